"""Files for other libraries: three plans as a whole, any plan by what a file says of ranks and batch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from emit_cases import GOLDEN_CASES, PREDICTION, cases
from emit_reading import READERS, Read, head_of, texts_of
from hypothesis import given
from hypothesis import strategies as st

from golden_files import Golden, golden_names
from shardway.errors import UserError
from shardway.plan.case import Case, Degrees, layers_of_stages
from shardway.plan.export.common import ENGINES, Emitted, emit

FILES = {
    "torchtitan": ("torchtitan.toml", "torchtitan_job.py"),
    "megatron": ("megatron.sh",),
    "deepspeed": ("ds_config.json", "ds_config.txt"),
    "accelerate": ("accelerate.yaml",),
    "nemo": ("megatron_bridge.yaml",),
}
WRITTEN = [(library, file) for library, files in FILES.items() for file in files]

each_library = pytest.mark.parametrize("library", ENGINES)


def written(library: str, case: Case) -> Emitted:
    return emit(library, case, PREDICTION)


# --- whole files


@pytest.mark.parametrize("name", GOLDEN_CASES)
@each_library
def test_the_files_of_a_plan(library: str, name: str, golden: Golden) -> None:
    texts = texts_of(written(library, GOLDEN_CASES[name]))
    assert tuple(texts) == FILES[library]
    for file, text in texts.items():
        golden(text, f"emit/{name}-{file}")


def test_every_golden_file_is_compared() -> None:
    assert golden_names("emit") == {f"{name}-{file}" for name in GOLDEN_CASES for _, file in WRITTEN}


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_bash_reads_the_flags_as_they_were_meant(name: str) -> None:
    """An array of words, and nothing that runs or is expanded on the way."""
    text = texts_of(written("megatron", GOLDEN_CASES[name]))["megatron.sh"]
    script = f'set -eu\n{text}\nprintf "%s\\n" "$EXPECTED_RANKS" "${{MEGATRON_ARGS[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True, env={})
    ranks, *words = done.stdout.splitlines()
    assert int(ranks) == GOLDEN_CASES[name].degrees.world
    lines = [line.strip() for line in text.splitlines() if line.startswith("  --")]
    assert [" ".join(words).split(" --")[place] for place in (0, -1)] == [lines[0], lines[-1].removeprefix("--")]
    assert sum(word.startswith("--") for word in words) == len(lines)


# --- any plan


@dataclass(frozen=True)
class Said:
    """A file, and all that is told beside it."""

    name: str
    read: Read
    emitted: Emitted
    told: str


def each_file(case: Case) -> Iterator[Said]:
    """What every file of every library says of a case; one that is missing is told."""
    for library, names in FILES.items():
        emitted = written(library, case)
        texts, told = texts_of(emitted), " ".join(emitted.notes)
        if set(texts) != set(names):
            assert set(names) - set(texts) == {"torchtitan_job.py"}
            assert "has no config of these sizes" in told
        for name in READERS.keys() & texts.keys():
            yield Said(name, READERS[name](texts[name], case), emitted, told)


@given(cases())
def test_a_file_says_what_the_plan_says(case: Case) -> None:
    """Ranks, batch, degrees and stages; what a file lacks is told."""
    for said in each_file(case):
        check_ranks(said, case)
        check_batch(said, case)
        check_degrees(said, case)
        if case.degrees.pp > 1:
            check_stages(said, case)


def check_ranks(said: Said, case: Case) -> None:
    world, ranks = case.degrees.world, said.read.ranks
    same = (
        "as many as in the plan." if ranks == world else f"but the plan has {world}: what is missing is listed below."
    )
    assert f"= {ranks} ranks, {same}" in head_of(said.emitted), said.name


def check_batch(said: Said, case: Case) -> None:
    if said.name == "accelerate.yaml":
        assert f"batches of {case.micro_batch} x {case.seq_len} tokens" in said.told
        assert f"gradient_accumulation_steps={case.micro_batches})" in said.told
        return
    read = said.read
    assert read.micro_batch * read.accumulation * case.degrees.data == case.global_batch, said.name
    assert (read.micro_batch, read.accumulation) == (case.micro_batch, case.micro_batches), said.name
    left_out = f"train_batch_size ({case.global_batch}) is not in the file" in said.told
    assert read.whole == (None if left_out else case.global_batch), said.name


def check_degrees(said: Said, case: Case) -> None:
    found = said.read.degrees
    assert found.get("dp", found.get("dp_replicate", 1) * found.get("dp_shard", 1)) == case.degrees.data, said.name
    for axis in ("cp", "tp", "pp", "ep"):
        size = getattr(case.degrees, axis)
        assert found.get(axis, 1) == size or f"{axis} {size} is not in the file" in said.told, (said.name, axis)
    if found.get("etp", 1) != case.degrees.etp:
        assert re.search(r"xpert\S* .*split|split\S* .*xpert", said.told), said.name


def check_stages(said: Said, case: Case) -> None:
    layers = layers_of_stages(case)
    if said.name == "ds_config.json":
        every = ", ".join(map(str, layers))
        assert f"layers of a stage: {layers[0] if len(set(layers)) == 1 else every}." in said.told
    elif said.name != "accelerate.yaml":
        assert said.read.stages == layers, said.name


@each_library
@given(case=cases())
def test_the_head_says_all_that_is_told(library: str, case: Case) -> None:
    """In every file that has comments, the prediction first, each sentence once."""
    emitted = written(library, case)
    head = head_of(emitted)
    assert head.startswith(" ".join(PREDICTION))
    assert len(set(emitted.notes)) == len(emitted.notes)
    place = 0
    for sentence in emitted.notes:
        place = head.index(f"- {sentence}", place)
    for name, text in texts_of(emitted).items():
        assert text.endswith("\n"), name
        if not name.startswith("ds_config"):
            assert all(line.startswith("#") for line in text.split("\n\n")[0].splitlines()), name


# --- no wish is dropped

WISHES = {
    "seq_len": (4096, 8192),
    "zero": (0, 1, 2, 3),
    "reshard": (False, True),
    "precision": ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "fp4"),
    "optimizer": ("adamw", "adamw8bit", "adafactor", "sgd", "muon"),
    "recompute": ("none", "selective", "products", "operators", "full"),
    "attention": ("plain", "flash1", "flash3"),
    "sequence": (False, True),
    "dropout": (False, True),
    "compiled": (False, True),
    "offload": (False, True),
    "fused_loss": (False, True),
    "async_tensor": (False, True),
    "schedule": ("gpipe", "1f1b", "zero_bubble"),
}


def has_meaning(wish: str, case: Case) -> bool:
    """Whether the wish changes anything of a step."""
    degrees = case.degrees
    if wish == "reshard":
        return case.zero == 3 and degrees.shards > 1
    if wish == "sequence":
        return degrees.tp > 1
    if wish == "async_tensor":  # an engine may hide these messages whatever the plan wishes
        return degrees.tp > 1 and not replace(case, async_tensor=False).hides_tensor
    if wish == "schedule":
        return degrees.pp > 1 and case.stages_per_rank == 1
    return wish != "zero" or degrees.shards > 1


def check_every_value_shows(library: str, wish: str, case: Case) -> None:
    """In a file or in what is told."""
    plans = [replace(case, **{wish: value}) for value in WISHES[wish]]
    meant = [plan for plan in plans if has_meaning(wish, plan)]
    assert len({written(library, plan) for plan in meant}) == len(meant), wish


LAYOUTS = {
    "shards": {"degrees": Degrees(dp_shard=4), "zero": 3},
    "tensor": {"degrees": Degrees(dp_shard=2, tp=2), "zero": 3},
    "context": {"degrees": Degrees(dp_replicate=2, dp_shard=2, cp=2), "zero": 2, "precision": "fp16"},
    "stages": {"degrees": Degrees(dp_shard=2, tp=2, pp=2), "zero": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@each_library
def test_no_wish_is_dropped_in_silence(library: str, layout: str) -> None:
    """Two plans never look the same where they differ in a setting that changes a step."""
    for wish in WISHES:
        check_every_value_shows(library, wish, replace(GOLDEN_CASES["fsdp-8b-64"], **LAYOUTS[layout]))


@each_library
@given(case=cases(), wish=st.sampled_from(list(WISHES)))
def test_no_wish_of_any_plan_is_dropped(library: str, case: Case, wish: str) -> None:
    check_every_value_shows(library, wish, case)


def test_a_library_that_is_not_known() -> None:
    with pytest.raises(UserError) as caught:
        emit("colossal", GOLDEN_CASES["fsdp-8b-64"], PREDICTION)
    assert str(caught.value) == (
        "1 problem in the plan\n"
        '  --emit: "colossal" is not known\n'
        "      allowed: torchtitan, megatron, deepspeed, accelerate, nemo"
    )
