"""Every key of a run file: its type, default, bounds, meaning, and how a text becomes its value.

Invariants:
- What a field serialises to is accepted by the same field again, unchanged.
- `read_skips` and `read_batch` report all problems at once.
- Keys are strict (an unknown key is an error), and each has the sentence that `shardway config explain` prints: a key
  cannot be made without one.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from shardway.batch_ramp import BatchRamp
from shardway.plugins import PluginName
from shardway.runfile.blend import BLEND_SCHEMA, BlendEntry, read_blend
from shardway.runfile.capture import CaptureRange, parse_capture_range
from shardway.runfile.pairs import MOST, list_wrong_pairs
from shardway.units import (
    LOSS,
    Monitor,
    Span,
    parse_bytes,
    parse_cadence,
    parse_monitor,
    parse_seconds,
    parse_span,
    render_bytes,
    render_cadence,
    render_seconds,
)

# --- field types: how the text of a unit becomes a typed value and back

Auto = Literal["auto"]
Off = Literal["off"]

ALLOWED = f"pairs [from, to] of integers, from less than to, 0 to {MOST}, such as [[120000, 121000]]"


BATCH_ALLOWED = (
    "an integer of at least 1, or pairs [position, samples] such as [[0, 32], [100000, 64]], from position 0 on"
)


def read_batch(value: Any) -> int | list[list[int]]:
    """The samples of a step: their number, or pairs [position, samples]. Raises ValueError with all that is wrong."""

    def is_size(samples: Any) -> bool:
        return isinstance(samples, int) and not isinstance(samples, bool) and 1 <= samples <= MOST

    if isinstance(value, list):
        if wrong := list_wrong_pairs(value, "size", f"number of samples (1 to {MOST})", is_size):
            raise ValueError(f"{'; '.join(wrong)}; allowed: {BATCH_ALLOWED}")
        return [list(pair) for pair in value]
    if isinstance(value, bool) or not isinstance(value, int):
        shown = json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else repr(value)
        raise ValueError(f"{shown} is neither an integer nor a list of pairs; allowed: {BATCH_ALLOWED}")
    if value < 1:
        raise ValueError(f"{value} is too small; allowed: {BATCH_ALLOWED}")
    return value


def read_skips(value: Any) -> list[list[int]]:
    """Pairs [from, to], in order, those that overlap or touch as one. Raises ValueError with all that is wrong."""
    entries, wrong = value if isinstance(value, list) else [value], []
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2:
            wrong.append(f"{entry!r} is no pair")
        elif any(isinstance(number, bool) or not isinstance(number, int) for number in entry):
            wrong.append(f"{entry!r} holds what is no integer")
        elif entry[0] < 0 or entry[1] > MOST:
            wrong.append(f"{entry!r} reaches out of the order")
        elif entry[0] >= entry[1]:
            wrong.append(f"{entry!r} ends where or before it begins")
    if wrong:
        raise ValueError(f"{', '.join(wrong)}; allowed: {ALLOWED}")
    merged: list[list[int]] = []
    for start, end in sorted(entries):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_text(parse: Callable[[str], Any], wanted: str, quantity: str = "", least: str = "") -> Callable[[Any], Any]:
    """A function that reads a text as `parse` does; a `quantity` has to be above `least`, which is nothing of it."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(f"{_show(value)} is not a string; allowed: {wanted}")
        parsed = parse(value)
        if quantity and parsed <= 0:
            raise ValueError(f'"{value}" is no {quantity}; allowed: more than {least}')
        return parsed

    return read


_read_monitor = _read_text(parse_monitor, 'a metric such as "loss" or "max f1"')


def _read_amount(parse: Callable[[str | int], Any], *words: str) -> Callable[[Any], Any]:
    """A function that reads an amount of training as `parse` does, or one of `words`. With such, the amount is an
    interval, and one of nothing would be a silent "at every step"."""

    def read(value: Any) -> Any:
        if value in words or isinstance(value, Span):
            return value
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(
                f'{_show(value)} is neither a string nor an integer; allowed: a string such as "500 steps", or an '
                "integer number of steps"
            )
        parsed = parse(value)
        if words and (parsed.amount if isinstance(parsed, Span) else parsed) <= 0:
            raise ValueError(f'{render_cadence(parsed)} is no interval; allowed: more than 0, or "off"')
        return parsed

    return read


def _read_capture(value: Any) -> CaptureRange | str:
    if isinstance(value, CaptureRange) or value == "":
        return value
    if not isinstance(value, str):
        raise ValueError(f'{_show(value)} is not a string; allowed: a string such as "steps 50-53", or "" for none')
    return parse_capture_range(value)


def _read_settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{_show(value)} is not a table; allowed: a table, such as {{a = 1}}")
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(
            "the table holds what JSON has no form for; allowed: strings, finite numbers, true, false, lists, tables"
        ) from None
    return value


def _read_elastic(value: Any) -> list[int] | str:
    whole = isinstance(value, list | tuple) and all(isinstance(each, int) and each is not True for each in value)
    if value != "off" and not (whole and len(value) == 2 and 1 <= value[0] <= value[1]):
        raise ValueError(f'{_show(value)} is no range of nodes; allowed: [fewest, most], such as [2, 4], or "off"')
    return "off" if value == "off" else list(value)


def _read_trackers(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)} names one twice; allowed: each once")
    return names


def _schema(kinds: list[str], examples: list[Any], hint: str) -> WithJsonSchema:
    return WithJsonSchema({"type": kinds, "examples": examples, "description": hint})


def _pair(least: int, hint: str | None = None) -> dict[str, Any]:
    pair = {"type": "array", "items": {"type": "integer", "minimum": least}, "minItems": 2, "maxItems": 2}
    return pair | ({"description": hint} if hint else {})


_AMOUNT, _TEXT = ["string", "integer"], ["string"]

SpanField = Annotated[
    Span,
    BeforeValidator(_read_amount(parse_span)),
    PlainSerializer(str, return_type=str),
    _schema(_AMOUNT, ["500 steps", "2e9 tokens", "3 epochs"], "a number of steps, samples, tokens or epochs"),
]
SpanOrOff = Annotated[
    Any,
    BeforeValidator(_read_amount(parse_span, "off")),
    PlainSerializer(str, return_type=str),
    _schema(_AMOUNT, ["500 steps", "1 epochs", "off"], 'a number of steps, samples, tokens or epochs, or "off"'),
]
SaveCadence = Annotated[
    Any,
    BeforeValidator(_read_amount(parse_cadence, "auto", "off")),
    PlainSerializer(lambda v: v if v in ("auto", "off") else render_cadence(v), return_type=str),
    _schema(_AMOUNT, ["200 steps", "10min", "auto", "off"], 'an amount of training, a time, "auto" or "off"'),
]
SecondsField = Annotated[
    float,
    BeforeValidator(_read_text(parse_seconds, 'a time in quotes with its unit, such as "90s"', "time to wait", "0s")),
    PlainSerializer(render_seconds, return_type=str),
    _schema(_TEXT, ["90s", "1h30m"], "a time with d, h, min, m, s or ms"),
]
MonitorField = Annotated[
    Monitor,
    BeforeValidator(lambda value: value if isinstance(value, Monitor) else _read_monitor(value)),
    PlainSerializer(str, return_type=str),
    _schema(_TEXT, ["loss", "accuracy", "max f1", "min rmse"], "a metric, with max or min where that is not known"),
]
BytesField = Annotated[
    int,
    BeforeValidator(_read_text(parse_bytes, 'a size in quotes with its unit, such as "25MiB"', "size", "0B")),
    PlainSerializer(render_bytes, return_type=str),
    _schema(_TEXT, ["25MiB", "1GB"], "a size with B, kB, MB, GB, KiB, MiB or GiB"),
]
SkipsField = Annotated[
    list[list[int]],
    BeforeValidator(read_skips),
    WithJsonSchema(
        {"type": "array", "items": _pair(0), "description": "pairs [from, to] of integers, from less than to"}
    ),
]
BlendField = Annotated[
    list[BlendEntry],
    BeforeValidator(read_blend),
    PlainSerializer(lambda parts: [part.as_table() for part in parts]),
    WithJsonSchema(BLEND_SCHEMA),
]
BatchField = Annotated[
    int | list[list[int]],
    BeforeValidator(read_batch),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": _pair(0), "minItems": 1}],
            "examples": [16, [[0, 32], [100000, 64]]],
            "description": "a number of samples, or pairs [position, samples]",
        }
    ),
]
CaptureField = Annotated[
    Any,
    BeforeValidator(_read_capture),
    PlainSerializer(str, return_type=str),
    _schema(_TEXT, ["steps 50-53", ""], "steps whose trace is captured; empty for none"),
]
TrackersField = Annotated[list[Annotated[str, PluginName("trackers")]], AfterValidator(_read_trackers)]
SettingsField = Annotated[
    dict[str, Any],
    BeforeValidator(_read_settings),
    WithJsonSchema({"type": "object", "description": "a table of what JSON can hold"}),
]
ElasticField = Annotated[
    list[int] | Off,
    BeforeValidator(_read_elastic),
    WithJsonSchema(
        {
            "anyOf": [
                _pair(1, "the fewest and the most, not less than the fewest"),
                {"const": "off", "type": "string"},
            ]
        }
    ),
]

# --- documented keys, bounds, strictness

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


def key(default: Any, doc: str, **bounds: Any) -> Any:
    """A documented key with its default."""
    return Field(default, description=doc, **bounds)


auto, off = partial(key, "auto"), partial(key, "off")
flag = partial(key, False)


class Section(BaseModel):
    """Base of the sections: strict keys, strict types, frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


# --- [checkpoint]


class CheckpointSection(Section):
    """When state is saved and how much of it is kept."""

    every: SaveCadence = key(
        Span(200, "steps"),
        'How often to save: an amount of training, a time, "auto" (what costs least, by the time of a save and the '
        'number of ranks) or "off".',
    )
    keep: PositiveInt = key(
        3, "Complete checkpoints that are kept; older ones are removed after a newer one is complete."
    )
    keep_every: SpanOrOff = off(
        "Steps whose checkpoints are kept for ever, beside the newest; they are saved whatever `every` says."
    )
    keep_best: NonNegativeInt = key(
        0,
        "How many of the steps with the best validation are kept besides, whatever `every` says; `monitor` is what "
        "makes them the best. 0 = none.",
    )
    monitor: MonitorField = key(
        LOSS,
        "Which metric of a validation keep_best and train.patience go by: loss, accuracy, bits_per_byte, or another "
        'name of its results with its direction, "max f1" or "min rmse".',
    )
    background: bool = key(
        True,
        "Write checkpoints while the run goes on, from a copy of the state in the host's memory; the last one is "
        "waited for, as are all where that memory does not suffice or the engine writes files of its own.",
    )
    local_every: SaveCadence = off(
        "How often to save on each node's own disk, as `every`; what `every` asks for is then saved there as well, and "
        'copied to the run directory while the run goes on. "off" = in the run directory alone.'
    )
    local_dir: str = key(
        "",
        "Folder on each node's own disk for these; variables of the environment may stand in it. Empty = the site's "
        "node.local_disk (local_every).",
    )


# --- [guard]


class GuardSection(Section):
    """What happens to numbers that are not finite and to data that are damaged, and how the machine is looked after."""

    non_finite: Literal["skip", "stop", "off"] = key(
        "skip",
        "What happens where loss or gradient are not finite after the passes of a step were repeated once: the step is "
        "skipped, or the run stops; off = nothing is repeated, and the run stops after such a step.",
    )
    max_skips: PositiveInt = key(3, "Skipped steps in a row that end the run (non_finite = skip).")
    spike: PositiveFloat | Off = off(
        "Tell a loss or a gradient norm that lies so many standard deviations above those of the last steps, such as "
        "8.0; `on_spike` says what is done about it."
    )
    on_spike: Literal["warn", "roll_back"] = key(
        "warn",
        "What follows a spike: nothing; or the run goes back to the newest checkpoint from before it and leaves the "
        "data from there to its end out.",
    )
    # More would shift the median of the least window (20 values) that a spike is measured by.
    spike_steps: Annotated[int, Field(ge=1, le=10)] = key(
        3, "Steps in a row with a spike after which the run goes back (on_spike = roll_back); 1 to 10."
    )
    spike_margin: NonNegativeInt = key(
        0, "Steps before a spike whose checkpoints are passed over when the run goes back (on_spike = roll_back)."
    )
    max_left_out: PositiveInt = key(
        500,
        "Global batches that one roll back leaves out at most, the last ones up to the end of the spike; those before "
        "them are trained on again.",
    )
    max_roll_backs: PositiveInt = key(
        3, "How often a run goes back at most, over all its attempts; the spike after that ends it."
    )
    probe_every: SpanOrOff = off(
        "How often the passes of a step are run twice and compared bit by bit; a third run decides."
    )
    compare_every: SpanOrOff = off(
        "How often weights that several ranks hold alike are compared over these ranks; a difference ends the run."
    )
    damaged_data: Literal["stop", "skip"] = key(
        "stop",
        "What happens where bytes of the data are damaged, such as a block with another checksum or an image that "
        "cannot be decoded: the run stops, or the samples that need them do not count.",
    )
    max_damaged: PositiveInt = key(
        100,
        "Damaged samples that a rank leaves out at most in an attempt; one more ends the run (damaged_data = skip).",
    )


# --- [track]


class TrackSection(Section):
    """Where else the numbers of a run are written, for the eyes of another program."""

    to: TrackersField = key(
        [], 'Trackers that rank 0 hands steps, validations and what `run.log` is given, such as ["tensorboard"].'
    )
    settings: SettingsField = key({}, 'Settings of each tracker by its name, such as {tensorboard = {folder = "x"}}.')


# --- [notify]


def _read_variable(value: str) -> str:
    if value and not (value.isascii() and value.isidentifier()):
        raise ValueError(
            "this is no name of an environment variable; allowed: the name of the one that holds the URL, such as "
            "SLACK_WEBHOOK, since the URL itself is a secret that no file of a run may hold"
        )
    return value


def _read_address(value: str) -> str:
    if value and (any(char.isspace() or not char.isprintable() for char in value) or value.startswith("-")):
        raise ValueError(f'"{value}" is no address; allowed: one such as me@example.org')
    return value


class NotifySection(Section):
    """Messages to the owner of the run."""

    mail: Annotated[str, AfterValidator(_read_address)] = key(
        "", "Address that gets mail through the node's own sendmail or mail; empty = none."
    )
    webhook: Annotated[str, AfterValidator(_read_variable)] = key(
        "",
        "Name of the environment variable that holds the URL of a webhook (Slack and alike, ntfy); in a job it comes "
        "from the file of secrets. Empty = none.",
    )
    form: Literal["auto", "slack", "ntfy"] = auto(
        "What the webhook takes: JSON with a text as Slack does, or a topic of ntfy; auto = by the host's name."
    )
    on: list[Literal["end", "failure", "no_progress"]] = key(
        ["end", "failure", "no_progress"],
        "What is sent: that an attempt ended, that it failed, that its ranks hung (the last under an agent).",
    )


# --- [run] and [site]


class PipelineSection(Section):
    """What `shardway submit` runs before and after the training, each as a run of its own."""

    before: list[str] = key(
        [],
        'Steps in order, each after the one before is finished: words of a verb ("data prepare {here}/corpus.txt --out '
        '{here}/tokens") or "-- COMMAND"; {here} is the folder of the command, {run} the run directory.',
    )
    then: list[str] = key(
        [], 'Steps in order once the run is finished, as --then takes them: "evaluate", "report" or "-- COMMAND".'
    )


RUN_NAME = r"^[^/\x00]*[^/\x00.][^/\x00]*$"
"""Names that a folder can have."""


class RunSection(Section):
    """The process: where it writes, on what it runs, how long it waits."""

    name: str = auto("Name of the run; auto = the run file's name.", pattern=RUN_NAME)
    root: str = key("runs", "Folder of run directories; the run directory is root/name unless --dir is given.")
    device: Literal["auto", "cpu", "cuda"] = auto("Device of the model; auto = cuda where there is one.")
    threads: PositiveInt | Auto = auto("CPU threads a rank; auto = usable cores / ranks on the node.")
    start_timeout: SecondsField = key(600.0, "How long ranks wait for each other at the start.")
    collective_timeout: SecondsField = key(300.0, "How long a collective waits before the job is ended.")
    hang_timeout: SecondsField | Auto | Off = auto(
        "How long a rank may do nothing before it is taken to hang and the ranks start again; auto = three times what "
        "its activity usually takes and 5 s, and a minute more where it waits for files (under an agent)."
    )
    max_restarts: NonNegativeInt | Auto = auto(
        "How often ranks start again after a failure; auto = while checkpoints get newer (under an agent)."
    )
    spares: SecondsField | Auto | Off = auto(
        "How long after the first step spare processes are started, which import torch and wait, so that ranks start "
        "again sooner; where a rank fails before that, then; auto = a minute, where memory is left; off = none (under "
        "an agent)."
    )
    elastic: ElasticField = off(
        "The fewest and the most nodes of the run, such as [2, 4]: where a node is lost it goes on with those that are "
        "left (`shardway train --nodes`), and the next attempt has all of site.nodes again; off = with all or not."
    )
    stop_timeout: SecondsField = key(900.0, "How long a graceful stop may take before ranks are killed.")
    stop_margin: SecondsField | Auto = auto(
        "How long before the end of the wall-time the run stops; auto = from the time that saves take."
    )
    telemetry: SecondsField | Off = key(
        1.0,
        "How often the accelerators, cores, memory, files and network of each node are sampled; off = never, and short "
        "runs are not.",
    )
    display: Literal["auto", "off"] = auto(
        "What is shown while it trains: auto = how it starts, its steps and its end; off = errors alone."
    )


class SiteSection(Section):
    """The machine, and what is asked of it."""

    name: str = key("laptop", "A shipped profile, one of your own, or the path of one.")
    nodes: PositiveInt = key(1, "Nodes of a job.")
    ranks_per_node: PositiveInt | Auto = auto("Ranks on each node; auto = its accelerators, or 1 where it has none.")
    walltime: SecondsField | Auto = auto("Wall-time of one attempt; auto = the longest that the queue allows.")
    queue: str = key("", "Queue or partition; empty = the first of the site.")
    account: str = key("", "Account, project or budget that is charged.")
    accelerator_type: str = key(
        "", 'Type of accelerator, where a partition has several: "a100" asks Slurm for gpu:a100:N; empty = the site\'s.'
    )
    budget: PositiveFloat | Off = off(
        "Most GPU-hours (core-hours where a node has no GPUs) of all attempts of a submission; above it, "
        "`shardway submit` wants --yes."
    )
    memory: BytesField | Auto = auto("Memory of a node; auto = all of it where the site wants it said.")
    launcher: Annotated[str, PluginName("launchers", ("auto",))] = auto(
        "What starts the ranks; agent = `shardway train --nodes`, which starts them again in place; ft_launcher = that "
        "of NVIDIA's resiliency extension; auto = agent for a training (under PBS where run.elastic is set), else the "
        "site's."
    )
    container: Annotated[str, PluginName("containers", ("auto", "none"))] = auto(
        "Container runtime; auto = the site's where image is set, or else none."
    )
    image: str = key("", "Container image: a file on the site, or a URI where the runtime takes one.")
    mounts: list[str] = key([], "SOURCE:TARGET[:ro] of folders that the container sees besides those of the run.")
    modules: list[str] = key([], "Environment modules to load after those of the site, with versions.")
    venv: str = auto(
        'Python environment of the ranks: folder of a venv, "conda:NAME", or "none"; auto = the one that submits, but '
        "none in a container."
    )
    preflight: bool = flag("Let `shardway doctor` look at the nodes of each attempt before its ranks start.")
    environment: SettingsField = key({}, "Environment variables of the job; no secrets, which come from a file.")
    options: SettingsField = key(
        {}, 'Options of the scheduler that no key names, such as {reservation = "x", exclusive = true}.'
    )


# --- the other sections and the whole file


class ModelSection(Section):
    """What is trained."""

    kind: Annotated[str, PluginName("models")] = key("transformer", "The reference model to build.")
    hf: str = key("", "A Hugging Face model (folder or name) instead of a reference model.")
    hf_weights: bool = key(True, "Start from the weights of model.hf, where it has some, and not from random ones.")
    dim: PositiveInt = key(128, "Width of the residual stream (transformer, encoder_decoder, vit).")
    layers: PositiveInt = key(
        4, "Number of blocks (transformer, vit); of the encoder and of the decoder each (encoder_decoder)."
    )
    heads: PositiveInt = key(4, "Attention heads; must divide dim unless head_dim is set.")
    head_dim: PositiveInt | Auto = auto("Width of a head; auto = dim / heads (transformer, vit).")
    kv_heads: PositiveInt | Auto = auto("Key/value heads; must divide heads; auto = heads (transformer).")
    ffn_dim: PositiveInt | Auto = auto("Width of the feed-forward layer; auto = 8/3 dim (swiglu) or 4 dim.")
    vocab: PositiveInt | Auto = auto("Vocabulary; auto = that of the data's tokenizer (transformer, encoder_decoder).")
    norm: Literal["rmsnorm", "layernorm"] = key("rmsnorm", "Normalisation (transformer, vit).")
    norm_eps: PositiveFloat = key(1e-5, "Added to the variance in a norm (transformer, vit).")
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = key(
        "swiglu", "Feed-forward activation; gelu_tanh is GPT-2's approximation of gelu (transformer, vit)."
    )
    bias: bool = flag("Biases in linear layers and layer norms (transformer, vit).")
    qkv_bias: bool = flag("Biases of queries, keys and values alone, as in Qwen2 (transformer, vit).")
    qk_norm: bool = flag("Normalise each head's queries and keys, as in Qwen3 (transformer, vit).")
    tied: bool = key(True, "Share the embedding with the output layer (transformer).")
    positions: Literal["rope", "learned"] = key("rope", "Rotary positions, or a learned table (transformer).")
    rope_theta: PositiveFloat = key(10000.0, "Base of the rotary position frequencies (transformer).")
    max_positions: PositiveInt | Auto = auto("Rows of the table of learned positions; auto = data.seq_len.")
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = key(0.0, "Dropout probability (all but convnet).")
    experts: NonNegativeInt = key(0, "Experts in place of the feed-forward layer; 0 = dense (transformer).")
    experts_per_token: PositiveInt = key(2, "Experts that a token is sent to.")
    expert_dim: PositiveInt | Auto = auto("Width of an expert; auto = ffn_dim / experts_per_token.")
    shared_experts: NonNegativeInt = key(0, "Experts that every token passes through besides.")
    dense_layers: NonNegativeInt = key(0, "Blocks that keep a dense feed-forward layer before the first with experts.")
    router_score: Literal["softmax", "sigmoid"] = key("softmax", "How a router scores experts.")
    router_normalise: bool = key(True, "Scale the weights of a token's experts so that they sum to router_scale.")
    router_scale: PositiveFloat = key(1.0, "Factor of the weights of a token's experts.")
    balance: Literal["bias", "loss", "none"] = key(
        "bias",
        "What keeps experts equally busy: a bias of the choice alone (arXiv:2412.19437, section 2.1.2), an auxiliary "
        "loss of each sequence, or nothing.",
    )
    bias_update_rate: PositiveFloat = key(1e-3, "How far the bias of an expert moves in a step.")
    balance_weight: PositiveFloat = key(1e-2, "Factor of the auxiliary loss.")
    capacity_factor: NonNegativeFloat = key(
        0.0, "An expert drops what exceeds this times its even share of a sequence; 0 drops nothing."
    )
    kv_rank: NonNegativeInt = key(
        0, "Width of the latent of keys and values in multi-head latent attention (arXiv:2405.04434); 0 = off."
    )
    q_rank: NonNegativeInt = key(0, "Width of the latent of queries; 0 = queries without one.")
    rope_head_dim: PositiveInt | Auto = auto("Rotary width of a head beside head_dim; auto = half of it.")
    value_head_dim: PositiveInt | Auto = auto("Width of a head's values; auto = head_dim.")
    channels: list[PositiveInt] = key([16, 32], "Output channels of the convolution blocks (convnet).", min_length=1)
    hidden: list[PositiveInt] = key([256], "Widths of the hidden layers (mlp).")
    patch: PositiveInt = key(4, "Height and width of a patch (vit).")
    pooling: Literal["class", "mean"] = key("class", "Classify by a token of its own, or by the mean patch (vit).")
    classes: PositiveInt = key(10, "Number of classes (convnet, mlp, vit).")
    settings: SettingsField = key({}, "Settings of a model of another package, such as {width = 64}.")
    adapter: Literal["none", "lora"] = key(
        "none",
        "lora = train small matrices beside the linear layers of model.hf (arXiv:2106.09685), with the library peft "
        "(shardway[lora]), and leave its own weights as they are; none = train all weights.",
    )
    lora_rank: PositiveInt = key(16, "Rank of the matrices beside a layer (adapter = lora).")
    lora_alpha: PositiveFloat | Auto = auto(
        "What they compute counts by the factor lora_alpha / lora_rank; auto = twice the rank."
    )
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = key(0.0, "Dropout of their inputs.")
    lora_targets: list[str] = key(
        ["all-linear"],
        'Layers that get them: names, or ends of names, such as ["q_proj", "v_proj"]; * stands for any part. '
        '"all-linear" = all in the blocks (with experts: in attention), "attention" = those of attention.',
        min_length=1,
    )


STDLIB = "python:stdlib"
"""The path of the running Python's own library."""


class DataSection(Section):
    """What it learns from, and in which order."""

    kind: Annotated[str, PluginName("data_sources")] = key(
        "text", "Format of the data; `shardway data info PATH` says which one a path has."
    )
    path: str = key(
        "python:stdlib", 'File or folder; "python:stdlib" is the running Python\'s own library.', min_length=1
    )
    dataset: str = key(
        "",
        'Function or class "module:name" that makes a torch Dataset, map-style or iterable, for kind = "dataset"; it '
        'has settings as keyword arguments, and split = "train" or "validation" if it takes that.',
    )
    blend: BlendField = key(
        [],
        "Parts to train on in place of path, in the ratio of their weights: a [[data.blend]] for each, with path and "
        "weight, and kind and name if wanted. A weight may change when a run goes on: weight = [[0, 0.7], [100000, "
        "0.2]] is 0.2 from position 100000 on.",
    )
    validation: str = key("", "File or folder to validate on; empty = hold out validation_fraction of path.")
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = key(
        0.01, "Part at the end of path that is held out where validation names nothing."
    )
    include: str = key("*.py", "Files of a folder that belong to the text (glob on the name).")
    tokenizer: str = key("bytes", '"bytes", or a tokenizer.json (tokenizers) or .model file (sentencepiece).')
    token_dtype: Literal["uint8", "uint16", "uint32"] = key("uint16", "Width of a token in a raw .bin token file.")
    seq_len: PositiveInt = key(128, "Tokens in a sample.")
    pack: bool = flag(
        "Fill each sample with whole documents, which do not see each other; only documents longer than seq_len are "
        "cut. Without it samples are cut from all documents one after the other, wherever a sample ends."
    )
    group_tokens: NonNegativeInt = key(
        0,
        "Tokens of one sample that holds documents of similar length, a row each, padded to the longest of them; "
        "documents longer than seq_len are cut. Not together with pack; 0 = off.",
    )
    inputs: str = auto(
        "Field of a record that is the input: an image or array, a text, tokens, or a conversation; auto = x of "
        "arrays, or else the first field of a usual name or type."
    )
    targets: str = auto(
        "Field of a record that is the class; auto = y of arrays, or else the first field of a usual name or type."
    )
    transform: str = key(
        "",
        'Function "module:name" that makes a decoded image an array or tensor, such as a torchvision v2 transform; '
        "what it draws at random follows from train.seed, the epoch and the sample. Empty = scale the shorter side to "
        "that of shape and cut its centre.",
    )
    decode: Literal["pil", "dali"] = key(
        "pil", "What decodes images: Pillow, or NVIDIA DALI where it is installed, on the device if there is one."
    )
    chat_template: str = key(
        "chatml", 'How a conversation becomes text: "chatml", or a Jinja file; only the turns of the assistant count.'
    )
    mean: float = key(0.0, "Subtracted from pixels after they were scaled to 0..1.")
    std: PositiveFloat = key(1.0, "Divides pixels after mean was subtracted.")
    samples: PositiveInt = key(4096, "Number of samples that synthetic data has.")
    shape: list[PositiveInt] = key([1, 28, 28], "Shape of a synthetic or decoded image: channels, height, width.")
    shuffle: bool | Literal["windows"] = key(
        True,
        "Visit the samples of an epoch in a random order derived from train.seed; windows = a few files at a time, so "
        "that data that do not fit on a node's disk are staged while the run trains.",
    )
    window: BytesField = key(
        32 * 10**9,
        'Size of the files whose samples are mixed with shuffle = "windows"; a larger window mixes better, and a node '
        "needs room for two.",
    )
    workers: NonNegativeInt | Auto = auto(
        "Loader processes a rank; 0 reads in the rank itself (best for tokens); auto = the rank reads itself and, "
        "where that keeps it waiting, goes on with as many as make it fastest, at most one a core."
    )
    prefetch: PositiveInt = key(2, "Batches that each worker reads ahead.")
    record_ids: bool = flag("Write the ids of the samples that each rank consumed into its events.")
    skip: SkipsField = key(
        [],
        "Spans [from, to) of positions that no step takes, such as [[120000, 121000]]; a position is the number of "
        "samples before it in the order of the run, whichever rank took them. It may change when a run goes on.",
    )
    cache: str = auto("Folder for prepared token files; auto = shardway in the user's cache folder.")
    stage: str = auto(
        "Folder of each node's own disk to which the data are copied before the first step; auto = node.local_disk of "
        "the site, for data on a shared file system that fit there; off = they are read where they lie."
    )
    settings: SettingsField = key(
        {}, 'Arguments of data.dataset, or settings of a data source of another package, such as {table = "train"}.'
    )


class TrainSection(Section):
    """How long and in which portions."""

    engine: Literal["torch", "deepspeed"] = key(
        "torch",
        "What updates the weights: PyTorch's own sharding along the axes of [parallel], or DeepSpeed's ZeRO, which "
        "shards over the dp_replicate ranks as [deepspeed] says (shardway[deepspeed]).",
    )
    steps: SpanField = key(Span(800, "steps"), "Length of the run: steps, samples, tokens or epochs.")
    seed: NonNegativeInt = key(0, "Seed of initial weights, data order and dropout.", le=2**63 - 1)
    global_batch: BatchField = key(
        16,
        "Samples that one optimizer step sees, over all ranks; or pairs [position, samples]: [[0, 32], [100000, 64]] "
        "is 32, and 64 for steps that begin at position 100000 or later (a position as of data.skip). It may change "
        "when a run goes on. Intervals and optim.decay in samples, tokens or epochs are counted in steps of the last "
        "size.",
    )
    micro_batch: PositiveInt | Auto = auto(
        "Samples of one pass of a rank; auto = the fastest that fit by the plan, or else its whole share."
    )
    validate_every: SpanOrOff = key(Span(100, "steps"), "How often to validate; also at the end.")
    validation_samples: PositiveInt = key(512, "At most so many samples are validated on.")
    patience: PositiveInt | Off = off(
        'The run is finished after so many validations in a row without a better checkpoint.monitor; "off" = never.'
    )
    sample_every: SpanOrOff = off(
        "How often the model in training continues sample_prompts, into the events of the run; off = never."
    )
    sample_prompts: list[Annotated[str, Field(min_length=1)]] = key(
        [], 'Texts that sample_every has continued, such as ["Once upon a time"].'
    )
    sample_tokens: PositiveInt = key(
        64, "Tokens that each of sample_prompts is continued by, always the likeliest (greedy)."
    )
    deterministic: bool = flag(
        "Choose operations whose result is the same in every run, and refuse those that have none. On a CPU the same "
        "layout then gives the same bits; on a GPU also as long as device, library versions and the way that "
        "collectives go round are the same."
    )
    profile: CaptureField = key(
        "",
        'Steps whose trace a profiler captures into traces/ of the run directory, such as "steps 50-53"; empty = none. '
        "`touch RUN/profile` asks a run for the next steps.",
    )
    compile: Literal["off", "blocks", "model"] | Auto = auto(
        "torch.compile nothing, each block of the model (blocks that are alike share a graph), or all of it; auto = "
        "blocks where the device gains by it, off on a CPU and in runs of few steps."
    )
    compile_cache: str = auto(
        "Folder that keeps compiled code between runs; auto = $TORCHINDUCTOR_CACHE_DIR, or else shardway in the user's "
        "cache folder.",
        min_length=1,
    )
    tune: Literal["off", "auto"] = key(
        "off",
        "auto = measure at the start, for at most 90 s, which of compile, micro_batch and float8 is fastest where "
        "nothing sets them, and keep what passes a check of its losses; off = take what they are without.",
    )
    cuda_graphs: bool = key(
        True,
        "Replay the passes of a step as CUDA graphs where the host is found to be slower than the device: on one rank, "
        "without dropout, experts, float8, fp16, recompute and deterministic, of a model of [model].",
    )
    channels_last: bool = flag(
        "Keep images and convolution weights with channels last in memory, as fast kernels want them."
    )
    cudnn_benchmark: bool = flag(
        "Let cuDNN try its convolutions and keep the fastest; for inputs that are always of one size."
    )

    @property
    def batch(self) -> BatchRamp:
        """The samples of each step, whichever way global_batch is written."""
        return BatchRamp.of(self.global_batch)

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is used; not where that is still to be decided."""
        return self.compile in ("blocks", "model")


class OptimSection(Section):
    """The optimizer and its learning rate."""

    name: Annotated[str, PluginName("optimizers")] = key(
        "adamw",
        "Optimizer. adamw8bit (torchao) continues in another layout only where that cuts parameters at whole blocks of "
        "256 numbers; muon takes the matrices of blocks and leaves the rest to AdamW.",
    )
    kernel: Literal["auto", "fused", "foreach"] = auto(
        "How updates are computed: one kernel a step, or one an operation; auto = fused on cpu and cuda."
    )
    state_dtype: Literal["fp32", "bf16"] = key(
        "fp32", "Format of moments and momentum; bf16 is rounded stochastically and halves their memory."
    )
    lr: PositiveFloat = key(3e-3, "Peak learning rate.")
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = key(
        [0.9, 0.95], "AdamW moments."
    )
    eps: PositiveFloat = key(1e-8, "AdamW denominator term.")
    muon_lr_factor: PositiveFloat = key(1.0, "Peak learning rate of Muon's matrices, as a multiple of lr.")
    muon_adjust: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "How the rate follows a matrix's shape: updates as large as AdamW's (arXiv:2502.16982), or sqrt(rows/columns) "
        "where that is above 1.",
    )
    muon_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = key(0.95, "Nesterov momentum of Muon.")
    muon_iterations: Annotated[int, Field(ge=1, lt=100)] = key(5, "Newton-Schulz iterations of Muon.")
    momentum: Fraction = key(0.9, "SGD momentum.")
    nesterov: bool = flag("SGD with Nesterov momentum.")
    weight_decay: Annotated[float, Field(ge=0.0)] = key(
        0.1, "Weight decay of matrices; norms, biases and other vectors have none."
    )
    clip: PositiveFloat | Off = key(1.0, 'Largest global gradient norm; "off" leaves gradients as they are.')
    schedule: Literal["cosine", "linear", "constant", "wsd"] = key(
        "cosine", "Course of the learning rate after the warm-up; wsd = warm-up, stable, decay."
    )
    warmup: SpanField = key(Span(50, "steps"), "Length of the linear warm-up from zero.")
    decay: SpanField = key(Span(200, "steps"), "Length of the decay at the end (wsd).")
    final_lr: Fraction = key(0.1, "Learning rate at the end, as a fraction of the peak.")
    lr_scaling: Literal["none", "linear"] = key(
        "none",
        "linear = multiply lr by train.global_batch (the largest of a ramp) / base_batch (Goyal et al., "
        "arXiv:1706.02677).",
    )
    base_batch: PositiveInt = key(256, "Global batch that lr was chosen for (lr_scaling = linear).")
    settings: SettingsField = key({}, "Settings of an optimizer of another package, such as {rho = 0.04}.")


class ParallelSection(Section):
    """The degree of each axis; their product is the number of ranks."""

    layout: Literal["given", "auto"] = key(
        "given",
        "given = the degrees below; auto = those that nothing sets, with micro_batch, recompute.mode, pp_schedule and "
        "reshard_after_forward, are the fastest that fit by the plan; without accelerators copies alone.",
    )
    dp_replicate: PositiveInt | Auto = auto("Copies of the model; auto = what the other axes leave.")
    dp_shard: PositiveInt | Auto = key(1, "Ranks that share one copy of the states (FSDP2).")
    cp: PositiveInt = key(1, "Context parallel degree (splits the sequence); the states are shared over it as well.")
    tp: PositiveInt = key(1, "Tensor parallel degree (splits matrices).")
    pp: PositiveInt = key(1, "Pipeline parallel degree (splits the layers).")
    ep: PositiveInt = key(1, "Expert parallel degree (over dp_shard x cp).")
    bucket: BytesField = key(25 * 2**20, "Size of a bucket of gradients that travel together (dp_replicate alone).")
    static_graph: bool = flag("Promise that every step uses the same parameters (dp_replicate alone).")
    compress: Literal["none", "bf16", "fp16", "powersgd"] = key(
        "none", "What gradients are compressed to before they travel (dp_replicate alone)."
    )
    powersgd_rank: PositiveInt = key(4, "Rank of the matrices that PowerSGD sends (arXiv:1905.13727).")
    reshard_after_forward: bool | PositiveInt | Auto = auto(
        "Free gathered weights after the forward pass; a number keeps them gathered over so many ranks; "
        "auto = true, but false under a pipeline (dp_shard > 1)."
    )
    prefetch: NonNegativeInt = key(1, "Blocks whose weights are gathered ahead of use (dp_shard > 1).")
    cpu_offload: bool = flag("Keep sharded weights, gradients and optimizer state in CPU memory (dp_shard > 1).")
    tp_sequence: bool = key(True, "Split norms, dropout and residual stream by sequence as well (tp > 1).")
    tp_loss: bool = key(True, "Keep logits split by vocabulary in the loss (tp > 1).")
    cp_method: Literal["ring", "gather"] = key(
        "ring", "How keys and values reach all queries: passed around in a ring, or gathered (cp > 1)."
    )
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = key(
        "1f1b", "Order of forward and backward passes of the micro-batches (pp > 1)."
    )
    pp_stages_per_rank: PositiveInt | Auto = auto(
        "Stages that a rank holds; auto = 2 for interleaved, zero_bubble and zbv, else 1 (pp > 1)."
    )
    pp_split: list[NonNegativeInt] = key(
        [], "Blocks of each stage; empty = balanced by cost, embedding and head counted (pp > 1)."
    )
    pp_micro_batches: PositiveInt | Auto = auto(
        "Micro-batches of one pass through the pipeline; auto = all of a step (pp > 1)."
    )


class DeepspeedSection(Section):
    """What DeepSpeed does where it is the engine; the rest of its settings follow from the other sections."""

    stage: Literal[1, 2, 3] = key(
        2, "What ZeRO shards over the ranks: 1 optimizer states, 2 gradients as well, 3 weights as well."
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = key(
        "none",
        "Where optimizer states (and fp32 weights) are kept; nvme needs stage 3, libaio and a C++ compiler, which is "
        "busy for minutes at the first start on a machine.",
    )
    offload_params: Literal["none", "cpu", "nvme"] = key("none", "Where sharded weights wait for their use (stage 3).")
    nvme_path: str = key("", "Folder on a local disk for what is offloaded to nvme; each rank of a node uses it.")
    settings: SettingsField = key(
        {}, "Other settings of DeepSpeed, as in its ds_config.json; none that another key of this file decides."
    )


class PrecisionSection(Section):
    """Number formats."""

    compute: Literal["fp32", "bf16", "fp16", "float8"] | Auto = auto(
        "Format of matrix products; fp16 scales its loss, float8 is for linear layers of blocks and the rest is bf16; "
        "auto = bf16 where the device multiplies it fast, else fp32."
    )
    weights: Literal["fp32", "bf16"] = key(
        "fp32", "Format in which weights, gradients and moments are kept; bf16 has no fp32 copy (compute bf16, float8)."
    )
    reduce: Literal["fp32", "bf16"] = key("fp32", "Format in which sharded gradients are summed.")
    tf32: bool | Auto = auto("Let fp32 matrix products run in TF32; auto = on devices that have it.")
    loss_scale: PositiveFloat = key(65536.0, "First factor on the loss, which keeps small gradients (fp16).")
    loss_scale_growth: Annotated[float, Field(gt=1.0)] = key(2.0, "What multiplies the factor after good steps (fp16).")
    loss_scale_backoff: Annotated[float, Field(gt=0.0, lt=1.0)] = key(
        0.5, "What multiplies the factor after a step whose gradients overflow, which is skipped (fp16)."
    )
    loss_scale_interval: PositiveInt = key(2000, "Good steps in a row before the factor grows (fp16).")
    float8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "blockwise"] = key(
        "tensorwise",
        "What shares a scale: a tensor, a row (with_gw_hp: weight gradients in bf16), 32 values, 128 x 128 (float8).",
    )
    float8_engine: Literal["torchao", "transformer_engine"] = key("torchao", "Library that multiplies (float8).")
    float8_emulate: bool = flag(
        "Compute what float8 would give where the device has no such products: slow, for tests (float8)."
    )
    float8_all_gather: bool | Auto = auto(
        "Cast sharded weights before they are gathered; auto = true for tensorwise with torchao where weights are "
        "sharded and reshard_after_forward is no number (float8)."
    )
    first_last: Literal["same", "bf16"] = key("same", "Format of the first and the last block (float8).")


class RecomputeSection(Section):
    """What the backward pass computes again instead of keeping it: less memory for more work."""

    mode: Literal["none", "selective", "budget", "full"] = key(
        "none",
        "Keep everything; keep the results of some operators; let the compiler choose within a budget; keep the inputs "
        "of blocks alone.",
    )
    every: PositiveInt = key(1, "Recompute every k-th block, from the first on (selective, full).")
    save_ops: list[str] = key(
        ["matmul", "attention", "collective"],
        "Operators whose results are kept: these groups, or names such as aten.mm (selective).",
    )
    budget: Fraction = key(
        0.5, "Part of the activations of a compiled graph that may be kept; needs train.compile (budget)."
    )


def _add_parent(schema: dict[str, Any]) -> None:
    """`extends` is gone once a file is merged with its parent, but editors meet it."""
    about = "Path of one other run file, beside this one, whose keys stand where this one sets none."
    schema["properties"]["extends"] = {"description": about, "type": "string"}


def optional_section() -> Any:
    """A section that may be left out. Its model is made at its first use, as a part of the whole file's."""
    return Field(default={}, validate_default=True)


class RunFile(Section):
    """A whole run file; `format` changes when a key changes its meaning."""

    model_config = ConfigDict(json_schema_extra=_add_parent)

    format: Literal[1] = key(1, "Version of the run file format.")
    model: ModelSection = optional_section()
    data: DataSection = optional_section()
    train: TrainSection = optional_section()
    optim: OptimSection = optional_section()
    parallel: ParallelSection = optional_section()
    deepspeed: DeepspeedSection = optional_section()
    precision: PrecisionSection = optional_section()
    recompute: RecomputeSection = optional_section()
    checkpoint: CheckpointSection = optional_section()
    guard: GuardSection = optional_section()
    track: TrackSection = optional_section()
    notify: NotifySection = optional_section()
    pipeline: PipelineSection = optional_section()
    run: RunSection = optional_section()
    site: SiteSection = optional_section()


def sections() -> dict[str, type[Section]]:
    """Section name -> its model, in the order of the file."""
    kinds = {name: field.annotation for name, field in RunFile.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}


def open_tables() -> frozenset[str]:
    """The keys whose value is a table with names of the user's own, such as `site.environment`."""
    fields = {f"{name}.{field}": info for name, kind in sections().items() for field, info in kind.model_fields.items()}
    return frozenset(dotted for dotted, info in fields.items() if info.annotation == dict[str, Any])


def all_keys() -> list[str]:
    """Every dotted key of a run file, in the order of the schema."""
    return [f"{name}.{field}" for name, section in sections().items() for field in section.model_fields]
