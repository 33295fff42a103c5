"""Every kind of missing or damaged file of a model is named before the queue, with what to do."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hub_models import CONFIG, FIRST, PARTS, SECOND, write_json, write_model, write_tensors
from hub_server import fill_cache
from shardway.errors import UserError
from shardway.launch.hosts import LocalHost
from shardway.launch.submission.hub_files import HubFiles, find_hub_files
from shardway.prefetch.cache import HubCache, HubName
from shardway.prefetch.check import (
    ModelNeeds,
    check_cached,
    check_model,
    check_named_file,
    locate_whole_model,
    read_safetensors_header,
)
from shardway.runfile.load import load_run
from shardway.sites.load import load_site

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 40000\n"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "tiny")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the model, in which something may be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "tiny"))


def edit(file: str, **keys: object) -> Callable[[Path], None]:
    """Other values of keys of a JSON file; None takes one out."""

    def apply(folder: Path) -> None:
        content = {**json.loads((folder / file).read_text()), **keys}
        write_json(folder / file, {key: value for key, value in content.items() if value is not None})

    return apply


def remove(*files: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / file).unlink() for file in files] and None


def write(file: str, content: bytes | str) -> Callable[[Path], None]:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(content) and None


def cut(file: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size]) and None


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [change(folder) for change in changes] and None


def drop_tensor(folder: Path) -> None:
    write_tensors(folder / SECOND, {name: shape for name, shape in PARTS[SECOND].items() if name != "lm_head.weight"})


def lengthen(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes() + b"xx")


def own_code(module: str = "modeling_own", **keys: str) -> Callable[[Path], None]:
    return edit("config.json", auto_map={"AutoModelForCausalLM": f"{module}.Own"}, **keys)


def adapter(base: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for file in ("config.json", INDEX, FIRST, SECOND):
            (folder / file).unlink(missing_ok=True)
        write_tensors(folder / "adapter_model.safetensors", {"a": (4, 4)})
        write_json(folder / "adapter_config.json", {"base_model_name_or_path": base})

    return apply


@dataclass(frozen=True)
class Kind:
    """A damage, the file that is named, words of what is wrong, and whether it is a warning alone."""

    name: str
    damage: Callable[[Path], None]
    file: str
    words: str
    doubtful: bool = False
    needs: ModelNeeds = field(default_factory=ModelNeeds)


def _no_tokenizer(kind: str) -> Callable[[Path], None]:
    return both(
        remove("tokenizer.json", "special_tokens_map.json"), edit("tokenizer_config.json", tokenizer_class=kind)
    )


CHAT, TOKENIZER = ModelNeeds(chat=True), ModelNeeds(tokenizer="needed")
KINDS = (
    Kind("config missing", remove("config.json"), "config.json", "is missing"),
    Kind("config cut", cut("config.json", 40), "config.json", "is no JSON"),
    Kind("config no object", write("config.json", "[1]"), "config.json", "where an object belongs"),
    Kind("config not text", write("config.json", b"\xff\xfe{"), "config.json", "is no text"),
    Kind("config empty", write("config.json", ""), "config.json", "is empty"),
    Kind("config a pointer", write("config.json", POINTER), "config.json", "is a pointer of Git LFS"),
    Kind("index missing", remove(INDEX), INDEX, "is missing, and the weights are in parts"),
    Kind("index broken", cut(INDEX, 60), INDEX, "is no JSON"),
    Kind("index without map", edit(INDEX, weight_map=None), INDEX, 'has no "weight_map"'),
    Kind("index leads out", edit(INDEX, weight_map={"a": "../x.safetensors"}), INDEX, "which is not beside it"),
    Kind("shard missing", remove(SECOND), SECOND, f"is missing, and {INDEX} names it"),
    Kind("shard cut", cut(SECOND, 3000), SECOND, "is cut: it has 3,000 of"),
    Kind("shard cut in its header", cut(SECOND, 100), SECOND, "inside its header"),
    Kind("shard header damaged", lambda f: damage_header(f / SECOND), SECOND, "its header is damaged"),
    Kind("shard empty", write(SECOND, b""), SECOND, "is empty"),
    Kind("shard a pointer", write(SECOND, POINTER), SECOND, "is a pointer of Git LFS and not the file itself"),
    Kind("shard a page", write(SECOND, "<html>404</html>" * 9), SECOND, "is no safetensors file"),
    Kind("shard longer", lengthen, SECOND, "has 2 bytes more"),
    Kind("shard without a tensor", drop_tensor, SECOND, "has no tensor lm_head.weight"),
    Kind("total of the index", edit(INDEX, metadata={"total_size": 5}), INDEX, "counts 5 bytes", doubtful=True),
    Kind(
        "weights pickled", both(remove(INDEX, FIRST, SECOND), write("x.bin", "x")), "model.safetensors", "as .bin files"
    ),
    Kind("tokenizer missing", remove("tokenizer.json"), "tokenizer.json", "is missing", needs=TOKENIZER),
    Kind("tokenizer cut", cut("tokenizer.json", 90), "tokenizer.json", "is no JSON"),
    Kind("tokenizer of no model", write("tokenizer.json", '{"a": 1}'), "tokenizer.json", 'has no "model"'),
    Kind("tokenizer a pointer", write("tokenizer.json", POINTER), "tokenizer.json", "is a pointer of Git LFS"),
    Kind("tokenizer.model missing", _no_tokenizer("LlamaTokenizer"), "tokenizer.model", "is missing", needs=TOKENIZER),
    Kind("vocab.json missing", _no_tokenizer("GPT2Tokenizer"), "vocab.json", "is missing", doubtful=True),
    Kind("merges missing", both(remove("tokenizer.json"), write("vocab.json", "{}")), "merges.txt", "is missing"),
    Kind("tokenizer config cut", cut("tokenizer_config.json", 9), "tokenizer_config.json", "is no JSON"),
    Kind("special tokens cut", cut("special_tokens_map.json", 9), "special_tokens_map.json", "is no JSON"),
    Kind(
        "special token unknown",
        edit("tokenizer_config.json", pad_token="<pad>"),
        "tokenizer_config.json",
        'names pad_token = "<pad>", which tokenizer.json does not have',
        doubtful=True,
    ),
    Kind("chat template missing", remove("chat_template.jinja"), "chat_template.jinja", "is missing", needs=CHAT),
    Kind("chat template empty", write("chat_template.jinja", " "), "chat_template.jinja", "is empty", needs=CHAT),
    Kind("generation config broken", cut("generation_config.json", 5), "generation_config.json", "is no JSON"),
    Kind("code missing", own_code(), "modeling_own.py", "is missing, and config.json names it"),
    Kind(
        "code that code needs",
        both(own_code(), write("modeling_own.py", "from .parts_own import x\n")),
        "parts_own.py",
        "is missing, and modeling_own.py names it",
    ),
    Kind(
        "code of its own",
        both(own_code(model_type="own"), write("modeling_own.py", "")),
        "config.json",
        'needs code of the repository (modeling_own.py) for "own"',
    ),
    Kind(
        "adapter without its base",
        adapter("org/base"),
        "adapter_config.json",
        "is an adapter of org/base, which is not",
    ),
    Kind("adapter of a lost folder", adapter("/lost/base"), "adapter_config.json", "/lost/base, which is not there"),
    Kind(
        "adapter without weights",
        both(adapter("org/base"), remove("adapter_model.safetensors")),
        "adapter_model.safetensors",
        "is missing",
    ),
)


def damage_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[20:40] = b"\x00" * 20
    path.write_bytes(content)


def of_job(hf: str, site: str = "jupiter") -> HubFiles:
    """What a submission finds."""
    loaded = load_run(None, [f"model.hf={json.dumps(hf)}"])
    return find_hub_files(loaded, load_site(site), LocalHost(), in_image=False)


def test_a_whole_model_has_no_fault(folder: Path) -> None:
    assert check_model(folder, ModelNeeds(chat=True, tokenizer="needed")) == []
    assert of_job(str(folder)).problems == []


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_the_file_is_named_in_a_folder_and_in_the_cache(
    kind: Kind, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.damage(folder)
    cache = HubCache(tmp_path / "hub", "HF_HUB_CACHE")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.folder))
    fill_cache(cache.folder, "org/tiny", folder)
    cached = check_cached(HubName("org/tiny"), cache, kind.needs)
    assert cached.folder is not None
    for faults in (check_model(folder, kind.needs), list(cached.faults)):
        (fault,) = [fault for fault in faults if fault.file == kind.file]
        assert kind.words in fault.what
        assert fault.doubtful == kind.doubtful
        assert fault.remedy
    if kind.needs == ModelNeeds():
        found = of_job("org/tiny")
        named = [problem.what for problem in found.problems]
        assert any(kind.file in text and kind.words in text for text in (found.warnings if kind.doubtful else named))
        assert kind.doubtful or found.repos == ()
        assert all(problem.remedy for problem in found.problems)


ANYTHING = (None, 1, True, "x", "", "../y", "org/x@", "\0", [], {}, [1], {"a": 1}, [[]], "x" * 300, 10**30)


def list_places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value of a JSON file, of long tables the first ones."""
    yield at
    parts = list(content.items()) if isinstance(content, dict) else []
    parts = list(enumerate(content)) if isinstance(content, list) else parts
    for key, value in parts[:8]:
        yield from list_places(value, (*at, key))


def put(content: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[at[0]] = put(content[at[0]], at[1:], value)
    return copy


@pytest.mark.parametrize(
    "file", ["config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "adapter_config.json"]
)
def test_whatever_a_file_holds_is_no_error_of_the_check(file: str, folder: Path) -> None:
    own_code()(folder)
    code = {"AutoTokenizer": ["a.T", None]}
    edit("tokenizer_config.json", auto_map=code, added_tokens_decoder={"0": {"content": "<pad>"}})(folder)
    if file == "adapter_config.json":
        adapter("org/base")(folder)
    content = json.loads((folder / file).read_text())
    for at in list_places(content):
        for value in ANYTHING:
            write_json(folder / file, put(content, at, value))
            assert all(fault.remedy for fault in check_model(folder, ModelNeeds(chat=True, tokenizer="needed")))


# --- what only the cache has


@pytest.fixture
def cache(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """A cache with the model, whole."""
    cache = HubCache(tmp_path / "hub", "HF_HUB_CACHE")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.folder))
    fill_cache(cache.folder, "org/tiny", whole)
    return cache


def snapshot_of(cache: HubCache) -> Path:
    (snapshot,) = (cache.folder / "models--org--tiny" / "snapshots").iterdir()
    return snapshot


def named(cache: HubCache) -> list[str]:
    """The problems of a job on a site without a network; refused with the same words on a start by hand."""
    return [problem.what for problem in of_job("org/tiny").problems]


def test_a_link_without_its_blob(cache: HubCache) -> None:
    blob = (snapshot_of(cache) / FIRST).resolve()
    blob.unlink()
    (text,) = named(cache)
    assert f'"org/tiny": {FIRST} is a link to ' in text
    assert "which is not there" in text
    blob.with_name(f"{blob.name}.shardway.incomplete").write_bytes(b"begun")
    (text,) = named(cache)
    assert text.endswith("which is not there: its download was cut")


@pytest.mark.parametrize("suffix", [".shardway.incomplete", ".1a2b3c4d.incomplete"])
def test_a_file_of_a_download_that_was_cut(suffix: str, cache: HubCache) -> None:
    link = snapshot_of(cache) / FIRST
    blob = link.resolve()
    link.unlink()
    blob.rename(blob.with_name(blob.name + suffix))
    (text,) = named(cache)
    assert f"{FIRST} is missing, and the hub lists it (a download was cut: blobs/" in text


@pytest.mark.parametrize("file", ["generation_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_a_file_that_nothing_else_names(file: str, cache: HubCache) -> None:
    (snapshot_of(cache) / file).unlink()
    assert named(cache) == [f'"org/tiny": {file} is missing, and the hub lists it']


def test_a_file_of_another_size_or_with_other_bytes(cache: HubCache) -> None:
    blob = (snapshot_of(cache) / "tokenizer.json").resolve()
    content = blob.read_text()
    blob.write_text(content.replace("[]", "[ ]"))
    assert ["tokenizer.json has" in text and "and the hub lists" in text for text in named(cache)] == [True]
    blob.write_text(content.replace('"1.0"', '"2.0"'))
    assert named(cache) == []  # not read by every submission
    found = check_cached(HubName("org/tiny"), cache, ModelNeeds(), reads=True)
    assert [fault.file for fault in found.faults] == ["tokenizer.json"]
    assert "has other bytes than the hub's" in found.faults[0].what


def test_a_revision_that_is_not_there(cache: HubCache) -> None:
    (problem,) = of_job("org/tiny@v2").problems
    assert "at the revision v2 (it has: c0ffeec0ffee, main)" in problem.what
    assert problem.remedy == "`shardway prefetch --model org/tiny@v2`"
    snapshot_of(cache).rename(snapshot_of(cache).with_name("0" * 40))
    (problem,) = of_job("org/tiny").problems
    assert "refs/main leads to commit c0ffeec0ffee, of which nothing is there" in problem.what


def test_a_model_that_was_never_fetched(cache: HubCache) -> None:
    (problem,) = of_job("org/gated").problems
    assert problem.what == f"org/gated is not in the cache {cache.folder}"
    assert problem.remedy == "`shardway prefetch --model org/gated`"


@pytest.mark.parametrize(
    ("site", "problems", "warnings"),
    [("jupiter", 1, 0), ("generic-slurm", 0, 1), ("perlmutter", 0, 0), ("laptop", 0, 0)],
)
def test_what_is_missing_counts_where_nodes_have_no_network(
    site: str, problems: int, warnings: int, cache: HubCache
) -> None:
    (snapshot_of(cache) / FIRST).unlink()
    found = of_job("org/tiny", site)
    assert (len(found.problems), len(found.warnings)) == (problems, warnings)
    assert all(FIRST in text and "shardway prefetch --model org/tiny" in text for text in found.warnings)


def test_on_this_machine_the_variables_of_the_shell_count(cache: HubCache, monkeypatch: pytest.MonkeyPatch) -> None:
    (snapshot_of(cache) / FIRST).unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(of_job("org/tiny", "laptop").problems) == 1


@pytest.mark.parametrize("site", ["generic-slurm", "perlmutter", "laptop"])
def test_what_is_damaged_counts_everywhere(site: str, cache: HubCache) -> None:
    (snapshot_of(cache) / FIRST).resolve().write_bytes(b"")
    assert len(of_job("org/tiny", site).problems) == 1


# --- the other callers


def test_a_start_by_hand_names_all_of_it_at_once(cache: HubCache, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate_whole_model("org/tiny", weights=True) == snapshot_of(cache)
    (snapshot_of(cache) / FIRST).unlink()
    (snapshot_of(cache) / SECOND).resolve().write_bytes(b"")
    with pytest.raises(UserError) as caught:
        locate_whole_model("org/tiny", weights=True)
    assert FIRST in str(caught.value)
    assert SECOND in str(caught.value)


def test_a_folder_with_a_config_alone_is_a_model(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CONFIG)
    assert locate_whole_model(str(tmp_path), weights=True) == tmp_path


def test_the_base_of_an_adapter_may_be_in_the_cache(cache: HubCache, folder: Path) -> None:
    adapter("org/tiny")(folder)
    assert check_model(folder, ModelNeeds()) == []
    adapter_of_it = fill_cache(cache.folder, "org/adapter", folder)
    assert check_model(adapter_of_it, ModelNeeds()) == []


def test_a_file_that_a_run_names_itself(folder: Path) -> None:
    assert check_named_file(folder / "tokenizer.json") is None
    assert check_named_file(folder / "chat_template.jinja", template=True) is None
    for file, words in (("gone.json", "is missing"), ("tokenizer_config.json", "has no chat_template")):
        fault = check_named_file(folder / file, template=True)
        assert fault is not None
        assert words in fault.what
    (folder / "x.model").write_text(POINTER)
    fault = check_named_file(folder / "x.model")
    assert fault is not None
    assert "pointer of Git LFS" in fault.what


def test_names_of_tokenizer_and_template_are_looked_at_before_the_queue(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    loaded = load_run(None, [f'data.tokenizer="{folder}/tokenizer.json"', f'data.chat_template="{folder}/gone.jinja"'])
    found = find_hub_files(loaded, load_site("jupiter"), LocalHost(), in_image=False)
    assert [problem.where for problem in found.problems] == ["data.tokenizer", "data.chat_template"]
    in_image = find_hub_files(loaded, load_site("jupiter"), LocalHost(), in_image=True)
    assert [problem.where for problem in in_image.problems] == ["data.tokenizer"]


def test_headers_are_those_that_the_library_writes(tmp_path: Path) -> None:
    """Every dtype that torch and safetensors share, and a tensor without elements."""
    import torch
    from safetensors.torch import save_file

    floats = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    kinds = (*floats, "int64", "int32", "int16", "int8", "uint8", "bool")
    tensors = {name: torch.zeros(3, 5).to(getattr(torch, name)) for name in kinds}
    save_file({**tensors, "none": torch.zeros(0, 4)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_safetensors_header(tmp_path / "x.safetensors")
    assert set(found) == {*kinds, "none"}
