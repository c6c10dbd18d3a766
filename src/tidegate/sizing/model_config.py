"""What a model is made of, read from a Hugging Face config.json or the header of a GGUF file: the numbers that decide how much memory it takes.

A model is a tuple of layers; a layer is its mixers (what remembers earlier tokens: attention, latent attention, a recurrent state) and its
feed-forward part. Names differ between families; each is looked up under the names it goes by. What is missing, no number or absurd is refused by
name: a plan from a guessed number would be believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.core.errors import BadRequest
from tidegate.core.nesting import too_deep
from tidegate.sizing.quantisation import NONE, Quantisation

_LARGEST_CONFIG = 8 << 20
_HINT = "Name a config.json, a folder with one, or a GGUF file."
#: No model has more layers than a few hundred; ten thousand is a typing error or an attack.
MOST_LAYERS = 1024
_MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head, grouped or multi-query attention. `window`: tokens that it looks back; None is all. `owns_cache`: whether it keeps keys and values
    of its own (Gemma 3n lets its last layers read those of earlier ones)."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    chunked: bool = False
    owns_cache: bool = True
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one compressed vector of `rank + rope` numbers per token for all heads.
    `index_dim`: numbers per token of a sparse-attention indexer (DeepSeek-V3.2), 0 without."""

    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int
    index_dim: int = 0


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state of fixed size per request. `channels` x (`kernel` - 1) numbers wait for the short convolution; `heads` x `rows` x `columns` is the
    state. `parameters`: weights of the layer."""

    heads: int
    rows: int
    columns: int
    channels: int
    kernel: int
    parameters: int
    state_bytes: int = 4


Mixer = Attention | Latent | Recurrent


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense feed-forward part; gated ones have three matrices, others two."""

    width: int
    gated: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` routed experts of `width`, `active` of them for a token, and shared ones of `shared_width` together."""

    count: int
    width: int
    active: int
    shared_width: int = 0
    gated: bool = True


@dataclass(frozen=True, slots=True)
class Layer:
    mixers: tuple[Mixer, ...]
    feed_forward: Mlp | Experts | None


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of a model. Sizes count numbers, not bytes; `weight_bytes` is the size of the weights where a file says it."""

    name: str
    architecture: str
    source: str
    hidden: int
    vocabulary: int
    context: int | None
    layers: tuple[Layer, ...]
    tied: bool
    dtype_bytes: float = 2
    quantisation: Quantisation = NONE
    vision_parameters: int = 0
    extra_parameters: int = 0
    weight_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def recurrent(self) -> bool:
        return any(isinstance(mixer, Recurrent) for layer in self.layers for mixer in layer.mixers)


class Fields:
    """A config's fields under any of their names, checked. `where` is the file, for the error."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, *names: str) -> bool:
        return any(self.values.get(name) is not None for name in names)

    def whole(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """A whole number. Raises BadRequest where it is missing (and has no default), is not one, or lies outside `least` to `most`."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.refused(f"{name} is {_short(value)}, and should be a whole number")
            if not least <= value <= most:
                raise self.refused(f"{name} is {_short(value)}, and should lie between {least} and {most}")
            return value
        if default is None:
            raise self.refused(f"there is no {' or '.join(names)} in it")
        return default

    def flag(self, *names: str, default: bool = False) -> bool:
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, bool):
                raise self.refused(f"{name} is {_short(value)}, and should be true or false")
            return value
        return default

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refused(f"{name} is {_short(value)}, and should be a text")
        return value

    def names(self, name: str, count: int | None = None) -> list[str] | None:
        """A list of texts, of `count` items where that is given."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.refused(f"{name} should be a list of texts")
        if count is not None and len(value) != count:
            raise self.refused(f"{name} names {len(value)} layers, and there are {count}")
        return value

    def wholes(self, name: str, most: int = MOST_LAYERS) -> list[int] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value) or len(value) > most:
            raise self.refused(f"{name} should be a list of whole numbers, at most {most}")
        return value

    def inner(self, name: str) -> Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refused(f"{name} should be an object")
        return Fields(value, f"{self.where}, {name}")

    def refused(self, why: str) -> BadRequest:
        return BadRequest(f"{self.where} cannot be planned: {why}.", hint="Is it a model's config.json, or a GGUF file, as its maker published it?")


def _short(value: Any) -> str:
    """A value as an error shows it: the beginning is enough to find it."""
    said = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else f"a number of {value.bit_length()} bits"
    return said if len(said) <= 60 else said[:57] + "..."


def read_model(path: Path) -> Model:
    """The model of a config.json, of a folder with one in it, or of a GGUF file (plain or gzipped; of a split file, any part).

    Raises BadRequest where the file cannot be read, or does not say what is needed.
    """
    from tidegate.sizing.gguf_model import read_gguf
    from tidegate.sizing.hf_model import from_config

    if path.is_dir():
        folder = path
        path = path / "config.json"
    else:
        folder = path.parent
    if re.search(r"\.gguf(\.gz)?$", path.name):
        return read_gguf(path)
    values = _load(path)
    return from_config(values, str(path), name=folder.name if path.name == "config.json" else path.stem, weight_bytes=_index_size(folder))


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise BadRequest(f"{path} is no regular file.", hint=_HINT)
        with path.open("rb") as file:
            raw = file.read(_LARGEST_CONFIG + 1)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}.", hint=_HINT) from error
    if raw[:4] == b"GGUF":
        raise BadRequest(f"{path} is a GGUF file with another name.", hint="Let its name end in .gguf.")
    if len(raw) > _LARGEST_CONFIG:
        raise BadRequest(f"{path} is larger than {_LARGEST_CONFIG >> 20} MiB: no model's config is.", hint="Name the config.json itself.")
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path} is not JSON: {error}.", hint=_HINT) from error
    if not isinstance(values, dict) or too_deep(values):
        raise BadRequest(f"{path} does not hold a model's config: a JSON object of fields.", hint=_HINT)
    return values


def _index_size(folder: Path) -> int | None:
    """The size of the weights, as the index beside a config tells it, or the one file of weights: exact, where a computed size is not quite."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file() and index.stat().st_size < 64 << 20:
            size = json.loads(index.read_bytes())["metadata"]["total_size"]
            return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
        files = [one.stat().st_size for one in folder.glob("*.safetensors") if one.is_file()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # no index that says it: the size is computed
    return sum(files) or None


def every(kind: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers, as a tuple of shared objects: a model of a thousand equal layers is one layer a thousand times."""
    seen: dict[Layer, Layer] = {}
    return tuple(seen.setdefault(layer, layer) for layer in kind)
