"""Bad captures are named as such, and lead to no advice that they would make false."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from made_traces import H100, MadeTrace, make_training

from shardway.watch.trace.analysis import TraceAnalysis, analyse_trace


def write(made: MadeTrace, path: Path) -> Path:
    return made.write(path / "t.json")


def without(made: MadeTrace, *categories: str) -> MadeTrace:
    made.events = [each for each in made.events if each["cat"] not in categories]
    return made


def truncated(path: Path) -> Path:
    text = json.dumps(make_training().as_dict())
    (path / "t.json").write_text(text[:-3000])
    return path / "t.json"


def truncated_gz(path: Path) -> Path:
    packed = gzip.compress(json.dumps(make_training().as_dict()).encode())
    (path / "t.json.gz").write_bytes(packed[:-200])
    return path / "t.json.gz"


def damaged_gz(path: Path) -> Path:
    packed = bytearray(gzip.compress(json.dumps(make_training(steps=20).as_dict()).encode()))
    half = len(packed) // 2
    packed[half : half + 40] = b"\xff" * 40
    (path / "t.json.gz").write_bytes(bytes(packed))
    return path / "t.json.gz"


def no_events(path: Path) -> Path:
    return write(MadeTrace(), path)


def malformed_time(path: Path) -> Path:
    made = make_training()
    made.events[40]["ts"] = "soon"
    made.events[90]["dur"] = -5.0
    return write(made, path)


def broken_quote(path: Path) -> Path:
    text = json.dumps(make_training().as_dict()).replace("triton_poi_fused_silu_mul_0", 'triton"poi', 1)
    (path / "t.json").write_text(text)
    return path / "t.json"


def overlong(path: Path) -> Path:
    made = make_training()
    kernels = [each for each in made.events if each["cat"] == "kernel"]
    kernels[len(kernels) // 2]["dur"] = 9e7
    return write(made, path)


def no_kernels(path: Path) -> Path:
    return write(without(make_training(), "kernel", "gpu_memcpy"), path)


def cpu_of_a_gpu_machine(path: Path) -> Path:
    return write(without(make_training(), "kernel", "gpu_memcpy", "cuda_runtime"), path)


def cpu_only(path: Path) -> Path:
    return write(without(make_training(gpu=None), "kernel", "gpu_memcpy", "cuda_runtime"), path)


def graph_replay(path: Path) -> Path:
    made = MadeTrace()
    for number in range(6):
        start = made.now
        for _ in range(30):
            made.product(2048, 2048, 2048)
        begin = made.now
        made.spend(20)
        made.annotate("cudaGraphLaunch", begin, "cuda_runtime", correlation=90_000 + number)
        made.spend(20_000)
        made.annotate(f"ProfilerStep#{number}", start)
    return write(made, path)


def graph_capture(path: Path) -> Path:
    made = make_training()
    made.event("cuda_runtime", "cudaStreamBeginCapture_v10000", 1_050_000, 3)
    return write(made, path)


def empty_steps(path: Path) -> Path:
    made = make_training(steps=3)
    for number in range(10, 40):
        start = made.now
        made.spend(5000)
        made.annotate(f"ProfilerStep#{number}", start)
    return write(made, path)


def merged(path: Path) -> Path:
    made, other = make_training(), make_training(process=200, seed=1)
    made.events += other.events
    return write(made, path)


def unknown_gpu(path: Path) -> Path:
    return write(make_training(gpu={**H100, "name": "Fancy GPU 9000"}), path)


def zero_steps(path: Path) -> Path:
    made = make_training()
    for number in (50, 51):
        made.event("user_annotation", f"ProfilerStep#{number}", made.now, 0.0)
    return write(made, path)


def skewed(path: Path) -> Path:
    made = make_training("item")
    for each in made.events:
        if each["cat"] in ("kernel", "gpu_memcpy"):
            each["ts"] -= 2500
    return write(made, path)


def overhead(path: Path) -> Path:
    made = make_training()
    made.event("overhead", "Buffer Flush", 1_040_000, 25_000)
    return write(made, path)


def no_shapes(path: Path) -> Path:
    made = make_training()
    for each in made.events:
        each["args"] = {name: value for name, value in each["args"].items() if not name.startswith("Input")}
    return write(made, path)


def no_steps(path: Path) -> Path:
    made = make_training()
    made.events = [each for each in made.events if not each["name"].startswith(("ProfilerStep", "Optimizer"))]
    return write(made, path)


def one_step(path: Path) -> Path:
    return write(make_training(steps=1), path)


def compiling(path: Path) -> Path:
    made = make_training()
    made.event("cpu_op", "_compile.compile_inner (dynamo_timed)", 1_000_900, 9000)
    made.events[-1]["tid"] = 102
    return write(made, path)


def lost_kernels(path: Path) -> Path:
    made = make_training()
    kernels = [each for each in made.events if each["cat"] == "kernel"]
    lost = {id(each) for each in kernels[::3]}
    made.events = [each for each in made.events if id(each) not in lost]
    return write(made, path)


def device_only(path: Path) -> Path:
    return write(without(make_training(), "cpu_op", "user_annotation", "cuda_runtime"), path)


def other_tool(path: Path) -> Path:
    events = [{"ph": "X", "name": "parse", "cat": "compiler", "ts": 1, "dur": 4, "pid": 1, "tid": 1, "args": {}}]
    (path / "t.json").write_text(json.dumps({"traceEvents": events}))
    return path / "t.json"


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated": (truncated, "truncated"),
    "truncated gz": (truncated_gz, "truncated"),
    "damaged gz": (damaged_gz, "truncated"),
    "no events": (no_events, "no-events"),
    "malformed time": (malformed_time, "malformed-event"),
    "broken quote": (broken_quote, "malformed-event"),
    "overlong": (overlong, "impossible-event"),
    "no kernels": (no_kernels, "no-kernels"),
    "CPU of a GPU machine": (cpu_of_a_gpu_machine, "no-kernels"),
    "CPU only": (cpu_only, "no-kernels"),
    "graph replay": (graph_replay, "graph-replay"),
    "graph capture": (graph_capture, "graph-capture"),
    "empty steps": (empty_steps, "empty-steps"),
    "merged ranks": (merged, "merged-ranks"),
    "unknown GPU": (unknown_gpu, "unknown-gpu"),
    "zero-length steps": (zero_steps, "zero-steps"),
    "clock skew": (skewed, "clock-skew"),
    "profiler overhead": (overhead, "profiler-overhead"),
    "no shapes": (no_shapes, "no-shapes"),
    "no steps": (no_steps, "no-steps"),
    "one step": (one_step, "few-steps"),
    "compiling": (compiling, "compiling"),
    "lost kernels": (lost_kernels, "lost-kernels"),
    "device only": (device_only, "no-operators"),
    "another tool's": (other_tool, "not-torch"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_capture_is_named(name: str, tmp_path: Path) -> None:
    make, rule = BAD[name]
    found = analyse_trace(make(tmp_path))
    assert rule in [fault.rule for fault in found.quality]
    json.dumps(found.as_json(), allow_nan=False)
    if any(fault.severity == "fatal" for fault in found.quality):
        assert not found.advice


def test_a_good_capture_has_no_fault(tmp_path: Path) -> None:
    assert not analyse_trace(write(make_training(), tmp_path)).quality


def rules(found: TraceAnalysis) -> set[str]:
    return {advice.rule for advice in found.advice}


@pytest.mark.parametrize("name", ["graph replay", "clock skew", "lost kernels", "graph capture"])
def test_false_idle_time_leads_to_no_advice(name: str, tmp_path: Path) -> None:
    found = analyse_trace(BAD[name][0](tmp_path))
    assert not rules(found) & {"host-sync", "launch-bound", "data-loader", "allocator"}


def test_one_malformed_event_does_not_change_the_report(tmp_path: Path) -> None:
    good = analyse_trace(write(make_training(), tmp_path))
    for make in (malformed_time, overlong):
        bad = analyse_trace(make(tmp_path))
        assert bad.step_ms == pytest.approx(good.step_ms, rel=0.01)
        assert bad.breakdown.compute_ms == pytest.approx(good.breakdown.compute_ms, rel=0.03)
