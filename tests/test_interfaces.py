"""Protocols that only some tasks and splits have: who has them, and that one without any works."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import trainkit
from trainkit.data import split as splits
from trainkit.data.faces.dataset import Faces
from trainkit.data.images.dataset import Images
from trainkit.data.people.dataset import People, PeopleSplit
from trainkit.data.people.pk_sampler import PK
from trainkit.data.volumes.dataset import Volumes
from trainkit.interfaces import (
    CachesTeacher,
    ChecksLeakage,
    ComparableSplit,
    ComparesSamples,
    DividesBlocks,
    DividesIntoFolds,
    DrawsBlocks,
    Exportable,
    HasBaselines,
    IdentifiesContent,
    ImageSplit,
    LabelsImages,
    LabelsVolumes,
    NamesEvaluationSets,
    NamesTrainingSet,
    NormalisesBatch,
    ThreadSafeFetch,
)
from trainkit.models.network_specs import MobileFaceNetSpec, ReidSpec
from trainkit.models.segmentation_specs import BiSeNetV2Spec, Norm, UNetSpec
from trainkit.tasks.adadistill import AdaDistill, Teacher
from trainkit.tasks.reid import Reid
from trainkit.tasks.segment2d import Segment2d
from trainkit.tasks.segment3d import Segment3d

OF_TASKS = (NormalisesBatch, ComparesSamples, CachesTeacher, Exportable, HasBaselines, LabelsImages, LabelsVolumes)
OF_DATA = (NamesTrainingSet, NamesEvaluationSets, ChecksLeakage, DividesIntoFolds, DrawsBlocks)
OF_SPLITS = (ThreadSafeFetch, DividesBlocks, ComparableSplit, IdentifiesContent, ImageSplit)
NAMED = {"NamesTrainingSet", "NamesEvaluationSets"}


def of(thing: object) -> set[str]:
    return {kind.__name__ for kind in (*OF_TASKS, *OF_DATA, *OF_SPLITS) if isinstance(thing, kind)}


def test_a_task_has_the_protocols_of_what_it_segments():
    scenes = Segment2d(net=BiSeNetV2Spec(name="bisenetv2"))
    volumes = Segment3d(net=UNetSpec(name="unet", filters=[8, 16]))
    assert of(scenes) == {"NormalisesBatch", "Exportable", "HasBaselines", "LabelsImages"}
    assert of(volumes) == {"HasBaselines", "LabelsVolumes"}


def test_a_distillation_caches_its_teacher():
    net = MobileFaceNetSpec(name="mobilefacenet")
    assert of(AdaDistill(student=net, teacher=Teacher(net=net, weights="file"))) == {"CachesTeacher", "HasBaselines"}


def test_data_has_the_protocols_of_the_keys_of_its_block():
    people = People(train="sample:people", sampler=PK(people=4, each=2))
    assert of(Faces(train="sample")) == NAMED
    assert of(Images(train="sample")) == {*NAMED, "ChecksLeakage"}
    volumes = Volumes(train="sample", patch=(16, 16, 16))
    assert of(volumes) == {*NAMED, "ChecksLeakage", "DividesIntoFolds"}
    assert of(people) == {*NAMED, "ChecksLeakage", "DrawsBlocks"} and people.block == 8


def test_people_are_compared_across_processes_that_share_their_blocks():
    assert of(Reid(net=ReidSpec(model="resnet18", embedding=16))) == {"ComparesSamples", "HasBaselines"}
    assert issubclass(PeopleSplit, DividesBlocks)


def test_sets_are_named_as_far_as_a_block_names_them():
    class Trained:
        train = "a"

    assert splits.named_sets(Faces(train="a", evaluate={"lfw": "b"})) == {"train": "a", "lfw": "b"}
    assert splits.named_sets(Trained()) == {"train": "a"} and splits.named_sets(object()) == {"train": ""}


def test_no_task_data_or_split_is_asked_by_the_name_of_a_member():
    asked = []
    for file in sorted(Path(trainkit.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(ast.Name("getattr" | "hasattr"), [thing, ast.Constant(), *_]):
                    if ast.unparse(thing).rpartition(".")[2].strip("_") in {"task", "data", "split", "protocol"}:
                        asked.append(f"{file.name}: {ast.unparse(node)}")
    assert not asked


@pytest.mark.parametrize("norm, together", [("batch", "batch"), ("sync", "sync"), ("group", None)])
def test_batch_norm_is_known_before_the_network_is_built(norm, together):
    task = Segment2d(net=BiSeNetV2Spec(name="bisenetv2"), norm=Norm(name=norm))
    assert isinstance(task, NormalisesBatch) and (task.batch_norm, task.batch_norm_least) == (together, 1)


def test_what_has_none_of_them_is_none_of_them():
    class Plain:
        def fetch(self, indices: np.ndarray, epoch: int) -> dict:
            return {}

    assert of(Plain()) == set()
