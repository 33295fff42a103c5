"""Makes a folder of kept data by the Shardway that is installed: what every later version has to read and to repeat.

    python tests/kept/make_kept.py 2027-03 --in /scratch/kept

Start it when formats or numbers have changed: the new folder lies beside the older ones, which stay. Its inputs (texts,
loop.py, run_files, profiles) are copies of those of the newest folder, unless they are there already: where keys were
added, copy and edit them first. It says which keys no run file sets. What a folder has by then is not made again.
`--in` is an empty folder in which the runs are made; /tmp will not do, since jobs are refused there.

Invariant: a folder that is complete (about.json) is never written to. Shardway is reached by its public doors alone.
What is written names neither this machine nor who made it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cases_kept import CASES, FAILED, FINISHED, JOB, KILLED, LOCAL, SHARDED, SPIKED
from kept_folders import (
    BESIDE,
    HERE,
    PLAN,
    VERSIONS,
    ask_all,
    check_ended,
    continue_run,
    copy,
    fake_scheduler,
    plan_counted,
    play,
    read_events,
    read_json,
    resolve_all,
    show_profiles,
)
from still_machine import STILL, StillMachine

INPUTS = ("text.txt", "spiky.txt", "loop.py", "run_files", "profiles", "plans/counted.toml")
PLACE = "/scratch/kept"
"""Where the runs say that they were made."""

SHARDWAY = Path(sys.executable).with_name("shardway")


def main() -> None:
    """Make the folder that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="of the new folder: the month, such as 2027-03")
    parser.add_argument("--in", dest="place", type=Path, default=Path(PLACE), help="an empty folder")
    given = parser.parse_args()
    kept = HERE / given.name
    if (kept / "about.json").exists():
        sys.exit(f"{kept} is complete: what is kept is never changed. Name a new folder.")
    if given.place.exists() and any(given.place.iterdir()):
        sys.exit(f"{given.place} is not empty")
    kept.mkdir(exist_ok=True)
    for name in INPUTS:
        if not (kept / name).exists():
            (kept / name).parent.mkdir(exist_ok=True)
            copy(VERSIONS[-1] / name, kept / name)
    given.place.mkdir(parents=True, exist_ok=True)
    with StillMachine() as machine, StillMachine(trains=False) as reader:
        maker = Maker(kept, given.place.resolve(), machine, reader)
        maker.make()
    write_json(kept / "about.json", about())
    print(f"made {kept}: read it, and commit it")


def about() -> dict[str, str]:
    """What made it."""
    return {
        "shardway": version("shardway"),
        "torch": version("torch"),
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_json(path: Path, content: Any) -> None:
    """As git shows changes best."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


class Maker:
    """Makes runs in `place`, and brings them into the folder `kept`."""

    def __init__(self, kept: Path, place: Path, machine: StillMachine, reader: StillMachine) -> None:
        self.kept, self.place, self.machine, self.reader = kept, place, machine, reader
        self.runs = place / "runs"

    def make(self) -> None:
        """What is not there yet."""
        if not (self.kept / "goes_on.json").exists():
            self.make_runs()
        self.make_answers()
        self.make_files()
        self.make_numbers()

    def make_numbers(self) -> None:
        """Every case, played."""
        numbers = {}
        for name, case in CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                for each in BESIDE:
                    copy(self.kept / each, Path(folder) / each)
                numbers[name] = {"parts": case["parts"], **play(self.machine, case, Path(folder))}
            print(f"numbers of {name}")
        write_json(self.kept / "numbers.json", numbers)

    # --- run directories

    def make_runs(self) -> None:
        """Run directories of every kind, and how each goes on, by its words."""
        project = self.place / "project"
        project.mkdir()
        for name in BESIDE:
            copy(self.kept / name, project / name)
        goes_on: dict[str, Any] = {}
        for name, make in {
            "finished": self.make_finished,
            "stopped": self.make_stopped,
            "failed": self.make_failed,
            "killed": self.make_killed,
            "spiked": self.make_spiked,
            "own-loop": self.make_own_loop,
            "own-disks": self.make_local,
            "slurm": self.make_slurm,
            "pbs": self.make_pbs,
        }.items():
            goes_on[name] = make(self.runs / name, project)
            target = self.kept / "runs" / name
            left = shutil.ignore_patterns("report.html", "writer.lock", "__pycache__")
            shutil.copytree(self.runs / name, target, symlinks=True, ignore=left)
            neutralise(target, self.place)
            print(f"made {name}")
        write_json(self.kept / "goes_on.json", {name: {"words": words} for name, words in goes_on.items()})

    def make_answers(self) -> None:
        """What is said of each run, and its numbers when it goes on."""
        goes_on = read_json(self.kept / "goes_on.json")
        for name, each in goes_on.items():
            if each["words"] is not None:
                each |= self.tell(name, each["words"])
        write_json(self.kept / "goes_on.json", goes_on)
        first = self.ask()
        time.sleep(2.1)  # what differs a moment later is no fact of the run
        again = self.ask()
        write_json(self.kept / "answers.json", keep_alike(first, again))

    def ask(self) -> dict[str, Any]:
        """All answers as they are now."""
        with tempfile.TemporaryDirectory() as folder:
            return ask_all(self.reader, self.kept, Path(folder))

    def tell(self, name: str, words: Any) -> dict[str, Any]:
        """How the kept run goes on."""
        with tempfile.TemporaryDirectory() as folder:
            return continue_run(self.machine, self.kept, name, words, Path(folder))

    def make_finished(self, run: Path, project: Path) -> Any:
        check_ended(self.machine.train(1, ["train", "--dir", run, *FINISHED], project))
        return {"ranks": 1, "words": [*FINISHED, "train.steps=10"]}

    def make_stopped(self, run: Path, project: Path) -> Any:
        """Two ranks with a shard each, stopped by the command."""
        words = [*SHARDED, "train.steps=1000"]
        with self.training(2, ["train", "--dir", run, *words], project):
            wait_for_step(run, 4)
            (told,) = self.reader.run(["stop", run], folder=project)
            assert told.code == 0, told.err
        status = read_json(run / "status.json")
        assert status["state"] == "stopped", status
        return {"ranks": 1, "words": [*SHARDED, "parallel.dp_shard=1", f"train.steps={status['step'] + 4}"]}

    @contextlib.contextmanager
    def training(self, ranks: int, words: list[Any], folder: Path) -> Iterator[None]:
        """Ranks that train meanwhile."""
        thread = threading.Thread(target=self.machine.train, args=(ranks, words, folder))
        thread.start()
        yield
        thread.join()

    def make_failed(self, run: Path, project: Path) -> Any:
        (told,) = self.machine.train(1, ["train", "--dir", run, *FAILED], project)
        assert told.code == 4, told
        return {"ranks": 1, "words": [*FAILED, "optim.lr=0.01", "checkpoint.every=4 steps"]}

    def make_killed(self, run: Path, project: Path) -> Any:
        """Two ranks below an agent, of which one is killed."""
        command = [SHARDWAY, "train", "--nproc", "2", "--dir", run, *KILLED, "train.steps=1000"]
        with subprocess.Popen(command, cwd=project, env=self.environ(), stderr=subprocess.PIPE, text=True) as process:
            wait_for_step(run, 5)
            first = next(each for each in read_events(run) if each["event"] == "started")
            parent = Path(f"/proc/{first['pid']}/stat").read_text().rpartition(")")[2].split()[1]
            ranks = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            os.kill(max(pid for pid in map(int, ranks) if is_rank(pid, "1")), signal.SIGKILL)
            said = process.communicate()[1]
        assert process.returncode == 4, said
        return {"ranks": 2, "words": [*KILLED, "train.steps=10", "checkpoint.every=5 steps"]}

    def make_spiked(self, run: Path, project: Path) -> Any:
        check_ended(self.machine.train(1, ["train", "--dir", run, *SPIKED], project))
        assert any(each["event"] == "rolled_back" for each in read_events(run)), "it did not go back"
        return {"ranks": 1, "words": [*SPIKED, "train.steps=38"]}

    def make_own_loop(self, run: Path, project: Path) -> Any:
        (told,) = self.machine.script(1, ["loop.py", "--stop-after=5"], project)
        assert told.code == 0, told.err
        (project / "run").rename(run)
        return {"ranks": 1, "script": "loop.py", "words": []}

    def make_local(self, run: Path, project: Path) -> Any:
        """Killed when the newest checkpoint is on a disk of the node's own. Its lease is given back then, as an agent
        of that node does: whoever goes on would wait for it to run out."""
        with self.training(1, ["train", "--dir", run, *LOCAL, "train.steps=1000"], project):
            wait_for_step(run, 6)
            os.kill(read_events(run)[0]["pid"], signal.SIGKILL)
        beat = run / "lease/beat-000001"
        beat.write_text(f"{int(beat.read_text()) + 1} released\n", encoding="utf-8")
        for older in sorted((project / "disk").glob("*/node-0/step-*"))[:-1]:
            shutil.rmtree(older)
        copy(project / "disk", self.kept / "disk")
        neutralise(self.kept / "disk", self.place)
        last = max(each["step"] for each in read_events(run) if each["event"] == "step")
        return {"ranks": 1, "words": [*LOCAL, f"train.steps={last + 3}"]}

    # --- jobs

    def environ(self, **more: str) -> dict[str, str]:
        """Variables of a person on a login node, whose commands of schedulers are fakes."""
        (self.place / "home").mkdir(exist_ok=True)
        fakes = self.place / "fakes"
        if not fakes.exists():
            fake_scheduler(self.place)
        said = {"PATH": f"{fakes}/bin:/usr/bin:/bin", "FAKES": str(fakes), "HOME": f"{self.place}/home"}
        return {**said, "LANG": "C.UTF-8", **STILL, **more}

    def submit(self, scheduler: str, run: Path, project: Path, *words: str) -> None:
        profile = project / f"{scheduler}.toml"
        profile.write_text(PROFILE.format(scheduler=scheduler), encoding="utf-8")
        command = [SHARDWAY, "submit", "--dir", run, "--on", profile.name, *words]
        subprocess.run(command, cwd=project, env=self.environ(), check=True)

    def run_job(self, run: Path, **variables: str) -> None:
        """Be the scheduler that starts it."""
        script = run / "attempts/0001/job.sh"
        subprocess.run(["bash", script], cwd=self.place, env=self.environ(**variables), check=False)

    def make_slurm(self, run: Path, project: Path) -> Any:
        """A run file in a chain: its first job ended by its deadline, the second waits."""
        (project / "job.toml").write_text(JOB, encoding="utf-8")
        words = ("job.toml", "--walltime", "1min", "run.stop_margin=48s", "--until-done")
        self.submit("slurm", run, project, *words)
        self.run_job(run, SLURM_JOB_ID="101", SLURM_JOB_NODELIST="localhost")
        result = read_json(run / "attempts/0001/result.json")
        assert result["state"] == "deadline", result
        assert (run / "attempts/0002/submission.json").exists()
        return None

    def make_pbs(self, run: Path, project: Path) -> Any:
        """A script of one's own with its code, whose job is done."""
        folder = project / "script"
        folder.mkdir()
        copy(self.kept / "loop.py", folder / "train.py")
        text = (folder / "train.py").read_text(encoding="utf-8")
        (folder / "train.py").write_text(text.replace('directory="run"', "directory=None"), encoding="utf-8")
        words = ("--walltime", "10min", "site.ranks_per_node=1", "--", "python", "train.py", "parallel.dp_shard=1")
        self.submit("pbs", run, folder, *words)
        nodes = self.place / "fakes/nodes"
        self.run_job(
            run,
            PBS_JOBID=read_json(run / "attempts/0001/submission.json")["job"],
            PBS_NODEFILE=str(nodes),
            PBS_CONF_FILE="/nonexistent",
        )
        result = read_json(run / "attempts/0001/result.json")
        assert result["state"] == "finished", result
        return None

    # --- files

    def make_files(self) -> None:
        """What run files resolve to, what profiles say, weights outside, a counted model."""
        resolved = resolve_all(self.reader, self.kept)
        write_json(self.kept / "resolved.json", resolved)
        missing = self.list_missing(resolved)
        print(f"no run file sets: {', '.join(missing) or 'none'}")
        self.make_probed_profile()
        write_json(self.kept / "shown_profiles.json", show_profiles(self.reader, self.kept))
        self.make_exports()
        (told,) = self.machine.run([*PLAN, "--trace"], folder=self.kept / "plans")
        assert told.code == 0, told.err
        write_json(self.kept / "plans/answer.json", plan_counted(self.reader, self.kept / "plans"))

    def list_missing(self, resolved: dict[str, Any]) -> list[str]:
        """Keys that stand at their default in every run file."""
        (told,) = self.reader.run(["config", "show", "--json"], folder=self.kept)
        defaults = {key: each["value"] for key, each in told.json()["keys"].items()}
        values: dict[str, list[Any]] = {key: [each[key] for each in resolved.values()] for key in defaults}
        return [key for key, found in values.items() if all(each == defaults[key] for each in found)]

    def make_probed_profile(self) -> None:
        command = [SHARDWAY, "sites", "probe", "--write", "probed"]
        subprocess.run(command, cwd=self.place, env=self.environ(), check=True, stdout=subprocess.DEVNULL)
        (path,) = (self.place / "home/.config/shardway").rglob("probed.toml")
        copy(path, self.kept / "profiles/probed.toml")
        neutralise(self.kept / "profiles", self.place)

    def make_exports(self) -> None:
        target = self.kept / "exports"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for run, name, more in (("finished", "library", []), ("own-loop", "own-names", ["--own-names"])):
            words = ["checkpoint", "export", self.kept / "runs" / run, target / name, *more]
            (told,) = self.machine.run(words, folder=self.place)
            assert told.code == 0, told.err


PROFILE = """format = 1
name = "small"
title = "A small cluster"
scheduler = "{scheduler}"
starter = "torchrun"
[node]
cores = 4
[[queues]]
name = "cpu"
max_walltime = "2h"
"""


def is_rank(pid: int, rank: str) -> bool:
    """Whether this process is that rank."""
    with contextlib.suppress(OSError):
        return f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def wait_for_step(run: Path, step: int) -> None:
    """Until it is done."""
    while not any(each["event"] == "step" and each["step"] >= step for each in read_events(run)):
        time.sleep(0.01)


def keep_alike(one: Any, other: Any) -> Any:
    """What is the same in both, at any depth."""
    if (
        isinstance(one, list)
        and isinstance(other, list)
        and len(one) == len(other)
        and one
        and isinstance(one[0], dict)
    ):
        return [keep_alike(*pair) for pair in zip(one, other, strict=True)]
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: keep_alike(one[key], other[key]) for key in one if key in other and is_alike(one[key], other[key])}
    return one


def is_alike(one: Any, other: Any) -> bool:
    """Whether anything of it can be kept."""
    both = isinstance(one, dict) and isinstance(other, dict)
    lists = isinstance(one, list) and isinstance(other, list) and bool(one) and isinstance(one[0], dict)
    return one == other or both or (lists and len(one) == len(other))


def neutralise(folder: Path, place: Path) -> None:
    """Let texts name no machine, person or folder of whoever made them. Bytes of checkpoints hold none."""
    package = importlib.util.find_spec("shardway")
    root = str(Path(str(package and package.origin)).parents[2])
    words = {str(place): PLACE, sys.prefix: "/opt/venv", sys.base_prefix: "/usr", root: "/opt/shardway"}
    name = re.escape(socket.gethostname())
    for path in folder.rglob("*"):
        if path.suffix != ".bin" and (path.is_symlink() or path.is_file()):
            text = os.readlink(path) if path.is_symlink() else path.read_text(encoding="utf-8")
            for word, instead in words.items():
                text = text.replace(word, instead)
            text = re.sub(rf"(?<![\w.-]){name}(?![\w-])", "node1", text)
            text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", NO_BOOT, text)
            text = re.sub(r'("(?:cpu|os|memory)": )"[^"]*"', r'\1"n/a"', text)
            if path.is_symlink():  # of a claim, whose words are the target of a link
                path.unlink()
                path.symlink_to(text)
            else:
                path.write_text(text, encoding="utf-8")


NO_BOOT = "00000000-0000-4000-8000-000000000000"

if __name__ == "__main__":
    main()
