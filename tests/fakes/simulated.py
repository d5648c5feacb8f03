"""A server of another project that answers greedily, as a made-up server of the simulation does."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.simulation.fleet import CONTROL, TREATMENT, Fleet, recorded
from benchmarks.simulation.greedy import Server
from tailgate.analysis.records.documents import EDITED
from tailgate.analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from tailgate.analysis.records.tables import RecordWriter, read_table
from tests.fakes.http_servers import DONE, Request, answer, event, plain, serving, usage

__all__ = ["GreedyServer", "serving"]


@dataclass
class GreedyServer:
    """Answers as `server` does, and keeps the bodies that it gets.

    It wants the bearer token `token` where there is one; each error repeats the token.
    """

    path = "/v1"
    server: Server
    token: str = ""
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
        prompt = zlib.crc32(json.dumps(body.get("prompt") or body.get("messages")).encode())
        self._times[prompt] += 1
        made = self.server.answer(0, prompt, self._times[prompt])
        count = min(int(body["max_tokens"]), made.asked)
        words = [f" {word}" for word in made.text.split()[:count]]
        events = [event({"choices": [{"index": 0, "text": word, "finish_reason": None}]}) for word in words]
        events.append(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        return answer(*events, usage(count), DONE)


def _error(status: str, message: str) -> bytes:
    return plain(status, json.dumps({"error": {"message": message}}).encode())


def write_external(folder: Path, made: Fleet, *, gates: Mapping[str, Any], seed: int = 1) -> Path:
    """Write a run with the treatment as an external arm, without telemetry."""
    pieces = [f'[[arms]]\nname = "{CONTROL}"\ncontrol = true\n']
    pieces.append(f'[[arms]]\nname = "{TREATMENT}"\nkind = "openai"\n')
    pieces.append("[gates]\n" + "".join(f"{key} = {value}\n" for key, value in gates.items()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text("compare_models = true\n" + "\n".join([*pieces, EDITED]))
    write_requests(folder / "requests.arrow", recorded(made, np.random.default_rng(seed))[1])
    return folder


def write_requests(path: Path, table: pa.Table) -> None:
    with RecordWriter(path, REQUESTS) as writer:
        for batch in table.to_batches():
            writer.append_batch(batch)


def write_logged(folder: Path, events: Sequence[Mapping[str, Any]], *, blind_spots: Sequence[str] = ()) -> Path:
    """Give the run in `folder` a log of the external arm that reported these events and may have left out others."""
    experiment = (folder / "experiment.toml").read_text()
    arm = f'name = "{TREATMENT}"\n'
    (folder / "experiment.toml").write_text(experiment.replace(arm, f'{arm}telemetry = {{ log = ["vllm.log"] }}\n'))
    log = {"replica": None, "lines": 99, "events": len(events), "blind_spots": list(blind_spots)}
    arms = [{"name": CONTROL}, {"name": TREATMENT, "kind": "openai", "reported": {"logs": [log]}}]
    arms[1]["external"] = {"telemetry": {"log": ["vllm.log"]}}
    start_ns = min(read_table(folder / "requests.arrow", REQUESTS)[0]["sent_ns"].to_pylist())
    (folder / "trial.json").write_text(json.dumps({"trial": 1, "complete": True, "start_ns": start_ns, "arms": arms}))
    with RecordWriter(folder / "compile_events.arrow", COMPILE_EVENTS) as writer:
        for number, event in enumerate(events):
            writer.append({"event_id": f"1-log-{number}", "trial": 1, "arm": TREATMENT, "kind": "jit", **event})
    return folder
