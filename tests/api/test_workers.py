"""`tidegate serve` with several workers: one port, one sum, nobody refused while a worker is started again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from tests.api.conftest import House, start_gateway, stop, until, url_of, workers

from tidegate.app.common import Common
from tidegate.core.errors import SettingsError
from tidegate.settings import Settings

ASK = {"messages": [{"role": "user", "content": "##n=3##"}]}


@pytest.fixture
def served(house: House, postgres_dsn: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__WORKERS="2")
    try:
        yield process, url_of(tmp_path, process)
    finally:
        stop(process)


def ask(url: str, key: str) -> int:
    """On a connection of its own, which the kernel gives to either worker."""
    return httpx.post(url + "/v1/chat/completions", headers={"authorization": f"Bearer {key}"}, json=ASK, timeout=30).status_code


def counted(url: str, key: str) -> float:
    text = httpx.get(url + "/metrics", headers={"authorization": f"Bearer {key}"}).text
    found = re.findall(r'^tidegate_requests_total\{.*route="/v1/chat/completions".*status="200"\} (\S+)$', text, re.M)
    return sum(map(float, found))


def test_metrics_are_the_sum_of_all_workers(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Whichever worker is asked, it tells what all of them counted, also what one counted that was killed since."""
    process, url = served
    assert [ask(url, house.keys["data"]) for _ in range(20)] == [200] * 20
    until(lambda: [counted(url, house.keys["admin"]) for _ in range(6)] == [20.0] * 6, "the sum in every worker")
    first = workers(process)
    os.kill(first[0], signal.SIGKILL)
    until(lambda: len(workers(process)) == 2 and workers(process) != first, "a new worker")
    until(lambda: [counted(url, house.keys["admin"]) for _ in range(6)] == [20.0] * 6, "the sum after a death")


def test_a_killed_worker_takes_no_count_along(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Both workers are killed, one after the other, at once after their answers: every one of them is counted."""
    process, url = served
    answered = 0
    for number in range(2):
        assert [ask(url, house.keys["data"]) for _ in range(12)] == [200] * 12
        answered += 12
        first = workers(process)
        os.kill(first[number], signal.SIGKILL)
        until(lambda first=first: len(workers(process)) == 2 and workers(process) != first, "a new worker")  # type: ignore[misc]
        assert [counted(url, house.keys["admin"]) for _ in range(8)] == [answered] * 8


def test_a_dead_worker_refuses_nobody(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Its socket stays open in the parent: who connects meanwhile waits for the next worker."""
    process, url = served
    os.kill(workers(process)[0], signal.SIGKILL)
    assert [ask(url, house.keys["data"]) for _ in range(12)] == [200] * 12


def test_a_worker_that_dies_again_before_it_serves_stops_nobody(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Killed once more while it starts, it is started again all the same: the other serves on, and so does the parent."""
    process, url = served
    first = workers(process)
    os.kill(first[0], signal.SIGKILL)
    until(lambda: bool(set(workers(process)) - set(first)), "a new worker")
    os.kill((set(workers(process)) - set(first)).pop(), signal.SIGKILL)
    assert [ask(url, house.keys["data"]) for _ in range(12)] == [200] * 12
    until(lambda: len(workers(process)) == 2, "two workers again")
    assert process.poll() is None
    assert first[1] in workers(process)


def test_a_stop_ends_all_workers(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """SIGTERM to the parent: every worker ends, the exit code is 0, and the port is free."""
    process = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__WORKERS="3")
    url = url_of(tmp_path, process)
    pids = workers(process)
    assert len(pids) == 3
    stop(process)
    assert process.returncode == 0
    assert not any(_lives(pid) for pid in pids)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")


def test_workers_die_with_a_killed_parent(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """However the parent went, no worker is left behind."""
    process = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__WORKERS="2")
    url_of(tmp_path, process)
    pids = workers(process)
    process.kill()
    process.wait(10)
    until(lambda: not any(_lives(pid) for pid in pids), "the workers' end")


def test_a_start_that_cannot_work_ends_at_once(house: House, tmp_path: Path) -> None:
    """A worker that never served is not started again and again: its error is said and its code is the command's."""
    (tmp_path / "spool").write_text("no folder")
    process = start_gateway(tmp_path, "postgresql://127.0.0.1:9/x", house.engine, TIDEGATE_SERVER__WORKERS="2")
    try:
        assert process.wait(30) == 2
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert "error: The flight spool cannot be written" in (tmp_path / "gateway.log").read_text()


# -- what is known of an engine


def test_a_retry_after_holds_for_all_workers(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """The engine tells one worker to come back in 7 s: none asks it before, and all tell their callers so."""
    more = {"TIDEGATE_SERVER__WORKERS": "4", "TIDEGATE_FLEET__MAX_RETRY_AFTER_S": "60"}
    process = start_gateway(tmp_path, postgres_dsn, house.engine, **more)
    try:
        url = url_of(tmp_path, process)
        headers = {"authorization": f"Bearer {house.keys['data']}"}
        busy = {"messages": [{"role": "user", "content": "##m=rate_limit##"}]}
        assert httpx.post(url + "/v1/chat/completions", headers=headers, json=busy, timeout=30).status_code == 429
        asked = house.stats()["requests"]
        for _ in range(16):  # each on a connection of its own
            answer = httpx.post(url + "/v1/chat/completions", headers=headers, json=ASK, timeout=30)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 0 < int(answer.headers["retry-after"]) <= 7
        assert house.stats()["requests"] == asked
    finally:
        stop(process)


# -- kept streams


@pytest.fixture
def keeping(house: House, postgres_dsn: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Four workers that keep streams for whoever asks for it."""
    more = {"TIDEGATE_SERVER__WORKERS": "4", "TIDEGATE_STREAMS__LEAVE": "keep"}
    process = start_gateway(tmp_path, postgres_dsn, house.engine, **more)
    try:
        yield process, url_of(tmp_path, process)
    finally:
        stop(process)


class Reading:
    """A client that reads a stream from any worker, on a connection of its own."""

    def __init__(self, url: str, key: str, last_id: str = "", order: str = "##i=10,n=300##") -> None:
        self._client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=20)
        if last_id:
            asked = self._client.build_request("GET", f"/v1/streams/{last_id.split('.')[0]}", headers={"last-event-id": last_id})
        else:
            body = {"messages": [{"role": "user", "content": order}], "stream": True}
            asked = self._client.build_request("POST", "/v1/chat/completions", json=body)
        self.answer = self._client.send(asked, stream=True)
        self._lines = self.answer.iter_lines()
        self.ids: list[str] = []
        self.data: list[str] = []

    def read(self, events: int) -> None:
        while len(self.data) < events:
            line = next(self._lines)
            if line.startswith("id: "):
                self.ids.append(line[4:])
            elif line.startswith("data: "):
                self.data.append(line[6:])

    @property
    def port(self) -> int:
        return int(self.answer.extensions["network_stream"].get_extra_info("client_addr")[1])

    def leave(self) -> None:
        self.answer.close()
        self._client.close()


def status_of(url: str, key: str, last_id: str) -> int:
    reading = Reading(url, key, last_id)
    reading.leave()
    return reading.answer.status_code


def holder(process: subprocess.Popen[bytes], client_port: int) -> int:
    """The worker that has the connection of the client at this port."""
    inodes = {
        f"socket:[{fields[9]}]"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if int((fields := line.split())[2].rpartition(":")[2], 16) == client_port
    }
    for pid in workers(process):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(file) in inodes:
                    return pid
    raise AssertionError("no worker has it")


def test_a_client_comes_back_to_any_worker(house: House, keeping: tuple[subprocess.Popen[bytes], str]) -> None:
    """Twenty-four breaks, each return on a new connection that the kernel gives to any of four workers: every event once, in order. Whoever it
    reached, one worker serves it."""
    process, url = keeping
    reading = Reading(url, house.keys["data"])
    reading.read(10)
    first = holder(process, reading.port)
    ids, data = reading.ids[:], reading.data[:]
    for _ in range(24):
        reading.leave()
        reading = Reading(url, house.keys["data"], ids[-1])
        assert reading.answer.status_code == 200, reading.answer.read()
        reading.read(10)
        until(lambda at=reading.port: holder(process, at) == first, "the way to the worker that keeps it")  # type: ignore[misc]
        ids += reading.ids
        data += reading.data
    while data[-1] != "[DONE]":
        reading.read(len(reading.data) + 1)
        data.append(reading.data[-1])
        ids.append(reading.ids[-1])
    reading.leave()
    assert ids == [f"{ids[0].split('.')[0]}.{number}" for number in range(1, len(ids) + 1)]


def test_a_killed_worker_loses_its_streams_and_says_so(house: House, keeping: tuple[subprocess.Popen[bytes], str]) -> None:
    """Killed while a client that came back reads: it sees its connection cut, without `[DONE]`. Whoever comes for the stream gets 410 from every
    worker, also from the one that has the dead one's number; others' clients get 404, and streams of other workers go on."""
    process, url = keeping
    reading = Reading(url, house.keys["data"])
    reading.read(10)
    reading.leave()
    back = Reading(url, house.keys["data"], reading.ids[-1])
    back.read(10)
    owner = holder(process, back.port)
    elsewhere = []
    while len(elsewhere) < 2:  # on connections that other workers have
        other = Reading(url, house.keys["data"])
        other.read(5)
        if holder(process, other.port) == owner:
            other.leave()
        else:
            elsewhere.append(other)
    os.kill(owner, signal.SIGKILL)
    with pytest.raises((httpx.TransportError, StopIteration)):
        back.read(10_000)
    assert "[DONE]" not in back.data
    until(lambda: len(workers(process)) == 4 and owner not in workers(process), "a new worker")
    assert {status_of(url, house.keys["data"], back.ids[-1]) for _ in range(12)} == {410}
    assert {status_of(url, house.keys["other"], back.ids[-1]) for _ in range(6)} == {404}
    for other in elsewhere:
        other.read(20)
        other.leave()
        again = Reading(url, house.keys["data"], other.ids[-1])
        again.read(5)
        assert again.ids[0] == f"{other.ids[-1].split('.')[0]}.{len(other.ids) + 1}"
        again.leave()
    back.leave()


def test_only_its_owner_enters_the_workers_sockets(house: House, keeping: tuple[subprocess.Popen[bytes], str], tmp_path: Path) -> None:
    """0600 in a folder of 0700."""
    sockets = list((tmp_path / "run").glob("worker-*.sock"))
    assert sorted(one.name for one in sockets) == [f"worker-{number}.sock" for number in range(4)]
    assert {one.stat().st_mode & 0o777 for one in sockets} == {0o600}
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


@pytest.fixture
def slotted(house: House, postgres_dsn: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Two workers before an engine with four slots."""
    more = {"TIDEGATE_SERVER__WORKERS": "2", "TIDEGATE_ENGINES__SCRIPTED__SLOTS": "4", "TIDEGATE_ADMISSION__FORECAST_S": "3600"}
    process = start_gateway(tmp_path, postgres_dsn, house.engine, **more)
    try:
        yield process, url_of(tmp_path, process)
    finally:
        stop(process)


def test_workers_run_no_more_than_the_engine_has(house: House, slotted: tuple[subprocess.Popen[bytes], str]) -> None:
    """Sixty requests at once, on connections of their own: at no look has the engine more than its four, and all are answered."""
    _, url = slotted
    order = {"messages": [{"role": "user", "content": "##t=60,n=2##"}]}
    headers = {"authorization": f"Bearer {house.keys['data']}"}
    most = 0
    with ThreadPoolExecutor(60) as pool:
        answers = [pool.submit(httpx.post, url + "/v1/chat/completions", headers=headers, json=order, timeout=60) for _ in range(60)]
        while not all(answer.done() for answer in answers):
            most = max(most, house.stats()["active"])
    assert {answer.result().status_code for answer in answers} == {200}
    assert most <= 4


def test_one_worker_has_the_slots_of_an_idle_one(house: House, slotted: tuple[subprocess.Popen[bytes], str]) -> None:
    """All four connections happen to be one worker's: three run there at once (one slot stays with the other), and the fourth when that ends."""
    process, url = slotted
    first, mine = 0, []
    while len(mine) < 4:
        reading = Reading(url, house.keys["data"], order="##i=20,n=3000##")
        first = first or holder(process, reading.port)
        if holder(process, reading.port) == first:
            mine.append(reading)
        else:
            reading.leave()
    for reading in mine[:3]:
        reading.read(1)
    until(lambda: house.stats()["active"] == 3, "three that run")
    mine[0].leave()
    mine[3].read(1)
    for reading in mine[1:]:
        reading.leave()
    until(lambda: house.stats()["active"] == 0, "the end of all")


# -- workers that hang


#: Seconds after which a worker of these tests that gives no sign of life is replaced; far above what a machine under load takes to let one run.
HUNG_S = "4"


def replaced(url: str) -> dict[str, int]:
    found: dict[str, int] = httpx.get(url + "/health", timeout=30).json()["workers"]["replaced"]
    return found


def replaced_by_metrics(url: str) -> dict[str, float]:
    text = httpx.get(url + "/metrics", timeout=30).text
    return {cause: float(count) for cause, count in re.findall(r'^tidegate_workers_replaced_total\{cause="(\w+)"\} (\S+)$', text, re.M)}


@pytest.fixture
def watched(house: House, postgres_dsn: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Two workers before an engine with four slots, watched by their parent; a key may have four requests at a time."""
    more = {
        "TIDEGATE_SERVER__WORKERS": "2", "TIDEGATE_SERVER__HUNG_WORKER_S": HUNG_S, "TIDEGATE_ENGINES__SCRIPTED__SLOTS": "4",
        "TIDEGATE_LIMITS__CONCURRENT": "4", "TIDEGATE_ADMISSION__FORECAST_S": "3600",
    }  # fmt: skip
    process = start_gateway(tmp_path, postgres_dsn, house.engine, **more)
    try:
        yield process, url_of(tmp_path, process)
    finally:
        with contextlib.suppress(OSError):  # one that is on its way out
            for pid in workers(process):
                os.kill(pid, signal.SIGCONT)
        stop(process)


def two_in_one(process: subprocess.Popen[bytes], url: str, key: str) -> tuple[int, list[Reading]]:
    """A worker in which two endless streams of this key run, and they."""
    first, mine = 0, list[Reading]()
    while len(mine) < 2:
        reading = Reading(url, key, order="##i=20,n=100000##")
        reading.read(1)
        first = first or holder(process, reading.port)
        if holder(process, reading.port) == first:
            mine.append(reading)
        else:
            reading.leave()
    return first, mine


def test_a_stopped_worker_is_replaced_and_what_it_held_comes_back(
    house: House, watched: tuple[subprocess.Popen[bytes], str], tmp_path: Path
) -> None:
    """SIGSTOP under two open streams: it is killed and replaced; the other worker is the same process as before; its clients see their
    connections cut; slots and the key's places are whole again, and it is counted and logged as hung."""
    process, url = watched
    hung, streams = two_in_one(process, url, house.keys["data"])
    other = (set(workers(process)) - {hung}).pop()
    os.kill(hung, signal.SIGSTOP)
    until(lambda: hung not in workers(process), "its end", 60)
    for reading in streams:
        with pytest.raises((httpx.TransportError, StopIteration)):
            reading.read(1_000_000)
        assert "[DONE]" not in reading.data
        reading.leave()
    until(lambda: len(workers(process)) == 2, "a new worker")
    assert other in workers(process)
    until(lambda: house.stats()["active"] == 0, "what ran in it at the engine")
    until(lambda: lanes(url) == (4, 0), "the slots")
    again = [Reading(url, house.keys["data"], order="##i=20,n=100000##") for _ in range(3)]
    assert [reading.answer.status_code for reading in again] == [200] * 3, "the key has four places, of which the dead one held two"
    for reading in again:
        reading.leave()
    assert replaced(url) == {"ended": 0, "killed": 0, "hung": 1}
    assert replaced_by_metrics(url) == {"ended": 0, "killed": 0, "hung": 1}
    log = (tmp_path / "gateway.log").read_text()
    assert f"(pid {hung}) hangs" in log
    assert "hung and was killed; it is started again" in log


def lanes(url: str) -> tuple[float, float]:
    """Slots and running requests over all workers, as /metrics tells them."""
    text = httpx.get(url + "/metrics", timeout=30).text
    slots, running = (
        sum(map(float, re.findall(rf'^tidegate_admission_{what}\{{model="scripted"\}} (\S+)$', text, re.M))) for what in ("slots", "running")
    )
    return slots, running


@pytest.mark.parametrize("count", [1, 2])
def test_a_data_folder_that_is_a_file_is_named_with_the_way_out(count: int, tmp_path: Path) -> None:
    """By one process, and by one that is about to fork."""
    (tmp_path / "file").write_text("")
    process = start_gateway(
        tmp_path, "postgresql://127.0.0.1:9/x", "http://127.0.0.1:9", TIDEGATE_SERVER__WORKERS=str(count), TIDEGATE_LOCAL__DATA=str(tmp_path / "file")
    )
    assert process.wait(30) != 0
    told = (tmp_path / "gateway.log").read_text()
    assert "is not a folder." in told
    assert "hint: Set local.data" in told


def test_a_second_gateway_with_workers_leaves_the_first_its_data_folder(
    house: House, served: tuple[subprocess.Popen[bytes], str], postgres_dsn: str, tmp_path: Path
) -> None:
    """It names who has it; a third one may have it as soon as the first is gone, killed or not."""
    process, _ = served
    second = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__WORKERS="2")
    assert second.wait(30) != 0
    assert f"is in use by another gateway with several workers (pid {process.pid})" in (tmp_path / "gateway.log").read_text()
    process.kill()
    process.wait(30)
    third = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__WORKERS="2")
    try:
        assert ask(url_of(tmp_path, third), house.keys["data"]) == 200
    finally:
        stop(third)


@pytest.mark.parametrize("seconds", [0.5, -1, float("inf"), float("nan")])
def test_a_bound_that_kills_the_living_is_refused(seconds: float) -> None:
    """Every process stands still for half a second now and then; 0 is for a debugger."""
    with pytest.raises(ValidationError, match="hung_worker_s"):
        Settings.model_validate({"server": {"hung_worker_s": seconds}})
    assert Settings.model_validate({"server": {"hung_worker_s": 0}}).server.hung_worker_s == 0


def test_an_empty_address_is_refused() -> None:
    """It would be every address of the machine, where the default is its own alone."""
    with pytest.raises(ValidationError, match="host"):
        Settings.model_validate({"server": {"host": ""}})


def test_fewer_slots_than_workers_are_refused() -> None:
    """One slot cannot be shared out: two workers would run two requests on it. Named with the way out; no bound, or enough, is fine."""
    engine = {"url": "http://127.0.0.1:1", "models": ["m"]}

    def settings(workers: int, *slots: int) -> Settings:
        engines = {f"e{number}": {**engine, "slots": one} for number, one in enumerate(slots)}
        return Settings.model_validate({"server": {"workers": workers}, "engines": engines, "limits": {"most_subjects": 16}})

    for few in (settings(2, 1), settings(4, 2, 1)):
        with pytest.raises(SettingsError, match="fewer than the") as refused:
            Common.of(few)
        assert "server.workers" in str(refused.value.hint)
    for enough in (settings(2, 2), settings(2, 1, 1), settings(2, 0), settings(4, 1, 0)):
        Common.of(enough)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
