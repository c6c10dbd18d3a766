"""The terms that begin with one character."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Road(NamedTuple):
    """The terms that begin with one character. `longest_prefix`: how far a text goes along any of them; `number_of`: of a whole term, or None;
    `at_words`: only where words begin; `parted`: also where their letters are parted."""

    longest_prefix: Callable[[str], int]
    number_of: Callable[[str, None], int | None]
    lengths: tuple[int, ...]
    at_words: bool
    parted: bool
