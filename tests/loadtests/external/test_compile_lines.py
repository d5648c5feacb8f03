"""Lines as the servers print them, and the compiles that they tell of.

Those of vLLM were printed by its own logger and monitor (0.32), those of PyTorch by 2.13 under TORCH_LOGS=recompiles;
those of SGLang (0.5.23) and of Triton's autotuner (3.9) follow the format strings of their sources.
"""

from __future__ import annotations

import pytest

from loadtests.external.compile_lines import CompileLog, LoggedCompile
from loadtests.external.telemetry import LogFormat

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
TRITON = JIT.format(what="Triton kernel JIT compilation", name="_fwd_kernel")
DETAIL = "(constexprs={BLOCK_M=64}; signature={n='i32', x='*bf16'}; extra_compile_info={num_warps=4}; key='abc(1)')"
IN_DETAIL = TRITON.replace("_fwd_kernel", f"_fwd_kernel {DETAIL}").replace(":140", ":137")
GRAPH = (
    CORE.format(level="INFO", place="backends.py:399") + "Compiling a graph for compile range (1, 8192) takes 12.34 s"
)
DYNAMO = CORE.format(level="INFO", place="backends.py:1167") + "Dynamo bytecode transform time: 4.25 s"


def read(*lines: str, format: LogFormat = "auto", every_ns: int = 0) -> list[LoggedCompile]:
    log = CompileLog(format=format)
    compiles = [compile for place, line in enumerate(lines) for compile in log.take(line, AT + place * every_ns)]
    return [*compiles, *log.rest()]


@pytest.mark.parametrize(
    ("line", "frame", "shape", "reason"),
    [
        (TRITON, "Triton _fwd_kernel", "", ""),
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
    assert read(line) == read(line, format="vllm") == [kernel]
    assert read(line, format="torch") == []


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


def test_colours_of_a_terminal_are_no_part_of_a_line() -> None:
    coloured = (
        "\x1b[0;36m(EngineCore pid=14346)\x1b[0;0m \x1b[32mINFO\x1b[0m \x1b[90m11-25 22:58:44\x1b[0m "
        "\x1b[90m[vl.py:19]\x1b[0m Compiling a graph for compile range (1, 8192) takes 12.34 s"
    )
    assert [compile.shape for compile in read(coloured)] == ["(1, 8192)"]


def test_ranks_of_one_engine_tell_of_one_compile_and_engines_beside_each_other_of_two() -> None:
    def of(process: str) -> str:
        return TRITON.replace("(EngineCore pid=14269)", process)

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


@pytest.mark.parametrize("format", ["auto", "torch"])
def test_a_recompile_of_dynamo_has_its_first_reason(format: LogFormat) -> None:
    recompile = LoggedCompile(
        kind="recompile",
        start_ns=AT,
        end_ns=AT,
        frame="forward in /srv/model.py:2",
        reason="0/3: tensor 'x' size mismatch at index 0. expected 5, actual 6",
        compile_id="0/4",
    )
    assert read(*RECOMPILE, format=format) == [recompile]
    assert read(*RECOMPILE, format="vllm") == []


def test_recompiles_that_follow_each_other_are_as_many_and_the_limit_is_one_of_its_own() -> None:
    second = [line.replace("[0/4]", "[0/5]") for line in RECOMPILE]
    compiles = read(*RECOMPILE, *second, *LIMIT)
    assert [(compile.kind, compile.compile_id) for compile in compiles] == [
        ("recompile", "0/4"),
        ("recompile", "0/5"),
        ("limit_hit", "0/8"),
    ]
    assert compiles[2].reason == "recompile_limit (8) was hit: other shapes run eagerly from now on"


def test_a_reason_is_waited_for_and_not_for_ever() -> None:
    log = CompileLog()
    assert list(log.take(RECOMPILE[0], AT)) == []
    assert list(log.rest(AT + SECOND // 2)) == []
    [recompile] = log.rest(AT + 2 * SECOND)
    assert (recompile.start_ns, recompile.reason) == (AT, "")
    assert list(log.rest()) == []


def test_ranks_of_torch_are_told_by_their_prefix() -> None:
    lines = [f"[rank{rank}]:" + line.replace(" 1506 ", f" 150{rank} ") for rank in (0, 1) for line in RECOMPILE]
    assert len(read(*lines)) == 1
    beside = [line.replace(" 1506 ", f" 150{place} ") for place in (6, 7) for line in RECOMPILE]
    assert len(read(*beside)) == 2


def test_lines_of_sglang() -> None:
    head = "[2026-11-25 22:58:35 TP0] "
    capture = (
        "Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=3.50 s, mem usage=0.11 GB, avail mem=9.00 GB."
    )
    older = "Capture cuda graph end. Time elapsed: 3.50 s. mem usage=0.11 GB. avail mem=9.00 GB."
    gemm = "Try DeepGEMM JIT Compiling for <GROUPED_GEMM_NT_F8F8BF16_CONTIG> N=512, K=7168, num_groups=8 with all Ms."
    kinds = read(head + capture, head + older, head + gemm, head.replace("TP0", "TP1") + gemm, format="sglang")
    assert [(compile.kind, compile.frame, compile.shape) for compile in kinds] == [
        ("graph_capture", "target decode CUDA graph", "[1, 2, 4]"),
        ("graph_capture", "cuda graph", ""),
        ("jit", "DeepGEMM GROUPED_GEMM_NT_F8F8BF16_CONTIG", "N=512, K=7168, num_groups=8"),
    ]
    assert [compile.end_ns - compile.start_ns for compile in kinds] == [3_500_000_000, 3_500_000_000, 0]


def test_tritons_autotuner_prints_a_few_lines_for_one_kernel() -> None:
    lines = [
        "Triton autotuning for function matmul,",
        "with key as (64, 128),",
        "finished after 2.50s,",
        "best config selected: BLOCK: 64, num_warps: 4;",
    ]
    assert read(*lines) == [
        LoggedCompile(kind="autotune", start_ns=AT - 2_500_000_000, end_ns=AT, frame="matmul", shape="(64, 128)")
    ]
    assert read(lines[2]) == []


# --- What a log leaves out --------------------------------------------------------------------------------------------

ONCE = "vLLM warns once for each kernel unless it is started with --jit-monitor-verbose"
UNSEEN = "no line says that vLLM's monitor of JIT compiles is on: show the log from its start on"


def spots(*lines: str, format: LogFormat = "auto", before: tuple[str, ...] = ()) -> list[str]:
    log = CompileLog(format=format)
    for line in before:
        log.learn(line)
    for line in lines:
        list(log.take(line, AT))
    return log.blind_spots


def test_a_log_of_vllm_tells_all_that_it_watches_where_it_was_started_to() -> None:
    assert spots(TRITON, before=(VERBOSE, MONITOR)) == [ONCE]  # whatever it says, this line has no details
    assert spots(IN_DETAIL, before=(VERBOSE, MONITOR)) == []
    assert spots(before=(VERBOSE, MONITOR), format="vllm") == []
    log = CompileLog()
    log.learn(VERBOSE)
    assert log.tells == "torch.compile, and kernels of Triton, CuTeDSL and TileLang"


def test_a_log_of_vllm_that_warns_once_or_that_began_too_late_tells_too_little() -> None:
    assert spots(before=(STARTS, MONITOR)) == [ONCE]
    assert spots(GRAPH) == [ONCE, UNSEEN]
    assert spots(before=(VERBOSE,)) == [UNSEEN]  # with --enforce-eager nothing is monitored
    assert spots(before=(VERBOSE, MONITOR, STARTS)) == [ONCE, UNSEEN]  # it was started again, otherwise


def test_logs_of_others_never_tell_all() -> None:
    assert "TORCH_LOGS=recompiles tells neither" in spots(*RECOMPILE)[0]
    assert "SGLang logs captures" in spots("[2026-11-25 22:58:35 TP0] Decode batch")[0]
    assert "SGLang logs captures" in spots(format="sglang")[0]
    assert spots("GET /health 200") == ["no line of it is known to be of vLLM, SGLang or PyTorch"]
