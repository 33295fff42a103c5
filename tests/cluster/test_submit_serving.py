"""An inference server on a real Slurm: ready on a compute node, reachable there alone, ended by `shardway stop`."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from submitting import Person

STAND_IN = Path(__file__).parents[1] / "stand_in_server.py"


def test_a_server_is_a_job(busy_alice: Person) -> None:
    """In place of vLLM there is a small server of the same name."""
    folder = busy_alice.folder
    busy_alice.cluster.output("mkdir", "-p", f"{folder}/stand-in/vllm/entrypoints/cli", f"{folder}/model")
    busy_alice.write("stand-in/vllm/entrypoints/cli/main.py", STAND_IN.read_text())
    weights = b'{"__metadata__": {"format": "pt"}}'
    contents = {
        "config.json": json.dumps({"model_type": "llama", "num_attention_heads": 4}),
        "tokenizer.json": json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}),
        "tokenizer_config.json": "{}",
        "model.safetensors": (len(weights).to_bytes(8, "little") + weights).decode(),
    }
    for name, text in contents.items():
        busy_alice.write(f"model/{name}", text)
    path = f'site.environment={{PYTHONPATH = "{folder}/stand-in"}}'
    words = ("--serve", "vllm", "model", "--on", "generic-slurm", "--walltime", "5m", path, "run.name=serve")
    run = busy_alice.submit(*words, "--wait", "90")
    served = busy_alice.facts("status", run.path)["serving"]
    assert served["state"] == "ready", run.printed()
    assert served["address"] == "127.0.0.1"
    assert served["tunnel"].startswith("ssh -N -J ")
    assert served["tunnel"].endswith(served["node"])
    key = run.directory.attempt(1).api_key
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    busy_alice.told("stop", run.path, "--wait", "60")
    assert run.ended().state == "stopped", run.printed()
    assert busy_alice.facts("status", run.path)["serving"]["state"] == "ended"
