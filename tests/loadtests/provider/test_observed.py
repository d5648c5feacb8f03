from pathlib import Path

import pytest

from analysis.records.documents import write_document
from loadtests.provider.judgement import Judgement, judge
from loadtests.provider.observed import Observed, newest_run
from loadtests.provider.question import Question
from servers.fields import ConfigError
from tests.fakes.rollout import Rollout

STEP = Question(goal="step")
PROMOTION = Question()


def judged(run: Rollout, question: Question = PROMOTION) -> Judgement:
    observed = Observed(run.folder, clock=run.now_ns)
    return judge(observed.evidence(question), question)


def verdict(run: Rollout, question: Question = PROMOTION) -> str:
    return judged(run, question).verdict


def going(run: Rollout, *, decision: str | None = None, safe: bool = False) -> None:
    """A minute of traffic and a look at it."""
    run.at_s += 60
    run.alive()
    run.answer()
    run.look(decision, safe=safe)


def test_before_there_is_a_run_nothing_is_known(tmp_path: Path) -> None:
    observed = Observed(tmp_path, clock=lambda: 0)
    assert judge(observed.evidence(STEP), STEP) == Judgement(
        verdict="INCONCLUSIVE", reasons=(f"there is no run in {tmp_path.name} yet",)
    )


def test_a_step_takes_that_it_is_surely_not_much_slower_and_the_promotion_every_gate(run: Rollout) -> None:
    going(run)
    assert (verdict(run, STEP), verdict(run)) == ("INCONCLUSIVE", "INCONCLUSIVE")
    going(run, safe=True)
    assert (verdict(run, STEP), verdict(run)) == ("PASS", "INCONCLUSIVE")
    assert judged(run).reasons[-1] == "It is open."
    going(run, decision="PASS")
    assert (verdict(run, STEP), verdict(run)) == ("PASS", "PASS")


def test_a_gate_is_asked_alone(run: Rollout) -> None:
    going(run)
    assert verdict(run, Question(gate="errors")) == "PASS"
    assert verdict(run, Question(gate="noninferiority p99_ttft")) == "INCONCLUSIVE"
    with pytest.raises(ConfigError, match="is not in the last look: give noninferiority p99_ttft, errors"):
        judged(run, Question(gate="speed"))


def test_pass_takes_requests_in_the_window(run: Rollout) -> None:
    going(run, decision="PASS")
    run.at_s += 59
    run.alive()
    assert verdict(run) == "PASS"
    assert judged(run, Question(window_s=50.0)).reasons == ("the candidate had 0 of 30 requests",)


def test_a_look_that_is_old_is_no_pass_any_more(run: Rollout) -> None:
    going(run, decision="PASS")
    run.at_s += 121  # four blocks of 30 s
    run.alive()
    assert judged(run) == Judgement(
        verdict="INCONCLUSIVE", reasons=("the last look is 121 s old, and counts for 120 s",)
    )
    going(run, decision="PASS")
    assert verdict(run) == "PASS"


def test_a_run_that_is_silent_or_has_ended_is_no_pass_any_more(run: Rollout) -> None:
    going(run, decision="PASS")
    run.at_s += 16
    assert judged(run).reasons == (f"run {run.folder.name} has said nothing for 16 s",)
    run.end()
    assert judged(run).reasons == (f"run {run.folder.name} has ended: nobody watches any more",)
    (run.folder / "status.json").unlink()
    assert "nothing shows that it goes on" in judged(run).reasons[0]


def test_a_failure_stays_one_when_nobody_looks_any_more(run: Rollout) -> None:
    run.look("FAIL", reason="Its p99 is 1.5 times the control's.")
    run.end()
    run.at_s += 10_000
    assert judged(run, STEP) == Judgement(verdict="FAIL", reasons=("Its p99 is 1.5 times the control's.",))


def test_harm_within_a_step_is_a_failure(run: Rollout) -> None:
    run.look(failed="It is surely 25 % slower.")
    assert judged(run, STEP) == Judgement(verdict="FAIL", reasons=("It is surely 25 % slower.",))


def test_an_alarm_is_a_failure_without_a_look(run: Rollout) -> None:
    observed = Observed(run.folder, clock=run.now_ns)
    assert judge(observed.evidence(STEP), STEP).verdict == "INCONCLUSIVE"
    run.compiled(9.0, phase="warmup")
    assert judge(observed.evidence(STEP), STEP).verdict == "INCONCLUSIVE"
    run.compiled(1.5)
    assert judge(observed.evidence(STEP), STEP) == Judgement(
        verdict="FAIL", reasons=("new compiled for 1.5 s while serving for prefill 1×81",)
    )


def test_a_death_is_a_failure_at_once(run: Rollout) -> None:
    going(run, decision="PASS")
    run.died()
    assert judged(run) == Judgement(verdict="FAIL", reasons=("new-0 died",))


def test_a_burst_of_errors_is_a_failure_as_long_as_it_is_in_the_window(run: Rollout) -> None:
    going(run, decision="PASS")
    run.answer(12, status="UNAVAILABLE")
    assert judged(run).reasons == ("12 of 52 requests to new failed in the last 300 s",)
    run.at_s += 61
    run.alive()
    run.answer()
    assert verdict(run, Question(window_s=60.0)) == "PASS"


def test_requests_that_their_client_cancelled_have_not_failed(run: Rollout) -> None:
    going(run, decision="PASS")
    run.answer(40, status="CANCELLED")
    assert verdict(run) == "PASS"


def test_alarms_that_the_experiment_forgives_are_forgiven(tmp_path: Path) -> None:
    run = Rollout(folder=tmp_path / "run", settings="[ramp]\nfailure_limit = 1\n")
    going(run, decision="PASS")
    run.compiled(1.5)
    assert verdict(run) == "PASS"
    run.died()
    assert verdict(run) == "FAIL"


def test_what_the_run_itself_took_back_has_failed(run: Rollout) -> None:
    run.rolled_back("new-0 died")
    assert judged(run).reasons == ("the run has rolled it back: new-0 died",)


def test_what_is_open_can_count_as_failed(run: Rollout) -> None:
    going(run)
    found = judged(run, Question(inconclusive="fail"))
    assert (found.verdict, found.reasons[0]) == ("FAIL", "still open, and inconclusive=fail")


def test_of_several_candidates_one_is_named(tmp_path: Path) -> None:
    run = Rollout(folder=tmp_path / "run", others=("newer",))
    with pytest.raises(ConfigError, match="has 2 candidates: give arm=new, newer"):
        judged(run)
    assert verdict(run, Question(arm="newer")) == "INCONCLUSIVE"
    with pytest.raises(ConfigError, match='arm "old" is no candidate of run: give new, newer'):
        judged(run, Question(arm="old"))


def test_the_newest_run_of_a_folder_is_followed(tmp_path: Path) -> None:
    assert newest_run(tmp_path) is None
    first = Rollout(folder=tmp_path / "20260101T120000Z-canary")
    first.look("FAIL")
    observed = Observed(tmp_path, clock=first.now_ns)
    assert judge(observed.evidence(STEP), STEP).verdict == "FAIL"
    second = Rollout(folder=tmp_path / "20260102T120000Z-canary")
    assert observed.evidence(STEP).run == second.folder.name
    assert judge(observed.evidence(STEP), STEP).verdict == "INCONCLUSIVE"


def test_files_of_somebody_else_are_no_pass(run: Rollout) -> None:
    going(run, decision="PASS")
    (run.folder / "looks.jsonl").write_text('{"at_ns": "soon", "arms": [1], "gates": {"a": 1}, "step": 7}\n[]\nnull\n')
    write_document(run.trial / "trial.json", {"deaths": {"arm": 3}})
    assert verdict(run) == "INCONCLUSIVE"
    (run.folder / "experiment.toml").write_text('arms = "all"')
    with pytest.raises(ConfigError, match="has 0 candidates"):
        judged(run)
