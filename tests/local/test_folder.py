"""The data folder's checks, each with its way out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tidegate.core.errors import LocalPartError
from tidegate.local.folder import DataFolder, explained, fits_socket, socket_folder


@pytest.mark.mounts
def test_too_little_disk_is_said_with_both_figures(small_disk: Path) -> None:
    """What is free and what is wanted stand in the error."""
    with pytest.raises(LocalPartError, match=r"has 8 MB free; at least 500 MB are wanted \(local.min_free_disk_mb\)") as error:
        DataFolder(small_disk / "data").open(500)
    assert "larger disk" in str(error.value.hint)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_to_do(number: int) -> None:
    """ENOSPC and a used-up quota become an error with the way out."""
    with pytest.raises(LocalPartError, match="disk is full: /data/x") as error, explained(Path("/data")):
        raise OSError(number, os.strerror(number), "/data/x")
    assert "Free some space" in str(error.value.hint)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_no_permission_says_what_to_do(number: int) -> None:
    """A folder that may not be written, or a read-only disk."""
    with pytest.raises(LocalPartError, match="No permission to write /data/x") as error, explained(Path("/data")):
        raise OSError(number, os.strerror(number), "/data/x")
    assert "chown" in str(error.value.hint)


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    """local.data that names a file, or lies below one."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(LocalPartError, match="is not a folder"):
            DataFolder(path).open(0)


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    """Below a file system that takes no folders."""
    with pytest.raises(LocalPartError, match="/proc/no-such-folder cannot be made there"):
        DataFolder(Path("/proc/no-such-folder/data")).open(0)


def test_an_unrelated_error_is_not_explained_away() -> None:
    """Only what is understood is translated."""
    with pytest.raises(OSError, match="Input/output"), explained(Path("/data")):
        raise OSError(errno.EIO, "Input/output error")


def test_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    """A closed folder can be opened again; an open one cannot."""
    first, second = DataFolder(tmp_path), DataFolder(tmp_path)
    first.open(0)
    with pytest.raises(LocalPartError, match=rf"in use by another `tidegate up` or `serve` \(pid {os.getpid()}\)"):
        second.open(0)
    first.close()
    second.open(0)
    second.close()


def test_private_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    """Logs and sockets are ours alone."""
    before = os.umask(0)
    try:
        folder = DataFolder(tmp_path / "data")
        folder.open(0)
        folder.close()
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in (folder.run, folder.log)] == ["0o700", "0o700"]
    assert not folder.path.stat().st_mode & 0o066


def test_a_long_path_gets_a_short_private_socket_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path may have 107 bytes."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    wanted = home / ("x" * 120)
    short = socket_folder(wanted)
    assert short.parent == home
    assert fits_socket(short)
    assert short == socket_folder(wanted)
    assert short.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("runtime", ["/no/such/folder", "/" + "y" * 120, ""])
def test_a_runtime_folder_that_is_of_no_use_is_passed_over(runtime: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_RUNTIME_DIR may be another user's, gone, or too long itself."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    short = socket_folder(home / ("x" * 120))
    short.rmdir()
    assert short.parent == Path("/tmp")


def test_a_socket_folder_that_others_may_enter_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder somebody else could have made it first."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    wanted = home / ("x" * 120)
    socket_folder(wanted).chmod(0o755)
    with pytest.raises(LocalPartError, match="somebody else made it or others may enter it"):
        socket_folder(wanted)
