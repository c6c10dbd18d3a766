"""The arithmetic: blocks of the KV cache by kind of layer, what tensor and pipeline parallelism cut and copy, the other terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.errors import BadRequest
from tidegate.sizing import memory
from tidegate.sizing.cache import Cells, layout
from tidegate.sizing.cards import CARDS, Card, find_card
from tidegate.sizing.hf_model import from_config
from tidegate.sizing.memory import GIB, Engine
from tidegate.sizing.model_config import Attention, Latent, Layer, Mixer, Mlp, Model, Recurrent
from tidegate.sizing.plan import Plan, plan
from tidegate.sizing.rank import Wish, tightest
from tidegate.sizing.rules import broken_rules
from tidegate.sizing.serving import read_bytes
from tidegate.sizing.weights import kv_heads_of, stages, total_bytes, weight_bytes

FULL = Attention(32, 8, 128, 128)
WINDOW = replace(FULL, window=1024)
LATENT = Latent(16, 512, 64, 128, 128, 0)
#: Qwen3.6 27B's gated delta net.
DELTA = Recurrent(48, 128, 128, 10240, 4, 1)
H100 = find_card("H100")
ENGINE = Engine("vllm", (0, 19), 8192, 1024, 0.9)


def layers(*mixers: Mixer) -> list[Layer]:
    return [Layer((mixer,), Mlp(1024)) for mixer in mixers]


def cache(*mixers: Mixer, tp: int = 1, bits: float = 16, **changes: Any) -> Any:
    return layout(layers(*mixers), tp=tp, kv_bits=bits, state_dtype_bytes=2, **changes)


def llama(**changes: Any) -> Model:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    }  # fmt: skip
    return from_config({**config, **changes}, "config.json", name="model")


def planned(model: Model, card: Card = H100, engine: Engine = ENGINE, **changes: Any) -> Plan:
    return plan(model, Wish(card, engine, **changes))


# -- cards --


def test_a_card_is_found_however_its_name_is_written() -> None:
    """Labels differ in case, dashes and the maker's name; an unknown one is refused with the known ones."""
    assert {find_card(name).name for name in ("RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "4090")} == {"RTX-4090"}
    with pytest.raises(BadRequest, match="RTX-4091"):
        find_card("RTX-4091")


def test_no_card_shows_what_its_label_says() -> None:
    """What a program sees is less than the label, and each figure has a source."""
    assert all(card.source for card in CARDS)
    assert all(card.source.startswith("https://") for card in CARDS if card.measured)
    labels = {"H100": 80, "A100-80GB": 80, "A100-40GB": 40, "T4": 16, "A10": 24, "L40S": 48, "RTX-4090": 24, "RTX-5090": 32, "B200": 192}
    assert all(0.85 * label < find_card(name).visible_gib < label for name, label in labels.items())


# -- the cache --


def test_bytes_of_a_token_follow_the_formula() -> None:
    """Two times heads times dimension times bytes, for each layer; half of it in 8 bits."""
    assert cache(FULL, FULL).token_bytes == 2 * 2 * 8 * 128 * 2
    assert cache(FULL, FULL, bits=8).token_bytes == 2 * 2 * 8 * 128


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_heads_of_keys_and_values_are_divided_then_copied(tp: int, heads: int) -> None:
    """With more ranks than heads every rank still holds one: the cache stops shrinking."""
    assert kv_heads_of(8, tp) == heads
    assert cache(FULL, tp=tp).token_bytes == 2 * heads * 128 * 2


def test_a_latent_cache_is_whole_on_every_rank() -> None:
    """One vector of rank + rope numbers for all heads, however many ranks there are."""
    assert cache(LATENT).token_bytes == cache(LATENT, tp=8).token_bytes == (512 + 64) * 2


def test_a_window_holds_its_window_and_a_step() -> None:
    """Beyond the window and what one step adds, longer requests need no more blocks of it."""
    made = cache(FULL, WINDOW, step_tokens=2048)
    grown = made.blocks_of(100_000) - made.blocks_of(50_000)
    assert grown == 50_000 // 16
    alone = cache(WINDOW, step_tokens=2048)  # one block more, because a window need not begin where a block does
    assert alone.blocks_of(100_000) == -(-(1023 + 2048) // 16) + 1
    assert cache(replace(WINDOW, chunked=True), step_tokens=2048).blocks_of(100_000) == (1024 + 2048) // 16
    assert cache(FULL, WINDOW, step_tokens=2048, hybrid=False).blocks_of(100_000) * 2 == 2 * 100_000 // 16


def test_layers_that_read_another_ones_cache_hold_none() -> None:
    """Gemma 3n's last layers cost nothing."""
    assert cache(FULL, replace(FULL, owns_cache=False)).token_bytes == cache(FULL).token_bytes


def test_beside_a_state_blocks_grow_to_its_size() -> None:
    """Qwen3.6 27B in 8 bits has blocks of 1568 tokens on one card (noonghunna/club-3090, issue 1047, prints it), padded to a multiple of 16."""
    attention = Attention(24, 4, 256, 256)
    made = cache(*[DELTA, DELTA, DELTA, attention] * 16, bits=8)
    assert made.block_tokens == 1568
    assert made.stride == 16
    assert made.copies == 4


def test_a_mamba_state_is_kept_in_the_models_type() -> None:
    """Nemotron Nano 9B v2 has blocks of 672 tokens (vllm-project/vllm, issue 24280, names it)."""
    mamba = Recurrent(128, 80, 128, 128 * 80 + 2 * 8 * 128, 4, 1, 2)
    assert cache(*[mamba] * 27, *[Attention(40, 8, 128, 128)] * 4).block_tokens == 672


def test_a_state_costs_the_same_whatever_the_length() -> None:
    """Prefix caching keeps a second state, a drafted token one more each."""
    made = cache(DELTA, DELTA, prefix_caching=False)
    assert made.blocks_of(1) == made.blocks_of(1_000_000) == 1
    assert cache(DELTA, prefix_caching=True).blocks_of(5) == 2
    assert cache(DELTA, prefix_caching=True, draft_tokens=3).blocks_of(5) == 5


def test_kinds_in_equal_number_are_padded_rather_than_split() -> None:
    """12 and 13 layers share blocks of 13; 10 and 52 are groups of ten, the last one padded."""
    assert cache(*[WINDOW] * 12, *[FULL] * 13).stride == 13
    split = cache(*[FULL] * 10, *[WINDOW] * 52)
    assert (split.stride, split.copies) == (10, 7)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([FULL, WINDOW, replace(FULL, window=8192, chunked=True), DELTA]), min_size=1, max_size=12),
    st.integers(0, 1 << 20), st.integers(1, 1 << 20), st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_the_longest_request_fits_and_one_more_token_does_not(mixers: list[Mixer], blocks: int, tokens: int, tp: int) -> None:
    """`longest` is the border: at it the blocks suffice, behind it they do not; more tokens never need fewer blocks."""
    made = cache(*mixers, tp=tp)
    longest = made.longest(blocks)
    assert made.blocks_of(longest) <= blocks or longest == 0
    assert longest == 1 << 31 or made.blocks_of(longest + 1) > blocks
    assert made.blocks_of(tokens) <= made.blocks_of(tokens + 1)


def test_llama_cpp_holds_cells_for_every_sequence() -> None:
    """The sizes that llama.cpp printed for gpt-oss 120B (ollama/ollama, issue 16480): 4608 MiB of full and 45 MiB of windowed cells a sequence."""
    full, window = Attention(64, 8, 64, 64), Attention(64, 8, 64, 64, window=128)
    assert Cells(tuple(layers(*[full] * 18)), 16, 1024).blocks_of(131072) == 4608 << 20
    assert Cells(tuple(layers(*[window] * 18)), 16, 1024).blocks_of(131072) == 45 << 20


# -- cutting --


def test_stages_are_cut_as_the_engine_cuts_them() -> None:
    """What is left over goes to the last stages but one, so that the one with the output is not the largest."""
    assert stages(32, 4) == [(0, 8), (8, 16), (16, 24), (24, 32)]
    assert [last - first for first, last in stages(30, 4)] == [7, 8, 8, 7]
    assert [last - first for first, last in stages(31, 4)] == [8, 8, 8, 7]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 400), st.integers(1, 16))
def test_stages_hold_every_layer_once(count: int, pp: int) -> None:
    """No layer is lost or doubled, and stages differ by one layer at most."""
    cut = stages(count, min(pp, count))
    assert [number for first, last in cut for number in range(first, last)] == list(range(count))
    assert max(last - first for first, last in cut) - min(last - first for first, last in cut) <= 1


def test_ranks_and_stages_together_hold_the_model() -> None:
    """What ranks hold adds up to the model, and copies of heads make it more, never less."""
    model = llama()
    whole = total_bytes(model)
    assert weight_bytes(model, 1, 0, 16) + weight_bytes(model, 1, 16, 32) == pytest.approx(whole)
    assert 2 * weight_bytes(model, 2, 0, 32) == pytest.approx(whole, rel=0.001)
    assert 32 * weight_bytes(model, 32, 0, 32) > 1.02 * whole


@pytest.mark.parametrize(
    ("changes", "tp", "named"),
    [
        ({"num_attention_heads": 40, "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17400}, 5, "vocabulary"),
        ({}, 3, "32 attention heads"),
        ({"num_attention_heads": 36, "num_key_value_heads": 4, "hidden_size": 4608}, 6, "neither be cut into 6 nor copied"),
        ({"intermediate_size": 14337}, 2, "14337 wide"),
    ],
)
def test_what_cannot_be_cut_fails_with_the_reason(changes: dict[str, Any], tp: int, named: str) -> None:
    """Heads, vocabulary and width must divide, as the engine demands at start; then the verdict is a fail, whatever the memory."""
    made = planned(llama(**changes), tp=tp)
    assert made.verdict == "fails"
    assert named in " ".join(made.why)
    assert made.what_if == []


def test_a_vocabulary_is_padded_before_it_is_cut() -> None:
    """128,257 words are padded to 128,320, which two and five can divide."""
    assert not broken_rules(llama(vocab_size=128257), Wish(H100, ENGINE, tp=2))


def test_more_stages_than_layers_are_refused() -> None:
    """So is tensor parallelism of llama.cpp, and vLLM before 0.6."""
    for changes in ({"pp": 33}, {"engine": Engine("llama.cpp"), "tp": 2}, {"engine": Engine("vllm", (0, 5))}):
        with pytest.raises(BadRequest):
            plan(llama(), Wish(**{"card": H100, "engine": ENGINE, **changes}))


# -- terms --


def test_the_last_stage_samples() -> None:
    """Only the stage with the output holds logits, so it has the least room, and every stage has as many blocks as that one."""
    model = llama()
    first = memory.activation(model, model.layers[:16], ENGINE, 1, last=False, pp=2)
    last = memory.activation(model, model.layers[16:], ENGINE, 1, last=True, pp=2)
    assert first.mid < last.mid
    assert tightest(model, Wish(H100, ENGINE, pp=2)).activation == last


def test_graphs_are_inside_the_share_since_0_21() -> None:
    """Before, they came on top of it: then the pool does not shrink, and a share near one is tight."""
    new, old = replace(ENGINE, version=(0, 21)), replace(ENGINE, version=(0, 20))
    assert planned(llama(), engine=new).pool_gib < planned(llama(), engine=old).pool_gib
    assert planned(llama(), engine=replace(old, share=0.99)).verdict == "tight"
    assert planned(llama(), engine=replace(new, share=0.99, graphs=False)).verdict == "fits"


def test_stages_of_different_layers_are_computed_apart() -> None:
    """Two full layers at the end of a model of windows make the stage that holds them the tightest."""
    kinds = ["sliding_attention"] * 30 + ["full_attention"] * 2
    model = llama(layer_types=kinds, sliding_window=128)
    cut = tightest(model, Wish(H100, ENGINE, pp=4))
    assert cut.cache.token_bytes == 2 * 2 * 8 * 128 * 2


def test_a_model_without_attention_has_room_by_requests() -> None:
    """A Mamba model holds one state a request: its tokens are the requests times their length."""
    config = {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 16, "time_step_rank": 160, "vocab_size": 50280}
    made = planned(from_config(config, "config.json", name="mamba"), length=1000, prefix_caching=False)
    assert made.kv_bytes_per_token == 0
    assert made.state_bytes_per_request == 64 * 5120 * (16 + 3) * 2
    assert made.tokens == pytest.approx(made.most_requests * 1000, rel=0.001)
    assert made.verdict == "fits"


def test_fewer_sequences_capture_fewer_graphs() -> None:
    """vLLM captures batch sizes up to twice the sequences, 512 at most: 51 of them, by steps of 8 and 16; one sequence captures few."""
    model = llama()
    full = memory.graphs(model.layers, ENGINE)
    assert memory.graphs(model.layers, replace(ENGINE, sequences=256)) == full
    assert memory.graphs(model.layers, replace(ENGINE, sequences=128)).mid == pytest.approx(full.mid * 35 / 51)
    assert memory.graphs(model.layers, replace(ENGINE, graphs=False)).high == 0


def test_collective_operations_take_memory_on_cards_with_a_fabric() -> None:
    """Since vLLM 0.18, on several data-centre cards; on others, and before, less."""
    card = find_card("RTX-4090")
    new, old = memory.non_torch(ENGINE, H100, 2, 1).mid, memory.non_torch(replace(ENGINE, version=(0, 15)), H100, 2, 1).mid
    assert (new / GIB, old / GIB, memory.non_torch(ENGINE, card, 2, 1).mid / GIB) == pytest.approx((2.1, 0.55, 0.55))
    assert memory.non_torch(ENGINE, H100, 1, 1).mid < old


def test_routers_are_whole_and_unquantised_on_every_rank() -> None:
    """A router costs its full width on each of two ranks, in the model's own type."""
    model = llama(num_local_experts=128, num_experts_per_tok=8, model_type="qwen3_moe", moe_intermediate_size=768)
    bare = llama(intermediate_size=768)
    own = weight_bytes(model, 2, 0, 32) - weight_bytes(bare, 2, 0, 32)
    assert own == pytest.approx(32 * (127 * 3 * 4096 * 768 / 2 + 4096 * 128) * 2)


def test_given_sizes_take_the_place_of_computed_ones() -> None:
    """With all of them the pool is the budget less their sum, without a band."""
    made = planned(llama(), weights_gib=14.99, activation_gib=1.89, non_torch_gib=0.25, graphs_gib=0.91)
    assert made.pool_gib == pytest.approx(79.19 * 0.9 - 14.99 - 1.89 - 0.25)
    assert made.pool_low_gib == made.pool_gib == made.pool_high_gib
    assert {term.basis for term in made.terms} == {"given"}


def test_the_verdict_goes_from_fits_over_tight_to_fails() -> None:
    """As the requests become more; the margin says how far it is to the border."""
    card = find_card("RTX-4090")
    verdicts = [planned(llama(), card, concurrency=count, length=8192).verdict for count in range(1, 9)]
    assert verdicts == sorted(verdicts, key=["fits", "tight", "fails"].index)
    assert set(verdicts) == {"fits", "tight", "fails"}
    border = planned(llama(), card, length=8192)
    assert planned(llama(), card, concurrency=int(border.most_requests), length=8192).margin_gib >= 0
    assert planned(llama(), card, concurrency=int(border.most_requests) + 1, length=8192).verdict == "fails"
    # What would fit at the good end of the band alone fails: nobody plans on luck.
    assert planned(llama(), card, length=(border.tokens + border.tokens_high) // 2).verdict == "fails"


def test_weights_that_do_not_fit_say_by_how_much() -> None:
    """Seventy billion weights on one small card."""
    made = planned(llama(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64), find_card("T4"))
    assert (made.verdict, made.tokens) == ("fails", 0)
    assert "more than the budget" in made.why[0]


def test_the_reserve_is_apart() -> None:
    """1.35 times everything, beside the verdict and in none of the terms."""
    made = planned(llama(), concurrency=2, length=32768)
    inside = sum(term.gib for term in made.terms) + made.needs_gib
    assert made.reserve.needs_gib == pytest.approx(1.35 * inside)
    assert made.reserve.holds
    close = planned(llama(), find_card("RTX-4090"), length=8192)
    assert (close.verdict, close.reserve.holds) == ("fits", False)


def test_a_change_is_what_a_plan_of_it_says() -> None:
    """The rows of what-if are plans of their own."""
    made = planned(llama(), length=8192)
    rows = {row.change: row for row in made.what_if}
    assert rows["KV cache in fp8"].tokens == planned(llama(), length=8192, kv_dtype="fp8").tokens
    assert rows["tensor parallel 2"].tokens == planned(llama(), length=8192, tp=2).tokens
    assert rows["weights in int4"].weights_gib < rows["weights in fp8"].weights_gib < made.terms[0].gib
    assert "tensor parallel 0" not in rows


def test_a_load_beyond_the_bandwidth_has_no_answer() -> None:
    """Little's law: as the rate grows more run at once, until reading their caches alone takes all bandwidth."""
    slow, fast = (planned(llama(), length=8192, qps=rate).serving for rate in (1, 10))
    assert slow is not None
    assert fast is not None
    assert slow.at_once is not None
    assert fast.at_once is not None
    assert fast.at_once > 10 * slow.at_once
    assert slow.at_once == pytest.approx(slow.qps * slow.answer_tokens * (slow.step_ms or 0) / 1e3)
    too_fast = planned(llama(), length=8192, qps=1e5).serving
    assert too_fast is not None
    assert too_fast.at_once is None


def test_an_error_budget() -> None:
    """99.9 % at two requests a second leaves 172.8 failures a day, 43.2 minutes in thirty days."""
    made = planned(llama(), length=8192, qps=2, slo=99.9).serving
    assert made is not None
    assert made.budget is not None
    assert made.budget.failures_a_day == pytest.approx(172.8)
    assert made.budget.minutes_a_month == pytest.approx(43.2)
    with pytest.raises(BadRequest):
        planned(llama(), length=8192, qps=2, slo=100)


def test_a_step_reads_the_experts_that_its_tokens_chose() -> None:
    """One token reads a few experts; many tokens read all of them."""
    model = llama(num_local_experts=8, num_experts_per_tok=2, model_type="mixtral")
    assert read_bytes(model, 1) < 0.4 * total_bytes(model)
    assert read_bytes(model, 1000) == pytest.approx(total_bytes(model))
