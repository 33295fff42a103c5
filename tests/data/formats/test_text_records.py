from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from shardway.data.content import DataPath
from shardway.data.formats.base import DamagedData
from shardway.data.formats.indexes import make_sums
from shardway.data.formats.text import TextRecords
from shardway.errors import UserError


def write(root: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def opened(path: Path | str) -> TextRecords:
    return TextRecords.open(DataPath("data.path", str(path)))


def refused(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        opened(path)
    return str(caught.value)


def test_each_text_file_is_a_record_sorted_by_path(tmp_path: Path) -> None:
    write(tmp_path, b_txt=b"two\n", a__z_md=b"\xe2\x82\xac", c_PY=b"", picture_png=b"\x89PNG", _git__x_txt=b"hidden")
    records = opened(tmp_path)
    assert records.read(range(len(records))) == [
        {"text": "€", "name": "a/z.md"},
        {"text": "two\n", "name": "b.txt"},
        {"text": "", "name": "c.PY"},
    ]
    assert records.fields == {"text": "text", "name": "text"}
    assert str(records.extent(1)) == f"{tmp_path / 'b.txt'}, byte 0"


def test_records_are_read_in_any_order_and_after_pickling(tmp_path: Path) -> None:
    write(tmp_path, **{f"{number}_txt": b"%d" % number for number in range(4)})
    records = pickle.loads(pickle.dumps(opened(tmp_path)))
    assert [record["text"] for record in records.read([3, 0, 3, 2])] == ["3", "0", "3", "2"]
    assert records.read([1], ("name", "nothing")) == [{"name": "1.txt"}]
    assert records.read([]) == []
    assert list(records.find_damage()) == []
    with pytest.raises(UserError, match="there is no record -1"):
        records.read([-1])


def test_bytes_that_are_not_utf8_become_replacement_characters(tmp_path: Path) -> None:
    records = opened(write(tmp_path, a_txt=b"caf\xe9 \xf0\x9f\x98"))
    assert records.read([0])[0]["text"] == "caf\ufffd \ufffd"


def test_one_file_of_any_name_is_read(tmp_path: Path) -> None:
    write(tmp_path, poem_tex=b"verse")
    assert opened(tmp_path / "poem.tex").read([0]) == [{"text": "verse", "name": "poem.tex"}]
    assert [record["name"] for record in opened(tmp_path / "*.tex").read([0])] == ["poem.tex"]


def test_what_holds_no_text_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none")
    assert "has no text files (.txt, .text, .md, .rst, .py)" in refused(tmp_path)
    write(tmp_path, a_txt=b"")
    assert f'"{tmp_path / "a.txt"}" is empty' in refused(tmp_path / "a.txt")
    write(tmp_path, b_txt=b"")
    assert "has 2 files, all of them empty" in refused(tmp_path)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("text")
    except OSError:
        pytest.skip("this file system has no such names")
    assert r"has files whose names are not UTF-8: \udcff.txt" in refused(tmp_path)


def test_a_file_that_changed_is_damage(tmp_path: Path) -> None:
    records = opened(write(tmp_path, a_txt=b"whole text", b_txt=b"text", c_txt=b"gone"))
    write(tmp_path, a_txt=b"whole", b_txt=b"longer text")
    (tmp_path / "c.txt").unlink()
    for number, cause in enumerate(
        (
            "it has 5 bytes, and had 10 when it was listed",
            "it has more than 4 bytes, and had 4 when it was listed",
            "it cannot be read: No such file or directory",
        )
    ):
        with pytest.raises(DamagedData) as caught:
            records.read([number])
        path = tmp_path / f"{'abc'[number]}.txt"
        assert str(caught.value).splitlines()[0] == f"{path} is damaged at byte 0: {cause}"


def test_a_flipped_byte_is_found_by_checksums(tmp_path: Path) -> None:
    records = opened(write(tmp_path, a_txt=b"right", b_txt=b"right"))
    make_sums(tmp_path, records.parts.files)
    write(tmp_path, b_txt=b"wrong")
    checked = opened(tmp_path)
    assert checked.read([0])[0]["text"] == "right"
    with pytest.raises(DamagedData, match=r"b\.txt is damaged at byte 0: the checksum"):
        checked.read([1])


def test_a_folder_of_text_is_told_from_others(tmp_path: Path) -> None:
    assert not TextRecords.is_at(tmp_path / "none")
    assert not TextRecords.is_at(tmp_path)
    write(tmp_path / "text", a_txt=b"a", b__c_py=b"b", d_png=b"")
    write(tmp_path / "other", README_md=b"a", a_bin=b"", b_bin=b"")
    assert TextRecords.is_at(tmp_path / "text")
    assert TextRecords.is_at(tmp_path / "text" / "a.txt")
    assert not TextRecords.is_at(tmp_path / "other")
    assert not TextRecords.is_at(tmp_path / "other" / "a.bin")
