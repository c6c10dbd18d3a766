"""One-time links."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stand_in import ADMIN

from tidegate.api.page import TokenFolder


def test_a_token_works_once(tmp_path: Path) -> None:
    """The first use says who signs in, the second nothing."""
    tokens = TokenFolder(tmp_path / "tokens")
    token = tokens.issue(ADMIN)
    assert TokenFolder(tmp_path / "tokens").redeem(token) == ADMIN
    assert tokens.redeem(token) is None


def test_of_many_at_once_one_gets_in(tmp_path: Path) -> None:
    """Eight uses at the same time: one caller."""
    tokens = TokenFolder(tmp_path / "tokens")
    for _ in range(20):
        token = tokens.issue(ADMIN)
        with ThreadPoolExecutor(8) as pool:
            assert sum(caller is not None for caller in pool.map(tokens.redeem, [token] * 8)) == 1


def test_an_old_token_is_worth_nothing(tmp_path: Path) -> None:
    """It signs nobody in, and the next one that is issued sweeps it away."""
    tokens = TokenFolder(tmp_path)
    old = tokens.issue(ADMIN, life_s=-1)
    assert tokens.redeem(old) is None
    tokens.issue(ADMIN, life_s=-1)
    tokens.issue(ADMIN)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_no_token_signs_nobody_in(tmp_path: Path) -> None:
    """Unknown, empty, hostile, or before the folder exists."""
    tokens = TokenFolder(tmp_path / "none")
    assert [tokens.redeem(token) for token in ("", "x", "../../etc/passwd", "\ud800", "x" * 100_000)] == [None] * 5


def test_only_the_owner_reads_tokens(tmp_path: Path) -> None:
    """The folder and its files are closed to others, and a file's name is not the token."""
    tokens = TokenFolder(tmp_path / "tokens")
    token = tokens.issue(ADMIN)
    [file] = (tmp_path / "tokens").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert token not in file.name
    assert token.encode() not in file.read_bytes()
