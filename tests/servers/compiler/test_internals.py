"""What is private to torch is read in one place, for versions that were tried, or not at all and said so."""

from __future__ import annotations

import ast
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo import utils

from servers.compiler import internals
from servers.compiler.events import CompilerFacts
from servers.compiler.footprint import CompileFootprint
from servers.compiler.policy import load_backend
from servers.compiler.recorder import COUNTED, CompileRecorder, Trigger
from servers.config import CompileConfig
from servers.fields import ConfigError
from tests.servers.compiler.reset import reset_compiler

SERVERS = Path(internals.__file__).parents[1]
PRIVATE = ("torch._dynamo", "torch._inductor", "torch._guards", "torch.fx.experimental", "triton.knobs")


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    reset_compiler()
    yield
    reset_compiler()


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x + 1


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
