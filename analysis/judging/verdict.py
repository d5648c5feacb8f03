"""What follows from the gates: the verdict on an arm, the outcome in plain words, and what would decide what is open.

An arm passes when every gate passes (intersection-union, Berger 1982).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from analysis.checks.applied import blocking
from analysis.checks.check import OVERLOADED, TOO_SHORT, Check
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.settings.metrics import gate_label
from analysis.wording import counted, duration_text


def combined(verdicts: Sequence[str]) -> str:
    """FAIL if any is, else INCONCLUSIVE if any is or there is none, else PASS."""
    if FAIL in verdicts:
        return FAIL
    return PASS if verdicts and set(verdicts) == {PASS} else INCONCLUSIVE


KIND_ORDER = {
    "parity": -1,
    "recompile": 0,
    "error": 1,
    "noninferiority": 2,
    "goodput": 2,
    "slo": 3,
    "cold": 4,
    "memory": 5,
    "ramp": 6,
}


def headline(arms: Mapping[str, str], gates: Sequence[Gate], checks: Sequence[Check], control: str) -> str:
    """The outcome in plain words, worst arm first. `arms` maps each judged arm to its verdict."""
    if not arms:
        return f"There is no arm to judge against {control}."
    open_arms = [arm for arm, verdict in arms.items() if verdict != PASS]
    # Whatever else is true of a run that overloaded its arms, it is true of an overload.
    parts = [f"{check.reason} {check.remedy}" for check in checks if _is_overload(check, open_arms)]
    of_arm = {
        arm: sorted((gate for gate in gates if gate.arm == arm), key=lambda gate: KIND_ORDER[gate.kind]) for arm in arms
    }
    reasons = {arm: _open_reason(of_arm[arm], checks) for arm in arms if arms[arm] == INCONCLUSIVE}
    for arm in sorted(arms, key=lambda name: ((FAIL, INCONCLUSIVE, PASS).index(arms[name]), list(arms).index(name))):
        own = of_arm[arm]
        if arms[arm] == FAIL:
            first = next(gate for gate in own if gate.verdict == FAIL)
            parts.append(f"{arm} must not replace {control}: {_clause(_plain(first))}.")
        elif arms[arm] == PASS:
            bounds = [bound for gate in own if (bound := _bound(gate)) is not None]
            slower = f" (latency at most {max(bounds):.2f} times {control}'s, error bars included)" if bounds else ""
            parts.append(f"{arm} may replace {control}: every gate passed{slower}.")
        elif arm == next(iter(reasons)):
            *others, last = reasons
            whether = " or ".join(filter(None, (", ".join(others), last)))
            parts += [f"This run cannot decide whether {whether} may replace {control}.", *_by_reason(reasons)]
    return " ".join(filter(None, parts))


def _by_reason(reasons: Mapping[str, str]) -> list[str]:
    """What leaves arms open, each reason once, behind the arms that it is of where there are several reasons."""
    arms: dict[str, list[str]] = {}
    for arm, reason in reasons.items():
        arms.setdefault(reason, []).append(arm)
    behind = len(arms) > 1
    # A reason that begins with its arm says whose it is.
    return [
        f"{', '.join(own)}: {reason}" if behind and reason and not reason.startswith(f"{own[0]} ") else reason
        for reason, own in arms.items()
    ]


def _bound(gate: Gate) -> float | None:
    """What the ratio of a latency surely does not exceed; None where there is no such limit."""
    if gate.kind != "noninferiority" or gate.high is None:
        return None
    return max(gate.high, gate.lasting[1] if gate.lasting else gate.high)


def _is_overload(check: Check, arms: Collection[str]) -> bool:
    return check.rule.rank == OVERLOADED and not check.ok and bool(arms) and check.arm in (None, *arms)


def _plain(gate: Gate) -> str:
    """The gate's reason without what it allows for, which is shown with the gate."""
    return gate.reason.replace(f" {gate.allowance}", "") if gate.allowance else gate.reason


def _clause(reason: str) -> str:
    """The sentence as the second half of another."""
    inner = reason.rstrip(".")
    return inner[0].lower() + inner[1:] if inner.startswith(("Compiles", "No ")) else inner


def _open_reason(gates: Sequence[Gate], checks: Sequence[Check]) -> str:
    open_gates = [gate for gate in gates if gate.verdict == INCONCLUSIVE]
    of_gates = [(gate, _blocking(gate, checks)) for gate in open_gates]
    if found := [check for _, own in of_gates for check in own]:
        return min(found, key=lambda check: (check.rule.rank, checks.index(check))).reason
    if not open_gates:
        return "No gate was judged."
    return next((gate.reason for gate, own in of_gates if own or not gate.blocked_by), "")


def _blocking(gate: Gate, checks: Sequence[Check]) -> list[Check]:
    """The failed checks that keep the gate open, without an overload, which is reported before all arms."""
    return [check for check in blocking(gate, checks) if check.rule.rank != OVERLOADED]


# Below this many blocks the spread, and every length that follows from it, is known to a factor of several.
FEW_BLOCKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would decide what is open; `needed_s` None where no run length would."""

    needed_s: float | None
    text: str


_LONG_S = 4 * 3600.0  # a gate that needs more is named by itself

# What would decide a gate that no length of the run decides.
_STUCK = {
    "compiles": "Record the compile events of every arm.",
    "compiles unseen": "Clients cannot see whether {arms} compiles while serving: its own logs know.",
    "cold": "More trials would decide {gates}: each starts cold once.",
    "memory": "More and longer trials would decide {gates}, with the machines watched ([bed]).",
    "parity": "Run `tailgate parity` on the experiment until it passes: traffic cannot tell.",
    "parity unseen": "What would decide the parity of {arms} stands in its gate's reason.",
    "starts": "{count} runs of each arm would decide {gates}, each after a fresh start, if they are like these.",
    "never": "No run of up to a week would decide {gates}.",
}


def advise(gates: Sequence[Gate], checks: Sequence[Check]) -> Advice:
    """How long a run would decide the open gates, and what must change first where length is not the trouble.

    Only of arms that have not failed: what else is open on an arm that failed decides nothing more.
    """
    failed = sorted({gate.arm for gate in gates if gate.verdict == FAIL})
    open_gates = [gate for gate in gates if gate.verdict == INCONCLUSIVE and gate.arm not in failed]
    arms = {gate.arm for gate in open_gates}
    faults = [check for check in checks if any(blocking(gate, [check]) for gate in open_gates)]
    # A longer run of the same load only makes the queues longer.
    overloaded = [gate for gate in open_gates if any(_is_overload(check, arms) for check in blocking(gate, checks))]
    timed = [gate for gate in open_gates if gate.needed_s is not None and gate not in overloaded]
    sentences = list(dict.fromkeys(check.remedy for check in faults if check.remedy))
    sentences += _lengths(timed, faults)
    stuck: dict[str, list[Gate]] = {name: [] for name in _STUCK}
    for gate in open_gates:
        if gate.needed_s is None and not gate.blocked_by:
            stuck[_why_stuck(gate)].append(gate)
    for name, own in stuck.items():
        if own:
            named = {"arms": sorted({gate.arm for gate in own}), "gates": sorted(set(map(_name, own)))}
            count = max(gate.needed_starts or 0 for gate in own)
            texts = {key: ", ".join(value) for key, value in named.items()}
            sentences.append(_STUCK[name].format(count=count, **texts))
    if failed:
        sentences.append(f"A longer run will not clear {', '.join(failed)}.")
    needed = max((gate.needed_s or 0.0 for gate in timed), default=None)
    return Advice(needed_s=needed, text=" ".join(sentences) or "Nothing is open.")


def _lengths(timed: Sequence[Gate], faults: Sequence[Check]) -> list[str]:
    """How long a run would decide the gates that a length decides."""
    if not timed:
        return []
    long = [gate for gate in timed if (gate.needed_s or 0.0) > _LONG_S]
    soon = [gate for gate in timed if gate not in long]
    sentences = []
    if soon:
        others = f"all open gates but {len(long)}" if long else "the open gates"
        sentences.append(f"A run of about {_length(soon)} would decide {others}, if the arms behave as they did here.")
    short = [check for check in faults if check.rule.rank == TOO_SHORT and check.rule.mended_by_length]
    few = min((check for check in short if (check.value or 0.0) < FEW_BLOCKS), key=_value, default=None)
    if few:
        # Hours by gate would be taken for more than the guess that they are.
        sentences += [] if soon else ["The open gates would take hours, if the arms behave as they did here."]
        blocks = counted(round(_value(few)), "block")
        sentences.append(f"This estimate rests on {blocks}; {few.limit:.0f} give a better one.")
    elif long:
        first = min(long, key=lambda gate: gate.needed_s or 0.0)
        more = f", and up to {_length(long)} {counted(len(long) - 1, 'more gate')}" if len(long) > 1 else ""
        sentences.append(
            f"About {_length([first])} would decide {_name(first)}, which is near its limit or varies much{more}."
        )
    return sentences


def _why_stuck(gate: Gate) -> str:
    if gate.kind in ("recompile", "parity"):
        name = "compiles" if gate.kind == "recompile" else "parity"
        return f"{name} unseen" if gate.unseen else name
    if gate.kind in ("cold", "memory"):
        return gate.kind
    return "starts" if gate.needed_starts else "never"


def _name(gate: Gate) -> str:
    return f'"{gate_label(gate.gate)}" of {gate.arm}'


def _length(gates: Sequence[Gate]) -> str:
    """The longest run that one of the gates needs, and in how many fresh starts."""
    starts = max(gate.needed_starts or 0 for gate in gates)
    over = f" in {starts} fresh starts (trials.count = {starts})" if starts else ""
    return f"{duration_text(max(gate.needed_s or 0.0 for gate in gates))}{over}"


def _value(check: Check) -> float:
    return check.value or 0.0
