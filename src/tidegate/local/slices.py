"""A tenant's own part of this machine: cores, or a GPU's slice, on which an engine runs for it alone and nothing else that `tidegate up` starts.

Cores are taken from the supervisor before it starts anything, and so from all its children; the tenant's engine pins itself to its own. A GPU's slice
(a MIG instance, or a whole GPU) is what CUDA_VISIBLE_DEVICES of the tenant's engine names, and what that of all other parts does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.core.errors import SettingsError

CUDA = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slice:
    """What one tenant's engine has for itself. `name` is that of the engine."""

    name: str
    tenant: str
    cores: tuple[int, ...] = ()
    gpu: str = ""


def cores_left(slices: Sequence[Slice], usable: frozenset[int]) -> frozenset[int]:
    """The cores of all other parts. Raises SettingsError where the slices cannot be cut from this machine."""
    owners: dict[int | str, str] = {}
    for one in slices:
        for core in one.cores:
            if core not in usable:
                raise SettingsError(
                    f"tenants.{one.tenant}.cores names core {core}, which this process may not run on.",
                    hint=f"It may run on {', '.join(map(str, sorted(usable)))}.",
                )
        for owned in (*one.cores, *((one.gpu,) if one.gpu else ())):
            if (other := owners.setdefault(owned, one.tenant)) != one.tenant:
                what = f"core {owned}" if isinstance(owned, int) else f"GPU {owned!r}"
                raise SettingsError(
                    f"{what[0].upper()}{what[1:]} is owned by two tenants, {other!r} and {one.tenant!r}.", hint="Leave it to one of them."
                )
    left = usable - {core for one in slices for core in one.cores}
    if not left:
        raise SettingsError(
            f"The tenants own all {len(usable)} cores: none is left for the database, the gateway and the engine of all others.",
            hint="Take one out of tenants.NAME.cores.",
        )
    return left


def environment_left(slices: Sequence[Slice], env: Mapping[str, str]) -> dict[str, str]:
    """What is to be changed in the environment of all other parts: they see no GPU that a tenant owns, and only those that were named to us."""
    owned = {one.gpu for one in slices if one.gpu}
    if not owned:
        return {}
    return {CUDA: ",".join(gpu for gpu in env.get(CUDA, "").split(",") if gpu and gpu not in owned)}


def on(own: Slice) -> str:
    """What it has, in words."""
    said = [f"core{'s' if len(own.cores) > 1 else ''} {', '.join(map(str, own.cores))}"] if own.cores else []
    return " and ".join([*said, *([f"GPU {own.gpu}"] if own.gpu else [])])


def take(cores: frozenset[int]) -> None:
    """Run on these cores alone from now on, with every child that is started after this."""
    os.sched_setaffinity(0, cores)
