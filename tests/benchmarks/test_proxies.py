from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from benchmarks.contest import Cores, NullProcess
from benchmarks.proxies import PATHS, opened
from servers.rpc import inference_pb2_grpc
from servers.rpc.inference_pb2 import GenerateRequest

ANYWHERE = Cores(server=None, load=None)


@pytest.mark.parametrize("name", PATHS)
def test_a_way_passes_answers_and_their_metadata_on(name: str, tmp_path: Path) -> None:
    with NullProcess((), folder=tmp_path, cores=ANYWHERE) as server:
        folder = tmp_path / "way"
        folder.mkdir()
        with opened(name, server.address, folder=folder, cores=ANYWHERE) as way:
            before = way.cpu_s()
            with grpc.insecure_channel(way.address, options=(("grpc.enable_http_proxy", 0),)) as channel:
                call = inference_pb2_grpc.InferenceStub(channel).Generate(GenerateRequest(max_tokens=3), timeout=10)
                assert sum(len(chunk.token_ids) for chunk in call) == 3
                assert dict(call.trailing_metadata())["tailgate-output-tokens"] == "3"
            assert (way.cpu_s() > before) == (name != "direct")
