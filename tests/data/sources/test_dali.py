"""Images decoded by NVIDIA DALI look as Pillow's; without DALI the key is refused."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardway.data.content import DataPath
from shardway.data.convert import WRITERS
from shardway.data.detect import open_records
from shardway.data.formats.base import DamagedData
from shardway.data.sources.base import DataRequest
from shardway.data.sources.decoded import DecodedSamples, open_decoded
from shardway.errors import UserError
from shardway.runfile.schema import DataSection

HAS_DALI = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def make_shards(folder: Path, *, damaged: bool = False) -> None:
    """Smooth pictures as JPEG and PNG."""
    records = []
    for number in range(8):
        rows, columns = np.mgrid[0 : 40 + 3 * number, 0 : 70 - 2 * number]
        pixels = np.stack([rows * 2, columns * 2, (rows + columns) + number], axis=-1).astype(np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG" if number % 2 else "PNG")
        content = stream.getvalue()
        records.append({"jpg": content[:100] if damaged and number == 5 else content, "cls": number % 2})
    WRITERS["webdataset"](iter(records), folder)


def open_by(folder: Path, decode: str, **keys: object) -> DecodedSamples:
    place = DataPath("data.path", str(folder))
    section = DataSection.model_validate({"kind": "webdataset", "shape": [3, 32, 32], "decode": decode, **keys})
    return open_decoded(open_records(place), place, DataRequest(section, 0, "images", classes=2))


@pytest.mark.skipif(HAS_DALI, reason="NVIDIA DALI is installed")
def test_without_dali_the_key_is_refused(tmp_path: Path) -> None:
    make_shards(tmp_path / "shards")
    with pytest.raises(UserError) as caught:
        open_by(tmp_path / "shards", "dali")
    assert 'data.decode: "dali" needs NVIDIA DALI, which cannot be imported' in str(caught.value)
    assert 'set data.decode = "pil"' in str(caught.value)


def test_what_dali_does_not_do_is_refused(tmp_path: Path) -> None:
    make_shards(tmp_path / "shards")
    with pytest.raises(UserError, match=r'allowed: "pil" with data\.transform'):
        open_by(tmp_path / "shards", "dali", transform="os:getcwd")
    with pytest.raises(UserError, match="allowed: 1 or 3 channels"):
        open_by(tmp_path / "shards", "dali", shape=[4, 32, 32])


@pytest.mark.skipif(not HAS_DALI, reason="NVIDIA DALI is not installed")
def test_pictures_are_those_of_pillow(tmp_path: Path) -> None:
    make_shards(tmp_path / "shards")
    by_dali, by_pillow = (open_by(tmp_path / "shards", decode) for decode in ("dali", "pil"))
    found, expected = (source.batch(np.arange(8)) for source in (by_dali, by_pillow))
    assert np.abs(found["inputs"] - expected["inputs"]).max() < 0.06
    np.testing.assert_array_equal(found["targets"], expected["targets"])
    assert by_dali.facts.fingerprint != by_pillow.facts.fingerprint


@pytest.mark.skipif(not HAS_DALI, reason="NVIDIA DALI is not installed")
def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    make_shards(tmp_path / "shards", damaged=True)
    source = open_by(tmp_path / "shards", "dali")
    with pytest.raises(DamagedData, match="record 5"):
        source.batch(np.arange(8))
    assert len(source.batch(np.arange(4))["inputs"]) == 4
