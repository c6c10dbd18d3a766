"""`tidegate drill NAME`: breaks a part of the running system for a moment, asks real requests meanwhile, and says which rung of the ladder caught
them and what users saw. Whatever happens, the part is whole again afterwards (drill_switch.py).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import httpx
import msgspec

from tidegate.core.errors import LocalPartError, SettingsError
from tidegate.core.plugins import load, names, nearest
from tidegate.local.folder import take_lock
from tidegate.local.scene import Payload, Scene, Switch, running

DRILLS = "tidegate.local.drills"
#: How many of the drill's requests run at the same time.
_AT_ONCE = 3
#: Seconds within which all has to be as before, and between two looks.
_BACK_S, _LOOK_S = 120.0, 0.3
_EXCERPT = 90

#: What a user saw: an answer; a message of the capability's last rung; another error with code, message and trace_id; a bare 500 or what is no
#: answer of ours at all; nothing.
Sight = Literal["answer", "message", "error", "bare", "nothing"]


class Seen(msgspec.Struct):
    """One request of the drill, as its user saw it. `excerpt` begins the answer or the message."""

    sight: Sight
    status: int
    rung: str
    code: str
    cause: str
    seconds: float
    trace_id: str
    excerpt: str
    payload: str = ""


class Report(msgspec.Struct):
    """What a drill found. `caught_by`: the rungs that answered while the part was broken, the highest first as they were met."""

    drill: str
    summary: str
    capability: str
    before: Seen
    during: list[Seen]
    after: Seen | None
    back_after_s: float | None
    caught_by: list[str]
    passed: bool


def drill_names() -> list[str]:
    """As they are typed."""
    return [name.replace("_", "-") for name in names(DRILLS)]


async def drill(
    name: str, data: Path, *, key: str | None = None, capability: str | None = None, inputs: Sequence[dict[str, Any]] = (), requests: int = 6,
    patience_s: float = 130.0,
) -> Report:
    """Run one drill. `inputs`: business fields to ask with, by default the examples of the input contract; `patience_s`: when a user gives up.

    Raises SettingsError and LocalPartError where it cannot be run; nothing was broken then.
    """
    plugin = load(DRILLS, name.replace("-", "_"))
    url, first_key = running(data) if key is None else (running(data)[0], key)
    lock = take_lock(data / "run" / "drill.lock", f"Another drill runs on {data}")
    try:
        headers = {"authorization": f"Bearer {key or first_key}"}
        limit_s = patience_s * (2 + requests / _AT_ONCE) + _BACK_S
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=patience_s) as client, Switch.held(limit_s) as switch:
            scene = Scene(data, url, key or first_key, client, switch)
            path = await _choose(scene, capability, inputs)
            return await _run(plugin, name, scene, path, requests)
    finally:
        os.close(lock)


async def _run(plugin: ModuleType, name: str, scene: Scene, capability: str, requests: int) -> Report:
    before = await _ask(scene, Payload(json.dumps(scene.inputs[0]).encode()))
    await _learn(scene, before)
    sent = plugin.payloads(scene) if hasattr(plugin, "payloads") else _questions(scene, requests)
    async with plugin.broken(scene):
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(payload: Payload) -> Seen:
            async with gate:
                return await _ask(scene, payload)

        during = await asyncio.gather(*(one(payload) for payload in sent))
    scene.switch.let_go()
    began_ns = time.perf_counter_ns()
    after = await _until_back(scene, before)
    back_s = (time.perf_counter_ns() - began_ns) / 1e9
    caught = list(dict.fromkeys(seen.rung for seen in during if seen.rung))
    passed = not any(seen.sight in ("bare", "nothing") for seen in during) and after is not None
    return Report(
        name, plugin.SUMMARY, capability, before, during, after, round(back_s, 2) if after else None, caught, passed
    )


async def _choose(scene: Scene, wanted: str | None, inputs: Sequence[dict[str, Any]]) -> str:
    """The capability: the one that is named, else the first with a ladder; and what it is asked."""
    answer = await scene.client.get("/api/v1/capabilities")
    if answer.status_code != 200:
        raise LocalPartError(f"The gateway answers {answer.status_code} to the drill's key.", hint="Give a key that works with --key.")
    rows = {row["path"]: row for row in answer.json()["capabilities"]}
    path = wanted or next((path for path, row in rows.items() if row.get("ladder")), next(iter(rows), None))
    if path is None or path not in rows:
        raise SettingsError(f"There is no capability {path!r}.", hint=nearest(path or "", rows))
    scene.path = f"/api/v1/{path}"
    scene.inputs = list(inputs) or rows[path]["input_schema"].get("examples") or []
    if not scene.inputs:
        raise SettingsError(f"The input contract of {path} has no examples to ask with.", hint='Give some with --input \'{"question": "..."}\'.')
    return path


async def _learn(scene: Scene, before: Seen) -> None:
    """Which model answers the capability, and how many slots its engine has. Raises LocalPartError where all is not well to begin with."""
    if before.sight != "answer":
        raise LocalPartError(
            f"The capability does not answer as it is: {before.code or before.sight} {before.excerpt}", hint="See /health, and tidegate flights."
        )
    flight = (await scene.client.get(f"/api/v1/flights/{before.trace_id}")).json()
    scene.model = flight.get("model", "")
    engines = (await scene.client.get("/health")).json().get("engines", {})
    scene.slots = int(engines.get(flight.get("engine", ""), {}).get("slots") or scene.slots)


def _questions(scene: Scene, requests: int) -> list[Payload]:
    """Good requests, every other one streamed."""
    bodies = itertools.islice(itertools.cycle(scene.inputs), requests)
    return [Payload(json.dumps(body).encode(), {"accept": "text/event-stream"} if n % 2 else {}) for n, body in enumerate(bodies)]


async def _until_back(scene: Scene, before: Seen) -> Seen | None:
    """Ask until the rung is again that of before. None where it does not come back."""
    end_ns = time.perf_counter_ns() + int(_BACK_S * 1e9)
    while True:
        seen = await _ask(scene, Payload(json.dumps(scene.inputs[0]).encode()))
        if seen.sight == "answer" and (seen.rung, seen.cause) == (before.rung, before.cause):
            return seen
        if time.perf_counter_ns() > end_ns:
            return None
        await asyncio.sleep(_LOOK_S)


# -- one request, as a user sees it


async def _ask(scene: Scene, payload: Payload) -> Seen:
    began_ns = time.perf_counter_ns()
    try:
        # No retries, no redirects: what one user sees.
        answer = await scene.client.post(
            scene.path, content=payload.body, headers={"content-type": "application/json", **payload.headers}, follow_redirects=False
        )
    except (httpx.HTTPError, UnicodeError) as error:
        return Seen("nothing", 0, "", type(error).__name__, "", _since(began_ns), "", "", payload.name)
    seen = judge(answer)
    seen.seconds, seen.payload = _since(began_ns), payload.name
    return seen


def _since(began_ns: int) -> float:
    return round((time.perf_counter_ns() - began_ns) / 1e9, 3)


def judge(answer: httpx.Response) -> Seen:
    """What a user saw of one response, streamed or not."""
    status, rung = answer.status_code, answer.headers.get("x-tidegate-rung", "")
    body = _last_event(answer.text) if answer.headers.get("content-type", "").startswith("text/event-stream") else _json(answer.content)
    error = body.get("error")
    if isinstance(error, dict):
        code, trace = str(error.get("code") or ""), str(error.get("trace_id") or "")
        status, rung = int(error.get("status") or status), error.get("rung") or rung
        whole = bool(code and trace and error.get("message")) and code != "internal"
        sight: Sight = "message" if whole and rung == "message" else "error" if whole else "bare"
        return Seen(sight, status, rung, code, str(error.get("cause") or ""), 0.0, trace, _excerpt(error.get("message")))
    if status == 200 and body.get("trace_id"):
        landing = body.get("ladder") or {}
        shown = body.get("answer") or {name: value for name, value in body.items() if name not in _BESIDE}
        rung, cause = str(landing.get("rung") or rung or "full"), str(landing.get("cause") or answer.headers.get("x-tidegate-search", ""))
        return Seen("answer", 200, rung, "", cause, 0.0, str(body["trace_id"]), _excerpt(shown))
    return Seen("bare", status, rung, "", "", 0.0, "", _excerpt(answer.text))


_BESIDE = frozenset({"trace_id", "capability_sha256", "index_version", "usage", "ladder", "ticket"})


def _last_event(text: str) -> dict[str, Any]:
    blocks = [block for block in text.split("\n\n") if "data: " in block]
    return _json(blocks[-1].partition("data: ")[2].encode()) if blocks else {}


def _json(content: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return body if isinstance(body, dict) else {}


def _excerpt(said: Any) -> str:
    text = " ".join((said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)).split())
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…"


def grouped(seen: Sequence[Seen]) -> list[tuple[Seen, int, float]]:
    """What is the same to a user, together: the first of its kind, how many, and the slowest in seconds. The worst last."""
    kinds: dict[tuple[str, int, str, str], list[Seen]] = defaultdict(list)
    for one in seen:
        kinds[one.sight, one.status, one.rung, one.code].append(one)
    order = ("answer", "message", "error", "bare", "nothing")
    groups = sorted(kinds.values(), key=lambda group: order.index(group[0].sight))
    return [(group[0], len(group), max(one.seconds for one in group)) for group in groups]
