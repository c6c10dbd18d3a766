"""Who PostgreSQL runs as. It refuses to run as root, so root lends it an unprivileged user."""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tidegate.core.errors import LocalPartError


@dataclass(frozen=True)
class Identity:
    """A user that a child runs as. `switch` is false where that is the user we are already."""

    uid: int
    gid: int
    name: str
    switch: bool

    def reaches(self, folder: Path) -> bool:
        """Can this user enter the folder? Tried, not computed: access lists and mounts have a say that mode bits do not show."""
        if not self.switch:
            return True
        tried = subprocess.run(
            ["test", "-x", str(folder)], user=self.uid, group=self.gid, extra_groups=[], cwd="/", check=False, stderr=subprocess.DEVNULL,
        )
        return tried.returncode == 0


def choose_identity(run_as: str, cluster: Path) -> Identity:
    """The user of a cluster's server: ourselves, or as root the setting, the cluster's owner, `postgres`, `nobody`, whichever comes first.

    Raises LocalPartError where that user is unknown, is root, or cannot be taken on.
    """
    if os.geteuid() != 0:
        return _ourselves(run_as)
    if run_as:
        return _lent(run_as)
    if cluster.is_dir() and (owner := cluster.stat().st_uid) != 0:
        return _lent(_name(owner))
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        return _lent("nobody")
    return _lent("postgres")


def _ourselves(run_as: str) -> Identity:
    uid = os.geteuid()
    name = _name(uid)
    if run_as not in ("", name):
        raise LocalPartError(
            f"local.postgres_run_as is {run_as!r}, but Tidegate runs as {name!r}, who cannot become another user.",
            hint="Leave local.postgres_run_as empty; it matters only when Tidegate runs as root.",
        )
    return Identity(uid, os.getegid(), name, switch=False)


def _lent(name: str) -> Identity:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise LocalPartError(
            f"There is no user {name!r} on this machine for PostgreSQL to run as.",
            hint="Set local.postgres_run_as to an existing unprivileged user, or make one: useradd --system tidegate.",
        ) from None
    if entry.pw_uid == 0:
        raise LocalPartError(
            "PostgreSQL refuses to run as root.", hint="Set local.postgres_run_as to an unprivileged user, or leave it empty.",
        )
    return Identity(entry.pw_uid, entry.pw_gid, entry.pw_name, switch=True)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise LocalPartError(
            f"User id {uid} has no entry in /etc/passwd, and PostgreSQL does not run without one.",
            hint=f"Add one (echo 'tidegate:x:{uid}:{os.getegid()}::/:/bin/sh' >> /etc/passwd), "
            "or set local.postgres = false and give a DSN.",
        ) from None
