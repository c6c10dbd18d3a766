"""PostgreSQL with pgvector, embedded: its cluster made, its server supervised, its one database there.

It listens on a unix socket alone. The socket's folder is private, and the kernel tells the server who calls (peer): root, the user that
runs Tidegate and the user that the server runs as are let in as `tidegate`, nobody else, and there is no password to lose.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import psycopg

from tidegate.core.errors import LocalPartError
from tidegate.local.child import Child, ChildSpec
from tidegate.local.folder import DataFolder, check_room, explained, take_lock
from tidegate.local.identity import Identity, choose_identity
from tidegate.local.logfile import LogFile
from tidegate.local.pg_files import Place, cluster_hint, find_place, usable_binaries
from tidegate.local.process import Process
from tidegate.local.settings import LocalSettings

NAME = "database"
DATABASE = ROLE = "tidegate"
_PORT = 5432  # only a part of the socket's name: nothing listens on TCP

#: SIGINT is PostgreSQL's fast stop, SIGQUIT its immediate one (it recovers at the next start). Never SIGKILL: its children would live on.
_STOP_STEPS = ((signal.SIGINT, 60.0), (signal.SIGQUIT, 30.0))

_HINT = "If the log does not say why, move the data folder aside and start again: a new database is made."


class Postgres:
    """The embedded database of one data folder. `fsync` off is for tests alone: a power cut may then lose the cluster."""

    def __init__(self, folder: DataFolder, settings: LocalSettings, *, fsync: bool = True) -> None:
        self._folder = folder
        self._settings = settings
        self._fsync = fsync
        self._place: Place | None = None
        self._who: Identity | None = None
        self._place_lock = -1
        self.child: Child | None = None

    @property
    def dsn(self) -> str:
        """The connection string; known once `start` has placed the cluster."""
        return self._dsn(DATABASE)

    async def start(self, note: Callable[[str], None] = lambda _: None) -> None:
        """Make what is missing, start the server, make the database. Raises LocalPartError; then nothing of it runs."""
        data = self._folder.path
        with explained(data):
            self._who = who = choose_identity(self._settings.postgres_run_as, cluster_hint(data))
            self._place = place = find_place(data, who)
            if place.root != data:
                check_room(place.root, self._settings.min_free_disk_mb)
                # A copied data folder points to the same cluster: two servers on it would ruin it.
                self._place_lock = take_lock(place.root / "lock", f"The database {place.cluster} is in use by another `tidegate up`")
            binaries = usable_binaries(who)
            await _stop_leftover(place.cluster, who)
            if not (place.cluster / "PG_VERSION").is_file():
                note("creating the cluster")
                await self._create(binaries, place, who)
            _write_access(place, who)
            self.child = Child(self._server(binaries, place, who))
        note("starting")
        await self.child.start()
        try:
            await self._create_database()
        except psycopg.Error as error:
            await self.stop()
            raise LocalPartError(f"The database {DATABASE!r} cannot be made: {error}", hint=_HINT) from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> bool:
        """Fast stop: open transactions are rolled back, what was committed is on disk. True when it is gone."""
        gone = await self.child.stop() if self.child else True
        if gone and self._place_lock >= 0:
            os.close(self._place_lock)
            self._place_lock = -1
        return gone

    async def _create(self, binaries: Path, place: Place, who: Identity) -> None:
        """initdb into a folder beside, then one rename: a run that was killed in between leaves no half a cluster."""
        new = place.root / "pg.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        if who.switch:
            os.chown(new, who.uid, who.gid)
        argv = [
            str(binaries / "bin" / "initdb"), "-D", str(new), "-U", ROLE, "--encoding=UTF8", "--locale=C",
            "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--auth=peer", "--no-instructions",
        ]
        if not self._fsync:
            argv.append("--no-sync")
        spec = ChildSpec(
            name="initdb", argv=argv, env=_env(), log=self._log(), pid_file=self._folder.run / "initdb.pid", ready=_never,
            identity=who, cwd=Path("/"), hint=_HINT,
        )
        await Child(spec).run_to_end(within_s=120.0)
        new.rename(place.cluster)

    def _server(self, binaries: Path, place: Place, who: Identity) -> ChildSpec:
        argv = [str(binaries / "bin" / "postgres"), "-D", str(place.cluster)]
        for name, value in self._options(place).items():
            argv += ["-c", f"{name}={value}"]
        return ChildSpec(
            name=NAME, argv=argv, env=_env(), log=self._log(), pid_file=self._folder.run / "postgres.pid", ready=self._answers,
            ready_within_s=300.0,  # recovery after a power cut
            death_signal=signal.SIGINT, stop_steps=_STOP_STEPS, identity=who, cwd=Path("/"), hint=_HINT,
        )

    def _options(self, place: Place) -> dict[str, str]:
        settings = self._settings
        return {
            "listen_addresses": "",
            "port": str(_PORT),
            "unix_socket_directories": str(place.sockets),
            "hba_file": str(place.conf / "pg_hba.conf"),
            "ident_file": str(place.conf / "pg_ident.conf"),
            "max_connections": str(settings.postgres_max_connections),
            "shared_buffers": f"{settings.postgres_shared_buffers_mb}MB",
            "max_wal_size": "256MB",
            "min_wal_size": "32MB",
            "fsync": "on" if self._fsync else "off",
            "jit": "off",  # its compiling takes longer than our queries
            "timezone": "UTC",
            "log_timezone": "UTC",
            # A log line with a statement or a row in it would carry prompts, passages and answers.
            "log_min_error_statement": "panic",
            "log_error_verbosity": "terse",
            "log_parameter_max_length": "0",
            "log_parameter_max_length_on_error": "0",
        }

    def _log(self) -> LogFile:
        return LogFile(self._folder.log / "postgres.log", self._settings.log_max_mb * 1_000_000)

    def _dsn(self, database: str) -> str:
        assert self._place is not None
        assert self._who is not None
        # requirepeer: a socket in a shared folder is believed only where the server's user opened it.
        return f"postgresql://{ROLE}@/{database}?host={quote(str(self._place.sockets), safe='')}&requirepeer={quote(self._who.name)}"

    async def _answers(self) -> bool:
        try:
            async with await psycopg.AsyncConnection.connect(self._dsn("postgres"), connect_timeout=5):
                return True
        except psycopg.OperationalError:
            return False

    async def _create_database(self) -> None:
        async with await psycopg.AsyncConnection.connect(self._dsn("postgres"), autocommit=True) as connection:
            found = await connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,))
            if await found.fetchone() is None:
                await connection.execute(f"CREATE DATABASE {DATABASE}")
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            await connection.execute("CREATE EXTENSION IF NOT EXISTS vector")


def _write_access(place: Place, who: Identity) -> None:
    """Who may come in. Written anew at each start, in a folder that is ours: the server's user cannot widen it."""
    callers = sorted({"root", who.name, getpass.getuser() if not who.switch else "root"})
    (place.conf / "pg_hba.conf").write_text(f"local all all peer map={ROLE}\n", "utf-8")
    (place.conf / "pg_ident.conf").write_text("".join(f'{ROLE} "{caller}" {ROLE}\n' for caller in callers), "utf-8")
    for name in ("pg_hba.conf", "pg_ident.conf"):
        (place.conf / name).chmod(0o644)


async def _stop_leftover(cluster: Path, who: Identity) -> None:
    """Stop the server of an earlier run that was killed: the kernel told it to stop then, but it may still be at it.

    The server enters its cluster's folder when it starts, so a process that stands there and has the noted pid is that server. A pid file
    that names another process of the same user would make PostgreSQL believe that its server runs: it is removed.
    """
    pid_file = cluster / "postmaster.pid"
    try:
        pid = int(pid_file.read_text("ascii", "replace").split("\n", 1)[0])
        process = Process.of(pid)
    except (OSError, ValueError):
        return
    if process is None:
        return  # dead: PostgreSQL replaces the file itself, after making sure that no child of that server lives
    if not _stands_in(pid, cluster, who):
        pid_file.unlink(missing_ok=True)
    elif not await process.stop(_STOP_STEPS):
        raise LocalPartError(f"An earlier database server (pid {pid}) does not stop.", hint=f"Look at it, then: kill -QUIT {pid}")


def _stands_in(pid: int, cluster: Path, who: Identity) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        return folder.stat().st_uid == who.uid and (folder / "cwd").resolve() == cluster.resolve()
    except OSError:
        return False


def _env() -> dict[str, str]:
    """No PG* variable of the user's may reach the server."""
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TZ": "UTC"}


async def _never() -> bool:
    return False
