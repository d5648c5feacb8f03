"""A runtime for MLServer, imported there: as many words as are asked for, each its own response where it streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

PACE_S = 0.01


class Words(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        count = self._count(payload)
        await asyncio.sleep(PACE_S * count)
        return self._response(" word" * count)

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        async for payload in payloads:
            for _ in range(self._count(payload)):
                await asyncio.sleep(PACE_S)
                yield self._response(" word")

    def _count(self, payload: InferenceRequest) -> int:
        """What the request asks for; a request without its text is refused."""
        tensors = {tensor.name: StringCodec.decode_input(tensor) for tensor in payload.inputs}
        if not tensors["text_input"][0]:
            raise ValueError("the prompt is empty")
        return int(json.loads(tensors["sampling_parameters"][0])["max_tokens"])

    def _response(self, text: str) -> InferenceResponse:
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("text_output", [text])])
