"""The compiler of this process as it was before an arm compiled."""

from __future__ import annotations

import torch


def reset_compiler() -> None:
    """No compiled code, and what an arm sets as torch brings it, but for `compile.options`."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 8
    torch._dynamo.config.accumulated_recompile_limit = 256
    torch._inductor.config.pre_grad_custom_pass = None
    torch.fx.experimental._config.use_duck_shape = True
    torch.compiler.set_stance("default")
