"""A real Slurm of several hosts on this machine, as tests see it: run a command there, wait for a job, break a host.

Invariant: whatever is done goes through the scripts in machine/, so that a test and a hand at the keyboard do the same.
This module must not decide whether the cluster may be started; conftest.py does.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MACHINE = Path(__file__).parent / "machine"
ENDED = frozenset(
    {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"}
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_POLL_S = 0.1
_AWAIT = """
job=$1 end=$((SECONDS + $2))
shift 2
while line=$(scontrol show job --oneliner "$job") || exit; do
    state=${line#*JobState=}
    for each; do [ "${state%% *}" != "$each" ] || break 2; done
    [ $SECONDS -lt $end ] || break
    sleep 0.2
done
echo "$line"
"""
"""JOB SECONDS STATE...: what scontrol shows of a job once it is in one of these states, or the time is over."""
_QUIETLY = 'out=$(mktemp); trap "rm -f $out" EXIT; "$@" >"$out" 2>&1; code=$?; cat "$out"; exit $code'


class ClusterError(Exception):
    """A script or command of the cluster failed, or something that was waited for did not come."""


@dataclass(frozen=True)
class Cluster:
    """The cluster that is up under this name. Paths are the same inside and outside of it."""

    name: str
    root: Path

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: the host is "login", the user alice."""
        return self.root / "conf" / "ssh" / "config"

    def home(self, user: str = "alice") -> Path:
        """The user's home, which all hosts share."""
        return self.root / "home" / user

    def folder(self, name: str, user: str = "alice") -> Path:
        """A new folder in the user's home; a number is added where the name is taken."""
        paths = (self.home(user) / (f"{name}-{number}" if number else name) for number in range(1000))
        path = next(path for path in paths if not path.exists())
        path.mkdir()
        owner = self.home(user).stat()
        os.chown(path, owner.st_uid, owner.st_gid)
        return path

    def run(
        self,
        *words: object,
        user: str = "alice",
        host: str = "login",
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end on a host ("login", "n1", "ctl"), with the plain environment of a login and these
        variables. Starts in the user's home if no folder is given."""
        assigned = [f"{name}={value}" for name, value in (variables or {}).items()]
        command = ["env", *assigned, *words] if assigned else list(words)
        return subprocess.run(
            [str(MACHINE / "enter.sh"), host, user, *map(str, command)],
            env=self._environment(**({"FOLDER": str(folder)} if folder else {})),
            input=stdin,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=timeout_s,
        )

    def output(self, *words: object, user: str = "alice", host: str = "login", folder: Path | None = None) -> str:
        """What a command prints that has to succeed."""
        return _checked(self.run(*words, user=user, host=host, folder=folder))

    def submit(self, script: str, *options: str, user: str = "alice", folder: Path | None = None) -> str:
        """Submit the text of a job script with plain sbatch; its number."""
        done = self.run("sbatch", "--parsable", *options, user=user, folder=folder, stdin=script)
        return _checked(done).strip()

    def describe(self, job: str) -> dict[str, str]:
        """What the scheduler says of a job (`scontrol show job`), by its own names."""
        return _read_fields(self.output("scontrol", "show", "job", "--oneliner", job))

    def wait_until(self, job: str, *states: str, timeout_s: float = 60.0) -> str:
        """Wait until the job is in one of these states, by default one that it ends in; that state.

        Raises ClusterError when the time is over, or when it has ended in another one.
        """
        wanted = frozenset(states) or ENDED
        words = ("bash", "-c", _AWAIT, "await", job, int(timeout_s), *sorted(wanted | ENDED))
        fields = _read_fields(_checked(self.run(*words, timeout_s=timeout_s + 60)))
        state = fields["JobState"]
        if state not in wanted:
            raise ClusterError(f"job {job} is {state}, not {' or '.join(sorted(wanted))}: {fields}")
        return state

    def accounted(self, job: str, *fields: str, timeout_s: float = 60.0) -> dict[str, str]:
        """Fields of a job that has ended from accounting (`sacct -X`), which lags a second or so behind."""
        columns = ("State", "End", *fields)
        found: dict[str, str] = {}

        def ended() -> bool:
            text = self.output("sacct", "-X", "-n", "-P", "-j", job, f"--format={','.join(columns)}")
            found.update(zip(columns, text.strip().split("|"), strict=False))
            return found.get("End", "Unknown") != "Unknown"

        wait_for(f"job {job} in accounting", ended, timeout_s)
        return found

    def crash(self, host: str) -> None:
        """Every process on the host dies at once."""
        self._control("crash", host)

    def boot(self, host: str) -> None:
        """Start a host that crashed."""
        self._control("boot", host)

    def cut(self, host: str) -> None:
        """Pull the host's network cable."""
        self._control("cut", host)

    def mend(self, host: str) -> None:
        """Put the cable in again."""
        self._control("mend", host)

    def stop_scheduler(self) -> None:
        """End slurmctld in order; jobs go on, and no command gets an answer."""
        self._control("stop")

    def start_scheduler(self) -> None:
        """Start slurmctld again, and wait until it answers."""
        self._control("run")

    def clear(self) -> None:
        """Cancel all jobs, boot and connect all hosts, resume nodes that were drained."""
        self._control("heal")

    def _control(self, *words: str) -> None:
        _checked(run_script("daemons.sh", *words, environment=self._environment()))

    def _environment(self, **more: str) -> dict[str, str]:
        return {"PATH": _PATH, "NAME": self.name, "ROOT": str(self.root), **more}


@dataclass(frozen=True)
class Image:
    """A small system with Python and without torch, and what has to be mounted so that it finds torch and Shardway."""

    folder: Path
    squashfs: Path
    mounts: dict[Path, str]
    """Of this machine -> in the container. The clusters' folder, homes and all, keeps its path."""


def bring_up(name: str, root: Path, **settings: str) -> Cluster:
    """Start the cluster, or mend the one that is up. Settings are those of machine/settings.sh and up.sh."""
    environment = {"PATH": _PATH, "NAME": name, "ROOT": str(root), **settings}
    _checked(run_script("up.sh", environment=environment))
    return Cluster(name, root)


def take_down(cluster: Cluster) -> None:
    """End the cluster and remove all of it."""
    environment = {"PATH": _PATH, "NAME": cluster.name, "ROOT": str(cluster.root)}
    _checked(run_script("down.sh", environment=environment))


def run_script(name: str, *words: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script of machine/. Its output goes to files: the daemons that it starts would hold a pipe open."""
    return subprocess.run(
        ["bash", "-c", _QUIETLY, "run", str(MACHINE / name), *words],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def wait_for(what: str, holds: Callable[[], bool], timeout_s: float) -> None:
    """Wait until something holds. Raises ClusterError when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s in vain for: {what}")
        time.sleep(_POLL_S)


def _read_fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        words = " ".join(word for word in done.args if word is not _QUIETLY)
        raise ClusterError(f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
