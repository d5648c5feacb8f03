from __future__ import annotations

import re
from pathlib import Path

import servers.rpc
from servers.rpc.generate import PACKAGE, generate


def test_committed_stubs_are_what_the_pinned_generator_writes(tmp_path: Path) -> None:
    for fresh in generate(tmp_path):
        committed = PACKAGE / fresh.name
        assert committed.read_text() == fresh.read_text(), f"{fresh.name} is stale: run make proto"


def test_the_stated_floors_are_those_of_the_generator() -> None:
    project = (Path(servers.rpc.__file__).parents[2] / "pyproject.toml").read_text()
    grpc_floor = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (PACKAGE / "inference_pb2_grpc.py").read_text())
    protobuf_floor = re.search(r"# Protobuf Python Version: (\d+\.\d+)", (PACKAGE / "inference_pb2.py").read_text())
    assert grpc_floor is not None
    assert protobuf_floor is not None
    assert f'"grpcio>={grpc_floor[1]}"' in project
    assert f'"protobuf>={protobuf_floor[1]}"' in project
