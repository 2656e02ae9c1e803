"""Contests of samplers and volumes: at tiny sizes their sides do the same work, and other work is noticed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def subject(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in ("samplers", "volume_reading", "contest"):
        sys.modules.pop(name, None)


# ---- samplers


@pytest.fixture
def samplers(subject, monkeypatch):
    found = subject("samplers")
    for name, value in {"SIZES": ((900, 20), (1800, 40)), "BATCHES": 40, "CYCLES": 2, "FEWER": 0.01}.items():
        monkeypatch.setattr(found, name, value)
    return found


@pytest.mark.parametrize("peer", ["popular", pytest.param("m_per_class", marks=pytest.mark.slow)])
def test_every_sampler_gives_eight_people_with_four_records_at_each_size(samplers, peer):
    if peer == "m_per_class":
        pytest.importorskip("pytorch_metric_learning")
    contest = samplers.CONTEST
    samples = {name: contest.sides[name]("") for name in ("modal_pk", "pk", peer)}
    assert {name: sample.proof for name, sample in samples.items()} == dict.fromkeys(samples, [[8, 8, 8, 4]] * 2)
    assert all(sample.value > 0 and sample.more["growth"] > 0 for sample in samples.values())
    for target in contest.targets:
        assert target.side not in samples or target.of in ("ratio", "value", *samples[target.side].more)


def test_batches_of_other_work_are_noticed(samplers):
    person, modality = np.repeat(np.arange(10), 5), np.tile([0, 1, 2, 3, 4], 10)
    good = (np.arange(8)[:, None] * 5 + np.arange(4)).reshape(-1)
    assert samplers.proof([good], person, modality, modal=True) == [8, 8, 8, 4]
    twice = good.copy()
    twice[:4] = twice[4:8]
    assert samplers.proof([good, twice], person, modality, modal=True) == [7, 8, 8, 4]
    with pytest.raises(ValueError, match="not one RGB record"):
        samplers.proof([good + 1], person, modality, modal=True)
    mixed = good.copy()
    mixed[[0, 4]] = mixed[[4, 0]]
    with pytest.raises(ValueError, match="two people"):
        samplers.proof([mixed], person, modality, modal=False)


# ---- volumes


@pytest.fixture
def volumes(subject, monkeypatch, tmp_path):
    found = subject("volume_reading")
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path))  # which the subject sets
    shape = found.Shape((40, 36, 30), "yzx", (16, 16, 16), found.SHAPES["tom500"].names, "ASR")
    settings = {"HOME": tmp_path / "home", "SECONDS": 0.01, "SHAPES": {"cube": shape}, "UNUSED": ()}
    for name, value in settings.items():
        monkeypatch.setattr(found, name, value)
    return found


def test_prepared_patches_are_those_of_the_files(volumes):
    sides = volumes.CONTEST.sides
    proofs = [sides[name]("cube").proof for name in ("prepared", "nii_gz")]
    assert proofs == [[4, [16, 16, 16, "float32", "uint8"]]] * 2
    folder, shape = volumes.files("cube"), volumes.SHAPES["cube"]
    image, mask, volume, start = next(volumes.prepared(folder, shape))
    assert volumes.compare([(image, mask, volume, start)], folder / "packed", shape)[0] == 1
    for wrong in ((image + 0.01, mask), (image, mask + 1)):
        with pytest.raises(ValueError, match="not the voxels"):
            volumes.compare([(*wrong, volume, start)], folder / "packed", shape)
