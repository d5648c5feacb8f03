"""What a prompt of a planned length is made of: random ids, or text that the model's tokenizer counts exactly.

Text is put together of pieces that are one token each whatever their neighbours are: words after a space, or single
letters where every letter is a token. A tokenizer for which this does not hold is refused when it is loaded; making a
prompt then costs one lookup, and not a run of the tokenizer inside the load generator, which needs no transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tailgate.servers.complaint import ConfigError, named
from tailgate.servers.presets import BOS_ID, BYTE_OFFSET

if TYPE_CHECKING:
    from tailgate.loadtests.traffic.schedule import PlannedRequest

Encode = Callable[[str], list[int]]
Words = npt.NDArray[np.uint64]

_TRIED = 6000  # vocabulary entries tried as pieces
_PIECES = 1024
_FEWEST = 8
_PROOF_TOKENS = 512
_HUB_S = 12.0
_FIRST_TOKEN_ID = np.uint64(3)  # ids below are padding, start and end of text in the common vocabularies

# One generator whose key is set anew for each prompt: making one costs six times as much, most of it for entropy from
# the system that a key makes useless.
_PHILOX = np.random.Philox(key=0)
_PHILOX_START: Any = _PHILOX.state
_PHILOX_KEY = _PHILOX_START["state"]["key"]


def prompt_words(seed: int, count: int) -> Words:
    """Return the first `count` random words of the sequence that `seed` names. Not for several threads at once.

    numpy keeps raw Philox words equal across versions and platforms, which it does not promise for distributions.
    """
    _PHILOX_KEY[0] = seed
    _PHILOX.state = _PHILOX_START
    words: Words = _PHILOX.random_raw(count)
    return words


# --- Tokenizers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """Text for one model, made of pieces of one token each: `first` begins a message, `follows` stand behind any other
    piece. The tokenizer puts the ids `before` and `after` it."""

    first: str
    first_id: int
    follows: tuple[str, ...]
    follow_ids: npt.NDArray[np.int64]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def added(self) -> int:
        """Tokens of a prompt besides its text."""
        return len(self.before) + len(self.after)

    def text(self, words: Words) -> str:
        """Return the text of as many tokens as there are words."""
        rest = (words[1:] % np.uint64(len(self.follows))).tolist()
        return self.first + "".join([self.follows[index] for index in rest])

    def prompt(self, plan: PlannedRequest) -> str:
        """Return the text of the prompt, which the model's tokenizer turns into `plan.prompt_tokens`."""
        return self.text(_content(plan, max(1, plan.prompt_tokens - self.added)))

    def ids(self, words: Words) -> list[int]:
        """Return the token ids of `text(words)` alone."""
        ids: list[int] = self.follow_ids[words % np.uint64(len(self.follows))].tolist()
        ids[0] = self.first_id
        return ids


def load_prompt_text(model: str, *, remedy: str = 'use traffic.prompts = "ids"') -> PromptText:
    """Return the text of the model at path or hub id `model`; bytes for `random:` models. Raises ConfigError, with
    `remedy` where no exact prompts can be made."""
    if model.startswith("random:"):
        return _prompt_text(
            model,
            lambda text: [BOS_ID, *(byte + BYTE_OFFSET for byte in text.encode())],
            lambda text: [byte + BYTE_OFFSET for byte in text.encode()],
            ascii_lowercase,
            remedy,
        )
    from tokenizers import Tokenizer

    if not Path(model).is_dir():
        check_hub(model, "tokenizer.json", what=f'no tokenizer can be loaded for "{model}"')
    path = _tokenizer_file(model)
    if path is None:
        raise ConfigError(
            f'"{model}" has no tokenizer.json to read: give the folder or id of a model with a fast tokenizer'
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(f'the tokenizer of "{model}" cannot be read ({named(error)})') from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = tokenizer.get_vocab_size()
    candidates = [
        tokenizer.decode([index], skip_special_tokens=True).strip() for index in range(0, size, max(1, size // _TRIED))
    ]

    def bare(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def full(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    words = [word for word in dict.fromkeys(candidates) if word.isascii() and word.isalpha()]
    return _prompt_text(model, full, bare, words, remedy)


def _prompt_text(name: str, full: Encode, bare: Encode, words: Sequence[str], remedy: str) -> PromptText:
    """Return the text of `words`, which `bare` counts alone and `full` with what is put around it."""
    text = _pieces(name, bare, words, remedy)
    around: set[tuple[tuple[int, ...], tuple[int, ...]] | None] = set()
    for seed in range(4):
        drawn = prompt_words(seed, _PROOF_TOKENS)
        part, whole = text.ids(drawn), full(text.text(drawn))
        place = next((at for at in range(len(whole) - len(part) + 1) if whole[at : at + len(part)] == part), -1)
        around.add((tuple(whole[:place]), tuple(whole[place + len(part) :])) if place >= 0 else None)
    first = around.pop()
    if around or first is None:
        raise ConfigError(
            f'the tokenizer of "{name}" changes the text that it gets, so that no exact length can be made: {remedy}'
        )
    return replace(text, before=first[0], after=first[1])


def _pieces(name: str, encode: Encode, words: Sequence[str], remedy: str) -> PromptText:
    first, first_id = next(((word, ids[0]) for word in words if len(ids := encode(word)) == 1), ("", 0))
    for glue in (" ", "") if first else ():
        follows: dict[str, int] = {}
        for word in words:
            ids = encode(f"{first}{glue}{word}{glue}{word}")
            if len(ids) == 3 and ids[0] == first_id and ids[1] == ids[2]:
                follows[glue + word] = ids[1]
            if len(follows) == _PIECES:
                break
        if len(follows) >= _FEWEST:
            follow_ids = np.array(list(follows.values()), dtype=np.int64)
            return PromptText(first=first, first_id=first_id, follows=tuple(follows), follow_ids=follow_ids)
    raise ConfigError(f'the vocabulary of "{name}" holds fewer than {_FEWEST} words of one token: {remedy}')


# --- Files of a model -------------------------------------------------------------------------------------------------


def _tokenizer_file(model: str) -> Path | None:
    """Return where the tokenizer of the model at path or hub id `model` is; None where it has none to read."""
    if Path(model).is_dir():
        path = Path(model, "tokenizer.json")
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download

    with suppress(Exception):  # a wrong id, no network, a file that the repository lacks: each has its own type
        return Path(hf_hub_download(model, "tokenizer.json"))
    return None


def check_hub(model: str, name: str, *, what: str) -> None:
    """Raise ConfigError that begins with `what` where the model's file is not in the cache and the hub does not answer:
    loaders try each file six times, which takes a minute."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(model, name), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(model, name), timeout=_HUB_S)
    except HfHubHTTPError:
        return  # it answers: the loader says what is wrong
    except Exception as error:
        raise ConfigError(
            f"{what}: its {name} is not in the cache, and {constants.ENDPOINT} cannot be reached "
            f"({named(error)}): give a local folder, fill the cache and set HF_HUB_OFFLINE=1, set HF_ENDPOINT to "
            "a hub that can be reached, or try again"
        ) from None


# --- Prompts of a schedule --------------------------------------------------------------------------------------------


def served_text(tokenizer: str, *, vocab_size: int) -> PromptText | None:
    """Return the text of the model at path or hub id `tokenizer`, which prompts are made of; None for "": random ids.

    Raises ConfigError also for tokens outside the vocabulary that is served.
    """
    if not tokenizer:
        return None
    text = load_prompt_text(tokenizer)
    highest = max(text.first_id, int(text.follow_ids.max()), *text.before, *text.after)
    if highest >= vocab_size:
        raise ConfigError(
            f'the tokenizer of "{tokenizer}" has token {highest}, but the vocabulary that is served ends at '
            f'{vocab_size - 1}: name the served model\'s own tokenizer, or use traffic.prompts = "ids"'
        )
    return text


def prompt_ids(plan: PlannedRequest, vocab_size: int) -> list[int]:
    """Return `plan.prompt_tokens` ids, uniform over [3, vocab_size) but for a bias below vocab_size / 2^64."""
    words = _content(plan, plan.prompt_tokens)
    ids: list[int] = (words % (np.uint64(vocab_size) - _FIRST_TOKEN_ID) + _FIRST_TOKEN_ID).tolist()
    return ids


def _content(plan: PlannedRequest, count: int) -> Words:
    """Return the words behind a prompt's `count` tokens: those of its shared blocks, then those of its own sequence."""
    if not plan.blocks or not plan.block_tokens:
        return prompt_words(plan.prompt_seed, count)
    ends = [min(count, round((index + 1) * plan.block_tokens)) for index in range(len(plan.blocks))]
    sizes = np.diff([0, *ends]).tolist()
    parts = [prompt_words(seed, size) for seed, size in zip(plan.blocks, sizes, strict=True) if size]
    if count > ends[-1]:
        parts.append(prompt_words(plan.prompt_seed, count - ends[-1]))
    return np.concatenate(parts)
