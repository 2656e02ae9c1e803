import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainkit.data import face_alignment, import_images
from trainkit.data.record import Record
from trainkit.errors import UserError

LFW = Path(__file__).parents[4] / "shared" / "data" / "faces_lfw112" / "unaligned250"
real = pytest.mark.skipif(not LFW.is_dir(), reason="the unaligned faces are not beside this checkout")

EYES, MOUTH, BOTH, NOSE_FIRST = (1, 0, 2, 3, 4), (0, 1, 2, 4, 3), (1, 0, 2, 4, 3), (2, 0, 1, 3, 4)
WRONG = {
    "eyes": lambda points, side: points[list(EYES)],
    "corners of the mouth": lambda points, side: points[list(MOUTH)],
    "left and right": lambda points, side: points[list(BOTH)],
    "nose first": lambda points, side: points[list(NOSE_FIRST)],
    "x and y": lambda points, side: points[:, ::-1],
    "mirrored": lambda points, side: [side, 0] + points * [-1, 1],
    "from 0 to 1": lambda points, side: points / side,
    "of an image four times as large": lambda points, side: points * 4,
}


def reason(points: np.ndarray, side: int = 112) -> str | None:
    try:
        face_alignment.check_landmarks(points, "a", (side, side))
    except UserError as error:
        return f"{error.found}; {error.remedy}"
    return None


def refused(points: list[np.ndarray]) -> bool:
    try:
        face_alignment.check_records("set", [Record("a", "a", Path(), "a", one) for one in points])
    except UserError:
        return True
    return False


def seen_from(yaw: float, pitch: float) -> np.ndarray:
    """Points of the template, the nose before the face, after the head has turned."""
    flat = face_alignment.TEMPLATE - face_alignment.TEMPLATE.mean(0)
    across, depth = flat[:, 0], np.asarray([0, 0, 20, 6, 6])
    x, z = across * np.cos(yaw) + depth * np.sin(yaw), depth * np.cos(yaw) - across * np.sin(yaw)
    return np.column_stack([x, flat[:, 1] * np.cos(pitch) - z * np.sin(pitch)]) + 56


@real
def test_all_real_faces_are_taken_and_all_in_a_wrong_order_refused():
    faces = [np.asarray(points, float) for points in json.loads((LFW / face_alignment.LANDMARKS).read_text()).values()]
    assert len(faces) == 120 and not any(reason(points, 250) for points in faces)
    assert float(face_alignment.misfit(np.asarray(faces)).max()) < 0.29
    for name, change in WRONG.items():
        changed = [change(points, 250) for points in faces]
        assert all(map(reason, changed, [250] * 120)) or refused(changed), name


@pytest.mark.parametrize("name", WRONG)
def test_points_of_no_face_are_refused_each_or_in_a_set(name):
    points = WRONG[name](face_alignment.TEMPLATE, 112)
    assert reason(points) is not None or refused([points] * 30)


@pytest.mark.parametrize("yaw", range(-90, 91, 15))
@pytest.mark.parametrize("pitch", [-30, 0, 30])
def test_faces_in_any_view_are_taken(yaw, pitch):
    assert reason(seen_from(np.radians(yaw), np.radians(pitch))) is None


def test_faces_that_are_turned_cut_off_small_or_near_are_taken():
    for angle in range(0, 360, 30):
        c, s = np.cos(np.radians(angle)), np.sin(np.radians(angle))
        assert reason((face_alignment.TEMPLATE - 56) @ np.asarray([[c, s], [-s, c]]) + 56) is None
    assert reason(face_alignment.TEMPLATE - [50, 0]) is None
    assert reason(face_alignment.TEMPLATE / 15) is None and reason(face_alignment.TEMPLATE * 30, 4000) is None


def test_the_misfit_is_what_the_similarity_leaves():
    rng = np.random.default_rng(0)
    for points in rng.normal(size=(20, 5, 2)):
        matrix = face_alignment.similarity(points, face_alignment.TEMPLATE)
        left = points @ matrix[:, :2].T + matrix[:, 2] - face_alignment.TEMPLATE
        spread = ((face_alignment.TEMPLATE - face_alignment.TEMPLATE.mean(0)) ** 2).sum()
        assert float(face_alignment.misfit(points)) == pytest.approx(np.sqrt((left**2).sum() / spread))


def of(points: np.ndarray, count: int) -> list[Record]:
    return [Record(f"{k}.png", "a", Path(), f"{k}.png", points) for k in range(count)]


def test_a_set_of_faces_upside_down_is_refused_and_a_few_are_taken():
    upside_down = face_alignment.TEMPLATE[::-1]
    assert reason(upside_down) is None
    with pytest.raises(UserError, match="30 of 30 faces"):
        face_alignment.check_records("set", of(upside_down, 30))
    face_alignment.check_records("set", [*of(upside_down, 14), *of(face_alignment.TEMPLATE, 16)])


def test_an_import_refuses_a_set_whose_landmarks_are_swapped(tmp_path):
    points = {}
    for k in range(30):
        name = f"{'ab'[k % 2]}/{k:02}.png"
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((112, 112, 3), k, np.uint8)).save(tmp_path / "set" / name)
        points[name] = face_alignment.TEMPLATE[list(EYES if k < 25 else range(5))].tolist()
    (tmp_path / "set" / face_alignment.LANDMARKS).write_text(json.dumps(points))
    for damaged in ("fail", "skip"):
        with pytest.raises(UserError, match=r"off by 8\d% of their spread in the median of 30"):
            import_images.import_faces(tmp_path / "set", tmp_path / "out", align=True, damaged=damaged)


def test_landmarks_outside_of_the_image_are_refused_where_it_is_read():
    record = dataclasses.replace(of(face_alignment.TEMPLATE, 1)[0], data=np.zeros((30, 30, 3), np.uint8))
    with pytest.raises(UserError, match=r"0\.png.*outside of an image of 30 x 30"):
        face_alignment.align_face(record.data, record.landmarks, 112, record.where)
