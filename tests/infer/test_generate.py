"""Tokens of batches, of caches and of draws are those of transformers; text comes whole, and stops where it should."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import (
    FAMILIES,
    GREEDY,
    continue_reference,
    list_prompts,
    save_families,
    save_tokenizer,
)

from pool import ranks
from runs import pool_ranks
from shardway.data.chat import CHATML, open_template
from shardway.data.tokenizers import ByteTokenizer
from shardway.errors import UserError
from shardway.infer.generate import Generator, Sampling, need_tokenizer
from shardway.infer.inputs import Prompt, make_prompt, read_prompts
from shardway.infer.model import ModelRequest, OpenedModel, open_model
from shardway.infer.tokenizer import DataTokenizer, Pieces, open_library_tokenizer
from tiny_hf import load_reference


@pytest.fixture(name="folders", scope="module")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family; the Llama has a tokenizer."""
    found = save_families(tmp_path_factory.mktemp("models"), vocab_size=260)
    save_tokenizer(found["llama"])
    return found


@pytest.fixture(name="llama", scope="module")
def _llama(folders: dict[str, Path]) -> OpenedModel:
    return open_model(ModelRequest(str(folders["llama"]), device="cpu"))


UNEVEN = ((5, 6, 7, 8), (9,), (40, 3, 3, 17, 21, 30, 11))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_gives_each_prompt_its_own_tokens(folders: dict[str, Path], name: str) -> None:
    opened = open_model(ModelRequest(str(folders[name]), device="cpu"))
    expected = [continue_reference(opened.model, ids) for ids in UNEVEN]
    for cache in ("dynamic", "static"):
        made = Generator(opened, cache=cache).generate(list_prompts(UNEVEN), GREEDY)
        assert [each.tokens for each in made] == expected, cache
        assert [each.prompt_tokens for each in made] == [4, 1, 7]


# --- draws


def test_draws_are_those_of_the_library(llama: OpenedModel) -> None:
    drawn = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3, max_tokens=12)
    before = torch.random.get_rng_state()
    (made,) = Generator(llama).generate(list_prompts([(5, 6)]), drawn)
    assert torch.equal(torch.random.get_rng_state(), before), "the draws of a caller are disturbed"
    with torch.random.fork_rng():
        torch.manual_seed(3)
        tokens = torch.tensor([[5, 6]])
        options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "max_new_tokens": 12}
        mask = torch.ones_like(tokens)
        expected = llama.model.generate(tokens, attention_mask=mask, pad_token_id=0, eos_token_id=None, **options)
    assert made.tokens == tuple(expected[0, 2 : 2 + len(made.tokens)].tolist())


def test_draws_follow_from_the_seed(llama: OpenedModel) -> None:
    def draw(**options: float) -> tuple[int, ...]:
        return Generator(llama).generate(list_prompts([(5, 6)]), Sampling(max_tokens=12, **options))[0].tokens  # type: ignore[arg-type]

    assert draw(temperature=1.5, seed=1) == draw(temperature=1.5, seed=1) != draw(temperature=1.5, seed=2)
    assert draw(temperature=1.5, top_k=1, seed=1) == draw()
    assert draw(temperature=1.5, top_p=1e-9, seed=2) == draw()


# --- text


@given(st.text(max_size=20))
def test_text_comes_in_whole_characters(text: str) -> None:
    """Bytes are tokens: a character of several is shown when its last one is there."""
    if "\x00" in text:  # the token that ends a document
        return
    tokenizer = DataTokenizer(ByteTokenizer(), None)
    pieces = Pieces(tokenizer)
    shown = [pieces.add([token]) for token in tokenizer.encode(text)]
    assert "".join(shown) + pieces.finish() == text == pieces.text
    assert all(len(piece) <= 1 or "\ufffd" in text for piece in shown)


def test_half_a_character_at_the_end_is_shown_as_one_that_is_not_known() -> None:
    pieces = Pieces(DataTokenizer(ByteTokenizer(), None))
    assert [pieces.add([token]) for token in "a€".encode()[:-1]] == ["a", "", ""]
    assert pieces.finish() == "\ufffd"


def generate_text(opened: OpenedModel, *stop: str, count: int = 30) -> tuple[str, list[str], str, int]:
    """The text that follows "abc", its pieces as they came, why it ended, and how many tokens it has."""
    came: list[str] = []
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=count, stop=stop)
    (made,) = Generator(opened).generate([make_prompt("abc").encode(need_tokenizer(opened))], sampling, came.append)
    return made.text, came, made.finish, len(made.tokens)


def test_text_is_passed_on_as_it_comes(llama: OpenedModel) -> None:
    text, came, finish, tokens = generate_text(llama)
    assert "".join(came) == text
    assert (finish, tokens) == ("length", 30)
    assert len(came) > 5


def test_nothing_of_a_stop_text_is_shown(llama: OpenedModel) -> None:
    whole = generate_text(llama)[0]
    for start, size in ((4, 1), (7, 3), (9, 2)):
        stop = whole[start : start + size]
        text, came, finish, tokens = generate_text(llama, "never in it at all", stop)
        assert text == "".join(came) == whole[: whole.index(stop)]
        assert finish == "stop"
        assert tokens < 30
    kept_back = whole[-2:] + "!" * 5  # a stop text of which only the beginning comes
    assert "".join(generate_text(llama, kept_back)[1]) == whole


def test_an_answer_can_be_broken_off(llama: OpenedModel) -> None:
    asked: list[bool] = []

    def is_interrupted() -> bool:
        asked.append(True)
        return len(asked) == 3

    (made,) = Generator(llama).generate(list_prompts([(5, 6)]), Sampling(max_tokens=20), None, is_interrupted)
    assert (made.finish, len(made.tokens)) == ("interrupted", 3)


@ranks(2)
def test_ranks_break_off_together(rank: int, folders: dict[str, Path]) -> None:
    on, asked = pool_ranks(), []
    opened = open_model(ModelRequest(str(folders["qwen3"])), on)

    def is_interrupted() -> bool:
        asked.append(True)
        return rank == 1 and len(asked) == 4

    (made,) = Generator(opened, on).generate(list_prompts([(5, 6)]), Sampling(max_tokens=20), None, is_interrupted)
    assert (made.finish, len(made.tokens)) == ("interrupted", 4)


# --- positions and prompts


def test_an_answer_ends_with_the_positions(llama: OpenedModel) -> None:
    assert llama.positions == 64
    prompts = list_prompts([[5] * 60])
    (made,) = Generator(llama).generate(prompts, Sampling(temperature=1.0, seed=2, max_tokens=100))
    assert (len(made.tokens), made.finish) == (4, "length")


@pytest.mark.parametrize(
    ("ids", "what"),
    [([5] * 64, "has 64 tokens, and .* has 64 positions"), ([], "is empty"), ([260], "a vocabulary of 260")],
)
def test_a_prompt_that_does_not_fit_is_refused(llama: OpenedModel, ids: Sequence[int], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Generator(llama).generate([Prompt((5,)), Prompt(tuple(ids))], GREEDY)


def test_prompts_of_a_file(llama: OpenedModel, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo ä\n", encoding="utf-8")
    assert [each.given for each in read_prompts(lines)] == [{"prompt": "one"}, {"prompt": "two ä"}]
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "one", "id": 7}\n{"prompt": 3}\nno\n{"text": "x"}\n')
    with pytest.raises(UserError) as refused:
        read_prompts(objects)
    assert [each.where for each in refused.value.problems] == ["line 2", "line 3", "line 4"]
    objects.write_text('{"prompt": "one", "id": 7}\n')
    (found,) = read_prompts(objects)
    assert found.given == {"prompt": "one", "id": 7}
    tokenizer = need_tokenizer(llama)
    assert found.encode(tokenizer).ids == make_prompt("one").encode(tokenizer).ids == tuple(tokenizer.encode("one"))
    assert found.encode(tokenizer).line == 1
    for content, what in (("", "is empty"), ("\udcff", "is not text")):
        lines.write_text(content, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(UserError, match=what):
            read_prompts(lines)


# --- conversations as tokens


def test_a_conversation_is_rendered_as_the_library_does(folders: dict[str, Path], tmp_path: Path) -> None:
    template = (
        open_template(CHATML, ByteTokenizer())
        .source.replace("{%- generation -%}", "")
        .replace("{%- endgeneration -%}", "")
    )
    save_tokenizer(tmp_path, template)
    tokenizer = open_library_tokenizer(tmp_path, trust_remote_code=False)
    assert tokenizer is not None
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hé"}]
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == tokenizer.encode(text)
    assert tokenizer.encode("<|im_end|>") == sorted(tokenizer.ends) == [2]
    own = DataTokenizer(ByteTokenizer(), open_template(CHATML, ByteTokenizer()))
    assert bytes(own.render_chat(messages)).decode() == text
    assert own.stops == ("<|im_end|>",)
    plain = DataTokenizer(ByteTokenizer(), None)
    with pytest.raises(UserError, match="without a chat template"):
        plain.render_chat(messages)
    with pytest.raises(UserError, match="has no chat template"):
        open_library_tokenizer(folders["llama"], trust_remote_code=False).render_chat(messages)  # type: ignore[union-attr]


def test_a_conversation_in_a_file_is_a_prompt(llama: OpenedModel, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    opened = open_model(ModelRequest(llama.name, device="cpu", template=CHATML))
    assert opened.tokenizer is not None
    found = read_prompts(path)[0].encode(opened.tokenizer)
    assert list(found.ids) == opened.tokenizer.render_chat(messages)
    assert load_reference(Path(llama.name)).config.vocab_size > max(found.ids)
