"""What watching the live page costs the load: how late it is with no page, with nobody, with readers, with browsers.

    python -m benchmarks.page_cost [EXPERIMENT] [--repeats 3] [--watchers 5] [--set KEY=VALUE ...]

Runs of the experiment (two arms of the tiny model that compile nothing, unless another is named) in turn, in an order
that changes from repeat to repeat: without a page; with one that nobody opens; with programs that read its stream; with
windows of Chromium, on this machine. A line a run: the p99 of how late the load began requests and of how late a
waiting greenlet of it ran, and the processor time of the page. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]
import tomli_w

from analysis.records.documents import content_of

WATCHED = ("no page", "nobody", "readers", "browsers")
_RUN = (sys.executable, "-P", "-m", "loadtests.commands.main", "run")
_JUDGED = (0, 3, 99)


def quiet(path: Path) -> Path:
    """The demo without its arm that compiles, and with eager steps of padded shapes in place of compiled ones."""
    table = tomllib.loads((files("loadtests.experiments") / "demo.toml").read_text(encoding="utf-8"))
    eager, padded, _ = table["arms"]
    table["arms"] = [eager, {**padded, "name": "eager-padded", "preset": "eager-padded"}]
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    return path


class Readers:
    """Programs that read the stream of the page at `url` from `with` on."""

    def __init__(self, url: str, count: int) -> None:
        self._threads = [threading.Thread(target=self._read, args=(url,), daemon=True) for _ in range(count)]
        self.read_bytes = 0

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(30)

    def _read(self, url: str) -> None:
        address = urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.request("GET", "/events")
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the page answered {answer.status}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            while content := answer.read1(65536):
                self.read_bytes += len(content)


def _window(url: str, profile: Path) -> list[str]:
    """The command of a headless browser that keeps the page open."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise SystemExit("no Chromium is installed: install chromium, or leave out the browsers")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")
    return [program, *flags, f"--user-data-dir={profile}", url]


@contextlib.contextmanager
def watching(watched: str, url: str, count: int) -> Iterator[None]:
    """So many of them watch."""
    with contextlib.ExitStack() as stack:
        if watched == "readers":
            stack.enter_context(Readers(url, count))
        elif watched == "browsers":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            for number in range(count):
                window = stack.enter_context(
                    subprocess.Popen(_window(url, folder / str(number)), stderr=subprocess.DEVNULL)
                )
                stack.callback(window.terminate)
        yield


def measured(experiment: Path, settings: Sequence[str], watched: str, count: int) -> dict[str, float]:
    """The figures of one run, in milliseconds and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_RUN, str(experiment), "--out", folder, "--json"]
        command += ["--page", "off"] if watched == "no page" else []
        command += [part for setting in settings for part in ("--set", setting)]
        errors = Path(folder) / "errors.txt"
        with errors.open("w") as file:
            run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
        page_cpu_s, is_watched = 0.0, watched == "no page"
        with contextlib.ExitStack() as stack:
            while _goes_on(run):
                page_cpu_s = max(page_cpu_s, _page_cpu_s(run.pid))
                if not is_watched and (found := [*Path(folder).glob("*/page.json")]):
                    stack.enter_context(watching(watched, content_of(found[0])["url"], count))
                    is_watched = True
        if run.returncode not in _JUDGED:
            raise SystemExit(f"the run ended with exit code {run.returncode}: {errors.read_text()[-2000:]}")
        (trial,) = Path(folder).glob("*/trial-01")
        account = content_of(trial / "generator-0.json")
        looks = [*trial.parent.glob("preview.jsonl")]
        return {
            "lag_p99_ms": account["lag_ms"]["p99"],
            "loop_lag_p99_ms": account["loop_lag_ms"]["p99"],
            "page_cpu_s": page_cpu_s,
            "looks": len(looks[0].read_text().splitlines()) if looks else 0,
        }


def _goes_on(run: subprocess.Popen[bytes]) -> bool:
    """Whether the run goes on after half a second more. It ends by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(0.5)
    return run.returncode is None


def _page_cpu_s(run: int) -> float:
    """Processor time of the page of the run and of its looks, in seconds."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(run).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "loadtests.page" in process.cmdline() or "loadtests.page" in (process.parent() or process).cmdline():
                    times = process.cpu_times()
                    total += times.user + times.system
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description="What watching the live page costs the load.")
    parser.add_argument("experiment", type=Path, nargs="?")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--watchers", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of tailgate run")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {watched: [] for watched in WATCHED}
    order = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        experiment = options.experiment or quiet(Path(folder) / "quiet.toml")
        for _ in range(options.repeats):
            for watched in order.sample(WATCHED, len(WATCHED)):
                row = measured(experiment, options.set, watched, options.watchers)
                rows[watched].append(row)
                print(f"{watched:<10}{json.dumps(row)}", flush=True)
    for watched, found in rows.items():
        middle = {name: statistics.median(row[name] for row in found) for name in found[0]}
        print(f"{watched:<10}{' '.join(f'{name} {value:.3g}' for name, value in middle.items())}")
    summary: dict[str, Any] = {"benchmark": "live_page", "watchers": options.watchers, "rows": rows}
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
