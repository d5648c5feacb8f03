"""Prompts of exact length: text that the model's tokenizer counts as planned, its chat template included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from loadtests.traffic.prompt_words import prompt_words, token_ids
from loadtests.traffic.prompts import Message, PromptKind, PromptSource, alternating, load_prompt_text
from loadtests.traffic.schedule import PlannedRequest
from servers.fields import ConfigError
from servers.front.tokenizer import ByteTokenizer, ModelTokenizer

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother"
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}\n\n"
    "{{ message['content'] | trim }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)


def model_folder(folder: Path, *, template: str = TEMPLATE, metaspace: bool = False) -> Path:
    """A folder with a small tokenizer as models bring it: byte-level BPE, or BPE over words with a leading mark."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(byte_fallback=metaspace, unk_token="<unk>" if metaspace else None))
    special = ["<unk>", "<s>", "<|start|>", "<|end|>"]
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        alphabet: list[str] = []
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS, WORDS.title(), "user assistant system\n\n" * 3, f" {WORDS}"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "unk_token": "<unk>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def plan(tokens: int, *, seed: int = 7, **changes: object) -> PlannedRequest:
    given: dict[str, object] = {
        "index": 0,
        "offset_ns": 0,
        "session_id": "s",
        "turn": 0,
        "prompt_tokens": tokens,
        "max_tokens": 1,
        "prompt_seed": 1,
        "arm": None,
        "phase": "measure",
        "prefix_seed": seed,
    }
    return PlannedRequest(**{**given, **changes})  # type: ignore[arg-type]


def source(folder: Path, kind: PromptKind) -> PromptSource:
    return PromptSource.of(kind, model=str(folder), vocab_size=600)


@settings(max_examples=40)
@given(tokens=st.integers(2, 700), seed=st.integers(0, 2**62))
def test_text_has_exactly_the_planned_tokens_for_the_servers_own_tokenizer(
    folder: Path, tokens: int, seed: int
) -> None:
    prompts = source(folder, "text")
    text = prompts.plain(plan(tokens, seed=seed))
    assert text is not None
    # Both what loads the tokenizer here and what the front loads it with.
    assert prompts.text is not None
    assert prompts.text.encode(text) == prompts.ids(plan(tokens, seed=seed))
    assert len(prompts.text.encode(text)) == tokens


def test_the_server_counts_text_as_planned(folder: Path) -> None:
    served = ModelTokenizer(str(folder))
    prompts = source(folder, "text")
    for tokens in (2, 3, 64, 511, 512, 4096):
        text = prompts.plain(plan(tokens))
        assert text is not None
        assert served.encode(text) == prompts.ids(plan(tokens))
        assert len(served.encode(text)) == tokens


def test_a_vocabulary_with_marked_words_is_counted_exactly_too(tmp_path: Path) -> None:
    prompts = source(model_folder(tmp_path / "m", metaspace=True), "text")
    for tokens in (2, 17, 300):
        text = prompts.plain(plan(tokens))
        assert text is not None
        assert prompts.text is not None
        assert len(prompts.text.encode(text)) == tokens


def test_byte_models_take_a_letter_for_each_token() -> None:
    prompts = PromptSource.of("text", model="random:tiny", vocab_size=512)
    text = prompts.plain(plan(40))
    assert text is not None
    assert len(text) == 39
    assert ByteTokenizer().encode(text) == prompts.ids(plan(40))


def test_chat_prompts_are_what_transformers_renders(folder: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(folder))
    prompts = source(folder, "chat")
    assert prompts.text is not None
    for parts in ([5], [300], [4, 9, 30], [1, 1, 1, 1, 1]):
        overhead = prompts.text.overhead(len(parts))
        request = plan(sum(parts) + overhead, parts=parts, turn=len(parts) // 2)
        messages = prompts.messages(request)
        assert messages is not None
        rendered = reference.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            add_generation_prompt=True,
            tokenize=False,
        )
        expected = reference(rendered, add_special_tokens=False)["input_ids"]
        assert prompts.ids(request) == expected
        assert len(expected) == request.prompt_tokens


def test_the_overhead_is_counted_for_each_message(folder: Path) -> None:
    prompts = source(folder, "chat")
    assert prompts.text is not None
    one, three, five = (prompts.text.overhead(count) for count in (1, 3, 5))
    assert one > 4
    assert five - three == three - one > 4


def test_later_turns_begin_with_the_earlier_ones(folder: Path) -> None:
    prompts = source(folder, "chat")
    assert prompts.text is not None
    first = prompts.messages(plan(0, parts=[6]))
    third = prompts.messages(plan(0, parts=[6, 8, 5]))
    assert first is not None
    assert third is not None
    assert third[0] == first[0]
    assert [message.role for message in third] == ["user", "assistant", "user"]


@pytest.mark.parametrize("kind", ["ids", "text", "chat"])
def test_prompts_that_share_blocks_share_tokens(folder: Path, kind: PromptKind) -> None:
    prompts = source(folder, kind)
    blocks = {"blocks": [11, 12], "block_tokens": 32.0}
    one = prompts.ids(plan(100, seed=1, **blocks, parts=[80]))
    two = prompts.ids(plan(100, seed=2, **{**blocks, "blocks": [11, 13]}, parts=[80]))
    other = prompts.ids(plan(100, seed=1, blocks=[14], block_tokens=32.0, parts=[80]))
    same = next(index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert same >= 32
    assert one[:32] != other[:32]


def test_ids_without_blocks_are_as_they_always_were() -> None:
    prompts = PromptSource(vocab_size=300)
    assert prompts.ids(plan(50, seed=123)) == token_ids(prompt_words(123, 50), 300)


def test_given_ids_are_sent_as_they_are(folder: Path) -> None:
    for kind in ("ids", "text", "chat"):
        prompts = source(folder, kind)  # type: ignore[arg-type]
        request = plan(3, token_ids=[7, 8, 9])
        assert prompts.ids(request) == [7, 8, 9]
        assert prompts.plain(request) is None
        assert prompts.messages(request) is None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0]['content'] | upper }}", "changes what it is given"),
        ("{% if true %}{{ raise_exception('no system role') }}{% endif %}", "no system role"),
        ("{{ nonsense", "fails"),
    ],
)
def test_a_template_that_cannot_be_exact_is_refused_in_one_line(tmp_path: Path, template: str, message: str) -> None:
    text = load_prompt_text(str(model_folder(tmp_path / "m", template=template)))
    with pytest.raises(ConfigError, match=message) as refused:
        text.overhead(1)
    assert "\n" not in str(refused.value)


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        load_prompt_text(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompt_text(str(tmp_path))


def test_a_tokenizer_beyond_the_served_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the vocabulary that is served ends at 299"):
        PromptSource.of("text", model=str(folder), vocab_size=300)


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{}")
    text = load_prompt_text(str(folder))
    with pytest.raises(ConfigError, match="has no chat template"):
        text.chat_of([Message("user", "hello")])


def test_a_template_file_counts_before_the_one_in_the_settings(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<|end|>")
    assert load_prompt_text(str(folder)).overhead(1) == 1


def test_roles_alternate() -> None:
    assert [message.role for message in alternating(["a", "b", "c"])] == ["user", "assistant", "user"]
    assert len(prompt_words(1, 5)) == 5
    assert np.array_equal(prompt_words(1, 5), prompt_words(1, 9)[:5])
