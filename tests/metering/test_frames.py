"""Finding an operator's caller."""

import numpy as np
import pytest
import torch

from memlab.metering import frames
from memlab.metering.modes import LightMode

USER_CODE = """
def with_a_hook(x):
    y = x.sin()
    y.register_hook(lambda gradient: gradient.tanh())
    y.sum().backward()

def through_a_module(x):
    torch.nn.Linear(3, 3)(x)

def through_numpy(x, rows):
    rows.__getitem__(x.sum())
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Run USER_CODE as if it were in train.py, and this file as if it belonged to torch."""
    monkeypatch.setattr(frames, "_INTERNAL_FRAMES", (*frames._INTERNAL_FRAMES, __file__))
    functions = {"torch": torch}
    exec(compile(USER_CODE, str(tmp_path / "train.py"), "exec"), functions)
    return functions


def seen_while(step, *args) -> dict[str, tuple[bool, str]]:
    """Return, for each operator's last call, whether the engine made it, and the user's line."""
    seen = {}

    class Watch(LightMode):
        def handle(self, func, types, args, kwargs):
            line = frames.user_line()
            seen[func.overloadpacket.__name__] = (frames.called_by_engine(), line)
            return func(*args, **kwargs)

    with Watch():
        step(*args)
    return seen


def test_the_engine_calls_autograd_formulas_but_not_user_hooks(user):
    seen = seen_while(user["with_a_hook"], torch.ones(3, requires_grad=True))
    came = {name: from_engine for name, (from_engine, _) in seen.items()}
    assert came["cos"]
    assert not came["sin"]
    assert not came["tanh"]


def test_the_line_is_in_user_code_not_in_torch(user):
    seen = seen_while(user["through_a_module"], torch.ones(1, 3))
    assert seen["addmm"][1] == "train.py:8 through_a_module"


def test_the_line_is_in_user_code_not_in_numpy(user, tmp_path):
    np.zeros(8, np.uint8).tofile(tmp_path / "rows")
    rows = np.memmap(tmp_path / "rows", mode="r")  # whose indexing is written in Python
    seen = seen_while(user["through_numpy"], torch.ones(1, dtype=torch.long), rows)
    assert seen["_local_scalar_dense"][1] == "train.py:11 through_numpy"


def test_a_file_below_the_working_directory_has_a_relative_path(user, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path.parent)
    seen = seen_while(user["through_a_module"], torch.ones(1, 3))
    assert seen["addmm"][1] == f"{tmp_path.name}/train.py:8 through_a_module"


def test_called_by_checks_the_calling_function():
    def outer() -> tuple[bool, bool]:
        return frames.called_by("outer"), frames.called_by("inner")

    assert outer() == (True, False)
