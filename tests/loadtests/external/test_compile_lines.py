"""Compiles as servers log them, and when their lines were written."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tailgate.loadtests.external.compile_lines import CompileLog, LineClock, LoggedCompile

SECOND = 10**9
AT = 1_764_100_000 * SECOND

CORE = "(EngineCore pid=14269) {level} 11-25 22:58:35 [{place}] "
STARTS = "(APIServer pid=14201) INFO 11-25 22:50:01 [api_utils.py:286] non-default args: {'model': 'a'}"
VERBOSE = STARTS.replace("'a'}", "'a', 'jit_monitor_verbose': True}")
MONITOR = (
    CORE.format(level="INFO", place="jit_monitor.py:94")
    + "Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn."
)
SPIKE = "This causes a latency spike; consider extending warmup to cover this shape/config."
JIT = CORE.format(level="WARNING", place="jit_monitor.py:140") + "{what} during inference: {name}. " + SPIKE
TRITON_LINE = JIT.format(what="Triton kernel JIT compilation", name="_fwd_kernel")
DETAIL = "(constexprs={BLOCK_M=64}; signature={n='i32', x='*bf16'}; extra_compile_info={num_warps=4}; key='abc(1)')"
IN_DETAIL = TRITON_LINE.replace("_fwd_kernel", f"_fwd_kernel {DETAIL}").replace(":140", ":137")
GRAPH = (
    CORE.format(level="INFO", place="backends.py:399") + "Compiling a graph for compile range (1, 8192) takes 12.34 s"
)
DYNAMO = CORE.format(level="INFO", place="backends.py:1167") + "Dynamo bytecode transform time: 4.25 s"


def read(*lines: str, every_ns: int = 0) -> list[LoggedCompile]:
    log = CompileLog()
    compiles = [compile for place, line in enumerate(lines) for compile in log.take(line, AT + place * every_ns)]
    return [*compiles, *log.rest()]


@pytest.mark.parametrize(
    ("line", "frame", "shape", "reason"),
    [
        (TRITON_LINE, "Triton _fwd_kernel", "", ""),
        (IN_DETAIL, "Triton _fwd_kernel", "", DETAIL[1:-1]),
        (JIT.format(what="CuTeDSL JIT compilation", name="gemm"), "CuTeDSL gemm", "", ""),
        (
            JIT.format(what="TileLang JIT compilation", name="mla (cache_key=(1, 2); runtime_shapes={q=(3, 64)})"),
            "TileLang mla",
            "{q=(3, 64)}",
            "cache_key=(1, 2); runtime_shapes={q=(3, 64)}",
        ),
    ],
)
def test_vllms_monitor_tells_of_kernels_and_not_how_long_they_took(
    line: str, frame: str, shape: str, reason: str
) -> None:
    kernel = LoggedCompile(kind="jit", start_ns=AT, end_ns=AT, frame=frame, shape=shape, reason=reason)
    assert read(line) == [kernel]


def test_a_graph_of_vllm_took_as_long_as_it_says_and_what_dynamo_took_before() -> None:
    assert read(GRAPH) == [LoggedCompile(kind="compile", start_ns=AT - 12_340_000_000, end_ns=AT, shape="(1, 8192)")]
    log = CompileLog()
    assert list(log.take(DYNAMO, AT)) == []
    later = AT + 20 * SECOND
    [graph] = log.take(GRAPH.replace("22:58:35", "22:58:55"), later)
    assert (graph.start_ns, graph.end_ns) == (AT - 4_250_000_000, later)


@pytest.mark.parametrize(
    ("message", "kind", "seconds", "shape", "cache"),
    [
        ("Compiling a graph for dynamic shape takes 0.50 s", "compile", 0.5, "dynamic shape", ""),
        ("[eagle_head] Compiling a graph for compile range (1, 8) takes 0.50 s", "compile", 0.5, "(1, 8)", ""),
        (
            "Directly load the compiled graph(s) for compile range (1, 8192) from the cache, took 1.500 s",
            *("compile", 1.5, "(1, 8192)", "hit"),
        ),
        ("Graph capturing finished in 7 secs, took 1.20 GiB", "graph_capture", 7, "", ""),
    ],
)
def test_other_lines_of_vllm(message: str, kind: str, seconds: float, shape: str, cache: str) -> None:
    [compile] = read(CORE.format(level="INFO", place="x.py:1") + message)
    assert (compile.kind, compile.shape, compile.cache) == (kind, shape, cache)
    assert compile.end_ns - compile.start_ns == seconds * SECOND


def test_ranks_of_one_engine_report_one_compile_and_separate_engines_two() -> None:
    def of(process: str) -> str:
        return TRITON_LINE.replace("(EngineCore pid=14269)", process)

    assert len(read(of("(Worker_TP0 pid=1)"), of("(Worker_TP1 pid=2)"), of("(Worker_TP2 pid=3)"))) == 1
    assert len(read(of("(Worker_DP0_TP0 pid=1)"), of("(Worker_DP1_TP0 pid=2)"))) == 2
    # The same process again has compiled again, and so has a rank much later.
    assert len(read(of("(Worker_TP0 pid=1)"), of("(Worker_TP0 pid=1)"))) == 2
    late = [of("(Worker_TP0 pid=1)"), of("(Worker_TP1 pid=2)").replace("22:58:35", "22:58:45")]
    assert len(read(*late, every_ns=10 * SECOND)) == 2


GLOG = "V1125 22:48:07.239000 1506 torch/_dynamo/guards.py:5396] [0/4] [__recompiles] "
RECOMPILE = [
    GLOG + "Recompiling function forward in /srv/model.py:2",
    GLOG + "    triggered by the following guard failure(s):",
    GLOG + "    - 0/3: tensor 'x' size mismatch at index 0. expected 5, actual 6",
    GLOG + "    - 0/2: tensor 'x' size mismatch at index 0. expected 4, actual 6",
]
WARNING = "W1125 22:48:07.891000 1506 torch/_dynamo/convert_frame.py:1994] [0/8] "
LIMIT = [
    WARNING + "torch._dynamo hit config.recompile_limit (8)",
    WARNING + "   function: 'forward' (/srv/model.py:2)",
]


def test_recompiles_have_their_first_reason_and_the_limit_is_an_event_of_its_own() -> None:
    reason = "0/3: tensor 'x' size mismatch at index 0. expected 5, actual 6"
    place = {"frame": "forward in /srv/model.py:2", "compile_id": "0/4"}
    first = LoggedCompile(kind="recompile", start_ns=AT, end_ns=AT, reason=reason, **place)
    assert read(*RECOMPILE) == [first]
    assert len(read(RECOMPILE[0], *RECOMPILE)) == 2, "one whose reason never came"
    again, limit = read(*RECOMPILE, *[line.replace("[0/4]", "[0/5]") for line in RECOMPILE], *LIMIT)[1:]
    assert again == replace(first, compile_id="0/5")
    assert (limit.kind, limit.compile_id) == ("limit_hit", "0/8")
    assert limit.reason == "recompile_limit (8) was hit: other shapes run eagerly from now on"


def test_lines_of_sglang() -> None:
    head = "[2026-11-25 22:58:35 TP0] "
    capture = "Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=3.50 s, mem usage=0.11 GB"
    older = "Capture cuda graph end. Time elapsed: 3.50 s. mem usage=0.11 GB. avail mem=9.00 GB."
    gemm = "Try DeepGEMM JIT Compiling for <GROUPED_GEMM_NT_F8F8BF16_CONTIG> N=512, K=7168, num_groups=8 with all Ms."
    kinds = read(head + capture, head + older, head + gemm, head.replace("TP0", "TP1") + gemm)
    assert [(compile.kind, compile.frame, compile.shape) for compile in kinds] == [
        ("graph_capture", "target decode CUDA graph", "[1, 2, 4]"),
        ("graph_capture", "cuda graph", ""),
        ("jit", "DeepGEMM GROUPED_GEMM_NT_F8F8BF16_CONTIG", "N=512, K=7168, num_groups=8"),
    ]
    assert [compile.end_ns - compile.start_ns for compile in kinds] == [3_500_000_000, 3_500_000_000, 0]


def test_tritons_autotuner_prints_a_few_lines_for_one_kernel() -> None:
    ends = "finished after 2.50s,"
    lines = [
        "Triton autotuning for function matmul,",
        "with key as (64, 128),",
        ends,
        "best config selected: BLOCK: 64;",
    ]
    [tuned] = read(*lines)
    assert tuned == LoggedCompile(
        kind="autotune", start_ns=AT - 2_500_000_000, end_ns=AT, frame="matmul", shape="(64, 128)"
    )
    assert read(ends) == []


ONCE = "vLLM warns once for each kernel unless it is started with --jit-monitor-verbose"
UNSEEN = "no line says that vLLM's monitor of JIT compiles is on: show the log from its start on"


def spots(*lines: str, before: tuple[str, ...] = ()) -> list[str]:
    log = CompileLog()
    for line in before:
        log.learn(line)
    for line in lines:
        list(log.take(line, AT))
    return log.blind_spots


@pytest.mark.parametrize(
    ("before", "lines", "missing"),
    [
        ((VERBOSE, MONITOR), (TRITON_LINE,), [ONCE]),  # whatever it says, this line has no details
        ((VERBOSE, MONITOR), (IN_DETAIL,), []),
        ((VERBOSE, MONITOR), (), []),
        ((STARTS, MONITOR), (), [ONCE]),
        ((), (GRAPH,), [ONCE, UNSEEN]),
        ((VERBOSE,), (), [UNSEEN]),  # with --enforce-eager nothing is monitored
        ((VERBOSE, MONITOR, STARTS), (), [ONCE, UNSEEN]),  # it was started again, otherwise
    ],
)
def test_a_log_of_vllm_reports_all_that_it_watches_if_it_was_started_to_and_is_shown_whole(
    before: tuple[str, ...], lines: tuple[str, ...], missing: list[str]
) -> None:
    assert spots(*lines, before=before) == missing


def test_logs_of_others_never_tell_all() -> None:
    assert "TORCH_LOGS=recompiles shows no" in spots(*RECOMPILE)[0]
    assert "SGLang logs captures" in spots("[2026-11-25 22:58:35 TP0] Decode batch")[0]
    assert spots("GET /health 200") == ["no line of it is known to be of vLLM, SGLang or PyTorch"]


NOON = int(datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()) * SECOND


@pytest.mark.parametrize(
    "head",
    [
        "(EngineCore pid=7) INFO 11-25 {clock} [x.py:1] ",
        "[2026-11-25 {clock} TP0] ",
        "V1125 {clock}.000000 1506 torch/_dynamo/guards.py:5396] [0/4] ",
        "2026-11-25T{clock}.000000000Z (EngineCore pid=7) INFO 03-04 01:02:03 [x.py:1] ",
        "2026-11-25T{clock}+02:00 ",
        '{{"asctime": "2026-11-25 {clock},000", "message": "',
    ],
)
@pytest.mark.parametrize("zone_h", [0, -8, 5])
def test_a_line_that_came_late_was_written_when_it_says(head: str, zone_h: int) -> None:
    clock = LineClock()
    away = zone_h * 3600 * SECOND  # by which the server's clock differs from this host's
    arrived = NOON + away + 20_000_000
    assert clock.moment(head.format(clock="12:00:00") + "first", arrived) == arrived
    late = clock.moment(head.format(clock="12:00:10") + "late", NOON + away + 17 * SECOND)
    assert 0 <= late - (NOON + away + 10 * SECOND) <= 1.1 * SECOND


@pytest.mark.parametrize(
    ("before", "after"), [("10-25 02:59:59", "10-25 02:00:00"), ("12-31 23:59:59", "01-01 00:00:00")]
)
def test_a_clock_that_was_set_back_is_learnt_anew(before: str, after: str) -> None:
    clock = LineClock()
    clock.moment(f"INFO {before} [x.py:1] ", NOON)
    assert clock.moment(f"INFO {after} [x.py:1] ", NOON + SECOND) == NOON + SECOND


def test_the_history_of_a_log_is_dated_from_its_newest_line() -> None:
    clock = LineClock()
    history = [f"INFO 11-25 {hour:02}:00:00 [x.py:1] " for hour in range(6, 12)]  # all printed at once
    for line in history:
        clock.learn(line, NOON)
    assert [round((NOON - clock.moment(line, NOON)) / 3600 / SECOND) for line in history] == [5, 4, 3, 2, 1, 0]


def test_a_line_without_a_time_was_written_when_it_came() -> None:
    assert LineClock().moment("finished after 1.23s,", NOON) == NOON
    assert LineClock().moment("INFO 02-30 12:00:00 [x.py:1] ", NOON) == NOON
