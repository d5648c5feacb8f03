"""What goes over the wire to and from an Open Inference Protocol server: tensors in, tensors out. No I/O, no clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from loadtests.external.arms import OipOptions, sampling_fields
from servers.rpc.oip_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"

# Field of InferTensorContents for each datatype, and the bytes of one element in raw form (0: it tells its length).
_FIELDS: Final = {
    "BOOL": ("bool_contents", 1),
    "INT8": ("int_contents", 1),
    "INT16": ("int_contents", 2),
    "INT32": ("int_contents", 4),
    "INT64": ("int64_contents", 8),
    "UINT8": ("uint_contents", 1),
    "UINT16": ("uint_contents", 2),
    "UINT32": ("uint_contents", 4),
    "UINT64": ("uint64_contents", 8),
    "BYTES": ("bytes_contents", 0),
}


def infer_request(
    options: OipOptions,
    *,
    model: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    whole_length: bool,
    seed: int,
    request_id: str,
    greedy: bool = False,
) -> bytes:
    """One serialised ModelInferRequest. `whole_length` asks for exactly `max_tokens`, where the server can; `greedy` is
    as for `sampling_fields`."""
    request = ModelInferRequest(model_name=model, id=request_id)
    batch = [1] if options.batched else []

    def add(name: str, datatype: str, values: Sequence[Any]) -> None:
        if not name:
            return
        contents = InferTensorContents(**{_FIELDS[datatype][0]: values})
        request.inputs.add(name=name, datatype=datatype, shape=[*batch, len(values)], contents=contents)

    if isinstance(prompt, str):
        add(options.prompt_tensor, "BYTES", [prompt.encode()])
    else:
        add(options.prompt_tensor, "INT32", prompt)
        add(options.prompt_length_tensor, "INT32", [len(prompt)])
    add(options.max_tokens_tensor, "INT32", [max_tokens])
    add(options.stream_tensor, "BOOL", [True])
    if options.parameters_tensor:
        sampling = sampling_fields(options, max_tokens=max_tokens, whole_length=whole_length, seed=seed, greedy=greedy)
        add(options.parameters_tensor, "BYTES", [json.dumps({"max_tokens": max_tokens, **sampling}).encode()])
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
    output = response.outputs[place]
    field, size = _FIELDS.get(output.datatype, ("", 0))
    if not field:
        return Piece(error=f'tensor "{output.name}" is {output.datatype}, which holds neither text nor token ids')
    values, raws = list(getattr(output.contents, field)), response.raw_output_contents
    raw = raws[place] if place < len(raws) and not values else b""
    if output.datatype != "BYTES":
        signed = output.datatype.startswith("INT")
        ends = range(size, len(raw) + 1, size)
        values += [int.from_bytes(raw[end - size : end], "little", signed=signed) for end in ends]
        return Piece(tuple(values))
    while raw:  # each element has its length before it, in four bytes
        end = 4 + int.from_bytes(raw[:4], "little")
        values.append(raw[4:end])
        raw = raw[end:]
    return Piece(tuple(value.decode("utf-8", "replace") for value in values))
