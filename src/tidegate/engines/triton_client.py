"""gRPC towards Triton: one channel per engine, requests as Triton's protocol has them, every failure as one of our errors.

tritonclient's generated protocol is used under its own stream, because that one cannot ask for the empty final response by which a decoupled
model says that it is done. Nothing of it is imported before an engine of this kind is built: the extra `triton` is optional.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tidegate.core.errors import EngineDown, EngineStalled, SettingsError, TidegateError
from tidegate.core.flight import Flight
from tidegate.engines.settings import EngineSettings
from tidegate.engines.triton_errors import status_error
from tidegate.engines.triton_model import Given, Tensor, TritonModel

#: A call that is over for us still owes its status: this long is waited for it before it is cancelled.
DRAIN_S = 1.0


class Protocol(NamedTuple):
    """The optional parts: grpc, and Triton's messages and stub as tritonclient ships them."""

    grpc: Any
    messages: Any
    stub: Any


def load_protocol(engine: str) -> Protocol:
    """Raises SettingsError where the extra is not installed."""
    try:
        import grpc.aio
        from tritonclient.grpc import service_pb2, service_pb2_grpc
    except ImportError as error:
        raise SettingsError(
            f"[engines.{engine}] wants the adapter triton, which needs a package that is missing ({error.name}).",
            hint="pip install 'tidegate[triton]'",
        ) from None
    return Protocol(grpc, service_pb2, service_pb2_grpc.GRPCInferenceServiceStub)


class TritonClient:
    """One Triton server. Nothing is connected before the first request."""

    def __init__(self, engine: str, label: str, settings: EngineSettings) -> None:
        """Raises SettingsError where the extra is missing or url has a path, OSError where ca_file cannot be read."""
        parts = urlsplit(settings.url)
        if parts.path:
            raise SettingsError(
                f"url of [engines.{engine}] has a path, and gRPC has none: {settings.url!r}.", hint="Name Triton's gRPC port: http://host:8001."
            )
        self.protocol = load_protocol(engine)
        self.label = label
        self._settings = settings
        self._target = f"{parts.hostname}:{parts.port or 8001}" if ":" not in (parts.hostname or "") else f"[{parts.hostname}]:{parts.port or 8001}"
        self._ca = Path(settings.ca_file).read_bytes() if settings.ca_file else None
        self._tls = parts.scheme == "https"
        key = settings.api_key.get_secret_value() if settings.api_key else ""
        #: `triton_grpc_error`: an error ends the stream with its status, instead of being a text inside it (Triton 24.08 and later).
        self._metadata = (("triton_grpc_error", "true"), *((("authorization", f"Bearer {key}"),) if key else ()))
        self._channel: Any = None
        self._stub: Any = None
        self._draining: set[Any] = set()

    # -- questions

    async def ask(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """One call with one answer, e.g. ask("ModelConfig", ...). Raises TidegateError."""
        self._open()
        try:
            return await getattr(self._stub, method)(request, metadata=self._metadata, timeout=timeout_s or self._settings.connect_s)
        except self.protocol.grpc.aio.AioRpcError as error:
            raise status_error(self.label, error.code().name, error.details() or "", began=False) from None

    async def model(self, name: str) -> TritonModel:
        """What a model takes and gives, from its own configuration. Raises EngineError where it is not understood."""
        answer = await self.ask("ModelConfig", self.protocol.messages.ModelConfigRequest(name=name))
        config = answer.config
        batched = (1,) if config.max_batch_size > 0 else ()

        def tensor(entry: Any, optional: bool) -> Tensor:
            type_ = self.protocol.messages.model__config__pb2.DataType.Name(entry.data_type).removeprefix("TYPE_")
            shape = (*batched, *(max(int(size), 1) for size in entry.dims))
            return Tensor(entry.name, "BYTES" if type_ == "STRING" else type_, shape, optional)

        return TritonModel(
            name,
            [tensor(entry, entry.optional) for entry in config.input],
            [tensor(entry, False) for entry in config.output],
            decoupled=config.model_transaction_policy.decoupled,
            sequences=config.HasField("sequence_batching"),
            where=self.label.replace("The", "the", 1),
        )

    # -- generations

    async def generate(self, model: TritonModel, given: list[Given], flight: Flight) -> tuple[Any, Any, int]:
        """Send one request on a stream of its own and wait for what comes first: the call, its first message, and when it came.

        Puts `engine.connect`, `engine.send`, `engine.first_byte` on the flight. Raises EngineDown, EngineRefused, EngineStalled and their kin.
        """
        try:
            await self._connect()
        finally:
            flight.lap("engine.connect")
        call = self._stub.ModelStreamInfer(metadata=self._metadata, timeout=self._settings.total_s)
        patience_s = min(self._settings.first_token_s, self._settings.total_s)
        name = "first_token_s" if patience_s == self._settings.first_token_s else "total_s"
        try:
            async with asyncio.timeout(patience_s):
                await call.write(self._request(model, given, flight))
                await call.done_writing()
                flight.lap("engine.send")
                first = await self.read(call, began=False)
        except TimeoutError:
            call.cancel()
            raise EngineStalled(
                f"{self.label} was silent while we waited for its first token ({name}).", hint="Is the engine overloaded or hung?"
            ) from None
        except self.protocol.grpc.aio.AioRpcError as error:
            raise self.failure(error, began=False) from None
        except BaseException:
            call.cancel()
            raise
        finally:
            at_ns = time.perf_counter_ns()
            flight.lap("engine.first_byte", at_ns)
        return call, first, at_ns

    async def read(self, call: Any, *, began: bool) -> Any:
        """The next message of a stream. Raises EngineCut where it ended well, as gRPC goes, though the model had not said that it is done."""
        try:
            message = await call.read()
        except self.protocol.grpc.aio.AioRpcError as error:
            raise self.failure(error, began=began) from None
        if message is self.protocol.grpc.aio.EOF:
            raise status_error(self.label, "OK", "no final response", began=began)
        return message

    def failure(self, error: Any, *, began: bool) -> TidegateError:
        """The error for what grpc raised."""
        return status_error(self.label, error.code().name, error.details() or "", began=began)

    def drain(self, call: Any) -> None:
        """The answer is whole: let the call end by itself, for a moment, so that the engine sees an end and no cancel."""
        self._draining.add(call)
        timer = asyncio.get_running_loop().call_later(DRAIN_S, call.cancel)

        def over(_: Any) -> None:
            timer.cancel()
            self._draining.discard(call)

        call.add_done_callback(over)

    async def close(self) -> None:
        """Close the channel; calls that run are cancelled."""
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()

    # --

    def _open(self) -> Any:
        if self._channel is None:
            aio = self.protocol.grpc.aio
            options = [
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", self._settings.max_event_bytes),
                ("grpc.primary_user_agent", "tidegate"),
                ("grpc.use_local_subchannel_pool", 1),
                # an engine that is back is seen within a second; gRPC's own two minutes are for clients that nobody waits for
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", int(self._settings.connect_s * 1000)),
                ("grpc.max_reconnect_backoff_ms", 1000),
                ("grpc.enable_retries", 0),
            ]
            if self._tls:
                credentials = self.protocol.grpc.ssl_channel_credentials(root_certificates=self._ca)
                self._channel = aio.secure_channel(self._target, credentials, options=options)
            else:
                self._channel = aio.insecure_channel(self._target, options=options)
            self._stub = self.protocol.stub(self._channel)
        return self._channel

    async def _connect(self) -> None:
        """Until the channel is ready or has failed: then the call itself says why."""
        channel = self._open()
        states = self.protocol.grpc.ChannelConnectivity
        state = channel.get_state(try_to_connect=True)
        if state is states.READY:
            return
        try:
            async with asyncio.timeout(self._settings.connect_s):
                while state not in (states.READY, states.TRANSIENT_FAILURE, states.SHUTDOWN):
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise EngineDown(
                f"{self.label} at {self._target} did not accept a connection within {self._settings.connect_s:g} s.",
                hint="A firewall, or a host that is down?",
            ) from None

    def _request(self, model: TritonModel, given: list[Given], flight: Flight) -> Any:
        messages = self.protocol.messages
        request = messages.ModelInferRequest(
            model_name=model.name,
            id=flight.id,
            inputs=[
                messages.ModelInferRequest.InferInputTensor(name=tensor.name, datatype=tensor.type, shape=tensor.shape) for tensor, _ in given
            ],
            raw_input_contents=[data for _, data in given],
        )
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        if model.sequences:
            request.parameters["sequence_id"].int64_param = new_sequence_id()
            request.parameters["sequence_start"].bool_param = True
            request.parameters["sequence_end"].bool_param = True
        return request


def new_sequence_id() -> int:
    """Names one sequence to a stateful model: 63 random bits, never 0 (which means none), so that workers need not agree on them.

    Among a million sequences that live at once, two get the same name with a probability below 1e-7.
    """
    return int.from_bytes(os.urandom(8), "big") >> 1 or 1
