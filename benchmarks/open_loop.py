"""An open loop: every request of a load is sent at its own instant, whether or not those before it are answered.

The load is the simulator's own: the jobs that `tidegate.sizing.scenario.make_jobs` makes of a trace and a scenario. What really happens is stamped
into them, so that the same `measure` counts both; when each had its slot is told by the gateway's own flights. Who is refused comes back as the
simulated clients do.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools
import httpx

from tidegate.core.ask import EngineCall
from tidegate.pipeline.stages.generate import estimate_prompt_tokens
from tidegate.sizing.job import Job
from tidegate.sizing.simulate import comes_back_s

#: Makes the body of a job's request. It streams, with its usage at the end.
Body = Callable[[Job], dict[str, Any]]


def guessed(body: dict[str, Any]) -> int:
    """For how many tokens the gateway takes a request's prompt before an engine has counted it."""
    return estimate_prompt_tokens(EngineCall("chat", "", body))


class _Answer(asyncio.Protocol):
    """One request on a connection of its own, and what came back. Instants are of `time.perf_counter_ns`."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_ns = self.done_ns = 0
        self.retry_after_s: float | None = None
        self.flight = ""
        self.status = self.error_status = 0
        self.usage: dict[str, Any] = {}
        self.text = b""
        self._request = request
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the connection closed before the answer's end"))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"retry-after":
            self.retry_after_s = float(value)
        elif name == b"x-request-id":
            self.flight = value.decode()

    def on_body(self, body: bytes) -> None:
        now_ns = time.perf_counter_ns()
        *lines, self.text = (self.text + body).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            if not self.first_ns or b'"usage"' in line:
                event = json.loads(line.removeprefix(b"data: "))
                if not self.first_ns and any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    self.first_ns = now_ns
                self.usage = event.get("usage") or self.usage
                if "error" in event:  # it waited, so the head was out already
                    self.error_status, self.retry_after_s = event["error"]["status"], event["error"].get("retry_after_s")

    def on_message_complete(self) -> None:
        self.status = self.error_status or self._parser.get_status_code()
        self.done_ns = time.perf_counter_ns()
        if not self.done.done():
            self.done.set_result(None)


class OpenLoop:
    """A load on the gateway at `url`. `keys`: an API key for each tenant."""

    def __init__(self, url: str, keys: Mapping[str, str], body: Body, returns: float, seed: int) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        assert where.port is not None
        self._host, self._port = where.hostname, where.port
        self._keys = keys
        self._body = body
        self._returns = returns
        self._seed = seed
        self._began_ns = 0
        #: When each was sent first, by its number: a burst leaves one request after the other, not at one instant.
        self.sent_ns: dict[int, int] = {}
        #: Those that were answered, by the id of their flight.
        self.flights: dict[str, Job] = {}

    async def run(self, jobs: list[Job]) -> None:
        """Send them all, in order of coming, and wait for the last; what happened stands in the jobs, with times since the beginning."""
        self._began_ns = time.perf_counter_ns() + 100_000_000
        async with asyncio.TaskGroup() as sending:
            for job in jobs:
                await self._until(job.asked_ns)
                sending.create_task(self._serve(job))

    def read_flights(self, within_s: float = 60.0) -> list[dict[str, Any]]:
        """The flights of the answered, the first to come first; when each had its slot is stamped into the jobs. Raises TimeoutError where the
        database does not have them in time."""
        found: dict[str, dict[str, Any]] = {}
        until_s = time.perf_counter() + within_s
        while len(found) < len(self.flights):
            if time.perf_counter() > until_s:
                raise TimeoutError(f"{len(self.flights) - len(found)} flights are missing")
            for key in self._keys.values():
                with httpx.Client(base_url=f"http://{self._host}:{self._port}", headers={"authorization": f"Bearer {key}"}) as client:
                    newest = client.get("/api/v1/flights", params={"limit": 500}).json()["flights"]
                    found |= {one["id"]: one for one in newest if one["id"] in self.flights}
        for name, record in found.items():
            job = self.flights[name]
            job.started_ns = job.came_ns + sum(spent_ns for part, spent_ns in record["laps"] if part == "queue")
        return sorted(found.values(), key=lambda one: one["began_unix_ns"])

    async def _until(self, at_ns: int) -> None:
        left_s = (self._began_ns + at_ns - time.perf_counter_ns()) / 1e9
        if left_s > 0:
            await asyncio.sleep(left_s)

    async def _serve(self, job: Job) -> None:
        while True:
            answer = await self._ask(job)
            if answer.status == 200:
                self.flights[answer.flight] = job
                job.first_ns = (answer.first_ns or answer.done_ns) - self._began_ns
                job.done_ns = answer.done_ns - self._began_ns
                job.prompt = answer.usage["prompt_tokens"]
                job.output = answer.usage["completion_tokens"]
                return
            if answer.status != 429:
                raise RuntimeError(f"request {job.number} was answered with {answer.status}: {answer.text[:300]!r}")
            job.refused = True
            back_s = comes_back_s(job, answer.retry_after_s, self._returns, self._seed)
            if back_s is None:
                return
            await asyncio.sleep(back_s - (time.perf_counter_ns() - answer.done_ns) / 1e9)

    async def _ask(self, job: Job) -> _Answer:
        said = self._body(job)
        body = json.dumps(said, separators=(",", ":")).encode()
        job.guessed = guessed(said)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer {self._keys[job.tenant]}\r\nconnection: close\r\n"
        job.came_ns = time.perf_counter_ns() - self._began_ns
        self.sent_ns.setdefault(job.number, job.came_ns)
        job.tries += 1
        job.refused = False
        request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        transport, answer = await asyncio.get_running_loop().create_connection(lambda: _Answer(request), self._host, self._port)
        try:
            await answer.done
        finally:
            transport.close()
        return answer
