from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.data.chat import (
    ChatTemplate,
    encode_conversations,
    make_scalar,
    open_template,
    read_messages,
)
from shardway.data.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer
from shardway.errors import UserError

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is\nthe sky blue? "},
    {"role": "assistant", "content": "  Rayleigh scattering. 🌈"},
    {"role": "user", "content": "Thanks <|im_end|> é"},
    {"role": "assistant", "content": "You are welcome."},
]

MARKED = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<|start|>{{ message['role'] }}<|stop|>\n\n{{ message['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of a byte-level BPE tokenizer with special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("snapshot")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([turn["content"] for turn in TURNS] * 4, trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": PLAIN})
    )
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return open_tokenizer(str(folder))


def template_of(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate("test", source, tokenizer.names)


def spans_of(template: ChatTemplate, turns: list[dict[str, Any]]) -> list[str]:
    text, spans = template.render(read_messages(turns))
    return [text[start:stop] for start, stop in spans]


def refused(value: Any) -> str:
    with pytest.raises(ValueError) as caught:
        read_messages(value)
    return str(caught.value)


# --- which tokens count


def test_chatml_counts_what_the_assistant_writes_and_its_end_of_turn() -> None:
    template = open_template("chatml", ByteTokenizer())
    text, spans = template.render(read_messages(TURNS[:3]))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy is\nthe sky blue? <|im_end|>\n"
        "<|im_start|>assistant\n  Rayleigh scattering. 🌈<|im_end|>\n"
    )
    assert [text[start:stop] for start, stop in spans] == ["  Rayleigh scattering. 🌈<|im_end|>"]
    ((tokens, counted), size) = encode_conversations([read_messages(TURNS[:3])], template, ByteTokenizer())[0]
    assert bytes(tokens[counted].astype(np.uint8)) == "  Rayleigh scattering. 🌈<|im_end|>".encode()
    assert bytes(tokens.astype(np.uint8)).decode() == text
    assert size == counted.sum()


@pytest.mark.parametrize("source", [MARKED, PLAIN])
def test_a_template_with_marks_and_one_without_count_the_same(source: str, tokenizer: Tokenizer) -> None:
    assert spans_of(template_of(source, tokenizer), TURNS) == [
        "  Rayleigh scattering. 🌈<|im_end|>",
        "You are welcome.<|im_end|>",
    ]


def test_a_template_may_trim_what_it_gets(tokenizer: Tokenizer) -> None:
    template = template_of(LLAMA, tokenizer)
    assert spans_of(template, TURNS) == ["Rayleigh scattering. 🌈</s>", "You are welcome.</s>"]
    # Without an end-of-turn token the space belongs to the content.
    bare = template_of("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", tokenizer)
    # Where the template has no prompt for the assistant, the role belongs to nothing that counts.
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    assert spans_of(bare, turns) == ["a"]
    assert spans_of(bare, TURNS[:3])[0][:4] == "  Ra"
    prompted = template_of(bare.source + "{% if add_generation_prompt %}[assistant]{% endif %}", tokenizer)
    turns[1]["content"] = "b \n"
    assert spans_of(prompted, turns) == ["b \n"]


@pytest.mark.parametrize("content", ["", " ", "\n", "x"])
def test_turns_without_much_in_them(content: str, tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    for source in (MARKED, PLAIN):
        assert spans_of(template_of(source, tokenizer), turns) == [f"{content}<|im_end|>"]
    assert spans_of(template_of(MARKED, tokenizer), turns[:1]) == []


def test_a_template_that_hides_the_assistant_names_the_difference(tokenizer: Tokenizer) -> None:
    rewrites = template_of(
        "{% for m in messages %}{{ m.role[0] }}:"
        "{{ m.content if loop.last or m.role == 'user' else 'hidden' }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}",
        tokenizer,
    )
    with pytest.raises(ValueError) as caught:
        rewrites.render(read_messages(TURNS[1:]))
    assert str(caught.value) == (
        "the chat template test does not show what the assistant writes: turn 2 is another text where further turns "
        'follow it. They differ at character 26: " blue? ;a:  Rayleigh scatterin" and " blue? ;a:hidden;u:Thanks <|im"'
        ". Mark it in the template: {% generation %} before and {% endgeneration %} after it"
    )
    unasked = template_of("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}", tokenizer)
    with pytest.raises(ValueError, match="the prompt for turn 2 is not how the text with that turn begins"):
        unasked.render(read_messages(TURNS[1:3]))


def test_tokens_in_the_middle_of_a_letter_and_spaces_at_the_edges_count(tokenizer: Tokenizer) -> None:
    """The tokenizer's own offsets would leave out spaces, and an emoji is several tokens."""
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "\n\n 🌈\n"}]
    template = template_of(PLAIN.replace("<|im_end|>", ""), tokenizer)
    ((tokens, counted), size) = encode_conversations([read_messages(turns)], template, tokenizer)[0]
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer.inner.decode(tokens[counted].tolist()) == "\n\n 🌈\n\n"
    assert size == len("\n\n 🌈\n\n".encode())


@pytest.mark.parametrize("source", [MARKED, LLAMA.replace("{{ message['content'] | trim }}{{ eos_token }}", "@")])
def test_transformers_gives_the_same_tokens_and_masks(source: str, folder: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    turn = "{{ message['content'] | trim }}{{ eos_token }}"
    source = source.replace(
        "@", "{% if message['role'] == 'assistant' %}{% generation %}" + turn + "{% endgeneration %}{% else %}"
        f"{turn}{{% endif %}}"
    )  # fmt: skip
    assert isinstance(tokenizer, JsonTokenizer)
    # Its offsets include spaces, as those of published models do: in transformers a turn that begins with a space
    # which has no place in the offsets does not count at all.
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.inner, bos_token="<s>", eos_token="</s>", chat_template=source
    )
    for count in range(1, len(TURNS) + 1):
        turns = TURNS[:count]
        expected = theirs.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ((tokens, counted), _) = encode_conversations(
            [read_messages(turns)], template_of(source, tokenizer), tokenizer
        )[0]
        assert tokens.tolist() == expected["input_ids"]
        assert counted.astype(int).tolist() == expected["assistant_masks"]


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=12)), min_size=1, max_size=5))
def test_marks_change_no_token(folder: Path, turns: list[tuple[str, str]]) -> None:
    tokenizer = open_tokenizer(str(folder))
    assert isinstance(tokenizer, JsonTokenizer)
    messages = read_messages([{"role": role, "content": content} for role, content in turns])
    template = template_of(MARKED, tokenizer)
    text, spans = template.render(messages)
    ((tokens, counted), size) = encode_conversations([messages], template, tokenizer)[0]
    assert tokens.tolist() == tokenizer.inner.encode(text, add_special_tokens=False).ids
    kept = "".join(text[start:stop] for start, stop in spans)
    assert tokenizer.inner.decode(tokens[counted].tolist(), skip_special_tokens=False) == kept
    assert size == len(kept.encode())
    assert [text[start:stop] for start, stop in spans] == [
        f"{content}<|im_end|>" for role, content in turns if role == "assistant"
    ]


def test_a_sentencepiece_model_recognises_its_control_pieces(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "a.txt"),
        model_prefix=str(tmp_path / "tiny"),
        vocab_size=16,
        control_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    tokenizer = open_tokenizer(str(tmp_path / "tiny.model"))
    assert tokenizer.names == {"bos_token": "<s>", "eos_token": "</s>"}
    template = template_of("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", tokenizer)
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
    ((tokens, counted), _) = encode_conversations([read_messages(turns)], template, tokenizer)[0]
    assert tokens.tolist().count(2) == 2
    assert tokens[-1] == 2
    assert tokenizer.inner.decode(tokens[counted].tolist()) == "sat on"  # type: ignore[attr-defined]
    assert tokenizer.describe()["end"] == 2


def test_a_folder_of_a_model_has_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    tokenizer, named = open_tokenizer(str(folder)), open_tokenizer(str(folder / "tokenizer.json"))
    assert tokenizer.describe() == named.describe()
    assert tokenizer.describe()["name"] == "tokenizer.json"
    assert tokenizer.describe()["vocab"] == tokenizer.vocab == 320
    assert tokenizer.describe()["end"] == tokenizer.end == 1
    assert tokenizer.names == {"bos_token": "<s>", "eos_token": "</s>"}
    assert open_tokenizer("bytes").describe() == {"name": "bytes", "xxh3": "", "vocab": 256, "end": 0}
    with pytest.raises(UserError, match=r"is a folder without tokenizer\.json or tokenizer\.model"):
        open_tokenizer(str(tmp_path))


# --- what a record holds


def test_sharegpt_and_parts_of_text_are_read() -> None:
    shared = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    expected = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    assert read_messages(shared) == expected
    assert read_messages(json.dumps(shared)) == expected
    assert read_messages({"conversations": shared}) == expected
    assert read_messages(np.array(shared, object)) == expected
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert read_messages([{"role": "user", "content": parts, "tool_calls": None}])[0]["content"] == "abc"
    # A message keeps what a template may ask for, but for what is null.
    kept = read_messages([{"role": "assistant", "content": "x", "reasoning_content": "why", "name": None}])[0]
    assert kept == {"role": "assistant", "content": "x", "reasoning_content": "why"}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([], "is an empty conversation"),
        (None, "is not a conversation but nothing; allowed: a list of messages"),
        (3, "is not a conversation but a int; allowed: a list of messages"),
        ("{", "is not a conversation: its text is not JSON"),
        (["hi"], 'has a str as message 1; allowed: a mapping with "role" and "content"'),
        ([{"role": "user"}], 'has no "content" in message 1 (it has role)'),
        ([{"role": "user", "content": None}], 'has no "content" in message 1 (it has role, content)'),
        ([{"content": "x"}], 'has no "role" in message 1 (it has content)'),
        ([{"from": "gpt"}], 'has no "content" in message 1 (it has from)'),
        ([{}], 'has no "role" in message 1 (it has nothing)'),
        ([{"role": 1, "content": "x"}], 'has a int as "role" of message 1; allowed: a text'),
        ([{"role": "user", "content": 5}], 'has a int as "content" of message 1; allowed: a text'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            'has a part of type "image_url" in message 1; allowed: parts of text, no images',
        ),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}],
            "calls tools in message 2, which is not supported; drop such records first",
        ),
        (
            [{"role": "tool", "content": "x"}],
            'has the role "tool" in message 1; tools are not supported, drop such records first',
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": ["f"]},
            "names tools, which are not supported; drop them from the records first",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(value: Any, sentence: str) -> None:
    assert refused(value).startswith(sentence)


def test_lone_surrogates_cannot_pass_for_marks() -> None:
    forged = "a\udc80b\udc81c"
    assert make_scalar(forged) == "a�b�c"
    assert make_scalar("\ud83d\ude00") == "😀"
    assert make_scalar("\ud83d") == "�"
    template = open_template("chatml", ByteTokenizer())
    turns = [{"role": "user", "content": forged}, {"role": "assistant", "content": "yes"}]
    text, spans = template.render(read_messages(turns))
    assert [text[start:stop] for start, stop in spans] == ["yes<|im_end|>"]
    assert "a�b�c" in text


# --- templates


def test_a_template_comes_from_a_file_or_from_a_config(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(PLAIN)
    from_file = open_template(str(tmp_path / "t.jinja"), tokenizer)
    from_config = open_template(str(folder / "tokenizer_config.json"), tokenizer)
    assert from_file.source == from_config.source == PLAIN
    assert from_file.fingerprint == from_config.fingerprint
    assert from_file.fingerprint != open_template("chatml", tokenizer).fingerprint
    (tmp_path / "named.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": LLAMA}]}))
    assert open_template(str(tmp_path / "named.json"), tokenizer).source == LLAMA
    assert from_file.render(read_messages(TURNS))[0].startswith("<s><|im_start|>system\n")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("gone.jinja", None, 'does not exist\n      allowed: "chatml", a file with a Jinja template, or a'),
        ("t.jinja", b"", "is empty"),
        ("t.jinja", b"\xff\xfe", "is not text: invalid start byte at byte 0"),
        ("t.jinja", b"a\n{% for %}", "is not a Jinja template: line 2: "),
        ("t.jinja", b"{% generation %}", "is not a Jinja template: line 1: "),
        ("t.json", b"{", "is not JSON: "),
        ("t.json", b"{}", 'has no "chat_template" that is a text\n      to do: many models keep it in chat_template'),
    ],
)
def test_what_is_no_template_is_refused(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_template(str(tmp_path / name), ByteTokenizer())
    assert str(caught.value).startswith(f'1 problem in the data\n  data.chat_template: "{tmp_path / name}" {sentence}')


def test_a_folder_is_no_template_but_one_may_be_in_it(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_template(str(folder), ByteTokenizer())
    assert f"to do: name {folder / 'tokenizer_config.json'}" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_fails_is_named(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match="the chat template test refuses it: ") as caught:
        ChatTemplate("test", source).render(read_messages(TURNS[:1]))
    assert reason in str(caught.value)


def test_a_template_has_what_templates_of_transformers_have() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') }}"
    )
    assert ChatTemplate("test", source).render(read_messages(TURNS[:2]))[0] == '1{"a": "<é>"}2024'
    template = ChatTemplate("test", source)
    assert dataclasses.replace(template, tokens={"bos_token": "x"}).fingerprint != template.fingerprint
