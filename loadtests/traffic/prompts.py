"""What a prompt of a planned length is made of: random ids, or text that the model's tokenizer counts exactly.

Text is put together of pieces that are one token each whatever stands beside them: words after a space, as byte-level
and SentencePiece vocabularies hold them, or single letters where every letter is a token. That this is so is tried
out when a tokenizer is loaded, and a tokenizer for which it is not is refused; making a prompt then costs a look-up,
and not a run of the tokenizer inside the load generator.

The tokenizer and the chat template are read from `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`
with the `tokenizers` package and Jinja, so that the load generator needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from string import ascii_lowercase
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from loadtests.traffic.prompt_words import Words, prompt_words, token_ids
from servers.complaint import ConfigError

if TYPE_CHECKING:
    from loadtests.traffic.schedule import PlannedRequest

Encode = Callable[[str], list[int]]
PromptKind = Literal["ids", "text", "chat"]

BYTE_START, BYTE_OFFSET = 1, 3  # of the byte tokenizer behind random: models: begin of sequence, then byte + 3

_TRIED = 6000  # vocabulary entries looked at for pieces
_PIECES = 1024
_FEWEST = 8
_PROOF_TOKENS = 512
_HUB_S = 12.0
_NO_CHAT = 'use traffic.prompts = "text" or "ids"'


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


# --- Tokenizers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Texts of one token each: `starts` at the beginning of a message, `follows` behind any other piece."""

    starts: tuple[str, ...]
    start_ids: npt.NDArray[np.int64]
    follows: tuple[str, ...]
    follow_ids: npt.NDArray[np.int64]

    def text(self, words: Words) -> str:
        """The text of as many tokens as there are words."""
        first = self.starts[int(words[0] % np.uint64(len(self.starts)))]
        rest = (words[1:] % np.uint64(len(self.follows))).tolist()
        return first + "".join([self.follows[index] for index in rest])

    def ids(self, words: Words) -> list[int]:
        """The token ids of `text(words)`."""
        ids: list[int] = self.follow_ids[words % np.uint64(len(self.follows))].tolist()
        ids[0] = int(self.start_ids[int(words[0] % np.uint64(len(self.starts)))])
        return ids


@dataclass(slots=True, kw_only=True)
class PromptText:
    """Text for one model: what its tokenizer makes of it, and what its chat template puts around it."""

    name: str
    encode: Encode  # with the tokens that the tokenizer adds by itself
    encode_bare: Encode  # without
    pieces: Pieces
    before: tuple[int, ...] = ()  # ids that the tokenizer puts before a plain text
    after: tuple[int, ...] = ()
    render: Callable[[Sequence[Message]], str] | None = None
    without: str = ""  # the remedy where the template cannot be used; by default other prompts of the traffic
    _segments: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def added(self) -> int:
        """Tokens that the tokenizer adds to a plain text."""
        return len(self.before) + len(self.after)

    @property
    def highest_id(self) -> int:
        """The largest token id that a made prompt may hold."""
        return int(max(self.pieces.start_ids.max(), self.pieces.follow_ids.max(), *self.before, *self.after, 0))

    def overhead(self, messages: int) -> int:
        """Tokens of the chat template around `messages` messages: user, assistant, user, ..."""
        return sum(len(segment) for segment in self.segments(messages))

    def segments(self, messages: int) -> tuple[tuple[int, ...], ...]:
        """The template's token ids before, between and after the contents, messages + 1 of them."""
        if messages not in self._segments:
            self._segments[messages] = self._measured(messages)
        return self._segments[messages]

    def chat_ids(self, words: Sequence[Words]) -> list[int]:
        """The ids of a chat whose messages have as many content tokens as `words`, in the model's template."""
        segments = self.segments(len(words))
        contents = [self.pieces.ids(own) for own in words]
        return [*segments[0], *chain.from_iterable([*c, *s] for c, s in zip(contents, segments[1:], strict=True))]

    def chat_of(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the messages in the model's template, as a chat server builds them."""
        if self.render is None:
            raise ConfigError(f'"{self.name}" has no chat template: {self.without or _NO_CHAT}')
        return self.encode_bare(self.render(messages))

    def _measured(self, messages: int) -> tuple[tuple[int, ...], ...]:
        templates: list[tuple[tuple[int, ...], ...]] = []
        for seed in (1, 2):
            words = [prompt_words(seed * 1000 + index, 9) for index in range(messages)]
            ids = self.chat_of(alternating([self.pieces.text(own) for own in words]))
            segments, at = [], 0
            for own in words:
                place = _place_of(self.pieces.ids(own), ids, at)
                if place < 0:
                    raise ConfigError(
                        f'the chat template of "{self.name}" changes what it is given, so that lengths cannot be '
                        f"exact: {self.without or _NO_CHAT}"
                    )
                segments.append(tuple(ids[at:place]))
                at = place + len(own)
            templates.append((*segments, tuple(ids[at:])))
        if templates[0] != templates[1]:
            raise ConfigError(
                f'the chat template of "{self.name}" adds tokens that depend on the text: {self.without or _NO_CHAT}'
            )
        return templates[0]


def alternating(contents: Sequence[str]) -> list[Message]:
    """Messages of user and assistant in turn, the user first."""
    return [Message("assistant" if index % 2 else "user", content) for index, content in enumerate(contents)]


def load_prompt_text(model: str, *, without: str = "") -> PromptText:
    """The text of the model at path or hub id `model`; bytes for `random:` models. Otherwise ConfigError.

    `without` is the remedy where no exact prompts can be made with it; by default prompts of ids.
    """
    if model.startswith("random:"):
        return _prompt_text(model, _bytes_with_start, _bytes_bare, ascii_lowercase, None, without)
    from tokenizers import Tokenizer

    path = _file(model, "tokenizer.json", required=True)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(f'the tokenizer of "{model}" cannot be read ({_first_line(error)})') from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _json(_file(model, "tokenizer_config.json"))
    size = tokenizer.get_vocab_size()
    candidates = [
        tokenizer.decode([index], skip_special_tokens=True).strip() for index in range(0, size, max(1, size // _TRIED))
    ]
    return _prompt_text(
        model,
        lambda text: list(tokenizer.encode(text).ids),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        [word for word in dict.fromkeys(candidates) if word.isascii() and word.isalpha()],
        _template(model, config),
        without,
    )


def _prompt_text(
    name: str,
    encode: Encode,
    encode_bare: Encode,
    words: Sequence[str],
    render: Callable[[Sequence[Message]], str] | None,
    without: str,
) -> PromptText:
    remedy = without or 'use traffic.prompts = "ids"'
    pieces = _pieces(name, encode_bare, words, remedy)
    plain, full = encode_bare(pieces.starts[0]), encode(pieces.starts[0])
    place = _place_of(plain, full, 0)
    if place < 0:
        raise ConfigError(f'the tokenizer of "{name}" changes text when it adds its own tokens: {remedy}')
    text = PromptText(
        name=name,
        encode=encode,
        encode_bare=encode_bare,
        pieces=pieces,
        before=tuple(full[:place]),
        after=tuple(full[place + len(plain) :]),
        render=render,
        without=without,
    )
    for seed in range(4):
        drawn = prompt_words(seed, _PROOF_TOKENS)
        if encode(pieces.text(drawn)) != [*text.before, *pieces.ids(drawn), *text.after]:
            raise ConfigError(
                f'the tokenizer of "{name}" joins words over their borders, so that no exact length can be made: '
                f"{remedy}"
            )
    return text


def _pieces(name: str, encode: Encode, words: Sequence[str], remedy: str) -> Pieces:
    starts = {word: ids[0] for word in words if len(ids := encode(word)) == 1}
    anchors = list(starts)[:1]
    for anchor in anchors:
        for glue in (" ", ""):
            follows: dict[str, int] = {}
            for word in words:
                ids = encode(f"{anchor}{glue}{word}{glue}{word}")
                if len(ids) == 3 and ids[0] == starts[anchor] and ids[1] == ids[2]:
                    follows[glue + word] = ids[1]
                if len(follows) == _PIECES:
                    break
            if len(follows) >= _FEWEST:
                first = dict(list(starts.items())[:_PIECES])
                return Pieces(
                    starts=tuple(first),
                    start_ids=np.array(list(first.values()), dtype=np.int64),
                    follows=tuple(follows),
                    follow_ids=np.array(list(follows.values()), dtype=np.int64),
                )
    raise ConfigError(f'the vocabulary of "{name}" holds fewer than {_FEWEST} words of one token: {remedy}')


def _bytes_bare(text: str) -> list[int]:
    return [byte + BYTE_OFFSET for byte in text.encode("utf-8")]


def _bytes_with_start(text: str) -> list[int]:
    return [BYTE_START, *_bytes_bare(text)]


def _place_of(part: Sequence[int], whole: Sequence[int], start: int) -> int:
    size = len(part)
    for at in range(start, len(whole) - size + 1):
        if whole[at] == part[0] and list(whole[at : at + size]) == list(part):
            return at
    return -1


# --- Files of a model -------------------------------------------------------------------------------------------------


def _file(model: str, name: str, *, required: bool = False) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        path = folder / name
        if path.is_file():
            return path
        if required:
            raise ConfigError(f'"{model}" holds no {name}: give a model folder with a fast tokenizer')
        return None
    from huggingface_hub import hf_hub_download

    if required:
        check_hub(model, name, what=f'no tokenizer can be loaded for "{model}"')
    try:
        return Path(hf_hub_download(model, name))
    except Exception as error:  # a wrong id, no network, a file that the repository lacks: each has its own type
        if required:
            raise ConfigError(f'no tokenizer can be loaded for "{model}": {_first_line(error)}') from None
        return None


def check_hub(model: str, name: str, *, what: str) -> None:
    """The file of the model is in the cache, or the hub answers. Otherwise ConfigError that begins with `what`.

    Loaders ask for one file after another and try each six times, which takes a minute.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(model, name), str):
        return
    answers: SimpleQueue[Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(model, name))
        except HfHubHTTPError:  # it answers: the loader says what is wrong
            answers.put(None)
        except Exception as error:
            answers.put(error)
        else:
            answers.put(None)

    # Neither the resolver nor the number of addresses that are tried is bounded by a timeout.
    Thread(target=ask, daemon=True).start()
    try:
        error = answers.get(timeout=_HUB_S)
    except Empty:
        error = TimeoutError(f"no answer within {_HUB_S:g} s")
    if error is not None:
        raise ConfigError(
            f"{what}: its {name} is not in the cache, and {constants.ENDPOINT} cannot be reached "
            f"({_first_line(error)}): give a local folder, fill the cache and set HF_HUB_OFFLINE=1, set HF_ENDPOINT to "
            "a hub that can be reached, or try again"
        )


def _json(path: Path | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f'"{path}" cannot be read: {_first_line(error)}') from None
    return content if isinstance(content, dict) else {}


def _template(model: str, config: Mapping[str, Any]) -> Callable[[Sequence[Message]], str] | None:
    """The model's default chat template as a function, or None."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if (path := _file(model, "chat_template.jinja")) is not None:
        source = path.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    special = {
        key: value.get("content", "") if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    return partial(_rendered, model, source, special)


def _rendered(model: str, source: str, special: Mapping[str, Any], messages: Sequence[Message]) -> str:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # What templates on the hub are written for: Hugging Face renders them in an environment set up like this.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source).render(
            messages=[{"role": message.role, "content": message.content} for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special,
        )
    except TemplateError as error:
        raise ConfigError(f'the chat template of "{model}" fails: {_first_line(error)}') from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- Prompts of a schedule --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Makes the prompts of planned requests. `vocab_size` bounds random ids; `text` is None for them."""

    kind: PromptKind = "ids"
    vocab_size: int = 256
    text: PromptText | None = None

    @classmethod
    def of(cls, kind: PromptKind, *, model: str, vocab_size: int) -> PromptSource:
        """The source for prompts of `kind` to the model. Tokens outside its vocabulary raise ConfigError."""
        text = None if kind == "ids" else load_prompt_text(model)
        if text is not None and text.highest_id >= vocab_size:
            raise ConfigError(
                f'the tokenizer of "{model}" has token {text.highest_id}, but the vocabulary that is served ends at '
                f'{vocab_size - 1}: name the served model\'s own tokenizer, or use traffic.prompts = "ids"'
            )
        return cls(kind=kind, vocab_size=vocab_size, text=text)

    def ids(self, plan: PlannedRequest) -> list[int]:
        """The prompt's token ids, `plan.prompt_tokens` of them."""
        if self.text is None:
            return token_ids(_content(plan, plan.prompt_tokens), self.vocab_size)
        if self.kind == "chat":
            return self.text.chat_ids(self._parts(plan))
        words = _content(plan, max(1, plan.prompt_tokens - self.text.added))
        return [*self.text.before, *self.text.pieces.ids(words), *self.text.after]

    def plain(self, plan: PlannedRequest) -> str | None:
        """The prompt as text that a server tokenises to `plan.prompt_tokens`; None where only ids are exact."""
        if self.text is None or self.kind != "text":
            return None
        return self.text.pieces.text(_content(plan, max(1, plan.prompt_tokens - self.text.added)))

    def messages(self, plan: PlannedRequest) -> list[Message] | None:
        """The prompt as chat messages, which the model's template makes `plan.prompt_tokens` long; None if no chat."""
        if self.text is None or self.kind != "chat":
            return None
        return alternating([self.text.pieces.text(words) for words in self._parts(plan)])

    def _parts(self, plan: PlannedRequest) -> list[Words]:
        assert self.text is not None
        sizes = list(plan.parts or [max(1, plan.prompt_tokens - self.text.overhead(1))])
        words = _content(plan, sum(sizes))
        return np.split(words, np.cumsum(sizes)[:-1])


def _content(plan: PlannedRequest, count: int) -> Words:
    """The words behind a prompt's `count` tokens: those of its shared blocks, then those of its own sequence."""
    if not plan.blocks or not plan.block_tokens:
        return prompt_words(plan.prefix_seed, count)
    ends = [min(count, round((index + 1) * plan.block_tokens)) for index in range(len(plan.blocks))]
    sizes = np.diff([0, *ends]).tolist()
    parts = [prompt_words(seed, size) for seed, size in zip(plan.blocks, sizes, strict=True) if size]
    if count > ends[-1]:
        parts.append(prompt_words(plan.prefix_seed, count - ends[-1]))
    return np.concatenate(parts)
