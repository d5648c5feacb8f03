"""Compiled code that outlives its process: made so that all of it can be kept, saved to a file, and loaded from one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from servers import artifact
from servers.artifact import Artifact
from servers.compiler.policy import has_inductor_option, set_inductor_option
from servers.config import ArmConfig
from servers.fields import ConfigError

# Three ways of inductor leave something out of the cache folder, or do not find what lies there:
#
# - A statically launched kernel is pickled with the path of its source, and looks for its tuned configuration beside
#   that path: in the folder of the process that compiled it. Up to torch 2.11 it looks only if it began with several
#   configurations (CachingAutotuner.recheck_autotune_cache). Either way it is tuned again. Launched by Triton itself, a
#   kernel is read from the folder that is there now.
# - A reduction that takes many registers is given a smaller variant whenever it is loaded, tuned or not. The faster of
#   the two is then kept as the best one, in the place of what the search had found; up to torch 2.11 what lies there is
#   no configuration that the next process knows, so that it searches again. The search tries smaller ones itself.
# - Precompiled C++ headers lie in a folder of their own, and the C++ compiler reads all headers at each start to find
#   out whether they still hold.
_PORTABLE = {
    "use_static_cuda_launcher": False,
    "use_static_triton_launcher": False,  # the later name of the same
    "dynamic_scale_rblock": False,
    "cpp_cache_precompile_headers": False,
}


_MADE = (".so", ".cubin", ".hsaco")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An artifact whose files lie in this process's compile cache, and what lay there then."""

    artifact: Artifact
    folder: Path
    files: frozenset[Path]

    def compiled_anew(self) -> int:
        """Libraries and kernels in the cache that were not there then. A cache hit of torch does not tell: behind one
        the C++ compiler or Triton may have run."""
        return sum(path.suffix in _MADE and path not in self.files for path in artifact.kept_files(self.folder))


def compile_portably() -> None:
    """From here on all that the compiler makes lies in its cache folder, and is found there again wherever that is.

    What `compile.options` say of these settings counts more.
    """
    for name, value in _PORTABLE.items():
        if has_inductor_option(name):
            set_inductor_option(name, value)


def save(path: str, arm: ArmConfig, device: torch.device) -> Artifact:
    """`path` holds all compiled code of this process, which has compiled `arm` and nothing else."""
    folder = Path(cache_dir())
    graphs = sum("fxgraph" in file.relative_to(folder).parts for file in artifact.kept_files(folder))
    if not graphs:
        raise ConfigError(
            f'arm "{arm.name}" left no graph in the compile cache: switch the cache on (TORCHINDUCTOR_FX_GRAPH_CACHE, '
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES), or compile something"
        )
    facts = artifact.facts_of(arm, device=_kind(device), threads=torch.get_num_threads(), on_cpu=device.type == "cpu")
    return artifact.write(path, folder, {**facts, "graphs": graphs})


def load(arm: ArmConfig, device: torch.device) -> Loaded:
    """This process's compile cache holds the arm's artifact. ConfigError where that is damaged or made for another."""
    loaded = artifact.read(arm.compile.artifact)
    threads = arm.engine.threads or torch.get_num_threads()
    on_cpu = device.type == "cpu"
    artifact.check(loaded, arm, on_cpu=on_cpu, devices=(_kind(device),), threads=threads if on_cpu else 0)
    folder = Path(cache_dir())
    artifact.unpack(loaded, folder)
    compile_portably()
    return Loaded(artifact=loaded, folder=folder, files=frozenset(artifact.kept_files(folder)))


def _kind(device: torch.device) -> str:
    """Machines of one kind run each other's code: a GPU by its product name, a processor by name and instructions."""
    return artifact.processor() if device.type == "cpu" else torch.cuda.get_device_name(device)
