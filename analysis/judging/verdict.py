"""What follows from the gates: the verdict on an arm, the outcome in plain words, and what to do next.

An arm passes when every gate passes (intersection-union, Berger 1982). Of an open arm the headline has one reason, the
worst failed check or the first open gate, and the advice has the length that would decide it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from analysis.checks.applied import blocking
from analysis.checks.check import OVERLOADED, Check
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.settings.metrics import gate_label
from analysis.wording import duration_text

# In the order in which failures are reported: what others may follow from comes first.
_KINDS = ("parity", "recompile", "error", "noninferiority", "goodput", "slo", "memory", "ramp")
KIND_ORDER = {kind: place for place, kind in enumerate(_KINDS)}


def combined(verdicts: Sequence[str]) -> str:
    """FAIL if any is, else INCONCLUSIVE if any is or there is none, else PASS."""
    if FAIL in verdicts:
        return FAIL
    return PASS if verdicts and set(verdicts) == {PASS} else INCONCLUSIVE


def _in_order(gates: Sequence[Gate]) -> list[Gate]:
    return sorted(gates, key=lambda gate: KIND_ORDER[gate.kind])


# --- The headline -----------------------------------------------------------------------------------------------------


def headline(arms: Mapping[str, str], gates: Sequence[Gate], checks: Sequence[Check], control: str) -> str:
    """The outcome in plain words, worst arm first. `arms` maps each judged arm to its verdict."""
    if not arms:
        return f"There is no arm to judge against {control}."
    # Whatever else is true of a run that overloaded its arms, it is true of an overload.
    not_passed = [arm for arm, verdict in arms.items() if verdict != PASS]
    parts = [f"{check.reason} {check.remedy}" for check in checks if _is_overload(check, not_passed)]
    of_arm = {arm: _in_order([gate for gate in gates if gate.arm == arm]) for arm in arms}
    for arm in _with(arms, FAIL):
        first = next(gate for gate in of_arm[arm] if gate.verdict == FAIL)
        reason = first.reason.replace(f" {first.allowance}", "") if first.allowance else first.reason
        parts.append(f"{arm} must not replace {control}: {reason}")
    undecided: dict[str, list[str]] = {}
    for arm in _with(arms, INCONCLUSIVE):
        undecided.setdefault(_open_reason(of_arm[arm], checks), []).append(arm)
    for reason, own in undecided.items():
        parts.append(f"This run cannot decide whether {' or '.join(own)} may replace {control}: {reason}")
    for arm in _with(arms, PASS):
        bounds = [
            max((gate.high, *(gate.lasting or ())))
            for gate in of_arm[arm]
            if gate.kind == "noninferiority" and gate.high is not None
        ]
        slower = f" (latency at most {max(bounds):.2f} times {control}'s, error bars included)" if bounds else ""
        parts.append(f"{arm} may replace {control}: every gate passed{slower}.")
    return " ".join(parts)


def _with(arms: Mapping[str, str], verdict: str) -> list[str]:
    return [arm for arm, own in arms.items() if own == verdict]


def _is_overload(check: Check, arms: Collection[str]) -> bool:
    return check.rule.rank == OVERLOADED and not check.ok and bool(arms) and check.arm in (None, *arms)


def _open_reason(gates: Sequence[Gate], checks: Sequence[Check]) -> str:
    """The reason of the worst failed check that keeps a gate open, else of the first open gate."""
    open_gates = [gate for gate in gates if gate.verdict == INCONCLUSIVE]
    found = [check for gate in open_gates for check in blocking(gate, checks)]
    # An overload is reported before all arms.
    others = [check for check in found if check.rule.rank != OVERLOADED]
    if others:
        return min(others, key=lambda check: (check.rule.rank, checks.index(check))).reason
    if found:
        return "The load was too high."
    return open_gates[0].reason if open_gates else "No gate was judged."


# --- What to do next --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What to do about `gates` of `arm`, which failed for one cause."""

    arm: str
    gates: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would decide what is open, `needed_s` None where no run length would; and what to do about what failed."""

    needed_s: float | None
    text: str
    remedies: tuple[Remedy, ...] = ()


_LONG_S = 4 * 3600.0  # a gate that needs more is named by itself

# What would decide an open gate that no length of the run decides, by its kind.
_STUCK = {
    "recompile": "Record the compile events of {arms}.",
    "memory": "More and longer trials would decide {gates}, with the machines watched ([machines]).",
    "parity": "Run `tailgate parity experiment.toml` until it passes: traffic cannot tell.",
}
_UNSEEN = "Clients cannot decide {gates}: its server's log may, as the reason of the gate says."
_STARTS = "{count} runs of each arm would decide {gates}, each after a fresh start, if they are like these."
_NEVER = "No run of up to a week would decide {gates}."

_INSPECT = "`tailgate inspect experiment.toml --arm {arm}`"
_LATENCY = "`tailgate frontier experiment.toml` finds which load each arm holds."
# What to do about a failed gate: by its name, else by its kind.
_REMEDIES = {
    "parity": "`tailgate parity experiment.toml` measures it without traffic and names what departs.",
    "recompile": f"{_INSPECT} shows, without traffic, which steps are not ready: warm them up (compile.warmup), or "
    "plan the shapes (preset compiled-bucketed or compiled-dynamic).",
    "refused": f"{_INSPECT} lists the shapes that it serves: widen its bounds or ladders, or admit less "
    "(engine.max_prompt_tokens).",
    "deaths": "The last lines of the replica that died are under logs/ in the trial's folder.",
    "error": "The column `error` of the requests says what each met, and the arm's logs say why.",
    "noninferiority": _LATENCY,
    "goodput": _LATENCY,
    "slo": _LATENCY,
    "memory": "To hold less, take fewer slots (engine.slots) or fewer planned shapes, which hold CUDA graphs.",
    "ramp": "The section on the ramp says at which share of the users it ended and why.",
}
_OF_BOTH = "The control misses it too: look at the objective and the load first."
_OF_EXTERNAL = {
    "parity": "Compare its weights, precision and sampling with the control's.",
    "recompile": "Have its server warm up the lengths of this traffic before it is measured.",
}


def advise(
    gates: Sequence[Gate], checks: Sequence[Check], *, external: Collection[str] = (), of_control: Sequence[Gate] = ()
) -> Advice:
    """What would decide the open gates, of arms that have not failed, and what to do about the failed ones.

    `external` are external arms, `of_control` the control's own gates on objectives.
    """
    failed = sorted({gate.arm for gate in gates if gate.verdict == FAIL})
    open_gates = [gate for gate in gates if gate.verdict == INCONCLUSIVE and gate.arm not in failed]
    sentences: list[str] = []
    timed: list[Gate] = []
    stuck: dict[str, list[Gate]] = {}
    for gate in open_gates:
        faults = blocking(gate, checks)
        sentences += [check.remedy for check in faults if check.remedy]
        if gate.needed_s is None and not gate.blocked_by:
            sentence = _STUCK.get(gate.kind, _STARTS if gate.needed_starts else _NEVER)
            stuck.setdefault(_UNSEEN if gate.unseen else sentence, []).append(gate)
        elif gate.needed_s is not None and not any(check.rule.rank == OVERLOADED for check in faults):
            timed.append(gate)  # a longer run of an overload only makes the queues longer
    sentences += _lengths(timed)
    for sentence, own in stuck.items():
        count = max(gate.needed_starts or 0 for gate in own)
        arms = ", ".join(sorted({gate.arm for gate in own}))
        sentences.append(sentence.format(count=count, arms=arms, gates=_names(own)))
    if failed:
        sentences.append(f"A longer run will not clear {', '.join(failed)}.")
    return Advice(
        needed_s=max((gate.needed_s or 0.0 for gate in timed), default=None),
        text=" ".join(dict.fromkeys(sentences)) or "Nothing is open.",
        remedies=_remedies(gates, external, {gate.gate for gate in of_control if gate.verdict == FAIL}),
    )


def _lengths(timed: Sequence[Gate]) -> list[str]:
    """How long a run would decide the gates that a length decides."""
    long = [gate for gate in timed if (gate.needed_s or 0.0) > _LONG_S]
    soon = [gate for gate in timed if gate not in long]
    sentences = []
    if soon:
        others = f"all open gates but {len(long)}" if long else "the open gates"
        sentences.append(f"A run of about {_length(soon)} would decide {others}, if the arms behave as they did here.")
    if long:
        sentences.append(f"About {_length(long)} would decide {_names(long)}: near the limit, or much varied.")
    return sentences


def _length(gates: Sequence[Gate]) -> str:
    """The longest run that one of the gates needs, and in how many fresh starts."""
    starts = max(gate.needed_starts or 0 for gate in gates)
    over = f" in {starts} fresh starts (trials.count = {starts})" if starts else ""
    return f"{duration_text(max(gate.needed_s or 0.0 for gate in gates))}{over}"


def _names(gates: Sequence[Gate]) -> str:
    return ", ".join(sorted({f'"{gate_label(gate.gate)}" of {gate.arm}' for gate in gates}))


def _remedies(gates: Sequence[Gate], external: Collection[str], missed: Collection[str]) -> tuple[Remedy, ...]:
    """One remedy for all gates of an arm that failed for one cause, in the order of arms and of `KIND_ORDER`.

    `missed` are the objectives that the control misses too.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for arm in dict.fromkeys(gate.arm for gate in gates):
        for gate in _in_order([gate for gate in gates if gate.arm == arm and gate.verdict == FAIL]):
            text = _REMEDIES.get(gate.gate, _REMEDIES[gate.kind])
            text = _OF_EXTERNAL.get(gate.kind, text) if arm in external else text
            text = _OF_BOTH if gate.gate in missed else text
            found.setdefault((arm, text.format(arm=arm)), []).append(gate.gate)
    return tuple(Remedy(arm=arm, gates=tuple(names), text=text) for (arm, text), names in found.items())
