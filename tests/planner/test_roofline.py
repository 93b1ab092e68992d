"""Estimated seconds of a step: compute and traffic of each operator, without side effects."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab.optim import Adam8bit
from memlab.planner import CARDS
from memlab.planner.costs import DISK_BANDWIDTH, UTILIZATION
from memlab.planner.outside import AS_IT_IS, attempts, checkpointed, kept_on_disk
from memlab.planner.outside import find as places_of
from memlab.planner.roofline import Roofline, moved_bytes

CARD = CARDS["rtx4090"]
COMPUTE_BOUND = replace(CARD, memory_bandwidth=1e40)


def moved_by(run) -> int:
    """Return the bytes moved by the operators that `run` calls."""
    counts = []
    with memlab.dry_run() as dry, dry.observed(lambda *call: counts.append(moved_bytes(*call))):
        run()
    return sum(counts)


X, Y, LONG = torch.ones(100), torch.ones(100), torch.ones(10, 100)
TABLE, PLACES = torch.ones(1000, 8), torch.tensor([3, 1, 4, 1])
ROWS = 4 * 8 * 4  # bytes


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (lambda: X + Y, 3 * 400),
        (lambda: X.clone(), 2 * 400),
        (lambda: X.sum(), 400 + 4),
        (lambda: torch.mm(LONG, LONG.t()), 2 * 4000 + 400),
        (lambda: X.bfloat16(), 400 + 200),
        (lambda: LONG.t(), 0),
        (lambda: LONG.view(1000).reshape(100, 10)[3], 0),
        (lambda: torch.empty(1000), 0),
        (lambda: torch.zeros(100), 400),
        (lambda: X.view(1, 100).expand(50, 100) + 1, 400 + 50 * 400),
        (lambda: F.embedding(PLACES, TABLE), 32 + 2 * ROWS),
        (lambda: TABLE.index_select(0, PLACES), 32 + 2 * ROWS),
        (lambda: TABLE[PLACES], 32 + 2 * ROWS),
    ],
)
def test_an_operator_moves_its_inputs_and_outputs(run, wanted):
    assert moved_by(run) == wanted


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (lambda x, y: x.add_(y), 3 * 400),
        (lambda x, y: x.copy_(y), 2 * 400),
        (lambda x, y: x.zero_(), 400),
        (lambda x, y: torch._foreach_add_([x, x], [y, y]), 2 * 3 * 400),
        (lambda x, y: torch.add(x, y, out=torch.empty(100)), 3 * 400),
        (lambda x, y: x.index_add_(0, torch.arange(0), y[:0]), 0),
    ],
)
def test_an_in_place_write_counts_once(run, wanted):
    assert moved_by(lambda: run(X.clone(), Y)) == 2 * 400 + wanted


# ------------------------------------------------------------------ seconds


def seconds_of(run, card) -> dict[str, float]:
    roofline = Roofline(card)
    with memlab.dry_run():
        roofline.counted(run)()
    return dict(roofline.seconds)


@pytest.mark.parametrize(
    ("dtype", "tf32", "peak"),
    [
        (torch.float32, False, CARD.float32_flops),
        (torch.float32, True, CARD.flops / 2),
        (torch.bfloat16, False, CARD.flops),
        (torch.float16, True, CARD.flops),
    ],
)
def test_a_matmul_runs_at_half_of_the_dtypes_peak(dtype, tf32, peak):
    a, b = torch.empty(64, 128, dtype=dtype), torch.empty(128, 256, dtype=dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        found = seconds_of(lambda: a @ b, COMPUTE_BOUND)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found["compute"] == pytest.approx(2 * 64 * 128 * 256 / (UTILIZATION * peak), rel=1e-6)


def test_an_operator_takes_the_longer_of_compute_and_memory_time():
    small, large = torch.empty(2, 2), torch.empty(4096, 4096)
    moving, computing = (
        seconds_of(lambda: small @ small, CARD),
        seconds_of(lambda: large @ large, CARD),
    )
    assert moving == {"memory": 3 * 16 / CARD.memory_bandwidth}
    assert computing == {"compute": 2 * 4096**3 / (UTILIZATION * CARD.float32_flops)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def build():
    model = nn.Sequential(*(Block() for _ in range(4)))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.empty(4096, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step, model, optimizer


def roofline_of(change, card, target="cuda") -> tuple[Roofline, memlab.Trace]:
    """Count the second step."""
    roofline = Roofline(card)

    def changed():
        step, model, optimizer = change(*build())
        return roofline.counted(step), model, optimizer

    return roofline, memlab.predict(changed, device=target)


def unchanged(*parts):
    return parts


def test_recomputation_is_counted():
    product = 2 * 4096 * 64 * 64 / (UTILIZATION * CARD.float32_flops)
    plain, _ = roofline_of(unchanged, COMPUTE_BOUND)
    again, _ = roofline_of(checkpointed, COMPUTE_BOUND)
    assert plain.seconds["compute"] == pytest.approx((8 + 8 + 7) * product, rel=1e-6)
    # Only a block's first matmul is recomputed: the second one's saved input exists by then.
    assert again.seconds["compute"] == pytest.approx((8 + 8 + 7 + 4) * product, rel=1e-6)


def test_offloaded_activations_are_written_and_read():
    steps = []

    def change(*parts):
        steps.append(kept_on_disk(*parts))
        return steps[0]

    roofline, _ = roofline_of(change, CARD)
    traffic = steps[0][0].store.traffic  # for both steps
    assert traffic.written > 4096 * 64 * 4
    moved = (traffic.written + traffic.read) / 2
    assert roofline.seconds["disk"] == pytest.approx(moved / DISK_BANDWIDTH, rel=1e-9)


class Moved(TorchDispatchMode):
    """Counts the traffic of a real step."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.bytes += moved_bytes(func, args, kwargs or {}, result)
        return result


@pytest.mark.parametrize("numbers", [256, 5 * 256, 5 * 256 + 7])
def test_chunks_that_a_dry_run_skips_are_counted(numbers):
    def step() -> None:
        optimizer = Adam8bit([weight], chunk=256)
        optimizer.step()

    weight = nn.Parameter(torch.ones(numbers))
    weight.grad = torch.ones(numbers)
    with Moved() as moved:
        step()
    found = seconds_of(step, CARD)
    assert found["memory"] == pytest.approx(moved.bytes / CARD.memory_bandwidth, rel=1e-9)


def test_each_step_starts_a_new_count():
    x = torch.ones(100)
    roofline = Roofline(CARD)
    step = roofline.counted(lambda: x + 1)
    with memlab.dry_run():
        step()
        first = roofline.total
        step()
    assert first == roofline.total > 0


# ------------------------------------------------------------------ no side effects


ATTEMPTS = (AS_IT_IS, *attempts(places_of(*build()[1:])))


@pytest.mark.few(1)
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_counting_does_not_change_a_steps_bytes(attempt):
    _, counted = roofline_of(attempt.applied, CARD)
    alone = memlab.predict(lambda: attempt.applied(*build()))
    assert counted.memory == alone.memory
    assert [(e.bytes, e.phase, e.operator) for e in counted.events] == [
        (e.bytes, e.phase, e.operator) for e in alone.events
    ]
