"""What a run costs: `[prices]` times its tokens, in whole parts of the currency, so that sums are exact."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tidegate.admission.settings import PriceSettings
from tidegate.core.chunk import Usage
from tidegate.core.errors import SettingsError

#: Money is counted in ten-millionths of the currency: a hundred tokens at 0.01 per million are ten of them.
PARTS = 10_000_000

#: No run has more: what an engine tells beyond it is no count.
MOST_TOKENS = 2**24
_PER_TOKEN = PARTS / 1_000_000


class Price(NamedTuple):
    """Of one token each, in parts. Reasoning tokens are completion tokens, cached tokens a part of the prompt's."""

    prompt: float
    cached: float
    completion: float

    def of(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> int:
        """Rounded up to a part: what costs something never costs nothing. Of counts that cannot be, what is nearest."""
        prompt_tokens, completion_tokens = min(max(0, prompt_tokens), MOST_TOKENS), min(max(0, completion_tokens), MOST_TOKENS)
        cached = min(max(0, cached_tokens), prompt_tokens)
        return math.ceil((prompt_tokens - cached) * self.prompt + cached * self.cached + completion_tokens * self.completion)

    def of_usage(self, usage: Usage) -> int:
        return self.of(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


class Prices:
    """The prices of all models."""

    def __init__(self, settings: Mapping[str, PriceSettings] | None = None, free: Collection[str] = ()) -> None:
        """`free`: models that cost nothing where they have no price.

        Raises SettingsError where two models are paid in two currencies: a limit could not add them up.
        """
        settings = settings or {}
        currencies = {name: price.currency for name, price in settings.items()}
        if len(set(currencies.values())) > 1:
            said = ", ".join(f"{name} in {currency}" for name, currency in sorted(currencies.items()))
            raise SettingsError(f"[prices] has more than one currency: {said}.", hint="Give all prices in one currency.")
        self.currency = next(iter(currencies.values()), "USD")
        self._prices = dict.fromkeys(free, Price(0.0, 0.0, 0.0)) | {
            name: Price(
                price.input * _PER_TOKEN, (price.input if price.cached_input is None else price.cached_input) * _PER_TOKEN, price.output * _PER_TOKEN
            )
            for name, price in settings.items()
        }
        #: Of a model without a name that is known: the dearest of all, so that a name of the caller's choice is never a way past a limit.
        self._dearest = Price(*(max((price[part] for price in self._prices.values()), default=0.0) for part in range(3)))

    def __bool__(self) -> bool:
        return bool(self._prices)

    def of(self, model: str) -> Price:
        return self._prices.get(model, self._dearest)

    def missing(self, models: Sequence[str]) -> list[str]:
        """Those of the models that have no price."""
        return [model for model in models if model not in self._prices]

    def need(self, models: Sequence[str]) -> None:
        """Raises SettingsError where one of these models has no price: money is limited, and it would pass for nothing."""
        missing = self.missing(models)
        if missing:
            raise SettingsError(
                f"Money is limited, but [prices] has no price for {', '.join(missing)}.",
                hint=f'Add [prices."{missing[0]}"] with `input` and `output` per million tokens; 0 where it costs nothing.',
            )
