"""The compiler of this process as it was before an arm compiled."""

from __future__ import annotations

import torch
import torch._inductor.config as inductor

_OPTIONS = inductor.save_config_portable()  # as torch brings them: this module is imported before any arm compiles


def reset_compiler() -> None:
    """No compiled code, and what an arm sets as torch brings it."""
    torch._dynamo.reset()
    inductor.load_config(_OPTIONS)
    torch._dynamo.config.recompile_limit = 8
    torch._dynamo.config.accumulated_recompile_limit = 256
    inductor.pre_grad_custom_pass = None
    torch.fx.experimental._config.use_duck_shape = True
    torch.compiler.set_stance("default")
