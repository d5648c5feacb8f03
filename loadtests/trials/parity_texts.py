"""The texts by which quantised arms are judged, as a file gives them: a list of token ids on each line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from tailgate.loadtests.experiments.model import Experiment
from tailgate.servers.complaint import ConfigError

_IDS = TypeAdapter(Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=2)])

Text = tuple[list[int], list[int]]  # what is read, and what is predicted after it


def read_texts(experiment: Experiment) -> list[Text]:
    """Return each text cut in two: its first half, as far as a prompt may be long, and what is predicted after it,
    `parity.tokens` at most. Texts that are equal as they are asked are one: copies tell nothing new.

    Returns none where no file is named. Raises ConfigError, which names the line.
    """
    if not experiment.parity.texts:
        return []
    path = Path(experiment.parity.texts)
    what = f'parity.texts "{path}"'
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{what} cannot be read ({error}): give a file with a list of token ids on each line"
        ) from None
    engines = [arm.engine for arm in experiment.own_arms]
    longest = min(engine.max_prompt_tokens for engine in engines)
    most = min(experiment.parity.tokens, *(engine.max_new_tokens for engine in engines))
    texts: dict[tuple[tuple[int, ...], int], Text] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            ids = _IDS.validate_json(line)
        except ValidationError:
            why = "give a list of two token ids or more, such as [1, 15043, 3186]"
            raise ConfigError(f"{what}, line {number}: {why}") from None
        read = min((len(ids) + 1) // 2, longest)
        prompt = ids[: read + most]
        texts.setdefault((tuple(prompt), read), (prompt[:read], prompt[read:]))
    if not texts:
        raise ConfigError(f"{what} has no texts: give a list of token ids on each line")
    return list(texts.values())
