"""Volumes of several channels in each layout, from files to patches; and label maps with values of their own."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from organ_volumes import affine, put, put_set, read_volume, volume

from trainkit.cli import main
from trainkit.data.volumes import importer, preprocess, verify
from trainkit.data.volumes.augment import VolumeAugment
from trainkit.data.volumes.augment_intensity import Gamma, Noise
from trainkit.data.volumes.augment_spatial import Rotate
from trainkit.data.volumes.dataset import Volumes
from trainkit.data.volumes.patch_reader import PatchReader
from trainkit.data.volumes.preprocess import Preparation
from trainkit.data.volumes.sources import open_volumes
from trainkit.errors import UserError

IDS = ("a", "b")


def second(image: np.ndarray) -> np.ndarray:
    """Another channel of the same body, on a scale of its own."""
    return (np.sqrt(np.abs(image)) * 30 + 5).astype(np.float32)


def write(root, name: str, number: int = 0, ids=IDS, labels: str = "labels") -> None:
    """Two channels of each case, by the pattern `name`, and its label map at `labels/<id>.nii.gz`."""
    for place, id in enumerate(ids):
        image, label = volume(number + place)
        for channel, array in enumerate((image, second(image))):
            put(root / name.format(id=id, channel=channel), array)
        put(root / labels / f"{id}.nii.gz", label)


def dataset_json(root, **said) -> None:
    (root / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "left": 1, "right": 2}} | said))


def files(source):
    return {case.id: [file.name for file in case.images] for case in source.cases}


NUMBERED = {id: [f"{id}_0000.nii.gz", f"{id}_0001.nii.gz"] for id in IDS}


def test_nnunets_numbers_are_channels_with_and_without_dataset_json(tmp_path):
    write(tmp_path, "imagesTr/{id}_{channel:04}.nii.gz", labels="labelsTr")
    source = open_volumes(tmp_path)
    assert files(source) == NUMBERED and source.channels == ("channel 0", "channel 1") and not source.left_out
    dataset_json(tmp_path, channel_names={"0": "T1w", "1": "FLAIR"})
    source = open_volumes(tmp_path)
    assert files(source) == NUMBERED and source.channels == ("T1w", "FLAIR") and source.names[1:] == ("left", "right")
    assert len(source.files) == 2 * 3 + 1
    # To predict for, images alone: as many channels as the network has.
    new = open_volumes(tmp_path / "imagesTr", labelled=False, channels=("T1w", "FLAIR"))
    assert files(new) == NUMBERED and new.channels == ("T1w", "FLAIR")
    assert len(open_volumes(tmp_path / "imagesTr", labelled=False).cases) == 4
    with pytest.raises(UserError, match=r"channels T1w, FLAIR; expected FLAIR, T1w"):
        open_volumes(tmp_path, labelled=False, channels=("FLAIR", "T1w"))
    put(tmp_path / "imagesTr" / "a_0002.nii.gz", volume(0)[0])
    with pytest.raises(UserError, match=r"files numbered up to 2; expected 2 channels: T1w, FLAIR"):
        open_volumes(tmp_path)


def test_a_missing_channel_is_named_and_refused(tmp_path):
    write(tmp_path / "set", "images/{id}_{channel:04}.nii.gz")
    (tmp_path / "set" / "images" / "b_0001.nii.gz").unlink()
    said = "b_0000.nii.gz: 1 channel; expected 2, channel 0, channel 1"
    with pytest.raises(UserError, match=said):
        importer.import_volumes(tmp_path / "set", tmp_path / "out")
    assert any(said in line for line in verify.verify(tmp_path / "set"))
    # Nor does the second of three stand for the third, though all have two.
    for id in IDS:
        put(tmp_path / "set" / "images" / f"{id}_0002.nii.gz", volume(2)[0])
    (tmp_path / "set" / "images" / "a_0001.nii.gz").unlink()
    with pytest.raises(UserError, match=r"2 channels; expected 3, channel 0, channel 1, channel 2"):
        importer.import_volumes(tmp_path / "set", tmp_path / "three")


def test_channels_on_another_grid_and_files_of_other_numbers_of_channels_are_named(tmp_path):
    write(tmp_path / "set", "images/{id}_{channel:04}.nii.gz")
    put(tmp_path / "set" / "images" / "b_0001.nii.gz", volume(1)[0], affine(origin=(0.0, 0.0, 0.0)))
    with pytest.raises(UserError, match=r"b_0001\.nii\.gz: lies elsewhere .* expected the grid of .*b_0000"):
        importer.import_volumes(tmp_path / "set", tmp_path / "out")
    four_axes(tmp_path / "many", {"a": 2, "b": 2, "c": 3})
    with pytest.raises(UserError, match=r"c\.nii\.gz: 3 channels; expected 2, as in most cases"):
        importer.import_volumes(tmp_path / "many", tmp_path / "out")


def four_axes(root, counts):
    for number, (id, count) in enumerate(counts.items()):
        image, label = volume(number)
        put(root / "imagesTr" / f"{id}.nii.gz", np.stack([image, second(image), image, image][:count], 3))
        put(root / "labelsTr" / f"{id}.nii.gz", label)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Two channels in files of four axes, as the Decathlon has them."""
    root = tmp_path_factory.mktemp("decathlon")
    four_axes(root / "set", dict.fromkeys(IDS, 2))
    listed = [{"image": f"./imagesTr/{id}.nii.gz", "label": f"./labelsTr/{id}.nii.gz"} for id in IDS]
    dataset_json(root / "set", training=listed, modality={"0": "T1w", "1": "FLAIR"})
    return importer.import_volumes(root / "set", root / "packed")


def test_each_channel_is_prepared_as_it_would_be_alone(packed, tmp_path):
    data = packed
    assert (data.channels, data.channel_names) == (2, ("T1w", "FLAIR"))
    for number in range(2):
        image = volume(number)[0]
        for channel, array in enumerate((image, second(image))):
            alone = preprocess.prepare(*read_volume(put(tmp_path / "one.nii.gz", array)), Preparation("zyx"))
            assert data.image(number)[channel].tobytes() == alone.image[0].tobytes()
            assert data.case(number).floors[channel] == alone.image.min()
        assert data.case(number).facts["also"][0]["highest"] == second(image).max()


def test_patches_have_all_channels_on_this_disk_and_on_a_networks(packed, tmp_path, monkeypatch):
    data = packed
    numbers = np.array([0, 1, 1])
    starts = np.array([[0, 0, 0], [-2, 3, 8], [1, 2, 3]])  # the second lies partly outside
    found = [PatchReader(data, np.arange(2)).patches(numbers, starts, (4, 6, 6))]
    monkeypatch.setattr("trainkit.files.on_network", lambda folder: True)
    found.append(PatchReader(packed, np.arange(2)).patches(numbers, starts, (4, 6, 6)))
    for image, mask in found:
        assert image.shape == (3, 2, 4, 6, 6) and torch.equal(image, found[0][0]) and torch.equal(mask, found[0][1])
    assert (found[0][0][2].numpy() == data.image(1)[:, 1:5, 2:8, 3:9]).all()
    floors = torch.tensor(data.case(1).floors, dtype=torch.float16)
    assert torch.equal(found[0][0][1, :, 0, 0, 0], floors)
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path))
    given = {"patch": (4, 6, 6), "fold": 0, "folds": 2, "evaluate": {"val": "held_out"}}
    opened = Volumes(train=str(data.path.with_name("set")), **given).open(0)
    assert opened.meta.shape == (2, 4, 6, 6) and opened.meta.channels == ("T1w", "FLAIR")
    assert opened.evaluations["val"].fetch(np.array([0]), 0)["image"].shape == (1, 2, 6, 10, 12)
    assert opened.evaluations["val.overlays"].protocol.shown == "T1w"


def test_changes_of_shape_are_one_for_all_channels_and_those_of_intensity_are_not(packed):
    image, mask = torch.randn(6, 1, 8, 12, 12), torch.zeros(6, 8, 12, 12, dtype=torch.uint8)
    both, patch, spacing, rows = image.repeat(1, 2, 1, 1, 1), (6, 8, 8), (1.0, 1.0, 1.0), np.arange(6)

    def changed(augment, tensor, channels):
        numbers = augment.numbers(3, 1, rows, patch, spacing, "zyx", channels=channels)
        given = {name: torch.from_numpy(each) for name, each in numbers.items()}
        return augment.apply(tensor, mask, given, patch)[0]

    shape = VolumeAugment(rotate=Rotate(p=1.0), flips=["left_right", "down_up"])
    found = changed(shape, both, 2)
    assert torch.equal(found[:, 0], found[:, 1]) and torch.equal(found[:, :1], changed(shape, image, 1))
    grey = VolumeAugment(gamma=Gamma(p=1.0), noise=Noise(p=1.0), flips=["left_right"])
    found = changed(grey, both, 2)
    assert torch.equal(found[:, :1], changed(grey, image, 1)), "the first channel has the draws of a single one"
    assert all(not torch.equal(one[0], one[1]) for one in found)


# Values of labels


def test_values_of_labels_are_read_by_a_mapping_or_by_dataset_json(tmp_path):
    root = put_set(tmp_path / "set", 3)
    for number in range(3):
        labels = volume(number)[1]
        put(root / "label" / f"p{number:02d}.nii.gz", np.asarray([0, 205, 420], np.float32)[labels])
    with pytest.raises(UserError, match=r"labels 205, 420 in \d+ of 720 voxels"):
        importer.import_volumes(root, tmp_path / "out", names=["kidney", "tumour"])
    data = importer.import_volumes(root, tmp_path / "out", names={"tumour": 420, "kidney": 205})
    assert data.names == ("background", "tumour", "kidney")
    assert (data.label(1) == np.asarray([0, 2, 1])[volume(1)[1]].transpose(2, 1, 0)).all()
    words = ["data", "verify", root, "--names", "tumour=420,kidney=205"]
    assert CliRunner().invoke(main.main, [str(word) for word in words]).exit_code == 0
    with pytest.raises(UserError, match=r"p00\.nii\.gz: labels 420 in \d+ of 720 voxels.*expected 0, 205"):
        importer.import_volumes(root, tmp_path / "none", names={"kidney": 205})
    assert Volumes(train="x", patch=(4, 4, 4), labels={"kidney": 205}).labels == {"kidney": 205}
    for wrong in ({"labels": {"a": 0}}, {"labels": {"a": 1, "b": 1}}, {"labels": {"a": 1}, "names": ["a"]}):
        with pytest.raises(ValueError, match="labels"):
            Volumes(train="x", patch=(4, 4, 4), **wrong)
    dataset_json(root, labels={"background": 0, "tumour": 420, "kidney": 205})
    data = importer.import_volumes(root, tmp_path / "named")
    assert data.names == ("background", "kidney", "tumour")
    assert (data.label(0) == volume(0)[1].transpose(2, 1, 0)).all()


def test_channels_that_nothing_names_are_numbered_and_named_as_those_of_the_training_set(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    four_axes(tmp_path / "set", dict.fromkeys(IDS, 2))
    given = {"train": str(tmp_path / "set"), "patch": (4, 6, 6), "fold": 0, "folds": 2, "evaluate": {"val": "held_out"}}
    assert Volumes(**given).open(0).meta.channels == ("channel 0", "channel 1")
    dataset_json(tmp_path / "set", modality={"0": "T1w", "1": "FLAIR"})
    write(tmp_path / "val", "images/{id}_{channel:04}.nii.gz", number=7)
    given |= {"evaluate": {"val": str(tmp_path / "val")}, "fold": None, "leakage": "allow"}
    opened = Volumes(**given).open(0)
    assert opened.evaluations["val"].packed.channel_names == opened.meta.channels == ("T1w", "FLAIR")
    dataset_json(tmp_path / "val", channel_names={"0": "FLAIR", "1": "T1w"})
    with pytest.raises(UserError, match=r"channels FLAIR, T1w; expected those of data\.train: T1w, FLAIR"):
        Volumes(**given).open(0)
