"""Models that `transformers` counted: their parts, kept in the user's cache, so that the next plan needs no torch.

Invariants:
- A kept count is used only for the config that it was taken of, by a digest of its content. Where the library is
  installed, it is also of that version; elsewhere the newest kept one is used.
- This process imports neither torch nor transformers: a child process counts. Without them nothing is guessed.
- Counts at three lengths determine those at any other: products and kept tensors of a layer grow with the length or
  its square. A model whose input has one size was counted at that size alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from shardway.errors import UserError
from shardway.places import find_own_folder
from shardway.plan.shapes import Measured, Unit, merge_units
from shardway.rundir.file_io import write_whole

FORMAT = 2
CHILD = "shardway.models.huggingface.count"
"""The module that counts: config.json on its standard input, a count or an error on its standard output."""

REST = "rest"
"""The part of all that is in no layer, as `models.trace` names it."""

_OF_NO_EFFECT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "quantization_config")
"""Keys of a config that change no count."""


@dataclass(frozen=True, kw_only=True)
class CountedUnit:
    """`count` parts alike; numbers of one part and of one sample, an entry for each length that was counted."""

    name: str
    parameters: int
    forward_flops: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    fixed_bytes: tuple[float, ...]
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """What one class of the library has for one config. `lengths` are tokens of a sample, empty for a model that takes
    something else; `failure` says why the forward pass was not followed, and units then have parameters alone."""

    model: str
    library: str
    takes: str
    """The inputs of one sample, such as "int64 [1, 768]"."""
    longest: int
    """Positions that the config states; 0: none."""
    learned: bool
    """Whether those positions have learned vectors, so that no sample is longer."""
    lengths: tuple[int, ...]
    units: tuple[CountedUnit, ...]
    value_bytes: int
    failure: str = ""

    @property
    def parameters(self) -> int:
        return sum(unit.count * unit.parameters for unit in self.units)

    def at_length(self, name: str, seq_len: int) -> Measured:
        """The counts for samples of `seq_len` tokens. Raises UserError if the forward pass was not followed."""
        source = f"counted by {self.library} as {self.model}"
        if self.failure:
            raise UserError(
                f"{name} has {self.parameters:,} parameters ({source}), and its forward pass cannot be counted without "
                f"numbers: {self.failure}\n"
                "  To do: give its inputs in a function: `shardway plan run.toml --trace --module file.py:function`"
            )

        def at(values: Sequence[float]) -> float:
            if len(values) == 1:
                return values[0]
            return max(0.0, float(_interpolate(self.lengths, [Fraction(value) for value in values], seq_len)))

        units = [
            Unit(
                name=unit.name,
                count=unit.count,
                parameters=unit.parameters,
                forward_flops=at(unit.forward_flops),
                saved_bytes=at(unit.saved_bytes),
                fixed_bytes=min(at(unit.fixed_bytes), at(unit.saved_bytes)),
            )
            for unit in self.units
        ]
        sample = f"{seq_len:,} tokens" if self.lengths else self.takes
        return Measured(
            name=name,
            units=merge_units(units),
            source=f"{source}, for samples of {sample}",
            value_bytes=self.value_bytes,
            active=sum(unit.count * self._count_met(unit) for unit in self.units) if self.lengths else 0,
        )

    def _count_met(self, unit: CountedUnit) -> int:
        """Parameters of a part that one token meets: of a layer with experts those that products in proportion to the
        length could be with; scores of attention grow with its square. Embeddings have no products and count whole."""
        products = _slope(self.lengths, [Fraction(value) for value in unit.forward_flops])
        if unit.name == REST or products <= 0:
            return unit.parameters
        return min(unit.parameters, round(products / 2))

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})


def _interpolate(places: Sequence[int], values: Sequence[Fraction], at: int) -> Fraction:
    """The polynomial through all values, at another place (Lagrange)."""
    total = Fraction(0)
    for place, value in zip(places, values, strict=True):
        for other in places:
            if other != place:
                value *= Fraction(at - other, place - other)
        total += value
    return total


def _slope(places: Sequence[int], values: Sequence[Fraction]) -> Fraction:
    """The coefficient of x in the polynomial through all values, by Newton's divided differences."""
    total, product_at_0, product_slope = Fraction(0), Fraction(1), Fraction(0)
    for order, place in enumerate(places):
        total += values[0] * product_slope
        product_at_0, product_slope = -place * product_at_0, product_at_0 - place * product_slope
        pairs = zip(values, values[1:], range(len(values) - 1), strict=False)
        values = [(two - one) / (places[at + order + 1] - places[at]) for one, two, at in pairs]
    return total


def counted_from_json(text: str) -> CountedModel | None:
    """The inverse of `to_json`; None for a text that is none of this format."""
    try:
        table = json.loads(text)
        if table.pop("format") != FORMAT:
            return None
        if len({*table["lengths"]}) < len(table["lengths"]):  # of a version that counted short models so
            return None
        lists = ("forward_flops", "saved_bytes", "fixed_bytes")
        units = tuple(CountedUnit(**{**unit, **{name: tuple(unit[name]) for name in lists}}) for unit in table["units"])
        return CountedModel(**{**table, "lengths": tuple(table["lengths"]), "units": units})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def find_counted(config: Mapping[str, Any], name: str, announce: Callable[[str], None]) -> CountedModel:
    """The count of a config: the kept one, or one that a child process takes and that is then kept. `announce` gets a
    sentence before that begins. Raises UserError if it is not kept and the libraries are not here, or they refuse."""
    version, digest = find_library(), digest_of_config(config)
    kept = _kept_folder()
    if version is None:
        if count := find_kept(config):
            return count
        where = f", or take {kept}/{digest}-*.json along" if kept else ""
        raise UserError(
            f'{name}: the planner does not know all layers of a "{config.get("model_type")}" by itself. transformers '
            "counts any model that it builds, and is not installed here with torch.\n"
            f'  To do: run this once where they are (pip install "shardway[torch,hf]"), with the same home{where}'
        )
    path = kept / f"{digest}-{version}.json" if kept else None
    if path and (count := _read(path)):
        return count
    announce(f"{name} is counted with transformers {version}, once")
    count = _ask_child(config, name)
    if path:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, count.to_json(), durable=False)
        except OSError:  # it is counted again next time
            pass
    return count


def find_kept(config: Mapping[str, Any]) -> CountedModel | None:
    """The kept count of a config, by the newest version of the library; None where it was not counted."""
    kept = _kept_folder()
    found = sorted(kept.glob(f"{digest_of_config(config)}-*.json"), key=_version_of) if kept else []
    return next((count for path in reversed(found) if (count := _read(path))), None)


def _kept_folder() -> Path | None:
    folder = find_own_folder("CACHE")
    return folder / "shapes" if folder else None


def find_library() -> str | None:
    """The version of transformers that is installed with torch; neither is imported."""
    if any(importlib.util.find_spec(package) is None for package in ("torch", "transformers")):
        return None
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def digest_of_config(config: Mapping[str, Any]) -> str:
    """Digest of what a config says about a model."""
    said = {key: value for key, value in config.items() if key not in _OF_NO_EFFECT}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _version_of(path: Path) -> tuple[int, ...]:
    parts = path.stem.partition("-")[2].split(".")
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def _read(path: Path) -> CountedModel | None:
    try:
        return counted_from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _ask_child(config: Mapping[str, Any], name: str) -> CountedModel:
    """Count in a process of its own. Raises UserError with what the library refuses."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", CHILD],
        input=json.dumps(config),
        capture_output=True,
        text=True,
        env={**os.environ, **quiet},
    )
    count = counted_from_json(done.stdout)
    if count is not None:
        return count
    try:
        what = json.loads(done.stdout)["error"]
    except (ValueError, TypeError, KeyError):
        last = (done.stderr.strip() or "nothing was written").splitlines()[-1]
        what = f"the process that counts it with transformers ended with {done.returncode}: {last}"
    raise UserError(f"{name}: {what}")
