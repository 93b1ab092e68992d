"""Checkpointing gives the values of plain autograd to the bit, and the predicted bytes.

A case runs a computation with a way to call functions, plainly or checkpointed. It returns all
observable results: outputs, gradients, buffers and random numbers drawn afterwards.
"""

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from quick import slow
from torch import Tensor, nn
from torch.autograd import forward_ad, grad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memlab
from memlab.checkpointing import MATMULS, Checkpoint, CheckpointError, checkpoint, selective
from memlab.metering.profiler_recording import record
from memlab.train import (
    Plugs,
    Setting,
    build,
    combined,
    dry_trace,
    measured,
    predicted_trace,
)

Call = Callable[..., Any]
Case = Callable[[Call], list[Tensor]]

RANDOM_STATE = 5056
FLOAT32 = 4
CASES: dict[str, Case] = {}


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


def plainly(fn: Call, /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


torchs = partial(torch_checkpoint, use_reentrant=False)
all_random = Checkpoint(random=("torch", "python", "numpy"))


def mlp(*extra: nn.Module, width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), *extra, nn.Linear(width, width))


def batch(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 8)), requires_grad=True)


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    return [tensor.grad for tensor in (*inputs, *model.parameters())]


# ------------------------------------------------------------------ values


@case
def one_call(call: Call) -> list[Tensor]:
    model, x = mlp(), batch()
    y = call(model, x)
    y.square().sum().backward()
    return [y, *gradients(model, x)]


@case
def a_chain(call: Call) -> list[Tensor]:
    model, x = nn.Sequential(*[mlp() for _ in range(4)]), batch()
    y = x
    for block in model:
        y = call(block, y)
    y.square().sum().backward()
    return [y, *gradients(model, x)]


@case
def an_input_that_requires_no_gradient(call: Call) -> list[Tensor]:
    model, tokens = nn.Sequential(nn.Embedding(10, 8), mlp()), torch.tensor([1, 2, 2])
    y = call(model, tokens)
    y.square().sum().backward()
    return [y, *gradients(model)]


@case
def dropout(call: Call) -> list[Tensor]:
    model, x = nn.Sequential(*[mlp(nn.Dropout()) for _ in range(3)]), batch()
    y = x
    for block in model:
        y = call(block, y)
    y.square().sum().backward()
    return [y, torch.rand(3), *gradients(model, x)]


@case
def random_numbers_drawn_and_the_state_reset(call: Call) -> list[Tensor]:
    """The state after the first run equals the state before, although numbers were drawn."""

    def draw(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return F.dropout(x).exp().exp()

    x = batch()
    y = call(draw, x)
    torch.rand(3)
    y.sum().backward()
    return [y, x.grad, torch.rand(3)]


@case
def a_seed_set_inside(call: Call) -> list[Tensor]:
    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return F.dropout(x).exp().exp()

    x = batch()
    torch.manual_seed(7)
    y = call(seeded, x)
    torch.manual_seed(8)
    y.sum().backward()
    return [y, x.grad, torch.rand(3)]


@case
def a_generator_as_argument(call: Call) -> list[Tensor]:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return (x * torch.rand(x.shape, generator=generator)).exp().sin()

    x, generator = batch(), torch.Generator()
    y = call(noisy, x, generator)
    y.sum().backward()
    return [y, x.grad, torch.rand(3, generator=generator)]


@case
def autocast_around_the_forward_pass(call: Call) -> list[Tensor]:
    model, x = nn.Sequential(mlp(), mlp()), batch()
    with torch.autocast("cpu", torch.bfloat16):
        y = call(model[1], call(model[0], x))
    y.square().sum().backward()
    return [y, *gradients(model, x)]


@case
def autocast_around_the_backward_pass(call: Call) -> list[Tensor]:
    model, x = mlp(), batch()
    y = call(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        y.square().sum().backward()
    return [y, *gradients(model, x)]


@case
def autocast_to_another_dtype_inside(call: Call) -> list[Tensor]:
    model, x = mlp(), batch()

    def half(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(x)

    with torch.autocast("cpu", torch.bfloat16):
        y = call(half, x)
    y.square().sum().backward()
    return [y, *gradients(model, x)]


@case
def a_weight_already_cast_by_autocast(call: Call) -> list[Tensor]:
    model, x = mlp(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        y = call(model, model(x))
    y.square().sum().backward()
    return [y, *gradients(model, x)]


@case
def keyword_arguments(call: Call) -> list[Tensor]:
    def scaled(x: Tensor, *, fn: Tensor, check: float) -> Tensor:
        return (x * fn).tanh() * check

    x, scale = batch(), batch()
    y = call(scaled, x, fn=scale, check=3.0)
    y.square().sum().backward()
    return [y, x.grad, scale.grad]


@case
def lists_and_dicts(call: Call) -> list[Tensor]:
    def nested(pair: list[Tensor], more: dict[str, Any]) -> dict[str, Any]:
        first, second = pair
        product = (first * second).tanh() * more["deep"][0].exp()
        return {"out": [product, more["deep"][0]], "number": 3}

    a, b, c = batch(), batch(), batch()
    result = call(nested, [a.sin(), b.sin()], more={"deep": (c.sin(), "no tensor")})
    (result["out"][0] * result["out"][1]).sum().backward()
    return [*result["out"], a.grad, b.grad, c.grad]


@case
def a_list_that_the_function_empties(call: Call) -> list[Tensor]:
    def emptying(tensors: list[Tensor]) -> Tensor:
        return (tensors.pop() * tensors.pop()).tanh().exp()

    a, b = batch(), batch()
    y = call(emptying, [a, b])
    y.sum().backward()
    return [y, a.grad, b.grad]


@case
def nested_twice(call: Call) -> list[Tensor]:
    model, x = nn.Sequential(*[mlp(nn.Dropout()) for _ in range(3)]), batch()

    def outer(x: Tensor) -> Tensor:
        for block in model:
            x = call(block, x)
        return x

    y = call(outer, x)
    y.square().sum().backward()
    return [y, torch.rand(3), *gradients(model, x)]


@case
def nested_five_deep(call: Call) -> list[Tensor]:
    model, x = nn.Sequential(*[mlp(nn.Dropout()) for _ in range(5)]), batch()

    def level(depth: int, x: Tensor) -> Tensor:
        inside = model[depth](x)
        return call(level, depth + 1, inside.sin()).tanh() if depth < 4 else inside

    y = call(level, 0, x)
    y.square().sum().backward()
    return [y, torch.rand(3), *gradients(model, x)]


@case
def autograd_grad(call: Call) -> list[Tensor]:
    model, x = mlp(), batch()
    y = call(model, x)
    found = grad(y.square().sum(), [x, model[0].weight])
    assert all(p.grad is None for p in (x, *model.parameters()))
    return [y, *found]


@case
def backward_for_some_inputs(call: Call) -> list[Tensor]:
    model, x = mlp(), batch()
    y = call(model, x)
    y.square().sum().backward(inputs=[model[0].weight])
    assert x.grad is None
    return [y, model[0].weight.grad]


@case
def retain_graph(call: Call) -> list[Tensor]:
    model, x = mlp(nn.Dropout()), batch()
    loss = call(model, call(model, x)).square().sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()
    return [loss, *gradients(model, x)]


@case
def a_second_derivative(call: Call) -> list[Tensor]:
    model, x = mlp(nn.Dropout()), batch()
    y = call(model, x)
    (slope,) = grad(y.square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [y, slope, *gradients(model, x)]


@case
def a_third_derivative(call: Call) -> list[Tensor]:
    x = batch()
    y = call(lambda x: (x.sin() * x.exp()).tanh(), x)
    for _ in range(3):
        (y,) = grad(y.sum(), x, create_graph=True)
    return [y]


@case
def tied_outputs(call: Call) -> list[Tensor]:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin().exp()
        return y, y

    x = batch()
    first, second = call(twice, x)
    assert first is second
    (first * second.cos()).sum().backward()
    return [first, x.grad]


@case
def an_input_as_output(call: Call) -> list[Tensor]:
    x = batch()
    same, y = call(lambda x: (x, x.sin().exp()), x)
    (same * y).sum().backward()
    return [y, x.grad]


@case
def an_output_used_twice(call: Call) -> list[Tensor]:
    model, x = mlp(), batch()
    y = call(model, x)
    (y.sin() * y.cos() + y).sum().backward()
    return [y, *gradients(model, x)]


@case
def one_function_called_twice(call: Call) -> list[Tensor]:
    model, x = mlp(nn.Dropout()), batch()
    first, second = call(model, x), call(model, x)
    (first * second).sum().backward()
    return [first, second, *gradients(model, x)]


@case
def parts_one_after_the_other(call: Call) -> list[Tensor]:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        middle = F.dropout(x).sin()
        return middle.exp(), middle.tanh().exp()

    x = batch()
    first, second = call(two, x)
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    return [first, second, x.grad]


@case
def branches_that_share_nothing_backward_one_by_one(call: Call) -> list[Tensor]:
    a, b = batch(), batch()
    first, second = call(lambda a, b: (a.sin().exp(), b.tanh().exp()), a, b)
    first.sum().backward()
    second.sum().backward()
    return [first, second, a.grad, b.grad]


@case
def an_output_that_is_dropped(call: Call) -> list[Tensor]:
    x = batch()
    first, _ = call(lambda x: (x.sin().exp(), x.tanh().exp()), x)
    del _
    first.sum().backward()
    return [first, x.grad]


@case
def backward_inside(call: Call) -> list[Tensor]:
    def with_slope(x: Tensor) -> Tensor:
        y = x.sin()
        (slope,) = grad(y.cos().sum(), x)
        return x.exp() * slope

    x = batch()
    y = call(with_slope, x.tanh())
    y.sum().backward()
    return [y, x.grad]


@case
def backward_inside_with_a_retained_graph(call: Call) -> list[Tensor]:
    def with_slope(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(x).sin()
        z = y.cos()
        (slope,) = grad(z.sum(), x, retain_graph=True)
        return slope, z.exp()

    x = batch()
    slope, z = call(with_slope, x.tanh())
    z.sum().backward()
    return [slope, z, x.grad, torch.rand(3)]


@case
def backward_with_a_graph_inside(call: Call) -> list[Tensor]:
    def force(x: Tensor) -> Tensor:
        (slope,) = grad(x.sin().exp().sum(), x, create_graph=True)
        return slope.tanh()

    x = batch()
    y = call(force, x.tanh())
    y.square().sum().backward()
    return [y, x.grad]


@case
def writing_in_place_inside(call: Call) -> list[Tensor]:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), batch()
    y = call(model, x)
    y.square().sum().backward()
    return [y, *gradients(model, x)]


@case
def writing_into_an_output(call: Call) -> list[Tensor]:
    x = batch()
    y = call(lambda x: x.sin() * 2, x).mul_(3)
    y.square().sum().backward()
    return [y, x.grad]


class TwiceUnpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,), (again,) = ctx.saved_tensors, ctx.saved_tensors
        assert torch.equal(x, again)
        return gradient * x.exp()


@case
def a_tensor_unpacked_twice(call: Call) -> list[Tensor]:
    x = batch()
    y = call(lambda x: TwiceUnpacked.apply(x.sin()), x)
    y.sum().backward()
    return [y, x.grad]


@case
def enclosing_hooks(call: Call) -> list[Tensor]:
    model, x = nn.Sequential(mlp(), mlp()), batch()
    with save_on_cpu():
        y = call(model[1], call(model[0], x).sin())
    y.square().sum().backward()
    return [y, *gradients(model, x)]


@case
def inner_hooks(call: Call) -> list[Tensor]:
    model, x = mlp(), batch()

    def saving(x: Tensor) -> Tensor:
        x = x.tanh()
        with save_on_cpu():
            return model(x).sin()

    y = call(lambda x: saving(x).tanh(), x)
    y.square().sum().backward()
    return [y, *gradients(model, x)]


@case
def an_except_clause_inside(call: Call) -> list[Tensor]:
    def caught(x: Tensor) -> Tensor:
        try:
            return x.sin().exp()
        except Exception:
            return x

    x = batch()
    y = call(caught, x)
    y.sum().backward()
    return [y, x.grad]


@case
def without_gradients(call: Call) -> list[Tensor]:
    model, x = mlp(nn.Dropout()), batch()
    with torch.no_grad():
        silent = call(model, x)
    with torch.inference_mode():
        inferred = call(model, x.detach().clone())
    assert not silent.requires_grad
    assert inferred.is_inference()
    return [silent, inferred.clone(), torch.rand(3)]


def statistics_of(norm: nn.Module, x: Tensor) -> Case:
    def run(call: Call) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.GELU(), nn.Linear(8, 8))
        shared = model.requires_grad_()
        inputs = x.clone().requires_grad_()
        y = call(lambda x: shared(call(shared, x)), inputs)  # each sees two batches
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        return [y, *gradients(model, inputs), *(b.clone() for b in model.buffers())]

    return run


@case
def batch_norm(call: Call) -> list[Tensor]:
    return statistics_of(nn.BatchNorm1d(8), torch.randn(4, 8))(call)


@case
def batch_norm_with_a_cumulative_average(call: Call) -> list[Tensor]:
    return statistics_of(nn.BatchNorm1d(8, momentum=None), torch.randn(4, 8))(call)


@case
def batch_norm_that_overflows(call: Call) -> list[Tensor]:
    """The statistics are infinite after one batch and nan after another."""
    norm, x = nn.BatchNorm1d(8), torch.full((4, 8), 3e38, requires_grad=True)
    y = call(lambda x: norm(x).tanh().exp(), x)
    y.nan_to_num().sum().backward()
    return [torch.isinf(norm.running_mean), norm.num_batches_tracked]


@case
def batch_norm_in_evaluation(call: Call) -> list[Tensor]:
    return statistics_of(nn.BatchNorm1d(8).eval(), torch.randn(4, 8))(call)


@case
def instance_norm(call: Call) -> list[Tensor]:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    return statistics_of(norm, torch.randn(2, 4, 8))(call)


@case
def synchronized_batch_norm_of_one(call: Call) -> list[Tensor]:
    norm = nn.SyncBatchNorm(8).eval()
    return statistics_of(norm, torch.randn(4, 8))(call)


@case
def random_numbers_of_python_and_numpy(call: Call) -> list[Tensor]:
    def noisy(x: Tensor) -> Tensor:
        y = (x * random.random()).sin()
        return (y * float(np.random.rand())).exp() * torch.rand(8)

    if call is checkpoint:
        call = all_random
    x = batch()
    y = call(noisy, x)
    random.random(), np.random.rand()
    y.sum().backward()
    return [y, x.grad, torch.tensor([random.random(), np.random.rand()]), torch.rand(3)]


# Each is a case where memlab's gives the values of a run without a checkpoint.
# torch's checkpoint raises an error or gives other values.
TORCH_IS_WRONG = {
    "a_generator_as_argument",  # the generator advances in the second run too
    "a_list_that_the_function_empties",
    "a_tensor_unpacked_twice",
    "batch_norm",  # counts every batch once per run
    "batch_norm_with_a_cumulative_average",
    "batch_norm_that_overflows",
    "instance_norm",
    "keyword_arguments",  # until torch 2.14: one has the same name as torch's own parameter
    "random_numbers_of_python_and_numpy",
}


def observed(run: Case, call: Call) -> list[Tensor]:
    """Run a case with fixed seeds."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    return run(call)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_changes_nothing(name: str) -> None:
    assert same(observed(CASES[name], checkpoint), observed(CASES[name], plainly))


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_without_early_stop_changes_nothing(
    name: str,
) -> None:
    whole = Checkpoint(early_stop=False, random=("torch", "python", "numpy"))
    assert same(observed(CASES[name], whole), observed(CASES[name], plainly))


hashing = Checkpoint(check="hash", random=("torch", "python", "numpy"))


@pytest.mark.few(29)
@pytest.mark.parametrize("name", [name for name in CASES if name != "instance_norm"])
def test_values_are_the_same_in_both_runs(name: str) -> None:
    assert same(observed(CASES[name], hashing), observed(CASES[name], plainly))


def test_copied_statistics_fail_the_hash_check() -> None:
    """InstanceNorm saves a repeated copy of its statistics."""
    with pytest.raises(CheckpointError, match="hash"):
        observed(CASES["instance_norm"], hashing)


@pytest.mark.parametrize("name", CASES)
def test_torchs_checkpoint_fails_only_the_listed_cases(name: str) -> None:
    wanted = observed(CASES[name], plainly)
    try:
        is_right = same(observed(CASES[name], torchs), wanted)
    except (torch.utils.checkpoint.CheckpointError, IndexError, TypeError):
        is_right = False
    assert is_right or name in TORCH_IS_WRONG


@pytest.mark.parametrize("name", CASES.keys() - {"without_gradients"})
def test_every_case_recomputes_something(name: str) -> None:
    calls, runs = [], []

    def counting(fn: Call, /, *args: Any, **kwargs: Any) -> Any:
        calls.append(fn)

        def counted(*args: Any, **kwargs: Any) -> Any:
            runs.append(fn)
            return fn(*args, **kwargs)

        return all_random(counted, *args, **kwargs)

    observed(CASES[name], counting)
    assert len(runs) > len(calls)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_may_be_outside_or_inside(backend: str) -> None:
    layer, x = nn.Linear(8, 8), batch()
    compiled = torch.compile(lambda x: layer(x).sin().exp(), backend=backend)
    around = torch.compile(lambda x: checkpoint(layer, x.cos()).sin().exp(), backend=backend)
    for call in (partial(checkpoint, compiled), around):
        (slope,) = grad(call(x).sum(), x)
        (wanted,) = grad(layer(x.cos() if call is around else x).sin().exp().sum(), x)
        assert_close(slope, wanted)
    torch._dynamo.reset()


def test_a_default_device_is_restored_in_the_second_run() -> None:
    def add_ones(x: Tensor) -> Tensor:
        return (x + torch.ones(3)).exp().sin()

    with torch.device("meta"):
        x = torch.ones(3, requires_grad=True)
        y = checkpoint(add_ones, x)
    y.backward(torch.ones(3, device="meta"))
    assert x.grad.device.type == "meta"
    assert torch.ones(1).device.type == "cpu"


# ------------------------------------------------------------------ operations


class MatmulCounter(TorchDispatchMode):
    """Counts matmuls inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def matmuls_in_backward(call: Call, *last: nn.Module) -> int:
    """Count matmuls for W2(relu(W1 x)), with two forward and four backward."""
    weights = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    y = call(nn.Sequential(weights[0], nn.ReLU(), weights[1], *last), batch())
    with MatmulCounter() as matmuls:
        y.sum().backward()
    return matmuls.count


def test_the_second_run_skips_the_last_matmul() -> None:
    assert matmuls_in_backward(plainly) == 4
    assert matmuls_in_backward(checkpoint) == matmuls_in_backward(torchs) == 5


def test_an_activation_at_the_end_needs_all_matmuls() -> None:
    assert matmuls_in_backward(checkpoint, nn.Tanh()) == 6


def test_without_early_stop_everything_is_recomputed() -> None:
    assert matmuls_in_backward(Checkpoint(early_stop=False)) == 6


def test_an_except_clause_in_the_function_does_not_catch_the_early_stop() -> None:
    caught = []

    def catching(x: Tensor) -> Tensor:
        try:
            return x.sin().exp() * 2
        except Exception as error:
            caught.append(error)
            raise

    checkpoint(catching, batch()).sum().backward()
    assert caught == []


def test_tensors_needed_only_by_a_dropped_output_are_not_recomputed() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return first(x), second(second(x).relu()).relu()

    def matmuls(call: Call) -> int:
        y, _ = call(two, batch())
        del _
        with MatmulCounter() as counted:
            y.sum().backward()
        return counted.count

    assert matmuls(plainly) == matmuls(checkpoint) == 2
    assert matmuls(torchs) == 2 + 3


@pytest.mark.parametrize("call", [checkpoint, torchs])
def test_nesting_reruns_code_before_an_inner_call_once_more(call: Call) -> None:
    runs = Counter()

    def stage(name: str, x: Tensor) -> Tensor:
        runs[name] += 1
        return x.sin().exp().sin()

    def outer(x: Tensor) -> Tensor:
        return call(stage, "second", call(stage, "first", x))

    call(outer, batch()).sum().backward()
    assert runs == {"first": 3, "second": 2}


# ------------------------------------------------------------------ bytes


def kept_bytes(call: Call, blocks: list[Call], x: Tensor) -> int:
    """Return the bytes of activations between forward and backward, without the result."""
    with memlab.meter() as running:
        y = x
        for block in blocks:
            y = call(block, y)
    return running.trace.at_end["activations"] - y.untyped_storage().nbytes()


def test_only_the_inputs_stay() -> None:
    blocks, x = [mlp() for _ in range(5)], batch(16, 8)
    of_an_input = 16 * 8 * FLOAT32
    assert kept_bytes(checkpoint, blocks, x) == (5 - 1) * of_an_input  # the first input is x
    assert kept_bytes(plainly, blocks, x) == (5 - 1) * of_an_input + 5 * 2 * of_an_input


def test_inputs_that_share_a_storage_count_once() -> None:
    x = batch(16, 8)

    def one(y: Tensor, views: list[Tensor]) -> Tensor:
        return (y * views[0].exp() * views[1].sin()).tanh().exp()

    def whole(x: Tensor) -> Tensor:
        y = x.sin()
        return checkpoint(one, y, [y[:, :], y.flatten().view(16, 8)])

    assert kept_bytes(plainly, [whole], x) == 16 * 8 * FLOAT32


def kept_with_random_states(blocks: list[Call], x: Tensor) -> int:
    """Measure with the allocator, because the generator's state bypasses operators."""
    kept = []

    def step() -> None:
        y = x
        for block in blocks:
            y = checkpoint(block, y)
        kept.append(y)

    return record(step).live_bytes - x.untyped_storage().nbytes()


def test_random_states_are_shared_between_calls_that_draw_nothing() -> None:
    x = batch(16, 8)
    between = (4 - 1) * 16 * 8 * FLOAT32
    silent, drawing = [mlp() for _ in range(4)], [mlp(nn.Dropout()) for _ in range(4)]
    assert kept_with_random_states(silent, x) == between + RANDOM_STATE
    assert kept_with_random_states(drawing, x) == between + 4 * RANDOM_STATE


def test_an_inner_call_keeps_nothing_inside_an_outer_one() -> None:
    blocks, x = [mlp() for _ in range(6)], batch(16, 8)

    def outer(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x)
        return x

    def twice(x: Tensor) -> Tensor:
        return checkpoint(outer, x)

    assert kept_bytes(plainly, [outer], x) == 5 * 16 * 8 * FLOAT32
    assert kept_bytes(checkpoint, [outer], x) == kept_bytes(checkpoint, [twice], x) == 0


def test_an_outer_call_drops_inputs_in_lists() -> None:
    x = batch(16, 8)

    def outer(x: Tensor) -> Tensor:
        return checkpoint(lambda pair: (pair[0] * pair[1]).exp(), [x.sin(), x.cos()])

    assert kept_bytes(plainly, [outer], x) == 2 * 16 * 8 * FLOAT32
    assert kept_bytes(checkpoint, [outer], x) == 0


def test_enclosing_hooks_handle_the_inputs() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = batch()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        checkpoint(lambda x: x.sin().exp().tanh(), x)
    assert len(packed) == 1
    assert packed[0] is x


@pytest.fixture
def no_collector():
    """Disable the cycle collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Witness:
    """A function that keeps weak references to the storages it creates."""

    def __init__(self) -> None:
        self.storages: list[weakref.ref] = []
        self.fails = False

    def __call__(self, x: Tensor) -> Tensor:
        for function in (torch.sin, torch.exp, torch.tanh, torch.cos):
            x = function(x)
            self.storages.append(weakref.ref(x.untyped_storage()))
        if self.fails:
            raise OSError("no disk")
        return x.exp()

    @property
    def alive(self) -> int:
        return sum(storage() is not None for storage in self.storages)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("call", [checkpoint, Checkpoint(early_stop=False, check="hash")])
def test_activations_are_freed_with_the_backward_pass_without_the_cycle_collector(
    call: Call,
) -> None:
    witness, x = Witness(), batch()
    y = call(lambda x: call(witness, x.sin()), x)
    assert witness.alive == 0
    y.sum().backward()
    assert len(witness.storages) >= 2 * 4
    assert witness.alive == 0


@pytest.mark.usefixtures("no_collector")
def test_a_retained_graph_keeps_no_activations() -> None:
    witness, x = Witness(), batch()
    y = checkpoint(witness, x)
    y.sum().backward(retain_graph=True)
    assert witness.alive == 0


def test_a_retained_graph_has_the_same_peak_in_backward() -> None:
    def peak_bytes(retain_graph: bool) -> int:
        y = checkpoint(Witness(), batch(16, 8))
        return memlab.measure(lambda: y.sum().backward(retain_graph=retain_graph)).peak_bytes

    assert peak_bytes(retain_graph=True) == peak_bytes(retain_graph=False)


@pytest.mark.usefixtures("no_collector")
def test_inspecting_a_saved_tensor_leaves_nothing_allocated() -> None:
    witness, x = Witness(), batch()
    y = checkpoint(witness, x)
    assert torch.equal(y.grad_fn._saved_result, y)
    assert len(witness.storages) == 2 * 4
    assert witness.alive == 0


@pytest.mark.usefixtures("no_collector")
def test_a_partial_backward_pass_leaves_nothing_allocated() -> None:
    witness, x = Witness(), batch()
    first, second = checkpoint(lambda x: (x.sin().exp(), witness(x)), x)
    first.sum().backward(retain_graph=True)
    assert len(witness.storages) == 2 * 4
    assert witness.alive == 0
    second.sum().backward()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("goes_backward", [True, False])
def test_inputs_are_freed_with_the_graph_without_the_cycle_collector(goes_backward: bool) -> None:
    middle = batch().sin()
    storage = weakref.ref(middle.untyped_storage())
    y = checkpoint(lambda x: x.exp().sin().exp(), middle)
    del middle
    assert storage() is not None
    if goes_backward:
        y.sum().backward()
    else:
        del y
    assert storage() is None


@pytest.mark.usefixtures("no_collector")
def test_an_error_in_the_first_run_leaves_nothing_allocated() -> None:
    witness, x = Witness(), batch()
    witness.fails = True
    with pytest.raises(OSError, match="no disk") as caught:
        checkpoint(witness, x)
    del caught
    assert witness.alive == 0
    assert same([x.sin().grad_fn._saved_self], [x])  # no hook is left


@pytest.mark.usefixtures("no_collector")
def test_an_error_in_the_second_run_leaves_nothing_allocated_and_allows_a_retry() -> None:
    witness, norm, x = Witness(), nn.BatchNorm1d(8), batch()
    whole = Checkpoint(early_stop=False)
    y = whole(lambda x: witness(norm(x)), x)
    buffers, state = norm._buffers, torch.get_rng_state()
    witness.fails = True
    with pytest.raises(OSError, match="no disk") as caught:
        y.sum().backward(retain_graph=True)
    del caught
    assert witness.alive == 0
    assert norm._buffers is buffers
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    witness.fails = False
    y.sum().backward()
    assert norm.num_batches_tracked == 1
    assert x.grad is not None


# ------------------------------------------------------------------ differences between the runs


class Changing:
    """A function that behaves differently each time."""

    def __init__(self, *actions: Callable[[Tensor], Tensor]) -> None:
        self.actions = list(actions)

    def __call__(self, x: Tensor) -> Tensor:
        return self.actions.pop(0)(x)


def backward_through(call: Call, *actions: Callable[[Tensor], Tensor]) -> None:
    call(Changing(*actions), batch(4, 8)).sum().backward()


def test_another_shape_is_an_error_that_names_both_shapes() -> None:
    wanted = (
        r"when Changing ran again for backward, it saved as tensor 2 of 2 \(4, 6\) float32 on cpu, "
        r"but \(4, 8\) float32 on cpu in the first run; a checkpointed function must do the same"
    )
    with pytest.raises(CheckpointError, match=wanted):
        backward_through(checkpoint, lambda x: x.sin().sin(), lambda x: x.sin()[:, :6].sin())


def test_another_dtype_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"tensor 2 of 2 .* float64 on cpu, but .* float32"):
        backward_through(checkpoint, lambda x: x.sin().sin(), lambda x: x.sin().double().sin())


def test_another_device_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"float32 on meta, but .* on cpu"):
        backward_through(checkpoint, lambda x: x.sin().sin(), lambda x: x.sin().to("meta").sin())


def test_fewer_tensors_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="it saved 1 tensors, but 2 in the first run"):
        backward_through(checkpoint, lambda x: x.sin().sin(), lambda x: x.sin())


def test_more_tensors_are_an_error_without_early_stop() -> None:
    actions = lambda x: x.sin(), lambda x: x.sin().sin()
    backward_through(checkpoint, *actions)
    with pytest.raises(CheckpointError, match="saved more than the 1 tensors of the first run"):
        backward_through(Checkpoint(early_stop=False), *actions)


def test_other_values_are_an_error_with_check_hash() -> None:
    actions = lambda x: (x * 2).sin(), lambda x: (x * 3).sin()
    backward_through(checkpoint, *actions)
    with pytest.raises(CheckpointError, match=r"hash 0x[0-9a-f]{16}, but .* hash 0x[0-9a-f]{16} "):
        backward_through(Checkpoint(check="hash"), *actions)


def test_the_hash_detects_a_result_that_depends_on_a_changed_buffer() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    call = Checkpoint(check="hash")
    with pytest.raises(CheckpointError, match="hash"):
        call(lambda x: layer(x).tanh(), batch()).sum().backward()


def test_check_none_accepts_other_values() -> None:
    unchecked = Checkpoint(check="none")
    backward_through(unchecked, lambda x: (x * 2).sin(), lambda x: (x * 2).cos().sin())


def test_a_weight_changed_between_the_runs_is_an_error_as_in_plain_autograd() -> None:
    for call, error in ((plainly, RuntimeError), (checkpoint, CheckpointError)):
        layer, x = nn.Linear(8, 8), batch()
        y = call(layer, x).sum()
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(error, match=r"inplace operation|a weight written to \d times"):
            y.backward()


def test_writing_over_a_saved_tensor_is_an_error_as_in_plain_autograd() -> None:
    def overwriting(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.exp()  # saves itself
        z.mul_(2)
        return z.tanh()

    for call, error in ((plainly, RuntimeError), (checkpoint, CheckpointError)):
        with pytest.raises(
            error, match=r"inplace operation|was written to after it had been saved"
        ):
            call(overwriting, batch()).sum().backward()


def test_an_input_that_the_function_writes_over_is_an_error() -> None:
    y = checkpoint(lambda x: x.mul_(2).exp().sin(), batch().sin())
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"check": "values"}, 'check=\'values\'; choose one of "none", "metadata", "hash"'),
        ({"random": ("cuda",)}, r'give a tuple of any of "torch", "python", "numpy"'),
        ({"random": "torch"}, r"random='torch'; give a tuple"),
    ],
)
def test_invalid_settings_are_errors_that_name_the_choices(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint(**settings)


# ------------------------------------------------------------------ with the meter


def around_blocks(call: Call) -> Plugs:
    def wrap(block: nn.Module) -> None:
        forward = block.forward
        block.forward = lambda *args: call(forward, *args)

    return Plugs(change_model=lambda model: [wrap(block) for block in model.blocks])


TINY = Setting("tiny", batch=4, seq_len=64)


def real_trace(setting: Setting, technique: Plugs) -> memlab.trace.Trace:
    training = build(setting, technique)
    training.step()
    return measured(training)


@pytest.mark.parametrize("trace_of", [real_trace, slow(dry_trace), slow(predicted_trace)])
def test_a_model_has_the_same_peak_as_with_torchs_checkpoint(trace_of: Callable) -> None:
    setting = Setting("tiny", 4, 64, device="cuda") if trace_of is predicted_trace else TINY
    ours, theirs = (trace_of(setting, around_blocks(call)) for call in (checkpoint, torchs))
    assert ours.peak_bytes == theirs.peak_bytes
    assert ours.at_peak == theirs.at_peak
    assert ours.peak_bytes < trace_of(setting, combined("plain")).peak_bytes


def test_a_dry_run_has_the_events_of_the_real_one() -> None:
    real, dry = (trace_of(TINY, around_blocks(checkpoint)) for trace_of in (real_trace, dry_trace))
    assert [e.bytes for e in real.events] == [e.bytes for e in dry.events]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [Checkpoint(check="hash"), all_random])
def test_a_dry_run_accepts_every_setting(settings: Checkpoint) -> None:
    assert dry_trace(TINY, around_blocks(settings)).peak_bytes > 0


# ------------------------------------------------------------------ contexts and transforms


def test_both_runs_have_the_contexts_of_context_fn_as_in_torch() -> None:
    def log_of(call: Call) -> list[str]:
        log: list[str] = []

        @contextmanager
        def logging(name: str) -> Iterator[None]:
            log.append(f"{name} begins")
            yield
            log.append(f"{name} ends")

        def function(x: Tensor) -> Tensor:
            log.append("runs")
            return x.sin().exp()

        x = batch()
        call(function, lambda: (logging("first"), logging("second")), x).sum().backward()
        return log

    ours = log_of(lambda fn, contexts, x: Checkpoint(context_fn=contexts, early_stop=False)(fn, x))
    theirs = log_of(lambda fn, contexts, x: torchs(fn, x, context_fn=contexts, early_stop=False))
    assert ours == theirs
    assert ours.count("second ends") == 1


def test_torchs_selective_contexts_keep_a_matmul() -> None:
    policy = torch.utils.checkpoint.create_selective_checkpoint_contexts
    keeping = partial(policy, [torch.ops.aten.mm.default])
    layer, x = nn.Linear(8, 8, bias=False), batch()
    (slope,) = grad(Checkpoint(context_fn=keeping)(lambda x: layer(x.sin()).exp(), x).sum(), x)
    (wanted,) = grad(layer(x.sin()).exp().sum(), x)
    assert torch.equal(slope, wanted)


@pytest.mark.parametrize("name", ["context_fn", "use_reentrant", "preserve_rng_state"])
def test_a_setting_of_torchs_checkpoint_is_an_error_and_never_ignored(name: str) -> None:
    with pytest.raises(TypeError, match=rf"got {name}=, a setting of torch.utils.checkpoint"):
        checkpoint(lambda x, **ignored: x.sin(), batch(), **{name: False})


def with_dual_tensors(call: Call, x: Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, x))


TRANSFORMS = {
    "vmap": lambda call, x: torch.vmap(call)(x),
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "vjp": lambda call, x: torch.func.vjp(call, x),
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "hessian": lambda call, x: torch.func.hessian(lambda x: call(x).sum())(x),
    "dual tensors": with_dual_tensors,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's, for its own derivatives
@pytest.mark.parametrize("run", [checkpoint, selective(MATMULS)])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_torch_func_is_an_error_in_one_sentence(name: str, run: Call) -> None:
    with pytest.raises(RuntimeError, match="got a checkpoint inside vmap, jvp or another"):
        TRANSFORMS[name](partial(run, torch.sin), torch.randn(3, 4))
