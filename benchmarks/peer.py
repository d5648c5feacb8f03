"""Output tokens per second of tailgate's engine or of vLLM, by one loop over one set of prompts.

    python benchmarks/peer.py --engine tailgate
    python benchmarks/peer.py --engine vllm [--eager]          # needs vLLM 0.23

Both hold a model of the same shape in bfloat16 with random weights, in this process, without HTTP or gRPC. decode: the
rate between the 32nd and the 288th token of a batch. mixed: 96 prompts at once, 128 tokens each. chat: so many requests
in flight at any time, with the lengths of conversations. Run both on one machine and compare the rows. The last line on
stdout is one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import Ledger, count, end_in_order, parser_of, several, spread
from tailgate.loadtests.traffic.lengths import FITS
from tailgate.servers.presets import RANDOM_PRESETS

PROMPT_TOKENS, NEW_TOKENS = 1536, 288  # limits of a request
FIRST_TOKEN_ID = 3
FEW, MANY = 32, 288  # tokens of the two runs whose difference is decode alone

Request = tuple[list[int], int]  # token ids of the prompt, tokens to generate


class Peer(Protocol):
    """An engine in this process."""

    def add(self, prompt: list[int], tokens: int) -> None:
        """Submit a request."""

    def step(self) -> int:
        """Advance; return how many requests ended."""


class Tailgate:
    """The engine of an arm, loaded and warm."""

    def __init__(self, runner: Any) -> None:
        from tailgate.servers.engine.engine import Engine
        from tailgate.servers.engine.messages import StepOutput
        from tailgate.servers.engine.scheduler import scheduler_for

        runner.recorder.drain()  # the warm-up's own compiles
        self.engine = Engine(scheduler_for(runner.arm), runner, runner.recorder.drain)
        self.turns = self.engine.turns()
        self.output = StepOutput
        self.added = 0

    def add(self, prompt: list[int], tokens: int) -> None:
        """Submit a request."""
        from tailgate.servers.engine.in_process import requests_of

        for request in requests_of([prompt], [tokens], first=self.added):
            self.engine.arrivals.put(request)
        self.added += 1

    def step(self) -> int:
        """Advance; return how many requests ended. Raises RuntimeError when one failed or the compiler worked."""
        ended = 0
        for message in next(self.turns):
            if not isinstance(message, self.output):
                raise RuntimeError(f"the compiler worked after the warm-up: {message.kind}")
            for finished in message.finished:
                ended += 1
                if finished.status != "OK":
                    raise RuntimeError(f"a request ended {finished.status}: {finished.message}")
        return ended


class Vllm:
    """vLLM's engine, its scheduler and workers in processes of its own."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.added = 0

    def add(self, prompt: list[int], tokens: int) -> None:
        """Submit a request."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.engine.add_request(str(self.added), TokensPrompt(prompt_token_ids=prompt), params)
        self.added += 1

    def step(self) -> int:
        """Advance; return how many requests ended."""
        return sum(output.finished for output in self.engine.step())


def answer(peer: Peer, requests: Sequence[Request], concurrency: int) -> float:
    """Answer `requests` with at most `concurrency` in flight; return the seconds."""
    begin = time.perf_counter()
    added = ended = 0
    while ended < len(requests):
        while added < len(requests) and added - ended < concurrency:
            peer.add(*requests[added])
            added += 1
        ended += peer.step()
    return time.perf_counter() - begin


class Bench:
    """Measures one engine."""

    def __init__(self, peer: Peer, ledger: Ledger, *, repeats: int, seed: int, vocabulary: int) -> None:
        self.peer = peer
        self.ledger = ledger
        self.repeats = repeats
        self.rng = np.random.default_rng(seed)
        self.vocabulary = vocabulary

    def _prompt(self, length: int) -> list[int]:
        drawn: list[int] = self.rng.integers(FIRST_TOKEN_ID, self.vocabulary, size=length).tolist()
        return drawn

    def _conversation(self) -> Request:
        prompt, tokens = (int(self.rng.lognormal(mu, sigma)) for mu, sigma, _ in FITS["conversation"])
        return self._prompt(min(max(prompt, 1), PROMPT_TOKENS)), min(max(tokens, 1), 256)

    def decode(self, batch: int) -> None:
        """Measure tokens per second while `batch` rows decode together."""

        rates = []
        for _ in range(1 + self.repeats):
            few, many = (
                answer(self.peer, [(self._prompt(128), tokens) for _ in range(batch)], batch) for tokens in (FEW, MANY)
            )
            rates.append(batch * (MANY - FEW) / (many - few))
        self.ledger.add("decode", batch=batch, tokens_s=spread(rates[1:]))

    def mixed(self) -> None:
        """Measure 96 prompts at once, 128 tokens each, lengths lognormal around 245 tokens."""

        def requests() -> list[Request]:
            lengths = np.clip(self.rng.lognormal(5.5, 1.0, size=96), 8, 1024).astype(int)
            return [(self._prompt(length), 128) for length in lengths.tolist()]

        self._rate("mixed", requests, 96)

    def chat(self, concurrency: int) -> None:
        """Measure conversations with `concurrency` requests in flight."""
        self._rate("chat", lambda: [self._conversation() for _ in range(max(32, 2 * concurrency))], concurrency)

    def _rate(self, section: str, drawn: Callable[[], list[Request]], concurrency: int) -> None:
        rates = []
        for _ in range(1 + self.repeats):
            requests = drawn()
            rates.append(sum(tokens for _, tokens in requests) / answer(self.peer, requests, concurrency))
        self.ledger.add(section, concurrency=concurrency, tokens_s=spread(rates[1:]))


def write_model(folder: Path, name: str) -> int:
    """Write the configuration of the model `name` for vLLM, without weights and tokenizer; return its vocabulary."""
    config = {**RANDOM_PRESETS[name], "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return int(config["vocab_size"])


def measure(peer: Peer, ledger: Ledger, options: Any, *, begin: float, vocabulary: int) -> None:
    """Measure everything of a peer that was started at `begin` and is ready now."""
    ledger.add("start", seconds=time.monotonic() - begin)
    bench = Bench(peer, ledger, repeats=options.repeats, seed=options.seed, vocabulary=vocabulary)
    for batch in (1, 32):
        bench.decode(batch)
    bench.mixed()
    for concurrency in options.chat:
        bench.chat(concurrency)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("peer.py", __doc__, repeats=3)
    parser.add_argument("--engine", choices=["tailgate", "vllm"], default="tailgate")
    parser.add_argument("--model", default="llama-3-8b", choices=RANDOM_PRESETS, help="shape (default %(default)s)")
    parser.add_argument("--arm", default="compiled-bucketed", help="tailgate: preset (default %(default)s)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="tailgate: a setting of the arm, after the default ones")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="vLLM: with enforce_eager")
    parser.add_argument("--slots", type=count, default=256, help="most requests in flight (default %(default)s)")
    parser.add_argument("--chat", type=several(count, "8,32"), default=(8, 32, 96, 256), metavar="N,N",
        help="requests in flight (default 8,32,96,256)")  # fmt: skip
    options = parser.parse_args(arguments)
    ledger, begin = Ledger(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tailgate-peer-", ignore_cleanup_errors=True) as scratch:
        if options.engine == "vllm":
            _measure_vllm(options, ledger, begin, Path(scratch))
        else:
            _measure_tailgate(options, ledger, begin, scratch)
    return ledger.finish("peer", arguments)


def _measure_tailgate(options: Any, ledger: Ledger, begin: float, scratch: str) -> None:
    import os

    from tailgate.loadtests.commands.arm_flags import preset_arm
    from tailgate.servers.program import isolate_compiler

    limits = [
        f"engine.slots={options.slots}",
        f"engine.max_prompt_tokens={PROMPT_TOKENS}",
        f"engine.max_new_tokens={NEW_TOKENS}",
    ]
    arm = preset_arm(options.arm, [*limits, *options.settings, f"model.id=random:{options.model}"])
    isolate_compiler(os.environ, scratch)
    from tailgate.servers.engine.in_process import warm_runner

    with warm_runner(arm, lambda *at: ledger.note("warm-up {} of {}: {}".format(*at))) as runner:
        vocabulary = int(RANDOM_PRESETS[options.model]["vocab_size"])
        measure(Tailgate(runner), ledger, options, begin=begin, vocabulary=vocabulary)


def _measure_vllm(options: Any, ledger: Ledger, begin: float, scratch: Path) -> None:
    vocabulary = write_model(scratch, options.model)
    from vllm import LLM

    llm = LLM(
        model=str(scratch),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
        gpu_memory_utilization=0.8,
        max_num_seqs=options.slots,
        seed=0,
        enforce_eager=options.eager,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    measure(Vllm(llm.llm_engine), ledger, options, begin=begin, vocabulary=vocabulary)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
