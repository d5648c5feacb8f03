"""Compiled code that outlives its process: what is set so that all of it is kept and found again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._inductor.config as inductor

from servers.compiler import artifacts
from tests.servers.compiler.reset import reset_compiler


@pytest.fixture(autouse=True)
def as_torch_brings_it() -> Iterator[None]:
    yield
    reset_compiler()


def test_kernels_are_launched_from_the_folder_and_tuned_ones_are_left_as_the_search_found_them() -> None:
    assert (inductor.use_static_cuda_launcher, inductor.dynamic_scale_rblock) == (True, True), "as torch brings them"
    artifacts.compile_portably()
    assert not inductor.use_static_cuda_launcher
    assert not inductor.dynamic_scale_rblock


def test_a_setting_that_a_torch_does_not_know_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_PORTABLE", {"use_some_later_launcher": False, "dynamic_scale_rblock": False})
    artifacts.compile_portably()
    assert not inductor.dynamic_scale_rblock
