"""Downloads: what is kept, what is refused, and that nothing is asked over plain http. No test uses the network."""

from __future__ import annotations

import hashlib
import io
import re
import urllib.request
import urllib.response
import zipfile
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainkit.autoconfig import archive, download
from trainkit.config.downloads import Download
from trainkit.data import hub
from trainkit.errors import UserError

CONTENT = b"weights of a teacher" * 1000
SHA = hashlib.sha256(CONTENT).hexdigest()
URL = "https://models.example/teacher.pth"


@pytest.fixture
def web(monkeypatch, tmp_path):
    """Pages by address: (status, headers, body). Every request is noted, also one over plain http."""
    pages, asked = {}, []

    def answer(self, request):
        asked.append(request.full_url)
        status, headers, body = pages[request.full_url]
        message = Message()
        for key, value in headers.items():
            message[key] = value
        response = urllib.response.addinfourl(io.BytesIO(body), message, request.full_url, status)
        response.msg = "said"
        return response

    monkeypatch.setattr(urllib.request.HTTPSHandler, "https_open", answer)
    monkeypatch.setattr(urllib.request.HTTPHandler, "http_open", answer)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path / "data"))
    pages["asked"] = asked
    return pages


def recipe(tmp_path, *files: Download, extra: str = "", name: str = "r") -> object:
    (tmp_path / "data").mkdir(exist_ok=True)
    listed = "".join(f"  - {{url: '{f.url}', sha256: {f.sha256}, to: {f.to}}}\n" for f in files)
    text = f"""
name: {name}
task: {{name: embed, net: {{name: mobilefacenet}}}}
data: {{name: faces, train: nowhere{extra}}}
optim: {{lr: 0.1}}
train: {{length: 1 epoch, batch_size: 4}}
downloads:{" []" if not files else ""}
{listed}"""
    file = tmp_path / f"{name}.yaml"
    file.write_text(text)
    return file


def one(to: str = "teacher.pth") -> Download:
    return Download(url=URL, sha256=SHA, to=to)


def left(tmp_path) -> list[str]:
    return sorted(str(p.relative_to(tmp_path / "data")) for p in (tmp_path / "data").rglob("*") if p.is_file())


def test_a_file_is_brought_once_and_found_the_next_time(web, tmp_path):
    web[URL] = (200, {}, CONTENT)
    file = recipe(tmp_path, one("deep/teacher.pth"), one("deep/teacher.pth"))
    assert list(download.download(file)) == [f"{tmp_path}/data/deep/teacher.pth: downloaded"]
    assert (tmp_path / "data" / "deep" / "teacher.pth").read_bytes() == CONTENT
    assert list(download.download(file)) == [f"{tmp_path}/data/deep/teacher.pth: already there"]
    assert web["asked"] == [URL] and left(tmp_path) == ["deep/teacher.pth"]


def test_a_file_with_another_hash_is_not_kept(web, tmp_path):
    web[URL] = (200, {}, CONTENT[:-1])
    with pytest.raises(UserError, match=f"SHA-256 .* expected {SHA}; the file was deleted") as caught:
        list(download.download(recipe(tmp_path, one())))
    assert caught.value.where == URL and left(tmp_path) == []


def test_a_file_of_the_users_is_not_written_over(web, tmp_path):
    web[URL] = (200, {}, CONTENT)
    file = recipe(tmp_path, one())
    (tmp_path / "data" / "teacher.pth").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"different content.*move it away"):
        list(download.download(file))
    assert (tmp_path / "data" / "teacher.pth").read_bytes() == b"mine" and web["asked"] == []


def test_a_redirect_to_https_is_followed_and_one_to_anything_else_is_never_asked(web, tmp_path):
    web["https://other.example/t"] = (200, {}, CONTENT)
    web[URL] = (302, {"Location": "https://other.example/t"}, b"")
    assert "downloaded" in next(download.download(recipe(tmp_path, one("a.pth"))))
    for other in ("http://models.example/teacher.pth", "ftp://models.example/t"):
        web[URL], web[other] = (302, {"Location": other}, b""), (200, {}, CONTENT)
        web["asked"].clear()
        with pytest.raises(UserError, match=f"leads to {other}"):
            list(download.download(recipe(tmp_path, one("b.pth"))))
        assert web["asked"] == [URL] and left(tmp_path) == ["a.pth"]


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_refuses_is_named(web, tmp_path, status):
    web[URL] = (status, {}, b"sorry")
    with pytest.raises(UserError, match=f"{URL}: cannot be downloaded: .*{status}"):
        list(download.download(recipe(tmp_path, one())))
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    "failure", [ConnectionResetError("reset"), TimeoutError("timed out"), OSError(28, "No space left")]
)
def test_a_download_that_breaks_off_leaves_nothing(web, tmp_path, monkeypatch, failure):
    class Breaks(io.BytesIO):
        def read(self, *size):
            if self.tell():
                raise failure
            return super().read(100)

    web[URL] = (200, {}, CONTENT)
    monkeypatch.setattr(io, "BytesIO", Breaks)
    with pytest.raises(UserError, match=r"cannot be downloaded: .*(reset|timed out|No space left)"):
        list(download.download(recipe(tmp_path, one())))
    assert left(tmp_path) == []


def test_what_a_teachers_recipe_names_is_brought_too(web, tmp_path):
    web[URL] = (200, {}, CONTENT)
    recipe(tmp_path, one(), name="teacher")
    student = tmp_path / "student.yaml"
    task = "{name: adadistill, student: {name: mobilefacenet}, teacher: {net: {name: iresnet18}, recipe: teacher.yaml}}"
    text = recipe(tmp_path, name="student").read_text()
    student.write_text(text.replace("{name: embed, net: {name: mobilefacenet}}", task))
    assert "downloaded" in next(download.download(student)) and left(tmp_path) == ["teacher.pth"]


def test_a_recipe_that_names_nothing_says_so(web, tmp_path):
    assert list(download.download(recipe(tmp_path))) == [f"{tmp_path}/r.yaml: no downloads listed"]


def test_data_sets_of_the_hub_are_brought_and_an_offline_switch_is_respected(web, tmp_path, monkeypatch):
    import huggingface_hub

    brought = []

    def snapshot_download(name, local_files_only, **options):
        if local_files_only and not brought:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing")
        brought.append(name)
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "_patterns", lambda name, where: ["a.parquet"])
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "a.parquet").touch()
    file = recipe(tmp_path, extra=", evaluate: {a: 'hf://some/faces@v1'}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set; unset it for this command"):
        list(download.download(file))
    assert brought == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert list(download.download(file)) == [f"hf://some/faces@v1: {tmp_path}/hub"] and brought == ["some/faces"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert list(download.download(file)) == [f"hf://some/faces@v1: {tmp_path}/hub"], "what is here needs no network"


def test_nothing_downloads_but_fetch_import_and_copies():
    """`data/hub.py` and `timm_weights.py` are told whether they may; `ui.py` asks the page that it has begun."""
    calls = r"network=True|hub\.download\(|hf_hub_download\(|snapshot_download\(|urllib\.request\.|\bload_dataset\("
    package = Path(download.__file__).parents[1]
    files = {file for file in package.rglob("*.py") if re.search(calls, file.read_text(encoding="utf-8"))}
    told = {"data/hub.py", "data/table.py", "checkpoint/timm_weights.py", "tracking/ui.py"}
    may = {"autoconfig/download.py", "data/import_images.py", "autoconfig/images.py"}
    assert {str(file.relative_to(package)) for file in files} == told | may


def test_only_https_may_be_named(tmp_path):
    with pytest.raises(UserError, match="use an https address"):
        list(download.download(recipe(tmp_path, DownloadOverHttp())))


class DownloadOverHttp:
    url, sha256, to = "http://models.example/t", SHA, "t"


# Archives


def zipped(files: dict[str, bytes], change=lambda info: None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o100644 << 16
            change(info)
            packed.writestr(info, content)
    return out.getvalue()


FILES = {"SET/train/a (1).nii.gz": b"1" * 3000, "SET/val/b.txt": b"2", "__MACOSX/SET/._b": b"x", "SET/.DS_Store": b"x"}


def test_an_archive_is_unpacked_once_without_its_folder_and_is_not_needed_again(web, tmp_path):
    to, pack = "deep/SET.zip", zipped
    web[URL] = (200, {}, pack(FILES))
    wanted = Download(url=URL, sha256=hashlib.sha256(pack(FILES)).hexdigest(), to=to, unpack="sets/SET")
    file = recipe(tmp_path, wanted)
    file.write_text(file.read_text().replace(f"to: {to}", f"to: {to}, unpack: sets/SET"))
    here = tmp_path / "data"
    assert list(download.download(file)) == [f"{here}/{to}: downloaded", f"{here}/sets/SET: 2 files unpacked"]
    assert left(tmp_path) == sorted([to, "sets/SET/train/a (1).nii.gz", "sets/SET/val/b.txt"])
    assert (here / "sets" / "SET" / "val" / "b.txt").read_bytes() == b"2"
    (here / to).unlink()
    assert list(download.download(file)) == [f"{here}/sets/SET: already there"] and len(web["asked"]) == 1


def bomb(info: zipfile.ZipInfo) -> None:
    info.compress_type = zipfile.ZIP_DEFLATED


HOSTILE = [
    ("a.zip", zipped({"../out.txt": b"1"}), "leads out of the folder"),
    ("a.zip", zipped({"/etc/x.txt": b"1"}), "leads out of the folder"),
    ("a.zip", zipped({"a/../../x.txt": b"1"}), "leads out of the folder"),
    ("a.zip", zipped({"a\\..\\x.txt": b"1"}), "leads out of the folder"),
    ("a.zip", zipped({"a/.bashrc": b"1"}), "hidden"),
    ("a.zip", zipped({"a/torch.py": b"1"}), "code"),
    ("a.zip", zipped({"a/Makefile": b"1"}), "code"),
    ("a.zip", zipped({"a/x.txt": b"1", "A/X.txt": b"2"}), "same name"),
    ("a.zip", zipped({"x": b"/etc"}, lambda info: setattr(info, "external_attr", 0o120777 << 16)), "a link"),
    ("a.zip", zipped({}), "holds 0 files"),
    ("a.zip", zipped({"x.txt": b"0" * 9000})[:-40], "cannot be unpacked"),
    ("a.zip", zipped({"x.txt": b"01234567"}).replace(b"01234567", b"01234568"), "CRC"),
    ("a.zip", b"no archive", "cannot be unpacked"),
    ("a.zip", zipped({"a/" * 33 + "b.txt": b"1"}), "deeper than 32 folders"),
    ("a.zip", zipped({"a" * 252 + ".txt": b"1"}), "more than 255 bytes"),
]


@pytest.mark.parametrize(
    ("name", "content", "said"), HOSTILE, ids=[f"{n}-{said}" for n, (_, _, said) in enumerate(HOSTILE)]
)
def test_an_archive_that_is_no_plain_files_leaves_nothing(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        archive.unpack(tmp_path / name, tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_streamed_zip_with_32_folders_and_a_long_name_is_unpacked(tmp_path):
    class Stream(io.BytesIO):
        def seek(self, *to):
            raise OSError

        tell = seek

    out, names = Stream(), ["a/" * 32 + "b.txt", "a" * 251 + ".txt", "empty.txt"]  # its sizes stand behind the data
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in names:
            with packed.open(name, "w", force_zip64=True) as file:
                file.write(b"" if name == "empty.txt" else b"1" * 3000)
    (tmp_path / "a.zip").write_bytes(out.getvalue())
    assert archive.unpack(tmp_path / "a.zip", tmp_path / "set") == 3
    assert [(tmp_path / "set" / name).stat().st_size for name in names] == [3000, 3000, 0]


def test_an_archive_that_the_disk_cannot_hold_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "a.zip").write_bytes(zipped({"x.bin": b"0" * (1 << 20)}, bomb))
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 19))
    with pytest.raises(UserError, match=r"it holds 0\.00105 GB, and the disk has"):
        archive.unpack(tmp_path / "a.zip", tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize(("to", "into"), [("set.zip", "../set"), ("set.zip", "~/set"), ("set.pth", "set")])
def test_what_is_unpacked_goes_below_the_data_and_is_an_archive(to, into):
    with pytest.raises(ValueError, match=r"^unpack is "):
        Download(url=URL, sha256=SHA, to=to, unpack=into)
