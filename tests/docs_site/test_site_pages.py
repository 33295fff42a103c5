"""The site is built once, and looked at: as files, and as a browser shows it, opened without a server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import axe_core_python
import pytest

import warm
from chromium import BROWSER, NO_BROWSER, Browser, browser
from golden_files import FOLDER
from shardway.cli.main import VERBS
from shardway.plugins import GROUPS
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import all_keys
from shardway.watch.report import render_report

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "docs_site" / "build.py"
needs_browser = pytest.mark.skipif(not BROWSER, reason=NO_BROWSER)

KINDS = {
    "start": "index.html",
    "how-to": "howto/idle-gpu.html",
    "keys": "reference/keys/track.html",
    "verb": "reference/verbs/status.html",
    "error": "errors/message-heads.html",
    "list of errors": "errors/index.html",
    "tutorials": "tutorials/index.html",
    "long tables": "numbers.html",
}
"""A page of each kind."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, for pictures and a report."""
    folder = tmp_path_factory.mktemp("run")
    words = ["train", "--dir", str(folder / "my"), "train.steps=6", "model.dim=16", "train.validation_samples=16"]
    with warm.starts():
        done = subprocess.run([sys.executable, "-m", "shardway", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "my"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """The built site. The build itself ends with an error at a warning, a dead link, or what comes from elsewhere."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, str(TOOL), str(folder), "--run", str(run)]
    with warm.starts():
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    """As a reader has it who never chose a theme."""
    with browser() as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")
        yield opened


def load(page: Browser, path: Path, width: int, scheme: str) -> None:
    """Show a page of the site."""
    page.show(path, width, scheme)
    wait_for(page, "document.readyState === 'complete'")


def wait_for(page: Browser, condition: str, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"{condition}: {page.problems}"
        time.sleep(0.05)


# --- as files


def test_every_key_verb_and_door_has_its_place(site: Path) -> None:
    for section in {key.partition(".")[0] for key in all_keys()}:
        text = (site / "reference" / "keys" / f"{section}.html").read_text(encoding="utf-8")
        assert [key for key in all_keys() if key.startswith(f"{section}.") and f'id="{key}"' not in text] == []
    assert {path.stem for path in (site / "reference" / "verbs").glob("*.html")} == {*VERBS, "index"}
    doors = (site / "reference" / "doors.html").read_text(encoding="utf-8")
    assert [group for group in GROUPS if f"shardway.{group}" not in doors] == []


def test_every_message_is_found_by_its_words(site: Path) -> None:
    index = (site / "search.js").read_text(encoding="utf-8").partition("=")[2].strip().rstrip(";")
    texts: dict[str, str] = {}
    for item in json.loads(index)["items"]:
        name = item["location"].partition("#")[0]
        texts[name] = f"{texts.get(name, '')} {item['title']} {item['text']}"
    lost = []
    for path in (FOLDER / "errors").glob("*.txt"):
        found = texts.get(f"errors/message-{path.stem}.html", "")
        words = path.read_text(encoding="utf-8").split("shardway: ", 1)[1].split()
        if not all(word.strip("\"'<>&`") in found for word in words[:6] if word.isalpha()):
            lost.append(path.name)
    assert lost == []


def test_docs_are_not_touched_and_a_folder_of_others_is_not_replaced(site: Path, tmp_path: Path) -> None:
    assert not (ROOT / "docs" / "reference").exists()
    assert not (ROOT / "docs" / "errors").exists()
    assert (site / "pictures" / "report.png").stat().st_size > 5000
    assert not list(site.glob(".*"))


# --- as a browser shows them


@needs_browser
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_sound_on_a_phone_and_a_desk(site: Path, page: Browser, kind: str) -> None:
    page.problems.clear()
    for width in (390, 1280):
        load(page, site / KINDS[kind], width, "light")
        assert (width, max(0, page.overflow())) == (width, 0)
    assert page.problems == []


@needs_browser
def test_axe_finds_nothing_serious(site: Path, page: Browser, run: Path) -> None:
    axe = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    report = run.parent / "report.html"
    report.write_text(render_report(RunDir(run)), encoding="utf-8")
    lessons = [path for path in sorted((site / "tutorials").glob("*.html")) if path.stem != "index"]
    light = [*(site / KINDS[kind] for kind in ("start", "how-to", "keys", "error")), *lessons[:1], report]
    dark = [site / KINDS[kind] for kind in ("how-to", "error")]
    found = {}
    for path, scheme in [*((each, "light") for each in light), *((each, "dark") for each in dark)]:
        load(page, path, 1280, scheme)
        page.evaluate(f"{axe}; 0")
        serious = page.evaluate(
            "axe.run({resultTypes: ['violations']}).then((all) => all.violations"
            ".filter((each) => ['serious', 'critical'].includes(each.impact))"
            ".map((each) => each.id + ': ' + each.nodes[0].html.slice(0, 200)))"
        )
        if serious:
            found[f"{path.name} {scheme}"] = serious
    assert found == {}


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The address of the site behind a server."""
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder and prints nothing."""

    def log_message(self, *words: object) -> None:
        pass


@needs_browser
@pytest.mark.parametrize("way", ["an opened folder", "a server"])
def test_the_search_works(site: Path, served: str, page: Browser, way: str) -> None:
    page.problems.clear()
    if way == "a server":
        page.call("Page.navigate", url=f"{served}/howto/index.html")
        wait_for(page, "location.protocol === 'http:' && document.readyState === 'complete'")
    else:
        load(page, site / "howto" / "index.html", 1280, "light")
    page.evaluate("document.querySelector('.md-search__button').click()")
    wait_for(page, "!!(document.activeElement && document.activeElement.shadowRoot)")
    page.call("Input.insertText", text="walltime over limit")
    wait_for(page, "!!document.activeElement.shadowRoot.querySelector('a[href*=slurm-walltime_over_limit]')")
    assert page.problems == []


@needs_browser
def test_the_recording_plays_pauses_and_heeds_a_wish_for_less_motion(site: Path, page: Browser) -> None:
    session = json.loads((ROOT / "docs" / "session.json").read_text(encoding="utf-8"))
    last = "".join(run[0] for run in session["frames"][-1][1].popitem()[1]).strip()
    load(page, site / "index.html", 1280, "light")
    words = "document.querySelector('.terminal__button').textContent"
    assert page.evaluate(words) == "Pause"
    page.evaluate("document.querySelector('.terminal__button').click()")
    assert page.evaluate(words) == "Play"
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    page.call("Page.reload")
    wait_for(page, f"document.querySelector('.terminal__button') && {words} === 'Play again'")
    assert last in page.evaluate("document.querySelector('.terminal__screen').textContent")
    assert "shardway status runs/my" in page.evaluate("document.querySelector('.terminal__screen').textContent")
