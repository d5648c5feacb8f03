"""The stock client and the frame client side by side, against the same real servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.certificates import make_certificates
from tests.fakes.grpc_peers import grpc_peer

ROOT = Path(__file__).resolve().parents[3]


def both(target: str, script: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """What the frame client saw, what grpcio saw, and the log."""
    argument = json.dumps({"target": target, "script": script, **options})
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.two_clients", argument],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    out = json.loads(done.stdout.splitlines()[-1])
    return out["frames"], out["grpcio"], done.stderr


@pytest.mark.process
def test_both_clients_end_calls_alike() -> None:
    with grpc_peer("aio", token_s=0.02) as target:
        frames, grpcio, _ = both(target, "ends")
    assert grpcio["failed"] == ["RESOURCE_EXHAUSTED", "as you asked: \u2713 100 %"]
    assert grpcio["late"] == "DEADLINE_EXCEEDED"
    assert grpcio["dropped"] == ["CANCELLED", "cancelled by the client"]
    assert grpcio["answered"] == ["OK", 3]
    assert grpcio["running"] == ["CANCELLED", "the client was closed"]
    assert grpcio["after"] == ["UNAVAILABLE", "the client is closed"]
    assert frames == grpcio


def test_tls_and_the_token_are_the_same_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = make_certificates(tmp_path, "arms.example")
    monkeypatch.setenv("TAILGATE_TEST_TOKEN", "s3cret")
    security = {
        **{"tls_ca": pem.ca, "tls_server_name": "arms.example", "token_env": "TAILGATE_TEST_TOKEN"},
        **{"tls_certificate": pem.client_certificate, "tls_key": pem.client_key},
    }
    with grpc_peer("aio", certificate=pem.certificate, key=pem.key, client_ca=pem.ca, token="s3cret") as target:
        frames, grpcio, log = both(f"https://{target}", "paced", streams=5, tokens=3, security=security)
    assert frames["statuses"] == grpcio["statuses"] == ["OK"]
    assert "s3cret" not in log
