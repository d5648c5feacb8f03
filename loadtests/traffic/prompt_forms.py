"""What the prompts of a schedule are made of: token ids, text, or chat messages.

Each form says how long its prompts are, how far they can be cut, and which columns a schedule needs for them.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from loadtests.traffic.lengths import IntArray
from loadtests.traffic.prompts import PromptKind, PromptText
from loadtests.traffic.sessions import Sessions


class PromptForm:
    """Token ids, exactly as many as the context has. `tokens` are those of each prompt, shape (n,) as `sessions`."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.tokens = sessions.context

    def smallest(self, rows: IntArray) -> IntArray:
        """The fewest tokens that the prompts of `rows` can be cut to."""
        return np.ones(len(rows), dtype=np.int64)

    def columns(self, rows: IntArray, tokens: IntArray) -> dict[str, Any]:
        """The columns of `schedule.PROMPTS` that the prompts of `rows` need, cut to `tokens`."""
        del rows, tokens
        return {}


class TextPrompts(PromptForm):
    """Plain text, with the tokens that the tokenizer adds to each."""

    def __init__(self, sessions: Sessions, text: PromptText) -> None:
        super().__init__(sessions)
        self._least = text.added + 1
        self.tokens = np.maximum(sessions.context, self._least)

    def smallest(self, rows: IntArray) -> IntArray:
        return np.full(len(rows), self._least, dtype=np.int64)


class ChatPrompts(PromptForm):
    """Messages in the model's chat template: the turns before, their answers, and the turn's own input."""

    def __init__(self, sessions: Sessions, text: PromptText, *, max_new_tokens: int) -> None:
        super().__init__(sessions)
        turn = sessions.turns.turn
        overhead = [text.overhead(2 * number + 1) for number in range(int(turn.max(initial=0)) + 1)]
        self._overhead = np.array(overhead, dtype=np.int64)[turn]
        self._most_answered = max_new_tokens
        self.tokens = sessions.context + self._overhead

    def smallest(self, rows: IntArray) -> IntArray:
        """The template and one token of each message."""
        return self._overhead[rows] + 2 * self.sessions.turns.turn[rows] + 1

    def columns(self, rows: IntArray, tokens: IntArray) -> dict[str, Any]:
        """ "parts": content tokens of each message; what is too much is taken from the last messages."""
        inputs = self.sessions.own.input_tokens
        answers = np.minimum(self.sessions.own.output_tokens, self._most_answered)
        sizes = (tokens - self._overhead[rows]).tolist()
        chats = []
        for row, turn, size in zip(rows.tolist(), self.sessions.turns.turn[rows].tolist(), sizes, strict=True):
            before = chain.from_iterable(
                zip(inputs[row - turn : row].tolist(), answers[row - turn : row].tolist(), strict=True)
            )
            parts = [*before, int(inputs[row])]
            excess = sum(parts) - size
            for place in range(len(parts) - 1, -1, -1):
                taken = min(excess, parts[place] - 1)
                parts[place] -= taken
                excess -= taken
            chats.append(parts)
        return {"parts": pa.array(chats, pa.list_(pa.int32()))}


def prompt_form(kind: PromptKind, sessions: Sessions, text: PromptText | None, *, max_new_tokens: int) -> PromptForm:
    """The prompts of `sessions` in the form that the traffic has."""
    if text is None or kind == "ids":
        return PromptForm(sessions)
    if kind == "chat":
        return ChatPrompts(sessions, text, max_new_tokens=max_new_tokens)
    return TextPrompts(sessions, text)


def template_facts(form: PromptForm, rows: IntArray, planned: IntArray, *, limit: int) -> dict[str, Any]:
    """What the chat template adds to the prompts of `rows`, and how many of all `planned` only it puts over `limit`."""
    context = form.sessions.context
    added = (form.tokens - context)[rows]
    over = (form.tokens[planned] > limit) & (context[planned] <= limit)
    return {
        "least": int(added.min()),
        "most": int(added.max()),
        "mean": float(added.mean()),
        "over_limit": int(over.sum()),
    }
