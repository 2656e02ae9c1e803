import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainkit.data import evaluation_sets, face_alignment, import_images
from trainkit.data.formats import image_decode
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Identification, Templates

REAL = Path(__file__).parents[3] / "shared" / "data" / "faces_lfw112"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the real faces are not beside this checkout")

NAMES = [f"{i}.jpg" for i in range(5)]
TEMPLATE, MEDIA, FACENESS = [1, 1, 4, 4, 9], [10, 11, 12, 12, 13], [0.5, 0.75, 0.25, 1.0, 0.125]
PAIRS = [(1, 4, 1), (4, 9, 0), (1, 9, 0)]


def save(file: Path, seed: int, size: int = 8) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")


def insightface(root: Path, size: int = 8) -> Path:
    for i, name in enumerate(NAMES):
        save(root / "loose_crop" / name, i, size)
    (root / "meta").mkdir()
    meta = root / "meta" / "ijbc_"
    points = " ".join(f"{value:.4f}" for value in (face_alignment.TEMPLATE * size / 112).ravel())
    rows = list(zip(NAMES, TEMPLATE, MEDIA, FACENESS, strict=True))
    Path(f"{meta}face_tid_mid.txt").write_text("".join(f"{n} {t} {m}\n" for n, t, m, _ in rows))
    Path(f"{meta}template_pair_label.txt").write_text("".join("{} {} {}\n".format(*pair) for pair in PAIRS))
    Path(f"{meta}name_5pts_score.txt").write_text("".join(f"{n} {points} {f}\n" for n, _, _, f in rows))
    return root


def test_template_metadata_gives_a_protocol(tmp_path):
    root = insightface(tmp_path / "set")
    import_images.import_evaluation(root, tmp_path / "out", image_size=8)
    data = Packed(tmp_path / "out")
    protocol = data.protocol()
    assert isinstance(protocol, Templates)
    assert protocol.template.tolist() == TEMPLATE and protocol.media.tolist() == MEDIA
    assert protocol.faceness.tolist() == FACENESS
    assert [*zip(protocol.first, protocol.second, protocol.same.astype(int), strict=True)] == PAIRS
    plain_pixels = np.stack([np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8) for i in range(5)])
    # The points of the InsightFace form lie on the template already: aligning is the identity there.
    difference = np.abs(data.fetch(np.arange(5)).transpose(0, 2, 3, 1).astype(int) - plain_pixels)
    assert difference[:, 1:-1, 1:-1].max() <= 1


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("template_pair_label", "1 5 1\n", "pair 0.*template 5"),
        ("template_pair_label", "1 4 2\n", "pair 0.*same: 2"),
        ("template_pair_label", "1 4\n", "template_pair_label"),
        ("template_pair_label", "1 x 1\n", "template_pair_label"),
        ("template_pair_label", "", "template_pair_label.*cannot be read"),
        ("template_pair_label", None, "template_pair_label.*is missing"),
        ("face_tid_mid", "0.jpg 1 99999999999999999999\n", "face_tid_mid"),
        ("face_tid_mid", "1.jpg 1 1\n", "other images or another order"),
        ("name_5pts_score", "x.jpg\n", "name_5pts_score"),
    ],
)
def test_bad_template_metadata_is_named(tmp_path, file, text, words):
    root = insightface(tmp_path / "set")
    place = root / "meta" / f"ijbc_{file}.txt"
    place.write_text(text) if text is not None else place.unlink()
    with pytest.raises(UserError, match=words):
        evaluation_sets.recognise(root)


def test_paths_and_faceness_of_templates_are_checked(tmp_path):
    root = insightface(tmp_path / "set")
    points = root / "meta" / "ijbc_name_5pts_score.txt"
    points.write_text(points.read_text().replace(" 0.5\n", " nan\n"))
    with pytest.raises(UserError, match="an empty faceness"):
        evaluation_sets.recognise(root)
    points.unlink()
    names = root / "meta" / "ijbc_face_tid_mid.txt"
    names.write_text(names.read_text().replace("0.jpg", "../../../etc/passwd"))
    with pytest.raises(UserError, match="inside"):
        evaluation_sets.recognise(root)


def tinyface(root: Path) -> Path:
    parts = {"Probe": ["7_1.jpg", "9_2.jpg"], "Gallery_Match": ["9_1.jpg", "7_3.jpg"], "Gallery_Distractor": ["1.jpg"]}
    for seed, (part, name) in enumerate((part, name) for part, names in parts.items() for name in names):
        save(root / "Testing_Set" / part / name, seed)
    return root


def test_tinyface_is_probes_matches_and_distractors(tmp_path):
    import_images.import_evaluation(tinyface(tmp_path / "set"), tmp_path / "out", image_size=8)
    data = Packed(tmp_path / "out")
    protocol = data.protocol()
    assert isinstance(protocol, Identification)
    ids = data.ids()
    assert [ids[row] for row in protocol.probe] == ["Probe/7_1.jpg", "Probe/9_2.jpg"]
    gallery = {ids[row]: int(protocol.label[row]) for row in protocol.gallery}
    assert gallery == {"Gallery_Match/9_1.jpg": 9, "Gallery_Match/7_3.jpg": 7, "Gallery_Distractor/1.jpg": -1}
    assert protocol.label[protocol.probe].tolist() == [7, 9]


def test_a_probe_without_a_match_or_an_identity_is_named(tmp_path):
    root = tinyface(tmp_path / "set")
    save(root / "Testing_Set" / "Probe" / "5_1.jpg", 0)
    with pytest.raises(UserError, match=r"5_1\.jpg.*not in the gallery"):
        evaluation_sets.recognise(root)
    (root / "Testing_Set" / "Probe" / "5_1.jpg").rename(root / "Testing_Set" / "Probe" / "nobody.jpg")
    with pytest.raises(UserError, match=r"nobody\.jpg.*no identity"):
        evaluation_sets.recognise(root)


def test_a_similarity_is_found_again():
    rng = np.random.default_rng(0)
    for _ in range(20):
        angle, scale, shift = rng.uniform(-3, 3), rng.uniform(0.2, 4), rng.normal(size=2) * 50
        rotation = np.asarray([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        points = rng.normal(size=(5, 2)) * 30
        found = face_alignment.similarity(points, scale * points @ rotation.T + shift)
        np.testing.assert_allclose(found, np.column_stack([scale * rotation, shift]), atol=1e-9)


@pytest.mark.parametrize("size", [112, 56])
def test_landmarks_land_on_the_template(size):
    points = np.asarray([[60.0, 70.0], [100.0, 62.0], [84.0, 92.0], [70.0, 118.0], [106.0, 110.0]])
    # An image that says of each pixel where it is: red its column, green its row.
    rows, columns = np.mgrid[:160, :160].astype(np.uint8)
    field = np.stack([columns, rows, np.zeros_like(rows)], axis=2)
    out = face_alignment.align_face(field, points, size, "")[:, :, :2].astype(float)
    matrix = face_alignment.similarity(points, face_alignment.TEMPLATE * size / 112)
    linear, shift = matrix[:, :2], matrix[:, 2]
    for x, y in [(size // 3, size // 3), (size // 2, size // 2), (size // 2, 2 * size // 3)]:
        expected = np.linalg.solve(linear, np.asarray([x, y]) - shift)
        # PIL cuts off what is behind the point, so a grey level is met from below.
        assert (out[y, x] <= expected + 0.01).all() and (out[y, x] >= expected - 1.01).all()
    moved = points @ linear.T + shift
    assert np.abs(moved - face_alignment.TEMPLATE * size / 112).max() < 6 * size / 112


def test_points_in_one_place_are_refused():
    with pytest.raises(UserError, match="photo"):
        face_alignment.align_face(np.zeros((8, 8, 3), np.uint8), np.ones((5, 2)), 8, "photo")


@real
def test_real_unaligned_faces_become_the_aligned_ones():
    landmarks = json.loads((REAL / "unaligned250" / "landmarks5.json").read_text())
    differences, shifted = [], []
    for name, points in landmarks.items():
        photograph = image_decode.decode((REAL / "unaligned250" / name).read_bytes(), name)
        pixels = face_alignment.align_face(photograph, np.asarray(points), 112, name).transpose(2, 0, 1)
        file = next(REAL / part / name for part in ("train", "verification") if (REAL / part / name).exists())
        theirs = image_decode.decode(file.read_bytes(), name).transpose(2, 0, 1).astype(int)
        differences.append(np.abs(theirs - pixels).mean())
        shifted.append(np.abs(theirs - np.roll(pixels, 1, axis=2)).mean())
    assert len(differences) == 120
    # 1.8 grey levels on average is what JPEG leaves; one pixel to the side is 6.7.
    assert np.mean(differences) < 2.5 and max(differences) < 4
    assert np.mean(shifted) > 2 * np.mean(differences)
