"""Builds the site of the documentation: one folder that a browser opens, with or without a server.

    python tools/docs_site/build.py site            # what `make docs` runs
    python tools/docs_site/build.py site --keep-source /tmp/source

The pages of docs/ are plain Markdown for a forge. Here they are copied, with the lessons where there are some, beside
pages that are made from the code (`reference`, `error_pages`) and from the files that pages link to. Zensical makes
HTML of them, strictly: a link that leads nowhere ends the build. Then every link and every asset of the HTML is checked
again (`check`).

Invariants:
- docs/ is never written; all work is done in a temporary folder, and the site appears by a rename when it is whole.
- No page loads anything from another host.
- A link of a page of docs/ is the same on a forge and on the site.
"""

from __future__ import annotations

import argparse
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pictures
import terminal
from check import find_problems
from error_pages import render_error_pages
from reference import cell, render_reference, table

from shardway.cli.main import VERBS
from shardway.runfile.schema import all_keys

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs"
LESSONS = ROOT / "src" / "shardway" / "learn" / "lessons"

NAVIGATION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Start", ("index",)),
    (
        "Tutorials",
        ("tutorials/index", "start", "own-loop", "own-loop-scripts", "own-data", "lora", "generate", "workshops"),
    ),
    ("How-to", ("howto/index", "howto/*")),
    (
        "Concepts",
        (
            *(
                "concepts",
                "plan",
                "planner-accuracy",
                "layouts",
                "communication",
                "memory",
                "defaults",
                "tune",
                "deepspeed",
            ),
            *(
                "submit",
                "sites",
                "image",
                "prefetch",
                "environment",
                "serve",
                "status",
                "top",
                "logs",
                "notify",
                "stop",
            ),
            *("resume", "nodes", "checkpoint", "data", "data-windows", "faults", "fault-tests", "hangs", "guard"),
            *("report", "advice", "telemetry", "profile", "trace", "trackers", "evaluate", "doctor", "rehearse"),
            *("bench-step", "bench-comm", "bench-device", "bench-topology", "bench-infer", "safety", "*"),
        ),
    ),
    (
        "Reference",
        (
            *("reference/index", "reference/verbs/index", "reference/keys/index", "reference/keys/*"),
            *("reference/site-profile", "reference/events", "reference/exit-codes", "reference/doors", "errors/index"),
            *("glossary", "numbers", "peers", "fault-peers", "decisions/index", "changelog"),
        ),
    ),
    ("Contribute", ("design", "extending", "contributing-docs", "project/*")),
)
"""Tab -> pages in order. `*` stands for all of a folder that are named nowhere else, so that a new page is never lost.
Pages of errors, decisions, verbs and files are not in it: their indexes list them."""

FEATURES = (
    *("navigation.tabs", "navigation.top", "navigation.footer", "navigation.indexes", "navigation.prune"),
    *("content.code.copy", "search.highlight", "search.suggest", "toc.follow"),
)


def main() -> None:
    """Read the words of the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="folder to write; an earlier site there is replaced")
    parser.add_argument("--keep-source", type=Path, help="keep the Markdown that the site is made of in this folder")
    parser.add_argument("--run", type=Path, help="a finished run to show in pictures; without it one is trained")
    parser.add_argument("--kept-pictures", action="store_true", help="take the pictures of docs/, make none")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardway-site-") as folder:
        work = Path(folder)
        write_source(work / "docs")
        if not words.kept_pictures:
            pictures.take_all(work / "docs" / "pictures", words.run)
        run_zensical(work)
        finish(work / "site")
        if words.keep_source:
            shutil.copytree(work / "docs", words.keep_source, dirs_exist_ok=True)
        if problems := find_problems(work / "site"):
            sys.exit("\n".join(["the site has faults:", *problems]))
        place(work / "site", words.site)
    pages = sum(1 for _ in words.site.rglob("*.html"))
    size = sum(path.stat().st_size for path in words.site.rglob("*") if path.is_file())
    print(f"{words.site}/index.html: {pages} pages, {size / 1e6:.1f} MB")


# --- the Markdown


def write_source(folder: Path) -> None:
    """Everything that the site is made of."""
    folder.mkdir(parents=True)
    pages: dict[str, str] = {**render_reference(), **render_error_pages()}
    linked: dict[str, Path] = {}
    for path, name in list_own_pages():
        pages[name] = rewrite_links(path.read_text(encoding="utf-8"), path, name, linked)
    pages["tutorials/index.md"] = render_tutorials(pages)
    pages["decisions/index.md"] = render_decisions(pages)
    pages["concepts.md"] = render_list("Concepts", "How each part works.", "Concepts", pages)
    pages["reference/index.md"] = render_list(
        "Reference", "Made from the code when the site is built.", "Reference", pages
    )
    while linked:  # a page of a folder names its files
        name, path = linked.popitem()
        if name not in pages:
            pages[name] = render_file(path, name, linked)
    for source, at in ((DOCS, folder), (LESSONS, folder / "tutorials")):
        for path in source.rglob("*"):
            if path.is_file() and ((source == DOCS and path.suffix != ".md") or path.suffix in _PICTURES):
                target = at / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    for name, text in pages.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(link_names(text, name, pages), encoding="utf-8")
    index = folder / "index.md"
    index.write_text(terminal.lay_player(index.read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copytree(HERE / "theme", folder / "theme")
    terminal.write_script(DOCS / "session.json", folder / "theme" / "session.js")


def list_own_pages() -> Iterator[tuple[Path, str]]:
    """Pages that are files of the repository -> where they stand on the site."""
    for path in sorted(DOCS.rglob("*.md")):
        yield path, path.relative_to(DOCS).as_posix()
    for path in sorted(ROOT.glob("*.md")):
        if path.name == "CHANGELOG.md":
            yield path, "changelog.md"
        elif path.name != "README.md":
            yield path, f"project/{path.stem.lower()}.md"
    if LESSONS.is_dir():
        for path in sorted(LESSONS.rglob("*.md")):
            yield path, f"tutorials/{path.relative_to(LESSONS).as_posix()}"


_PICTURES = (".svg", ".png", ".webp", ".jpg")
_FENCE = re.compile(r"^ {0,12}(```+|~~~+)")
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s]+)(?=\))")


def map_prose(text: str, change: Callable[[str], str]) -> str:
    """A text with each line outside of fenced blocks changed."""
    lines, fence = [], ""
    for line in text.split("\n"):
        if found := _FENCE.match(line):
            mark = found[1]
            fence = mark if not fence else "" if mark.startswith(fence) else fence
            lines.append(line)
        else:
            lines.append(line if fence else change(line))
    return "\n".join(lines)


def rewrite_links(text: str, path: Path, name: str, linked: dict[str, Path]) -> str:
    """The text with links as they lead on the site. Files and folders outside of the pages get a page of their own."""
    own = {each.resolve(): at for each, at in list_own_pages()}

    def lead(match: re.Match[str]) -> str:
        target, hash_, anchor = match[1].partition("#")
        found = (path.parent / target).resolve()
        if found in own:
            at = own[found]
        elif found == ROOT / "README.md":
            at = "index.md"
        elif found == DOCS / "decisions":
            at = "decisions/index.md"
        elif found.is_relative_to(DOCS) and found.is_file():
            at = found.relative_to(DOCS).as_posix()
        elif found.is_relative_to(LESSONS) and found.suffix in _PICTURES and found.is_file():
            at = f"tutorials/{found.relative_to(LESSONS).as_posix()}"
        elif found.is_relative_to(ROOT) and found.exists():
            at = name_of_file(found)
            linked[at] = found
        else:
            raise SystemExit(f"{path}: the link {match[1]} leads nowhere")
        return posixpath.relpath(at, posixpath.dirname(name) or ".") + hash_ + anchor

    return map_prose(text, lambda line: _LINK.sub(lead, line))


def name_of_file(path: Path) -> str:
    """Where the page of a file or folder of the repository stands."""
    at = path.relative_to(ROOT).as_posix()
    return f"files/{at}/index.md" if path.is_dir() else f"files/{at}.md"


_LANGUAGES = {".toml": "toml", ".py": "python", ".sh": "sh", ".json": "json", ".cff": "yaml", ".yml": "yaml"}


def render_file(path: Path, name: str, linked: dict[str, Path]) -> str:
    """A page with a file of the repository, or with the list of a folder's."""
    at = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        tracked = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", at],
            cwd=ROOT, capture_output=True, text=True, check=False,
        ).stdout.split("\n")  # fmt: skip
        rows = []
        for each in sorted(filter(None, tracked)):
            file = ROOT / each
            if file.is_file() and file.suffix in (*_LANGUAGES, ".md", ".txt") and file.stat().st_size < 200_000:
                page = name_of_file(file)
                linked[page] = file
                rows.append([f"[`{each}`]({posixpath.relpath(page, posixpath.dirname(name))})"])
        return f"# {at}/\n\nFiles of the repository.\n\n" + (table(["file"], rows) if rows else "")
    text = path.read_text(encoding="utf-8", errors="replace")
    fence = "`" * (max([3, *(len(each) + 1 for each in re.findall(r"`{3,}", text))]))
    return f"# {at}\n\n{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


_SPAN = re.compile(r"(?<![\[`])`([^`]+)`(?![`\]])")


def link_names(text: str, name: str, pages: dict[str, str]) -> str:
    """The first mention of each key and verb of a page, as a code span, becomes a link to its reference."""
    if name.startswith(("reference/", "decisions/", "files/", "changelog")):
        return text
    keys, seen = set(all_keys()), set()

    def lead(match: re.Match[str]) -> str:
        words = match[1].split()
        key = re.split(r"[ =]", match[1])[0]
        if key in keys:
            at, anchor = f"reference/keys/{key.partition('.')[0]}.md", f"#{key}"
        elif len(words) > 1 and words[0] == "shardway" and words[1] in VERBS:
            key, at, anchor = words[1], f"reference/verbs/{words[1]}.md", ""
        else:
            return match[0]
        if key in seen or at not in pages:
            return match[0]
        seen.add(key)
        return f"[`{match[1]}`]({posixpath.relpath(at, posixpath.dirname(name) or '.')}{anchor})"

    def change(line: str) -> str:
        if line.startswith(("#", "<")) or re.search(r"\[[^\]]*`[^\]]*\]\(", line):
            return line
        return _SPAN.sub(lead, line)

    return map_prose(text, change)


# --- pages that list others


def title_of(text: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else "?"


def summary_of(text: str) -> str:
    """The first paragraph of a page, to its first full stop, without links."""
    body = re.sub(r"<!--.*?-->", "", text.partition("\n")[2], flags=re.DOTALL)
    paragraph = next((each for each in body.split("\n\n") if re.match(r"\s*[A-Za-z`]", each)), "")
    flat = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:]) ", flat)[0].rstrip(":")


def render_tutorials(pages: dict[str, str]) -> str:
    """The lessons, if there are some, and the longer walks."""
    lessons = sorted(name for name in pages if name.startswith("tutorials/"))
    parts = ["# Tutorials\n\nPages to follow from top to bottom, with a terminal beside them.\n"]
    if lessons:
        rows = [[f"[{title_of(pages[name])}]({posixpath.relpath(name, 'tutorials')})", cell(summary_of(pages[name]))]
                for name in lessons]  # fmt: skip
        parts.append("\n## Lessons\n\n`shardway learn` prints them, and `shardway learn check N` looks at what you "
                     f"did.\n\n{table(['lesson', 'about'], rows)}")  # fmt: skip
    walks = ("start", "own-loop", "own-loop-scripts", "own-data", "lora", "generate", "workshops")
    rows = [
        [f"[{title_of(pages[f'{name}.md'])}](../{name}.md)", cell(summary_of(pages[f"{name}.md"]))] for name in walks
    ]
    return "".join([*parts, f"\n## Walks\n\n{table(['page', 'about'], rows)}"])


def render_decisions(pages: dict[str, str]) -> str:
    """The list of the decisions, the newest first."""
    names = sorted((name for name in pages if re.match(r"decisions/\d{4}", name)), reverse=True)
    rows = [[f"[{cell(title_of(pages[name]))}]({posixpath.basename(name)})"] for name in names]
    return f"# Decisions\n\nWhy things are as they are, one page each, the newest first.\n\n{table(['decision'], rows)}"


def render_list(title: str, about: str, tab: str, pages: dict[str, str]) -> str:
    """The pages of a tab with what each is about."""
    named = [name for name in expand(tab, pages) if name not in ("concepts.md", "reference/index.md")]
    rows = [[f"[{cell(title_of(pages[name]))}]({_from(title, name)})", cell(summary_of(pages[name]))] for name in named]
    return f"# {title}\n\n{about}\n\n{table(['page', 'about'], rows)}"


def _from(title: str, name: str) -> str:
    return posixpath.relpath(name, "reference" if title == "Reference" else ".")


def expand(tab: str, names: dict[str, str]) -> list[str]:
    """The pages of a tab in order."""
    fixed = {f"{each}.md" for _, listed in NAVIGATION for each in listed if "*" not in each}
    found = []
    for each in dict(NAVIGATION)[tab]:
        if not each.endswith("*"):
            found += [f"{each}.md"] * (f"{each}.md" in names)
            continue
        folder = posixpath.dirname(each)
        found += sorted(name for name in names if posixpath.dirname(name) == folder and name not in fixed)
    return found


# --- the HTML


def run_zensical(work: Path) -> None:
    """HTML of the Markdown in docs/, into site/. Ends the program with what Zensical printed where it found a fault."""
    names = {path.relative_to(work / "docs").as_posix(): "" for path in (work / "docs").rglob("*.md")}
    lessons = [name for name in sorted(names) if name.startswith("tutorials/") and name != "tutorials/index.md"]
    navigation = []
    for tab, _ in NAVIGATION:
        listed = expand(tab, names)
        listed = listed[:1] + lessons + listed[1:] if tab == "Tutorials" else listed
        navigation.append({tab: listed[0] if len(listed) == 1 else listed})
    config = (HERE / "site.yml").read_text(encoding="utf-8")
    config = config.replace("theme:\n", f"theme:\n  features: {json.dumps(FEATURES)}\n", 1)  # JSON is YAML
    config += f"docs_dir: docs\nsite_dir: site\nnav: {json.dumps(navigation)}\n"
    (work / "mkdocs.yml").write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    done = subprocess.run(
        command, cwd=work, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}, check=False
    )
    output = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    if done.returncode or "Warning" in output:
        sys.exit(f"Zensical found faults:\n{output}")


WORKER_SHIM = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"[^>]*></script>')


def finish(site: Path) -> None:
    """Make the pages whole without a network: the search of an opened folder works by a script of ours in place of one
    of another host, and tables that scroll can be reached by the keyboard."""
    for path in site.rglob("*.html"):
        up = posixpath.relpath("theme/file-worker.js", posixpath.dirname(path.relative_to(site).as_posix()) or ".")
        text = path.read_text(encoding="utf-8")
        path.write_text(WORKER_SHIM.sub(f'<script src="{up}"></script>', text), encoding="utf-8")
    for name in ("sitemap.xml", "404.html"):  # for a site of a fixed address
        (site / name).unlink(missing_ok=True)
    if not json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]:
        sys.exit("the search index is empty")


def place(built: Path, site: Path) -> None:
    """Put the built folder where it is asked for. Ends the program where something else stands there."""
    if site.exists() and not (site / "search.js").is_file() and any(site.iterdir()):
        sys.exit(f"{site} is no site that was built before; remove it, or name another folder")
    site.parent.mkdir(parents=True, exist_ok=True)
    beside = site.with_name(f".{site.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.move(built, beside)
    if site.exists():
        shutil.rmtree(site)
    beside.rename(site)


if __name__ == "__main__":
    main()
