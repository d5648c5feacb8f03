"""The environment of the processes that a run starts."""

from __future__ import annotations

import os

from loadtests.workers.channel_token import TOKEN_VARIABLE
from servers.clock import anchored_environment
from servers.config import ArmConfig


def child_environment() -> dict[str, str]:
    """This process's environment with the shared clock, and without what is meant for Locust."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_") and key != TOKEN_VARIABLE}
    return {**kept, **anchored_environment()}


def thread_variables(arm: ArmConfig) -> dict[str, str]:
    """What sizes the thread pools of an arm on the CPU. They are sized once, when torch is imported."""
    threads = arm.engine.threads
    if not threads or arm.model.device.startswith("cuda"):
        return {}
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
