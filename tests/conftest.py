"""What every test stands on: one thread, fixed seeds, no window, and no GPU asked for in vain."""

import os

# Before torch is imported: the number of threads decides how much scratch a kernel needs, and
# waiting threads must not spin. Processes that tests start inherit both.
os.environ["OMP_NUM_THREADS"] = os.environ.get("TEST_THREADS", "1")  # two in `make floats`
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["MPLBACKEND"] = "Agg"
# Predictions follow them.
os.environ.pop("PYTORCH_ALLOC_CONF", None)
os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)

import gc
import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.modules import module
from torch.utils import _python_dispatch

# Read when Triton is first imported, which many a module of torch does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings
from quick import leave_few

# The same examples on every run and machine, and no clock: a slow machine is not a wrong answer.
settings.register_profile("memlab", derandomize=True, deadline=None)
settings.load_profile("memlab")

# Ctrl-C is tested. Who runs the tests in the background has it ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Random numbers that depend on nothing but the test itself."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_on() -> Iterator[None]:
    """A test that leaves autocast on, a mode or a global hook fails itself, not whichever comes
    after it."""
    yield
    autocast = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    for device in autocast:
        torch.set_autocast_enabled(device, False)
    hooks = [name for name, held in vars(module).items() if name.startswith("_global_") and held]
    modes = torch._C._len_torch_dispatch_stack(), _python_dispatch.is_in_torch_dispatch_mode()
    vars(_python_dispatch).update(_is_in_torch_dispatch_mode=False)
    assert (autocast, hooks, modes) == ([], [], (0, False))


# Two processes share the files: with these first, neither is left alone with a long one at the end.
LONG = {
    *("test_zero_processes.py", "test_measure.py", "test_compositions.py", "test_checks.py"),
    *("test_readme.py", "test_zero_bytes.py", "test_exactness.py", "test_train.py"),
    *("test_compiled.py", "test_benchmark_evidence.py"),
}


def pytest_collection_finish() -> None:
    """Keep all imported and collected objects out of later cycle collections.

    Recordings and checks collect cycles again and again, and each time Python would walk through
    all of torch and every test: a second instead of a few milliseconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def imported_later() -> None:
    """Keep also what earlier files imported and left out of cycle collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; few of many parameters; skip tests marked `gpu` if there is no GPU."""
    leave_few(items)
    items.sort(key=lambda item: item.path.name not in LONG)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
