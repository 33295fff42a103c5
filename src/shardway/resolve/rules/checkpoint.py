"""Rules of which checkpoints are kept, and of what is saved on the disks of nodes.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Draft


def what_nodes_save_has_a_folder(draft: Draft) -> None:
    folder = draft.get("checkpoint.local_dir")
    if folder and not folder.startswith(("/", "~", "$")):
        draft.refuse(
            "checkpoint.local_dir",
            f'"{folder}" is no whole path, and each node would look for it elsewhere',
            'a text that begins with /, ~ or $, such as "$TMPDIR"',
        )
    if draft.get("checkpoint.local_every") == "off" or folder:
        return
    facts = draft.circumstances
    if facts.local_disk:
        draft.derive("checkpoint.local_dir", facts.local_disk, f"node.local_disk of the site {facts.site}")
        return
    draft.refuse(
        "checkpoint.local_every",
        f"each node saves on its own disk, and the site {facts.site} says of no folder there (node.local_disk)",
        '"off"; or a checkpoint.local_dir such as "$TMPDIR" or "/local/scratch"',
    )


def what_nodes_save_is_written_by_shardway(draft: Draft) -> None:
    """DeepSpeed's files are written by all ranks into one folder."""
    if draft.get("checkpoint.local_every") != "off" and draft.get("train.engine") == "deepspeed":
        draft.refuse(
            "checkpoint.local_every",
            "DeepSpeed writes its files into one folder that all ranks see, not on the disks of nodes",
            '"off"; or train.engine = "torch"',
        )


def the_best_is_found_by_validating(draft: Draft) -> None:
    """Whether a script hands over something to validate on is seen later (`train.monitoring`)."""
    off = f'train.validate_every = "off" ({draft.origin("train.validate_every")}) makes none'
    remedy = 'set train.validate_every, such as "100 steps"'
    if draft.get("train.validate_every") != "off":
        return
    if best := draft.get("checkpoint.keep_best"):
        draft.refuse("checkpoint.keep_best", f"{best} is of steps with the best validation, and {off}", "0", remedy)
    if (patience := draft.get("train.patience")) != "off":
        draft.refuse("train.patience", f"{patience} is a number of validations, and {off}", '"off"', remedy)
