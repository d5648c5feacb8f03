"""What the requests of an experiment are taken from: a trace, the model's text. Read once a run."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.traffic.prompts import PromptText, load_prompt_text
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.traces import Trace, read_trace
from servers.complaint import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the files behind a `[traffic]` table hold; None for what it does not name."""

    trace: Trace | None = None
    text: PromptText | None = None


def read_source(config: TrafficConfig, *, model: str = "", answers: bool = True) -> Source:
    """Read the files that `config` names. `model` has the tokenizer if none is named.

    Without `answers` nothing is generated, and a trace need not say how much. Whatever cannot be used is a ConfigError.
    """
    trace = None
    if config.trace:
        trace = read_trace(
            config.trace,
            answers=answers,
            blocks=config.workload == "trace" and config.turns_mean == 1,
            time_unit=config.trace_time_unit,
            block_tokens=config.trace_block_tokens,
        )
    text = None
    if config.prompts != "ids":
        if not (config.tokenizer or model):
            raise ConfigError("traffic.tokenizer is empty and no model is named: give the path of a model folder")
        text = load_prompt_text(config.tokenizer or model)
    if config.prompts == "chat" and text is not None and text.render is None:
        raise ConfigError(
            f'traffic.prompts is "chat" but "{text.name}" has no chat template: use traffic.prompts = "text", '
            "or name a model folder with one as traffic.tokenizer"
        )
    return Source(trace=trace, text=text)
