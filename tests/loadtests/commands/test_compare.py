"""`tailgate compare`: two runs, or a folder of earlier ones and a run, from the records to exit code and reports."""

import functools
import hashlib
import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.records.run_list import RunList, write_run_list
from analysis.releases.release import read_release
from loadtests.commands.main import main
from tests.fakes.beds import referenced
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

MEMORY = {"process_peak": 600_000_000, "device_peak": 1 << 30}
COMPILED = FakeArm(name="compiled", ratio=0.8, memory_bytes=MEMORY)
RUN = FakeRun(
    arms=(EAGER, COMPILED),
    trials=4,
    duration_s=240,
    rate=3.0,
    drift=0.03,
    start_spread=0.01,
    gates={"draws": 99},
    slo={"p99_e2e_ms": 5000},
    bed=referenced(python_ms=10.0, read_gb_per_s=20.0),
    environment={"machine": "0123456789ab", "versions": {"torch": "2.11"}},
)
LATER = replace(RUN, seed=2, day=7, environment={"machine": "0123456789ab", "versions": {"torch": "2.12"}})

SHORT = replace(RUN, duration_s=60, trials=2)
RELEASE = functools.cache(read_release)
FOLDER: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _runs_are_written_and_read_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    FOLDER[:] = [tmp_path_factory.mktemp("compared")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loadtests.commands.compare.read_release", RELEASE)
        patch.setattr("analysis.releases.history.read_release", RELEASE)
        yield


def made(name: str, run: FakeRun) -> Path:
    """Write `run` once into a folder called `name`."""
    path = FOLDER[0] / hashlib.sha256(repr(run).encode()).hexdigest()[:12] / name
    return path if path.exists() else write_run(path, run)


def with_arm(run: FakeRun, **changes: object) -> FakeRun:
    return replace(run, arms=(EAGER, replace(COMPILED, **changes)))


@pytest.fixture
def baseline() -> Path:
    return made("last-week", RUN)


def compare(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict, str]:
    code = main(["compare", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out.splitlines()[-1]), out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    code = main(["compare", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err


def test_equal_run_of_another_day_does_not_fail(tmp_path: Path, baseline: Path, capsys) -> None:
    later = made("this-week", LATER)
    code, line, out = compare(capsys, baseline, later)
    assert (code, line["verdict"]) == (3, "INCONCLUSIVE"), "four trials do not bound every figure"
    assert "versions.torch 2.11 → 2.12" in out
    figures = json.loads((later / "compare.json").read_text())["figures"]
    verdicts = {row["verdict"] for row in figures if row["arm"] == "compiled"}
    assert "PASS" in verdicts
    assert "FAIL" not in verdicts


def test_slower_decode_fails_with_reports_beside_the_candidate(tmp_path: Path, baseline: Path, capsys) -> None:
    later = made("this-week", with_arm(LATER, decode=1.15))
    code, line, out = compare(capsys, baseline, later, "--arm", "compiled")
    assert (code, line["verdict"], line["arms"]) == (99, "FAIL", {"compiled": "FAIL"})
    assert "decode time (p50 TPOT)" in out
    document = json.loads((later / "compare.json").read_text())
    assert document["overall"] == "FAIL"
    suites = ET.parse(later / "compare.xml").getroot()
    (suite,) = suites
    assert int(suite.get("failures", "0")) >= 1
    assert "decode time (p50 TPOT)" in [case.get("name") for case in suite if case.find("failure") is not None]


def test_more_memory_fails_by_itself(baseline: Path, capsys) -> None:
    later = made("fat", with_arm(LATER, memory_bytes={**MEMORY, "process_peak": 780_000_000}))
    _, _, out = compare(capsys, baseline, later, "--json")
    judged = {(row["arm"], row["figure"]): row["verdict"] for row in json.loads(out)["figures"]}
    assert judged[("compiled", "process_peak_bytes")] == "FAIL"
    assert judged[("compiled", "device_peak_bytes")] == "PASS"


def test_a_new_recompile_fails(baseline: Path, capsys) -> None:
    later = made("naive", with_arm(LATER, compiles=(Compile(at_s=100.0, seconds=2.0),)))
    code, line, _ = compare(capsys, baseline, later)
    assert (code, line["arms"]["compiled"]) == (99, "FAIL")


def test_other_traffic_or_objectives_are_refused_with_a_list(tmp_path: Path, baseline: Path, capsys) -> None:
    other = made("other", replace(LATER, slo={"p99_e2e_ms": 4000}, ignore_eos=True))
    message = refusal(capsys, baseline, other)
    assert "traffic.ignore_eos False → True" in message
    assert "p99_e2e_ms <= 5000 → p99_e2e_ms <= 4000" in message
    assert "run both with one experiment" in message


def test_other_model_is_refused(tmp_path: Path, baseline: Path, capsys) -> None:
    other = with_arm(LATER, config={"model": {"id": "random:small", "dtype": "float32"}})
    assert "compiled.model.id random:tiny → random:small" in refusal(capsys, baseline, made("other", other))


def test_run_is_not_compared_with_itself(baseline: Path, capsys) -> None:
    assert "is the baseline and the candidate" in refusal(capsys, baseline, baseline)


# --- A folder of baselines --------------------------------------------------------------------------------------------


def test_accepted_runs_are_kept_small_and_the_newest_is_compared(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "baselines" / "main"
    code, line, _ = compare(capsys, folder, made("one", SHORT), "--accept")
    assert (code, line["verdict"]) == (3, "INCONCLUSIVE")
    kept = Path(line["kept"])
    assert kept.parent == folder
    assert kept.stat().st_size < 64_000
    code, line, _ = compare(capsys, folder, made("two", replace(SHORT, seed=2, day=7)), "--accept")
    assert code in (0, 3)
    assert [path.stem for path in sorted(folder.iterdir())] == ["one", "two"]
    third = made("three", replace(SHORT, seed=3, day=14))
    _, _, out = compare(capsys, folder, third, "--json")
    document = json.loads(out)
    assert document["baseline"]["run_id"] == "two"
    assert [run["run_id"] for run in document["history"]] == ["one", "two"]
    points = next(item for item in document["trends"] if item["figure"] == "p50_tpot_ms")["points"]
    assert [point["run_id"] for point in points] == ["one", "two", "three"]


def test_record_says_what_its_run_said(tmp_path: Path, baseline: Path, capsys) -> None:
    folder = tmp_path / "baselines"
    compare(capsys, folder, baseline, "--accept")
    later = made("this-week", with_arm(LATER, decode=1.15))
    _, _, from_record = compare(capsys, folder / "last-week.json", later, "--json")
    _, _, from_run = compare(capsys, baseline, later, "--json")
    assert json.loads(from_record) == json.loads(from_run)


def test_failed_run_is_kept_by_force_alone(tmp_path: Path, baseline: Path, capsys) -> None:
    folder = tmp_path / "baselines"
    compare(capsys, folder, baseline, "--accept")
    later = made("this-week", with_arm(LATER, decode=1.15))
    code, line, out = compare(capsys, folder, later, "--accept")
    assert (code, line["kept"]) == (99, None)
    assert "--force" in out
    code, line, _ = compare(capsys, folder, later, "--accept", "--force")
    assert code == 99
    assert Path(line["kept"]).exists()


def test_damaged_record_is_named_and_left_out(tmp_path: Path, baseline: Path, capsys) -> None:
    folder = tmp_path / "baselines"
    compare(capsys, folder, baseline, "--accept")
    broken = folder / "zzz.json"
    broken.write_text((folder / "last-week.json").read_text().replace("600000000", "500000000"))
    later = made("this-week", LATER)
    _, _, out = compare(capsys, folder, later)
    assert "zzz.json is not as it was written" in out.replace("\n", " ")
    assert "not as it was written" in refusal(capsys, broken, later)


def test_folder_of_run_directories_is_a_history_too(tmp_path: Path, capsys) -> None:
    for day in range(2):
        write_run(tmp_path / "runs" / f"day-{day}", replace(SHORT, day=day, seed=day + 10))
    _, _, out = compare(capsys, tmp_path / "runs", made("new", replace(SHORT, day=7)), "--json")
    assert [run["run_id"] for run in json.loads(out)["history"]] == ["day-0", "day-1"]


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_limits_come_from_the_folder_or_the_file(tmp_path: Path, baseline: Path, capsys) -> None:
    folder = tmp_path / "baselines"
    compare(capsys, folder, baseline, "--accept")
    later = made("this-week", with_arm(LATER, decode=1.15))
    (folder / "compare.toml").write_text("[compare.limits]\np50_tpot_ms = 0.5\np99_e2e_ms = false\n")
    code, _, out = compare(capsys, folder, later, "--json")
    judged = {row["figure"]: row for row in json.loads(out)["figures"] if row["arm"] == "compiled"}
    assert judged["p50_tpot_ms"]["verdict"] == "PASS"
    assert judged["p99_e2e_ms"]["verdict"] is None
    strict = tmp_path / "strict.toml"
    strict.write_text("[compare.limits]\np50_tpot_ms = 0.03\n")
    code, _, _ = compare(capsys, folder, later, "--limits", strict)
    assert code == 99


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[compare]\nalpha = 2\n", "compare.alpha is 2: give a value from 0.0001 to 0.5"),
        ("[compare]\nspeed = 2\n", "compare.speed is unknown"),
        ("[compare.limits]\nspeed = 0.1\n", "compare.limits.speed is unknown: use p50_ttft_ms"),
        ("[compare.limits]\ngood_pct = 1.5\n", "give a share below 1"),
        ("[compare.limits]\np99_e2e_ms = true\n", "give a share such as 0.1, or false"),
        ('[compare.limits]\np99_e2e_ms = "5%"\n', "give a number"),
        ("[compare]\nneed_references = 1\n", "use true or false"),
        ("[gates]\nmargin = 1\n", "it takes a table [compare]"),
        ("[compare\n", "limits.toml"),
    ],
)
def test_limits_that_cannot_be_used_are_refused(text, expected, tmp_path: Path, baseline: Path, capsys) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text(text)
    assert expected in refusal(capsys, baseline, baseline, "--limits", limits)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["none", "{run}"], "none does not exist"),
        (["{run}", "none"], "none is no run directory and no record"),
        (["{empty}", "{run}"], "holds no run from before last-week: keep a first one with --accept"),
        (["{run}", "{run}", "--accept"], "give a folder of baselines"),
        (["{empty}", "{run}", "--force"], "add --accept"),
        (["{run}", "{run}", "--limits", "none.toml"], "none.toml: cannot be read"),
        (["{run}", "{run}", "--limits", ""], "--limits is empty"),
        (["{run}", "{run}", "--out", ""], "--out is empty"),
        (["", "{run}"], "BASELINE is empty"),
        (["{run}", ""], "CANDIDATE is empty"),
        (["{run}", "{run}", "--arm", "eager="], '--arm "eager=" lacks a name'),
        (["{run}", "{run}", "--arm", "=eager"], '--arm "=eager" lacks a name'),
        (["{run}", "{run}", "--arm", ""], '--arm "" lacks a name'),
        (["/dev/null", "{run}"], "/dev/null is no run directory and no record"),
        (["{run}", "/dev/null"], "/dev/null is no run directory and no record"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, expected, tmp_path: Path, baseline: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    given = [word.format(run=baseline, empty=tmp_path / "empty") for word in arguments]
    assert expected in refusal(capsys, *given)


def test_reports_that_cannot_be_written_are_said_in_a_line(tmp_path: Path, baseline: Path, capsys) -> None:
    later = made("this-week", LATER)
    said = refusal(capsys, baseline, later, "--out", "/proc/reports")
    assert "give a folder that can be written as --out" in said


class TestBeforeRunsAreRead:
    """A folder that cannot be written is said before the minutes that reading may take."""

    @pytest.fixture(autouse=True)
    def unread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loadtests.commands.compare.read_release", lambda path: pytest.fail(f"{path} was read"))

    @pytest.mark.parametrize("place", ["experiment.toml", "experiment.toml/within"])
    def test_a_file_is_no_folder_for_reports(self, place: str, tmp_path: Path, baseline: Path, capsys) -> None:
        later = made("this-week", LATER)
        experiment = (baseline / "experiment.toml").read_text()
        said = refusal(capsys, baseline, later, "--out", str(baseline / place))
        assert f'--out "{baseline / place}" cannot be made ("{baseline / "experiment.toml"}" is no folder)' in said
        assert (baseline / "experiment.toml").read_text() == experiment

    def test_the_candidates_own(self, tmp_path: Path, baseline: Path, capsys, monkeypatch) -> None:
        monkeypatch.setattr("os.access", lambda path, mode: False)
        later = made("this-week", LATER)
        assert f'--out "{later}" is not writable: give a folder that is' in refusal(capsys, baseline, later)

    def test_the_one_that_accepted_runs_are_kept_in(self, tmp_path: Path, baseline: Path, capsys, monkeypatch) -> None:
        later = made("this-week", LATER)
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) == later)
        said = refusal(capsys, tmp_path / "baselines" / "new", later, "--accept")
        assert f'BASELINE "{tmp_path}" is not writable: give a folder that is' in said
        assert not (tmp_path / "baselines").exists()


def test_record_that_cannot_be_kept_is_said_in_a_line(tmp_path: Path, baseline: Path, capsys) -> None:
    later = made("this-week", LATER)
    (tmp_path / "baselines" / "this-week.json").mkdir(parents=True)
    assert "write" in refusal(capsys, tmp_path / "baselines", later, "--accept")


@pytest.mark.parametrize("accept", [[], ["--accept"]])
def test_folder_that_joins_runs_is_neither_baseline_nor_candidate(
    accept, tmp_path: Path, baseline: Path, capsys
) -> None:
    joined = tmp_path / "joined"
    write_run_list(joined, RunList(directories=(baseline, made("more", LATER))))
    before = sorted(joined.iterdir())
    assert f"{joined} joins runs" in refusal(capsys, joined, baseline, *accept)
    assert f"{joined} joins runs" in refusal(capsys, tmp_path / "folder", joined, *accept)
    assert sorted(joined.iterdir()) == before


def test_renamed_copy_of_the_baseline_is_no_candidate(tmp_path: Path, baseline: Path, capsys) -> None:
    copied = Path(shutil.copytree(baseline, tmp_path / "copy"))
    assert "last-week and copy hold the same trial" in refusal(capsys, baseline, copied)
