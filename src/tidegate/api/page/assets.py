"""The page's own and vendored files, read once. Their address carries their hash, so a browser may keep them for ever."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


class Asset(NamedTuple):
    body: bytes
    media_type: str
    digest: str


class Assets:
    """Every file of assets/ and vendor/ that a browser may ask for, by name."""

    def __init__(self) -> None:
        self._files: dict[str, Asset] = {}
        for folder in ("assets", "vendor"):
            for file in sorted((_HERE / folder).iterdir()):
                if file.suffix in _TYPES:
                    body = file.read_bytes()
                    self._files[file.name] = Asset(body, _TYPES[file.suffix], hashlib.sha256(body).hexdigest()[:16])

    def find(self, name: str) -> Asset | None:
        return self._files.get(name)

    def address(self, name: str) -> str:
        """Where a template links to; raises KeyError for a file that is not there."""
        return f"/assets/{name}?v={self._files[name].digest}"
