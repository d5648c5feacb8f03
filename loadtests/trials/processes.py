"""What the processes of a run are given: their environment."""

from __future__ import annotations

import os

from loadtests.page.serving import TOKEN_VARIABLE as PAGE_TOKEN_VARIABLE
from loadtests.provider import TOKEN_VARIABLE as PROVIDER_TOKEN_VARIABLE
from loadtests.workers.channel_token import TOKEN_VARIABLE
from servers.clock import anchored_environment
from servers.config import ArmConfig


def child_environment() -> dict[str, str]:
    """This process's environment with the shared clock, without variables of Locust and without the secrets of its
    channel, of the live page and of those who ask about a candidate."""
    secrets = {TOKEN_VARIABLE, PAGE_TOKEN_VARIABLE, PROVIDER_TOKEN_VARIABLE}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_") and key not in secrets}
    return {**kept, **anchored_environment()}


def thread_variables(arm: ArmConfig) -> dict[str, str]:
    """What sizes the thread pools of an arm on the CPU. They are sized once, when torch is imported."""
    threads = arm.engine.threads
    if not threads or arm.model.device.startswith("cuda"):
        return {}
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
