"""Every kind of step: the meter against the step unwatched, and dry runs against real ones."""

from collections.abc import Iterator

import pytest
import torch
from kinds import KINDS, OUTSIDE_THE_PROMISE
from quick import quick
from traces import renumbered

import memlab
from memlab.metering.cycles import no_cycle_collection
from memlab.metering.profiler_recording import compare, record, with_workspace
from memlab.trace import Trace

QUICK = list(KINDS)[::3]  # in make test
PROMISED = [name for name in KINDS if name not in OUTSIDE_THE_PROMISE]
DRY_RUN_REFUSES = {
    "recommender_sparse_gradients": "sparse gradients",
    "formulas_beyond_the_promise": "least squares, whose rank is a value",
    "lbfgs": "how often it evaluates the loss depends on the loss",
}


@pytest.fixture(autouse=True)
def _no_cycle_collection() -> Iterator[None]:
    """Two runs of one step would free a cycle of Python objects at different moments."""
    with no_cycle_collection():
        yield


NOT_REFUSED = [name for name in KINDS if name not in DRY_RUN_REFUSES]


def second_step(name: str) -> Trace:
    step, model, optimizer = KINDS[name]()
    step()
    return memlab.measure(step, model=model, optimizer=optimizer)


@pytest.mark.parametrize("name", quick(QUICK, PROMISED))
def test_the_meter_sees_exactly_what_happens_unwatched(name):
    """Each result of an operator is one allocation of the stream, and nothing else is; live bytes
    at the end and the peak are equal to the byte."""
    step, _, _ = KINDS[name]()
    comparison = compare(second_step(name), record(step, warm_up=step))
    assert comparison.exact, comparison


@pytest.mark.parametrize("name", quick(QUICK, [name for name in PROMISED if name != "lstm"]))
def test_with_the_kernels_scratch_the_peak_is_the_real_one(name):
    """Not for `lstm`: of 160 bytes that it frees around its peak, Python decides which die first,
    and watched it decides otherwise."""
    step, _, _ = KINDS[name]()
    recording = record(step, warm_up=step)
    trace = second_step(name)
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    whole = with_workspace(trace, recording)
    assert whole.peak_bytes == before + recording.peak_bytes
    assert whole.live_bytes == before + recording.live_bytes


@pytest.mark.filterwarnings("ignore:cov.*degrees of freedom")  # it reads their number
@pytest.mark.parametrize("name", quick(QUICK, NOT_REFUSED))
def test_a_dry_run_equals_the_real_run(name):
    real = second_step(name)
    with memlab.dry_run():
        dry = second_step(name)
    assert renumbered(dry) == renumbered(real)


@pytest.mark.parametrize("name", DRY_RUN_REFUSES)
def test_a_dry_run_refuses_what_depends_on_values_in_one_sentence(name):
    with (
        memlab.dry_run(),
        pytest.raises(ValueError, match=r"^\S*\w+.py:\d+ .* a dry run (has|does)"),
    ):
        second_step(name)


@pytest.mark.parametrize("name", OUTSIDE_THE_PROMISE)
def test_what_is_outside_the_promise_is_so_for_a_reason_that_still_holds(name):
    step, _, _ = KINDS[name]()
    assert not compare(second_step(name), record(step, warm_up=step)).exact


IN_ANOTHER_WAY = {  # operators whose gradients take other operators while they are watched
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
IN_THE_SAME_WAY = {
    "amax": lambda x: x.amax(),
    "max of a dimension": lambda x: x.max(dim=1).values,
    "masked_fill by a number": lambda x: x.masked_fill((x > 0).detach(), 0.0),
    "inverse": lambda x: torch.linalg.inv(x + 3 * torch.eye(8)),
    "norm": lambda x: x.norm(float("inf")),
}


@pytest.mark.parametrize("name", IN_ANOTHER_WAY | IN_THE_SAME_WAY)
def test_a_note_names_a_gradient_that_is_computed_in_another_way_while_watched(name):
    """It is there exactly if the meter and the step unwatched differ."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8))

    def step() -> None:
        weight.grad = None
        (IN_ANOTHER_WAY | IN_THE_SAME_WAY)[name](weight * 1).sum().backward()

    step()
    trace = memlab.measure(step)
    note = [note for note in trace.notes if "in another way" in note]
    assert bool(note) == (name in IN_ANOTHER_WAY)
    assert all(name.removesuffix(" of a dimension") in each for each in note)
    assert compare(trace, record(step, warm_up=step)).exact == (not note)
