"""A conversation: what is part of it, how it is kept within the positions, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardway.data.chat import CHATML, open_template
from shardway.data.tokenizers import ByteTokenizer
from shardway.errors import UserError
from shardway.infer.chat import Conversation, read_conversation
from shardway.infer.tokenizer import DataTokenizer

TOKENIZER = DataTokenizer(ByteTokenizer(), open_template(CHATML, ByteTokenizer()))


def make_long(exchanges: int) -> Conversation:
    conversation = Conversation("be brief")
    for number in range(exchanges):
        conversation.answer(f"question {number}", f"answer {number}")
    return conversation


def test_all_of_it_is_given_to_the_model() -> None:
    prompt, dropped = make_long(2).make_prompt(TOKENIZER, "now", None)
    text = bytes(prompt.ids).decode()
    order = ["be brief", "question 0", "answer 0", "question 1", "answer 1", "now"]
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)
    assert text.endswith("<|im_start|>assistant\n")
    assert dropped == 0


def test_the_oldest_exchanges_are_left_out_and_the_system_prompt_is_not() -> None:
    conversation = make_long(6)
    whole = len(conversation.make_prompt(TOKENIZER, "now", None)[0].ids)
    prompt, dropped = conversation.make_prompt(TOKENIZER, "now", whole - 50)
    assert dropped == 6 - len(conversation.turns) // 2 > 0
    text = bytes(prompt.ids).decode()
    assert len(prompt.ids) + 16 <= whole - 50
    assert "be brief" in text
    assert "question 0" not in text
    assert "question 5" in text


def test_a_turn_that_does_not_fit_changes_nothing() -> None:
    conversation = make_long(3)
    before = list(conversation.turns)
    with pytest.raises(UserError, match=r"has \d+ tokens with all that stands around it, and the model has 60"):
        conversation.make_prompt(TOKENIZER, "long " * 30, 60)
    assert conversation.turns == before


def test_an_exchange_is_taken_back() -> None:
    conversation = make_long(2)
    assert conversation.undo()
    assert [each["content"] for each in conversation.turns] == ["question 0", "answer 0"]
    conversation.reset()
    assert conversation.list_messages() == [{"role": "system", "content": "be brief"}]
    assert not conversation.undo()


def test_it_is_saved_as_a_line_of_a_data_set(tmp_path: Path) -> None:
    conversation = make_long(2)
    conversation.save(tmp_path / "c.jsonl")
    (line,) = (tmp_path / "c.jsonl").read_text().splitlines()
    assert json.loads(line) == {"messages": conversation.list_messages()}
    assert read_conversation(tmp_path / "c.jsonl") == conversation
    with pytest.raises(UserError, match="exists, and is not overwritten"):
        conversation.save(tmp_path / "c.jsonl")
    with pytest.raises(UserError, match="cannot be written"):
        conversation.save(tmp_path / "no" / "c.jsonl")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("no JSON", "is not a conversation"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "has turns of user"),
        ('{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]}', "in exchange"),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(UserError, match=what):
        read_conversation(tmp_path / "c.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        read_conversation(tmp_path / "none.jsonl")
