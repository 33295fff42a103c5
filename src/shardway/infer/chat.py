"""A conversation with a model: its turns, how it is kept within the model's positions, its commands and its file.

Invariants:
- A turn is part of the history only with its answer; one that was refused leaves it as it was.
- What does not fit is dropped from the oldest exchange on, the system prompt never, and how much is stated.
- A saved conversation is a line that `shardway generate --file` reads, and a sample of a chat data set.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from shardway.data.chat import ASSISTANT, read_messages
from shardway.errors import Problem, UserError, check_no_problems
from shardway.infer.inputs import COMMAND_LINE, Prompt, read_lines
from shardway.infer.tokenizer import Message, ModelTokenizer
from shardway.rundir.file_io import write_new

LEAST_ROOM_TOKENS = 16
"""Room that is kept for an answer, where the model has so many positions."""

COMMANDS = {
    "/help": "list the commands",
    "/reset": "forget the conversation, but not the system prompt",
    "/system TEXT": "set the system prompt and begin anew; without TEXT, none",
    "/undo": "take back the last exchange",
    "/save FILE": "write the conversation as a line of JSON; the file must not exist",
    "/quit": "end, as the end of the input does",
}
"""What may be written instead of a turn, and what it does."""


@dataclass
class Conversation:
    """The turns so far, answered ones alone, and the system prompt ("": none)."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def list_messages(self, text: str | None = None) -> list[Message]:
        """All messages, and a new one of the user."""
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        new: list[Message] = [] if text is None else [{"role": "user", "content": text}]
        return [*first, *self.turns, *new]

    def answer(self, text: str, reply: str) -> None:
        """Add an exchange."""
        self.turns += [{"role": "user", "content": text}, {"role": ASSISTANT, "content": reply}]

    def reset(self) -> None:
        self.turns.clear()

    def undo(self) -> bool:
        """Take back the last exchange; whether there was one."""
        had = bool(self.turns)
        del self.turns[-2:]
        return had

    def make_prompt(self, tokenizer: ModelTokenizer, text: str, positions: int | None) -> tuple[Prompt, int]:
        """The prompt for the answer to `text`, and how many exchanges were dropped for it. Raises UserError if the turn
        alone is too long, or the template refuses it."""
        dropped: list[Message] = []
        while True:
            messages = self.list_messages(text)
            ids = tokenizer.render_chat(messages)
            if positions is None or len(ids) + min(LEAST_ROOM_TOKENS, positions // 4) <= positions:
                return Prompt(tuple(ids), {"messages": messages}), len(dropped) // 2
            if not self.turns:
                self.turns = dropped
                raise UserError(
                    f"this turn has {len(ids)} tokens with all that stands around it, and the model has {positions} "
                    "positions.\n  To do: write less; the conversation is as it was."
                )
            dropped += self.turns[:2]
            del self.turns[:2]

    def save(self, path: Path) -> None:
        """Write it to a new file. Raises UserError, also where there is nothing yet."""
        if not self.list_messages():
            raise UserError("there is no exchange yet that could be saved.")
        try:
            text = json.dumps({"messages": self.list_messages()}, ensure_ascii=False) + "\n"
            is_new = not os.path.lexists(path) and write_new(path, text)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.\n  To do: name another file.") from None
        if not is_new:
            raise UserError(f"{path} exists, and is not overwritten.\n  To do: name another file.")


def read_conversation(path: Path) -> Conversation:
    """The conversation of a file that `save` wrote, its last message an answer. Raises UserError about --history."""
    remedy = "name a file that /save has written"
    lines = read_lines("--history", path, remedy)
    what, allowed, messages = "", "", list[Message]()
    try:
        messages = list(read_messages("\n".join(line for _, line in lines)))
    except ValueError as error:
        what = f"{path} {error}"
    system = ""
    if messages and messages[0]["role"] == "system":
        system, messages = str(messages[0]["content"]), messages[1:]
    roles = [str(each["role"]) for each in messages]
    if not what and roles != ["user", ASSISTANT] * (len(roles) // 2):
        what = f"{path} has turns of {', '.join(roles)}"
        allowed = "turns of user and assistant in exchange, the last one the assistant's"
    if what:
        problem = Problem("--history", what, COMMAND_LINE, allowed, "" if allowed else remedy)
        check_no_problems("the command line", [problem])
    return Conversation(system, messages)
