"""Compiles as servers log them: lines in, compiles out. Nothing here reads a file or a clock.

Read in the sources of vLLM 0.32 (`utils/jit_monitor.py`, `compilation/backends.py`, `v1/worker/gpu_model_runner.py`),
SGLang 0.5.23 (`model_runner_components/cuda_graph_setup.py`, `deep_gemm_wrapper/compile_utils.py`), PyTorch 2.13
(`_dynamo/guards.py`, `_dynamo/convert_frame.py`, `_logging/_internal.py`) and Triton 3.9 (`runtime/autotuner.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from loadtests.external.line_clock import LineClock
from loadtests.external.telemetry import LogFormat

_LONGEST = 400  # characters of a reason
_SECOND = 10**9
_RANKS_NS = 5 * _SECOND  # within which all ranks of an engine log the same compile
_REASON_NS = _SECOND  # within which the reason of a recompile follows it

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"[_ ]?(?:TP|PP|EP|rank)\d+")

_VLLM_PROCESS = re.compile(r"\((\w+) pid=(\d+)\)")
_VLLM_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[")  # of all releases
_VLLM_JIT = re.compile(
    r"(Triton|CuTeDSL|TileLang) (?:kernel )?JIT compilation during inference: (.+?)"
    r"(?: \(((?:constexprs|cache_key)=.*)\))?\. This causes a latency spike"
)
_VLLM_VERBOSE = re.compile(r"jit_monitor_verbose['\"]?\s*[=:]\s*(True|False)")
_VLLM_STARTS, _VLLM_MONITOR = "non-default args: ", "Kernel JIT monitor activated"
_DYNAMO = re.compile(r"Dynamo bytecode transform time: ([\d.]+) s")
_GRAPH = re.compile(r"Compiling a graph for (?:compile range |shape )?(.+?) takes ([\d.]+) s")
_CACHED = re.compile(
    r"Directly load the compiled graph\(s\) for (?:compile range |shape )?(.+?) from the cache, took ([\d.]+) s"
)
_VLLM_CAPTURE = re.compile(r"Graph capturing finished in (\d+) secs")
_RUNTIME_SHAPES = re.compile(r"runtime_shapes=(\{.*\})")

_SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{3})?((?: [A-Z]+\d+)*)\] ")
_SGLANG_CAPTURE = re.compile(r"Capture (.+?) end\. .*?(?:elapsed=|Time elapsed: )([\d.]+) s")
_SGLANG_SIZES = re.compile(r"\bbs=(\[[^\]]*\])")
_DEEP_GEMM = re.compile(r"Try DeepGEMM JIT Compiling for <(\w+)> (N=\d+, K=\d+, num_groups=\d+)")

_GLOG = re.compile(r"(?:\[(rank\d+)\]:)?[VIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ (\d+) [^\]]*\](?: \[([^\]]+)\])? ")
_RECOMPILE = re.compile(r"\[__recompiles(?:_verbose)?\] Recompiling function (\S+) in (\S+)")
_GUARD = re.compile(r"\[__recompiles(?:_verbose)?\] +- (.+)")
_LIMIT = re.compile(r"torch\._dynamo hit config\.(\w+) \((\d+)\)")

_AUTOTUNED = re.compile(r"Triton autotuning for function (\S+),")
_KEY, _FINISHED = re.compile(r"with key as (.+),$"), re.compile(r"finished after ([\d.]+)s,")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCompile:
    """One compile by its lines. Where no line tells how long it took, start and end are the moment of its line: the end
    of a kernel of Triton, the begin of any other."""

    kind: str  # one of analysis.records.schemas
    start_ns: int
    end_ns: int
    frame: str = ""
    shape: str = ""
    reason: str = ""
    compile_id: str = ""
    cache: str = ""


@dataclass(slots=True)
class _Recompile:
    """A recompile whose reason stands in lines that follow."""

    compile: LoggedCompile
    engine: str
    process: str
    seen_ns: int


@dataclass(slots=True)
class CompileLog:
    """What one log tells of compiles, and what it leaves out."""

    format: LogFormat = "auto"
    lines: int = 0
    _clock: LineClock = field(default_factory=LineClock)
    _servers: set[str] = field(default_factory=set)
    _verbose: bool = False
    _monitored: bool = False
    _terse: bool = False  # a kernel of Triton was logged without its details
    _traced_ns: dict[str, int] = field(default_factory=dict)  # when Dynamo began on what the process compiles now
    _recompile: _Recompile | None = None
    _tuned: str = ""
    _tuned_for: str = ""
    _last: dict[tuple[str, ...], tuple[str, int]] = field(default_factory=dict)  # by what process, and when

    def learn(self, line: str) -> None:
        """What the line says of the server is known; for lines from before the log was followed."""
        self._learn(_COLOUR.sub("", line))

    def set_clock(self, line: str, arrived_ns: int) -> None:
        """What the line, which is taken later, tells of the server's clock is known."""
        self._clock.learn(_COLOUR.sub("", line), arrived_ns)

    def take(self, line: str, arrived_ns: int) -> Iterator[LoggedCompile]:
        """The compiles that are known with this line."""
        line = _COLOUR.sub("", line)
        self.lines += 1
        self._learn(line)
        at_ns = self._clock.moment(line, arrived_ns)
        engine, process = _engine_of(line)
        if self._recompile is not None:
            guard = _GUARD.search(line)
            if guard and process == self._recompile.process and not self._recompile.compile.reason:
                self._recompile.compile = replace(self._recompile.compile, reason=guard[1][:_LONGEST])
            elif "[__recompiles" not in line or _RECOMPILE.search(line):
                yield from self.rest()
        if self.format in ("auto", "torch"):
            yield from self._torch(line, at_ns, arrived_ns, engine, process)
        if self.format != "torch":
            yield from self._served(line, at_ns, engine, process)
        yield from self._autotuned(line, at_ns, engine, process)

    def rest(self, now_ns: int | None = None) -> Iterator[LoggedCompile]:
        """The compile whose reason was waited for; with `now_ns`, once it will not come any more."""
        waiting = self._recompile
        if waiting is not None and (now_ns is None or now_ns - waiting.seen_ns > _REASON_NS):
            self._recompile = None
            yield from self._once(waiting.compile, waiting.engine, waiting.process)

    @property
    def blind_spots(self) -> list[str]:
        """What compiles may have been without a line, in sentences; empty where the log has all."""
        known = self._known()
        spots = []
        if "vllm" in known:
            if self._terse or not self._verbose:
                spots.append("vLLM warns once for each kernel unless it is started with --jit-monitor-verbose")
            if not self._monitored:
                spots.append("no line says that vLLM's monitor of JIT compiles is on: show the log from its start on")
        if "sglang" in known:
            spots.append("SGLang logs captures of CUDA graphs and compiles of DeepGEMM, and no kernels of Triton")
        if "torch" in known and "vllm" not in known:
            spots.append("TORCH_LOGS=recompiles tells neither first compiles, captures of CUDA graphs nor kernels")
        return spots or ([] if known else ["no line of it is known to be of vLLM, SGLang or PyTorch"])

    def _known(self) -> set[str]:
        return self._servers if self.format == "auto" else {self.format}

    def _learn(self, line: str) -> None:
        if _VLLM_LEVEL.search(line):
            self._servers.add("vllm")
        elif _SGLANG.search(line):
            self._servers.add("sglang")
        elif "[__recompiles" in line or _LIMIT.search(line):
            self._servers.add("torch")
        if _VLLM_STARTS in line:
            self._verbose = self._monitored = self._terse = False  # of this start nothing is known yet
        if verbose := _VLLM_VERBOSE.search(line):
            self._verbose = verbose[1] == "True"
        if _VLLM_MONITOR in line:
            self._servers.add("vllm")
            self._monitored = True
        if (jit := _VLLM_JIT.search(line)) and jit[1] == "Triton":
            self._monitored = True
            self._terse |= not jit[3]

    def _served(self, line: str, at_ns: int, engine: str, process: str) -> Iterator[LoggedCompile]:
        """Of the lines of vLLM and of SGLang, which logs graphs in vLLM's words."""
        if match := _DYNAMO.search(line):
            self._traced_ns[process] = at_ns - _ns(match[1])
        for pattern, cache in ((_GRAPH, ""), (_CACHED, "hit")):
            if match := pattern.search(line):
                start_ns = min(self._traced_ns.pop(process, at_ns), at_ns - _ns(match[2]))
                compile = LoggedCompile(kind="compile", start_ns=start_ns, end_ns=at_ns, shape=match[1], cache=cache)
                yield from self._once(compile, engine, process)
        if match := _VLLM_JIT.search(line):
            shapes = _RUNTIME_SHAPES.search(match[3] or "")
            compile = LoggedCompile(
                kind="jit",
                start_ns=at_ns,
                end_ns=at_ns,
                frame=f"{match[1]} {match[2]}",
                shape=shapes[1] if shapes else "",
                reason=(match[3] or "")[:_LONGEST],
            )
            yield from self._once(compile, engine, process)
        if match := _VLLM_CAPTURE.search(line) or _SGLANG_CAPTURE.search(line):
            *name, took = match.groups()
            sizes = _SGLANG_SIZES.search(line)
            capture = LoggedCompile(kind="graph_capture", start_ns=at_ns - _ns(took), end_ns=at_ns)
            capture = replace(capture, frame=name[0] if name else "", shape=sizes[1] if sizes else "")
            yield from self._once(capture, engine, process)
        if match := _DEEP_GEMM.search(line):
            compile = LoggedCompile(kind="jit", start_ns=at_ns, end_ns=at_ns, frame=f"DeepGEMM {match[1]}")
            yield from self._once(replace(compile, shape=match[2]), engine, process)

    def _torch(self, line: str, at_ns: int, arrived_ns: int, engine: str, process: str) -> Iterator[LoggedCompile]:
        head = _GLOG.search(line)
        compile_id = head[3] or "" if head else ""
        if match := _RECOMPILE.search(line):
            compile = LoggedCompile(
                kind="recompile", start_ns=at_ns, end_ns=at_ns, frame=f"{match[1]} in {match[2]}", compile_id=compile_id
            )
            self._recompile = _Recompile(compile, engine, process, arrived_ns)
        elif match := _LIMIT.search(line):
            reason = f"{match[1]} ({match[2]}) was hit: other shapes run eagerly from now on"
            limit = LoggedCompile(kind="limit_hit", start_ns=at_ns, end_ns=at_ns, reason=reason, compile_id=compile_id)
            yield from self._once(limit, engine, process)

    def _autotuned(self, line: str, at_ns: int, engine: str, process: str) -> Iterator[LoggedCompile]:
        """Triton prints these lines one after the other, without a time."""
        if match := _AUTOTUNED.search(line):
            self._tuned, self._tuned_for = match[1], ""
        elif self._tuned and (match := _KEY.search(line)):
            self._tuned_for = match[1][:_LONGEST]
        elif self._tuned and (match := _FINISHED.search(line)):
            tuned = LoggedCompile(kind="autotune", start_ns=at_ns - _ns(match[1]), end_ns=at_ns, frame=self._tuned)
            self._tuned = ""
            yield from self._once(replace(tuned, shape=self._tuned_for), engine, process)

    def _once(self, compile: LoggedCompile, engine: str, process: str) -> Iterator[LoggedCompile]:
        """The compile, unless another rank of the engine has just logged the same: ranks compile in step."""
        key = (engine, compile.kind, compile.frame, compile.shape, compile.reason, compile.compile_id)
        last = self._last.get(key)
        if last is not None and last[0] != process and abs(compile.end_ns - last[1]) <= _RANKS_NS:
            return
        self._last[key] = process, compile.end_ns
        yield compile


def _engine_of(line: str) -> tuple[str, str]:
    """(engine, process) that wrote the line: one engine may be several processes, its ranks."""
    if match := _VLLM_PROCESS.search(line):
        return _RANK.sub("", match[1]), f"{match[1]} {match[2]}"
    if match := _SGLANG.search(line):
        return _RANK.sub("", match[1]), match[1]
    if match := _GLOG.search(line):
        # Processes that are no ranks serve side by side.
        return ("ranks" if match[1] else match[2]), f"{match[1]} {match[2]}"
    return "", ""


def _ns(seconds: str) -> int:
    return int(float(seconds) * _SECOND)
