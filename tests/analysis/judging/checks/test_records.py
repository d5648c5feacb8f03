from analysis.judging.checks.records import check_complete, check_counts, check_cut, check_deaths, check_records


def test_mirrored_arms_must_have_equal_counts():
    assert check_counts({"a": 1000, "b": 999}, {}, mirrored=True).ok
    lost = check_counts({"a": 1000, "b": 900}, {}, mirrored=True)
    assert not lost.ok
    assert "b has 900 of 1000 requests" in lost.reason


def test_an_arm_without_requests_is_missing_in_any_design():
    assert not check_counts({"a": 1000, "b": 0}, {}, mirrored=False).ok
    assert not check_counts({}, {}, mirrored=True).ok


def test_requests_that_were_planned_must_be_there():
    assert not check_counts({"a": 900, "b": 900}, {"a": 1000, "b": 1000}, mirrored=True).ok
    assert not check_counts({"a": 500, "b": 400}, {"*": 1000}, mirrored=False).ok
    assert check_counts({"a": 600, "b": 400}, {"*": 1000}, mirrored=False).ok


def test_requests_cut_by_the_end_must_not_hold_the_tail():
    assert check_cut("a", 10, 1000, 0.99).ok
    assert not check_cut("a", 11, 1000, 0.99).ok


def test_nobody_is_missing_who_was_only_under_way():
    assert check_counts({"a": 1000, "b": 998}, {}, mirrored=True).ok
    assert not check_counts({"a": 1000, "b": 997}, {}, mirrored=True).ok


def test_a_torn_file_a_broken_time_and_a_row_that_is_there_twice_are_told():
    assert check_records([], 0, 0).ok
    torn = check_records(["requests-0.arrow is cut off at its end"], 1, 2)
    assert not torn.ok
    assert torn.reason == (
        "requests-0.arrow is cut off at its end; 1 request has times that are missing or run backwards; "
        "2 rows repeat a request."
    )


def test_a_stopped_trial_is_named():
    assert check_complete([{"trial": 1, "complete": True}]).ok
    stopped = check_complete([{"trial": 1, "complete": True}, {"trial": 2}])
    assert (stopped.ok, stopped.reason) == (False, "Trial 2 was stopped before its end.")


def test_a_trial_that_was_planned_and_is_not_there_is_named():
    """Two of three trials that are there ended well; the third may be the one that the folder was deleted of."""
    ended = [{"trial": 1, "complete": True}, {"trial": 2, "complete": True}]
    assert check_complete(ended, planned=2).ok
    assert check_complete(ended, planned=3).reason == "Trial 3 is missing."
    assert (
        check_complete([{"trial": 1, "complete": True}, {"trial": 3, "complete": True}]).reason == "Trial 2 is missing."
    )
    assert check_complete([], planned=0).ok


def test_a_dead_control_spoils_every_arm_and_a_dead_arm_itself():
    deaths = [{"replica": "a-0", "exit_code": -9}]
    assert check_deaths("a", [], control=False).ok
    assert check_deaths("a", deaths, control=True).arm is None
    died = check_deaths("a", deaths, control=False)
    assert (died.arm, died.reason) == ("a", "a died under load: a-0 (exit code -9).")


def test_a_death_in_the_midst_of_a_compile_says_so():
    compiling = {"start_ns": 5, "seconds": 12.04, "shape": "prefill 2x64"}
    died = check_deaths("a", [{"replica": "a-0", "exit_code": -9, "compiling": compiling}], control=False)
    assert "a-0 (exit code -9, 12.0 s into a compile for prefill 2x64)" in died.reason
