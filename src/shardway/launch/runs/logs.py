"""What the jobs of a run printed: the job's own output, that of one rank in it, or the files of one node.

Lines of ranks begin with the rank, whoever started them: "3: ..." (torchrun as the job script sets it, srun --label),
"[1,3]<stdout>: ..." (mpirun --tag-output).

Invariant: following ends when the attempt has ended, on every host. This module must not print.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardway.errors import UserError
from shardway.launch.hosts.base import Host
from shardway.launch.runs.ledger import Entry, Ledger
from shardway.rundir.attempts import Attempt

_FOLLOW = """end=$1 log=$2; shift 2; tail -q -n +1 -F "$@" 2>/dev/null & tail=$!
trap 'kill "$tail"' EXIT
while [ ! -e "$end" ]; do sleep 1; done
for second in {1..30}; do
  grep -qE 'shardway: (attempt [0-9]+: |nothing to do)' "$log" && break
  sleep 1
done; sleep 1"""
"""A rank says how it ended before it prints that; the job script's last word comes after those of all ranks, unless the
job was killed."""
_RANK = re.compile(r"\s*(?:(?P<rank>\d+): |\[\d+,(?P<mpi>\d+)\]<std\w+>:)")


def choose_attempt(ledger: Ledger, number: int | None) -> Entry:
    """The attempt of that number, or the newest that has begun. Raises UserError where there is none."""
    begun = [entry for entry in ledger.entries if entry.started is not None] or list(ledger.entries)
    chosen = [entry for entry in ledger.entries if entry.number == number] if number else begun[-1:]
    if not chosen:
        known = ", ".join(str(entry.number) for entry in ledger.entries) or "none"
        raise UserError(f"{ledger.run.path} has no attempt {number or ''}; attempts: {known}.")
    return chosen[0]


def read_output(host: Host, attempt: Attempt, node: int | None, *, follow: bool) -> Iterator[str]:
    """Lines of the job's output, or of every rank of one node. Raises UserError where nothing was printed yet."""
    paths = [str(attempt.job_log)] if node is None else _files_of_node(host, attempt, node)
    if follow:
        words = ("bash", "-c", _FOLLOW, "follow", str(attempt.result_path), str(attempt.job_log), *paths)
        return host.follow(words)
    done = host.run(("cat", "--", *paths))
    if not done.ok and not done.out:
        raise UserError(f"attempt {attempt.number} has printed nothing yet: {done.err.strip()}")
    return iter(done.out.splitlines())


def only_rank(lines: Iterable[str], rank: int) -> Iterator[str]:
    """The lines of one rank, without what says so."""
    for line in lines:
        match = _RANK.match(line)
        if match and int(match["rank"] or match["mpi"]) == rank:
            yield line[match.end() :]


def _files_of_node(host: Host, attempt: Attempt, node: int) -> list[str]:
    folder: Path = attempt.node_log_folder(node)
    done = host.run(("find", str(folder), "-name", "std*.log"))
    files = sorted(path for path in done.out.split("\n") if path)
    if not files:
        raise UserError(
            f"attempt {attempt.number} has no output of node {node} by itself.\n"
            "  torchrun keeps such files; with srun and mpirun all of it is in the job's output: "
            "`shardway logs --job --rank R`."
        )
    return files
