"""How much memory a program sees on a card: less than the label says. A card of "80 GB" shows 79.2 GiB at most, one of "24 GB" with ECC 22.2.

`visible_gib` is what the driver reports to a program as the total (cudaMemGetInfo). Each figure is one that somebody saw and published; `source` is
where. Where none was found, `measured` is false, and the figure is what nvidia-smi reports less what the driver keeps on the nearest relative.
Bandwidths are the makers' data sheets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidegate.core.errors import BadRequest
from tidegate.core.plugins import nearest

_GH = "https://github.com/"


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    visible_gib: float
    bandwidth_gbs: float | None
    source: str
    #: Data-centre cards with a fast fabric: engines keep larger buffers for all-reduce on them.
    fabric: bool = False
    measured: bool = True
    also: tuple[str, ...] = ()


CARDS = (
    Card("H100", 79.19, 3350, _GH + "llm-d-incubation/llm-d-planner/pull/205", fabric=True, also=("h100-80gb", "h100-sxm", "h800")),
    Card("H200", 139.8, 4800, "nvidia-smi 143771 MiB, less what the driver keeps on an H100", fabric=True, measured=False, also=("h200-141gb",)),
    Card("B200", 178.35, 8000, _GH + "unslothai/unsloth/issues/3411", fabric=True, also=("b200-180gb",)),
    Card("A100-80GB", 79.15, 2039, _GH + "vllm-project/vllm/issues/4408", also=("a100", "a800", "a100-sxm4-80gb")),
    Card("A100-40GB", 39.38, 1555, _GH + "vllm-project/vllm/issues/16570", also=("a100-sxm4-40gb",)),
    Card("V100-32GB", 31.74, 900, _GH + "liucongg/ChatGLM-Finetuning/issues/73", also=("v100",)),
    Card("T4", 14.56, 320, _GH + "Zheng-Chong/CatVTON/issues/133", also=("tesla-t4",)),
    Card("L4", 22.03, 300, "nvidia-smi 23034 MiB (" + _GH + "modal-labs/modal-client/pull/2797), less what the driver keeps", measured=False),
    Card("A10", 22.18, 600, _GH + "OpenBMB/MiniCPM-V/issues/640", also=("a10g",)),
    Card("L40", 44.40, 864, _GH + "QwenLM/Qwen3-VL/issues/2097"),
    Card("L40S", 44.42, 864, _GH + "stepfun-ai/Step-Video-T2V/issues/8"),
    Card("A40", 44.42, 696, "nvidia-smi 46068 MiB (" + _GH + "guqiong96/Lvllm/issues/35), as on an L40S", measured=False),
    Card("RTX-A6000", 47.5, 768, "nvidia-smi 49140 MiB, less what the driver keeps", measured=False, also=("a6000",)),
    Card("RTX-6000-Ada", 44.43, 960, _GH + "DINGYANB/MTVCrafter/issues/21 (with ECC)", also=("6000-ada",)),
    Card("RTX-PRO-6000", 94.97, 1792, _GH + "antirez/ds4/issues/431", also=("rtx-pro-6000-blackwell",)),
    Card("RTX-PRO-4500", 31.38, 896, _GH + "vllm-project/vllm/pull/51590", also=("rtx-pro-4500-blackwell",)),
    Card("RTX-5090", 31.4, 1792, _GH + "noonghunna/club-3090/issues/1087", also=("5090",)),
    Card("RTX-5060-Ti-16GB", 15.45, 448, _GH + "Luce-Org/lucebox/issues/407", also=("5060-ti",)),
    Card("RTX-4090", 23.55, 1008, _GH + "vllm-project/vllm/issues/13061", also=("4090",)),
    Card("RTX-4060-8GB", 8.0, 272, _GH + "vllm-project/vllm/issues/13882", also=("4060",)),
    Card("RTX-3090", 23.58, 936, _GH + "vllm-project/vllm/issues/10517", also=("3090",)),
    Card("GB10", 121.69, 273, _GH + "MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks/issues/204 (shared with the machine)", also=("dgx-spark",)),
)


def find_card(name: str) -> Card:
    """A card by its name, however it is written (`RTX 4090`, `nvidia-l40s`). Raises BadRequest for one that is not known."""
    wanted = _plain(name)
    for card in CARDS:
        if wanted in (_plain(one) for one in (card.name, *card.also)):
            return card
    known = [card.name for card in CARDS]
    hint = f"Known: {', '.join(known)}. Another card: --gpu-memory with the GiB that a program sees on it."
    raise BadRequest(f"There is no card {name!r} here. {nearest(name, known)}", hint=hint)


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|tesla|rtx)+", "", plain)
