"""A headless Chromium, spoken to over a pipe in its DevTools protocol: what a page looks like to a reader."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FOLDERS = f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in _NAMES if (found := shutil.which(name, path=_FOLDERS))), "")
NO_BROWSER = "there is no Chromium here (Debian: apt-get install chromium)"
_WITHIN_S = 60.0


@dataclass
class Browser:
    """One page of a browser. `problems`: errors of scripts, of the policy and of the network."""

    to_browser: int
    from_browser: int
    session: str = ""
    problems: list[str] = field(default_factory=list)
    _rest: bytes = b""
    _number: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _WITHIN_S
        while time.monotonic() < end:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
        raise TimeoutError(method)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self.from_browser, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(message["params"]["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] == "error":
            self.problems.append(json.dumps(message["params"]["args"])[:500])
        return message

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; an error in it is a problem."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            self.problems.append(json.dumps(found["exceptionDetails"])[:500])
        return found["result"].get("value")

    def show(self, page: Path, width: int, scheme: str) -> None:
        """Open a page in a window of this width, for a reader of light or dark pages."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        end = time.monotonic() + _WITHIN_S
        loaded = "document.readyState === 'complete' && location.href !== 'about:blank'"
        while not self.evaluate(loaded):
            assert time.monotonic() < end
            time.sleep(0.02)

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def point_at(self, selector: str, x: float, y: float) -> str:
        """Point at a part of an element (from 0 to 1 across and down); the words of the tooltip."""
        box = self.evaluate(
            f"(() => {{ const at = document.querySelector({json.dumps(selector)});"
            " at.scrollIntoView({block: 'center'}); const box = at.getBoundingClientRect();"
            " return [box.x, box.y, box.width, box.height]; })()"
        )
        time.sleep(0.1)  # the event of that scrolling
        place = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        return str(self.evaluate("document.querySelector('body > .tip').innerText"))

    def print_pdf(self) -> bytes:
        """The page on paper."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with one empty page."""
    to_read, to_write = os.pipe()
    answers_read, answers_write = os.pipe()
    options = (
        "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
    )
    command = f'exec "$0" {options} about:blank 3<&{to_read} 4>&{answers_write}'
    process = subprocess.Popen(
        ["bash", "-c", command, BROWSER],
        pass_fds=(to_read, answers_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(answers_write)
    page = Browser(to_write, answers_read)
    try:
        target = page.call("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        yield page
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_write)
        os.close(answers_read)


def check_page(page: Browser, path: Path) -> None:
    """No error of a script, nothing wider than the window at three widths in both themes, and a sheet with content."""
    page.problems.clear()
    backgrounds = set()
    for scheme in ("light", "dark"):
        for width in (390, 800, 1280):
            page.show(path, width, scheme)
            page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            assert (width, page.overflow()) == (width, 0)
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    paper = page.print_pdf()
    assert paper.startswith(b"%PDF-")
    assert len(paper) > 12_000  # text and drawings, not a blank sheet
    assert page.problems == []
