from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardway.data.content import DataPath
from shardway.data.formats import image_folder
from shardway.data.formats.base import DamagedData, FileParts
from shardway.data.formats.image_folder import ImageFolder
from shardway.data.formats.indexes import make_sums
from shardway.data.formats.whole_files import FileTable
from shardway.errors import UserError


def encoded(colour: int, suffix: str = ".png") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 3), (colour, 0, 0)).save(stream, Image.registered_extensions()[suffix])
    return stream.getvalue()


def write(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number, path.suffix.lower()))
    return root


def opened(root: Path) -> ImageFolder:
    return ImageFolder.open(DataPath("data.path", str(root)))


def refused(root: Path) -> str:
    with pytest.raises(UserError) as caught:
        opened(root)
    return str(caught.value)


def listed(records: ImageFolder) -> list[tuple[str, int]]:
    return [(record["name"], record["label"]) for record in records.read(range(len(records)), ("name", "label"))]


def test_classes_are_numbered_and_files_ordered_as_by_torchvision(tmp_path: Path) -> None:
    names = ("dog/z.png", "dog/sub/a.png", "dog/a.jpg", "Cat/1.PNG", "bee/x.webp", "bee/10.gif", "bee/9.bmp")
    write(tmp_path, *names, ".hidden/h.png", "bee/.hidden.png")
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "README.md").write_text("no class")
    (tmp_path / "empty").mkdir()
    records = opened(tmp_path)
    assert records.classes == ("Cat", "bee", "dog", "empty")
    assert records.empty_classes == 1
    assert listed(records) == [
        ("Cat/1.PNG", 0),
        ("bee/10.gif", 1),
        ("bee/9.bmp", 1),
        ("bee/x.webp", 1),
        ("dog/a.jpg", 2),
        ("dog/z.png", 2),
        ("dog/sub/a.png", 2),
    ]
    assert records.fields == {"image": "bytes", "label": "int", "name": "text"}
    assert records.extent(6).path == tmp_path / "dog/sub/a.png"
    assert records.extent(6).size == (tmp_path / "dog/sub/a.png").stat().st_size
    assert ImageFolder.is_at(tmp_path)


def test_records_are_read_in_any_order_and_after_pickling(tmp_path: Path) -> None:
    names = [f"{kind}/{number}.png" for kind in "ab" for number in range(3)]
    write(tmp_path, *names)
    records = pickle.loads(pickle.dumps(opened(tmp_path)))
    ids = [4, 0, 4, 5, 1]
    for number, record in zip(ids, records.read(ids), strict=True):
        content = (tmp_path / names[number]).read_bytes()
        assert record == {"image": content, "label": number // 3, "name": names[number]}
    assert records.read([]) == []
    assert records.read([2], ("label", "nothing")) == [{"label": 0}]
    with pytest.raises(UserError, match="there is no record 6; allowed: 0 to 5"):
        records.read([6])
    assert list(records.find_damage()) == []


def test_the_walk_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(write(tmp_path, "a/1.png", "a/deep/2.png", "b/3.png"))

    def fail(*_: object) -> None:
        raise AssertionError("walked again")

    with monkeypatch.context() as patch:
        patch.setattr(image_folder, "_walk_class", fail)
        second = opened(tmp_path)
    assert listed(second) == listed(first)
    assert second.fingerprint == first.fingerprint


@pytest.mark.parametrize("name", ["a/new.png", "a/deep/new.png", "c/new.png"])
def test_an_added_file_is_found(tmp_path: Path, name: str) -> None:
    first = opened(write(tmp_path, "a/1.png", "a/deep/2.png", "b/3.png"))
    write(tmp_path, name)
    again = opened(tmp_path)
    assert name in dict(listed(again))
    assert len(again) == 4
    assert again.fingerprint != first.fingerprint


def test_a_removed_folder_is_noticed(tmp_path: Path) -> None:
    opened(write(tmp_path, "a/1.png", "a/x/y/2.png"))
    (tmp_path / "a/x/y/2.png").unlink()
    (tmp_path / "a/x/y").rmdir()
    assert listed(opened(tmp_path)) == [("a/1.png", 0)]


def test_a_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    names = ("a/1.png", "b/2.png")
    one, two = (opened(write(tmp_path / copy, *names)).fingerprint for copy in ("one", "two"))
    assert one == two
    (tmp_path / "two" / "empty").mkdir()
    assert opened(tmp_path / "two").fingerprint != one


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    write(tmp_path / "store", "k/1.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "k").symlink_to(tmp_path / "store" / "k")
    (tmp_path / "store" / "k" / "loop").symlink_to(tmp_path / "store" / "k")
    assert listed(opened(tmp_path / "data")) == [("k/1.png", 0)]


def test_a_file_that_vanished_or_changed_is_damage(tmp_path: Path) -> None:
    names = ("a/0.png", "a/1.png", "a/2.png", "a/3.png", "a/4.png")
    write(tmp_path, *names)
    (tmp_path / "a/1.png").write_bytes(b"")
    records = opened(tmp_path)
    (tmp_path / "a/2.png").unlink()
    (tmp_path / "a/3.png").write_bytes(b"short")
    (tmp_path / "a/4.png").write_bytes(encoded(0) + bytes(9000))
    size = len(encoded(4))
    causes = {
        1: "the image is an empty file",
        2: "it cannot be read: No such file or directory",
        3: f"it has 5 bytes, and had {len(encoded(3))} when it was listed",
        4: f"it has more than {size} bytes, and had {size} when it was listed",
    }
    for number, cause in causes.items():
        with pytest.raises(DamagedData) as caught:
            records.read([0, number])
        assert str(caught.value).splitlines()[0] == f"{tmp_path / names[number]} is damaged at byte 0: {cause}"
    found = list(records.find_damage())
    assert [line for line in found if line.startswith("record ")] == [
        f"record {number}: {tmp_path / names[number]} is damaged at byte 0: {cause}" for number, cause in causes.items()
    ]


def test_a_link_that_leads_nowhere_is_damage_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a/0.png")
    (tmp_path / "a/1.png").symlink_to(tmp_path / "gone")
    records = opened(tmp_path)
    with pytest.raises(DamagedData, match=r"a/1\.png is damaged"):
        records.read([1])


def test_a_flipped_byte_is_found_by_checksums(tmp_path: Path) -> None:
    records = opened(write(tmp_path, "a/0.png", "a/1.png"))
    assert isinstance(records.parts, FileParts)
    make_sums(tmp_path, records.parts.files)
    path = tmp_path / "a/1.png"
    content = bytearray(path.read_bytes())
    content[30] ^= 1
    path.write_bytes(bytes(content))
    checked = opened(tmp_path)
    checked.read([0])
    with pytest.raises(DamagedData, match=r"a/1\.png is damaged at byte 0: the checksum"):
        checked.read([1])


def test_what_is_no_folder_of_classes_is_refused(tmp_path: Path) -> None:
    path, allowed = tmp_path / "d", "\n      allowed: a folder that holds a folder of images for each class"
    assert f'"{path}" does not exist{allowed}' in refused(path)
    path.mkdir()
    assert f'"{path}" is an empty folder{allowed}' in refused(path)
    (path / "notes.txt").write_text("")
    assert f'"{path}" has no folders in it{allowed}' in refused(path)
    assert f'"{path / "notes.txt"}" is not a folder{allowed}' in refused(path / "notes.txt")
    (path / "cat").mkdir()
    assert f'"{path}" has 1 folders and no image in them{allowed}' in refused(path)
    assert not ImageFolder.is_at(path)
    write(path, "flat.png")
    assert "holds images beside folders of classes: flat.png" in refused(path)
    (path / "cat").rmdir()
    assert "holds 1 images and no folder of a class" in refused(path)
    assert "to do: move the images of each class into a folder of its name" in refused(path)
    assert not ImageFolder.is_at(path)


def test_the_parts_of_a_data_set_are_not_taken_for_classes(tmp_path: Path) -> None:
    write(tmp_path, "train/cat/1.png", "val/cat/2.png")
    assert "holds the parts train, val of a data set, not classes" in refused(tmp_path)
    assert f'to do: set data.path to "{tmp_path / "train"}", and data.validation to another part' in refused(tmp_path)
    assert opened(tmp_path / "train").classes == ("cat",)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a/1.png")
    try:
        os.rename(os.fsencode(tmp_path / "a/1.png"), os.fsencode(tmp_path) + b"/a/\xff.png")
    except OSError:
        pytest.skip("this file system has no such names")
    assert r'has a file whose name is not UTF-8: "a/\xff.png"' in refused(tmp_path)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), st.integers(0, 2**40), st.integers(0, 2**60)), max_size=20))
def test_a_table_is_the_list_of_its_files(files: list[tuple[str, int, int]]) -> None:
    files = [each for each in files if each[0].isprintable()]
    table = FileTable.of(files, DataPath("", ""))
    assert [(file.name, file.size, file.mtime_ns) for file in table] == files
    assert [(table[at].name, table[at].size, table[at].mtime_ns) for at in range(len(table))] == files
    assert [file.name for file in table[1:3]] == [name for name, _, _ in files[1:3]]
    assert table.sizes.dtype == np.int64
