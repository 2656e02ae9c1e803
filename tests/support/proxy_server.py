"""A server in front of another one: it can hold who asks, hang up, want a password, or say things of its own."""

from __future__ import annotations

import base64
import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

_OWN_HEADERS = ("host", "connection", "content-length", "transfer-encoding")


class ProxyServer(ThreadingHTTPServer):
    """Passes every request on to a port of this machine, or answers it with one of `says`."""

    daemon_threads = True

    def __init__(self, behind: int | None = None):
        super().__init__(("127.0.0.1", 0), _Request)
        self.behind = behind
        self.says: dict[str, tuple[int, str]] = {}
        """Status and text by path, where there is nothing behind."""
        self.otherwise = (404, "<h1>Not Found</h1>")
        self.holds = Event()
        """While it is set, who asks waits for an answer."""
        self.down = False
        self.password = ""
        """`name:password`, if one is wanted."""
        self.held = Event()
        self.wrong: Callable[[str], str] = lambda path: ""
        """What is done to whom asks for a path: `drop` (what was asked for is done, the answer lost), `half` of an
        answer, `garbage`, a status such as `500`, or a number of `seconds` of waiting as `2 s`."""

    def wait_for_somebody(self) -> None:
        """Until somebody who has asked is held."""
        assert self.held.wait(60), "nobody has asked"

    def handle_error(self, *_) -> None:
        """A client that has given up is no matter."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ProxyServer

    def _pass(self) -> None:
        door = self.server
        chunked = self.headers.get("Transfer-Encoding", "") == "chunked"
        body = b"".join(self._chunks()) if chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        while door.holds.is_set():
            door.held.set()
            time.sleep(0.02)
        if door.down:
            self.close_connection = True
            return
        wanted = "Basic " + base64.b64encode(door.password.encode()).decode()
        if door.password and self.headers.get("Authorization") != wanted:
            self._answer(401, b"You are not authenticated.", {"WWW-Authenticate": 'Basic realm="mlflow"'})
        elif door.behind is None:
            status, text = door.says.get(self.path.partition("?")[0], door.otherwise)
            self._answer(status, text.encode(), {})
        elif (wrong := door.wrong(self.path)).isdigit():
            self._answer(int(wrong), b"something is wrong", {})
        else:
            if wrong.endswith(" s"):
                time.sleep(float(wrong.removesuffix(" s")))
            inner = http.client.HTTPConnection("127.0.0.1", door.behind, timeout=60)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS}
            inner.request(self.command, self.path, body or None, kept)
            reply = inner.getresponse()
            said = {name: value for name, value in reply.getheaders() if name.lower() not in _OWN_HEADERS}
            body = reply.read()
            inner.close()
            if wrong == "drop":
                self.close_connection = True
            elif wrong == "half":
                self._answer(reply.status, body, said, len(body) // 2)
                self.close_connection = True
            else:
                self._answer(reply.status, b'{"run": {"inf' if wrong == "garbage" else body, said)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _answer(self, status: int, body: bytes, headers: dict[str, str], most: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:most])

    def log_message(self, *_) -> None:
        pass


@contextmanager
def proxy(behind: int | None = None) -> Iterator[ProxyServer]:
    """One that answers until the block ends."""
    with ProxyServer(behind) as door:
        Thread(target=door.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield door
        finally:
            door.holds.clear()
            door.shutdown()
