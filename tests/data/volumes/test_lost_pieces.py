"""Annotated pieces that a preparation loses are counted and named, at import, in verify and when a run opens them."""

import numpy as np
import pytest
from organ_volumes import affine, put_case
from scipy import ndimage

from trainkit.data.volumes import fingerprint, importer, verify
from trainkit.data.volumes.dataset import Volumes
from trainkit.data.volumes.sources import open_volumes

NAMES = ["liver", "lesion"]
COARSE = (4.0, 4.0, 4.0)


def tumours(root, cases: int = 6, lesions: int = 1):
    """Volumes of 1 mm with a liver, and lesions of which the first is a single voxel and the others are large."""
    for number in range(cases):
        labels = np.zeros((32, 28, 24), np.uint8)
        labels[4:28, 4:24, 4:20] = 1
        labels[9 + number, 9, 9] = 2
        for more in range(1, lesions):
            labels[22:27, 6 * more : 6 * more + 5, 12:17] = 2
        image = np.random.default_rng(number).normal(0, 1, labels.shape).astype(np.float32)
        put_case(root, f"c{number}", image, labels, affine((1, 1, 1)))
    return root


def test_a_lesion_that_vanishes_is_counted_and_named(tmp_path):
    root = tumours(tmp_path / "set")
    data = importer.import_volumes(root, tmp_path / "out", names=NAMES, spacing=COARSE)
    said = "2 lesion: 6 of 6 pieces lost by resampling, and in 6 of 6 cases all of it: c0 (1 -> 0), c1 (1 -> 0)"
    (note,) = (note for note in importer.notes(open_volumes(root), data) if "lost by" in note)
    assert note.startswith(said) and "c5 (1 -> 0)" in note
    assert not any("lost" in line for line in verify.verify(root, names=NAMES))
    notes = Volumes(train=str(root), names=NAMES, spacing=COARSE, patch=(4, 4, 4)).open(0).notes
    assert f"data.train: {note}" in notes and not any("no voxel of" in line for line in notes)


@pytest.mark.parametrize("shape", [(6, 7, 8), (12, 7, 24), (3, 30, 9), (17, 19, 23)])
def test_a_piece_is_kept_where_a_prepared_voxel_that_it_lies_in_has_its_label(shape):
    rng = np.random.default_rng(sum(shape))
    truth = (rng.random((12, 15, 16)) > 0.93).astype(np.uint8) * rng.integers(1, 3, (12, 15, 16)).astype(np.uint8)
    label = (rng.random(shape) > 0.5).astype(np.uint8) * rng.integers(1, 3, shape).astype(np.uint8)
    seen = fingerprint.organs(truth, label)
    for organ in (1, 2):
        pieces, count = ndimage.label(truth == organ, np.ones((3, 3, 3)))
        kept = set()
        for place in np.argwhere(truth == organ):
            cell = tuple(int((2 * i + 1) * m // (2 * n)) for i, m, n in zip(place, shape, truth.shape, strict=True))
            kept |= {int(pieces[tuple(place)])} if label[cell] == organ else set()
        assert seen[str(organ)] == {"pieces": count, "lost": count - len(kept)}
