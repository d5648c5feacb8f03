"""Compiles beside torch's: each is seen once, with what it was for, by the step that met it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import utils

from servers.clock import now_ns
from servers.compiler import internals, jit
from servers.compiler.events import CompilerFacts
from servers.compiler.recorder import CompileRecorder, Trigger
from tests.fakes import triton_jit
from tests.servers.compiler.reset import reset_compiler


@pytest.fixture
def recorder() -> Iterator[CompileRecorder]:
    recorder = CompileRecorder()
    recorder.install()
    yield recorder
    recorder.remove()


def kernel(BLOCK: int = 0, SPLITS: int = 0) -> None:  # noqa: N803
    """What a compile of the stand-in calls: longer than the millisecond that the stand-in says it took."""
    end_ns = now_ns() + 2_000_000
    while now_ns() < end_ns:
        pass


HERE = f"compiler/test_jit.py:{kernel.__code__.co_firstlineno} in kernel"


def test_any_jit_says_by_a_hook_that_it_compiles_and_for_what(recorder: CompileRecorder) -> None:
    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")
    before_ns = now_ns()
    with jit.jit_compile("attention", variant="head_dim=128", compiler="cute"):
        pass
    (event,) = recorder.drain()
    assert (event.kind, event.frame) == ("jit", "attention")
    assert event.reason == "cute compiled attention for head_dim=128"
    assert (event.batch_id, event.shape, event.phase) == (3, "decode batch 8", "serving")
    assert before_ns <= event.start_ns <= event.end_ns <= now_ns()
    assert (event.kernels, event.backend_ns) == (1, event.end_ns - event.start_ns)
    assert recorder.drain() == []


def test_a_jit_compile_that_fails_is_an_event_too(recorder: CompileRecorder) -> None:
    with pytest.raises(ValueError, match="no such tile"), jit.jit_compile("attention"):
        raise ValueError("no such tile")
    assert [event.kind for event in recorder.drain()] == ["jit"]


def test_the_hook_reports_to_nobody_once_the_recorder_is_removed(recorder: CompileRecorder) -> None:
    recorder.remove()
    with jit.jit_compile("attention"):
        pass
    assert recorder.drain() == []


def compiled_elsewhere() -> None:
    """Another thread has compiled a kernel."""

    def compile_ahead() -> None:
        with jit.jit_compile("attention"):
            pass

    thread = threading.Thread(target=compile_ahead)
    thread.start()
    thread.join()


def test_a_kernel_that_another_thread_compiles_over_several_steps_holds_none_up(recorder: CompileRecorder) -> None:
    compiled_elsewhere()
    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")  # began after the compile did
    (event,) = recorder.drain()
    assert (event.kind, event.frame) == ("background_compile", "attention")
    assert (event.batch_id, event.shape, event.phase) == (-1, "", "serving")


def test_a_kernel_that_another_thread_compiles_while_nothing_runs_holds_no_step_up(recorder: CompileRecorder) -> None:
    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")
    recorder.drain()
    compiled_elsewhere()
    assert [event.kind for event in recorder.drain()] == ["background_compile"]


def test_a_compile_on_another_thread_that_its_step_may_have_waited_for_is_the_steps(recorder: CompileRecorder) -> None:
    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")
    compiled_elsewhere()
    (event,) = recorder.drain()
    assert (event.kind, event.batch_id, event.shape) == ("jit", 3, "decode batch 8")


def test_a_kernel_compiled_in_a_step_that_ran_eagerly_is_seen(recorder: CompileRecorder) -> None:
    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")
    start_ns = now_ns()
    with jit.jit_compile("attention"):
        pass
    recorder.record_eager_step(start_ns, now_ns())
    assert [event.kind for event in recorder.drain()] == ["eager_fallback", "jit"]


def test_a_kernel_compiled_while_a_graph_is_recorded_is_seen(recorder: CompileRecorder) -> None:
    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")
    start_ns = now_ns()
    with jit.jit_compile("attention"):
        pass
    recorder.record_capture(start_ns, now_ns())
    assert [event.kind for event in recorder.drain()] == ["graph_capture", "jit"]


def test_a_kernel_compiled_in_a_compile_of_torch_is_part_of_it(recorder: CompileRecorder) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with jit.jit_compile("template"):
            pass
        return graph.forward

    reset_compiler()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    with jit.jit_compile("afterwards"):
        pass
    reset_compiler()
    assert [(event.kind, event.frame.split(" in ")[-1]) for event in recorder.drain()] == [
        ("compile", "<lambda>"),
        ("jit", "afterwards"),
    ]


def span(start: int, end: int, *, thread: int = 1, **more: Any) -> jit.JitCompile:
    return jit.JitCompile(
        compiler="triton", kernel="k", start_ns=start, end_ns=end, thread=thread, compile_ns=end - start, **more
    )


def test_a_tuning_is_one_wait_with_the_number_and_time_of_its_compiles() -> None:
    tuning = jit.JitCompile(
        compiler="triton", kernel="k", start_ns=100, end_ns=900, thread=1, tuned=True, kernels=0, compile_ns=0
    )
    inside = [span(110, 300), span(400, 500)]
    merged = jit.outermost([*inside, span(120, 880, thread=2), tuning, span(950, 990)])
    assert [(item.start_ns, item.thread, item.kernels, item.compile_ns) for item in merged] == [
        (100, 1, 2, 290),
        (120, 2, 1, 760),
        (950, 1, 1, 40),
    ]


def test_a_kernel_of_triton_is_an_event_at_its_first_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = triton_jit.install(monkeypatch)
    told: list[dict[str, Any]] = []
    knobs.compilation.listener = lambda **compiled: told.append(compiled)
    recorder = CompileRecorder()
    recorder.install()
    recorder.trigger = Trigger(batch_id=1, shape="decode batch 2", phase="serving")
    decode = triton_jit.Kernel(kernel, knobs)
    for splits in (2, 2, 4):
        decode.run(SPLITS=splits)
    first, second = recorder.drain()
    recorder.remove()
    decode.run(SPLITS=8)
    assert recorder.drain() == []
    assert len(told) == 3, "a listener that was there before is still told"
    assert (first.kind, first.frame, first.cache) == ("jit", HERE, "miss")
    assert first.reason == "triton compiled kernel for SPLITS=2, num_warps=4, num_stages=3"
    assert second.reason == "triton compiled kernel for SPLITS=4, num_warps=4, num_stages=3"
    assert first.end_ns - first.start_ns == first.backend_ns == 1_000_000


def test_kernels_that_inductor_makes_in_a_tuning_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinate descent compiles when compiled code first runs, and reports the time of all kernels together."""
    knobs = triton_jit.install(monkeypatch)
    recorder = CompileRecorder()
    recorder.install()
    generated = triton_jit.Kernel(kernel, knobs)
    generated.__module__ = "torch._inductor.runtime.compile_tasks.c4xyz"
    generated.run(BLOCK=64)
    (alone,) = recorder.drain()
    assert alone.kind == "jit"
    assert alone.reason.startswith("inductor compiled kernel for BLOCK=64")
    generated.run(BLOCK=128)
    metrics = utils.get_runtime_metrics_context()
    metrics.increment("runtime_triton_autotune_time_us", 100, extra={"is_runtime": True})
    metrics.finish()
    triton_jit.Kernel(kernel, knobs).run(BLOCK=128)
    events = recorder.drain()
    recorder.remove()
    assert [event.kind for event in events] == ["autotune", "jit"]
    assert events[1].reason.startswith("triton compiled kernel")


def test_the_autotuner_is_one_event_for_each_key_that_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = triton_jit.install(monkeypatch)
    autotuner = sys.modules["triton.runtime.autotuner"].Autotuner
    untapped = autotuner.run
    recorder = CompileRecorder()
    recorder.install()
    tuner = autotuner(triton_jit.Kernel(kernel, knobs), [{"BLOCK": 16}, {"BLOCK": 32}])
    for key in (64, 64, 128):
        tuner.run(key)
    first, second = recorder.drain()
    recorder.remove()
    assert (first.kind, first.reason, first.kernels) == ("jit", "triton tuned kernel for (64,)", 2)
    assert 0 < first.backend_ns < first.end_ns - first.start_ns
    assert first.autotune_ns == first.end_ns - first.start_ns - first.backend_ns
    assert (second.reason, second.kernels) == ("triton tuned kernel for (128,)", 0)
    assert autotuner.run is untapped


def test_an_unknown_triton_is_left_alone_and_said_to_be_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = triton_jit.install(monkeypatch, version="9.1.0")
    published: list[CompilerFacts] = []
    recorder = CompileRecorder(publish=published.append)
    recorder.install()
    recorder.remove()
    assert knobs.compilation.listener is None
    (text,) = published[0].blind_spots
    assert text == "triton 9.1.0 is not among the versions that are read (3.6, 3.8): its JIT compiles are not seen"


def test_a_triton_without_its_listener_is_said_to_be_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = triton_jit.install(monkeypatch)
    del knobs.compilation.listener
    assert internals.triton_blind_spots() == (
        "triton 3.6.0 lacks triton.knobs:compilation.listener: its JIT compiles are not seen",
    )
