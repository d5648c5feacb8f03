"""What a run shows and leaves is read as it is."""

from __future__ import annotations

from pathlib import Path

from tests.faults import look_over
from tests.faults.arrangement import SECRETS


def test_secrets_and_tracebacks_are_found_wherever_they_lie(tmp_path: Path) -> None:
    name, secret = next(iter(SECRETS.items()))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "arm.log").write_bytes(b"\xff opens with " + secret.encode())
    (tmp_path / "logs" / "page.log").write_text("Traceback (most recent call last):\n")
    assert look_over.leaks([tmp_path], []) == (f"{tmp_path}/logs/arm.log ({name})",)
    assert len(look_over.leaks([], [f"python --token {secret}"])) == 1
    assert look_over.tracebacks([tmp_path]) == (f"{tmp_path}/logs/page.log",)
    (tmp_path / "logs" / "page.log").write_text(
        "Exception ignored in atexit callback:\nTraceback (most recent call last):\n"
    )
    assert look_over.tracebacks([tmp_path]) == ()
    assert look_over.leaks([tmp_path / "none"], ["python"]) == ()
