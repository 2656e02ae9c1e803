import io
import json
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import packed_rows
import pytest
from PIL import Image

from trainkit.data import import_images, leakage, thread_pool, verify_images
from trainkit.data.formats import image_decode
from trainkit.data.record import Record, Source
from trainkit.data.rows import reader, writer
from trainkit.data.storage import image_store
from trainkit.data.storage.image_store import Packed, Writer
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
    import_images.import_faces(people(tmp_path / "people"), tmp_path / "set", image_size=SIZE, store=request.param)
    return tmp_path / "set"


def test_what_was_put_in_comes_out(folder):
    data = Packed(folder)
    assert len(data) == 12 and data.classes == 3 and data.image_size == SIZE
    assert data.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    rows = np.asarray([11, 0, 5, 5])
    for pixels, row in zip(data.fetch(rows), rows, strict=True):
        assert (pixels.transpose(1, 2, 0) == picture(10 * (row // 4) + row % 4)).all()
    assert data.ids()[5] == "p1/1.png"
    assert data.fetch(np.asarray([], np.int64)).shape == (0, 3, SIZE, SIZE)


def test_sets_of_squares_keep_the_digest_they_always_had(tmp_path):
    root = tmp_path / "people"
    for person in range(3):
        (root / f"p{person}").mkdir(parents=True)
        for k in range(4):
            pixels = (np.arange(8 * 8 * 3).reshape(8, 8, 3) * (10 * person + k) % 256).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"p{person}" / f"{k}.bmp")
    # As written by the first version, which knew only squares.
    first = {
        "decoded": "62d6b60b96a47e512ce3cc7b55f127b8b8bf0764c40e0813d3b85da45350bd67",
        "encoded": "abf12cb271d4e2807c4b6409a9a6a7d39bf4208b40d803b5c85051304f89ff7f",
    }
    for store, digest in first.items():
        import_images.import_faces(root, tmp_path / store, image_size=8, store=store)
        data = Packed(tmp_path / store)
        assert data.digest == digest and data.manifest["image_size"] == 8 and data.size == (8, 8)
        assert data.groups is None and data.group_names == ()
        assert {file.name for file in (tmp_path / store).iterdir()} == {"manifest.json", "names.json", "rows.arrow"}


def test_sets_of_the_same_files_are_known_as_such_in_any_size(tmp_path):
    root = people(tmp_path / "people")
    packed = [
        import_images.import_faces(root, tmp_path / f"set{size}{store}", image_size=size, resize="down", store=store)
        for size, store in ((8, "decoded"), (8, "encoded"), (4, "decoded"))
    ]
    assert len({Packed(report.out).originals for report in packed}) == 1
    assert len({Packed(report.out).digest for report in packed}) == 3
    known = Packed(packed[0].out).originals

    def other(name: str) -> str | None:
        return Packed(import_images.import_faces(root, tmp_path / name, image_size=SIZE).out).originals

    Image.fromarray(picture(99)).save(root / "p1" / "2.png")
    changed = other("changed")
    (root / "p1").rename(root / "p9")
    assert len({known, changed, other("renamed")}) == 3
    manifest = tmp_path / "set8decoded" / "manifest.json"
    said = json.loads(manifest.read_text())
    for entry in (None, 5, "remove"):
        found = (
            {**said, "originals": entry} if entry != "remove" else {k: v for k, v in said.items() if k != "originals"}
        )
        manifest.write_text(json.dumps(found))
        assert Packed(manifest.parent).originals is None, "of a set that was packed before"


@pytest.mark.parametrize("store", ["decoded", "encoded"])
def test_pictures_of_any_shape_are_kept(tmp_path, store):
    root = people(tmp_path / "people")
    Image.fromarray(np.full((5, 12, 3), 9, np.uint8)).save(root / "p0" / "0.png")
    import_images.import_pictures(root, tmp_path / "set", size=(4, 6), fit="stretch", store=store)
    data = Packed(tmp_path / "set")
    assert data.size == (4, 6) and data.manifest["image_size"] == [4, 6]
    images = data.fetch(np.arange(12))
    assert images.shape == (12, 3, 4, 6) and (images[0] == 9).all()
    for row in range(12):
        assert (data.picture(row) == images[row].transpose(1, 2, 0)).all() and data.picture(row).flags.c_contiguous
    with pytest.raises(ValueError, match="4 x 6, not squares"):
        _ = data.image_size
    assert verify_images.verify(tmp_path / "set") == []


def own_sizes(tmp_path: Path) -> Path:
    root = tmp_path / "things"
    for row, shape in enumerate([(5, 7), (9, 3), (5, 7), (2, 2)]):
        (root / f"c{row % 2}").mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(row).integers(0, 256, (*shape, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"c{row % 2}" / f"{row}.png")
    return root


def test_pictures_may_keep_their_own_sizes(tmp_path):
    root = own_sizes(tmp_path)
    report = import_images.import_pictures(root, tmp_path / "set", size=None)
    assert report.store == "encoded"
    data = Packed(tmp_path / "set")
    assert data.size is None and data.manifest["image_size"] is None and data.labels.tolist() == [0, 0, 1, 1]
    for row, name in enumerate(data.ids()):
        assert (data.picture(row) == np.asarray(Image.open(root / name))).all()
        assert data.encoded(row) == (root / name).read_bytes()
    several = data.pictures(np.asarray([3, 0, 2, 2, 1]))
    assert [pixels.shape[:2] for pixels in several] == [data.picture(row).shape[:2] for row in (3, 0, 2, 2, 1)]
    assert all((pixels == data.picture(row)).all() for pixels, row in zip(several, (3, 0, 2, 2, 1), strict=True))
    with pytest.raises(ValueError, match="one by one"):
        data.fetch(np.asarray([0]))
    for row in (-1, 4):
        with pytest.raises(ValueError, match="row"):
            data.picture(row)
    assert len(set(data.contents().tolist())) == 4
    again = import_images.import_pictures(tmp_path / "set", tmp_path / "small", size=(4, 4), fit="crop")
    direct = import_images.import_pictures(root, tmp_path / "direct", size=(4, 4), fit="crop")
    assert again.digest == direct.digest
    with pytest.raises(ValueError, match="encoded"):
        import_images.import_pictures(root, tmp_path / "no", size=None, store="decoded")


def grouped(tmp_path: Path) -> Path:
    import_images.import_pictures(people(tmp_path / "people"), tmp_path / "set", size=(8, 8), group=r"/(\d)\.")
    return tmp_path / "set"


def test_groups_are_kept_and_travel_to_workers(tmp_path):
    import pickle

    data = Packed(grouped(tmp_path))
    for one in (data, pickle.loads(pickle.dumps(data))):
        assert one.group_names == ("0", "1", "2", "3") and one.groups.tolist() == [0, 1, 2, 3] * 3
        assert one.groups.dtype == np.int64
    import_images.import_pictures(tmp_path / "people", tmp_path / "plain", size=(8, 8))
    assert Packed(tmp_path / "plain").digest != data.digest, "groups are part of what a set is"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (np.asarray([0] * 11 + [4]), r"row 11 .*group 4; expected 0 to 3"),
        (np.asarray([-1] + [0] * 11), r"row 0 .*group -1"),
        ("groups.json", "manifest"),
        ("groups.npy", "manifest"),
    ],
)
def test_groups_that_do_not_fit_are_refused(tmp_path, changed, words):
    folder = grouped(tmp_path)
    if isinstance(changed, str):
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["files"][changed]
        manifest["digest"] = Packed.digest_of(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
    else:
        packed_rows.rewrite(Packed(folder), group=changed)
    with pytest.raises(UserError, match=words):
        Packed(folder)


def test_every_flipped_byte_of_every_file_is_noticed(folder):
    rng = np.random.default_rng(0)
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["manifest.json", "names.json", "rows.arrow"]
    for file in files:
        whole = file.read_bytes()
        for place in rng.integers(0, len(whole), 60 if file.name == "rows.arrow" else 12):
            content = bytearray(whole)
            content[place] ^= 1 << int(rng.integers(8))
            file.write_bytes(content)
            if file.name == "manifest.json":
                noticed = _refuses(folder) or Packed(folder).digest == json.loads(whole)["digest"]
            else:
                noticed = _refuses(folder) and verify_images.verify(folder) != []
            assert noticed, (file.name, int(place))
        file.write_bytes(whole)
    assert verify_images.verify(folder) == []


def _refuses(folder: Path) -> bool:
    try:
        data = Packed(folder)
        data.fetch(np.arange(len(data)))
    except UserError:
        return True
    return False


def test_an_import_that_fails_leaves_nothing(tmp_path):
    root = people(tmp_path / "people")
    (root / "p1" / "2.png").write_bytes((root / "p1" / "2.png").read_bytes()[:60])
    (root / "p2" / "0.png").write_bytes(b"")
    Image.fromarray(picture(0)).resize((9, 8)).save(root / "p2" / "1.png")
    with pytest.raises(UserError) as caught:
        import_images.import_faces(root, tmp_path / "out" / "set", image_size=SIZE)
    for name in ("p1/2.png", "p2/0.png", "p2/1.png"):
        assert name in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_damaged_pictures_are_left_out_on_demand_and_named(tmp_path):
    root = people(tmp_path / "people")
    (root / "p1" / "2.png").write_bytes(b"no picture")
    report = import_images.import_faces(root, tmp_path / "set", image_size=SIZE, damaged="skip")
    assert report.rows == 11 and "p1/2.png" in report.notes[0]
    data = Packed(tmp_path / "set")
    assert data.labels.tolist() == [0] * 4 + [1] * 3 + [2] * 4
    assert (data.fetch(np.asarray([6]))[0].transpose(1, 2, 0) == picture(13)).all()


@pytest.mark.parametrize("size", [None, (8, 8)])
@pytest.mark.parametrize("after", [1, 5, 10])
def test_an_import_that_was_ended_is_resumed_and_gives_the_same_set(tmp_path, monkeypatch, after, size):
    root = people(tmp_path / "people")
    (root / "p0" / "3.png").write_bytes(b"no picture")
    Image.fromarray(np.full((8, 8), 100, np.uint16)).save(root / "p2" / "0.png")
    how = {"size": size, "group": r"/(\d)\.", "damaged": "skip"}
    monkeypatch.setattr(writer, "BATCH_BYTES", 400)
    whole = import_images.import_pictures(root, tmp_path / "whole", **how)
    assert any("skipped: " in note for note in whole.notes)

    def ending(self, *image):
        if self.rows == after:
            raise KeyboardInterrupt
        add_image(self, *image)

    add_image, read, one = Writer.add_image, [], import_images._one
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Writer, "add_image", ending)
        import_images.import_pictures(root, tmp_path / "set", **how)
    monkeypatch.setattr(import_images, "_one", lambda record, recipe: read.append(record.id) or one(record, recipe))
    resumed = import_images.import_pictures(root, tmp_path / "set", **how)
    assert len(read) in ({12} if after == 1 else range(12 - after - 1, 12 - after + 3))
    assert (resumed.digest, resumed.notes) == (whole.digest, whole.notes)
    assert Packed(resumed.out).originals == Packed(whole.out).originals is not None
    assert len(list(tmp_path.iterdir())) == 3, "nothing is left aside"


def test_packing_takes_no_memory_for_an_image_but_its_number(tmp_path, monkeypatch):
    """Each content is there twice, under two people: names, contents and labels of all were in memory at the end."""
    monkeypatch.setattr(writer, "BATCH_BYTES", 150_000)
    monkeypatch.setattr(import_images, "_IN_MEMORY", 1000)
    monkeypatch.setattr(leakage, "_AT_ONCE", 1000)
    pixels, encoded = np.zeros((3, SIZE, SIZE), np.uint8), image_decode.encode(np.zeros((SIZE, SIZE, 3), np.uint8))

    def peak(rows: int) -> int:
        found = import_images._Rows(False, tmp_path)
        source = Source("folder", "here", rows, lambda: iter(()))
        with Writer(tmp_path / str(rows), size=(SIZE, SIZE), store="encoded", key="k", state=found.state) as out:
            for row in range(rows):
                pixels[0, 0, :4] = np.frombuffer((row // 2).to_bytes(4), np.uint8)
                record = Record(f"record {row}", row % 4, b"", "")
                found.add(out, import_images._Made(record, pixels, bytes(16), encoded))
                if row == 4000:
                    tracemalloc.start()
            report = found.finish(out, source, None)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert report.rows == rows and f"{rows // 2} images are in two classes: record 0 = record 1" in report.notes[-1]
        return most

    peak(4_500)  # imports
    small, large = peak(8_000), peak(24_000)
    assert large - small < 24 * 16_000, (large - small) / 16_000


def test_odd_things_are_warnings(tmp_path):
    root = people(tmp_path / "people")
    (root / "twin").mkdir()
    (root / "twin" / "x.png").write_bytes((root / "p0" / "1.png").read_bytes())
    import_images.import_faces(root, tmp_path / "set", image_size=SIZE)
    other = tmp_path / "other"
    (other / "z").mkdir(parents=True)
    Image.fromarray(picture(21)).save(other / "z" / "0.bmp")
    import_images.import_faces(other, tmp_path / "evaluation", image_size=SIZE)
    problems = verify_images.verify(tmp_path / "set", against=[tmp_path / "evaluation"])
    assert all(problem.startswith("warning: ") for problem in problems) and len(problems) == 3
    single, double, shared = problems
    assert "twin" in single
    assert "p0/1.png = twin/x.png" in double
    assert "p2/1.png = z/0.bmp" in shared


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def animated() -> bytes:
    frames = [Image.fromarray(picture(i)) for i in range(2)]
    return encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"GIF89a" + b"\0" * 50, "formats"),
        (encoded(Image.fromarray(picture(0)), "PCX"), "formats"),
        (encoded(Image.fromarray(picture(0)), "GIF"), "formats"),
        (encoded(Image.fromarray(picture(0)))[:-40], "cannot be decoded"),
        (encoded(Image.fromarray(picture(0)), "JPEG")[:-30], "cannot be decoded"),
        (animated(), "animated"),
        (b"\xff" * 100, "formats"),
    ],
)
def test_what_is_no_whole_picture_is_refused_by_name(data, words):
    with pytest.raises(UserError, match=f"photo 3.*{words}"):
        image_decode.decode(data, "photo 3")


def photograph(seed: int, size: tuple[int, int] = (40, 56)) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((size[1], size[0]), Image.Resampling.BICUBIC)


def jpeg(picture: Image.Image, **options) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", **options)
    return stream.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    return exif


PLAIN = {
    "4:4:4": lambda: jpeg(photograph(0), quality=92, subsampling=0),
    "4:2:2": lambda: jpeg(photograph(1), quality=85, subsampling=1),
    "4:2:0": lambda: jpeg(photograph(2), quality=75, subsampling=2),
    "coarse": lambda: jpeg(photograph(3), quality=5),
    "progressive": lambda: jpeg(photograph(4), quality=90, progressive=True),
    "optimised": lambda: jpeg(photograph(5), optimize=True, comment=b"Exif"),
    "restarts": lambda: jpeg(photograph(6), restart_marker_blocks=3),
    "profile": lambda: jpeg(photograph(7), icc_profile=b"x" * 70_000),
    "noise": lambda: jpeg(Image.fromarray(np.random.default_rng(8).integers(0, 256, (40, 56, 3), dtype=np.uint8))),
}
OTHERS = {
    "upside down": lambda: jpeg(photograph(0), exif=turned()),
    "grey": lambda: jpeg(photograph(1).convert("L")),
    "CMYK": lambda: jpeg(photograph(2).convert("CMYK")),
    "RGB": lambda: jpeg(photograph(3), keep_rgb=True),
    "PNG": lambda: image_decode.encode(np.asarray(photograph(4))),
}


def packed_bytes(folder: Path, encoded: list[bytes]) -> Packed:
    with Writer(folder, size=(40, 56), store="encoded") as writer:
        for i, data in enumerate(encoded):
            writer.add_image(str(i), np.ascontiguousarray(image_decode.decode(data, "").transpose(2, 0, 1)), data)
        return writer.finish(labels=np.zeros(len(encoded), np.int64), class_names=["one"])


def test_jpegs_are_decoded_as_pillow_decodes_them(tmp_path):
    data = packed_bytes(tmp_path / "set", [make() for make in (PLAIN | OTHERS).values()])
    assert not data._bytes.flags.writeable, "a file larger than memory can be mapped for reading alone"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = data.fetch(np.arange(len(data)))
    for row, (name, make) in enumerate((PLAIN | OTHERS).items()):
        pixels = image_decode.decode(make(), "")
        assert (images[row].transpose(1, 2, 0) == pixels).all(), name
        assert (data.picture(row) == pixels).all() and data.picture(row).flags.c_contiguous
        assert image_decode.plain_jpeg(make()) == ((40, 56) if name in PLAIN else None), name
    assert data._known.tolist() == [image_store._PLAIN] * len(PLAIN) + [image_store._CHECKED] * len(OTHERS)
    assert data._proved >= len(PLAIN), "Pillow has not decoded them"


def test_once_it_has_proved_itself_a_decoder_is_believed_and_pillow_reads_what_it_cannot(tmp_path, monkeypatch):
    made = [make() for make in (PLAIN | OTHERS).values()]
    data = packed_bytes(tmp_path / "set", 4 * made)
    asked = []

    def picky(encoded) -> np.ndarray:
        asked.append(encoded)
        if len(asked) % 11 == 0:
            raise ValueError("not this time")
        return image_decode.decode(encoded.tobytes(), "").transpose(2, 0, 1)

    monkeypatch.setattr(image_decode, "plain_decoder", lambda: picky)
    expected = [image_decode.decode(encoded, "").transpose(2, 0, 1) for encoded in 4 * made]
    plain = np.tile(np.arange(len(made)) < len(PLAIN), 4).nonzero()[0]
    with thread_pool.alone():
        for rows in (np.arange(len(data)), plain, np.arange(len(data))[::-1]):
            assert (data.fetch(rows) == np.stack([expected[row] for row in rows])).all()
    assert len(asked) > 2 * len(plain)


def test_a_decoder_that_differs_is_not_asked_twice(tmp_path, monkeypatch, caplog):
    data = packed_bytes(tmp_path / "set", [make() for make in PLAIN.values()])
    asked = []

    def off_by_one(encoded) -> np.ndarray:
        asked.append(encoded)
        return image_decode.decode(encoded.tobytes(), "").transpose(2, 0, 1) ^ 1

    monkeypatch.setattr(image_decode, "plain_decoder", lambda: off_by_one)
    with thread_pool.alone():
        images = data.fetch(np.arange(len(data)))
    for row, make in enumerate(PLAIN.values()):
        assert (images[row].transpose(1, 2, 0) == image_decode.decode(make(), "")).all()
    assert len(asked) == 1 and "other pixels than the import" in caplog.text and "row 0" in caplog.text


def test_threads_read_what_one_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(thread_pool, "count", lambda: 3)
    monkeypatch.setattr(reader, "HASHED_AT_OPEN", 0)
    for store in ("decoded", "encoded"):
        import_images.import_pictures(people(tmp_path / store), tmp_path / f"{store}.set", size=(8, 8), store=store)
        data = Packed(tmp_path / f"{store}.set")
        drawn = np.random.default_rng(0).integers(0, 12, 50)
        for pixels, row in zip(data.fetch(drawn), drawn, strict=True):
            assert (pixels.transpose(1, 2, 0) == picture(10 * (row // 4) + row % 4)).all()
        for row in (7, 10):
            packed_rows.damage(data, "image", row)
        for read in (Packed(data.path).fetch, Packed(data.path).pictures):
            with pytest.raises(UserError, match="row 7 "):
                read(np.arange(12))


def test_headers_that_are_cut_or_made_up_are_no_plain_jpegs():
    whole = PLAIN["4:2:0"]()
    start = whole.index(b"\xff\xda")
    assert image_decode.plain_jpeg(whole) == (40, 56)
    assert all(image_decode.plain_jpeg(whole[:cut]) is None for cut in range(start + 4))
    rng = np.random.default_rng(0)
    for _ in range(2000):
        content = bytearray(whole[: start + 20])
        content[rng.integers(len(content))] = rng.integers(256)
        found = image_decode.plain_jpeg(bytes(content))
        assert found is None or (len(found) == 2 and min(found) >= 1)
    large = whole.replace((40).to_bytes(2, "big") + (56).to_bytes(2, "big"), b"\xff\xff\xff\xff")
    assert image_decode.plain_jpeg(large) is None, "beyond the cap"
