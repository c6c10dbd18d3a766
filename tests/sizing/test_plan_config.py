"""Reading a model's config or GGUF header: what it is made of, and that nothing is guessed."""

from __future__ import annotations

import gzip
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.errors import BadRequest
from tidegate.sizing.describe import parameters
from tidegate.sizing.hf_model import from_config
from tidegate.sizing.memory import GIB
from tidegate.sizing.model_config import Attention, Experts, Latent, Mlp, Model, Recurrent, read_model
from tidegate.sizing.weights import total_bytes

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip


def read(**changes: Any) -> Model:
    return from_config({**LLAMA, **changes}, "config.json", name="model")


def written(folder: Path, values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def gguf(pairs: dict[str, Any]) -> bytes:
    """A GGUF header of texts, whole numbers and lists of whole numbers, without tensors."""
    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    def one(value: Any) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, list):
            return struct.pack("<IIQ", 9, 4, len(value)) + b"".join(struct.pack("<I", item) for item in value)
        return struct.pack("<II", 4, value)

    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(text(key) + one(value) for key, value in pairs.items())


# -- families --


@pytest.mark.parametrize(
    ("changes", "heads"),
    [({"num_key_value_heads": 32}, 32), ({"num_key_value_heads": 8}, 8), ({"num_key_value_heads": 1}, 1), ({"num_key_value_heads": None}, 32)],
)
def test_heads_of_keys_and_values(changes: dict[str, Any], heads: int) -> None:
    """Multi-head, grouped and multi-query attention; without a number each head has its own."""
    mixer = read(**changes).layers[0].mixers[0]
    assert isinstance(mixer, Attention)
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim) == (32, heads, 128)


def test_old_names_are_known() -> None:
    """A family of older names (n_embd, n_layer, n_head, multi_query) is read as the same thing."""
    made = from_config(
        {
            "model_type": "gpt_bigcode", "n_embd": 2048, "n_layer": 24, "n_head": 16, "multi_query": True, "n_inner": 8192, "vocab_size": 49152,
            "n_positions": 8192,
        },
        "config.json", name="old",
    )  # fmt: skip
    assert made.layers[0].mixers == (Attention(16, 1, 128, 128),)
    assert made.layers[0].feed_forward == Mlp(8192, gated=False)
    assert made.context == 8192


def test_counted_weights_are_those_that_the_makers_state() -> None:
    """Llama 3.1 8B has 8.03 billion weights: 14.96 GiB in 16 bits."""
    made = read()
    assert parameters(made) == pytest.approx(8.03e9, rel=0.001)
    assert total_bytes(made) / GIB == pytest.approx(14.96, abs=0.01)


@pytest.mark.parametrize(
    ("billions", "config"),
    [
        (671.0, {
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "vocab_size": 129280,
        }),
        (456.0, {
            "model_type": "minimax", "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 9216, "num_local_experts": 32, "num_experts_per_tok": 2,
            "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10, "vocab_size": 200064,
        }),
        (51.6, {
            "model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
            "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "vocab_size": 65536,
        }),
        (8.9, {
            "model_type": "nemotron_h", "hidden_size": 4480, "num_hidden_layers": 56, "num_attention_heads": 40, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 15680, "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "vocab_size": 131072,
        }),
        (32.2, {
            "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 768, "shared_intermediate_size": 1536, "num_local_experts": 72, "num_experts_per_tok": 10,
            "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
            "vocab_size": 100352, "tie_word_embeddings": True,
        }),
    ],
    ids=["DeepSeek-V3", "MiniMax-Text-01", "Jamba-1.5-Mini", "Nemotron-Nano-9B-v2", "Granite-4.0-H-Small"],
)  # fmt: skip
def test_the_weights_of_intricate_families_add_up(billions: float, config: dict[str, Any]) -> None:
    """Experts, latent attention and recurrent layers are counted as their makers count them, to half a percent."""
    made = from_config({"tie_word_embeddings": False, **config}, "config.json", name="model")
    assert parameters(made) / 1e9 == pytest.approx(billions, rel=0.005)


def test_the_language_model_of_a_nested_config_is_found() -> None:
    """A model of several parts keeps the language model's fields one level down, or two."""
    for nested in ({"text_config": LLAMA}, {"thinker_config": {"text_config": LLAMA}}):
        made = from_config({"model_type": "parts", "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}, **nested}, "c", name="m")
        assert made.hidden == 4096
        assert made.vision_parameters > 400e6


def test_latent_attention_and_experts() -> None:
    """DeepSeek-V2: latent attention; the first layer dense, the others routed with shared experts."""
    made = read(
        model_type="deepseek_v2", kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=None, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1,
    )  # fmt: skip
    assert made.layers[0].mixers == (Latent(32, 512, 64, 128, 128, 0),)
    assert made.layers[0].feed_forward == Mlp(14336)
    assert made.layers[1].feed_forward == Experts(64, 1408, 6, 2816)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "gemma2", "sliding_window": 4096, "num_hidden_layers": 4}, [4096, None, 4096, None]),
        ({"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 3, "num_hidden_layers": 4}, [1024, 1024, None, 1024]),
        ({"model_type": "mistral", "sliding_window": 4096, "num_hidden_layers": 2}, [4096, 4096]),
        ({"model_type": "mistral", "sliding_window": None, "num_hidden_layers": 2}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "num_hidden_layers": 2}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 2}, [None, 9]),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128, "num_hidden_layers": 2}, [128, None]),
        ({"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4}, [8192, 8192, 8192, None]),
    ],
)
def test_which_layers_have_a_window(changes: dict[str, Any], windows: list[int | None]) -> None:
    """Each family says it in its own way."""
    assert [layer.mixers[0].window for layer in read(**changes).layers if isinstance(layer.mixers[0], Attention)] == windows


def test_hybrid_models_by_their_fields() -> None:
    """Qwen3-Next by its interval, Nemotron-H by its letters, Jamba by its period, Kimi Linear by its lists, Falcon-H1 with both in each layer."""
    delta = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    mamba = {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
    kimi = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128}

    def kinds(**changes: Any) -> str:
        marks = {Attention: "*", Recurrent: "M", Latent: "L"}
        return " ".join("".join(marks[type(mixer)] for mixer in layer.mixers) or "-" for layer in read(num_hidden_layers=4, **changes).layers)

    assert kinds(model_type="qwen3_next", full_attention_interval=4, **delta) == "M M M *"
    assert kinds(model_type="nemotron_h", hybrid_override_pattern="M-*M", **mamba) == "M - * M"
    assert kinds(model_type="jamba", attn_layer_period=4, attn_layer_offset=2, mamba_d_state=16, mamba_dt_rank=256) == "M M * M"
    assert kinds(model_type="kimi_linear", linear_attn_config=kimi) == "M M M *"
    assert kinds(model_type="falcon_h1", mamba_n_heads=24, mamba_d_head=64, mamba_d_state=256, mamba_n_groups=1) == "*M *M *M *M"


@pytest.mark.parametrize(
    ("about", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.156),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4.3125),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.0),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}, 8.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    ],
)
def test_bits_of_a_quantised_weight(about: dict[str, Any], bits: float) -> None:
    """Scales and zero points count; embeddings and the output stay in the model's own type."""
    made = read(quantization_config=about)
    assert made.quantisation.bits == pytest.approx(bits, abs=0.001)
    assert total_bytes(made) == pytest.approx((8.03e9 - 2 * 128256 * 4096) * bits / 8 + 2 * 128256 * 4096 * 2, rel=0.001)


@pytest.mark.parametrize("ignore", [["re:.*self_attn.*", "lm_head"], [f"model.layers.{number}.self_attn" for number in range(32)]])
def test_parts_that_a_checkpoint_leaves_alone(ignore: list[str]) -> None:
    """A list of exceptions, by pattern or by name, keeps its parts in the model's own type."""
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "type": "int"}}}
    about = {"quant_method": "compressed-tensors", "ignore": ignore, "config_groups": groups}
    made = read(quantization_config=about)
    assert made.quantisation.bits_of("attention", 16) == 16
    assert made.quantisation.bits_of("mlp", 16) == pytest.approx(4.125)


@pytest.mark.parametrize(
    ("ignore", "kept"),
    [
        (["re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"], {"shared", "mlp"}),
        (["model.layers.0.mlp", "model.layers.31.self_attn"], set()),
        (["model.layers.0", "lm_head", "re:("], set()),
        (["*.experts.*"], {"experts"}),
    ],
)
def test_a_part_is_left_alone_where_most_of_it_is(ignore: list[str], kept: set[str]) -> None:
    """Exceptions for the first and the last layer do not make a checkpoint a large one; a broken pattern matches nothing."""
    about = {"quant_method": "compressed-tensors", "ignore": ignore, "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}
    assert read(quantization_config=about).quantisation.kept == kept | {"head", "vision"}


# -- sizes that files say --


def test_an_index_beside_the_config_says_the_size(tmp_path: Path) -> None:
    """The size of the weights comes from their index, or from the files themselves, where there are any."""
    written(tmp_path, LLAMA)
    assert read_model(tmp_path).weight_bytes is None
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    assert read_model(tmp_path).weight_bytes == 1000
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 16060522496}}')
    assert read_model(tmp_path).weight_bytes == 16060522496
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": "much"}}')
    assert read_model(tmp_path / "config.json").weight_bytes is None


def test_a_gguf_file_says_the_shape_and_its_size(tmp_path: Path) -> None:
    """A header gives the shape; the file's own size is that of the weights; without weights its type gives the size. Plain and gzipped."""
    pairs = {
        "general.architecture": "llama", "general.name": "small", "general.file_type": 7, "llama.block_count": 4, "llama.embedding_length": 512,
        "llama.feed_forward_length": 2048, "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2, "llama.context_length": 4096,
        "llama.vocab_size": 32000,
    }  # fmt: skip
    raw = gguf(pairs)
    header = tmp_path / "header.gguf"
    header.write_bytes(raw)
    made = read_model(header)
    assert made.layers[0].mixers == (Attention(8, 2, 64, 64),)
    assert (made.weight_bytes, made.context, made.quantisation.bits) == (None, 4096, 8.5)
    packed = tmp_path / "header.gguf.gz"
    packed.write_bytes(gzip.compress(raw))
    assert read_model(packed).layers == made.layers
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(raw + bytes(20_000_000))
    assert read_model(whole).weight_bytes == len(raw) + 20_000_000
    assert read_model(whole).tied
    whole.write_bytes(raw + struct.pack("<Q", 13) + b"output.weight" + bytes(20_000_000))
    assert not read_model(whole).tied


def test_a_split_gguf_file_is_as_large_as_its_parts(tmp_path: Path) -> None:
    """Any part names the whole."""
    pairs = {
        "general.architecture": "llama", "general.file_type": 1, "llama.block_count": 1, "llama.embedding_length": 64,
        "llama.feed_forward_length": 128, "llama.attention.head_count": 2, "llama.vocab_size": 1000,
    }  # fmt: skip
    raw = gguf(pairs)
    for number in (1, 2):
        (tmp_path / f"big-{number:05d}-of-00002.gguf").write_bytes(raw + bytes(1_000_000))
    assert read_model(tmp_path / "big-00001-of-00002.gguf").weight_bytes == 2 * (len(raw) + 1_000_000)


def test_a_gguf_hybrid_has_states_where_it_has_no_heads(tmp_path: Path) -> None:
    """Heads that differ by layer come as a list; no heads of keys and values beside a state is a recurrent layer."""
    pairs = {
        "general.architecture": "nemotron_h", "general.file_type": 1, "nemotron_h.block_count": 3, "nemotron_h.embedding_length": 256,
        "nemotron_h.feed_forward_length": [0, 1024, 0], "nemotron_h.attention.head_count": 8, "nemotron_h.attention.head_count_kv": [0, 0, 2],
        "nemotron_h.ssm.inner_size": 512, "nemotron_h.ssm.state_size": 16, "nemotron_h.ssm.group_count": 1, "nemotron_h.ssm.time_step_rank": 8,
        "nemotron_h.vocab_size": 1000,
    }  # fmt: skip
    path = tmp_path / "hybrid.gguf"
    path.write_bytes(gguf(pairs))
    assert [type(layer.mixers[0]) for layer in read_model(path).layers] == [Recurrent, Recurrent, Attention]


# -- what is refused --


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_hidden_layers": 10_000}, "num_hidden_layers is 10000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        ({"num_hidden_layers": math.nan}, "num_hidden_layers is nan"),
        ({"num_hidden_layers": [32]}, "num_hidden_layers is [32]"),
        ({"vocab_size": 10**30}, "vocab_size is a number of 100 bits"),
        ({"num_key_value_heads": 7}, "num_key_value_heads 7"),
        ({"torch_dtype": "float7"}, "torch_dtype is 'float7'"),
        ({"torch_dtype": 16}, "torch_dtype is 16"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": ["telepathy"] * 32}, "'telepathy'"),
        ({"layer_types": 3}, "layer_types"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method is 'magic'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "bits"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "bits is '4'"),
        ({"quantization_config": []}, "quantization_config"),
        ({"model_type": "deepseek_v4"}, "deepseek_v4"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ({"text_config": 7}, "text_config"),
        ({"hybrid_override_pattern": "MMQ"}, "hybrid_override_pattern"),
        ({"block_configs": [{}]}, "block_configs"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"intermediate_size": [14336] * 31}, "intermediate_size names 31"),
        ({"attn_type_list": [1, 0]}, "attn_type_list names 2"),
    ],
)
def test_a_config_that_cannot_be_planned_says_which_field(changes: dict[str, Any], named: str) -> None:
    """Missing fields, texts for numbers, ten thousand layers and nonsense are refused by name."""
    with pytest.raises(BadRequest) as refused:
        read(**changes)
    assert named in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    "raw",
    ["", "{", "[]", "7", "null", '{"a": ' * 3000 + "1" + "}" * 3000, "[" * 100_000, '{"hidden_size": ' + "9" * 10_000 + "}"],
    ids=["empty", "open", "list", "number", "null", "deep", "deeper", "digits"],
)
def test_what_is_no_config_is_refused(tmp_path: Path, raw: str) -> None:
    """No JSON, no object, nested without end, a number of ten thousand digits: a message, never a crash."""
    with pytest.raises(BadRequest):
        read_model(written(tmp_path, raw))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """A missing file, a folder without a config, a huge file, a vocabulary alone, a GGUF file by another name."""
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(9 << 20)
    renamed = tmp_path / "model.json"
    renamed.write_bytes(gguf({"general.architecture": "llama"}))
    vocabulary = tmp_path / "vocab.gguf"
    vocabulary.write_bytes(gguf({"general.architecture": "llama"}))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03")
    for path in (tmp_path / "none.json", tmp_path, huge, renamed, vocabulary, broken):
        with pytest.raises(BadRequest) as refused:
            read_model(path)
        assert str(path) in refused.value.message


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["full_attention", "mamba", "bfloat16", "gptq"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*LLAMA, "bits", "quant_method", "weights"]), inner, max_size=4),
    max_leaves=8,
)
_names = st.sampled_from([
    *LLAMA, "layer_types", "sliding_window", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank", "qk_rope_head_dim",
    "quantization_config", "text_config", "vision_config", "full_attention_interval", "linear_num_value_heads", "mamba_d_state", "linear_attn_config",
    "attention_chunk_size", "no_rope_layers", "hybrid_override_pattern", "moe_layer_freq", "num_kv_shared_layers", "head_dim", "global_head_dim",
])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(_names, _values, max_size=6))
def test_any_config_is_a_model_or_a_refusal(changes: dict[str, Any]) -> None:
    """Whatever a config says, it is read or refused with a message; nothing else comes out."""
    try:
        made = read(**changes)
    except BadRequest:
        return
    assert total_bytes(made) > 0
