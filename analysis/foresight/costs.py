"""When an arm pays: GPUs for a load, and its start-up against the GPU-seconds that it saves on every request.

What an arm holds comes from a saturation search, as an interval (`analysis.judging.load_steps`); the interval is
carried through to the end, so that an answer reads "from 2 to 9 hours", or "never" where the arm may be no faster.
Replicas are taken to add up: two hold twice the load of one. The control is there already, so the arm pays for its
whole start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from analysis.foresight.energies import held_token_j, step_energies
from analysis.judging.gates import FAIL, PASS
from analysis.judging.judgement import Judgement
from analysis.judging.load_steps import FEWEST_STARTS, Bracket, brackets, is_search
from analysis.judging.wording import digits
from analysis.nouns import counted
from analysis.records.plain_values import mapping, number
from analysis.run.run import Run
from analysis.run.startup import startup_row
from analysis.settings.rollout import Rollout

NEVER = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A value as seen with the limits of its interval; None where it is not known, NEVER where it never comes."""

    low: float | None = None
    seen: float | None = None
    high: float | None = None

    @classmethod
    def all(cls, value: float | None) -> Span:
        """A value that is known exactly, or not at all."""
        return cls(low=value, seen=value, high=value)

    def each(self, change: Callable[[float], float | None]) -> Span:
        """`change` of what is known."""
        low, seen, high = (None if value is None else change(value) for value in (self.low, self.seen, self.high))
        return Span(low=low, seen=seen, high=high)

    def crossed(self, other: Span, change: Callable[[float, float], float | None]) -> Span:
        """`change` of both where both are known. It falls as `other` rises: far ends go together."""

        def both(own: float | None, far: float | None) -> float | None:
            return None if own is None or far is None else change(own, far)

        return Span(low=both(self.low, other.high), seen=both(self.seen, other.seen), high=both(self.high, other.low))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What one start of one replica costs; None where it is not recorded. `memory_bytes` is the peak on the device."""

    serving_s: float | None = None
    warmup_s: float | None = None
    compile_s: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """One arm. Rates are requests/s that one replica holds within the SLO.

    `gpus` carry the rollout's load. `start_gpu_s` is what starting as many replicas costs (one replica where no load is
    given). `saved` is in GPUs where a load is given, else in GPU-seconds a request, and below 0 where the arm needs
    more. It pays after `requests`, or `hours` at the load (without one: at what its replica holds).
    `request_gpu_s` is what a request takes of the GPUs that carry the load, busy or not (without a load: of a replica
    at its limit), and `tokens` are answered to it on average, each for `token_j` joules of the arm's card at what the
    replica was seen to hold (without a search: at what it was offered).
    """

    arm: str
    control: bool
    source: Literal["search", "offered", "unknown"]
    trials: int
    rps: Span
    start: Start
    gpus: Span
    start_gpu_s: Span
    saved: Span
    requests: Span
    hours: Span
    request_gpu_s: Span
    tokens: float | None
    token_j: float | None
    verdict: str | None
    reason: str


def break_evens(run: Run, judgement: Judgement, rollout: Rollout) -> list[BreakEven]:
    """Every arm of the run against the control, which comes first."""
    capacities = _capacities(run, judgement)
    steps = step_energies(run) if is_search(run) else None
    return [
        weigh(
            arm,
            own=capacities[arm],
            control=None if arm == run.control else capacities[run.control],
            start=start_of(run, arm),
            rollout=rollout,
            verdict=judgement.verdicts.get(arm),
            tokens=tokens_of(run, arm),
            token_j=held_token_j(run, arm, capacities[arm].rps.seen, steps),
        )
        for arm in run.arms
    ]


def tokens_of(run: Run, arm: str) -> float | None:
    """Tokens that come out for a request, the mean; None where the arm answered nothing, or does not count them."""
    rows = run.answered(arm)
    return float(run.requests.output_tokens[rows].mean()) if rows.size and run.account(arm).counts_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one replica of an arm holds within its SLO, in requests/s, and from where that is known."""

    source: Literal["search", "offered", "unknown"]
    rps: Span
    trials: int = 0


def _capacities(run: Run, judgement: Judgement) -> dict[str, Capacity]:
    if not is_search(run):
        return {arm: _offered(run, arm, judgement) for arm in run.arms}
    return {item.arm: _searched(run, item) for item in brackets(run)}


def _searched(run: Run, item: Bracket) -> Capacity:
    # One start decides nothing: what it shows is what was seen.
    low, high = (item.low_rps, item.high_rps) if item.trials >= FEWEST_STARTS else (None, None)
    held, replicas = Span(low=low, seen=item.passed_rps, high=high), run.replicas(item.arm)
    return Capacity(source="search", rps=held.each(lambda rps: rps / replicas), trials=item.trials)


def _offered(run: Run, arm: str, judgement: Judgement) -> Capacity:
    """A load that was held is a lower limit and no more; one under which the SLO surely broke is an upper one."""
    # Targets of the cold start come last, and say nothing of a load that lasts.
    verdicts = [gate.verdict for gate in judgement.slo[arm][: len(run.targets)]]
    each = run.rate(int((run.of_arm(arm) & run.usable).sum())) / run.replicas(arm)
    trials = len(run.trials)
    if each > 0 and verdicts and set(verdicts) == {PASS}:
        return Capacity(source="offered", rps=Span(low=each), trials=trials)
    if each > 0 and FAIL in verdicts:
        return Capacity(source="offered", rps=Span(high=each), trials=trials)
    return Capacity(source="unknown", rps=Span(), trials=trials)


def start_of(run: Run, arm: str) -> Start:
    """What a start of the arm cost in this run."""
    row = startup_row(run, arm)
    memory = mapping(row.get("memory_bytes"))
    peak = number(memory.get("device_peak")) or number(memory.get("device_reserved"))
    return Start(
        serving_s=row["serving_s"],
        warmup_s=row["warmup_s"],
        compile_s=row["compile_s"],
        # Of all replicas together.
        memory_bytes=None if peak is None else peak / run.replicas(arm),
    )


# --- Weighing ---------------------------------------------------------------------------------------------------------


def weigh(
    arm: str,
    *,
    own: Capacity,
    control: Capacity | None,
    start: Start,
    rollout: Rollout,
    verdict: str | None,
    tokens: float | None = None,
    token_j: float | None = None,
) -> BreakEven:
    """What the arm needs and when it pays; `control` is None for the control itself."""
    gpus, load, each = gpus_for(own.rps, rollout), rollout.load_rps, rollout.gpus_per_replica
    cost = Span.all(start.serving_s)
    start_gpu_s = cost.each(lambda value: value * each) if load is None else _product(gpus, start.serving_s)
    saved = requests = hours = Span()
    if control is not None and load is None:
        saved = _less(_per_request(control.rps, each), _per_request(own.rps, each))
        requests = _pays(start_gpu_s, saved)
        hours = requests.crossed(own.rps, lambda count, held: count / held / 3600.0 if held else None)
    elif control is not None:
        saved = _less(gpus_for(control.rps, rollout), gpus)
        seconds = _pays(start_gpu_s, saved)
        requests, hours = _product(seconds, load), seconds.each(lambda value: value / 3600.0)
    return BreakEven(
        arm=arm,
        control=control is None,
        source=own.source,
        trials=own.trials,
        rps=own.rps,
        start=start,
        gpus=gpus,
        start_gpu_s=start_gpu_s,
        saved=saved,
        requests=requests,
        hours=hours,
        request_gpu_s=_per_request(own.rps, each) if load is None else gpus.each(lambda count: count / load),
        tokens=tokens,
        token_j=token_j,
        verdict=verdict,
        reason=_reason(arm, own, control, start, rollout, saved, hours, verdict),
    )


def _product(span: Span, factor: float | None) -> Span:
    return Span() if factor is None else span.each(lambda value: value * factor)


def gpus_for(rps: Span, rollout: Rollout) -> Span:
    """GPUs for the rollout's load where a replica holds `rps`: the fewest if it holds as much as it may, the most if as
    little."""

    def needed(load: float, held: float) -> float | None:
        return float(max(1, math.ceil(load / held - 1e-9)) * rollout.gpus_per_replica) if held else None

    return Span.all(rollout.load_rps).crossed(rps, needed)


def _per_request(rps: Span, gpus: int) -> Span:
    """GPU-seconds that a request takes on a replica at its limit."""
    return Span.all(gpus).crossed(rps, lambda count, held: count / held if held else None)


def _less(one: Span, other: Span) -> Span:
    """The difference; its limits are the far ends of both."""
    return one.crossed(other, lambda left, right: left - right)


def _pays(cost: Span, saved: Span) -> Span:
    """How much it takes until what is saved has paid the cost: soonest, as seen, latest. NEVER where nothing is."""

    def until(spent: float | None, gain: float | None) -> float | None:
        if gain is None or (gain > 0 and spent is None):
            return None
        return spent / gain if gain > 0 and spent is not None else NEVER

    return Span(low=until(cost.low, saved.high), seen=until(cost.seen, saved.seen), high=until(cost.high, saved.low))


# --- In words ---------------------------------------------------------------------------------------------------------


def _reason(
    arm: str,
    own: Capacity,
    control: Capacity | None,
    start: Start,
    rollout: Rollout,
    saved: Span,
    hours: Span,
    verdict: str | None,
) -> str:
    sentences = [_held_text(arm, own)]
    if control is not None:
        sentences.append(_pays_text(own, control, start, rollout, saved, hours))
        if verdict is not None and verdict != PASS:
            sentences.append(f"It is {verdict} by its gates, and nothing here changes that.")
    return " ".join(sentences)


def _held_text(arm: str, own: Capacity) -> str:
    rps = own.rps
    if own.source == "offered" and rps.low is not None:
        return (
            f"A replica of {arm} was offered {digits(rps.low)} requests/s and kept every SLO: it holds at least that, "
            "and how much more only a saturation search tells."
        )
    if own.source == "offered" and rps.high is not None:
        return f"A replica of {arm} was offered {digits(rps.high)} requests/s and broke its SLO: it holds less."
    if own.source == "search" and own.trials == 1:
        seen = "none of its loads" if rps.seen is None else f"{digits(rps.seen)} requests/s"
        return f"A replica of {arm} is seen to hold {seen} in one start, which decides nothing: start it again."
    if rps.low is None and rps.high is None:
        return f'What {arm} holds is not known: search with arrivals = "saturation" and an [slo].'
    low = digits(rps.low or 0.0)
    span = f"{low} requests/s or more" if rps.high is None else f"{low} to {digits(rps.high)} requests/s"
    return f"A replica of {arm} holds {span}."


def _pays_text(own: Capacity, control: Capacity, start: Start, rollout: Rollout, saved: Span, hours: Span) -> str:
    if own.source != "search" or control.source != "search":
        return "Whether it saves anything is not known from this run."
    if saved == Span():
        return "Whether it saves anything is not known: more steps of the search must be held, and more missed."
    if hours == Span.all(NEVER):
        cost = (
            "it needs as many GPUs as the control"
            if rollout.load_rps
            else "a request takes as many GPU-seconds as on the control"
        )
        return f"It never pays: {cost}, or more."
    if start.serving_s is None:
        return "What its start costs is not recorded, so that nothing says when it pays."
    ends = [("as seen", hours.seen), ("soonest", hours.low), ("latest", hours.high)]
    times = ", ".join(f"{name} {_hours_text(value)}" for name, value in ends)
    if hours.seen == NEVER:
        return f"As seen its start is never paid; at the ends of the intervals {times.partition(', ')[2]}."
    return f"Its start is paid {times}: replicas that restart more often than that do not pay."


def _hours_text(hours: float | None) -> str:
    if hours is None:
        return "unknown"
    if hours == NEVER:
        return "never"
    if hours < 1.0 / 60.0:
        return f"after {digits(hours * 3600, 2)} s"
    return (
        f"after {counted(hours * 60, 'minute', lambda value: digits(value, 2))}"
        if hours < 2.0
        else f"after {digits(hours)} hours"
    )


def summary_rows(run: Run, judgement: Judgement) -> dict[str, Any] | None:
    """What the summary says; None where the run made no search and its experiment names no load to carry."""
    rollout = Rollout.from_table(mapping(run.records.experiment.get("rollout")))
    if rollout.load_rps is None and not is_search(run):
        return None
    return break_even_rows(break_evens(run, judgement, rollout), rollout)


def break_even_rows(arms: Sequence[BreakEven], rollout: Rollout) -> dict[str, Any]:
    """The arms as plain values; NEVER is the word "never"."""
    return {
        "load_rps": rollout.load_rps,
        "gpus_per_replica": rollout.gpus_per_replica,
        "gpu_hour_price": rollout.gpu_hour_price,
        "currency": rollout.currency,
        "arms": [
            {
                "arm": row.arm,
                "control": row.control,
                "source": row.source,
                "trials": row.trials,
                "start": asdict(row.start),
                **{name: span_row(getattr(row, name)) for name in ("rps", "gpus", "start_gpu_s", "saved")},
                **{name: span_row(getattr(row, name)) for name in ("requests", "hours", "request_gpu_s")},
                "cost": _cost_row(row, rollout),
                "energy": _energy_row(row),
                "verdict": row.verdict,
                "reason": row.reason,
            }
            for row in arms
        ],
    }


def _cost_row(row: BreakEven, rollout: Rollout) -> dict[str, Any] | None:
    """What requests and tokens cost; None without a price."""
    if rollout.gpu_hour_price is None:
        return None
    cost = row.request_gpu_s.each(rollout.price_of)
    return {
        "per_1000_requests": span_row(cost.each(lambda value: 1e3 * value)),
        "per_million_tokens": span_row(cost.each(lambda value: 1e6 * value / row.tokens if row.tokens else None)),
    }


def _energy_row(row: BreakEven) -> dict[str, float | None] | None:
    """What tokens and requests take of energy; None where that is not known."""
    if row.token_j is None:
        return None
    return {"per_token_j": row.token_j, "per_request_j": row.token_j * row.tokens if row.tokens else None}


def span_row(span: Span) -> dict[str, float | str | None]:
    """The span as plain values; NEVER is the word "never"."""
    return {name: "never" if value == NEVER else value for name, value in asdict(span).items()}
