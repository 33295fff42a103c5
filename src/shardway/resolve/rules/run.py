"""Rules of the process, of checkpoints, and of the guard.

Invariant: a rule derives an open key or refuses; it never changes what the user set.
"""

from __future__ import annotations

from shardway.resolve.draft import Draft, Rule, fact_of, list_rules, takes_of
from shardway.units import render_seconds


def a_run_without_a_name_is_called_after_its_file(draft: Draft) -> None:
    if draft.get("run.name") == "auto":
        draft.derive("run.name", draft.file_name, "name of the run file")


def a_run_uses_the_accelerator_where_there_is_one(draft: Draft) -> None:
    accelerators = draft.circumstances.accelerators
    if draft.get("run.device") == "auto":
        found = f"{accelerators} accelerators found" if accelerators else "no accelerator found"
        draft.derive("run.device", "cuda" if accelerators else "cpu", found)
    elif draft.get("run.device") == "cuda" and not accelerators:
        draft.refuse("run.device", '"cuda" is asked for and this machine shows no accelerator', '"auto" or "cpu"')


def ranks_of_a_node_share_its_cores(draft: Draft) -> None:
    if draft.get("run.threads") == "auto":
        facts = draft.circumstances
        threads = max(1, facts.usable_cores // facts.ranks_per_node)
        draft.derive("run.threads", threads, f"{facts.usable_cores} cores / {facts.ranks_per_node} ranks on a node")


def timeouts_are_nested(draft: Draft) -> None:
    """The innermost timeout must fire first, since only it can name the operation that hangs."""
    collective = draft.get("run.collective_timeout")
    for outer in ("run.start_timeout", "run.stop_timeout"):
        if draft.get(outer) <= collective:
            what = (
                f"{render_seconds(collective)} is not shorter than {outer} = {render_seconds(draft.get(outer))}, so a "
                "hanging collective would be ended before it can say which operation hangs"
            )
            allowed = f"less than {render_seconds(draft.get(outer))}"
            draft.refuse("run.collective_timeout", what, allowed, f"lower run.collective_timeout or raise {outer}")


def a_job_has_as_many_nodes_as_the_run_may(draft: Draft) -> None:
    elastic, nodes = draft.get("run.elastic"), draft.get("site.nodes")
    if elastic != "off" and not elastic[0] <= nodes <= elastic[1]:
        what = f"{elastic} leaves out site.nodes = {nodes}"
        remedy = f"set site.nodes to {elastic[0]} to {elastic[1]}, or widen run.elastic"
        draft.refuse("run.elastic", what, f"a range with {nodes} in it", remedy)


# --- the guard


def a_probe_repeats_what_has_one_result(draft: Draft) -> None:
    """On a GPU some operations sum in varying order, so two runs of a healthy device differ."""
    probes = draft.get("guard.probe_every") != "off"
    if probes and draft.get("run.device") == "cuda" and not draft.get("train.deterministic"):
        what = (
            "two runs of the same passes are compared bit by bit, and on a GPU operations have one result only with "
            "train.deterministic = true"
        )
        draft.refuse("guard.probe_every", what, '"off"; or train.deterministic = true')


def a_run_goes_back_before_spikes_that_are_looked_for(draft: Draft) -> None:
    if draft.get("guard.on_spike") == "roll_back" and draft.get("guard.spike") == "off":
        what = '"roll_back", and guard.spike = "off" looks for no spike'
        draft.refuse("guard.on_spike", what, '"warn"; or a guard.spike such as 8.0')


def a_run_goes_back_to_what_was_saved(draft: Draft) -> None:
    saves = draft.get("checkpoint.every") != "off" or draft.get("checkpoint.keep_every") != "off"
    if draft.get("guard.on_spike") == "roll_back" and not saves:
        what = '"roll_back" goes back to a checkpoint, and checkpoint.every = "off" makes none'
        draft.refuse("guard.on_spike", what, '"warn"; or a checkpoint.every such as "200 steps"')


def a_spike_that_is_left_out_is_left_out_whole(draft: Draft) -> None:
    most, steps = draft.get("guard.max_left_out"), draft.get("guard.spike_steps")
    if draft.get("guard.on_spike") == "roll_back" and most < steps:
        what = f"{most} batches do not reach back to the beginning of a spike of guard.spike_steps = {steps} steps"
        draft.refuse("guard.max_left_out", what, f"at least {steps}")


# --- data on the disks of nodes


def data_are_staged_to_a_whole_path(draft: Draft) -> None:
    wanted, facts = draft.get("data.stage"), draft.circumstances
    if wanted == "auto" and facts.local_disk:
        draft.derive("data.stage", facts.local_disk, f"node.local_disk of the site {facts.site}")
    elif wanted == "auto":
        draft.derive("data.stage", "off", "no node.local_disk in the site profile")
    elif wanted != "off" and not wanted.startswith(("/", "~", "$")):
        what = f'"{wanted}" is no whole path, and each node would look for it elsewhere'
        draft.refuse("data.stage", what, '"auto", "off", or a string that begins with /, ~ or $, such as "$TMPDIR"')


def windows_are_those_of_one_data_set(draft: Draft) -> None:
    if draft.get("data.shuffle") != "windows":
        return
    if draft.get("data.blend") or draft.get("data.pack"):
        what = '"windows" visits the samples of one data set file by file, and '
        what += (
            "data.blend names several" if draft.get("data.blend") else "data.pack = true packs those of several files"
        )
        draft.refuse("data.shuffle", what, "true or false")


def what_is_only_gathered_needs_no_loader_process(draft: Draft) -> None:
    takes = takes_of(draft.get("model.kind"))
    computed = any(takes in fact_of("data.kind", kind, "computes") for kind in draft.data_kinds)
    if not draft.is_set("data.workers") and not computed:  # one that a script asks for reads its own dataset
        draft.derive("data.workers", 0, "the samples are only gathered, which the rank does fastest")


# --- checkpoints


def what_nodes_save_has_a_folder(draft: Draft) -> None:
    folder = draft.get("checkpoint.local_dir")
    if folder and not folder.startswith(("/", "~", "$")):
        what = f'"{folder}" is no whole path, and each node would look for it elsewhere'
        draft.refuse("checkpoint.local_dir", what, 'a string that begins with /, ~ or $, such as "$TMPDIR"')
    if draft.get("checkpoint.local_every") == "off" or folder:
        return
    facts = draft.circumstances
    if facts.local_disk:
        draft.derive("checkpoint.local_dir", facts.local_disk, f"node.local_disk of the site {facts.site}")
        return
    what = f"each node saves on its own disk, and the site {facts.site} says of no folder there (node.local_disk)"
    allowed = '"off"; or a checkpoint.local_dir such as "$TMPDIR" or "/local/scratch"'
    draft.refuse("checkpoint.local_every", what, allowed)


def what_nodes_save_is_written_by_shardway(draft: Draft) -> None:
    """DeepSpeed writes its files from all ranks into one folder."""
    if draft.get("checkpoint.local_every") != "off" and draft.get("train.engine") == "deepspeed":
        what = "DeepSpeed writes its files into one folder that all ranks see, not on the disks of nodes"
        draft.refuse("checkpoint.local_every", what, '"off"; or train.engine = "torch"')


RULES: tuple[Rule, ...] = list_rules(globals())
