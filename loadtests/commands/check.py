"""`tailgate check`: what a run would do and could decide. Nothing is started or written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from tailgate.loadtests.commands import options
from tailgate.loadtests.commands.doctor import Finding, needed_by_managed_arms
from tailgate.loadtests.commands.run import UntilDecided, planned
from tailgate.servers import stdout

if TYPE_CHECKING:
    from tailgate.loadtests.experiments.model import Experiment
    from tailgate.loadtests.traffic.schedule import Schedule

EXAMPLES = """\
  tailgate check my.toml
  tailgate check my.toml --duration 20m
  tailgate check demo --set traffic.rate=8"""


class Gates(NamedTuple):
    """A kind of gates, whether the run can decide it at the best, and what it counts or lacks."""

    gates: str
    decidable: bool
    why: str


def command(
    experiment: options.ExperimentName,
    settings: Annotated[list[str] | None, options.set_option("traffic.rate=4")] = None,
    duration: options.Duration = None,
    trace: options.TraceFile = "",
    out: options.Out = "runs",
    until_decided: UntilDecided = False,
    at_most: options.AtMost = None,
    as_json: options.Json = False,
) -> int:
    """Check an experiment and say what its run can decide.

    Refuses whatever `tailgate run` would refuse before its start: settings, model, device, compiler, ports, trace. Then
    says which arms run, with which traffic, for how long, which gates such a run can decide, and what `tailgate doctor`
    finds missing. Starts and writes nothing.

    Exit codes: 0 it can run, 2 it cannot.
    """
    from tailgate.loadtests.experiments.files import check_makeable
    from tailgate.loadtests.trials.preflight import check_experiment
    from tailgate.loadtests.trials.trial_schedule import draw, source_of

    loaded = planned(experiment, settings, duration, trace, until_decided, at_most)
    check_experiment(loaded)
    schedule = draw(loaded, source_of(loaded), 1)
    check_makeable(Path(out))
    gates, found = list(decidable(loaded, schedule)), list(warnings(loaded))
    document = {
        "name": loaded.name,
        "arms": [arm.name for arm in loaded.arms],
        "trials": loaded.trials.count,
        "traffic_s": loaded.trials.count * loaded.traffic.duration_s,
        "requests": schedule.planned,
        "can_pass": all(item.decidable for item in gates) if gates else None,
        "gates": [item._asdict() for item in gates],
        "warnings": [item._asdict() for item in found],
    }
    words = "\n".join(_words(loaded, schedule, gates, found, bounded=at_most is not None))
    stdout.write(words, document, as_json=as_json)
    return 0


def warnings(experiment: Experiment) -> Iterator[Finding]:
    """Yield what `tailgate doctor` finds amiss for managed arms, and external arms that are one server."""
    if experiment.managed_arms:
        yield from (item for item in needed_by_managed_arms() if item.state != "ok")
    arms = experiment.external_arms
    for arm, other in combinations(sorted(arms, key=lambda arm: not arm.control), 2):
        same = set(arm.address) & set(other.address)
        if same and arm.model_name == other.model_name:
            text = f"is {min(same)}, as arms.{arm.name}.address: one server is compared with itself, so give another"
            yield Finding(f"arms.{other.name}.address", "warning", text)


def decidable(experiment: Experiment, schedule: Schedule) -> Iterator[Gates]:
    """Yield each kind of gates. Machines, variance and differences near a limit may leave a gate open all the same."""
    from tailgate.analysis.settings.slo_targets import parse_slo
    from tailgate.analysis.statistics.planning import needs
    from tailgate.analysis.wording import counted, duration_text

    traffic, trials = experiment.traffic, experiment.trials.count
    if traffic.arrivals == "saturation":  # its gates are judged at the loads that it finds
        return
    pace = _pace(experiment, schedule)
    for need in needs(experiment.gates, parse_slo(experiment.slo)):
        if need.requests is None or not pace["rate"]:
            never = "no run is long enough to show that no request fails"
            yield Gates(need.gates, False, never if pace["rate"] else "an arm of weight 0 gets no request")
            continue
        length_s = need.trial_s(**pace, trials=trials)
        each = " in each trial" if trials > 1 else ""
        blocks = f"{counted(need.blocks, 'block')} of {pace['block_s']:g} s"
        cold = " after the cold start" if need.cold_s else ""
        what = f"{need.requests:,} requests to every arm, at a tenth below the rate, and {blocks}{cold}"
        why = f"takes {duration_text(length_s)} of traffic{each}: {what}"
        yield Gates(need.gates, length_s <= traffic.duration_s, why)
    candidates = [arm for arm in experiment.external_arms if not arm.control]  # the gates are on their compiles
    unseen = [arm.name for arm in candidates if not (arm.telemetry.log or arm.telemetry.log_command)]
    seen = f"by stalls that clients see; arms.{unseen[0]}.telemetry.log would name compiles" if unseen else "counted"
    yield Gates("compiles and stalls", True, seen)


def _pace(experiment: Experiment, schedule: Schedule) -> dict[str, float]:
    """Return the requests/s of the arm with the fewest, and the seconds of a block as it is judged: with arms that take
    turns, of one that holds a turn of each."""
    from tailgate.analysis.statistics.planning import least_share

    traffic, arms = experiment.traffic, experiment.arms
    turns = len(arms) if traffic.design == "switchback" else 1
    share = least_share(traffic.design, [arm.weight for arm in arms])
    rate = traffic.rate or len(schedule) / experiment.traffic.duration_s
    return {"rate": rate * share, "block_s": experiment.gates.block_s * turns}


def _words(
    experiment: Experiment, schedule: Schedule, gates: Sequence[Gates], amiss: Sequence[Finding], *, bounded: bool
) -> Iterator[str]:
    """Yield the lines for people; the length is `bounded` by --at-most, which counts all trials."""
    yield f"{experiment.name} can run."
    yield ""
    yield from stdout.aligned([*_arms(experiment), *_plan(experiment, schedule)], left=2)
    yield ""
    if amiss:
        yield from stdout.aligned([(item.state, item.what, item.text) for item in amiss], left=2)
        yield ""
    if not gates:
        yield "This is a search: it says which load each arm holds within [slo], and judges the arms at that load."
        return
    yield from stdout.aligned(
        [(item.gates, "can be decided" if item.decidable else "stays open", item.why) for item in gates], left=2
    )
    yield ""
    yield _outlook(experiment, schedule, gates, bounded=bounded)


def _arms(experiment: Experiment) -> Iterator[tuple[str, str, str]]:
    from tailgate.analysis.wording import counted
    from tailgate.loadtests.trials.environment import sees_gpu

    for arm in experiment.arms:
        if arm.kind == "tailgate":
            found = "cuda" if sees_gpu() else "cpu"
            what = f"{arm.preset} on {found if arm.model.device == 'auto' else arm.model.device}"
        else:
            what = f"{arm.kind} at {arm.address[0]}, not asked here: `tailgate run` asks it first"
        more = f", {counted(arm.replicas, 'replica')}" if arm.replicas > 1 else ""
        yield arm.name, "control" if arm.control else "candidate", f"{what}{more}"
    if experiment.managed_arms:
        yield "model", "", experiment.managed_arms[0].model.id


def _plan(experiment: Experiment, schedule: Schedule) -> Iterator[tuple[str, str, str]]:
    from tailgate.analysis.wording import counted, duration_text, percent

    traffic, trials = experiment.traffic, experiment.trials.count
    shares = [
        f"{count:,} to {'every arm' if traffic.design == 'mirrored' else 'all arms together' if arm == '*' else arm}"
        for arm, count in schedule.planned.items()
    ]
    pace = f"{traffic.rate or len(schedule) / traffic.duration_s:.3g} requests/s on average"
    if traffic.arrivals == "saturation":
        pace = "steps of {:g} to {:g} requests/s".format(*traffic.step_rates)
    yield "traffic", traffic.design, f"{pace} ({traffic.arrivals}), lengths: {traffic.workload}"
    drawn = f" (drawn with seed = {experiment.seed})" if traffic.rate else ""
    yield "requests", "", f"{', '.join(dict.fromkeys(shares))} in trial 1{drawn}"
    answers = ("answers", "output_over", "max_tokens", "max_new_tokens")
    for what, over, column, limit in (("prompts", "input_over", "prompt_tokens", "max_prompt_tokens"), answers):
        if share := schedule.over[over] / len(schedule):
            most = schedule.ints(column).max()
            yield "", "", f"{percent(share, 2)} of {what} are cut to {most} tokens (engine.{limit})"
    most = "at most " if experiment.gates.sequential else ""
    yield "time", "", f"{most}{duration_text(trials * traffic.duration_s)} of traffic in {counted(trials, 'trial')}"
    if experiment.managed_arms:
        each = f"before each trial the start of {counted(len(experiment.managed_arms), 'arm')}"
        yield "", "", f"and {each}: a compiled one takes about a minute on the CPU, two to five on a GPU"
    yield "machine", "", "its speed is not measured here: `tailgate doctor` does that in 10 s"


def _outlook(experiment: Experiment, schedule: Schedule, gates: Sequence[Gates], *, bounded: bool) -> str:
    from tailgate.analysis.settings.slo_targets import parse_slo
    from tailgate.analysis.statistics.planning import needs, shortest_trial_s

    if all(item.decidable for item in gates):
        return "This run can PASS or FAIL. Where arms are nearly equal it may end INCONCLUSIVE and say what it lacks."
    limits, targets, trials = experiment.gates, parse_slo(experiment.slo), experiment.trials.count
    lacks = "This run can FAIL or end INCONCLUSIVE. It cannot PASS."
    if impossible := [need.gates for need in needs(limits, targets) if need.requests is None]:
        return f"{lacks}\nNo length of it can PASS, because {', '.join(impossible)} allows no miss."
    pace = _pace(experiment, schedule)
    minutes = shortest_trial_s(limits, targets, **pace, trials=trials) / 60
    needed = f"--at-most {minutes * trials:.0f}m" if bounded else f"--duration {minutes:.0f}m"
    return f"{lacks}\nFor a PASS give at least {needed}." if pace["rate"] else lacks
