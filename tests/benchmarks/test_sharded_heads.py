"""A hundredth of the measurement of divided heads: the bytes on the wire are those of the formula."""

from __future__ import annotations

import pytest

from benchmarks.rehearsals import sharded_heads as heads

CLASSES = 857


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_hundredth_of_the_classes_sends_the_bytes_of_the_formula(world):
    if not heads.alone():
        pytest.skip("this machine gives a process no network of its own, in which bytes could be counted")
    for sharded in (False, True):
        _, forecast = heads.forecast(CLASSES, world, heads.SAMPLES // world, heads.SIZE, sharded, gloo=True)
        # Headers of packets, barriers and what the processes say to each other besides.
        assert heads.launched(world, CLASSES, sharded)["traffic"] == pytest.approx(forecast, rel=0.06)


def test_traffic_does_not_depend_on_the_classes_and_memory_falls_with_the_processes():
    of = [heads.forecast(classes, 8, 64, 512, sharded=True) for classes in (85_742, 10_000_000)]
    assert of[0][1] == of[1][1]
    whole = heads.forecast(10_000_000, 8, 64, 512, sharded=False)
    assert whole[0] == pytest.approx(8 * of[1][0]) and whole[1] > 10_000 * of[1][1]
