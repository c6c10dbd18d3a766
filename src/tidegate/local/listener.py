"""The socket that the gateway serves on, made and kept by the supervisor: a gateway that restarts refuses no connection."""

from __future__ import annotations

import errno
import socket

from tidegate.core.errors import LocalPartError

_BACKLOG = 2048
#: How many ports after the default one are tried.
_TRIES = 100


def listen(host: str, port: int, *, by_hand: bool, tries: int = _TRIES) -> socket.socket:
    """Listen on `port`, or where it is taken and nobody chose it by hand, on the next free one. Raises LocalPartError."""
    if by_hand:
        tries = 1
    last = min(port + tries, 65536)
    for candidate in range(port, last):
        try:
            return _listen(host, candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _refused(host, candidate, error) from error
    if by_hand:
        raise LocalPartError(
            f"Port {port} of {host} is taken by another program.",
            hint=f"Stop that program (ss -ltnp 'sport = :{port}' names it), or choose another port; without one,"
            " the next free one is taken.",
        )
    raise LocalPartError(f"Every port of {host} from {port} to {last - 1} is taken.", hint="Choose a free port by hand, as server.port.")


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    # IPPROTO_TCP by name: with protocol 0 event loops take the sockets it accepts for something else and leave Nagle's delay on.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _refused(host: str, port: int, error: OSError) -> LocalPartError:
    if error.errno == errno.EACCES:
        return LocalPartError(f"No permission to serve on port {port}.", hint="Choose a port above 1023.")
    return LocalPartError(f"Cannot serve on {host} port {port}: {error.strerror}.", hint="Set server.host to an address of this machine.")


def reachable(listener: socket.socket) -> tuple[str, int]:
    """Host and port under which this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port  # noqa: S104 - compared, not bound


def url_of(listener: socket.socket) -> str:
    """The same as a URL."""
    host, port = reachable(listener)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
