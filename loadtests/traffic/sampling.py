"""Requests as they are drawn for a trial, before limits: whose turn, how long, and of what their prompts are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loadtests.traffic.conversations import Conversation
from loadtests.traffic.lengths import (
    FITS,
    FitName,
    Lengths,
    Turns,
    fitted_lengths,
    growing_context,
    resampled_rows,
    session_turns,
    turns_of,
)
from loadtests.traffic.prompts import Message, PromptText
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source
from loadtests.traffic.traces import BLOCK_TOKENS, Trace

IntArray = npt.NDArray[np.int64]

_COUNTED_BLOCKS = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Every request drawn, session by session and turn by turn; arrays have shape (n,).

    `own` are a turn's input and answer; `content` is the whole context up to it, and `total` the prompt's tokens with
    what a tokenizer or a chat template adds to it.
    """

    turns: Turns
    own: Lengths
    content: IntArray
    total: IntArray
    trace_row: IntArray | None  # the row of the trace that each request is
    written: tuple[tuple[int, ...], ...] | None  # the prompts of conversations, when these are sent as written


def draw(
    config: TrafficConfig,
    source: Source,
    starts_ns: IntArray,
    window: slice,
    *,
    max_new_tokens: int,
    rng: Mapping[str, np.random.Generator],
) -> Drawn:
    """The requests of the sessions that start at `starts_ns`; `window` are the trace's rows when it is replayed."""
    trace_row: IntArray | None = None
    chosen: list[Conversation] | None = None
    if source.conversations is not None and source.text is not None:
        kept = source.conversations.kept
        chosen = [kept[index] for index in rng["lengths"].integers(0, len(kept), size=len(starts_ns)).tolist()]
        counts = [1 if config.arrivals == "closed" else len(conversation.exchanges) for conversation in chosen]
        turns = turns_of(
            starts_ns, np.array(counts, dtype=np.int64), think_time_s=config.think_time_s, think_rng=rng["think"]
        )
        own = _conversation_lengths(chosen, counts, source.text)
    else:
        turns = session_turns(
            starts_ns,
            turns_mean=config.turns_mean,
            think_time_s=config.think_time_s,
            turns_rng=rng["turns"],
            think_rng=rng["think"],
        )
        own, trace_row = _lengths(config, source.trace, window, len(turns.session), rng["lengths"])
    own = own.scaled(config.length_scale)
    content = growing_context(own, turns, max_new_tokens=max_new_tokens).input_tokens
    total, written = content, None
    if source.text is not None and config.prompts != "ids":
        if chosen is not None:
            written = _written(chosen, turns, source.text, chat=config.prompts == "chat")
            total = np.array([len(ids) for ids in written], dtype=np.int64)
        elif config.prompts == "chat":
            overhead = [source.text.overhead(2 * turn + 1) for turn in range(int(turns.turn.max(initial=0)) + 1)]
            total = content + np.array(overhead, dtype=np.int64)[turns.turn]
        else:
            total = np.maximum(content, source.text.added + 1)
    return Drawn(turns=turns, own=own, content=content, total=total, trace_row=trace_row, written=written)


def _lengths(
    config: TrafficConfig, trace: Trace | None, window: slice, count: int, rng: np.random.Generator
) -> tuple[Lengths, IntArray | None]:
    """`count` rows of input and output lengths, and which rows of the trace they are if they are any."""
    if config.workload == "trace" and trace is not None:
        if config.arrivals == "trace":
            rows = np.arange(len(trace), dtype=np.int64)[window]
        else:
            rows = resampled_rows(len(trace), count, rng=rng)
        lengths = Lengths(
            input_tokens=trace.input_tokens[rows].astype(np.int64),
            output_tokens=trace.output_tokens[rows].astype(np.int64),
        )
        return lengths, rows
    fit: FitName = next((name for name in FITS if name == config.workload), "conversation")
    return fitted_lengths(fit, count, rng=rng), None


# --- Conversations ----------------------------------------------------------------------------------------------------


def _conversation_lengths(chosen: Sequence[Conversation], counts: Sequence[int], text: PromptText) -> Lengths:
    known: dict[int, list[tuple[int, int]]] = {}
    inputs: list[int] = []
    outputs: list[int] = []
    for conversation, count in zip(chosen, counts, strict=True):
        sizes = known.setdefault(id(conversation), [])
        for exchange in conversation.exchanges[len(sizes) : count]:
            system = conversation.system if not sizes else ""
            asked = len(text.encode_bare(system + exchange.asked))
            sizes.append((max(1, asked), max(1, len(text.encode_bare(exchange.answered)))))
        inputs += [size[0] for size in sizes[:count]]
        outputs += [size[1] for size in sizes[:count]]
    return Lengths(input_tokens=np.array(inputs, dtype=np.int64), output_tokens=np.array(outputs, dtype=np.int64))


def _written(
    chosen: Sequence[Conversation], turns: Turns, text: PromptText, *, chat: bool
) -> tuple[tuple[int, ...], ...]:
    """The ids of each turn's prompt: all that was said before, as it was written, and the question."""
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    prompts = []
    for session, turn in zip(turns.session.tolist(), turns.turn.tolist(), strict=True):
        conversation = chosen[session]
        key = (id(conversation), turn)
        if key not in known:
            messages = _messages(conversation, turn)
            plain = "\n".join(message.content for message in messages)
            known[key] = tuple(text.chat_of(messages) if chat else text.encode(plain))
        prompts.append(known[key])
    return tuple(prompts)


def _messages(conversation: Conversation, turn: int) -> list[Message]:
    messages = [Message("system", conversation.system)] if conversation.system else []
    for exchange in conversation.exchanges[:turn]:
        messages += [Message("user", exchange.asked), Message("assistant", exchange.answered)]
    return [*messages, Message("user", conversation.exchanges[turn].asked)]


# --- Columns and facts ------------------------------------------------------------------------------------------------


def smallest(config: TrafficConfig, drawn: Drawn, text: PromptText | None, rows: IntArray) -> IntArray:
    """The fewest tokens that the prompts of `rows` can be cut to: the template and one token of each message."""
    if config.prompts == "chat" and drawn.written is None:
        return (drawn.total - drawn.content)[rows] + 2 * drawn.turns.turn[rows] + 1
    if config.prompts == "text" and drawn.written is None and text is not None:
        return np.full(len(rows), text.added + 1, dtype=np.int64)
    return np.ones(len(rows), dtype=np.int64)


def prompt_columns(
    config: TrafficConfig,
    source: Source,
    drawn: Drawn,
    rows: IntArray,
    prompt_tokens: IntArray,
    *,
    max_new_tokens: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """The columns of `schedule.PROMPTS` that the prompts of `rows` need, cut to `prompt_tokens`."""
    if drawn.written is not None:
        cut = [drawn.written[row][:size] for row, size in zip(rows.tolist(), prompt_tokens.tolist(), strict=True)]
        return {"token_ids": pa.array(cut, pa.list_(pa.int32()))}
    columns: dict[str, Any] = {}
    if shares(config, source.trace) and drawn.trace_row is not None and source.trace is not None:
        trace = source.trace
        ids = [trace.blocks(row) for row in drawn.trace_row[rows].tolist()]
        flat = np.concatenate(ids) if ids else np.zeros(0, dtype=np.int64)
        ends = np.cumsum([0, *(len(own) for own in ids)])
        columns["blocks"] = pa.ListArray.from_arrays(
            pa.array(ends.astype(np.int32)), pa.array(_mixed(flat, int(rng.integers(0, 2**63 - 1))))
        )
        columns["block_tokens"] = pa.array(np.full(len(rows), BLOCK_TOKENS * config.length_scale))
    if config.prompts == "chat":
        wanted = prompt_tokens - (drawn.total - drawn.content)[rows]
        columns["parts"] = pa.array(_parts(drawn, rows, wanted, max_new_tokens), pa.list_(pa.int32()))
    return columns


def _parts(drawn: Drawn, rows: IntArray, wanted: IntArray, max_new_tokens: int) -> list[list[int]]:
    """Content tokens of each message of the chats of `rows`; what is too much is taken from the last messages."""
    asked = drawn.own.input_tokens
    answered = np.minimum(drawn.own.output_tokens, max_new_tokens)
    found = []
    for row, turn, size in zip(rows.tolist(), drawn.turns.turn[rows].tolist(), wanted.tolist(), strict=True):
        before = chain.from_iterable(
            zip(asked[row - turn : row].tolist(), answered[row - turn : row].tolist(), strict=True)
        )
        parts = [*before, int(asked[row])]
        excess = sum(parts) - size
        for place in range(len(parts) - 1, -1, -1):
            taken = min(excess, parts[place] - 1)
            parts[place] -= taken
            excess -= taken
        found.append(parts)
    return found


def shares(config: TrafficConfig, trace: Trace | None) -> bool:
    """Whether prompts share the blocks that the trace says; turns of made-up sessions share their context instead."""
    return trace is not None and trace.shares_prefixes and config.workload == "trace" and config.turns_mean == 1


def _mixed(ids: IntArray, salt: int) -> IntArray:
    """A seed for each block id: equal for equal ids, from 0 to 2^63 - 1 (the finaliser of SplitMix64)."""
    words = ids.astype(np.uint64) ^ np.uint64(salt)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    seeds: IntArray = ((words ^ (words >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
    return seeds


def source_facts(source: Source) -> dict[str, Any]:
    """What was read of the files behind the traffic."""
    facts: dict[str, Any] = {}
    if source.trace is not None:
        trace = source.trace
        facts["trace"] = {"format": trace.format, "rows_read": trace.rows_read, "rows_kept": len(trace)}
    if source.conversations is not None:
        talks = source.conversations
        facts["conversations"] = {"read": talks.read, "unusable": talks.unusable, "kept": len(talks.kept)}
    return facts


def template_facts(
    drawn: Drawn, rows: IntArray, planned: IntArray, *, limit: int, edges: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """What the chat template adds to the prompts of `rows`, and how many of all `planned` it moves where.

    "moved" counts by arm the prompts whose padded length changes; "over_limit" those that only the template puts over
    the model's limit.
    """
    added = (drawn.total - drawn.content)[rows]
    over = (drawn.total[planned] > limit) & (drawn.content[planned] <= limit)
    return {
        "least": int(added.min()),
        "most": int(added.max()),
        "mean": float(added.mean()),
        "prompts": len(rows),
        "over_limit": int(over.sum()),
        "moved": {
            arm: int((_bucket(drawn.content[rows], ladder) != _bucket(drawn.total[rows], ladder)).sum())
            for arm, ladder in edges.items()
            if len(ladder) > 1
        },
    }


def _bucket(lengths: IntArray, ladder: Sequence[int]) -> IntArray:
    """Which step of the ladder each prompt takes."""
    bucket: IntArray = np.searchsorted(np.array(ladder), lengths, side="left")
    return bucket


def shared_facts(columns: Mapping[str, Any], prompt_tokens: IntArray) -> dict[str, Any]:
    """How much of the prompts stands in blocks that an earlier prompt began with; empty where none share blocks."""
    if "blocks" not in columns or len(columns["blocks"].flatten()) > _COUNTED_BLOCKS:
        return {}
    block_tokens = float(columns["block_tokens"][0].as_py()) if len(prompt_tokens) else 0.0
    seen: set[int] = set()
    shared = 0.0
    for blocks, size in zip(columns["blocks"].to_pylist(), prompt_tokens.tolist(), strict=True):
        # A prompt that was cut holds fewer blocks than the trace says.
        held = blocks[: max(0, -(-size // max(1, round(block_tokens))))]
        known = next((index for index, block in enumerate(held) if block not in seen), len(held))
        shared += min(known * block_tokens, size)
        seen.update(held)
    return {
        "block_tokens": block_tokens,
        "blocks": len(seen),
        "shared_pct": 100.0 * shared / float(prompt_tokens.sum()),
    }
