"""Chromium without a window, driven over the WebDriver protocol, which needs no package of its own."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Browser:
    """One window of a running `chromedriver`."""

    def __init__(self, address: str, profile: Path) -> None:
        self.address = f"{address}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "SEVERE"}}}
        self.address += f"/{self.call('', capabilities=capabilities)['sessionId']}"

    def call(self, path: str, **body: Any) -> Any:
        """The value that a command of the protocol returns."""
        request = urllib.request.Request(self.address + path, json.dumps(body).encode())
        return json.load(DIRECT.open(request, timeout=120))["value"]

    def run(self, script: str) -> Any:
        """What a script returns in the page."""
        return self.call("/execute/sync", script=script, args=[])

    def open(self, url: str, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=size)
        self.call("/url", url=url)

    def wait_for(self, script: str, seconds: float = 60) -> Any:
        """What a script returns as soon as that is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"{script}: {self.run('return document.body.innerText')}"
            time.sleep(0.2)
        return found

    def errors(self) -> list[str]:
        """Errors in the console since the last call."""
        return [entry["message"] for entry in self.call("/se/log", type="browser")]

    def screenshot(self, file: Path) -> None:
        """The whole page as an image."""
        shot = self.call("/goog/cdp/execute", cmd="Page.captureScreenshot", params={"captureBeyondViewport": True})
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a new profile in a folder. Skips the test where none is installed."""
    if not (driver := shutil.which("chromedriver")):
        pytest.skip("a browser test needs chromium and chromedriver")
    port = free_port()
    process = subprocess.Popen([driver, f"--port={port}", "--silent"], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        window = Browser(f"http://127.0.0.1:{port}", folder / "profile")
        try:
            yield window
        finally:
            DIRECT.open(urllib.request.Request(window.address, method="DELETE"))
    finally:
        process.terminate()
        process.wait()
