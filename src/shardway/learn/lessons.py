"""The lessons as they are shipped: their text, their files, and the folder of a learner.

Invariants:
- A lesson is a Markdown page `lessons/NN-name.md`; the page is the only list of what it has learners do.
- Files are placed beside what is there; one that exists is left as it is, whatever it holds.
- Scripts are shipped as text (`.py.txt`): they are the learner's, and no module of this package.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from shardway.errors import UserError
from shardway.rundir.file_io import write_new

FOLDER = "learn"
"""The folder of a learner, with a folder for each lesson."""

_PAGE = re.compile(r"(\d\d)-([a-z0-9-]+)\.md")
_TITLE = re.compile(r"^# \d+\. (.+)$", re.MULTILINE)
_MINUTES = re.compile(r"^About (\d+) minutes", re.MULTILINE)
_AS_TEXT = ".txt"


@dataclass(frozen=True)
class Lesson:
    """One lesson: its number from 1, the name of its folder, and its page as Markdown."""

    number: int
    name: str
    text: str

    @property
    def title(self) -> str:
        found = _TITLE.search(self.text)
        return found[1] if found else self.name

    @property
    def minutes(self) -> int:
        """Minutes on two cores, as the page states them; 0 where it does not."""
        found = _MINUTES.search(self.text)
        return int(found[1]) if found else 0

    def text_for(self, folder: Path, here: Path) -> str:
        """The page for a learner in folder `here`: its `cd` leads from there into the lesson's folder."""
        return self.text.replace(f"cd {FOLDER}/{self.name}\n", f"cd {os.path.relpath(folder / self.name, here)}\n")

    def read_files(self) -> dict[str, str]:
        """The text of each file of the lesson by its name: those of all lessons, and its own."""
        shipped = _shipped() / "files"
        found = dict(_read_folder(shipped)) | dict(_read_folder(shipped / self.name))
        return dict(sorted(found.items()))


def _shipped() -> Traversable:
    return files("shardway.learn") / "lessons"


def _read_folder(folder: Traversable) -> Iterator[tuple[str, str]]:
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.is_file():
            yield each.name.removesuffix(_AS_TEXT), each.read_text(encoding="utf-8")


@cache
def list_lessons() -> tuple[Lesson, ...]:
    """All lessons in their order."""
    pages = [(found, each) for each in _shipped().iterdir() if (found := _PAGE.fullmatch(each.name))]
    lessons = [Lesson(int(found[1]), f"{found[1]}-{found[2]}", each.read_text("utf-8")) for found, each in pages]
    return tuple(sorted(lessons, key=lambda lesson: lesson.number))


def find_lesson(word: str) -> Lesson:
    """The lesson that a number or a name means (`4`, `04-ddp`, `ddp`). Raises UserError for no lesson."""
    for lesson in list_lessons():
        number, _, name = lesson.name.partition("-")
        if word in (str(lesson.number), number, name, lesson.name):
            return lesson
    known = "\n".join(f"        {lesson.number:>2}  {lesson.name.partition('-')[2]}" for lesson in list_lessons())
    raise UserError(f"there is no lesson {word!r}.\n      allowed: a number or a name of\n{known}")


def find_folder(start: Path) -> Path:
    """The learner's folder of a place: the nearest at it or above it that has a lesson, else a new one in it."""
    names = {lesson.name for lesson in list_lessons()}
    for place in (start, *start.parents):
        if place.name in names and place.parent.name == FOLDER:
            return place.parent
        if any((place / FOLDER / name).is_dir() for name in names):
            return place / FOLDER
    return start / FOLDER


@dataclass(frozen=True)
class PlacedFile:
    """A file of a lesson in the learner's folder: it is "new", the "same" as shipped, or "kept" as it was changed."""

    name: str
    state: str


def place_files(lesson: Lesson, folder: Path) -> tuple[PlacedFile, ...]:
    """Put the files of a lesson into its folder below the learner's; what exists is left as it is. Raises OSError."""
    place = folder / lesson.name
    place.mkdir(parents=True, exist_ok=True)
    placed = []
    for name, text in lesson.read_files().items():
        state = "new"
        if os.path.lexists(place / name) or not write_new(place / name, text):
            state = "same" if _holds(place / name, text) else "kept"
        placed.append(PlacedFile(name, state))
    return tuple(placed)


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:  # a folder, or a link that leads nowhere: the learner's own
        return False
