"""Each claim of the recorder, provoked in the real compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from servers.clock import now_ns
from servers.compiler.events import CompilerFacts, CompileUnderWay
from servers.compiler.recorder import CompileRecorder, EagerCanary, Trigger
from tests.servers.compiler.reset import reset_compiler

Function = Callable[..., torch.Tensor]
HERE = "compiler/test_recorder.py"


@pytest.fixture
def published() -> list[CompilerFacts]:
    return []


@pytest.fixture
def recorder(published: list[CompilerFacts]) -> Iterator[CompileRecorder]:
    torch._dynamo.reset()
    recorder = CompileRecorder(publish=published.append)
    recorder.install()
    yield recorder
    recorder.remove()
    torch._dynamo.reset()


def compiled(function: Function, **options: object) -> Function:
    return torch.compile(function, **({"backend": "aot_eager", "dynamic": None} | options))  # type: ignore[call-overload, no-any-return]


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x + 1


@pytest.fixture
def announced() -> Iterator[list[CompileUnderWay]]:
    """What a recorder announces that serves batch 7."""
    torch._dynamo.reset()
    told: list[CompileUnderWay] = []
    recorder = CompileRecorder(announce=told.append)
    recorder.install()
    recorder.trigger = Trigger(batch_id=7, shape="prefill 2x64", phase="serving")
    yield told
    recorder.remove()
    torch._dynamo.reset()


def test_a_compile_is_announced_before_it_begins_and_again_once_it_is_over(announced: list[CompileUnderWay]) -> None:
    seen: list[list[CompileUnderWay]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(list(announced))  # in the midst of the compile
        return graph.forward

    function = compiled(square, backend=backend)
    function(torch.ones(3))
    ((begun,),) = seen
    assert (begun.kind, begun.compile_id, begun.end_ns) == ("compile", "0/0", 0)
    assert (begun.batch_id, begun.shape, begun.phase) == (7, "prefill 2x64", "serving")
    assert announced[1:] == [replace(begun, end_ns=announced[1].end_ns)]
    assert begun.start_ns < announced[1].end_ns <= now_ns()
    function(torch.ones(3))
    assert len(announced) == 2, "a step without a compile announces nothing"


def test_a_compile_that_fails_is_over(announced: list[CompileUnderWay]) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        raise RuntimeError("no kernel for it")

    with pytest.raises(Exception, match="no kernel for it"):
        compiled(square, backend=backend)(torch.ones(3))
    assert [bool(told.end_ns) for told in announced] == [False, True]


def test_what_compiles_on_another_thread_is_not_announced(announced: list[CompileUnderWay]) -> None:
    thread = threading.Thread(target=lambda: compiled(square)(torch.ones(3)))
    thread.start()
    thread.join()
    assert announced == []


def test_a_compile_tells_when_where_and_for_which_step(recorder: CompileRecorder) -> None:
    recorder.trigger = Trigger(batch_id=7, shape="decode batch 3", phase="serving")
    before_ns = now_ns()
    compiled(square)(torch.ones(3))
    (event,) = recorder.drain()
    assert (event.kind, event.reason, event.dynamic, event.cache) == ("compile", "", False, "")
    assert (event.batch_id, event.shape, event.phase) == (7, "decode batch 3", "serving")
    assert event.frame == f"{HERE}:{square.__code__.co_firstlineno} in square"
    assert event.compile_id == "0/0"
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
    assert second.reason == "0/0: tensor 'x' size mismatch at index 0. expected 3, actual 4"
    assert set(third.reason.splitlines()) == {
        "0/0: tensor 'x' size mismatch at index 0. expected 3, actual 5",
        "0/1: tensor 'x' size mismatch at index 0. expected 4, actual 5",
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
def test_past_the_limit_there_is_one_event_and_then_silence_that_only_the_canary_hears(
    recorder: CompileRecorder,
) -> None:
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
    assert limit.kind == "limit_hit"
    assert "expected 4, actual 5" in limit.reason
    assert fallback.kind == "eager_fallback"
    assert "no compiled code fits" in fallback.reason
    assert [event.kind for event in (limit, fallback)].count("eager_fallback") == 1


def test_a_spell_of_eager_steps_is_one_event_until_a_compiled_step_ends_it(recorder: CompileRecorder) -> None:
    recorder.record_eager_step(10, 20)
    recorder.record_eager_step(30, 40, reason="not heard within a spell")
    (spell,) = recorder.drain()
    assert (spell.start_ns, spell.end_ns) == (10, 40)
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
    assert before.breaks == (text,)
    assert after.breaks == ()
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
    whole = [text for text in recorder.facts.graph_breaks if "the whole frame runs eagerly" in text]
    assert len(whole) == 1
    assert " in looped: " in whole[0]


def test_what_fullgraph_refuses_is_told_with_its_cause(recorder: CompileRecorder) -> None:
    with pytest.raises(Exception, match="graph_break"):
        compiled(broken, fullgraph=True)(torch.ones(3))
    (event,) = recorder.drain()
    assert "graph_break" in event.reason
    assert len(event.breaks) == 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def test_blocks_compiled_one_by_one_share_a_graph_and_recompile_together(recorder: CompileRecorder) -> None:
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.compile(backend="aot_eager", dynamic=False)
    with torch.no_grad():
        model(torch.ones(2, 4))
        model(torch.ones(3, 4))
    first, second = recorder.drain()
    assert (first.kind, second.kind) == ("compile", "recompile")
    assert first.frame == f"{HERE}:{Block.forward.__code__.co_firstlineno} in forward"
    assert first.nodes == 6  # weight, bias, input, two operations, output
    assert "expected 2, actual 3" in second.reason


def test_captures_of_the_runner_and_of_the_compiler_are_events(recorder: CompileRecorder) -> None:
    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")
    recorder.record_capture(100, 300)
    recording = CallbackArgs(CallbackTrigger.CUDAGRAPH_RECORDING, "5/0")
    with callback_handler.install_callbacks(recording.callback_trigger, recording.compile_id):
        pass
    own, tree = recorder.drain()
    assert {own.kind, tree.kind} == {"graph_capture"}
    assert (own.shape, own.start_ns, own.end_ns, own.batch_id) == ("decode batch 8", 100, 300, 3)
    assert (tree.compile_id, tree.shape) == ("5/0", "decode batch 8")
    assert tree.end_ns >= tree.start_ns > 0


def test_captures_that_could_not_be_are_facts(recorder: CompileRecorder, published: list[CompilerFacts]) -> None:
    recorder.capture_skipped("no CUDA device")
    recorder.capture_skipped("no CUDA device")
    assert [facts.cudagraph_skips for facts in published] == [{"no CUDA device": 1}, {"no CUDA device": 2}]
    assert recorder.drain() == []
    assert len(published) == 2


MUTATION = """skipping cudagraphs due to mutated inputs (2 instances). Found from :
   File "/usr/lib/python3/site-packages/transformers/models/llama.py", line 12, in forward
    keys.index_copy_(0, index, states)"""


def test_graph_trees_that_give_up_are_facts_with_cause_and_place(
    recorder: CompileRecorder, published: list[CompilerFacts]
) -> None:
    """What only a GPU provokes, said through the compiler's own functions."""
    from torch._inductor import cudagraph_utils

    cudagraph_utils.log_cudagraph_skip_and_bump_counter(MUTATION)
    cudagraph_utils.cudagraphs_log.warning("CUDAGraph supports dynamic shapes by recording a new graph")
    recorder.drain()
    assert recorder.facts.cudagraph_skips == {
        "mutated inputs (2 instances) at transformers/models/llama.py:12 in forward": 1
    }
    assert len(published) == 1


def test_a_partitioned_graph_that_is_not_captured_is_a_fact_though_the_compiler_says_nothing(
    recorder: CompileRecorder,
) -> None:
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


def test_nothing_is_told_once_the_recorder_is_removed(published: list[CompilerFacts]) -> None:
    torch._dynamo.reset()
    recorder = CompileRecorder(publish=published.append)
    recorder.install()
    recorder.remove()
    compiled(broken)(torch.ones(3))
    assert recorder.drain() == []
    assert published == []


def test_one_recorder_goes_on_when_another_is_removed_before_it() -> None:
    first, second = CompileRecorder(), CompileRecorder()
    first.install()
    second.install()
    try:
        first.remove()
        reset_compiler()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
        assert [event.kind for event in second.drain()] == ["compile"]
    finally:
        second.remove()
        first.remove()
