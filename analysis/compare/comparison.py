"""Two runs as one with two arms: the later run's is judged by the gates, and the earlier's is its control."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailgate.analysis.checks.check import TAIL, Check, Rule
from tailgate.analysis.checks.machines import speed
from tailgate.analysis.imports.vllm import DESIGN, write_run
from tailgate.analysis.judging.gates import FAIL, PASS
from tailgate.analysis.judging.judgement import judge
from tailgate.analysis.records.joining import RecordedRun, flat, is_among, joins_runs, settings_of, shown
from tailgate.analysis.records.plain_values import mapping, rows_of, table, text_of
from tailgate.analysis.records.request_columns import RequestColumns, is_named
from tailgate.analysis.records.run_records import RunRecords, read_together, table_files
from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.run.arm_account import replica_names
from tailgate.analysis.run.client_stalls import with_lengths
from tailgate.analysis.run.machine_records import WORK, speeds_of
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.trials import devices_of, takes_part
from tailgate.analysis.summary.summary import moment, summary_of
from tailgate.analysis.wording import sentence

BASELINE, CANDIDATE = "baseline", "candidate"
_RESULT_ARM = "server"  # the arm of another tool's result file

# Settings, or tables of them, that must be alike; the length only where the load changes with time.
_ALIKE = ("traffic", "slo", "pressure", "trials.compile_cache", "loop", "arm.model", "arm.kind", "replicas")
# Those that say nothing of what was measured: how the traffic is sent, of other arms, and of the run.
_IGNORED = (
    *("traffic.workers", "traffic.remote_workers", "traffic.master_bind", "traffic.block_s"),
    *("arms", "control", "model", "arm.model.seed", "arm.weight"),
    *("name", "seed", "machines", "trials.count", "block_s"),
)
_LENGTH = "traffic.duration_s"
_FILES = ("traffic.trace", "traffic.tokenizer")  # compared by their names
_OF_MACHINE = ("machine", "cpu.model", "cpu.usable", "gpus", "platform", "python", "git_commit")


def made_run(path: Path, folder: Path) -> Path:
    """Return the run directory at `path`, or make one in `folder` from another tool's result file."""
    if joins_runs(path):
        raise RecordError(f"{path} is what `analyze` wrote: give the folder of a run, named in its runs.json")
    if path.is_file():
        write_run(folder / path.stem, [(_RESULT_ARM, path)])
        return folder / path.stem
    if any(path.glob("trial-*/")) or (path / "experiment.toml").exists() or table_files(path, "requests"):
        return path
    problem = "is no run directory and no result file" if path.exists() else "does not exist"
    raise RecordError(f"{path} {problem}: give a directory that `tailgate run` wrote, or another tool's result")


def read_pair(
    baseline: Path, candidate: Path, *, arm: str = "", gates: Mapping[str, Any] | None = None
) -> tuple[Run, list[str], str]:
    """Read both directories as one run; return it, what else differs, and the arm's name in the candidate.

    `arm` is a name, or BASELINE=CANDIDATE; `gates` replace the candidate's.
    Raises RecordError if the two are one run, lack the arm, or differ in what a comparison rests on.
    """
    if baseline.resolve() == candidate.resolve():
        raise RecordError(f"{candidate.name} is the baseline and the candidate: give two runs")
    records = read_together((baseline, candidate))
    joined = {run.directory: run for run in records.runs}
    runs = one, two = joined[baseline], joined[candidate]
    if set(one.starts_ns.values()) & set(two.starts_ns.values()):
        raise RecordError(f"{one.name} and {two.name} hold the same trial, of one start: give two runs")
    arms = chosen_arms(arm, one, two)
    settings = [_conditions(run, name) for run, name in zip(runs, arms, strict=True)]
    texts = {
        key: " → ".join((f"{key} {shown(settings[0].get(key))}", shown(settings[1].get(key))))
        for key in dict.fromkeys((*settings[0], *settings[1]))
        if settings[0].get(key) != settings[1].get(key)
    }
    changing = settings[0].get("traffic.length_scales") or settings[0].get("traffic.workload") == "trace"
    free = () if changing or settings[0].get("traffic.arrivals", "poisson") not in ("poisson", "gamma") else (_LENGTH,)
    if wrong := [text for key, text in texts.items() if is_among(key, _ALIKE) and key not in free]:
        raise RecordError(
            f"{baseline.name} and {candidate.name} cannot be compared, since they differ in {'; '.join(wrong)}: run "
            "both with one experiment"
        )
    if settings[0].get("traffic.arrivals") == "saturation":
        raise RecordError(f"{candidate.name} searched for the load that its arms hold: give runs of `tailgate run`")
    sides = [_Side(run, own, name) for run, own, name in zip(runs, arms, (BASELINE, CANDIDATE), strict=True)]
    return with_lengths(Run.of(_of_two_arms(records, sides, gates))), [*texts.values()], arms[1]


def chosen_arms(text: str, baseline: RecordedRun, candidate: RecordedRun) -> tuple[str, str]:
    """Return the arm of each run that `text` names; by default the only shared one that is no control, or the only one.

    Raises RecordError if that is not one arm, or a run has no such arm.
    """
    known = [_arms(documents) for documents in (baseline, candidate)]
    name, mapped, other = text.partition("=")
    if not text:
        # A run of one arm has no other than its control.
        alone = max(map(len, known)) == 1
        judged = [arm for arm in known[0] if arm in known[1] and (alone or not (known[0][arm] or known[1][arm]))]
        if len(judged) != 1:
            raise RecordError(
                f"the baseline has {', '.join(known[0])}, the candidate {', '.join(known[1])}: choose an arm with "
                "--arm NAME, or two with --arm BASELINE=CANDIDATE"
            )
        return judged[0], judged[0]
    pair = (name, other if mapped else name)
    for arm, side, own in zip(pair, (BASELINE, CANDIDATE), known, strict=True):
        if arm not in own:
            raise RecordError(f'the {side} has no arm "{arm}": use {", ".join(own)}')
    return pair


def _arms(documents: RecordedRun) -> dict[str, bool]:
    """Return the arms of the run, each with whether it is its control."""
    rows = [*rows_of(documents.experiment.get("arms"))]
    rows += [row for info in documents.infos for row in rows_of(mapping(info).get("arms"))]
    arms: dict[str, bool] = {}
    for row in rows:
        arms.setdefault(str(row.get("name")), row.get("control") is True)
    return arms


def _conditions(documents: RecordedRun, arm: str) -> dict[str, Any]:
    """Return the conditions under which the run measured `arm`, by key: its settings as "arm.…", no other arm's."""
    given = {re.sub(rf"^arms\.{re.escape(arm)}\.", "arm.", key): value for key, value in settings_of(documents).items()}
    found = {key: value for key, value in given.items() if not is_among(key, _IGNORED)}
    found |= {key: PurePath(str(found[key])).name for key in _FILES if key in found}
    infos = [mapping(info) for info in documents.infos]
    rows = [row for info in infos for row in rows_of(info.get("arms")) if row.get("name") == arm]
    found["arm.model_name"] = next((mapping(row.get("external")).get("model_name") for row in rows), None)
    found["replicas"] = len(replica_names(infos, arm)) or None
    environment = dict(flat(documents.environment))
    return found | {key: environment.get(key) for key in _OF_MACHINE}


class _Side(NamedTuple):
    run: RecordedRun
    arm: str
    name: str  # what the arm is called here


def _of_two_arms(records: RunRecords, sides: Sequence[_Side], gates: Mapping[str, Any] | None) -> RunRecords:
    candidate = sides[1].run.experiment
    rows = (
        next((row for row in rows_of(side.run.experiment.get("arms")) if row.get("name") == side.arm), {})
        for side in sides
    )
    experiment = {
        **candidate,
        "name": " → ".join(f"{side.arm} of " * (side.arm != _RESULT_ARM) + side.run.name for side in sides),
        "compare_models": True,
        "arms": [
            {**row, "name": side.name, "control": side.name == BASELINE} for row, side in zip(rows, sides, strict=True)
        ],
        "traffic": {**table(candidate, "traffic"), "design": DESIGN},
        "trials": {**table(candidate, "trials"), "count": sum(len(side.run.trials) for side in sides)},
        "gates": {**(table(candidate, "gates") if gates is None else gates), "sequential": False},
        "parity": {},
    }
    side_of = {trial: side for side in sides for trial in side.run.trials.values()}
    infos = {int(info["trial"]): info for info in records.trials}
    absent = {trial for trial, info in infos.items() if not takes_part(info, side_of[trial].arm)}
    names = {(trial, side.arm): side.name for trial, side in side_of.items() if trial not in absent}
    requests, unjudged = _of_sides(records.requests, names)
    return replace(
        records,
        experiment=experiment,
        environment={**records.environment, **sides[1].run.environment},
        trials=tuple(_info(info, side_of[trial]) for trial, info in infos.items() if trial not in absent),
        requests=requests,
        unjudged=unjudged,
        events=_renamed(records.events, names),
        steps=_renamed(records.steps, names),
        machines=_renamed(records.machines, names, keep_others=True),
        parity=None,
        answers=(),
        search=None,
        weights=(),
        runs=(),
        trial_names={
            at: f"the {side.name}'s trial" + f" {own}" * (len(side.run.trials) > 1)
            for side in sides
            for own, at in side.run.trials.items()
        },
    )


def _of_sides(requests: RequestColumns, names: Mapping[tuple[int, str], str]) -> tuple[RequestColumns, RequestColumns]:
    """Return the requests of the arms in `names`, by trial and arm, under their new names, and all others."""
    arms = tuple(sorted(set(names.values())))
    arm = np.full(len(requests), -1, dtype=np.int8)
    for (number, name), chosen in names.items():
        arm[(requests.trial == number) & is_named(requests.arm, requests.arms, name)] = arms.index(chosen)
    return replace(requests, arms=arms, arm=arm).kept(arm >= 0), requests.kept(arm < 0)


def _renamed(
    rows: pa.Table | None, names: Mapping[tuple[int, str], str], *, keep_others: bool = False
) -> pa.Table | None:
    """Select and rename the rows of the arms in `names`, by trial and arm; `keep_others` keeps all other rows."""
    if rows is None:
        return None
    place, arm, trial = rows.schema.get_field_index("arm"), rows.column("arm").cast(pa.string()), rows.column("trial")
    new = pa.nulls(rows.num_rows, pa.string())
    for (number, name), chosen in names.items():
        own = pc.and_(pc.equal(trial, number), pc.equal(arm, name))
        new = pc.if_else(pc.fill_null(own, False), chosen, new)
    arms = pc.coalesce(new, arm) if keep_others else new
    renamed = rows.set_column(place, rows.schema.field(place), arms.cast(rows.schema.field(place).type))
    return renamed if keep_others else renamed.filter(pc.is_valid(arms))


def _info(info: Mapping[str, Any], side: _Side) -> dict[str, Any]:
    """Return trial.json of a trial reduced to the side's arm."""

    def renamed(values: Any) -> dict[str, Any]:
        return {side.name if key == side.arm else key: value for key, value in mapping(values).items()}

    kept = {key: value for key, value in info.items() if key not in ("answers", "asked")}
    for key, column in (("arms", "name"), ("deaths", "arm")):
        if key in kept:
            kept[key] = [{**row, column: side.name} for row in rows_of(kept[key]) if row.get(column) == side.arm]
    for key in kept.keys() & {"startup", "planned", "ended_arms"}:
        kept[key] = {name: value for name, value in renamed(kept[key]).items() if name == side.name}
    # Other arms keep their devices, which they may have shared with it.
    if "devices" in kept:
        kept["devices"] = renamed(kept["devices"])
    return {**kept, "design": DESIGN}


_NOISE = 0.01  # of a log reference, by which two runs of one machine may differ
_DRIFT = 0.05  # from here on a queue may have grown by more than the machine was slower

WHAT_DIFFERS = Rule(
    name="what differs",
    sees="Two runs of `tailgate compare` differ in length, which opens *memory ratio*. It lists all that differs.",
    find=lambda seen: (),
    remedy="A longer run has a higher peak of memory: compare runs of one traffic.duration_s.",
    opens=("memory",),
)


def compare_runs(
    baseline: Path,
    candidate: Path,
    *,
    arm: str = "",
    gates: Mapping[str, Any] | None = None,
    trust_machines: bool = False,
) -> dict[str, Any]:
    """Return the summary of two run directories, ready for JSON. Raises RecordError if they cannot be compared.

    `arm` and `gates` are as of `read_pair`; `trust_machines` assumes that both machines are equally fast.
    """
    run, differing, own_name = read_pair(baseline, candidate, arm=arm, gates=gates)
    of_machines = _speed(run, trusted=trust_machines)
    texts = "; ".join(differing)
    differs = f"The candidate differs in {texts}." if texts else "No version and no setting that matters here differs."
    faults = [text for text in differing if run.limits.max_memory_ratio and text.startswith(_LENGTH)]
    given = (of_machines, WHAT_DIFFERS.found(faults, reason=differs, arm=CANDIDATE))
    summary = summary_of(run, judge(run, given))
    summary["created"] = moment(min(trial.first_ns for trial in run.trials_of(CANDIDATE)))
    advice, own = summary["advice"], candidate / "experiment.toml"  # which commands read, and settings are in
    for row in (advice, *advice["remedies"], *summary["gates"]):
        key = "text" if "text" in row else "reason"
        text = row[key].replace(f"--arm {CANDIDATE}", f"--arm {own_name}").replace("experiment.toml", str(own))
        row[key] = text.replace(f"arms.{CANDIDATE}.", f"arms.{own_name}.")
    return summary


def _speed(run: Run, *, trusted: bool) -> Check:
    """Check "machine speed": by the references of both arms' devices, the machines were equally fast.

    A ratio of latencies is decided if it would stand even if the machines caused all of their difference.
    """
    external = any(run.account(arm).external for arm in run.arms)  # not on the machine of the run
    one, two = ({} if external else _measured(run, arm) for arm in (BASELINE, CANDIDATE))
    # Above 0 where the candidate's machine is slower.
    differences = {key: one[key] - two[key] for key in one if key in two}
    moved = {figure: value for (figure, _), value in differences.items() if abs(value) > _NOISE}
    machines = {text_of(trial.info, "machine") for trial in run.trials}
    same_machine = len(machines) == 1 and machines != {""}
    known = trusted or (same_machine and not external) or (bool(differences) and one.keys() == two.keys())
    row: dict[str, Any] = {"arm": CANDIDATE, "opens": ("noninferiority",)}
    if not known:
        fault = "No reference shows that the machines of both runs were equally fast"
        remedy = "Give --trust-machines if both runs had the same machines."
        remedy += "" if external else " If not, measure them in both (machines.reference_s)."
        return replace(speed, rank=TAIL).found([fault], remedy=remedy, **row)  # which is no disturbance
    if not moved:
        ending = "." if differences else ", by assumption (no reference)."
        return speed.found([], reason=f"The machines of both runs were equally fast{ending}", **row)
    words = (
        f"{WORK[figure]} was {100.0 * abs(math.expm1(-value)):.1f} % {'lower' if value > 0 else 'higher'} during the "
        "candidate's run"
        for figure, value in moved.items()
    )
    spread = max(map(abs, moved.values()))
    slowed, sped = max(moved.values()) > 0, min(moved.values()) < 0
    return speed.found(
        [sentence([", ".join(words)])],
        shift=spread if spread <= math.log1p(_DRIFT) else None,
        spares="" if slowed and sped else PASS if slowed else FAIL,
        remedy=f"Run the baseline again {'right before' if same_machine else 'on the machine of'} the candidate.",
        **row,
    )


def _measured(run: Run, arm: str) -> dict[tuple[str, str], float]:
    """Return the mean logarithm of each figure of the arm's device, by figure and size of the work."""
    devices = {trial.number: devices_of(trial).get(arm) for trial in run.trials_of(arm)}
    values: dict[tuple[str, str], list[float]] = {}
    for item in speeds_of(run.trials_of(arm)):
        if devices[item.trial] in (None, item.device):
            values.setdefault((item.figure, item.size), []).append(item.mean)
    return {key: fmean(own) for key, own in values.items()}
