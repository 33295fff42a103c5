"""The phrases in which a person reads of a run; plain ASCII, one line each.

Invariant: what is unknown reads "n/a"; text that came from an event stays on one line. This module must not know
colours, widths or HTML.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardway.rundir.left_out import SkippedRange
from shardway.rundir.lineage import LOCAL
from shardway.units import render_clock, render_count
from shardway.watch.account import TimeAccount
from shardway.watch.facts import (
    EndedEvent,
    FailedSave,
    FaultEvent,
    Logged,
    QuarantinedEvent,
    Restart,
    Save,
    Start,
    ValidatedEvent,
)
from shardway.watch.progress import RunProgress

UNKNOWN = "n/a"

ACCOUNT_WORDS = {
    "productive_s": "steps that hold",
    "lost_s": "steps undone or unfinished",
    "start_s": "start-up",
    "load_s": "loading a checkpoint",
    "data_s": "waiting for data",
    "save_s": "saving",
    "validation_s": "validation",
    "script_s": "the script's own",
    "end_s": "ending",
    "idle_s": "between attempts",
    "unaccounted_s": "not accounted for",
}
"""Row of an account -> what it is called."""

REMEDIES = {"data_s": ": raise data.workers or data.prefetch"}
"""Row of an account -> what makes it smaller, where that is known."""

_SHOWN, _WORTH_A_REMEDY = 0.01, 0.05
"""From which share of the time on a row is named, and its remedy."""


def one_line(text: str) -> str:
    """Text without line breaks and control characters."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))


def render_loss(loss: float | None) -> str:
    """Four decimals, or four figures where that would hide a small loss."""
    if loss is None or not math.isfinite(loss):
        return UNKNOWN if loss is None else str(loss)
    return f"{loss:.4f}" if loss == 0 or abs(loss) >= 0.01 else f"{loss:.3e}"


def render_number(value: float | None, form: str) -> str:
    """A number in a format such as ".2e"."""
    return UNKNOWN if value is None else format(value, form)


def render_total(total: float | None) -> str:
    """Three figures and a suffix: 1264512 -> "1.26M"."""
    return UNKNOWN if total is None or not math.isfinite(total) else render_count(total)


def render_time(seconds: float | None) -> str:
    """2:41, or n/a."""
    return UNKNOWN if seconds is None or not math.isfinite(seconds) else render_clock(seconds)


def render_size(size_bytes: float | None) -> str:
    """Three figures and a binary unit: 14889779 -> "14.2 MiB"."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return UNKNOWN
    power = next((power for power in (4, 3, 2, 1) if abs(size_bytes) >= 1024**power), 0)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    scaled = size_bytes / 1024**power
    return f"{scaled:.0f} {unit}" if power == 0 or scaled >= 100 else f"{scaled:.3g} {unit}"


def render_unit(start: Start | None) -> str:
    """The unit that a run's speed is measured in."""
    return "tokens/s" if start and start.counts_tokens else "samples/s"


def render_rate(progress: RunProgress) -> str:
    """Typical speed of the last steps: "51.2k tokens/s"."""
    unit = render_unit(progress.start)
    return f"{render_total(progress.typical(unit.replace('/', '_per_')))} {unit}"


def render_plural(count: int | None, noun: str) -> str:
    """ "1 rank", "2 ranks", "n/a ranks"."""
    return f"{UNKNOWN if count is None else count} {noun if count == 1 else noun + 's'}"


def render_machine(start: Start) -> str:
    """ "1.26M parameters, 2 ranks on cpu"."""
    device = one_line(start.device) or UNKNOWN
    return f"{render_total(start.parameters)} parameters, {render_plural(start.world, 'rank')} on {device}"


def render_start(start: Start) -> str:
    """How an attempt begins: "resumed from step 500 (step-000000500)", or what the run is."""
    if start.step:
        base = f"resumed from step {start.step}" + (f" ({one_line(start.checkpoint)})" if start.checkpoint else "")
        return f"{base}, changed since: {one_line(', '.join(start.changes))}" if start.changes else base
    return f"started, {render_plural(start.total_steps, 'step')}"


def render_numerics(start: Start) -> str:
    """ "computes in fp32, without TF32, not compiled (a CPU)", each with its reason; "" where it was not recorded."""
    rows = [
        (_NUMERICS[key](value), origin.removeprefix("derived: "))
        for key, value, origin in start.numerics
        if key in _NUMERICS
    ]
    groups = [
        (reason, [words for words, _ in group]) for reason, group in itertools.groupby(rows, key=lambda row: row[1])
    ]
    return one_line(", ".join(f"{', '.join(words)} ({reason})" for reason, words in groups))


_NUMERICS: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "precision.compute": lambda value: f"computes in {value}",
        "precision.tf32": lambda value: "with TF32" if value is True else "without TF32",
        "train.compile": lambda value: "not compiled" if value == "off" else f"{value} compiled",
    }
)
"""Key -> what its value is in words."""


def render_validation(validation: ValidatedEvent, metric: str = "loss") -> str:
    """ "loss 2.4012  1.830 bits/byte  98.51 % correct  f1 0.8125": a script's own metrics come last, of these first the
    one that a best validation is found by."""
    parts = [f"loss {render_loss(validation.loss)}"]
    if validation.bits_per_byte is not None:
        parts.append(f"{validation.bits_per_byte:.3f} bits/byte")
    if validation.accuracy is not None:
        parts.append(f"{validation.accuracy:.2%} correct")
    others = validation.others
    first = {metric: others[metric]} if metric in others else {}
    return "  ".join((*parts, *_render_named({**first, **others})))


def render_logged(logged: Logged) -> str:
    """ "accuracy 0.931  lag 12  at step 400"."""
    return "  ".join((*_render_named(logged.values), f"at step {logged.step}"))


def _render_named(values: Mapping[str, float]) -> list[str]:
    """Some values by their names."""
    shown = [f"{one_line(name)} {value:.4g}" for name, value in list(values.items())[:_MOST_NAMED]]
    return [*shown, f"and {len(values) - _MOST_NAMED} more"] if len(values) > _MOST_NAMED else shown


_MOST_NAMED = 5
"""Values of a script that a line shows."""


def render_monitored(metric: str, value: float) -> str:
    """ "loss 2.4012", "f1 0.8125", "accuracy 98.51 %": what a validation is the best by."""
    return f"accuracy {value:.2%}" if metric == "accuracy" else f"{one_line(metric)} {render_loss(value)}"


def render_account(account: TimeAccount) -> str:
    """ "93 % of 1:02:41, then saving (4 %); start-up 0:38": the productive share of the time after start-up, and where
    most of the rest went, with a remedy where one knows it; start-up by itself."""
    running_s = account.wall_s - account.start_s
    is_shown = account.start_s > 0 and account.start_s >= _SHOWN * account.wall_s
    started = f"start-up {render_time(account.start_s)}" if is_shown else ""
    if running_s <= 0:
        return f"nothing yet; {started}" if started else f"{UNKNOWN} of {render_time(account.wall_s)}"
    words = f"{render_share(account.productive_s, running_s)} of {render_time(running_s)}"
    rest = {name: seconds for name, seconds in account.rows.items() if name not in ("productive_s", "start_s")}
    name, seconds = max(rest.items(), key=lambda row: row[1])
    if seconds >= _SHOWN * running_s:
        remedy = REMEDIES.get(name, "") if seconds >= _WORTH_A_REMEDY * running_s else ""
        words += f", then {ACCOUNT_WORDS[name]} ({render_share(seconds, running_s)}{remedy})"
    return f"{words}; {started}" if started else words


def render_share(part: float, whole: float) -> str:
    """ "93 %", with a decimal where the part is small or nearly all, or n/a."""
    if whole <= 0:
        return UNKNOWN
    percent = 100 * part / whole
    return f"{percent:.1f} %" if 0 < percent < 10 or 99 < percent < 100 else f"{percent:.0f} %"


def render_failed_save(failed: FailedSave) -> str:
    """ "not saved: no space is left; the next try is in 30 s"."""
    return f"not saved: {one_line(failed.reason)}; the next try is in {render_time(failed.retry_s)}"


def render_set_aside(damaged: QuarantinedEvent) -> str:
    """ "step-000000200 is damaged (a shard is missing) and kept as damaged-step-000000200"; on the disk of a node it is
    not kept."""
    if not damaged.kept_as:
        return one_line(f"{damaged.name} on the disks of the nodes was not used and removed ({damaged.reason})")
    what = "undone" if damaged.kept_as.startswith("undone-") else "damaged"
    return one_line(f"{damaged.name} is {what} ({damaged.reason}) and kept as {damaged.kept_as}")


def render_left_out(left_out: SkippedRange) -> str:
    """ "8000 samples (positions 96000 to 104000), back to step 1200: a spike in steps 1298 to 1300"."""
    span = f"positions {left_out.start} to {left_out.end}"
    return one_line(f"{left_out.samples} samples ({span}), back to step {left_out.back_to}: {left_out.reason}")


def render_save(save: Save) -> str:
    """ "saved step-000000100  14.2 MiB in 0.3 s"; on the disks of the nodes it says so."""
    took = "" if save.seconds is None else f" in {save.seconds:.1f} s"
    where = " on the nodes" if save.tier == LOCAL else ""
    return f"saved {one_line(save.name)}{where}  {render_size(save.size_bytes)}{took}"


def render_restart(restart: Restart) -> str:
    """ "starting again from step 40 (2 failures by now): rank 1 was ended by SIGKILL"."""
    base = f"from step {restart.step}" if restart.step else "from the start"
    count = "" if restart.failures in (None, 1) else f" ({restart.failures} failures by now)"
    return one_line(f"starting again {base}{count}: {restart.reason}")


def render_fault(fault: FaultEvent) -> str:
    """ "fault UserError: the first sentence of what happened"."""
    return f"fault {one_line(fault.kind)}: {one_line(fault.message)}"


def render_ending(ending: EndedEvent) -> str:
    """ "stopped at step 120: SIGTERM"."""
    place = "" if ending.step is None else f" at step {ending.step}"
    return f"{ending.state}{place}" + (f": {one_line(ending.reason)}" if ending.reason else "")


def list_last_lines(
    directory: str,
    state: str,
    reason: str,
    *,
    report: str,
    nothing_done: bool,
    status: Mapping[str, Any],
    by_hand: bool,
) -> list[str]:
    """What stands below a run when its command or script ends: where it is, and how it goes on. `report` is the page,
    or the command that makes it; `nothing_done`: the run was finished before, as its `status` says; `by_hand`: no job
    goes on with it."""
    lines = [f"run directory  {directory}", f"report         {report}"]
    if nothing_done:
        key = status.get("finished_by", "train.steps")
        hint = "" if "finished_early" in status else f" (to go on, ask for more with {key})"
        lines.insert(0, f"nothing to do: {one_line(reason)}{hint}")
    if state == "stopped" and by_hand:
        lines.append("to go on, run the same command again")
    return lines
