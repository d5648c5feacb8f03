"""The floor of a decode step: the bytes that it must move, over the bandwidth that the device really gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What a decode step must read and write, whatever code runs it.

    weights: bytes of all parameters that a token passes through; quantised: of those the ones that are held in fewer
    bits; position: bytes of keys and values that one position of one row holds in all layers. Activations and logits
    are left out: they fit in the caches.
    """

    weights: int
    position: int
    quantised: int = 0

    def total(self, *, batch: int, positions: float) -> float:
        """Return the bytes of a step: weights once, keys and values of `positions` read, those of `batch` new ones
        written."""
        return self.weights + self.position * (positions + batch)

    def floor_tokens_per_s(self, *, batch: int, positions: float, bytes_per_s: float) -> float:
        """Return the tokens per second of a step that only moves its bytes."""
        return batch * bytes_per_s / self.total(batch=batch, positions=positions)


def step_bytes(model: Any) -> StepBytes:
    """Return the bytes that a loaded Hugging Face causal model must move in a decode step.

    An input embedding that is not the output matrix too does not count: a step reads one row of it a token.
    """
    from tailgate.servers.engine.quantisation import stored_bytes, weight_bytes  # brings torch along

    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    position = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    every, quantised = weight_bytes(model)
    weights = every if embedding is output else every - stored_bytes(embedding)
    return StepBytes(weights=weights, position=position, quantised=quantised)


def measure_bandwidth(device: Any, dtype: Any, *, tensor_bytes: int = 0, repeats: int = 15) -> dict[str, float]:
    """Measure bytes per second on random data, medians: each is a lower bound of what the device can do.

    copy: device to device, bytes read and bytes written; sum: a reduction to one number; matvec: a matrix times a
    vector, as decode's projections at batch 1; best: the fastest of them, which the floor is computed with.
    tensor_bytes 0: 4 GiB on a GPU, 256 MiB on a CPU, far past every cache. A GPU's stay with torch's allocator.
    """
    import torch

    from tailgate.servers.reference import device_times

    columns = 8192
    rows = (tensor_bytes or (4 << 30 if device.type == "cuda" else 256 << 20)) // (dtype.itemsize * columns)
    matrix = torch.empty((rows, columns), dtype=dtype, device=device).normal_()
    target = torch.empty_like(matrix)
    vector = torch.empty((1, columns), dtype=dtype, device=device).normal_()
    held = rows * columns * dtype.itemsize

    def rate(work: Callable[[], object], moved: int) -> float:
        work()  # the first call picks a kernel
        return moved / median(device_times(device, work, 1)[0] for _ in range(repeats))

    with torch.no_grad():
        rates = {
            "copy": rate(lambda: target.copy_(matrix), 2 * held),
            "sum": rate(matrix.sum, held),
            "matvec": rate(lambda: torch.nn.functional.linear(vector, matrix), held),
        }
    return {**rates, "best": max(rates.values())}
