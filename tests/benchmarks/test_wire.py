from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.measure import throughput
from benchmarks.traffic import WORKLOADS, decode_set
from benchmarks.wire import Wire
from servers.config import ArmConfig, EngineConfig, ModelConfig


def test_a_served_arm_streams_all_tokens_to_a_client_behind_envoy(tmp_path: Path) -> None:
    engine = EngineConfig(slots=4, max_prompt_tokens=64, max_new_tokens=256, threads=1)
    arm = ArmConfig.from_preset("eager", model=ModelConfig(device="cpu"), engine=engine)
    wire = Wire(arm, folder=tmp_path, cache_dir=str(tmp_path / "cache"), note=lambda text: None)
    try:
        requests = decode_set(WORKLOADS["small"], 4, wire.vocab_size, np.random.default_rng(0))
        with wire.watched(True):
            session = wire.serve(requests)
        assert session.failed == {}
        assert session.output_tokens == 4 * 256
        assert throughput(session) > 0
        assert all(answer.token_ns == sorted(answer.token_ns) for answer in session.answers.values())
        assert wire.snapshot().counters["tokens"] == 4 * 256
    finally:
        wire.close()
