"""A plan as text: what takes the memory, what is left, and what a change would make of it."""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.sizing.observe import Comparison
from tidegate.sizing.plan import Plan


def render(plan: Plan, comparison: Comparison | None = None) -> str:
    lines = [*_head(plan), "", *_memory(plan), "", *_answer(plan)]
    if comparison is not None:
        lines += ["", *_compared(comparison)]
    if plan.serving is not None:
        lines += ["", *_serving(plan)]
    if plan.what_if:
        lines += ["", *_what_if(plan)]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _head(plan: Plan) -> Iterator[str]:
    yield f"{plan.model} ({plan.architecture}): {plan.parameters / 1e9:.2f} billion weights, {plan.weights}"
    yield f"{plan.attention}"
    spread = f", tensor parallel {plan.tp}, pipeline {plan.pp}" if plan.cards > 1 else ""
    yield f"{plan.cards} x {plan.card}, {plan.card_gib:.2f} GiB visible each ({plan.card_source}){spread}; {plan.engine}"


def _memory(plan: Plan) -> Iterator[str]:
    yield f"{'GiB per card':24}{'low':>9}{'expected':>10}{'high':>9}"
    for term in plan.terms:
        beside = "" if term.inside else ", not counted"
        yield f"{term.name:24}{term.low_gib:9.2f}{term.gib:10.2f}{term.high_gib:9.2f}  {term.basis}{beside}"
    yield f"{'budget':24}{'':9}{plan.budget_gib:10.2f}"
    yield f"{'left for the KV cache':24}{plan.pool_low_gib:9.2f}{plan.pool_gib:10.2f}{plan.pool_high_gib:9.2f}"
    yield f"{'tokens':24}{plan.tokens_low:9}{plan.tokens:10}{plan.tokens_high:9}"
    state = f", {plan.state_bytes_per_request / (1 << 20):.1f} MiB a request" if plan.state_bytes_per_request else ""
    yield f"KV cache in {plan.kv_dtype}: {plan.kv_bytes_per_token / 1024:.1f} KiB a token and card{state}"


def _answer(plan: Plan) -> Iterator[str]:
    part = f" ({plan.margin:+.0%})" if plan.pool_gib > 0 else ""
    yield (
        f"{plan.verdict.upper()}: {plan.concurrency} x {plan.length} tokens need {plan.needs_gib:.2f} GiB of KV cache; "
        f"margin {plan.margin_gib:+.2f} GiB{part}"
    )
    for why in plan.why:
        yield f"  {why}"
    yield f"at most {plan.most_requests:.2f} requests of {plan.length} tokens ({plan.most_requests_low:.2f} at the bad end), or one of {plan.longest}"
    holds = "holds" if plan.reserve.holds else "does not hold"
    yield f"with a reserve of {plan.reserve.factor:g} on everything: {plan.reserve.needs_gib:.2f} GiB of {plan.reserve.card_gib:.2f}: {holds}"


def _compared(comparison: Comparison) -> Iterator[str]:
    seen = comparison.observed
    if comparison.error is None:
        yield f"observed: {seen.engine} has {seen.slots} slots of {seen.length} tokens"
    else:
        blocks = f"{seen.blocks} blocks of {seen.block_tokens} tokens"
        yield f"observed: {seen.engine} has {blocks}; planned {comparison.planned} tokens in all ({comparison.error:+.1%})"


def _serving(plan: Plan) -> Iterator[str]:
    load = plan.serving
    assert load is not None
    asked = f"{load.qps:g} requests a second of {load.prompt_tokens} + {load.answer_tokens} tokens"
    if load.at_once is None or load.step_ms is None or load.bandwidth_per_request_gbs is None:
        yield f"{asked}: no number of requests at once keeps up; reading their caches alone takes more than {load.bandwidth_gbs:.0f} GB/s"
    else:
        yield (
            f"{asked}: at least {load.at_once:.1f} at once, {load.step_ms:.2f} ms a token, {load.bandwidth_per_request_gbs:.1f} GB/s of "
            f"{load.bandwidth_gbs:.0f} for each, {load.read_per_request_gb:.1f} GB read for one"
        )
    if load.budget is not None:
        budget = load.budget
        allowed = f"{budget.failures_a_day:.1f} failures a day, or {budget.minutes_a_month:.1f} minutes in 30 days"
        yield f"an objective of {budget.objective:g} %: {allowed}"


def _what_if(plan: Plan) -> Iterator[str]:
    yield f"{'what if':24}{'weights':>9}{'pool':>10}{'tokens':>12}{'requests':>10}  verdict"
    for row in plan.what_if:
        yield f"{row.change:24}{row.weights_gib:9.2f}{row.pool_gib:10.2f}{row.tokens:12}{row.concurrency:10.2f}  {row.verdict}"
