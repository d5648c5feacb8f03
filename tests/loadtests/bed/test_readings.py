import pytest

from loadtests.bed import readings as module
from loadtests.bed.readings import Probe, Readings, Seldom, probe, reason


def test_what_fails_is_said_once_and_tried_again_each_time() -> None:
    said: list[dict[str, str]] = []
    readings = Readings("run", said.append)
    answers = iter([ValueError("not yet"), ValueError("still not"), 7])

    def read() -> int:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    probes = [probe("one", read), Probe(("two", "three"), lambda: (2, None))]
    assert [readings.of("cuda:0", probes) for _ in range(3)] == [{"two": 2}, {"two": 2}, {"one": 7, "two": 2}]
    assert said == [{"host": "run", "name": "cuda:0", "what": "one", "why": "not yet"}]


def test_a_reason_is_one_line_in_the_words_of_whoever_refused() -> None:
    assert reason(FileNotFoundError(2, "No such file or directory", "/x")) == "/x: No such file or directory"
    assert reason(OSError("the kernel\nshows none")) == "the kernel shows none"
    assert reason(ValueError()) == "ValueError"


def test_what_costs_much_waits_until_its_share_of_a_processor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"monotonic": 100.0, "thread_time": 0.0}
    monkeypatch.setattr(module.time, "monotonic", lambda: now["monotonic"])
    monkeypatch.setattr(module.time, "thread_time", lambda: now["thread_time"])
    seldom = Seldom(share=0.001, least_s=2.0)
    assert seldom.due
    with seldom.spending():
        now["thread_time"] += 0.005
    due = []
    for now["monotonic"] in (102.0, 104.9, 105.0):
        due.append(seldom.due)
    assert due == [False, False, True]
    with seldom.spending():
        pass  # costs nothing
    assert not seldom.due
    now["monotonic"] += 2.0
    assert seldom.due
    with seldom.spending():
        pass
    seldom.hurry()
    assert seldom.due
