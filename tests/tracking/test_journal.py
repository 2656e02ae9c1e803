import json
import math
import threading

import pytest

from trainkit.errors import UserError
from trainkit.tracking import journal as journal_module
from trainkit.tracking.journal import Journal, at_best, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


@pytest.fixture(params=["append", "note"], autouse=True)
def how(request, monkeypatch):
    """Every test holds for values that are appended and for those that are noted, and taken in a moment later."""
    monkeypatch.setattr(Journal, "append", getattr(Journal, request.param))
    return request.param


def test_values_come_back_with_the_same_bits(path):
    values = [0.1, 1 / 3, -0.0, 5e-324, 1.7976931348623157e308, 123456789.123456789, float(2**53)]
    journal = Journal(path)
    for step, value in enumerate(values):
        journal.append(step, {"train/loss": value})
    journal.close()
    steps, again = read(path).series("train/loss")
    assert steps == list(range(len(values)))
    assert [v.hex() for v in again] == [v.hex() for v in values]


def test_values_that_are_not_finite_are_strings_in_strict_json(path):
    journal = Journal(path)
    journal.append(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    journal.event(1, "nonfinite", {"loss": math.nan})
    journal.close()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0]["m"] == {"a": "nan", "b": "inf", "c": "-inf"}
    assert [line["data"] for line in lines[1:]] == [{"names": ["a", "b", "c"]}, {"loss": "nan"}]
    history = read(path)
    assert math.isnan(history.metrics["a"][0].value) and history.metrics["b"][0].value == math.inf


def test_commit_returns_the_size_of_the_file(path):
    journal = Journal(path)
    journal.append(1, {"train/loss": 1.0})
    assert path.stat().st_size == 0, "lines are held in memory until a commit or a few seconds have passed"
    position = journal.commit()
    assert position == path.stat().st_size == journal.position > 0


def test_a_line_cut_short_by_a_crash_is_left_out_and_overwritten(path):
    journal = Journal(path)
    journal.append(1, {"train/loss": 1.0})
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t":17,"step":2,"m":{"train/lo')
    assert read(path).series("train/loss") == ([1], [1.0])
    journal = Journal(path)
    journal.append(2, {"train/loss": 2.0})
    journal.close()
    assert read(path).series("train/loss") == ([1, 2], [1.0, 2.0])


def test_damage_before_the_last_line_is_named(path):
    path.write_bytes(b'{"t":1,"step":1,"m":{"a":1.0}}\n{"t":2,"st\xff\xff\n{"t":3,"step":3,"m":{"a":3.0}}\n')
    with pytest.raises(UserError, match=r"line 2.*damaged"):
        read(path)


def train(journal, start, end, at=1.0):
    for step in range(start, end):
        journal.append(step, {"train/loss": at / (step + 1), "speed/samples_per_s": journal_module.time.time() % 7})
        if step % 3 == 0:
            journal.event(step, "gate", {"name": "lfw", "due": step % 2 == 0})


def test_recomputed_values_keep_their_time_and_their_place(path, monkeypatch):
    clock = [1_000_000_000_000_000_000]
    monkeypatch.setattr(journal_module.time, "time_ns", lambda: clock.__setitem__(0, clock[0] + 10**9) or clock[0])
    journal = Journal(path)
    train(journal, 0, 4)
    position = journal.commit()
    train(journal, 4, 9)
    journal.commit()
    before = path.read_bytes()
    del journal

    resumed = Journal(path)
    resumed.cut_back(position)
    assert path.read_bytes() == before[:position]
    train(resumed, 4, 9)
    resumed.close()
    assert read(path).metrics == read_bytes(before, path).metrics
    assert read(path).events == read_bytes(before, path).events


def read_bytes(content, path):
    copy = path.with_name("copy.jsonl")
    copy.write_bytes(content)
    return read(copy)


def test_time_stamps_survive_a_second_interruption_during_the_repeated_steps(path):
    journal = Journal(path)
    journal.append(0, {"train/loss": 9.0})
    position = journal.commit()
    for step in (1, 2, 3):
        journal.append(step, {"train/loss": float(step)})
    journal.close()
    first = read(path).metrics["train/loss"]
    for stop in (2, 3, 4):  # killed again after one, two and three repeated steps
        journal = Journal(path)
        journal.cut_back(position)
        for step in range(1, stop):
            journal.append(step, {"train/loss": float(step)})
        journal.commit()
        del journal
    assert read(path).metrics["train/loss"] == first


def test_other_bits_at_a_repeated_step_are_reported_and_kept(path):
    journal = Journal(path)
    position = journal.commit()
    journal.append(1, {"train/loss": 0.5, "train/grad_norm": 2.0})
    journal.commit()
    journal.cut_back(position)
    journal.append(1, {"train/loss": 0.5000000001, "train/grad_norm": 2.0})
    journal.close()
    history = read(path)
    assert history.series("train/loss") == ([1], [0.5000000001])
    assert [(e.name, e.data) for e in history.events] == [
        ("nondeterminism", {"name": "train/loss", "first": 0.5, "again": 0.5000000001})
    ]


def test_what_was_measured_stays_whether_or_not_its_step_is_logged_again(path):
    """The store may have it: of a step at which a process goes on, of a forecast, of the machine's load."""
    journal = Journal(path)
    journal.append(0, {"system/cpu": 30.0})
    position = journal.commit()
    journal.append(1, {"train/loss": 0.5, "speed/samples_per_s": 100.0, "device/rss_gb": 2.0})
    journal.append(3, {"speed/samples_per_s": 120.0})
    journal.append(4, {"speed/forecast_s": 60.0})
    journal.append(1, {"system/cpu": 40.0})
    journal.commit()
    first = read(path).metrics
    for _ in range(2):
        journal.cut_back(position)
        journal.close()
        journal = Journal(path)
        assert journal.highest("system/") == 1
    journal.cut_back(position)
    journal.append(1, {"train/loss": 0.5})
    journal.append(1, {"speed/samples_per_s": 90.0})
    journal.append(2, {"speed/samples_per_s": 110.0})
    journal.append(3, {"speed/samples_per_s": 110.0})
    journal.append(2, {"system/cpu": 50.0})
    journal.close()
    now = read(path)
    new = {name: [p.step for p in points if p not in first[name]] for name, points in now.metrics.items()}
    assert {name: steps for name, steps in new.items() if steps} == {"speed/samples_per_s": [2], "system/cpu": [2]}
    assert all(set(points) <= set(now.metrics[name]) for name, points in first.items()) and now.events == []
    assert sum(map(len, now.metrics.values())) == 2 + sum(map(len, first.values()))


def test_what_was_measured_stays_where_a_run_is_killed_while_its_journal_is_cut(path, monkeypatch):
    journal = Journal(path)
    position = journal.commit()
    journal.append(1, {"train/loss": 0.5, "system/cpu": 40.0})
    journal.commit()
    first = read(path).metrics
    monkeypatch.setattr(journal._lines, "append", lambda record: 0)  # what was held went with the process
    journal.cut_back(position)
    assert not read(path).metrics
    again = Journal(path)
    again.cut_back(position)
    again.close()
    assert read(path).metrics == {"system/cpu": first["system/cpu"]}


def test_decisions_after_the_checkpoint_can_be_replayed(path):
    journal = Journal(path)
    journal.event(1, "gate", {"name": "early"})
    position = journal.commit()
    journal.event(5, "gate", {"name": "lfw"})
    journal.event(6, "other")
    journal.event(9, "gate", {"name": "val"})
    journal.close()
    replay = Journal(path).cut_back(position)
    assert [(e.step, e.data["name"]) for e in replay.events(1, "gate")] == [(5, "lfw"), (9, "val")]
    assert [e.step for e in replay.events(5)] == [6, 9]


def test_a_name_has_one_value_a_step(path):
    journal = Journal(path)
    journal.append(3, {"best/val/accuracy": 0.5})
    journal.append(3, {"best/val/accuracy": 0.5})
    journal.append(3, {"best/val/accuracy": 0.75})
    journal.close()
    history = read(path)
    assert history.series("best/val/accuracy") == ([3], [0.5])
    assert [(e.name, e.data["dropped"]) for e in history.events] == [("repeated", 0.75)]


def test_scores_at_the_best_step_are_found_under_the_names_of_older_runs_and_of_newer_ones(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(3, {"val/loss": 0.3, "best/val/accuracy": 0.5, "best/val/loss": 0.3})  # by a version from before
    journal.append(6, {"val/loss": 0.2, "best/val/accuracy": 0.6, "at_best/val/loss": 0.2, "at_best/val/ema/loss": 0.1})
    journal.close()
    found = at_best(read(journal.path).metrics)
    assert {name: [(p.step, p.value) for p in points] for name, points in found.items()} == {
        "val/loss": [(3, 0.3), (6, 0.2)],
        "best/val/accuracy": [(3, 0.5), (6, 0.6)],
        "best/val/loss": [(3, 0.3), (6, 0.2)],
        "best/val/ema/loss": [(6, 0.1)],
    }


def test_a_journal_shorter_than_the_checkpoint_is_refused(path):
    journal = Journal(path)
    journal.append(1, {"a": 1.0})
    position = journal.commit()
    with pytest.raises(UserError, match="was written at byte"):
        journal.cut_back(position + 1)
    with pytest.raises(UserError, match="not the end of a line"):
        journal.cut_back(position - 3)
    assert read(path).series("a") == ([1], [1.0])


def test_a_clock_set_back_does_not_put_later_lines_first(path, monkeypatch):
    times = iter([5_000_000_000, 2_000_000_000, 1_000_000_000])
    monkeypatch.setattr(journal_module.time, "time_ns", lambda: next(times))
    journal = Journal(path)
    for step in range(3):
        journal.append(step, {"a": 1.0})
    journal.close()
    assert [p.t for p in read(path).metrics["a"]] == [5000, 5000, 5000]


def test_a_full_disk_stops_neither_training_nor_loses_a_line(path, caplog):
    journal = Journal(path)
    real = journal._lines.file

    class Full:
        closed = False
        room = 25

        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            taken, self.room = real.write(bytes(data[: self.room])), 0
            return taken

    journal._lines.file = Full()
    journal.append(1, {"train/loss": 1.0})
    journal._take_in()
    journal._lines.pass_on()
    journal.append(2, {"train/loss": 2.0})
    journal._take_in()
    journal._lines.pass_on()
    assert len(caplog.records) == 1
    with pytest.raises(OSError, match="No space"):
        journal.commit()
    journal._lines.file = real
    journal.append(3, {"train/loss": 3.0})
    journal.close()
    assert read(path).series("train/loss") == ([1, 2, 3], [1.0, 2.0, 3.0])


def test_nothing_is_written_after_closing(path):
    journal = Journal(path)
    journal.close()
    journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.append(1, {"a": 1.0})


def test_what_is_noted_is_in_its_place_before_anything_else_is_asked(path):
    journal = Journal(path)
    journal.note(1, {"a": 1.0})
    assert journal.points(["a", "b"], 1)["a"].value == 1.0
    journal.note(2, {"a": 2.0, "system/x": 0.0})
    assert journal.last_step == 2 and journal.highest("system/") == 2
    journal.note(3, {"a": 3.0})
    journal.event(3, "gate", {})
    journal.note(4, {"a": 4.0})
    assert journal.position > path.stat().st_size == 0
    journal.note(5, {"a": 5.0})
    assert journal.commit() == path.stat().st_size
    journal.note(6, {"a": 6.0})
    journal.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6] and "event" in lines[3]
    with pytest.raises(ValueError, match="closed"):
        journal.note(7, {"a": 7.0})


def test_a_note_has_the_time_at_which_it_was_made(path, monkeypatch):
    times = iter(range(1_000_000_000, 9_000_000_000, 1_000_000_000))
    monkeypatch.setattr(journal_module.time, "time_ns", lambda: next(times))
    journal = Journal(path)
    for step in range(4):
        journal.note(step, {"a": 1.0})
    journal.close()
    assert [p.t for p in read(path).metrics["a"]] == [1000, 2000, 3000, 4000]


def test_notes_are_taken_in_by_the_noting_thread_where_nobody_else_comes_by(path, monkeypatch):
    journal = Journal(path)
    for step in range(journal_module._NOTES):
        journal.note(step, {"a": float(step)})
    assert len(journal._notes) == journal_module._NOTES
    journal.note(step + 1, {"a": 0.0})
    assert not journal._notes
    journal.note(step + 2, {"a": 0.0})
    later = journal_module.time.monotonic() + 1.5 * journal_module._HOLD_SECONDS
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: later)
    journal.note(step + 3, {"a": 0.0})
    assert not journal._notes and path.stat().st_size > 0, "what is old goes to the system as well"


def test_notes_of_one_thread_while_others_commit_and_append_are_all_there_and_in_order(path):
    journal, ends = Journal(path), threading.Event()

    def other(number):
        step = 0
        while not ends.is_set():
            journal.commit()
            step += 1
            journal.append(step, {f"system/{number}": 1.0})

    others = [threading.Thread(target=other, args=(number,)) for number in range(3)]
    for thread in others:
        thread.start()
    for step in range(4000):
        journal.note(step, {"a": float(step), "b": -float(step)})
    ends.set()
    for thread in others:
        thread.join()
    journal.close()
    history = read(path)
    assert history.series("a") == (list(range(4000)), [float(step) for step in range(4000)])
    times = [json.loads(line)["t"] for line in path.read_text().splitlines()]
    assert times == sorted(times) and not history.events
