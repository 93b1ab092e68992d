"""A pytest plugin: memory budgets for tests.

    @pytest.mark.memory_budget("1.5 GiB")
    def test_a_step_stays_small():
        step()

fails if the tensors that the test allocates exceed 1.5 GiB at once, on all devices together. The
limit applies to allocated memory. Fixtures and earlier tensors do not count.

    @pytest.mark.memory_budget("20 GiB", device="cuda:rtx4090")
    def test_training_fits_an_rtx_4090():
        model = Net().cuda()
        ...
        return step, model, optimizer

runs the test as a dry run that predicts that GPU's memory, on a machine without one. Tensors are
fake, so assertions about their values mean nothing. If the test returns (step, model, optimizer),
or a function `step`, two steps run. The device is any that `memlab.predict` takes. Without a limit,
the budget is the GPU's memory minus a CUDA context, and it applies to reserved memory.

pytest finds the plugin if memlab is installed; after an update of an editable installation, install
it again or pass `-p memlab.pytest_plugin`. Tests without the marker import nothing of it.
"""

from collections.abc import Generator

import pytest

MARKER = "memory_budget"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(limit, *, device=None, assume=None): fail if the test allocates more tensors "
        f"than `limit`, such as '1.5 GiB'; with device='cuda:rtx4090', in a prediction for it",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse tests that pytest does not call as a plain function: their memory is not measured."""
    if item.get_closest_marker(MARKER) is None:
        return
    import inspect
    import unittest

    function = getattr(item, "obj", None)
    owner = getattr(item, "cls", None)
    if inspect.iscoroutinefunction(function) or not isinstance(item, pytest.Function):
        pytest.fail(f"{MARKER} works on plain test functions; this is none", pytrace=False)
    if owner is not None and issubclass(owner, unittest.TestCase):
        pytest.fail(
            f"{MARKER} does not work on unittest.TestCase; use a plain class or function",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run the test within its budget, in the place of its function."""
    marker = pyfuncitem.get_closest_marker(MARKER)
    if marker is None:
        return (yield)
    from memlab.pytest_plugin.budgets import budget_of

    function = pyfuncitem.obj
    try:
        budget = budget_of(marker.args, marker.kwargs)
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)

    def within_budget(**fixtures: object) -> None:
        failure = budget.failure_of(lambda: function(**fixtures))
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    pyfuncitem.obj = within_budget
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function
