"""Each claim of the recorder, provoked in the real compiler."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch._inductor.output_code
from torch._dynamo.utils import dynamo_timed
from torch._guards import CompileId

from tailgate.servers.clock import now_ns
from tailgate.servers.compiler import recorder as recorder_module
from tailgate.servers.compiler.recorder import COUNTED, Compile, CompileRecorder, Trigger
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent, CompileUnderWay

_OPTIONS = inductor.save_config_portable()  # as torch brings them: this module is imported before any arm compiles
Function = Callable[..., torch.Tensor]
HERE = "compiler/test_recorder.py"


def reset_compiler() -> None:
    """Forget compiled code and what an arm has set."""
    torch._dynamo.reset()
    inductor.load_config(_OPTIONS)
    torch._dynamo.config.recompile_limit = 8
    torch._dynamo.config.accumulated_recompile_limit = 256
    inductor.pre_grad_custom_pass = None
    torch.fx.experimental._config.use_duck_shape = True
    torch.compiler.set_stance("default")


@pytest.fixture
def published() -> list[tuple[str, ...]]:
    return []


@pytest.fixture
def announced() -> list[CompileUnderWay]:
    return []


@pytest.fixture
def recorder(published: list[tuple[str, ...]], announced: list[CompileUnderWay]) -> Iterator[CompileRecorder]:
    torch._dynamo.reset()
    recorder = CompileRecorder(publish=published.append, announce=announced.append)
    recorder.install()
    yield recorder
    recorder.remove()
    torch._dynamo.reset()


def compiled(function: Function, **options: object) -> Function:
    return torch.compile(function, **({"backend": "aot_eager", "dynamic": None} | options))  # type: ignore[call-overload, no-any-return]


def on_another_thread(work: Any, *arguments: Any) -> None:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x + 1


def serving() -> Trigger:
    return Trigger(batch_id=7, shape="decode batch 3", phase="serving")


def place_of(event: CompileEvent | CompileUnderWay) -> tuple[int, str, str]:
    return (event.batch_id, event.shape, event.phase)


AT_SERVING = (7, "decode batch 3", "serving")


def test_a_compile_is_announced_before_and_after_it(
    recorder: CompileRecorder, announced: list[CompileUnderWay]
) -> None:
    recorder.trigger = serving()
    seen: list[list[CompileUnderWay]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(list(announced))  # during the compile
        return graph.forward

    function = compiled(square, backend=backend)
    function(torch.ones(3))
    ((begun,),) = seen
    assert (begun.kind, begun.compile_id, begun.end_ns) == ("compile", "1/0", 0)
    assert place_of(begun) == AT_SERVING
    assert [(item.kind, item.compile_id, item.start_ns) for item in announced[1:]] == [
        ("compile", "1/0", begun.start_ns)
    ]
    assert place_of(announced[1]) == AT_SERVING
    assert begun.start_ns < announced[1].end_ns <= now_ns()
    function(torch.ones(3))
    assert len(announced) == 2, "a step without a compile announces nothing"
    on_another_thread(compiled(square), torch.ones(3))
    assert len(announced) == 2, "a compile of another thread is not announced"

    def fails(graph: torch.fx.GraphModule, inputs: object) -> object:
        raise RuntimeError("no kernel for it")

    with pytest.raises(Exception, match="no kernel for it"):
        compiled(square, backend=fails)(torch.ones(3, 3))
    assert [bool(compile.end_ns) for compile in announced[2:]] == [False, True]


def test_a_compile_has_its_time_place_and_step(recorder: CompileRecorder) -> None:
    recorder.trigger = serving()
    before_ns = now_ns()
    compiled(square)(torch.ones(3))
    (event,) = recorder.drain()
    assert event.event_id == "0"  # the analysis takes a number that no event has for a lost event
    assert (event.kind, event.reason, event.dynamic, event.cache) == ("compile", "", False, "")
    assert place_of(event) == AT_SERVING
    assert event.frame == f"{HERE}:{square.__code__.co_firstlineno} in square"
    assert event.compile_id == "1/0"
    assert before_ns <= event.start_ns < event.end_ns <= now_ns()
    assert 0 < event.backend_ns < event.end_ns - event.start_ns
    assert recorder.drain() == []


def test_a_recompile_names_the_failure_of_every_graph_that_did_not_fit(recorder: CompileRecorder) -> None:
    step = compiled(square, dynamic=False)
    for size in (3, 4, 5):
        step(torch.ones(size))
    first, second, third = recorder.drain()
    assert (first.kind, second.kind, third.kind) == ("compile", "recompile", "recompile")
    assert second.reason == "1/0: tensor 'x' size mismatch at index 0. expected 3, actual 4"
    assert set(third.reason.splitlines()) == {
        "1/0: tensor 'x' size mismatch at index 0. expected 3, actual 5",
        "1/1: tensor 'x' size mismatch at index 0. expected 4, actual 5",
    }


def test_a_graph_is_dynamic_when_one_of_its_sizes_is_a_symbol(recorder: CompileRecorder) -> None:
    for dynamic, sizes, expected in (
        (False, (3, 4), [False, False]),
        (None, (3, 4, 5), [False, True]),  # the second size makes the dimension dynamic, the third fits
        (True, (3, 4), [True]),
    ):
        torch._dynamo.reset()
        step = compiled(square, dynamic=dynamic)
        for size in sizes:
            step(torch.ones(size))
        assert [event.dynamic for event in recorder.drain()] == expected


def test_a_run_of_eager_steps_is_one_event_until_a_compiled_step_ends_it(recorder: CompileRecorder) -> None:
    recorder.record_step(10, 20, compiled=False)
    recorder.record_step(30, 40, compiled=False)
    (run,) = recorder.drain()
    assert (run.start_ns, run.end_ns) == (10, 40)
    recorder.record_step(50, 60, compiled=False)
    assert recorder.drain() == []
    recorder.record_step(60, 70, compiled=True)
    recorder.record_step(70, 80, compiled=False)
    assert [event.start_ns for event in recorder.drain()] == [70]


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def test_a_compile_shows_how_often_each_node_guard_and_break_occurs() -> None:
    shown: list[Compile] = []
    recorder = CompileRecorder(show=shown.append)
    recorder.install()
    compiled(broken, dynamic=False)(torch.ones(3))
    recorder.remove()
    first, last = (compile.contents() for compile in shown[-2:])
    assert {text: count for text, count in first.items() if text.startswith("node")} == {"node +": 1}
    assert (first["guard L['x']: size=[3]"], first["guard L['x']: torch.float32"], last["node *"]) == (1, 1, 1)
    assert [HERE in text for text in first if text.startswith("graph break")] == [True]


def test_graph_breaks_are_named_by_place_and_cause(recorder: CompileRecorder) -> None:
    step = compiled(broken, dynamic=False)
    step(torch.ones(3))
    line = broken.__code__.co_firstlineno + 2
    before, after = recorder.drain()
    (text,) = before.breaks
    assert text.startswith(f"{HERE}:{line} in broken: Call to `torch._dynamo.graph_break()`")
    assert after.breaks == []
    assert after.frame.endswith(f"in torch_dynamo_resume_in_broken_at_{line}")
    step(torch.ones(4))
    step(torch.ones(4))
    assert [event.breaks for event in recorder.drain()] == [[text], []]


def test_a_frame_that_the_compiler_skips_is_a_graph_break_too(recorder: CompileRecorder) -> None:
    def looped(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = broken(x)
            torch._dynamo.graph_break()
        return x

    compiled(looped)(torch.ones(3))
    breaks = [text for event in recorder.drain() for text in event.breaks]
    (whole,) = [text for text in breaks if "the whole frame runs eagerly" in text]
    assert " in looped: " in whole


def test_a_break_that_fullgraph_refuses_is_the_reason_of_the_event(recorder: CompileRecorder) -> None:
    with pytest.raises(Exception, match="graph_break"):
        compiled(broken, fullgraph=True)(torch.ones(3))
    (event,) = recorder.drain()
    assert "graph_break" in event.reason
    assert len(event.breaks) == 1


def test_captures_of_the_runner_and_of_the_compiler_are_events(
    recorder: CompileRecorder, announced: list[CompileUnderWay]
) -> None:
    """What only a GPU provokes, as the compiler's graph trees enclose a recording."""
    recorder.trigger = serving()
    recorder.record_capture(100, 300)
    with dynamo_timed(
        "CUDAGraphNode.record", log_pt2_compile_event=True, compile_id=CompileId(frame_id=5, frame_compile_id=0)
    ):
        assert announced[-1].kind == "graph_capture"
    own, tree = recorder.drain()
    assert {own.kind, tree.kind} == {"graph_capture"}
    assert (place_of(own), own.start_ns, own.end_ns) == (AT_SERVING, 100, 300)
    assert (tree.compile_id, tree.shape) == ("5/0", "decode batch 3")
    assert tree.end_ns >= tree.start_ns > 0
    assert [bool(news.end_ns) for news in announced] == [False, True]


def test_skipped_captures_are_counted(recorder: CompileRecorder) -> None:
    """What only a GPU provokes, said through the compiler's own function."""
    from torch._inductor import cudagraph_utils

    cudagraph_utils.log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs (2 instances)")
    assert recorder.drain() == []
    assert recorder.cudagraph_skips == 1


# --- A torch that is not read -----------------------------------------------------------------------------------------


def renamed(name: str) -> Callable[[CompileRecorder, Any, Any], None]:
    """Reading of a stream that has another name for the records called `name`."""

    def read(recorder: CompileRecorder, metadata: dict[str, Any], payload: str | None) -> None:
        shown = "renamed" if next(iter(metadata)) == name else next(iter(metadata))
        READ(recorder, {shown: next(iter(metadata.values())), **metadata}, payload)

    return read


def without_reason(metrics: dict[str, Any]) -> dict[str, Any]:
    return metrics | {"recompile_reason": None}


def failing(*_: object, **__: object) -> Any:
    raise AttributeError("no such interface")


READ = CompileRecorder._read
END = CompileRecorder._end_compile


@pytest.mark.parametrize(
    ("owner", "name", "replacement", "words"),
    [
        (CompileRecorder, "_read", renamed("compilation_metrics"), "2 beginnings and ends, 0 compiles"),
        (CompileRecorder, "_read", renamed("dynamo_start"), "0 beginnings and ends, 2 compiles"),
        (CompileRecorder, "_end_compile", lambda *given: END(*given[:2], without_reason(given[2])), "2 compiles"),
        (CompileRecorder, "_read", failing, "AttributeError: no such interface"),
        (recorder_module, "_STREAM", "torch.other", "0 beginnings and ends, 0 compiles"),
        (torch, "compile", failing, "AttributeError: no such interface"),
    ],
)
def test_a_torch_that_does_not_report_a_test_compile_cannot_pass_the_recompile_gates(
    owner: Any, name: str, replacement: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, replacement)
    recorder = CompileRecorder()
    recorder.install()
    recorder.remove()
    assert any(text.startswith(f"torch {torch.__version__} does not report") for text in recorder.blind_spots)
    assert words in " ".join(recorder.blind_spots)
    assert not any("\n" in text for text in recorder.blind_spots)


def test_a_record_that_cannot_be_read_is_a_blind_spot_and_the_compile_goes_on(
    recorder: CompileRecorder, published: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompileRecorder, "_read", failing)
    assert compiled(square)(torch.ones(3)).tolist() == [2, 2, 2]
    (text,) = recorder.blind_spots
    assert "cannot be read (AttributeError: no such interface)" in text
    assert published[-1] == (text,)
    assert [(event.kind, event.reason) for event in recorder.drain()] == [("compile", COUNTED)]


def test_compiles_of_a_torch_that_is_not_read_are_counted_and_cover_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_STREAM", "torch.other")
    torch._dynamo.reset()
    recorder = CompileRecorder()
    recorder.install()
    step = compiled(square, dynamic=False)
    step(torch.ones(3))
    recorder.trigger = serving()
    recorder.drain()
    started_ns = recorder.trigger.started_ns
    step(torch.ones(4))
    (event,) = recorder.drain()
    assert (event.kind, event.reason) == ("compile", COUNTED)
    assert place_of(event) == AT_SERVING
    assert event.start_ns == started_ns < event.end_ns
    step(torch.ones(4))
    assert recorder.drain() == []
    recorder.remove()


def test_the_test_compile_leaves_no_event_and_no_graph(published: list[tuple[str, ...]]) -> None:
    recorder = CompileRecorder(publish=published.append)
    recorder.install()
    gc.collect()
    assert "self_test" not in [item.__name__ for item in gc.get_objects() if type(item) is FunctionType]
    assert (recorder.drain(), published, recorder.blind_spots) == ([], [], ())
    recorder.remove()


def test_a_step_that_compiles_nothing_and_another_reader_of_the_stream_are_left_alone(
    recorder: CompileRecorder,
) -> None:
    """TORCH_TRACE adds its handler to the same logger."""
    records: list[str] = []

    class Other(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(next(iter(record.metadata)))  # type: ignore[attr-defined]

    other = Other()
    stream = logging.getLogger("torch.__trace")
    stream.addHandler(other)
    others = [handler for handler in stream.handlers if type(handler) is not logging.NullHandler]
    step = compiled(square)
    step(torch.ones(3))
    assert {"dynamo_start", "compilation_metrics"} < set(records)
    records.clear()
    step(torch.ones(3))
    assert records == []
    recorder.drain()
    recorder.remove()
    assert stream.handlers == others
    stream.removeHandler(other)
    compiled(broken)(torch.ones(3))
    assert recorder.drain() == []


def test_a_compile_on_another_thread_is_a_background_compile(recorder: CompileRecorder) -> None:
    step = compiled(square, dynamic=False)
    on_another_thread(step, torch.ones(3))
    recorder.trigger = serving()
    step(torch.ones(4))
    here, elsewhere = recorder.drain()
    assert (here.kind, here.batch_id) == ("recompile", 7)
    assert (elsewhere.kind, elsewhere.compile_id, elsewhere.batch_id) == ("background_compile", "1/0", -1)
    assert elsewhere.frame == here.frame
    assert elsewhere.start_ns < elsewhere.end_ns <= here.start_ns
