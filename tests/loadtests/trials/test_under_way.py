import pytest

from loadtests.trials.under_way import UnderWay, stalls

S = 1_000_000_000


def compile_of(*, arm: str = "naive", kind: str = "compile", start_s: float = 10.0) -> UnderWay:
    return UnderWay(arm=arm, replica=f"{arm}-0", kind=kind, start_ns=int(start_s * S), shape="prefill 2x64")


@pytest.mark.parametrize(("at_s", "is_stall"), [(10.5, False), (11.0, True), (32.0, True)])
def test_a_compile_is_a_stall_from_the_instant_on_at_which_it_reached_the_limit(at_s: float, is_stall: bool) -> None:
    found = stalls([compile_of()], arm="naive", limit_s=1.0, at_ns=int(at_s * S))
    assert [at_ns for at_ns, _ in found] == [11 * S] * is_stall


def test_a_stall_says_for_how_long_and_for_which_shape() -> None:
    ((_, why),) = stalls([compile_of()], arm="naive", limit_s=1.0, at_ns=12 * S)
    assert why == "naive has been compiling for 2.0 s while serving for prefill 2x64"


def test_other_arms_and_what_counts_as_no_recompile_are_no_stalls() -> None:
    others = [compile_of(arm="eager"), compile_of(kind="graph_capture")]
    assert stalls(others, arm="naive", limit_s=0.0, at_ns=99 * S) == []
