"""The options of `shardway plan`, each with its help sentence.

Invariant: an option that is not given is None, empty or off; `plan.answer` assumes a value for it and reports that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardway.cli.options import complete_gpu, complete_site


def _option(name: str, help_text: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    return typer.Option(name, help=help_text, show_default=False, autocompletion=complete)


Model = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL [KEY=VALUE]...",
        help="A model by name (llama3-8b), a Hugging Face name or folder, or a run file and keys to set over it.",
        show_default=False,
    ),
]

On = Annotated[str | None, _option("--on", "Site profile, by name or path.", complete_site)]
Gpu = Annotated[str | None, _option("--gpu", "Accelerator, where no site is named.", complete_gpu)]
Nodes = Annotated[int | None, _option("--nodes", "Whole nodes (1 where nothing is said).")]
Gpus = Annotated[int | None, _option("--gpus", "Accelerators, instead of --nodes.")]
Queue = Annotated[str | None, _option("--queue", "Queue of the site, whose wall-time cuts the run into jobs.")]
Price = Annotated[str | None, _option("--price", 'Of a GPU-hour, with its currency: "2.5 EUR".')]

Tokens = Annotated[str | None, _option("--tokens", "Length of the run in tokens: 100e9, 15T.")]
Steps = Annotated[int | None, _option("--steps", "Length of the run in steps.")]
SeqLen = Annotated[int | None, _option("--seq-len", "Tokens of a sequence.")]
GlobalBatch = Annotated[int | None, _option("--global-batch", "Sequences (images) of a step, over all ranks.")]
Precision = Annotated[str, _option("--precision", "Format of products: bf16, fp16, fp8, mxfp8, fp4, tf32, fp32.")]
Optimizer = Annotated[str, _option("--optimizer", "adamw, adamw8bit, adafactor, sgd or muon.")]
Engine = Annotated[str, _option("--engine", "Library that trains: shardway, torchtitan, megatron, deepspeed ...")]

Layout = Annotated[str, _option("--layout", "Degrees to keep, such as tp=8,pp=4; the others are searched.")]
MicroBatch = Annotated[int | None, _option("--micro-batch", "Sequences of one pass, instead of a search.")]
Recompute = Annotated[str | None, _option("--recompute", "none, selective, products, operators or full.")]
Schedule = Annotated[str | None, _option("--schedule", "gpipe, 1f1b, interleaved, zero_bubble or zbv.")]
Zero = Annotated[int | None, _option("--zero", "Stage of ZeRO, 0 to 3, instead of a search.")]
Attention = Annotated[str | None, _option("--attention", "Kernel: plain, flash1, flash2 or flash3.")]
Compiled = Annotated[bool, _option("--compiled", "The model is compiled.")]
Offload = Annotated[
    bool | None, _option("--offload/--no-offload", "Optimizer states in the host's memory, always or never.")
]

Explain = Annotated[str | None, _option("--explain", "Show memory, time or layout in full.")]
Curve = Annotated[str | None, _option("--curve", "Show the scaling over nodes: nodes, or numbers such as 1,2,8.")]
Html = Annotated[Path | None, _option("--html", "Write a page with pictures to this file.")]
Emit = Annotated[
    str | None, _option("--emit", "Print the configuration for torchtitan, megatron, deepspeed, accelerate or nemo.")
]
Out = Annotated[Path | None, _option("--out", "Folder for the files of --emit, instead of printing them.")]
Module = Annotated[str, _option("--module", "What --trace counts instead of the run file's model: file.py:function.")]
Trace = Annotated[
    bool, _option("--trace", "Count the run file's own model with torch, and keep the shape for the next plan.")
]


@dataclass(frozen=True)
class Counting:
    """Whether to count the model with torch; `module` ("file.py:function") makes it where the run file does not."""

    trace: bool = False
    module: str = ""
