"""A server of another project that answers greedily, as a made-up server of the simulation does, with probabilities."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulation.greedy import Server
from tests.fakes.http1 import DONE, Request, answer, event, plain, serving, usage

__all__ = ["GreedyServer", "serving"]


@dataclass
class GreedyServer:
    """Answers as `server` does, and keeps the bodies that it gets.

    It `refuses` log-probabilities, and wants the bearer token `token` where there is one; each error repeats the token.
    """

    path = "/v1"
    server: Server
    refuses: bool = False
    token: str = ""
    empty: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    _times: Counter[int] = field(default_factory=Counter)

    def script(self, request: Request) -> None:
        if request.line.startswith("POST"):
            request.send(self.reply(request.json, request.headers.get("authorization", "")))
        else:
            request.send(plain("200 OK", b"{}"))

    def reply(self, body: dict[str, Any], authorization: str) -> bytes:
        self.bodies.append(body)
        if self.token and authorization != f"Bearer {self.token}":
            return _error("401 No", f"{authorization} is not {self.token}")
        if self.refuses and "logprobs" in body:
            return _error("400 No", f"logprobs are not supported, {self.token}")
        prompt = zlib.crc32(json.dumps(body.get("prompt") or body.get("messages")).encode())
        self._times[prompt] += 1
        made = self.server.answer(0, prompt, self._times[prompt])
        count = 0 if self.empty else min(int(body["max_tokens"]), made.asked)
        words = [f" {word}" for word in made.text.split()[:count]]
        events = []
        for place, word in enumerate(words):
            choice: dict[str, Any] = {"index": 0, "text": word, "finish_reason": None}
            if "logprobs" in body and made.tokens:
                likeliest = {f" {other}": value for other, value in made.likeliest[place].items()}
                choice["logprobs"] = {"tokens": [word], "token_logprobs": [made.log_probs[place]]}
                choice["logprobs"]["top_logprobs"] = [likeliest]
            events.append(event({"choices": [choice]}))
        events.append(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        return answer(*events, usage(count), DONE)


def _error(status: str, message: str) -> bytes:
    return plain(status, json.dumps({"error": {"message": message}}).encode())
