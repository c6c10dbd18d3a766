"""Makes a Hugging Face folder of the packaged GGUF, so that engines that read only such folders can run the default model.

    python hf_model.py MODEL.gguf FOLDER

It needs gguf, numpy and safetensors. Weights are dequantised to float16; tokenizer and chat template are written from what the GGUF says.
Nothing is fetched. A folder that is whole already is left as it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: GGUF's names of tensors -> those of a LlamaForCausalLM.
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
#: GGUF's type of a control token.
_CONTROL = 3
#: Written last: a folder without it was torn.
_WHOLE = "whole"


def make(model: Path, folder: Path) -> None:
    """The folder; raises SystemExit where the GGUF is not of the kind that this script knows."""
    import gguf

    if (folder / _WHOLE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(model)
    said = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    if (said["general.architecture"], said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"]) != ("llama", "gpt2", "smollm"):
        raise SystemExit(f"{model}: only Llama models with SmolLM's tokenizer are known here.")
    _write(folder / "config.json", _config(said))
    _write(folder / "tokenizer.json", _tokenizer(said))
    _write(folder / "tokenizer_config.json", _tokenizer_config(said))
    _write(folder / "generation_config.json", {"eos_token_id": said["tokenizer.ggml.eos_token_id"]})
    _weights(reader, said, folder / "model.safetensors")
    (folder / _WHOLE).touch()


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _config(said: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": said["llama.attention.head_count"],
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": said["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": said["llama.rope.freq_base"],
        "vocab_size": said["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float16",
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "pad_token_id": said["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(said: dict[str, Any]) -> dict[str, Any]:
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": tokens[number], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for number, kind in enumerate(kinds)
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in said["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(said: dict[str, Any]) -> dict[str, Any]:
    tokens = said["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[said["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[said["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[said["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[said["tokenizer.ggml.padding_token_id"]],
        "model_max_length": said["llama.context_length"],
        "chat_template": said["tokenizer.chat_template"],
    }


def _weights(reader: Any, said: dict[str, Any], path: Path) -> None:
    import gguf
    import numpy as np
    from safetensors.numpy import save_file

    heads = {"attn_q": said["llama.attention.head_count"], "attn_k": said["llama.attention.head_count_kv"]}
    named = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    made = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = named.get(tensor.name)
        if name is None:
            _, layer, part, kind = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER[part]}.{kind}"
            if part in heads:  # GGUF interleaves the two halves of a rotated head; Hugging Face keeps them apart
                rows, columns = values.shape
                values = values.reshape(heads[part], rows // heads[part] // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        made[name] = np.ascontiguousarray(values, dtype=np.float16)
    save_file(made, path, metadata={"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
