"""Chromium without a window, driven over its DevTools protocol: as little of it as looking at a page takes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE = 60.0


def installed() -> str | None:
    """The browser's program."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browser(width: int = 1400, height: int = 900) -> Iterator[Page]:
    """An empty page of this size, in a browser of its own that asks nothing of other machines."""
    home = Path(tempfile.mkdtemp(prefix="browser-"))
    words = [str(installed()), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    words += ["--no-first-run", "--disable-background-networking", "--disable-extensions", "--hide-scrollbars"]
    words += [
        "--force-device-scale-factor=1",
        "--no-proxy-server",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ]
    words += [f"--window-size={width},{height}", f"--user-data-dir={home}", "--remote-debugging-port=0", "about:blank"]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        page = Page(_address(home, process), width, height)
        try:
            yield page
        finally:
            page.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        shutil.rmtree(home, ignore_errors=True)


def _address(home: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the page's WebSocket is."""
    end = time.monotonic() + _PATIENCE
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the browser ended with code {process.returncode}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            port = int((home / "DevToolsActivePort").read_text().split("\n")[0])
            with straight.open(f"http://127.0.0.1:{port}/json", timeout=5) as answer:
                pages = [target for target in json.load(answer) if target["type"] == "page"]
            return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.1)
    raise RuntimeError(f"the browser did not answer within {_PATIENCE:.0f} s")


class Page:
    """What the browser shows."""

    def __init__(self, address: str, width: int, height: int):
        self._socket = _WebSocket(address)
        self._number = 0
        self.call("Page.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        # A panel with an assistant would open by itself, over a quarter of the page.
        self.remember("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1")

    def remember(self, choice: str) -> None:
        """From the next page on the browser has kept this choice of the one who looks."""
        script = f"try {{ localStorage.setItem({json.dumps(choice)}, 'true') }} catch {{}}"
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and give its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.receive())
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']['message']}")
                return said["result"]

    def evaluate(self, script: str) -> Any:
        """Value of an expression of JavaScript, as JSON holds it."""
        said = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(f"{script}: {said['exceptionDetails'].get('exception', {}).get('description')}")
        return said["result"].get("value")

    def open(self, address: str) -> None:
        """Go to an address. That the page is there is for `until` to find out."""
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self.call("Page.navigate", url=address)

    def text(self) -> str:
        """All that can be read."""
        return self.evaluate("document.body ? document.body.innerText : ''")

    def until(self, script: str, seconds: float = _PATIENCE) -> Any:
        """Wait until an expression is true, and give its value. Otherwise an AssertionError shows what can be read."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(RuntimeError):  # of a page that is just going
                if value := self.evaluate(script):
                    return value
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}\n{self.evaluate('location.href')}\n{self.text()[:3000]}")

    def until_shown(self, *texts: str, seconds: float = _PATIENCE) -> None:
        """Wait until all of these can be read."""
        for text in texts:
            self.until(f"document.body && document.body.innerText.includes({json.dumps(text)})", seconds)

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element that a CSS selector finds, once it is there."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.until(f"!!{element}")
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        x, y = self.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str) -> None:
        """Press a key such as `ArrowRight`, `Home` or `Enter`."""
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Enter": 13, "Escape": 27}[name]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def settle(self, quiet: float = 0.7, seconds: float = 20.0) -> None:
        """Wait until nothing has changed in the page for a while, such as charts that are still drawn."""
        script = (
            "[document.getElementsByTagName('*').length, (document.body || {innerText: ''}).innerText.length].join()"
        )
        end, last, since = time.monotonic() + seconds, "", time.monotonic()
        while time.monotonic() < end and time.monotonic() - since < quiet:
            now = self.evaluate(script)
            if now != last:
                last, since = now, time.monotonic()
            time.sleep(0.1)

    def screenshot(self, file: Path, clip: tuple[int, int, int, int] | None = None) -> None:
        """Write the page, or its part `clip` (left, top, width, height), as a PNG."""
        part = {"clip": {**dict(zip(("x", "y", "width", "height"), clip, strict=True)), "scale": 1}} if clip else {}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **part)["data"]))


class _WebSocket:
    """The client's side of RFC 6455, of text messages, to this machine."""

    def __init__(self, address: str):
        place, _, path = address.removeprefix("ws://").partition("/")
        host, _, port = place.partition(":")
        self._connection = socket.create_connection((host, int(port)), timeout=_PATIENCE)
        self._held = b""
        key = base64.b64encode(os.urandom(16)).decode()
        hello = f"GET /{path} HTTP/1.1\r\nHost: {place}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        hello += f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        self._connection.sendall(hello.encode())
        while b"\r\n\r\n" not in self._held:
            self._more()
        head, _, self._held = self._held.partition(b"\r\n\r\n")
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"no WebSocket: {head[:200]!r}")

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        if len(data) < 126:
            head = struct.pack("!BB", 0x81, 0x80 | len(data))
        elif len(data) < 65536:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, len(data))
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, len(data))
        masked = bytes(byte ^ mask[n % 4] for n, byte in enumerate(data))
        self._connection.sendall(head + mask + masked)

    def receive(self) -> str:
        """The next whole message; what is not text is passed over."""
        message = b""
        while True:
            first, second = self._take(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(self._take(2 if size == 126 else 8), "big")
            data, kind = self._take(size), first & 0x0F
            if kind == 8:
                raise RuntimeError("the browser has closed the page")
            if kind in (0, 1):
                message += data
                if first & 0x80:
                    return message.decode()

    def close(self) -> None:
        self._connection.close()

    def _take(self, size: int) -> bytes:
        while len(self._held) < size:
            self._more()
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _more(self) -> None:
        data = self._connection.recv(1 << 16)
        if not data:
            raise RuntimeError("the browser is gone")
        self._held += data
