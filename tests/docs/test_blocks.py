"""How pages are read, and what a desk does with their blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import Block, blocks
from desk import Desk, reader


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def bare_desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, "127.0.0.1:9", reader())


def shell(text: str, **more: str) -> Block:
    return Block(Path("page.md"), 1, "bash", text, **more)


def test_console_blocks_keep_only_the_commands(tmp_path: Path) -> None:
    """What follows a `$` is a command, with its continued lines; the rest is what it printed."""
    (one,) = blocks(page(tmp_path, "```console\n$ echo a \\\n    b\na b\n$ true\n```\n"))
    assert one.script == "echo a \\\n    b\ntrue\n"


def test_a_comment_steers_the_next_block_only(tmp_path: Path) -> None:
    """A reason not to run a block does not reach the block after it."""
    first, second = blocks(page(tmp_path, "<!-- not run: needs a GPU -->\n```bash\nfalse\n```\n\n```bash\ntrue\n```\n"))
    assert (first.steer, first.words, second.steer) == ("not run", "needs a GPU", "")


def test_a_comment_that_steers_nothing_is_refused(tmp_path: Path) -> None:
    """A reason that lost its block is an error, not a silence."""
    with pytest.raises(ValueError, match="does not stand before"):
        blocks(page(tmp_path, "<!-- not run: needs a GPU -->\n\nWords between.\n\n```bash\nfalse\n```\n"))


def test_variables_last_from_block_to_block(bare_desk: Desk) -> None:
    """A variable that one block sets is there for the blocks after it."""
    bare_desk.do(shell("WHO=reader"))
    bare_desk.do(shell('test "$WHO" = reader'))


def test_a_command_that_fails_is_shown(bare_desk: Desk) -> None:
    """The error names the page, the line and what was printed."""
    with pytest.raises(AssertionError, match=r"page.md:1 ended with status 3(.|\n)*printed:\n(.|\n)*oh"):
        bare_desk.do(shell("echo oh\nexit 3"))


def test_a_command_may_be_meant_to_fail(bare_desk: Desk) -> None:
    """`fails` turns the expectation round."""
    bare_desk.do(shell("false", steer="fails"))
    with pytest.raises(AssertionError):
        bare_desk.do(shell("true", steer="fails"))


def test_a_file_block_becomes_a_file(bare_desk: Desk) -> None:
    """The blocks after it can read it, in a folder that it names."""
    bare_desk.do(shell("[server]\n", steer="file", words="settings/tidegate.toml"))
    bare_desk.do(shell("grep -q server settings/tidegate.toml"))


def test_a_file_block_stays_on_the_desk(bare_desk: Desk) -> None:
    """A page cannot write elsewhere."""
    with pytest.raises(AssertionError, match="writes outside the desk"):
        bare_desk.do(shell("x", steer="file", words="../outside"))


def test_a_desk_has_no_way_into_the_checkout(bare_desk: Desk) -> None:
    """It holds copies: a command that clears a folder clears the copy. The one link leads to the desk's own examples."""
    bare_desk.lay()
    links = [path for path in bare_desk.folder.rglob("*") if path.is_symlink()]
    assert all(link.resolve().is_relative_to(bare_desk.folder.resolve()) for link in links)
    assert not (bare_desk.folder / ".git").exists()


def test_a_running_command_is_stopped_at_the_end(bare_desk: Desk) -> None:
    """`until` waits for the words, leaves the command running, and sees that Ctrl-C ends it well."""
    program = "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(0)); print('ready', flush=True); signal.pause()"
    bare_desk.do(shell(f'python -c "{program}"', steer="until", words="ready"))
    ((_, process),) = bare_desk.running
    assert process.poll() is None
    bare_desk.leave()
    assert process.returncode == 0


def test_the_pages_address_becomes_the_products(bare_desk: Desk) -> None:
    """127.0.0.1:8080 in a page is where the test's product listens."""
    bare_desk.do(shell('test "http://127.0.0.1:8080/v1 http://localhost:8080" = "http://127.0.0.1:""9/v1 http://127.0.0.1:""9"'))
