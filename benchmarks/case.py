"""The case study: keep its runs, judge them again, plant its faults.

    python benchmarks/case.py keep ab runs/20261122T182031Z-case-ab     # add a run to benchmarks/results/case/ab.tar.xz
    python benchmarks/case.py judge                                     # judge every case again, over all its runs
    python benchmarks/case.py unpack ab                                 # print the folder of a case's runs
    python benchmarks/case.py plant case-planted-decode --out runs      # run a case with the faults that its arms name
    python benchmarks/case.py others                                    # print what other tools' rules say, as tables

One archive holds all runs of a case, without engine steps. A search keeps its steps, for its table of step times. The
gaps between tokens are kept, in units of 100 µs, only with `keep --token-gaps`: for cases whose gates or checks read
them. `keep` refuses a run that differs from the registered experiment of its name. NAME.json holds the verdict on all
runs of a case, and others.json the verdicts of other tools' rules on the same records. A test judges them again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kept import pack, unpack
from benchmarks.other_rules import markdown, other_verdicts
from benchmarks.planted_arm import VARIABLE
from tailgate.analysis.records.joining import (
    RunList,
    flat,
    is_among,
    listed_runs,
    read_run_list,
    shown,
    write_run_list,
)
from tailgate.analysis.records.run_records import check_runs, table_files, trial_folders
from tailgate.analysis.records.schemas import TABLES
from tailgate.analysis.records.tables import NOT_AS_WRITTEN, RecordError, read_table
from tailgate.analysis.summary.summary import analyze
from tailgate.analysis.wording import counted
from tailgate.loadtests.commands.main import main as tailgate
from tailgate.loadtests.experiments.reading import load, to_table

PLANTED_ARM = (sys.executable, "-m", "benchmarks.planted_arm")
# What is planted in the arms of this name.
PLANTED = {
    "decode-plus-5": "decode=1.05",
    "decode-plus-10": "decode=1.1",
    "decode-plus-20": "decode=1.2",
    "stall-2s-in-300s": "stall_s=2,every_s=300,first_s=120",
    "memory-plus-30": "memory=1.3",
}
CASES = Path(__file__).parent / "results" / "case"
OTHERS = CASES / "others.json"
EXPERIMENTS = Path(__file__).parent / "experiments"
_TABLES = ("requests", "compile_events", "machines")
_DOCUMENTS = (
    *("experiment.toml", "environment.json", "parity.json", "frontier.json"),
    *("trial.json", "generator-*.json", "answers-*.json"),
)
_OWN = ("name", "seed", "trials.count")  # of each run


def archives() -> list[Path]:
    """Return the archive of each case."""
    return sorted(CASES.glob("*.tar.xz"), key=lambda archive: verdict_file(archive).stem)


def archive_of(name: str) -> Path:
    """Return where the archive of the case is, or will be."""
    return CASES / f"{name}.tar.xz"


def verdict_file(archive: Path) -> Path:
    """Return the file with the verdict on the case of `archive`."""
    return archive.with_name(archive.name.removesuffix(".tar.xz") + ".json")


def keep(case: Path, run_dir: Path, accepted: Sequence[str] = (), *, token_gaps: bool = False) -> None:
    """Add the run to the folder `case` and list all its runs, which may differ in `accepted` keys."""
    kept = case / run_dir.name.partition("-")[0]
    folders = trial_folders(run_dir)
    for path in (path for folder in (run_dir, *folders) for name in _DOCUMENTS for path in folder.glob(name)):
        target = kept / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    stems = (*_TABLES, "steps") if (run_dir / "frontier.json").exists() else _TABLES
    for path in (path for folder in folders for stem in stems for path in table_files(folder, stem)):
        _keep_table(path, kept / path.relative_to(run_dir).with_suffix(".parquet"), token_gaps=token_gaps)
    runs = sorted(path.parent for path in case.glob("*/experiment.toml"))
    before = read_run_list(case)
    keys = dict.fromkeys([*(before.accepted if before else ()), *accepted])
    write_run_list(case, RunList(directories=tuple(runs), accepted=tuple(keys)))


def _keep_table(path: Path, target: Path, *, token_gaps: bool) -> None:
    schema = next(schema for stem, schema in TABLES.items() if path.name.startswith(stem))
    table, problems = read_table(path, schema)
    if NOT_AS_WRITTEN in problems:
        raise RecordError(f"{path} {NOT_AS_WRITTEN}: give another run")
    if "token_ns" in schema.names and not token_gaps:
        place = schema.get_field_index("token_ns")
        table = table.set_column(place, schema.field(place), pa.nulls(len(table), schema.field(place).type))
    pq.write_table(table, target)


def deviations(run_dir: Path, accepted: Sequence[str] = ()) -> list[str]:
    """Return how the run's experiment differs from the registered one of its name, except `accepted` keys or tables."""
    run = tomllib.loads((run_dir / "experiment.toml").read_text(encoding="utf-8"))
    name = str(run.get("name"))
    registered_file = EXPERIMENTS / f"{name}.toml"
    if not registered_file.is_file():
        return [] if "name" in accepted else [f'name is "{name}", which no registered experiment has']
    own, registered = (
        dict(flat({**table, "arms": {arm["name"]: arm for arm in table["arms"]}}))
        for table in (run, to_table(load(registered_file)))
    )
    return [
        f"{key} is {shown(own.get(key))}, registered {shown(registered.get(key))}"
        for key in sorted({*own, *registered})
        if own.get(key) != registered.get(key) and not is_among(key, (*_OWN, *accepted))
    ]


def plant(case: str, more: Sequence[str]) -> int:
    """Run the case with the fault in each arm that is named after one; return the exit code of `tailgate run`."""
    path = EXPERIMENTS / f"{case}.toml"
    arms = [arm["name"] for arm in tomllib.loads(path.read_text(encoding="utf-8"))["arms"]]
    os.environ[VARIABLE] = ";".join(f"{arm}:{PLANTED[arm]}" for arm in arms if arm in PLANTED)
    return tailgate(["run", str(path), *more], arm_command=PLANTED_ARM)


def verdict_of(case: Path) -> dict[str, Any]:
    """Judge all runs in the folder `case` together: overall, by gate, and whether the machines were quiet."""
    summary = analyze(case)
    return {
        "overall": summary["overall"],
        "headline": summary["headline"],
        "machines": summary["machines"]["verdict"],
        "trials": summary["design"]["trials"],
        "gates": [_short(gate) for gate in summary["gates"]],
        "failed_checks": [
            {name: check[name] for name in ("check", "arm", "reason")}
            for check in summary["validity"]
            if not check["ok"]
        ],
        "compiles_while_serving": sum(arm["compile"]["serving_events"] or 0 for arm in summary["arms"]),
        "advice": summary["advice"]["text"],
        **({"answer": summary["frontier"]["answer"]} if summary["frontier"] else {}),
    }


def judged_cases() -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the folder and the kept verdict of each case, by its name."""
    return {
        verdict_file(archive).stem: (unpack(archive), json.loads(verdict_file(archive).read_text(encoding="utf-8")))
        for archive in archives()
    }


def write_others() -> list[dict[str, Any]]:
    """Write others.json: what the rules of other tools say of every case as it is kept and judged now."""
    rows = other_verdicts(judged_cases())
    OTHERS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return rows


def _short(gate: Mapping[str, Any]) -> dict[str, Any]:
    return {name: gate[name] for name in ("arm", "gate", "verdict", "value", "reason")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep and judge the cases."""
    parser = argparse.ArgumentParser(prog="case.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep")
    keeping.add_argument("case")
    keeping.add_argument("run_dir", type=Path, nargs="+")
    keeping.add_argument(
        "--allow-different", default="", metavar="KEY,...", help="from the registered experiment, and as of analyze"
    )
    keeping.add_argument("--token-gaps", action="store_true", help="where gates or checks read gaps between tokens")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("case", choices=[verdict_file(archive).stem for archive in archives()])
    commands.add_parser("judge")
    commands.add_parser("others")
    planting = commands.add_parser("plant")
    planting.add_argument("case", choices=sorted(path.stem for path in EXPERIMENTS.glob("case-planted-*.toml")))
    planting.add_argument("more", nargs=argparse.REMAINDER, help="for tailgate run")
    options = parser.parse_args(arguments)
    if options.command == "plant":
        return plant(options.case, options.more)
    if options.command == "unpack":
        print(unpack(archive_of(options.case)))
        return 0
    if options.command == "others":
        print(markdown(write_others()))
        return 0
    if options.command == "keep":
        accepted = [key for key in options.allow_different.split(",") if key]
        for run_dir in options.run_dir:
            if not (run_dir / "experiment.toml").is_file():
                parser.error(f"{run_dir} holds no experiment.toml: give the directory of a run")
            if found := deviations(run_dir, accepted):
                keys = ",".join(line.partition(" is ")[0] for line in found)
                parser.error(
                    f"{run_dir} is no run of the registered experiment: {'; '.join(found)}: run that, or accept what "
                    f"differs with --allow-different {keys}"
                )
        archive = archive_of(options.case)
        with tempfile.TemporaryDirectory() as folder:
            case = Path(folder) / options.case
            if archive.exists():
                shutil.copytree(unpack(archive), case, ignore=shutil.ignore_patterns(".unpacked"))
            try:
                # What cannot be judged with the kept runs changes nothing.
                check_runs(listed_runs([*([case] if case.exists() else []), *options.run_dir], accepted))
                for run_dir in options.run_dir:
                    keep(case, run_dir, accepted, token_gaps=options.token_gaps)
            except RecordError as error:
                parser.error(str(error))
            pack(case, archive)
    for archive in archives():
        verdict = verdict_of(unpack(archive))
        path = verdict_file(archive)
        path.write_text(json.dumps(verdict, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.stem}: {verdict['overall']}, {counted(verdict['trials'], 'trial')}: {verdict['headline']}")
    write_others()
    return 0


if __name__ == "__main__":
    sys.exit(main())
