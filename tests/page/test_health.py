"""The figures at the top of the page, from /health."""

from __future__ import annotations

from tidegate.api.page.health import Figure, figures


def of_limits(health: dict[str, object]) -> list[Figure]:
    return [figure for figure in figures(health, []) if figure.name == "Limits"]


def test_limits_are_shown_where_machines_share_them() -> None:
    """Shared, or alone and what that means; nothing where there is nobody to share with."""
    assert of_limits({"limits": {"subjects": 3}}) == []
    assert of_limits({}) == []
    assert of_limits({"limits": {"shared": True}}) == [Figure("Limits", "shared", "by all machines", "good")]
    alone = of_limits({"limits": {"shared": False, "means": "this machine uses its own share of every limit"}})
    assert alone == [Figure("Limits", "alone", "this machine uses its own share of every limit", "warn")]
