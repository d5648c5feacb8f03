"""What goes over the wire to and from an Open Inference Protocol server: tensors in, tensors out. No I/O, no clock."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from tailgate.loadtests.external.arms import OipOptions
from tailgate.loadtests.external.asking import Asking
from tailgate.servers.rpc.oip_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"


def infer_request(options: OipOptions, model: str, asking: Asking, request_id: str) -> bytes:
    request = ModelInferRequest(model_name=model, id=request_id)
    shape = [1, 1] if options.batched else [1]

    def add(name: str, datatype: str, **contents: Any) -> None:
        if name:
            request.inputs.add(name=name, datatype=datatype, shape=shape, contents=contents)

    add(options.prompt_tensor, "BYTES", bytes_contents=[asking.prompt.encode()])
    add(options.max_tokens_tensor, "INT32", int_contents=[asking.max_tokens])
    add(options.stream_tensor, "BOOL", bool_contents=[True])
    add(options.parameters_tensor, "BYTES", bytes_contents=[json.dumps(asking.fields(options)).encode()])
    request.outputs.add(name=options.output_tensor)
    return request.SerializeToString()


class Piece(NamedTuple):
    """The text that one response brought, or why it brought none."""

    text: str = ""
    error: str = ""


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
            if output.datatype != "BYTES":
                return Piece(error=f'tensor "{output.name}" is {output.datatype} and not text: set oip.output_tensor')
            return Piece(b"".join(_elements(response, place)).decode("utf-8", "replace"))
    if response.outputs:
        named = ", ".join(output.name for output in response.outputs)
        return Piece(error=f'the response has no tensor "{options.output_tensor}" but {named}: set oip.output_tensor')
    return Piece()  # such as the empty one with which a stream may end


def _elements(response: ModelInferResponse, place: int) -> list[bytes]:
    """Return the elements of a tensor of BYTES, from its contents or as they stand raw behind all tensors."""
    elements, raws = list(response.outputs[place].contents.bytes_contents), response.raw_output_contents
    raw = raws[place] if place < len(raws) and not elements else b""
    at = 0
    while at < len(raw):  # each element has its length before it, in four bytes
        begin, at = at + 4, at + 4 + int.from_bytes(raw[at : at + 4], "little")
        elements.append(raw[begin:at])
    return elements
