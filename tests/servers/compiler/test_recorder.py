"""Each claim of the recorder, provoked in the real compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from servers.clock import now_ns
from servers.compiler.events import CompileEvent, CompilerFacts, CompileUnderWay
from servers.compiler.recorder import CompileRecorder, EagerCanary, Trigger

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
def published() -> list[CompilerFacts]:
    return []


@pytest.fixture
def announced() -> list[CompileUnderWay]:
    return []


@pytest.fixture
def recorder(published: list[CompilerFacts], announced: list[CompileUnderWay]) -> Iterator[CompileRecorder]:
    torch._dynamo.reset()
    recorder = CompileRecorder(publish=published.append, announce=announced.append)
    recorder.install()
    yield recorder
    recorder.remove()
    torch._dynamo.reset()


def compiled(function: Function, **options: object) -> Function:
    return torch.compile(function, **({"backend": "aot_eager", "dynamic": None} | options))  # type: ignore[call-overload, no-any-return]


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
    assert announced[1:] == [replace(begun, end_ns=announced[1].end_ns)]
    assert begun.start_ns < announced[1].end_ns <= now_ns()
    function(torch.ones(3))
    assert len(announced) == 2, "a step without a compile announces nothing"
    thread = threading.Thread(target=lambda: compiled(square)(torch.ones(3)))
    thread.start()
    thread.join()
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
    assert (event.kind, event.reason, event.dynamic, event.cache) == ("compile", "", False, "")
    assert place_of(event) == AT_SERVING
    assert event.frame == f"{HERE}:{square.__code__.co_firstlineno} in square"
    assert event.compile_id == "1/0"
    assert before_ns <= event.start_ns < event.end_ns <= now_ns()
    assert 0 < event.backend_ns < event.end_ns - event.start_ns
    assert event.guards > 0
    assert event.nodes == 4  # one input, two operations, one output
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


@torch._dynamo.config.patch(recompile_limit=2)
def test_past_the_limit_there_is_one_event_and_the_canary_sees_eager_steps(recorder: CompileRecorder) -> None:
    canary = EagerCanary()

    def counted(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            canary.steps += 1
        return x + 1

    step = compiled(counted, dynamic=False)
    eager = []
    for size in (3, 4, 5, 6, 3):
        started_ns = now_ns()
        step(torch.ones(size))
        eager.append(canary.ran_eagerly())
        if eager[-1]:
            recorder.record_eager_step(started_ns, now_ns())
        else:
            recorder.record_compiled_step()
    assert eager == [False, False, True, True, False]
    *_, limit, fallback = recorder.drain()
    assert (limit.kind, fallback.kind) == ("limit_hit", "eager_fallback")
    assert "expected 4, actual 5" in limit.reason


def test_a_run_of_eager_steps_is_one_event_until_a_compiled_step_ends_it(recorder: CompileRecorder) -> None:
    recorder.record_eager_step(10, 20)
    recorder.record_eager_step(30, 40, reason="not recorded within a run")
    (run,) = recorder.drain()
    assert (run.start_ns, run.end_ns) == (10, 40)
    recorder.record_eager_step(50, 60)
    assert recorder.drain() == []
    recorder.record_compiled_step()
    recorder.record_eager_step(70, 80, reason="the shape was not warmed")
    assert [(event.start_ns, event.reason) for event in recorder.drain()] == [(70, "the shape was not warmed")]


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def test_graph_breaks_are_counted_by_place_and_cause(recorder: CompileRecorder, published: list[CompilerFacts]) -> None:
    step = compiled(broken, dynamic=False)
    step(torch.ones(3))
    line = broken.__code__.co_firstlineno + 2
    (text,) = recorder.facts.graph_breaks
    assert text.startswith(f"{HERE}:{line} in broken: Call to `torch._dynamo.graph_break()`")
    before, after = recorder.drain()
    assert (before.breaks, after.breaks) == ((text,), ())
    assert after.frame.endswith(f"in torch_dynamo_resume_in_broken_at_{line}")
    step(torch.ones(4))
    step(torch.ones(4))
    assert recorder.facts.graph_breaks == {text: 2}
    assert [facts.graph_breaks for facts in published] == [{text: 1}, {text: 2}]


def test_a_frame_that_the_compiler_skips_is_a_graph_break_too(recorder: CompileRecorder) -> None:
    def looped(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = broken(x)
            torch._dynamo.graph_break()
        return x

    compiled(looped)(torch.ones(3))
    (whole,) = [text for text in recorder.facts.graph_breaks if "the whole frame runs eagerly" in text]
    assert " in looped: " in whole


def test_a_break_that_fullgraph_refuses_is_the_reason_of_the_event(recorder: CompileRecorder) -> None:
    with pytest.raises(Exception, match="graph_break"):
        compiled(broken, fullgraph=True)(torch.ones(3))
    (event,) = recorder.drain()
    assert "graph_break" in event.reason
    assert len(event.breaks) == 1


def test_captures_of_the_runner_and_of_the_compiler_are_events(recorder: CompileRecorder) -> None:
    recorder.trigger = serving()
    recorder.record_capture(100, 300)
    recording = CallbackArgs(CallbackTrigger.CUDAGRAPH_RECORDING, "5/0")
    with callback_handler.install_callbacks(recording.callback_trigger, recording.compile_id):
        pass
    own, tree = recorder.drain()
    assert {own.kind, tree.kind} == {"graph_capture"}
    assert (place_of(own), own.start_ns, own.end_ns) == (AT_SERVING, 100, 300)
    assert (tree.compile_id, tree.shape) == ("5/0", "decode batch 3")
    assert tree.end_ns >= tree.start_ns > 0


MUTATION = """skipping cudagraphs due to mutated inputs (2 instances). Found from :
   File "/usr/lib/python3/site-packages/transformers/models/llama.py", line 12, in forward
    keys.index_copy_(0, index, states)"""


def test_skipped_captures_are_facts_with_cause_and_place(
    recorder: CompileRecorder, published: list[CompilerFacts]
) -> None:
    """What only a GPU provokes, said through the compiler's own functions."""
    from torch._inductor import cudagraph_utils

    recorder.capture_skipped("no CUDA device")
    recorder.capture_skipped("no CUDA device")
    cudagraph_utils.log_cudagraph_skip_and_bump_counter(MUTATION)
    cudagraph_utils.cudagraphs_log.warning("CUDAGraph supports dynamic shapes by recording a new graph")
    assert recorder.drain() == []
    place = "mutated inputs (2 instances) at transformers/models/llama.py:12 in forward"
    assert recorder.facts.cudagraph_skips == {"no CUDA device": 2, place: 1}
    assert [sum(facts.cudagraph_skips.values()) for facts in published] == [1, 2, 3]


def test_a_partitioned_graph_that_is_not_captured_is_a_fact_without_a_message(recorder: CompileRecorder) -> None:
    from torch._inductor import output_code
    from torch._inductor.utils import BoxedBool

    for causes in (["mutated inputs", "non-Tensor inputs"], []):
        graph = SimpleNamespace(
            cudagraph_info=SimpleNamespace(cudagraph_fail_reasons=causes),
            current_callable=print,
            fx_kwargs={"is_backward": False},
            partition_maps=None,
        )
        cudagraphs = BoxedBool(True)
        output_code.cudagraph_partition_post_compile([], graph, cudagraphs, {}, None)  # type: ignore[arg-type]
        assert not cudagraphs
    assert recorder.facts.cudagraph_skips == {
        "mutated inputs; non-Tensor inputs": 1,
        "no part of the graph can be captured": 1,
    }


def test_a_removed_recorder_records_nothing_until_it_is_installed_again(
    recorder: CompileRecorder, published: list[CompilerFacts]
) -> None:
    recorder.remove()
    compiled(broken)(torch.ones(3))
    assert (recorder.drain(), published) == ([], [])
    recorder.install()
    compiled(square)(torch.ones(3))
    assert [event.kind for event in recorder.drain()] == ["compile"]


def test_a_recorder_that_is_removed_after_another_was_installed_stops_and_the_other_continues(
    recorder: CompileRecorder,
) -> None:
    second = CompileRecorder()
    second.install()
    try:
        recorder.remove()
        recorder.drain()  # the second one's test compile
        compiled(square)(torch.ones(3))
        assert [event.kind for event in second.drain()] == ["compile"]
        assert recorder.drain() == []
    finally:
        second.remove()
