"""The command line: what it hands to the app, what it prints, and how it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

import tidegate as tidegate_package
import tidegate.app as app_package
from tidegate import __version__
from tidegate.cli import drain, main
from tidegate.core.ask import Passage
from tidegate.core.errors import LocalPartError, StoreDown
from tidegate.core.flight import FlightRecord, new_flight_id
from tidegate.core.keys import hash_key
from tidegate.core.ports import KeyLimits, KeyRecord
from tidegate.core.search import Filter, IndexProgress, IndexState, Ranking
from tidegate.retrieval.ingest import Given, IngestReport, Progress
from tidegate.retrieval.quality import Mean, Quality, Ranked
from tidegate.retrieval.search import Searched
from tidegate.retrieval.structure import Rules

BEGAN_NS = 1_700_000_000_000_000_000


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without settings, and none in the environment but the data folder."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TIDEGATE_LOCAL__DATA", str(tmp_path / "data"))


def tidegate(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the files of tidegate.app and for tidegate.home; `calls` is what they were asked."""
    fake = SimpleNamespace(calls=[])
    files = [(app_package, name) for name in ("serving", "collections", "parts", "evaluate", "on_ray")]
    for package, name in (*files, (tidegate_package, "home")):
        monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", fake)
        monkeypatch.setattr(package, name, fake, raising=False)
    return fake


def record(**changes: Any) -> FlightRecord:
    facts: dict[str, Any] = {
        "id": new_flight_id(BEGAN_NS), "began_unix_ns": BEGAN_NS, "whole_ns": 100_000_000,
        "laps": [("parse", 1_000_000), ("engine.first_byte", 59_000_000), ("stream", 40_000_000)],
        "route": "/v1/chat/completions", "end": "stop", "http_status": 200, "model": "smollm2", "engine": "local",
        "token_ns": [60_000_000, 70_000_000, 100_000_000], "first_token_ns": 60_000_000, "decisions": [(5_000, "limit", {"left": 59})],
    }
    return FlightRecord(**(facts | changes))


# -- the way in --


def test_help_names_every_command_and_is_quick() -> None:
    """`--help` imports neither rich nor pydantic nor any room: that is what makes it quick."""
    code = "import sys; from tidegate.cli import main; main(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    for name in main.commands:
        assert f"  {name} " in said
    for heavy in ("'rich'", "'pydantic'", "'httpx'", "'tidegate.settings'", "'tidegate.app'", "'numpy'"):
        assert heavy not in said


def test_every_option_and_command_says_what_it_is() -> None:
    """No command without a sentence, no option without help."""
    def silent(path: str, command: click.Command) -> list[str]:
        found = [] if command.help else [path]
        found += [f"{path} {one.name}" for one in command.params if isinstance(one, click.Option) and not one.help]
        for name, below in getattr(command, "commands", {}).items():
            found += silent(f"{path} {name}", below)
        return found

    assert silent("tidegate", main) == []


def test_version_is_told() -> None:
    """Both ways of asking."""
    assert __version__ in tidegate("version").output
    assert __version__ in tidegate("--version").output


# -- errors --


def test_a_wrong_setting_is_a_sentence_a_hint_and_exit_code_2() -> None:
    """Never a traceback."""
    result = tidegate("settings", "--set", "server.prt=1")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: flag: [server] has no setting 'prt'.\nhint: Did you mean 'port'?")
    assert result.stdout == ""


def test_another_error_is_exit_code_1(app: SimpleNamespace) -> None:
    """A part that cannot run says so, with its hint."""
    def up(settings: Any, *, port_by_hand: bool) -> int:
        raise LocalPartError("The disk is full.", hint="Make room.")

    app.up = up
    result = tidegate("up")
    assert (result.exit_code, result.stderr) == (1, "error: The disk is full.\nhint: Make room.\n")


def test_a_fault_of_our_own_is_a_sentence_too(app: SimpleNamespace) -> None:
    """Even a bug does not throw a traceback at the user, unless it is asked for."""
    def up(settings: Any, *, port_by_hand: bool) -> int:
        raise RuntimeError("surprise")

    app.up = up
    result = tidegate("up")
    assert result.exit_code == 1
    assert "RuntimeError: surprise" in result.stderr
    assert "--debug" in result.stderr
    assert isinstance(tidegate("--debug", "up").exception, RuntimeError)


# -- running --


@pytest.mark.parametrize(
    ("args", "env", "port", "by_hand"),
    [((), {}, 8080, False), (("--port", "9000"), {}, 9000, True), ((), {"TIDEGATE_SERVER__PORT": "9001"}, 9001, True)],
)
def test_up_knows_whether_the_port_was_set_by_hand(
    app: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], env: dict[str, str], port: int, by_hand: bool
) -> None:
    """By flag, environment or file: then a taken port is an error and no next one is tried."""
    app.up = lambda settings, *, port_by_hand: app.calls.append((settings.server.port, port_by_hand)) or 7
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert tidegate("up", *args).exit_code == 7
    assert app.calls == [(port, by_hand)]


def test_serve_hands_on_its_socket_and_settings(app: SimpleNamespace) -> None:
    """--fd, --config, --host and --set arrive; the exit code is the app's."""
    Path("x.toml").write_text("[server]\nport = 1234\n")
    app.serve = lambda settings, fd: app.calls.append((settings.server.host, settings.server.port, settings.log.level, fd)) or 0
    assert tidegate("serve", "--config", "x.toml", "--host", "::1", "--set", "log.level=debug", "--fd", "5").exit_code == 0
    assert app.calls == [("::1", 1234, "debug", 5)]


@pytest.mark.parametrize(
    ("command", "setting"), [("serve", "server.port=7"), ("serve", "server.host=::1"), ("up", "server.port=7"), ("up", "local.data=/elsewhere")]
)
def test_a_setting_that_has_an_option_of_its_own_can_be_set_by_name(monkeypatch: pytest.MonkeyPatch, command: str, setting: str) -> None:
    """An option that was not given does not take back what `--set` says."""
    seen: list[Any] = []
    monkeypatch.setattr("tidegate.app.serving.serve", lambda settings, fd: seen.append(settings) or 0)
    monkeypatch.setattr("tidegate.home.up", lambda settings, port_by_hand: seen.append(settings) or 0)
    assert tidegate(command, "--set", setting).exit_code == 0
    name, _, value = setting.partition("=")
    assert (str(seen[0].provenance[name][0]), seen[0].provenance[name][1]) == (value, "flag")


def test_migrate_needs_a_database_and_tells_what_it_did(app: SimpleNamespace) -> None:
    """Without a DSN it says where one is named."""
    app.migrate_store = lambda settings: ["0001_first"]
    assert tidegate("migrate").exit_code == 2
    assert "applied 0001_first" in tidegate("migrate", "--set", "store.dsn=postgres://h/db").output


# -- documents --


def test_ingest_hands_on_everything_and_sums_up(app: SimpleNamespace) -> None:
    """Paths, collection, tags and prune arrive; what was skipped or failed is told with its reason, and fails the command."""
    async def ingest(
        settings: Any, paths: Any, *, collection: str, given: Given, base: Path | None, prune: bool,
        rules: Rules | None, progress: Callable[[Progress], None],
    ) -> IngestReport:
        app.calls.append(([str(path) for path in paths], collection, given.tags, prune, str(base), rules))
        progress(Progress(0, 1, "/d/[a].md", "reading"))
        progress(Progress(1, 1, "/d/[a].md", "stored", 3))
        failed = [("/d/b.pdf", "It is encrypted."), ("/d/\x07\x9b31m.pdf", "It is\r\nempty.")]
        return IngestReport(stored=["/d/a.md"], skipped=[("/d/.x", "hidden")], failed=failed, passages=3, seconds=0.5)

    app.ingest = ingest
    result = tidegate("ingest", "d", "--collection", "c", "--tag", "lang=en", "--tag", "a=b=c", "--prune", "--base", "d")
    assert app.calls == [(["d"], "c", {"lang": "en", "a": "b=c"}, True, "d", None)]
    assert "failed: /d/b.pdf: It is encrypted." in result.output
    assert "failed: /d/··31m.pdf: It is··empty." in result.output, "a file's name cannot steer the terminal"
    assert "1 stored (3 passages), 0 unchanged, 1 skipped, 2 failed, in 0.5 s" in result.output
    assert result.exit_code == 1
    assert json.loads(tidegate("ingest", "d", "--json").stdout)["passages"] == 3


def test_ingest_reads_as_its_capability_says(app: SimpleNamespace, tmp_path: Path) -> None:
    """Its structure.toml is read, and its collection is the one; an unknown capability and an unknown name in the file are refused."""
    folder = tmp_path / "capabilities" / "support" / "answer"
    shutil.copytree(Path(__file__).parents[1] / "examples" / "capabilities" / "support" / "answer", folder)
    manifest = folder / "capability.toml"
    manifest.write_text(re.sub(r'collection = ".*"', 'collection = "reports"', manifest.read_text()))
    (folder / "structure.toml").write_text('starts = ["Exclusions"]\n')
    seen: list[tuple[str, Rules | None]] = []

    async def ingest(settings: Any, paths: Any, *, collection: str, rules: Rules | None, **rest: Any) -> IngestReport:
        seen.append((collection, rules))
        return IngestReport()

    app.ingest = ingest
    folders = f"capabilities.folders=[{str(tmp_path / 'capabilities')!r}]"
    assert tidegate("ingest", "d", "--capability", "support/answer", "--set", folders).exit_code == 0
    assert tidegate("ingest", "d", "--capability", "support/answer", "--collection", "c", "--set", folders).exit_code == 0
    assert seen == [("reports", Rules(starts=["Exclusions"])), ("c", Rules(starts=["Exclusions"]))]
    assert "There is no capability 'support/anser'" in tidegate("ingest", "d", "--capability", "support/anser", "--set", folders).stderr
    (folder / "structure.toml").write_text('start = ["Exclusions"]\n')
    assert "Known names: starts, owns_table, skip" in tidegate("ingest", "d", "--capability", "support/answer", "--set", folders).stderr


@pytest.mark.parametrize(
    "args", [("ingest", "d"), ("search", "q"), ("explain", "q"), ("eval", "retrieval", "s.jsonl")], ids=lambda args: " ".join(args)
)
def test_an_empty_collection_is_not_the_default(app: SimpleNamespace, args: tuple[str, ...]) -> None:
    """It comes of a variable that is not set, and documents would go where nobody looks for them."""
    result = tidegate(*args, "--collection", "")
    assert (result.exit_code, app.calls) == (2, [])
    assert "the name is empty" in result.stderr


def test_a_tag_without_a_value_is_refused(app: SimpleNamespace) -> None:
    """Before anything is read."""
    result = tidegate("ingest", "d", "--tag", "lang")
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.stderr


def test_index_hands_on_its_facets(app: SimpleNamespace) -> None:
    """None where none are named: those that are there stay; an empty list drops them."""
    async def build_indexes(
        settings: Any, collection: str, *, facets: Any, graph: bool | None, progress: Callable[[IndexProgress], None]
    ) -> list[IndexState]:
        app.calls.append((collection, facets, graph))
        progress(IndexProgress("x", "building", 1, 2))
        return [IndexState("i_graph", "graph of neighbours", 5_000_000, True), IndexState("i_facet", "facet a\x07", 1_200_000, False)]

    app.build_indexes = build_indexes
    assert tidegate("index", "c").stdout == (
        "built: i_graph, graph of neighbours, 5.0 MB\nthere: i_facet, facet a·, 1.2 MB\nThe indexes of c are complete.\n"
    )
    tidegate("index", "c", "--facet", "a", "--facet", "b", "--graph")
    tidegate("index", "c", "--no-facets", "--no-graph")
    assert app.calls == [("c", None, None), ("c", ["a", "b"], True), ("c", [], False)]
    assert tidegate("index", "c", "--facet", "a", "--no-facets").exit_code == 2


def test_explain_hands_on_its_filter(app: SimpleNamespace) -> None:
    """Times are UTC."""
    async def explain_search(settings: Any, question: str, *, collection: str, k: int, wanted: Filter) -> list[str]:
        app.calls.append((question, collection, k, wanted))
        return ["exact", "Sort\x07"]

    app.explain_search = explain_search
    result = tidegate("explain", "why", "-k", "3", "--collection", "c", "--tag", "a=b", "--since", "1970-01-02", "--min-confidence", "0.5")
    assert app.calls == [("why", "c", 3, Filter({"a": "b"}, 86400.0, None, 0.5))]
    assert result.output == "exact\nSort·\n"


@pytest.mark.parametrize(
    "wrong",
    [
        ("search", "why", "--min-confidence", "nan"), ("explain", "why", "--min-confidence", "nan"),
        ("eval", "retrieval", "s", "--min-recall", "nan"), ("check", "http://127.0.0.1:1", "--time-limit", "nan"),
        ("drain", "--wait", "--time-limit", "nan"), ("ingest", "d", "--confidence", "nan"),
        ("search", "why", "--since", "2026-01-02", "--until", "2026-01-01"),
    ],
    ids=lambda wrong: " ".join((wrong[0], wrong[-2])),
)
def test_what_no_number_or_time_can_be_is_refused(app: SimpleNamespace, wrong: tuple[str, ...]) -> None:
    """NaN is in every range, and nothing is later than its end: both would silently find nothing."""
    assert tidegate(*wrong).exit_code == 2


def judged(recall: float) -> Quality:
    figure = Mean(recall, 0.0, 1.0)
    order = Ranked(figure, dict.fromkeys((1, 3, 5, 10), figure), figure, figure)
    return Quality("c", "7-a", "s.jsonl", "0" * 64, 2, {"vector": order, "final": order}, {"vector": Mean(0.125, -0.5, 0.5)}, ["gone\x07.md"])


def test_eval_prints_each_order_with_its_interval(app: SimpleNamespace, tmp_path: Path) -> None:
    """The gain with its sign, what the collection does not hold, and exit code 1 below the bound."""
    async def evaluate_retrieval(settings: Any, path: Path, *, collection: str, save: bool, progress: Callable[[int, int], None]) -> Quality:
        app.calls.append((path.name, collection, save))
        progress(1, 2)
        return judged(0.75)

    app.evaluate_retrieval = evaluate_retrieval
    result = tidegate("eval", "retrieval", "s.jsonl", "--collection", "c", "--min-recall", "0.75")
    assert result.exit_code == 0
    head = "2 questions of s.jsonl, collection c at index version 7-a"
    for said in (head, "0.750", "0.000..1.000", "+0.125", "-0.500..+0.500", "does not hold gone·.md"):
        assert said in result.stdout
    assert tidegate("eval", "retrieval", "s.jsonl", "--no-save", "--min-recall", "0.76").exit_code == 1
    assert app.calls == [("s.jsonl", "c", True), ("s.jsonl", "default", False)]
    assert json.loads(tidegate("eval", "retrieval", "s.jsonl", "--json").stdout)["orders"]["final"]["mrr"]["value"] == 0.75


def test_eval_tells_what_earlier_runs_said(app: SimpleNamespace) -> None:
    """Newest first, as they came; a set and --history exclude each other."""
    async def list_evaluations(settings: Any, collection: str, limit: int) -> list[tuple[float, Quality]]:
        return [(86_400.0, judged(0.5)), (0.0, judged(0.25))]

    app.list_evaluations = list_evaluations
    shown = tidegate("eval", "retrieval", "--history").stdout
    assert shown.index("1970-01-02 00:00:00") < shown.index("1970-01-01 00:00:00")
    assert "s.jsonl 00000000" in shown
    assert json.loads(tidegate("eval", "retrieval", "--history", "--json").stdout)[1]["at_unix_s"] == 0
    for wrong in ((), ("s.jsonl", "--history")):
        assert tidegate("eval", "retrieval", *wrong).exit_code == 2


FOUND = Searched(
    [Passage("p1", "motor\x1b.md", "Motor", "Seven days.\nAt once.", 0.87, page=3), Passage("p2", "home.md", "Home", "Water.", 0.5)], "9", "exact",
    [Ranking("vector", ["p1", "p3"], [0.87, 0.6]), Ranking("words", ["p2", "p1"], [7.1, 2.0], [0.9, 0.25])],
    reranker="features", scores=[1.5, 0.5], repeated=1, differing=[("p1", "p2")], took_ns={"embed": 6_000_000, "store": 2_000_000},
)


def test_search_shows_where_each_leg_had_a_passage(app: SimpleNamespace) -> None:
    """Source, page, text, and per leg place and score; what a leg did not find it does not name. Its filter is that of explain."""
    async def search(settings: Any, question: str, *, collection: str, k: int, wanted: Filter, rerank: str | None) -> Searched:
        app.calls.append((question, collection, k, wanted, rerank))
        return FOUND

    app.search = search
    shown = tidegate("search", "why", "-k", "3", "--collection", "c", "--tag", "a=b", "--until", "1970-01-02", "--superseded").stdout
    assert app.calls == [("why", "c", 3, Filter({"a": "b"}, None, 86400.0, superseded=True), None)]
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[lines.index("") + 1 :][:3] == [
        "1 motor·.md, page 3  Motor", "vector 1 (0.870)   words 2 (2.000, covers 0.25)   features 1.500   p1", "Seven days.",
    ]  # fmt: skip
    assert "words 1 (7.100, covers 0.90)   features 0.500   p2" in lines
    assert "p1 and p2 say the same with other figures." in lines
    head = " ".join(lines[: lines.index("")])
    for said in ("2 passages of index version 9", "in the order of features", "1 left out that repeat others", "8.00 ms (embed 6.00, store 2.00)"):
        assert said in head
    assert "by vector" not in shown


def test_search_shows_the_legs_and_the_fused_order(app: SimpleNamespace) -> None:
    """--legs lists what each leg found, also what is not shown; --no-rerank asks for no reranker; --json has it all."""
    async def search(settings: Any, question: str, *, rerank: str | None, **_: Any) -> Searched:
        app.calls.append(rerank)
        return msgspec.structs.replace(FOUND, reranker="off", scores=[], not_reranked="slow")

    app.search = search
    shown = tidegate("search", "why", "--legs", "--no-rerank").stdout
    assert app.calls == ["off"]
    assert "not reranked: slow" in " ".join(shown.split())
    rows = [line.split() for line in shown.splitlines()]
    assert ["2", "0.600", "-", "p3"] in rows
    assert ["1", "7.100", "0.90", "2", "p2"] in rows
    assert msgspec.json.decode(tidegate("search", "why", "--json").stdout)["legs"][1]["coverage"] == [0.9, 0.25]


# -- keys --


class Keys:
    """A key store in memory."""

    def __init__(self) -> None:
        self.records: list[KeyRecord] = []
        self.limits: dict[str, KeyLimits] = {}

    async def limit_key(self, key_id: str, limits: KeyLimits) -> bool:
        known = any(record.id == key_id for record in self.records)
        if known:
            self.limits[key_id] = limits
        return known

    async def add_key(self, key: KeyRecord) -> None:
        self.records.append(key)

    async def list_keys(self) -> list[KeyRecord]:
        return self.records

    async def revoke_key(self, key_id: str) -> bool:
        return any(record.id == key_id for record in self.records)


@pytest.fixture
def store(app: SimpleNamespace) -> Keys:
    keys = Keys()

    @asynccontextmanager
    async def key_store(settings: Any) -> AsyncIterator[Keys]:
        yield keys

    app.key_store = key_store
    return keys


LIMITED = ("--rpm", "60", "--tpm", "1000", "--concurrent", "4", "--money", "2.5")


def test_a_new_key_is_printed_once_and_stored_hashed(store: Keys) -> None:
    """stdout holds the key alone, for `KEY=$(tidegate keys create)`; the store has its SHA-256; the list never shows it.
    A list in a pipe is not cut to a terminal's width."""
    name = "the nightly run of the claims portal's own checks, and of others"
    result = tidegate("keys", "create", "--tenant", "acme", "--role", "admin", "--name", name, *LIMITED)
    key = result.stdout.strip()
    (stored,) = store.records
    assert stored.sha256 == hash_key(key)
    assert (stored.tenant, stored.role, stored.name) == ("acme", "admin", name)
    assert (stored.requests_per_minute, stored.tokens_per_minute, stored.concurrent, stored.money_per_day) == (60, 1000, 4, 2.5)
    assert key not in result.stderr
    for listed in (tidegate("keys", "list").output, tidegate("keys", "list", "--json").output):
        assert stored.id in listed
        assert name in listed
        assert key not in listed
        assert stored.sha256 not in listed


def test_limits_of_a_key_are_listed_and_changed(store: Keys) -> None:
    """The list shows each; `limit` changes those that are named, and says no to a key that is none."""
    tidegate("keys", "create", *LIMITED)
    heading, row = tidegate("keys", "list").output.splitlines()
    assert ("at once" in heading, "money/day" in heading, row.split()[-4:-2]) == (True, True, ["4", "2.5"])
    key_id = store.records[0].id
    assert "has its new limits" in tidegate("keys", "limit", key_id, "--money", "0", "--concurrent", "9").output
    assert store.limits == {key_id: KeyLimits(concurrent=9, money_per_day=0.0)}
    assert tidegate("keys", "limit", "key_none", "--rpm", "1").exit_code == 1


@pytest.mark.parametrize(
    "options", [(), ("--concurrent", "-1"), ("--money", "nan"), ("--money", "inf"), ("--rpm", str(2**31))],
    ids=["none", "negative", "nan", "inf", "huge"],
)
def test_a_limit_that_is_none_is_refused(store: Keys, options: tuple[str, ...]) -> None:
    """Before anything is stored."""
    result = tidegate("keys", "limit", "key_1", *options)
    assert (result.exit_code, store.limits) == (2, {})


def test_a_key_that_does_not_exist_cannot_be_revoked(store: Keys) -> None:
    """The way out is the list; one that exists is revoked."""
    tidegate("keys", "create")
    assert "is revoked" in tidegate("keys", "revoke", store.records[0].id).output
    result = tidegate("keys", "revoke", "key_none")
    assert result.exit_code == 1
    assert "tidegate keys list" in result.stderr


def test_a_database_that_is_down_is_a_sentence(app: SimpleNamespace) -> None:
    """No traceback from the driver."""
    @asynccontextmanager
    async def key_store(settings: Any) -> AsyncIterator[Keys]:
        if settings is not None:
            raise StoreDown("The database cannot be reached.", hint="Start it.")
        yield Keys()

    app.key_store = key_store
    result = tidegate("keys", "list")
    assert (result.exit_code, result.stderr) == (1, "error: The database cannot be reached.\nhint: Start it.\n")


# -- looking at flights --


class Gateway:
    """Answers with what `answers` says for the path; `asked` is (path, authorization), `posted` the paths of POST."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}  # a list: one answer after the other
        self.asked: list[tuple[str, str]] = []
        self.posted: list[str] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gateway.asked.append((self.path, self.headers["authorization"]))
                unknown = 404, {"error": {"message": "No such flight.", "hint": "Look."}}
                answer = gateway.answers.get(self.path.partition("?")[0], unknown)
                status, body = answer.pop(0) if isinstance(answer, list) else answer
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else msgspec.json.encode(body))

            def do_POST(self) -> None:
                gateway.posted.append(self.path)
                self.do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                """Silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """A gateway that left its address and the first key in the data folder, as `tidegate up` does."""
    running = Gateway()
    thread = threading.Thread(target=running.server.serve_forever, args=(0.01,))
    thread.start()
    (tmp_path / "data" / "run").mkdir(parents=True)
    (tmp_path / "data" / "run" / "gateway.json").write_text(json.dumps({"url": running.url, "pid": 1}))
    (tmp_path / "data" / "first-key").write_text("tg_first\n")
    yield running
    running.server.shutdown()
    running.server.server_close()
    thread.join()


def test_a_flight_is_drawn(gateway: Gateway) -> None:
    """Every part with its ms and percent, the whole, the tokens' rhythm, decisions and end; asked with the first key."""
    gateway.answers["/api/v1/flights/abc"] = (200, record())
    result = tidegate("flight", "abc")
    assert result.exit_code == 0, result.output
    assert gateway.asked == [("/api/v1/flights/abc", "Bearer tg_first")]
    for said in ("engine.first_byte", "59.0", "whole", "100.0", "first token 60.0 ms, 3 events", "limit", "left=59", "stop, HTTP 200", "█"):
        assert said in result.output


def test_a_flight_as_json_is_the_record(gateway: Gateway) -> None:
    """For programs."""
    one = record()
    gateway.answers["/api/v1/flights/abc"] = (200, one)
    assert msgspec.json.decode(tidegate("flight", "abc", "--json").stdout, type=FlightRecord) == one


def test_a_refusal_is_told_in_the_gateways_words(gateway: Gateway) -> None:
    """Message and hint, exit code 1."""
    result = tidegate("flight", "none")
    assert (result.exit_code, result.stderr) == (1, "error: No such flight.\nhint: Look.\n")


@pytest.mark.parametrize("answer", [(200, b"<html>"), (200, b'{"id": 3}'), (502, b"<html>"), (500, b"{}"), (404, b"[]")])
def test_a_stranger_at_the_address_is_told(gateway: Gateway, answer: tuple[int, bytes]) -> None:
    """Something else that answers there is no traceback."""
    gateway.answers["/api/v1/flights/abc"] = answer
    result = tidegate("flight", "abc")
    assert result.exit_code == 1
    assert "--url" in result.stderr


# -- engines


def engine(requests: int = 0, **fleet: Any) -> dict[str, Any]:
    return {"admitted": True, "conformance": "passed", "fleet": {"requests": requests, "breaker": "closed", **fleet}}


@pytest.mark.parametrize("arguments", [["one"], ["one", "--undo"], []])
def test_a_drain_without_an_admin_key_asks_nobody(gateway: Gateway, arguments: list[str]) -> None:
    """The data key that `tidegate up` keeps would be refused: what is needed is said, with the way to it, also where engines are only shown."""
    result = tidegate("drain", *arguments)
    assert result.exit_code == 1
    assert "This takes an admin key, and none was given" in result.output
    assert "tidegate keys create --role admin" in result.output
    assert (gateway.posted, gateway.asked) == ([], [])


def test_an_engine_is_drained_and_waited_for(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order goes to the gateway; the command comes back when nothing runs there, and shows all engines."""
    monkeypatch.setattr(drain, "LOOK_S", 0.001)
    gateway.answers["/api/v1/engines/one/drain"] = (200, {})
    two = engine(3, breaker="half_open")
    looks = [engine(count, drained=True, tokens_in_flight=70 * count) for count in (2, 2, 1, 0)]
    gateway.answers["/api/v1/engines"] = [(200, {"engines": {"one": look, "two": two}}) for look in [looks[0], *looks]]
    result = tidegate("drain", "one", "--wait", "--key", "admin")
    assert result.exit_code == 0, result.output
    assert gateway.posted == ["/api/v1/engines/one/drain"]
    assert not gateway.answers["/api/v1/engines"], "it looked until nothing ran"
    for said in ("one", "drained", "two", "breaker half open", "3"):
        assert said in result.output


def test_a_wait_that_takes_too_long_is_given_up(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, what still runs, and that it stays drained."""
    monkeypatch.setattr(drain, "LOOK_S", 0.001)
    gateway.answers["/api/v1/engines/one/drain"] = (200, {})
    gateway.answers["/api/v1/engines"] = (200, {"engines": {"one": engine(2, drained=True)}})
    result = tidegate("drain", "one", "--wait", "--time-limit", "0.01", "--key", "admin")
    assert (result.exit_code, "2 requests still run on 'one'" in result.stderr, "--undo" in result.stderr) == (1, True, True)
    assert "drained: requests end on it" in result.stdout


def test_an_order_is_taken_back_and_engines_are_shown(gateway: Gateway) -> None:
    """--undo; without a name only the table; --json is the gateway's own."""
    gateway.answers["/api/v1/engines/one%2Ftwo/resume"] = (200, {})
    known = {"engines": {"one/two": engine(), "ill": {**engine(), "admitted": False}, "busy": engine(asked_not_before_s=6.5)}}
    gateway.answers["/api/v1/engines"] = (200, known)
    undone = tidegate("drain", "one/two", "--undo", "--key", "admin")
    assert undone.exit_code == 0, undone.output
    for said in ("takes requests", "not admitted", "left alone for 6.5 s"):
        assert said in undone.output
    assert json.loads(tidegate("drain", "--json", "--key", "admin").stdout) == known
    assert gateway.posted == ["/api/v1/engines/one%2Ftwo/resume"]


@pytest.mark.parametrize("args", [("--undo",), ("--wait",), ("one", "--undo", "--wait"), ("one", "--time-limit", "3"), ("one", "--time-limit", "0")])
def test_drains_that_make_no_sense_are_refused(gateway: Gateway, args: tuple[str, ...]) -> None:
    """Exit code 2, and nothing was ordered."""
    assert tidegate("drain", *args).exit_code == 2
    assert gateway.asked == []


def test_an_order_that_is_refused_is_told_in_the_gateways_words(gateway: Gateway) -> None:
    """Message and hint, exit code 1."""
    gateway.answers["/api/v1/engines/third/drain"] = (404, {"error": {"message": "There is no engine 'third'.", "hint": "Known: one."}})
    result = tidegate("drain", "third", "--key", "admin")
    assert (result.exit_code, result.stderr) == (1, "error: There is no engine 'third'.\nhint: Known: one.\n")


def test_without_a_gateway_the_way_out_is_told(tmp_path: Path) -> None:
    """No run file, or nobody at the address."""
    assert "tidegate up" in tidegate("flight", "abc").stderr
    assert "cannot be reached" in tidegate("flight", "abc", "--url", "http://127.0.0.1:1", "--key", "k").stderr
    assert "cannot be reached" in tidegate("flight", "abc", "--url", "no url", "--key", "k").stderr


def test_url_and_key_may_come_from_the_environment(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """TIDEGATE_URL and TIDEGATE_KEY, and they are no unknown settings."""
    monkeypatch.setenv("TIDEGATE_URL", gateway.url + "/")
    monkeypatch.setenv("TIDEGATE_KEY", "tg_other")
    gateway.answers["/api/v1/flights/abc"] = (200, record())
    assert tidegate("flight", "abc").exit_code == 0
    assert gateway.asked[0][1] == "Bearer tg_other"
    assert tidegate("settings").exit_code == 0


def test_flights_are_listed_and_the_bad_ones_found(gateway: Gateway) -> None:
    """--bad leaves those that failed through an engine or through us."""
    good, bad, own = record(), record(end="cut", error_code="engine_cut", http_status=502), record(end="refused", http_status=401)
    gateway.answers["/api/v1/flights"] = (200, {"flights": [good, bad, own]})
    listed = tidegate("flights").output
    assert all(one.id in listed for one in (good, bad, own))
    found = msgspec.json.decode(tidegate("flights", "--bad", "--json").stdout)["flights"]
    assert [one["id"] for one in found] == [bad.id]
    assert tidegate("flights", "--capability", "a/b", "--end", "cut").exit_code == 0
    assert gateway.asked[-1][0] == "/api/v1/flights?limit=20&capability=a%2Fb&end=cut"
    unknown = tidegate("flights", "--end", "stoped")
    assert (unknown.exit_code, "Did you mean 'stop'?" in unknown.stderr) == (2, True)


# -- ladder --


def test_ladder_shows_rungs_and_budgets_in_force() -> None:
    """Without engines the profile is the one that `tidegate up` takes for its own; each time says what set it and what follows."""
    told = json.loads(tidegate("ladder", "support/answer", "--json").stdout)
    assert [rung["rung"] for rung in told["rungs"]] == ["full", "no_retrieval", "small_model", "faq", "message"]
    assert told["profile"] == "embedded"
    retrieve = next(one for one in told["budgets"] if one["part"] == "retrieve")
    assert retrieve == {"part": "retrieve", "at_most_s": 2.0, "set_by": "profile embedded", "otherwise": "no_retrieval"}
    shown = tidegate("ladder", "support/answer", "--set", "budgets.profile=gpu", "--set", "budgets.retrieve_s=0.5").stdout
    assert "Budgets, profile gpu:" in shown
    assert "share" not in shown.splitlines()[0]  # nobody has set one
    assert next(line.split() for line in shown.splitlines() if line.startswith("retrieve ")) == ["retrieve", "0.5", "s", "flag", "no_retrieval"]


# -- settings --


def test_settings_in_force_are_printed_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """File with line, environment, flag and default; the real command in a process of its own."""
    Path("tidegate.toml").write_text("[server]\nhost = '::1'\n\n[store]\ndsn = 'postgres://u:hunter2@h/db'\n")
    env = os.environ | {"TIDEGATE_SERVER__PORT": "9000"}
    command = [sys.executable, "-m", "tidegate.cli", "settings", "--set", "log.level=debug"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=env).stdout
    rows = {row.split()[0]: row.split()[1:] for row in said.splitlines()}
    assert rows["server.host"] == ['"::1"', "tidegate.toml:2"]
    assert rows["server.port"] == ["9000", "env", "TIDEGATE_SERVER__PORT"]
    assert rows["log.level"] == ['"debug"', "flag"]
    assert rows["server.backlog"] == ["2048", "default"]
    assert rows["store.dsn"] == ['"postgres://u:***@h/db"', "tidegate.toml:5"]
    assert "hunter2" not in said


def test_settings_as_json_and_only_the_changed_ones() -> None:
    """For programs, and for a quick look."""
    told = json.loads(tidegate("settings", "--json", "--changed", "--set", "server.port=1").stdout)
    assert told["server.port"] == {"value": 1, "source": "flag"}
    assert set(told) == {"server.port", "local.data"}


def test_a_set_without_a_value_is_refused() -> None:
    """`--set log.level` is not NAME=VALUE."""
    result = tidegate("settings", "--set", "log.level")
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.stderr


# -- engines --


@pytest.fixture
def scripted_engine(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts `tidegate scripted` with options; gives the address that it prints."""
    running: list[subprocess.Popen[str]] = []

    def start(*options: str) -> str:
        command = [sys.executable, "-m", "tidegate.cli", "scripted", *options]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout is not None
        return "http://" + running[-1].stdout.readline().split()[-1]

    yield start
    for process in running:
        process.terminate()
        assert process.wait(30) == 0
        assert process.stdout is not None
        process.stdout.close()


def ask(url: str, *, order: str = "", timeout_s: float = 30.0) -> dict[str, Any]:
    """A whole answer of the scripted engine."""
    import httpx

    body = {"messages": [{"role": "user", "content": f"Hello {order}"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s, trust_env=False)
    found: dict[str, Any] = answer.json()
    return found


def test_scripted_says_the_words_it_is_given(scripted_engine: Callable[..., str], tmp_path: Path) -> None:
    """In turn, as many as the prompt orders; what the prompt orders else wins."""
    (tmp_path / "words.txt").write_text("red green\nblue", encoding="utf-8")
    url = scripted_engine("--words", str(tmp_path / "words.txt"), "--first-ms", "1~0.2", "--between-ms", "0.1", "--seed", "3")
    assert ask(url, order="##n=4##")["choices"][0]["message"]["content"] == " red green blue red"
    assert ask(url, order='##json="mine"##')["choices"][0]["message"]["content"] == "mine"


def test_scripted_refuses_what_does_not_fit_its_context(scripted_engine: Callable[..., str]) -> None:
    """In the words by which every adapter knows it."""
    url = scripted_engine("--context", "4")
    assert "choices" in ask(url)
    assert ask(url, order="one two three four")["error"]["message"].startswith("This model's maximum context length is 4 tokens.")


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--first-ms", "fast"], "'fast' is no time"), (["--words", "nowhere.txt"], "nowhere.txt cannot be read"), (["--port", "1"], "cannot listen")],
)
def test_scripted_options_that_make_no_sense(options: list[str], why: str) -> None:
    """A sentence, and exit code 2."""
    if options == ["--port", "1"] and os.geteuid() == 0:
        options = ["--host", "192.0.2.1"]  # an address that is nobody's, since root may have every port
    result = tidegate("scripted", *options)
    assert (result.exit_code, why in result.stderr) == (2, True), result.output


def test_check_shows_a_verdict_and_evidence_for_each_check(scripted_engine: Callable[..., str]) -> None:
    """Exit code 0 where no must failed."""
    result = tidegate("check", scripted_engine("--first-ms", "5", "--between-ms", "3"))
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    for name, verdict in (("streaming", "pass"), ("usage", "pass"), ("cancel", "pass"), ("special_tokens", "not proven"), ("json_schema", "fail")):
        assert verdict in lines[name], result.stdout
    assert "by the engine's own count" in lines["cancel"]
    assert "no must failed" in result.stdout


def test_check_as_json(scripted_engine: Callable[..., str]) -> None:
    """The same as a document, for scripts."""
    url = scripted_engine()
    result = tidegate("check", url, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["passed"], told["target"], told["adapter"]) == (0, True, url, "scripted")
    assert {"name", "level", "verdict", "evidence", "ms"} == set(told["findings"][0])


def test_check_of_an_engine_that_fails_a_must(scripted_engine: Callable[..., str]) -> None:
    """Exit code 1: this one claims 8,192 tokens of context and refuses none, which the plain OpenAI adapter sees."""
    result = tidegate("check", scripted_engine(), "--adapter", "openai")
    assert result.exit_code == 1
    assert "context failed, so a gateway would not use it" in result.stdout


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["http://127.0.0.1:1"], "refuses connections"),
        (["ftp://host"], "must begin with http"),
        (["nowhere.gguf"], "nowhere.gguf cannot be read"),
        (["http://127.0.0.1:1", "--adapter", "opanai"], "There is no adapters plug-in 'opanai'"),
        (["http://127.0.0.1:1", "--api-key-env", "NO_SUCH_KEY"], "There is no environment variable 'NO_SUCH_KEY'"),
        (["http://127.0.0.1:1", "--tokenizer", "nowhere.gguf"], "nowhere.gguf cannot be read"),
        (["http://127.0.0.1:1", "--time-limit", "0"], "0"),
    ],
)
def test_check_of_nothing(args: list[str], why: str) -> None:
    """Exit code 2: nothing was checked, and the error says why."""
    result = tidegate("check", *args)
    assert (result.exit_code, why in result.stderr) == (2, True), result.output


def test_check_brings_the_key(scripted_engine: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, since every user of the machine can read arguments."""
    url = scripted_engine("--api-key", "sesame")
    monkeypatch.setenv("ENGINE_KEY", "sesame")
    result = tidegate("check", url, "--api-key-env", "ENGINE_KEY", "--json")
    assert json.loads(result.stdout)["passed"] is True
    monkeypatch.setenv("ENGINE_KEY", "other")
    assert tidegate("check", url, "--api-key-env", "ENGINE_KEY").exit_code == 2
