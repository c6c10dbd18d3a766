"""What a room's settings look like: a name, a default and a sentence each; unknown names are refused."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo

from tidegate.core.errors import SettingsError
from tidegate.core.toml import KeyPath

S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """A section of tidegate.toml. Every field carries `Field(default, description="one sentence")`: a test fails where one does not."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_nul(cls, value: Any) -> Any:
        """No path, address or name may hold one, and what they are given to says so late and badly."""
        if isinstance(value, str) and "\0" in value:
            raise ValueError("must not hold a NUL character")
        return value


class Leaf(NamedTuple):
    """A setting as it is documented. `path` holds NAME where the user chooses a name."""

    path: KeyPath
    field: FieldInfo

    def fits(self, path: KeyPath) -> bool:
        """True where `path` is this setting."""
        return fits(self.path, path)


def leaves(section: type[Section], path: KeyPath = ()) -> Iterator[Leaf]:
    """All settings that a section and those below it know."""
    for name, field in section.model_fields.items():
        below, named = inner(field)
        if below is None:
            yield Leaf((*path, name), field)
        else:
            yield from leaves(below, (*path, name, "NAME") if named else (*path, name))


def values(section: Section, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """All settings in force, with the names that the user chose."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        below, named = inner(field)
        if below is None:
            yield (*path, name), value
        elif named:
            for key, one in value.items():
                yield from values(one, (*path, name, key))
        else:
            yield from values(value, (*path, name))


def inner(field: FieldInfo) -> tuple[type[Section] | None, bool]:
    """The section that a field holds, if any; True where it holds one for each name that the user chooses."""
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    if get_origin(annotation) is dict:
        value = get_args(annotation)[1]
        if isinstance(value, type) and issubclass(value, Section):
            return value, True
    return None, False


def parse(text: str, name: str, kind: type[S], shape: str) -> S:
    """A section from the text of a TOML file of its own. `name`: the file's; `shape`: how it looks, as a hint.

    Raises SettingsError that names the file and what is wrong in it.
    """
    try:
        return kind.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{name} is not TOML: {error}.", hint="Correct the line that it names.") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}.", hint=shape) from None


def fits(pattern: KeyPath, path: KeyPath) -> bool:
    """True where `path` is `pattern` with names chosen for NAME."""
    return len(pattern) == len(path) and all(want in ("NAME", name) for want, name in zip(pattern, path, strict=True))


MASK = "***"
_SECRET = re.compile(r"(^|_)(secret|password|passwd|token|key)$")
_URL_PASSWORD = re.compile(r"(?<=://)([^:/@\s]*):([^@\s]*)@")
_DSN_PASSWORD = re.compile(r"\b(password\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)", re.IGNORECASE)


def shown(name: str, value: Any) -> Any:
    """A setting's value as it may be shown, in plain JSON types: secrets and the passwords inside addresses are masked."""
    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else ""
    if isinstance(value, str):
        if value and _SECRET.search(name):
            return MASK
        return _DSN_PASSWORD.sub(rf"\g<1>{MASK}", _URL_PASSWORD.sub(rf"\g<1>:{MASK}@", value))
    if isinstance(value, Mapping):
        return {key: shown(str(key), one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [shown(name, one) for one in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
