"""Checks a built site: links, anchors and assets of every page, and that none comes from another host.

Invariant: what is checked is the HTML as a browser reads it, without a server.
"""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

_ASSETS = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src"}


class _Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.headings: list[int] = []
        self.untitled: int = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in _ASSETS and values.get(_ASSETS[tag]) and values.get("rel") not in ("prev", "next", "canonical"):
            self.assets.append(values[_ASSETS[tag]])
        if tag == "img" and "alt" not in values:
            self.untitled += 1
        if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit():
            self.headings.append(int(tag[1]))


def find_problems(site: Path) -> list[str]:
    """Each fault as a line: "page.html: the link x leads nowhere"."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for address in page.assets:
            if urlsplit(address).scheme or address.startswith("//"):
                problems.append(f"{name}: {address} is loaded from another host")
            elif not _target(path, address).is_file():
                problems.append(f"{name}: there is no {address}")
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = _target(path, address)
            if not target.is_file():
                problems.append(f"{name}: the link {address} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                problems.append(f"{name}: {address} names no heading of that page")
        problems += [f"{name}: a picture has no text in its place"] * bool(page.untitled)
        if any(after > before + 1 for before, after in pairwise(page.headings)):
            problems.append(f"{name}: headings leave a level out")
    return problems


def _target(page: Path, address: str) -> Path:
    """The file that an address of a page leads to."""
    path = unquote(urlsplit(address).path)
    if not path:
        return page
    found = (page.parent / path).resolve()
    return found / "index.html" if found.is_dir() else found
