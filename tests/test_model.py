"""The model against published counts, closed forms, and another library's Llama."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memlab.attention import attention_reference
from memlab.data import batches, source_bytes
from memlab.model import (
    GPT,
    PRESETS,
    Attention,
    GPTConfig,
    Rotary,
    cross_entropy,
    rotate,
    scaled_dot_product_attention,
)

TINY = PRESETS["tiny"]

# What each family adds to Llama's parts, with a head width other than width / heads.
FAMILIES = {
    "llama": {"attention_biases": ("query", "key", "value", "output")},
    "mistral": {"custom_head_dim": 12},
    "qwen2": {"attention_biases": ("query", "key", "value")},
    "qwen3": {"custom_head_dim": 12, "head_norms": True},
    "gemma": {"custom_head_dim": 12, "activation": "gelu_tanh", "scaled_embeddings": True},
    "gemma3_text": {
        "custom_head_dim": 12,
        "head_norms": True,
        "post_norms": True,
        "activation": "gelu_tanh",
        "scaled_embeddings": True,
    },
}

PUBLISHED_PARAMETERS = {
    "1b": 1_235_814_400,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
}


def tiny_model(*, dtype=torch.float64, attention=scaled_dot_product_attention, **changes):
    torch.manual_seed(0)
    return GPT(replace(TINY, **changes), attention=attention, dtype=dtype)


def random_tokens(batch=2, length=16, vocab_size=TINY.vocab_size):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab_size, (batch, length), generator=generator)


def count(tensors):
    return sum(tensor.numel() for tensor in tensors)


class Recorded(TorchDispatchMode):
    """Records (operator, outputs) of everything that runs inside `with`."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.calls.append((func, out.dtype, out.numel()))
        return out


# Counting


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_the_formula_gives_the_published_count(name):
    assert PRESETS[name].parameters == PUBLISHED_PARAMETERS[name]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", PRESETS)
def test_the_formula_equals_the_built_model(name):
    with torch.device("meta"):
        model = GPT(PRESETS[name])
    assert count(model.parameters()) == PRESETS[name].parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_equals_the_built_model_of_each_family(family):
    model = tiny_model(**FAMILIES[family])
    assert count(model.parameters()) == model.config.parameters > TINY.parameters


def test_untying_adds_one_matrix_of_vocabulary_by_width():
    tied, untied = TINY.parameters, replace(TINY, tied=False).parameters
    assert untied - tied == TINY.vocab_size * TINY.hidden_size


def test_the_tiny_preset_is_tiny_and_shares_its_keys():
    assert 10_000 < TINY.parameters < 100_000
    assert TINY.kv_heads < TINY.heads


def test_the_25m_preset_has_the_proportions_of_llama_3_8b():
    small, large = PRESETS["25m"], PRESETS["llama-3-8b"]
    assert small.parameters == pytest.approx(25e6, rel=0.001)
    assert small.heads // small.kv_heads == large.heads // large.kv_heads
    assert small.vocab_size / small.hidden_size == 32
    assert large.vocab_size / large.hidden_size == pytest.approx(32, rel=0.03)


def test_the_34m_preset_is_64_weights_short_of_the_published_one():
    assert PRESETS["34m"].parameters == 34_083_904 - 64


def test_one_token_more_would_put_the_34m_preset_320_over():
    one_more = replace(PRESETS["34m"], vocab_size=32_000)
    assert one_more.parameters == 34_083_904 + 320


def test_the_124m_preset_is_gpt_2_small_without_positions_and_biases():
    width, layers = 768, 12
    positions = 1024 * width
    norm_biases = (2 * layers + 1) * width
    attention_biases = layers * (3 + 1) * width
    mlp_biases = layers * (4 + 1) * width
    left_out = positions + norm_biases + attention_biases + mlp_biases
    assert PRESETS["124m"].parameters == 124_439_808 - left_out
    assert PRESETS["124m"].parameters == pytest.approx(124e6, rel=0.005)


# Values


# The names of the parts in transformers.
THEIRS = {
    "embedding": "model.embed_tokens",
    "unembedding": "lm_head",
    "blocks": "model.layers",
    "norm": "model.norm",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
# With a norm after the attention, the norm before the MLP has another name.
THEIRS_OF_GEMMA_3 = THEIRS | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, tied):
    transformers = pytest.importorskip("transformers")
    ours = tiny_model(tied=tied, **FAMILIES[family])
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(
            family,
            vocab_size=TINY.vocab_size,
            hidden_size=TINY.hidden_size,
            intermediate_size=TINY.intermediate_size,
            num_hidden_layers=TINY.layers,
            num_attention_heads=TINY.heads,
            num_key_value_heads=TINY.kv_heads,
            head_dim=ours.config.head_dim,
            max_position_embeddings=TINY.seq_len,
            rms_norm_eps=TINY.norm_eps,
            tie_word_embeddings=tied,
            attention_bias=family == "llama",
            rope_theta=TINY.rope_theta,
            query_pre_attn_scalar=ours.config.head_dim,  # Gemma 3's scale, like all others
            bos_token_id=0,  # Gemma's own ids exceed this vocabulary
            eos_token_id=1,
            pad_token_id=None,
        )
    ).double()
    names = THEIRS_OF_GEMMA_3 if family == "gemma3_text" else THEIRS
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.normal_(std=0.3)
            path = ".".join(names.get(part, part) for part in name.split("."))
            one = 1 if family.startswith("gemma") and name.endswith("norm.weight") else 0
            theirs.get_parameter(path).copy_(weight - one)  # Gemma multiplies by 1 + w
    tokens = random_tokens(length=TINY.seq_len)
    # Their tables are float32 for any dtype of the model, so the bound is too.
    assert_close(ours(tokens), theirs(tokens).logits, dtype=torch.float32)


def test_a_later_token_does_not_change_earlier_logits():
    model, tokens = tiny_model(), random_tokens()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % TINY.vocab_size
    assert_close(model(changed)[:, :10], model(tokens)[:, :10])


def test_an_earlier_token_changes_every_later_logit():
    model, tokens = tiny_model(), random_tokens()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % TINY.vocab_size
    moved = (model(changed) - model(tokens)).abs().amax(dim=-1)
    assert (moved[:, 10:] > 1e-9).all()


def test_rotated_dot_products_depend_only_on_the_distance():
    D, positions = TINY.head_dim, torch.arange(TINY.seq_len)
    cos, sin = Rotary(TINY, torch.float64).tables(TINY.seq_len, torch.float64)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64).expand(2, 1, TINY.seq_len, 1, D)
    products = rotate(q, cos, sin)[0, :, 0] @ rotate(k, cos, sin)[0, :, 0].T  # (T, T)
    distance = positions[:, None] - positions
    of_distance = {int(d): products[distance == d] for d in distance.unique()}
    assert max(float(same.max() - same.min()) for same in of_distance.values()) < 1e-12
    neighbours = [float(of_distance[d][0]) for d in range(8)]
    assert all(abs(a - b) > 1e-3 for a, b in pairwise(neighbours))


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_pair_i_turns_by_theta_to_the_minus_2i_over_d_a_position(theta):
    rotary = Rotary(replace(TINY, rope_theta=theta), torch.float64)
    cos, sin = rotary.tables(TINY.seq_len, torch.float64)
    pairs = TINY.head_dim // 2
    for position in (0, 1, 63):
        angles = [position * theta ** (-pair / pairs) for pair in range(pairs)]
        assert cos[position, 0].tolist() == pytest.approx([math.cos(a) for a in angles])
        assert sin[position, 0].tolist() == pytest.approx([math.sin(a) for a in angles])


def test_shared_keys_equal_keys_repeated_for_every_query_head():
    shared = tiny_model()
    repeated = tiny_model(kv_heads=TINY.heads)
    state = shared.state_dict()
    times = TINY.heads // TINY.kv_heads
    for name, weight in state.items():
        if name.endswith(("key.weight", "value.weight")):
            heads = weight.view(TINY.kv_heads, TINY.head_dim, TINY.hidden_size)
            state[name] = heads.repeat_interleave(times, dim=0).flatten(0, 1)
    repeated.load_state_dict(state)
    tokens = random_tokens()
    assert_close(shared(tokens), repeated(tokens))


def test_the_loss_is_the_cross_entropy_of_the_logits():
    model, tokens, targets = tiny_model(), random_tokens(), random_tokens().roll(1, 1)
    expected = F.cross_entropy(model(tokens).reshape(-1, TINY.vocab_size), targets.reshape(-1))
    assert_close(model(tokens, targets), expected)


def test_training_on_bytes_lowers_the_loss():
    model = tiny_model(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = batches(source_bytes("64 KiB"), batch=8, seq_len=32, seed=0)
    losses = []
    for _, (tokens, targets) in zip(range(40), data, strict=False):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 5.0
    assert losses[-1] < 4.0


# Initialization


@pytest.mark.parametrize("name", ["tiny", "25m"])
def test_the_first_loss_is_the_loss_of_guessing(name):
    torch.manual_seed(0)
    model, V = GPT(PRESETS[name]), PRESETS[name].vocab_size
    tokens, targets = random_tokens(2, 64, V), random_tokens(2, 64, V).roll(1, 1)
    with torch.no_grad():
        assert model(tokens, targets).item() == pytest.approx(math.log(V), rel=0.03)


def test_matrices_start_with_a_spread_of_0_02_and_norms_at_one():
    for name, weight in tiny_model(hidden_size=128, kv_heads=4).named_parameters():
        if name.endswith("norm.weight"):
            assert (weight == 1).all()
        elif not name.endswith(("output.weight", "down.weight")):
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name


def test_residual_matrices_start_smaller_by_the_root_of_their_number():
    model = tiny_model(hidden_size=128, kv_heads=4)
    residual = [block.attention.output for block in model.blocks]
    residual += [block.mlp.down for block in model.blocks]
    for matrix in residual:
        expected = 0.02 / math.sqrt(len(residual))
        assert matrix.weight.std().item() == pytest.approx(expected, rel=0.05)


def test_biases_start_at_zero():
    model = tiny_model(attention_biases=("query", "output"))
    biases = [bias for name, bias in model.named_parameters() if name.endswith("bias")]
    assert len(biases) == 2 * TINY.layers
    for bias in biases:
        bias.data.fill_(math.nan)  # uninitialized memory may contain nan
    model.initialize_()
    assert all((bias == 0).all() for bias in biases)


@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_is_drawn_once(tied):
    with Recorded() as recorded:
        model = tiny_model(tied=tied)
    drawn = [n for func, _, n in recorded.calls if torch.Tag.nondeterministic_seeded in func.tags]
    assert sorted(drawn) == sorted(p.numel() for p in model.parameters() if p.ndim == 2)


def test_a_bfloat16_model_is_never_created_in_float32():
    with Recorded() as recorded:
        tiny_model(dtype=torch.bfloat16)
    wide = [numel for _, dtype, numel in recorded.calls if dtype == torch.float32]
    assert max(wide) == TINY.seq_len * TINY.head_dim // 2  # the angles before rounding


def test_a_7b_step_runs_on_fake_tensors():
    with FakeTensorMode():
        model = GPT(PRESETS["llama-2-7b"], dtype=torch.bfloat16)
        tokens = torch.zeros(1, 128, dtype=torch.int64)
        model(tokens, tokens).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(isinstance(gradient, FakeTensor) for gradient in gradients)
    assert sum(gradient.nbytes for gradient in gradients) == 2 * 6_738_415_616


# Rotary tables


def test_the_rotation_keeps_only_its_tables_for_backward():
    cos, sin = Rotary(TINY, torch.float32).tables(16, torch.float32)
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda packed: packed):
        rotate(torch.randn(2, 16, 4, TINY.head_dim, requires_grad=True), cos, sin)
    assert {tensor.data_ptr() for tensor in saved} == {cos.data_ptr(), sin.data_ptr()}


def test_all_blocks_share_one_pair_of_tables_even_after_a_cast():
    model = tiny_model(dtype=torch.float32).to(torch.bfloat16)
    tables = {b.attention.rotary.cos.untyped_storage().data_ptr() for b in model.blocks}
    assert len(tables) == 1
    assert sum(b.nbytes for b in model.buffers()) == 2 * TINY.seq_len * TINY.head_dim // 2 * 2


def test_bfloat16_tables_are_the_float32_tables_rounded():
    # An angle computed in bfloat16 at position 257 would be position 256's.
    config = replace(TINY, seq_len=300)
    exact, rounded = Rotary(config, torch.float32), Rotary(config, torch.bfloat16)
    assert torch.equal(rounded.cos, exact.cos.bfloat16())
    assert torch.equal(rounded.sin, exact.sin.bfloat16())


def test_autocast_does_not_promote_queries_and_keys():
    seen = []

    def attention(q, k, v, *, causal):
        seen.append({q.dtype, k.dtype, v.dtype})
        return scaled_dot_product_attention(q, k, v, causal=causal)

    model = tiny_model(dtype=torch.float32, attention=attention)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(random_tokens())
    assert seen == [{torch.bfloat16}] * TINY.layers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_have_the_dtype_of_the_model(dtype):
    assert tiny_model(dtype=dtype)(random_tokens()).dtype == dtype


def test_a_model_cast_to_bfloat16_equals_one_loaded_in_bfloat16():
    cast = tiny_model(dtype=torch.float32).to(torch.bfloat16)
    made = tiny_model(dtype=torch.bfloat16)
    made.load_state_dict(cast.state_dict())
    assert torch.equal(cast(random_tokens()), made(random_tokens()))


# Plugs


def test_the_attention_plug_gets_batch_heads_tokens_width_in_every_layer():
    calls = []

    def attention(q, k, v, *, causal):
        calls.append((q.shape, k.shape, v.shape, causal))
        return scaled_dot_product_attention(q, k, v, causal=causal)

    tiny_model(attention=attention)(random_tokens(2, 16))
    H, KV, D = TINY.heads, TINY.kv_heads, TINY.head_dim
    assert calls == [((2, H, 16, D), (2, KV, 16, D), (2, KV, 16, D), True)] * TINY.layers


def test_the_block_adds_the_result_of_the_attention_plug():
    model = tiny_model(attention=lambda q, k, v, *, causal: torch.zeros_like(q))
    attention = model.blocks[0].attention
    assert not attention(torch.ones(1, 4, TINY.hidden_size, dtype=torch.float64)).any()


def test_the_reference_attention_gives_the_logits_of_the_fused_one():
    tokens = random_tokens()
    fused, reference = tiny_model(), tiny_model(attention=attention_reference)
    assert_close(fused(tokens), reference(tokens))


def test_the_loss_plug_gets_hidden_states_and_unembedding_and_gives_the_result():
    calls = []

    def loss(hidden, weight, targets):
        calls.append((hidden, weight, targets))
        return 2 * cross_entropy(hidden, weight, targets)

    torch.manual_seed(0)
    model = GPT(replace(TINY, tied=False), loss=loss)
    tokens = random_tokens()
    result = model(tokens, tokens)
    [(hidden, weight, targets)] = calls
    assert weight is model.unembedding.weight
    assert targets is tokens
    assert_close(hidden @ weight.T, model(tokens))
    assert_close(result, 2 * cross_entropy(hidden, weight, targets))


def test_without_targets_the_loss_plug_is_not_called():
    def loss(hidden, weight, targets):
        raise AssertionError("the loss was called")

    assert GPT(TINY, loss=loss)(random_tokens(2, 16)).shape == (2, 16, TINY.vocab_size)


def test_a_tied_model_scores_with_the_embedding_itself():
    model = tiny_model()
    assert model.unembedding_weight is model.embedding.weight


def test_a_block_can_be_wrapped_from_outside():
    plain, wrapped = tiny_model(), tiny_model()
    forward = wrapped.blocks[1].forward
    wrapped.blocks[1].forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    tokens = random_tokens()
    for model in (plain, wrapped):
        model(tokens, tokens).backward()
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_queries_and_keys_are_laid_out_tokens_first_for_fused_kernels():
    layouts = []

    def attention(q, k, v, *, causal):
        layouts.append(all(x.transpose(1, 2).is_contiguous() for x in (q, k, v)))
        return scaled_dot_product_attention(q, k, v, causal=causal)

    tiny_model(attention=attention)(random_tokens())
    assert layouts == [True] * TINY.layers


def test_merging_the_heads_after_fused_attention_copies_nothing():
    returned, merged = [], []

    def attention(q, k, v, *, causal):
        returned.append(scaled_dot_product_attention(q, k, v, causal=causal))
        return returned[-1]

    model = tiny_model(attention=attention)
    for block in model.blocks:
        block.attention.output.register_forward_pre_hook(lambda _, args: merged.append(args[0]))
    model(random_tokens())
    assert [x.data_ptr() for x in merged] == [x.data_ptr() for x in returned]


# Names


def test_a_saved_model_holds_each_weight_once_and_no_tables():
    for tied in (True, False):
        model = tiny_model(tied=tied)
        assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
        assert count(model.state_dict().values()) == replace(TINY, tied=tied).parameters


def test_weights_are_named_by_their_modules():
    names = [name for name, _ in tiny_model(layers=1, tied=False).named_parameters()]
    assert names == [
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention.query.weight",
        "blocks.0.attention.key.weight",
        "blocks.0.attention.value.weight",
        "blocks.0.attention.output.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.gate.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "norm.weight",
        "unembedding.weight",
    ]


def test_the_weights_of_the_families_are_named_by_their_modules():
    biases = ("query", "key", "value", "output")
    model = tiny_model(layers=1, attention_biases=biases, **FAMILIES["gemma3_text"])
    assert {name for name, _ in model.named_parameters()} - {
        name for name, _ in tiny_model(layers=1).named_parameters()
    } == {
        *(f"blocks.0.attention.{name}.bias" for name in biases),
        "blocks.0.attention.query_norm.weight",
        "blocks.0.attention.key_norm.weight",
        "blocks.0.attention_post_norm.weight",
        "blocks.0.mlp_post_norm.weight",
    }


def test_a_part_missing_from_a_shape_is_not_a_module():
    names = {name.rpartition(".")[2] for name, _ in tiny_model().named_modules()}
    assert not {name for name in names if "post_norm" in name or name in ("query_norm", "key_norm")}


def test_operators_of_the_rotation_run_inside_the_attention_module():
    # A meter attributes bytes by forward hooks, so the rotation must run inside the attention.
    running = []
    model = tiny_model()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
    model(random_tokens())
    assert "blocks.0.attention" in running
    assert not any(name.endswith("rotary") for name in running)
    assert isinstance(model.get_submodule("blocks.0.attention"), Attention)


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 100},
            "hidden_size=100 does not split into 4 heads of an even head_dim .* use 96 or 104",
        ),
        ({"hidden_size": 4}, r"hidden_size=4 does not split into 4 heads .* use 8$"),
        ({"kv_heads": 3}, "4 heads cannot share 3 key/value heads evenly; use kv_heads=1, 2, 4"),
        ({"kv_heads": 8}, "4 heads cannot share 8 key/value heads evenly"),
        ({"layers": 0}, "got layers=0; give at least 1"),
        ({"kv_heads": 0}, "got kv_heads=0; give at least 1"),
        ({"custom_head_dim": 7}, "got custom_head_dim=7; rotary .*: give an even integer from 2$"),
        ({"custom_head_dim": 0}, "got custom_head_dim=0; rotary"),
        ({"custom_head_dim": -2}, "got custom_head_dim=-2; rotary"),
        (
            {"attention_biases": ("query", "gate")},
            "got attention_biases for 'gate'; the matrices are query, key, value, output",
        ),
        ({"activation": "relu"}, "got activation='relu'; choose one of silu, gelu_tanh"),
    ],
)
def test_an_invalid_shape_is_an_error_with_a_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_with_a_custom_head_dim_the_hidden_size_need_not_be_divisible():
    config = replace(TINY, hidden_size=33, custom_head_dim=6)
    assert config.head_dim == 6
    assert GPT(config)(random_tokens(1, 8)).shape == (1, 8, TINY.vocab_size)


def test_a_sequence_too_long_names_both_lengths_and_the_remedy():
    wanted = (
        r"got sequences of 65 tokens, wanted at most seq_len=64; .*replace\(config, seq_len=65\)"
    )
    with pytest.raises(ValueError, match=wanted):
        tiny_model()(random_tokens(1, 65))


def test_the_longest_sequence_is_accepted():
    assert tiny_model()(random_tokens(1, 64)).shape == (1, 64, TINY.vocab_size)


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        GPTConfig(256, 32, 4, 4, 2, 96, 64).hidden_size = 64
