import pytest

from analysis.records.tables import RecordError
from analysis.settings.slo_targets import merged, parse_cold, parse_slo, parse_target


def refused(call, *arguments):
    with pytest.raises(RecordError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestTheFieldsSyntax:
    @pytest.mark.parametrize(
        ("text", "key", "limit", "strict"),
        [
            ("p99_ttft_ms <= 500", "p99_ttft_ms", 500.0, False),
            ("p50_itl_ms < 40", "p50_itl_ms", 40.0, True),
            ("p99.9_e2el <= 2s", "p99_9_e2e_ms", 2000.0, False),
            ("p95_max_itl_ms<=1.5e2", "p95_max_itl_ms", 150.0, False),
            ("p90_tpot ≤ 40 ms", "p90_tpot_ms", 40.0, False),
            ("error_rate <= 0.5%", "error_pct", 0.5, False),
            ("error_pct < 1", "error_pct", 1.0, True),
        ],
    )
    def test_a_target_reads_as_it_is_written(self, text, key, limit, strict):
        target = parse_target(text, "slo.targets")
        assert (target.key, target.limit, target.strict) == (key, limit, strict)

    @pytest.mark.parametrize("text", ["p99_ttft_ms <= 500", "p99_9_e2e_ms < 30000.5", "error_rate <= 0.5%"])
    def test_what_is_written_reads_back(self, text):
        assert parse_target(text, "--slo").text == text

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("p99_ttft_ms >= 500", '">=" is no limit from above: write <= or <, such as p99_ttft_ms <= 500'),
            ("p99_ttft_ms = 500", '"=" is no limit from above'),
            ("p99_ttft_ms 500", "the operator is missing"),
            ("p99_ttft_ms <=", "the number is missing: write one after <=, such as p99_ttft_ms <= 500"),
            ("p99_ttft_ms <= fast", '"fast" is no finite number: write one such as 500 or 0.5'),
            ("p99_ttft_ms <= nan", '"nan" is no finite number: write one such as 500 or 0.5'),
            ("p99_ttft_ms <= -inf", '"-inf" is no finite number'),
            ("p99_ttft_ms <= 1.2.3", '"1.2.3" is no number'),
            ("p99_ttft_ms <= -3", "give milliseconds above 0"),
            ("p99_ttft <= 500", "the unit is missing: write p99_ttft_ms <= 500 or p99_ttft <= 500ms"),
            ("p99_ttft_ms <= 0.5s", '"s" is no unit of p99_ttft_ms: write p99_ttft <= 500ms or p99_ttft <= 0.5s'),
            ("p99_latency_ms <= 5", "p99_latency_ms is unknown: write pQ_METRIC_ms with METRIC of ttft, e2e"),
            ("p0_ttft_ms <= 5", "asks for quantile 0"),
            ("error_rate <= 0.005", "write the error rate in percent, such as error_rate <= 0.5%"),
            ("error_rate <= 101%", "give a percentage from 0 to 100"),
            ("", "write KEY <= LIMIT"),
        ],
    )
    def test_what_cannot_be_used_is_told_with_the_remedy(self, text, expected):
        message = refused(parse_target, text, "slo.targets")
        assert message.startswith(f'slo.targets holds "{text}": ')
        assert expected in message


class TestTables:
    def test_keys_and_texts_stand_side_by_side(self):
        targets = parse_slo({"p99_ttft_ms": 500, "targets": ["p50_itl_ms < 40", "error_rate <= 0.5%"]})
        assert [target.text for target in targets] == ["p99_ttft_ms <= 500", "p50_itl_ms < 40", "error_rate <= 0.5%"]

    def test_saying_it_twice_is_saying_it_once(self):
        assert len(parse_slo({"p99_ttft_ms": 500, "targets": ["p99_ttft_ms <= 500"]})) == 1

    @pytest.mark.parametrize("other", ["p99_ttft_ms <= 400", "p99_ttft_ms < 500"])
    def test_two_limits_of_one_figure_are_refused(self, other):
        message = refused(parse_slo, {"p99_ttft_ms": 500, "targets": [other]})
        assert message == f"slo has both p99_ttft_ms <= 500 and {other}: keep one"

    def test_the_cold_start_has_targets_of_its_own(self):
        table = {"p99_ttft_ms": 500, "cold": {"targets": ["p99_ttft_ms <= 9000"]}}
        assert [(target.limit, target.cold) for target in parse_slo(table)] == [(500.0, False)]
        assert [(target.limit, target.cold) for target in parse_cold(table)] == [(9000.0, True)]

    @pytest.mark.parametrize(
        ("table", "expected"),
        [
            ({"cold": 3}, "slo.cold is 3: give a table [slo.cold]"),
            ({"cold": {"speed": 3}}, "slo.cold.speed is unknown"),
            ({"cold": {"cold": {}}}, "slo.cold.cold is unknown"),
        ],
    )
    def test_a_bad_cold_table_is_named(self, table, expected):
        assert expected in refused(parse_cold, table)

    @pytest.mark.parametrize("value", ["p99_ttft_ms <= 5", [5], None])
    def test_targets_are_a_list_of_texts(self, value):
        assert "give a list such as" in refused(parse_slo, {"targets": value})

    def test_a_text_of_the_command_line_replaces_its_own_figure_alone(self):
        table = {"p99_ttft_ms": 500, "p99_e2e_ms": 6000, "cold": {"p99_ttft_ms": 9000}}
        changed = merged(table, ["p99_ttft_ms <= 300", "error_rate <= 1%"])
        assert [target.text for target in parse_slo(changed)] == [
            "p99_e2e_ms <= 6000",
            "p99_ttft_ms <= 300",
            "error_rate <= 1%",
        ]
        assert parse_cold(changed) == parse_cold(table)
        assert refused(merged, {}, ["p99_ttft_ms"]).startswith('--slo holds "p99_ttft_ms"')
