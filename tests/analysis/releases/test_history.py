"""A folder of earlier runs: which of them is compared, which are its repeats, and which tell nothing."""

import copy
import json
import random
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.records.documents import write_document
from analysis.records.tables import RecordError
from analysis.releases.comparison import arms_to_compare, compare_releases
from analysis.releases.conditions import departures, obstacles
from analysis.releases.history import History, accept, before, by_time, days, read_history
from analysis.releases.release import Release, read_release
from analysis.report.release import release_html, release_junit, release_markdown, release_table
from analysis.settings.release_limits import ReleaseLimits
from tests.fakes.releases import DAY_NS, Build, release

ARMS = {"compiled": "compiled"}
COMMITTED = Build(environment={"machine": "0123456789ab", "git_commit": "4b1f0c6e", "versions": {"torch": "2.11"}})


def history(*releases: Release) -> History:
    return History(releases=by_time(releases))


def test_record_holds_all_that_a_comparison_reads(tmp_path: Path) -> None:
    build = Build(luck=None, cache={"hit": 2.0, "miss": 1.0}, doubts=("generator lag",), counts={"recompiles": [1, 0]})
    kept = release(build, day=3, seed=1)
    assert read_release(accept(kept, tmp_path / "new")) == kept


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kind": "other"}, "no record"),
        ({"schema": 9}, "schema 9"),
        *(
            ({"arms": {"compiled": {"figures": {"p99_e2e_ms": rows}}}}, "p99_e2e_ms")
            for rows in ([[1, "fast", None, None]], [3.0], [[1, 300.0, 0.1, 0]], [[1, 300.0, 0.1, -3]])
        ),
        ({"created_ns": 1e30}, "1e.30"),
        ({"created_ns": None}, "None"),
    ],
)
def test_a_document_that_is_no_record_is_refused_in_one_line(change, expected, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_document(path, release(Build(), day=0, seed=1).to_dict() | change)
    with pytest.raises(RecordError, match=expected) as refused:
        read_release(path)
    assert "\n" not in str(refused.value)
    path.write_text(json.dumps(release(Build(), day=0, seed=1).to_dict()))
    with pytest.raises(RecordError, match="no checksum"):
        read_release(path)


JUNK = (None, True, -1, 1e300, "", "x" * 300, [], [[]], {}, {"": None}, [[1, 2, 3, 4]], [["a", 1, None, None]])


def junked(value: Any, rng: random.Random) -> Any:
    """The value with one of its parts replaced by something else."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return rng.choice(JUNK)
    copied = copy.copy(value)
    place = rng.choice(list(copied) if isinstance(copied, dict) else range(len(copied)))
    copied[place] = junked(copied[place], rng)
    return copied


@pytest.mark.parametrize("seed", range(12))
def test_record_with_anything_in_it_is_compared_or_refused_in_words(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    kept = json.loads(json.dumps(release(COMMITTED, day=0, seed=1).to_dict()))
    path = tmp_path / "record.json"
    for _ in range(2):
        key = rng.choice(["arms", "arms", "arms", "conditions", "environment", "run_id", "trials", "created_ns"])
        kept[key] = junked(kept[key], rng)
    write_document(path, kept)
    candidate = release(COMMITTED, day=1, seed=1)
    try:
        read = read_history(path)
        arms = arms_to_compare(read.newest, candidate)
        document = compare_releases(read, candidate, arms=arms, limits=ReleaseLimits())
    except RecordError:
        return
    json.dumps(document, allow_nan=False)
    for show in (release_html, release_markdown, release_table):
        assert show(document)
    ET.fromstring(release_junit(document))


def test_newest_before_the_candidate_is_the_baseline() -> None:
    runs = [release(Build(), day=day, seed=1) for day in (4, 0, 2, 9)]
    candidate = release(Build(), day=5, seed=1)
    earlier = before(history(*runs, candidate), candidate)
    assert [item.run_id for item in earlier.releases] == ["run-1-0", "run-1-2", "run-1-4"]


def test_runs_under_other_conditions_tell_nothing() -> None:
    other = replace(Build(), conditions={"traffic": {"rate": 8.0}, "slo": []})
    runs = history(release(other, day=0, seed=1), release(Build(), day=1, seed=1))
    candidate = release(Build(), day=2, seed=1)
    assert [item.run_id for item in runs.alike(candidate, ARMS)] == ["run-1-1"]
    document = compare_releases(runs, candidate, arms=ARMS, limits=ReleaseLimits())
    assert "1 earlier run had other arms, traffic, model or objectives" in " ".join(document["notes"])


def test_repeats_of_the_newest_build_share_out_its_spread() -> None:
    earlier = [release(COMMITTED, day=day, seed=1) for day in range(5)]
    spreads = []
    for runs in (earlier, earlier[-1:]):
        document = compare_releases(
            history(*runs), release(COMMITTED, day=5, seed=1), arms=ARMS, limits=ReleaseLimits()
        )
        assert len(document["baseline"]["runs"]) == len(runs)
        spreads += [row["spread"] for row in document["figures"] if row["figure"] == "process_peak_bytes"]
    assert spreads[0] < 0.8 * spreads[1]


def test_runs_at_one_time_on_one_machine_had_one_day() -> None:
    beside = [release(COMMITTED, day=0, seed=seed) for seed in (1, 2)]
    elsewhere = release(replace(COMMITTED, environment={"machine": "ba9876543210"}), day=0, seed=3)
    later = release(COMMITTED, day=1, seed=4)
    assert sorted(map(len, days([later, elsewhere, *beside]))) == [1, 1, 2]
    assert tuple(beside) in days([later, elsewhere, *beside])
    nothing_known = replace(beside[0], starts_ns=())
    assert days([nothing_known, beside[1]]) == [(nothing_known,), (beside[1],)]


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {**COMMITTED.environment, "git_commit": "ffffffff"}},
        {"environment": {**COMMITTED.environment, "versions": {"torch": "2.12"}}},
        {"config": {**COMMITTED.config, "engine": {"slots": 16}}},
        {"doubts": ("generator lag",)},
    ],
)
def test_another_build_or_a_doubtful_run_is_no_repeat(changes) -> None:
    runs = history(release(replace(COMMITTED, **changes), day=0, seed=1), release(COMMITTED, day=1, seed=1))
    candidate = release(COMMITTED, day=2, seed=1)
    assert [item.run_id for item in runs.repeats(ARMS, runs.alike(candidate, ARMS))] == ["run-1-1"]


@pytest.mark.parametrize("commit", [None, "4b1f0c6e+changes"])
def test_build_of_unknown_or_changed_code_has_no_repeats(commit) -> None:
    build = replace(COMMITTED, environment={**COMMITTED.environment, "git_commit": commit})
    runs = history(release(build, day=0, seed=1), release(build, day=1, seed=1))
    assert len(runs.repeats(ARMS, runs.releases)) == 1


def test_what_may_be_the_cause_is_listed() -> None:
    one = release(COMMITTED, day=0, seed=1)
    two = release(
        replace(
            COMMITTED,
            trials=6,
            environment={**COMMITTED.environment, "machine": "ba9876543210"},
            config={**COMMITTED.config, "compile": {"mode": "max-autotune"}},
        ),
        day=1,
        seed=1,
    )
    assert [item.text for item in departures(one, two, ARMS)] == [
        "machine 0123456789ab → ba9876543210",
        "compiled.compile.mode none → max-autotune",
        "trials 4 → 6",
    ]


def test_file_that_is_no_record_in_a_folder_is_named(tmp_path: Path) -> None:
    accept(release(Build(), day=0, seed=1), tmp_path)
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "compare.toml").write_text("")
    read = read_history(tmp_path)
    assert len(read.releases) == 1
    assert len(read.unread) == 1
    assert "notes.json" in read.unread[0]


def test_copy_of_a_run_under_another_name_is_the_same_run(tmp_path: Path) -> None:
    one = release(Build(), day=1, seed=1)
    copied = replace(one, run_id="copy")
    part = replace(copied, starts_ns=one.starts_ns[1:], created_ns=one.created_ns + DAY_NS)
    for other in (copied, part):
        with pytest.raises(RecordError, match="run-1-1 and copy hold the same trial"):
            compare_releases(history(one), other, arms=ARMS, limits=ReleaseLimits())
    assert not before(history(one), copied).releases
    for name, item in (("one", one), ("copy", copied)):
        write_document(tmp_path / f"{name}.json", item.to_dict())
    assert len(read_history(tmp_path).releases) == 1


def test_other_number_of_replicas_is_an_obstacle() -> None:
    one, three = (
        release(replace(COMMITTED, config={**COMMITTED.config, "replicas": count}), day=count, seed=1)
        for count in (1, 3)
    )
    assert [item.text for item in obstacles(one, three, ARMS)] == ["compiled.replicas 1 → 3"]
    assert obstacles(release(COMMITTED, day=0, seed=1), three, ARMS) == []
