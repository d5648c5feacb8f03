import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.judging.validity import LENGTH_CHECKS
from analysis.settings.gate_limits import CompileBudget, GateLimits
from analysis.settings.rollout import Rollout
from analysis.settings.slo_targets import parse_cold, parse_slo
from analysis.summary.summary import analyze
from loadtests.experiments.files import builtin_names
from loadtests.experiments.model import Experiment, ParityConfig, SplitterSettings, TrialsConfig
from loadtests.experiments.overrides import parse_setting, set_path
from loadtests.experiments.reading import from_table, load
from loadtests.experiments.writing import to_toml
from loadtests.traffic.settings import TrafficConfig
from servers.config import CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from servers.fields import ConfigError
from tests.fakes.runs import FakeArm, FakeRun, write_run

MINIMAL = """
name = "canary"

[[arms]]
preset = "eager"
control = true

[[arms]]
name = "compiled"
preset = "compiled-padded"

[traffic]
rate = 2
"""


def arm_of(experiment: Experiment, name: str = "compiled") -> Any:
    return next(arm for arm in experiment.arms if arm.name == name)


def write(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, **changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), **changes)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_minimal_experiment_takes_presets_and_defaults(tmp_path: Path) -> None:
    experiment = load(write(tmp_path, MINIMAL))
    assert [arm.name for arm in experiment.arms] == ["eager", "compiled"]
    assert experiment.control.name == "eager"
    assert arm_of(experiment).config.shapes.kind == "pad"
    assert arm_of(experiment).replica_names == ("compiled-0",)
    assert experiment.gates == GateLimits(block_s=experiment.traffic.block_s)


@pytest.mark.parametrize("name", ["demo", "external", "frontier-demo", "h200", "vllm"])
def test_built_in_experiment_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    experiment = load(name, trace=str(trace) if name == "h200" else "")
    assert from_table(tomllib.loads(to_toml(experiment))) == experiment


def test_every_experiment_in_the_package_is_offered() -> None:
    assert builtin_names() == [
        "case-aa",
        "case-aa-bucketed",
        "case-ab",
        "case-encoder",
        "case-frontier",
        "case-naive",
        "case-planted-decode",
        "case-planted-others",
        "case-planted-processors",
        "case-planted-turns",
        "case-ramp",
        "case-turns",
        "case-widening",
        "demo",
        "embed",
        "external",
        "frontier-demo",
        "h200",
        "minilm",
        "vllm",
    ]


SEARCHES_AND_SHORT_ONES = (
    "demo",
    "embed",
    "minilm",
    "frontier-demo",
    "case-encoder",
    "case-frontier",
    "case-naive",
    "case-ramp",
)


@pytest.mark.parametrize(
    "name",
    [name for name in builtin_names() if name not in SEARCHES_AND_SHORT_ONES],
)
def test_a_built_in_experiment_is_long_enough_to_decide(name: str, tmp_path: Path) -> None:
    """Those apart that are to find recompiles: they say that they decide nothing else."""
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    experiment = load(name, trace=str(trace) if name == "h200" else "")
    traffic = experiment.traffic
    assert experiment.arms[0].control
    run = FakeRun(
        arms=[FakeArm(name=arm.name, enabled=False) for arm in experiment.arms],
        design=traffic.design,
        duration_s=traffic.duration_s,
        rate=traffic.rate or 4.3 / traffic.time_scale,  # the mean pace of the trace over these minutes
        turn_s=traffic.block_s,
        trials=experiment.trials.count,
        gates={"draws": 99, "block_s": traffic.block_s, "min_blocks": experiment.gates.min_blocks},
        slo=dict(experiment.slo),
    )
    checks = analyze(write_run(tmp_path / "run", run))["validity"]
    assert [check["reason"] for check in checks if check["check"] in LENGTH_CHECKS and not check["ok"]] == []
    expected = {"blocks", "tail"} | ({"run length"} if experiment.slo else set())
    assert {check["check"] for check in checks} >= expected


def test_the_gpu_experiment_has_every_way_of_compiling() -> None:
    text = (Path(__file__).parents[3] / "loadtests" / "experiments" / "h200.toml").read_text()
    presets = [arm["preset"] for arm in tomllib.loads(text)["arms"]]
    assert presets == ["eager", "compiled-padded", "compiled-bucketed", "compiled-dynamic", "compiled-naive"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            MINIMAL.replace("compiled-padded", "eager-padded").replace(
                "[traffic]", "[arms.compile]\nfullgraph = true\n[traffic]"
            ),
            "arms[1].compile.fullgraph is set but the preset does not compile: add enabled = true",
        ),
        (
            MINIMAL.replace("[traffic]", '[arms.compile]\nbackend = "aot_eager"\n[traffic]'),
            'compile.mode is "reduce-overhead" but compile.backend is "aot_eager"',
        ),
        (
            MINIMAL.replace("compiled-padded", "compiled-naive").replace(
                "[traffic]", '[arms.compile]\nbackend = "aot_eager"\noptions = {max_autotune = true}\n[traffic]'
            ),
            'arms[1].compile.options is set but compile.backend is "aot_eager", and only inductor reads it',
        ),
        *(
            (
                MINIMAL.replace("[traffic]", f"[arms.compile]\nenabled = false\n{setting}\n[traffic]"),
                f"arms[1].compile.{setting.partition(' ')[0]} is set but arms[1].compile.enabled is false, so that",
            )
            for setting in (
                'mode = "max-autotune"',
                "strict = true",
                'regions = ["lm_head"]',
                "options = {max_autotunee = true}",
                'backend = "aot_eager"\nmode = "default"',
            )
        ),
        (MINIMAL + "\n[bed]\nsample_s = 0.01\n", "bed.sample_s is 0.01, about what a sample takes: give 0.05 or more"),
        (MINIMAL.replace('name = "compiled"', 'name = "é"'), 'arm name "é" is not usable'),
        (MINIMAL.replace('name = "compiled"', f'name = "{"x" * 80}"'), "arm name has 80 characters: give at most 64"),
        (MINIMAL.replace('"canary"', f'"{"x" * 300}"'), "name has 300 characters: give at most 64"),
        (
            MINIMAL.replace("[traffic]", '[splitter]\nport = 5557\n[traffic]\nmaster_bind = "10.0.0.1:5557"')
            + "remote_workers = 2\n",
            "splitter.port and the port of traffic.master_bind are both 5557: give two ports",
        ),
    ],
)
def test_what_contradicts_itself_or_breaks_a_name_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_arm_may_switch_its_compiler_off_and_keep_the_rest(tmp_path: Path) -> None:
    text = MINIMAL.replace("[traffic]", '[arms.compile]\nenabled = false\nwarmup = "minimal"\n[traffic]')
    experiment = load(write(tmp_path, text))
    policy = arm_of(experiment).config.compile
    assert (policy.enabled, policy.warmup, policy.mode) == (False, "minimal", "reduce-overhead")
    assert load(write(tmp_path, to_toml(experiment))) == experiment


def test_resolved_experiment_keeps_overrides_and_replicas(tmp_path: Path) -> None:
    text = MINIMAL + (
        "timeout_s = 5\nmax_concurrency = 4\n"
        '[slo]\np99_ttft_ms = 200\n[trials]\ncount = 3\n[splitter]\nstickiness = "replica"\n'
        '[model]\ndevice = "cuda:0"\n'
    )
    text = text.replace('preset = "compiled-padded"', 'preset = "compiled-bucketed"\ndevice = "cuda:1"').replace(
        "[traffic]",
        '[arms.compile]\nmode = "max-autotune-no-cudagraphs"\n[arms.shapes]\nbatch_ladder = [1, 8]\n[traffic]',
    )
    experiment = load(write(tmp_path, text))
    compiled = arm_of(experiment).config
    assert (compiled.compile.mode, compiled.shapes.batch_ladder) == ("max-autotune-no-cudagraphs", (1, 8))
    assert compiled.model.device == "cuda:1"
    assert from_table(tomllib.loads(to_toml(experiment))) == experiment


def test_targets_and_budgets_survive_a_round_trip(tmp_path: Path) -> None:
    text = MINIMAL + (
        '[slo]\np99_e2e_ms = 6000\ntargets = ["p50_itl_ms < 40", "error_rate <= 0.5%"]\n'
        "[slo.cold]\np99_ttft_ms = 9000\n"
        "[gates]\nquantile = 0.95\nmin_goodput_ratio = 0.9\n[gates.margins]\ne2e = 0.2\n"
        "[gates.cold]\nmax_recompiles = 3\n"
    )
    experiment = load(write(tmp_path, text), slo=["p99_e2e_ms <= 4000"])
    assert [target.text for target in parse_slo(experiment.slo)] == [
        "p50_itl_ms < 40",
        "error_rate <= 0.5%",
        "p99_e2e_ms <= 4000",
    ]
    assert [target.limit for target in parse_cold(experiment.slo)] == [9000.0]
    assert experiment.gates.quantiles == (0.95,)
    assert experiment.gates.cold == CompileBudget(max_recompiles=3)
    assert from_table(tomllib.loads(to_toml(experiment))) == experiment


def test_a_bad_target_of_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match='--slo holds "p99_ttft_ms 3": the operator is missing'):
        load("demo", slo=["p99_ttft_ms 3"])


@given(
    duration_s=st.floats(1, 1e5),
    rate=st.floats(0.01, 1e4),
    seed=st.integers(0, 2**63 - 1),
    margin=st.floats(0, 10),
    limits=st.dictionaries(st.sampled_from(["p99_ttft_ms", "p50_e2e_ms", "p99_9_max_itl_ms"]), st.floats(0.1, 1e6)),
    replicas=st.integers(1, 256),
)
def test_any_valid_experiment_survives_a_round_trip(
    duration_s: float, rate: float, seed: int, margin: float, limits: dict[str, float], replicas: int
) -> None:
    table = tomllib.loads(MINIMAL)
    table |= {"seed": seed, "slo": limits, "gates": {"margin": margin}}
    table["traffic"] = {"duration_s": duration_s, "rate": rate}
    for arm in table["arms"]:
        arm["replicas"] = replicas
    experiment = from_table(table)
    assert from_table(tomllib.loads(to_toml(experiment))) == experiment


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('name = "canary"', 'name = "canary"\nspeed = 9', "speed is unknown"),
        ('name = "canary"', "", "name is missing"),
        ('name = "canary"', 'name = "a b"', 'name "a b" is not usable'),
        ('name = "canary"', 'name = "canary"\nseed = "7"', "seed is '7': expected int"),
        ('name = "canary"', 'name = "canary"\nseed = -1', "seed is -1"),
        ('name = "canary"', 'name = "canary"\nmodel = 3', "model is 3: give a table [model]"),
        ("control = true", "", "no arm is the control"),
        ('name = "compiled"', 'name = "compiled"\ncontrol = true', "2 arms are the control (eager, compiled)"),
        ('name = "compiled"', 'name = "eager"', 'arms[1].name is "eager", the name of arms[0]'),
        ('name = "compiled"', 'name = "*"', 'arms[1]: arm name "*" is not usable'),
        ('name = "compiled"', "colour = 1", "arms[1].colour is unknown"),
        ('name = "compiled"', "weight = -1", "arms[1].weight is -1"),
        ('name = "compiled"', "weight = 3", 'does not split by weight: remove it or use design = "split"'),
        ('name = "compiled"', "replicas = 0", "arms[1].replicas is 0"),
        ('name = "compiled"', "replicas = 2", "make them equal"),
        ("compiled-padded", "compiled-quickly", 'arms[1]: preset "compiled-quickly" is unknown'),
        ('preset = "compiled-padded"', "", "arms[1].preset is missing"),
        ("[traffic]", "[arms.compile]\nmode = 'fast'\n[traffic]", "arms[1].compile.mode is 'fast'"),
        ("[traffic]", "[arms.compile]\nmod = 'x'\n[traffic]", "arms[1].compile.mod is unknown"),
        ("[traffic]", "[arms.shapes]\nbatch_ladder = [4, 2]\n[traffic]", "arms[1].shapes.batch_ladder is [4, 2]"),
        ("[traffic]", '[arms.model]\ndtype = "float16"\n[traffic]', "arms[1].model.dtype is 'float16' but the control"),
        ("[traffic]", '[arms.model]\nattention = "eager"\n[traffic]', "compare_models = true"),
        ("[traffic]", "[arms.engine]\nslots = 4\n[traffic]", "arms[1].engine.slots is 4 but the control"),
        ('preset = "compiled-padded"', 'preset = "compiled-padded"\ndevice = "cpu"', "arms[1].model.device is 'cpu'"),
        ("rate = 2", "rate = 2\ncolour = 1", "traffic.colour is unknown"),
        ("rate = 2", "rate = -2", "traffic.rate is -2"),
        ("rate = 2", "rate = 2\ndesign = 'split'\ndirect = true", "traffic.direct is true"),
        ("rate = 2", "rate = 2\ndesign = 'switchback'\nduration_s = 40", "traffic.duration_s is 40"),
        ("rate = 2", "rate = 2\n[slo]\np95ttft = 3", "slo.p95ttft is unknown: write pQ_METRIC_ms"),
        ("rate = 2", "rate = 2\n[slo]\np99_ttft_ms = 0", "slo.p99_ttft_ms is 0"),
        ("rate = 2", "rate = 2\n[slo]\np99_ttft_ms = 'x'", "slo.p99_ttft_ms is 'x'"),
        ("rate = 2", "rate = 2\n[slo]\ntargets = ['p99_ttft_ms >= 3']", 'slo.targets holds "p99_ttft_ms >= 3"'),
        ("rate = 2", "rate = 2\n[slo]\np99_ttft_ms = 3\ntargets = ['p99_ttft_ms <= 4']", "slo has both"),
        ("rate = 2", "rate = 2\n[slo.cold]\nspeed = 3", "slo.cold.speed is unknown"),
        (
            "rate = 2",
            "rate = 2\n[slo.cold]\np99_ttft_ms = 3\n[gates]\ncold_s = 0",
            "slo.cold has targets but gates.cold_s",
        ),
        ("rate = 2", "rate = 2\n[gates]\nmargin = -1", "gates.margin is -1"),
        ("rate = 2", "rate = 2\n[gates]\nquantile = 0.9\nquantiles = [0.9]", "keep quantiles"),
        ("rate = 2", "rate = 2\n[gates]\nmin_goodput_ratio = 0.9", "nothing says what a good request is"),
        ("rate = 2", "rate = 2\n[gates.margins]\ntpot = 0.1", "gates.margins.tpot is for a metric that is not in"),
        ("rate = 2", "rate = 2\n[gates.cold]\nmax_stall = 1", "gates.cold.max_stall is unknown"),
        ("rate = 2", "rate = 2\n[gates.cold]\nmax_recompiles = 'x'", "gates.cold.max_recompiles is 'x'"),
        ("rate = 2", "rate = 2\n[gates]\nmetrics = ['speed']", "gates.metrics holds 'speed'"),
        ("rate = 2", "rate = 2\n[gates]\nmetrics = []", "gates.metrics is empty"),
        ("rate = 2", "rate = 2\n[trials]\ncount = 0", "trials.count is 0"),
        ("rate = 2", "rate = 2\n[trials]\ncompile_cache = 'hot'", "trials.compile_cache is 'hot'"),
        (
            'preset = "compiled-padded"',
            'preset = "compiled-naive"\n[arms.compile]\nprofile = true',
            "compile.profile is true but trials.compile_cache is",
        ),
        ("[traffic]", "[arms.compile]\nprofile = true\n[traffic]", "so that no size is found to vary"),
        ("[traffic]", "[arms.compile]\nartifact = 'x'\nenabled = false\n[traffic]", "so that nothing is compiled"),
        (
            "[traffic]",
            "[arms.compile]\nartifact = 'x'\nbackend = 'eager'\n[traffic]",
            "only inductor keeps compiled code",
        ),
        (
            "[traffic]\nrate = 2",
            "[arms.compile]\nartifact = 'x'\n[trials]\ncompile_cache = 'shared'\n[traffic]\nrate = 2",
            'artifact is set but trials.compile_cache is "shared"',
        ),
        ("rate = 2", "rate = 2\n[splitter]\nport = 70000", "splitter.port is 70000"),
        ("rate = 2", "rate = 2\n[splitter]\nport = 80\nadmin_port = 80", "are both 80"),
        ("rate = 2", "rate =", "not valid TOML"),
        ("rate = 2", "arrivals = 'trace'", "replays a trace and names none: add --trace FILE"),
    ],
)
def test_bad_experiment_is_refused_with_key_value_and_remedy(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert old in MINIMAL
    # the last place, so that an arm's key lands in the second arm
    head, _, tail = MINIMAL.rpartition(old)
    assert expected in refusal(tmp_path, head + new + tail)


def test_one_arm_is_not_an_experiment(tmp_path: Path) -> None:
    text = 'name = "x"\n[[arms]]\npreset = "eager"\ncontrol = true\n[traffic]\nrate = 1\n'
    assert "arms has 1 entry: give 2 to" in refusal(tmp_path, text)


def test_models_may_differ_when_that_is_the_question(tmp_path: Path) -> None:
    text = MINIMAL.replace('name = "canary"', 'name = "canary"\ncompare_models = true').replace(
        "[traffic]", '[arms.model]\ndtype = "float16"\n[arms.engine]\nslots = 4\n[traffic]'
    )
    experiment = load(write(tmp_path, text))
    assert arm_of(experiment).config.model.dtype == "float16"
    assert from_table(tomllib.loads(to_toml(experiment))) == experiment


def test_arms_on_two_gpus_are_comparable(tmp_path: Path) -> None:
    text = MINIMAL.replace('preset = "eager"', 'preset = "eager"\ndevice = "cuda:0"').replace(
        'preset = "compiled-padded"', 'preset = "compiled-padded"\ndevice = "cuda:1"'
    )
    experiment = load(write(tmp_path, text))
    assert [arm.config.model.device for arm in experiment.arms] == ["cuda:0", "cuda:1"]
    assert from_table(tomllib.loads(to_toml(experiment))) == experiment


@pytest.mark.parametrize(
    ("setting", "path", "expected"),
    [
        ("traffic.duration_s=30", ("traffic", "duration_s"), 30.0),
        ("traffic.design=split", ("traffic", "design"), "split"),
        ("seed=5", ("seed",), 5),
        ("gates.metrics=['ttft']", ("gates", "metrics"), ("ttft",)),
        ("slo.p50_ttft_ms=1.5", ("slo", "p50_ttft_ms"), 1.5),
    ],
)
def test_a_setting_replaces_one_key(setting: str, path: tuple[str, ...], expected: object, tmp_path: Path) -> None:
    found: object = load(write(tmp_path, MINIMAL), settings=[setting])
    for key in path:
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert found == expected


@pytest.mark.parametrize("key", ["arms[1].compile.mode", "arms.compiled.compile.mode"])
def test_a_setting_reaches_an_arm_by_number_or_name(key: str, tmp_path: Path) -> None:
    experiment = load(write(tmp_path, MINIMAL), settings=[f"{key}=max-autotune"])
    assert experiment.arms[1].config.compile.mode == "max-autotune"
    assert experiment.arms[0].config.compile.mode == "default"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("traffic.rate", "is not KEY=VALUE"),
        ("=3", "is not KEY=VALUE"),
        ("traffic.speed=3", "traffic.speed is unknown"),
        ("arms[7].weight=3", "arms has 2 entries"),
        ("arms.other.weight=3", 'no entry is called "other"'),
        ("arms[0]=3", "names a whole table"),
        ("name.first=3", "is 'canary', not a table"),
        ("a b=3", '"a b" is no key'),
    ],
)
def test_a_setting_that_leads_nowhere_is_refused(setting: str, expected: str, tmp_path: Path) -> None:
    assert expected in refusal(tmp_path, MINIMAL, settings=[setting])


@given(st.text(alphabet="ab.[]0=_- ", max_size=12), st.integers())
def test_setting_a_path_never_fails_but_with_a_config_error(key: str, value: int) -> None:
    table: dict[str, object] = {"a": {"b": 1}, "b": [{"name": "a", "a": 0}]}
    try:
        set_path(table, key, value)
    except ConfigError:
        return
    assert str(value) in str(table)


@given(st.text(max_size=30))
def test_any_text_with_a_key_is_a_setting(text: str) -> None:
    wanted, equals, _ = text.partition("=")
    if not equals or not wanted.strip():
        with pytest.raises(ConfigError):
            parse_setting(text)
        return
    assert parse_setting(text)[0] == wanted.strip()


def test_a_trace_replaces_arrivals_and_lengths_but_keeps_the_scale(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    text = MINIMAL + "burstiness = 0.5\narrivals = 'gamma'\nlength_scale = 0.1\nturns_mean = 3\n"
    traffic = load(write(tmp_path, text), trace=str(trace)).traffic
    assert (traffic.arrivals, traffic.workload, traffic.trace) == ("trace", "trace", str(trace.resolve()))
    assert traffic.length_scale == 0.1
    assert "does not exist" in refusal(tmp_path, MINIMAL, trace=str(tmp_path / "none.csv"))


def test_a_trace_path_is_relative_to_the_experiment(tmp_path: Path) -> None:
    text = MINIMAL.replace("rate = 2", 'arrivals = "trace"\ntrace = "here.csv"')
    assert load(write(tmp_path, text)).traffic.trace == str((tmp_path / "here.csv").resolve())


def test_a_missing_experiment_names_the_built_in_ones(tmp_path: Path) -> None:
    known = ", ".join(builtin_names())
    with pytest.raises(ConfigError, match=rf"does not exist: give a TOML file or .* name \({known}\)"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        load(tmp_path)


INT8 = MINIMAL.replace(
    'preset = "compiled-padded"', 'preset = "compiled-bucketed"\nmodel = { quantisation = "int8-weight-only" }'
)


class TestQuantisation:
    """Arms may differ in how their weights are held, beside their policy."""

    def test_an_arm_of_its_own_weights_is_comparable_and_its_projections_are_not_joined(self, tmp_path: Path) -> None:
        experiment = load(write(tmp_path, INT8))
        config = arm_of(experiment).config
        assert (config.model.quantisation, config.compile.join_projections) == ("int8-weight-only", False)
        assert [arm.name for arm in experiment.quantised_arms] == ["compiled"]
        assert load(write(tmp_path, to_toml(experiment))) == experiment

    def test_projections_that_are_to_be_joined_all_the_same_are_refused(self, tmp_path: Path) -> None:
        text = INT8.replace("[traffic]", "[arms.compile]\njoin_projections = true\n\n[traffic]")
        assert "compile.join_projections is true but model.quantisation is" in refusal(tmp_path, text)

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            ({"quantisation": "fp4"}, "model.quantisation is 'fp4': use one of none, float8-per-row,"),
            ({"quantisation": "float8-per-row", "device": "cpu"}, "runs on the CPU, which only knows"),
            ({"quantisation": "int4-weight-only", "device": "cpu"}, "runs on the CPU, which only knows"),
            ({"quantisation": "float8-per-row", "device": "cuda", "dtype": "float16"}, 'needs dtype = "bfloat16"'),
        ],
    )
    def test_what_cannot_be_is_refused(self, model: dict[str, str], words: str, tmp_path: Path) -> None:
        settings = [f"model.{key}={value}" for key, value in model.items()]
        assert words in refusal(tmp_path, MINIMAL, settings=settings)

    def test_parity_needs_a_control_that_is_not_quantised(self, tmp_path: Path) -> None:
        settings = ["model.quantisation=int8-weight-only", "model.device=cpu"]
        assert load(write(tmp_path, MINIMAL), settings=settings).quantised_arms == ()
        message = refusal(tmp_path, MINIMAL, settings=[*settings, "parity.full=true"])
        assert 'the control "eager" has model.quantisation "int8-weight-only"' in message

    def test_real_weights_are_judged_by_texts_of_the_user_s(self, tmp_path: Path) -> None:
        settings = ["model.id=org/model", "parity.full=true"]
        assert "parity.texts names none" in refusal(tmp_path, INT8, settings=settings)
        load(write(tmp_path, MINIMAL), settings=settings)
        load(write(tmp_path, INT8), settings=["model.id=org/model"])
        text = INT8 + '[parity]\ntexts = "own.jsonl"\n'
        experiment = load(write(tmp_path, text), settings=settings)
        assert experiment.parity.texts == str(tmp_path / "own.jsonl")


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ("model", ModelConfig),
        ("engine", EngineConfig),
        ("shapes", ShapeConfig),
        ("compile", CompileConfig),
        ("traffic", TrafficConfig),
        ("trials", TrialsConfig),
        ("gates", GateLimits),
        ("splitter", SplitterSettings),
        ("rollout", Rollout),
        ("parity", ParityConfig),
    ],
)
def test_every_setting_is_documented(table: str, kind: type) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "quickstart.md").read_text()
    missing = [item.name for item in fields(kind) if f"`{table}.{item.name}`" not in text]
    assert missing == []


def test_the_experiment_in_the_quickstart_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "quickstart.md").read_text()
    example = text.partition("```toml\n")[2].partition("```")[0]
    assert load(write(tmp_path, example)).control.name == "eager"


def test_a_hubs_tokenizer_is_not_looked_for_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.toml").write_text(MINIMAL + 'tokenizer = "org/model"\nprompts = "text"\n')
    (tmp_path / "stands" / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "stands")
    assert load(tmp_path / "mine" / "own.toml").traffic.tokenizer == "org/model"
    chosen = load(tmp_path / "mine" / "own.toml", settings=["traffic.tokenizer=org/model"])
    assert chosen.traffic.tokenizer == str(tmp_path / "stands" / "org" / "model")
