"""Run directories of earlier versions: read, verified, continued, stopped and exported by this one.

Finished, stopped, failed, killed, gone back before a spike, a script's own, saved on disks of nodes, in a chain of
Slurm jobs, in a job of PBS. `answers.json` has what `status`, `checkpoint verify` and `checkpoint inspect` said of
them: facts that a later version says too. `goes_on.json` has the numbers with which each goes on.

Invariant: only public doors are used (command line, `import shardway`, files whose format is documented), no module
below `shardway` is imported, and a test works on a copy.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from kept_folders import (
    QUESTIONS,
    VERSIONS,
    by_names_of_today,
    check_says,
    compare_numbers,
    compare_parameters,
    continue_run,
    fake_scheduler,
    has_same_bits,
    lay_out,
    list_holding,
    list_tensors,
    read_events,
    read_json,
    read_parameters,
    values_of,
)
from still_machine import StillMachine

KEPT = [pytest.param(kept, id=kept.name) for kept in VERSIONS]
RUNS = [(kept, name) for kept in VERSIONS for name in sorted(read_json(kept / "goes_on.json"))]
GOING_ON = [(kept, name) for kept, name in RUNS if read_json(kept / "goes_on.json")[name]["words"]]


def names(value: Any) -> str:
    """Of a folder or a run, for the id of a test."""
    return value.name if isinstance(value, Path) else str(value)


# --- read


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(("kept", "name"), RUNS, ids=names)
def test_the_same_is_said_of_a_run(said: dict[Path, dict[str, Any]], kept: Path, name: str, question: str) -> None:
    check_says(said[kept][name][question], read_json(kept / "answers.json")[name][question])


@pytest.mark.parametrize("kept", KEPT)
def test_every_event_that_holds_is_printed(reader: StillMachine, tmp_path: Path, kept: Path) -> None:
    lay_out(kept, tmp_path)
    found = sorted((tmp_path / "runs").iterdir())
    for run, told in zip(found, reader.run(*(["logs", "--json", run] for run in found), folder=tmp_path), strict=True):
        assert told.code == 0, told.err
        assert [json.loads(line) for line in told.out.splitlines()] == list_holding(read_events(run)), run.name


@pytest.mark.parametrize("kept", KEPT)
def test_a_report_is_written(reader: StillMachine, tmp_path: Path, kept: Path) -> None:
    lay_out(kept, tmp_path)
    chosen = [tmp_path / "runs" / name for name in ("spiked", "slurm")]
    for run, told in zip(
        chosen, reader.run(*(["report", "--json", run] for run in chosen), folder=tmp_path), strict=True
    ):
        assert told.json()["summary"]["step"] == read_json(run / "status.json")["step"]
        losses = [event["loss"] for event in read_events(run) if event["event"] == "step"]
        assert f"{losses[-1]:.4f}" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("kept", KEPT)
def test_a_resolved_run_is_a_run_file(reader: StillMachine, tmp_path: Path, kept: Path) -> None:
    """Every value that stands in `resolved.toml` is what the file says when it is read as a run file."""
    lay_out(kept, tmp_path)
    files = {}
    for run in sorted((tmp_path / "runs").iterdir()):
        if not (run / "attempts").exists():  # whose profile lies where they were submitted
            files[run.name] = tmp_path / f"{run.name}.toml"
            files[run.name].write_bytes((run / "resolved.toml").read_bytes())
    worlds = {name: read_json(tmp_path / "runs" / name / "status.json")["world"] for name in files}
    commands = [["config", "show", path, "--nproc", worlds[name], "--json"] for name, path in files.items()]
    for path, told in zip(files.values(), reader.run(*commands, folder=tmp_path), strict=True):
        found, table = values_of(told), tomllib.loads(path.read_text(encoding="utf-8"))
        written = {f"{room}.{key}": value for room in table.keys() - {"format"} for key, value in table[room].items()}
        written = by_names_of_today(written)
        assert {key: found[key] for key in written if not isinstance(written[key], dict)} == {
            key: value for key, value in written.items() if not isinstance(value, dict)
        }, path.name


@pytest.mark.parametrize("kept", KEPT)
def test_damage_is_found_by_the_checksums_of_then(reader: StillMachine, tmp_path: Path, kept: Path) -> None:
    run = lay_out(kept, tmp_path, "finished")
    (path,) = run.glob("checkpoints/*/rank-00000.bin")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    (told,) = reader.run(["checkpoint", "verify", run], folder=tmp_path)
    assert told.code == 4
    assert path.name in told.out + told.err


# --- continued


@pytest.mark.parametrize(("kept", "name"), GOING_ON, ids=names)
def test_a_run_goes_on(machine: StillMachine, tmp_path: Path, kept: Path, name: str) -> None:
    """With the losses and to the parameters with which it went on then. Where nodes save on their own disks, the line
    of starts has one more."""
    case = read_json(kept / "goes_on.json")[name]
    found = continue_run(machine, kept, name, case["words"], tmp_path)
    compare_numbers(found["numbers"], case["numbers"], has_same_bits(kept))
    compare_parameters(found["parameters"], case["parameters"], has_same_bits(kept))
    if (kept / "runs" / name / "line.json").exists():
        before, after = (read_json(run / "line.json")["entries"] for run in (kept / "runs" / name, tmp_path / "run"))
        assert after[:-1] == before
        assert after[-1] | {"name": ""} == {"epoch": 2, "from_step": 5, "tier": "local", "name": ""}


# --- jobs


@pytest.mark.parametrize("kept", KEPT)
def test_a_waiting_job_is_taken_out(reader: StillMachine, tmp_path: Path, kept: Path) -> None:
    run = lay_out(kept, tmp_path, "slurm")
    (told,) = reader.run(["stop", "--json", run], folder=tmp_path, environ=fake_scheduler(tmp_path))
    assert told.json()["cancelled"] == ["102"]
    (call,) = (tmp_path / "fakes/calls").glob("scancel.*")
    assert call.read_text(encoding="utf-8").split("\0") == ["scancel", "102", ""]


@pytest.mark.parametrize("kept", KEPT)
def test_a_run_is_submitted_again_by_what_was_asked_for_then(reader: StillMachine, tmp_path: Path, kept: Path) -> None:
    run = lay_out(kept, tmp_path, "pbs")
    order = run / "attempts/0001/order.json"
    (tmp_path / "script").mkdir()
    for path in (run / "attempts/0001/code").iterdir():
        (tmp_path / "script" / path.name).write_bytes(path.read_bytes())
    order.write_text(
        order.read_text(encoding="utf-8").replace("/scratch/kept/project", str(tmp_path)), encoding="utf-8"
    )
    environ = fake_scheduler(tmp_path)
    (told,) = reader.run(["resume", run, "--dry-run"], folder=tmp_path, environ=environ)
    print(told)
    assert told.code == 0, told.err
    assert "train.py" in told.out
    assert "#PBS" in told.out


# --- exported and imported


@pytest.mark.parametrize(
    ("run", "name", "words"), [("finished", "library", ()), ("own-loop", "own-names", ("--own-names",))]
)
@pytest.mark.parametrize("kept", KEPT)
def test_an_export_has_the_files_that_it_had(
    machine: StillMachine, tmp_path: Path, kept: Path, run: str, name: str, words: tuple[str, ...]
) -> None:
    """The bits of a checkpoint are data: no machine changes them."""
    lay_out(kept, tmp_path, run)
    (told,) = machine.run(["checkpoint", "export", "run", "out", *words], folder=tmp_path)
    assert told.code == 0, told.err
    exported = kept / "exports" / name
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {path.name for path in exported.iterdir()}
    found, expected = (dict(list_tensors(folder / "model.safetensors")) for folder in (tmp_path / "out", exported))
    assert found == expected


@pytest.mark.parametrize("kept", KEPT)
def test_weights_that_were_exported_come_back(machine: StillMachine, tmp_path: Path, kept: Path) -> None:
    words = read_json(kept / "goes_on.json")["finished"]["words"]["words"]
    exported = kept / "exports/library"
    (told,) = machine.run(["checkpoint", "import", exported, *words, "--dir", tmp_path / "new"], folder=tmp_path)
    assert told.code == 0, told.err
    lay_out(kept, tmp_path, "finished")
    found, expected = (read_parameters(machine, tmp_path / run, tmp_path / f"{run}-out") for run in ("new", "run"))
    assert found == expected
