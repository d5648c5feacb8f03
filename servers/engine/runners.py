"""The runner of an arm's task."""

from __future__ import annotations

from servers.compiler.recorder import CompileRecorder
from servers.config import ArmConfig
from servers.engine.encoder import EncoderRunner
from servers.engine.runner import ModelRunner


def runner_for(arm: ArmConfig, recorder: CompileRecorder) -> ModelRunner | EncoderRunner:
    """What loads, warms and runs the arm's model; nothing is loaded yet."""
    return EncoderRunner(arm, recorder) if arm.model.embeds else ModelRunner(arm, recorder)
