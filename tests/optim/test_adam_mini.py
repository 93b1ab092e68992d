"""Adam-mini: partitions as plain data, and steps of the authors' package and of AdamW."""

import contextlib
import copy
import io
import pickle
from dataclasses import replace
from math import prod

import pytest
import torch
from close import assert_close
from torch import nn

from memlab.model import GPT, PRESETS, GPTConfig
from memlab.optim import AdamMini, AdamW, ByRules, gpt_partition, llama_partition
from memlab.optim.adam_mini import GPT_RULES, LLAMA_RULES

TINY = PRESETS["tiny"]  # 4 heads of dimension 8, 2 for keys and values
UNTIED = replace(TINY, layers=2, tied=False)


def gpt(config: GPTConfig = UNTIED, dtype: torch.dtype | None = None) -> GPT:
    torch.manual_seed(0)
    return GPT(config, dtype=dtype)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TINY.vocab_size, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def mini(model: GPT, **settings) -> AdamMini:
    partition = gpt_partition(model.config.head_dim)
    return AdamMini(model.named_parameters(), partition=partition, **settings)


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for seed in range(steps):
        optimizer.zero_grad()
        model(*batch(seed)).backward()
        optimizer.step()


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


# ------------------------------------------------------------------ partitions


def test_gpt_blocks_match_the_paper():
    size = gpt_partition(8)
    assert size("embedding.weight", (256, 32)) == 32  # a token
    assert size("unembedding.weight", (256, 32)) == 32
    assert size("blocks.3.attention.query.weight", (32, 32)) == 8 * 32  # a head
    assert size("blocks.3.attention.key.weight", (16, 32)) == 8 * 32
    assert size("blocks.3.attention.value.weight", (16, 32)) == 32  # a row
    assert size("blocks.3.attention.output.weight", (32, 32)) == 32
    assert size("blocks.3.mlp.gate.weight", (96, 32)) == 32
    assert size("blocks.3.mlp.up.weight", (96, 32)) == 32
    assert size("blocks.3.mlp.down.weight", (32, 96)) == 96
    for norm in ("blocks.3.attention_norm.weight", "blocks.3.mlp_norm.weight", "norm.weight"):
        assert size(norm, (32,)) == 32  # the tensor


def test_llama_blocks_match_the_paper_with_grouped_queries_and_wide_heads():
    size = llama_partition(128)  # 2 heads of 128 in a hidden size of 96
    layer = "model.layers.0"
    assert size("model.embed_tokens.weight", (1000, 96)) == 96
    assert size(f"{layer}.self_attn.q_proj.weight", (256, 96)) == 128 * 96
    assert size(f"{layer}.self_attn.k_proj.weight", (128, 96)) == 128 * 96
    assert size(f"{layer}.self_attn.v_proj.weight", (128, 96)) == 96
    assert size(f"{layer}.self_attn.o_proj.weight", (96, 256)) == 256
    assert size(f"{layer}.self_attn.q_proj.bias", (256,)) == 1
    assert size(f"{layer}.mlp.down_proj.weight", (96, 301)) == 301
    assert size(f"{layer}.post_attention_layernorm.weight", (96,)) == 96
    assert size("model.norm.weight", (96,)) == 96
    assert size("lm_head.weight", (1000, 96)) == 96


def test_every_rule_matches_a_parameter_of_the_gpt():
    full_config = replace(UNTIED, head_norms=True, post_norms=True, attention_biases=("query",))
    names = [name for name, _ in gpt(full_config).named_parameters()]
    unused = [end for end in GPT_RULES if not any(f".{n}".endswith(f".{end}") for n in names)]
    assert unused == []


def test_an_unknown_layer_is_named_in_the_error():
    with pytest.raises(
        ValueError, match=r"got blocks\.0\.mixer\.weight of shape \(4, 4\), which m"
    ):
        gpt_partition(8)("blocks.0.mixer.weight", (4, 4))


def test_rules_match_whole_parts_of_a_name():
    with pytest.raises(ValueError, match="subnorm"):
        gpt_partition(8)("blocks.0.subnorm.weight", (32,))


@pytest.mark.parametrize(("share", "size"), [("element", 1), ("row", 5), ("tensor", 35)])
def test_an_unknown_layer_uses_the_default(share, size):
    assert gpt_partition(8, default=share)("mixer.weight", (7, 5)) == size


def test_the_longest_rule_applies():
    size = ByRules({"norm.weight": "tensor", "query.norm.weight": "element"}, head_dim=8)
    assert size("a.query.norm.weight", (8,)) == 1
    assert size("a.norm.weight", (8,)) == 8


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("h.0.attn.c_attn.weight", (96, 32)),
        ("layers.0.self_attn.qkv_proj.weight", (96, 32)),
        ("layers.0.attention.query_key_value.weight", (96, 32)),
        ("attention.in_proj_weight", (96, 32)),
    ],
)
@pytest.mark.parametrize("default", [None, "row", "tensor"])
def test_fused_queries_keys_and_values_are_refused_for_any_default(name, shape, default):
    with pytest.raises(ValueError, match=f"got {name} .* fuses queries, keys and values"):
        llama_partition(8, default=default)(name, shape)


def test_fused_queries_keys_and_values_accept_their_own_rule():
    size = ByRules({**LLAMA_RULES, "qkv_proj.weight": "row"}, head_dim=8)
    assert size("layers.0.self_attn.qkv_proj.weight", (96, 32)) == 32


@pytest.mark.parametrize("shape", [(20, 32), ()])
def test_rows_that_heads_do_not_divide_are_refused(shape):
    with pytest.raises(ValueError, match="whose rows 8 does not divide; give the model's head"):
        gpt_partition(8)("blocks.0.attention.query.weight", shape)


def test_a_vector_in_the_mlp_has_one_second_moment_per_element():
    assert ByRules({"mlp.scale": "row"}, head_dim=8)("blocks.0.mlp.scale", (7,)) == 1


def test_an_unknown_share_is_refused():
    with pytest.raises(ValueError, match=r"got the rule 'column' for a\.weight"):
        ByRules({"weight": "column"}, head_dim=8)("a.weight", (2, 2))


# ------------------------------------------------------------------ the steps

# Our names, and names that the package recognizes.
PACKAGE_NAMES = {
    "embedding": "embed_tokens",
    "unembedding": "lm_head",
    "attention.query": "q_proj",
    "attention.key": "k_proj",
    "attention.value": "v_proj",
    "attention.output": "o_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_layernorm",
}


def package_name(name: str) -> str:
    for ours, theirs in PACKAGE_NAMES.items():
        name = name.replace(ours, theirs) if f".{name}".endswith(f".{ours}.weight") else name
    return name


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2**-23)],  # float32's spacing at 1, where norms are
)
def test_twenty_steps_with_weight_decay_match_the_package(dtype, tolerance):
    adam_mini = pytest.importorskip("adam_mini")
    model, other = gpt(dtype=dtype), gpt(dtype=dtype)
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    is_norm = {name: "norm" in name for name, _ in model.named_parameters()}
    groups = [
        {
            "params": [(n, p) for n, p in model.named_parameters() if is_norm[n] is norm],
            "weight_decay": 0.0 if norm else 0.1,
        }
        for norm in (False, True)
    ]
    ours = AdamMini(groups, partition=gpt_partition(UNTIED.head_dim), **settings)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints how it classifies each name
        named = [(package_name(name), p) for name, p in other.named_parameters()]
        shape = {"dim": UNTIED.hidden_size, "n_heads": UNTIED.heads}
        theirs = adam_mini.Adam_mini(named, weight_decay=0.1, verbose=False, **settings, **shape)
    train(model, ours, steps=20)
    train(other, theirs, steps=20)
    assert largest_difference(gpt(dtype=dtype), model) > 5e-3  # the weights moved
    assert largest_difference(model, other) <= tolerance
    kept = [theirs.state[p]["vmean"].numel() for p in other.parameters()]
    assert [ours.state[p]["exp_avg_sq"].numel() for p in model.parameters()] == kept


def test_one_element_per_block_equals_adamw():
    model, other = gpt(), gpt()
    ones = {name: 1 for name, _ in model.named_parameters()}
    train(model, AdamMini(model.named_parameters(), weight_decay=0.1, partition=ones), steps=20)
    train(other, AdamW(other.parameters(), weight_decay=0.1), steps=20)
    assert largest_difference(gpt(), model) > 5e-3
    assert largest_difference(model, other) <= 20 * 2**-23  # an ulp at 1 per step


def test_the_first_step_divides_by_the_root_of_the_blocks_mean_square():
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    weight.grad = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 6.0]], dtype=torch.float64)
    settings = {"lr": 0.5, "eps": 0.0, "weight_decay": 0.0}
    AdamMini([("weight", weight)], partition={"weight": 3}, **settings).step()
    root_mean_squares = torch.tensor([[3.0], [12.0**0.5 * 3**0.5]], dtype=torch.float64) / 3**0.5
    assert_close(weight, -0.5 * weight.grad / root_mean_squares)


def test_chunks_of_any_size_take_the_same_steps():
    model, other = gpt(), gpt()
    train(model, mini(model), steps=3)
    train(other, mini(other, chunk=100), steps=3)  # one to three rows; a head is never split
    assert largest_difference(model, other) == 0


def test_each_group_has_its_own_decay_for_any_names():
    weight, norm = (nn.Parameter(torch.ones(4)) for _ in range(2))
    weight.grad, norm.grad = torch.zeros(4), torch.zeros(4)
    pairs = [("weight", weight), ("norm.weight", norm)]
    partition = {"weight": 4, "norm.weight": 4}
    AdamMini(pairs, lr=0.1, weight_decay=0.5, partition=partition).step()
    assert torch.equal(weight, torch.full((4,), 0.95))
    assert torch.equal(norm, torch.full((4,), 0.95))


# ------------------------------------------------------------------ bytes and states


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def blocks_of(config: GPTConfig) -> int:
    """Count second moments from the shapes: one per token, head, row and norm."""
    embeddings = config.vocab_size * (1 if config.tied else 2)
    heads = config.heads + config.kv_heads
    rows = config.kv_heads * config.head_dim + config.hidden_size  # value, output
    mlp = 2 * config.intermediate_size + config.hidden_size
    return embeddings + config.layers * (heads + rows + mlp + 2) + 1


@pytest.mark.parametrize("config", [TINY, UNTIED, replace(TINY, heads=2, kv_heads=1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_four_bytes_per_element_and_per_block(config, dtype):
    model = gpt(config, dtype)
    optimizer = mini(model)
    train(model, optimizer, steps=1)
    assert state_bytes(optimizer) == 4 * config.parameters + 4 * blocks_of(config)


def test_a_tied_weight_counts_once_under_its_first_name():
    layer = nn.Linear(4, 6, bias=False)
    names = [("embedding.weight", layer.weight), ("unembedding.weight", layer.weight)]
    optimizer = AdamMini(names, partition=gpt_partition(2))
    assert optimizer.param_groups[0]["param_names"] == ["embedding.weight"]
    layer.weight.grad = torch.ones(6, 4)
    optimizer.step()
    assert optimizer.state[layer.weight]["step"] == 1
    assert state_bytes(optimizer) == 4 * 24 + 4 * 6


def test_training_resumes_from_a_saved_state(tmp_path):
    model, other = gpt(), gpt()
    optimizer = mini(model)
    train(model, optimizer, steps=3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(model.state_dict())
    resumed = mini(other)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    train(model, optimizer, steps=3)
    train(other, resumed, steps=3)
    assert largest_difference(model, other) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_model_and_optimizer_trains_the_same(copied):
    model = gpt()
    optimizer = mini(model)
    train(model, optimizer, steps=2)
    other, its_optimizer = copied((model, optimizer))
    train(model, optimizer, steps=2)
    train(other, its_optimizer, steps=2)
    assert largest_difference(model, other) == 0


def test_the_state_of_another_partition_is_refused():
    model = gpt()
    optimizer = mini(model)
    train(model, optimizer, steps=1)
    rows = {name: p.shape[-1] for name, p in model.named_parameters()}
    other = AdamMini(model.named_parameters(), partition=rows)
    with pytest.raises(ValueError, match=r"exp_avg_sq \(4,\).* exp_avg_sq \(32,\)"):
        other.load_state_dict(optimizer.state_dict())


def test_a_group_added_later_is_stepped():
    first, later = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = AdamMini([("a", first)], partition={"a": 3, "b": 6}, lr=0.1)
    optimizer.add_param_group({"params": [("b", later)], "lr": 0.2})
    first.grad, later.grad = torch.ones(2, 3), torch.ones(2, 3)
    optimizer.step()
    assert [len(optimizer.state[p]["exp_avg_sq"]) for p in (first, later)] == [2, 1]
    assert first.mean() > later.mean()


# ------------------------------------------------------------------ invalid input


def test_a_refused_group_leaves_the_others_unchanged():
    optimizer = AdamMini([("a", nn.Parameter(torch.ones(3)))], partition={"a": 3})
    with pytest.raises(ValueError, match="got b of shape"):
        optimizer.add_param_group({"params": [("b", nn.Parameter(torch.ones(3)))]})
    assert [group["param_names"] for group in optimizer.param_groups] == [["a"]]


def test_weights_without_names_are_refused():
    with pytest.raises(TypeError, match="got weights without names"):
        AdamMini(gpt().parameters(), partition=gpt_partition(8))


def test_a_partition_without_a_weight_is_refused():
    with pytest.raises(ValueError, match=r"got b of shape \(2, 3\), which the partition does not"):
        AdamMini([("b", nn.Parameter(torch.ones(2, 3)))], partition={"a": 3})


@pytest.mark.parametrize("size", [0, -1, 4, 7, 12])
def test_blocks_that_do_not_divide_a_weight_are_refused(size):
    with pytest.raises(
        ValueError, match=f"got blocks of {size} for a, which do not divide its 6 .* such as 3 for"
    ):
        AdamMini([("a", nn.Parameter(torch.ones(2, 3)))], partition={"a": size})


@pytest.mark.parametrize("shape", [(7,), (3, 5), (3, 5, 7), ()])
@pytest.mark.parametrize("share", ["element", "row", "tensor"])
def test_odd_and_small_shapes_are_stepped(shape, share):
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones(shape)
    partition = ByRules({"a": share}, head_dim=8)
    optimizer = AdamMini([("a", weight)], lr=0.1, weight_decay=0.0, partition=partition)
    optimizer.step()
    assert_close(weight.detach(), torch.full(shape, 0.9))
    blocks = prod(shape) // partition("a", shape)
    assert optimizer.state[weight]["exp_avg_sq"].shape == (blocks,)
