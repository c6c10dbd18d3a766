"""Is somebody there? One bounded try."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

_TRY_S = 2.0


async def http_answers(host: str, port: int, path: str, want: int | None = None) -> bool:
    """Does a GET get an HTTP answer (with status `want` where one is wanted) within two seconds?"""
    try:
        async with asyncio.timeout(_TRY_S):
            status = await _status(host, port, path)
    except (OSError, TimeoutError, ValueError, IndexError):
        return False
    return want is None or status == want


async def _status(host: str, port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii"))
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def socket_answers(path: Path) -> bool:
    """Does somebody accept connections on this unix socket?"""
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
