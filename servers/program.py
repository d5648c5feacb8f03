"""What the programs of an arm have in common: how they read it, log, keep compiled code and end."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from tailgate.servers.complaint import ConfigError, fault, one_line
from tailgate.servers.config import ArmConfig
from tailgate.servers.processes import temporary_folder


def read_arm(path: str) -> ArmConfig:
    """Return the arm in the JSON file that --config names. Raises ConfigError."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    return ArmConfig.from_dict(table)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Log lines from `level` on. A screen shows errors alone of libraries; a log file (`level` INFO and no terminal)
    has their warnings too. torch reads TORCH_LOGS when it is imported; a user's own stays."""
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if level > logging.INFO or sys.stderr.isatty():
        logging.captureWarnings(True)
        os.environ.setdefault("TORCH_LOGS", "-all")
        for handler in logging.getLogger().handlers:
            handler.addFilter(_own_or_error)


def _own_or_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.name.startswith("tailgate")


def progress_to_stderr(*, quiet: bool) -> Callable[[str], None]:
    """Return what prints a line of progress, or nothing where it is to be quiet."""

    def report(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return report


@contextmanager
def compile_cache(folder: str) -> Iterator[str]:
    """Yield where compiled code is kept: `folder`, or a fresh one that is removed afterwards, since last week's code
    would hide what a rollout costs."""
    if folder:
        yield folder
        return
    with temporary_folder("tailgate-compile-") as fresh:
        yield str(fresh)


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
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def pin_to_card(arm: ArmConfig, environment: MutableMapping[str, str]) -> ArmConfig:
    """Narrow `environment` to the arm's card, and return the arm as a process with that environment reads it.

    Inductor keeps compiled code under the number of its card, which is 0 in a process that sees its card alone: an arm
    that changes places between trials finds its code. An arm on the processor sees no card: torch's compiler would take
    half a gigabyte on the first one. A card that `environment` does not show is left to `resolve_device`.
    """
    if arm.model.device == "cpu":
        environment[_VISIBLE] = ""
        return arm
    match = re.fullmatch(r"cuda:(\d+)", arm.model.device)
    if match is None:
        return arm
    number = int(match[1])
    shown = [card.strip() for card in environment[_VISIBLE].split(",")] if _VISIBLE in environment else None
    card = str(number) if shown is None else "".join(shown[number : number + 1])
    if not card:
        return arm
    environment[_VISIBLE] = card
    return arm.replace(model=arm.model.replace(device="cuda:0"))


def isolate_compiler(environment: MutableMapping[str, str], folder: str) -> None:
    """Have the compiler take over from earlier processes what lies in `folder`, its default place if empty, and nothing
    else. Torch reads these variables when it is imported."""
    for name in _CARRYING:
        environment.pop(name, None)
    environment["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO"] = "0"
    if assembler := _torch_assembler():
        # Triton's keys hold the version of its assembler. Torch names its own only when its first compile begins, and
        # in its workers: what was keyed before that is never found after it, and is compiled anew.
        environment.setdefault("TRITON_PTXAS_PATH", str(assembler))
    if folder:
        folder = os.path.abspath(folder)  # noqa: PTH100 (links stay as they are)
        environment["TORCHINDUCTOR_CACHE_DIR"] = folder
        # Triton's own default outlives every start. Kernels that inductor does not make would go there.
        environment["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")  # noqa: PTH118


def _torch_assembler() -> Path | None:
    """Find the assembler (ptxas) that torch's CUDA builds bring, which inductor gives to Triton. Without torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    path = Path(torch.origin).parent / "bin" / "ptxas"
    return path if path.is_file() and os.access(path, os.X_OK) else None


def exit_code(work: Callable[[], int]) -> int:
    """Return what `work` returns; 2 for a wrong configuration and 1 when it broke, each with one line on stderr."""
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
