"""What browsers ask of the run: a line of JSON to the run that started this process, and its answer, a line back.

A pipe and no file: what was asked of a run that is gone is gone with it, and whoever can write into the run directory
still needs the token.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, TextIO


class RunLine:
    """The line to the run: it is asked on `questions`, and answers come in `answers`, any time later."""

    def __init__(self, questions: TextIO, answers: Iterable[str]) -> None:
        self._questions = questions
        self._answers = answers
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._asking = threading.Lock()
        threading.Thread(target=self._hear, name="run-line", daemon=True).start()

    def ask_weights(self, weights: Mapping[str, Any], *, within_s: float) -> dict[str, Any] | None:
        """The run's answer: {"weights": …} that are in force from now on, or {"error": …}; None where none came."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._asking:
            number = next(self._numbers)
            self._waiting[number] = answer
            with suppress(OSError):
                self._questions.write(json.dumps({"ask": number, "weights": dict(weights)}) + "\n")
                self._questions.flush()
        try:
            return answer.get(timeout=within_s)
        except queue.Empty:
            return None
        finally:
            self._waiting.pop(number, None)

    def _hear(self) -> None:
        for line in self._answers:
            with suppress(ValueError, KeyError, TypeError):
                answer = json.loads(line)
                waiting = self._waiting.get(answer.pop("ask"))
                if waiting is not None:
                    waiting.put(answer)
