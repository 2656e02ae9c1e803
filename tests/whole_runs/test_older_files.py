"""Files that trainkit wrote before its packages were laid out anew are read: checkpoint, journal, run, packed sets.

`golden/files_of_0_1_0.zip` was written by the program as it was then: a run of the toy recipe that was told to stop,
with its checkpoint of step 6 of 12, a packed set of four images and one of a volume.
"""

from __future__ import annotations

import sys
import zipfile

import pytest
import torch
from runs import PLUGIN, ROOT, TOY
from safetensors.torch import load_file

from trainkit.config.run_request import RunRequest, load
from trainkit.data.storage.image_store import Packed
from trainkit.data.volumes.volume_store import PackedVolumes
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.tracking import journal
from trainkit.tracking.run_folder import RunFolder
from trainkit.training.checkpointer import Resume
from trainkit.training.run_logger import RunLogger
from trainkit.training.trainer import Trainer

WORDS = ("train.length=12 steps", "checkpoints.every=3 steps", "evaluations.val.every=3 steps", "log.ceilings=off")


@pytest.fixture
def before(tmp_path):
    with zipfile.ZipFile(ROOT / "tests" / "golden" / "files_of_0_1_0.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_a_run_goes_on_from_its_checkpoint(before, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PLUGIN), *sys.path])
    recipe = load(RunRequest(TOY, WORDS, ("toy",)))
    path = before / "run" / "checkpoints" / "step-000000006"
    logger = RunLogger(recipe, RunFolder(before / "run"))
    resume = Resume(path, journal.read(before / "run" / "journal.jsonl").events)
    with Trainer(recipe, recipe.data.open(recipe.seed), Runtime(recipe), logger, resume=resume) as trainer:
        assert trainer.state.step == 6 and trainer.state.best[0]["step"] == 6
        written = {"model": trainer.model.bare.state_dict(), "ema": trainer.model.ema.tensors}
        for file, tensors in written.items():
            kept = load_file(path / f"{file}.safetensors")
            assert all(torch.equal(tensor, kept[name]) for name, tensor in tensors.items()), file
        assert trainer.state.spent == pytest.approx({"cost/core_hours": 0.004257135})
        outcome = trainer.fit()
    assert (outcome.status, outcome.step) == ("FINISHED", 12) and "val/accuracy" in outcome.final
    assert (before / "run" / "checkpoints" / "step-000000012").is_dir()


def test_its_journal_and_its_record_are_read(before):
    history = journal.read(before / "run" / "journal.jsonl")
    assert [point.step for point in history.metrics["train/loss"]] == [2, 4, 6]
    assert history.metrics["train/loss"][0].value == pytest.approx(1.7656672596931458)
    info = RunFolder(before / "run").info()
    assert (info.recipe, info.status, info.data_digest, info.last_step) == ("toy", "KILLED", "train-64-1.0", 6)


def test_packed_images_and_volumes_are_to_be_imported_again(before):
    with pytest.raises(UserError, match=r"a set of a version before 0\.2; expected 1; import"):
        Packed(before / "images")
    # Version 1 took ignored voxels for an organ, and sheared grids for straight ones.
    with pytest.raises(UserError, match="version 1; expected 2; import the set again"):
        PackedVolumes(before / "volumes")
