"""Static batches and offline throughput: each figure of scripted delays, engines by their interfaces, shares of
peaks."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardway.bench.inference import backends, offline
from shardway.bench.inference.backends import (
    EngineFacts,
    EngineRequest,
    OpenedEngine,
    ScriptedBackend,
    parse_settings,
    wait_until,
)
from shardway.bench.inference.engines import SglangBackend, VllmBackend, read_work, split_steps
from shardway.bench.inference.offline import BatchSweep, RequestSet, measure_batches, measure_requests_offline
from shardway.bench.inference.results import BatchTimes, BenchConditions, ServedRequest
from shardway.bench.inference.utilisation import DecoderWork, Peaks, choose_peaks, rate_one_batch, rate_throughput
from shardway.bench.roofline import RoofCeilings
from shardway.errors import JobError, UserError
from shardway.hfconfig import CONFIG

CONDITIONS = BenchConditions("scripted", "scripted delays", "none")
LLAMA_8B: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


class Clock:
    """A time that only sleeping and reading move, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (backends, offline):
        monkeypatch.setattr(module, "time", made)
    return made


# --- scripted delays


def open_scripted(**settings: float) -> OpenedEngine:
    return ScriptedBackend().open(EngineRequest(None, settings=settings))


@pytest.mark.usefixtures("clock")
def test_each_figure_of_a_static_batch_is_what_was_scripted() -> None:
    engine = open_scripted(prefill_ms=30.0, prefill_token_ms=0.5, decode_ms=4.0, slow_every=3, slow_ms=20.0)
    (row,) = measure_batches(engine, BatchSweep((4,), (100,), (9,), 0), CONDITIONS, None)
    steps = [4, 4, 24, 4, 4, 24, 4, 4]  # milliseconds of the eight steps
    close = {"rel": 0.001, "abs": 1e-4}
    assert row["prefill_latency"] == pytest.approx(0.08, **close)
    assert row["prefill_throughput"] == pytest.approx(400 / 0.08, **close)
    assert row["median_decode_latency"] == pytest.approx(0.004, rel=0.01)
    assert row["median_decode_throughput"] == pytest.approx(4 / 0.004, rel=0.01)
    assert row["total_latency"] == pytest.approx(0.08 + sum(steps) / 1e3, **close)
    assert row["overall_throughput"] == pytest.approx(4 * 109 / (0.08 + sum(steps) / 1e3), **close)
    assert row["p99_decode_ms"] == pytest.approx(24, rel=0.01)
    assert (row["decode_mbu"], row["peaks"], row["concurrency"]) == (None, "n/a", 4)


@pytest.mark.usefixtures("clock")
def test_each_figure_of_offline_throughput_is_what_was_scripted() -> None:
    engine = open_scripted(prefill_ms=10.0, decode_ms=2.0, slots=2)
    row = measure_requests_offline(engine, RequestSet(6, 50, 11, 1.0, 0), CONDITIONS, None)
    # Two slots, three waves of 10 + 10 x 2 ms.
    assert row["total_latency"] == pytest.approx(0.09, rel=0.01)
    assert (row["successful_requests"], row["total_input_tokens"], row["total_output_tokens"]) == (6, 300, 66)
    assert row["request_throughput"] == pytest.approx(6 / 0.09, rel=0.01)
    assert row["input_throughput"] == pytest.approx(300 / 0.09, rel=0.01)
    assert row["output_throughput"] == pytest.approx(66 / 0.09, rel=0.01)
    assert row["total_throughput"] == pytest.approx(366 / 0.09, rel=0.01)
    assert row["median_ttft_ms"] == pytest.approx(40, rel=0.01)  # 10, 40 and 70, two of each
    assert row["median_itl_ms"] == pytest.approx(2, rel=0.01)
    assert row["median_tpot_ms"] == pytest.approx(2, rel=0.01)


def test_a_real_wait_ends_when_it_is_due_and_never_before() -> None:
    due = backends.time.perf_counter() + 0.01
    assert wait_until(due) >= due
    assert wait_until(due) >= due  # a time that has passed


def test_a_sweep_is_the_product_in_the_order_of_sglang(clock: Clock) -> None:
    del clock
    skipped: list[str] = []
    engine = open_scripted()
    engine.facts = EngineFacts("e", "m", positions=20)
    sweep = BatchSweep((1, 2), (8, 16), (1, 8), 0)
    rows = list(measure_batches(engine, sweep, CONDITIONS, None, skipped.append))
    points = [(row["batch_size"], row["input_len"], row["output_len"]) for row in rows]
    assert points == [(1, 8, 1), (1, 8, 8), (1, 16, 1), (2, 8, 1), (2, 8, 8), (2, 16, 1)]
    assert len(skipped) == 2
    assert "16 + 8 tokens: the model has 20 positions" in skipped[0]
    assert rows[0]["median_decode_latency"] is None
    with pytest.raises(UserError, match="no combination fits the 20 positions"):
        list(measure_batches(engine, BatchSweep((1,), (30,), (1,), 0), CONDITIONS, None))
    with pytest.raises(UserError, match="more than the 20 positions"):
        measure_requests_offline(engine, RequestSet(1, 16, 8, 1.0, 0), CONDITIONS, None)


def test_an_engine_that_stops_early_or_fails_is_named() -> None:
    class Early(OpenedEngine):
        facts = EngineFacts("early 1.0", "m")

        def run_batch(self, prompts: Any, output_len: int) -> BatchTimes:
            return BatchTimes(0.1, (0.1,))

        def run_requests(self, prompts: Any, output_lens: Sequence[int]) -> list[ServedRequest]:
            return [ServedRequest(0.0, error="out of memory") for _ in prompts]

    with pytest.raises(JobError, match=r"early 1\.0 wrote 2 tokens where 5 were asked for"):
        list(measure_batches(Early(), BatchSweep((1,), (4,), (5,), 0), CONDITIONS, None))
    with pytest.raises(JobError, match=r"none of 3 requests to early 1\.0 succeeded: 3 x out of memory"):
        measure_requests_offline(Early(), RequestSet(3, 4, 5, 1.0, 0), CONDITIONS, None)


def test_settings_are_read_by_their_types_and_refused_all_at_once() -> None:
    assert parse_settings(["decode_ms=3", "slots=2"], ScriptedBackend) == {"decode_ms": 3.0, "slots": 2}
    with pytest.raises(ValueError, match=r"decode_ms = '-1' is no float; there is no setting \"slot\" \(did you mean"):
        parse_settings(["decode_ms=-1", "slot=2"], ScriptedBackend)
    with pytest.raises(ValueError, match='"slots" is no setting; allowed: NAME=VALUE'):
        parse_settings(["slots"], ScriptedBackend)


# --- shares of peaks


def test_bytes_and_flop_of_a_known_model() -> None:
    """Llama 3 8B: 8.03 billion parameters, 0.525 of them in the embedding, which a step does not read."""
    work = read_work(LLAMA_8B, "bf16")
    assert work is not None
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    read = 32 * (layer + 2 * 4096) + 4096 * 128256
    kept = 32 * 2 * 1024  # keys and values of a token
    assert work.count_decode_bytes(1, 1) == pytest.approx(2 * (read + kept))
    assert work.count_decode_bytes(8, 500) == pytest.approx(2 * (read + 8 * 500 * kept))
    head = 2 * 4096 * 128256
    assert work.count_decode_flops(3, 100) == pytest.approx(3 * (32 * (2 * layer + 4 * 100 * 4096) + head))
    assert work.count_prefill_flops(2, 10) == pytest.approx(2 * (32 * (20 * layer + 4 * 55 * 4096) + head))


def test_of_experts_those_that_a_batch_meets_are_read() -> None:
    mixture = {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    work = read_work(mixture, "bf16")
    assert work is not None
    one, many = work.count_decode_bytes(1, 1), work.count_decode_bytes(10_000, 0)
    expert = 2.0 * 32 * 3 * 4096 * 14336
    assert many - one == pytest.approx(6 * expert, rel=1e-3)  # 2 of 8, and all 8
    assert read_work({"model_type": "no such family"}, "bf16") is None


def test_shares_are_of_the_peaks_and_never_guessed() -> None:
    work = read_work(LLAMA_8B, "bf16")
    assert work is not None
    figures = {"batch_size": 1, "input_len": 128, "output_len": 8, "prefill_latency": 0.02}
    figures |= {"median_decode_latency": 1 / 155.7}
    found = rate_one_batch(work, Peaks(989e12, 3.35e12, "rated", "x"), figures)
    # SGLang #1008: 155.7 tokens/s of 8B in bf16 on an H100 of 3.35 TB/s.
    assert found["decode_mbu"] == pytest.approx(0.70, abs=0.01)
    assert found["prefill_mfu"] == pytest.approx(work.count_prefill_flops(1, 128) / 0.02 / 989e12)
    assert (found["peaks"], found["peak_bytes_per_s"]) == ("rated", 3.35e12)
    assert rate_one_batch(work, None, figures)["decode_mbu"] is None
    assert rate_one_batch(None, Peaks(1.0, 1.0, "measured", "x"), figures)["peaks"] == "n/a"
    one = {**figures, "median_decode_latency": None}
    assert rate_one_batch(work, Peaks(1e12, 1e12, "measured", "x"), one)["decode_mbu"] is None
    whole = rate_throughput(work, Peaks(1e12, None, "measured", "x"), [(10, 1), (10, 1)], 2.0)
    assert whole["mfu"] == pytest.approx(work.count_prefill_flops(2, 10) / 2.0 / 1e12)
    assert rate_throughput(work, None, [(10, 1)], 2.0)["mfu"] is None


def test_peaks_are_measured_ones_else_rated_ones_else_none() -> None:
    measured = choose_peaks(RoofCeilings({"bf16": 5e14}, 2e12, "measured here"), "NVIDIA L40S", "bf16", 2)
    assert measured == Peaks(1e15, 4e12, "measured", "measured here")
    rated = choose_peaks(None, "NVIDIA H100 80GB HBM3", "bf16", 1)
    assert rated is not None
    assert (rated.basis, round((rated.flops_per_s or 0) / 1e12)) == ("rated", 989)
    assert choose_peaks(None, "CPU, 2 threads", "fp32", 1) is None


# --- engines by their interfaces


def test_a_step_ends_when_the_last_request_has_its_token() -> None:
    assert split_steps(1.0, [[2.0, 4.0], [3.0, 3.5]]) == BatchTimes(2.0, (1.0,))
    with pytest.raises(JobError, match=r"wrote \[1, 2\] tokens"):
        split_steps(0.0, [[1.0], [1.0, 2.0]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONFIG).write_text(json.dumps({**LLAMA_8B, "dtype": "bfloat16"}))
    return tmp_path


class FakeLLMEngine:
    """What of vLLM's LLMEngine is used: a step gives each request one more token. It computes in another format than
    config.json has, and its core begins with what is there as soon as it is not held, as the real one does."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        if arguments.get("gpu_memory_utilization", 0) > 1:
            raise ValueError("Input should be less than or\nequal to 1")
        if arguments.get("max_num_seqs") == 1:
            raise RuntimeError("Engine core initialization failed")
        self.arguments = arguments
        self.model_config = types.SimpleNamespace(dtype="torch.float16", max_model_len=64, enforce_eager=False)
        scheduler = types.SimpleNamespace(max_num_seqs=128, max_num_batched_tokens=2048)
        self.vllm_config = types.SimpleNamespace(scheduler_config=scheduler, model_config=self.model_config)
        self.is_held, self.begun_with = False, list[int]()
        self.waiting: dict[str, list[int]] = {}  # tokens so far, tokens at most

    @classmethod
    def from_engine_args(cls, arguments: Mapping[str, Any]) -> FakeLLMEngine:
        return cls(arguments)

    def add_request(self, name: str, prompt: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        assert prompt["prompt_token_ids"]
        assert (sampling["temperature"], sampling["detokenize"]) == (0.0, False)
        self.waiting[name] = [0, sampling["max_tokens"]]
        self._begin()

    def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (0, "keep")
        self.is_held = True

    def wake_up(self, tags: list[str]) -> None:
        assert tags == ["scheduling"]
        self.is_held = False
        self._begin()

    def _begin(self) -> None:
        if not self.is_held:
            self.begun_with.append(len(self.waiting))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        outputs = []
        for name, state in list(self.waiting.items()):
            state[0] += 1
            output = types.SimpleNamespace(token_ids=list(range(state[0])))
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[output]))
            if state[0] == state[1]:
                del self.waiting[name]
        return outputs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("vllm")
    vars(module).update(EngineArgs=dict, SamplingParams=dict, LLMEngine=FakeLLMEngine, __version__="0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


@pytest.mark.usefixtures("vllm")
def test_vllm_is_stepped_by_hand(folder: Path) -> None:
    engine = VllmBackend().open(EngineRequest(str(folder), settings={"max_num_seqs": 8}))
    made = engine._engine.arguments  # type: ignore[attr-defined]
    assert (made["load_format"], made["skip_tokenizer_init"], made["enable_prefix_caching"]) == ("dummy", True, False)
    assert (made["max_num_seqs"], "max_num_batched_tokens" in made) == (8, False)
    assert (engine.facts.vocabulary, engine.facts.dtype, engine.facts.positions) == (128256, "fp16", 64)
    assert (engine.facts.settings["max_num_batched_tokens"], engine.facts.engine) == (2048, "vllm 0.32.0")
    assert len(engine.run_batch([[1, 2], [3, 4]], 5).decode_s) == 4
    assert engine._engine.begun_with == [2]  # type: ignore[attr-defined] # not with the first prompt alone
    served = engine.run_requests([[1], [2, 3]], [2, 4])
    assert [(each.input_tokens, each.output_tokens, len(each.arrivals_s)) for each in served] == [(1, 2, 2), (2, 4, 4)]
    engine.close()


@pytest.mark.usefixtures("vllm")
def test_what_vllm_refuses_is_a_mistake_and_what_fails_in_it_is_not(folder: Path) -> None:
    with pytest.raises(UserError, match="vLLM refuses: Input should be less than or equal to 1\n  To do: another"):
        VllmBackend().open(EngineRequest(str(folder), settings={"gpu_memory_utilization": 5.0}))
    with pytest.raises(JobError, match="vLLM failed: Engine core initialization failed\n  To do: see what vLLM wrote"):
        VllmBackend().open(EngineRequest(str(folder), settings={"max_num_seqs": 1}))
    other = "cpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(UserError, match=f"--device {other} is for the backend transformers; vLLM is on"):
        VllmBackend().open(EngineRequest(str(folder), device=other))
    with pytest.raises(UserError, match="has no weights"):
        VllmBackend().open(EngineRequest(str(folder), random_weights=False))
    (folder / CONFIG).unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        VllmBackend().open(EngineRequest(str(folder)))


class FakeSglangEngine:
    """What of SGLang's Engine is used: a stream of pieces, each with the tokens so far."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.is_ended = arguments, False

    def generate(self, *, input_ids: Any, sampling_params: Any, stream: bool) -> Iterator[dict[str, Any]]:
        assert stream
        for step in range(max(each["max_new_tokens"] for each in sampling_params)):
            for index, each in enumerate(sampling_params):
                if step < each["max_new_tokens"]:
                    yield {"index": index, "meta_info": {"completion_tokens": step + 1}}

    def shutdown(self) -> None:
        self.is_ended = True


def test_sglang_streams(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("sglang")
    vars(module).update(Engine=FakeSglangEngine)
    monkeypatch.setitem(sys.modules, "sglang", module)
    (folder / "model.safetensors").touch()
    engine = SglangBackend().open(EngineRequest(str(folder), prefix_caching=True, random_weights=False))
    made = engine._engine.arguments  # type: ignore[attr-defined]
    assert (made["load_format"], made["disable_radix_cache"], made["stream_interval"]) == ("auto", False, 1)
    assert len(engine.run_batch([[1, 2], [3, 4]], 3).decode_s) == 2
    served = engine.run_requests([[1], [2, 3]], [2, 4])
    assert [(each.input_tokens, each.output_tokens) for each in served] == [(1, 2), (2, 4)]
    engine.close()
    assert engine._engine.is_ended  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="--quantize fp8 is for the backend transformers"):
        SglangBackend().open(EngineRequest(str(folder), quantize="fp8"))


def test_what_is_not_installed_is_one_sentence() -> None:
    for backend, package in ((VllmBackend, "vllm"), (SglangBackend, "sglang")):
        assert f"the package {package} is not installed in this environment.\n  To do: pip install {package}" in (
            backend.describe_lack()
        )
    assert ScriptedBackend.describe_lack() == ""


def test_weights_of_fewer_bits_are_fewer_bytes() -> None:
    whole, half = read_work(LLAMA_8B, "bf16"), read_work(LLAMA_8B, "bf16", "int4")
    assert isinstance(whole, DecoderWork)
    assert half is not None
    assert half.count_decode_bytes(1, 0) == pytest.approx(whole.count_decode_bytes(1, 0) / 4)
