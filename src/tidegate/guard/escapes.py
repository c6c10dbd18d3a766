"""The letters of a JSON text, as they come: what stands as an escape in the arguments of a tool call is looked at as what it means."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.", re.DOTALL)
#: An escape that is not whole yet, or the first half of a pair.
_BEGUN = re.compile(r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?)?\Z")
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class Unescaped:
    """Takes a JSON text in pieces; `feed` gives what is certain of it, without escapes. `open`: a piece of an escape waits for its rest."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = ""

    def feed(self, text: str) -> str:
        """The letters that this piece adds."""
        text = self.open + text
        if "\\" not in text:
            self.open = ""
            return text
        # Whole escapes first, from the left: a backslash that is itself escaped begins none.
        out: list[str] = []
        at = 0
        while (back := text.find("\\", at)) >= 0:
            out.append(text[at:back])
            if _BEGUN.match(text, back):
                self.open = text[back:]
                return "".join(out)
            found = _ESCAPE.match(text, back)
            if found is None:  # no JSON: looked at as it is
                out.append("\\")
                at = back + 1
                continue
            out.append(_meant(found.group()))
            at = found.end()
        self.open = ""
        return "".join([*out, text[at:]])


def _meant(escape: str) -> str:
    if len(escape) == 2:
        return _SHORT.get(escape[1], escape[1])
    units = [int(unit, 16) for unit in escape.split("\\u")[1:]]
    if len(units) == 2:
        return chr(0x10000 + ((units[0] - 0xD800) << 10) + (units[1] - 0xDC00))
    return chr(units[0])
