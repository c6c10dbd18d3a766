"""The listening socket that the supervisor keeps."""

from __future__ import annotations

import socket

import pytest

from tidegate.core.errors import LocalPartError
from tidegate.local.listener import listen, url_of


def test_accepted_connections_send_at_once() -> None:
    """TCP_NODELAY and the protocol's number reach the sockets that it accepts: without them tokens stall 40 ms."""
    with listen("127.0.0.1", 0, by_hand=True) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_all_ports_taken_names_the_range() -> None:
    """The error says which ports were tried."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LocalPartError, match=f"Every port of 127.0.0.1 from {port} to {port} is taken") as error:
            listen("127.0.0.1", port, by_hand=False, tries=1)
    assert "by hand" in str(error.value.hint)


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_a_host_that_is_not_ours_is_refused(host: str) -> None:
    """An address of another machine, or no address at all."""
    with pytest.raises(LocalPartError, match=f"Cannot serve on {host} port 8080"):
        listen(host, 8080, by_hand=True)


def test_a_socket_for_all_addresses_is_reached_by_loopback() -> None:
    """The URL that is shown works when pasted."""
    with listen("0.0.0.0", 0, by_hand=True) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
