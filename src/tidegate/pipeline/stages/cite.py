"""Answer and its citations: which passages the answer rests on."""

from __future__ import annotations

import re

from tidegate.core.ask import Ask, Passage
from tidegate.core.ports import Stage
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.parts import Parts

_MARK = re.compile(r"\[(\d{1,2})\]")
_WORDS = re.compile(r"[0-9]+(?:[.,][0-9]+)*|[^\W\d_]{4,}|[\u3400-\u9fff]{2}")


class CiteStage:
    """Text in, `answer` and `citations` out, checked by the output contract.

    A passage is `quoted` where the model marked it with [n], or where it holds at least half of the answer's rarer words and figures
    (lexical support; AUROC about 0.78 on RAGTruth by others' figures). The rest were read but are not claimed as sources. A citation has the whole
    passage, with its place on the page, also where the prompt showed a part of it.
    """

    name = "cite"

    def __init__(self, capability: Capability) -> None:
        self._capability = capability

    async def __call__(self, ask: Ask) -> None:
        answer = "".join(ask.text).strip()
        marked = {int(n) for n in _MARK.findall(answer)}
        words = {word.casefold() for word in _WORDS.findall(_MARK.sub("", answer))}
        citations = [_citation(n, passage, n in marked or _supports(words, passage)) for n, passage in enumerate(ask.passages, 1)]
        ask.answer = {"answer": answer, "citations": citations}
        self._capability.check_output(ask.answer)
        ask.flight.decide("cited", quoted=[c["passage_id"] for c in citations if c["quoted"]])
        ask.flight.lap("cite")


def _supports(words: set[str], passage: Passage) -> bool:
    text = (passage.shown or passage.text).casefold()  # an answer does not rest on what its prompt did not show
    return bool(words) and sum(word in text for word in words) * 2 >= len(words)


def _citation(n: int, passage: Passage, quoted: bool) -> dict[str, object]:
    return {
        "n": n, "passage_id": passage.id, "document": passage.document, "title": passage.title, "page": passage.page,
        "boxes": [list(box) for box in passage.boxes], "text": passage.text, "score": round(passage.score, 4), "quoted": quoted,
    }


def keeps_without_passages(capability: Capability) -> bool:
    """Whether an answer without citations can keep the output contract; the ladder asks."""
    return not any(where.startswith("citations") for where in capability.breaks({"answer": "", "citations": []}))


def build(capability: Capability, parts: Parts) -> Stage:
    return CiteStage(capability)
