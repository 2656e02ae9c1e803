"""Landmarks of no face are refused, those of faces in any view are taken."""

from __future__ import annotations

import numpy as np
import pytest

from trainkit.data import face_alignment
from trainkit.errors import UserError

WRONG = {
    "left and right": lambda points: points[[1, 0, 2, 4, 3]],
    "x and y": lambda points: points[:, ::-1],
    "from 0 to 1": lambda points: points / 112,
    "of an image four times as large": lambda points: points * 4,
    "not a number": lambda points: points * np.nan,
    "four points": lambda points: points[:4],
}


def reason(points: np.ndarray, side: int = 112) -> str | None:
    try:
        face_alignment.check_landmarks(points, "a", (side, side))
    except UserError as error:
        return f"{error.found}; {error.remedy}"
    return None


def seen_from(yaw: float, pitch: float) -> np.ndarray:
    """Points of the template, the nose before the face, after the head has turned."""
    flat = face_alignment.TEMPLATE - face_alignment.TEMPLATE.mean(0)
    across, depth = flat[:, 0], np.asarray([0, 0, 20, 6, 6])
    x, z = across * np.cos(yaw) + depth * np.sin(yaw), depth * np.cos(yaw) - across * np.sin(yaw)
    return np.column_stack([x, flat[:, 1] * np.cos(pitch) - z * np.sin(pitch)]) + 56


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


@pytest.mark.parametrize("name", WRONG)
def test_points_of_no_face_are_refused(name):
    assert reason(WRONG[name](face_alignment.TEMPLATE)) is not None
    with pytest.raises(UserError, match="photo"):
        face_alignment.align_face(np.zeros((112, 112, 3), np.uint8), WRONG[name](face_alignment.TEMPLATE), 112, "photo")
