"""What each verb prints: text for people, and with --json nothing but JSON on stdout."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from command_line import TINY, Ended, Shardway, write_text

from claimed import claim_from
from shardway.cli.options import list_examples
from shardway.launch.runs import logs
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.rundir.attempts import AttemptStart, Submission
from shardway.rundir.directory import RunDir
from shardway.runfile.load import load_run
from shardway.runfile.schema import RunFile, all_keys


def facts(ended: Ended) -> Any:
    assert (ended.code, ended.err) == (0, "")
    return json.loads(ended.out)


@pytest.fixture
def trained(shardway: Shardway, tmp_path: Path) -> Path:
    """The run directory of two steps."""
    write_text(tmp_path)
    assert shardway("train", *TINY, "--dir", "runs/a").code == 0
    return Path("runs/a")


# --- init


def test_init_writes_a_file_that_trains_as_the_default(shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway("init")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "wrote run.toml; train it with `shardway train run.toml`\n"
    assert load_run(tmp_path / "run.toml").values == RunFile()


def test_init_minimal_has_what_one_decides(shardway: Shardway, tmp_path: Path) -> None:
    assert shardway("init", "my.toml", "--minimal").code == 0
    assert len((tmp_path / "my.toml").read_text().splitlines()) < 25
    loaded = load_run(tmp_path / "my.toml")
    assert loaded.values == RunFile()


def test_init_on_a_full_disk_leaves_nothing(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)  # what was written lies in the page cache until then
    ended = shardway("init", "my.toml")
    assert (ended.code, ended.out) == (2, "")
    assert "my.toml cannot be written: No space left on device.\n  To do: make room there" in ended.err
    assert not [each.name for each in tmp_path.iterdir() if "my.toml" in each.name]


def test_what_init_writes_lets_a_file_be_of_another_kind(shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "to be"}\n')
    for words in ((), ("--minimal",), ("--from", "default")):
        assert shardway("init", "my.toml", *words).code == 0
        ended = shardway("train", "my.toml", "data.path=data.jsonl")
        assert (ended.code, 'to do: set data.kind = "jsonl"' in ended.err) == (2, True), ended.err
        (tmp_path / "my.toml").unlink()


@pytest.mark.parametrize("name", list_examples())
def test_init_from_an_example(name: str, shardway: Shardway, tmp_path: Path) -> None:
    assert shardway("init", "my.toml", "--from", name).code == 0
    own = Path(__file__).parents[2] / "examples" / f"{name}.toml"
    assert load_run(tmp_path / "my.toml").values == load_run(own).values
    shipped = resources.files("shardway.runfile").joinpath("examples", f"{name}.toml").read_text()
    assert shipped == own.read_text(), "the examples of the package are those of the project"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--from", "gpt"),
            'there is no example "gpt".\n      allowed: chat, default, lora, mnist, webdataset, wikitext2',
        ),
        (("--from", "../x"), "there is no example"),
        (("--from", "mnist", "--minimal"), "allowed: one of them"),
    ],
)
def test_init_from_nothing(words: tuple[str, ...], says: str, shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway("init", *words)
    assert (ended.code, says in ended.err) == (2, True)
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize("where", [(), ("empty",)])
def test_no_run_is_no_error(where: tuple[str, ...], shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = shardway("status", *where)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"no run in {where[0] if where else 'runs'} yet; start one with `shardway train`")


def test_init_with_dry_run_writes_nothing(shardway: Shardway, tmp_path: Path) -> None:
    printed = shardway("init", "my.toml", "--dry-run").out
    assert list(tmp_path.iterdir()) == []
    shardway("init", "my.toml")
    assert (tmp_path / "my.toml").read_text() == printed


# --- config


def test_config_show_is_a_run_file(shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway("config", "show", "train.seed=7", "--dir", "here")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("# run directory: here\nformat = 1\n")
    request = ResolveRequest(None, ("train.seed=7",), Path("here"))
    assert ended.out.partition("\n")[2] == resolve_request(request).resolved.render()
    (tmp_path / "shown.toml").write_text(ended.out)
    again = shardway("config", "show", "shown.toml", "--dir", "here")
    assert tomllib.loads(again.out) == tomllib.loads(ended.out)


def test_config_show_json_has_every_key_with_its_origin(shardway: Shardway) -> None:
    shown = facts(shardway("config", "show", "--json", "train.seed=7", "--nproc", "2"))
    assert list(shown["keys"]) == all_keys()
    assert shown["keys"]["train.seed"] == {"value": 7, "origin": "command line"}
    assert shown["keys"]["parallel.dp_replicate"] == {"value": 2, "origin": "derived: 2 ranks"}
    assert shown["directory"] == "runs/default"
    assert shown["derived"] == {"replicas": 2, "accumulation": 1, "peak_lr": 3e-3}


def test_config_explain(shardway: Shardway) -> None:
    ended = shardway("config", "explain", "checkpoint")
    assert ended.out == (
        "checkpoint.every\n"
        '  How often to save: an amount of training, a time, "auto" (what costs least, by the time of a save and the '
        'number of ranks) or "off".\n'
        '  allowed: such as "200 steps", "10min", "auto", "off"\n'
        '  default: "200 steps"\n'
        "\n"
        "checkpoint.keep\n"
        "  Complete checkpoints that are kept; older ones are removed after a newer one is complete.\n"
        "  allowed: an integer, at least 1\n"
        "  default: 3\n"
        "\n"
        "checkpoint.keep_every\n"
        "  Steps whose checkpoints are kept for ever, beside the newest; they are saved whatever `every` says.\n"
        '  allowed: such as "500 steps", "1 epochs", "off"\n'
        '  default: "off"\n'
        "\n"
        "checkpoint.keep_best\n"
        "  How many of the steps with the best validation are kept besides, whatever `every` says; `monitor` is what "
        "makes them the best. 0 = none.\n"
        "  allowed: an integer, at least 0\n"
        "  default: 0\n"
        "\n"
        "checkpoint.monitor\n"
        "  Which metric of a validation keep_best and train.patience go by: loss, accuracy, bits_per_byte, or another "
        'name of its results with its direction, "max f1" or "min rmse".\n'
        '  allowed: such as "loss", "accuracy", "max f1", "min rmse"\n'
        '  default: "loss"\n'
        "\n"
        "checkpoint.background\n"
        "  Write checkpoints while the run goes on, from a copy of the state in the host's memory; the last one is "
        "waited for, as are all where that memory does not suffice or the engine writes files of its own.\n"
        "  allowed: true or false\n"
        "  default: true\n"
        "\n"
        "checkpoint.local_every\n"
        "  How often to save on each node's own disk, as `every`; what `every` asks for is then saved there as well, "
        'and copied to the run directory while the run goes on. "off" = in the run directory alone.\n'
        '  allowed: such as "200 steps", "10min", "auto", "off"\n'
        '  default: "off"\n'
        "\n"
        "checkpoint.local_dir\n"
        "  Folder on each node's own disk for these; variables of the environment may stand in it. Empty = the site's "
        "node.local_disk (local_every).\n"
        "  allowed: a string\n"
        '  default: ""\n'
    )
    assert [doc["key"] for doc in facts(shardway("config", "explain", "checkpoint", "--json"))] == [
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.keep_every",
        "checkpoint.keep_best",
        "checkpoint.monitor",
        "checkpoint.background",
        "checkpoint.local_every",
        "checkpoint.local_dir",
    ]


def test_config_schema(shardway: Shardway) -> None:
    found = facts(shardway("config", "schema"))
    assert found.pop("$schema") == "http://json-schema.org/draft-07/schema#"
    assert found == RunFile.model_json_schema()
    assert facts(shardway("config", "schema", "run")) == {"$schema": "http://json-schema.org/draft-07/schema#", **found}


@pytest.mark.parametrize("kind", ["run", "site"])
def test_the_published_schema_is_current(kind: str, shardway: Shardway) -> None:
    """Else: `shardway config schema KIND > docs/schema/KIND.json`."""
    published = Path(__file__).parents[2] / "docs" / "schema" / f"{kind}.json"
    assert shardway("config", "schema", kind).out == published.read_text()


def test_init_names_a_schema_that_is_there(shardway: Shardway, tmp_path: Path) -> None:
    shardway("init", "my.toml", "--minimal")
    first = (tmp_path / "my.toml").read_text().splitlines()[0]
    schema = json.loads(Path(first.removeprefix("#:schema file://")).read_text())
    assert schema == facts(shardway("config", "schema"))


def test_init_without_a_cache_has_no_schema(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert shardway("init", "my.toml", "--minimal").code == 0
    assert (tmp_path / "my.toml").read_text().startswith("# A Shardway run file")


# --- train


def test_train_prints_where_to_look(shardway: Shardway, trained: Path) -> None:
    ended = shardway("train", *TINY, "--dir", "runs/a", "--fresh")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-2:] == ["run directory  runs/a", "report         runs/a/report.html"]
    assert (trained / "report.html").is_file()
    assert (trained.parent / "a.old-1/report.html").is_file()


def test_train_json_prints_facts_alone(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    ended = shardway("train", *TINY, "--dir", "runs/a", "--json")
    outcome = json.loads(ended.out)
    assert ended.code == 0
    assert (outcome["directory"], outcome["state"], outcome["step"]) == ("runs/a", "finished", 2)
    assert "step" in ended.err  # the progress of a person


def test_train_with_dry_run_does_nothing(shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway("train", *TINY, "--dry-run", "--nproc", "2")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("# would train with 2 rank(s) into runs/default\nformat = 1\n")
    assert tomllib.loads(ended.out)["parallel"]["dp_replicate"] == 2
    plan = facts(shardway("train", *TINY, "--dry-run", "--nproc", "2", "--json"))
    assert (plan["ranks"], plan["directory"], plan["derived"]["replicas"]) == (2, "runs/default", 2)
    assert list(tmp_path.iterdir()) == []


def test_the_resolved_file_of_a_run_runs_again(shardway: Shardway, trained: Path) -> None:
    ended = shardway("train", str(trained / "resolved.toml"), "--dir", "runs/b")
    assert (ended.code, ended.err) == (0, "")
    first, second = (
        [event["loss"] for event in RunDir(Path(name)).events() if event["event"] == "step"]
        for name in ("runs/a", "runs/b")
    )
    assert len(first) == 2
    assert first == second


def test_the_request_is_kept_as_it_was_written(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    text = "# mine\n[train]\nseed = 3\n"
    (tmp_path / "my.toml").write_text(text)
    assert shardway("train", "my.toml", *TINY).code == 0
    assert (tmp_path / "runs/my/run.toml").read_text() == text
    assert (tmp_path / "my.toml").read_text() == text


# --- status, logs, report


def test_status_of_one_run(shardway: Shardway, trained: Path) -> None:
    ended = shardway("status", "runs/a")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].startswith("runs/a  finished: ")
    assert lines[1] == "  step        2/2 (100 %)"
    shown = facts(shardway("status", "runs/a", "--json"))
    assert (shown["state"], shown["step"], shown["total_steps"], shown["path"]) == ("finished", 2, 2, "runs/a")


def test_a_run_whose_file_system_is_away_is_told_and_the_others_are_shown(
    shardway: Shardway, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDir(Path("runs/b")).create()
    real = os.stat

    def fail_for_one(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if not isinstance(path, int) and "runs/b" in os.fsdecode(path):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), os.fsdecode(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", fail_for_one)
    for words in (("status",), ("status", "runs")):
        shown = shardway(*words)
        assert shown.out.startswith("runs/a  finished: ")
        assert "runs/b/status.json cannot be looked at: Transport endpoint is not connected." in shown.err
    alone = shardway("status", "runs/b")
    assert (alone.code, alone.out) == (4, "")


def test_status_of_a_folder_is_a_list(shardway: Shardway, trained: Path) -> None:
    assert [run["name"] for run in facts(shardway("status", "--json"))] == ["a"]
    RunDir(Path("runs/b")).create()
    assert [run["name"] for run in facts(shardway("status", "runs", "--json"))] == ["a", "b"]
    first, a, b = shardway("status").out.splitlines()
    assert first.split()[:3] == ["RUN", "STATE", "STEP"]
    assert (a.split()[:3], b.split()) == (["runs/a", "finished", "2/2"], ["runs/b", "new"])


def test_status_of_nothing_as_json_is_an_empty_list(shardway: Shardway) -> None:
    assert facts(shardway("status", "--json")) == []


def test_status_only_reads(shardway: Shardway, trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    for verb in ("status", "logs"):
        shardway(verb, "runs/a")
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_one_run_that_cannot_be_read_hides_no_other(shardway: Shardway, trained: Path) -> None:
    run = RunDir(Path("runs/b"))
    run.create()
    (run.path / "events/rank-00000.jsonl").mkdir()
    ended = shardway("status", "runs")
    assert (ended.code, ended.out.splitlines()[0][:16]) == (0, "runs/a  finished")
    assert ended.err.startswith("shardway: the events in runs/b/events/rank-00000.jsonl cannot be read: Is a directory")
    assert shardway("status", "runs/b").code == 4


def test_a_reason_is_shown_and_not_obeyed(shardway: Shardway, trained: Path) -> None:
    RunDir(trained).write_status(state="stopped", step=2, reason="\x1b[2J a\ud800")
    assert shardway("status", "runs/a").out.startswith("runs/a  stopped: \\x1b[2J a\\ud800\n")


def test_logs_json_is_one_event_a_line(shardway: Shardway, trained: Path) -> None:
    ended = shardway("logs", "--json")
    assert (ended.code, ended.err) == (0, "")
    assert [json.loads(line) for line in ended.out.splitlines()] == RunDir(trained).events()
    assert shardway("logs", "runs/a").out.count("\n") >= 3


def test_logs_follow_ends_with_a_run_that_has_ended(shardway: Shardway, trained: Path) -> None:
    assert shardway("logs", "--follow", "--json").out == shardway("logs", "--json").out


def test_logs_follow_ends_with_a_run_whose_node_died_with_the_lock(
    shardway: Shardway, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of NFS may keep the lock of a node that is gone; the scheduler knows that its job is over."""
    run = RunDir(trained)
    attempt = run.attempt(1)
    attempt.make()
    attempt.write_submission(Submission("local", "a1b2c3", "999999999.1", submitted=1.0))
    attempt.write_started(AttemptStart("999999999.1", "n1", "n1"))
    monkeypatch.setattr(logs, "LeftLock", partial(logs.LeftLock, gap_s=0.0))
    lock = run.writer_lock()
    lock.acquire()
    claim_from(run, "n1")
    try:
        ended = shardway("logs", "--follow", "--json")
    finally:
        lock.release()
    assert ended.out == shardway("logs", "--json").out
    assert ended.err.startswith("shardway: attempt 1 (job 999999999.1) is over: unknown: ")


def test_logs_output_is_what_a_rank_printed(shardway: Shardway, trained: Path) -> None:
    folder = trained / "logs/start/attempt_0/1"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_bytes(b"said\n")
    (folder / "stderr.log").write_bytes(b"warned \xff\n")
    assert shardway("logs", "--rank", "1", "--output").out == "said\nwarned \ufffd\n"


def test_report(shardway: Shardway, trained: Path) -> None:
    (trained / "report.html").unlink()
    ended = shardway("report", "runs/a", "--dry-run")
    assert (ended.code, ended.out, ended.err) == (0, "runs/a/report.html\n", "")
    assert not (trained / "report.html").exists()
    shown = facts(shardway("report", "--json"))
    assert (shown["report"], shown["summary"]["step"]) == ("runs/a/report.html", 2)
    assert (trained / "report.html").read_text().startswith("<!")


def test_a_run_that_patience_has_finished_says_which_key_goes_on(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    words = ("train", *TINY, "train.steps=9", "train.validate_every=1 steps", "optim.lr=30.0", "train.patience=1")
    assert shardway(*words, "--dir", "a").code == 0
    again = shardway(*words, "--dir", "a").out
    assert again.startswith("nothing to do: no better loss for 1 validation: ")
    assert " is the best (to go on, ask for more with train.patience)\n" in again
