"""Lessons without a run: what is shipped, where files go, and that neither empty folders nor faked runs are work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from page_shell import list_blocks
from runs import lone_rank, train_tiny
from shardway.cli.main import app, run_guarded
from shardway.errors import JobError, UserError
from shardway.learn.checks import REQUIREMENTS, check_lesson
from shardway.learn.evidence import gather, read_run
from shardway.learn.figures import find_figures, render_figures
from shardway.learn.lessons import find_folder, find_lesson, list_lessons, place_files
from shardway.learn.proofs import (
    find_largest_difference,
    find_position_gap,
    prove_alone,
    prove_divided_states,
    prove_evaluated,
    prove_killed,
    prove_learning,
)
from shardway.plan.planner import find_machine
from shardway.rundir.directory import RunDir

ROOT = Path(__file__).parents[2]
FILES = ROOT / "src/shardway/learn/lessons/files"
NUMBERS = [lesson.number for lesson in list_lessons()]
BASE = (
    *("model.kind=transformer", "model.dim=16", "model.layers=1", "model.heads=2"),
    *("data.kind=text", "data.seq_len=8", "data.path=text.txt", "data.include=*", "optim.lr=0.03"),
    *("train.steps=20", "train.global_batch=4", "train.validate_every=off", "train.validation_samples=4"),
    *("run.threads=1", "checkpoint.background=false", "checkpoint.every=10 steps"),
)


# --- what is shipped


def test_there_are_ten_lessons_and_each_has_its_parts() -> None:
    assert NUMBERS == list(range(1, 11)) == sorted(REQUIREMENTS)
    for lesson in list_lessons():
        headings = re.findall(r"^## (.+)$", lesson.text, re.MULTILINE)
        for heading in ("Picture", "Do it", "Before and after", "Exercise", "Check", "On a machine with GPUs"):
            assert heading in headings, (lesson.name, heading)
        assert 5 <= lesson.minutes <= 15
        assert "**Goal:**" in lesson.text
        assert lesson.text.startswith(f"# {lesson.number}. {lesson.title}\n")
        assert f"cd learn/{lesson.name}\n" in lesson.text
        assert f"shardway learn check {lesson.number}\n" in lesson.text
        assert "gpt.toml" in lesson.read_files()
        assert [each.what.partition(":")[0] for each in REQUIREMENTS[lesson.number]].count("exercise") == 1
        assert max(map(len, lesson.text.splitlines())) <= 180


@pytest.mark.parametrize(
    ("name", "lesson"), [("mnist", "01-single-device"), ("wikitext2", "02-precision"), ("fsdp2", "05-fsdp2")]
)
def test_scripts_of_lessons_are_those_of_the_examples(name: str, lesson: str) -> None:
    examples = {path.name: path.read_text() for path in (ROOT / "examples" / name).glob("*.py")}
    shipped = find_lesson(lesson).read_files()
    assert {file: shipped[file] for file in examples} == examples


def test_a_toy_script_has_eight_new_lines() -> None:
    shipped = find_lesson("ddp").read_files()
    before, after = (
        {line for line in text.splitlines() if line.strip()}
        for text in (shipped["ddp.py"], shipped["with_shardway.py"])
    )
    code = [line for line in after - before if not line.startswith(('"""', "    python", "    torchrun"))]
    assert len(code) == 8, code


def test_a_lesson_has_several_names() -> None:
    assert find_lesson("4") == find_lesson("04") == find_lesson("ddp") == find_lesson("04-ddp")
    with pytest.raises(UserError, match=r"there is no lesson '11'.*\n.*allowed") as error:
        find_lesson("11")
    assert "10  watch-profile-infer" in str(error.value)


# --- the folder of a learner


def test_what_a_learner_changed_stays(tmp_path: Path) -> None:
    lesson = find_lesson("1")
    assert {each.state for each in place_files(lesson, tmp_path / "learn")} == {"new"}
    changed = tmp_path / "learn" / lesson.name / "gpt.toml"
    changed.write_text("mine")
    (changed.parent / "single.py").unlink()
    (changed.parent / "single.py").mkdir()
    states = {each.name: each.state for each in place_files(lesson, tmp_path / "learn")}
    assert states == {"gpt.toml": "kept", "single.py": "kept", "with_shardway.py": "same"}
    assert changed.read_text() == "mine"


def test_the_folder_is_found_from_inside_a_lesson(tmp_path: Path) -> None:
    assert find_folder(tmp_path) == tmp_path / "learn"
    place_files(find_lesson("1"), tmp_path / "learn")
    inside = tmp_path / "learn/01-single-device/runs"
    inside.mkdir()
    assert find_folder(tmp_path) == find_folder(inside) == find_folder(inside.parent) == tmp_path / "learn"


def test_cd_leads_from_where_the_learner_is(tmp_path: Path) -> None:
    lesson = find_lesson("2")
    inside = tmp_path / "learn/01-single-device"
    assert "\ncd ../02-precision\n" in lesson.text_for(tmp_path / "learn", inside)
    assert lesson.text_for(tmp_path / "learn", tmp_path) == lesson.text


# --- undone work is refused


@pytest.mark.parametrize("number", NUMBERS)
def test_an_untouched_lesson_is_not_done(number: int, tmp_path: Path) -> None:
    lesson = find_lesson(str(number))
    place_files(lesson, tmp_path)
    check = check_lesson(lesson, tmp_path)
    assert [each.evidence for each in check.findings] == [""] * len(REQUIREMENTS[number])
    assert all(each.missing and each.remedy for each in check.findings)
    assert not check.is_done


@pytest.mark.parametrize("number", NUMBERS)
def test_faked_runs_are_no_work(number: int, tmp_path: Path) -> None:
    """Names, notes and outputs alone: a status, a report, a resolved run, traces and answers without a run behind."""
    lesson = find_lesson(str(number))
    place_files(lesson, tmp_path)
    place = tmp_path / lesson.name
    for name in ("one", "two", "fp32", "bf16", "shard", "chain"):
        run = RunDir(place / "runs" / name)
        run.create()
        run.write_status(state="finished", step=40, total_steps=40)
        run.write_request("", '[model]\nkind = "transformer"\n[parallel]\ndp_shard = 2\n')
        run.report_path.write_text("<html>")
        trace = run.trace_path(1, 3, 0)
        trace.parent.mkdir()
        trace.write_bytes(b"x" * 2000)
    (place / "answers.txt").write_text('{"prompt": "a", "text": "b"}\n')
    for script in ("slurm.sh", "pbs.sh", "apptainer.sh", "enroot.sh"):
        (place / script).write_text(
            f"#!/bin/bash\n# Written by Shardway 1\nrun=/elsewhere/runs/x\nruntime={script[:-3]}\n"
        )
    check = check_lesson(lesson, tmp_path)
    assert [each.evidence for each in check.findings] == [""] * len(REQUIREMENTS[number])
    assert check.rejected["runs/one"] == "it has no run id, which every start writes"


@pytest.fixture(scope="module", name="trained")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lesson's run of twenty steps, as a learner has it."""
    folder = tmp_path_factory.mktemp("lesson")
    text = folder / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 50)
    threads = torch.get_num_threads()
    train_tiny(folder / "01-single-device/runs/one", lone_rank(), f"data.path={text}", base=BASE)
    torch.set_num_threads(threads)
    return folder


def test_a_trained_run_counts_and_what_it_did_not_do_is_missing(trained: Path) -> None:
    check = check_lesson(find_lesson("1"), trained)
    assert [bool(each.evidence) for each in check.findings] == [True, True, False, False]
    assert check.findings[0].evidence == "runs/one"
    assert len(check.run_ids) == 1
    evidence = gather(trained / "01-single-device")
    (run,) = evidence.gpts
    assert find_position_gap(run) == ""
    assert find_largest_difference(run, run) == 0.0
    assert prove_alone(evidence)
    assert prove_learning(evidence)
    assert not prove_divided_states(evidence)
    assert not prove_killed(evidence)
    assert not prove_evaluated(evidence)


def test_figures_have_the_plan_beside(trained: Path) -> None:
    machine, _ = find_machine(None, "a100")
    (found,) = find_figures(gather(trained / "01-single-device"), machine)
    run = read_run(RunDir(trained / "01-single-device/runs/one"), "runs/one")
    assert found.step_s == run.find_median_s()
    assert found.loss == run.losses[20]
    parameters = run.starts[0]["parameters"]
    assert found.planned_kept_bytes == pytest.approx(12 * parameters)  # fp32 weights and two states of AdamW
    beside = found.saved_bytes - found.planned_kept_bytes  # random numbers, and each tensor begins at a round address
    assert 0 < beside < 2**16
    shown = render_figures([found], "a100")
    assert "x 1.00" in shown
    assert "runs/one: nothing" in shown


def copy_run(trained: Path, name: str) -> RunDir:
    import shutil

    path = trained / "01-single-device/runs" / name
    shutil.copytree(trained / "01-single-device/runs/one", path)
    return RunDir(path)


def test_copies_and_changed_records_do_not_count(trained: Path) -> None:
    folder = trained / "01-single-device"
    copy = copy_run(trained, "two")
    assert re.match(r"it is a copy of runs/one: both have the run id \w{32}", gather(folder).rejected["runs/two"])
    (copy.path / "run-id").unlink()
    assert gather(folder).rejected["runs/two"] == "it has no run id, which every start writes"
    (copy.path / "run-id").write_text("0" * 32 + " 5c5d7d4e\n")
    with pytest.raises(JobError):
        read_run(copy, "runs/two")

    damaged = copy_run(trained, "three")
    newest = damaged.checkpoint_path(damaged.checkpoint_steps()[-1])
    with open(newest / "rank-00000.bin", "r+b") as file:
        file.write(b"x" * 64)
    with pytest.raises(JobError, match="damaged"):
        read_run(damaged, "runs/three")

    shortened = copy_run(trained, "four")
    lines = shortened.events_path(0).read_text().splitlines(keepends=True)
    shortened.events_path(0).write_text("".join(line for line in lines if '"step": 7,' not in line))
    with pytest.raises(JobError, match="its events lack steps"):
        read_run(shortened, "runs/four")

    bigger = copy_run(trained, "five")
    bigger.events_path(0).write_text("".join(lines).replace('"world": 1', '"world": 2'))
    with pytest.raises(JobError, match="its checkpoint is of 1 ranks, and its events are not"):
        read_run(bigger, "runs/five")


# --- the verb


def run_verb(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run_guarded(lambda: app(list(words), standalone_mode=False, prog_name="shardway"))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(name="here")
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_list_prints_what_comes_next(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_verb(capsys, "learn")
    assert code == 0
    assert out.count(" min ") == 10
    assert out.endswith("next: shardway learn 1\n")
    facts = json.loads(run_verb(capsys, "learn", "--json")[1])
    assert [each["state"] for each in facts["lessons"]] == ["not begun"] * 10
    assert list(here.iterdir()) == []  # a look makes nothing


def test_a_piped_lesson_is_its_page_and_the_note_is_on_stderr(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_verb(capsys, "learn", "3")
    assert (code, out) == (0, find_lesson("3").text)
    assert err == "files in learn/03-data: gpt.toml, make_text.py written\n".replace("learn", str(here / "learn"), 1)
    (here / "learn/03-data/gpt.toml").write_text("mine")
    assert "kept as you changed them: gpt.toml" in run_verb(capsys, "learn", "3")[2]


def test_check_ends_with_1_and_names_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_verb(capsys, "learn", "check", "ddp")
    assert code == 1
    assert "To do: shardway train gpt.toml --nproc 2 --dir runs/two" in out
    assert "learn/04-ddp is not there; `shardway learn 4` makes it" in out
    code, out, _ = run_verb(capsys, "learn", "check", "all")
    assert code == 1
    assert len(out.splitlines()) == 10
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("0",), "there is no lesson '0'."),
        (("check",), "learn check: no lesson is named."),
        (("check", "x"), "there is no lesson 'x'."),
        (("1", "2"), "learn 1 2: these words are no order."),
        (("figures", "1"), "has no run with figures yet."),
        (("figures", "1", "--gpu", "nothing"), "nothing"),
    ],
)
def test_wrong_words_are_a_sentence(
    words: tuple[str, ...], expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_verb(capsys, "learn", *words)
    assert code == 2
    assert expected in err
    assert list(here.iterdir()) == []


def test_neither_listing_nor_checking_imports_torch(here: Path) -> None:
    program = (
        "import sys; from shardway.cli.main import app;"
        "[app(words.split(), standalone_mode=False) for words in ('learn', 'learn 1', 'learn check all')];"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=here, check=True, capture_output=True, timeout=60)


def test_the_commands_of_the_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = list_blocks((ROOT / "docs/learn.md").read_text())
    lines = [line.partition("#")[0].split() for line in "".join(blocks).splitlines()]
    codes = {"shardway learn": 0, "shardway learn 1": 0, "shardway learn check all || true": 1}
    assert [" ".join(line) for line in lines] == list(codes)
    for line, code in codes.items():
        assert run_verb(capsys, *line.removesuffix(" || true").split()[1:])[0] == code
