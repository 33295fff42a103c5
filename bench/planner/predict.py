"""Predict rows: python bench/planner/predict.py ROWS.csv OUT.csv

ROWS.csv has the input columns of the published rows (see rows.py); OUT.csv gets a line for each, with `why_not` where
a row lacks what is needed. Times in seconds, memory in GiB; `mem_low` and `mem_high` are of the kind of memory that the
row names, else of what is reserved.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping

import answers
import measured
import rows

from shardway.errors import ShardwayError

COLUMNS = [
    "id",
    "tok_s_gpu",
    "step_time_s",
    "tflops_per_gpu_full",
    "tflops_per_gpu_causal",
    "mem_allocated_gib",
    "mem_reserved_gib",
    "mem_device_gib",
    "fits",
    "time_low",
    "time_high",
    "mem_low",
    "mem_high",
    "assumed",
    "why_not",
]
GIB = 2**30


def main() -> None:
    """Read rows, write predictions."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    predict_file(sys.argv[1], sys.argv[2])


def predict_file(rows_path: str, predictions_path: str) -> None:
    """A line in the second file for each row of the first."""
    with open(rows_path, newline="", encoding="utf-8") as source, open(predictions_path, "w", newline="") as target:
        writer = csv.DictWriter(target, COLUMNS, restval="")
        writer.writeheader()
        for row in csv.DictReader(source):
            writer.writerow({"id": row.get("id") or "", **predict(row)})


def predict(row: Mapping[str, str]) -> dict[str, str]:
    """The columns of one row."""
    try:
        question = rows.read_question(row)
        return render(question, answers.answer(question), measured.memory_kind(row))
    except (rows.Missing, ShardwayError, ArithmeticError) as error:
        return {"why_not": " ".join(str(error).split())}


def render(question: rows.Question, found: answers.Answer, kind: str) -> dict[str, str]:
    """An answer as text."""
    case, memory, time = found.case, found.memory, found.time
    gpus = case.degrees.world
    rate = case.tokens_per_step / time.seconds / gpus
    peak = getattr(memory, kind) / GIB
    return {
        "tok_s_gpu": f"{rate:.6g}",
        "step_time_s": f"{time.seconds:.6g}",
        "tflops_per_gpu_full": f"{rate * case.model.flops_per_token(case.seq_len, causal=False) / 1e12:.6g}",
        "tflops_per_gpu_causal": f"{rate * case.model.flops_per_token(case.seq_len, causal=True) / 1e12:.6g}",
        "mem_allocated_gib": f"{memory.allocated / GIB:.3f}",
        "mem_reserved_gib": f"{memory.reserved / GIB:.3f}",
        "mem_device_gib": f"{memory.device / GIB:.3f}",
        "fits": str(int(found.fits)),
        "time_low": f"{time.low:.6g}",
        "time_high": f"{time.high:.6g}",
        "mem_low": f"{peak * memory.overheads.low:.5g}",
        "mem_high": f"{peak * memory.overheads.high:.5g}",
        "assumed": "; ".join((*question.assumed, *(f"{name} chosen" for name in question.open))),
    }


if __name__ == "__main__":
    main()
