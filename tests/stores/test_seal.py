"""Kept text can be read with the secret alone, for its own flight alone."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidegate.core.errors import SettingsError
from tidegate.stores.seal import VARIABLE, Seal

TEXT = {"prompt": [{"role": "user", "content": "你好"}], "answer": "Hello"}


@pytest.fixture
def seal(tmp_path: Path) -> Seal:
    return Seal(tmp_path / "data" / "secret", {})


def test_text_comes_back(seal: Seal) -> None:
    """Sealed and opened it is equal, also after a restart; the sealed bytes show none of it, and are never the same twice."""
    sealed = seal.seal("f1", TEXT)
    assert Seal(seal.file, {}).open("f1", sealed) == TEXT
    assert b"Hello" not in sealed
    assert sealed != seal.seal("f1", TEXT)


def test_half_a_surrogate_pair_does_not_stop_the_seal(seal: Seal) -> None:
    """A prompt may hold one; it becomes U+FFFD."""
    assert seal.open("f1", seal.seal("f1", {"prompt": "a\ud800"})) == {"prompt": "a\ufffd"}


def test_each_purpose_has_a_secret_of_its_own(seal: Seal) -> None:
    """The same after a restart, another one for another purpose or another secret, and never the secret itself."""
    derived = seal.derive("page sessions")
    assert derived == Seal(seal.file, {}).derive("page sessions")
    assert len({derived, seal.derive("other"), Seal(seal.file, {VARIABLE: "00" * 32}).derive("page sessions")}) == 3
    assert derived.hex() not in seal.file.read_text()


def test_text_opens_for_its_own_flight_alone(seal: Seal) -> None:
    """Another flight's id does not open it."""
    with pytest.raises(SettingsError, match="f2"):
        seal.open("f2", seal.seal("f1", TEXT))


@pytest.mark.parametrize("at", [0, 1, 13, -1])
def test_changed_bytes_do_not_open(seal: Seal, at: int) -> None:
    """Version, nonce, text or tag: any change is noticed."""
    sealed = bytearray(seal.seal("f1", TEXT))
    sealed[at] ^= 1
    with pytest.raises(SettingsError):
        seal.open("f1", bytes(sealed))


@pytest.mark.parametrize("sealed", [b"", b"\x01", b"\x01" + b"\0" * 12])
def test_too_few_bytes_do_not_open(seal: Seal, sealed: bytes) -> None:
    """A clear error, not one of the library's."""
    with pytest.raises(SettingsError):
        seal.open("f1", sealed)


def test_another_secret_does_not_open(seal: Seal, tmp_path: Path) -> None:
    """The error says to bring the old one back."""
    sealed = seal.seal("f1", TEXT)
    with pytest.raises(SettingsError) as caught:
        Seal(tmp_path / "other", {}).open("f1", sealed)
    assert "bring back" in (caught.value.hint or "")


def test_the_secret_is_its_owners_alone(seal: Seal) -> None:
    """Made with 0600; one that others can read is refused."""
    seal.seal("f1", TEXT)
    assert seal.file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(seal.file.parent) == ["secret"]
    seal.file.chmod(0o640)
    with pytest.raises(SettingsError, match="read by others"):
        Seal(seal.file, {}).seal("f1", TEXT)


def test_the_environment_wins_over_the_file(seal: Seal) -> None:
    """No file is made then; hex and base64 are understood alike."""
    sealed = Seal(seal.file, {VARIABLE: "00" * 32}).seal("f1", TEXT)
    assert not seal.file.exists()
    assert Seal(seal.file, {VARIABLE: "A" * 43 + "="}).open("f1", sealed) == TEXT


@pytest.mark.parametrize("secret", ["short", "zz" * 32, "A" * 40])
def test_a_secret_of_the_wrong_form_is_refused(seal: Seal, secret: str) -> None:
    """The error names the variable and how to make one, and does not repeat the secret."""
    with pytest.raises(SettingsError, match=VARIABLE) as caught:
        Seal(seal.file, {VARIABLE: secret}).seal("f1", TEXT)
    assert secret not in caught.value.message


def test_processes_that_start_at_once_share_one_secret(tmp_path: Path) -> None:
    """Whoever comes second uses the first one's."""
    seals = [Seal(tmp_path / "secret", {}) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        sealed = list(pool.map(lambda seal: seal.seal("f1", TEXT), seals))
    assert all(seals[0].open("f1", one) == TEXT for one in sealed)
    assert os.listdir(tmp_path) == ["secret"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """With the way out."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be read or made") as caught:
        Seal(tmp_path / "file" / "secret", {}).seal("f1", TEXT)
    assert VARIABLE in (caught.value.hint or "")


def test_importing_costs_no_cryptography() -> None:
    """A gateway that keeps no text does not load the library."""
    code = "import sys, tidegate.stores.seal; assert 'cryptography' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_running_process_keeps_its_secret(seal: Seal) -> None:
    """A file that is removed or opened to others after the start changes nothing for the process that read it."""
    seal.derive("something")
    seal.file.chmod(0o644)
    sealed = seal.seal("f1", TEXT)
    seal.file.unlink()
    assert seal.open("f1", sealed) == TEXT
    assert not seal.file.exists(), "no second secret is made beside the one that is in use"
