"""Traces: when requests came and how long their prompts and answers were, in the formats of public traces and of our own flights.

The format is known by its content, never by the file's name; gzip is seen through; a folder is a workload of ServeGen, with a file for each client.
What fits no format is refused with the list of those that are known. Whatever a file says is checked, and the error names the line: a token count is
a whole number up to `MAX_TOKENS`, time does not run backwards.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from tidegate.core.errors import SettingsError

#: More tokens than any context has: a count above it is a damaged file, not a request.
MAX_TOKENS = 16_000_000
#: Bytes of one line, and of a document that is read whole.
_MAX_LINE, _MAX_DOCUMENT = 4 << 20, 256 << 20
#: Bytes by which a format is known.
_HEAD = 4096
#: Draws of one ServeGen window that come at the same instant: more means a rate or a shape that is not of this world.
_MAX_DRAWS = 10_000_000


@dataclass(frozen=True, slots=True)
class Served:
    """When an engine was given a request, and when each of its tokens came, in seconds on the clock of `Arrival.at_s`."""

    started_s: float
    tokens_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. `at_s`: seconds since the trace began; `prompt` and `output`: tokens, `output` as many as the answer really took, and
    `cached` those of the prompt that the engine had already read. `served`: where the trace tells it."""

    at_s: float
    prompt: int
    output: int
    tenant: str = ""
    cached: int = 0
    served: Served | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read. `timed`: the arrival times are the trace's own, else all are 0 and a burst or a rate has to be chosen. `cut`: the file goes on
    behind what was asked for. `skipped`: records that cannot be replayed, since nothing ran."""

    format: str
    arrivals: tuple[Arrival, ...]
    timed: bool
    cut: bool
    skipped: int = 0


class Source:
    """The lines of a trace, counted, with the errors that name them. `skipped` counts what the format left out on purpose."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.line = 0
        self.skipped = 0
        self._stream = stream

    def head(self) -> str:
        """The first line, or as much of it as tells the format; what is no text comes as marks."""
        return self._read(_HEAD).decode("utf-8-sig", errors="replace").strip()

    def lines(self) -> Iterator[str]:
        """Lines that are not empty. Raises SettingsError for one that is too long, is not UTF-8, or lies in a broken archive."""
        while raw := self._read(_MAX_LINE + 1):
            self.line += 1
            if len(raw) > _MAX_LINE:
                raise self.wrong(f"is longer than {_MAX_LINE >> 20} MiB")
            if text := self._text(raw).strip():
                yield text

    def document(self) -> Any:
        """The file as one JSON document."""
        raw = self._read(_MAX_DOCUMENT + 1, self._stream.read)
        if len(raw) > _MAX_DOCUMENT:
            raise self.wrong(f"is larger than {_MAX_DOCUMENT >> 20} MiB")
        return self.json(self._text(raw))

    def json(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"is no JSON: {error}") from None

    def tokens(self, value: object, name: str) -> int:
        """A token count, as a number or its digits."""
        try:
            number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else -1
        except ValueError:
            number = -1
        if not 0 <= number <= MAX_TOKENS:
            raise self.wrong(f"says {name} = {str(value)[:40]!r}, which is no count of tokens (0 to {MAX_TOKENS:,})")
        return number

    def number(self, value: object, name: str, least: float = 0.0) -> float:
        """A finite number from `least` on, as a number or its digits."""
        try:
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and number >= least):
            raise self.wrong(f"says {name} = {str(value)[:40]!r}, which is no number from {least:g} on")
        return number

    def wrong(self, what: str) -> SettingsError:
        where = f"{self.path}, line {self.line}," if self.line else str(self.path)
        return SettingsError(f"{where} {what}.", hint="Take the line out, or name another trace.")

    def _read(self, most: int, read: Callable[[int], bytes] | None = None) -> bytes:
        try:
            return (read or self._stream.readline)(most)
        except (OSError, EOFError) as error:
            raise SettingsError(f"{self.path} cannot be read: {error}.", hint="Is the file whole?") from None

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8-sig" if self.line <= 1 else "utf-8")
        except UnicodeDecodeError:
            raise self.wrong("is not UTF-8 text") from None


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of trace: its name, how its files look, whether they carry times, how they are told apart by their first line, how they are read."""

    name: str
    looks: str
    timed: bool
    fits: Callable[[str], bool]
    read: Callable[[Source, random.Random], Iterator[Arrival]]


def read(path: Path, limit: int, seed: int = 0) -> Trace:
    """The first `limit` requests of a trace. `seed` draws what a trace leaves open (ServeGen's are distributions, not requests). A folder is one of
    ServeGen's: see `_clients`.

    Raises SettingsError where the file cannot be read, is of no known format, is damaged, or holds no requests.
    """
    if path.is_dir():
        return _clients(path, limit, seed)
    with _open(path) as stream:
        head = Source(path, stream).head()
    known = next((one for one in FORMATS if one.fits(head)), None)
    if known is None:
        names = "; ".join(f"{one.name} ({one.looks})" for one in FORMATS)
        raise SettingsError(f"{path} is no trace of a known format; it begins with {head[:60]!r}.", hint=f"Known: {names}.")
    with _open(path) as stream:
        source = Source(path, stream)
        found: list[Arrival] = []
        began_s, last_s = 0.0, -math.inf
        cut = False
        for arrival in known.read(source, random.Random(f"{seed}/trace")):  # noqa: S311 - a simulation, no secrets
            if len(found) == limit:
                cut = True
                break
            if known.timed:
                if arrival.at_s < last_s:
                    raise source.wrong("is earlier than the line before it")
                began_s = arrival.at_s if not found else began_s
                last_s = arrival.at_s
            found.append(_since(began_s, arrival))
    if not found:
        raise SettingsError(f"{path} holds no requests.", hint=f"It looks like {known.name}: {known.looks}.")
    return Trace(known.name, tuple(found), known.timed, cut, source.skipped)


def _clients(folder: Path, limit: int, seed: int) -> Trace:
    """The clients of a ServeGen workload together, each a tenant with the name of its file: their times are of one clock."""
    paths = sorted(folder.glob(f"*{_WINDOWS}"))
    if not paths:
        raise SettingsError(f"{folder} holds no clients.", hint=f"A folder is a ServeGen workload, NAME{_WINDOWS} and NAME{_LENGTHS} for each.")
    found: list[Arrival] = []
    with ExitStack() as opened:
        for arrival in heapq.merge(*(_client(opened, path, seed) for path in paths), key=lambda one: one.at_s):
            if len(found) > limit:
                break
            found.append(arrival)
    if not found:
        raise SettingsError(f"{folder} holds no requests.", hint="The rate of each client is 0 in all windows.")
    began_s = found[0].at_s
    return Trace("servegen", tuple(_since(began_s, arrival) for arrival in found[:limit]), timed=True, cut=len(found) > limit)


def _client(opened: ExitStack, path: Path, seed: int) -> Iterator[Arrival]:
    """What one client sends does not depend on which others there are."""
    source = Source(path, opened.enter_context(_open(path)))
    name = path.name.removesuffix(_WINDOWS)
    for arrival in _servegen(source, random.Random(f"{seed}/{name}")):  # noqa: S311 - a simulation, no secrets
        yield replace(arrival, tenant=name)


def _since(began_s: float, arrival: Arrival) -> Arrival:
    served = arrival.served
    if served is not None:
        served = Served(served.started_s - began_s, tuple(at_s - began_s for at_s in served.tokens_s))
    return replace(arrival, at_s=arrival.at_s - began_s, served=served)


def _open(path: Path) -> BinaryIO:
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        return cast(BinaryIO, gzip.open(path)) if packed else path.open("rb")
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.", hint="Name a trace file.") from None


# -- Azure LLM inference trace 2023 --

_AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def _azure(source: Source, _: random.Random) -> Iterator[Arrival]:
    for row in _rows(source, 3):
        yield Arrival(_stamp_s(source, row[0]), source.tokens(row[1], "ContextTokens"), source.tokens(row[2], "GeneratedTokens"))


def _stamp_s(source: Source, text: str) -> float:
    # Seven digits behind the point, one more than Python reads.
    try:
        when, _, rest = text.partition(".")
        return (datetime.fromisoformat(when) - datetime(2000, 1, 1)).total_seconds() + (float(f"0.{rest}") if rest else 0.0)  # noqa: DTZ001 - differences only
    except (ValueError, TypeError):
        raise source.wrong(f"says TIMESTAMP = {text[:40]!r}, which is no time") from None


def _rows(source: Source, columns: int) -> Iterator[list[str]]:
    """The rows behind the heading of a table."""
    lines = source.lines()
    next(lines)
    for line in lines:
        row = line.split(",")
        if len(row) != columns:
            raise source.wrong(f"has {len(row)} columns in place of {columns}")
        yield row


# -- Mooncake --


def _mooncake(source: Source, _: random.Random) -> Iterator[Arrival]:
    for line in source.lines():
        record = source.json(line)
        if not isinstance(record, dict) or not {"timestamp", "input_length", "output_length"} <= record.keys():
            raise source.wrong("is no object with timestamp, input_length and output_length")
        yield Arrival(
            source.number(record["timestamp"], "timestamp") / 1e3,
            source.tokens(record["input_length"], "input_length"), source.tokens(record["output_length"], "output_length"),
        )


# -- Vidur: lengths without times --

_VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio"


def _vidur(source: Source, _: random.Random) -> Iterator[Arrival]:
    for row in _rows(source, 4):
        yield Arrival(0.0, source.tokens(row[0], "num_prefill_tokens"), source.tokens(row[1], "num_decode_tokens"))


# -- ServeGen: rates and lengths of one client as distributions --

_WINDOWS, _LENGTHS = "-trace.csv", "-dataset.json"


def _servegen_fits(head: str) -> bool:
    fields = head.split(",")
    return len(fields) == 6 and all(_is_number(one) for one in fields[:3]) and fields[3] in ("", "Gamma", "Weibull")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _servegen(source: Source, chance: random.Random) -> Iterator[Arrival]:
    """Draws requests as ServeGen does (Xiang et al. 2025): in each window the times between arrivals by the window's distribution and shape,
    scaled to its rate, and the lengths of prompt and answer each by the histogram of the hours around it.
    """
    lengths = _histograms(source)
    windows = [line.split(",") for line in source.lines()]
    width_s = 600.0
    for number, row in enumerate(windows):
        source.line = number + 1
        if len(row) != 6:
            raise source.wrong(f"has {len(row)} columns in place of 6")
        begin_s, rate = source.number(row[0], "the window's begin"), source.number(row[1], "the rate")
        if number + 1 < len(windows):
            width_s = source.number(windows[number + 1][0], "the window's begin") - begin_s
            if width_s <= 0:
                raise source.wrong("is not earlier than the line behind it")
        if rate == 0:
            continue
        gap = _gaps(source, row[3], source.number(row[4], "the shape", least=1e-6), rate, chance)
        prompts, outputs = next((both for start_s, both in reversed(lengths) if start_s <= begin_s), lengths[0][1])
        at_s = begin_s + gap()
        for _ in range(_MAX_DRAWS):
            if at_s >= begin_s + width_s:
                break
            yield Arrival(at_s, prompts(chance), outputs(chance))
            at_s += gap()
        else:
            raise source.wrong(f"makes more than {_MAX_DRAWS:,} requests")


def _gaps(source: Source, kind: str, shape: float, rate: float, chance: random.Random) -> Callable[[], float]:
    """Draws seconds between two arrivals, 1 / rate on average."""
    if kind == "Gamma":
        return lambda: chance.gammavariate(shape, 1 / (shape * rate))
    if kind == "Weibull":
        try:
            scale = 1 / (rate * math.gamma(1 + 1 / shape))
        except OverflowError:
            raise source.wrong(f"says the shape = {shape:g}, which is too small for a Weibull distribution") from None
        return lambda: chance.weibullvariate(scale, shape)
    raise source.wrong(f"names the distribution {kind!r}; known are Gamma and Weibull")


_Draw = Callable[[random.Random], int]


def _histograms(source: Source) -> list[tuple[float, tuple[_Draw, _Draw]]]:
    """(second from which they hold, draws of prompt and answer lengths), sorted; hours without requests have none."""
    pair = source.path.with_name(source.path.name.replace(_WINDOWS, _LENGTHS))
    if pair == source.path or not pair.is_file():
        raise SettingsError(f"{source.path} has no lengths beside it.", hint=f"A ServeGen trace is NAME{_WINDOWS} and, beside it, NAME{_LENGTHS}.")
    with _open(pair) as stream:
        beside = Source(pair, stream)
        document = beside.document()
        if not isinstance(document, dict):
            raise beside.wrong("is no object of windows")
        found = []
        for start, window in document.items():
            if not isinstance(window, dict):
                raise beside.wrong(f"holds no object at {start!r}")
            draws = [_draw(beside, window.get(field), field) for field in ("input_tokens", "output_tokens")]
            if draws[0] is not None and draws[1] is not None:
                found.append((beside.number(start, "a window's begin"), (draws[0], draws[1])))
    if not found:
        raise beside.wrong("holds no lengths")
    return sorted(found, key=lambda one: one[0])


def _draw(source: Source, said: object, field: str) -> _Draw | None:
    """From "{45: 0.0097, 46: 0.0117}", ServeGen's own notation; None where nothing has any probability."""
    if not isinstance(said, str):
        raise source.wrong(f"has no {field}")
    lengths: list[int] = []
    weights: list[float] = []
    for pair in filter(None, said.strip().removeprefix("{").removesuffix("}").split(",")):
        length, _, weight = pair.partition(":")
        lengths.append(source.tokens(length.strip(), field))
        weights.append(source.number(weight.strip(), f"the probability of {length.strip()[:20]}"))
    sums = list(accumulate(weights))
    if not sums or sums[-1] <= 0:
        return None
    return lambda chance: chance.choices(lengths, cum_weights=sums)[0]


# -- our own flights: `tidegate flights --json` --


def _flights(source: Source, _: random.Random) -> Iterator[Arrival]:
    """Newest first in the file. A flight without prompt tokens was refused before anything ran: nobody knows what it would have cost."""
    document = source.document()
    records = document.get("flights")
    if not isinstance(records, list):
        raise source.wrong("holds no list of flights")
    found = []
    for number, record in enumerate(records, 1):
        usage = record.get("usage", {}) if isinstance(record, dict) else None
        if not isinstance(usage, dict):
            raise source.wrong(f"holds something else than a flight at place {number} of its list")
        prompt = source.tokens(usage.get("prompt_tokens", 0), "prompt_tokens")
        if not prompt:
            source.skipped += 1
            continue
        at_s = source.number(record.get("began_unix_ns"), "began_unix_ns") / 1e9
        tenant = record.get("tenant", "")
        cached = min(source.tokens(usage.get("cached_tokens", 0), "cached_tokens"), prompt)
        output = source.tokens(usage.get("completion_tokens", 0), "completion_tokens")
        found.append(Arrival(at_s, prompt, output, str(tenant)[:200], cached, _served(source, record, at_s)))
    yield from sorted(found, key=lambda one: one.at_s)


def _served(source: Source, record: dict[str, Any], at_s: float) -> Served | None:
    """None where no engine gave a token. It counts from when an engine was asked last: what was tried before is over."""
    laps, stamps = record.get("laps", []), record.get("token_ns", [])
    if not isinstance(laps, list) or not isinstance(stamps, list) or not all(isinstance(lap, list) and len(lap) == 2 for lap in laps):
        raise source.wrong("holds a flight whose laps or stamps are no lists")
    names = [lap[0] for lap in laps]
    if "engine.send" not in names or not stamps:
        return None
    before_ns = sum(source.number(lap[1], "a lap") for lap in laps[: len(names) - 1 - names[::-1].index("engine.send")])
    tokens_s = tuple(at_s + source.number(stamp, "token_ns") / 1e9 for stamp in stamps)
    started_s = at_s + before_ns / 1e9
    return Served(started_s, tokens_s) if all(one <= other for one, other in pairwise((started_s, *tokens_s))) else None


FORMATS = (
    Format("azure-2023", f"CSV with the heading {_AZURE}", True, lambda head: head == _AZURE, _azure),
    Format("vidur", f"CSV with the heading {_VIDUR}; no times", False, lambda head: head == _VIDUR, _vidur),
    Format(
        "mooncake", "a JSON object a line with timestamp (ms), input_length and output_length", True,
        lambda head: head.startswith("{") and '"input_length"' in head, _mooncake,
    ),
    Format(
        "servegen", "NAME-trace.csv: begin, rate, cv, distribution and its two parameters, a window a line, and NAME-dataset.json beside it", True,
        _servegen_fits, _servegen,
    ),
    Format("flights", "what `tidegate flights --json` prints", True, lambda head: head.startswith('{"flights":'), _flights),
)
