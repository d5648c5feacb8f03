"""Short runs of every kind of arm and traffic: with a live page, split, encoders, external arms, and a ramp."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.records.schemas import STEPS
from tailgate.analysis.records.tables import read_table
from tailgate.analysis.summary.summary import analyze
from tailgate.loadtests.experiments.reading import from_table, to_table
from tailgate.loadtests.generator.record import SERVED_COLUMNS
from tailgate.loadtests.trials.live_page import live_page
from tailgate.loadtests.trials.run import Orchestrator
from tailgate.loadtests.trials.run_metrics import exporting
from tailgate.loadtests.trials.status import Status
from tailgate.servers.complaint import ConfigError
from tests.fakes.http_servers import DONE, HttpPeer, Request, answer, plain, said, scripted, usage
from tests.fakes.processes import wait_for
from tests.fakes.whole_run import (
    children_of_this_process,
    experiment,
    last_line,
    requests,
    run,
    summary_of,
    trial_facts,
    with_fake_arms,
)

STREAMED = answer(said("a"), said(" b", finish="length"), usage(2, 9), DONE)
SECRET = "s3cret-token"


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as page:
        return str(page.read().decode())


@pytest.mark.process
def test_a_mirrored_run_is_seen_on_its_live_page_and_by_prometheus(tmp_path: Path) -> None:
    status = Status()
    scraped: list[str] = []

    def scrape() -> None:
        wait_for(lambda: "splitter" in status.pages and status.load.finished > 0)
        scraped.append(get(f"http://127.0.0.1:{port}/metrics"))

    with exporting(status, "127.0.0.1:0") as port, ExitStack() as page:
        page.enter_context(live_page(status, 0, {"complete": True}))
        scraping = threading.Thread(target=scrape)
        scraping.start()
        outcome, _ = run(experiment(), tmp_path, status=status)
        scraping.join()
        last = get(f"http://127.0.0.1:{port}/metrics")
        (url,) = [note.removeprefix("live page: ") for note in status.notes if note.startswith("live page: ")]
        with urllib.request.urlopen(f"{url}events", timeout=60) as events:
            lines = iter(events)
            shown = json.loads(next(line for line in lines if line.startswith(b"data: "))[6:])
            page.close()
            ending = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")][-1]
    assert outcome.complete, outcome.error
    for words in ("tailgate_run_phase", "envoy_cluster_membership_healthy", 'replica="eager-0"', 'replica="naive-0"'):
        assert words in scraped[0]
    assert status.pages == {}
    answered = 'tailgate_load_requests_total{arm="naive",outcome="ok"}'
    (line,) = [line for line in last.splitlines() if line.startswith(answered)]
    assert float(line.split()[1]) == status.planned / 2 > 0
    assert [arm["name"] for arm in shown["run"]["arms"]] == ["eager", "naive"]
    assert shown["now"]["load"]["finished"] == shown["now"]["planned"] > 0
    assert any(event["phase"] == "serving" for event in shown["events"])
    assert shown["load"][-1]["arms"]["eager"]["ttft_p99_ms"] > 0
    assert shown["now"]["replicas"]["eager-0"]["text"] == "ready"
    assert shown["machines"]
    assert (ending["last"], ending["now"]["ended"]["complete"]) == (True, True)


@pytest.mark.process
def test_split_traffic_goes_by_weight_to_all_replicas_of_an_arm(tmp_path: Path) -> None:
    arms = [
        {"name": "eager", "preset": "eager", "control": True, "weight": 3, "replicas": 2},
        {"name": "naive", "preset": "compiled-naive", "weight": 1},
    ]
    what = experiment(arms=arms, traffic={"design": "split", "workers": 2, "rate": 30})
    outcome, _ = run(what, tmp_path)
    assert outcome.complete, outcome.error
    rows = requests(outcome.run_dir)
    assert len(rows) == trial_facts(outcome.run_dir)["planned"]["*"]
    assert {row["replica"] for row in rows} == {"eager-0", "eager-1", "naive-0"}
    assert 0.5 < sum(row["arm"] == "eager" for row in rows) / len(rows) < 0.95
    # The weights did not change, so there is no journal of them.
    assert not (outcome.run_dir / "weights.jsonl").exists()


@pytest.mark.process
def test_encoders_are_sent_texts_and_judged_by_their_vectors(tmp_path: Path) -> None:
    encoders = experiment(
        model={"id": "random:bert-tiny", "task": "embed"},
        engine={"max_prompt_tokens": 128, "max_new_tokens": 128},
        traffic={"design": "switchback"},
    )
    outcome, _ = run(encoders, tmp_path, "--token", "naive-0=6")
    assert outcome.complete, outcome.error
    rows = requests(outcome.run_dir)
    assert {row["arm"] for row in rows} == {"eager", "naive"}
    assert {row["status"] for row in rows} == {"OK"}
    assert {row["output_tokens"] for row in rows} == {row["first_token_ns"] for row in rows} == {None}
    steps = read_table(outcome.run_dir / "trial-01" / "steps.arrow", STEPS)[0].to_pylist()
    assert {step["kind"] for step in steps} == {"encode"}
    answers = {row["replica"]: row for row in trial_facts(outcome.run_dir)["answers"]["replicas"]}
    assert answers["eager-0"]["cosine"] == pytest.approx(1.0)
    assert answers["naive-0"]["cosine"] == pytest.approx(0.5403, abs=1e-4)  # the fake's vector turns by one radian
    summary = analyze(outcome.run_dir)
    assert [gate["verdict"] for gate in summary["gates"] if gate["gate"] == "parity"] == ["FAIL"]
    assert {row["metric"] for row in summary["comparisons"]} == {"e2e"}


def next_to_eager(*external: dict[str, Any], **tables: Any) -> Any:
    arms = [{"name": "eager", "preset": "eager", "control": True}]
    arms += [{"kind": "openai", "model_name": "llama", **arm} for arm in external]
    base = to_table(experiment(**tables))
    for table in ("splitter", "model", "engine"):
        del base[table]
    return from_table({**base, "compare_models": True, "arms": arms, "engine": {"max_new_tokens": 16}})


@pytest.mark.process
def test_external_arms_go_direct_and_their_failures_and_no_token_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children_of_this_process()
    monkeypatch.setenv("VLLM_TOKEN", SECRET)

    def failing(request: Request) -> bool | None:
        if len(bad.requests) > 8:
            return False  # the server is going down: at first it drops what it is asked
        if len(bad.requests) > 5:
            request.send(plain("401 No", b'{"error": {"message": "s3cret-token is not known"}}'))
        else:
            request.send(STREAMED if request.line.startswith("POST") else plain("200 OK"))
        return None

    with HttpPeer(scripted([STREAMED])) as good, HttpPeer(failing) as bad:
        twice = [good.address, good.address.replace("127.0.0.1", "localhost")]
        what = next_to_eager(
            {"name": "vllm", "address": twice}, {"name": "bad", "address": bad.address, "token_env": "VLLM_TOKEN"}
        )
        outcome, status = run(what, tmp_path)
    assert outcome.complete, outcome.error
    assert children_of_this_process() <= before
    facts, rows = trial_facts(outcome.run_dir), requests(outcome.run_dir)
    found = Counter((row["arm"], row["status"]) for row in rows)
    assert set(found) == {("eager", "OK"), ("vllm", "OK"), *(("bad", it) for it in ("OK", *FAILED))}
    assert found["eager", "OK"] == found["vllm", "OK"] == len(rows) / 3
    assert {row["replica"] for row in rows if row["status"] == "OK"} == {"eager-0", "vllm-0", "vllm-1", "bad-0"}
    theirs = [row for row in rows if row["arm"] == "vllm"]
    assert len({(row["pair_id"], row["scheduled_ns"]) for row in rows}) == len(theirs)
    assert {(row["prompt_tokens"], row["output_tokens"], len(row["token_ns"])) for row in theirs} == {(9, 2, 2)}
    assert {row[name] for row in theirs for name in SERVED_COLUMNS} == {None}
    assert all(row["first_token_ns"] == row["sent_ns"] + row["token_ns"][0] for row in theirs)
    assert {row["request_id"] for row in theirs} <= {request.headers.get("x-request-id") for request in good.requests}
    own, vllm, _ = facts["arms"]
    assert (own["kind"], vllm["kind"], "config" in vllm) == ("tailgate", "openai", False)
    assert vllm["external"]["address"] == ", ".join(twice)
    assert [probe["tokens"] for probe in vllm["probe"]] == [2, 2]
    assert set(facts["startup"]) == {"eager"}
    assert facts["deaths"] == []
    folder = outcome.run_dir / "trial-01"
    assert not (folder / "envoy.json").exists(), "with an external arm all requests go direct"
    assert {event["arm"] for event in read_table(folder / "steps.arrow", STEPS)[0].to_pylist()} == {"eager"}
    assert any("answered 2 of 8 tokens" in note for note in status.notes)
    assert any("HTTP 401: " in text and "*** is not known" in text for row in rows if (text := row["error"]))
    assert {request.headers["authorization"] for request in bad.requests} == {f"Bearer {SECRET}"}
    for path in outcome.run_dir.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path
    monkeypatch.delenv("VLLM_TOKEN")
    with pytest.raises(ConfigError, match="VLLM_TOKEN"):
        Orchestrator(what, out=tmp_path / "none").run()
    assert not (tmp_path / "none").exists()


FAILED = ("UNAUTHENTICATED", "UNAVAILABLE")
MODELS = plain("200 OK", b'{"data": [{"id": "llama", "max_model_len": 20}]}')


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ((plain("404 No", b'{"error": {"message": "no such model"}}'),), ("HTTP 404", "no such model")),
        ((plain("503 Busy", b"loading"),), ("1 s", "HTTP 503: loading")),
        ((MODELS, STREAMED), ("20 tokens", "engine.max_prompt_tokens", "engine.max_new_tokens")),
    ],
)
def test_an_external_arm_that_cannot_be_used_ends_the_run_before_anything_starts(
    replies: tuple[bytes, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    def script(request: Request) -> None:
        request.send(replies[-1] if request.line.startswith("POST") else replies[0])

    with HttpPeer(script) as peer:
        what = next_to_eager({"name": "vllm", "address": peer.address}, trials={"ready_timeout_s": 1})
        outcome, _ = run(what, tmp_path)
    assert not outcome.complete
    assert outcome.error is not None
    for word in ('arm "vllm"', peer.address, *words):
        assert word in outcome.error
    logs = {path.name for path in (outcome.run_dir / "trial-01" / "logs").iterdir()}
    assert logs == {"watcher.log"}  # the machines are watched before anything starts on them
    assert sum(request.line.startswith("POST") for request in peer.requests) <= 2  # no traffic


@pytest.fixture(scope="session")
def taken_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a ramp whose naive candidate recompiled in the first step."""
    folder = tmp_path_factory.mktemp("ramp")
    settings = ["ramp.candidate=compiled-naive", "ramp.steps=[10,50,100]", "traffic.block_s=1", "traffic.rate=40"]
    settings += ["gates.cold_s=1", "trials.starting_at_once=2"]
    flags = [word for setting in settings for word in ("--set", setting)]
    done = with_fake_arms(["ramp", "demo", "--set", "seed=3", "--at-most", "60s", "--out", "out", *flags], folder)
    line = last_line(done)
    assert (line["verdict"], line["exit_code"], done.returncode) == ("FAIL", 99, 99), done.stderr
    return folder / str(line["run_dir"])


def changes(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run_dir / "weights.jsonl").read_text().splitlines()]


@pytest.mark.process
@pytest.mark.xdist_group("ramp")
def test_a_candidate_that_recompiles_is_taken_back_in_its_first_step(taken_back: Path) -> None:
    rows = changes(taken_back)
    assert [row["action"] for row in rows] == ["start", "start", "rollback", "rollback"]
    assert [row["weights"]["compiled-naive"] for row in rows] == [1000, 1000, 0, 0]
    assert rows[-1]["done_ns"] > rows[-1]["at_ns"] >= rows[-1]["cause_ns"]
    ramp = summary_of(taken_back)["ramp"]
    assert (ramp["outcome"], ramp["candidate"]) == ("rollback", "compiled-naive")
    assert 0 < ramp["hurt"] <= ramp["exposed"]


@pytest.mark.process
@pytest.mark.xdist_group("ramp")
def test_after_a_rollback_the_control_alone_answers_and_no_stream_is_dropped(taken_back: Path) -> None:
    back_ns = changes(taken_back)[-1]["done_ns"]
    rows = requests(taken_back)
    assert {row["status"] for row in rows} == {"OK"}
    assert {row["arm"] for row in rows if row["sent_ns"] > back_ns} == {"eager"}
    assert {row["arm"] for row in rows if row["sent_ns"] < back_ns} == {"eager", "compiled-naive"}
