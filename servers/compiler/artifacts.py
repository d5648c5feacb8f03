"""Compiled code that outlives its process: saved to a file, and loaded from one, by torch's portable cache."""

from __future__ import annotations

import torch
import torch._inductor.config as inductor

from servers import artifact
from servers.artifact import Artifact
from servers.config import ArmConfig
from servers.fields import ConfigError

# A statically launched kernel looks for its tuned configuration in the folder of the process that compiled it, and a
# reduction that takes many registers is given another variant whenever it is loaded: either is tuned again at a start.
# The launcher has its second name since torch 2.13.
_PORTABLE = {"use_static_cuda_launcher": False, "use_static_triton_launcher": False, "dynamic_scale_rblock": False}


def compile_portably() -> None:
    """Have the compiler make what another process can use without tuning. `compile.options` overrule it."""
    for name, value in _PORTABLE.items():
        if hasattr(inductor, name):
            setattr(inductor, name, value)


def save(path: str, arm: ArmConfig, device: torch.device) -> tuple[Artifact, int]:
    """Write the graphs of this process, which has compiled `arm` and nothing else, and return their number."""
    saved = torch.compiler.save_cache_artifacts()
    if saved is None or not saved[1].inductor_artifacts:
        raise ConfigError(f'arm "{arm.name}" left no graph in the compile cache: switch it on, or compile something')
    code, kept = saved
    return artifact.write(path, artifact.facts_of(arm, device=_kind(arm, device)), code), len(kept.inductor_artifacts)


def load(arm: ArmConfig, device: torch.device) -> Artifact:
    """Fill this process's compile cache with the arm's artifact. Raises ConfigError where it does not belong here."""
    loaded = artifact.read(arm.compile.artifact)
    artifact.check(loaded, arm, (_kind(arm, device),))
    if torch.compiler.load_cache_artifacts(loaded.code) is None:
        raise ConfigError(f'compile.artifact "{loaded.path}" holds no cache that torch can read: write it anew')
    compile_portably()
    return loaded


def _kind(arm: ArmConfig, device: torch.device) -> str:
    """What runs the same code: a GPU by its product name, a processor by its instructions and the threads in use."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    threads = arm.engine.threads or torch.get_num_threads()
    return f"a processor with {torch.backends.cpu.get_cpu_capability()} and {threads} threads"
