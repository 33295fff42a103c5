"""Models by name have the published number of parameters."""

from __future__ import annotations

import pytest
from library_counts import build_on_meta, count, make_config

from shardway.errors import UserError
from shardway.plan.huggingface import find_named, load_named
from shardway.plan.shapes import Architecture, Measured

HUB = "size that the model's page on huggingface.co states (of its safetensors files)"
TORCHVISION = "torchvision, table of weights"
PUBLISHED: dict[str, tuple[str, str]] = {
    "gpt2": ("124M", "openai/gpt-2, README"),
    "gpt2-medium": ("355M", "openai/gpt-2, README"),
    "gpt2-large": ("774M", "openai/gpt-2, README"),
    "gpt2-xl": ("1558M", "openai/gpt-2, README"),
    "gpt3-125m": ("125M", "arXiv:2005.14165, table 2.1"),
    "gpt3-760m": ("760M", "arXiv:2005.14165, table 2.1"),
    "gpt3-1.3b": ("1.3B", "arXiv:2005.14165, table 2.1"),
    "gpt3-2.7b": ("2.7B", "arXiv:2005.14165, table 2.1"),
    "gpt3-6.7b": ("6.7B", "arXiv:2005.14165, table 2.1"),
    "gpt3-175b": ("175.0B", "arXiv:2005.14165, table 2.1"),
    "gpt-530b": ("530B", "arXiv:2201.11990, abstract"),
    "gpt-j-6b": ("6.05B", "EleutherAI/gpt-j-6b, model card: 6,053,381,344"),
    "gpt-neox-20b": ("20,554,567,680", "arXiv:2204.06745, section 2"),
    "pythia-70m": ("70,426,624", "EleutherAI/pythia-70m, model card"),
    "pythia-160m": ("162,322,944", "EleutherAI/pythia-160m, model card"),
    "pythia-410m": ("405,334,016", "EleutherAI/pythia-410m, model card"),
    "pythia-1b": ("1,011,781,632", "EleutherAI/pythia-1b, model card"),
    "pythia-1.4b": ("1,414,647,808", "EleutherAI/pythia-1.4b, model card"),
    "pythia-2.8b": ("2,775,208,960", "EleutherAI/pythia-2.8b, model card"),
    "pythia-6.9b": ("6,857,302,016", "EleutherAI/pythia-6.9b, model card"),
    "pythia-12b": ("11,846,072,320", "EleutherAI/pythia-12b, model card"),
    "opt-125m": ("125M", "arXiv:2205.01068, table 1"),
    "opt-1.3b": ("1.3B", "arXiv:2205.01068, table 1"),
    "opt-2.7b": ("2.7B", "arXiv:2205.01068, table 1"),
    "opt-6.7b": ("6.7B", "arXiv:2205.01068, table 1"),
    "opt-13b": ("13B", "arXiv:2205.01068, table 1"),
    "opt-30b": ("30B", "arXiv:2205.01068, table 1"),
    "opt-66b": ("66B", "arXiv:2205.01068, table 1"),
    "opt-175b": ("175B", "arXiv:2205.01068, table 1"),
    "bloom-176b": ("176,247,271,424", "bigscience/bloom, model card"),
    "bloom-7b1": ("7,069,016,064", "bigscience/bloom-7b1, model card"),
    "mpt-7b": ("6.65B", HUB),
    "mpt-30b": ("30.0B", HUB),
    "llama-7b": ("6.7B", "arXiv:2302.13971, table 2"),
    "llama-13b": ("13.0B", "arXiv:2302.13971, table 2"),
    "llama-33b": ("32.5B", "arXiv:2302.13971, table 2"),
    "llama-65b": ("65.2B", "arXiv:2302.13971, table 2"),
    "llama2-7b": ("6.74B", HUB),
    "llama2-13b": ("13.0B", HUB),
    "llama2-70b": ("69.0B", HUB),
    "llama3-8b": ("8.03B", HUB),
    "llama3-70b": ("70.6B", HUB),
    "llama3-405b": ("406B", HUB),
    "llama3.2-1b": ("1.23B", "meta-llama/Llama-3.2-1B, model card"),
    "llama3.2-3b": ("3.21B", "meta-llama/Llama-3.2-3B, model card"),
    "mistral-7b": ("7.24B", HUB),
    "mixtral-8x7b": ("46.7B", HUB),
    "mixtral-8x22b": ("141B", HUB),
    "qwen2.5-0.5b": ("0.49B", "Qwen/Qwen2.5-0.5B, model card"),
    "qwen2.5-1.5b": ("1.54B", "Qwen/Qwen2.5-1.5B, model card"),
    "qwen2.5-3b": ("3.09B", "Qwen/Qwen2.5-3B, model card"),
    "qwen2.5-7b": ("7.61B", "Qwen/Qwen2.5-7B, model card"),
    "qwen2.5-14b": ("14.7B", "Qwen/Qwen2.5-14B, model card"),
    "qwen2.5-32b": ("32.5B", "Qwen/Qwen2.5-32B, model card"),
    "qwen2.5-72b": ("72.7B", "Qwen/Qwen2.5-72B, model card"),
    "qwen3-0.6b": ("0.6B", "Qwen/Qwen3-0.6B, model card"),
    "qwen3-1.7b": ("1.7B", "Qwen/Qwen3-1.7B, model card"),
    "qwen3-4b": ("4.0B", "Qwen/Qwen3-4B, model card"),
    "qwen3-8b": ("8.2B", "Qwen/Qwen3-8B, model card"),
    "qwen3-14b": ("14.8B", "Qwen/Qwen3-14B, model card"),
    "qwen3-32b": ("32.8B", "Qwen/Qwen3-32B, model card"),
    "qwen3-30b-a3b": ("30.5B", "Qwen/Qwen3-30B-A3B, model card"),
    "qwen3-235b-a22b": ("235B", "Qwen/Qwen3-235B-A22B, model card"),
    "deepseek-v2": ("236B", "arXiv:2405.04434, section 3.1.2"),
    "deepseek-v2-lite": ("15.7B", "arXiv:2405.04434, appendix B"),
    "deepseek-v3": ("671B", "arXiv:2412.19437, section 4.2"),
    "gpt-oss-20b": ("20.91B", "arXiv:2508.10925, table 1"),
    "gpt-oss-120b": ("116.83B", "arXiv:2508.10925, table 1"),
    "gemma2-2b": ("2.61B", HUB),
    "gemma2-9b": ("9.24B", HUB),
    "gemma2-27b": ("27.2B", HUB),
    "olmo2-7b": ("7.30B", HUB),
    "olmo2-13b": ("13.7B", HUB),
    "olmo2-32b": ("32.2B", HUB),
    "phi-2": ("2.78B", HUB),
    "phi-3-mini": ("3.82B", HUB),
    "phi-3-medium": ("14.0B", HUB),
    "phi-4": ("14.7B", HUB),
    "bert-base": ("110M", "arXiv:1810.04805, section 3"),
    "bert-large": ("336M", HUB),
    "t5-small": ("60.5M", HUB),
    "t5-base": ("223M", HUB),
    "t5-large": ("738M", HUB),
    "t5-3b": ("2.85B", "size of google-t5/t5-3b's weights in fp32 (11.4 GB)"),
    "t5-11b": ("11.3B", "size of google-t5/t5-11b's weights in fp32 (45.2 GB)"),
    "vit-b16": ("86,567,656", TORCHVISION),
    "vit-l16": ("304,326,632", TORCHVISION),
    "vit-h14": ("632M", "arXiv:2010.11929, table 1"),
    "resnet-50": ("25,557,032", TORCHVISION),
    "resnet-18": ("11,689,512", TORCHVISION),
}
FARTHER = {
    "gpt3-350m": (355_871_744, "the paper says 350M of these sizes, which GPT-2's repository counts as 355M"),
    "gpt3-13b": (12_853_386_240, "the paper says 13.0B of a width of 5140, which its 40 heads of 128 are not"),
}
"""More than 1 % from the paper's number, and why."""
ACTIVE = {
    "mixtral-8x7b": ("12.9B", "mistral.ai/news/mixtral-of-experts"),
    "mixtral-8x22b": ("39B", "mistral.ai/news/mixtral-8x22b"),
    "qwen3-30b-a3b": ("3.3B", "Qwen/Qwen3-30B-A3B, model card"),
    "qwen3-235b-a22b": ("22B", "Qwen/Qwen3-235B-A22B, model card"),
    "deepseek-v2": ("21B", "arXiv:2405.04434, section 3.1.2"),
    "deepseek-v3": ("37B", "arXiv:2412.19437, section 4.2"),
}
WITHOUT_EMBEDDING = {
    "deepseek-v2-lite": ("2.4B", "arXiv:2405.04434, appendix B"),
    "gpt-oss-20b": ("3.61B", "arXiv:2508.10925, table 1"),
    "gpt-oss-120b": ("5.13B", "arXiv:2508.10925, table 1"),
}
"""Active parameters that were published without the embedding."""
ROUNDED = 0.025
"""Active parameters are published in two digits, often rounded down."""
UNITS = {"M": 10**6, "B": 10**9}


def is_near(number: int, published: str) -> bool:
    """Within 1 %, or what the published digits round to."""
    unit = UNITS.get(published[-1], 1)
    digits = published.rstrip("MB").replace(",", "")
    half = 0.5 * 10 ** -len(digits.partition(".")[2]) * unit
    return abs(number - float(digits) * unit) <= max(0.01 * float(digits) * unit, half)


def test_every_model_is_compared_with_a_published_number() -> None:
    assert set(load_named()) == set(PUBLISHED) | set(FARTHER)
    assert len(load_named()) >= 45


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    assert is_near(find_named(name).parameters, PUBLISHED[name][0])


@pytest.mark.parametrize("name", FARTHER)
def test_where_a_paper_rounds_further(name: str) -> None:
    assert find_named(name).parameters == FARTHER[name][0]


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters_that_a_token_meets(name: str) -> None:
    model = find_named(name)
    assert isinstance(model, Architecture)
    assert model.active_parameters == pytest.approx(float(ACTIVE[name][0][:-1]) * UNITS["B"], rel=ROUNDED)


@pytest.mark.parametrize("name", WITHOUT_EMBEDDING)
def test_parameters_that_a_token_is_multiplied_with(name: str) -> None:
    model = find_named(name)
    assert isinstance(model, Architecture)
    met = model.active_parameters - model.embedding_parameters
    assert met == pytest.approx(float(WITHOUT_EMBEDDING[name][0][:-1]) * UNITS["B"], rel=ROUNDED)


@pytest.mark.parametrize("name", load_named())
def test_every_model_names_its_source(name: str) -> None:
    source = load_named()[name].source
    assert "arXiv:" in source or "/" in source


def test_windows_of_named_models() -> None:
    oss, mistral = find_named("gpt-oss-20b"), find_named("mistral-7b")
    assert isinstance(oss, Architecture)
    assert isinstance(mistral, Architecture)
    assert [layer.attention.window for layer in oss.layers] == [128, 0] * 12
    assert {layer.attention.window for layer in mistral.layers} == {4096}


def test_the_flops_of_residual_networks() -> None:
    """4.09 and 1.81 GFLOPs in torchvision's table of weights, which counts a multiplication and an addition as one."""
    large, small = find_named("resnet-50"), find_named("resnet-18")
    assert isinstance(large, Measured)
    assert isinstance(small, Measured)
    assert large.forward_flops_per_sample / 2e9 == pytest.approx(4.09, abs=0.005)
    assert small.forward_flops_per_sample / 2e9 == pytest.approx(1.81, abs=0.005)


def test_names_are_found_in_any_case() -> None:
    assert find_named("Llama3-8B") == find_named("llama3-8b")


def test_an_unknown_name_is_told_with_those_like_it() -> None:
    with pytest.raises(UserError) as told:
        find_named("llama3-7b")
    message = str(told.value)
    assert 'model: "llama3-7b" is no model that is known by name' in message
    assert "names like it: llama3-70b, " in message
    with pytest.raises(UserError, match=r"gpt2, gpt2-medium, .* and \d+ more"):
        find_named("?")


@pytest.mark.parametrize("name", load_named())
def test_parameters_are_those_of_the_library(name: str) -> None:
    assert find_named(name).parameters == count(build_on_meta(make_config(load_named()[name].config)))
