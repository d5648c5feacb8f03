"""What to do about a failure: the cause that the records tell, and nothing that they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.judging.gates import Gate
from analysis.judging.remedies import Evidence, Remedy, remedies
from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.run.shape_map import shape_map
from analysis.run.time_parts import TimeParts
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, Startup, write_run

WARMED = "prefill batch 1 × length 64, context 64"
NEW = "extend batch 2 × length 128, context 256"
POLICY = {"shapes": {"kind": "exact"}, "compile": {"enabled": True, "warmup": "minimal"}}
ARM = FakeArm(name="compiled", config=POLICY, startup=Startup(warmed={WARMED: 2.0}))
GUARD = "1/2: tensor 'last' size mismatch at index 0. expected 1, actual 2\n1/1: another"
SHORT = FakeRun(duration_s=60.0, rate=5.0)


def failed(name: str, kind: str, verdict: str = "FAIL") -> Gate:
    return Gate(
        arm="compiled", gate=name, kind=kind, value=3.0, limit=0.0, unit="count", verdict=verdict, reason="It is so."
    )


RECOMPILES = failed("recompiles", "recompile")


def evidence(folder: Path, arm: FakeArm = ARM, **more: object) -> Evidence:
    run = Run.of(read_run(write_run(folder / "run", replace(SHORT, arms=(EAGER, arm)))))
    return Evidence(**{"run": run, "shapes": shape_map(run), "parts": {}, "slo": (), **more})  # type: ignore[arg-type]


def compiling(*shapes: str, **more: object) -> FakeArm:
    events = tuple(
        Compile(at_s=10.0 + place, seconds=0.5, shape=shape, reason=GUARD) for place, shape in enumerate(shapes)
    )
    return replace(ARM, compiles=events, **more)  # type: ignore[arg-type]


def text_of(found: tuple[Remedy, ...]) -> str:
    (remedy,) = found
    return remedy.text


class TestCompiles:
    def test_a_step_that_was_not_warmed_up_is_named_with_its_guard_and_command(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(NEW, NEW)), [RECOMPILES]))
        assert text.startswith("All 2 compiles while serving were for steps that its start had not warmed up.")
        assert "First failed guard: tensor 'last' size mismatch at index 0. expected 1, actual 2." in text
        assert 'compile.warmup = "shapes", not "minimal"' in text
        assert '`tailgate inspect experiment.toml --arm compiled --shapes "extend 2x128@256"`' in text

    def test_of_steps_that_were_warmed_up_no_warm_up_is_advised(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(WARMED)), [RECOMPILES]))
        assert "had run each step" in text
        assert "compile.warmup" not in text

    def test_a_step_that_was_captured_was_warmed_up(self, tmp_path: Path) -> None:
        captured = Startup(warmed={f"capture {NEW}": 1.0})
        text = text_of(remedies(evidence(tmp_path, compiling(NEW, startup=captured)), [RECOMPILES]))
        assert "had run each step" in text

    def test_what_a_kernel_says_of_itself_is_no_guard(self, tmp_path: Path) -> None:
        kernel = replace(ARM, compiles=(Compile(at_s=10.0, seconds=0.5, kind="jit", shape=NEW),))
        assert "guard" not in text_of(remedies(evidence(tmp_path, kernel), [RECOMPILES]))

    def test_only_those_that_were_not_warmed_up_are_counted(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(WARMED, NEW)), [RECOMPILES]))
        assert text.startswith("1 of 2 compiles while serving were for steps")

    def test_without_a_record_of_the_warm_up_nothing_is_said_of_it(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(NEW, startup=None)), [RECOMPILES]))
        assert "warm" not in text.lower()
        assert '--shapes "extend 2x128@256"' in text

    def test_compiles_that_name_no_step_leave_the_shapes_of_requests(self, tmp_path: Path) -> None:
        other = Startup(warmed={"prefill batch 9 × length 9, context 9": 1.0})
        text = text_of(remedies(evidence(tmp_path, compiling("", startup=other)), [RECOMPILES]))
        assert "in which requests began had not been warmed up" in text
        assert "--shapes" not in text

    def test_marked_sizes_are_held_against_their_bounds(self, tmp_path: Path) -> None:
        marked = {
            "shapes": {"kind": "exact"},
            "compile": {"enabled": True, "mark_dynamic": True, "batch_bounds": [2, 4]},
        }
        text = text_of(remedies(evidence(tmp_path, compiling(NEW, config=marked)), [RECOMPILES]))
        assert "Hold its bounds (batch_bounds) against these steps." in text
        assert "preset" not in text

    def test_autotuning_alone_is_no_recompile(self, tmp_path: Path) -> None:
        tuned = replace(ARM, compiles=(Compile(at_s=10.0, seconds=2.0, kind="autotune"),))
        text = text_of(remedies(evidence(tmp_path, tuned), [failed("longest stall", "recompile")]))
        assert text.startswith("Nothing was recompiled; what held requests up was: autotune (1).")


class TestOrder:
    def test_compiles_come_before_the_errors_and_latency_that_they_explain(self, tmp_path: Path) -> None:
        gates = [
            failed("noninferiority p99_ttft", "noninferiority"),
            failed("errors", "error"),
            failed("longest stall", "recompile"),
            RECOMPILES,
        ]
        found = remedies(evidence(tmp_path, compiling(NEW)), gates)
        assert [item.gates for item in found] == [
            ("longest stall", "recompiles"),
            ("errors",),
            ("noninferiority p99_ttft",),
        ]

    @pytest.mark.parametrize("verdict", ["PASS", "INCONCLUSIVE"])
    def test_a_gate_that_did_not_fail_has_no_remedy(self, tmp_path: Path, verdict: str) -> None:
        assert remedies(evidence(tmp_path), [failed("recompiles", "recompile", verdict)]) == ()


class TestErrors:
    def test_a_failure_that_waited_for_no_compile_is_not_blamed_on_one(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, replace(ARM, error_share=0.2)), [failed("errors", "error")]))
        assert "compile" not in text
        assert "`error`" in text

    def test_a_want_of_room_or_time_is_counted(self, tmp_path: Path) -> None:
        shed = replace(ARM, error_share=0.2, error_status="RESOURCE_EXHAUSTED")
        text = text_of(remedies(evidence(tmp_path, shed), [failed("errors", "error")]))
        assert "found no room or no time" in text
        assert "lower the rate" in text

    def test_a_death_says_how_and_where_its_last_lines_are(self, tmp_path: Path) -> None:
        death = {"arm": "compiled", "replica": "compiled-0", "exit_code": -9, "compiling": {"seconds": 12.0}}
        directory = write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, ARM)))
        path = directory / "trial-01" / "trial.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "deaths": [death]}))
        held = Evidence(run=Run.of(read_run(directory)), shapes=None, parts={}, slo=())
        text = text_of(remedies(held, [failed("deaths", "error")]))
        assert text.startswith("compiled-0 died first (exit code -9, 12.0 s into a compile): its last lines are under")


class TestLatency:
    SLOWER = failed("noninferiority p99_e2e", "noninferiority")

    @staticmethod
    def parts(**more: float) -> tuple[TimeParts, ...]:
        ms = {f"{part}_ms": 10.0 for part in ("queue", "prefill", "decode", "stall", "rest")} | more
        return (TimeParts(quantile=0.99, requests=5, e2e_ms=sum(ms.values()), **ms),)

    def test_the_part_that_grew_most_is_named(self, tmp_path: Path) -> None:
        parts = {"eager": self.parts(), "compiled": self.parts(queue_ms=40.0, decode_ms=20.0)}
        text = text_of(remedies(evidence(tmp_path, parts=parts), [self.SLOWER]))
        assert text.startswith("Around p99 E2E its requests took 40 ms longer than eager's, 30 ms of it in the queue.")

    @pytest.mark.parametrize(("compiled", "says"), [(True, "`tailgate inspect"), (False, "Nothing of it is compiled:")])
    def test_an_arm_that_compiles_nothing_is_not_searched_for_graph_breaks(
        self, tmp_path: Path, compiled: bool, says: str
    ) -> None:
        parts = {"eager": self.parts(), "compiled": self.parts(decode_ms=40.0)}
        arm = replace(ARM, config={"compile": {"enabled": compiled}})
        text = text_of(remedies(evidence(tmp_path, arm, parts=parts), [self.SLOWER]))
        assert f"30 ms of it in decode. {says}" in text

    @pytest.mark.parametrize("known", [("eager",), ("compiled",), ()])
    def test_where_no_server_says_its_times_no_part_is_blamed(self, tmp_path: Path, known: tuple[str, ...]) -> None:
        parts = {arm: self.parts() for arm in known}
        assert "do not show where" in text_of(remedies(evidence(tmp_path, parts=parts), [self.SLOWER]))

    def test_an_objective_that_the_control_misses_too_is_questioned_first(self, tmp_path: Path) -> None:
        missed = failed("slo p99_ttft_ms", "slo")
        text = text_of(remedies(evidence(tmp_path, slo=(replace(missed, arm="eager"),)), [missed]))
        assert text == "eager misses SLO p99 TTFT too: look at the objective and the load first."


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        (failed("parity", "parity"), "`tailgate parity experiment.toml`"),
        (failed("refused", "error"), "Widen the arm's bounds or ladders"),
        (failed("eager steps", "recompile"), "shows which steps run eagerly"),
        (failed("memory ratio", "memory"), "fewer slots"),
        (failed("memory growth", "memory"), "tells a leak from a long warm-up"),
        (failed("cold slo p99_ttft_ms", "cold"), "`tailgate precompile`"),
        (failed("ramp", "ramp"), "The section on the ramp"),
    ],
)
def test_every_kind_of_gate_has_a_remedy(tmp_path: Path, gate: Gate, says: str) -> None:
    assert says in text_of(remedies(evidence(tmp_path), [gate]))


def test_the_summary_holds_the_remedies_of_what_failed(tmp_path: Path) -> None:
    summary = analyze(write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, compiling(NEW)))))
    (first, *_) = summary["advice"]["remedies"]
    assert first["arm"] == "compiled"
    assert "recompiles" in first["gates"]
    assert "--arm compiled" in first["text"]
