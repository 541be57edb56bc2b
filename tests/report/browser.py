"""Chromium without a window, driven through its debugging pipe (--remote-debugging-pipe): no port, no network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
    "--disable-background-networking --remote-debugging-pipe about:blank"
)
PATIENCE_SECONDS = 60.0


def find() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page at a time. What it complains of (errors, blocked requests) is kept in `complaints`."""

    def __init__(self, path: str, profile: Path) -> None:
        # Chromium reads commands from its descriptor 3 and writes answers to 4, each ended by a zero byte.
        down, self._down = os.pipe()
        self._up, up = os.pipe()
        script = f'exec "$0" --user-data-dir="$1" {FLAGS} 3<&{down} 4>&{up}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, path, str(profile)], pass_fds=(down, up), stderr=subprocess.DEVNULL
        )
        os.close(down)
        os.close(up)
        self._count, self._rest, self._session = 0, b"", ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._down, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self._event(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def open(self, page: Path, width: int = 1280, *, dark: bool = False) -> None:
        self.complaints, self.requests = [], []
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + PATIENCE_SECONDS
        while self.ask("document.readyState") != "complete" or self.ask("location.protocol") != "file:":
            assert time.monotonic() < end, "the page does not load"

    def ask(self, script: str) -> Any:
        """What `script` comes to, in the page; its error is a complaint, too."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def shoot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        got = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(got["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._down)
        os.close(self._up)

    def _event(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(parameters["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(str(parameters["request"]["url"])[:200])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._up], [], [], PATIENCE_SECONDS)
            assert ready, "chromium does not answer"
            data = os.read(self._up, 1 << 20)
            assert data, "chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))
