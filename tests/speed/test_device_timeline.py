"""Device times: events are put down where the phase changes, read late, never waited for, and add up."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.speed import device_timeline
from trainkit.speed.clock import BETWEEN, PHASES, STEP, Clock, Steps
from trainkit.speed.device_timeline import CudaTimeline


class Device:
    """A queue that works off what it is given: `now` is how far it has come, `queued` when it will have done all."""

    def __init__(self):
        self.now = self.queued = 0.0
        self.made = 0

    def event(self):
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at, self.asked = device, None, 0

    def record(self, stream):
        assert stream == "a stream"
        self.device.queued = max(self.device.queued, self.device.now)
        self.at = self.device.queued

    def query(self):
        self.asked += 1
        return self.at <= self.device.now

    def elapsed_time(self, later):
        assert self.query() and later.query(), "an event was read that the device has not passed"
        return 1e3 * (later.at - self.at)

    def synchronize(self):
        raise AssertionError("waited for the device")


def line(device):
    return CudaTimeline(torch.device("cpu"), device.event, "a stream")


def test_a_cpu_has_no_timeline_of_its_own():
    assert device_timeline.of(torch.device("cpu")) is None and device_timeline.of(torch.device("mps")) is None


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_times_of_any_training_are_those_that_the_device_took(data):
    """The host hands over work and runs ahead by up to a few steps; evaluations come between steps now and then."""
    device = Device()
    marks = line(device)
    clock = Clock(marks, now=lambda: device.now)
    seconds = st.sampled_from([0.0, 0.001, 0.004, 0.5])
    expected, between = [], []
    ahead = data.draw(st.integers(0, 4)) * 0.01

    def give(phase, spent, work):
        clock.to(phase)
        free = device.queued < device.now  # the device waits for the host
        spent[phase] += work
        device.queued = max(device.queued, device.now) + work
        return free

    clock.to("setup")
    device.now = device.queued = 3.0
    for _ in range(data.draw(st.integers(1, 30))):
        spent = dict.fromkeys(PHASES, 0.0)
        if data.draw(st.booleans()):
            give("eval", spent, data.draw(seconds))
        if not expected:
            spent["setup"] = 3.0
        for _ in range(data.draw(st.integers(1, 3))):
            clock.to("data")
            device.queued = max(device.queued, device.now)
            wait = data.draw(seconds)
            began = device.queued
            device.now += wait
            device.queued = max(device.queued, device.now)
            spent["data"] += device.queued - began
            for phase in ("transfer", "forward", "backward"):
                give(phase, spent, data.draw(seconds))
        give("optimizer", spent, data.draw(seconds))
        clock.step()
        expected.append([1e3 * spent[phase] for phase in STEP])
        between.append([spent[phase] for phase in BETWEEN])
        device.now = max(device.now, device.queued - ahead)
    device.now = device.queued
    found = marks.recent()
    assert found.number.tolist() == list(range(1, len(expected) + 1))
    np.testing.assert_allclose(1e3 * found.phases, expected, atol=1e-6)
    np.testing.assert_allclose(found.between, between, atol=1e-9)
    mean = dict(zip(("idle", *STEP[1:]), np.mean(expected, 0), strict=True))
    window = marks.window()
    mean["step"] = sum(mean.values())
    assert window == pytest.approx({f"device/{name}_ms": value for name, value in mean.items()})
    assert marks.window() == {}


def test_nothing_is_asked_of_a_device_that_is_behind_and_events_are_used_again():
    device = Device()
    marks = line(device)
    clock = Clock(marks)

    def step(work):
        for phase in STEP:
            clock.to(phase)
            device.queued += work
        clock.step()

    for _ in range(100):
        step(0.001)
    assert marks.window() == {} and marks.recent() is None  # not one has been passed
    device.now = device.queued
    assert marks.window()["device/step_ms"] == pytest.approx(5.0) and len(marks.recent()) == 100
    made = device.made
    for _ in range(1000):
        step(0.002)
        device.now = device.queued
    assert device.made == made
    assert marks.window()["device/forward_ms"] == pytest.approx(2.0)
    assert len(marks.recent(7)) == 7 and marks.recent(7).number[-1] == 1100


def test_a_device_that_never_comes_along_costs_no_memory_and_wrong_times_are_left_out():
    device = Device()
    marks = line(device)
    clock = Clock(marks)
    for _ in range(3 * device_timeline.LOST):
        for phase in STEP:
            clock.to(phase)
            device.queued += 0.001
        clock.step()
    assert device.made < 6 * (device_timeline.LOST + device_timeline.LATE)
    device.now = device.queued
    found = marks.recent()
    assert found.number[-1] == 3 * device_timeline.LOST and len(found) <= device_timeline.LOST + 1
    np.testing.assert_allclose(found.phases[:, 1:], 0.001, atol=1e-9)


def test_a_step_costs_few_events_and_little_time():
    class Cheap:
        def record(self, stream):
            pass

        def query(self):
            return True

        def elapsed_time(self, later):
            return 1.0

    marks = CudaTimeline(torch.device("cpu"), Cheap)
    clock = Clock(marks)
    took = []
    for _ in range(20):
        began = time.thread_time()
        for _ in range(200):
            for phase in STEP:
                clock.to(phase)
            clock.step()
        took.append((time.thread_time() - began) / 200)
    assert min(took) < 60e-6  # 12 us where no one else is in the way; the calls of CUDA come on top


def test_a_cpu_is_its_own_device():
    rng = np.random.default_rng(0)
    phases = rng.uniform(0.001, 0.02, (9, 5))
    found = device_timeline.of_host(Steps(np.arange(9), phases, np.ones((9, 4))))
    assert list(found) == [f"device/{name}_ms" for name in ("transfer", "forward", "backward", "optimizer", "step")]
    for column, name in enumerate(STEP[1:], 1):
        assert found[f"device/{name}_ms"] == pytest.approx(1e3 * sum(phases[:, column]) / 9)
    assert found["device/step_ms"] == pytest.approx(1e3 * phases[:, 1:].sum() / 9)
    assert device_timeline.of_host(Clock().recent()) == {}
