"""Block costs predict bytes and operations exactly for any schedule."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from quick import quick, slow
from torch import nn

import memlab
from memlab.attention import attention_reference
from memlab.checkpointing.costs import predicted_peak_bytes, recomputed
from memlab.checkpointing.execution import checkpoint_blocks
from memlab.checkpointing.operations import Operations
from memlab.checkpointing.optimal import optimal_schedule, tradeoffs
from memlab.checkpointing.schedules import (
    Schedule,
    plain_schedule,
    sqrt_schedule,
    uniform_schedule,
)
from memlab.lora import add_lora
from memlab.model import GPT, PRESETS, GPTConfig
from memlab.planner.block_costs import chain_costs, metered_peak_bytes

LAYERS = 4
SMALL = GPTConfig(
    vocab_size=96,
    hidden_size=24,
    layers=LAYERS,
    heads=4,
    kv_heads=2,
    intermediate_size=40,
    seq_len=48,
)


def random_schedule(rng: random.Random, start: int, end: int) -> Schedule:
    parts: list = []
    while start < end:
        if rng.random() < 0.5:
            parts.append(start)
            start += 1
        else:
            border = rng.randint(start + 1, end)
            parts.append(random_schedule(rng, start, border))
            start = border
    return tuple(parts)


def some_schedules(stages: int, count: int = 3) -> list[Schedule]:
    rng = random.Random(0)
    simple = [plain_schedule(stages), uniform_schedule(stages, 1), sqrt_schedule(stages)]
    nested = [(plain_schedule(stages),), ((((0,), *range(1, stages - 1)), stages - 1),)]
    return simple + nested + [random_schedule(rng, 0, stages) for _ in range(count)]


def batch(vocab_size: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(torch.Size(shape).numel()).reshape(shape) % vocab_size
    return tokens, tokens.clone()


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for here, there in pairwise(widths):
        layers += [nn.Linear(here, there), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Classifier(nn.Module):
    """An embedding, arbitrary blocks, and a loss."""

    def __init__(self, blocks: list[nn.Module], first: int, last: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, first)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(last, 50)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def with_lora() -> nn.Module:
    model = GPT(SMALL)
    add_lora(model, 3)
    return model


# These blocks' inputs are freed once the block has run.
MODELS_THAT_KEEP_NO_INPUT = {
    "bfloat16": lambda: GPT(SMALL, dtype=torch.bfloat16),  # the norm keeps a float32 copy
    "frozen, with LoRA": with_lora,  # nothing before the first block has a gradient
}
MODELS = {
    "tied": lambda: GPT(SMALL),
    "untied": lambda: GPT(replace(SMALL, tied=False)),
    "score matrix": lambda: GPT(SMALL, attention=attention_reference),
    "blocks that keep their own output": lambda: Classifier(
        [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(LAYERS)], 16, 16
    ),
    "blocks that draw random numbers": lambda: Classifier(
        [nn.Sequential(mlp(16, 32, 16), nn.Dropout(0.1)) for _ in range(LAYERS)], 16, 16
    ),
    "outputs that shrink": lambda: Classifier(
        [mlp(a, 3 * a, b) for a, b in ((64, 48), (48, 40), (40, 16), (16, 16))], 64, 16
    ),
}


# ------------------------------------------------------------------ bytes


ONE_GPT = [  # stands for all GPTs in a quick run
    slow(name) if name in ("untied", "score matrix") else name for name in MODELS
]


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(1, 3), slow(((4, 48),))])
@pytest.mark.parametrize("name", ONE_GPT)
def test_the_predicted_peak_equals_the_measured_peak(name, shape):
    """With few tokens gradients dominate the peak, with many activations."""
    with memlab.dry_run():
        model = MODELS[name]()
        tokens, targets = batch(50, *shape)
        chain = chain_costs(model, tokens, targets)
        for schedule in some_schedules(len(chain.stages)):
            predicted = predicted_peak_bytes(schedule, chain)
            assert predicted == metered_peak_bytes(model, tokens, targets, schedule), schedule


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(["bfloat16"], MODELS_THAT_KEEP_NO_INPUT))
def test_if_blocks_save_no_input_the_peak_is_overestimated_by_at_most_the_inputs(name):
    with memlab.dry_run():
        model = MODELS_THAT_KEEP_NO_INPUT[name]()
        tokens, targets = batch(50, 2, 16)
        chain = chain_costs(model, tokens, targets)
        for schedule in some_schedules(LAYERS):
            predicted = predicted_peak_bytes(schedule, chain)
            peak = metered_peak_bytes(model, tokens, targets, schedule)
            inputs = sum(stage.output_bytes for stage in chain.stages)
            assert predicted - inputs <= peak <= predicted, schedule


@pytest.mark.slow
def test_real_tensors_have_the_same_costs_and_peak():
    with memlab.dry_run():
        dry = chain_costs(GPT(SMALL), *batch(50, 2, 32))
    model, (tokens, targets) = GPT(SMALL), batch(50, 2, 32)
    chain = chain_costs(model, tokens, targets)
    assert chain == dry
    for schedule in some_schedules(LAYERS, count=4):
        predicted = predicted_peak_bytes(schedule, chain)
        assert predicted == metered_peak_bytes(model, tokens, targets, schedule)


def test_equal_blocks_have_equal_costs():
    with memlab.dry_run():
        chain = chain_costs(GPT(SMALL), *batch(50, 2, 32))
    assert len(set(chain.stages)) == 1
    [block] = set(chain.stages)
    assert block.output_bytes == 4 * 2 * 32 * SMALL.hidden_size
    assert block.gradient_bytes == 4 * sum(p.numel() for p in GPT(SMALL).blocks[0].parameters())


@pytest.mark.slow
def test_every_optimal_schedule_uses_its_whole_budget():
    with memlab.dry_run():
        model, (tokens, targets) = GPT(replace(SMALL, layers=6)), batch(50, 4, 48)
        chain = chain_costs(model, tokens, targets)
        best = tradeoffs(chain)
        for peak, _, schedule in best[::2]:
            assert metered_peak_bytes(model, tokens, targets, schedule) == peak
    assert len(best) > 10


@pytest.mark.slow
def test_a_billion_parameter_model_is_planned_without_allocating_it():
    with memlab.dry_run():
        model = GPT(PRESETS["1b"])
        tokens, targets = batch(50, 4, 2048)
        chain = chain_costs(model, tokens, targets)
        layers = len(chain.stages)
        most, least = tradeoffs(chain)[-1].peak_bytes, tradeoffs(chain)[0].peak_bytes
        budget = (most + least) // 2
        schedule = optimal_schedule(chain, budget)
        peak = metered_peak_bytes(model, tokens, targets, schedule)
    assert peak == predicted_peak_bytes(schedule, chain) <= budget
    assert 0 < recomputed(schedule, chain) < recomputed(uniform_schedule(layers, 1), chain)


# ------------------------------------------------------------------ operations


@pytest.mark.parametrize("name", quick(list(MODELS)[:1], MODELS))
def test_the_recomputed_operations_match_the_prediction(name):
    with memlab.dry_run():
        model, (tokens, targets) = MODELS[name](), batch(50, 2, 16)
        chain = chain_costs(model, tokens, targets)
        for schedule in some_schedules(len(chain.stages)):
            with Operations() as counter, checkpoint_blocks(model, schedule):
                model(tokens, targets).backward()
            assert counter.total == chain.operations + recomputed(schedule, chain), schedule


def test_a_blocks_operations_are_its_matmuls():
    B, T = 2, 32
    with memlab.dry_run():
        chain = chain_costs(GPT(SMALL), *batch(50, B, T))
    C, KV, D = SMALL.hidden_size, SMALL.kv_heads, SMALL.head_dim
    weights = 2 * C * C + 2 * C * KV * D + 3 * C * SMALL.intermediate_size
    attention = 2 * 2 * B * SMALL.heads * T * T * D
    assert chain.stages[0].forward == 2 * B * T * weights + attention
    assert chain.stages[0].backward == 2 * 2 * B * T * weights + attention * 5 // 2
    assert (
        chain.stages[0].tail == 2 * B * T * SMALL.intermediate_size * C
    )  # the last matrix of the MLP
    assert chain.last.forward == 2 * B * T * C * SMALL.vocab_size


# ------------------------------------------------------------------ errors


def test_a_model_with_gradients_is_an_error():
    model, (tokens, targets) = GPT(SMALL), batch(50, 1, 4)
    model(tokens, targets).backward()
    with pytest.raises(ValueError, match=r"the model has gradients.*call model\.zero_grad\(\)"):
        chain_costs(model, tokens, targets)
    with pytest.raises(ValueError, match="the model has gradients"):
        metered_peak_bytes(model, tokens, targets, plain_schedule(LAYERS))


def test_the_model_is_restored():
    model, (tokens, targets) = GPT(SMALL), batch(50, 1, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = set(model.__dict__)
    chain_costs(model, tokens, targets)
    assert set(model.__dict__) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
