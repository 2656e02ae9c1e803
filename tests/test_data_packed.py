import errno
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainkit.data import importing, packed, pictures
from trainkit.data.packed import Packed, Writer
from trainkit.errors import UserError

SIZE = 8


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def people(root: Path) -> Path:
    for person in range(3):
        (root / f"p{person}").mkdir(parents=True)
        for k in range(4):
            Image.fromarray(picture(10 * person + k)).save(root / f"p{person}" / f"{k}.png")
    return root


@pytest.fixture(params=["decoded", "encoded"])
def folder(request, tmp_path) -> Path:
    importing.import_faces(people(tmp_path / "people"), tmp_path / "set", image_size=SIZE, store=request.param)
    return tmp_path / "set"


def images(folder: Path) -> Path:
    return next(folder.glob("images.*"))


def test_what_was_put_in_comes_out(folder):
    data = Packed(folder)
    assert len(data) == 12 and data.classes == 3 and data.image_size == SIZE
    assert data.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    rows = np.asarray([11, 0, 5, 5])
    for pixels, row in zip(data.fetch(rows), rows, strict=True):
        assert (pixels.transpose(1, 2, 0) == picture(10 * (row // 4) + row % 4)).all()
    assert data.ids()[5] == "p1/1.png"
    assert data.fetch(np.asarray([], np.int64)).shape == (0, 3, SIZE, SIZE)


def test_rows_that_are_not_there_are_a_mistake_of_the_caller(folder):
    for row in (-1, 12):
        with pytest.raises(ValueError, match="rows"):
            Packed(folder).fetch(np.asarray([row]))


def test_decoded_and_encoded_hold_the_same_pixels(tmp_path):
    source = people(tmp_path / "people")
    for store in ("decoded", "encoded"):
        importing.import_faces(source, tmp_path / store, image_size=SIZE, store=store)
    one, two = Packed(tmp_path / "decoded"), Packed(tmp_path / "encoded")
    assert (one.fetch(np.arange(12)) == two.fetch(np.arange(12))).all()
    assert (one.contents() == two.contents()).all()
    assert two.encoded(3) == (source / "p0" / "3.png").read_bytes(), "files that fit are kept as they are"


def test_every_flipped_byte_of_every_file_is_noticed(folder):
    rng = np.random.default_rng(0)
    files = sorted(folder.iterdir())
    assert len(files) >= 7
    for file in files:
        whole = file.read_bytes()
        for place in rng.integers(0, len(whole), 12):
            content = bytearray(whole)
            content[place] ^= 1 << int(rng.integers(8))
            file.write_bytes(content)
            if file.name == "manifest.json":
                noticed = _refuses(folder) or Packed(folder).digest == json.loads(whole)["digest"]
            else:
                noticed = _refuses(folder) and importing.verify(folder) != []
            assert noticed, (file.name, int(place))
        file.write_bytes(whole)
    assert importing.verify(folder) == []


def _refuses(folder: Path) -> bool:
    try:
        data = Packed(folder)
        data.fetch(np.arange(len(data)))
    except UserError:
        return True
    return False


def test_a_row_that_was_changed_is_named_when_it_is_read(folder, monkeypatch):
    monkeypatch.setattr(packed, "_HASHED_AT_OPEN", 0)  # as for sets of gigabytes
    data = Packed(folder)
    begin = 128 + 7 * 3 * SIZE * SIZE if data.store == "decoded" else int(data._offsets[7])
    content = bytearray(images(folder).read_bytes())
    content[begin + 20] ^= 4
    images(folder).write_bytes(content)
    data = Packed(folder)
    data.fetch(np.asarray([6, 8]))
    with pytest.raises(UserError, match=r"row 7 \(p1/3\.png\)"):
        data.fetch(np.asarray([6, 7]))
    problems = importing.verify(folder)
    assert len(problems) == 2 and "images." in problems[0] and "row 7" in problems[1]


@pytest.mark.parametrize("name", ["images", "labels.npy", "checksums.npy", "ids.txt", "manifest.json", "names.json"])
def test_a_truncated_or_missing_file_is_named(folder, name):
    file = images(folder) if name == "images" else folder / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=file.name):
        Packed(folder)
    file.unlink()
    with pytest.raises(UserError, match=file.name):
        Packed(folder)
    assert len(importing.verify(folder)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 10**15},
        {"rows": -1},
        {"rows": "12"},
        {"image_size": 0},
        {"classes": 2},
        {"version": 99},
        {"store": "other"},
        {"protocol": "Pairs"},
        {"files": {}},
        {"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}},
        {"digest": "0" * 64},
        {"format": None},
    ],
)
def test_a_manifest_that_was_tampered_with_is_refused(folder, change):
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match="manifest"):
        Packed(folder)


def test_a_label_out_of_range_is_named_by_its_row(folder):
    labels = np.load(folder / "labels.npy")
    labels[9] = 3
    np.save(folder / "labels.npy", labels)
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["labels.npy"]["sha256"] = packed.sha256(folder / "labels.npy")
    manifest["digest"] = packed.digest_of(manifest["files"], (12, 3, SIZE))
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"row 9 .*label 3"):
        Packed(folder)


def test_an_import_that_fails_leaves_nothing(tmp_path):
    root = people(tmp_path / "people")
    (root / "p1" / "2.png").write_bytes((root / "p1" / "2.png").read_bytes()[:60])
    (root / "p2" / "0.png").write_bytes(b"")
    Image.fromarray(picture(0)).resize((9, 8)).save(root / "p2" / "1.png")
    with pytest.raises(UserError) as caught:
        importing.import_faces(root, tmp_path / "out" / "set", image_size=SIZE)
    for name in ("p1/2.png", "p2/0.png", "p2/1.png"):
        assert name in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_damaged_pictures_are_left_out_on_demand_and_named(tmp_path):
    root = people(tmp_path / "people")
    (root / "p1" / "2.png").write_bytes(b"no picture")
    report = importing.import_faces(root, tmp_path / "set", image_size=SIZE, damaged="skip")
    assert report.rows == 11 and "p1/2.png" in report.notes[0]
    data = Packed(tmp_path / "set")
    assert data.labels.tolist() == [0] * 4 + [1] * 3 + [2] * 4
    assert (data.fetch(np.asarray([6]))[0].transpose(1, 2, 0) == picture(13)).all()


def test_an_existing_folder_is_not_written_over(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(UserError, match="exists"):
        importing.import_faces(folder.parent / "people", folder, image_size=SIZE)
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    root = people(tmp_path / "people")
    monkeypatch.setattr(Writer, "_save", full)
    with pytest.raises(UserError, match="No space left"):
        importing.import_faces(root, tmp_path / "out" / "set", image_size=SIZE)
    assert list((tmp_path / "out").iterdir()) == []


def test_progress_counts_to_the_end(tmp_path):
    seen = []
    importing.import_faces(
        people(tmp_path / "p"), tmp_path / "set", image_size=SIZE, on_progress=lambda *done: seen.append(done)
    )
    assert seen == [(i, 12) for i in range(1, 13)]
    seen.clear()
    importing.verify(tmp_path / "set", on_progress=lambda *done: seen.append(done))
    assert seen[-1] == (12, 12)


def test_odd_things_are_warnings(tmp_path):
    root = people(tmp_path / "people")
    (root / "twin").mkdir()
    (root / "twin" / "x.png").write_bytes((root / "p0" / "1.png").read_bytes())
    importing.import_faces(root, tmp_path / "set", image_size=SIZE)
    other = tmp_path / "other"
    (other / "z").mkdir(parents=True)
    Image.fromarray(picture(21)).save(other / "z" / "0.bmp")
    importing.import_faces(other, tmp_path / "evaluation", image_size=SIZE)
    problems = importing.verify(tmp_path / "set", against=[tmp_path / "evaluation"])
    assert all(problem.startswith("warning: ") for problem in problems) and len(problems) == 3
    single, double, shared = problems
    assert "twin" in single
    assert "p0/1.png = twin/x.png" in double
    assert "p2/1.png = z/0.bmp" in shared


def test_info_says_what_is_there(folder):
    facts = importing.info(folder)
    assert facts["pictures"] == 12 and facts["classes"] == 3
    assert facts["pictures_per_class"] == {"least": 4, "median": 4.0, "most": 4}
    assert facts["bytes"] == sum(f.stat().st_size for f in folder.iterdir() if f.name != "manifest.json")


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def test_pictures_of_every_mode_become_rgb():
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    three = np.repeat(grey[:, :, None], 3, 2)
    image = Image.fromarray(grey)
    assert (pictures.decode(encoded(image), "") == three).all()
    assert (pictures.decode(encoded(image.convert("RGBA")), "") == three).all()
    assert (pictures.decode(encoded(image.convert("LA")), "") == three).all()
    assert (pictures.decode(encoded(image.convert("P")), "") == three).all()
    assert (pictures.decode(encoded(Image.fromarray(grey.astype(np.uint16) * 257)), "") == three).all()
    black_and_white = pictures.decode(encoded(Image.fromarray(grey > 100)), "")
    assert (black_and_white == np.where(grey > 100, 255, 0)[:, :, None]).all()
    cmyk = pictures.decode(encoded(Image.fromarray(three).convert("CMYK"), "JPEG", quality=100), "")
    assert cmyk.shape == (8, 8, 3) and np.abs(cmyk.astype(int) - three).max() < 12
    webp = pictures.decode(encoded(Image.fromarray(three), "WEBP", lossless=True), "")
    assert (webp == three).all()


def test_a_picture_lying_on_its_side_is_set_upright():
    pixels = picture(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = pictures.decode(encoded(Image.fromarray(pixels), exif=exif), "")
    assert (upright == np.rot90(pixels, -1)).all()


def animated() -> bytes:
    frames = [Image.fromarray(picture(i)) for i in range(2)]
    return encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"GIF89a" + b"\0" * 50, "formats"),
        (encoded(Image.fromarray(picture(0)), "TIFF"), "formats"),
        (encoded(Image.fromarray(picture(0)), "GIF"), "formats"),
        (encoded(Image.fromarray(picture(0)))[:-40], "cannot be decoded"),
        (encoded(Image.fromarray(picture(0)), "JPEG")[:-30], "cannot be decoded"),
        (animated(), "animated"),
        (b"\xff" * 100, "formats"),
    ],
)
def test_what_is_no_whole_picture_is_refused_by_name(data, words):
    with pytest.raises(UserError, match=f"photo 3.*{words}"):
        pictures.decode(data, "photo 3")


@pytest.mark.parametrize("side", [8_000, 20_000])
def test_a_bomb_is_refused_from_its_header(side):
    bomb = encoded(Image.new("1", (side, side)), optimize=True)
    assert len(bomb) < 100_000
    import tracemalloc

    tracemalloc.start()
    with pytest.raises(UserError, match=r"pixels|cannot be decoded"):
        pictures.decode(bomb, "bomb")
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
