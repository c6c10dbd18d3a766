"""Traces: every format is read as it is, and what is wrong in a file is said with its line."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.sizing.traces import FORMATS, MAX_TOKENS, Arrival, Served, Trace, read

DATA = Path(__file__).parents[3] / "shared" / "data" / "traces"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside this checkout")

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:18:04.0319600,3180,8\n"
MOONCAKE = (
    '{"timestamp": 1500, "input_length": 100, "output_length": 7, "hash_ids": [0]}\n{"timestamp": 2500, "input_length": 5, "output_length": 1}\n'
)
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n"


def read_text(folder: Path, text: str, name: str = "trace") -> Trace:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read(path, 100)


@needs_data
@pytest.mark.parametrize(
    ("file", "kind", "count", "first"),
    [
        ("azure2023_code.csv", "azure-2023", 8819, (4808, 10)), ("mooncake_synthetic.jsonl.gz", "mooncake", 3993, (40160, 6)),
        ("vidur_arxiv_lengths.csv", "vidur", 28257, (3772, 54)),
    ],
)  # fmt: skip
def test_real_traces_are_read_whole(file: str, kind: str, count: int, first: tuple[int, int]) -> None:
    """Every record of a real trace is there, the first as it stands in the file, times beginning at 0."""
    trace = read(DATA / file, 100_000)
    assert (trace.format, len(trace.arrivals), trace.cut) == (kind, count, False)
    assert (trace.arrivals[0].at_s, trace.arrivals[0].prompt, trace.arrivals[0].output) == (0.0, *first)


@needs_data
def test_servegen_is_drawn_by_seed() -> None:
    """A ServeGen trace is a distribution: the same seed draws the same requests, another seed others, at the rate that the windows say."""
    path = DATA / "servegen" / "reason__deepseek-r1__chunk-3-trace.csv"
    one, same, other = read(path, 20_000, 1), read(path, 20_000, 1), read(path, 20_000, 2)
    assert one == same
    assert one.arrivals != other.arrivals
    late = [arrival for arrival in one.arrivals if 1000 < arrival.at_s < 1600]  # inside windows of 13.1 to 13.4 requests/s
    assert 12.0 < len(late) / 600 < 14.5


def test_times_begin_at_zero(tmp_path: Path) -> None:
    """Seven digits of a second are read, and the first request comes at 0."""
    assert read_text(tmp_path, AZURE).arrivals == (Arrival(0.0, 4808, 10), Arrival(pytest.approx(60.052), 3180, 8))
    assert read_text(tmp_path, MOONCAKE).arrivals == (Arrival(0.0, 100, 7), Arrival(1.0, 5, 1))


def test_gzip_is_seen_through_and_lengths_alone_have_no_times(tmp_path: Path) -> None:
    """A packed file is read like the plain one, whatever its name; a trace of lengths says that it has no times."""
    path = tmp_path / "packed"
    path.write_bytes(gzip.compress(VIDUR.encode()))
    trace = read(path, 10)
    assert (trace.format, trace.timed, trace.arrivals) == ("vidur", False, (Arrival(0.0, 3772, 54),))


def test_a_limit_is_said(tmp_path: Path) -> None:
    """Where the file goes on behind what was asked for, the trace says so."""
    path = tmp_path / "trace"
    path.write_text(AZURE)
    assert (len(read(path, 1).arrivals), read(path, 1).cut, read(path, 2).cut) == (1, True, False)


def test_own_flights_are_a_trace(tmp_path: Path) -> None:
    """Flights come newest first and leave oldest first, with their tenants; one that never ran is counted, not replayed."""
    flights = [
        {"began_unix_ns": 3_000_000_000, "tenant": "b", "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
        {"began_unix_ns": 2_000_000_000, "tenant": "b"},
        {"began_unix_ns": 1_000_000_000, "tenant": "a", "usage": {"prompt_tokens": 5}},
    ]
    trace = read_text(tmp_path, json.dumps({"flights": flights}, separators=(",", ":")))
    assert trace.arrivals == (Arrival(0.0, 5, 0, "a"), Arrival(2.0, 9, 2, "b"))
    assert trace.skipped == 1


def test_flights_tell_what_was_cached_and_when_they_were_served(tmp_path: Path) -> None:
    """A connection that was dead when it was used again: the request was served from when it was sent for the second time."""
    laps = [
        ["queue", 1_000_000_000], ["engine.send", 1], ["engine.connect", 500_000_000], ["engine.send", 1], ["engine.first_token", 400_000_000],
        ["close", 1],
    ]  # fmt: skip
    flight = {
        "began_unix_ns": 5_000_000_000, "laps": laps, "token_ns": [2_000_000_000, 2_500_000_000],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 4},
    }  # fmt: skip
    (found,) = read_text(tmp_path, json.dumps({"flights": [flight]}, separators=(",", ":"))).arrivals
    assert (found.prompt, found.cached, found.output) == (9, 4, 2)
    assert found.served == Served(pytest.approx(1.500000001), (pytest.approx(2.0), pytest.approx(2.5)))


@pytest.mark.parametrize("more", [{}, {"laps": [["queue", 5]], "token_ns": [7]}, {"laps": [["engine.send", 5]]}])
def test_a_flight_that_no_engine_served_tells_no_times(tmp_path: Path, more: dict[str, object]) -> None:
    """An answer from a cache, one without tokens."""
    flight = {"began_unix_ns": 1, "usage": {"prompt_tokens": 9, "completion_tokens": 2}, **more}
    (found,) = read_text(tmp_path, json.dumps({"flights": [flight]}, separators=(",", ":"))).arrivals
    assert found.served is None


def test_an_unknown_format_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    """What fits no format is refused by what it begins with, and every known format is named."""
    with pytest.raises(SettingsError, match="begins with 'id,when'") as caught:
        read_text(tmp_path, "id,when\n1,2\n")
    assert all(one.name in (caught.value.hint or "") for one in FORMATS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AZURE + "2023-11-16 18:19:00,-1,8\n", r"line 4, says ContextTokens = '-1'"),
        (AZURE + "2023-11-16 18:19:00,1,1e3\n", r"line 4, says GeneratedTokens = '1e3'"),
        (AZURE + "2023-11-16 18:19:00,1\n", "line 4, has 2 columns in place of 3"),
        (AZURE + "yesterday,1,1\n", "line 4, says TIMESTAMP = 'yesterday'"),
        (AZURE + "2023-11-16 18:00:00,1,1\n", "line 4, is earlier than the line before it"),
        (AZURE.splitlines()[0], "holds no requests"),
        (MOONCAKE + "{", "line 3, is no JSON"),
        (MOONCAKE + "[]", "line 3, is no object with timestamp"),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 3, says timestamp = 'nan'"),
        (MOONCAKE + '{"timestamp": 9000, "input_length": true, "output_length": 1}', "line 3, says input_length = 'True'"),
        (MOONCAKE + f'{{"timestamp": 9000, "input_length": {MAX_TOKENS + 1}, "output_length": 1}}', "line 3, says input_length"),
        ('{"flights":3}', "holds no list of flights"),
        ('{"flights":[3]}', "something else than a flight at place 1"),
        ('{"flights":[{"usage":{"prompt_tokens":1}}]}', "says began_unix_ns = 'None'"),
        ('{"flights":[{"began_unix_ns":1,"usage":{"prompt_tokens":1},"laps":3}]}', "laps or stamps are no lists"),
        ('{"flights":[{"began_unix_ns":1,"usage":{"prompt_tokens":1},"laps":[["a","b"],["engine.send",1]],"token_ns":[1]}]}', "says a lap = 'b'"),
        ('{"flights":[{"began_unix_ns":1,"usage":{"prompt_tokens":1},"laps":[["engine.send",1]],"token_ns":["x"]}]}', "says token_ns = 'x'"),
        ("0,1.5,1,Gamma,1,1\n", "has no lengths beside it"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    """A damaged record is refused by its line and its value, never skipped."""
    with pytest.raises(SettingsError, match=words):
        read_text(tmp_path, text)


@pytest.mark.parametrize(
    ("window", "lengths", "words"),
    [
        ("0,5,1,Cauchy,1,1", '{"0": {"input_tokens": "{5: 1.0}", "output_tokens": "{5: 1.0}"}}', "known format"),
        ("0,5,1,,1,1", '{"0": {"input_tokens": "{5: 1.0}", "output_tokens": "{5: 1.0}"}}', "names the distribution ''"),
        ("0,5,1,Gamma,0,1", '{"0": {"input_tokens": "{5: 1.0}", "output_tokens": "{5: 1.0}"}}', "the shape = '0'"),
        ("0,5,1,Weibull,0.001,1", '{"0": {"input_tokens": "{5: 1.0}", "output_tokens": "{5: 1.0}"}}', "too small for a Weibull"),
        ("0,5,1,Gamma,1,1", '{"0": {"input_tokens": "{-5: 1.0}", "output_tokens": "{5: 1.0}"}}', "no count of tokens"),
        ("0,5,1,Gamma,1,1", '{"0": {"input_tokens": "{5: -1}", "output_tokens": "{5: 1.0}"}}', "the probability of 5"),
        ("0,5,1,Gamma,1,1", '{"0": {"input_tokens": "{}", "output_tokens": "{}"}}', "holds no lengths"),
        ("0,5,1,Gamma,1,1", "[]", "no object of windows"),
    ],
)
def test_a_wrong_servegen_pair_is_refused(tmp_path: Path, window: str, lengths: str, words: str) -> None:
    """Windows and lengths are checked before anything is drawn from them."""
    (tmp_path / "x-dataset.json").write_text(lengths)
    with pytest.raises(SettingsError, match=words):
        read_text(tmp_path, window + "\n", "x-trace.csv")


@pytest.mark.parametrize("content", [b"", b"\x1f\x8bgarbage", b"\xff\xfe\x00", gzip.compress(AZURE.encode(), mtime=0)[:40]])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    """An empty, binary or truncated file is an error with the file's name, not a traceback."""
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="broken"):
        read(path, 10)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    """A file that is not there cannot be read; a folder is one of clients, and an empty one has none."""
    with pytest.raises(SettingsError, match="cannot be read"):
        read(tmp_path / "none", 10)
    with pytest.raises(SettingsError, match="holds no clients"):
        read(tmp_path, 10)


def client(folder: Path, name: str, windows: str, length: int) -> None:
    (folder / f"{name}-trace.csv").write_text(windows)
    (folder / f"{name}-dataset.json").write_text(json.dumps({"0": {"input_tokens": f"{{{length}: 1.0}}", "output_tokens": "{7: 1.0}"}}))


def test_a_folder_is_a_workload_of_clients(tmp_path: Path) -> None:
    """Each client is a tenant with its own lengths and times, all on one clock; who else is there changes nothing of what it sends."""
    client(tmp_path, "early", "0,0.1,1,Gamma,1,1\n600,0,0,,0,0\n", 11)
    client(tmp_path, "late", "0,0,0,,0,0\n600,0.1,1,Weibull,1,1\n", 22)
    alone = read(tmp_path / "early-trace.csv", 1000)
    both = read(tmp_path, 1000)
    assert (both.format, both.timed, both.cut, both.arrivals[0].at_s) == ("servegen", True, False, 0.0)
    times = [one.at_s for one in both.arrivals]
    assert times == sorted(times)
    assert {(one.tenant, one.prompt, one.output) for one in both.arrivals} == {("early", 11, 7), ("late", 22, 7)}
    assert max(one.at_s for one in both.arrivals if one.tenant == "early") < min(one.at_s for one in both.arrivals if one.tenant == "late")
    assert 30 < len(alone.arrivals) < 90
    assert both == read(tmp_path, 1000)
    assert both.arrivals != read(tmp_path, 1000, seed=1).arrivals
    client(tmp_path, "third", "0,0.1,1,Gamma,1,1\n", 33)
    # but for when the first of all came
    early = [[one.at_s - other.at_s for one, other in pairwise(one for one in found.arrivals if one.tenant == "early")] for found in
             (both, read(tmp_path, 1000))]  # fmt: skip
    assert early[0] == pytest.approx(early[1])
    assert len(read(tmp_path, 5).arrivals) == 5
    assert read(tmp_path, 5).cut


def test_what_is_wrong_in_a_folder_is_said(tmp_path: Path) -> None:
    """By the client's file and line; clients that never send anything are no trace."""
    client(tmp_path, "one", "0,0,0,,0,0\n", 11)
    with pytest.raises(SettingsError, match="holds no requests"):
        read(tmp_path, 10)
    client(tmp_path, "two", "0,0.1,1,Gamma,1,1\n1200,0.1,1,Gamma,1,1\n600,0.1,1,Gamma,1,1\n", 11)
    with pytest.raises(SettingsError, match=r"two-trace\.csv, line 2, is not earlier than the line behind it"):
        read(tmp_path, 1000)
    client(tmp_path, "two", "0,0.1,1,Gamma,1,1\n", 11)
    (tmp_path / "two-dataset.json").unlink()
    with pytest.raises(SettingsError, match=r"two-trace\.csv has no lengths beside it"):
        read(tmp_path, 1000)


@needs_data
def test_a_real_workload_of_clients_is_read_whole() -> None:
    """Six clients of a day, about as many requests of each as its rates say."""
    trace = read(DATA / "servegen", 200_000)
    assert not trace.cut
    said = {"0": 4926, "1": 10_815, "10": 1770, "2": 312, "21": 316, "3": 92_449}
    got = Counter(one.tenant.rsplit("-", 1)[1] for one in trace.arrivals)
    assert got.keys() == said.keys()
    assert all(0.7 * said[name] < count < 1.3 * said[name] for name, count in got.items())


@given(
    st.text(alphabet='{}[]":,.0123456789eE+- TIMESTAMPinput_length\n', max_size=200),
    st.sampled_from([AZURE, MOONCAKE, VIDUR, '{"flights":', "0,1,1,Gamma,1,1\n"]),
)
def test_whatever_a_file_says_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str, head: str) -> None:
    """Any text behind any beginning is a trace with sane figures or a SettingsError, never another exception."""
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_text(head + text, encoding="utf-8")
    try:
        trace = read(path, 50)
    except SettingsError:
        return
    assert all(0 <= one.prompt <= MAX_TOKENS and 0 <= one.output <= MAX_TOKENS and one.at_s >= 0 for one in trace.arrivals)
