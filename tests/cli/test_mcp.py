"""The server for assistants: the SDK's own client against the real process, and what a call may reach and cost."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Shardway

import warm
from page_shell import list_blocks
from shardway.cli.mcp import find_roots
from shardway.cli.tools import TABLE, Reach, ToolCalls, list_tools, mask_secrets, read_secret_values
from shardway.errors import UserError
from shardway.rundir.directory import RunDir

SCRIPT = "print('trained')\n"


# --- the real process


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of one session, by what was asked: (is an error, text, data)."""
    import mcp
    from mcp.client.stdio import stdio_client

    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    home = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "STATE")}
    environ = {**os.environ, **home, "MY_API_KEY": "4a1b-not-for-others"}
    parameters = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "shardway", "mcp", "--root", str(folder)], env=environ, cwd=folder
    )
    found: dict[str, Any] = {"folder": folder}

    async def talk() -> None:
        async with stdio_client(parameters) as streams, mcp.ClientSession(*streams) as client:
            await client.initialize()
            found["tools"] = (await client.list_tools()).tools

            async def ask(label: str, tool: str, **arguments: Any) -> Any:
                answer = await client.call_tool(tool, arguments)
                text = "".join(part.text for part in answer.content)
                found[label] = answer.is_error, text, answer.structured_content
                return answer.structured_content or {}

            job = {"words": ["run.name=key-4a1b-not-for-others"], "command": ["python", "train.py"]}
            await ask("plan", "plan", model=["gpt2"], gpu="h100-sxm5-80gb")
            await ask("wrong", "plan", model=["gpt-none"], gpu="h100-sxm5-80gb")
            await ask("invented", "submit", **job, confirm="a-token-of-my-own")
            first = await ask("dry", "submit", **job)
            (folder / "train.py").write_text(SCRIPT * 2, encoding="utf-8")
            await ask("changed", "submit", **job, confirm=first["confirm"])
            second = await ask("again", "submit", **job)
            await ask("submitted", "submit", **job, confirm=second["confirm"])
            await ask("twice", "submit", **job, confirm=second["confirm"])
            await ask("status", "status")
            seen = await ask("stop", "stop", run="runs/key-4a1b-not-for-others")
            await ask("stopped", "stop", run="runs/key-4a1b-not-for-others", confirm=seen.get("confirm", ""))

    with warm.starts():
        asyncio.run(asyncio.wait_for(talk(), 120))
    return found


def test_the_tools_are_the_verbs(session: dict[str, Any]) -> None:
    offered = {tool.name: tool for tool in session["tools"]}
    assert [*offered] == [row.name for row in TABLE]
    changing = {name for name, tool in offered.items() if not tool.annotations.read_only_hint}
    assert changing == {"submit", "resume", "stop"}
    assert {name for name, tool in offered.items() if "confirm" in tool.input_schema["properties"]} == changing


def test_reading_is_free(session: dict[str, Any]) -> None:
    wrong, text, data = session["plan"]
    assert not wrong
    assert data == json.loads(text)
    assert data["plan"]["model"]["parameters"] == 124_439_808
    wrong, text, data = session["status"]
    assert (wrong, len(json.loads(text))) == (False, 1)


def test_an_error_of_ours_comes_back_as_our_text(session: dict[str, Any]) -> None:
    wrong, text, data = session["wrong"]
    assert (wrong, data) == (True, None)
    assert text.startswith('1 problem in the model\n  model: "gpt-none" is no model')


def test_a_submission_takes_a_dry_run_and_its_token(session: dict[str, Any]) -> None:
    folder = session["folder"]
    wrong, text, _ = session["invented"]
    assert wrong
    assert text.startswith("confirm: the token is not valid")
    wrong, _, would = session["dry"]
    assert (wrong, would["done"], would["gpu_hours"]) == (False, False, 0.0)
    assert would["would"]["script"].startswith("#!/bin/bash\n")
    wrong, _, sent = session["submitted"]
    assert (wrong, sent["attempt"], sent["run"]) == (False, 1, f"{folder}/runs/key-***")
    assert session["twice"][0]
    assert [attempt.number for attempt in RunDir(folder / "runs/key-4a1b-not-for-others").attempts()] == [1]


def test_a_file_that_changed_since_the_dry_run_is_refused(session: dict[str, Any]) -> None:
    wrong, text, _ = session["changed"]
    assert wrong
    assert text.startswith("submit: what would be done is not what was confirmed")


def test_a_stop_is_confirmed_too(session: dict[str, Any]) -> None:
    wrong, _, would = session["stop"]
    assert (wrong, would["gpu_hours"], len(would["would"]["jobs"])) == (False, 0.0, 1)
    wrong, text, _ = session["stopped"]
    # a job that ended between the two calls is not what was confirmed
    assert "asked" in text if not wrong else "not what was confirmed" in text


def test_secrets_are_masked_wherever_they_stand(session: dict[str, Any]) -> None:
    texts = [value[1] for value in session.values() if isinstance(value, tuple)]
    assert any("key-***" in text for text in texts)
    assert not any("4a1b-not-for-others" in text for text in texts)


# --- what is offered, without a process


def test_arguments_have_the_types_and_help_of_the_verb() -> None:
    tools = {tool.row.name: tool for tool in list_tools()}
    submit = tools["submit"].schema()["properties"]
    assert submit["nodes"] == {"type": "integer", "description": "Nodes of the job (site.nodes)."}
    assert submit["until_done"]["type"] == "boolean"
    assert submit["then"]["items"] == {"type": "string"}
    assert not {"dry_run", "expose", "yes", "json"} & {*submit}
    assert tools["plan"].schema()["required"] == ["model"]
    assert tools["resume"].words({"run": "runs/x", "until_done": False, "keys": ["train.steps=9"]}) == [
        *("resume", "--json", "--once", "runs/x", "train.steps=9")
    ]


def test_no_closed_option_is_a_misspelling() -> None:
    """Each is an option of its verb, but for those that a later version of `submit` may have."""
    open_and_closed = {tool.row.name: {each.option for each in tool.parameters} for tool in list_tools()}
    for row in TABLE:
        assert not open_and_closed[row.name] & {*row.closed}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"words": ["a.toml"], "node": 2}, "node: there is no such argument"),
        ({"nodes": "2"}, 'nodes: "2" is of another type'),
        ({"nodes": True}, "nodes: true is of another type"),
        ({"words": "a.toml"}, 'words: "a.toml" is of another type'),
        ({"words": ["--yes"]}, 'words: "--yes" begins with "-"'),
        ({"run": "x"}, "run: there is no such argument"),
    ],
)
def test_an_argument_that_is_wrong_is_refused(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError) as raised:
        next(tool for tool in list_tools() if tool.row.name == "submit").words(arguments)
    assert part in str(raised.value)


# --- what a call may reach


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToolCalls:
    """Calls in a folder, with the answers of `_Verbs`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    root = tmp_path / "open"
    root.mkdir()
    monkeypatch.chdir(root)
    (root / "leads-out").symlink_to(tmp_path)
    return ToolCalls(Reach(find_roots([root]), ("cluster",), 10.0), _Verbs(str(root / "runs/a")))


class _Verbs:
    """In place of processes: the dry run of a submission that costs 4 GPU-hours; the words of every call."""

    def __init__(self, run: str) -> None:
        self.run, self.gpu_hours, self.digest, self.fails = run, 4.0, "d", False
        self.seen: list[Sequence[str]] = []

    async def __call__(self, words: Sequence[str], folder: Path, limit_s: float) -> tuple[int, str, str]:
        self.seen.append(words)
        facts: Mapping[str, Any] = {"job": "7"}
        if self.fails and "--dry-run" not in words:
            return 2, "", "shardway: the queue is closed\n"
        if "--dry-run" in words:
            facts = {"run": self.run, "host": "", "gpu_hours": self.gpu_hours, "digest": self.digest, "then": []}
        return 0, json.dumps(facts), ""


def _refused(calls: ToolCalls, tool: str, **arguments: Any) -> str:
    with pytest.raises(UserError) as raised:
        asyncio.run(calls.call(tool, arguments))
    return str(raised.value)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("status", {"run": ["/etc"]}),
        ("config_show", {"words": ["../my.toml"]}),
        ("config_show", {"words": ["data.path=/etc/passwd"]}),
        ("config_show", {"words": ['data.path = "~/x"']}),
        ("config_show", {"words": ['data.blend=[{path="/etc", weight=1}]']}),
        ("config_show", {"words": ["data.path=$HOME/x"]}),
        ("config_show", {"dir": "leads-out/x"}),
        ("plan", {"model": ["leads-out/config.json"]}),
        ("submit", {"command": ["python", "train.py", "--data=/scratch/x"]}),
        ("submit", {"command": ["python", "../train.py"]}),
    ],
)
def test_a_path_outside_of_the_folders_is_refused(calls: ToolCalls, tool: str, arguments: dict[str, Any]) -> None:
    assert "is outside of the folders that are open" in _refused(calls, tool, **arguments)
    assert calls.run_verb.seen == []  # type: ignore[attr-defined]


def test_a_run_that_a_name_finds_elsewhere_is_refused(calls: ToolCalls, tmp_path: Path) -> None:
    from shardway.launch.runs.find import Known, remember

    RunDir(tmp_path / "other/mine").create()
    remember(Known(str(tmp_path / "other/mine")))
    remember(Known("/data/far", "unknown"))
    assert f"{tmp_path}/other/mine is outside" in _refused(calls, "logs", run="mine")
    assert "unknown is a host that may not be reached\n      allowed: cluster" in _refused(calls, "logs", run="far")
    RunDir(Path("runs/mine")).create()
    asyncio.run(calls.call("logs", {"run": "mine"}))
    assert calls.run_verb.seen == [["logs", "--json", "runs/mine"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text", ['extends = "../../secret.toml"', '[site]\nname = "/etc/site.toml"', 'extends = "b.toml"']
)
def test_a_file_that_reads_another_one_outside_is_refused(calls: ToolCalls, text: str) -> None:
    Path("a.toml").write_text(text)
    Path("b.toml").write_text('extends = "../c.toml"')
    assert "is outside of the folders that are open" in _refused(calls, "config_show", words=["a.toml"])
    Path("a.toml").write_text('extends = "a.toml"')  # in a circle, which the verb reports
    asyncio.run(calls.call("config_show", {"words": ["a.toml"]}))


@pytest.mark.parametrize(
    "command", [["bash", "-c", "ls"], ["python", "-c", "1"], ["./train.sh"], ["python"], ["env", "python", "x.py"]]
)
def test_a_command_is_a_script_or_a_module(calls: ToolCalls, command: list[str]) -> None:
    assert "allowed: python SCRIPT.py ..., python -m MODULE ..." in _refused(calls, "submit", command=command)


def test_a_run_file_may_not_lead_out_either(calls: ToolCalls) -> None:
    calls.run_verb.run = "/scratch/runs/a"  # type: ignore[attr-defined]
    assert "run.root: /scratch/runs/a is outside" in _refused(calls, "submit", words=["my.toml"])


def test_the_budget_is_that_of_all_submissions(calls: ToolCalls) -> None:
    def submit() -> None:
        token = asyncio.run(calls.call("submit", {"words": ["my.toml"]}))["confirm"]
        asyncio.run(calls.call("submit", {"words": ["my.toml"], "confirm": token}))

    submit()
    submit()
    why = _refused(calls, "submit", words=["my.toml"])
    assert why.startswith("submit: it may cost 4 GPU-hours, and 2 of 10 are left.")
    calls.run_verb.gpu_hours = 1.0  # type: ignore[attr-defined]
    calls.run_verb.fails = True  # type: ignore[attr-defined]
    token = asyncio.run(calls.call("submit", {"words": ["my.toml"]}))["confirm"]
    assert _refused(calls, "submit", words=["my.toml"], confirm=token) == "the queue is closed"
    assert calls.spent_gpu_hours == 8.0  # what the scheduler refused costs nothing
    calls.run_verb.gpu_hours = None  # type: ignore[attr-defined]
    assert "no limit of time, so its cost is not known" in _refused(calls, "submit", words=["my.toml"])


def test_a_token_is_for_one_request_and_a_while(calls: ToolCalls) -> None:
    def ask(**more: Any) -> Any:
        return asyncio.run(calls.call("submit", {"words": ["my.toml"], **more}))

    assert "was not" not in _refused(calls, "submit", words=["my.toml"], nodes=2, confirm=ask()["confirm"])
    calls.clock = lambda: 1e9
    late = ask()["confirm"]
    calls.clock = lambda: 1e9 + 601
    assert "older than 600 s" in _refused(calls, "submit", words=["my.toml"], confirm=late)
    assert ask(confirm=ask()["confirm"]) == {"job": "7"}
    submitted = [words for words in calls.run_verb.seen if "--dry-run" not in words]  # type: ignore[attr-defined]
    assert submitted == [["submit", "--json", "my.toml"]]


def test_values_of_the_secrets_file_are_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".config/shardway/secrets.env"
    file.parent.mkdir(parents=True)
    file.write_text('# note\nexport WANDB="w-\\u00fc-123"\nSHORT=no\n', encoding="utf-8")
    values = read_secret_values()
    assert "no" not in values
    assert mask_secrets('a "w-\\\\u00fc-123" b no', values) == 'a "***" b no'


def test_a_root_is_a_folder(tmp_path: Path) -> None:
    for wrong in (Path("/"), tmp_path / "gone"):
        with pytest.raises(UserError):
            find_roots([wrong])


def test_the_settings_of_the_page_are_words_of_the_verb(shardway: Shardway, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/mcp.md").read_text(encoding="utf-8")
    (block,) = list_blocks(page, "json")
    (toml,) = list_blocks(page, "toml")
    entries = json.loads(block)["mcpServers"]["shardway"], tomllib.loads(toml)["mcp_servers"]["shardway"]
    for entry in entries:
        words = [str(tmp_path) if word.startswith("/home") else word for word in entry["args"]]
        ended = shardway(*words, "--tools")
        assert (entry["command"], ended.code, ended.err) == ("shardway", 0, "")
        assert [*json.loads(ended.out)] == [row.name for row in TABLE]
    for row in TABLE:
        assert f"`{row.name}`" in page


def test_without_the_sdk_a_sentence(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.lowlevel", None)
    ended = shardway("mcp")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.endswith('To do: pip install "shardway[mcp]"\n')
