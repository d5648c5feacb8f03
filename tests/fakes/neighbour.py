"""A neighbour that reports work and does none: the command line of `python -m servers.neighbour`, and faults."""

from __future__ import annotations

import argparse
import json
import os
import sys

from servers.clock import now_ns


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--tenant", default="")
    for name in ("prompt-tokens", "tokens"):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in ("refuse", "short"):  # DEVICE that is taken, or lacks the memory
        parser.add_argument(f"--{name}", default="")
    for name in ("die", "hang"):  # DEVICE=DEMANDS
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    if options.refuse == options.device:
        print(json.dumps({"error": "the device is busy"}), flush=True)
        sys.exit(1)
    print(json.dumps({"ready": True, "device": options.device}), flush=True)
    dies, _, after = options.die.partition("=")
    hangs, _, answers = options.hang.partition("=")
    for number, line in enumerate(sys.stdin):
        if hangs == options.device and number >= int(answers):
            continue
        if dies == options.device and number == int(after):
            print("the driver fell off", file=sys.stderr, flush=True)
            os._exit(7)
        demand = json.loads(line)
        short = options.device == options.short and demand["memory_share"] > 0
        answer = {
            "ended_ns": now_ns(),
            "had": {"compute_share": 0.25, "answered": 3, "failed": 1, "left_out": 0},
            "began_ns": now_ns(),
            "memory_bytes": int(demand["memory_share"] * 1000) // (2 if short else 1),
            "error": "holds half: out of memory" if short else None,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
