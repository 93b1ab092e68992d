"""memlab computes the same, in the same bytes, whatever torch's default dtype is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memlab import compression
from memlab.train import TECHNIQUES, Setting
from memlab.train.step import build, measured

PACKAGE = Path(__file__).parents[1] / "memlab"

# ------------------------------------------------------------------ the code

FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randn", "tensor", "zeros"),
}
# A check builds its own test data, in the process of a learner, whose default dtype is torch's.
NOT_READ = ("course",)


def factories_without_dtype(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or any(k.arg in ("dtype", None) for k in node.keywords):
            continue
        called = node.func
        is_torchs = isinstance(called, ast.Attribute) and ast.unparse(called.value) == "torch"
        if is_torchs and called.attr in FACTORIES:
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_that_memlab_makes_states_its_dtype():
    files = [f for f in PACKAGE.rglob("*.py") if f.relative_to(PACKAGE).parts[0] not in NOT_READ]
    assert [line for path in files for line in factories_without_dtype(path)] == []


# ------------------------------------------------------------------ the techniques

SETTING = Setting("tiny", batch=2, seq_len=16)


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def trained(name: str, dtype: torch.dtype) -> tuple:
    """Return the losses of three steps, the state's dtypes, and the peak of the third."""
    torch.set_default_dtype(dtype)
    # Compression draws from a generator of its own, which goes on from training to training.
    compression._default_generator(torch.device("cpu")).manual_seed(0)
    losses: list[torch.Tensor] = []
    training = build(SETTING, TECHNIQUES[name], on_loss=losses.append)
    training.step()
    training.step()
    state = [
        (key, value)
        for of_weight in training.optimizer.state.values()
        for key, value in of_weight.items()
        if isinstance(value, torch.Tensor)
    ]
    # torch's own optimizers count steps in tensors of the default dtype.
    counters = sum(value.nbytes for key, value in state if key == "step")
    if name in ("offloaded-optimizer", "streamed-layers"):  # they keep AdamW's state for themselves
        counters = len(list(training.model.parameters())) * (8 if dtype == torch.float64 else 4)
    dtypes = [(key, value.dtype) for key, value in state if key != "step"]
    peak = measured(training).peak_bytes - counters
    return [(loss.dtype, loss.item()) for loss in losses], dtypes, peak


@pytest.mark.few(1)
@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_has_the_same_values_and_bytes_under_every_default_dtype(name):
    wanted = trained(name, torch.float32)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert trained(name, dtype) == wanted, dtype
