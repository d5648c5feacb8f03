"""What the programs of an arm have in common: how they read it, log, keep compiled code and end."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from servers.complaint import fault, one_line
from servers.config import ArmConfig
from servers.fields import ConfigError
from servers.temporary_folder import TemporaryFolder
from servers.visible_card import only_card


def read_arm(path: str) -> ArmConfig:
    """The arm in the JSON file that --config names. Raises ConfigError."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    return ArmConfig.from_dict(table)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Lines from `level` on have a time and the name of who wrote them."""
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")


@contextmanager
def compile_cache(folder: str) -> Iterator[str]:
    """Where compiled code is kept: in `folder`, or in a fresh one that is gone afterwards.

    A cold cache is the honest default: a replica with last week's artifacts would hide what a rollout costs.
    """
    if folder:
        yield folder
        return
    with TemporaryFolder("tailgate-compile-") as fresh:
        yield str(fresh.path)


# What would carry decisions of earlier processes into this one, or out of it: profiles of sizes, under a name or in
# words; caches on other machines; whatever Triton's kernels are kept in. And where compiles run, which is the arm's.
_CARRYING = (
    *("TORCH_COMPILE_JOB_ID", "TORCH_COMPILE_STICKY_PGO_KEY"),
    *("TORCH_COMPILE_STICKY_PGO_READ", "TORCH_COMPILE_STICKY_PGO_WRITE", "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO"),
    *("TORCH_COMPILE_DYNAMIC_SOURCES", "TORCH_COMPILE_DYNAMIC_VALUES", "TORCH_COMPILE_UNBACKED_SOURCES"),
    *("TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE", "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE"),
    *("TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE", "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE"),
    *("TORCH_CACHING_PRECOMPILE", "TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER"),
    "TORCHINDUCTOR_FX_COMPILE_MODE",
)


def on_its_card_alone(arm: ArmConfig, environment: MutableMapping[str, str]) -> ArmConfig:
    """The arm as a process reads it that has `environment` from its start and sees no card but the arm's own."""
    device, visible = only_card(arm.model.device, environment)
    environment.update(visible)
    return replace(arm, model=replace(arm.model, device=device))


def isolate_compiler(environment: MutableMapping[str, str], folder: str) -> None:
    """In `environment` the compiler takes over from earlier processes what lies in `folder`, and nothing else.

    Torch reads these variables when it is imported. Without a folder it keeps code in its default place.
    """
    for name in _CARRYING:
        environment.pop(name, None)
    environment["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO"] = "0"
    if assembler := _torch_assembler():
        # Triton's keys hold the version of its assembler. Torch names its own only when its first compile begins, and
        # in its workers: what was keyed before that is found by nobody after it, and is compiled anew.
        environment.setdefault("TRITON_PTXAS_PATH", str(assembler))
    if folder:
        folder = os.path.abspath(folder)  # noqa: PTH100 (links stay as they are)
        environment["TORCHINDUCTOR_CACHE_DIR"] = folder
        # Triton's own default outlives every start. Kernels that inductor does not make would go there.
        environment["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")  # noqa: PTH118


def _torch_assembler() -> Path | None:
    """The assembler (ptxas) that torch's CUDA builds bring, which inductor gives to Triton. Does not import torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    path = Path(torch.origin).parent / "bin" / "ptxas"
    return path if path.is_file() and os.access(path, os.X_OK) else None


def exit_code(work: Callable[[], int]) -> int:
    """What `work` returns; 2 when it cannot be configured so and 1 when it broke, each with one line on stderr."""
    try:
        return work()
    except ConfigError as error:
        print(f"tailgate: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tailgate: interrupted", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"tailgate: {one_line(fault(error))}", file=sys.stderr)
        return 1
