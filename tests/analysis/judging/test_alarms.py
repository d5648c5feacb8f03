from analysis.judging.alarms import Alarm, ServedCompile, burst_alarms, compile_alarms, death_alarms


def compiled(end_ns: int, seconds: float = 0.1, *, kind: str = "recompile", arm: str = "new") -> ServedCompile:
    return ServedCompile(arm=arm, kind=kind, seconds=seconds, end_ns=end_ns, shape="prefill 1×81")


def found(*events: ServedCompile, most: int = 1) -> list[str]:
    return [alarm.why for alarm in compile_alarms("new", events, stall_limit_s=1.0, max_recompiles=most)]


def test_a_compile_of_the_limit_or_longer_is_an_alarm_when_it_ends() -> None:
    (alarm,) = compile_alarms("new", [compiled(7, 1.0), compiled(9, 0.99)], stall_limit_s=1.0, max_recompiles=9)
    assert alarm == Alarm(at_ns=7, why="new compiled for 1.0 s while serving for prefill 1×81")


def test_recompiles_beyond_the_limit_are_alarms_each() -> None:
    assert found(compiled(1)) == []
    assert found(compiled(1), compiled(2), compiled(3)) == [
        "new recompiled 2 times while serving for prefill 1×81",
        "new recompiled 3 times while serving for prefill 1×81",
    ]


def test_other_arms_and_events_that_no_unforeseen_shape_caused_are_none() -> None:
    assert found(compiled(1, 9.0, arm="old"), compiled(2, 9.0, kind="graph_capture"), most=0) == []


def test_a_death_counts_when_it_happened_and_now_where_nobody_knows() -> None:
    deaths = [{"arm": "new", "replica": "new-0", "at_ns": 5}, {"arm": "new"}, {"arm": "old", "replica": "old-0"}]
    assert death_alarms("new", deaths, now_ns=9) == [
        Alarm(at_ns=5, why="new-0 died"),
        Alarm(at_ns=9, why="new died"),
    ]


def test_a_burst_is_five_failures_and_more_than_a_fifth() -> None:
    def burst(failed: int, finished: int) -> list[Alarm]:
        return burst_alarms("new", failed=failed, finished=finished, now_ns=3, meanwhile="in this step")

    assert burst(4, 4) == burst(5, 25) == []
    assert burst(5, 24) == [Alarm(at_ns=3, why="5 of 24 requests to new failed in this step")]
