"""What a host has of memory."""

from pathlib import Path

from servers.host_memory import host_memory


def test_memory_is_told_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  16 kB\nMemFree: 1 kB\nMemAvailable:  4 kB\nHugePages_Total:  0\n")
    assert host_memory(tmp_path) == (16384, 4096)
