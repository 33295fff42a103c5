"""A model is found on disk or fetched from the hub, its config is read without torch, and refusals say what to do."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from hub_server import fill_cache
from shardway import hfconfig
from shardway.errors import UserError
from shardway.hfconfig import ModelFacts, import_extra, locate_model, read_config, read_facts, without_warnings

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def write_config(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def refusal(hf: str) -> str:
    with pytest.raises(UserError) as told:
        locate_model(hf)
    return str(told.value)


# --- config.json


def test_facts_of_a_model(tmp_path: Path) -> None:
    assert read_facts(write_config(tmp_path, CONFIG)) == ModelFacts(
        family="llama",
        vocab=50,
        dim=32,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn_dim=48,
        max_positions=64,
        tied=False,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2, 48)),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, (4, 2, 24)),
        ({"num_experts_per_tok": 2}, (0, 0, 0)),
    ],
)
def test_facts_of_a_mixture(tmp_path: Path, changes: dict[str, int], expected: tuple[int, int, int]) -> None:
    facts = read_facts(write_config(tmp_path, {**CONFIG, **changes}))
    assert (facts.experts, facts.experts_per_token, facts.expert_dim) == expected


def test_a_tokenizer_is_found_beside_the_config(tmp_path: Path) -> None:
    assert read_facts(write_config(tmp_path, CONFIG)).tokenizer == ""
    (tmp_path / "tokenizer.json").touch()
    assert read_facts(tmp_path).tokenizer == str(tmp_path / "tokenizer.json")


def test_facts_that_a_config_leaves_open(tmp_path: Path) -> None:
    config = {**CONFIG, "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": True}
    facts = read_facts(write_config(tmp_path, config))
    assert (facts.kv_heads, facts.head_dim, facts.tied) == (4, 8, True)


def test_all_that_is_missing_in_a_config_is_told(tmp_path: Path) -> None:
    config = {**CONFIG, "vocab_size": "many", "num_hidden_layers": 0}
    del config["hidden_size"]
    with pytest.raises(UserError) as told:
        read_facts(write_config(tmp_path, config))
    assert [line.strip() for line in str(told.value).splitlines() if not line.startswith("      ")] == [
        f"3 problems in {tmp_path / 'config.json'}",
        "vocab_size: 'many' is no size",
        "hidden_size: is missing",
        "num_hidden_layers: 0 is no size",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "is no JSON object"),
        ("[" * 9999, "read: max"),
        ('{"a": 1, // one\n"b": 2}', "which has no comments"),
        ('{"a": 1,}', "no comma after the last entry"),
    ],
)
def test_a_damaged_config_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_config(write_config(tmp_path, text))


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("utf-8-sig", "begins with a byte-order mark"),
        ("utf-16", r"a config\.json in UTF-16"),
        ("utf-16-le", r"a config\.json in UTF-16-LE"),
        ("utf-32", r"a config\.json in UTF-32"),
    ],
)
def test_a_config_of_another_encoding_is_named(encoding: str, words: str, tmp_path: Path) -> None:
    """As editors on Windows write it; transformers reads UTF-8 alone."""
    config = tmp_path / "config.json"
    config.write_bytes('{"model_type": "llama", "name": "é"}'.encode(encoding))
    with pytest.raises(UserError, match=words):
        read_config(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_config(tmp_path)


def test_reading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shardway.hfconfig import locate_model, read_facts;"
        f"read_facts(locate_model({str(write_config(tmp_path, CONFIG))!r}));"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- where a model is


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert locate_model(str(tmp_path / "models")) == locate_model("~/models") == tmp_path / "models"


def fetched(monkeypatch: pytest.MonkeyPatch, outcome: Path | Exception) -> list[Any]:
    """Stand in for the hub; what it was asked for."""
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize("hf", ["/nowhere/model", "./model", "~/nothing", "a/b/c"])
def test_a_path_that_is_no_folder_is_not_asked_of_the_hub(hf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fetched(monkeypatch, OSError())
    assert f'model.hf: "{hf}" is no folder' in refusal(hf)
    assert asked == []


@pytest.mark.parametrize(("hf", "revision"), [("org/name", None), ("org/name@v1", "v1")])
def test_a_hub_name_is_fetched_without_what_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: str, revision: str | None
) -> None:
    (tmp_path / "model.safetensors").touch()
    asked = fetched(monkeypatch, tmp_path)
    assert locate_model(hf) == tmp_path
    ((name, options),) = asked
    assert (name, options["revision"]) == ("org/name", revision)
    assert {"config.json", "*.safetensors", "tokenizer.json"} <= set(options["allow_patterns"])
    assert not any(pattern.endswith((".bin", ".pt", ".gguf", "*")) for pattern in options["allow_patterns"][:-1])


def test_facts_need_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fetched(monkeypatch, write_config(tmp_path, CONFIG))
    assert locate_model("org/name", weights=False) == tmp_path
    assert asked[0][1]["allow_patterns"] == ["config.json", "tokenizer.json"]


def test_a_model_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched(monkeypatch, write_config(tmp_path, CONFIG))
    text = refusal("org/name")
    assert '"org/name" has no safetensors files' in text
    assert "save_pretrained(folder)" in text


@pytest.mark.parametrize(
    ("kind", "what", "remedy"),
    [
        ("GatedRepoError", "is gated", "`hf auth login` or set HF_TOKEN"),
        ("RepositoryNotFoundError", "is neither a folder nor a name of the hub", "correct the name"),
        ("RevisionNotFoundError", "names a revision that the hub does not have", "behind the @"),
        ("HFValidationError", "is neither a folder nor a name of the hub", "such as Qwen/Qwen3-0.6B"),
        ("LocalEntryNotFoundError", "is not in the local cache, and the hub", "`shardway prefetch --model org/name"),
        ("IncompleteSnapshotError", "is in the local cache in part alone", "`shardway prefetch --model org/name"),
        ("SomethingNew", "could not be fetched from the hub: because", "`shardway prefetch --model org/name"),
    ],
)
def test_what_the_hub_refuses_is_explained(monkeypatch: pytest.MonkeyPatch, kind: str, what: str, remedy: str) -> None:
    fetched(monkeypatch, type(kind, (OSError,), {})("because\nof much"))
    text = refusal("org/name@v1")
    assert f'model.hf: "org/name@v1" {what}' in text
    assert remedy in text


def test_the_errors_have_the_names_that_the_client_gives_them() -> None:
    """A gated repository is also one that is not found, so the order of the explanations counts."""
    errors = importlib.import_module("huggingface_hub.errors")
    assert all(hasattr(errors, kind) for kind in hfconfig.HUB_REFUSALS)
    assert issubclass(errors.GatedRepoError, errors.RepositoryNotFoundError)
    assert list(hfconfig.HUB_REFUSALS).index("GatedRepoError") < list(hfconfig.HUB_REFUSALS).index(
        "RepositoryNotFoundError"
    )


def test_offline_the_cache_alone_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, told to stay offline: nothing is there at first, then what a download has left."""
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "is not in the local cache, and the hub cannot be reached" in refusal("org/name")
    stored = tmp_path / "models--org--name"
    commit = "0" * 40
    (stored / "snapshots" / commit).mkdir(parents=True)
    (stored / "snapshots" / commit / "model.safetensors").touch()
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    assert locate_model("org/name") == stored / "snapshots" / commit


def test_what_was_prefetched_is_asked_of_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fetched(monkeypatch, OSError("the hub was asked"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    source = write_config(tmp_path / "source", CONFIG)
    (source / "model.safetensors").write_text("weights")
    snapshot = fill_cache(tmp_path / "cache", "org/name", source)
    assert locate_model("org/name") == locate_model(f"org/name@{snapshot.name}") == snapshot
    assert asked == []
    (snapshot / "model.safetensors").unlink()
    assert locate_model("org/name", weights=False) == snapshot
    with pytest.raises(UserError):  # where a file is gone, the hub's library may bring it again
        locate_model("org/name")
    (snapshot / "config.json").unlink()
    with pytest.raises(UserError):
        locate_model("org/name", weights=False)
    fill_cache(tmp_path / "cache", "org/other", write_config(tmp_path / "config", CONFIG))
    assert locate_model("org/other", weights=False).is_dir()
    with pytest.raises(UserError):
        locate_model("org/other")  # its weights were not prefetched


def test_a_refusal_of_the_hub_stands_in_a_list_of_others() -> None:
    refused = hfconfig.hf_error("org/x", "is not there", remedy="fetch it")
    (problem,) = refused.problems
    assert (problem.where, problem.what, problem.remedy) == ("model.hf", '"org/x" is not there', "fetch it")


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(UserError, match=r'To do: pip install "shardway\[hf\]"'):
        import_extra("no_such_package_of_anyone")


def test_libraries_warn_of_nothing_while_they_are_imported() -> None:
    with warnings.catch_warnings(record=True) as came:
        warnings.simplefilter("always")
        for around in (without_warnings(), contextlib.nullcontext()):
            with around:
                shown = logging.getLogger("a library").isEnabledFor(logging.WARNING)
                warnings.warn("deprecated", stacklevel=1)
                assert shown == isinstance(around, contextlib.nullcontext)
    assert len(came) == 1
