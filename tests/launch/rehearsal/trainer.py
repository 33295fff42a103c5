"""Stands in for a training command: takes steps, writes events, stops at its deadline, goes on; no torch.

    trainer.py STEPS SECONDS_A_STEP [drift | deaf | silent | broken]

Not exactly what it should be on request: `drift` changes the losses after a resume, `deaf` sees no deadline, `silent`
writes no events (and obeys the stop file), `broken` ends with an error when it goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ATTEMPT = Path(os.environ["SHARDWAY_ATTEMPT_DIR"])
RUN = ATTEMPT.parents[1]
TOTAL, PACE, FLAW = int(sys.argv[1]), float(sys.argv[2]), (*sys.argv, "", "")[3]
KEPT = RUN / "kept"
MARGIN_S = 5.0
"""What it keeps of its time; it ends in a moment, and a busy machine makes that a longer one."""


def write(event: str, **facts: object) -> None:
    if FLAW == "silent":
        return
    (RUN / "events").mkdir(exist_ok=True)
    with open(RUN / "events/rank-00000.jsonl", "a") as file:
        file.write(json.dumps({"event": event, **facts, "time": time.time()}) + "\n")


def end(event: str, state: str, step: int) -> None:
    (RUN / f"checkpoints/step-{step:09d}").mkdir(parents=True, exist_ok=True)
    KEPT.write_text(str(step))
    write("saved", step=step, seconds=0.01)
    write(event, step=step, reason="the clock")
    (RUN / "stop").unlink(missing_ok=True)
    (ATTEMPT / "result.json").write_text(json.dumps({"state": state, "step": step, "reason": "the clock"}))
    sys.exit(0)


deadline = json.loads((ATTEMPT / "started.json").read_text())["deadline"]
first = int(KEPT.read_text()) if KEPT.exists() else 0
if first and FLAW == "broken":
    sys.exit("nothing fits")
write("started", step=first)
for step in range(first + 1, TOTAL + 1):
    time.sleep(PACE)
    drift = 1e-12 if FLAW == "drift" and first else 0.0
    write("step", step=step, loss=1.0 / step + drift, grad_norm=2.0, lr=0.1, seconds=PACE)
    if (RUN / "stop").exists():
        end("stopped", "stopped", step)
    if deadline and FLAW != "deaf" and time.time() > deadline - MARGIN_S:
        end("stopped", "deadline", step)
end("finished", "finished", TOTAL)
