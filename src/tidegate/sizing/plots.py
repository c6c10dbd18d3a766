"""A picture of a simulation: what share of all requests had its first token within so many seconds, one curve a policy, as an SVG file.

Written by hand: a few lines and letters need no plotting library (the smallest useful one is ten times the size of Tidegate), the file opens in every
browser, its text can be searched, and the same figures give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tidegate.core.errors import SettingsError
from tidegate.sizing.measures import Measures

_WIDTH, _HEIGHT = 860, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 190, 44, 48
#: Steps from left to right: one is finer than a pixel of most screens.
_STEPS = 614
#: Colours that are told apart with every kind of colour vision (Okabe and Ito 2008); the shipped policy has the strongest.
_COLOURS = {
    "tidegate": "#d55e00", "fifo": "#000000", "edf": "#56b4e9", "shortest-prompt": "#009e73", "shortest-predicted": "#0072b2", "fair": "#cc79a7",
    "clairvoyant": "#999999",
}


def write(path: Path, panels: Sequence[tuple[str, float, Mapping[str, Measures]]]) -> None:
    """One panel a scenario: (title, SLO in s, figures by policy). Raises SettingsError where the file cannot be written or is to be no SVG."""
    if path.suffix.lower() != ".svg":
        raise SettingsError(f"--plot writes SVG, and {path} is named otherwise.", hint="Name the file NAME.svg; a browser shows it.")
    try:
        path.write_text(draw(panels), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}.", hint="Name a file in a folder that is there.") from None


def draw(panels: Sequence[tuple[str, float, Mapping[str, Measures]]]) -> str:
    """The SVG document."""
    body = "".join(
        f'<g transform="translate(0 {number * _HEIGHT})">{"".join(_panel(title, slo_s, figures))}</g>\n'
        for number, (title, slo_s, figures) in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT * len(panels)}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}</svg>\n'
    )


def _panel(title: str, slo_s: float, figures: Mapping[str, Measures]) -> Iterator[str]:
    ends = [one.ttfts_s[-1] for one in figures.values() if one.ttfts_s]
    begins = [one.ttfts_s[0] for one in figures.values() if one.ttfts_s]
    low = math.floor(math.log10(max(min([*begins, slo_s]), 1e-3)))
    high = max(math.ceil(math.log10(max([*ends, slo_s]))), low + 1)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(seconds: float) -> float:
        return _LEFT + (right - _LEFT) * (math.log10(seconds) - low) / (high - low)

    def up(share: float) -> float:
        return bottom - (bottom - _TOP) * share

    yield f'<text x="{_LEFT}" y="24" font-size="14">{escape(title)}</text>'
    for quarter in range(5):
        y = up(quarter / 4)
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/><text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{quarter * 25} %</text>'
    for power in range(low, high + 1):
        x = across(10.0**power)
        yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#ddd"/><text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{10.0**power:g} s</text>'
    yield f'<text x="{(_LEFT + right) / 2:.0f}" y="{bottom + 38}" text-anchor="middle">time to first token; height: share of all requests</text>'
    x = across(slo_s)
    yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#000" stroke-dasharray="4 3"/><text x="{x + 4:.1f}" y="{_TOP - 4}">SLO {slo_s:g} s</text>'
    for number, (name, one) in enumerate(figures.items()):
        colour = _COLOURS.get(name, "#000")
        wide = 3 if name == "tidegate" else 1.5
        points = " ".join(
            f"{_LEFT + (right - _LEFT) * step / _STEPS:.1f},{up(one.within(10 ** (low + (high - low) * step / _STEPS))):.1f}"
            for step in range(_STEPS + 1)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{wide}"/>'
        y = _TOP + 12 + 22 * number
        yield f'<path d="M{right + 14} {y - 4}h20" stroke="{colour}" stroke-width="{wide}"/>'
        yield f'<text x="{right + 40}" y="{y}">{escape(name)}: {100 * one.goodput:.1f} %</text>'
