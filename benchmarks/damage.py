"""What damage to a run's records does to its judgement: crashes, tracebacks, false PASSes, changes without a word.

    python benchmarks/damage.py RUN_DIR... [--tries 3000] [--processes 2] [--seed 1] [--reports]

In each try a copy of one run has one of its files damaged: one bit or twenty flipped, a stretch zeroed, the end cut
off, a stretch written twice, or two stretches swapped. It is then judged in a process of its own, so that one which
dies is seen. Counted are *crashes* (the process died or hung), *tracebacks* (an exception that is no error of the
records), *false PASSes* (a gate, or the run, passes that does not without the damage) and *unexplained* changes (a
verdict of a gate or of the run changed, and no check fails that did not before). The last line on stdout is one JSON
object; the exit status is 1 where any of them is not 0.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

# The project may not be installed where this runs.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from analysis.records.tables import RecordError
from analysis.report import write_reports
from analysis.summary.summary import analyze

TIME_LIMIT_S = 120
FAULTS = ("crash", "traceback", "false PASS", "unexplained")
RECORDS = ("experiment.toml", "*.json", "trial-*/*.arrow", "trial-*/*.json")
# What judging writes, and what arms and load processes were told.
_NOT_RECORDS = ("summary.json", "generator.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What judging a run directory came to. `ended` is "judged", "refused" (one line), "traceback" or "crash"."""

    ended: str
    verdicts: dict[str, str] = field(default_factory=dict)  # of the run under "", and of each gate
    failed: frozenset[str] = frozenset()  # checks that failed
    detail: str = ""


# --- Damage -----------------------------------------------------------------------------------------------------------


def flip_one(content: bytearray, rng: random.Random) -> None:
    """One bit is the other way round."""
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def flip_twenty(content: bytearray, rng: random.Random) -> None:
    """Up to twenty bits are the other way round."""
    for _ in range(20):
        flip_one(content, rng)


def zero(content: bytearray, rng: random.Random) -> None:
    """A stretch of up to a third is zero, as after a power cut."""
    start, end = _stretch(content, rng)
    content[start:end] = bytes(end - start)


def cut(content: bytearray, rng: random.Random) -> None:
    """The end is gone, from anywhere or from the end of a line."""
    at = rng.randrange(len(content))
    line = content.find(b"\n", at)
    del content[line + 1 if line >= 0 and rng.random() < 0.5 else at :]


def repeat(content: bytearray, rng: random.Random) -> None:
    """A stretch is there twice."""
    start, end = _stretch(content, rng)
    content[end:end] = content[start:end]


def swap(content: bytearray, rng: random.Random) -> None:
    """Two neighbouring stretches have changed places."""
    start, end = _stretch(content, rng)
    later = min(len(content), end + max(1, end - start))
    content[start:later] = content[end:later] + content[start:end]


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (flip_one, flip_twenty, zero, cut, repeat, swap)

_MESSAGE = b"\xff\xff\xff\xff"


def _stretch(content: bytearray, rng: random.Random) -> tuple[int, int]:
    """Somewhere, at most a third of the whole; half the time on the borders of messages (batches) or lines."""
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.randint(1, max(1, len(content) // 3)))
    if rng.random() < 0.5:
        border = _MESSAGE if _MESSAGE in content else b"\n"
        start = max(0, content.rfind(border, 0, start + 1))
        later = content.find(border, end)
        end = later if later > start else end
    return start, end


# --- Judging ----------------------------------------------------------------------------------------------------------


def judged(directory: Path, *, reports: bool = False) -> Outcome:
    """What judging `directory` comes to, in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(TIME_LIMIT_S)
        with os.fdopen(writer, "wb") as out:
            pickle.dump(_judge(directory, reports=reports), out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        outcome = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) or not outcome:
        return Outcome(ended="crash", detail=f"status {status}")
    return cast("Outcome", pickle.loads(outcome))


def _judge(directory: Path, *, reports: bool) -> Outcome:
    try:
        summary = analyze(directory)
        if reports:
            write_reports(summary, directory)
    except (RecordError, OSError) as error:
        return Outcome(ended="refused" if len(str(error).splitlines()) == 1 else "traceback", detail=str(error))
    except BaseException:
        return Outcome(ended="traceback", detail=traceback.format_exc())
    verdicts = {f"{row['arm']}: {row['gate']}": row["verdict"] for row in summary["gates"]}
    failed = (row for row in summary["validity"] if not row["ok"] and row["reason"])
    return Outcome(
        ended="judged",
        verdicts={**verdicts, "": summary["overall"]},
        failed=frozenset(f"{row['check']} {row['arm']} {row['reason']}" for row in failed),
    )


def fault_of(whole: Outcome, damaged: Outcome) -> str | None:
    """Which of FAULTS the damage made, if any."""
    if damaged.ended in ("crash", "traceback"):
        return damaged.ended
    if damaged.ended == "refused":
        return None
    before, after = whole.verdicts, damaged.verdicts
    if any(verdict == "PASS" != before.get(name) for name, verdict in after.items()):
        return "false PASS"
    if after != before and not damaged.failed - whole.failed:
        return "unexplained"
    return None


def record_files(directory: Path) -> list[Path]:
    """The files of a run that judging rests on."""
    paths = {path for pattern in RECORDS for path in directory.glob(pattern)}
    return sorted(path for path in paths if path.name not in _NOT_RECORDS and path.stat().st_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One damage to one file and what came of it."""

    run: str
    file: str
    damage: str
    seed: int
    ended: str
    fault: str | None
    changed: bool
    detail: str


def attempts(runs: Sequence[Path], *, tries: int, seed: int, processes: int, reports: bool = False) -> Iterator[Try]:
    """`tries` damages over all `runs` in turn, each known by its seed."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(processes) as pool:
        wholes = {run: judged(run) for run in runs}
        for run, whole in wholes.items():
            if whole.ended != "judged":
                raise SystemExit(f"{run} cannot be judged as it is ({whole.detail}): give other runs")

        def attempt(number: int) -> Try:
            run = runs[number % len(runs)]
            rng = random.Random(seed * 1_000_003 + number)
            copy = Path(scratch) / str(number)
            shutil.copytree(run, copy, ignore=shutil.ignore_patterns("logs", "report.*", "compile-cache", "parity"))
            path = rng.choice(record_files(copy))
            damage = rng.choice(DAMAGES)
            content = bytearray(path.read_bytes())
            damage(content, rng)
            path.write_bytes(content)
            outcome = judged(copy, reports=reports)
            shutil.rmtree(copy)
            return Try(
                run=run.name,
                file=path.relative_to(copy).as_posix(),
                damage=damage.__name__,
                seed=number,
                ended=outcome.ended,
                fault=fault_of(wholes[run], outcome),
                changed=outcome.verdicts != wholes[run].verdicts,
                detail=outcome.detail,
            )

        yield from pool.map(attempt, range(tries))


def main() -> int:
    """Print one line a fault, and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--tries", type=int, default=3000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reports", action="store_true", help="write the reports too")
    options = parser.parse_args()
    faults: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    changed = done = 0
    runs = [path.resolve() for path in options.runs]
    for done, one in enumerate(
        attempts(runs, tries=options.tries, seed=options.seed, processes=options.processes, reports=options.reports), 1
    ):
        ends[one.ended] += 1
        changed += one.changed
        if one.fault:
            faults[one.fault] += 1
            print(f"{one.fault}: {one.run}/{one.file}, {one.damage}, try {one.seed}: {one.detail}")
        if done % 100 == 0:
            print(f"{done} of {options.tries}: {dict(faults) or 'no fault'}", file=sys.stderr, flush=True)
    counts = {name: faults[name] for name in FAULTS}
    print(json.dumps({"tries": done, "runs": len(runs), **counts, "ends": dict(ends), "verdicts changed": changed}))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
