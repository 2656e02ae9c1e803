"""Protocols that only some tasks and splits have: who has them, and that one without any works."""

from __future__ import annotations

import numpy as np
import pytest

from trainkit.interfaces import (
    ComparableSplit,
    Exportable,
    ImageSplit,
    LabelsImages,
    LabelsVolumes,
    NormalisesBatch,
    ThreadSafeFetch,
)
from trainkit.models.segmentation_2d import BiSeNetV2Spec, Norm
from trainkit.models.segmentation_3d import UNetSpec
from trainkit.tasks.segment2d import Segment2d
from trainkit.tasks.segment3d import Segment3d

OF_TASKS = (NormalisesBatch, Exportable, LabelsImages, LabelsVolumes)


def of(thing: object) -> set[str]:
    return {
        kind.__name__ for kind in (*OF_TASKS, ThreadSafeFetch, ComparableSplit, ImageSplit) if isinstance(thing, kind)
    }


def test_a_task_has_the_protocols_of_what_it_segments():
    scenes = Segment2d(net=BiSeNetV2Spec(name="bisenetv2"))
    volumes = Segment3d(net=UNetSpec(name="unet", filters=[8, 16]))
    assert of(scenes) == {"NormalisesBatch", "Exportable", "LabelsImages"}
    assert of(volumes) == {"LabelsVolumes"}


@pytest.mark.parametrize("norm, together", [("batch", "batch"), ("sync", "sync"), ("group", None)])
def test_batch_norm_is_known_before_the_network_is_built(norm, together):
    task = Segment2d(net=BiSeNetV2Spec(name="bisenetv2"), norm=Norm(name=norm))
    assert isinstance(task, NormalisesBatch) and (task.batch_norm, task.batch_norm_least) == (together, 1)


def test_what_has_none_of_them_is_none_of_them():
    class Plain:
        def fetch(self, indices: np.ndarray, epoch: int) -> dict:
            return {}

    assert of(Plain()) == set()
