"""The contract of an inference engine (group `shardway.inference_backends`), and one with scripted delays.

An engine is opened once and then answers static batches and sets of requests of random ids. It reports when each output
came, by `time.perf_counter`; what follows from these times is computed elsewhere, alike for every engine.

Invariants:
- This module imports neither torch nor an engine.
- The scripted engine computes nothing: it waits until each time of a schedule that a pure function made, so that what a
  bench reports of it can be compared with what is known.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardway.bench.inference.results import BatchTimes, ServedRequest
from shardway.bench.inference.utilisation import DecoderWork
from shardway.plugins import HasSettings

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class EngineRequest:
    """What an engine is opened for. `model`: a folder, a run or a hub name, None where none was named;
    `random_weights`: drawn from `seed` by its config.json alone."""

    model: str | None
    random_weights: bool = True
    dtype: str = "auto"
    device: str = "auto"
    quantize: str = "off"
    seed: int = 0
    ignore_eos: bool = True
    prefix_caching: bool = False
    trust_remote_code: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineFacts:
    """What was opened. `device_kind`: "cpu", "cuda", or "" where nothing computes; `positions`: the longest sequence in
    tokens, 0 where any; `work` is None for a model whose shape the planner does not know."""

    engine: str
    model: str
    device: str = "n/a"
    device_kind: str = ""
    dtype: str = "n/a"
    devices: int = 1
    vocabulary: int = 10_000
    positions: int = 0
    work: DecoderWork | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class InferenceBackend(HasSettings, ABC):
    """The contract of an engine. Its settings are those that `--setting NAME=VALUE` takes."""

    opens_model: ClassVar[bool] = True
    """Whether it opens a model; of one that does not, options about a model are refused."""

    @classmethod
    @abstractmethod
    def describe_lack(cls) -> str:
        """Why this engine cannot be used here (a package that is not installed), with what to do; "" where it can."""

    @abstractmethod
    def open(self, request: EngineRequest) -> OpenedEngine:
        """Load the model. Raises UserError for a model or a setting that it cannot take."""


class OpenedEngine(ABC):
    """An engine with its model."""

    facts: EngineFacts
    """Package and version, model, device and format, the devices that work together, the vocabulary."""

    @abstractmethod
    def run_batch(self, prompts: Prompts, output_len: int) -> BatchTimes:
        """Answer prompts of one length as one static batch, greedily, so many tokens each whatever they are. Returns
        the seconds of the prefill and of each later step."""

    def prepare(self, prompts: Prompts, output_lens: Sequence[int]) -> None:  # noqa: B027 - most have nothing to do
        """Set up what a set of requests needs (a cache, graphs), so that it does not count; called once before them."""

    @abstractmethod
    def run_requests(self, prompts: Prompts, output_lens: Sequence[int]) -> list[ServedRequest]:
        """Answer prompts as fast as it can, so many tokens each at most. Returns them in their order, with times of
        `time.perf_counter`; one that failed has its error."""

    def reset_peak_memory(self) -> None:  # noqa: B027 - an engine may not know it
        """Forget what was in use before: peaks may have been measured in this process."""

    def read_peak_memory(self) -> tuple[int | None, str]:
        """The most bytes that were in use since `reset_peak_memory`, and of what; None where that is not known."""
        return None, "n/a"

    def close(self) -> None:  # noqa: B027 - an engine may have nothing to end
        """End what it started."""


# --- scripted delays


class ScriptedBackend(InferenceBackend):
    """An engine of known delays. `slots` requests are answered at a time; a static batch has as many as it has
    prompts. Prefill of a request takes `prefill_ms` and `prefill_token_ms` for each of its tokens, a step `decode_ms`;
    every `slow_every`-th step (0: none) takes `slow_ms` more."""

    opens_model = False
    settings: ClassVar[Mapping[str, Any]] = {
        "prefill_ms": 20.0,
        "prefill_token_ms": 0.0,
        "decode_ms": 5.0,
        "slow_every": 0,
        "slow_ms": 0.0,
        "slots": 4,
    }

    @classmethod
    def describe_lack(cls) -> str:
        return ""

    def open(self, request: EngineRequest) -> OpenedEngine:
        return ScriptedEngine(ScriptedDelays(**self.read_settings(request.settings)))


@dataclass(frozen=True)
class ScriptedDelays:
    """Milliseconds, as the settings of `ScriptedBackend`."""

    prefill_ms: float
    prefill_token_ms: float
    decode_ms: float
    slow_every: int
    slow_ms: float
    slots: int

    def list_arrivals(self, input_len: int, output_len: int) -> list[float]:
        """Seconds from the start of a request to each of its tokens."""
        now = self.prefill_ms + self.prefill_token_ms * input_len
        found = [now]
        for step in range(1, output_len):
            slow = self.slow_every and step % self.slow_every == 0
            now += self.decode_ms + (self.slow_ms if slow else 0.0)
            found.append(now)
        return [each / 1e3 for each in found]

    def schedule(self, lengths: Sequence[tuple[int, int]]) -> list[list[float]]:
        """Seconds after the start to each token of requests with (input, output) tokens, which all wait from the
        start; each takes the slot that is free first."""
        free, found = [0.0] * max(1, self.slots), []
        for input_len, output_len in lengths:
            begin = heapq.heappop(free)
            found.append([begin + each for each in self.list_arrivals(input_len, output_len)])
            heapq.heappush(free, found[-1][-1])
        return found


class ScriptedEngine(OpenedEngine):
    """Waits as its delays state."""

    def __init__(self, delays: ScriptedDelays) -> None:
        self.delays = delays
        self.facts = EngineFacts("scripted delays", "none", settings=vars(delays))

    def run_batch(self, prompts: Prompts, output_len: int) -> BatchTimes:
        began = time.perf_counter()
        stamps = [began]
        for due in self.delays.list_arrivals(len(prompts[0]), output_len):
            stamps.append(wait_until(began + due))
        steps = [after - before for before, after in itertools.pairwise(stamps)]
        return BatchTimes(steps[0], tuple(steps[1:]))

    def run_requests(self, prompts: Prompts, output_lens: Sequence[int]) -> list[ServedRequest]:
        lengths = [(len(prompt), output) for prompt, output in zip(prompts, output_lens, strict=True)]
        due = self.delays.schedule(lengths)
        began = time.perf_counter()
        order = sorted((at, number) for number, times in enumerate(due) for at in times)
        arrivals: list[list[float]] = [[] for _ in due]
        for at, number in order:
            arrivals[number].append(wait_until(began + at))
        return [
            ServedRequest(began, tuple(times), read, written)
            for times, (read, written) in zip(arrivals, lengths, strict=True)
        ]


_SPUN_S = 2e-4
"""The last part of a wait is spun: a sleep ends later by some of it. A longer spin is more often preempted."""


def wait_until(due: float) -> float:
    """Wait for a time of `time.perf_counter`, and return the time then."""
    while (left := due - time.perf_counter()) > 0:
        if left > _SPUN_S:
            time.sleep(left - _SPUN_S)
    return time.perf_counter()


# --- settings from the command line


def parse_settings(words: Sequence[str], backend: type[InferenceBackend]) -> dict[str, Any]:
    """Settings from "NAME=VALUE", each of the type that its default has, checked by `read_settings`. Raises ValueError
    with all that is wrong."""
    given: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f'"{word}" is no setting; allowed: NAME=VALUE')
        default = backend.settings.get(name)
        given[name.strip()] = _parse_value(text.strip(), default)
    backend.read_settings(given)
    return given


def _parse_value(text: str, default: Any) -> Any:
    """A number or a truth where the default is one and the text can be read so; else the text, which the check then
    refuses with its value."""
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    kind = type(default)
    if kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            return text
        return value if math.isfinite(value) and value >= 0 else text
    return text
