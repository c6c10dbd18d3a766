"""The rungs of a capability's ladder as its author writes them, and which of them cannot be: those that could not keep the output contract."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from tidegate.core.errors import SettingsError
from tidegate.core.plugins import load
from tidegate.core.settings import Section

if TYPE_CHECKING:
    from tidegate.pipeline.capability import Capability

#: The rung on which every request begins: the capability's stages as they are. It is not written down.
FULL = "full"
_CODE = re.compile(r"[a-z][a-z0-9_]{2,63}")
#: What a rung says of its answers where its author says nothing.
NOTES = {
    "no_retrieval": "The documents could not be searched; this answer does not rest on them.",
    "small_model": "A smaller model gave this answer.",
    "faq": "This answer is from the list of frequent questions.",
}


class Rung(Section):
    """`[[ladder]]`: one way to answer below the full one, in the order in which they are tried."""

    rung: Literal["no_retrieval", "small_model", "faq", "message"] = Field(
        description="`no_retrieval`, `small_model`, `faq`, or the last one, `message`."
    )
    note: str = Field("", max_length=500, description="What an answer of this rung says of itself; empty: a sentence of ours.")
    model: str = Field("", description="With `small_model`: the public name of the other model.")
    optional: bool = Field(False, description="With `small_model`: the rung is left out where no engine serves the model; else that stops the start.")
    share: float = Field(
        0.0, ge=0, le=1, description="Most of the time that is left when it begins; 0: 0.6, or 0.95 where no rung below it needs an engine."
    )
    code: str = Field("", description="With `message`: the business code that your systems know, e.g. `support_unavailable`.")
    message: str = Field("", max_length=2000, description="With `message`: what your users read.")
    hint: str = Field("", max_length=2000, description="With `message`: what they can do instead.")

    @property
    def says(self) -> str:
        """What an answer of this rung says of itself."""
        return self.note or NOTES.get(self.rung, "")


class Said(NamedTuple):
    """One rung in words. `share`: most of the time that is left when it begins; 0: as the ladder sets it."""

    rung: str
    answers: str
    rests_on: str
    share: float
    note: str


def described(capability: Capability) -> list[Said]:
    """The whole ladder, the full answer first; of a capability without one, the full answer alone."""
    manifest = capability.manifest
    retrieves = "retrieve" in manifest.stages
    full = ", ".join((["documents"] if retrieves else []) + [f"model {manifest.model}"])
    rows = [Said(FULL, "as long as nothing fails", full, manifest.budgets.full_share, "")]
    for rung in manifest.ladder:
        if rung.rung == "no_retrieval":
            answers, rests_on = "documents cannot be searched, or make the prompt too long", f"model {manifest.model}"
        elif rung.rung == "small_model":
            where = ", where an engine serves it" if rung.optional else ""
            found = ["documents already found"] if retrieves else []
            answers, rests_on = "the model fails, is silent, is busy, or breaks the contract", ", ".join([*found, f"model {rung.model}{where}"])
        elif rung.rung == "faq":
            entries = len(capability.faq.entries) if capability.faq is not None else 0
            answers, rests_on = "the question fits an entry", f"{entries} entries of {manifest.faq.file}"
        else:
            answers, rests_on = f"never: 503 {rung.code} (422 for broken output), with a ticket", "nothing"
        rows.append(Said(rung.rung, answers, rests_on, rung.share, rung.message if rung.rung == "message" else rung.says))
    return rows


def check_ladder(file: object, capability: Capability) -> None:
    """Raises SettingsError that names the rung that cannot be, and why. `file` is where the ladder stands."""
    rungs = capability.manifest.ladder
    seen: set[tuple[str, str]] = set()
    for number, rung in enumerate(rungs, 1):
        why = _unfit(capability, rung)
        if (rung.rung, rung.model) in seen:
            why = "it stands there twice"
        seen.add((rung.rung, rung.model))
        if rung.rung == "message" and number < len(rungs):
            why = why or "nothing comes after a message"
        if why:
            raise SettingsError(
                f"{file}: rung {number} of the ladder, {rung.rung!r}, cannot be: {why}.", hint="docs/ladder.md tells what each rung needs."
            )
    if rungs and rungs[-1].rung != "message":
        raise SettingsError(
            f"{file}: the ladder does not end with the rung 'message'.",
            hint="Where nothing answers, your users read its message, and your systems its code.",
        )


def _unfit(capability: Capability, rung: Rung) -> str:
    """Why the rung cannot be; empty where it can."""
    given = {name for name in rung.model_fields_set if name not in ("rung", "note", "share")}
    foreign = given - {"small_model": {"model", "optional"}, "message": {"code", "message", "hint"}}.get(rung.rung, set())
    if foreign:
        return f"it has no {', '.join(sorted(foreign))}"
    return {"no_retrieval": _no_retrieval, "small_model": _small_model, "faq": _faq, "message": _message}[rung.rung](capability, rung)


def _no_retrieval(capability: Capability, _: Rung) -> str:
    stages = capability.manifest.stages
    if "retrieve" not in stages:
        return "the capability does not retrieve, so there is nothing to leave out"
    for name in stages:
        keeps = getattr(load("tidegate.pipeline.stages", name), "keeps_without_passages", None)
        if keeps is not None and not keeps(capability):
            return f"without passages the stage {name!r} cannot keep the output contract"
    return ""


def _small_model(capability: Capability, rung: Rung) -> str:
    if not rung.model:
        return "it names no model"
    if rung.model == capability.manifest.model:
        return f"{rung.model!r} is the model of the full answer"
    return "" if "generate" in capability.manifest.stages else "the capability asks no model"


def _faq(capability: Capability, _: Rung) -> str:
    if capability.faq is None:
        return "faq.file names no file"
    for number, entry in enumerate(capability.faq.entries, 1):
        if broken := capability.breaks(entry.output):
            return f"entry {number} of the FAQ breaks the output contract at {', '.join(broken[:5])}"
    return ""


def _message(_: Capability, rung: Rung) -> str:
    if not _CODE.fullmatch(rung.code):
        return f"its code {rung.code!r} is not one of small letters, digits and underscores"
    return "" if rung.message.strip() else "it has no message"
