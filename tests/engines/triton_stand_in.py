"""A server that speaks Triton's real gRPC protocol (tritonclient's own service stubs) and does what a test scripts, in the test's own loop."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

TYPES = {"BYTES": "TYPE_STRING"}
#: The tensors of vLLM's backend, as its model.py declares them.
VLLM: dict[str, Any] = {
    "inputs": [
        ("text_input", "BYTES", False), ("stream", "BOOL", True), ("sampling_parameters", "BYTES", True), ("exclude_input_in_output", "BOOL", True),
        ("return_finish_reason", "BOOL", True), ("return_cumulative_logprob", "BOOL", True), ("return_num_input_tokens", "BOOL", True),
        ("return_num_output_tokens", "BOOL", True),
    ],
    "outputs": [("text_output", "BYTES"), ("finish_reason", "BYTES"), ("num_input_tokens", "UINT32"), ("num_output_tokens", "UINT32")],
}  # fmt: skip
#: Those of TensorRT-LLM's ensemble.
TRTLLM: dict[str, Any] = {
    "inputs": [
        ("text_input", "BYTES", False), ("max_tokens", "INT32", False), ("bad_words", "BYTES", True), ("stop_words", "BYTES", True),
        ("end_id", "INT32", True), ("top_k", "INT32", True), ("top_p", "FP32", True), ("temperature", "FP32", True), ("stream", "BOOL", True),
        ("random_seed", "UINT64", True), ("beam_width", "INT32", True),
    ],
    "outputs": [("text_output", "BYTES"), ("cum_log_probs", "FP32")],
    "max_batch_size": 4,
}  # fmt: skip
#: A small model in Python.
PYTHON: dict[str, Any] = {"inputs": [("prompt", "BYTES", False)], "outputs": [("completion", "BYTES")]}

Script = Callable[["Request"], AsyncIterator[Any]]


class Request:
    """One request as the server got it, for scripts and for tests."""

    def __init__(self, message: Any, context: Any) -> None:
        self.message = message
        self.context = context
        self.metadata = dict(context.invocation_metadata() or ())
        self.inputs = {
            tensor.name: (tensor.datatype, tuple(tensor.shape), data)
            for tensor, data in zip(message.inputs, message.raw_input_contents, strict=True)
        }

    def text(self, name: str) -> str:
        _, _, data = self.inputs[name]
        (length,) = struct.unpack_from("<I", data)
        assert len(data) == 4 + length, f"{name} holds more than one text"
        return data[4:].decode()


class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """`models`: name -> its tensors; `script`: what the next requests are answered with."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, Any]] = {"m": VLLM}
        self.script: Script = words
        self.requests: list[Request] = []
        self.configs_read = 0
        self.active = 0
        self.cancelled = 0
        self.url = ""

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        self.configs_read += 1
        model = self.models.get(request.name)
        if model is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
            raise AssertionError("abort raises")

        def type_of(name: str) -> int:
            value: int = model_config_pb2.DataType.Value(TYPES.get(name, f"TYPE_{name}"))
            return value

        config = model_config_pb2.ModelConfig(
            name=request.name,
            max_batch_size=model.get("max_batch_size", 0),
            input=[
                model_config_pb2.ModelInput(name=name, data_type=type_of(kind), dims=[1], optional=optional)
                for name, kind, optional in model["inputs"]
            ],
            output=[model_config_pb2.ModelOutput(name=name, data_type=type_of(kind), dims=[-1]) for name, kind in model["outputs"]],
        )
        config.model_transaction_policy.decoupled = model.get("decoupled", True)
        if model.get("sequences"):
            config.sequence_batching.SetInParent()
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.active += 1
        try:
            async for message in request_iterator:
                request = Request(message, context)
                self.requests.append(request)
                async for response in self.script(request):
                    yield response
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0")

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name in self.models)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        statistics = service_pb2.ModelStatistics(name=request.name)
        statistics.inference_stats.success.count = len(self.requests)
        return service_pb2.ModelStatisticsResponse(model_stats=[statistics])


def response(final: bool | None = None, **tensors: Any) -> Any:
    """One message of the stream. A text or bytes become BYTES, a number UINT32; `final` None leaves the flag out."""
    outputs, raw = [], []
    for name, value in tensors.items():
        data = value.encode() if isinstance(value, str) else value
        outputs.append(
            service_pb2.ModelInferResponse.InferOutputTensor(name=name, datatype="UINT32" if isinstance(value, int) else "BYTES", shape=[1])
        )
        raw.append(struct.pack("<I", value) if isinstance(value, int) else struct.pack("<I", len(data)) + data)
    made = service_pb2.ModelInferResponse(model_name="m", outputs=outputs, raw_output_contents=raw)
    if final is not None:
        made.parameters["triton_final_response"].bool_param = final
    return service_pb2.ModelStreamInferResponse(infer_response=made)


def failed(message: str) -> Any:
    """An error as servers before 24.08 put it into the stream."""
    return service_pb2.ModelStreamInferResponse(error_message=message)


WORDS = " the quick brown fox"


async def words(request: Request) -> AsyncIterator[Any]:
    """Four words, with everything that vLLM's backend tells, and an empty final response."""
    pieces = WORDS.split(" ")[1:]
    for number, word in enumerate(pieces):
        end = "stop" if number == len(pieces) - 1 else "None"
        yield response(False, text_output=f" {word}", finish_reason=end, num_input_tokens=7, num_output_tokens=1)
    yield response(True)


async def serve(stand_in: StandIn, tls: tuple[bytes, bytes] | None = None) -> Any:
    """Starts it on a free port; the grpc server, to be stopped. `tls`: key and certificate, PEM."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(stand_in, server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([tls])) if tls else server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stand_in.url = f"http{'s' if tls else ''}://127.0.0.1:{port}"
    return server
