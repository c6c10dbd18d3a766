"""The engines of this gateway, by the name of the model that they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tidegate.core.errors import NotFound, SettingsError
from tidegate.core.plugins import load, nearest
from tidegate.core.ports import Engine
from tidegate.engines.settings import EngineSettings

_ADAPTERS = "tidegate.engines.adapters"


class Fleet:
    """Builds each engine of the settings; the first model of the first engine is the default."""

    def __init__(self, settings: Mapping[str, EngineSettings]) -> None:
        """Raises SettingsError for an unknown adapter, an unreadable ca_file, or a model that two engines serve."""
        self.engines: list[Engine] = []
        self._routes: dict[str, tuple[Engine, str]] = {}
        for name, section in settings.items():
            engine = _build(name, section)
            self.engines.append(engine)
            for public, own in section.model_names.items():
                if public in self._routes:
                    raise SettingsError(
                        f"The model {public!r} is served by engine {self._routes[public][0].name!r} and by engine {name!r}.",
                        hint='Give one of them another name: models = {"other-name" = "' + own + '"}.',
                    )
                self._routes[public] = (engine, own)

    def find(self, model: str | None) -> tuple[Engine, str]:
        """The engine that serves a model, and the engine's own name for it; None is the default model. Raises NotFound."""
        if not self._routes:
            raise NotFound("No engine is set up.", hint="Add a section [engines.NAME] to tidegate.toml.")
        if model is None:
            return next(iter(self._routes.values()))
        route = self._routes.get(model)
        if route is None:
            raise NotFound(f"There is no model {model[:200]!r}.", hint=nearest(model[:200], self._routes), param="model")
        return route

    def models(self) -> list[str]:
        """Public names of all models, default first."""
        return list(self._routes)

    async def close(self) -> None:
        """Close every engine's connections."""
        await asyncio.gather(*(engine.close() for engine in self.engines))


def _build(name: str, section: EngineSettings) -> Engine:
    try:
        engine: Engine = load(_ADAPTERS, section.adapter).build(name, section)
    except OSError as error:
        raise SettingsError(
            f"ca_file of [engines.{name}] cannot be read: {section.ca_file!r} ({error.strerror or error}).",
            hint="Name a file with PEM certificates.",
        ) from None
    return engine
