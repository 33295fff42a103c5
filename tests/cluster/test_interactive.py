"""`shardway shell` and `shardway exec` on a real Slurm, and which partition would start a job soonest."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator

import pytest
from real_cluster import MACHINE
from submitting import SHARDWAY, Person, Submitted

SCRIPT = """\
import pathlib, time

until = time.time() + 120
while time.time() < until and not pathlib.Path("enough").exists():
    time.sleep(0.2)
"""
VARIABLES = 'site.environment={OWN = "a b$c"}'


class Terminal:
    """A command at a terminal of its own on the login node."""

    def __init__(self, alice: Person, *words: object) -> None:
        self.near, far = pty.openpty()
        cluster, path = alice.cluster, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {"PATH": path, "NAME": cluster.name, "ROOT": str(cluster.root), "FOLDER": str(alice.folder)}
        self.process = subprocess.Popen(
            [str(MACHINE / "enter.sh"), "login", "alice", "env", "TERM=dumb", SHARDWAY, *map(str, words)],
            env=environment,
            stdin=far,
            stdout=far,
            stderr=far,
            start_new_session=True,
        )
        os.close(far)
        self.shown = ""

    def ask(self, shell: str) -> str:
        """What a line of shell prints. The marks around it are not those that are typed."""
        os.write(self.near, f'echo "@$((20 + 3)):$({shell}):$((20 + 4))@"\n'.encode())
        self.until("@23:")
        return self.until(":24@")

    def leave(self, code: int) -> int:
        """Leave the shell with a code; the one that the command has ended with."""
        os.write(self.near, f"exit {code}\n".encode())
        try:
            while select.select([self.near], [], [], 20)[0] and os.read(self.near, 4096):
                pass
        except OSError:  # the other end is closed
            pass
        return self.process.wait(20)

    def until(self, text: str, timeout_s: float = 30.0) -> str:
        """What is shown up to where this text comes."""
        end = time.monotonic() + timeout_s
        while text not in self.shown:
            ready, _, _ = select.select([self.near], [], [], max(0.0, end - time.monotonic()))
            assert ready, self.shown
            self.shown += os.read(self.near, 4096).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.near)


@pytest.fixture(scope="module")
def running(busy_alice: Person) -> Iterator[Submitted]:
    """A command on two nodes."""
    busy_alice.write("train.py", SCRIPT)
    words = ("--on", "generic-slurm", "--nodes", "2", "--walltime", "5m", VARIABLES, "run.name=there")
    run = busy_alice.submit(*words, "site.launcher=srun", "--", "python", "train.py")
    busy_alice.cluster.wait_until(run.job(), "RUNNING")
    yield run
    (run.directory.work / "enough").touch()


def test_a_command_runs_on_each_node_of_a_job(running: Submitted, busy_alice: Person) -> None:
    script = 'echo "$(hostname)|$OWN|$PWD|$SLURM_JOB_ID|$SHARDWAY_ATTEMPT_DIR|$(command -v python)"; exit 7'
    attempt, python = running.directory.attempt(1).path, SHARDWAY.replace("shardway", "python")
    done = busy_alice.shardway("exec", running.path, "--node", "n2", "--", "bash", "-c", script)
    found = f"n2|a b$c|{running.directory.work}|{running.job()}|{attempt}|{python}\n"
    assert (done.stdout, done.returncode) == (found, 7), done.stderr
    told = busy_alice.told("exec", running.path, "--all", "--", "bash", "-c", "echo -e 'a\\nb'")
    assert sorted(told.splitlines()) == ["n1  a", "n1  b", "n2  a", "n2  b"]


def test_a_rank_is_found_where_it_runs(running: Submitted, busy_alice: Person) -> None:
    look = "hostname; tr '\\0' ' ' < /proc/{pid}/cmdline; tr '\\0' '\\n' < /proc/{pid}/environ | grep ^RANK="
    told = busy_alice.told("exec", running.path, "--rank", 1, "--", "bash", "-c", look).split()
    assert (told[0], told[2:]) == ("n2", ["train.py", "RANK=1"])


def test_a_shell_in_a_job_has_a_terminal(running: Submitted, busy_alice: Person) -> None:
    there = Terminal(busy_alice, "exec", running.path, "--node", 1, "--", "bash", "--norc")
    assert there.ask("echo $(hostname) $(tty)").startswith("n2 /dev/pts/")
    assert there.leave(5) == 5
    there.close()


def test_a_shell_is_on_nodes_of_its_own(busy_alice: Person) -> None:
    """The step of the shell leaves its nodes to the steps that are started in it."""
    words = ("shell", "--on", "generic-slurm", "--nodes", "2", "--walltime", "5m", VARIABLES)
    there = Terminal(busy_alice, *words)
    own, folder, python = there.ask('echo "$OWN|$PWD|$(command -v python)"').split("|")
    assert (own, folder) == ("a b$c", str(busy_alice.folder))
    assert python == SHARDWAY.replace("shardway", "python")
    hosts = there.ask("srun hostname | sort | xargs").split()
    assert len(set(hosts)) == 2
    assert there.ask("hostname") == hosts[0]
    assert there.leave(7) == 7
    there.close()


def test_partitions_say_when_they_would_start_a_job(running: Submitted, busy_alice: Person) -> None:
    """The one node of `debug` is full; `--test-only` alone names a start in partitions that never start the job."""
    cluster = busy_alice.cluster
    filler = cluster.submit("#!/bin/bash\nsleep 100\n", "--nodelist=n1", "--cpus-per-task=3", "--time=2")
    cluster.wait_until(filler, "RUNNING")
    ask = ("--on", "generic-slurm", "--walltime", "4m", "site.account=physics")
    rows = {row["queue"]: row for row in busy_alice.facts("submit", "--when", *ask, "--", "python", "train.py")}
    assert [row["start"] is not None for row in rows.values()] == [True, True, True, False, False]
    assert rows["debug"]["start"] > rows["batch"]["start"] + 30
    assert rows["closed"]["reasons"] == ["its state is DOWN"]
    assert rows["staff"]["reasons"] == ['site.account: "physics" may not use it; allowed: staff']
    busy_alice.add_site("two", *(f'[[queues]]\nname = "{name}"' for name in ("debug", "batch")))
    script = busy_alice.told("submit", "--soonest", "--dry-run", "--on", "two", *ask[2:], "--", "python", "train.py")
    assert "#SBATCH --partition=batch\n" in script
    cluster.output("scancel", filler)
