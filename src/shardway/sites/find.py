"""Where site profiles are: shipped with Shardway, in the user's own folder, in another package (entry points of the
group `shardway.sites`), or at a path; and how one is saved there.

Invariants:
- A name means one file. A user's file with the name of a shipped profile is found first, and marked by `shadows`.
- An existing file is never overwritten, and a new one appears complete.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardway.errors import UserError
from shardway.places import expand_place, find_own_folder
from shardway.plugins import GROUPS, is_registered, list_installed, load_plugin
from shardway.rundir.file_io import write_new

Origin = Literal["shipped", "yours", "installed", "file"]

_SUFFIX = ".toml"


class UnknownSite(UserError):
    """No profile has this name."""


@dataclass(frozen=True)
class ProfileFile:
    """One profile: its name (a path for `origin` "file") and where it comes from.

    `path` is None for a shipped one and one of another package. `shadows`: a shipped profile has the same name.
    """

    name: str
    origin: Origin
    path: Path | None = None
    shadows: bool = False

    @property
    def title(self) -> str:
        """What to call it in messages."""
        return f"site profile {self.path if self.origin == 'yours' else self.name}"

    def read_text(self) -> str:
        """Its text. Raises UserError where the file cannot be read."""
        if self.path is None:
            return str(load_plugin("sites", self.name))
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError for a name that no file can have
            not_text = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            reason = error.strerror if isinstance(error, OSError) else not_text
            raise UserError(
                f"cannot read the {self.title}: {reason}\n"
                f"  allowed: a readable TOML file, or one of {', '.join(list_sites())}\n"
                "  to do: correct the path"
            ) from error


def own_folder() -> Path | None:
    """$XDG_CONFIG_HOME/shardway/sites, or that below ~/.config; None for an account without a home."""
    folder = find_own_folder("CONFIG")
    return folder / "sites" if folder else None


def describe_own_folder() -> str:
    """The folder in words, with the reason where nothing in it can be read."""
    folder = own_folder()
    if folder is None:
        return "none, since this account has no home folder"
    return f"{folder}{_list_own_files()[1]}"


def list_shipped() -> tuple[str, ...]:
    """Names of the profiles that come with Shardway, sorted."""
    return tuple(sorted(GROUPS["sites"].own))


def list_profiles() -> tuple[ProfileFile, ...]:
    """What every name means, sorted by name: profiles of the user's own folder, and shipped ones and those of other
    packages that none shadows."""
    found = {**{name: ProfileFile(name, "installed") for name in list_installed("sites")}, **_list_ours()}
    return tuple(found[name] for name in sorted(found))


def _list_ours() -> dict[str, ProfileFile]:
    shipped = {name: ProfileFile(name, "shipped") for name in list_shipped()}
    return {**shipped, **{path.stem: _own(path, shipped) for path in _list_own_files()[0]}}


def list_sites() -> tuple[str, ...]:
    """Names of all profiles, shipped and the user's own, sorted."""
    return tuple(profile.name for profile in list_profiles())


def find_profile(name_or_path: str, beside: Path | None = None) -> ProfileFile:
    """The profile of that name, or at that path (with a "/" or ending in .toml), which is relative to `beside`.

    Raises UnknownSite for a name that no profile has.
    """
    if "/" in name_or_path or name_or_path.endswith(_SUFFIX):
        path = expand_place(name_or_path)
        return ProfileFile(name_or_path, "file", beside / path if beside else path)
    if found := _list_ours().get(name_or_path):
        return found
    if is_registered("sites", name_or_path):
        return ProfileFile(name_or_path, "installed")
    raise UnknownSite(_render_unknown_site(name_or_path))


def find_parent(name_or_path: str, child: ProfileFile) -> ProfileFile:
    """The profile that `child` extends; its own name means the shipped one. Raises UserError."""
    if child.origin == "yours" and child.shadows and name_or_path == child.name:
        return ProfileFile(child.name, "shipped")
    return find_profile(name_or_path, child.path.parent if child.path else None)


def find_nearest(word: str, words: Iterable[str]) -> str | None:
    """The word that was probably meant, or None where none is similar."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1)), None)


def _list_own_files() -> tuple[list[Path], str]:
    """The profiles in the user's own folder; in words, why there are none where it may not be looked at.

    It may be another account's (`sudo` keeps HOME), and shipped profiles do not need it.
    """
    folder = own_folder()
    if folder is None:
        return [], ""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return [], ""
    except OSError as error:
        return [], f", which cannot be read ({error.strerror})"
    return [folder / name for name in names if name.endswith(_SUFFIX) and not name.startswith(".")], ""


def _own(path: Path, shipped: Iterable[str]) -> ProfileFile:
    return ProfileFile(path.stem, "yours", path, shadows=path.stem in shipped)


def _render_unknown_site(name: str) -> str:
    nearest = find_nearest(name, list_sites())
    hint = f'write "{nearest}"' if nearest else "choose one of these"
    unread = _list_own_files()[1]
    own = f"\n  your own profiles stand in {own_folder()}{unread}" if unread else ""
    return (
        f'there is no site "{name}"\n'
        f"  allowed: {', '.join(list_sites())}, or the path of a profile (with a / or ending in .toml){own}\n"
        f"  to do: {hint}, or write a profile for your site: `shardway sites probe`"
    )


# --- save a profile in the user's own folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def keep_profile(name: str, text: str) -> Path:
    """Write a profile as NAME.toml and return its path.

    Raises UserError for a name that is no file's or that of a shipped profile, for a file that is there, and where the
    folder cannot be written.
    """
    path = find_place(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = write_new(path, text)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"cannot write {path}: {reason}\n  to do: write the profile elsewhere: without --write"
        ) from error
    if not is_new:
        raise _refuse(path)
    return path


def find_place(name: str) -> Path:
    """Where a new profile of that name belongs. Raises UserError as `keep_profile` does, before any work is done."""
    if not _NAME.fullmatch(name) or name.endswith(".toml"):
        raise UserError(
            f'"{name}" is no name of a site\n'
            "  allowed: letters, digits, - _ and ., without .toml\n"
            "  to do: choose another"
        )
    if name in list_shipped():
        raise UserError(
            f'"{name}" is the name of a shipped profile\n'
            f'  to do: choose another name, or write a profile by hand that says extends = "{name}"'
        )
    folder = own_folder()
    if folder is None:
        raise UserError(
            "this account has no home folder for profiles\n  to do: set XDG_CONFIG_HOME, or leave out --write"
        )
    path = folder / f"{name}.toml"
    if os.path.lexists(path):
        raise _refuse(path)
    return path


def _refuse(path: Path) -> UserError:
    return UserError(
        f"{path} is there and is not written over\n  to do: choose another name, or move the file away first"
    )
