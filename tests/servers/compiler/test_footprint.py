"""What compiled regions left in memory, as the compiler's callbacks show it."""

from __future__ import annotations

from torch._dynamo.callback import CallbackTrigger, callback_handler

from servers.compiler.footprint import CompileFootprint


def test_each_region_has_what_its_compiles_and_recordings_added() -> None:
    held = [(0, 100)]
    with CompileFootprint(lambda: held[0]) as footprint:
        for trigger, region, after in (
            (CallbackTrigger.DYNAMO, "0/0", (0, 150)),
            (CallbackTrigger.DYNAMO, "1/0", (0, 155)),
            (CallbackTrigger.CUDAGRAPH_RECORDING, "0/0", (30, 157)),
        ):
            with callback_handler.install_callbacks(trigger, region):
                held[0] = after
        held[0] = (99, 999)  # between compiles
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "1/1"):
            pass
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "2/0"):
        held[0] = (0, 0)
    assert footprint.grown == {"0/0": (30, 52), "1/0": (0, 5), "1/1": (0, 0)}
