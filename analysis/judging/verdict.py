"""What follows from the gates: the verdict on an arm, the outcome in plain words, and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tailgate.analysis.checks.applied import blocking
from tailgate.analysis.checks.check import MACHINES, OVERLOADED, TOO_SHORT, Check
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from tailgate.analysis.settings.metrics import gate_label
from tailgate.analysis.wording import duration_text, listed

Needs = Callable[[float], str]  # what a PASS needs of the run, where gates need so many seconds
# In the order in which failures are reported: what others may follow from comes first.
KIND_ORDER = ("parity", "recompile", "error", "noninferiority", "goodput", "slo", "memory", "ramp")


def combined(verdicts: Sequence[str]) -> str:
    """Return FAIL if any is, else INCONCLUSIVE if any is or there is none, else PASS."""
    if FAIL in verdicts:
        return FAIL
    return PASS if verdicts and set(verdicts) == {PASS} else INCONCLUSIVE


def headline(
    arms: Mapping[str, str], gates: Sequence[Gate], checks: Sequence[Check], control: str, needs: Needs
) -> str:
    """State the outcome in plain words, worst arm first. `arms` maps each judged arm to its verdict."""
    if not arms:
        return f"There is no arm to judge against {control}."
    overloads = [check for check in checks if check.rule.rank == OVERLOADED and not check.ok]
    concerned = [None, *(arm for arm, verdict in arms.items() if verdict != PASS)]
    parts = [f"{check.reason} {check.remedy}" for check in overloads if check.arm in concerned and len(concerned) > 1]
    undecided: dict[str, list[str]] = {}
    passed = []
    for arm, verdict in arms.items():
        own = sorted((gate for gate in gates if gate.arm == arm), key=lambda gate: KIND_ORDER.index(gate.kind))
        if verdict == FAIL:
            first = next(gate for gate in own if gate.verdict == FAIL)
            reason = first.reason.replace(f" {first.allowance}", "") if first.allowance else first.reason
            parts.append(f"{arm} must not replace {control}: {reason}")
        elif verdict == INCONCLUSIVE:
            undecided.setdefault(_open_reason(own, checks, needs), []).append(arm)
        else:
            ratios = [gate for gate in own if gate.kind == "noninferiority" and gate.high is not None]
            most = max((gate.high or 0.0 for gate in ratios), default=0.0)
            lasting = max((limit for gate in ratios for limit in gate.lasting or ()), default=0.0)
            slower = f" (latency at most {most:.2f} times {control}'s, error bars included)" if ratios else ""
            if round(lasting, 2) > round(most, 2):
                slower = f"{slower[:-1]}; {lasting:.2f} times if a disturbance lasts for several trials)"
            passed.append(f"{arm} may replace {control}: every gate passed{slower}.")
    for reason, managed_arms in undecided.items():
        parts.append(f"This run cannot decide whether {' or '.join(managed_arms)} may replace {control}: {reason}")
    return " ".join([*parts, *passed])


def _open_reason(gates: Sequence[Gate], checks: Sequence[Check], needs: Needs) -> str:
    """Return the reason of the worst failed check that keeps a gate open (of machines, the gate's), else of a gate."""
    open_gates = [gate for gate in gates if gate.verdict == INCONCLUSIVE]
    found = [check for gate in open_gates for check in blocking(gate, checks)]
    # An overload is reported before all arms.
    others = [check for check in found if check.rule.rank != OVERLOADED]
    if others:
        worst = min(others, key=partial(_urgency, checks))
        rank = worst.rule.rank
        seen = [gate.reason for gate in open_gates if gate.caveat and worst.check in gate.blocked_by]
        reason = seen[0] if seen and rank == MACHINES else worst.reason
        known = max(gate.needed_s or 0.0 for gate in open_gates) if rank == TOO_SHORT and not _is_broken(found) else 0.0
        length = needs(known) if rank == TOO_SHORT or (rank == MACHINES and not seen) else ""
        never = next((gate.reason for gate in open_gates if gate.unseen), "")  # no longer run decides it
        return " ".join(filter(None, (never, reason, length)))
    if found:
        return "The load was too high."
    return open_gates[0].reason if open_gates else "No gate was judged."


def _is_broken(faults: Sequence[Check]) -> bool:
    """Return whether a fault stays when the run is longer. Machines may be quiet next time."""
    return any(not check.rule.fixed_by_length and check.rule.rank != MACHINES for check in faults)


def _urgency(checks: Sequence[Check], check: Check) -> tuple[int, bool, int]:
    """Return the place of a failed check. Other work on the host comes before the load generator that it makes late."""
    late = check.check == "load generator" and any(one.check == "other work" and not one.ok for one in checks)
    return MACHINES if late else check.rule.rank, late, checks.index(check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What to do about gates of `arm` that failed for one cause."""

    arm: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would decide what is open, `needed_s` None where no run length does; and what to do about what failed."""

    needed_s: float | None
    text: str
    remedies: tuple[Remedy, ...] = ()


# What would decide open gates, by their kind where no length of the run decides them.
_LENGTH = "A run of {about} {length} would decide {which}, if the arms behave as they did here."
_LONG_S = 4 * 3600.0
_LONG = "Deciding {gates} takes {about} {length}: the value is close to its limit, or its variance is high."
_STUCK = {
    "recompile": "Record the compile events of {arms}.",
    "memory": "More and longer trials would decide {gates}, with the machines watched ([machines]).",
    "parity": "Run `tailgate parity experiment.toml`: traffic cannot decide parity.",
}
_UNSEEN = "A longer run does not decide {{gates}}: {}."
_STARTS = "Deciding {gates} takes at least {count} runs of each arm, each after a fresh start."
_NEVER = "No run of up to a week would decide {gates}."

_INSPECT = "`tailgate inspect experiment.toml --arm {arm}`"
_LATENCY = "`tailgate frontier experiment.toml` finds which load each arm holds."
# What to do about a failed gate: by its name, else by its kind; `_LATENCY` about the others.
_REMEDIES = {
    "parity": "`tailgate parity experiment.toml` measures it without traffic and names the answers that differ.",
    "recompile": f"{_INSPECT} shows, without traffic, which steps are not ready: warm them up (compile.warmup), or "
    "plan the shapes (preset compiled-bucketed or compiled-dynamic).",
    "refused": f"{_INSPECT} lists the shapes that it serves: widen its bounds or ladders, or admit less "
    "(engine.max_prompt_tokens).",
    "deaths": "See the end of the dead replica's log under logs/ in the trial's folder.",
    "error": "See the column `error` of the requests, and the arm's logs.",
    "memory": "To use less memory, set fewer slots (engine.slots) or plan fewer shapes: each has CUDA graphs.",
    "ramp": "See the ramp's line in the report: at which share of the traffic it ended, and why.",
}
_LOAD_HELD = 'Search for the load that it holds: traffic.arrivals = "saturation", with traffic.rates in place of rate.'
_OF_EXTERNAL = {
    "noninferiority": _LOAD_HELD,
    "slo": _LOAD_HELD,
    "parity": "Compare its weights, precision and sampling with the control's.",
    "recompile": "Before the next run, send its server requests like those that compiles delayed: as long{lengths}, as "
    "many at once, sampled alike. vLLM compiles the sizes in its option compile_sizes at its start.",
}


def advise(
    gates: Sequence[Gate], checks: Sequence[Check], *, external: Mapping[str, str] = {}, needs: str = ""
) -> Advice:
    """Say what would decide the open gates of arms that have not failed, and how to fix the failed ones.

    Failed checks come first, and with them only the shortest run that can PASS, `needs`, if a longer one with the same
    fault stays open. `external` has the requests that compiles delayed, in words, of each external arm.
    """
    failed = sorted({gate.arm for gate in gates if gate.verdict == FAIL})
    undecided = [gate for gate in gates if gate.verdict == INCONCLUSIVE and gate.arm not in failed]
    faults = [check for gate in undecided for check in blocking(gate, checks)]
    faults.sort(key=partial(_urgency, checks))
    fixes = list(dict.fromkeys(check.remedy for check in faults if check.remedy))
    if len(fixes) > 2:
        fixes[2:] = ['"Checks of the run" in report.html lists what else to do.']
    broken = _is_broken(faults)
    found: dict[str, list[Gate]] = {}
    for gate in undecided:
        remedy = _UNSEEN.format(gate.unseen) if gate.unseen else _STUCK.get(gate.kind)
        if gate.needed_s is None and not gate.blocked_by and (remedy or not broken):
            found.setdefault(remedy or (_STARTS if gate.needed_starts else _NEVER), []).append(gate)
        elif gate.needed_s is not None and not broken:
            found.setdefault(_LONG if gate.needed_s > _LONG_S else _LENGTH, []).append(gate)
    lengths = [text for text in (_LENGTH, _LONG) if text in found]
    sentences = [
        _filled(text, found[text], "" if len(found) > 1 else "the open gates")
        for text in (*lengths, *(text for text in found if text not in lengths))
    ]
    if not lengths and needs and any(check.rule.rank == TOO_SHORT for check in faults):
        sentences.append(needs)
    if failed:
        sentences.append(f"A longer run cannot change the FAIL of {', '.join(failed)}.")
    stuck = {gate.arm for gate in undecided if gate.unseen}  # a longer run alone leaves these arms open
    deciding = [gate.needed_s or 0.0 for text in lengths for gate in found[text] if gate.arm not in stuck]
    return Advice(
        needed_s=max(deciding, default=None),
        text=" ".join(dict.fromkeys([*fixes, *sentences])) or "Nothing is open.",
        remedies=_remedies(gates, external),
    )


def _filled(text: str, gates: Sequence[Gate], which: str) -> str:
    """Fill in the sentence: the gates' names, and the longest run and the most fresh starts that one needs. `which`
    stands for all open gates."""
    starts = max(gate.needed_starts or 0 for gate in gates)
    over = f" in {starts} fresh starts (trials.count = {starts})" if starts else ""
    arms = sorted({gate.arm for gate in gates})
    named = ((sorted({f'"{gate_label(gate.gate)}"' for gate in gates if gate.arm == arm}), arm) for arm in arms)
    names = listed([f"{listed(names)} of {arm}" for names, arm in named])
    return text.format(
        about="up to" if any(gate.path for gate in gates) else "about",  # interim analyses may end the run sooner
        arms=", ".join(arms),
        gates=names,
        which=which or names,
        count=starts,
        length=f"{duration_text(max(gate.needed_s or 0.0 for gate in gates))}{over}",
    )


def _remedies(gates: Sequence[Gate], external: Mapping[str, str]) -> tuple[Remedy, ...]:
    """Return one remedy for all gates of an arm that failed for one cause, in the order of arms and `KIND_ORDER`."""
    arms = list(dict.fromkeys(gate.arm for gate in gates))
    found: dict[tuple[str, str], None] = {}
    for gate in sorted(gates, key=lambda gate: (arms.index(gate.arm), KIND_ORDER.index(gate.kind))):
        if gate.verdict == FAIL:
            text = _REMEDIES.get(gate.gate) or _REMEDIES.get(gate.kind, _LATENCY)
            text = _OF_EXTERNAL.get(gate.kind, text) if gate.arm in external else text
            found[gate.arm, text.format(arm=gate.arm, lengths=external.get(gate.arm))] = None
    return tuple(Remedy(arm=arm, text=text) for arm, text in found)
