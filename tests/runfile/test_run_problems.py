"""What is wrong with a run file, told all at once, each with its value, its line and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.runfile.load import load_run
from shardway.runfile.schema import sections

OPTIM = (
    "name, kernel, state_dtype, lr, betas, eps, muon_lr_factor, muon_adjust, muon_momentum, muon_iterations, momentum, "
    "nesterov, weight_decay, clip, schedule, warmup, decay, final_lr, lr_scaling, base_batch, settings"
)
CHECKPOINT = "every, keep, keep_every, keep_best, monitor, background, local_every, local_dir"
TOP = (
    "model, data, train, optim, parallel, deepspeed, precision, recompute, checkpoint, guard, track, notify, "
    "pipeline, run, site, format"
)


def problem(*overrides: str) -> str:
    """The lines below the title of what is refused."""
    with pytest.raises(UserError) as told:
        load_run(None, overrides)
    title, _, text = str(told.value).partition("\n")
    assert title.endswith(" in the command line")
    return text


def problem_of_file(path: Path, text: str, *overrides: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as told:
        load_run(path, overrides)
    return str(told.value).replace(str(path.parent), "")


# --- keys


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    assert problem("checkpoint.evry=5") == (
        "  checkpoint.evry (command line): there is no key of this name; did you mean checkpoint.every?\n"
        f"      allowed: in [checkpoint]: {CHECKPOINT}"
    )


def test_a_key_of_another_section_is_answered_with_that_section() -> None:
    assert problem("checkpoint.dp_shard=5") == (
        "  checkpoint.dp_shard (command line): there is no key of this name; did you mean parallel.dp_shard?\n"
        f"      allowed: in [checkpoint]: {CHECKPOINT}"
    )


def test_an_unknown_key_that_is_like_no_other() -> None:
    assert problem("checkpoint.zzz=5") == (
        f"  checkpoint.zzz (command line): there is no key of this name\n      allowed: in [checkpoint]: {CHECKPOINT}"
    )


def test_an_unknown_section_is_answered_with_the_nearest(tmp_path: Path) -> None:
    assert problem_of_file(tmp_path / "my.toml", "format = 1\n\n[optin]\nlr = 1.0\n") == (
        "1 problem in /my.toml\n"
        "  optin (my.toml:3): there is no section of this name; did you mean optim?\n"
        f"      allowed: {TOP}"
    )


def test_a_key_without_its_section(tmp_path: Path) -> None:
    assert problem_of_file(tmp_path / "my.toml", "lr = 1.0\n") == (
        "1 problem in /my.toml\n"
        "  lr (my.toml:1): there is no section of this name; did you mean optim.lr?\n"
        f"      allowed: {TOP}"
    )


def test_a_key_below_a_key() -> None:
    assert problem("optim.lr.peak=1") == (
        f"  optim.lr.peak (command line): there is no key of this name\n      allowed: in [optim]: {OPTIM}"
    )


@pytest.mark.parametrize("override", ["steps=5", "train", "train.steps", "=5", ""])
def test_no_override(override: str) -> None:
    assert problem(override) == (
        f"  {override} (command line): is not an override\n      allowed: section.key=value, such as train.steps=500"
    )


def test_a_section_that_is_no_section(tmp_path: Path) -> None:
    names = ", ".join(sections()["checkpoint"].model_fields)
    assert problem_of_file(tmp_path / "my.toml", "checkpoint = 5\n") == (
        "1 problem in /my.toml\n"
        "  checkpoint (my.toml:1): 5 is not a section\n"
        f"      allowed: a table [checkpoint] with {names}"
    )


def test_a_section_that_is_no_section_is_not_hidden_by_an_override(tmp_path: Path) -> None:
    text = problem_of_file(tmp_path / "my.toml", "checkpoint = 5\n", "checkpoint.keep=2")
    assert text.splitlines()[1] == "  checkpoint (my.toml:1): 5 is not a section"


def test_an_array_of_sections(tmp_path: Path) -> None:
    text = problem_of_file(tmp_path / "my.toml", "[[checkpoint]]\nkeep = 5\n")
    assert text.splitlines()[1] == "  checkpoint (my.toml): [{'keep': 5}] is not a section"


# --- values


@pytest.mark.parametrize(
    ("override", "what", "allowed"),
    [
        ("model.dim=x", '"x" is not an integer', "an integer"),
        ("model.dim=1.5", "1.5 is not an integer", "an integer"),
        ("model.dim=true", "true is not an integer", "an integer"),
        ("model.dim=0", "0 is too small", "at least 1"),
        ("model.tied=1", "1 is neither true nor false", "true or false"),
        ("model.tied=yes", '"yes" is neither true nor false', "true or false"),
        ("run.name=5", "5 is not a string", "a string in quotes"),
        ('run.name=""', '"" is not the name of a folder', "a string without / that is more than dots"),
        ("run.name=a/b", '"a/b" is not the name of a folder', "a string without / that is more than dots"),
        ("run.name=..", '".." is not the name of a folder', "a string without / that is more than dots"),
        ('data.path=""', '"" is too short', "a string of at least 1 character"),
        ("optim.lr=fast", '"fast" is not a number', "a number"),
        ("optim.lr=0", "0 is too small", "more than 0"),
        ("optim.lr=inf", "inf is not a finite number", "a finite number"),
        ("optim.lr=nan", "nan is not a finite number", "a finite number"),
        ("optim.momentum=1.5", "1.5 is too large", "at most 1"),
        ("model.dropout=1.0", "1.0 is too large", "less than 1"),
        ("optim.name=adam", '"adam" is not one of the choices', '"adamw", "sgd", "adafactor", "adamw8bit" or "muon"'),
        ("model.vocab=auot", '"auot" is not an integer', 'an integer or "auto"'),
        ("model.vocab=0", "0 is too small", 'at least 1 or "auto"'),
        ("optim.clip=none", '"none" is not a number', 'a number or "off"'),
        ("model.channels=3", "3 is not a list", "a list such as [1, 2]"),
        ("track.to=wandb,mlflow", '"wandb,mlflow" is not a list', 'a list such as ["wandb", "mlflow"]'),
        ("model.channels=[]", "[] has 0 entries", "at least 1 entries"),
        ("model.channels=[1, 'x']", '"x" is not an integer', "an integer"),
        ("optim.betas=[0.9]", "[0.9] has 1 entries", "at least 2 entries"),
        ("optim.betas=[0.1, 0.2, 0.3]", "[0.1, 0.2, 0.3] has 3 entries", "at most 2 entries"),
        (
            "train.steps=soon",
            '"soon" is not an amount of training',
            'a number of steps, samples, tokens, epochs, such as "500 steps"',
        ),
        (
            "train.steps=1.5",
            "1.5 is neither a string nor an integer",
            'a string such as "500 steps", or an integer number of steps',
        ),
        ("train.steps=1e30 tokens", '"1e30 tokens" is too large', "up to 9007199254740992 tokens"),
        ("train.validate_every=0", "0 steps is no interval", 'more than 0, or "off"'),
        ("checkpoint.every=0 tokens", "0 tokens is no interval", 'more than 0, or "off"'),
        ("checkpoint.every=0s", "0ms is no interval", 'more than 0, or "off"'),
        (
            "checkpoint.every=-1",
            '"-1" is neither an amount of training ("200 steps", "1 epochs") nor a time ("10min")',
            "",
        ),
        (
            "checkpoint.every=inf",
            "inf is neither a string nor an integer",
            'a string such as "500 steps", or an integer number of steps',
        ),
        ("run.stop_timeout=90", "90 is not a string", 'a time in quotes with its unit, such as "90s"'),
        ("run.stop_timeout=90.0", "90.0 is not a string", 'a time in quotes with its unit, such as "90s"'),
        ("run.stop_timeout=0s", '"0s" is no time to wait', "more than 0s"),
        (
            "run.stop_timeout=fast",
            '"fast" is not a time',
            'numbers with d, h, min, m, s or ms, such as "1h30m"',
        ),
        ("run.stop_timeout=1e9d", '"1e9d" is too long', "up to 3650d"),
        (f"train.seed={2**63}", f"{2**63} is too large", f"at most {2**63 - 1}"),
    ],
)
def test_a_wrong_value(override: str, what: str, allowed: str) -> None:
    key = override.partition("=")[0]
    tail = f"\n      allowed: {allowed}" if allowed else ""
    assert problem(override) == f"  {key} (command line): {what}{tail}"


def test_a_wrong_format(tmp_path: Path) -> None:
    assert problem_of_file(tmp_path / "my.toml", "format = 2\n") == (
        "1 problem in /my.toml\n  format (my.toml:1): 2 is not one of the choices\n      allowed: 1"
    )


def test_a_date_is_a_name_too() -> None:
    assert load_run(None, ["run.name=2026-01-31"]).values.run.name == "2026-01-31"


def test_a_date_in_a_file_is_no_text(tmp_path: Path) -> None:
    assert problem_of_file(tmp_path / "my.toml", "[run]\nname = 2026-01-31\n") == (
        "1 problem in /my.toml\n  run.name (my.toml:2): 2026-01-31 is not a string\n      allowed: a string in quotes"
    )


# --- all at once


def test_all_problems_of_file_parent_and_command_line_at_once(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[train]\nseed = -1\n\n[model]\ndim = 'x'\n")
    text = 'extends = "base.toml"\n[train]\nglobal_batch = 0\nbatch = 5\n[checkpoint]\nkeep = [1,\n 2]\n'
    told = problem_of_file(tmp_path / "my.toml", text, "steps=5", "optim.name=adm")
    assert [line for line in told.splitlines() if not line.startswith("      ")] == [
        "7 problems in /my.toml",
        "  steps=5 (command line): is not an override",
        '  model.dim (base.toml:5): "x" is not an integer',
        "  train.seed (base.toml:2): -1 is too small",
        "  train.global_batch (my.toml:3): 0 is too small",
        "  train.batch (my.toml:4): there is no key of this name; did you mean train.micro_batch?",
        '  optim.name (command line): "adm" is not one of the choices',
        "  checkpoint.keep (my.toml:6): [1, 2] is not an integer",
    ]
