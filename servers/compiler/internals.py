"""Everything private that is read of torch and Triton stands here.

No other module of the servers imports torch._dynamo, torch._inductor or torch.fx.experimental, or reaches into Triton.
What is private changes without a word. So it is read only where every interface is there and a test compile was heard
through it (`hear_torch`, `hear_triton`); otherwise compiles are counted by torch's public counters alone, and
`blind_spots` says so to whoever judges.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import CodeType, FunctionType
from typing import Any

import torch
import torch._dynamo

from servers.clock import now_ns
from servers.compiler.jit import JitCompile, JitListener
from servers.fields import ConfigError

# What the recorder cannot do without, as "module:attribute".
_NEEDED = (
    "torch._dynamo.callback:on_compile_start",
    "torch._dynamo.callback:on_compile_end",
    "torch._dynamo.callback:callback_handler",
    "torch._dynamo.callback:CallbackTrigger.CUDAGRAPH_RECORDING",
    "torch._dynamo.utils:get_metrics_context",
    "torch._dynamo.utils:get_runtime_metrics_context",
    "torch._dynamo.utils:get_compilation_metrics",
    "torch._dynamo.utils:record_compilation_metrics",
    "torch._dynamo.utils:CompilationMetrics",
    "torch._dynamo.utils:counters",
    "torch._dynamo.utils:graph_break_reasons",
    "torch._dynamo.utils:guard_failures",
    "torch._inductor.cudagraph_utils:cudagraphs_log",
    "torch._inductor.metrics:generated_kernel_count",
)
_NEEDED_METRICS = (
    *("compile_id", "co_filename", "co_firstlineno", "co_name", "recompile_reason", "fail_reason", "is_runtime"),
    *("fail_user_frame_filename", "fail_user_frame_lineno", "has_guarded_code", "runtime_triton_autotune_time_us"),
    *("aot_autograd_cumulative_compile_time_us", "compile_time_autotune_time_us", "guard_count", "graph_node_count"),
    *("shape_env_guard_count", "graph_node_shapes"),
)
_NEEDED_OF_TRITON = ("triton.knobs:compilation.listener", "triton.runtime.autotuner:Autotuner.run")

_COUNTED = "compiles are counted by its public counters alone"
_MISSING = object()
_LONGEST_CAUSE = 240
# A symbol among the sizes of a traced graph is quoted, a number is not: {'x': ['s77', 8]}.
_SYMBOLIC_SIZE = re.compile(r"\[[^\]]*'")
_DEBUG_CONTEXT = re.compile(r"Developer debug context: (.+)")


# --- What can be read ---------------------------------------------------------------------------------------------


def torch_blind_spots() -> tuple[str, ...]:
    """Why torch's compiles cannot be read, a sentence; empty where this torch has every interface."""
    lacking = [path for path in _NEEDED if _reach(path, _MISSING) is _MISSING]
    metrics = _reach("torch._dynamo.utils:CompilationMetrics")
    lacking += [
        f"CompilationMetrics.{name}"
        for name in _NEEDED_METRICS
        if metrics is not None and name not in getattr(metrics, "__dataclass_fields__", ())
    ]
    return (f"torch {torch.__version__} lacks {', '.join(lacking)}: {_COUNTED}",) if lacking else ()


def hear_torch() -> tuple[str, ...]:
    """Why the recorder's taps do not hear torch's compiles, a sentence; empty where they do.

    Compile a function of one line for two sizes by the backend "eager", which takes 0.2 to 0.5 s, most of it imports.
    The taps must report a compile, then a recompile with its reason, and a beginning and an end of each. To be called
    before anything else listens.
    """
    heard: list[Compiled] = []
    begun: list[str] = []
    ended: list[int] = []
    # A code of its own: the compiler keeps graphs by code, and forgets them with the function.
    function = FunctionType(
        (lambda values: values + 1).__code__.replace(co_name="self_test"), {"__builtins__": builtins}
    )
    failures, problem, taps = _failures(), "", Taps()
    try:
        taps.compiles(lambda compiled, _: heard.append(compiled))
        taps.under_way(lambda compile_id, _: begun.append(compile_id), lambda: ended.append(1))
        step = torch.compile(function, backend="eager", dynamic=False)
        for size in (2, 3):
            step(torch.ones(size))
    except Exception as error:  # whatever another version raises
        problem = f"{type(error).__name__}: {cause(str(error))}"
    finally:
        taps.remove()
    ids = [item.compile_id for item in heard if item.compile_id and item.frame.endswith(" in self_test")]
    if (
        [bool(item.reason) for item in heard] == [False, True]
        and begun == ids
        and len(ended) == len(ids)
        and _failures() > failures
    ):
        return ()
    what = problem or f"{len(begun)} beginnings, {len(ended)} ends, {len(heard)} compiles"
    return (f"torch {torch.__version__} does not report a test's compile and recompile ({what}): {_COUNTED}",)


def _failures() -> int:
    return sum(map(len, guard_failures().values()))


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def triton_blind_spots() -> tuple[str, ...]:
    """Why kernels that Triton compiles are not seen; empty where they are, or where there is no Triton."""
    if not has_triton():
        return ()
    lacking = [path for path in _NEEDED_OF_TRITON if _reach(path, _MISSING) is _MISSING]
    return (f"triton {_triton()} lacks {', '.join(lacking)}: its JIT compiles are not seen",) if lacking else ()


def hear_triton() -> tuple[str, ...]:
    """Why the recorder's taps do not hear what Triton compiles, a sentence; empty where they do, or where no GPU is.

    Compile an empty kernel, or fetch it from Triton's disk cache.
    """
    if not has_triton() or not torch.cuda.is_available():
        return ()
    heard: list[JitCompile] = []
    problem, taps = "", Taps()
    try:
        taps.triton(heard.append)
        triton, compiler = importlib.import_module("triton"), importlib.import_module("triton.compiler")
        triton.compile(compiler.ASTSource(fn=triton.jit(_empty), signature={}))
    except Exception as error:  # whatever another version raises
        problem = f" ({type(error).__name__}: {cause(str(error))})"
    finally:
        taps.remove()
    if [item.kernel for item in heard] == [_empty.__name__]:
        return ()
    return (f"triton {_triton()} does not report a test's compile{problem}: its JIT compiles are not seen",)


def _triton() -> str:
    return str(_reach("triton:__version__"))


def _empty():  # type: ignore[no-untyped-def]  # Triton reads the source
    pass


def _reach(path: str, default: object = None) -> Any:
    """What stands at "module:attribute.attribute"; `default` where there is no such thing."""
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except Exception:  # a module of another version may fail in any way
        return default
    return found


# --- What torch.compile is asked for ------------------------------------------------------------------------------


class _UnknownError(Exception):
    """Stands for an error that this torch does not have."""


# A graph has a condition that the compiler cannot show to hold within the promised bounds, whether it does or not.
UnprovenBounds: type[Exception] = (
    _reach("torch.fx.experimental.symbolic_shapes:ConstraintViolationError") or _UnknownError
)

# What inductor takes as a pass over its graphs.
GraphPass: Any = _reach("torch._inductor.custom_graph_pass:CustomGraphPass") or object


def known_backends() -> list[str]:
    """The names of all backends, in alphabetical order; empty where this torch does not tell."""
    list_backends = _reach("torch._dynamo:list_backends")
    return sorted(list_backends(exclude_tags=())) if list_backends is not None else []


def find_backend(name: str) -> object:
    """The backend of that name, None where this torch does not tell. Raises whatever loading it does: a package's entry
    point runs only here."""
    lookup_backend = _reach("torch._dynamo:lookup_backend")
    return lookup_backend(name) if lookup_backend is not None else None


def try_backend(name: str, device: str) -> None:
    """The backend of that name compiles a function of one line on `device`, where there is one. Raises what it raises:
    many load their package only when they are first used."""
    place = "cuda" if device == "cuda" and torch.cuda.is_available() else "cpu"
    torch.compile(lambda values: values + 1, backend=name)(torch.ones(2, device=place))


def has_inductor_option(name: str) -> bool:
    """Whether this torch has the option: some have another name in another version. A group of them, such as triton,
    is none."""
    found = getattr(_reach("torch._inductor:config"), name, _MISSING)
    return found is not _MISSING and not hasattr(found, "_prefix")


def option_kind(name: str, value: object) -> str:
    """What kind of value the option is to have, in words, where `value` is another; empty where it is of that kind, or
    the option tells none."""
    default = getattr(_reach("torch._inductor:config"), name, None)
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        wanted = int if isinstance(default, int) else (int, float)
        return "" if isinstance(value, wanted) and not isinstance(value, bool) else "a number"
    return "a text" if isinstance(default, str) and not isinstance(value, str) else ""


def compiled_code_folder() -> str:
    """Where inductor keeps compiled code."""
    return str(_reach("torch._inductor.runtime.cache_dir_utils:cache_dir")())


def set_inductor_option(name: str, value: object) -> None:
    """inductor compiles with this option from now on. Raises ConfigError for one that this torch does not know."""
    if not has_inductor_option(name):
        raise ConfigError(f"compile.options.{name} is unknown to torch {torch.__version__}: see torch._inductor.config")
    setattr(_reach("torch._inductor:config"), name, value)


def set_recompile_limits(limit: int | None, accumulated: int) -> None:
    """So many graphs are made for a frame (None: as torch has it), and so many over all that share its code."""
    options = _reach("torch._dynamo:config")
    if limit is not None:
        _set(options, "recompile_limit", limit, key="compile.recompile_limit", see="torch._dynamo.config")
    _set(options, "accumulated_recompile_limit", accumulated, key="compile.recompile_limit", see="torch._dynamo.config")


def keep_equal_sizes_apart() -> None:
    """Two dimensions that happen to be equal in the first batch are not one dimension."""
    options = _reach("torch.fx.experimental:_config")
    _set(options, "use_duck_shape", False, key="compile.mark_dynamic", see="torch.fx.experimental._config")


def store() -> Any:
    """The operator with arguments (tensor, its strides) that gives the same tensor, in memory. None where torch has it
    not."""
    return _reach("torch._inductor.inductor_prims:force_stride_order")


def multiply_float8(rows: torch.Tensor, columns: torch.Tensor, *, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """The product in `dtype` of float8 matrices [M, K] and [K, N], taken for the numbers that they hold; `fast` sums it
    less exactly."""
    one = torch.ones((), device=rows.device)
    product: torch.Tensor = torch._scaled_mm(rows, columns, one, one, out_dtype=dtype, use_fast_accum=fast)
    return product


def use_graph_pass(graph_pass: object) -> None:
    """inductor runs the pass over every graph before it looks at gradients."""
    _set(
        _reach("torch._inductor:config"),
        "pre_grad_custom_pass",
        graph_pass,
        key="a pass over graphs",
        see="torch._inductor.config",
    )


def mark_dynamic(tensor: torch.Tensor, dimension: int, low: int, high: int) -> None:
    """The dimension varies within the bounds, and one graph must fit all of it."""
    torch._dynamo.mark_dynamic(tensor, dimension, min=low, max=high)


def maybe_mark_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """The dimension varies, and a graph may fit a part of it."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def mark_static_address(tensor: torch.Tensor) -> None:
    """The tensor's memory stays where it is."""
    torch._dynamo.mark_static_address(tensor)


def _set(options: Any, name: str, value: object, *, key: str, see: str) -> None:
    if not hasattr(options, name):
        raise ConfigError(f"{key} is unknown to torch {torch.__version__}, which has no {name} in {see}")
    setattr(options, name, value)


# --- What the compiler did ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler tells of one compile, or of work that compiled code did when it ran (`at_run`)."""

    compile_id: str  # "0/1", and in an isolated cache "0/1@3": its region is the third
    frame: str
    reason: str  # the guard failure that it names
    failure: str  # why it was given up
    skipped: str  # the place of a frame that will run eagerly as a whole
    at_run: bool
    hit_limit: bool
    dynamic: bool
    cache: str  # hit | miss | empty where none was asked
    backend_ns: int
    tuning_ns: int
    guards: int
    nodes: int


def _compiled(metrics: Any) -> Compiled:
    failure = metrics.fail_reason or ""
    tuning_us = metrics.runtime_triton_autotune_time_us if metrics.is_runtime else metrics.compile_time_autotune_time_us
    skipped = ""
    if failure and not metrics.has_guarded_code:
        skipped = place(
            metrics.fail_user_frame_filename or metrics.co_filename,
            metrics.fail_user_frame_lineno or metrics.co_firstlineno,
            metrics.co_name,
        )
    return Compiled(
        compile_id=compile_key(metrics.compile_id),
        frame=place(metrics.co_filename, metrics.co_firstlineno, metrics.co_name),
        reason=metrics.recompile_reason or "",
        failure=failure,
        skipped=skipped,
        at_run=bool(metrics.is_runtime),
        hit_limit="recompile limit" in failure.lower(),
        dynamic=_is_dynamic(metrics),
        cache=_cache_state(metrics),
        backend_ns=(metrics.aot_autograd_cumulative_compile_time_us or 0) * 1000,
        tuning_ns=(tuning_us or 0) * 1000,
        guards=metrics.guard_count or 0,
        nodes=metrics.graph_node_count or 0,
    )


def compile_key(compile_id: object) -> str:
    """The compile's id, with the number of its region where that has a cache of its own (isolate_recompiles)."""
    region = _region()
    return f"{compile_id or ''}" if region < 0 or not compile_id else f"{compile_id}@{region}"


def _region() -> int:
    # The first version with isolated caches is 2.13; before, all regions of a code share one.
    current = _reach("torch._dynamo.eval_frame:get_eval_frame_isolate_recompiles_id")
    return int(current()) if current is not None else -1


def _is_dynamic(metrics: Any) -> bool:
    """Whether a size of the graph is a symbol. A dynamic graph need not have a guard on one."""
    if metrics.graph_node_shapes:
        return _SYMBOLIC_SIZE.search(metrics.graph_node_shapes) is not None
    return bool(metrics.shape_env_guard_count)


def _cache_state(metrics: Any) -> str:
    """Whether the disk caches served the compile; empty where none was consulted. A hit still costs the tracing.

    The cache of generated code decides where it was consulted, as the backend's time goes there.
    """
    for cache in ("inductor_fx_local_cache", "aotautograd_local_cache"):
        if getattr(metrics, f"{cache}_miss_count", 0):
            return "miss"
        if getattr(metrics, f"{cache}_hit_count", 0):
            return "hit"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the compiler has counted since its process began."""

    kernels: int = 0  # generated
    library_calls: int = 0
    bypasses: int = 0  # of the cache of generated code
    graph_bypasses: int = 0  # of the cache of traced graphs


def counts() -> Counts:
    """What the compiler has counted by now; zero for what this torch does not count."""
    return Counts(
        kernels=_reach("torch._inductor.metrics:generated_kernel_count") or 0,
        library_calls=_count("inductor", "extern_calls"),
        bypasses=_count("inductor", "fxgraph_cache_bypass"),
        graph_bypasses=_count("aot_autograd", "autograd_cache_bypass"),
    )


def graphs_made() -> int:
    """Graphs that the compiler has made by now, and frames that it looked at: a compile raises this public count."""
    return _count("stats", "unique_graphs") + _count("frames", "total")


def cudagraph_skips() -> int:
    """CUDA graphs that the compiler has given up on by now."""
    return _count("inductor", "cudagraph_skips")


def _count(group: str, name: str) -> int:
    # Some are looked at in every step, so that no path is searched here.
    counters = getattr(getattr(torch._dynamo, "utils", None), "counters", None)
    return int(counters[group][name]) if counters is not None else 0


def graph_breaks() -> Sequence[Any]:
    """Every graph break so far, the newest last; `break_text` says what one is."""
    breaks: Sequence[Any] = _reach("torch._dynamo.utils:graph_break_reasons") or ()
    return breaks


def break_text(item: Any) -> str:
    """Where the graph broke and why."""
    where = item.user_stack[-1] if item.user_stack else None
    text = place(where.filename, where.lineno, where.name) if where is not None else "an unknown place"
    return f"{text}: {cause(item.reason)}"


def guard_failures() -> Mapping[CodeType, list[str]]:
    """By code: why each graph that was tried did not fit, since the compiler was last reset."""
    return _reach("torch._dynamo.utils:guard_failures") or {}


def place(filename: str | None, line: int | None, function: str | None) -> str:
    """ "models/llama/modeling_llama.py:300 in forward": the path below site-packages, or its last two parts."""
    if not filename:
        return f"an unknown place in {function}" if function else ""
    _, packages, inside = filename.rpartition("site-packages/")
    shown = inside if packages else "/".join(PurePath(filename).parts[-2:])
    return f"{shown}:{line} in {function}"


def cause(text: str) -> str:
    """The first line of the compiler's explanation, with what it was about where the explanation says so."""
    first = text.strip().splitlines()[0].strip() if text.strip() else "no reason given"
    context = _DEBUG_CONTEXT.search(text)
    shown = f"{first} ({context[1].strip()})" if context else first
    return shown if len(shown) <= _LONGEST_CAUSE else shown[: _LONGEST_CAUSE - 1] + "…"


# --- When it did --------------------------------------------------------------------------------------------------


class Taps:
    """Calls of the compiler that are passed on to whoever listens, until `remove`. Each is called on the thread where
    it happens, and may not raise: the compiler would fail."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._removed = False

    def remove(self) -> None:
        """Nothing is passed on any more; what was replaced is back, in the reverse order, unless it was replaced again
        since or another thread holds it."""
        self._removed = True
        while self._undo:
            self._undo.pop()()

    def compiles(self, listener: Callable[[Compiled, int], object]) -> None:
        """`listener(what, duration_ns)` after each compile of any thread, and after work at run time."""
        utils = _reach("torch._dynamo.utils:__dict__")
        get_metrics, last = utils["get_compilation_metrics"], [None]

        def after(original: Callable[..., Any]) -> Callable[..., None]:
            def on_exit(start_ns: int, end_ns: int, *rest: Any) -> None:
                original(start_ns, end_ns, *rest)
                recorded = get_metrics()
                if not self._removed and recorded and recorded[-1] is not last[0]:
                    last[0] = recorded[-1]
                    listener(_compiled(recorded[-1]), end_ns - start_ns)

            return on_exit

        # Each thread has contexts of its own. Those of this thread hold the function that they were made with; those
        # of threads to come will be made with the one that the module has then.
        for name in ("get_metrics_context", "get_runtime_metrics_context"):
            context = utils[name]()
            self._replace(context, "_on_exit", after(context._on_exit))
        module = importlib.import_module("torch._dynamo.utils")
        self._replace(module, "record_compilation_metrics", after(utils["record_compilation_metrics"]))

    def recordings(self, on_start: Callable[[], object], on_end: Callable[[str], object]) -> None:
        """`on_start()` and `on_end(compile id)` around each recording of the compiler's graph trees."""
        callback = importlib.import_module("torch._dynamo.callback")
        recording = callback.CallbackTrigger.CUDAGRAPH_RECORDING

        def started(args: Any) -> None:
            if args.callback_trigger is recording:
                on_start()

        def ended(args: Any) -> None:
            if args.callback_trigger is recording:
                on_end(compile_key(args.compile_id))

        self._call_back(started, ended)

    def under_way(self, on_start: Callable[[str, bool], object], on_end: Callable[[], object]) -> None:
        """`on_start(compile id, whether it is a recording)` before each compile and recording, `on_end()` after it,
        also where it failed. One that begins while another thread compiles is part of that one."""
        recording = _reach("torch._dynamo.callback:CallbackTrigger.CUDAGRAPH_RECORDING")
        self._call_back(
            lambda args: on_start(compile_key(args.compile_id), args.callback_trigger is recording),
            lambda args: on_end(),
        )

    def skipped_graphs(self, listener: Callable[[str], object], on_partition: Callable[[str], object]) -> None:
        """`listener(line)` for what the log of CUDA graphs says, `on_partition(cause)` for what it does not say."""
        log = _reach("torch._inductor.cudagraph_utils:cudagraphs_log")

        def read(record: logging.LogRecord) -> bool:
            listener(record.getMessage())
            return True

        log.addFilter(read)
        self._undo.append(lambda: log.removeFilter(read))
        name = "cudagraph_partition_post_compile"
        partition = _reach(f"torch._inductor.output_code:{name}")
        if partition is None:  # before graphs were partitioned
            return

        def after(example_inputs: Any, compiled_graph: Any, *rest: Any, **options: Any) -> None:
            partition(example_inputs, compiled_graph, *rest, **options)
            if self._removed:
                return
            # This path gives up without a word and without counting.
            causes = compiled_graph.cudagraph_info.cudagraph_fail_reasons
            if causes:
                on_partition("; ".join(causes))
            elif not compiled_graph.partition_maps:
                on_partition("no part of the graph can be captured")

        self._replace(importlib.import_module("torch._inductor.output_code"), name, after)

    def triton(self, listener: JitListener) -> None:
        """`listener` gets each kernel that Triton compiles in this process, or fetches from its disk cache, and each
        tuning of its autotuner."""
        options = _reach("triton.knobs:compilation")
        before = options.listener

        def on_compile(**compiled: Any) -> None:
            if before is not None:
                before(**compiled)
            if not self._removed:
                listener(_triton_compile(now_ns(), **compiled))

        self._replace(options, "listener", on_compile)
        autotuner = _reach("triton.runtime.autotuner:Autotuner")
        run = autotuner.run

        def tuned(tuner: Any, *args: Any, **options: Any) -> Any:
            known, start_ns = len(tuner.cache), now_ns()
            try:
                return run(tuner, *args, **options)
            finally:
                if not self._removed and len(tuner.cache) > known:
                    listener(_triton_tuning(tuner, start_ns, now_ns()))

        self._replace(autotuner, "run", tuned)

    def _replace(self, owner: Any, name: str, replacement: object) -> None:
        original = getattr(owner, name)
        setattr(owner, name, replacement)

        def restore() -> None:
            if getattr(owner, name) is replacement:  # else somebody has tapped it since, and goes on through here
                setattr(owner, name, original)

        self._undo.append(restore)

    def _call_back(self, on_start: Callable[[Any], object], on_end: Callable[[Any], object]) -> None:
        callback = importlib.import_module("torch._dynamo.callback")
        callback.on_compile_start(on_start)
        callback.on_compile_end(on_end)
        handler = callback.callback_handler

        def forget() -> None:
            for kept, own in ((handler.start_callbacks, on_start), (handler.end_callbacks, on_end)):
                if own in kept:  # a reset of the compiler drops them
                    kept.remove(own)

        self._undo.append(forget)


def _triton_compile(end_ns: int, *, src: Any, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> JitCompile:
    """One compile as Triton's listener tells it; `times` are microseconds."""
    took_ns = int(getattr(times, "total", 0)) * 1000
    function = getattr(src, "fn", None)
    name, where = _kernel(function)
    is_inductors = str(getattr(function, "__module__", "")).startswith("torch._inductor")
    constants: Mapping[Any, Any] = getattr(src, "constants", None) or {}
    names = getattr(function, "arg_names", ())
    values = [f"{_argument(key, names)}={value}" for key, value in constants.items()]
    options = [f"{key}={metadata[key]}" for key in ("num_warps", "num_stages") if key in metadata]
    # Two variants may differ in nothing but the types of their arguments, or in what is known to divide them.
    signature: Mapping[Any, Any] = getattr(src, "signature", None) or {}
    types = [f"{_argument(key, names)} {kind}" for key, kind in signature.items() if kind != "constexpr"]
    attributes: Mapping[Any, Any] = getattr(src, "attrs", None) or {}
    divisible = [_argument(key, names) for key, known in attributes.items() if known]
    multiples = [f"multiples of 16: {' '.join(divisible)}"] if divisible else []
    return JitCompile(
        compiler="inductor" if is_inductors else "triton",
        kernel=name or str(getattr(src, "name", "a kernel")),
        variant=", ".join([*values, *options, *types, *multiples]),
        place=where,
        start_ns=end_ns - took_ns,
        end_ns=end_ns,
        thread=threading.get_ident(),
        cache="hit" if cache_hit else "miss",
        compile_ns=took_ns,
    )


def _triton_tuning(tuner: Any, start_ns: int, end_ns: int) -> JitCompile:
    """One tuning: every variant of a kernel was run for sizes that it had not met."""
    name, where = _kernel(getattr(tuner, "base_fn", None))
    key = next(reversed(tuner.cache), "")
    return JitCompile(
        compiler="triton",
        kernel=name or "a kernel",
        variant=str(key),
        place=where,
        start_ns=start_ns,
        end_ns=end_ns,
        thread=threading.get_ident(),
        tuned=True,
        kernels=0,
    )


def _kernel(function: Any) -> tuple[str, str]:
    """(name, place) of a kernel by its Python function, which Triton may have wrapped."""
    while function is not None and not isinstance(getattr(function, "__code__", None), CodeType):
        function = getattr(function, "fn", None)
    if function is None:
        return "", ""
    code = function.__code__
    return function.__name__, place(code.co_filename, code.co_firstlineno, function.__name__)


def _argument(key: Any, names: Sequence[str]) -> str:
    """The name of an argument by which a constant is kept: its position, a path that begins with it, or its name."""
    position = key[0] if isinstance(key, tuple) and key else key
    return names[position] if isinstance(position, int) and position < len(names) else str(key)
