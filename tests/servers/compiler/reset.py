"""The compiler of this process as it was before anything was compiled or configured."""

from __future__ import annotations

import torch


def reset_compiler() -> None:
    """No compiled code, and every option that an arm sets as torch brings it."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 8
    torch.fx.experimental._config.use_duck_shape = True
    torch.compiler.set_stance("default")
