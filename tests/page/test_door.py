"""Failed logins are counted."""

from __future__ import annotations

from tidegate.api.page import door


def test_ten_failures_shut_the_door_for_that_address_alone() -> None:
    """The eleventh attempt waits up to the window; another address does not."""
    counted = door.Door()
    for _ in range(door.MOST_FAILURES):
        assert counted.wait_s("a") == 0
        counted.failed("a")
    assert 0 < counted.wait_s("a") <= door.WINDOW_S
    assert counted.wait_s("b") == 0


def test_a_good_key_forgets_the_failures() -> None:
    """After a login the count begins anew."""
    counted = door.Door()
    for _ in range(door.MOST_FAILURES - 1):
        counted.failed("a")
    counted.opened("a")
    counted.failed("a")
    assert counted.wait_s("a") == 0


def test_many_addresses_do_not_fill_the_memory() -> None:
    """The number of remembered addresses is bounded."""
    counted = door.Door()
    for n in range(5000):
        counted.failed(str(n))
    assert len(counted._failures) <= 4096
