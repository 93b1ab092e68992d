"""One training step with plugs: each technique leaves the gradients alone, and changes the bytes
as it claims. A technique that does nothing fails its claim."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from close import assert_close
from quick import quick
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memlab
from memlab.lora import LoRALinear, added_weights
from memlab.losses import chunk_rows
from memlab.model import PRESETS
from memlab.offload.layers import stream_of
from memlab.qlora import NF4Linear
from memlab.quantize import nf4_bytes, quantize_nf4
from memlab.trace import Trace
from memlab.train import (
    SEED,
    TECHNIQUES,
    Plugs,
    Setting,
    build,
    combined,
    dry_trace,
    measured,
    of_all_weights,
    rank_step,
)

FLOAT32 = 4
TINY = Setting("tiny", batch=4, seq_len=64)
PLAIN = combined("plain")
NOTHING = Plugs()

B, T = TINY.batch, TINY.seq_len
CONFIG = PRESETS["tiny"]
_C, _KV_D = CONFIG.hidden_size, CONFIG.kv_heads * CONFIG.head_dim
_HIDDEN = CONFIG.intermediate_size
# The inputs and outputs of a block's seven matrices.
MATRICES = [
    *((_C, _C), (_C, _KV_D), (_C, _KV_D), (_C, _C)),
    *((_C, _HIDDEN), (_C, _HIDDEN), (_HIDDEN, _C)),
]
H, L, N = CONFIG.heads, CONFIG.layers, CONFIG.parameters
STREAM_BYTES = B * T * CONFIG.hidden_size * FLOAT32  # what passes from block to block


def each_block(wrap: Callable[[nn.Module], None]) -> Callable[[nn.Module], object]:
    """The change of a model that wraps every block of it."""
    return lambda model: [wrap(block) for block in model.blocks]


def checkpoint_block(block: nn.Module) -> None:
    """By torch."""
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@pytest.fixture(autouse=True)
def deeper_preset(monkeypatch):
    """The tiny model with two blocks more."""
    monkeypatch.setitem(PRESETS, "deeper", replace(CONFIG, layers=L + 2))


def second_step(technique: Plugs, setting: Setting = TINY) -> Trace:
    training = build(setting, technique)
    training.step()
    return memlab.measure(training.step, model=training.model, optimizer=training.optimizer)


def gradients(technique: Plugs, setting: Setting = TINY) -> dict[str, torch.Tensor]:
    """Of the first step."""
    training = build(setting, technique)
    training.step()
    return {name: p.grad for name, p in training.model.named_parameters()}


def most(trace: Trace, category: str) -> int:
    """The most bytes of the category alive at once."""
    alive = peak = 0
    for event in trace.events:
        alive += event.bytes * (event.category == category)
        peak = max(peak, alive)
    return peak


def quadratic_part(technique: Plugs, category: str) -> float:
    """The factor of T² in the most bytes of the category, by three lengths in equal steps."""
    step = T // 4
    short, middle, long = (
        most(second_step(technique, replace(TINY, seq_len=n)), category)
        for n in (T - 2 * step, T - step, T)
    )
    return (long - 2 * middle + short) / (2 * step**2)


# ------------------------------------------------------------------ values

# How far a gradient may be from the plain step's, as a share of its weight's largest.
REORDERED = 256 * torch.finfo(torch.float32).eps  # sums in another order
TOLERANCES = {
    "checkpointing": 0,  # the same kernels on the same numbers
    "sqrt-checkpointing": 0,
    "selective-checkpointing": 0,
    "int8-activations": 0.03,
    "int4-activations": 0.4,
    "autocast": 0.03,  # bfloat16 keeps 8 bits
    "loss-scaling": 0.004,  # float16 keeps 11
    "fp8": 0.4,  # E4M3 keeps 4 bits, E5M2 3
    "bfloat16": 0.03,  # weights, too
    "eager-attention": REORDERED,
    "flash-attention": REORDERED,
    "chunked-loss": REORDERED,
    "foreach-adamw": 0,  # these change what happens after backward
    "fused-adamw": 0,
    "accumulation": REORDERED,
    "adam8bit": 0,
    "lion": 0,
    "lion8bit": 0,
    "adam-mini": 0,
    "muon": 0,
    "galore": 0,
    "apollo-mini": 0,
    "offloaded-optimizer": 0,
    "offloaded-activations": 0,
    "post-hoc-ema": 0,
    "sgd": 0,
    "momentum-sgd": 0,
}


def error(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest value of the same tensor."""
    errors = [(ours[n] - right).abs().max() / right.abs().max() for n, right in wanted.items()]
    return max(errors).item()


@pytest.mark.parametrize(("name", "tolerance"), [("lora", REORDERED), ("qlora", 0.5)])
def test_lora_has_the_gradients_of_its_two_factors(name, tolerance):
    """At first B is zero: the gradient of B is scale · G Aᵀ, and A's gradient is zero. In 4 bits, G
    comes from rounded weights."""
    plain, ours = gradients(PLAIN), build(TINY, combined(name))
    ours.step()
    changes = {n: m for n, m in ours.model.named_modules() if isinstance(m, LoRALinear)}
    assert len(changes) == 7 * L
    start = build(TINY, combined(name)).model
    for name, layer in changes.items():
        A = start.get_submodule(name).down
        expected = layer.scale * plain[f"{name}.weight"] @ A.T
        assert error({name: layer.up.grad}, {name: expected}) <= tolerance
        assert layer.down.grad.count_nonzero() == 0


def test_master_weights_have_the_gradients_in_float32():
    plain, ours = gradients(PLAIN), build(TINY, combined("master-weights"))
    ours.step()
    (group,) = ours.optimizer.param_groups
    for wanted, copy in zip(plain.values(), group["params"], strict=True):
        assert copy.grad.dtype == torch.float32
        assert error({"": copy.grad}, {"": wanted}) <= TOLERANCES["bfloat16"]


def test_stepped_in_backward_the_weights_are_those_of_the_plain_step():
    ours, plain = (build(TINY, combined(name)) for name in ("step-in-backward", "plain"))
    for training in (ours, plain):
        training.step()
        training.step()
    pairs = zip(ours.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(our, their) for our, their in pairs)


def test_streamed_the_weights_are_those_of_the_plain_step():
    ours, plain = (build(TINY, combined(name)) for name in ("streamed-layers", "plain"))
    for training in (ours, plain):
        training.step()
        training.step()
    with all_present(ours.model):
        pairs = zip(ours.model.parameters(), plain.model.parameters(), strict=True)
        assert all(torch.equal(our, their) for our, their in pairs)


def all_present(model: nn.Module) -> AbstractContextManager[None]:
    """Has the weights of streamed layers on the device."""
    streams = {stream_of(weight) for weight in model.parameters()} - {None}
    return streams.pop().present() if streams else nullcontext()


@pytest.mark.few(7)
@pytest.mark.parametrize("name", TOLERANCES)
def test_a_technique_has_the_gradients_of_the_plain_step(name):
    plain, ours = gradients(PLAIN), gradients(combined(name))
    assert error(ours, plain) <= TOLERANCES[name]


@pytest.mark.parametrize("name", ["foreach-adamw", "fused-adamw"])
def test_every_adamw_of_torch_makes_the_same_weights(name):
    plain, ours = build(TINY, PLAIN), build(TINY, combined(name))
    for training in (plain, ours):
        training.step(), training.step()
    assert_close(list(ours.model.parameters()), list(plain.model.parameters()))


# ------------------------------------------------------------------ bytes


def blocks_keep_only_their_inputs(technique: Plugs) -> None:
    """Two blocks more add their two inputs to what is alive when backward starts."""
    deeper = second_step(technique, replace(TINY, model="deeper"))
    grown = most(deeper, "activations") - most(second_step(technique), "activations")
    assert grown == 2 * STREAM_BYTES


def a_block_keeps_its_activations_in(bits: int):
    """21 times its input's numbers, of 32 bits each, and two for each 256 of them; queries, keys
    and values in 8 at least. The norms' and attention's sums for each token stay in 32."""

    def claim(technique: Plugs) -> None:
        deeper = second_step(technique, replace(TINY, model="deeper"))
        grown = most(deeper, "activations") - most(second_step(technique), "activations")
        sums = (2 + H) / CONFIG.hidden_size
        inputs = 21 * (bits / 32 + 1 / 256) + 2 * (8 - bits) / 32 + sums
        assert grown == 2 * inputs * STREAM_BYTES

    return claim


def linear_layers_keep_a_byte_per_element(technique: Plugs) -> None:
    """In float32 the linear layers of a block keep two norms' outputs and the input of `down`. In
    FP8 it is these and the output layer's input, each with a scale."""
    kept = [
        alive_before_backward(which, "deeper") - alive_before_backward(which, "tiny")
        for which in (PLAIN, technique)
    ]
    a_token = 2 * CONFIG.hidden_size + CONFIG.intermediate_size
    copies = a_token + CONFIG.heads * CONFIG.head_dim
    saved = B * T * (FLOAT32 * a_token - copies) - 4 * FLOAT32
    assert kept[0] - kept[1] == 2 * saved


def segments_keep_only_their_inputs(technique: Plugs) -> None:
    """Five blocks more are three segments of three in place of two of two: one input more is kept
    when backward starts, and then a block more at a time."""
    monkey = pytest.MonkeyPatch()
    monkey.setitem(PRESETS, "nine", replace(CONFIG, layers=9))
    nine, four = (alive_before_backward(technique, model) for model in ("nine", "tiny"))
    monkey.undo()
    assert nine - four == STREAM_BYTES


def blocks_keep_their_products_and_attention(technique: Plugs) -> None:
    """Each block's input, q, k and v, attention's output and log-sum-exp, its projection, and the
    first two products of the MLP."""
    deeper, tiny = (alive_before_backward(technique, model) for model in ("deeper", "tiny"))
    C, KV_D, hidden = (
        CONFIG.hidden_size,
        CONFIG.kv_heads * CONFIG.head_dim,
        CONFIG.intermediate_size,
    )
    a_token = C + (C + 2 * KV_D) + (C + H) + C + 2 * hidden
    assert deeper - tiny == 2 * B * T * a_token * FLOAT32


def alive_before_backward(technique: Plugs, model: str) -> int:
    """Bytes, in a second step."""
    return kept_for_backward(second_step(technique, replace(TINY, model=model)))


def kept_for_backward(trace: Trace) -> int:
    """Activations, when the first gradient is made."""
    alive = 0
    for event in trace.events:
        if event.phase == "backward":
            break
        alive += event.bytes * (event.category == "activations")
    return alive


def matrix_products_of_the_forward_pass_are(dtype: str, technique: Plugs) -> None:
    products = {
        event.dtype
        for event in second_step(technique).events
        if event.operator == "aten.mm.default" and event.phase == "forward" and event.bytes > 0
    }
    assert products == {dtype}


def weights_gradients_and_state_take(weight: int, gradient: int, state: int):
    """Bytes for each weight, at the end of a step."""

    def claim(technique: Plugs) -> None:
        at_end = second_step(technique).at_end
        assert at_end["parameters"] == weight * N
        assert at_end["gradients"] == gradient * N
        assert 0 <= at_end["optimizer_state"] - state * N <= FLOAT32 * 9 * (L + 1)  # steps, counted

    return claim


def moments_take(in_8_bits: int, in_float32: int, codes: int):
    """A moment of each weight with at least 4096 elements is a byte, plus a scale for each 256. A
    codebook is 1 KiB, and its look-up table 65."""

    def claim(technique: Plugs) -> None:
        sizes = [p.numel() for p in build(TINY, PLAIN).model.parameters()]
        large = [n for n in sizes if n >= 4096]
        small = sum(sizes) - sum(large) if in_8_bits else sum(sizes)
        scales = sum(-(-n // 256) for n in large)
        expected = in_8_bits * (sum(large) + FLOAT32 * scales) + in_float32 * FLOAT32 * small
        assert second_step(technique).at_end["optimizer_state"] == expected + 66 * 1024 * codes

    return claim


def the_second_moment_is_one_for_each_row_or_head(technique: Plugs) -> None:
    C, KV_D, D, hidden = CONFIG.hidden_size, CONFIG.kv_heads * CONFIG.head_dim, CONFIG.head_dim, 96
    of_a_block = C // D + KV_D // D + KV_D + C + 2 * hidden + C + 2  # q, k, v, output, MLP, norms
    blocks = CONFIG.vocab_size + 1 + L * of_a_block
    assert second_step(technique).at_end["optimizer_state"] == FLOAT32 * (N + blocks)


def matrices_keep(elements: Callable[[int, int], int]):
    """Numbers for a block's matrix, by its short and its long side; two for all other weights."""

    def claim(technique: Plugs) -> None:
        in_matrices = L * sum(columns * rows for columns, rows in MATRICES)
        kept = L * sum(elements(min(shape), max(shape)) for shape in MATRICES)
        expected = kept + 2 * (N - in_matrices)
        assert second_step(technique).at_end["optimizer_state"] == FLOAT32 * expected

    return claim


def no_gradient_is_left_and_no_two_are_there_at_once(technique: Plugs) -> None:
    trace = second_step(technique)
    assert "gradients" not in trace.at_end
    assert (
        most(trace, "gradients") == CONFIG.vocab_size * CONFIG.hidden_size * FLOAT32
    )  # the largest


def the_state_is_there_in_the_step_alone(technique: Plugs) -> None:
    """But for a count of steps for each weight."""
    plain, ours = second_step(PLAIN), second_step(technique)
    tensors = len(list(build(TINY, PLAIN).model.parameters()))
    assert ours.at_end["optimizer_state"] == tensors * FLOAT32
    assert most(ours, "optimizer_state") == 2 * N * FLOAT32 + tensors * FLOAT32
    assert plain.peak_phase == ours.peak_phase == "backward"
    assert plain.peak_bytes - ours.peak_bytes == 2 * N * FLOAT32


def nothing_is_kept_but_sums_of_each_token(technique: Plugs) -> None:
    """Of norms and of each head of attention; the loss, and the number of its targets."""
    kept = kept_for_backward(second_step(technique))
    assert kept == (B * T * ((2 * L + 1) + L * H) + 2) * FLOAT32


def two_blocks_weights_are_there_and_neither_gradients_nor_state(technique: Plugs) -> None:
    """Beside the embedding and the last norm; between steps not even those two."""
    trace = second_step(technique)
    rest = (CONFIG.vocab_size + 1) * CONFIG.hidden_size
    block = (N - rest) // L
    before_the_step = [event for event in trace.events if event.phase != "optimizer"]
    assert most(replace(trace, events=before_the_step), "parameters") == (
        (rest + 2 * block) * FLOAT32
    )
    assert trace.at_end["parameters"] == rest * FLOAT32
    assert "gradients" not in trace.at_end
    assert trace.at_end["optimizer_state"] == (9 * L + 2) * FLOAT32  # counts of steps


def each_head_keeps_its_weights_and_each_block_its_mask(technique: Plugs) -> None:
    assert quadratic_part(technique, "activations") == L * (B * H * FLOAT32 + 1)


def attention_keeps_what_torch_s_kernel_does_without_it(technique: Plugs) -> None:
    ours, plain = second_step(technique), second_step(PLAIN)
    assert kept_for_backward(ours) == kept_for_backward(plain)
    assert not any("scaled_dot_product" in event.operator for event in ours.events)


def the_logits_are_there_a_chunk_at_a_time(technique: Plugs) -> None:
    """And their gradients are kept in their place: of the hidden states, and of the weight."""
    V, C = CONFIG.vocab_size, CONFIG.hidden_size
    of_the_loss = [e.bytes for e in second_step(technique).events if e.module == "GPT"]
    assert max(of_the_loss) == chunk_rows(B * T, V, C) * V * FLOAT32
    plain, ours = kept_for_backward(second_step(PLAIN)), kept_for_backward(second_step(technique))
    assert plain - ours == (B * T * V - B * T * C - 1) * FLOAT32  # 1: the number of targets


def the_optimizer_step_takes_as_much_as_all_weights(technique: Plugs) -> None:
    assert most(second_step(technique), "optimizer_temporaries") == N * FLOAT32


def the_optimizer_step_takes_nothing(technique: Plugs) -> None:
    assert most(second_step(technique), "optimizer_temporaries") == 0


def the_peak_is_without_two_moments_and_a_count_of_steps(technique: Plugs) -> None:
    plain, ours = second_step(PLAIN), second_step(technique)
    assert plain.peak_phase == ours.peak_phase == "backward"
    tensors = len(list(build(TINY, PLAIN).model.parameters()))
    assert plain.peak_bytes - ours.peak_bytes == 2 * N * FLOAT32 + tensors * FLOAT32


def the_state_is_a_momentum_in_bfloat16(technique: Plugs) -> None:
    assert second_step(technique).at_end["optimizer_state"] == 2 * N


def the_most_activations_are_those_of_one_sequence(technique: Plugs) -> None:
    one = most(second_step(PLAIN, replace(TINY, batch=1)), "activations")
    assert most(second_step(technique), "activations") - one in (0, FLOAT32)  # a loss times tokens


def gradients_and_state_are_those_of_the_added_weights(technique: Plugs) -> None:
    n = L * sum(added_weights(*size, 8) for size in MATRICES)
    at_end = second_step(technique).at_end
    assert at_end["gradients"] == FLOAT32 * n
    assert at_end["optimizer_state"] == 2 * FLOAT32 * n + FLOAT32 * 2 * 7 * L
    assert at_end["parameters"] == FLOAT32 * (N + n)


def the_blocks_matrices_are_in_4_bits_beside_adapters(technique: Plugs) -> None:
    n = L * sum(added_weights(*size, 8) for size in MATRICES)
    in_blocks = L * sum(columns * rows for columns, rows in MATRICES)
    codes = L * sum(nf4_bytes(columns * rows) for columns, rows in MATRICES)
    at_end, plain = second_step(technique).at_end, second_step(PLAIN).at_end
    assert at_end["gradients"] == FLOAT32 * n
    assert at_end["optimizer_state"] == 2 * FLOAT32 * n + FLOAT32 * 2 * 7 * L
    assert at_end["parameters"] == FLOAT32 * (N - in_blocks + n)
    assert at_end["buffers"] - plain["buffers"] == codes + 4 * (16 + 256)  # the codebooks


def two_averages_are_there(technique: Plugs) -> None:
    plain, ours = second_step(PLAIN), second_step(technique)
    assert ours.live_bytes - plain.live_bytes == 2 * N * FLOAT32
    assert ours.peak_bytes - plain.peak_bytes == 2 * N * FLOAT32


CLAIMS = {
    "checkpointing": blocks_keep_only_their_inputs,
    "sqrt-checkpointing": segments_keep_only_their_inputs,
    "selective-checkpointing": blocks_keep_their_products_and_attention,
    "int8-activations": a_block_keeps_its_activations_in(bits=8),
    "int4-activations": a_block_keeps_its_activations_in(bits=4),
    "autocast": partial(matrix_products_of_the_forward_pass_are, "bfloat16"),
    "loss-scaling": partial(matrix_products_of_the_forward_pass_are, "float16"),
    "fp8": linear_layers_keep_a_byte_per_element,
    "bfloat16": weights_gradients_and_state_take(2, 2, 4),
    "master-weights": weights_gradients_and_state_take(2 + 4, 4, 8),
    "eager-attention": each_head_keeps_its_weights_and_each_block_its_mask,
    "flash-attention": attention_keeps_what_torch_s_kernel_does_without_it,
    "chunked-loss": the_logits_are_there_a_chunk_at_a_time,
    "foreach-adamw": the_optimizer_step_takes_as_much_as_all_weights,
    "fused-adamw": the_optimizer_step_takes_nothing,
    "accumulation": the_most_activations_are_those_of_one_sequence,
    "adam8bit": moments_take(in_8_bits=2, in_float32=2, codes=2),
    "lion": moments_take(in_8_bits=0, in_float32=1, codes=0),
    "lion8bit": moments_take(in_8_bits=1, in_float32=1, codes=1),
    "adam-mini": the_second_moment_is_one_for_each_row_or_head,
    "muon": matrices_keep(lambda short, long: short * long),
    "galore": matrices_keep(lambda short, long: _C // 4 * (short + 2 * long)),
    "apollo-mini": matrices_keep(lambda short, long: 2 * long + 1),
    "step-in-backward": no_gradient_is_left_and_no_two_are_there_at_once,
    "lora": gradients_and_state_are_those_of_the_added_weights,
    "qlora": the_blocks_matrices_are_in_4_bits_beside_adapters,
    "offloaded-optimizer": the_state_is_there_in_the_step_alone,
    "offloaded-activations": nothing_is_kept_but_sums_of_each_token,
    "streamed-layers": two_blocks_weights_are_there_and_neither_gradients_nor_state,
    "post-hoc-ema": two_averages_are_there,
    "sgd": the_peak_is_without_two_moments_and_a_count_of_steps,
    "momentum-sgd": the_state_is_a_momentum_in_bfloat16,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CLAIMS)
def test_a_technique_changes_the_bytes_as_it_claims(name):
    CLAIMS[name](combined(name))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CLAIMS)
def test_a_technique_that_does_nothing_fails_the_claim(name):
    with pytest.raises(AssertionError):
        CLAIMS[name](NOTHING)


def test_every_technique_has_a_claim_and_a_tolerance():
    assert CLAIMS.keys() == TECHNIQUES.keys() - {"plain"}
    in_tests_of_their_own = {
        *("lora", "qlora", "master-weights", "step-in-backward", "streamed-layers"),
    }
    assert TOLERANCES.keys() == CLAIMS.keys() - in_tests_of_their_own


def test_the_plain_adamw_takes_twice_the_largest_weight():
    largest = max(p.numel() for p in build(TINY, PLAIN).model.parameters())
    assert most(second_step(PLAIN), "optimizer_temporaries") == 2 * largest * FLOAT32


def test_the_plain_attention_keeps_nothing_that_grows_with_the_square_of_the_length():
    assert quadratic_part(PLAIN, "activations") == 0


@pytest.mark.parametrize(("smaller", "larger"), [("checkpointing", "plain"), ("autocast", "plain")])
def test_what_saves_activations_has_the_lower_peak(smaller, larger):
    peaks = [second_step(combined(name)).peak_bytes for name in (smaller, larger)]
    assert peaks[0] < peaks[1]


@pytest.mark.few(12)
@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_takes_a_model_with_an_unembedding_of_its_own(name, monkeypatch):
    monkeypatch.setitem(PRESETS, "untied", replace(CONFIG, tied=False))
    build(Setting("untied", 2, 8), combined(name)).step()


# ------------------------------------------------------------------ checkpointing


def calls_of_each_block(technique: Plugs) -> list[int]:
    """How often each block's MLP began in one step: a recomputation stops as soon as it has what
    backward needs, so the last module does not come to its end."""
    training, calls = build(TINY, technique), Counter()
    for index in range(L):
        block = training.model.blocks[index]
        block.mlp.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
    training.step()
    return [calls[index] for index in range(L)]


def test_the_plain_step_computes_each_block_once():
    assert calls_of_each_block(PLAIN) == [1] * L


def test_checkpointing_computes_each_block_twice():
    assert calls_of_each_block(combined("checkpointing")) == [2] * L
    assert calls_of_each_block(combined("sqrt-checkpointing")) == [2] * L


def test_checkpointing_has_the_bytes_of_torch_s():
    torchs = replace(NOTHING, change_model=each_block(checkpoint_block))
    assert second_step(combined("checkpointing")).peak_bytes == second_step(torchs).peak_bytes


def test_a_wrapper_that_only_calls_the_block_does_not_pass_as_checkpointing():
    def only_call(block):
        forward = block.forward
        block.forward = lambda *args: forward(*args)

    with pytest.raises(AssertionError):
        blocks_keep_only_their_inputs(replace(NOTHING, change_model=each_block(only_call)))


def test_a_wrapper_that_leaves_a_block_out_does_not_pass_as_checkpointing():
    wrapped = []

    def every_second(block):
        wrapped.append(block)
        if len(wrapped) % 2:
            checkpoint_block(block)

    with pytest.raises(AssertionError):
        blocks_keep_only_their_inputs(replace(NOTHING, change_model=each_block(every_second)))


# ------------------------------------------------------------------ the training


def test_every_technique_starts_from_the_same_weights():
    def weights(technique):
        model = build(TINY, technique).model
        with all_present(model):
            named = [(n, p.detach().clone()) for n, p in model.named_parameters()]
        of_the_model = {n.replace(".frozen", ""): p.flatten() for n, p in named}
        for name, layer in model.named_modules():
            if isinstance(layer, NF4Linear):  # put in what was rounded, if it was that
                weight = gpt.get_submodule(name.removesuffix(".frozen")).weight.detach()
                assert torch.equal(layer.codes, quantize_nf4(weight).codes)
                of_the_model[f"{name.removesuffix('.frozen')}.weight"] = weight.flatten()
        return torch.cat([of_the_model[name] for name, _ in gpt.named_parameters()])

    gpt = build(TINY, PLAIN).model

    torch.manual_seed(SEED + 1)
    plain = weights(PLAIN)
    for technique in TECHNIQUES.values():
        ours = weights(technique)
        assert torch.equal(ours, plain.to(ours.dtype))


def test_a_step_changes_the_weights():
    training = build(TINY, PLAIN)
    before = [p.clone() for p in training.model.parameters()]
    training.step()
    assert not any(map(torch.equal, before, training.model.parameters()))


OF_EACH_PLUG = ("plain", "checkpointing", "autocast", "chunked-loss", "lora", "adam8bit")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(OF_EACH_PLUG, TECHNIQUES))
def test_a_dry_trace_is_that_of_a_second_step(name):
    setting = Setting(replace(CONFIG, layers=2), batch=2, seq_len=16)
    with memlab.dry_run():
        training = build(setting, combined(name))
        training.step()
        wanted = measured(training)
    assert events_of(dry_trace(setting, combined(name))) == events_of(wanted)


def events_of(trace):
    """What was there before, in whatever order it was made; then each event in its order."""
    events = [(event.bytes, event.category, event.phase, event.module) for event in trace.events]
    before = [event for event in events if event[2] == "before"]
    return sorted(before), [event for event in events if event[2] != "before"]


def test_the_second_step_does_not_add_to_the_gradients_of_the_first():
    """With a learning rate of 0 both steps are the same."""
    standing = replace(PLAIN, optimizer=of_all_weights(torch.optim.SGD, lr=0.0))
    training = build(TINY, standing)
    training.step()
    first = [p.grad.clone() for p in training.model.parameters()]
    training.step()
    assert all(map(torch.equal, first, (p.grad for p in training.model.parameters())))


def test_the_weights_have_the_dtype_of_the_setting():
    training = build(replace(TINY, dtype=torch.bfloat16), PLAIN)
    assert {p.dtype for p in training.model.parameters()} == {torch.bfloat16}


def test_the_batch_has_the_size_of_the_setting():
    trace = second_step(PLAIN)
    tokens_and_targets = 2 * B * T * torch.int64.itemsize
    assert trace.at_peak["inputs"] == tokens_and_targets


# ------------------------------------------------------------------ the setting


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "24m"}, "got model '24m'; choose one of tiny, 5m, 25m"),
        ({"seq_len": 0}, "got sequences of 0 tokens; tiny takes 1 to 64"),
        ({"seq_len": 65}, "got sequences of 65 tokens; tiny takes 1 to 64"),
        ({"batch": 0}, "got a batch of 0 sequences; give at least 1"),
    ],
)
def test_a_setting_that_cannot_be_says_what_was_got_and_what_is_wanted(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **wrong)


def test_a_setting_reads_as_a_title():
    assert str(TINY) == "tiny, 4 × 64 tokens, float32, cpu"


# ------------------------------------------------------------------ several at once


def test_techniques_combine_plug_by_plug():
    """Checkpointing in autocast's forward pass, one sequence at a time: the bytes of all three."""
    names = ("checkpointing", "autocast", "accumulation")
    technique = combined("+".join(names))
    matrix_products_of_the_forward_pass_are("bfloat16", technique)
    assert technique.micro_batch == 1
    alone = [most(second_step(combined(n)), "activations") for n in names]
    assert most(second_step(technique), "activations") < min(alone)
    plain, ours = gradients(PLAIN), gradients(technique)
    assert error(ours, plain) <= TOLERANCES["autocast"]


@pytest.mark.parametrize(
    "others",
    quick(
        ["int4-activations"],
        ["selective-checkpointing", "checkpointing", "int4-activations", "bfloat16", "lora"],
    ),
)
def test_flash_attention_keeps_what_torch_s_kernel_does_beside_any_other_technique(others):
    ours, theirs = combined(f"{others}+flash-attention"), combined(others)
    assert kept_for_backward(second_step(ours)) == kept_for_backward(second_step(theirs))


@pytest.mark.parametrize("others", ["autocast", "loss-scaling", "accumulation", "bfloat16"])
def test_beside_others_the_chunked_loss_has_their_gradients(others):
    ours, theirs = gradients(combined(f"{others}+chunked-loss")), gradients(combined(others))
    assert error(ours, theirs) <= max(REORDERED, TOLERANCES[others])


def test_two_changes_of_the_model_are_both_made():
    model = build(TINY, combined("lora+bfloat16")).model
    assert any(isinstance(module, LoRALinear) for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_combined_with_nothing_a_technique_is_itself():
    alone, beside_plain = combined("sgd+lora"), combined("plain+lora+sgd")
    filled = {field.name for field in fields(Plugs)}
    same = {name for name in filled if getattr(alone, name) is getattr(beside_plain, name)}
    assert filled - same == {"change_model", "optimizer"}  # made anew by each call
    assert alone.optimizer.__code__ is beside_plain.optimizer.__code__


def test_two_techniques_for_one_plug_are_refused():
    with pytest.raises(ValueError, match="fused-adamw and sgd each bring their own optimizer"):
        combined("fused-adamw+autocast+sgd")


def test_a_scaled_loss_in_micro_batches_overflows_no_more_than_in_one():
    training = build(TINY, combined("loss-scaling+accumulation"))
    training.step()
    assert training.optimizer.state  # the first step was taken, not skipped


@pytest.mark.parametrize(
    "plugs",
    [
        Plugs(stepping=lambda optimizer: optimizer),
        Plugs(after_step=lambda model: lambda: None),
        *(combined(name) for name in ("step-in-backward", "offloaded-optimizer", "post-hoc-ema")),
    ],
)
def test_plugs_that_ranks_cannot_run_are_refused_even_if_handmade(plugs):
    with pytest.raises(ValueError, match=r"; leave (step-in-backward|post-hoc-ema)"):
        rank_step(TINY, plugs, 2, 1)
