from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtests.page.asking import RunLine
from loadtests.page.server import PageServer

Serve = Callable[..., PageServer]
Answers = Callable[[dict[str, Any]], dict[str, Any] | None]


@contextmanager
def serving(run_dir: Path, host: str, token: str, **options: Any) -> Iterator[PageServer]:
    server = PageServer(run_dir, host, 0, token=token, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def answering(answer: Answers) -> Iterator[RunLine]:
    """A line to a run that answers each question so, or not at all where that is None."""
    (questions, to_run), (answers, to_page) = os.pipe(), os.pipe()

    def run() -> None:
        with os.fdopen(questions) as asked, os.fdopen(to_page, "w") as told:
            for line in asked:
                question = json.loads(line)
                if (words := answer(question["weights"])) is not None:
                    told.write("no answer\n" + json.dumps({"ask": question["ask"], **words}) + "\n")
                    told.flush()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with os.fdopen(answers) as heard:
        with os.fdopen(to_run, "w") as asking:
            yield RunLine(asking, heard)
        thread.join()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the page of a run directory until the test ends; with `answer`, that of a run whose weights change."""
    with ExitStack() as stack:

        def start(
            run_dir: Path, *, host: str = "127.0.0.1", token: str = "", answer: Answers | None = None, change: str = ""
        ) -> PageServer:
            line = None if answer is None else stack.enter_context(answering(answer))
            return stack.enter_context(serving(run_dir, host, token, line=line, change_token=change))

        yield start
