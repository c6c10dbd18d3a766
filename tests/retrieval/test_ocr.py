"""OCR is an optional program: what is missing is said before anything is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tidegate.core.errors import SettingsError
from tidegate.retrieval import ocr
from tidegate.retrieval.loaded import Bounds
from tidegate.retrieval.loaders import pdf

SCAN = Path(__file__).parents[3] / "shared" / "data" / "pdf" / "scan" / "ocr_test.pdf"


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A tesseract that does as it is told."""
    file = folder / "tesseract"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the setting, the program and the way to get it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match=r"retrieval\.ocr is tesseract, but there is no such program") as caught:
        ocr.check("eng")
    assert "apt install tesseract-ocr" in (caught.value.hint or "")


def test_a_missing_language_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So is a language that the program does not have, with those that it has."""
    program(tmp_path, monkeypatch, "printf 'List of languages (2):\\neng\\nosd\\n'")
    ocr.check("eng")
    with pytest.raises(SettingsError, match=r"language 'chi_sim'.*known: eng, osd") as caught:
        ocr.check("eng+chi_sim")
    assert "tesseract-ocr-chi-sim" in (caught.value.hint or "")


@pytest.mark.skipif(not SCAN.exists(), reason="the real-world files are not here (../shared/data/pdf)")
@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "could not be read (CalledProcessError)"), ("sleep 60", "took too long"), ("cat >/dev/null", "OCR found no text")],
    ids=["fails", "hangs", "silent"],
)
def test_a_program_that_fails_costs_its_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str) -> None:
    """A page that OCR cannot read is noted with the reason, and the document is refused only if nothing else is in it."""
    program(tmp_path, monkeypatch, script)
    with pytest.raises(Exception, match="holds no text") as caught:
        pdf.load(str(SCAN), Bounds(ocr="tesseract", seconds=1.0))
    assert said in str(caught.value)


@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")
def test_the_program_that_is_installed_passes() -> None:
    """What Debian installs is what is asked for."""
    ocr.check("eng")
