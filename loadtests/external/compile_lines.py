"""Compiles as servers log them: lines in, compiles out. Nothing here reads a file or a clock.

Read in the sources of vLLM 0.32 (`utils/jit_monitor.py`, `compilation/backends.py`, `v1/worker/gpu_model_runner.py`),
SGLang 0.5.23 (`model_runner_components/cuda_graph_setup.py`, `deep_gemm_wrapper/compile_utils.py`), PyTorch 2.13
(`_dynamo/guards.py`, `_dynamo/convert_frame.py`, `_logging/_internal.py`) and Triton 3.9 (`runtime/autotuner.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

_LONGEST = 400  # characters of a reason
_SECOND = 10**9
_RANKS_NS = 5 * _SECOND  # within which all ranks of an engine log the same compile
_REASON_NS = _SECOND  # within which the reason of a recompile follows it

_HEAD = 240  # characters of a line in which its time stands
# (day and time, fraction, zone), as kubectl and docker put it in front, as SGLang and JSON lines have it.
_WHOLE = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
# (month, day, time, fraction) of vLLM's "INFO 11-25 22:48:07", and PyTorch's "V1125 22:48:07.239000".
_YEARLESS = re.compile(r"\b(?:[A-Z]+ |[VIWEC](?=\d{4} ))(\d\d)-?(\d\d) (\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?")
_SET_BACK_NS = 600 * _SECOND
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"[_ ]?(?:TP|PP|EP|rank)\d+")
_VLLM_PROCESS = re.compile(r"\((\w+) pid=(\d+)\)")
_SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{3})?((?: [A-Z]+\d+)*)\] ")
_GLOG = re.compile(r"(?:\[(rank\d+)\]:)?[VIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ (\d+) [^\]]*\](?: \[([^\]]+)\])? ")

# Each line that is a compile by itself: (kind, pattern). Its groups are of a `LoggedCompile`: `maker` stands before the
# `frame`, and `took` are the seconds that end with the line.
_LINES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("compile", r"Compiling a graph for (?:compile range |shape )?(?P<shape>.+?) takes (?P<took>[\d.]+) s"),
        (
            "compile",
            r"Directly load the compiled graph\(s\) for (?:compile range |shape )?(?P<shape>.+?) "
            r"from the (?P<cache>cache), took (?P<took>[\d.]+) s",
        ),
        (
            "jit",
            r"(?P<maker>Triton|CuTeDSL|TileLang) (?:kernel )?JIT compilation during inference: (?P<frame>.+?)"
            r"(?: \((?P<reason>(?:constexprs|cache_key)=.*)\))?\. This causes a latency spike",
        ),
        ("jit", r"Try (?P<maker>DeepGEMM) JIT Compiling for <(?P<frame>\w+)> (?P<shape>N=\d+, K=\d+, num_groups=\d+)"),
        ("graph_capture", r"Graph capturing finished in (?P<took>\d+) secs"),
        ("graph_capture", r"Capture (?P<frame>.+?) end\. .*?(?:elapsed=|Time elapsed: )(?P<took>[\d.]+) s"),
        ("limit_hit", r"torch\._dynamo hit config\.(?P<reason>\w+ \(\d+\))"),
    )
)
_SHAPES = re.compile(r"runtime_shapes=(\{.*\})|\bbs=(\[[^\]]*\])")
_DYNAMO = re.compile(r"Dynamo bytecode transform time: ([\d.]+) s")
_RECOMPILE = re.compile(r"\[__recompiles(?:_verbose)?\] Recompiling function (\S+) in (\S+)")
_GUARD = re.compile(r"\[__recompiles(?:_verbose)?\] +- (.+)")
_AUTOTUNED = re.compile(r"Triton autotuning for function (\S+),")
_KEY, _FINISHED = re.compile(r"with key as (.+),$"), re.compile(r"finished after ([\d.]+)s,")

# Whose log it is.
_SERVERS = {
    "vllm": re.compile(
        r"\b(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[|Kernel JIT monitor activated"  # of all versions
    ),
    "sglang": _SGLANG,
    "torch": re.compile(r"\[__recompiles|torch\._dynamo hit config\."),
}
_VLLM_VERBOSE = re.compile(r"jit_monitor_verbose['\"]?\s*[=:]\s*(True|False)")
_VLLM_STARTS, _VLLM_MONITOR = "non-default args: ", "Kernel JIT monitor activated"
_TRITON = re.compile(r"Triton (?:kernel )?JIT compilation during inference: .+?( \(constexprs=.*\))?\. This causes")


class LineClock:
    """The clock of one log, whose zone and error are unknown. Its offset is that of the lines that arrived soonest.

    A line without a time counts as written when it arrived.
    """

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._before_ns: int | None = None  # the time of the line before, as it has it

    def learn(self, line: str, arrived_ns: int) -> None:
        """Update the offset by a line that is read later."""
        if (stamp := _time_of(line[:_HEAD], arrived_ns)) is not None:
            delay_ns = arrived_ns - stamp[0]
            self._offset_ns = delay_ns if self._offset_ns is None else min(delay_ns, self._offset_ns)

    def moment(self, line: str, arrived_ns: int) -> int:
        """Return when the line was written: its arrival, unless its own time shows that it arrived late."""
        stamp = _time_of(line[:_HEAD], arrived_ns)
        if stamp is None:
            return arrived_ns
        at_ns, step_ns = stamp
        if self._before_ns is not None and at_ns < self._before_ns - _SET_BACK_NS:
            self._offset_ns = None
        self._before_ns = at_ns
        self.learn(line, arrived_ns)
        assert self._offset_ns is not None
        return min(arrived_ns, at_ns + self._offset_ns + step_ns)


def _time_of(head: str, arrived_ns: int) -> tuple[int, int] | None:
    """Return (ns, what it is rounded down to) of the first time in the text, as if of UTC; None where there is none."""
    if match := _WHOLE.search(head):
        text, digits = match[1] + (match[3] or "Z"), match[2] or ""
    elif match := _YEARLESS.search(head):
        # The year in which it arrives; a clock that a new year sets back is learnt anew.
        year = datetime.fromtimestamp(arrived_ns // _SECOND, tz=UTC).year
        text, digits = f"{year}-{match[1]}-{match[2]} {match[3]}Z", match[4] or ""
    else:
        return None
    try:
        at_ns = int(datetime.fromisoformat(text).timestamp()) * _SECOND
    except ValueError:  # there is no such day
        return None
    return at_ns + int(digits.ljust(9, "0")), 10 ** (9 - len(digits))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCompile:
    """One compile by its lines. Where no line tells how long it took, start and end are the moment of its line: the end
    of a kernel of Triton, the begin of any other."""

    kind: str  # one of tailgate.analysis.records.schemas
    start_ns: int
    end_ns: int
    frame: str = ""
    shape: str = ""
    reason: str = ""
    compile_id: str = ""
    cache: str = ""


@dataclass(slots=True)
class CompileLog:
    """The compiles that one log reports, and what it leaves out."""

    lines: int = 0
    _clock: LineClock = field(default_factory=LineClock)
    _servers: set[str] = field(default_factory=set)
    _verbose: bool = False
    _monitored: bool = False
    _terse: bool = False  # a kernel of Triton was logged without its details
    _traced_ns: dict[str, int] = field(default_factory=dict)  # when Dynamo began on what the process compiles now
    # A recompile whose reason stands in lines that follow, who wrote it, and when its line came.
    _recompile: tuple[LoggedCompile, tuple[str, str], int] | None = None
    _tuned: str = ""
    _tuned_for: str = ""
    _last: dict[tuple[str, LoggedCompile], tuple[str, int]] = field(default_factory=dict)  # by what process, and when

    def learn(self, line: str) -> None:
        """Learn what the line says of the server; for lines from before the log was followed."""
        line = _COLOUR.sub("", line)
        self._servers |= {name for name, pattern in _SERVERS.items() if pattern.search(line)}
        if _VLLM_STARTS in line:
            self._verbose = self._monitored = self._terse = False  # of this start nothing is known yet
        if verbose := _VLLM_VERBOSE.search(line):
            self._verbose = verbose[1] == "True"
        triton = _TRITON.search(line)
        self._monitored |= _VLLM_MONITOR in line or triton is not None
        self._terse |= triton is not None and not triton[1]

    def set_clock(self, line: str, arrived_ns: int) -> None:
        """Learn the server's clock from the line, which is taken later."""
        self._clock.learn(_COLOUR.sub("", line), arrived_ns)

    def take(self, line: str, arrived_ns: int) -> Iterator[LoggedCompile]:
        """Yield the compiles that are known with this line."""
        line = _COLOUR.sub("", line)
        self.lines += 1
        self.learn(line)
        at_ns, writer = self._clock.moment(line, arrived_ns), _writer_of(line)
        if self._recompile is not None and self._recompile[1] == writer and (guard := _GUARD.search(line)):
            (recompile, *_), self._recompile = self._recompile, None
            yield from self._once(replace(recompile, reason=guard[1][:_LONGEST]), writer)
        head = _GLOG.search(line)
        known = LoggedCompile(kind="", start_ns=at_ns, end_ns=at_ns, compile_id=(head[3] or "") if head else "")
        if match := _RECOMPILE.search(line):
            yield from self.rest()
            recompile = replace(known, kind="recompile", frame=f"{match[1]} in {match[2]}")
            self._recompile = recompile, writer, arrived_ns
        if match := _DYNAMO.search(line):
            self._traced_ns[writer[1]] = at_ns - _ns(match[1])
        for kind, pattern in _LINES:
            if match := pattern.search(line):
                yield from self._once(self._compile(replace(known, kind=kind), match, line, writer[1]), writer)
        yield from self._autotuned(line, known, writer)

    def rest(self, now_ns: int | None = None) -> Iterator[LoggedCompile]:
        """Yield the compile whose reason was waited for; with `now_ns`, once it will not come any more."""
        if self._recompile is not None and (now_ns is None or now_ns - self._recompile[2] > _REASON_NS):
            (recompile, writer, _), self._recompile = self._recompile, None
            yield from self._once(recompile, writer)

    @property
    def blind_spots(self) -> list[str]:
        """What compiles may have been without a line, in sentences; empty where the log has all."""
        spots = []
        if "vllm" in self._servers:
            if self._terse or not self._verbose:
                spots.append("vLLM warns once for each kernel unless it is started with --jit-monitor-verbose")
            if not self._monitored:
                spots.append("no line says that vLLM's monitor of JIT compiles is on: show the log from its start on")
        if "sglang" in self._servers:
            spots.append("SGLang logs captures of CUDA graphs and compiles of DeepGEMM, and no kernels of Triton")
        if "torch" in self._servers and "vllm" not in self._servers:
            spots.append("TORCH_LOGS=recompiles shows no first compiles, CUDA graph captures or kernel compiles")
        return spots or ([] if self._servers else ["no line of it is known to be of vLLM, SGLang or PyTorch"])

    def _compile(self, known: LoggedCompile, match: re.Match[str], line: str, process: str) -> LoggedCompile:
        found = {name: text or "" for name, text in match.groupdict().items()}
        start_ns = known.end_ns - _ns(found.get("took") or "0")
        if known.kind == "compile":
            start_ns = min(self._traced_ns.pop(process, known.end_ns), start_ns)
        shapes = _SHAPES.search(line)
        limit = " was hit: other shapes run eagerly from now on" if known.kind == "limit_hit" else ""
        return replace(
            known,
            start_ns=start_ns,
            frame=f"{found.get('maker', '')} {found.get('frame', '')}".strip(),
            shape=found.get("shape") or (shapes[1] or shapes[2] if shapes else ""),
            reason=found.get("reason", "")[:_LONGEST] + limit,
            cache="hit" if "cache" in found else "",
        )

    def _autotuned(self, line: str, known: LoggedCompile, writer: tuple[str, str]) -> Iterator[LoggedCompile]:
        """Yield the autotuning of Triton's consecutive lines, which have no time."""
        if match := _AUTOTUNED.search(line):
            self._tuned, self._tuned_for = match[1], ""
        elif self._tuned and (match := _KEY.search(line)):
            self._tuned_for = match[1][:_LONGEST]
        elif self._tuned and (match := _FINISHED.search(line)):
            tuned = replace(known, kind="autotune", start_ns=known.end_ns - _ns(match[1]), frame=self._tuned)
            self._tuned = ""
            yield from self._once(replace(tuned, shape=self._tuned_for), writer)

    def _once(self, compile: LoggedCompile, writer: tuple[str, str]) -> Iterator[LoggedCompile]:
        """Yield the compile, unless another rank of the engine has just logged the same: ranks compile in step."""
        engine, process = writer
        key = engine, replace(compile, start_ns=0, end_ns=0)
        last = self._last.get(key)
        if last is not None and last[0] != process and abs(compile.end_ns - last[1]) <= _RANKS_NS:
            return
        self._last[key] = process, compile.end_ns
        yield compile


def _writer_of(line: str) -> tuple[str, str]:
    """Return the (engine, process) that wrote the line: one engine may be several processes, its ranks."""
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
