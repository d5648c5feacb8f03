"""What all reports say alike: the facts of a run, gates by arm, worst events, and what would decide open gates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from analysis.checks.telemetry import UNKNOWN_STALLS
from analysis.records.schemas import RUN_HOST
from analysis.report.joined import accepted, head
from analysis.report.looks import ramp_facts
from analysis.report.resources import resources
from analysis.report.tables import Figure, Shown, Table, figures_of
from analysis.report.values import (
    DASH,
    Row,
    at,
    byte_size,
    count,
    figure,
    interval,
    is_number,
    label,
    milliseconds,
    percent,
    rate,
    ratio,
    rows,
    seconds,
    span,
    text,
    verdict,
)
from analysis.settings.metrics import EMBED, EMBED_METRICS, METRIC_NAMES
from analysis.wording import counted

KEY_FIGURES = {
    "requests",
    "error rate",
    "goodput",
    "p50 TTFT",
    "p99 TTFT",
    "p99 E2E",
    "compiles while serving",
    "longest stall",
    "requests hit",
    "cost of 1,000 requests",
}
ORDER = {"FAIL": 0, "INCONCLUSIVE": 1, DASH: 2, "PASS": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One named value about the run, ready to print."""

    name: str
    value: str
    note: str = ""


def headline(summary: Row) -> str:
    """The summary's own sentence."""
    sentence = text(at(summary, "headline"))
    return "This run has no verdict." if sentence == DASH else sentence


def pressure(summary: Row) -> str:
    """What weighed on the machines on purpose, in a sentence; empty when nothing did."""
    sentence = text(at(summary, "design", "pressure"))
    return "" if sentence == DASH else sentence


def facts(summary: Row) -> list[Fact]:
    """Design, duration, blocks, requests, machine: what the verdict rests on, and how far a ramp came. What is unknown
    is left out."""
    design = at(summary, "design")
    trials, blocks, each = at(design, "trials"), at(design, "blocks"), at(design, "block_s")
    loop, lag = at(design, "open_loop"), at(design, "generator_lag_p99_ms")
    joined = head(summary)
    facts = [
        *([Fact(name="Joined", value=joined, note=accepted(summary))] if joined else []),
        Fact(
            name="Design",
            value=text(at(design, "design")),
            note={True: "open loop", False: "closed loop"}.get(loop, "") if isinstance(loop, bool) else "",
        ),
        Fact(
            name="Duration",
            value=span(at(design, "duration_s")),
            note=counted(trials, "trial", count) if is_number(trials) else "",
        ),
        Fact(name="Blocks", value=count(blocks), note=f"of {seconds(each)}" if is_number(each) else ""),
        Fact(name="Requests", value=_requests(summary), note=_planned(summary)),
        *(Fact(name=name, value=value, note=note) for name, value, note in ramp_facts(summary)),
        Fact(name="Generator lag", value=milliseconds(lag), note="p99"),
        Fact(name="Machine", value=machine(summary), note=device(summary)),
    ]
    return [fact for fact in facts if fact.value != DASH]


def machine_line(summary: Row) -> str:
    """Whether the machines were quiet, and what that means for a PASS; empty where the summary does not say."""
    line = text(at(summary, "machines", "line"))
    allowed = " Every gate passed with that allowed for."
    passed = at(summary, "overall") == "PASS" and at(summary, "machines", "verdict") == "disturbed"
    return "" if line == DASH else line + allowed * passed


def machine_note(summary: Row) -> str:
    """The line on the machines as it stands below the headline, which may have said already what disturbed them."""
    line = machine_line(summary)
    verdict_of_machines, _, why = line.partition(": ")
    said = why.rstrip(".").lower()
    return f"{verdict_of_machines}, as said above." if said and said in headline(summary).lower() else line


def _requests(summary: Row) -> str:
    known = [arm["requests"] for arm in rows(summary, "arms") if is_number(at(arm, "requests"))]
    return count(sum(known)) if known else DASH


def _planned(summary: Row) -> str:
    planned = at(summary, "design", "planned")
    arms = len(rows(summary, "arms"))
    if not is_number(planned):
        return counted(arms, "arm", count)
    return f"{count(planned)} planned, {counted(arms, 'arm', count)}"


def machine(summary: Row) -> str:
    """The processor that ran it, or the platform where that is unknown."""
    environment = at(summary, "environment")
    processor = text(at(environment, "cpu", "model"))
    return processor if processor != DASH else text(at(environment, "platform"))


def _cards_of_arms(summary: Row) -> Counter[str]:
    """How many cards of each model arms ran on, on the machine that had most; empty where no card was sampled."""
    machine_of = {
        row.get("trial"): row.get("machine")
        for row in rows(summary, "machines", "hosts")
        if row.get("host") == RUN_HOST
    }
    cards: dict[object, dict[str, str]] = {}
    for row in rows(summary, "machines", "devices"):
        if row.get("host") == RUN_HOST and row.get("arms") and isinstance(row.get("model"), str):
            cards.setdefault(machine_of.get(row.get("trial")), {})[text(row.get("identity"))] = text(row["model"])
    return max((Counter(own.values()) for own in cards.values()), key=Counter.total, default=Counter())


def device(summary: Row) -> str:
    """The GPUs of the arms where the records tell them, else those of the machine; how many CPUs where there is
    none."""
    gpus, cpus = at(summary, "environment", "gpus"), at(summary, "environment", "cpu", "usable")
    listed = Counter(map(text, gpus)) if isinstance(gpus, list) else Counter[str]()
    if used := _cards_of_arms(summary):
        # The environment also tells the driver.
        named = {gpu.partition(",")[0]: gpu for gpu in listed}
        listed = Counter({named.get(model, model): number for model, number in used.items()})
    if listed:
        return "; ".join(f"{number} × {gpu}" if number > 1 else gpu for gpu, number in listed.items())
    return counted(cpus, "CPU", count) if is_number(cpus) else ""


def arms_of(summary: Row) -> list[Row]:
    """The arms' tables, the control first."""
    return sorted(rows(summary, "arms"), key=lambda arm: not at(arm, "control"))


def arm_names(summary: Row) -> list[str]:
    """Names of all arms, the control first, then those that only gates or comparisons name."""
    named = [arm.get("name") for arm in arms_of(summary)]
    named += [gate.get("arm") for gate in (*rows(summary, "gates"), *rows(summary, "comparisons"))]
    return list(dict.fromkeys(name for name in named if isinstance(name, str)))


def gates_of(summary: Row, arm: str) -> list[Row]:
    """One arm's gates: failures first, then open ones, each group in the summary's order."""
    mine = [gate for gate in rows(summary, "gates") if gate.get("arm") == arm]
    return sorted(mine, key=lambda gate: ORDER[verdict(gate.get("verdict"))])


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLists:
    """The gates of all arms as a reader wants them: what several that did not pass share stands once, on top."""

    shared: tuple[tuple[str, str], ...]  # whose gates, the reason that they share
    arms: Mapping[str, tuple[tuple[Row, str], ...]]  # of each arm: a gate, its own reason


SHARED = "see above"


def gate_lists(summary: Row) -> GateLists:
    """The gates of each arm in the order of `gates_of`, with what two or more of them share taken out of their reasons:
    the whole reason, or the sentence at its end in which failed checks turn a verdict."""
    arms = {arm: gates_of(summary, arm) for arm in arm_names(summary)}
    unsettled = [gate for gates in arms.values() for gate in gates if verdict(gate.get("verdict")) != "PASS"]
    sharing: dict[str, list[Row]] = {}
    for gate in unsettled:
        for said in dict.fromkeys((text(gate.get("reason")), _caveat(gate))):
            if said != DASH:
                sharing.setdefault(said, []).append(gate)
    shared = {said: gates for said, gates in sharing.items() if len(gates) > 1}

    def own(gate: Row) -> str:
        reason, caveat = text(gate.get("reason")), _caveat(gate)
        if verdict(gate.get("verdict")) == "PASS":
            return reason
        if reason in shared:
            return SHARED
        return reason.removesuffix(caveat).rstrip() or SHARED if caveat in shared else reason

    def told(gate: Row, said: str) -> bool:
        # A reason that is shared whole says its caveat itself.
        return text(gate.get("reason")) == said or text(gate.get("reason")) not in shared

    concerned = ((said, [gate for gate in gates if told(gate, said)]) for said, gates in shared.items())
    return GateLists(
        shared=tuple((_whose(gates), said) for said, gates in concerned if gates),
        arms={arm: tuple((gate, own(gate)) for gate in gates) for arm, gates in arms.items()},
    )


def _caveat(gate: Row) -> str:
    """The sentence in which failed checks turn the gate's verdict, an en dash where it has none."""
    caveat = text(gate.get("caveat"))
    return caveat if text(gate.get("reason")).endswith(caveat) else DASH


def _whose(gates: Sequence[Row]) -> str:
    """Arms and names of gates: "a, b: errors, SLO p99 TTFT; c: errors"."""
    by_arm: dict[str, list[str]] = {}
    for gate in gates:
        by_arm.setdefault(text(gate.get("arm")), []).append(label(gate.get("gate")))
    by_names: dict[tuple[str, ...], list[str]] = {}
    for arm, names in by_arm.items():
        by_names.setdefault(tuple(names), []).append(arm)
    return "; ".join(f"{', '.join(arms)}: {', '.join(names)}" for names, arms in by_names.items())


def failed_checks(summary: Row) -> list[Row]:
    return [check for check in rows(summary, "validity") if check.get("ok") is not True]


def unknown_stalls(summary: Row) -> dict[str, object]:
    """The longest stall of each arm that stalled for too long without a compile event, in seconds."""
    return {
        str(check.get("arm")): check.get("value")
        for check in failed_checks(summary)
        if check.get("check") == UNKNOWN_STALLS.name
    }


def is_allowed_for(summary: Row, check: Row) -> bool:
    """Whether the failed check leaves no gate open: those that were decided beside it have what it saw in their error
    bars."""
    if at(summary, "overall") == "PASS":
        return True
    name, arm = check.get("check"), check.get("arm")
    keeps_open = any(
        name in (gate.get("blocked_by") or ()) and arm in (None, gate.get("arm")) for gate in rows(summary, "gates")
    )
    return is_number(check.get("shift")) and not keeps_open


def checks_heading(summary: Row) -> str:
    """What failed checks are to the verdict."""
    allowed = all(is_allowed_for(summary, check) for check in failed_checks(summary))
    return "What the verdict allows for" if allowed else "What limits this run"


def check_name(check: Row) -> str:
    """A validity check's name, with the arm that it is about."""
    name, arm = text(check.get("check")), text(check.get("arm"))
    return name if arm == DASH else f"{name} ({arm})"


def deciders(summary: Row) -> list[str]:
    """Sentences that say what would decide the gates that are open; empty when none is."""
    advice = text(at(summary, "advice", "text"))
    gates = rows(summary, "gates")
    failed = {gate.get("arm") for gate in gates if gate.get("verdict") == "FAIL"}
    if rows(summary, "advice", "remedies"):
        # What else is open of an arm that failed decides nothing.
        gates = [gate for gate in gates if gate.get("arm") not in failed]
    verdicts = {at(summary, "overall"), *(gate.get("verdict") for gate in gates)}
    return [advice] if advice != DASH and "INCONCLUSIVE" in verdicts else []


def remedies(summary: Row) -> list[tuple[str, str]]:
    """Each arm that failed and what to do about it; what explains other failures comes first."""
    lines: dict[str, list[str]] = {}
    for row in rows(summary, "advice", "remedies"):
        lines.setdefault(text(row.get("arm")), []).append(text(row.get("text")))
    return [(arm, " ".join(own)) for arm, own in lines.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentences:
    """What stands below the headline: the first in full, the others folded away, so that the arms' figures are on the
    first screen."""

    lines: tuple[tuple[str, str], ...]  # whose or what for, a sentence with code between backticks
    others: tuple[str, ...]  # what all but the first are about, in words


def below_headline(summary: Row, shared: Sequence[tuple[str, str]]) -> Sentences:
    """Remedies, then what would decide what is open, then what gates share."""
    lines = [(f"To mend {arm}", line) for arm, line in remedies(summary)]
    lines += [("To decide what is open", line) for line in deciders(summary)]
    others = [title[0].lower() + title[1:] for title, _ in lines[1:]]
    if shared[not lines :]:
        others.append("what several gates share")
    return Sentences(lines=(*lines, *shared), others=tuple(others))


def remedy_of(summary: Row, gate: Row) -> str:
    """What to do about a gate that failed; empty where nothing is said."""
    for row in rows(summary, "advice", "remedies"):
        gates = row.get("gates")
        if row.get("arm") == gate.get("arm") and isinstance(gates, list) and gate.get("gate") in gates:
            return text(row.get("text"))
    return ""


JIT_COMPILES, BACKGROUND = "of which JIT compiles of kernels", "compiling in the background"


def embeds(summary: Row) -> bool:
    """Whether the arms were asked for vectors: such requests have an end and no tokens."""
    return bool(at(summary, "task") == EMBED)


def metric_names(summary: Row) -> dict[str, str]:
    """What a reader calls each metric that the run's requests have, in order."""
    return {key: name for key, name in METRIC_NAMES.items() if key in EMBED_METRICS or not embeds(summary)}


def _defined(summary: Row, shown: Sequence[Shown]) -> list[Shown]:
    """Those of `shown` that the run's requests have. An embedding is called by what it is: one text."""
    if not embeds(summary):
        return list(shown)
    without = [name for key, name in METRIC_NAMES.items() if key not in EMBED_METRICS]
    kept = [row for row in shown if row[1] != "output tokens" and not any(name in row[1] for name in without)]
    return [(group, "sentences" if name == "request rate" else name, show, path) for group, name, show, path in kept]


def side_by_side(summary: Row) -> list[Figure]:
    """Key figures, a row each, a value for every arm in the order of `arms_of`."""
    shown: tuple[Shown, ...] = (
        ("Traffic", "requests", count, ("requests",)),
        ("Traffic", "failed", count, ("failed",)),
        ("Traffic", "cancelled", count, ("cancelled",)),
        ("Traffic", "error rate", percent, ("error_pct",)),
        ("Traffic", "request rate", rate, ("request_rate",)),
        ("Traffic", "output tokens", rate, ("output_token_rate",)),
        ("Traffic", "goodput", rate, ("goodput_rps",)),
        ("Latency", "p50 TTFT", milliseconds, ("metrics", "ttft", "p50_ms")),
        ("Latency", "p99 TTFT", milliseconds, ("metrics", "ttft", "p99_ms")),
        ("Latency", "p50 E2E", milliseconds, ("metrics", "e2e", "p50_ms")),
        ("Latency", "p99 E2E", milliseconds, ("metrics", "e2e", "p99_ms")),
        ("Latency", "p50 ITL", milliseconds, ("metrics", "itl", "p50_ms")),
        ("Latency", "p99 ITL", milliseconds, ("metrics", "itl", "p99_ms")),
        ("Latency", "p99 max ITL", milliseconds, ("metrics", "max_itl", "p99_ms")),
        ("Compiles", "compiles while serving", count, ("compile", "serving_events")),
        ("Compiles", "recompiles", count, ("compile", "recompiles")),
        ("Compiles", "of which in the cold start", count, ("compile", "cold", "recompiles")),
        ("Compiles", "of which past it", count, ("compile", "steady", "recompiles")),
        ("Compiles", JIT_COMPILES, count, ("compile", "jit_compiles")),
        ("Compiles", "graph captures", count, ("compile", "graph_captures")),
        ("Compiles", "limit hits", count, ("compile", "limit_hits")),
        ("Compiles", "ran eager after the limit", percent, ("compile", "eager_fallback_pct")),
        ("Compiles", "longest stall", seconds, ("compile", "longest_stall_s")),
        ("Compiles", "stall time per minute", seconds, ("compile", "stall_s_per_min")),
        ("Compiles", "requests hit", count, ("compile", "requests_hit")),
        ("Compiles", "share of requests hit", percent, ("compile", "requests_hit_pct")),
        ("Compiles", BACKGROUND, seconds, ("compile", "background_s")),
    )
    arms = arms_of(summary)
    none = {  # rare, and left out where no arm has any
        JIT_COMPILES: not any(at(arm, "compile", "jit_compiles") for arm in arms),
        BACKGROUND: not any(at(arm, "compile", "background_s") for arm in arms),
    }
    figures = figures_of(arms, _defined(summary, shown), keys=KEY_FIGURES)
    return [row for row in figures if row.known and not none.get(row.name)] + resources(arms)


def parity(summary: Row) -> list[Figure]:
    """What is known of the arms' numerics, a row each, a value for every arm in the order of `arms_of`; empty when
    nothing was measured and no replica was asked."""
    parities = {row.get("name"): row for row in rows(summary, "parity", "arms")}
    control = at(summary, "parity", "control")
    measured, answers = [], []
    for arm in arms_of(summary):
        own = parities.get(arm.get("name"), {})
        is_reference = at(control, "figures") and arm.get("name") == at(control, "name")
        measured.append(control if is_reference else own.get("measured") or {})
        answers.append(own)
    figures: list[Figure] = []
    if any(row.get("measured") for row in parities.values()):
        before = "Measured before the traffic"
        vectors: tuple[Shown, ...] = (
            (before, "verdict", verdict, ("verdict",)),
            (before, "least cosine", _cosine, ("figures", "cosine", "least")),
        )
        shown: tuple[Shown, ...] = (
            (before, "verdict", verdict, ("verdict",)),
            (before, "median error against float64", figure, ("figures", "error", "median")),
            *(
                (before, name, partial(_finding, name=finding), ("findings",))
                for name, finding in (
                    ("median error, to the control's", "error"),
                    ("p99 error, to the control's", "tail error"),
                    ("largest error, to the control's", "worst error"),
                )
            ),
            (before, "mean KL from float64", figure, ("figures", "divergence", "mean")),
            (before, "mean KL, to the control's", partial(_finding, name="divergence"), ("findings",)),
            (before, "tokens that float64 would not take", count, ("figures", "flips")),
            (before, "of them beyond noise", count, ("figures", "flips_unexplained")),
            (before, "greedy answers as the control's", _same_answers, ("figures",)),
        )
        figures = figures_of(measured, vectors if embeds(summary) else shown)
        accuracy: tuple[Shown, ...] = (
            (_ACCURACY, "mean KL in nats a token", _divergence, ("findings",)),
            (_ACCURACY, "texts", count, ("figures", "texts")),
        )
        figures += [row for row in figures_of(measured, accuracy) if row.known]
    asked = "Asked after the traffic"
    served = figures_of(
        answers,
        [
            (asked, "vectors near enough to the control's", _same_as_control, ("answers",)),
            (asked, "lowest cosine with the control's", _lowest_cosine, ("answers",)),
        ]
        if embeds(summary)
        else [(asked, "greedy answers as the control's", _same_as_control, ("answers",))],
    )
    return figures + [row for row in served if row.known] + _asked(summary, answers)


def was_asked(summary: Row) -> bool:
    """Whether external arms were asked the same prompts."""
    return any(rows(arm, "asked") for arm in rows(summary, "parity", "arms"))


def _asked(summary: Row, parities: Sequence[Row]) -> list[Figure]:
    """What external arms answered before and after the load beside the control, which has no values of its own."""
    figures: list[Figure] = []
    for when in ("before", "after"):
        group = f"Greedy answers {when} the load"
        told = [next((row for row in rows(arm, "asked") if row.get("when") == when), {}) for arm in parities]
        shown: tuple[Shown, ...] = (
            (group, "verdict", verdict, ("verdict",)),
            (group, "as the control’s", _same_asked, ()),
            (group, "the control’s own, asked twice", _of_answered("control_same"), ()),
            (group, "the arm’s own, asked twice", _of_answered("own_same"), ()),
            (group, "others part at token: middle (first to last)", _departures, ("departs",)),
            (group, "at a near tie", count, ("ties",)),
            (group, "at no near tie", count, ("apart",)),
            (group, "largest lead there (nats)", figure, ("lead",)),
            (group, "log-probability of equal tokens, mean difference (nats)", _shift, ("shift",)),
            (group, "the same of the control, asked twice", _shift, ("control_shift",)),
            (group, "different ones that the control repeats", count, ("held",)),
        )
        figures += [row for row in figures_of(told, shown) if row.known]
    return figures


def _same_asked(row: object) -> str:
    limits = interval(at(row, "low_pct"), at(row, "high_pct"), percent)
    same = _of_answered("same")(row)
    return same if DASH in (same, limits) else f"{same} {limits}"


def _of_answered(key: str) -> Callable[[object], str]:
    def shown(row: object) -> str:
        same, answered = at(row, key), at(row, "answered")
        return f"{count(same)} of {count(answered)}" if is_number(same) and answered else DASH

    return shown


def _departures(value: object) -> str:
    places = [int(place) + 1 for place in value if is_number(place)] if isinstance(value, list) else []
    if not places:
        return DASH
    return f"{places[(len(places) - 1) // 2]} ({places[0]} to {places[-1]})"


def _shift(value: object) -> str:
    mean, limits = at(value, "mean"), interval(at(value, "low"), at(value, "high"), figure)
    return DASH if not is_number(mean) else figure(mean) if limits == DASH else f"{figure(mean)} {limits}"


_ACCURACY = "Accuracy of quantised weights"


def _divergence(findings: object) -> str:
    return _finding(findings, name="kl", show=figure)


def _finding(findings: object, *, name: str, show: Callable[[object], str] = ratio) -> str:
    """The finding's value, a ratio to the control's unless `show` says else, with its interval where it has one."""
    finding = next((row for row in rows(findings) if row.get("name") == name), {})
    limits = interval(finding.get("low"), finding.get("high"), None if show is ratio else show)
    shown = show(finding.get("value"))
    return shown if DASH in (shown, limits) else f"{shown} {limits}"


def _same_answers(figures: object) -> str:
    same = at(figures, "answers_same")
    return f"{count(same)} of {count(at(figures, 'answers'))}" if is_number(same) else DASH


def _lowest_cosine(answers: object) -> str:
    known = [row["cosine"] for row in rows(answers) if is_number(row.get("cosine"))]
    return _cosine(min(known, default=None))


def _cosine(value: object) -> str:
    return f"{value:.6f}" if is_number(value) else DASH


def _same_as_control(answers: object) -> str:
    """How many greedy answers of all replicas are the control's, and how many replicas gave none."""
    silent = sum(bool(row.get("error")) for row in rows(answers))
    known = [row for row in rows(answers) if is_number(row.get("same")) and is_number(row.get("of"))]
    shown = f"{count(sum(row['same'] for row in known))} of {count(sum(row['of'] for row in known))}"
    return f"{shown}, {count(silent)} silent" if silent else shown if known else DASH


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """An arm that tailgate did not start, and what is not known of it."""

    arm: object
    what: str
    notes: tuple[str, ...]


def externals(summary: Row) -> list[External]:
    """The external arms, in the order of `arms_of`; empty when tailgate started them all."""
    shown = []
    for arm in arms_of(summary):
        external = arm.get("external")
        if isinstance(external, Mapping):
            kind, address, model = (text(external.get(key)) for key in ("kind", "address", "model_name"))
            notes = external.get("notes")
            sentences = tuple(map(text, notes)) if isinstance(notes, list) else ()
            shown.append(External(arm=arm.get("name"), what=f"{kind} at {address}, model {model}", notes=sentences))
    return shown


# A step's size as events and start-up items word it.
STEP_SHAPE = re.compile(r"(\w+) batch (\d+) × length (\d+), context (\d+)")
MOST_FACTS = 8
KEY_COSTS = {"to serving", "load", "warm-up", "compile time", "disk cache", "artifact", "weights", "KV cache"}
MEMORY_NAMES = {
    "weights": "weights",
    "quantised_weights": "of which quantised",
    "step_weights": "of which each decode step reads",
    "kv_cache": "KV cache",
    "graph_pools": "CUDA graphs",
    "device_peak": "device, peak",
    "device_reserved": "device, reserved",
    "process_peak": "host process, peak",
}


def startup_costs(summary: Row) -> list[Figure]:
    """What each arm cost before its first request: time to serving by part, compiling, slowest shapes, memory.

    A part that no arm has is left out.
    """
    starts = [at(arm, "startup") for arm in arms_of(summary)]
    compiling = "Compiling in the warm-up"
    parts: tuple[Shown, ...] = (
        ("Time", "to serving", _duration, ("serving_s",)),
        ("Time", "process and imports", _duration, ("process_s",)),
        ("Time", "unpacking compiled code", _duration, ("artifact_s",)),
        ("Time", "load", _duration, ("load_s",)),
        ("Time", "warm-up", _duration, ("warmup_s",)),
        ("Time", "of which prefill shapes", _duration, ("prefill_s",)),
        ("Time", "of which later chunks of prompts", _duration, ("extend_s",)),
        ("Time", "of which decode shapes", _duration, ("decode_s",)),
        ("Time", "of which shapes of whole texts", _duration, ("encode_s",)),
        ("Time", "of which CUDA-graph capture", _duration, ("capture_s",)),
        (compiling, "compiles", count, ("compiles",)),
        (compiling, "compile time", _duration, ("compile_s",)),
        (compiling, "of which the backend", _duration, ("backend_s",)),
        (compiling, "of which tuning kernels", _duration, ("autotune_s",)),
        (compiling, "tuning kernels at their first run", _duration, ("tuning_s",)),
        (compiling, "trials that searched for kernels", count, ("searching_starts",)),
        (compiling, "recording CUDA graphs", _duration, ("recording_s",)),
        (compiling, "kernels of other compilers (JIT)", _duration, ("jit_s",)),
        (compiling, "disk cache", _cache_state, ("cache",)),
        (compiling, "artifact", text, ("artifact",)),
    )
    deepest = max((len(rows(start, "slowest")) for start in starts), default=0)
    shapes: list[Shown] = [
        ("Slowest shapes to warm", str(place + 1), partial(_shape_cost, place=place), ("slowest",))
        for place in range(deepest)
    ]
    tables = [at(start, "memory_bytes") for start in starts]
    kinds = dict.fromkeys(str(kind) for table in tables if isinstance(table, Mapping) for kind in table)
    memory: list[Shown] = [
        ("Memory", MEMORY_NAMES.get(kind, text(kind).replace("_", " ")), byte_size, ("memory_bytes", kind))
        for kind in sorted(kinds, key=lambda kind: [*MEMORY_NAMES, kind].index(kind))
    ]
    nothing = (DASH, _duration(0), count(0))
    return [
        row
        for row in figures_of(starts, (*parts, *shapes, *memory), keys=KEY_COSTS)
        if row.name in ("load", "warm-up") or not all(value in nothing for value in row.values)
    ]


def _duration(value: object) -> str:
    return milliseconds(value * 1e3) if is_number(value) and value else seconds(value)


def _cache_state(counts: object) -> str:
    """ "cold" when nothing was found, "warm" when everything was, else how much of each."""
    known = {name: at(counts, name) or 0 for name in ("hit", "miss", "bypass")}
    if not all(is_number(value) for value in known.values()) or not any(known.values()):
        return DASH
    if not known["hit"]:
        return "cold" if known["miss"] else "bypassed"
    if not known["miss"] and not known["bypass"]:
        return "warm"
    return f"{count(known['hit'])} of {count(sum(known.values()))} found"


def _shape_cost(slowest: object, *, place: int) -> str:
    shape = rows(slowest)[place : place + 1]
    if not shape or not is_number(shape[0].get("s")):
        return DASH
    return f"{brief_shape(shape[0].get('item'))}: {_duration(shape[0]['s'])}"


def brief_shape(item: object) -> str:
    """ "decode 4@256" for four rows that decode up to position 256, "prefill 1x32", "encode 4x32"; other text as it
    is."""

    def shorten(match: re.Match[str]) -> str:
        kind, batch, length, context = match.groups()
        sizes = {**dict.fromkeys(("prefill", "encode"), f"{batch}x{length}"), "decode": f"{batch}@{context}"}
        return f"{kind} {sizes.get(kind, f'{batch}x{length}@{context}')}"

    return STEP_SHAPE.sub(shorten, text(item))


def shortfalls(summary: Row) -> Table:
    """Graph breaks and CUDA graphs that were not made, the most frequent of each arm, as the summary sorts them."""
    shown = []
    for arm in arms_of(summary):
        for key, what in (("graph_breaks", "graph break"), ("cudagraph_skips", "no CUDA graph")):
            counts = at(arm, "compile", key)
            known = counts.items() if isinstance(counts, Mapping) else ()
            numbered = [(cause, times) for cause, times in known if is_number(times)]
            shown += [
                {"Arm": text(arm.get("name")), "What": what, "Times": count(times), "Where and why": text(cause)}
                for cause, times in numbered[:MOST_FACTS]
            ]
    return Table(rows=shown, kinds={"Arm": "arm", "What": "words", "Where and why": "code"})


def flattened(table: object, prefix: str = "") -> list[tuple[str, str]]:
    """Every leaf of nested tables as ("host.cores", "2"). Numbers named *_bytes read as sizes."""
    if not isinstance(table, Mapping | list):
        return []
    leaves: list[tuple[str, str]] = []
    for key, value in table.items() if isinstance(table, Mapping) else enumerate(table):
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value)):
            leaves += flattened(value, f"{name}.")
        elif name.endswith("bytes"):
            leaves.append((name, byte_size(value)))
        else:
            leaves.append((name, str(value) if is_number(value) else text(value)))
    return leaves


def ratio_of_limit(gate: Row) -> float | None:
    """A gate's value as a share of its limit; None where less is worse or the limit is 0."""
    value, limit = gate.get("value"), gate.get("limit")
    if gate.get("kind") == "goodput" or not is_number(value) or not is_number(limit) or limit <= 0 or value < 0:
        return None
    return value / limit
