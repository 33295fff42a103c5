"""What stands in for things that a row names and nobody knows: accelerators, sizes of models, how a library works.

Invariant: a stand-in is found by rules on names and numbers alone, the same for every row. This module must not know a
source's name, nor look at a measurement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from shardway.hardware.catalogue import load_accelerators
from shardway.plan.case import EngineTraits, find_engine

LAST_RESORT = "h100-sxm5-80gb"
"""Of an accelerator whose name is like none."""
WIDTH_PER_LAYER = 128
"""Hidden size over layers of GPT-3 175B and Llama 7B; of most models between 80 and 130."""
HEAD = 128

WRAPPERS = ("accelerate", "transformers", "hugging", "lightning", "torchtune", "axolotl", "levanter", "maxtext", "jax")
"""Frameworks that shard weights as PyTorch's FSDP does, in layers."""
OLDER_WRAPPERS = ("composer", "fairscale", "metaseq", "fairseq")


def read_number(text: str) -> float | None:
    """The first number in a text ("1,024", "~80 GB"); None where there is none, or no finite one."""
    found = re.search(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?", text)
    number = float(found[0].replace(",", "")) if found else math.nan
    return number if math.isfinite(number) else None


def find_accelerator(name: str) -> str:
    """The key of the catalogue's part whose name is most like it, of those that it has rates of."""
    keys = [key for key, part in load_accelerators().items() if part.peak_flops and part.memory_bandwidth_bytes_per_s]
    wanted = set(re.findall(r"[a-z]+\d+[a-z]*|\d+gb|sxm|pcie|nvl", name.lower()))
    shared = {key: sum(key.startswith(word) + (word in key) for word in wanted) for key in keys}
    best = max(keys, key=shared.__getitem__)
    return best if any(best.startswith(word) for word in wanted) else _find_relative(wanted, keys)


def _find_relative(wanted: set[str], keys: list[str]) -> str:
    """Of the same letters the one with the nearest number: MI355X for an MI350X."""
    families = [_split(word) for word in wanted if re.match(r"[a-z]+\d\d|l4", word)]
    near = [
        (abs(math.log(_split(key)[1] / number)), key)
        for letters, number in families
        for key in keys
        if _split(key)[0] == letters and number
    ]
    return min(near)[1] if near else LAST_RESORT


def _split(word: str) -> tuple[str, int]:
    found = re.match(r"([a-z]+)(\d+)", word)
    return (found[1], int(found[2])) if found else (word, 1)


def guess_sizes(row: Mapping[str, str]) -> dict[str, str]:
    """Layers, hidden size and heads of a model of so many parameters, as the row or the model's name says; or none.

    Of a row that has one of layers and hidden size, the other follows from it.
    """
    hidden, layers = (max(0.0, read_number(row.get(name) or "") or 0.0) for name in ("hidden", "layers"))
    if hidden >= HEAD or layers >= 1:
        return {"layers": f"{layers or hidden // WIDTH_PER_LAYER:.0f}", "hidden": f"{hidden or layers * HEAD:.0f}"}
    billions = read_number(row.get("params_b") or "")
    named = re.search(r"(\d+(?:\.\d+)?) ?[bB](?![a-zA-Z])", row.get("model") or "")
    billions = billions or (float(named[1]) if named else 0.0)
    if billions <= 0:
        return {}
    parameters = billions * 1e9
    hidden = max(1, round((parameters * WIDTH_PER_LAYER / 12) ** (1 / 3) / HEAD)) * HEAD
    layers = max(1, round(parameters / 12 / hidden**2))
    return {"hidden": str(hidden), "layers": str(layers), "heads": str(hidden // HEAD)}


def guess_engine(framework: str, year: int, zero: int) -> EngineTraits:
    """By words in a framework's name, else by how it shards."""
    if any(word in framework for word in OLDER_WRAPPERS):
        return find_engine("fsdp1")
    if "megatron" not in framework and (zero == 3 or any(word in framework for word in WRAPPERS)):
        return find_engine("fsdp2" if year > 2023 else "fsdp1")
    return find_engine("megatron-2021" if year < 2023 and "megatron" in framework else "megatron")
