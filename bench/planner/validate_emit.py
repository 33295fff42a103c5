"""Every file that `shardway.plan.export` writes, read by the library that it is for, with its own reader and checks.

Libraries that are not installed are named and left out; those that are, are not asked to train:

    python bench/planner/validate_emit.py [--cases 200]

torchtitan 0.2 reads the TOML, 0.3 the file of Python; Megatron-LM is the `megatron.training` of megatron-core 0.19 and
later. On a machine without a GPU, questions for the device's generation are answered with that of a GPU that has the
format (`--capability`), and empty classes stand in for Transformer Engine where it is not installed. A refusal counts
as told where a sentence beside the file says that the library refuses this; any other one fails the run. Refusals are
printed with the library's reason and with those sentences, to be compared by eye: a cut word may hide that they differ.

Invariant: what a library makes of a file is compared with the case, not with the file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests" / "plan" / "emit")]

from deepspeed_reading import load_with_deepspeed  # noqa: E402
from emit_cases import GOLDEN_CASES, PREDICTION, cases  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402

from shardway.plan.case import Case, layers_of_stages  # noqa: E402
from shardway.plan.export.common import ENGINES, Emitted, emit  # noqa: E402

REFUSED = re.compile(r"\brefuses?\b")
DIGITS = re.compile(r"\d+")


class Differs(Exception):
    """A library read something else than the case says."""


def expect(what: str, found: object, wanted: object) -> None:
    """Both are the same."""
    if found != wanted:
        raise Differs(f"{what}: read {found!r}, the case has {wanted!r}")


@dataclass(frozen=True)
class Reader:
    """What reads a file: the library's name on PyPI, the emitter, the file, and the check."""

    package: str
    emitter: str
    file: str
    check: Callable[[Path, Case], None]
    says: str


# --- torchtitan


def check_torchtitan_toml(path: Path, case: Case) -> None:
    manager = importlib.import_module("torchtitan.config").ConfigManager()
    config = manager.parse_args(["--job.config_file", str(path)])
    check_titan_config(config, case)
    spec = importlib.import_module("torchtitan.protocols.train_spec").get_train_spec(config.model.name)
    sizes = spec.model_args[config.model.flavor]
    expect("layers", sizes.n_layers, len(case.model.layers))
    expect("hidden size", sizes.dim, case.model.hidden)
    degrees = config.parallelism
    importlib.import_module("torchtitan.distributed").ParallelDims(
        **titan_degrees(degrees), etp=degrees.expert_tensor_parallel_degree, world_size=case.degrees.world
    )


def check_torchtitan_job(path: Path, case: Case) -> None:
    manager = importlib.import_module("torchtitan.config").ConfigManager()
    sys.modules.pop(path.stem, None)
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        importlib.invalidate_caches()
        config = manager.parse_args(["--module", path.stem, "--config", "planned"])
    check_titan_config(config, case)
    expect("layers", len(config.model_spec.model.layers), len(case.model.layers))
    expect("hidden size", config.model_spec.model.dim, case.model.hidden)
    dims = importlib.import_module("torchtitan.distributed").ParallelDims
    dims(**titan_degrees(config.parallelism), world_size=case.degrees.world)


def titan_degrees(split: object) -> dict[str, int]:
    names = {
        "dp_replicate": "data_parallel_replicate",
        "dp_shard": "data_parallel_shard",
        "cp": "context_parallel",
        "tp": "tensor_parallel",
        "pp": "pipeline_parallel",
        "ep": "expert_parallel",
    }
    return {short: getattr(split, f"{name}_degree") for short, name in names.items()}


def check_titan_config(config: object, case: Case) -> None:
    training, split = config.training, config.parallelism
    data = split.data_parallel_replicate_degree * split.data_parallel_shard_degree
    single = case.degrees.pp == 1
    micro_batch = training.local_batch_size if single else split.pipeline_parallel_microbatch_size
    expect("micro-batch", micro_batch, case.micro_batch)
    sums = training.global_batch_size // (training.local_batch_size * data)
    expect("micro-batches", sums * training.local_batch_size // micro_batch, case.micro_batches)
    if not single:
        expect("layers of stages", titan_stages(split, case), list(layers_of_stages(case)))


def titan_stages(split: object, case: Case) -> list[int]:
    pipeline = importlib.import_module("torchtitan.distributed.pipeline_parallel")
    generate = "generate_llm_fqn_per_model_part"
    parts = split.module_fqns_per_model_part or getattr(pipeline, generate, getattr(pipeline, f"_{generate}", None))(
        case.stages,
        len(case.model.layers),
        split.pipeline_parallel_first_stage_less_layers,
        split.pipeline_parallel_last_stage_less_layers,
    )
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    schedule = schedules.get_schedule_class(split.pipeline_parallel_schedule)
    if issubclass(schedule, schedules.PipelineScheduleMulti) != (case.stages_per_rank > 1):
        raise Differs(f"{schedule.__name__} has another number of stages a rank")
    return [sum(name.startswith("layers.") for name in part) for part in parts]


# --- Megatron


def check_megatron(path: Path, case: Case) -> None:
    words, connections = source(path)
    arguments = importlib.import_module("megatron.training.arguments")
    own = ["--train-iters", "10", "--lr", "1e-4", "--tokenizer-type", "NullTokenizer", "--mock-data"]
    variables = {"WORLD_SIZE": str(case.degrees.world), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    with mock.patch.dict(os.environ, variables), mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words, *own]):
        if not connections:
            del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        args = arguments.validate_args(arguments.parse_args())
    expect("data ranks", args.data_parallel_size, case.degrees.data)
    expect("global batch", args.global_batch_size, case.global_batch)
    expect("micro-batch", args.micro_batch_size, case.micro_batch)
    degrees = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    expect("tp, pp, cp", degrees, (case.degrees.tp, case.degrees.pp, case.degrees.cp))
    expect("experts", (args.expert_model_parallel_size,), (case.degrees.ep,))
    if case.degrees.pp > 1:
        expect("stages a rank", args.virtual_pipeline_model_parallel_size or 1, case.stages_per_rank)
    utils = importlib.import_module("megatron.training.argument_utils")
    make = getattr(arguments, "core_transformer_config_from_args", None) or utils.core_transformer_config_from_args
    check_core_config(make(args), case)


def source(path: Path) -> tuple[list[str], str]:
    """The array as bash makes it, and the variable of CUDA's."""
    script = 'source "$1"; printf "%s\\0" "$CUDA_DEVICE_MAX_CONNECTIONS" "${MEGATRON_ARGS[@]}"'
    done = subprocess.run(["bash", "-euc", f"set +u; {script}", "-", str(path)], capture_output=True, check=True)
    connections, *words = done.stdout.decode().split("\0")[:-1]
    return words, connections


def check_core_config(config: object, case: Case) -> None:
    expect("layers", config.num_layers, len(case.model.layers))
    expect("hidden size", config.hidden_size, case.model.hidden)
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        ranks = [[sum(str(kind).endswith("decoder") for kind in stage) for stage in rank] for rank in layout.layout]
        found = [ranks[rank][place] for place in range(case.stages_per_rank) for rank in range(case.degrees.pp)]
        expect("layers of stages", found, list(layers_of_stages(case)))


def check_bridge(path: Path, case: Case) -> None:
    common = importlib.import_module("megatron.bridge.recipes.common")
    overrides = importlib.import_module("megatron.bridge.training.utils.omegaconf_utils")
    config = common._pretrain_common()
    config.model = bridge_model(case)
    config = overrides.process_config_with_overrides(config, config_filepath=str(path))
    expect("data ranks", config.get_data_parallel_size(case.degrees.world), case.degrees.data)
    expect(
        "batches",
        (config.train.global_batch_size, config.train.micro_batch_size),
        (case.global_batch, case.micro_batch),
    )
    precision = importlib.import_module("megatron.bridge.training.mixed_precision")
    precision.get_mixed_precision_config(config.mixed_precision).setup(config.model, config.optimizer, config.ddp)
    config.model.finalize()
    check_core_config(config.model, case)


def bridge_model(case: Case) -> object:
    """A recipe's model of the family, with other sizes."""
    latent = case.model.layers[0].attention.latent
    module = "mla_provider" if latent else "gpt_provider"
    provider = importlib.import_module(f"megatron.bridge.models.{module}")
    make = provider.MLAModelProvider if latent else provider.GPTModelProvider
    sizes = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "vocab_size": 256}
    return make(**sizes, gated_linear_unit=True, normalization="RMSNorm", add_bias_linear=False)


# --- Hugging Face, DeepSpeed


def check_accelerate(path: Path, case: Case) -> None:
    launch = importlib.import_module("accelerate.commands.launch")
    accelerate = importlib.import_module("accelerate")
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, _, _ = launch._validate_launch_command(args)
    expect("processes", args.num_processes, case.degrees.world if args.use_fsdp else case.degrees.data)
    env = importlib.import_module("accelerate.utils.launch").prepare_multi_gpu_env(args)
    with mock.patch.dict(os.environ, env, clear=True):
        if args.use_fsdp:
            plugin = accelerate.FullyShardedDataParallelPlugin()
            expect("version of FSDP", plugin.fsdp_version, 2)
            expect("freed after the forward pass", plugin.reshard_after_forward, case.zero == 3 and case.reshard)
            expect("recompute", plugin.activation_checkpointing, case.recompute == "full")
            sizes = accelerate.ParallelismConfig()
            found = (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.cp_size, sizes.tp_size)
            degrees = case.degrees
            expect("degrees", found, (degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp))
            if sizes.total_size != args.num_processes:
                raise ValueError("as many processes as the degrees make, Accelerate would say")


def check_deepspeed(path: Path, case: Case) -> None:
    config = load_with_deepspeed(json.loads(path.read_text()), case, case.degrees.world)
    expect("stage of ZeRO", int(config.zero_optimization_stage), case.zero)
    expect("micro-batch", config.train_micro_batch_size_per_gpu, case.micro_batch)
    expect("micro-batches", config.gradient_accumulation_steps, case.micro_batches)
    if case.degrees.pp == 1:
        expect("tp", max(1, config.tensor_parallel_config.autotp_size), case.degrees.tp)


# --- what is there, and what it says


def has(module: str) -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec(module) is not None
    return False


def find_readers() -> Iterator[Reader]:
    if has("torchtitan"):
        toml = hasattr(importlib.import_module("torchtitan.config.manager").ConfigManager, "_maybe_load_toml")
        check = check_torchtitan_toml if toml else check_torchtitan_job
        file = "torchtitan.toml" if toml else "torchtitan_job.py"
        says = "ConfigManager, ParallelDims, the flavor's sizes, the layers of each stage"
        yield Reader("torchtitan", "torchtitan", file, check, says)
    if has("megatron.training"):
        says = "parse_args, validate_args, TransformerConfig, the words as bash reads them"
        yield Reader("megatron-core", "megatron", "megatron.sh", check_megatron, says)
    if has("megatron.bridge"):
        says = "overrides merged over a ConfigContainer, mixed precision set up, the model's config finalized"
        yield Reader("megatron-bridge", "nemo", "megatron_bridge.yaml", check_bridge, says)
    if has("accelerate"):
        says = "the launcher's arguments and environment, FullyShardedDataParallelPlugin, ParallelismConfig"
        yield Reader("accelerate", "accelerate", "accelerate.yaml", check_accelerate, says)
    if has("deepspeed"):
        yield Reader(
            "deepspeed", "deepspeed", "ds_config.json", check_deepspeed, "DeepSpeedConfig, the checks of AutoEP"
        )


def draw_cases(count: int) -> list[Case]:
    drawn: list[Case] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def keep(case: Case) -> None:
        drawn.append(case)

    keep()
    return [*GOLDEN_CASES.values(), *drawn]


@dataclass(frozen=True)
class Outcome:
    """ "loaded", "no file", "refused, as told" or what went wrong; `told` are the sentences that foretell a refusal."""

    what: str
    told: frozenset[str] = frozenset()


def read(reader: Reader, case: Case, emitted: Emitted, folder: Path) -> Outcome:
    """What the library makes of a file."""
    texts = {file.name: file.text for file in emitted.files}
    if reader.file not in texts:
        return Outcome("no file, as told")
    path = folder / reader.file
    path.write_text(texts[reader.file], encoding="utf-8")
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            reader.check(path, case)
    except Differs as error:
        return Outcome(f"DIFFERS: {error}")
    except ImportError as error:
        return Outcome(f"NOT READ, something is not installed: {error}")
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {str(error) or out.getvalue()[-300:]}"
        why = re.sub(DIGITS, "N", why.replace("\n", " "))[:160]
        told = [re.sub(DIGITS, "N", line) for line in emitted.notes if REFUSED.search(line)]
        return Outcome(f"refused, as told: {why}" if told else f"REFUSED: {why}", frozenset(told))
    return Outcome("loaded")


def report(reader: Reader, outcomes: Sequence[Outcome]) -> bool:
    """Print what came of the cases, under a refusal the sentences that foretell it; whether nothing went wrong."""
    found = Counter(outcome.what for outcome in outcomes)
    version = importlib.metadata.version(reader.package) if has_version(reader.package) else "of unknown version"
    print(f"{reader.package} {version}: {reader.file} by {reader.says}")
    for outcome, count in sorted(found.items()):
        print(f"  {count:5} {outcome}")
        told = Counter(line for each in outcomes if each.what == outcome for line in each.told)
        for line, times in told.most_common(3):
            print(f"        {times:5} told: {line}")
    return not any(outcome.startswith(("DIFFERS", "REFUSED", "NOT READ")) for outcome in found)


def has_version(package: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    return False


class _AnyClass(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _AnyClass(name, (), {}))
        return getattr(cls, name)


class _StandIn(types.ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> type:
        return _AnyClass.__getattr__(self, name)


class _TransformerEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of empty classes: enough for the configs of Megatron, which ask for its version."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        ours = name.split(".")[0] in ("transformer_engine", "transformer_engine_torch")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: object) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


@contextlib.contextmanager
def device(capability: tuple[int, int]) -> Iterator[None]:
    """Stands in for a GPU, where there is none, in questions for its generation."""
    import torch

    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            properties = mock.Mock(major=capability[0], minor=capability[1], multi_processor_count=132)
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=capability))
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=properties))
            if has("torchtitan.components.quantization"):
                for part in ("float8", "mx", "nvfp4"):
                    with contextlib.suppress(ImportError, AttributeError):
                        module = importlib.import_module(f"torchtitan.components.quantization.{part}")
                        stack.enter_context(mock.patch.object(module, "has_cuda_capability", return_value=True))
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200, help="drawn beside the three of the golden files")
    parser.add_argument("--capability", type=int, nargs=2, default=(10, 0), help="of the GPU, where there is none")
    parser.add_argument("--only", help="one library, by its name on PyPI")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if has("megatron") and not has("transformer_engine"):
        sys.meta_path.append(_TransformerEngine())
        print("empty classes stand in for Transformer Engine, which is not installed")
    logging.disable(logging.CRITICAL)
    readers = [reader for reader in find_readers() if options.only in (None, reader.package)]
    missing = set(ENGINES) - {reader.emitter for reader in readers}
    print(f"not read, since what reads it is not installed: {', '.join(sorted(missing)) or 'none'}")
    drawn, well = draw_cases(options.cases), True
    with tempfile.TemporaryDirectory() as folder, device(tuple(options.capability)):
        for reader in readers:
            emitted = [(case, emit(reader.emitter, case, PREDICTION)) for case in drawn]
            well &= report(reader, [read(reader, case, files, Path(folder)) for case, files in emitted])
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
