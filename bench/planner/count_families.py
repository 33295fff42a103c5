"""Counts the default config of every family that the installed `transformers` has, as `shardway plan` would.

    python bench/planner/count_families.py [FAMILY ...] [--parameters]

A line a family: whether its parameters are those of the library, whether its forward pass was followed, seconds.
Then how many of how many. `--parameters` leaves the forward passes out. A default config that the library itself does
not build is listed and not counted. No network is used.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections import Counter
from typing import Any

os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}

import torch
import transformers

from shardway.errors import UserError
from shardway.models.huggingface import count as counting
from shardway.plan.huggingface import shape_of_config


def count_family(family: str) -> tuple[str, str]:
    """(What became of it, details) of the default config of a family, written as a config.json."""
    try:
        config = transformers.CONFIG_MAPPING[family]()
        written = json.loads(json.dumps(config.to_dict()))
        kind = counting.find_class(transformers, counting.make_config(transformers, written))
        with torch.device("meta"):
            expected = sum(each.numel() for each in kind._from_config(config).parameters())
    except Exception as error:  # whatever the library raises
        return "not built by the library", f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
    written["architectures"] = [kind.__name__]
    try:
        own = f", by formulas {shape_of_config(written, family).parameters:,}"
    except UserError:
        own = ""
    count = counting.count_config(written)
    followed = "parameters alone" if count.failure else "counted"
    result = followed if count.parameters == expected else "WRONG"
    return result, f"{kind.__name__} {count.parameters:,}{own} {count.failure[:90]}"


def main(words: list[str]) -> None:
    """Count the named families, or all."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    if "--parameters" in words:
        no_inputs: Any = lambda *_: iter(())  # noqa: E731
        counting.list_inputs = no_inputs
    families = [word for word in words if not word.startswith("-")] or sorted(transformers.CONFIG_MAPPING)
    results, began = Counter[str](), time.monotonic()
    for family in families:
        start = time.monotonic()
        result, details = count_family(family)
        results[result] += 1
        print(f"{family:32} {result:26} {time.monotonic() - start:6.1f} s  {details}", flush=True)
    print(f"transformers {transformers.__version__}: {len(families)} families in {time.monotonic() - began:.0f} s")
    for result, number in results.most_common():
        print(f"  {number:4} {result}")


if __name__ == "__main__":
    main(sys.argv[1:])
