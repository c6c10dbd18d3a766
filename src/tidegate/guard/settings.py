"""`[guard]`: what must not be said, and what happens when the model begins to say it. `[door]`: what may come in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidegate.core.nesting import MAX_DEPTH
from tidegate.core.settings import Section
from tidegate.guard.door import Action


class GuardSettings(Section):
    """`[guard]` of tidegate.toml, for every answer. A capability may add a list of its own in its capability.toml."""

    terms_file: str = Field("", description="File of terms that no answer may hold: UTF-8, one a line, # comments. Empty: no term is banned.")
    whole_words: bool = Field(
        True, description="Terms count as whole words; in scripts without blanks between words, anywhere. false: every term counts anywhere."
    )
    parted_letters: bool = Field(
        True,
        description="Terms are found also where their letters are spelled singly (b a n) or emphasis stands between them (b**an**). "
        "Holds for the lists of capabilities too.",
    )
    on_term: Literal["step_back", "stop"] = Field(
        "step_back",
        description="`step_back`: the model goes on from before the term, its beginning forbidden; `stop`: the answer ends as content_filter.",
    )
    max_step_backs: int = Field(3, ge=0, description="After so many steps back in one answer the next term ends it as content_filter.")


class DoorSettings(Section):
    """`[door]` of tidegate.toml, for every request to a capability, and to /v1 as `v1` and `v1_injection` say: what its texts may hold. `pass` looks
    for nothing, `mark` lets it pass and tells of it in the flight and in the header `x-tidegate-door`, `refuse` is an error 400. A capability may say
    otherwise in its capability.toml."""

    v1: bool = Field(
        False,
        description="Whether requests to /v1 are looked at too, embeddings among them. A usual prompt takes 1 us, one of 200 kB 0.2 ms.",
    )
    v1_injection: bool = Field(
        False,
        description="Whether phrases of injection are looked for at /v1 too. A prompt of 500 characters takes 6 us, one of 200 kB up to 4 ms in "
        "which nobody else is served; turns seen before take nothing again.",
    )
    max_chars: int = Field(0, ge=0, description="Most characters of all texts of a request together; 0: as many as server.max_body_bytes allows.")
    max_depth: int = Field(MAX_DEPTH, ge=1, le=MAX_DEPTH, description="How deep lists and objects may lie in each other.")
    control: Action = Field("mark", description="Control characters other than tabs and line ends.")
    invisible: Action = Field("mark", description="Characters that reorder a text, or write in it what nobody sees: bidi overrides, tags, selectors.")
    encoding: Action = Field("mark", description="Code points that are no characters, or many replacement characters: read in a wrong encoding.")
    blob: Action = Field("mark", description="Long runs of encoded data: base64, hexadecimal.")
    blob_chars: int = Field(512, ge=64, description="Characters from which a run of encoded data counts.")
    repetition: Action = Field("mark", description="One passage over and over.")
    repeat_chars: int = Field(1024, ge=64, description="Characters from which repetition counts.")
    injection: Action = Field("mark", description="Usual phrases of prompt injection; docs/door.md says how often they are right.")
