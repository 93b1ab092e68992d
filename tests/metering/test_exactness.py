"""For every kind of step, compare the meter with a recording, and dry runs with real runs."""

from collections.abc import Iterator

import pytest
import torch
from kinds import INEXACT, KINDS
from quick import quick
from traces import renumbered

import memlab
from memlab.internals.cycles import no_cycle_collection
from memlab.metering.profiler_recording import compare, record, with_workspace
from memlab.trace import Trace

QUICK = list(KINDS)[::3]  # for make test
EXACT = [name for name in KINDS if name not in INEXACT]
DRY_RUN_REFUSES = {
    "recommender_sparse_gradients": "sparse gradients",
    "formulas_beyond_the_promise": "least squares, whose rank depends on values",
    "lbfgs": "its number of evaluations depends on the loss",
}


@pytest.fixture(autouse=True)
def _no_cycle_collection() -> Iterator[None]:
    """Two runs of one step would free reference cycles at different moments."""
    with no_cycle_collection():
        yield


NOT_REFUSED = [name for name in KINDS if name not in DRY_RUN_REFUSES]


def second_step(name: str) -> Trace:
    step, model, optimizer = KINDS[name]()
    step()
    return memlab.measure(step, model=model, optimizer=optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(QUICK, EXACT))
def test_the_meter_equals_a_recording_without_it(name):
    """Allocations are exactly the operators' results; the peak and the live bytes are equal."""
    step, _, _ = KINDS[name]()
    comparison = compare(second_step(name), record(step, warm_up=step))
    assert comparison.exact, comparison


def test_a_sum_of_gradients_at_the_very_end_of_backward_is_exact():
    """The next operator comes after backward, and folds the sum into its first term."""

    def step():
        x = torch.randn(64, 64, requires_grad=True) * 2
        gradient = torch.autograd.grad((x.sin() + x.exp()).sum(), x)
        return gradient, torch.ones(3)

    comparison = compare(memlab.measure(step), record(step))
    assert comparison.exact, comparison


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(QUICK, [name for name in EXACT if name != "lstm"]))
def test_with_kernel_scratch_the_peak_is_the_real_peak(name):
    """Except `lstm`: Python frees 160 bytes near its peak in another order under the meter."""
    step, _, _ = KINDS[name]()
    recording = record(step, warm_up=step)
    trace = second_step(name)
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    whole = with_workspace(trace, recording)
    assert whole.peak_bytes == before + recording.peak_bytes
    assert whole.live_bytes == before + recording.live_bytes


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:cov.*degrees of freedom")  # it reads their number
@pytest.mark.parametrize("name", quick(QUICK, NOT_REFUSED))
def test_a_dry_run_equals_the_real_run(name):
    real = second_step(name)
    with memlab.dry_run():
        dry = second_step(name)
    assert renumbered(dry) == renumbered(real)


@pytest.mark.parametrize("name", DRY_RUN_REFUSES)
def test_a_dry_run_raises_for_kinds_that_depend_on_values(name):
    with (
        memlab.dry_run(),
        pytest.raises(ValueError, match=r"^\S*\w+.py:\d+ .* depends? on .*values"),
    ):
        second_step(name)


@pytest.mark.parametrize("name", INEXACT)
def test_kinds_listed_as_inexact_are_still_inexact(name):
    step, _, _ = KINDS[name]()
    assert not compare(second_step(name), record(step, warm_up=step)).exact


OTHER_FORMULAS = {  # operators whose gradients run other operators under a mode
    "prod": lambda x: (x / 9 + 1).prod(),
    "prod of a dimension": lambda x: (x / 9 + 1).prod(dim=1),
    "cumprod": lambda x: (x / 9 + 1).cumprod(dim=1),
    "max of all elements": lambda x: x.max(),
    "min of all elements": lambda x: x.min(),
    "median of all elements": lambda x: x.median(),
    "nanmedian of all elements": lambda x: x.nanmedian(),
    "masked_fill by a tensor": lambda x: x.masked_fill((x > 0).detach(), x.mean()),
    "angle": lambda x: torch.polar(x + 3, x).angle(),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x / 9),
    "pinv": lambda x: torch.linalg.pinv(x + 3 * torch.eye(8)),
    "lstsq": lambda x: torch.linalg.lstsq(x + 3 * torch.eye(8), x[:, :3]).solution,
    "qr": lambda x: torch.linalg.qr(x)[0],
    "householder_product": lambda x: torch.linalg.householder_product(x, x[0]),
}
SAME_FORMULAS = {
    "amax": lambda x: x.amax(),
    "max of a dimension": lambda x: x.max(dim=1).values,
    "masked_fill by a number": lambda x: x.masked_fill((x > 0).detach(), 0.0),
    "inverse": lambda x: torch.linalg.inv(x + 3 * torch.eye(8)),
    "norm": lambda x: x.norm(float("inf")),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", OTHER_FORMULAS | SAME_FORMULAS)
def test_a_note_names_a_gradient_that_is_computed_differently_under_the_meter(name):
    """The note exists exactly if the meter and a recording differ."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8))

    def step() -> None:
        weight.grad = None
        (OTHER_FORMULAS | SAME_FORMULAS)[name](weight * 1).sum().backward()

    step()
    trace = memlab.measure(step)
    note = [note for note in trace.notes if "differently under the meter" in note]
    assert bool(note) == (name in OTHER_FORMULAS)
    assert all(name.removesuffix(" of a dimension") in each for each in note)
    assert compare(trace, record(step, warm_up=step)).exact == (not note)
