"""The e5 network as an ONNX graph, written with `onnx.helper` alone: no torch, no export.

In: `words` float32 (texts, tokens, hidden), the word vectors, looked up by whoever holds the weights' file; `mask` int32 (texts, tokens),
1 where a token is. Out: `mean` float32 (texts, hidden), the mean over each text's tokens, not yet normalised, so that windows of one text
can be averaged.

BERT (Devlin et al. 2018): embeddings, then per layer attention and feed-forward, each added and layer-normalised after, GELU by erf.

int8: weights are rounded per output channel, activations **per token**. The usual dynamic quantisation takes one scale for the whole
batch, so that a text's vector depends on its neighbours (cosine 0.991 between alone and in company); per token it does not, is nearer to
float32, and is faster. Weights keep 7 bits: where the processor has no VNNI, u8 x s8 products of full range overflow their 16-bit sums.
`MatMulIntegerToFloat` is written out because ONNX Runtime fuses MatMulInteger + Cast + Mul into it as if the scale were one per matrix.

int8_weights: only the weights are rounded, in full range; whoever computes may round activations by itself, as OpenVINO does per token.
Its softmax adds up in another order where a row is no multiple of the processor's lanes, and int8 makes much of the last bit, so that a text
of 19 tokens alone and the same one padded to 32 differed (0.0035 in a vector's number). So `mask` may be wider here than the texts are long,
and the keys become as many: a row of the softmax then always fills its lanes.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tidegate.core.errors import LocalPartError
from tidegate.retrieval.e5_weights import INSTALL, E5Weights, unpack

Precision = Literal["float32", "int8", "int8_weights"]

OPSET = 20
IR_VERSION = 10
MICROSOFT = "com.microsoft"
#: Largest weight after rounding where ONNX Runtime multiplies: 255 * 64 * 2 still fits 16 bits.
WEIGHT_MAX = 64
#: Largest activation after rounding, around the zero point 128; OpenVINO's weights take the full range too.
ACTIVATION_MAX = 127


class _Sketch:
    """Nodes and constants as they are added. Every value has a name; an operation returns its output's."""

    def __init__(self) -> None:
        from onnx import helper, numpy_helper

        self._helper = helper
        self._numpy_helper = numpy_helper
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        if name not in self.constants:
            self.constants[name] = self._numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def axes(self, *axes: int) -> str:
        return self.constant("axes" + "_".join(map(str, axes)), np.array(axes, np.int64))

    def number(self, value: float) -> str:
        return self.constant(f"number_{value}", np.array(value, np.float32))

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        return self.ops(kind, *inputs, count=1, domain=domain, **attributes)[0]

    def ops(self, kind: str, *inputs: str, count: int, domain: str = "", **attributes: Any) -> list[str]:
        outputs = [f"{kind}_{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(self._helper.make_node(kind, list(inputs), outputs, domain=domain, **attributes))
        return outputs


class _E5(_Sketch):
    """The network's own steps."""

    def __init__(self, weights: E5Weights, precision: Precision) -> None:
        super().__init__()
        self.weights = weights
        self.precision = precision
        self._missing_keys = ""

    def embeddings(self) -> str:
        hidden = self.weights.header.hidden
        first_type = self.weights.floats("emb.type")[:hidden]
        positions = self.constant("positions", self.weights.floats("emb.pos").reshape(-1, hidden) + first_type)
        tokens = self.op("Shape", "words", start=1, end=2)
        return self.norm(self.op("Add", "words", self.op("Slice", positions, self.axes(0), tokens, self.axes(0))), "emb.ln")

    def layer(self, x: str, index: int) -> str:
        header = self.weights.header
        at = f"l{index}."
        query, key, value = self.ops("Split", self.linear(x, header.hidden, at + "q", at + "k", at + "v"), count=3, axis=-1, num_outputs=3)
        if self.precision == "int8_weights":
            key, value = (self.op("Pad", side, self.missing_keys()) for side in (key, value))
        seen = self.op("MultiHeadAttention", query, key, value, "", "mask", domain=MICROSOFT, num_heads=header.heads)
        x = self.norm(self.op("Add", x, self.linear(seen, header.hidden, at + "ao")), at + "aln")
        wide = self.op("Gelu", self.linear(x, header.hidden, at + "fi"))
        return self.norm(self.op("Add", x, self.linear(wide, header.feed_forward, at + "fo")), at + "oln")

    def missing_keys(self) -> str:
        """By how much the mask is wider than the texts, as `Pad` wants it."""
        if not self._missing_keys:
            more = self.op("Sub", self.op("Shape", "mask", start=1, end=2), self.op("Shape", "words", start=1, end=2))
            none = self.axes(0)
            self._missing_keys = self.op("Concat", none, none, none, none, more, none, axis=0)
        return self._missing_keys

    def pool(self, x: str) -> str:
        from onnx import TensorProto

        own = "mask"
        if self.precision == "int8_weights":
            own = self.op("Slice", "mask", self.axes(0), self.op("Shape", "words", start=1, end=2), self.axes(1))
        mask = self.op("Unsqueeze", self.op("Cast", own, to=TensorProto.FLOAT), self.axes(-1))
        total = self.op("ReduceSum", self.op("Mul", x, mask), self.axes(1), keepdims=0)
        return self.op("Div", total, self.op("ReduceSum", mask, self.axes(1), keepdims=0))

    def norm(self, x: str, name: str) -> str:
        scale, bias = (self.constant(f"{name}.{part}", self.weights.floats(f"{name}.{part}")) for part in "wb")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.weights.header.epsilon)

    def linear(self, x: str, inputs: int, *names: str) -> str:
        """x times the named matrices side by side, plus their biases."""
        matrix = np.concatenate([unpack(self.weights.q4(f"{name}.w", inputs)) for name in names]).T
        bias = self.constant(f"{names[0]}.b", np.concatenate([self.weights.floats(f"{name}.b") for name in names]))
        multiply = {"float32": self.multiply, "int8": self.multiply_int8, "int8_weights": self.multiply_weights}[self.precision]
        return self.op("Add", multiply(x, f"{names[0]}.w", matrix), bias)

    def multiply(self, x: str, name: str, matrix: npt.NDArray[np.float32]) -> str:
        return self.op("MatMul", x, self.constant(name, matrix))

    def multiply_weights(self, x: str, name: str, matrix: npt.NDArray[np.float32]) -> str:
        channel_scale = np.abs(matrix).max(axis=0) / ACTIVATION_MAX
        rounded = self.constant(name, np.rint(matrix / channel_scale).astype(np.int8))
        return self.op("MatMul", x, self.op("DequantizeLinear", rounded, self.constant(f"{name}.scale", channel_scale), axis=1))

    def multiply_int8(self, x: str, name: str, matrix: npt.NDArray[np.float32]) -> str:
        channel_scale = np.abs(matrix).max(axis=0) / WEIGHT_MAX
        rounded = self.constant(name, np.rint(matrix / channel_scale).astype(np.int8))
        channel = self.constant(f"{name}.scale", channel_scale / ACTIVATION_MAX)
        one, zero_point = self.number(1), self.constant("zero_point", np.array(128, np.uint8))
        # Never zero: a token whose activations are all zero must not become 0/0.
        largest = self.op("Max", self.op("ReduceMax", self.op("Abs", x), self.axes(-1), keepdims=1), self.number(1e-12))
        levels = self.op("Mul", x, self.op("Div", self.number(ACTIVATION_MAX), largest))
        quantised = self.op("QuantizeLinear", levels, one, zero_point)
        return self.op("Mul", self.op("MatMulIntegerToFloat", quantised, rounded, one, channel, zero_point, domain=MICROSOFT), largest)


def build_graph(weights: E5Weights, precision: Precision = "int8") -> bytes:
    """The whole network as a serialised ONNX model. Raises LocalPartError where the package `onnx` is missing."""
    try:
        from onnx import TensorProto, helper
    except ImportError as error:
        raise LocalPartError("The embedder's model cannot be built: no package onnx.", hint=INSTALL) from error
    network = _E5(weights, precision)
    x = network.embeddings()
    for index in range(weights.header.layers):
        x = network.layer(x, index)
    network.nodes.append(helper.make_node("Identity", [network.pool(x)], ["mean"]))
    hidden = weights.header.hidden
    graph = helper.make_graph(
        network.nodes,
        "multilingual-e5-small",
        [
            helper.make_tensor_value_info("words", TensorProto.FLOAT, ["texts", "tokens", hidden]),
            helper.make_tensor_value_info("mask", TensorProto.INT32, ["texts", "keys" if precision == "int8_weights" else "tokens"]),
        ],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["texts", hidden])],
        list(network.constants.values()),
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString())
