"""Reading a run file: its parent, overrides over both, and the origin of every key."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.runfile.load import DEFAULT, LoadedRunFile, load_run, parse_override_value
from shardway.runfile.schema import RunFile, all_keys
from shardway.units import Span


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path | None, *overrides: str) -> str:
    with pytest.raises(UserError) as told:
        load_run(path, overrides)
    return str(told.value)


def set_keys(loaded: LoadedRunFile) -> dict[str, str]:
    return {dotted: origin for dotted, origin in loaded.origins.items() if origin != DEFAULT}


# --- values and origins


def test_no_file_is_all_defaults() -> None:
    loaded = load_run(None)
    assert loaded.values == RunFile()
    assert list(loaded.origins) == all_keys()
    assert set_keys(loaded) == {}
    assert (loaded.text, loaded.path) == ("", None)


def test_a_file_sets_what_it_names(tmp_path: Path) -> None:
    text = 'format = 1\n\n[train]\nsteps = "2e6 tokens"\n[model]\ndim = 64\n'
    path = write(tmp_path / "my.toml", text)
    loaded = load_run(path)
    assert loaded.values.train.steps == Span(2e6, "tokens")
    assert loaded.values.model.dim == 64
    assert set_keys(loaded) == {"train.steps": "my.toml:4", "model.dim": "my.toml:6"}
    assert (loaded.text, loaded.path) == (text, path)


def test_the_command_line_wins_over_the_file_and_the_file_over_its_parent(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "[train]\nseed = 1\nglobal_batch = 8\n[optim]\nlr = 0.1\n")
    child = write(tmp_path / "child.toml", 'extends = "base.toml"\n[train]\nglobal_batch = 16\n[optim]\nlr = 0.2\n')
    loaded = load_run(child, ["optim.lr=0.3"])
    assert (loaded.values.train.seed, loaded.values.train.global_batch, loaded.values.optim.lr) == (1, 16, 0.3)
    assert set_keys(loaded) == {
        "train.seed": "base.toml:2",
        "train.global_batch": "child.toml:3",
        "optim.lr": "command line",
    }


def test_the_parent_stands_beside_the_file_not_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    write(tmp_path / "base.toml", "[train]\nseed = 5\n")
    write(tmp_path / "runs/child.toml", 'extends = "../base.toml"\n')
    monkeypatch.chdir("/")
    assert load_run(tmp_path / "runs/child.toml").values.train.seed == 5


def test_an_empty_section_leaves_the_parent_as_it_is(tmp_path: Path) -> None:
    """`shardway init` writes sections whose keys are all comments."""
    write(tmp_path / "base.toml", "[model]\ndim = 64\n")
    child = write(tmp_path / "child.toml", 'extends = "base.toml"\n[model]\n# dim = 128\n')
    loaded = load_run(child)
    assert loaded.values.model.dim == 64
    assert set_keys(loaded) == {"model.dim": "base.toml:2"}


def test_only_the_text_of_the_file_itself_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "[train]\nseed = 5\n")
    child = write(tmp_path / "child.toml", 'extends = "base.toml"\n')
    assert load_run(child).text == 'extends = "base.toml"\n'


def test_the_last_of_two_overrides_wins() -> None:
    assert load_run(None, ["train.seed=1", "train.seed=2"]).values.train.seed == 2


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("train.seed=7", "train", "seed", 7),
        ("train.seed = 7", "train", "seed", 7),
        ("train.steps=500 steps", "train", "steps", Span(500, "steps")),
        ("train.steps=500", "train", "steps", Span(500, "steps")),
        ("model.channels=[4, 8]", "model", "channels", [4, 8]),
        ("model.tied=false", "model", "tied", False),
        ('run.name="a b"', "run", "name", "a b"),
        ("run.name=a=b", "run", "name", "a=b"),
        ("data.path=/a/b.txt", "data", "path", "/a/b.txt"),
        ("optim.clip=off", "optim", "clip", "off"),
        ("checkpoint.every=10min", "checkpoint", "every", 600.0),
        ("parallel.dp_shard=auto", "parallel", "dp_shard", "auto"),
        ("optim.lr=1e-3", "optim", "lr", 1e-3),
        ("model.hf=", "model", "hf", ""),
    ],
)
def test_overrides(override: str, section: str, name: str, value: object) -> None:
    loaded = load_run(None, [override])
    assert getattr(getattr(loaded.values, section), name) == value
    assert set_keys(loaded) == {f"{section}.{name}": "command line"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("3.5", 3.5), ("true", True), ("[1, 2]", [1, 2]), ('"3"', "3"), ("3 steps", "3 steps"), ("", "")],
)
def test_an_override_is_toml_or_else_text(text: str, value: object) -> None:
    assert parse_override_value(text) == value


def test_a_value_in_place_of_a_default() -> None:
    loaded = load_run(None, ["train.seed=3"])
    changed = loaded.with_default("train.steps", "3 epochs", "the script")
    assert changed.values.train.steps == Span(3, "epochs")
    assert set_keys(changed) == {"train.seed": "command line", "train.steps": "the script"}
    assert changed.values.train.seed == 3
    assert set_keys(loaded) == {"train.seed": "command line"}
    assert loaded.with_default("train.seed", 4, "the script") is loaded


def test_another_value_of_one_key() -> None:
    loaded = load_run(None, ["train.seed=3"])
    changed = loaded.with_value("train.seed", 4, "the script")
    assert (changed.values.train.seed, set_keys(changed)) == (4, {"train.seed": "the script"})
    with pytest.raises(UserError) as told:
        loaded.with_value("train.seed", -4, "the script")
    assert str(told.value) == (
        "1 problem in the script\n  train.seed (the script): -4 is too small\n      allowed: at least 0"
    )


def test_a_run_file_is_not_touched(tmp_path: Path) -> None:
    path = write(tmp_path / "my.toml", "[train]\nseed = 5\n")
    path.chmod(0o400)
    before = (path.stat().st_mtime_ns, path.read_bytes())
    load_run(path, ["train.seed=6"])
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["my.toml"]


# --- what cannot be read


def test_a_parent_of_a_parent(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", "[train]\nseed = 1\n")
    write(tmp_path / "b.toml", 'extends = "a.toml"\n')
    child = write(tmp_path / "c.toml", 'extends = "b.toml"\n')
    assert refused(child) == (
        f"{tmp_path}/c.toml extends {tmp_path}/b.toml, which extends another file itself; allowed: one parent.\n"
        f"  To do: copy the keys that you need from {tmp_path}/b.toml's parent into {tmp_path}/c.toml."
    )


def test_a_file_that_extends_itself(tmp_path: Path) -> None:
    child = write(tmp_path / "c.toml", 'extends = "c.toml"\n')
    assert refused(child) == f"{child} extends itself; allowed: the path of another run file."


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "my.toml", "\ufeff[train]\nseed = 5\n")
    loaded = load_run(path)
    assert loaded.values.train.seed == 5
    assert set_keys(loaded) == {"train.seed": "my.toml:2"}


def test_two_parents(tmp_path: Path) -> None:
    child = write(tmp_path / "c.toml", 'extends = ["a.toml", "b.toml"]\n')
    assert refused(child) == (
        f"extends in {tmp_path}/c.toml is ['a.toml', 'b.toml']; allowed: the path of one run file as a string."
    )


def test_a_parent_that_is_missing(tmp_path: Path) -> None:
    child = write(tmp_path / "c.toml", 'extends = "gone.toml"\n')
    assert refused(child) == (
        f"the run file {tmp_path}/gone.toml (extends in {tmp_path}/c.toml) cannot be read: No such file or directory.\n"
        "  To do: check the path, or write a new run file with `shardway init`."
    )


def test_a_parent_whose_name_no_file_can_have(tmp_path: Path) -> None:
    child = write(tmp_path / "c.toml", 'extends = "a\\u0000b"\n')
    assert "cannot be read: " in refused(child)


def test_a_folder_as_run_file(tmp_path: Path) -> None:
    assert refused(tmp_path).startswith(f"the run file {tmp_path} cannot be read: Is a directory.\n")


def test_no_text(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(b"[train]\n\xff\xfe")
    assert refused(path) == (
        f"the run file {path} is not UTF-8 text (byte 8): is it a run file?\n"
        "  To do: name a run file; where it is one, save it as UTF-8 in your editor."
    )


@pytest.mark.parametrize("text", ["[train\n", "x = \n", "[train]\nseed = 1\nseed = 2\n", "train.seed 5\n"])
def test_no_toml(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "my.toml", text)
    assert refused(path).startswith(f"{path} is not valid TOML: ")


@pytest.mark.parametrize("text", [f"a = {'9' * 5000}\n", f"a = {'[' * 5000}{']' * 5000}\n"])
def test_toml_that_no_reader_can_hold(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "my.toml", text)
    assert refused(path).startswith(f"{path} is not valid TOML: ")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000 + "]" * 5000])
def test_an_override_that_no_reader_can_hold_is_text(value: str) -> None:
    assert parse_override_value(value) == value


def test_an_override_that_is_no_text() -> None:
    """What a shell hands over for a path in another encoding than UTF-8."""
    assert refused(None, "data.path=caf\udce9") == (
        "1 problem in the command line\n"
        "  data.path (command line): 'caf\\udce9' is not UTF-8 text\n"
        "      allowed: text in UTF-8"
    )


def test_keys_are_read_by_their_earlier_names(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nrestarts = 3\n[site]\nstarter = "srun"\n[guard]\non_spike = "tell"\n')
    loaded = load_run(path, ['recompute.save=["attention"]', "model.balance_step=0.5"])
    values = loaded.values
    assert (values.run.max_restarts, values.site.launcher, values.guard.on_spike) == (3, "srun", "warn")
    assert (values.recompute.save_ops, values.model.bias_update_rate) == (["attention"], 0.5)
    assert (loaded.origins["run.max_restarts"], loaded.origins["recompute.save_ops"]) == ("run.toml:2", "command line")


def test_a_key_is_not_set_by_both_of_its_names(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nmax_restarts = 2\nrestarts = 3\n")
    with pytest.raises(UserError, match=r"sets run\.restarts \(line 3\), the earlier name of run\.max_restarts"):
        load_run(path)
