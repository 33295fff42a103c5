"""The keys of a run file about the process and the machine: [run] and [site].

Invariant: as in `schema`: strict keys, each with its sentence. This module must not check one key against another.
"""

from __future__ import annotations

from typing import Literal

from shardway.runfile.section import NonNegativeInt, PositiveInt, Section, key
from shardway.runfile.types import Auto, BytesField, ElasticField, Off, SecondsField, SettingsField


class RunSection(Section):
    """The process: where it writes, on what it runs, how long it waits."""

    name: str = key("auto", "Name of the run; auto = the run file's name.", pattern=r"^[^/\x00]*[^/\x00.][^/\x00]*$")
    root: str = key("runs", "Folder of run directories; the run directory is root/name unless --dir is given.")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Device of the model; auto = cuda where there is one.")
    threads: PositiveInt | Auto = key("auto", "CPU threads a rank; auto = usable cores / ranks on the node.")
    start_timeout: SecondsField = key(600.0, "How long ranks wait for each other at the start.")
    collective_timeout: SecondsField = key(300.0, "How long a collective waits before the job is ended.")
    hang_timeout: SecondsField | Auto | Off = key(
        "auto",
        "How long a rank may do nothing before it is taken to hang and the ranks start again; auto = three times what "
        "its activity usually takes and 5 s, and a minute more where it waits for files (under an agent).",
    )
    max_restarts: NonNegativeInt | Auto = key(
        "auto",
        "How often ranks start again after a failure; auto = while checkpoints get newer (under an agent).",
    )
    spares: SecondsField | Auto | Off = key(
        "auto",
        "How long after the first step spare processes are started, which import torch and wait, so that ranks start "
        "again sooner; where a rank fails before that, then; auto = a minute, where memory is left; off = none (under "
        "an agent).",
    )
    elastic: ElasticField = key(
        "off",
        "The fewest and the most nodes of the run, such as [2, 4]: where a node is lost it goes on with those that are "
        "left (`shardway train --nodes`), and the next attempt has all of site.nodes again; off = with all or not.",
    )
    stop_timeout: SecondsField = key(900.0, "How long a graceful stop may take before ranks are killed.")
    stop_margin: SecondsField | Auto = key(
        "auto", "How long before the end of the wall-time the run stops; auto = from the time that saves take."
    )
    display: Literal["auto", "off"] = key(
        "auto", "What is shown while it trains: auto = how it starts, its steps and its end; off = errors alone."
    )


class SiteSection(Section):
    """The machine, and what is asked of it."""

    name: str = key("laptop", "A shipped profile, one of your own, or the path of one.")
    nodes: PositiveInt = key(1, "Nodes of a job.")
    ranks_per_node: PositiveInt | Auto = key(
        "auto", "Ranks on each node; auto = its accelerators, or 1 where it has none."
    )
    walltime: SecondsField | Auto = key("auto", "Wall-time of one attempt; auto = the longest that the queue allows.")
    queue: str = key("", "Queue or partition; empty = the first of the site.")
    account: str = key("", "Account, project or budget that is charged.")
    accelerator_type: str = key(
        "", 'Type of accelerator, where a partition has several: "a100" asks Slurm for gpu:a100:N; empty = the site\'s.'
    )
    memory: BytesField | Auto = key("auto", "Memory of a node; auto = all of it where the site wants it said.")
    launcher: Literal["auto", "torchrun", "srun", "mpirun", "agent", "ft_launcher"] = key(
        "auto",
        "What starts the ranks; agent = `shardway train --nodes`, which starts them again in place; ft_launcher = that "
        "of NVIDIA's resiliency extension; auto = agent for a training (under PBS where run.elastic is set), else the "
        "site's.",
    )
    container: Literal["auto", "none", "pyxis", "enroot", "apptainer", "podman", "charliecloud"] = key(
        "auto", "Container runtime; auto = the site's where image is set, or else none."
    )
    image: str = key("", "Container image: a file on the site, or a URI where the runtime takes one.")
    mounts: list[str] = key([], "SOURCE:TARGET[:ro] of folders that the container sees besides those of the run.")
    modules: list[str] = key([], "Environment modules to load after those of the site, with versions.")
    venv: str = key(
        "auto",
        'Python environment of the ranks: folder of a venv, "conda:NAME", or "none"; auto = the one that submits, but '
        "none in a container.",
    )
    preflight: bool = key(False, "Let `shardway doctor` look at the nodes of each attempt before its ranks start.")
    environment: SettingsField = key({}, "Environment variables of the job; no secrets, which come from a file.")
    options: SettingsField = key(
        {}, 'Options of the scheduler that no key names, such as {reservation = "x", exclusive = true}.'
    )
