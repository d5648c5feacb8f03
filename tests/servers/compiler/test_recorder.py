"""Each claim of the recorder, provoked in the real compiler."""

from __future__ import annotations

import ast
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import utils
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from servers.clock import now_ns
from servers.compiler import internals
from servers.compiler.events import CompilerFacts, CompileUnderWay
from servers.compiler.footprint import CompileFootprint
from servers.compiler.policy import load_backend
from servers.compiler.recorder import COUNTED, CompileRecorder, EagerCanary, Trigger
from servers.config import CompileConfig
from servers.fields import ConfigError
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


def test_the_torch_that_runs_here_is_among_those_that_are_read() -> None:
    assert internals.torch_blind_spots() == ()


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0+cpu", "2.14.1", "2.14.0.dev20261001"])
def test_releases_of_a_version_that_was_tried_are_read(version: str) -> None:
    assert internals.torch_blind_spots(version) == ()


def test_the_page_names_the_versions_that_are_read() -> None:
    page = (SERVERS.parent / "docs" / "arms.md").read_text(encoding="utf-8")
    for name, tested in (("torch", internals.TESTED_TORCH), ("Triton", internals.TESTED_TRITON)):
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert row.split("|")[2].strip() == ", ".join(tested)


@pytest.mark.parametrize("version", ["2.1.1", "2.12.0", "2.15.0+cpu", "3.11.0", "2.130.0", "nonsense"])
def test_other_versions_are_not_read_and_named(version: str) -> None:
    (text,) = internals.torch_blind_spots(version)
    assert text == (
        f"torch {version} is not among the versions whose compiler is read (2.11, 2.13, 2.14): "
        "compiles are counted by its public counters alone"
    )


@pytest.mark.parametrize(
    ("owner", "name", "shown"),
    [
        (utils, "guard_failures", "torch._dynamo.utils:guard_failures"),
        (utils, "get_metrics_context", "torch._dynamo.utils:get_metrics_context"),
        (utils, "counters", "torch._dynamo.utils:counters"),
    ],
)
def test_a_missing_interface_is_named_and_nothing_fails(
    owner: object, name: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    (text,) = internals.torch_blind_spots()
    assert text.startswith(f"torch {torch.__version__} lacks {shown}: ")
    recorder = CompileRecorder()
    recorder.install()
    assert recorder.facts.blind_spots == (text,)
    assert recorder.drain() == []
    recorder.remove()


def test_a_compile_elsewhere_that_cannot_be_seen_is_named_where_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # it reads the variable once, and this process is to stay as it is
    importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(internals, "_SEND", "torch._inductor.compile_fx_ext:_OutOfProcessFxCompile._no_such_call")
    monkeypatch.delenv("TORCHINDUCTOR_FX_COMPILE_MODE", raising=False)
    for asked in (False, True):
        if asked:
            monkeypatch.setenv("TORCHINDUCTOR_FX_COMPILE_MODE", "progressive+SUBPROCESS")
        recorder = CompileRecorder()
        recorder.install()
        recorder.remove()
        texts = [text for text in recorder.facts.blind_spots if "_no_such_call" in text]
        assert [text.endswith("what it compiles in the background is not seen") for text in texts] == [True] * asked


def test_a_process_that_did_not_begin_so_compiles_nothing_in_the_background() -> None:
    with pytest.raises(ConfigError, match=r"compile\.background is true but torch .* compiles nothing in the backgr"):
        internals.compile_in_background()


def test_a_torch_that_tells_no_backends_serves_with_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"inductor", "eager"} <= set(internals.known_backends())
    policy = CompileConfig(enabled=True, backend="telepathy")
    with pytest.raises(ConfigError, match=r'compile\.backend is "telepathy": torch knows'):
        load_backend(policy)
    for name in ("list_backends", "lookup_backend"):
        monkeypatch.delattr(torch._dynamo, name)
    assert internals.known_backends() == []
    load_backend(policy)


def test_metrics_that_lost_a_field_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {name: item for name, item in utils.CompilationMetrics.__dataclass_fields__.items() if name != "co_name"}
    monkeypatch.setattr(utils.CompilationMetrics, "__dataclass_fields__", fields)
    (text,) = internals.torch_blind_spots()
    assert "lacks CompilationMetrics.co_name: " in text


def test_compiles_of_a_torch_that_is_not_read_are_counted_and_cover_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "TESTED_TORCH", {"1.0": "CPU"})
    published: list[CompilerFacts] = []
    recorder = CompileRecorder(publish=published.append)
    recorder.install()
    step = torch.compile(square, backend="aot_eager", dynamic=False)
    step(torch.ones(3))
    recorder.trigger = Trigger(batch_id=7, shape="decode batch 4", phase="serving")
    recorder.drain()
    started_ns = recorder.trigger.started_ns
    step(torch.ones(4))
    (event,) = recorder.drain()
    assert (event.kind, event.reason) == ("compile", COUNTED)
    assert (event.batch_id, event.shape, event.phase) == (7, "decode batch 4", "serving")
    assert event.start_ns == started_ns < event.end_ns
    step(torch.ones(4))
    assert recorder.drain() == []
    assert [facts.blind_spots for facts in published] == [recorder.facts.blind_spots]
    recorder.remove()


def test_a_compile_on_another_thread_is_a_background_compile() -> None:
    recorder = CompileRecorder()
    recorder.install()
    step = torch.compile(square, backend="aot_eager", dynamic=False)
    thread = threading.Thread(target=step, args=(torch.ones(3),))
    thread.start()
    thread.join()
    recorder.trigger = Trigger(batch_id=7, shape="decode batch 4", phase="serving")
    step(torch.ones(4))
    here, elsewhere = recorder.drain()
    recorder.remove()
    assert (here.kind, here.batch_id) == ("recompile", 7)
    assert (elsewhere.kind, elsewhere.compile_id, elsewhere.batch_id) == ("background_compile", "0/0", -1)
    assert elsewhere.frame == here.frame
    assert elsewhere.start_ns < elsewhere.end_ns <= here.start_ns


def isolated(**options: object) -> object:
    try:
        return torch.compile(square, backend="aot_eager", dynamic=False, isolate_recompiles=True, **options)  # type: ignore[call-overload]
    except TypeError:  # torch 2.11 has one cache for all regions of a code
        return None


def test_isolated_regions_of_one_function_are_told_apart_by_key_reason_and_footprint() -> None:
    recorder = CompileRecorder()
    recorder.install()
    first, second = isolated(), isolated()
    shared = torch.compile(square, backend="aot_eager", dynamic=False)
    if first is None or second is None:
        recorder.remove()
        pytest.skip(f"torch {torch.__version__} has no isolate_recompiles: all regions of a code share one cache")
    with CompileFootprint(lambda: (0, 0)) as footprint:
        for step, size in ((first, 3), (second, 4), (first, 5), (shared, 6)):
            step(torch.ones(size))  # type: ignore[operator]
    events = recorder.drain()
    recorder.remove()
    keys = [event.compile_id for event in events]
    assert len(set(keys)) == 4
    regions = [key.partition("@")[2] for key in keys]
    assert regions[0] == regions[2] != regions[1] != "" != regions[0]
    assert regions[3] == ""
    assert [event.kind for event in events] == ["compile", "compile", "recompile", "compile"]
    assert "expected 3, actual 5" in events[2].reason
    assert "expected 4" not in events[2].reason, "the other region has a graph for 4"
    assert list(footprint.grown) == keys


def test_each_region_has_what_its_compiles_and_recordings_added() -> None:
    held = [(0, 100)]
    with CompileFootprint(lambda: held[0]) as footprint:
        for trigger, region, after in (
            (CallbackTrigger.DYNAMO, "0/0", (0, 150)),
            (CallbackTrigger.DYNAMO, "1/0", (0, 155)),
            (CallbackTrigger.CUDAGRAPH_RECORDING, "0/0", (30, 157)),
        ):
            with callback_handler.install_callbacks(trigger, region):
                held[0] = after
        held[0] = (99, 999)  # between compiles
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "1/1"):
            pass
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "2/0"):
        held[0] = (0, 0)
    assert footprint.grown == {"0/0": (30, 52), "1/0": (0, 5), "1/1": (0, 0)}
