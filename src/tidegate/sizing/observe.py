"""What a running engine says of its own cache: vLLM by its metrics, llama.cpp by /props and /slots. Beside a plan it shows how far off the plan was.

Read only, over HTTP, with bounds: a server that hangs, lies or sends gigabytes costs seconds and an error.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import httpx

from tidegate.core.errors import BadRequest, EngineDown, EngineError

_TIMEOUT_S = 5.0
_MOST_BYTES = 8 << 20
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_MOST = 1 << 50


@dataclass(frozen=True, slots=True)
class Observed:
    """`tokens`: of the whole cache, all blocks times their tokens. `slots`: requests at once, where their number is fixed. `length`: the longest
    request."""

    engine: str
    tokens: int
    slots: int | None = None
    length: int | None = None
    blocks: int | None = None
    block_tokens: int | None = None
    kv_dtype: str | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan beside what runs. `planned`: tokens of all blocks. `error`: planned less seen, as a part of those seen; null where the engine was told
    how many it has, as llama.cpp is, so that there is nothing to be wrong about."""

    observed: Observed
    planned: int
    error: float | None


def compare(planned: int, observed: Observed) -> Comparison:
    return Comparison(observed, planned, planned / observed.tokens - 1 if observed.blocks is not None else None)


def observe(url: str, *, api_key: str | None = None) -> Observed:
    """Raises EngineDown where nothing answers, EngineError where what answers does not say its sizes."""
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"{url!r} is no address of an engine.", hint="Give it as http://HOST:PORT.")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    with httpx.Client(timeout=_TIMEOUT_S, headers=headers, follow_redirects=False) as client:
        metrics = _get(client, f"{base}/metrics")
        if metrics is not None and "cache_config_info{" in metrics:
            return _vllm(metrics, _json(_get(client, f"{base}/v1/models")))
        props = _json(_get(client, f"{base}/props"))
        if isinstance(props, dict) and ("total_slots" in props or "default_generation_settings" in props):
            return _llama(props, _json(_get(client, f"{base}/slots")))
    hint = "vLLM says it under /metrics, llama.cpp under /props. Is the address the engine's own?"
    raise EngineError(f"What answers at {base} says nothing of its cache.", hint=hint)


def _get(client: httpx.Client, url: str) -> str | None:
    """The body of an answer, None where there is none of that name. Raises EngineDown where nothing answers in time."""
    try:
        with client.stream("GET", url) as answer:
            if not answer.is_success:
                return None
            read = b""
            for piece in answer.iter_bytes():
                read += piece
                if len(read) > _MOST_BYTES:
                    raise EngineError(f"{url} sends more than {_MOST_BYTES >> 20} MiB.", hint="Is the address the engine's own?")
            return read.decode("utf-8", "replace")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        why = str(error) or type(error).__name__
        raise EngineDown(f"{url} cannot be read: {why}.", hint="Is the engine running, and is --observe its address?") from error


def _json(text: str | None) -> Any:
    try:
        return json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        return None


def _vllm(metrics: str, models: Any) -> Observed:
    """`vllm:cache_config_info` carries the configuration as labels."""
    line = next(line for line in metrics.splitlines() if "cache_config_info{" in line and not line.startswith("#"))
    labels = dict(_LABEL.findall(line))
    blocks, block = _whole(labels.get("num_gpu_blocks")), _whole(labels.get("block_size"))
    if blocks is None or block is None:
        raise EngineError("The engine's cache_config_info names no blocks.", hint="It is known once the engine has started.")
    longest = None
    if isinstance(models, dict) and isinstance(models.get("data"), list) and models["data"] and isinstance(models["data"][0], dict):
        longest = _whole(models["data"][0].get("max_model_len"))
    share = labels.get("gpu_memory_utilization", "")
    return Observed(
        "vllm", blocks * block, length=longest, blocks=blocks, block_tokens=block, kv_dtype=labels.get("cache_dtype"),
        share=float(share) if re.fullmatch(r"\d*\.?\d+", share) else None,
    )  # fmt: skip


def _llama(props: dict[str, Any], slots: Any) -> Observed:
    """`n_ctx` of /props and /slots is that of one slot."""
    settings = props.get("default_generation_settings")
    length = _whole(settings.get("n_ctx")) if isinstance(settings, dict) else None
    count = _whole(props.get("total_slots"))
    if isinstance(slots, list) and slots and isinstance(slots[0], dict):
        count = count or len(slots)
        length = length or _whole(slots[0].get("n_ctx"))
    if length is None or count is None:
        raise EngineError("The engine's /props name no slots, or no context.", hint="Is it llama.cpp's server?")
    return Observed("llama.cpp", count * length, slots=count, length=length)


def _whole(value: Any) -> int | None:
    """A count above zero, as a number or a text; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,15}", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST else None
