"""Colours can be read: WCAG 2.2 AA, 4.5 to 1 for text and 3 to 1 for what is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tidegate.api.page

CSS = (Path(tidegate.api.page.__file__).parent / "assets" / "page.css").read_text()
_NAMED = re.compile(r"--([a-z-]+): (#[0-9a-f]{6})")
LIGHT = dict(_NAMED.findall(CSS.split("@media (prefers-color-scheme: dark)")[0]))
DARK = LIGHT | dict(_NAMED.findall(CSS.split("@media (prefers-color-scheme: dark)")[1].split("\n}\n")[0]))

TEXT = [
    *((ink, ground) for ink in ("ink", "soft", "accent", "good", "warn", "bad") for ground in ("paper", "ground")),
    ("ink", "warn-ground"), ("ink", "bad-ground"), ("soft", "warn-ground"), ("accent", "accent-ground"), ("ink", "accent-ground"),
    ("soft", "accent-ground"), ("on-accent", "accent"), ("good", "accent-ground"), ("warn", "accent-ground"), ("bad", "accent-ground"),
]
DRAWN = [(colour, "paper") for colour in ("api", "admission", "retrieval", "pipeline", "engine", "decode", "other", "line-strong", "bad")]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("front", "back", "least"), [(*pair, 4.5) for pair in TEXT] + [(*pair, 3.0) for pair in DRAWN])
def test_contrast(colours: dict[str, str], front: str, back: str, least: float) -> None:
    """In light and in dark."""
    assert ratio(colours[front], colours[back]) >= least


def ratio(one: str, other: str) -> float:
    """The WCAG contrast ratio of two sRGB colours (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio)."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
