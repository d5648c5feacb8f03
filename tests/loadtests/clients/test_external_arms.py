"""One schedule to arms of several kinds: what each gets, which replica it goes to, and what is recorded."""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import gevent
import pytest

from loadtests.clients.external_arms import external_route
from loadtests.clients.own_arms import OwnEncoder
from loadtests.clients.route import Lane, Route
from loadtests.external.addresses import ExternalConfig, OipOptions, OpenAiOptions
from loadtests.generator.generator import Generator
from loadtests.generator.load_log import LoadLog
from loadtests.generator.record import RequestRecord
from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.prompt_words import prompt_words, token_ids
from loadtests.traffic.prompts import PromptSource
from loadtests.traffic.schedule import PlannedRequest
from servers.clock import now_ns
from servers.fields import ConfigError
from servers.rpc.inference_pb2 import GenerateRequest
from servers.rpc.oip_pb2 import ModelInferRequest
from tests.fakes.http1 import DONE, HttpPeer, Request, answer, plain, said, scripted, usage
from tests.fakes.inference import Behaviour, ServedFake, serve
from tests.loadtests.generator.test_generator import schedule

GOOD = answer(said("a"), said(" b"), said(" c", finish="length"), usage(3, 21), DONE)


def plan(**change: Any) -> PlannedRequest:
    row: dict[str, Any] = {
        **{"index": 7, "offset_ns": 0, "session_id": "s-1", "turn": 0, "prompt_tokens": 12, "max_tokens": 5},
        **{"prompt_seed": 3, "arm": "*", "phase": "measure", "prefix_seed": 11},
    }
    return PlannedRequest(**{**row, **change})


def config(kind: Any, *addresses: str, **settings: Any) -> ExternalConfig:
    return ExternalConfig(kind=kind, addresses=addresses, model_name="llama", vocab_size=100, **settings)


def body(
    external: ExternalConfig, plan: PlannedRequest, *, whole: bool = True, traffic: Any = None
) -> tuple[Any, bytes]:
    route = external_route("x", external, traffic=traffic or PromptSource(vocab_size=100), ignore_eos=whole)
    return route.encode(plan, "1-7-x", "x")


def test_copies_for_own_arms_share_their_prompt_and_differ_in_id_and_arm() -> None:
    asked: list[int] = []

    def ids(plan: PlannedRequest) -> list[int]:
        asked.append(plan.index)
        return [5, 6, 7]

    encode, one = OwnEncoder(ids, ignore_eos=True), plan()
    copies = [encode(one, f"1-7-{arm}", arm) for arm in ("eager", "compiled")]
    encode(plan(index=8), "1-8", None)
    assert asked == [7, 8]
    first, second = (GenerateRequest.FromString(content) for content, _ in copies)
    assert (first.request_id, second.request_id) == ("1-7-eager", "1-7-compiled")
    assert list(first.token_ids.ids) == [5, 6, 7]
    assert b"compiled" in copies[1][1]
    assert b"x-tailgate-session" in copies[1][1]


def test_prompt_as_token_ids_is_the_one_that_own_arms_get() -> None:
    external = config("openai", "http://a/v1", openai=OpenAiOptions(prompt="token_ids"))
    content, headers = body(external, plan())
    assert json.loads(content)["prompt"] == token_ids(prompt_words(11, 12), 100)
    assert headers == b"X-Request-Id: 1-7-x\r\n"


def test_words_stand_in_for_a_tokenizer_that_is_not_at_hand() -> None:
    external = config("openai", "http://a/v1")
    sent, longer = (json.loads(body(external, plan(prompt_tokens=size))[0]) for size in (12, 20))
    assert len(sent["prompt"].split()) == 12
    assert longer["prompt"].startswith(sent["prompt"])  # a session's prompts grow
    assert (sent["model"], sent["max_tokens"], sent["seed"]) == ("llama", 5, 3)
    chat = json.loads(body(config("openai", "http://a/v1", openai=OpenAiOptions(endpoint="chat")), plan())[0])
    assert chat["messages"] == [{"role": "user", "content": sent["prompt"]}]


def test_exact_length_is_asked_for_only_when_the_traffic_wants_it() -> None:
    external = config("openai", "http://a/v1", openai=OpenAiOptions(length_fields=("min_tokens",)))
    assert json.loads(body(external, plan())[0])["min_tokens"] == 5
    assert "min_tokens" not in json.loads(body(external, plan(), whole=False)[0])


def test_inference_request_carries_text_or_ids() -> None:
    content, headers = body(config("oip", "a:1"), plan())
    sent = ModelInferRequest.FromString(content)
    assert (sent.model_name, sent.id, headers) == ("llama", "1-7-x", b"")
    assert len(sent.inputs[0].contents.bytes_contents[0].split()) == 12
    ids = config("oip", "a:1", oip=OipOptions(prompt="token_ids", prompt_tensor="input_ids"))
    assert list(ModelInferRequest.FromString(body(ids, plan())[0]).inputs[0].contents.int_contents) == (
        token_ids(prompt_words(11, 12), 100)
    )


def test_prompts_that_only_ids_can_carry_are_refused_as_text() -> None:
    with pytest.raises(ConfigError, match='set prompt = "token_ids"'):
        body(config("openai", "http://a/v1"), plan(token_ids=[5, 6]))
    with pytest.raises(ConfigError, match=r'prompts is "chat" and an external arm takes plain text'):
        body(config("oip", "a:1"), plan(), traffic=PromptSource(kind="chat"))


class _Nobody:
    def connect(self, timeout_s: float | None = None) -> str:
        return ""


def test_replica_with_the_fewest_requests_is_next_and_equals_take_turns() -> None:
    lanes = [Lane(_Nobody(), str(number)) for number in range(3)]  # type: ignore[arg-type]
    route = Route(lambda *_: (b"", b""), lanes)
    assert Counter(route.lane().replica for _ in range(30)) == {"0": 10, "1": 10, "2": 10}
    lanes[0].running, lanes[2].running = 2, 1
    assert {route.lane().replica for _ in range(5)} == {"1"}


# --- Through the generator --------------------------------------------------------------------------------------------


def run(settings: dict[str, Any], offsets_ms: list[int], *, arm: str = "*") -> tuple[list[RequestRecord], bool]:
    trial = TrialConfig(**{"arms": ("eager", "vllm"), "drain_s": 10.0, "timeout_s": 5.0, **settings})
    log = LoadLog(None, worker=0, planned=len(offsets_ms), arms=trial.arms)
    records: list[RequestRecord] = []
    generator = Generator(trial, log=log, on_record=records.append)
    generator.load(schedule(offsets_ms, arm=arm, tokens=3))
    generator.connect()
    gc.freeze()  # the generator collects garbage before it starts, which takes long in a process full of imports
    ended = generator.run(now_ns() + 50_000_000)
    generator.stop()
    assert generator.failure is None
    return records, ended


@pytest.fixture(scope="module")
def eager() -> Iterator[ServedFake]:
    with serve(Behaviour(arm="eager")) as served:
        yield served


def test_own_and_external_arms_are_recorded_alike(eager: ServedFake) -> None:
    with HttpPeer(scripted([GOOD])) as peer:
        external = {"vllm": config("openai", peer.address)}
        records, ended = run({"targets": {"eager": eager.target}, "external": external}, list(range(0, 200, 10)))
    assert ended
    assert Counter((record.arm, record.status, record.replica) for record in records) == {
        ("eager", "OK", "eager-0"): 20,
        ("vllm", "OK", "vllm-0"): 20,
    }
    pairs = {(record.pair_id, record.scheduled_ns) for record in records}
    assert len(pairs) == 20
    theirs = [record for record in records if record.arm == "vllm"]
    assert {(record.prompt_tokens, record.output_tokens, len(record.token_ns)) for record in theirs} == {(21, 3, 3)}
    assert all(set(record.served) == {None} for record in theirs)
    assert all(record.first_token_ns == record.sent_ns + record.token_ns[0] for record in theirs)
    assert {request.headers["x-request-id"] for request in peer.requests} == {
        record.request_id for record in records if record.arm == "vllm"
    }


def test_slow_external_arm_is_no_reason_to_wait() -> None:
    def script(request: Request) -> None:
        time.sleep(0.4)
        request.send(GOOD)

    with HttpPeer(script) as peer:
        records, _ = run({"arms": ("vllm",), "external": {"vllm": config("openai", peer.address)}}, [0, 20, 40, 60])
    assert all(record.ok and record.ttft_ms is not None and record.ttft_ms >= 390 for record in records)
    assert max(record.sent_ns - record.scheduled_ns for record in records) < 350_000_000


def test_replicas_share_the_load_and_a_dead_one_shows_in_the_errors() -> None:
    with HttpPeer(scripted([GOOD])) as one, HttpPeer(scripted([plain("503 Busy", b"full")])) as other:
        external = {"vllm": config("openai", one.address, other.address)}
        records, _ = run({"arms": ("vllm",), "external": external}, list(range(0, 200, 10)))
    told = Counter((record.replica, record.status, record.error) for record in records)
    # It fails at once and so is always the least busy: it must not draw the whole load.
    assert 1 <= told[("vllm-1", "UNAVAILABLE", "HTTP 503: full")] <= 4
    assert told[("vllm-0", "OK", None)] == 20 - told[("vllm-1", "UNAVAILABLE", "HTTP 503: full")]


def test_own_replicas_are_balanced_without_a_splitter(eager: ServedFake) -> None:
    with serve(Behaviour(arm="eager", replica="eager-1")) as second:
        target = f"{eager.target},{second.target}"
        records, _ = run({"arms": ("eager",), "targets": {"eager": target}}, list(range(0, 200, 10)))
    served = Counter(record.replica for record in records)
    assert served.total() == 20
    # The one with fewer requests on its way gets the next: on a busy machine an answer may come late.
    assert min(served["eager-0"], served["eager-1"]) >= 7


def test_cap_holds_for_external_arms() -> None:
    most = [0, 0]

    def script(request: Request) -> None:
        most[0] += 1
        most[1] = max(most)
        time.sleep(0.05)
        most[0] -= 1
        request.send(GOOD)

    with HttpPeer(script) as peer:
        settings = {"arms": ("vllm",), "external": {"vllm": config("openai", peer.address)}, "max_concurrency": 2}
        records, _ = run(settings, [0] * 8)
    assert most[1] <= 2
    assert len(records) == 8


def test_stop_records_external_requests_in_flight_as_cancelled() -> None:
    with HttpPeer(lambda request: time.sleep(3)) as peer:
        trial = TrialConfig(arms=("vllm",), external={"vllm": config("openai", peer.address)})
        records: list[RequestRecord] = []
        generator = Generator(trial, log=LoadLog(None, worker=0, planned=2, arms=("vllm",)), on_record=records.append)
        generator.load(schedule([0, 10], arm="vllm"))
        gevent.spawn_later(0.3, generator.stop)
        generator.run(now_ns() + 10_000_000)
        generator.stop()
    assert [record.status for record in records] == ["CANCELLED"] * 2


def test_arm_cannot_be_in_two_places() -> None:
    with pytest.raises(ConfigError, match='both have "a": keep one'):
        TrialConfig(targets={"a": "h:1"}, external={"a": config("oip", "h:1")})
    with pytest.raises(ConfigError, match=r"generator.targets is empty"):
        TrialConfig()
