"""What each inference server is called with, how many accelerators split its model, and how it is reached."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shardway.launch.serving.servers import ServedModel
from shardway.launch.serving.state import ServerAccess, ServingState
from shardway.launch.submission.serve import choose_degree
from shardway.plugins import list_names, make_plugin

MODEL = ServedModel("/models/m", "m", 2, False, ("--dtype", "float16"))
WORDS = {
    "vllm": "python3 -m vllm.entrypoints.cli.main serve /models/m --served-model-name m --host {host} --port {port} "
    "--tensor-parallel-size 2 --dtype float16",
    "sglang": "python3 -m sglang.launch_server --model-path /models/m --served-model-name m --host {host} "
    "--port {port} --tp-size 2 --config {key_file} --dtype float16",
    "transformers": "python3 -m transformers.cli.transformers serve /models/m --host {host} --port {port} "
    "--dtype float16",
}


@pytest.mark.parametrize("name", WORDS)
def test_the_words_of_a_server(name: str) -> None:
    assert " ".join(make_plugin("inference_servers", name).words(MODEL)) == WORDS[name]


def test_every_server_of_ours_is_shown_here() -> None:
    assert set(WORDS) == set(list_names("inference_servers"))


def test_no_server_has_its_key_among_its_words() -> None:
    for name in WORDS:
        assert not any("{key}" in word for word in make_plugin("inference_servers", name).words(MODEL))


@pytest.mark.parametrize(
    ("available", "heads", "kv", "degree"),
    [
        (8, 32, 8, 8),
        (8, 28, 4, 4),  # Qwen2.5-7B on eight: 28 heads split over four at most
        (6, 32, 8, 4),
        (4, 14, 2, 2),
        (8, 8, 1, 8),  # the one head of keys and values is copied
        (3, 7, 7, 1),
    ],
)
def test_the_degree_splits_the_heads(available: int, heads: int, kv: int, degree: int) -> None:
    found, why = choose_degree(available, {"num_attention_heads": heads, "num_key_value_heads": kv})
    assert found == degree
    assert bool(why) == (degree != available)


def test_a_model_that_is_not_known_takes_them_all() -> None:
    assert choose_degree(4, {}) == (4, "")


def access(host: str = "", this_machine: bool = False, address: str = "127.0.0.1", key_file: str = "") -> ServerAccess:
    serving = ServingState("ready", "vllm", "m", "/m", 1, "node07", address, 8123, healthy=True, key_file=key_file)
    return ServerAccess(serving, host, this_machine)


@pytest.mark.parametrize(
    ("given", "tunnel"),
    [
        (access(this_machine=True), ""),
        (access("me@box", this_machine=True), "ssh -N -L 8123:127.0.0.1:8123 me@box"),
        (access("me@login"), "ssh -N -J me@login -L 8123:127.0.0.1:8123 me@node07"),
        (access("login"), "ssh -N -J login -L 8123:127.0.0.1:8123 node07"),
        (access("me@login", address="0.0.0.0"), "ssh -N -L 8123:node07:8123 me@login"),
    ],
)
def test_the_tunnel(given: ServerAccess, tunnel: str) -> None:
    assert given.tunnel == tunnel


def test_the_line_to_paste_hands_the_key_over_in_no_word(tmp_path: Path) -> None:
    """curl is replaced by a program that shows its words and what stands in the files that they name."""
    key, curl = tmp_path / "the key", tmp_path / "curl"
    key.write_text("abc\n")
    curl.write_text('#!/bin/bash\necho "words $*"\nfor word; do [[ $word != @* ]] || cat "${word#@}"; done\n')
    curl.chmod(0o755)
    line = access(this_machine=True, key_file=str(key)).curl
    done = subprocess.run(["bash", "-c", f"PATH={tmp_path}:$PATH; {line}"], capture_output=True, text=True, check=True)
    words, _, rest = done.stdout.partition("\n")
    assert "abc" not in words
    assert rest == "Authorization: Bearer abc"
