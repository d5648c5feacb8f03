"""A server of the Open Inference Protocol on the stubs of NVIDIA's tritonclient package.

It needs a process of its own (`served`): its stubs register the same protobuf names as tailgate's.
Models: `text` takes and streams words as Triton's vLLM backend does, `ensemble` takes them as TensorRT-LLM's, `broken`
fails inside its stream, `loading` is not ready, and to ask whether `raises` is ready fails, as a backend may. Triton
answers a request with other tensors inside the stream.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

from tests.fakes.grpc_servers import spawned

TOKEN_S = 0.02


def _text(number: int) -> bytes:
    raw = f" word{number}".encode()
    return len(raw).to_bytes(4, "little") + raw


def main() -> None:
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
            if request.name == "raises":
                raise LookupError("Model raises not found")
            if request.name == "missing":
                context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
            return service_pb2.ModelReadyResponse(ready=request.name != "loading")

        def ModelStreamInfer(self, requests: Any, context: Any) -> Any:  # noqa: N802
            for request in requests:
                if unexpected := self._unexpected(request):
                    yield service_pb2.ModelStreamInferResponse(error_message=unexpected)
                    return
                for number, response in enumerate(self._answers(request)):
                    if request.model_name == "broken" and number == 1:
                        yield service_pb2.ModelStreamInferResponse(error_message="CUDA error: out of memory")
                        return
                    yield service_pb2.ModelStreamInferResponse(infer_response=response)
                    time.sleep(TOKEN_S)
                # The empty response with which a decoupled model may end.
                last = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
                last.parameters["triton_final_response"].bool_param = True
                yield service_pb2.ModelStreamInferResponse(infer_response=last)

        def _unexpected(self, request: Any) -> str:
            length = "max_tokens" if request.model_name == "ensemble" else "sampling_parameters"
            for what, known in (("input", ("text_input", "stream", length)), ("output", ("text_output",))):
                for tensor in getattr(request, f"{what}s"):
                    if tensor.name not in known:
                        return f"unexpected inference {what} '{tensor.name}' for model '{request.model_name}'"
            return ""

        def _answers(self, request: Any) -> Iterator[Any]:
            inputs = {tensor.name: tensor for tensor in request.inputs}
            for tensor in request.inputs:
                count = sum(len(values) for _, values in tensor.contents.ListFields())
                assert count == tensor.shape[-1], f"{tensor.name} has {count} values of {list(tensor.shape)}"
            wanted = [tensor.name for tensor in request.outputs]
            if request.model_name == "ensemble":
                tokens = inputs["max_tokens"].contents.int_contents[0]
                assert [list(tensor.shape) for tensor in request.inputs] == [[1, 1]] * 3
            else:
                tokens = json.loads(inputs["sampling_parameters"].contents.bytes_contents[0])["max_tokens"]
            assert inputs["text_input"].datatype == "BYTES"
            for number in range(tokens):
                response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
                response.outputs.add(name=wanted[0], datatype="BYTES", shape=[1])
                response.raw_output_contents.append(_text(number))
                yield response

    server = grpc.server(futures.ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps({"port": port}), flush=True)
    server.wait_for_termination()


@contextlib.contextmanager
def served() -> Iterator[str]:
    with spawned("tests.fakes.triton") as (_, port):
        yield f"grpc://127.0.0.1:{port}"


if __name__ == "__main__":
    main()
