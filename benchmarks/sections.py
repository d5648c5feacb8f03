"""What the benchmark measures, section by section. Each puts a row into the ledger as soon as it has one."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from benchmarks import quiet
from benchmarks.baselines import DECODE_KINDS, MIXED_KINDS, Baselines, compiles
from benchmarks.floor import StepBytes, measure_bandwidth, step_bytes
from benchmarks.inprocess import InProcess
from benchmarks.kernels import profile_decode
from benchmarks.ledger import Ledger, Row
from benchmarks.measure import (
    NothingMeasuredError,
    Session,
    SteadyDecode,
    paired_ratio,
    spread,
    steady_arrivals,
    steady_decode,
    throughput,
)
from benchmarks.startup import Start, read_libraries, start_once, summary, with_artifact
from benchmarks.traffic import Request, Workload, churn_set, decode_set, first_seconds, mixed_set, paced, trace_rows
from servers.config import ArmConfig
from servers.fields import ConfigError

if TYPE_CHECKING:
    from benchmarks.wire import Wire

T = TypeVar("T")
Measure = Callable[[Sequence[Request]], float]  # tokens per second

SECTIONS = ("startup", "floor", "quiet", "decode", "kernels", "mixed", "recorder", "baselines")
THROUGH = ("engine", "grpc")


class MeasurementError(RuntimeError):
    """A measurement cannot be trusted; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run and how often."""

    sections: tuple[str, ...]
    through: tuple[str, ...]
    work: Workload
    batches: tuple[int, ...]
    repeats: int
    baselines: tuple[str, ...]
    starts: int
    pairs: int
    seed: int
    trace: str
    duration_s: float
    time_scale: float
    saturation_share: float
    saturation_s: float


def once(make: Callable[[], T]) -> Callable[[], T]:
    """`make`, called at the first use. A failure is kept as well: what took minutes to fail is not tried again."""
    outcome: Future[T] = Future()

    def get() -> T:
        if not outcome.done():
            try:
                outcome.set_result(make())
            except Exception as error:
                outcome.set_exception(error)
        return outcome.result()

    return get


class Bench:
    """One arm under measurement: loaded, served and compared once for all sections, each when first needed."""

    def __init__(self, arm: ArmConfig, plan: Plan, ledger: Ledger, cache_dir: str) -> None:
        self.arm = arm
        self.plan = plan
        self.ledger = ledger
        self.cache_dir = cache_dir
        self._closing = contextlib.ExitStack()
        self._streams = 0
        self._engine = once(self._load)
        self._wire = once(self._serve)
        self._floor = once(self._measure_floor)

    def close(self) -> None:
        """Every process and tap is gone."""
        self._closing.close()

    def rng(self) -> np.random.Generator:
        """A stream of its own, reproducible from the seed: no two measurements share their inputs."""
        self._streams += 1
        return np.random.default_rng([self.plan.seed, self._streams])

    @property
    def engine(self) -> InProcess:
        """The arm in this process, warm."""
        return self._engine()

    @property
    def wire(self) -> Wire:
        """The arm served behind Envoy, warm; its compiler finds what this process has compiled."""
        return self._wire()

    @property
    def floor(self) -> tuple[StepBytes, float]:
        """(the bytes of a decode step, bytes per second of the device), with a row in the ledger."""
        return self._floor()

    @property
    def partner(self) -> InProcess | None:
        """The engine, where it is measured at all: what everything else is paired with."""
        return self.engine if "engine" in self.plan.through else None

    def _load(self) -> InProcess:
        self.ledger.note(f"loading {self.arm.name} ({self.arm.model.id})")
        engine = InProcess.load(self.arm, self.ledger.note)
        self._closing.callback(engine.close)
        return engine

    def _serve(self) -> Wire:
        from benchmarks.wire import Wire

        self.ledger.note(f"starting servers.front.serve for {self.arm.name} and Envoy")
        folder = Path(tempfile.mkdtemp(prefix="tailgate-bench-"))
        self._closing.callback(shutil.rmtree, folder, ignore_errors=True)
        wire = Wire(self.arm, folder=folder, cache_dir=self.cache_dir, note=self.ledger.note)
        self._closing.callback(wire.close)
        return wire

    def _measure_floor(self) -> tuple[StepBytes, float]:
        runner = self.engine.runner
        needed = step_bytes(runner.model)
        bandwidth = measure_bandwidth(runner.device, runner.model.dtype)
        if runner.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        rates = {f"{kind}_gb_s": value / 1e9 for kind, value in bandwidth.items()}
        weights = {"weights_gb": needed.weights / 1e9}
        if needed.quantised:
            weights["quantised_gb"] = needed.quantised / 1e9
        self.ledger.add("floor", **weights, kv_bytes_a_position=needed.position, **rates)
        return needed, bandwidth["best"]


# --- sections ---------------------------------------------------------------------------------------------------------


def startup(bench: Bench) -> None:
    """Start on an empty cache, on the one that this start filled, and on an empty one with the arm's artifact, several
    times. Only an arm that inductor compiles has an artifact.

    The last pair leaves its artifacts to the sections that follow, unless those were given a filled cache.
    """
    read_libraries()
    policy = bench.arm.compile
    arm = replace(bench.arm, compile=replace(policy, artifact=""))
    starts: dict[str, list[Start]] = {}

    def start(kind: str, started: ArmConfig, cache_dir: str) -> None:
        starts.setdefault(kind, []).append(start_once(started, cache_dir, bench.ledger.note))
        bench.ledger.note(f"{kind} start {number} of {bench.plan.starts}: {starts[kind][-1].ready_s:.1f} s")

    with tempfile.TemporaryDirectory(prefix="tailgate-start-", ignore_cleanup_errors=True) as scratch:
        shipped = None
        if policy.enabled and policy.backend == "inductor":
            shipped = with_artifact(arm, Path(scratch) / "artifact", bench.ledger.note)
        for number in range(1, bench.plan.starts + 1):
            keep = number == bench.plan.starts and not any(Path(bench.cache_dir).glob("*"))
            cache_dir = bench.cache_dir if keep else f"{scratch}/cold-{number}"
            start("cold", arm, cache_dir)
            start("warm", arm, cache_dir)
            if shipped is not None:
                start("artifact", shipped, f"{scratch}/shipped-{number}")
    bench.ledger.add("startup", **summary(starts))


def floor(bench: Bench) -> None:
    """The device's bandwidth and the bytes of a decode step."""
    _ = bench.floor


def quiet_section(bench: Bench) -> None:
    """Any admissible requests after the warm-up, and a trace if there is one: the compiler must not be heard."""
    plan, engine, limits = bench.plan, bench.engine, bench.arm.engine
    rng = bench.rng()
    requests = churn_set(
        plan.work.churn_requests,
        max_prompt=limits.max_prompt_tokens,
        max_new=limits.max_new_tokens,
        vocab_size=engine.vocab_size,
        rng=rng,
    )
    bench.ledger.add("quiet", **quiet.quietness(quiet.churn(engine, requests, rng)))
    if not plan.trace:
        return
    rows = trace_rows(plan.trace, max_prompt=limits.max_prompt_tokens, max_new=limits.max_new_tokens)
    extra: Row = {}
    if plan.saturation_share:
        tokens_per_s = quiet.saturate(engine, rows, seconds=plan.saturation_s, rng=bench.rng())
        bench.ledger.add("saturation", output_tokens_s=tokens_per_s, seconds=plan.saturation_s)
        rows, scale = paced(rows, tokens_per_s=tokens_per_s, share=plan.saturation_share, duration_s=plan.duration_s)
        extra = {"share": plan.saturation_share, "time_scale": scale}
    else:
        rows = first_seconds(rows, duration_s=plan.duration_s, time_scale=plan.time_scale)
        extra = {"time_scale": plan.time_scale}
    bench.ledger.note(f"replaying {len(rows)} requests of {plan.trace} in {plan.duration_s:g} s")
    bench.ledger.add("trace", **extra, **quiet.replay(engine, rows.requests(engine.vocab_size, bench.rng())))


def decode_engine(bench: Bench) -> None:
    """Steady decode in the engine, against the floor."""
    for batch in bench.plan.batches:
        with bench.ledger.attempt("decode", through="engine", batch=batch):
            _decode_engine(bench, batch)


def _decode_engine(bench: Bench, batch: int) -> None:
    decodes: list[SteadyDecode] = []

    def tokens_per_s(requests: Sequence[Request]) -> float:
        decodes.append(_steady(bench.engine.serve(requests), batch))
        return decodes[-1].tokens_per_s

    drawn = partial(decode_set, bench.plan.work, batch, bench.engine.vocab_size)
    by_name, unmeasured = _in_turn(
        bench, f"decode, batch {batch}", {"engine": tokens_per_s}, drawn, repeats=bench.plan.repeats
    )
    rates = by_name["engine"]
    steady = decodes[-len(rates) :]
    needed, bytes_per_s = bench.floor
    positions = float(np.mean([decode.positions for decode in steady]))
    bound = needed.floor_tokens_per_s(batch=batch, positions=positions, bytes_per_s=bytes_per_s)
    moved: Row = {"mb_a_token": needed.bytes_a_token(batch=batch, positions=positions) / 1e6}
    if needed.quantised:
        moved["quantised_share_of_floor"] = needed.quantised_share(batch=batch, positions=positions)
    bench.ledger.add(
        "decode",
        through="engine",
        batch=batch,
        tokens_s=spread(rates),
        step_ms=spread([decode.step_ms for decode in steady]),
        floor_tokens_s=bound,
        share_of_floor=float(np.median(rates)) / bound,
        **moved,
        **unmeasured,
        samples=rates,
    )


def kernels(bench: Bench) -> None:
    """Where the time of a decode step goes: a row for the step, and one for each kernel."""
    for batch in bench.plan.batches:
        with bench.ledger.attempt("kernels", batch=batch):
            drawn = decode_set(bench.plan.work, batch, bench.engine.vocab_size, bench.rng())
            profile = profile_decode(bench.engine, drawn)
            bench.ledger.add(
                "kernels",
                batch=batch,
                kernel="the step",
                calls=sum(kernel.calls for kernel in profile.kernels),
                us=profile.step_us,
                share=profile.busy_us / profile.step_us,
            )
            for kernel in profile.longest:
                share = kernel.us / profile.step_us
                bench.ledger.add(
                    "kernels", batch=batch, kernel=kernel.name[:80], calls=kernel.calls, us=kernel.us, share=share
                )


def decode_wire(bench: Bench) -> None:
    """Steady decode as a client sees it, next to the engine's."""
    for batch in bench.plan.batches:
        with bench.ledger.attempt("decode", through="grpc", batch=batch):
            _compare(bench, "decode", "grpc", partial(_rate_through, bench.wire, "decode"), batch=batch)


def mixed_engine(bench: Bench) -> None:
    """Prompts of very different lengths at once, in the engine."""
    _compare(bench, "mixed", "engine")


def mixed_wire(bench: Bench) -> None:
    """The same through the wire, next to the engine's."""
    _compare(bench, "mixed", "grpc", partial(_rate_through, bench.wire, "mixed"))


def recorder_engine(bench: Bench) -> None:
    """Decode with the compile recorder and with its taps out of the compiler. The engine's step records stay."""
    engine, batch = bench.engine, max(bench.plan.batches)

    def tapped(on: bool, requests: Sequence[Request]) -> float:
        with engine.recording(on):
            return float(_steady(engine.serve(requests), batch).tokens_per_s)

    _on_off(bench, "engine", batch, engine.vocab_size, tapped)


def recorder_wire(bench: Bench) -> None:
    """Decode as a client sees it, with and without somebody who follows the telemetry."""
    wire, batch = bench.wire, max(bench.plan.batches)

    def watched(on: bool, requests: Sequence[Request]) -> float:
        with wire.watched(on):
            return _steady_through(wire, requests)

    _on_off(bench, "grpc", batch, wire.vocab_size, watched)


def baselines(bench: Bench) -> None:
    """transformers on the same machine, each run next to one of the arm's, by its engine or else through gRPC."""
    for kinds in (DECODE_KINDS, MIXED_KINDS):  # a process for each: what the first leaves on the device goes with it
        planned = [kind for kind in kinds if kind in bench.plan.baselines]
        if not planned:
            continue
        bench.ledger.note("starting the process that holds the plain model")
        plain = Baselines(bench.arm.model, threads=bench.arm.engine.threads)
        try:
            for kind in planned:
                for batch in bench.plan.batches if kinds is DECODE_KINDS else (0,):
                    identity = {"through": f"transformers-{kind}"} | ({"batch": batch} if batch else {})
                    with bench.ledger.attempt("baselines", **identity):
                        _baseline(bench, plain, kind, batch)
        finally:
            plain.close()


def _baseline(bench: Bench, plain: Baselines, kind: str, batch: int) -> None:
    work = bench.plan.work
    section, new_tokens = ("decode", work.decode_new) if kind in DECODE_KINDS else ("mixed", work.mixed_new)

    def tokens_per_s(requests: Sequence[Request]) -> float:
        return plain.tokens_per_s(kind, [request.prompt for request in requests], new_tokens)

    _compare(bench, section, f"transformers-{kind}", tokens_per_s, batch=batch, vocab_size=plain.vocab_size)


class Part(NamedTuple):
    """A piece of a section: what runs, and through what (empty: neither engine nor wire decides)."""

    section: str
    through: str
    run: Callable[[Bench], None]


# Cold starts come before anything has been compiled, the engine before what takes minutes to start beside it.
PARTS = (
    Part("startup", "", startup),
    Part("floor", "", floor),
    Part("quiet", "", quiet_section),
    Part("decode", "engine", decode_engine),
    Part("kernels", "", kernels),
    Part("mixed", "engine", mixed_engine),
    Part("recorder", "engine", recorder_engine),
    Part("decode", "grpc", decode_wire),
    Part("mixed", "grpc", mixed_wire),
    Part("recorder", "grpc", recorder_wire),
    Part("baselines", "", baselines),
)


def parts_of(plan: Plan) -> list[Part]:
    """The parts that `plan` asks for, in their order."""
    return [part for part in PARTS if part.section in plan.sections and part.through in ("", *plan.through)]


# --- measuring --------------------------------------------------------------------------------------------------------


def _whole(session: Session) -> Session:
    """`session` if every request was answered; otherwise MeasurementError."""
    if session.failed:
        counts = ", ".join(f"{count} {status}" for status, count in session.failed.items())
        raise MeasurementError(f"of {len(session.answers)} requests, {counts}: nothing can be said of the rest")
    return session


def _steady(session: Session, batch: int) -> SteadyDecode:
    sizes = {name: answer.prompt_tokens for name, answer in _whole(session).answers.items()}
    return steady_decode(session.outputs, sizes, batch)


def _steady_through(wire: Wire, requests: Sequence[Request]) -> float:
    return steady_arrivals(_whole(wire.serve(requests)).answers.values())


def _rate_through(wire: Wire, section: str, requests: Sequence[Request]) -> float:
    return _steady_through(wire, requests) if section == "decode" else throughput(_whole(wire.serve(requests)))


def _rate(engine: InProcess, section: str, requests: Sequence[Request]) -> float:
    session = engine.serve(requests)
    return _steady(session, len(requests)).tokens_per_s if section == "decode" else throughput(_whole(session))


def _compare(
    bench: Bench, section: str, through: str, other: Measure | None = None, *, batch: int = 0, vocab_size: int = 0
) -> None:
    """The row of `through` is in the ledger: of the engine, or of `other`, in pairs with the engine if measured too.

    transformers are paired with the arm through gRPC where the engine is not measured.
    """
    engine = bench.partner
    vocab_size = vocab_size or (engine.vocab_size if engine else bench.wire.vocab_size)
    measures: dict[str, Measure] = {} if other is None else {through: other}
    partner = ""
    if engine is not None:
        partner, measures["engine"] = "engine", partial(_rate, engine, section)
    elif through.startswith("transformers-") and "grpc" in bench.plan.through:
        partner, measures["grpc"] = "grpc", partial(_rate_through, bench.wire, section)

    def drawn(rng: np.random.Generator) -> list[Request]:
        work = bench.plan.work
        return decode_set(work, batch, vocab_size, rng) if section == "decode" else mixed_set(work, vocab_size, rng)

    label = f"{section}{f', batch {batch}' if batch else ''}"
    rates, unmeasured = _in_turn(bench, label, measures, drawn, repeats=bench.plan.repeats)
    row: Row = {"through": through}
    if section == "decode":
        row |= {"batch": batch}
    else:
        row |= {"requests": bench.plan.work.mixed_requests, "new_tokens": bench.plan.work.mixed_new}
    if through.startswith("transformers-"):
        row |= {"compiled": compiles(through.removeprefix("transformers-"), bench.arm.model.device)}
    row |= {"tokens_s": spread(rates[through]), **unmeasured}
    if partner and other is not None:
        row |= {f"{partner}_tokens_s": spread(rates[partner])}
        if through == "grpc":
            row |= {"over_engine": paired_ratio(rates[through], rates[partner])}
        else:
            row |= {f"{partner}_over_it": paired_ratio(rates[partner], rates[through])}
    bench.ledger.add(section, **row, samples=rates[through])


def _on_off(bench: Bench, through: str, batch: int, vocab_size: int, measure: Callable[..., float]) -> None:
    rates, unmeasured = _in_turn(
        bench,
        f"recorder, {through}",
        {"without": partial(measure, False), "with": partial(measure, True)},
        partial(decode_set, bench.plan.work, batch, vocab_size),
        repeats=bench.plan.pairs,
    )
    bench.ledger.add(
        "recorder",
        through=through,
        batch=batch,
        with_tokens_s=spread(rates["with"]),
        without_tokens_s=spread(rates["without"]),
        with_over_without=paired_ratio(rates["with"], rates["without"]),
        **unmeasured,
    )


def _in_turn(
    bench: Bench,
    label: str,
    measures: Mapping[str, Measure],
    drawn: Callable[[np.random.Generator], list[Request]],
    *,
    repeats: int,
) -> tuple[dict[str, list[float]], Row]:
    """The rates of each measure on the same requests, in random order; and how often nothing was measured, if ever."""
    rates: dict[str, list[float]] = {name: [] for name in measures}
    unmeasured = 0
    for repeat in range(1 + repeats):
        rng = bench.rng()
        requests = drawn(rng)
        try:
            pair = {str(name): measures[str(name)](requests) for name in rng.permutation(list(measures))}
        except NothingMeasuredError as nothing:
            # a front that is starved of a processor delivers in bursts; the row says how often
            unmeasured += repeat > 0
            if unmeasured == repeats:
                raise
            bench.ledger.note(f"{label}, repeat {repeat}: {nothing}")
            continue
        if repeat == 0:
            continue  # warms caches and clocks
        shown = ", ".join(f"{name} {rate:,.1f} tok/s" for name, rate in pair.items())
        bench.ledger.note(f"{label}, repeat {repeat}: {shown}")
        for name, rate in pair.items():
            rates[name].append(rate)
    return rates, {"unmeasured_pairs": unmeasured} if unmeasured else {}


def check(plan: Plan, arm: ArmConfig) -> None:
    """Whether the arm's engine can take the planned work; otherwise ConfigError."""
    work, limits = plan.work, arm.engine
    if max(plan.batches) > limits.slots:
        raise ConfigError(f"--batch {max(plan.batches)} is above engine.slots {limits.slots}: raise engine.slots")
    decodes = bool({"decode", "baselines", "recorder"} & set(plan.sections))
    mixes = bool({"mixed", "baselines"} & set(plan.sections))
    prompt = max(work.decode_prompt * decodes, work.mixed_high * mixes)
    if prompt > limits.max_prompt_tokens:
        raise ConfigError(
            f"prompts have up to {prompt} tokens, engine.max_prompt_tokens is {limits.max_prompt_tokens}: raise it or "
            "lower the workload's prompts"
        )
    answer = max(work.decode_new * decodes, work.mixed_new * mixes)
    if answer > limits.max_new_tokens:
        raise ConfigError(
            f"answers have {answer} tokens, engine.max_new_tokens is {limits.max_new_tokens}: raise it or lower the "
            "workload's answers"
        )
    if plan.trace and not Path(plan.trace).is_file():
        raise ConfigError(f'--trace "{plan.trace}" does not exist: give an Azure CSV or a Mooncake JSON Lines file')
    if mixes and work.mixed_requests > limits.slots + limits.max_queue:
        raise ConfigError(
            f"{work.mixed_requests} requests come at once, the engine holds {limits.slots + limits.max_queue} "
            "(slots + max_queue): raise engine.max_queue"
        )
    # requests join one prefill step after the other, and those that run decode in between
    joining = math.ceil(max(plan.batches) / limits.prefill_batch) * math.ceil(
        work.decode_prompt / limits.prefill_tokens
    )
    steady = work.decode_new - joining * limits.decode_per_prefill
    if steady < 8 and decodes:
        raise ConfigError(
            f"with {work.decode_new} new tokens, {max(plan.batches)} rows decode together for {max(0, steady)} steps: "
            "raise --new-tokens (and engine.max_new_tokens) or lower --batch"
        )
