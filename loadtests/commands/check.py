"""`tailgate check`: what a run would do and could decide. Nothing is started or written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from tailgate.loadtests.commands import options
from tailgate.loadtests.commands.doctor import Finding, needed_by_managed_arms
from tailgate.loadtests.commands.run import UntilDecided, planned
from tailgate.servers import stdout

if TYPE_CHECKING:
    from tailgate.analysis.settings.gate_limits import GateLimits
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
    stdout.write("\n".join(_words(loaded, schedule, gates, found, out)), document, as_json=as_json)
    return 0


def warnings(experiment: Experiment) -> Iterator[Finding]:
    """Yield what `tailgate doctor` finds amiss for managed arms, and external arms that are one server."""
    if experiment.own_arms:
        yield from (item for item in needed_by_managed_arms() if item.state != "ok")
    arms = experiment.external_arms
    for arm, other in combinations(sorted(arms, key=lambda arm: not arm.control), 2):
        same = set(arm.address) & set(other.address)
        if same and arm.model_name == other.model_name:
            text = f"is {min(same)}, as arms.{arm.name}.address: one server is compared with itself, so give another"
            yield Finding(f"arms.{other.name}.address", "warning", text)


def needed_requests(limits: GateLimits, slo: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    """Yield each kind of estimate with the fewest requests of an arm that can decide it; None: no number can."""
    from tailgate.analysis.settings.slo_targets import parse_slo
    from tailgate.analysis.statistics.planning import TAIL_REQUESTS, requests_for_share

    names = [f"p{100 * quantile:g} {metric.upper()}" for metric in limits.metrics for quantile in limits.quantiles]
    yield f"latency ({', '.join(names)})", round(TAIL_REQUESTS / (1.0 - limits.quantile))
    shares = [(f"slo {target.key}", target.allowed_share) for target in parse_slo(slo)]
    for name, share in [*shares, ("errors", limits.max_error_pct / 100.0)]:
        if 0.0 < share < 1.0:
            yield name, requests_for_share(0.0, share, alpha=limits.alpha)
        else:
            yield name, 1 if share else None


def least_minutes(limits: GateLimits, slo: Mapping[str, Any], *, rate: float, block_s: float, trials: int = 1) -> int:
    """Return how long each trial sends traffic until all estimates can be decided, at `rate` requests/s to an arm."""
    requests = max(count for _, count in needed_requests(limits, slo) if count)
    least = max(_least_blocks(limits, name) for name, _ in needed_requests(limits, slo))
    blocks = max(least, math.ceil(requests / (0.9 * rate) / block_s))  # arrivals are random
    return math.ceil((math.ceil(blocks / trials) * block_s + limits.cold_s) / 60.0)


def _least_blocks(limits: GateLimits, name: str) -> int:
    from tailgate.analysis.statistics.share_evidence import BLOCKS_FOR_PASS

    return max(limits.min_blocks, BLOCKS_FOR_PASS) if name.startswith("slo p") else limits.min_blocks


def decidable(experiment: Experiment, schedule: Schedule) -> Iterator[Gates]:
    """Yield each kind of gates. Machines, variance and differences near a limit may leave a gate open all the same."""
    limits, trials, width_s = experiment.gates, experiment.trials.count, _block_s(experiment)
    if experiment.traffic.arrivals == "saturation":  # its gates are judged at the loads that it finds
        return
    for place, (name, needed) in enumerate(needed_requests(limits, experiment.slo)):
        cold_s = 0.0 if place else limits.cold_s  # of latencies alone
        requests = requests_of_an_arm(experiment, schedule, after_s=cold_s) * trials
        blocks = max(0, math.floor((schedule.duration_s - cold_s) / width_s + (0.5 if place else 1e-9))) * trials
        short = ["no run is long enough to show that no request fails"] if needed is None else []
        short += [f"{requests:,} of {needed:,} requests an arm"] if needed and requests < needed else []
        if blocks < (least := _least_blocks(limits, name)) and not limits.sequential:
            short.append(f"{blocks} of {least} blocks")
        yield Gates(name, not short, ", ".join(short) or f"{requests:,} requests an arm, {needed:,} needed")
    # A candidate first: its compiles are what the gates ask for.
    external = sorted(experiment.external_arms, key=lambda arm: arm.control)
    unseen = [arm.name for arm in external if not (arm.telemetry.log or arm.telemetry.log_command)]
    seen = f"by stalls that clients see; arms.{unseen[0]}.telemetry.log would name compiles" if unseen else "counted"
    yield Gates("compiles and stalls", True, seen)


def _block_s(experiment: Experiment) -> float:
    """Return the seconds of a block as it is judged: with arms that take turns, of one that holds a turn of each."""
    turns = len(experiment.arms) if experiment.traffic.design == "switchback" else 1
    return experiment.gates.block_s * turns


def requests_of_an_arm(experiment: Experiment, schedule: Schedule, *, after_s: float = 0.0) -> int:
    """Return how many requests of a trial, due after so many seconds, the arm with the fewest gets."""
    before = schedule.planned_before(int(after_s * 1e9))
    planned = [count - before[arm] for arm, count in schedule.planned.items()]
    weights = [arm.weight for arm in experiment.arms]
    return min(planned) * min(weights) // sum(weights) if schedule.design == "split" else min(planned)


def _words(
    experiment: Experiment, schedule: Schedule, gates: Sequence[Gates], amiss: Sequence[Finding], out: str
) -> Iterator[str]:
    from tailgate.analysis.wording import counted, duration_text
    from tailgate.loadtests.trials.environment import sees_gpu

    traffic, trials = experiment.traffic, experiment.trials.count
    rows = []
    for arm in experiment.arms:
        if arm.kind == "tailgate":
            found = "cuda" if sees_gpu() else "cpu"
            what = f"{arm.preset} on {found if arm.model.device == 'auto' else arm.model.device}"
        else:
            what = f"{arm.kind} at {arm.address[0]}"
        more = f", {counted(arm.replicas, 'replica')}" if arm.replicas > 1 else ""
        rows.append((arm.name, "control" if arm.control else "candidate", f"{what}{more}"))
    if experiment.own_arms:
        rows.append(("model", "", experiment.own_arms[0].model.id))
    shares = [
        f"{count:,} to {'every arm' if traffic.design == 'mirrored' else 'all arms together' if arm == '*' else arm}"
        for arm, count in schedule.planned.items()
    ]
    pace = len(schedule) / schedule.duration_s
    rows.append(("traffic", traffic.design, f"{pace:.3g} requests/s ({traffic.arrivals}), lengths: {traffic.workload}"))
    rows.append(("requests", "", f"{', '.join(dict.fromkeys(shares))} in a trial"))
    most = "at most " if experiment.gates.sequential else ""
    length = f"{most}{duration_text(trials * traffic.duration_s)} of traffic in {counted(trials, 'trial')}"
    start = ", after the arms have loaded, compiled and warmed up" if experiment.own_arms else ""
    rows.append(("time", "", f"{length}{start}"))
    rows.append(("machine", "", "its speed is not measured here: `tailgate doctor` does that in 10 s"))
    rows.append(("records", "", f"in a new folder of {out}{'' if Path(out).exists() else ', which is made'}"))
    yield f"{experiment.name} can run."
    yield ""
    yield from stdout.aligned(rows, left=2)
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
    if all(item.decidable for item in gates):
        yield "This run can PASS or FAIL. Where arms are nearly equal it may end INCONCLUSIVE and say what it lacks."
        return
    yield "This run can FAIL or end INCONCLUSIVE, and not PASS."
    rate = requests_of_an_arm(experiment, schedule) / schedule.duration_s
    if impossible := [name for name, needed in needed_requests(experiment.gates, experiment.slo) if needed is None]:
        yield f"No length of it can PASS: {', '.join(impossible)} allows no miss."
    elif rate:
        limits, width_s = experiment.gates, _block_s(experiment)
        minutes = least_minutes(limits, experiment.slo, rate=rate, block_s=width_s, trials=trials)
        yield f"A PASS needs at least --duration {minutes}m."
