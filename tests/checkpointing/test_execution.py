"""Schedules on a model's blocks: gradients, the number of runs, and removing the schedule."""

import copy
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memlab.checkpointing import MATMULS, Checkpoint, checkpoint, selective
from memlab.checkpointing.execution import checkpoint_blocks, run_segment
from memlab.checkpointing.operations import Operations
from memlab.checkpointing.schedules import Schedule, executions, plain_schedule, sqrt_schedule
from memlab.dry_runs import dry_run
from memlab.metering import measure
from memlab.model import GPT, PRESETS

BLOCKS = PRESETS["tiny"].layers
TOKENS = torch.arange(24).reshape(2, 12)


@st.composite
def schedules(draw, start: int = 0, end: int = BLOCKS) -> Schedule:
    """Draw schedules of any depth, including segments around a single segment."""
    parts: list = []
    while start < end:
        border = draw(st.integers(start + 1, end))
        if border == start + 1 and draw(st.booleans()):
            parts.append(start)
        else:
            parts.append(draw(schedules(start, border)))
        start = border
    return tuple(parts)


class WithDropout(nn.Module):
    """A model that loops over its blocks and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()) for _ in range(BLOCKS)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(PRESETS["tiny"])


def gradients(model: nn.Module, *batch: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(*batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def count_runs(model: nn.Module) -> Counter:
    runs: Counter = Counter()
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: runs.update([number]))
    return runs


# ------------------------------------------------------------------ values and counts


@settings(deadline=None, max_examples=40)
@given(schedules())
def test_any_schedule_gives_plain_gradients_and_the_stated_number_of_runs(
    schedule,
):
    model = gpt()
    expected = gradients(model, TOKENS, TOKENS)
    runs = count_runs(model)
    with checkpoint_blocks(model, schedule):
        found = gradients(model, TOKENS, TOKENS)
    assert all(map(torch.equal, found, expected))
    assert [runs[block] for block in range(BLOCKS)] == executions(schedule)


@settings(deadline=None, max_examples=40)
@given(schedules())
def test_random_numbers_equal_the_plain_runs_also_afterwards(schedule):
    torch.manual_seed(0)
    model, x = WithDropout(), torch.randn(5, 6)
    expected, next_expected = gradients(model, x), torch.rand(3)
    with checkpoint_blocks(model, schedule):
        found, next_found = gradients(model, x), torch.rand(3)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(next_found, next_expected)


def test_without_gradients_every_block_runs_once():
    model = gpt()
    runs = count_runs(model)
    with torch.no_grad(), checkpoint_blocks(model, sqrt_schedule(BLOCKS)):
        model(TOKENS)
    assert [runs[block] for block in range(BLOCKS)] == [1] * BLOCKS


def test_further_arguments_reach_every_block():
    def scale(x, by, *, add):
        return x * by + add

    x = torch.ones(2, requires_grad=True)
    y = run_segment((0, (1, (2,)), 3), [scale] * 4, x, 2.0, add=1.0)
    y.sum().backward()
    assert y.tolist() == [31.0, 31.0]
    assert x.grad.tolist() == [16.0, 16.0]


# ------------------------------------------------------------------ outside the model


def test_parameters_state_dict_and_modules_stay_the_same():
    model = gpt()
    before = ([*dict(model.named_parameters())], [*model.state_dict()], [*model.modules()])
    checkpoint_blocks(model, sqrt_schedule(BLOCKS))
    after = ([*dict(model.named_parameters())], [*model.state_dict()], [*model.modules()])
    assert after == before
    assert len(model.blocks) == BLOCKS
    assert model.blocks[-1] in before[2]


def test_removing_the_schedule_restores_the_plain_model():
    model = gpt()
    blocks = model.blocks
    attributes = set(model.__dict__)
    handle = checkpoint_blocks(model, sqrt_schedule(BLOCKS))
    assert model.blocks is not blocks
    handle.remove()
    handle.remove()  # a second call has no effect
    assert model.blocks is blocks
    assert set(model.__dict__) == attributes


def test_a_copy_runs_its_own_blocks():
    """A closure over the blocks would make the copy run the original's blocks."""
    model = gpt()
    checkpoint_blocks(model, sqrt_schedule(BLOCKS))
    twin = copy.deepcopy(model)
    gradients(twin, TOKENS, TOKENS)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())


def test_backward_works_after_the_schedule_is_removed():
    model = gpt()
    expected = gradients(model, TOKENS, TOKENS)
    model.zero_grad()
    with checkpoint_blocks(model, ((0, (1, 2), 3),)):
        loss = model(TOKENS, TOKENS)
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, found, expected))


# ------------------------------------------------------------------ errors


def test_a_second_schedule_is_an_error_that_names_the_first():
    model = gpt()
    handle = checkpoint_blocks(model, plain_schedule(BLOCKS))
    with pytest.raises(
        ValueError, match=r"already runs by the schedule \(0, 1, 2, 3\); call remove"
    ):
        checkpoint_blocks(model, sqrt_schedule(BLOCKS))
    handle.remove()
    checkpoint_blocks(model, sqrt_schedule(BLOCKS))


def test_a_schedule_for_another_number_of_blocks_is_an_error_and_changes_nothing():
    model = gpt()
    with pytest.raises(ValueError, match="ends before stage 3"):
        checkpoint_blocks(model, (0, (1, 2)))
    assert "blocks" not in model.__dict__


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "Linear has none"),
        (nn.Sequential(nn.Linear(2, 2)), "Sequential has none"),
        (nn.ModuleDict({"blocks": nn.Linear(2, 2)}), "ModuleDict has a Linear"),
    ],
)
def test_a_model_without_a_list_of_blocks_is_an_error(model, message):
    with pytest.raises(TypeError, match=message):
        checkpoint_blocks(model, (0,))


# ------------------------------------------------------------------ how segments are run

WAYS = {
    "checkpoint": checkpoint,
    "values checked": Checkpoint(check="hash"),
    "products kept": selective(MATMULS),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", [((0, 1), (2, 3)), ((0, (1, (2,))), 3)], ids=str)
def test_using_chooses_how_a_segment_runs(way, schedule):
    model = gpt()
    wanted = gradients(model, TOKENS, TOKENS)
    with checkpoint_blocks(model, schedule, using=WAYS[way]):
        assert all(map(torch.equal, gradients(model, TOKENS, TOKENS), wanted))


def test_kept_matmuls_are_not_recomputed():
    model, counts = gpt(), {}
    for name in ("checkpoint", "products kept"):
        with checkpoint_blocks(model, ((0, 1), (2, 3)), using=WAYS[name]):
            loss = model(TOKENS, TOKENS)
            with Operations() as counter:
                loss.backward()
            counts[name] = counter.total
    with Operations() as counter:
        model(TOKENS, TOKENS)
    loss = model(TOKENS, TOKENS)
    with Operations() as plain:
        loss.backward()
    assert plain.total < counts["products kept"] < counts["checkpoint"]
    attention = (
        counts["products kept"] - plain.total
    )  # torch does not count it as a matmul, so it runs again
    assert attention < (counts["checkpoint"] - plain.total) / 5


def test_kept_outputs_have_the_same_bytes_on_fake_tensors():
    def peak_bytes() -> int:
        model = gpt()
        checkpoint_blocks(model, ((0, 1), (2, 3)), using=WAYS["products kept"])
        return measure(lambda: model(TOKENS, TOKENS).backward(), model=model).peak_bytes

    with dry_run():
        fake = peak_bytes()
    assert fake == peak_bytes()
