"""What computes the e5 network: ONNX Runtime, or OpenVINO where it is installed. Both take the graph that `precision_for` names for them."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tidegate.core.errors import LocalPartError
from tidegate.core.ports import Vectors
from tidegate.retrieval.e5_graph import Precision
from tidegate.retrieval.e5_weights import INSTALL

Runtime = Literal["onnxruntime", "openvino"]
#: Word vectors (texts, tokens, hidden) and mask (texts, tokens) to mean vectors (texts, hidden). Any number of threads may call it at once.
Network = Callable[[Vectors, npt.NDArray[np.int32]], Vectors]

INSTALL_OPENVINO = "pip install 'tidegate[openvino]', or set embedder.runtime = \"onnxruntime\"."
#: So many activations of one token share a scale. 128: cosine with float32 0.9995 in place of 0.999, and a tenth slower.
_GROUP = 384
#: Numbers of float32 that a processor takes at once, at most: keys come in multiples of it, see `e5_graph`.
_LANES = 16
#: Questions and passages are computed at once.
_STREAMS = 2


def precision_for(runtime: Runtime) -> Precision:
    """OpenVINO rounds activations by itself, per token, so its graph has rounded weights only."""
    return "int8" if runtime == "onnxruntime" else "int8_weights"


def missing(runtime: Runtime) -> str | None:
    """The pip line where the runtime's package is not installed."""
    if importlib.util.find_spec(runtime) is not None:
        return None
    return INSTALL if runtime == "onnxruntime" else INSTALL_OPENVINO


def open_network(graph: bytes, threads: int, runtime: Runtime = "onnxruntime") -> Network:
    """`threads`: of one call. Blocks for 0.1 s, OpenVINO for 2 s. Raises LocalPartError where the runtime's package is not installed."""
    hint = missing(runtime)
    if hint is not None:
        raise LocalPartError(f"The embedder cannot run: no package {runtime}.", hint=hint)
    return _onnxruntime(graph, threads) if runtime == "onnxruntime" else _openvino(graph, threads)


def _onnxruntime(graph: bytes, threads: int) -> Network:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # A thread that spins while it waits takes a core from the engine beside it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def run(words: Vectors, mask: npt.NDArray[np.int32]) -> Vectors:
        return np.asarray(session.run(None, {"words": words, "mask": mask})[0], np.float32)

    return run


def _openvino(graph: bytes, threads: int) -> Network:
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(graph), "CPU", {
        "NUM_STREAMS": _STREAMS,
        "INFERENCE_NUM_THREADS": _STREAMS * threads,
        "ENABLE_CPU_PINNING": False,  # the engine and the database run here too
        "INFERENCE_PRECISION_HINT": "f32",  # bfloat16, its own choice where the processor has it, is slower here and no nearer
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": _GROUP,
    })
    own = threading.local()  # one request computes one thing at a time

    def run(words: Vectors, mask: npt.NDArray[np.int32]) -> Vectors:
        request: Any = getattr(own, "request", None)
        if request is None:
            request = own.request = compiled.create_infer_request()
        keys = np.pad(mask, ((0, 0), (0, -mask.shape[1] % _LANES)))
        return np.array(request.infer({"words": words, "mask": keys}, share_inputs=True)[0], np.float32)  # a copy: the next call writes there

    return run
