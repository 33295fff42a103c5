from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from shardway.data.content import DataPath
from shardway.data.sources import tokens
from shardway.data.sources.base import DataRequest
from shardway.data.sources.tokens import TokenWindows, list_text, open_text
from shardway.errors import JobError, UserError
from shardway.runfile.schema import DataSection


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three documents that match *.py, in another order than they were written, among others that do not."""
    root = tmp_path / "text"
    for name, content in {
        "z.py": b"last = 1\n",
        "a.py": b"first = 1\n",
        "sub/b.py": b"second = \xff\n",
        "notes.txt": b"no",
        "site-packages/c.py": b"no",
        "sub/dist-packages/c.py": b"no",
        "__pycache__/c.py": b"no",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


JOINED = b"first = 1\n\0second = \xff\n\0last = 1\n"


def read(path: Path | str, vocab: int | None = None, **keys: Any) -> TokenWindows:
    section = DataSection(kind="text", path=str(path), **{"seq_len": 4, **keys})
    return open_text(DataPath("data.path", str(path)), DataRequest(section, 0, "tokens", vocab))


def refused(path: Path | str, vocab: int | None = None, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(path, vocab, **keys)
    return str(caught.value)


def all_tokens(source: TokenWindows) -> list[int]:
    return source.file.open().tolist()


def test_a_folder_is_its_files_in_order_joined_by_zero_bytes(folder: Path, tmp_path: Path) -> None:
    source = read(folder, cache=str(tmp_path / "cache"))
    assert bytes(all_tokens(source)) == JOINED
    assert len(source) == (len(JOINED) - 1) // 4
    facts = source.facts
    assert (facts.vocab, facts.bytes_per_token, facts.sample_shape) == (256, 1.0, (4,))
    assert facts.description == f"0.0 MB of text, 3 files in {folder}"


def test_include_chooses_files(folder: Path, tmp_path: Path) -> None:
    assert bytes(all_tokens(read(folder, include="*.txt", seq_len=1))) == b"no"
    assert len(read(folder, include="*", cache=str(tmp_path)).file.open()) == len(JOINED) + len(b"\0no")


def test_one_file_is_mapped_where_it_lies(folder: Path, tmp_path: Path) -> None:
    source = read(folder / "a.py", cache=str(tmp_path / "cache"))
    assert bytes(all_tokens(source)) == b"first = 1\n"
    assert source.file.path == folder / "a.py"
    assert not (tmp_path / "cache").exists()


def test_a_folder_is_prepared_once_and_again_when_it_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "cache"
    first = read(folder, cache=str(kept))
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_read_document", lambda *_: pytest.fail("read a second time"))
        again = read(folder, cache=str(kept))
        assert again.file == first.file
        assert again.facts == first.facts
    os.utime(folder / "a.py", ns=(1, 1))
    assert read(folder, cache=str(kept)).file.path != first.file.path
    (folder / "a.py").write_bytes(b"third")
    assert bytes(all_tokens(read(folder, cache=str(kept)))).startswith(b"third\0")
    assert len(list(kept.iterdir())) == 3


def test_a_damaged_prepared_file_is_made_again(folder: Path, tmp_path: Path) -> None:
    prepared = read(folder, cache=str(tmp_path / "cache")).file.path
    prepared.write_bytes(prepared.read_bytes()[:-3])
    assert bytes(all_tokens(read(folder, cache=str(tmp_path / "cache")))) == JOINED


def test_what_a_failure_leaves_half_is_removed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens, "_read_document", stop)
    with pytest.raises(KeyboardInterrupt):
        read(folder, cache=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_a_kill_left_long_ago_is_removed(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache"
    kept.mkdir()
    old, new = kept / ".preparing-old", kept / ".preparing-new"
    for left in (old, new):
        left.touch()
    os.utime(old, (0, time.time() - tokens.STALE_S - 60))
    read(folder, cache=str(kept))
    assert not old.exists()
    assert new.exists()


def test_processes_that_prepare_at_once_agree(folder: Path, tmp_path: Path) -> None:
    (folder / "big.py").write_bytes(os.urandom(3_000_000))
    script = textwrap.dedent(f"""
        from pathlib import Path
        from shardway.data.open import open_data
        from shardway.runfile.schema import DataSection
        section = DataSection(path={str(folder)!r}, cache={str(tmp_path / "cache")!r})
        print(open_data(section, 0, "tokens").train.facts.fingerprint)
    """)
    started = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=300)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(answers) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".npy"]


def test_the_standard_library_is_found(tmp_path: Path) -> None:
    listed = list_text(DataPath("data.path", "python:stdlib"), "*.py")
    names = {file.name for file in listed.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name or "dist-packages" in name for name in names)
    assert listed.size > 1_000_000


def test_the_cache_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert tokens.cache_folder("auto") == Path("/somewhere/shardway")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tokens.cache_folder("auto") == tmp_path / ".cache/shardway"
    assert tokens.cache_folder("~/mine") == tmp_path / "mine"


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no"
    assert refused(path) == (
        f'1 problem in the data\n  data.path: "{path}" does not exist\n'
        '      allowed: a file, a folder, or "python:stdlib"'
    )


def test_a_folder_without_a_matching_file_is_refused(folder: Path, tmp_path: Path) -> None:
    assert refused(folder, include="*.md") == (
        f'1 problem in the data\n  data.path: "{folder}" has no file that matches "*.md", but a.py, b.py, '
        "notes.txt and 1 more\n"
        '      to do: set data.include to a glob on file names, such as "*.py"'
    )


def test_a_folder_of_another_kind_names_its_kind(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "to be"}\n')
    said = refused(tmp_path)
    assert f'"{tmp_path}" has no file that matches "*.py", but a.jsonl, b.jsonl\n' in said
    assert '      to do: set data.kind = "jsonl" (and data.inputs to the field' in said
    assert 'as they are, data.include to a glob on file names, such as "*.jsonl"' in said
    (tmp_path / "c.py").write_text("print()" * 99)  # a text among other files is the text that was asked for
    assert list_text(DataPath("data.path", str(tmp_path)), "*.py").files[0].name == "c.py"


def test_empty_text_is_refused(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    assert refused(tmp_path / "a.py") == f'1 problem in the data\n  data.path: "{tmp_path / "a.py"}" is empty'
    assert refused(tmp_path) == f'1 problem in the data\n  data.path: "{tmp_path}" has 2 files, all of them empty'


def test_text_too_short_for_a_sample_is_refused(folder: Path) -> None:
    path = folder / "a.py"
    assert refused(path, seq_len=10) == (
        f'1 problem in the data\n  data.path: "{path}" holds 10 tokens, too few for one sample\n'
        "      allowed: at least data.seq_len + 1 = 11\n"
        "      to do: give more data or a smaller data.seq_len"
    )


def test_files_that_may_not_be_read_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By a stand-in for access(2), because a test that runs as root may read everything.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name == "z.py")
    assert refused(folder) == (
        f'1 problem in the data\n  data.path: "{folder}" has files that may not be read: a.py, sub/b.py\n'
        "      to do: ask their owner for read permission"
    )


def test_a_file_that_changes_while_it_is_read_ends_the_job(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tokens.list_text
    monkeypatch.setattr(tokens, "list_text", lambda *given: (listing(*given), (folder / "z.py").write_text("x"))[0])
    with pytest.raises(JobError) as caught:
        read(folder, cache=str(tmp_path / "cache"))
    assert str(caught.value) == f"{folder / 'z.py'} changed while it was read; start the run again"


def test_a_cache_that_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "file" / "cache"
    (tmp_path / "file").touch()
    assert refused(folder, cache=str(kept)) == (
        f'1 problem in the data\n  data.cache: "{kept}" cannot be written: Not a directory\n'
        "      to do: set data.cache to a folder of yours"
    )


def test_no_space_in_the_cache_ends_the_job(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    kept = tmp_path / "cache"
    with pytest.raises(JobError) as caught:
        read(folder, cache=str(kept))
    assert str(caught.value) == (
        f"no space for prepared data in {kept} (No space left on device)\n"
        "  To do: make room there (`df -h`; `df -i` where there is space), or set data.cache to a folder with room."
    )
    assert list(kept.iterdir()) == []


def test_a_vocabulary_smaller_than_the_tokens_is_refused(folder: Path) -> None:
    assert refused(folder / "a.py", vocab=128) == (
        "1 problem in the data\n"
        '  model.vocab: 128 is less than the 256 tokens of data.tokenizer "bytes"\n'
        '      allowed: 256 and above, or "auto"'
    )
    assert read(folder / "a.py", vocab=300).facts.vocab == 256
