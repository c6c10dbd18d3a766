"""How far a tenant is kept apart from the others: by slots of its own, by engines of its own, by a part of the machine of its own."""

from __future__ import annotations

from typing import Literal

import msgspec

#: `shared`: nothing is its own; `slots`: slots of each instance; `instance`: instances; `device`: an instance on cores or a GPU's slice of its own.
Level = Literal["shared", "slots", "instance", "device"]


class Isolation(msgspec.Struct, frozen=True):
    """What is a tenant's own: `slots` of each instance, lent to others while they are idle where `lend` says so; or whole `instances`."""

    slots: int = 0
    lend: bool = False
    instances: tuple[str, ...] = ()
