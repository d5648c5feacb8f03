"""Kernels that compilers other than torch's make: Triton, and any that takes part by the hook."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import utils

from tailgate.servers.clock import now_ns
from tailgate.servers.compiler import jit
from tailgate.servers.compiler.recorder import CompileRecorder, Trigger
from tests.fakes import kernels as triton_jit
from tests.servers.compiler.test_recorder import (
    AT_SERVING,
    announced,
    on_another_thread,
    place_of,
    published,
    recorder,
    reset_compiler,
    serving,
)

__all__ = ["announced", "published", "recorder"]


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    reset_compiler()
    yield
    reset_compiler()


def compile_attention() -> None:
    with jit.jit_compile("attention", variant="head_dim=128", compiler="cute"):
        pass


def kinds(recorder: CompileRecorder) -> list[str]:
    return [event.kind for event in recorder.drain()]


def test_any_compiler_reports_its_compiles_through_a_hook(recorder: CompileRecorder) -> None:
    recorder.trigger = serving()
    before_ns = now_ns()
    compile_attention()
    (event,) = recorder.drain()
    assert (event.kind, event.frame) == ("jit", "attention")
    assert all(word in event.reason for word in ("cute", "attention", "head_dim=128"))
    assert place_of(event) == AT_SERVING
    assert before_ns <= event.start_ns <= event.end_ns <= now_ns()
    with pytest.raises(ValueError, match="no such tile"), jit.jit_compile("attention"):
        raise ValueError("no such tile")
    assert kinds(recorder) == ["jit"]
    recorder.remove()
    compile_attention()
    assert recorder.drain() == []


def test_a_compile_on_another_thread_holds_up_the_step_that_began_before_it(recorder: CompileRecorder) -> None:
    on_another_thread(compile_attention)
    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")  # began after the compile did
    (event,) = recorder.drain()
    assert (event.kind, event.frame) == ("background_compile", "attention")
    assert place_of(event) == (-1, "", "serving")
    on_another_thread(compile_attention)
    assert kinds(recorder) == ["background_compile"], "the step has ended"
    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")
    on_another_thread(compile_attention)
    (event,) = recorder.drain()
    assert (event.kind, place_of(event)) == ("jit", (3, "decode batch 8", "serving"))


def test_a_kernel_compiled_in_a_compile_of_torch_is_part_of_it(recorder: CompileRecorder) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compile_attention()
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    compile_attention()
    assert kinds(recorder) == ["compile", "jit"]


def kernel(BLOCK: int = 0, SPLITS: int = 0) -> None:  # noqa: N803
    """What a compile of the stand-in calls: longer than the millisecond that the stand-in says it took."""
    end_ns = now_ns() + 2_000_000
    while now_ns() < end_ns:
        pass


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of a stand-in for Triton. List it before `recorder`."""
    return triton_jit.install(monkeypatch)


def test_a_kernel_of_triton_is_an_event_at_its_first_call_alone(knobs: Any) -> None:
    heard: list[dict[str, Any]] = []
    knobs.compilation.listener = lambda **compiled: heard.append(compiled)
    recorder = CompileRecorder()
    recorder.install()
    recorder.trigger = serving()
    decode = triton_jit.Kernel(kernel, knobs)
    for splits in (2, 2, 4):
        decode.run(SPLITS=splits)
    first, second = recorder.drain()
    recorder.remove()
    decode.run(SPLITS=8)
    assert recorder.drain() == []
    assert len(heard) == 3, "an earlier listener still hears of each compile"
    here = f"compiler/test_jit.py:{kernel.__code__.co_firstlineno} in kernel"
    assert (first.kind, first.frame, first.cache) == ("jit", here, "miss")
    assert [("SPLITS=2" in event.reason, "SPLITS=4" in event.reason) for event in (first, second)] == [
        (True, False),
        (False, True),
    ]
    assert first.end_ns - first.start_ns == 1_000_000


def test_kernels_that_inductor_makes_in_a_tuning_are_part_of_it(knobs: Any, recorder: CompileRecorder) -> None:
    """Its coordinate descent compiles when compiled code first runs, and reports the time of all kernels together."""
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
    assert [event.kind for event in events] == ["autotune", "jit"]
    assert events[1].reason.startswith("triton compiled kernel")


def test_the_autotuner_is_one_event_for_each_key(knobs: Any) -> None:
    autotuner = sys.modules["triton.runtime.autotuner"].Autotuner
    untapped = autotuner.run
    recorder = CompileRecorder()
    recorder.install()
    tuner = autotuner(triton_jit.Kernel(kernel, knobs), [{"BLOCK": 16}, {"BLOCK": 32}])
    for key in (64, 64, 128):
        tuner.run(key)
    first, second = recorder.drain()
    recorder.remove()
    assert (first.kind, first.reason) == ("jit", "triton tuned kernel for (64,)")
    assert first.end_ns - first.start_ns > 4_000_000, "two variants of 2 ms each were compiled in it"
    assert second.reason == "triton tuned kernel for (128,)"
    assert autotuner.run is untapped


@pytest.mark.parametrize("how", ["reports", "reports nothing", "has no listener"])
def test_a_triton_that_does_not_report_a_test_compile_is_left_alone_and_named(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = triton_jit.install(monkeypatch, reports=how == "reports")
    if how == "has no listener":
        del knobs.compilation.listener
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(CompileRecorder, "_read_torch", lambda _: True)  # torch's compiler would ask the card
    recorder = CompileRecorder()
    recorder.install()
    assert (getattr(knobs.compilation, "listener", None) is not None) == (how == "reports")
    assert recorder.drain() == []
    recorder.remove()
    expected = [] if how == "reports" else ["triton 3.6.0 does not report"]
    assert [spot.partition(" a test")[0] for spot in recorder.blind_spots] == expected
