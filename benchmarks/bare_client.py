"""tailgate's client by itself, without Locust: `python -m benchmarks.bare_client FOLDER` replays the schedule there."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import gevent
import numpy as np

from benchmarks.simulation.records import request_table, token_lists, write_requests
from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.inference import InferenceClient
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.servers.clock import now_ns
from tailgate.servers.rpc.inference_pb2 import GenerateRequest


def drive(folder: Path) -> None:
    """Send what the schedule in the folder says, wait for the last answer, and record all of them."""
    schedule = Schedule.read(folder / "schedule.arrow")
    client = InferenceClient(TrialConfig.read(folder / "generator.json").targets["*"], max_connections=1)
    failure = client.connect(10.0)
    if failure:
        sys.exit(failure)
    gc.collect()
    gc.freeze()
    gc.disable()
    calls: list[Call] = []
    start_ns = now_ns() + 500_000_000
    planned = zip(schedule.offset_ns.tolist(), schedule.ints("max_tokens").tolist(), strict=True)
    for number, (offset_ns, tokens) in enumerate(planned):
        scheduled_ns, name = start_ns + offset_ns, f"bare-{number}"
        while (left_ns := scheduled_ns - now_ns()) > 0:
            gevent.sleep(left_ns / 1e9 if left_ns > 1_000_000 else 0)
        body = GenerateRequest(request_id=name, max_tokens=tokens).SerializeToString()
        calls.append(client.start(body, timeout_s=600.0, tag=(name, scheduled_ns)))
    while not all(call.status for call in calls):
        gevent.sleep(0.05)
    sent = np.array([call.sent_ns for call in calls], np.int64)
    counts = np.array([len(call.token_ns) for call in calls], np.int64)
    stamps = np.concatenate([np.zeros(0, np.int64), *(np.array(call.token_ns, np.int64) for call in calls)])
    table = request_table(
        sent,
        request_id=[call.tag[0] for call in calls],
        scheduled_ns=[call.tag[1] for call in calls],
        status=[call.status for call in calls],
        end_ns=[call.end_ns for call in calls],
        server_end_ns=[int(call.trailing_metadata.get("tailgate-end-ns", 0)) for call in calls],
        token_ns=token_lists(stamps - np.repeat(sent, counts), counts),
    )
    write_requests(folder / "requests-0.arrow", table)


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
