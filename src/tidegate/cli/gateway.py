"""The running gateway: which one is meant, and what it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import F, settings_from, settings_options
from tidegate.core.errors import TidegateError

if TYPE_CHECKING:
    from collections.abc import Mapping


_url = click.option("--url", envvar="TIDEGATE_URL", help="The gateway (default: the one that runs on this machine).")


def gateway_options(command: F) -> F:
    """--url and --key of a running gateway, and the options of the settings that know its data folder."""
    key = click.option("--key", envvar="TIDEGATE_KEY", help="An API key (default: the first key in the data folder).")
    return _url(key(settings_options(command)))


def admin_options(command: F) -> F:
    """The same for what takes an admin key, of which none lies in the data folder; see `admin_key`."""
    key = click.option("--key", envvar="TIDEGATE_KEY", help="An admin key. It must be given: `tidegate keys create --role admin` makes one.")
    return _url(key(settings_options(command)))


def admin_key(key: str | None) -> str:
    """The key as it was given. Raises TidegateError where none was: the first key in the data folder is a data key, which would be refused."""
    if not key:
        raise TidegateError(
            "This takes an admin key, and none was given; the key that `tidegate up` keeps is a data key.",
            hint="Make one with `tidegate keys create --role admin`, and give it with --key or TIDEGATE_KEY.",
        )
    return key


def ask(
    path: str, query: Mapping[str, str], url: str | None, key: str | None, config: Path | None, sets: tuple[str, ...], *, method: str = "GET"
) -> bytes:
    """What the running gateway answers. Raises TidegateError with the gateway's own words where it refuses."""
    import httpx

    url, key = _where(url, key, config, sets)
    try:
        answer = httpx.request(method, url.rstrip("/") + path, params=query, headers={"authorization": f"Bearer {key}"}, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        hint = "Is it running? --url or TIDEGATE_URL names another."
        raise TidegateError(f"The gateway at {url} cannot be reached: {error}", hint=hint) from error
    if answer.is_success:
        return answer.content
    raise _refusal(answer.status_code, answer.content)


def decoded(body: bytes, kind: Any) -> Any:
    """An answer's body as `kind`. Raises TidegateError where it is something else."""
    import msgspec

    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TidegateError(f"What answered is not a Tidegate gateway of this version: {error}", hint="Is --url right?") from error


def _refusal(status: int, body: bytes) -> TidegateError:
    try:
        said = json.loads(body)["error"]
        return TidegateError(str(said["message"]), hint=said.get("hint"))
    except (ValueError, KeyError, TypeError):
        return TidegateError(f"The gateway answered with HTTP {status} and no words that Tidegate knows.", hint="Is --url right?")


def _where(url: str | None, key: str | None, config: Path | None, sets: tuple[str, ...]) -> tuple[str, str]:
    """The running gateway's address and a key: as given, else as `tidegate up` left them in the data folder."""
    if url and key:
        return url, key
    folder = settings_from(config, sets).local.folder
    try:
        url = url or str(json.loads((folder / "run" / "gateway.json").read_text("utf-8"))["url"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "Start one with `tidegate up`, or name another with --url or TIDEGATE_URL."
        raise TidegateError(f"No gateway runs on the data folder {folder}.", hint=hint) from error
    try:
        return url, key or (folder / "first-key").read_text("utf-8").strip()
    except OSError as error:
        raise TidegateError(f"There is no readable first key in {folder}.", hint="Give a key with --key or TIDEGATE_KEY.") from error
