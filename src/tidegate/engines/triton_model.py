"""What a model on Triton takes and gives: its own configuration, read by the names that the usual language model backends give their tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tidegate.core.errors import BadRequest, EngineError

#: The tensor of the prompt, by backend: vLLM, TensorRT-LLM, its older ensembles, and models in Python.
_PROMPT = ("text_input", "INPUT_0", "prompt", "PROMPT", "input_text", "inputs", "text", "TEXT", "QUERY", "query")
#: The tensor of the answer's text.
_ANSWER = ("text_output", "OUTPUT_0", "generated_text", "output_text", "output", "OUTPUT", "text", "TEXT", "response", "completion")
#: A request's field -> the tensors that may take it, first match wins.
_FIELDS: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "sampling_param_max_tokens", "max_new_tokens", "request_output_len", "output_len", "INPUT_1"),
    "temperature": ("temperature", "sampling_param_temperature"),
    "top_p": ("top_p", "sampling_param_top_p", "runtime_top_p"),
    "top_k": ("top_k", "sampling_param_top_k", "runtime_top_k"),
    "min_p": ("min_p", "sampling_param_min_p"),
    "min_tokens": ("min_tokens", "sampling_param_min_tokens", "min_length"),
    "seed": ("seed", "sampling_param_seed", "random_seed"),
    "stop": ("stop_words", "sampling_param_stop", "stop", "INPUT_3"),
    "frequency_penalty": ("frequency_penalty", "sampling_param_frequency_penalty"),
    "presence_penalty": ("presence_penalty", "sampling_param_presence_penalty"),
    "repetition_penalty": ("repetition_penalty", "sampling_param_repetition_penalty"),
    "ignore_eos": ("ignore_eos", "sampling_param_ignore_eos"),
    "skip_special_tokens": ("skip_special_tokens", "sampling_param_skip_special_tokens"),
    "user": ("user",),
}
#: Tensors that are always filled where the model has them.
_ALWAYS: dict[str, Any] = {
    "stream": True, "streaming": True, "exclude_input_in_output": True,
    "return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True,
    # some of TensorRT-LLM's ensembles want these though they may be empty; where they are optional they are left out
    "bad_words": "", "stop_words": "", "INPUT_2": "", "INPUT_3": "",
}  # fmt: skip
#: vLLM's backend takes these as JSON in one tensor.
_SAMPLING = "sampling_parameters"
_IN_SAMPLING = frozenset({
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "stop", "stop_token_ids", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "ignore_eos", "logit_bias", "skip_special_tokens", "include_stop_str_in_output",
})
#: Fields that say nothing to a model: for the caller's own books, or what is done here anyway.
_NOT_FOR_MODELS = frozenset({
    "messages", "prompt", "model", "stream", "stream_options", "n", "user", "metadata", "store", "service_tier", "prompt_cache_key",
    "prompt_cache_retention", "safety_identifier", "add_generation_prompt", "cache_prompt", "priority",
})
#: Values by which a field asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (False, None), "tools": ([],), "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "echo": (False,),
    "best_of": (1,), "parallel_tool_calls": (True, False), "functions": ([],), "function_call": ("none", "auto"), "suffix": ("",),
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "top_p": (1,), "logit_bias": ({},), "modalities": (["text"],),
}  # fmt: skip

#: Triton's name of a type -> how one value lies in a tensor.
_PACK = {
    "BOOL": "<?", "INT8": "<b", "INT16": "<h", "INT32": "<i", "INT64": "<q", "UINT8": "<B", "UINT16": "<H", "UINT32": "<I", "UINT64": "<Q",
    "FP32": "<f", "FP64": "<d",
}  # fmt: skip
_LENGTH = struct.Struct("<I")


class Tensor(NamedTuple):
    """One input or output as the model's configuration has it. `type` in Triton's words without TYPE_, e.g. BYTES, INT32."""

    name: str
    type: str
    shape: tuple[int, ...]
    optional: bool = False


class Given(NamedTuple):
    """An input filled with one value: its bytes as they go over the wire."""

    tensor: Tensor
    data: bytes


class TritonModel:
    """The tensors of one model, and which of them mean what."""

    def __init__(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, decoupled: bool, sequences: bool = False, where: str = "Triton"
    ) -> None:
        """Raises EngineError, which names what was found, where the model is no language model that can be understood."""
        self.name = name
        self.decoupled = decoupled
        self.sequences = sequences
        self.inputs = {tensor.name: tensor for tensor in inputs}
        self.outputs = {tensor.name: tensor for tensor in outputs}
        prompt = _pick(_PROMPT, self.inputs, "BYTES") or _only([t for t in inputs if t.type == "BYTES" and not t.optional])
        answer = _pick(_ANSWER, self.outputs, "BYTES") or _only([t for t in outputs if t.type == "BYTES"])
        if prompt is None or answer is None:
            raise self._strange(where, "no tensor of text is known to be its " + ("prompt" if prompt is None else "answer"))
        self.prompt, self.answer = prompt, answer
        self.fields: dict[str, Tensor] = {}
        for field, known in _FIELDS.items():
            name_ = next((name for name in known if name in self.inputs and name != prompt.name), None)
            if name_ is not None:
                self.fields[field] = self.inputs[name_]
        self.sampling = self.inputs.get(_SAMPLING)
        self.always = {
            name: value for name, value in _ALWAYS.items()
            if name in self.inputs and name != prompt.name and (value != "" or not self.inputs[name].optional)
        }  # fmt: skip
        filled = {prompt.name, _SAMPLING, *self.always, *(tensor.name for tensor in self.fields.values())}
        unfilled = sorted(tensor.name for tensor in inputs if not tensor.optional and tensor.name not in filled)
        if unfilled:
            raise self._strange(where, f"it wants {', '.join(unfilled)}, and nothing is known to go there")
        self.finish = self.outputs.get("finish_reason")
        self.prompt_tokens = self.outputs.get("num_input_tokens")
        self.answer_tokens = self.outputs.get("num_output_tokens")

    def given(self, prompt: str, fields: Mapping[str, Any], where: str) -> list[Given]:
        """The inputs of one request. Raises BadRequest, which names the field, for what the model has no input for."""
        filled: dict[str, Given] = {self.prompt.name: Given(self.prompt, pack_text(prompt))}
        for name, value in self.always.items():
            filled[name] = _fill(self.inputs[name], value, name)
        sampling: dict[str, Any] = {}
        for field, value in _renamed(fields):
            if field in _NOT_FOR_MODELS or value is None or value == []:
                continue
            tensor = self.fields.get(field)
            if tensor is not None:
                filled[tensor.name] = _fill(tensor, value, field)
            elif self.sampling is not None and field in _IN_SAMPLING:
                sampling[field] = value
            elif value not in _NEUTRAL.get(field, ()):
                takes = sorted(self.fields) if self.sampling is None else sorted({*self.fields, *_IN_SAMPLING})
                raise BadRequest(
                    f"The model {self.name!r} of {where} has no input for `{field}`.", hint=f"It takes: {', '.join(takes) or 'the prompt alone'}.",
                    param=field,
                )  # fmt: skip
        if self.sampling is not None:
            filled[_SAMPLING] = Given(self.sampling, pack_text(msgspec.json.encode(sampling).decode()))
        missing = next((t for t in self.inputs.values() if not t.optional and t.name not in filled), None)
        if missing is not None:
            field = next((field for field, tensor in self.fields.items() if tensor.name == missing.name), missing.name)
            raise BadRequest(f"The model {self.name!r} of {where} wants `{field}`, and the request has none.", hint=f"Send {field}.", param=field)
        return list(filled.values())

    def _strange(self, where: str, why: str) -> EngineError:
        inputs = ", ".join(f"{t.name} ({t.type}{'' if t.optional else ', required'})" for t in self.inputs.values())
        outputs = ", ".join(f"{t.name} ({t.type})" for t in self.outputs.values())
        found = f"inputs {inputs or 'none'}; outputs {outputs or 'none'}"
        return EngineError(
            f"The model {self.name!r} of {where} is not understood: {why}. It has {found}.",
            hint="Put a model with text_input and text_output in front of it, as the vLLM and TensorRT-LLM backends have them.",
        )


def pack_text(text: str) -> bytes:
    """One BYTES value: its length, then its bytes."""
    data = text.encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(data)) + data


def unpack_texts(data: bytes) -> list[bytes]:
    """All values of a BYTES tensor. Raises ValueError where the lengths do not fit."""
    values = []
    at, size = 0, len(data)
    while at < size:
        if at + 4 > size:
            raise ValueError("a length is cut off")
        (length,) = _LENGTH.unpack_from(data, at)
        at += 4
        if at + length > size:
            raise ValueError("a value is cut off")
        values.append(data[at : at + length])
        at += length
    return values


def unpack_number(data: bytes, type_: str) -> int:
    """The first value of a tensor of whole numbers. Raises ValueError."""
    form = _PACK.get(type_)
    if form is None or form[1] in "fd?":
        raise ValueError(f"{type_} is no whole number")
    try:
        return int(struct.unpack_from(form, data)[0])
    except struct.error as error:
        raise ValueError(str(error)) from None


def _fill(tensor: Tensor, value: Any, field: str) -> Given:
    try:
        if tensor.type == "BYTES":
            values = value if isinstance(value, list) else [value]
            if field == "stop" and len(values) > 1 and tensor.shape[-1:] == (1,):
                raise BadRequest("This model takes one stop string only.", hint="Send one.", param="stop")
            texts = [one if isinstance(one, str) else msgspec.json.encode(one).decode() for one in values]
            shape = (*tensor.shape[:-1], len(texts))
            return Given(tensor._replace(shape=shape), b"".join(map(pack_text, texts)))
        form = _PACK.get(tensor.type)
        if form is None:
            raise BadRequest(f"The model takes `{field}` as {tensor.type}, which cannot be filled.", hint="Leave it out.", param=field)
        number = value if form[1] in "fd?" else int(value)
        if number != value:
            raise BadRequest(f"`{field}` must be a whole number for this model.", hint="Round it.", param=field)
        return Given(tensor, struct.pack(form, number))
    except (struct.error, OverflowError, TypeError, ValueError):
        raise BadRequest(f"`{field}` does not fit the model's type {tensor.type}.", hint="Send a value in its range.", param=field) from None


def _renamed(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Fields with their one name: OpenAI's newer and llama.cpp's names mean the same."""
    names = {"max_completion_tokens": "max_tokens", "repeat_penalty": "repetition_penalty"}
    return [(names.get(field, field), value) for field, value in fields.items()]


def _pick(known: Sequence[str], tensors: Mapping[str, Tensor], type_: str) -> Tensor | None:
    return next((tensors[name] for name in known if name in tensors and tensors[name].type == type_), None)


def _only(tensors: Sequence[Tensor]) -> Tensor | None:
    return tensors[0] if len(tensors) == 1 else None
