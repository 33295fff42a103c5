"""`shardway plan`: what it prints, what it writes, what it refuses; its page in docs/ shows what it prints now."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from command_line import Shardway

from golden_files import Golden, golden_names
from page_tables import check_block
from shardway.hardware.catalogue import load_accelerators
from shardway.plan import counted
from shardway.plan.case import load_aliases, machine_of_part
from shardway.plan.counted import CountedModel, CountedUnit
from shardway.plugins import list_names
from shardway.ranks.doctor.examine import read_wanted
from shardway.resolve.request import parse_words, resolve_request

A100 = ("--gpu", "a100-sxm4-80gb")
EXAMPLE = ("plan", "llama3-8b", "--on", "leonardo-booster", "--nodes", "16", "--tokens", "100e9")
LABELS = (
    "model",
    "batch",
    "layout",
    "memory",
    "step",
    "utilisation",
    "run",
    "failures",
    "costs",
    "calibrated",
    "assumed",
)


def test_the_table_on_the_page(shardway: Shardway, request: pytest.FixtureRequest) -> None:
    done = shardway(*EXAMPLE)
    assert (done.code, done.err) == (0, "")
    command = "$ shardway " + " ".join(EXAMPLE)
    check_block(request, "plan.md", "the table of a plan", "console", [command, *done.out.splitlines()])


def test_every_line_of_the_table_is_explained(shardway: Shardway) -> None:
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text(encoding="utf-8")
    labels = {line.split("  ")[0] for line in shardway(*EXAMPLE).out.splitlines() if line[:1].isalpha()}
    explained = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    headings = {"memory of the fullest rank", "one step", "other layouts"}
    told = {label for label in labels if not label.startswith(("llama3-8b on", "other layouts", "memory of"))}
    assert told == set(LABELS)
    assert told | headings <= explained


def test_the_curve_on_the_page(shardway: Shardway, request: pytest.FixtureRequest) -> None:
    words = ("plan", "llama3-8b", "--on", "leonardo-booster", "--nodes", "16", "--curve", "4,16,64,256")
    lines = ["$ shardway " + " ".join(words), *shardway(*words).out.splitlines()]
    assert [line.split()[0] for line in lines[2:]] == ["4", "16", "64", "256"]
    check_block(request, "plan.md", "the curve of a plan", "console", lines)


def test_facts_are_those_of_the_table(shardway: Shardway) -> None:
    table, facts = shardway(*EXAMPLE).out, json.loads(shardway(*EXAMPLE, "--json").out)
    plan, run = facts["plan"], facts["run"]
    assert f"{plan['peak_bytes']['device'] / 2**30:.1f} GiB (" in table
    assert f"MFU {plan['mfu_full']:.1%} (causal {plan['mfu_causal']:.1%})".replace("%", " %") in table
    assert f"{run['steps']:,} steps: {run['days']:.3g} days in {run['jobs']} jobs" in table
    assert sum(plan["step_items_seconds"].values()) == pytest.approx(plan["step_seconds"])
    (stage,) = plan["stages"]
    assert sum(stage["items"].values()) == pytest.approx(stage["allocated"])
    layout = plan["layout"]
    assert layout["micro_batch"] * layout["micro_batches"] * layout["dp_shard"] * layout["dp_replicate"] == 512
    assert run["gpu_hours"] == pytest.approx(64 * run["wall_seconds"]["total_seconds"] / 3600)


@pytest.mark.parametrize("topic", ["memory", "time", "layout"])
def test_an_explanation_adds_up_to_the_table(shardway: Shardway, topic: str) -> None:
    facts = json.loads(shardway("plan", "gpt2-xl", *A100, "--json").out)["plan"]
    told = shardway("plan", "gpt2-xl", *A100, "--explain", topic).out
    assert {
        "memory": f"{facts['peak_bytes']['device'] / 2**30:,.1f} GiB   of",
        "time": f"{facts['layout']['micro_batches']} passes",
        "layout": "ways were looked at",
    }[topic] in told


@pytest.mark.parametrize(
    ("gpu", "runs", "unfitted", "fitted"),
    [
        ("h100", "this kind of accelerator", "flash3", "matmul"),
        ("mi300x", "other accelerators", "matmul", "memory"),
        ("v100-sxm2-32gb", "other accelerators", "link", "network"),
    ],
)
def test_a_plan_says_which_factors_were_fitted(
    gpu: str, runs: str, unfitted: str, fitted: str, shardway: Shardway, tmp_path: Path
) -> None:
    table = shardway("plan", "gpt2", "--gpu", gpu, "--html", "page.html").out
    assert f"calibrated   on published runs of {runs}; nothing" in table
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert ("fitted on published measurements of other accelerators;" in page) == runs.startswith("other")
    lines = shardway("plan", "gpt2", "--gpu", gpu, "--explain", "time").out.splitlines()
    origins = {words[0]: " ".join(words[2:]) for words in map(str.split, lines) if len(words) > 2}
    assert (origins[unfitted], origins[fitted]) == ("not fitted", "fitted on published runs")


def test_a_run_without_a_queue_has_one_start(shardway: Shardway) -> None:
    words = ("plan", "llama3-8b", "--gpu", "h100", "--steps", "1")
    run = json.loads(shardway(*words, "--json").out)["run"]
    parts = run["wall_seconds"]
    assert parts["slot_seconds"] == 180
    assert parts["total_seconds"] > parts["ideal_seconds"] + 180
    assert "1 step: " in shardway(*words).out


def test_what_does_not_fit_is_told_with_what_would_help(shardway: Shardway) -> None:
    done = shardway("plan", "llama3-70b", *A100, "--no-offload")
    assert done.code == 0
    assert "does not fit" in done.out
    helps = [line for line in done.out.splitlines() if line.startswith("to fit")]
    assert any("nodes" in line for line in helps)
    assert any("host's memory" in line for line in helps)
    facts = json.loads(shardway("plan", "llama3-70b", *A100, "--no-offload", "--json").out)
    assert not facts["plan"]["fits"]
    assert facts["run"] is None
    assert all(change["fits"] for change in facts["to_fit"])


def test_a_run_file_is_planned_as_it_resolves(shardway: Shardway) -> None:
    Path("my.toml").write_text("[model]\ndim = 256\n[train]\nglobal_batch = 64\n[parallel]\ntp = 2\n", encoding="utf-8")
    facts = json.loads(shardway("plan", "my.toml", "train.micro_batch=4", *A100, "--gpus", "8", "--json").out)
    layout = facts["plan"]["layout"]
    assert (layout["tp"], layout["dp_replicate"], layout["micro_batch"], layout["global_batch"]) == (2, 4, 4, 64)
    assert facts["run"]["steps"] == 800
    refused = shardway("plan", "my.toml", *A100, "--seq-len", "64", "--layout", "tp=4")
    assert refused.code == 2
    assert "data.seq_len" in refused.err
    assert "2 problems" in refused.err


@pytest.mark.parametrize("words", [("parallel.tp=2",), ("model.kind=convnet", "data.kind=synthetic")])
def test_a_batch_that_grows_is_planned_by_its_largest_size(shardway: Shardway, words: tuple[str, ...]) -> None:
    """200 steps of 32 samples and 600 of 64 are as many samples as 700 of 64."""
    Path("my.toml").write_text("[train]\nglobal_batch = [[0, 32], [6400, 64]]\n", encoding="utf-8")
    facts = json.loads(shardway("plan", "my.toml", *words, *A100, "--gpus", "8", "--json").out)
    assert facts["plan"]["layout"]["global_batch"] == 64
    assert facts["run"]["steps"] == 700
    assert "steps of the largest size; the run has 32 samples, 64 from position 6400 on" in facts["assumed"]


def test_convolutions_are_planned_by_their_parts(shardway: Shardway) -> None:
    words = ("model.kind=convnet", "data.kind=synthetic", "data.shape=[3,32,32]", "train.steps=100 steps")
    Path("my.toml").write_text("", encoding="utf-8")
    done = shardway("plan", "my.toml", *words, *A100, "--gpus", "4")
    assert (done.code, done.err) == (0, "")
    assert "convnet on a100-sxm4-80gb" in done.out
    assert "run          100 steps" in done.out
    assert shardway("plan", "my.toml", *words, *A100, "--explain", "time").code == 2


OWN = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)), torch.zeros(1, 64)
"""


def test_a_module_of_ones_own_is_counted_once(shardway: Shardway, tmp_path: Path) -> None:
    Path("own.py").write_text(OWN, encoding="utf-8")
    Path("my.toml").write_text("", encoding="utf-8")
    counted = shardway("plan", "my.toml", *A100, "--gpus", "2", "--trace", "--module", "own.py:make", "--json")
    assert (counted.code, counted.err) == (0, "")
    facts = json.loads(counted.out)
    assert facts["plan"]["model"]["parameters"] == 64 * 128 + 128 + 128 * 10 + 10
    again = json.loads(shardway("plan", "my.toml", *A100, "--gpus", "2", "--json").out)
    assert again["plan"] == facts["plan"]
    stale = shardway("plan", "my.toml", "model.dim=64", *A100, "--gpus", "2")
    assert stale.code == 2
    assert "was counted for another [model]" in stale.err


@pytest.mark.parametrize(("schedule", "stages"), [("zbv", {2}), ("interleaved", {2, 3, 4, 6}), ("gpipe", {1})])
def test_a_schedule_that_is_set_gets_the_stages_that_it_wants(
    shardway: Shardway, schedule: str, stages: set[int]
) -> None:
    done = shardway("plan", "gpt2-xl", *A100, "--layout", "pp=4", "--schedule", schedule, "--json")
    layout = json.loads(done.out)["plan"]["layout"]
    assert (layout["pp"], layout["schedule"]) == (4, schedule)
    assert layout["stages_per_rank"] in stages


def test_a_layout_is_handed_to_another_library(shardway: Shardway, tmp_path: Path) -> None:
    done = shardway(
        "plan", "llama3-8b", *A100, "--gpus", "16", "--layout", "tp=4", "--emit", "torchtitan", "--out", "to"
    )
    assert (done.code, done.err) == (0, "")
    job = tomllib.loads(Path("to/torchtitan.toml").read_text(encoding="utf-8"))
    assert job["parallelism"]["tensor_parallel_degree"] == 4
    assert "written: to/torchtitan.toml" in done.out


def test_a_page_is_written(shardway: Shardway) -> None:
    done = shardway("plan", "gpt2-xl", *A100, "--html", "plan.html")
    assert (done.code, done.err) == (0, "written: plan.html\n")
    assert Path("plan.html").read_text(encoding="utf-8").startswith("<!")


def test_what_a_site_measured_stands_before_what_is_shipped(shardway: Shardway) -> None:
    text = (Path(__file__).parents[2] / "src/shardway/sites/leonardo-booster.toml").read_text(encoding="utf-8")
    Path("mine.toml").write_text(text + "\n[measured]\nmatmul = 0.35\n", encoding="utf-8")
    shipped = json.loads(shardway(*EXAMPLE, "--json").out)["plan"]
    mine = [*EXAMPLE[:3], "./mine.toml", *EXAMPLE[4:]]
    measured = json.loads(shardway(*mine, "--json").out)["plan"]
    assert measured["step_items_seconds"]["products"] > 1.5 * shipped["step_items_seconds"]["products"]
    assert "what was measured on this site: matmul" in shardway(*mine).out
    Path("mine.toml").write_text(text + "\n[measured]\nmatmull = 0.35\n", encoding="utf-8")
    refused = shardway(*mine)
    assert refused.code == 2
    assert "measured.matmull" in refused.err


REFUSED = {
    "no-machine": ("llama3-8b",),
    "two-machines": ("llama3-8b", *A100, "--on", "lumi-g"),
    "unknown-gpu": ("llama3-8b", "--gpu", "h1000"),
    "unknown-model-and-no-machine": ("llama9-8b",),
    "unknown-model": ("llama9-8b", *A100),
    "site-without-accelerators": ("llama3-8b", "--on", "laptop"),
    "unknown-queue": ("llama3-8b", "--on", "leonardo-booster", "--queue", "fast"),
    "absurd-sizes": ("llama3-8b", *A100, "--nodes", "0", "--seq-len", "-5", "--global-batch", "99999999999"),
    "unknown-words": (
        "llama3-8b",
        *A100,
        "--precision",
        "int3",
        "--recompute",
        "some",
        "--schedule",
        "dual",
        "--zero",
        "4",
    ),
    "unknown-engine": ("llama3-8b", *A100, "--engine", "horovod"),
    "no-such-format": ("llama3-8b", *A100, "--precision", "fp8"),
    "layout-that-is-none": ("llama3-8b", *A100, "--layout", "tp=4,dp=2,pp"),
    "two-degrees-of-an-axis": ("llama3-8b", *A100, "--layout", "tp=2,tp=4"),
    "patches-that-are-too-many": ("vit-b16", *A100, "--seq-len", "4096"),
    "folder-for-nothing": ("llama3-8b", *A100, "--out", "outdir"),
    "layout-that-does-not-divide": ("llama3-8b", *A100, "--layout", "tp=3"),
    "positions-that-are-too-few": ("gpt2", *A100, "--seq-len", "2048"),
    "parts-that-no-axis-splits": ("resnet-50", *A100, "--layout", "tp=2", "--recompute", "full"),
    "heads-that-do-not-divide": ("gpt2-xl", *A100, "--layout", "tp=2"),
    "experts-of-a-dense-model": ("llama3-8b", *A100, "--layout", "ep=2"),
    "batch-that-no-layout-takes": ("llama3-8b", *A100, "--global-batch", "7", "--layout", "dp_shard=8"),
    "samples-that-no-ranks-share": ("resnet-50", *A100, "--gpus", "16", "--global-batch", "7"),
    "tokens-that-are-none": ("llama3-8b", *A100, "--tokens", "many"),
    "two-lengths": ("llama3-8b", *A100, "--tokens", "1e9", "--steps", "5"),
    "price-without-a-currency": ("llama3-8b", *A100, "--price", "2.5"),
    "price-that-is-too-high": ("llama3-8b", *A100, "--price", "9e300 EUR"),
    "unknown-topic": ("llama3-8b", *A100, "--explain", "cost"),
    "curve-that-is-none": ("llama3-8b", *A100, "--curve", "0,2"),
    "unknown-library": ("llama3-8b", *A100, "--emit", "colossal"),
    "trace-without-a-run-file": ("llama3-8b", *A100, "--trace"),
    "key-without-a-run-file": ("llama3-8b", "train.steps=5", *A100),
    "nothing-to-emit": ("llama3-70b", *A100, "--no-offload", "--emit", "megatron"),
    "page-without-a-place": ("gpt2", *A100, "--html", "/proc/plan.html"),
}


@pytest.mark.parametrize(
    ("short", "part"),
    [
        ("h100", "NVIDIA H100 SXM5 80 GB"),
        ("A100", "NVIDIA A100 SXM4 80 GB"),
        ("h100-pcie", "NVIDIA H100 PCIe 80 GB"),
        ("h200", "NVIDIA H200 SXM 141 GB"),
        ("gh200", "NVIDIA GH200 96 GB"),
    ],
)
def test_a_short_name_of_a_gpu_is_the_most_common_variant(short: str, part: str) -> None:
    machine = machine_of_part(short)
    assert machine.accelerator.name == part
    assert machine.assumed[0].startswith(f"{part} for --gpu {short}")


def test_every_short_name_of_a_gpu_is_of_the_catalogue() -> None:
    assert set(load_aliases().values()) <= set(load_accelerators())
    assert not set(load_aliases()) & set(load_accelerators())


def test_the_variant_is_told(shardway: Shardway) -> None:
    done = shardway("plan", "gpt2", "--gpu", "h100", "--gpus", "8")
    assert done.code == 0
    assert "NVIDIA H100 SXM5 80 GB for --gpu h100 (also: h100-sxm5-64gb, h100-sxm5-96gb, h100-pcie-80gb" in done.out


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_told_in_a_sentence(shardway: Shardway, golden: Golden, name: str) -> None:
    done = shardway("plan", *REFUSED[name])
    assert done.code in (2, 3)
    assert done.out == ""
    golden(f"$ shardway plan {' '.join(REFUSED[name])}\n{done.err}exit code {done.code}\n", f"plan/{name}.txt")


def test_a_config_of_an_unknown_family(
    shardway: Shardway, golden: Golden, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(counted, "find_library", lambda: None)
    Path("m").mkdir()
    Path("m/config.json").write_text('{"model_type": "mamba2", "hidden_size": 8}', encoding="utf-8")
    done = shardway("plan", "./m", *A100)
    assert done.code == 2
    said = done.err.replace(str(tmp_path), "HOME")
    golden(f"$ shardway plan ./m {' '.join(A100)}\n{said}exit code {done.code}\n", "plan/unknown-family.txt")


MAMBA = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 1,
    "vocab_size": 100,
}
PLAN = ("plan", "m", "--gpu", "h100", "--gpus", "8")


def write_config(keys: dict[str, object]) -> None:
    Path("m").mkdir(exist_ok=True)
    Path("m/config.json").write_text(json.dumps(keys), encoding="utf-8")


@pytest.mark.slow
def test_a_model_of_another_family_is_counted_once_and_then_planned_without_torch(
    shardway: Shardway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_config(MAMBA)
    done = shardway(*PLAN, "--json")
    assert done.code == 0
    assert done.err.startswith("shardway: m is counted with transformers ")
    facts = json.loads(done.out)
    assert facts["plan"]["fits"]
    assert "as Mamba2ForCausalLM, for samples of 4,096 tokens" in facts["plan"]["model"]["source"]
    assert len(list((tmp_path / "cache/shardway/shapes").iterdir())) == 1

    monkeypatch.setattr(counted, "_ask_child", lambda *_: pytest.fail("it is kept"))
    assert json.loads(shardway(*PLAN, "--json").out) == facts
    monkeypatch.setattr(counted, "find_library", lambda: None)
    again = shardway(*PLAN, "--json")
    assert (json.loads(again.out), again.err) == (facts, "")
    longer = json.loads(shardway(*PLAN, "--seq-len", "8192", "--global-batch", "64", "--json").out)
    assert "for samples of 8,192 tokens" in longer["plan"]["model"]["source"]
    write_config({**MAMBA, "num_hidden_layers": 2})
    assert shardway(*PLAN).code == 2
    write_config({**MAMBA, "torch_dtype": "float16"})
    assert json.loads(shardway(*PLAN, "--json").out)["plan"]["fits"]


@pytest.mark.parametrize("learned", [True, False])
def test_learned_positions_bound_samples_of_a_counted_model(
    shardway: Shardway, monkeypatch: pytest.MonkeyPatch, learned: bool
) -> None:
    unit = CountedUnit(
        name="all", parameters=10**8, forward_flops=(1e11,) * 3, saved_bytes=(8.0,) * 3, fixed_bytes=(0.0,) * 3
    )
    count = CountedModel(
        model="BertForPreTraining",
        library="transformers 5.0.0",
        takes="input_ids int64 [1, 128]",
        longest=512,
        learned=learned,
        lengths=(128, 256, 384),
        units=(unit,),
        value_bytes=2,
    )
    monkeypatch.setattr(counted, "find_library", lambda: "5.0.0")
    monkeypatch.setattr(counted, "_ask_child", lambda *_: count)
    write_config({"model_type": "bert", "architectures": ["BertForPreTraining"]})
    assert shardway(*PLAN, "--seq-len", "512").code == 0
    done = shardway(*PLAN, "--seq-len", "4096")
    if learned:
        assert (done.code, done.out) == (2, "")
        assert "--seq-len: 4,096 is more than the 512 positions that the model has learned vectors for" in done.err
    else:
        assert done.code == 0
        assert "more positions than the 512 that its config states" in done.out


def test_what_is_not_for_a_model_known_by_its_parts_is_named_as_typed(shardway: Shardway) -> None:
    done = shardway("plan", "resnet-50", *A100, "--emit", "torchtitan")
    assert (done.code, done.out) == (2, "")
    assert "--emit: resnet-50 is known by its parts alone" in done.err
    both = shardway("plan", "resnet-50", *A100, "--emit", "torchtitan", "--engine", "torchtitan")
    assert "--engine: has no effect on resnet-50" in both.err


@pytest.mark.parametrize("steps", ["0", "-3", "1000000000001"])
def test_a_run_has_no_such_length(shardway: Shardway, steps: str) -> None:
    done = shardway("plan", "gpt2", *A100, "--steps", steps)
    assert (done.code, done.out) == (2, "")
    assert f"--steps: {steps} is no length" in done.err
    assert "allowed: 1 to 1,000,000,000,000" in done.err


def test_a_model_known_by_its_parts_is_copied_or_sharded(shardway: Shardway) -> None:
    found = json.loads(shardway("plan", "resnet-50", *A100, "--gpus", "8", "--json").out)["plan"]
    assert found["model"]["parameters"] == 25_557_032
    assert (found["layout"]["dp_replicate"], found["layout"]["dp_shard"]) == (8, 1)
    words = ("--layout", "dp_shard=4", "--micro-batch", "16", "--global-batch", "1024")
    kept = json.loads(shardway("plan", "resnet-50", *A100, "--gpus", "8", *words, "--json").out)["plan"]["layout"]
    assert (kept["dp_replicate"], kept["dp_shard"], kept["micro_batch"], kept["micro_batches"]) == (2, 4, 16, 8)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 100},
            114_688,
        ),
        ({"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}, 106_624),
        (
            {"model_type": "opt", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
            | {"vocab_size": 100, "max_position_embeddings": 128},
            73_536,
        ),
        (
            {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            | {"vocab_size": 100},
            92_800,
        ),
    ],
)
def test_a_run_of_a_family_with_older_names_of_keys(
    shardway: Shardway, config: dict[str, object], parameters: int
) -> None:
    write_config(config)
    Path("my.toml").write_text('[model]\nhf = "m"\n[data]\nkind = "synthetic"\nseq_len = 64\n', encoding="utf-8")
    done = shardway("plan", "my.toml", *A100, "--gpus", "2", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["plan"]["model"]["parameters"] == parameters
    if config["model_type"] in ("gpt2", "opt"):
        longer = shardway("plan", "my.toml", "data.seq_len=256", *A100, "--gpus", "2")
        assert longer.code == 2
        assert "256 is more than the 128 positions that the model knows" in longer.err


@pytest.mark.slow
def test_a_run_of_a_family_that_is_counted_by_the_library(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardway.models.huggingface.count import count_config

    monkeypatch.setattr(counted, "_ask_child", lambda config, name: count_config(config))
    monkeypatch.setattr("shardway.models.huggingface.count.LENGTHS", (64, 128, 192))
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    write_config({"model_type": "qwen3_next", **sizes})
    Path("my.toml").write_text('[model]\nhf = "m"\n[data]\nkind = "synthetic"\nseq_len = 64\n', encoding="utf-8")
    done = shardway("plan", "my.toml", *A100, "--gpus", "2", "--trace", "--json")
    assert done.code == 0
    assert "as Qwen3NextForCausalLM, for samples of 64 tokens" in json.loads(done.out)["plan"]["model"]["source"]


def test_no_refusal_is_left_over() -> None:
    assert golden_names("plan") == {f"{name}.txt" for name in (*REFUSED, "unknown-family")}


H100 = ("--gpu", "h100-sxm5-80gb")


def test_a_run_is_planned_for_the_machine_that_is_named_and_not_for_this_one(shardway: Shardway) -> None:
    Path("my.toml").write_text('[run]\ndevice = "cuda"\n[precision]\ncompute = "float8"\n', encoding="utf-8")
    done = shardway("plan", "my.toml", *H100, "--gpus", "2", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["plan"]["layout"]["precision"] == "fp8"


def test_experts_of_a_run_are_split_by_the_tensor_axis_as_the_engine_splits_them(shardway: Shardway) -> None:
    words = ("model.experts=4", "parallel.tp=2", "parallel.dp_shard=4", "parallel.ep=4", "train.global_batch=64")
    Path("my.toml").write_text("", encoding="utf-8")
    layout = json.loads(shardway("plan", "my.toml", *words, *H100, "--gpus", "8", "--json").out)["plan"]["layout"]
    assert (layout["tp"], layout["ep"], layout["etp"]) == (2, 4, 2)
    found = json.loads(shardway("plan", "mixtral-8x7b", *H100, "--nodes", "2", "--json").out)
    for each in (found["plan"], *found["others"]):
        layout = each["layout"]
        assert layout["etp"] == layout["tp"]
        assert (layout["dp_shard"] * layout["cp"]) % layout["ep"] == 0


def test_degrees_beside_experts_are_kept(shardway: Shardway) -> None:
    words = ("plan", "mixtral-8x7b", *H100, "--nodes", "4", "--layout", "ep=4,dp_shard=8", "--json")
    layout = json.loads(shardway(*words).out)["plan"]["layout"]
    assert (layout["ep"], layout["dp_shard"]) == (4, 8)


def test_a_counted_model_of_tokens_has_as_many_steps_as_its_tokens_take(shardway: Shardway) -> None:
    Path("my.toml").write_text("[data]\nseq_len = 512\n[train]\nglobal_batch = 64\n", encoding="utf-8")
    done = shardway("plan", "my.toml", *A100, "--gpus", "1", "--trace", "--tokens", "1e9", "--json")
    assert json.loads(done.out)["run"]["steps"] == -(-(10**9) // (512 * 64))


@pytest.mark.parametrize(
    "words",
    [
        ("llama3-70b", *H100, "--gpus", "8", "--layout", "cp=8", "--seq-len", "4104"),
        ("llama3-8b", "--on", "perlmutter", "--queue", "debug", "--nodes", "1", "--global-batch", "65536"),
        ("my.toml", *A100, "--gpus", "2", "--emit", "accelerate"),
        ("llama3-70b", *H100, "--gpus", "4", "--offload"),
    ],
    ids=["a half that does not split", "a step longer than a job", "a run file handed on", "half a node's host"],
)
def test_it_answers(shardway: Shardway, words: tuple[str, ...]) -> None:
    Path("my.toml").write_text("", encoding="utf-8")
    done = shardway("plan", *words)
    assert (done.code, done.err) == (0, "")
    assert "does not fit" not in done.out or "cp=8" in words


@pytest.mark.parametrize(
    "body", ["def make(x): return x", "import nowhere", "def make(:", "def make(): raise KeyError(1)"]
)
def test_what_fails_in_the_persons_own_file_is_told(shardway: Shardway, body: str) -> None:
    Path("own.py").write_text(body, encoding="utf-8")
    Path("my.toml").write_text("", encoding="utf-8")
    done = shardway("plan", "my.toml", *A100, "--module", "own.py:make")
    assert done.code == 2
    assert '--module "own.py:make" failed' in done.err


@pytest.mark.parametrize(
    ("run_file", "says"),
    [
        ('[data]\npath = "later.txt"\n', "samples of data.seq_len tokens, since later.txt is not there yet"),
        (
            '[model]\nkind = "convnet"\n[data]\nkind = "idx"\npath = "later"\n',
            "images of [1, 28, 28] (others: data.kind=synthetic data.shape=[...]), since later is not there yet",
        ),
    ],
)
@pytest.mark.parametrize("trace", [True, False])
def test_a_plan_needs_no_data(run_file: str, says: str, trace: bool, shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(run_file)
    done = shardway("plan", "my.toml", *A100, "--gpus", "1", *(["--trace"] if trace else []))
    assert (done.code, done.err) == (0, "")
    if trace or "convnet" in run_file:
        assert says in " ".join(done.out.split())


@pytest.mark.parametrize("name", list_names("optimizers"))
def test_a_checkpoint_has_the_states_of_the_optimizer(name: str, shardway: Shardway, tmp_path: Path) -> None:
    """`shardway doctor` states the same size."""
    model = '[model]\ndim = 1024\nlayers = 8\nheads = 8\nvocab = 32000\n[data]\nkind = "synthetic"\n'
    (tmp_path / "run.toml").write_text(f"format = 1\n{model}[train]\nsteps = 1000\n", encoding="utf-8")
    words = ["run.toml", f"optim.name={name}", "optim.lr=1e-3"]
    size = read_wanted(resolve_request(parse_words(words))).checkpoint_bytes
    facts = json.loads(shardway("plan", *words, "--gpu", "h100", "--json").out)
    assert size is not None
    assert f"a checkpoint of {size / 1e9:,.3g} GB" in " ".join(facts["assumed"])


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        (("resnet-50", "--gpus", "4100"), "4,100 samples"),
        (("vit-b16", "--gpus", "4100"), "4,100 images"),
        (("llama3-8b", "--gpus", "400000"), "3,125 sequences"),
        (("llama3-8b", "--gpus", "4100"), "410 sequences"),
    ],
)
def test_a_batch_that_is_assumed_is_one_that_the_ranks_can_have(
    words: tuple[str, ...], batch: str, shardway: Shardway
) -> None:
    done = shardway("plan", *words, "--gpu", "h100", "--steps", "10")
    assert (done.code, f"a global batch of {batch}" in done.out) == (0, True), done


def test_a_vocabulary_that_nothing_says_is_asked_for(shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[data]\nkind = "tokens"\npath = "later.bin"\n')
    done = shardway("plan", "my.toml", *A100, "--gpus", "1", "--trace")
    assert (done.code, "to do: set model.vocab" in done.err) == (2, True)
