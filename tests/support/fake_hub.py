"""A hub on this machine: a folder for each data set, served as `huggingface_hub` and `datasets` ask for it.

Commands are run in a process of their own with `HF_ENDPOINT` set to it: the libraries read the variable once.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMIT = "1" * 40


class Hub:
    """Folders `root/owner/name`, which each have one revision, under whatever name it is asked for."""

    def __init__(self, root: Path, home: Path):
        self.root, self.home, self.sent = root, home, 0
        self.asked: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length)
        parts = [urllib.parse.unquote(part) for part in request.path.partition("?")[0].strip("/").split("/")]
        self.asked.append(f"{request.command} {request.path}")
        if parts[0] == "datasets" and "resolve" in parts:
            return self._file(request, self.root / parts[1] / parts[2], "/".join(parts[5:]))
        if parts[:2] == ["api", "datasets"] and len(parts) > 3 and (root := self.root / parts[2] / parts[3]).is_dir():
            what = parts[4] if len(parts) > 4 else "revision"
            if what == "tree":
                return self._tell(
                    request, self._listed(root, "/".join(parts[6:]), "recursive=true" in request.path.lower())
                )
            if what == "paths-info":
                asked = urllib.parse.parse_qs(body.decode()) if body[:1] != b"{" else json.loads(body)
                return self._tell(
                    request, [self._entry(root, path) for path in asked["paths"] if (root / path).exists()]
                )
            files = [{"rfilename": f.relative_to(root).as_posix()} for f in sorted(root.rglob("*")) if f.is_file()]
            return self._tell(request, {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": files, "tags": []})
        return self._tell(request, {"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _file(self, request: http.server.BaseHTTPRequestHandler, root: Path, name: str) -> None:
        if not root.is_dir() or not (root / name).is_file():
            code = "EntryNotFound" if root.is_dir() else "RepoNotFound"
            return self._tell(request, {"error": "not found"}, 404, {"X-Error-Code": code, "X-Repo-Commit": COMMIT})
        data = (root / name).read_bytes()
        first, last, status = 0, len(data) - 1, 200
        if wanted := request.headers.get("Range"):
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last, status = int(begin), min(int(end or last), last), 206
        etag = hashlib.sha1(data).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(request, data[first : last + 1], status, headers)

    def _entry(self, root: Path, path: str) -> dict[str, Any]:
        place = root / path
        if place.is_dir():
            return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
        return {
            "type": "file",
            "path": path,
            "oid": hashlib.sha1(path.encode()).hexdigest(),
            "size": place.stat().st_size,
        }

    def _listed(self, root: Path, below: str, recursive: bool) -> list[dict[str, Any]]:
        found = (root / below).rglob("*") if recursive else (root / below).glob("*")
        return [self._entry(root, place.relative_to(root).as_posix()) for place in sorted(found)]

    def _tell(self, request: Any, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(request, json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, request: Any, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.sent += len(data) * (request.command != "HEAD")
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)

    def run(self, *commands: list[str | Path], **env: str) -> list[tuple[int, str]]:
        """Run commands of `trainkit` one after another in a process that knows this hub; exit codes and output."""
        own = {**os.environ, "HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        own |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
        words = json.dumps([[str(word) for word in command] for command in commands])
        done = subprocess.run([sys.executable, "-c", _CHILD, words], env=own, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return [(code, text) for code, text in json.loads(done.stdout.splitlines()[-1])]


_CHILD = """
import json, sys
from click.testing import CliRunner
from trainkit.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words)
    why = "" if isinstance(done.exception, SystemExit) else repr(done.exception)
    found.append((done.exit_code, done.output + why))
print(json.dumps(found))
"""


@contextlib.contextmanager
def serving(root: Path, home: Path) -> Iterator[Hub]:
    """Serve the sets below `root`; `home` is where clients keep what they download."""
    hub = Hub(root, home)
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
