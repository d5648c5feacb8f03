"""What goes over the wire to and from an Open Inference Protocol server: tensors in, tensors out. No I/O, no clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from tailgate.loadtests.external.arms import OipOptions
from tailgate.loadtests.external.asking import Asking
from tailgate.servers.rpc.oip_pb2 import (
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)

METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"

# Field of InferTensorContents for each datatype.
_FIELDS: Final = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
}


def infer_request(options: OipOptions, model: str, asking: Asking, request_id: str) -> bytes:
    request = ModelInferRequest(model_name=model, id=request_id)
    batch = [1] if options.batched else []

    def add(name: str, datatype: str, values: Sequence[Any]) -> None:
        if not name:
            return
        contents = InferTensorContents(**{_FIELDS[datatype]: values})
        request.inputs.add(name=name, datatype=datatype, shape=[*batch, len(values)], contents=contents)

    if isinstance(asking.prompt, str):
        add(options.prompt_tensor, "BYTES", [asking.prompt.encode()])
    else:
        add(options.prompt_tensor, "INT32", asking.prompt)
        add(options.prompt_length_tensor, "INT32", [len(asking.prompt)])
    add(options.max_tokens_tensor, "INT32", [asking.max_tokens])
    add(options.stream_tensor, "BOOL", [True])
    add(options.parameters_tensor, "BYTES", [json.dumps(asking.fields(options)).encode()])
    request.outputs.add(name=options.output_tensor)
    return request.SerializeToString()


class Piece(NamedTuple):
    """What one response brought: pieces of text or token ids, or why it brought none."""

    values: tuple[str | int, ...] = ()
    error: str = ""

    @property
    def counted(self) -> bool:
        """Whether token ids came, so that `tokens` is exact."""
        return bool(self.values) and not isinstance(self.values[0], str)

    @property
    def tokens(self) -> int:
        """How many new tokens came; 1 for text, however long."""
        return len(self.values) if self.counted else int(any(self.values))


def read_response(options: OipOptions, message: bytes) -> Piece:
    """Return the meaning of one message of the answer."""
    try:
        streamed = ModelStreamInferResponse.FromString(message)
    except DecodeError as problem:
        return Piece(error=f"a message is no inference response as Triton streams it ({problem})")
    if streamed.error_message:
        return Piece(error=streamed.error_message)
    response = streamed.infer_response
    for place, output in enumerate(response.outputs):
        if output.name == options.output_tensor:
            return _elements(response, place)
    if response.outputs:
        named = ", ".join(output.name for output in response.outputs)
        return Piece(error=f'the response has no tensor "{options.output_tensor}" but {named}: set oip.output_tensor')
    return Piece()  # such as the empty one with which a stream may end


def _elements(response: ModelInferResponse, place: int) -> Piece:
    output, raws = response.outputs[place], response.raw_output_contents
    if output.datatype not in _FIELDS:
        return Piece(error=f'tensor "{output.name}" is {output.datatype}, which holds neither text nor token ids')
    values = list(getattr(output.contents, _FIELDS[output.datatype]))
    raw = raws[place] if place < len(raws) and not values else b""
    if output.datatype != "BYTES":
        kind = np.dtype(output.datatype.lower()).newbyteorder("<")  # the protocol has NumPy's names
        return Piece(tuple(values or np.frombuffer(raw, kind, len(raw) // kind.itemsize).tolist()))
    while raw:  # each element has its length before it, in four bytes
        end = 4 + int.from_bytes(raw[:4], "little")
        values.append(raw[4:end])
        raw = raw[end:]
    return Piece(tuple(value.decode("utf-8", "replace") for value in values))
