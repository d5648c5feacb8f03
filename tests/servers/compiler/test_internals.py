"""What is private to torch and Triton, and compiles beside torch's."""

from __future__ import annotations

import ast
import gc
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch._dynamo import utils

from servers.clock import now_ns
from servers.compiler import internals, jit
from servers.compiler.events import CompilerFacts
from servers.compiler.recorder import COUNTED, CompileRecorder, Trigger
from tests.fakes import kernels as triton_jit
from tests.servers.compiler.test_recorder import (
    AT_SERVING,
    announced,
    place_of,
    published,
    recorder,
    reset_compiler,
    serving,
    square,
)

__all__ = ["announced", "published", "recorder"]

SERVERS = Path(internals.__file__).parents[1]
PRIVATE = ("torch._dynamo", "torch._inductor", "torch._guards", "torch.fx.experimental", "triton.knobs")


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    reset_compiler()
    yield
    reset_compiler()


def private_names(path: Path) -> set[str]:
    """What the module imports, or reaches by a dotted name, of what is private to torch or Triton."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if name.startswith(PRIVATE)}


def test_no_other_module_of_the_servers_reads_what_is_private() -> None:
    readers = {path.relative_to(SERVERS).as_posix() for path in SERVERS.rglob("*.py") if private_names(path)}
    assert readers == {"compiler/internals.py"}


def test_a_missing_interface_is_named_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("guard_failures", "get_metrics_context", "counters"):
        with monkeypatch.context() as patched:
            patched.delattr(utils, name)
            (text,) = internals.torch_blind_spots()
            assert f"torch._dynamo.utils:{name}" in text
            recorder = CompileRecorder()
            recorder.install()
            assert recorder.facts.blind_spots == (text,)
            assert recorder.drain() == []
            recorder.remove()
    fields = {name: item for name, item in utils.CompilationMetrics.__dataclass_fields__.items() if name != "co_name"}
    monkeypatch.setattr(utils.CompilationMetrics, "__dataclass_fields__", fields)
    (text,) = internals.torch_blind_spots()
    assert "CompilationMetrics.co_name" in text


def silent(*_: object) -> None:
    pass


def without_reason(metrics: Any) -> internals.Compiled:
    return replace(COMPILED(metrics), reason="")


def failing(*_: object, **__: object) -> Any:
    raise AttributeError("no such metric")


COMPILED = internals._compiled


@pytest.mark.parametrize(
    ("owner", "name", "replacement", "words"),
    [
        (internals.Taps, "compiles", silent, "2 beginnings, 2 ends, 0 compiles"),
        (torch._dynamo.callback, "on_compile_start", silent, "0 beginnings, 2 ends, 2 compiles"),
        (torch._dynamo.callback, "on_compile_end", silent, "2 beginnings, 0 ends, 2 compiles"),
        (internals, "_compiled", without_reason, "2 beginnings, 2 ends, 2 compiles"),
        (internals, "_compiled", failing, "2 beginnings, 2 ends, 0 compiles"),
        (torch, "compile", failing, "AttributeError: no such metric"),
        (internals, "guard_failures", dict, "2 beginnings, 2 ends, 2 compiles"),
    ],
)
def test_a_torch_that_does_not_report_a_test_compile_cannot_pass_the_recompile_gates(
    owner: Any, name: str, replacement: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, replacement)
    recorder = CompileRecorder()
    recorder.install()
    recorder.remove()
    (text,) = recorder.facts.blind_spots
    assert text.startswith(f"torch {torch.__version__} ")
    assert words in text
    assert "\n" not in text


def test_the_test_compile_leaves_no_event_and_no_graph(published: list[CompilerFacts]) -> None:
    recorder = CompileRecorder(publish=published.append)
    recorder.install()
    gc.collect()
    assert "self_test" not in [item.__name__ for item in gc.get_objects() if type(item) is FunctionType]
    assert (recorder.drain(), published, recorder.facts.blind_spots) == ([], [], ())
    recorder.remove()


def test_compiles_of_a_torch_that_is_not_read_are_counted_and_cover_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals.Taps, "compiles", silent)
    published: list[CompilerFacts] = []
    recorder = CompileRecorder(publish=published.append)
    recorder.install()
    step = torch.compile(square, backend="aot_eager", dynamic=False)
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
    assert [facts.blind_spots for facts in published] == [recorder.facts.blind_spots]
    recorder.remove()


def on_another_thread(work: Any, *arguments: Any) -> None:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


def test_a_compile_on_another_thread_is_a_background_compile(recorder: CompileRecorder) -> None:
    step = torch.compile(square, backend="aot_eager", dynamic=False)
    on_another_thread(step, torch.ones(3))
    recorder.trigger = serving()
    step(torch.ones(4))
    here, elsewhere = recorder.drain()
    assert (here.kind, here.batch_id) == ("recompile", 7)
    assert (elsewhere.kind, elsewhere.compile_id, elsewhere.batch_id) == ("background_compile", "1/0", -1)
    assert elsewhere.frame == here.frame
    assert elsewhere.start_ns < elsewhere.end_ns <= here.start_ns


def test_isolated_regions_of_a_function_have_their_own_keys_and_reasons(recorder: CompileRecorder) -> None:
    def region(**options: object) -> Any:
        return torch.compile(square, backend="aot_eager", dynamic=False, **options)  # type: ignore[call-overload]

    try:
        first, second = region(isolate_recompiles=True), region(isolate_recompiles=True)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} has no isolate_recompiles: all regions of a code share one cache")
    for step, size in ((first, 3), (second, 4), (first, 5), (region(), 6)):
        step(torch.ones(size))
    events = recorder.drain()
    keys = [event.compile_id for event in events]
    assert len(set(keys)) == 4
    regions = [key.partition("@")[2] for key in keys]
    assert regions[0] == regions[2] != regions[1] != "" != regions[0]
    assert regions[3] == ""
    assert [event.kind for event in events] == ["compile", "compile", "recompile", "compile"]
    assert "expected 3, actual 5" in events[2].reason
    assert "expected 4" not in events[2].reason, "the other region has a graph for 4"


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
    assert (event.kernels, event.backend_ns) == (1, event.end_ns - event.start_ns)
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


def test_a_kernel_compiled_in_an_eager_step_or_a_recording_is_an_event(recorder: CompileRecorder) -> None:
    recorder.trigger = serving()
    for record, kind in ((recorder.record_capture, "graph_capture"), (recorder.record_eager_step, "eager_fallback")):
        start_ns = now_ns()
        compile_attention()
        record(start_ns, now_ns())
        assert kinds(recorder) == [kind, "jit"]


def test_a_kernel_compiled_in_a_compile_of_torch_is_part_of_it(recorder: CompileRecorder) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compile_attention()
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    compile_attention()
    assert kinds(recorder) == ["compile", "jit"]


def test_a_tuning_is_one_wait_with_the_number_and_time_of_its_compiles() -> None:
    def span(start: int, end: int, *, thread: int = 1, compile_ns: int = -1, **more: Any) -> jit.JitCompile:
        took_ns = end - start if compile_ns < 0 else compile_ns
        return jit.JitCompile(
            compiler="triton", kernel="k", start_ns=start, end_ns=end, thread=thread, compile_ns=took_ns, **more
        )

    tuning = span(100, 900, compile_ns=0, tuned=True, kernels=0)
    merged = jit.outermost([span(110, 300), span(400, 500), span(120, 880, thread=2), tuning, span(950, 990)])
    assert [(item.start_ns, item.thread, item.kernels, item.compile_ns) for item in merged] == [
        (100, 1, 2, 290),
        (120, 2, 1, 760),
        (950, 1, 1, 40),
    ]


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
    here = f"compiler/test_internals.py:{kernel.__code__.co_firstlineno} in kernel"
    assert (first.kind, first.frame, first.cache) == ("jit", here, "miss")
    assert [("SPLITS=2" in event.reason, "SPLITS=4" in event.reason) for event in (first, second)] == [
        (True, False),
        (False, True),
    ]
    assert first.end_ns - first.start_ns == first.backend_ns == 1_000_000


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
    assert (first.kind, first.reason, first.kernels) == ("jit", "triton tuned kernel for (64,)", 2)
    assert 0 < first.backend_ns < first.end_ns - first.start_ns
    assert first.autotune_ns == first.end_ns - first.start_ns - first.backend_ns
    assert (second.reason, second.kernels) == ("triton tuned kernel for (128,)", 0)
    assert autotuner.run is untapped


@pytest.mark.parametrize("heard", [True, False])
def test_a_triton_that_does_not_report_a_test_compile_is_left_alone_and_named(
    heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = triton_jit.install(monkeypatch, reports=heard)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(internals, "hear_torch", tuple)  # torch's compiler would ask the card
    recorder = CompileRecorder()
    recorder.install()
    assert (knobs.compilation.listener is not None) == heard
    recorder.remove()
    spots = recorder.facts.blind_spots
    assert [spot.partition(" a test")[0] for spot in spots] == ([] if heard else ["triton 3.6.0 does not report"])
    del knobs.compilation.listener
    (text,) = internals.triton_blind_spots()
    assert text.startswith("triton 3.6.0 lacks triton.knobs:compilation.listener")
