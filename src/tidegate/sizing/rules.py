"""Whether tensor parallelism can cut a model so: heads, vocabulary and widths must divide."""

from __future__ import annotations

from tidegate.sizing.model_config import Attention, Experts, Latent, Mlp, Model, Recurrent
from tidegate.sizing.rank import Wish
from tidegate.sizing.weights import VOCABULARY_PAD, padded_vocabulary


def broken_rules(model: Model, wish: Wish) -> list[str]:
    """Why tensor parallelism cannot cut this model so, as vLLM would refuse it at start; empty where it can."""
    tp, broken = wish.tp, []
    vocabulary = padded_vocabulary(model.vocabulary)
    if vocabulary % tp:
        broken.append(f"the vocabulary, {model.vocabulary} words padded to a multiple of {VOCABULARY_PAD}, cannot be cut into {tp}")
    for mixer in {mixer for layer in model.layers for mixer in layer.mixers}:
        if isinstance(mixer, Attention | Latent) and mixer.heads % tp:
            broken.append(f"{mixer.heads} attention heads cannot be cut into {tp}")
        elif isinstance(mixer, Attention) and mixer.kv_heads % tp and tp % mixer.kv_heads:
            broken.append(f"{mixer.kv_heads} heads of keys and values can neither be cut into {tp} nor copied to {tp}")
        elif isinstance(mixer, Recurrent) and mixer.heads % tp:
            broken.append(f"{mixer.heads} heads of a recurrent layer cannot be cut into {tp}")
    for part in {layer.feed_forward for layer in model.layers}:
        width = part.width if isinstance(part, Mlp | Experts) else 0
        if width % tp:
            broken.append(f"a feed-forward part {width} wide cannot be cut into {tp}")
    return sorted(set(broken))
