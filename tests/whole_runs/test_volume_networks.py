"""The segmentation recipes with every network, and the one for a GPU with the settings that it ships."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import nibabel
import nifti_sets
import numpy as np
import pytest
from runs import ROOT, Ran, all_same, run, stopped_and_resumed

from tests.whole_runs.test_segmentation_3d import TOM500, words
from trainkit.data.synthetic import orbits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("store")]
FULL, EMCAD = ROOT / "recipes" / "tom500_full.yaml", ROOT / "recipes" / "tom500_emcad_full.yaml"
SHAPE, SPACING = (512, 512, 20), (0.3125, 0.3125, 3.85)
"""What most volumes of TOM500 have, in the axes of their files."""

NETS = {
    "dynunet": "{name: dynunet, filters: [4, 8, 16, 16]}",
    "emcad 2.5-D": "{name: emcad, encoder: pvt_v2_b0, neighbours: 1}",
    "emcad": "{name: emcad, encoder: pvt_v2_b0}",
}


@pytest.fixture(scope="module")
def bodies(tmp_path_factory):
    """Two sets of patients, imported once."""
    root = tmp_path_factory.mktemp("bodies")
    nifti_sets.write_set(root / "train", 3, seed=1)
    nifti_sets.write_set(root / "val", 2, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield root


@pytest.mark.parametrize("net", NETS)
def test_every_network_trains_scores_whole_volumes_and_resumes_to_the_bit(bodies, net):
    settings = words(
        bodies,
        task__net=NETS[net],
        data__patch="[8, 32, 32]",
        train="{length: 4 steps, batch_size: 2, ema: 0.9}",
        evaluations="{val: {every: 2 steps}, images: {split: val.overlays}}",
        checkpoints="{every: 1 steps, keep_last: 50}",
        log="{every: 1 steps, system_every: null}",
    )
    whole = run(*settings, recipe=TOM500)
    assert whole.code == 0 and whole.history.series("val/dice_mean")[0] == [2, 4]
    assert set(whole.series("eval/val/unique_samples")) == {2.0}
    assert all(np.isfinite(whole.series(name)).all() for name in ("loss", "val/dice_mean", "val/hd95_mean_mm"))
    resumed = stopped_and_resumed(TOM500, settings, 3)
    assert all_same(resumed, whole) and resumed.repeatable == whole.repeatable


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Three drawn patients as TOM500 has them, in its layout."""
    root = tmp_path_factory.mktemp("heads")
    for part, count in (("train", 2), ("val", 1)):
        for kind in ("image", "label"):
            (root / part / kind).mkdir(parents=True)
        for patient in orbits.patients(part)[:count]:
            affine = orbits.affine(patient, SHAPE, SPACING)
            for kind, array in zip(("image", "label"), orbits.draw(patient, SHAPE, SPACING), strict=True):
                nibabel.save(nibabel.Nifti1Image(array, affine), root / part / kind / f"{patient}.nii.gz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield root


def full(heads: Path, capsys, *more: str, recipe: Path = FULL) -> tuple[Ran, str]:
    """A recipe for TOM500 with all that it says of network and patch, for one update of one patch; and its words."""
    begin = time.perf_counter()
    ran = run(
        f"data.train={heads}#train",
        f"data.evaluate={{val: {heads}#val}}",
        "train.length=1 steps",
        "loader.workers=1",
        "log.system_every=null",
        *(() if "train.batch_size=8" in more else ("train.batch_size=1",)),
        *more,
        recipe=recipe,
    )
    said = capsys.readouterr().out
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(said, f"{time.perf_counter() - begin:.0f} s, {peak:.1f} GiB at the peak of the process")
    assert peak < 8
    return ran, said


def test_the_recipe_for_tom500_builds_its_whole_network_and_takes_an_update(heads, capsys):
    ran, said = full(heads, capsys, "evaluations={}", "best=null")
    assert ran.code == 0 and ran.last.step == 1 and np.isfinite(ran.series("loss")).all()
    kernels, strides = re.search(r"dynunet: kernels ([\dx ]+), strides ([\dx ]+), ", said).groups()
    # A level sees across slices once its voxels within them are more than half as long as slices are apart.
    caught_up = [2 * 0.3125 * 2**level > 3.85 for level in range(6)]
    assert kernels.split() == ["3x3x3" if up else "1x3x3" for up in caught_up] and sum(caught_up) == 3
    assert strides.split() == ["1x2x2"] * 3 + ["2x2x2"] * 2, "3.85 mm are 8 times 0.3125, and then half as much again"
    assert "30,176,914 parameters" in said, "32 to 320 channels"
    assert ran.last.tensors["model"] and "voxels of" not in said


def test_the_recipe_with_emcad_builds_its_whole_network_and_scores_a_whole_volume(heads, capsys):
    random = "task.net={name: emcad, encoder: pvt_v2_b2, form: code}"  # no weights are downloaded here
    evaluated = "evaluations={val: {}}"
    ran, said = full(heads, capsys, random, evaluated, "train.batch_size=8", "log.baseline=false", recipe=EMCAD)
    assert ran.code == 0 and ran.last.step == 1 and np.isfinite(ran.series("loss")).all()
    assert (
        "8 samples = 1 process x 1 micro-batch x 8" in said and "pvt_v2_b2 with kernels 1x3x5, each slice alone" in said
    )
    assert ran.series("eval/val/unique_samples") == [1.0] and 0 <= ran.series("val/dice_mean")[-1] < 0.3
