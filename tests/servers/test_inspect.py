"""Which shapes find their graph ready: asked of arms that the real compiler has warmed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tailgate.servers.compiler import recorder
from tailgate.servers.compiler.jit import jit_compile
from tailgate.servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig
from tailgate.servers.engine.runner import ModelRunner
from tailgate.servers.engine.scheduler import Step
from tailgate.servers.engine.shapes import StepShape
from tailgate.servers.engine.steps import Outputs
from tailgate.servers.inspect import EXIT_COMPILES, Inspection, inspect_arm, parse_shapes, text_of, unplanned_shapes
from tests.servers.compiler.test_recorder import reset_compiler
from tests.servers.test_config import refusal

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12)
ENCODER = ArmConfig(name="encoder", model=ModelConfig(id="random:bert-tiny", task="embed"), engine=ENGINE)


@pytest.fixture(scope="module", autouse=True)
def compiler() -> Iterator[None]:
    yield
    reset_compiler()


def inspection_of(arm: ArmConfig, shapes: str = "") -> Inspection:
    reset_compiler()
    return inspect_arm(arm, parse_shapes(shapes, arm) if shapes else [], report=lambda line: None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefill 7", [StepShape("prefill", 1, 7, 7)]),
        ("encode 4×40", [StepShape("encode", 4, 40, 40)]),
        ("decode 3 @ 50 , decode 1@2", [StepShape("decode", 3, 1, 50), StepShape("decode", 1, 1, 2)]),
    ],
)
def test_shapes_are_read_as_they_are_written(text: str, expected: list[StepShape]) -> None:
    arm = ENCODER if text.startswith("encode") else ArmConfig(engine=ENGINE)
    assert parse_shapes(text, arm) == expected
    assert parse_shapes(", ".join(map(str, expected)), arm) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefill 1x3", ("prefill 1x3", "TOKENS")),
        ("decode 3x2", ("decode 3x2", "ROWS@CONTEXT")),
        ("prefill 45", ("45 tokens", "engine.step_tokens", "44")),
        ("decode 5@9", ("5 rows", "engine.slots", "4")),
        ("decode 1@52", ("52 positions", "51")),
        ("decode 1@1", ("1 positions", "2 to 51")),
        ("encode 1x5", ('"generate"', "encode")),
        ("prefill " + "9" * 5000, ("is not a shape",)),
        ("prefill ٣", ("is not a shape",)),
    ],
)
def test_shapes_that_the_engine_can_never_run_are_refused_in_a_short_line(text: str, words: tuple[str, ...]) -> None:
    assert len(refusal(parse_shapes, text, ArmConfig(engine=ENGINE), words=words)) < 1200


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(slots=1, max_prompt_tokens=1, max_new_tokens=1),
        EngineConfig(slots=3, max_prompt_tokens=100, max_new_tokens=5, step_tokens=7),
    ],
)
def test_unplanned_shapes_can_run(engine: EngineConfig) -> None:
    arm = ArmConfig(engine=engine)
    shapes = list(unplanned_shapes(arm))
    assert parse_shapes(", ".join(map(str, shapes)), arm) == shapes
    assert {shape.kind for shape in shapes} >= {"prefill", "decode"}


@pytest.fixture(scope="module")
def naive() -> Inspection:
    """Of five shapes, its one request warmed two."""
    policy = CompileConfig(enabled=True, backend="eager", warmup="minimal")
    shapes = "prefill 5, decode 1@6, prefill 8, decode 1@17, prefill 9"
    return inspection_of(ArmConfig(name="naive", compile=policy, engine=ENGINE), shapes)


def test_an_arm_warmed_with_one_request_names_the_shapes_that_will_recompile_and_every_graph(naive: Inspection) -> None:
    assert [visit.outcome for visit in naive.visits] == ["ready", "ready", "recompiles", "recompiles", "ready"]
    assert [visit.planned for visit in naive.visits] == [True, True, False, False, False]
    assert naive.to_dict()["exit_code"] == EXIT_COMPILES
    for visit in naive.unready:
        assert "expected" in visit.reason
        assert visit.first_s > visit.again_s
    assert [graph.compile_id for graph in naive.graphs] == ["1/0", "2/0", "1/1", "2/1"]
    assert [graph.phase for graph in naive.graphs] == ["warmup", "warmup", "serving", "serving"]
    assert [graph.dynamic for graph in naive.graphs] == [False, False, True, True]
    assert naive.graphs[2].shape == "prefill 8"
    assert all("steps.py" in graph.frame for graph in naive.graphs[:2])
    text = text_of(naive)
    assert all(str(visit.shape) in text for visit in naive.visits)
    assert text.strip().splitlines()[-1].startswith("2 of 5 shapes are not ready")
    json.dumps(naive.to_dict())


def test_the_graphs_of_listed_shapes_are_compared(naive: Inspection) -> None:
    first, same, _ = naive.to_dict()["differences"]
    assert (first["shapes"], first["graphs"]) == (["prefill 5", "prefill 8"], ["1/0", "1/1"])
    assert [first["changes"][f"guard {text}"] for text in ("L['rows']: size=[5]", "L['rows']: size=[None]")] == [-1, 1]
    assert first["changes"]["guard 2 <= L['rows'].size()[0]"] == 1
    assert (same["shapes"], same["graphs"], same["changes"]) == (["prefill 8", "prefill 9"], ["1/1", "1/1"], {})
    assert "prefill 5 → prefill 8: 1/1 instead of 1/0\n  -1 guard L['rows']: size=[5]\n" in text_of(naive)


def test_a_failing_step_is_an_error_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = ModelRunner.launch

    def failing(self: ModelRunner, step: Step, batch_id: int) -> object:
        if len(step.jobs[0].prompt) == 9:
            raise RuntimeError("constraint violated\nat length")
        return launch(self, step, batch_id)

    monkeypatch.setattr(ModelRunner, "launch", failing)
    inspection = inspection_of(ArmConfig(engine=ENGINE), "prefill 9, prefill 8")
    assert [(visit.outcome, visit.reason) for visit in inspection.visits] == [
        ("fails", "RuntimeError: constraint violated"),
        ("eager as asked", ""),
    ]
    assert inspection.to_dict()["exit_code"] == EXIT_COMPILES


def test_a_kernel_that_an_eager_warm_up_did_not_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in's JIT makes a kernel for each context."""
    made: set[int] = set()
    run = ModelRunner.run

    def with_kernels(runner: ModelRunner, step: Step, shape: StepShape) -> Outputs:
        if shape.context not in made:
            with jit_compile("plug-in", variant=f"context {shape.context}"):
                made.add(shape.context)
        return run(runner, step, shape)

    monkeypatch.setattr(ModelRunner, "run", with_kernels)
    met = inspection_of(ArmConfig(engine=ENGINE), "decode 3@11, decode 2@11")
    assert [visit.outcome for visit in met.visits] == ["compiles a kernel", "eager as asked"]
    assert met.visits[0].reason == "jit compiled plug-in for context 11"
    assert met.to_dict()["exit_code"] == EXIT_COMPILES


def test_an_inspection_says_what_it_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_STREAM", "torch.other")
    met = inspection_of(ArmConfig(engine=ENGINE), "prefill 5")
    (text,) = met.blind_spots
    assert met.to_dict()["blind_spots"] == (text,)
    assert "not seen: torch" in text_of(met)
