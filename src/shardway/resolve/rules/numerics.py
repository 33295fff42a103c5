"""Rules of number formats and of the optimizer.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Draft


def what_this_version_lacks_is_refused(draft: Draft) -> None:
    """Refused with a sentence rather than ignored, so that nobody trains something other than what they wrote."""
    if draft.get("precision.compute") in ("fp16", "float8"):
        wish = draft.get("precision.compute")
        draft.refuse(
            "precision.compute",
            f'"{wish}": this version of Shardway does not train in it yet',
            '"fp32", "bf16"',
        )
    if draft.get("model.hf"):
        draft.refuse(
            "model.hf",
            f'"{draft.get("model.hf")}": this version of Shardway does not load Hugging Face models yet',
            "empty, with model.kind naming a reference model; or `run.shard(your_model)` in a script of your own",
        )


def tf32_needs_a_device_that_has_it(draft: Draft) -> None:
    if draft.get("precision.tf32") and draft.get("run.device") == "cpu":
        draft.refuse("precision.tf32", "true has no effect on a CPU", "false")


def nesterov_needs_momentum(draft: Draft) -> None:
    if draft.get("optim.nesterov") and draft.get("optim.momentum") == 0:
        draft.refuse("optim.nesterov", "true needs optim.momentum above 0", "false, or a momentum")
