"""Which trial ran on which machine."""

from dataclasses import replace

import numpy as np

from analysis.records.run_list import listed_runs, write_run_list
from analysis.records.run_records import read_run
from analysis.run.machines import Machines
from tests.fakes.runs import DAYS_APART, FakeRun, write_run

SHORT = FakeRun(duration_s=10, rate=1)


def machines_of(folder, *machines):
    directories = []
    for day, machine in enumerate(machines):
        environment = {"machine": machine} if machine else {}
        run = replace(SHORT, seed=day, day=day * DAYS_APART, environment=environment)
        directories.append(write_run(folder / f"run-{day}", run))
    write_run_list(folder / "joined", listed_runs(directories))
    return Machines.of(read_run(folder / "joined").runs)


def test_machines_stand_in_order_of_their_first_trial(tmp_path):
    machines = machines_of(tmp_path, "b", "a", "b")
    assert machines.names == ("b", "a")
    assert machines.of_trial == {1: 0, 2: 1, 3: 0}
    assert machines.codes(np.array([3, 2, 1, 1])).tolist() == [0, 1, 0, 0]


def test_a_run_that_does_not_say_where_it_ran_has_a_machine_of_its_own(tmp_path):
    machines = machines_of(tmp_path, None, "a", None)
    assert machines.names == ("the machine of run-0", "a", "the machine of run-2")


def test_trials_that_no_run_has_are_on_the_first_machine(tmp_path):
    assert machines_of(tmp_path, "b", "a").codes(np.array([-1, 0, 9])).tolist() == [0, 0, 0]
