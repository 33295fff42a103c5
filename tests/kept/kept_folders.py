"""The folders of kept data, one a version of the formats, and how a value of today is compared with a kept one.

    tests/kept/2026-11/
      about.json      which Shardway, torch and machine made it, and when
      numbers.json    runs by their words, and the losses that they had (test_kept_numbers.py)
      ...

Invariant: nothing here writes into a folder of kept data; a test copies what it works on. No module below `shardway`
is named here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from still_machine import StillMachine, Told

HERE = Path(__file__).parent
VERSIONS = tuple(sorted(path.parent for path in HERE.glob("*/about.json")))
"""Every folder, the oldest first. The newest is made by make_kept.py; none is ever changed."""

LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 1e-3
"""Relative, where another torch or another kind of CPU adds in another order: those of docs/layouts.md."""


def read_json(path: Path) -> Any:
    """The content of a file of kept data."""
    return json.loads(path.read_text(encoding="utf-8"))


def has_same_bits(kept: Path) -> bool:
    """Whether this torch on this machine gives the bits that are kept (still_machine.py says why)."""
    about = read_json(kept / "about.json")
    alike = (about["torch"], about["machine"]) == (version("torch"), platform.machine())
    if not alike or platform.machine() != "x86_64":
        return alike
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return " avx2 " in cpu and "GenuineIntel" in cpu


def copy(source: Path, target: Path) -> Path:
    """A copy that a test may change."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)
    return target


# --- numbers of a run


def read_events(run: Path) -> list[dict[str, Any]]:
    """The events of rank 0, as they stand in its file."""
    path = run / "events/rank-00000.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def list_holding(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the steps that were undone: those after the one that a run goes on from, or goes back to."""
    holding: list[dict[str, Any]] = []
    for event in events:
        if event["event"] in ("started", "rolled_back"):
            undone = ("step", "validation", "spike")
            holding = [each for each in holding if each["event"] not in undone or each["step"] <= event["step"]]
        holding.append(event)
    return holding


def read_numbers(run: Path) -> dict[str, list[str]]:
    """Loss and gradient norm of each step that holds, and each validation, in hex: every bit."""
    holding = list_holding(read_events(run))
    steps = [each for each in holding if each["event"] == "step"]
    validations = [each for each in holding if each["event"] == "validation"]
    return {
        "losses": [float(each["loss"]).hex() for each in steps],
        "grad_norms": [float(each["grad_norm"]).hex() for each in steps],
        "validations": [float(each["loss"]).hex() for each in validations],
    }


def compare_numbers(found: Mapping[str, Sequence[str]], kept: Mapping[str, Sequence[str]], same_bits: bool) -> None:
    """Every bit, or close to it where bits are not to be had."""
    if same_bits:
        assert found == kept
        return
    assert found.keys() == kept.keys()
    for name, values in kept.items():
        tolerance = NORM_TOLERANCE if name == "grad_norms" else LOSS_TOLERANCE
        pairs = zip(map(float.fromhex, found[name]), map(float.fromhex, values), strict=True)
        far = [(one, other) for one, other in pairs if not math.isclose(one, other, rel_tol=tolerance)]
        assert not far, (name, far)


# --- parameters of a run


def read_parameters(machine: StillMachine, run: Path, target: Path) -> dict[str, dict[str, Any]]:
    """Of each tensor of the newest checkpoint, as `checkpoint export --own-names` gives it: shape, a checksum of its
    bytes, and the sum of squares for machines with other bits."""
    (told,) = machine.run(["checkpoint", "export", run, target, "--own-names"], folder=target.parent)
    assert told.code == 0, told.err
    return dict(list_tensors(target / "model.safetensors"))


def list_tensors(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """By the format of safetensors: eight bytes of length, a table, and the numbers."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    table = json.loads(content[8:start])
    table.pop("__metadata__", None)
    for name, entry in sorted(table.items()):
        first, last = entry["data_offsets"]
        numbers = content[start + first : start + last]
        values = memoryview(numbers).cast("f") if entry["dtype"] == "F32" else ()
        yield (
            name,
            {
                "shape": entry["shape"],
                "sha256": hashlib.sha256(numbers).hexdigest()[:16],
                "squares": math.fsum(value * value for value in values),
            },
        )


def compare_parameters(found: Mapping[str, Any], kept: Mapping[str, Any], same_bits: bool) -> None:
    """Every bit of every tensor, or how large each is where bits are not to be had."""
    assert found.keys() == kept.keys()
    for name, one in kept.items():
        assert found[name]["shape"] == one["shape"], name
        if same_bits:
            assert found[name] == one, name
        else:
            assert math.isclose(found[name]["squares"], one["squares"], rel_tol=NORM_TOLERANCE, abs_tol=1e-6), name


# --- runs by their words


def by_words_of_today(kept: Path, case: dict[str, Any]) -> dict[str, Any]:
    """A case whose words ask for what they asked for when it was kept: until 0.1.0 a loop of one's own was seeded by
    train.seed also where the script had seeded torch (docs/decisions/0089)."""
    if read_json(kept / "about.json")["shardway"] != "0.1.0":
        return case
    seeded = [{**part, "words": [*part["words"], *(["train.seed=0"] * ("script" in part))]} for part in case["parts"]]
    return {**case, "parts": seeded}


def check_ended(told: Sequence[Told]) -> None:
    """All ranks came to a good end."""
    assert [each.code for each in told] == [0] * len(told), "\n".join(each.err for each in told)


def play(machine: StillMachine, case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run a case of numbers.json in a folder that has the kept text and script; what it gives."""
    run = folder / "run"
    for part in case["parts"]:
        if "script" in part:
            told = machine.script(part["ranks"], [part["script"], *part["words"]], folder)
        else:
            told = machine.train(part["ranks"], ["train", "--dir", str(run), *part["words"]], folder)
        check_ended(told)
    found: dict[str, Any] = {"numbers": read_numbers(run)}
    if "parameters" in case:
        found["parameters"] = read_parameters(machine, run, folder / "exported")
    return found


# --- kept run directories


def lay_out(kept: Path, folder: Path, name: str = "") -> Path:
    """A copy of a kept run, or of all, in a folder with what they need beside them; nothing of it is recent."""
    for each in (*BESIDE, "disk"):
        copy(kept / each, folder / each)
    target = copy(kept / "runs" / name, folder / "run" if name else folder / "runs")
    for path in (target, *target.rglob("*")):
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    return target


LONG_AGO = 1_790_000_000
"""When files were written last, in Unix seconds: a clone has written them a moment ago."""


def continue_run(
    machine: StillMachine, kept: Path, name: str, part: Mapping[str, Any], folder: Path
) -> dict[str, dict[str, Any]]:
    """Go on with a copy of a kept run, as `part` says; its numbers and parameters then."""
    lay_out(kept, folder, name)
    return play(machine, {"parts": [part], "parameters": {}}, folder)


BESIDE = ("text.txt", "spiky.txt", "loop.py")
"""What runs need beside them; one has saved in the folder `disk` besides."""

FAKES = HERE.parent / "launch/fake_commands.sh"
FAKED = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun", "qsub", "qstat", "qdel", "pbs_tmrsh")


def fake_scheduler(folder: Path) -> dict[str, str]:
    """Variables by which commands of schedulers are fakes, with whom those jobs of runs in this folder wait that have
    not begun."""
    fakes = folder / "fakes"
    for name in ("bin", "calls", "ranks"):
        (fakes / name).mkdir(parents=True)
    commands = copy(FAKES, fakes / FAKES.name)
    commands.chmod(0o755)
    for name in FAKED:
        (fakes / "bin" / name).symlink_to(commands)
    (fakes / "nodes").write_text("localhost\n")
    for path in sorted(folder.rglob("attempts/*/submission.json")):
        script = path.with_name("job.sh").read_text(encoding="utf-8")
        name = re.search("^#SBATCH --job-name=(.*)$", script, re.M)
        if name and not path.with_name("began").exists():
            job = read_json(path)["job"]
            (fakes / "queue").write_text(f"{job}|{job}|PENDING|N/A|N/A||Priority|{name[1]}\n", encoding="utf-8")
    return {"PATH": f"{fakes / 'bin'}:{os.environ['PATH']}", "FAKES": str(fakes)}


QUESTIONS: dict[str, tuple[str, ...]] = {
    "status": ("status", "--json"),
    "verify": ("checkpoint", "verify", "--json"),
    "inspect": ("checkpoint", "inspect", "--json"),
}
"""What is asked of a run directory, and answered in JSON."""


def ask_all(machine: StillMachine, kept: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """By run and question: the exit code and the answer."""
    lay_out(kept, folder)
    asked = [(path.name, question) for path in sorted((folder / "runs").iterdir()) for question in QUESTIONS]
    commands = [[*QUESTIONS[question], f"runs/{name}"] for name, question in asked]
    answers: dict[str, dict[str, Any]] = {}
    told = machine.run(*commands, folder=folder, environ=fake_scheduler(folder))
    for (name, question), one in zip(asked, told, strict=True):
        said = _facts(json.loads(one.out)) if one.out else None
        answers.setdefault(name, {})[question] = {"code": one.code, "said": said}
    return answers


def _facts(said: Any) -> Any:
    """Without sentences: of the one about who writes the run whether there is any."""
    if isinstance(said, dict):
        kept = {key: _facts(value) for key, value in said.items() if key not in ("explanation", "remedy")}
        return {**kept, "writer": bool(kept["writer"])} if "writer" in kept else kept
    return [_facts(each) for each in said] if isinstance(said, list) else said


RENAMED = {
    "site.starter": "site.launcher",
    "starter": "launcher",
    "sources.starter": "sources.launcher",
    "run.restarts": "run.max_restarts",
    "model.balance_step": "model.bias_update_rate",
    "recompute.save": "recompute.save_ops",
    "tier_dropped": "local_checkpoints_ignored",
}
"""Keys and fields by the names that they have had since 2026-11; CHANGELOG.md says that the earlier ones are read."""
RENAMED_VALUES = {
    ("guard.on_spike", "tell"): "warn",
    ("state", "lost"): "unknown",
    ("path", "starter"): "launcher",
}


def by_names_of_today(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Entries whose keys and values have other names since."""
    renamed = {RENAMED.get(key, key): value for key, value in kept.items()}
    return {
        key: RENAMED_VALUES.get((key, value), value) if isinstance(value, str) else value
        for key, value in renamed.items()
    }


def check_says(found: Any, kept: Any, where: str = "") -> None:
    """What was said is said still, by the names of today; more may be said."""
    if isinstance(kept, dict):
        assert isinstance(found, dict), where
        kept = by_names_of_today(kept)
        missing = kept.keys() - found.keys()
        assert not missing, f"{where} lacks {', '.join(sorted(missing))}"
        for key, value in kept.items():
            check_says(found[key], value, f"{where}.{key}")
    elif isinstance(kept, list) and kept and isinstance(kept[0], dict):
        assert len(found) == len(kept), where
        for number, (one, other) in enumerate(zip(found, kept, strict=True)):
            check_says(one, other, f"{where}[{number}]")
    else:
        assert found == kept, where


# --- run files and profiles


def resolve_all(machine: StillMachine, kept: Path) -> dict[str, dict[str, Any]]:
    """Key -> value of each kept run file, resolved for eight ranks."""
    names = sorted(path.stem for path in (kept / "run_files").glob("*.toml") if path.stem != "base")
    commands = [["config", "show", f"{name}.toml", "--nproc", "8", "--json"] for name in names]
    told = machine.run(*commands, folder=kept / "run_files")
    return {name: values_of(one) for name, one in zip(names, told, strict=True)}


def values_of(told: Told) -> dict[str, Any]:
    """What `config show --json` says, without where it comes from."""
    return {key: each["value"] for key, each in told.json()["keys"].items()}


def show_profiles(machine: StillMachine, kept: Path) -> dict[str, Any]:
    """Every fact of each kept profile."""
    names = sorted(path.stem for path in (kept / "profiles").glob("*.toml"))
    told = machine.run(*(["sites", "show", f"{name}.toml", "--json"] for name in names), folder=kept / "profiles")
    return {name: one.json() for name, one in zip(names, told, strict=True)}


# --- plans

PLAN = ("plan", "counted.toml", "--gpu", "a100-sxm4-80gb", "--gpus", "1", "--json")
"""Of a model that was counted with torch: `--trace` leaves counted.shape.json beside the run file."""


def plan_counted(machine: StillMachine, folder: Path) -> dict[str, Any]:
    """What a plan says of the counted model; its seconds and bytes follow calibrations, which are no format."""
    (told,) = machine.run(PLAN, folder=folder)
    return {name: told.json()["plan"][name] for name in ("model", "layout")}
