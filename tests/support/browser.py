"""A real browser for tests: Chromium through chromedriver, by the WebDriver protocol over plain HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "no Chromium here: apt-get install chromium chromium-driver"
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
]  # fmt: skip


class Browser:
    """One window. `script` runs JavaScript in the page; everything else a test needs is built on it."""

    def __init__(self) -> None:
        self.profile = tempfile.mkdtemp(prefix="thinwire-chromium-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.driver = subprocess.Popen(
            [str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.base = f"http://127.0.0.1:{port}"
        self.session = ""
        try:
            self._wait()
            capabilities = {
                "browserName": "chrome",
                "goog:chromeOptions": {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={self.profile}"]},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
            self.session = f"/session/{made['sessionId']}"
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        for _ in range(200):
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise RuntimeError("chromedriver did not start within 10 s")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        # Never through a proxy: the driver is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()[:600]}") from error

    def post(self, path: str, body: Any = None) -> Any:
        return self._call("POST", self.session + path, {} if body is None else body)

    def open(self, page: Path) -> None:
        self.post("/url", {"url": page.resolve().as_uri()})

    def script(self, text: str, *arguments: Any) -> Any:
        """Run the body of a function; it sees `arguments` and returns JSON."""
        return self.post("/execute/sync", {"script": text, "args": list(arguments)})

    def settle(self) -> None:
        """Until the page has drawn twice: what was scrolled or resized before is then where it stays."""
        twice = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(null)))"
        self.post("/execute/async", {"script": twice, "args": []})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def window(self, width: int, height: int = 900) -> None:
        """The size of the page itself: headless windows cannot be as narrow as a phone."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def scheme(self, name: str) -> None:
        """What the system prefers: "light" or "dark"."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def move(self, x: float, y: float, *, kind: str = "mouse") -> None:
        """Put the mouse, or a finger, on a point of the window."""
        at = {"duration": 0, "x": round(x), "y": round(y)}
        moves = [{"type": "pointerMove", **at}]
        if kind == "touch":
            moves += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        pointer = {"type": "pointer", "id": kind, "parameters": {"pointerType": kind}, "actions": moves}
        self.post("/actions", {"actions": [pointer]})

    def press(self, *keys: str) -> None:
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def log(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self.post("/se/log", {"type": "browser"})]

    def picture(self, place: Path) -> None:
        """The whole page, as a PNG file."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        place.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        try:
            if self.session:
                self._call("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait(10)
            shutil.rmtree(self.profile, ignore_errors=True)
