"""Archives as archivers write them are unpacked, whatever their dialect; the limits are stated ones."""

from __future__ import annotations

import io
import subprocess
import tarfile
import zipfile

import pytest
from archive_bombs import head, padded, records

from trainkit.autoconfig import archive
from trainkit.errors import UserError

LONG = "/".join(["set", *(letter * 60 for letter in "abcd"), "image (1).png"])
FILES = {LONG: b"1" * 3000, "set/b.txt": b"2", "set/empty.txt": b"", "set/c.bin": b"3" * 1024}


def packed(form: int, mode: str) -> bytes:
    out = io.BytesIO()
    said = {"comment": "of git archive"} if form == tarfile.PAX_FORMAT else None
    with tarfile.open(fileobj=out, mode=mode, format=form, pax_headers=said) as tar:
        for name, content in FILES.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1700000000.25
            if form == tarfile.PAX_FORMAT:
                info.pax_headers = {"SCHILY.xattr.user.note": "a\nb=" + "x" * 3000}
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_every_dialect_of_tar_is_unpacked(tmp_path, form, mode):
    (tmp_path / "a.tar").write_bytes(packed(form, mode))
    assert archive.unpack(tmp_path / "a.tar", tmp_path / "set") == len(FILES)
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES


def test_what_the_systems_own_tar_and_a_streamed_zip_wrote_is_unpacked(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    subprocess.run(["tar", "czf", "a.tar.gz", "set"], cwd=tmp_path, check=True)

    class Stream(io.BytesIO):
        def seek(self, *to):
            raise OSError

        tell = seek

    out = Stream()  # its sizes stand behind the data
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in FILES.items():
            with zipped.open(name, "w", force_zip64=True) as file:
                file.write(content)
    (tmp_path / "a.zip").write_bytes(out.getvalue())
    for name in ("a.tar.gz", "a.zip"):
        assert archive.unpack(tmp_path / name, tmp_path / name[2:5]) == len(FILES)
        found = {file: (tmp_path / name[2:5] / file.partition("/")[2]).read_bytes() for file in FILES}
        assert found == FILES


def folders(count: int) -> str:
    return "/".join(["a"] * count) + "/b.txt"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (records(path=folders(33)) + head("x"), "deeper than 32 folders"),
        (records(path="a" * 252 + ".txt") + head("x"), "more than 255 bytes"),
        (records(path="/etc/x.txt") + head("x"), "leads out"),
        (records(path="a.txt", linkpath="/etc") + head("x", 0, tarfile.SYMTYPE), "a link"),
        (head("a.txt") + b"no header of tar".ljust(512, b"x") + head("b.txt"), "a damaged header at byte 512"),
        (head("a.txt", 3000) + b"1" * 1000, "unexpected end|stated size"),
        (records(path="a.txt")[:-512] + b"9 no".ljust(512, b"\0") + head("x"), "a damaged extended header"),
    ],
)  # fmt: skip
def test_names_links_and_damage_are_refused_and_leave_nothing(tmp_path, content, said):
    (tmp_path / "a.tar").write_bytes(content + bytes(1024))
    with pytest.raises(UserError, match=said):
        archive.unpack(tmp_path / "a.tar", tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_32_folders_and_a_name_of_255_bytes_are_allowed(tmp_path):
    name = "a" * 251 + ".txt"
    content = records(path=folders(32)) + head("x", 1) + padded(b"1") + records(path=name) + head("x")
    (tmp_path / "a.tar").write_bytes(content + bytes(1024))
    assert archive.unpack(tmp_path / "a.tar", tmp_path / "set") == 2
    assert (tmp_path / "set" / folders(32)).read_bytes() == b"1" and (tmp_path / "set" / name).is_file()
