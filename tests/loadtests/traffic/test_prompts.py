"""Prompts of exact length: text that the model's tokenizer counts as planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tailgate.loadtests.external.arms import OpenAiArm, OpenAiOptions
from tailgate.loadtests.external.asking import prompt_text
from tailgate.loadtests.traffic.drawing import build_schedule, read_source
from tailgate.loadtests.traffic.prompts import load_prompt_text, prompt_ids, served_text
from tailgate.loadtests.traffic.schedule import PlannedRequest, Schedule, planned_requests
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.servers.complaint import ConfigError
from tailgate.servers.front.requests import Encode, load_tokenizer
from tests.fakes.processes import refusal

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother"
)


def model_folder(folder: Path) -> Path:
    """A folder with a small tokenizer as models bring it: byte-level BPE."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS, WORDS.title(), f" {WORDS}"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def plan(tokens: int, *, seed: int = 7) -> PlannedRequest:
    given: dict[str, Any] = {"index": 0, "offset_ns": 0, "max_tokens": 1}
    return PlannedRequest(prompt_tokens=tokens, **given, prompt_seed=seed, arm=None, phase="measure")


@pytest.fixture(scope="module")
def served(folder: Path) -> Encode:
    """What the front loads the tokenizer with."""
    return load_tokenizer(str(folder))


@settings(max_examples=40)
@given(tokens=st.integers(2, 700) | st.just(4096), seed=st.integers(0, 2**62))
def test_text_has_exactly_the_planned_tokens_for_the_servers_own_tokenizer(
    folder: Path, served: Encode, tokens: int, seed: int
) -> None:
    text = served_text(str(folder), vocab_size=600)
    assert text is not None
    assert len(served(text.prompt(plan(tokens, seed=seed)))) == tokens


def test_a_tokenizer_that_changes_its_text_is_refused_in_one_line(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "m") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Replace(Regex(r"(\w+ ){3}"), "time ")
    tokenizer.save(str(path))
    assert "changes the text" in refusal(ConfigError, load_prompt_text, str(path.parent))


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    assert "has no tokenizer.json to read" in refusal(ConfigError, load_prompt_text, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    assert "cannot be read" in refusal(ConfigError, load_prompt_text, str(tmp_path))


def test_an_external_tokenizer_that_cannot_count_is_refused_with_settings_of_the_arm(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    options = OpenAiOptions(tokenizer=str(tmp_path))
    config = OpenAiArm(name="x", kind="openai", address=("http://a",), model_name="m", openai=options)
    said = refusal(ConfigError, prompt_text, config, None)
    assert "fewer than 8 words" in said
    assert ": remove openai.tokenizer" in said
    assert "traffic.prompts" not in said


def test_a_tokenizer_beyond_the_served_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the vocabulary that is served ends at 299"):
        served_text(str(folder), vocab_size=300)


def built(config: TrafficConfig, **changes: Any) -> Schedule:
    arguments: dict[str, Any] = {"arms": ("eager", "compiled"), "seed": 5, "trial": 1, "max_new_tokens": 256}
    return build_schedule(
        config, read_source(config, tokenizer=config.tokenizer), **{**arguments, "max_prompt_tokens": 4096, **changes}
    )


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_requests_that_share_hash_ids_share_the_tokens_of_their_blocks(tmp_path: Path, scale: float) -> None:
    path = tmp_path / "trace.jsonl"
    own = {"input_length": 1400, "output_length": 9}
    ids = [[number % 3, 10 + number % 3, 100 + number] for number in range(300)]
    path.write_text("\n".join(json.dumps({"timestamp": 100 * n, "hash_ids": row, **own}) for n, row in enumerate(ids)))
    config = TrafficConfig(
        **{"arrivals": "trace", "workload": "trace", "trace": str(path), "duration_s": 20, "timeout_s": 5},
        length_scale=scale,
    )
    schedule = built(config)
    prompts = [prompt_ids(plan, 500) for plan in planned_requests(schedule.table)]
    assert {len(prompt) for prompt in prompts} == {round(1400 * scale)}
    first, other_group, same_group = prompts[0], prompts[1], prompts[3]
    shared = round(1024 * scale)
    assert first[:shared] == same_group[:shared]
    assert first[shared : shared + 20] != same_group[shared : shared + 20]
    assert first[:20] != other_group[:20]


def test_text_prompts_are_never_shorter_than_what_the_tokenizer_adds(folder: Path) -> None:
    schedule = built(TrafficConfig(rate=20, duration_s=5, length_scale=1e-6, prompts="text", tokenizer=str(folder)))
    assert set(schedule.ints("prompt_tokens").tolist()) == {2}


def test_text_needs_room_for_what_the_tokenizer_adds(folder: Path) -> None:
    config = TrafficConfig(rate=9, prompts="text", tokenizer=str(folder))
    assert "raise it to 2 or more" in refusal(ConfigError, built, config, max_prompt_tokens=1)


def test_prompt_ids_are_uniform_and_differ_between_seeds() -> None:
    ids = np.array(prompt_ids(plan(97_000, seed=11), 100))
    counts = np.bincount(ids, minlength=100)[3:]
    # Chi-square with 96 degrees of freedom: mean 96, standard deviation 13.9.
    assert ((counts - 1000) ** 2 / 1000).sum() < 96 + 4 * 13.9
    assert prompt_ids(plan(20, seed=11), 50_000) != prompt_ids(plan(20, seed=12), 50_000)
