"""The figures at the top of the page, from /health."""

from __future__ import annotations

from tidegate.api.page.health import Figure, figures


def of_limits(health: dict[str, object]) -> list[Figure]:
    return [figure for figure in figures(health, []) if figure.name == "Limits"]


def test_the_profile_of_budgets_is_shown() -> None:
    """Its name, and the values in force; nothing where /health tells none."""
    budgets = {"profile": "embedded", "retrieve_s": 2.0, "first_token_s": 30.0, "forecast_s": 7.5}
    shown = [figure for figure in figures({"budgets": budgets}, []) if figure.name == "Budgets"]
    assert shown == [Figure("Budgets", "embedded", "first token 30 s, search 2 s, wait 7.5 s")]
    assert [figure for figure in figures({}, []) if figure.name == "Budgets"] == []


def test_limits_are_shown_where_machines_share_them() -> None:
    """Shared, or alone and what that means; nothing where there is nobody to share with."""
    assert of_limits({"limits": {"subjects": 3}}) == []
    assert of_limits({}) == []
    assert of_limits({"limits": {"shared": True}}) == [Figure("Limits", "shared", "by all machines", "good")]
    alone = of_limits({"limits": {"shared": False, "means": "this machine uses its own share of every limit"}})
    assert alone == [Figure("Limits", "alone", "this machine uses its own share of every limit", "warn")]


def test_recall_is_shown_where_searches_were_sampled() -> None:
    """Over all collections; nothing before the first sample."""
    told = {"a": {"found": 9, "passages": 10}, "b": {"found": 10, "passages": 10}}
    assert [figure for figure in figures({"recall": told}, []) if figure.name == "Recall"] == [Figure("Recall", "95.0%", "of 20 sampled passages")]
    assert [figure for figure in figures({"recall": {}}, []) if figure.name == "Recall"] == []
