"""Selective checkpointing: values, recomputed operators, and kept bytes.

torch's selective checkpointing is the oracle for all three.
"""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain, combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memlab
from memlab.attention import flash_attention
from memlab.checkpointing.operations import ATTENTION, MATMULS, Operations
from memlab.checkpointing.recompute import CheckpointError, checkpoint
from memlab.checkpointing.recording import Operator
from memlab.checkpointing.selection import best_within, operators_of, selective
from memlab.model import GPT, PRESETS

aten = torch.ops.aten
ROWS, WIDTH = 32, 64
TENSOR = 4 * ROWS * WIDTH  # bytes


def everything(operator: Operator) -> bool:
    return True


KEEP = {
    "nothing": (),
    "matmuls": MATMULS,
    "attention": ATTENTION,
    "both": MATMULS | ATTENTION,
    "silu": {aten.silu.default},
    "every third": lambda operator: operator.number % 3 == 0,
    "everything": everything,
}


class Calls(TorchDispatchMode):
    """Counts the calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def matmuls(self) -> int:
        return sum(self.count[func] for func in MATMULS)


def plain(fn, *args):
    return fn(*args)


def torchs(policy):
    """torch's selective checkpointing; `policy` decides for each operator."""

    def call(fn, *args):
        def decide(ctx, op, *_, **__):
            return CheckpointPolicy.MUST_SAVE if policy(op) else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, decide)
        return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=contexts)

    return call


def block_and_input(**plugs) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    block = GPT(PRESETS["tiny"], **plugs).blocks[1]
    return block, torch.randn(2, 16, 32, requires_grad=True)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """W2 relu(W1 x), without biases."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    return model, torch.randn(ROWS, WIDTH, requires_grad=True)


def gradients(wrap, fn, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x.grad = None
    parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    for parameter in parameters:
        parameter.grad = None
    wrap(fn, x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in parameters)]


def matmuls_of_backward(wrap, fn, x: torch.Tensor) -> int:
    y = wrap(fn, x).square().sum()
    with Calls() as calls:
        y.backward()
    return calls.matmuls


def kept_bytes(wrap, fn, x: torch.Tensor) -> int:
    """Return the bytes alive for backward, without the result."""
    results = []
    with memlab.meter() as running:
        results.append(wrap(fn, x))
    born = [event for event in running.trace.events if event.phase != "before"]
    result = results[0].untyped_storage().nbytes()
    return sum(event.bytes for event in born) - result


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("name", KEEP)
def test_a_transformer_block_has_the_gradients_of_the_plain_run(name):
    block, x = block_and_input()
    expected = gradients(plain, block, x)
    assert all(map(torch.equal, gradients(selective(KEEP[name]), block, x), expected))


@pytest.mark.parametrize("keep", [MATMULS, ATTENTION, MATMULS | ATTENTION])
def test_torchs_own_selection_has_the_same_gradients(keep):
    block, x = block_and_input()
    expected = gradients(torchs(lambda op: op in keep), block, x)
    assert all(map(torch.equal, gradients(selective(keep), block, x), expected))


@pytest.mark.slow
@given(st.sets(st.integers(0, 70)))
def test_gradients_do_not_depend_on_the_kept_calls(numbers):
    block, x = block_and_input()
    expected = gradients(plain, block, x)
    assert all(map(torch.equal, gradients(selective(numbers), block, x), expected))


def with_dropout(x):
    """The second dropout must not repeat the numbers of the first."""
    x, _ = torch.native_dropout(x.sin(), 0.3, True)
    return nn.functional.dropout(x.cos(), 0.6).exp()


@pytest.mark.parametrize(
    "keep", [everything, {aten.native_dropout.default}, {aten.bernoulli_.float}]
)
def test_random_numbers_do_not_depend_on_the_kept_operators(keep):
    x = torch.randn(64, requires_grad=True)
    expected, expected_next = gradients(plain, with_dropout, x), torch.rand(2)
    found, found_next = gradients(selective(keep), with_dropout, x), torch.rand(2)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found_next, expected_next)


def test_torchs_selection_can_draw_a_kept_dropouts_numbers_for_the_next_dropout():
    """It raises no error but gives another gradient. Random operators are therefore never kept."""
    x = torch.randn(64, requires_grad=True)
    expected = gradients(plain, with_dropout, x)
    found = gradients(torchs(lambda op: op is aten.native_dropout.default), with_dropout, x)
    assert not torch.equal(found[0], expected[0])


def written_over(x):
    y = (x @ x).relu_()  # the matmul's output is kept and overwritten
    z = (y @ x).add_(1.0)
    z[0].mul_(2.0)  # through a view
    return (z @ y).mul_(0.5)


@pytest.mark.parametrize("name", KEEP)
def test_the_function_may_overwrite_a_kept_output(name):
    x = torch.randn(8, 8, requires_grad=True)
    expected = gradients(plain, written_over, x)
    assert torch.equal(gradients(selective(KEEP[name]), written_over, x)[0], expected[0])
    assert matmuls_of_backward(selective(MATMULS), written_over, x) == matmuls_of_backward(
        plain, written_over, x
    )


@pytest.mark.parametrize("name", KEEP)
def test_the_second_run_does_not_change_kept_outputs(name):
    x = torch.randn(8, 8, requires_grad=True)
    y = selective(KEEP[name])(written_over, x).sum()
    once = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x)[0], once[0])


def test_overwriting_a_kept_output_afterwards_is_an_error():
    x = torch.randn(8, 8, requires_grad=True)
    kept = []

    def leaks(x):
        kept.append(x @ x)
        return kept[0].sin()

    y = selective(MATMULS)(leaks, x)
    with torch.no_grad():
        kept[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def reads_a_value(x):
    y = x @ x
    return y.sin() if y.sum().item() > 0 else y.cos()


@pytest.mark.parametrize("name", KEEP)
def test_a_function_may_branch_on_a_value(name):
    for sign in (1.0, -1.0):
        x = (sign * torch.eye(4)).requires_grad_()
        with torch.no_grad():
            x[0, 1] = 50.0 * sign
        expected = gradients(plain, reads_a_value, x)
        assert torch.equal(gradients(selective(KEEP[name]), reads_a_value, x)[0], expected[0])


def calls_of_backward(keep, fn, x: torch.Tensor) -> Counter:
    y = selective(keep)(fn, x).sum()
    with Calls() as calls:
        y.backward()
    return calls.count


@pytest.mark.parametrize("keep", [(), everything])
def test_values_that_a_branch_depends_on_are_recomputed(keep):
    count = calls_of_backward(keep, reads_a_value, torch.eye(4).requires_grad_())
    assert count[aten._local_scalar_dense.default] == 1
    assert count[aten.sum.default] == (0 if keep is everything else 1)  # kept, or run again


def test_both_runs_write_to_tensors_outside_the_function():
    """As in every checkpoint: a buffer is counted twice, but has no other values."""
    total = torch.zeros(())

    def adds_up(x):
        total.add_((x.detach() @ x.detach()).sum())
        return x.sin().exp()

    x = torch.eye(4).requires_grad_()
    count = calls_of_backward((), adds_up, x)
    assert count[aten.mm.default] == 1
    assert total.item() == 2 * 4


def test_an_index_used_for_writing_is_recomputed():
    """Writing at an uncomputed index could access memory out of bounds."""

    def marks(x):
        marked = torch.zeros(8)
        marked[x.detach().argsort()] = 1.0
        return x.sin().exp()

    count = calls_of_backward((), marks, torch.randn(8, requires_grad=True))
    assert count[aten.sort.default] + count[aten.argsort.default] + count[aten.sort.stable] == 1


@pytest.mark.few(4)
@pytest.mark.parametrize("name", KEEP)
def test_a_retained_graph_goes_backward_twice_and_so_do_second_derivatives(name):
    """torch's selective checkpointing raises an error in both cases."""

    def cubes(x):
        return (x @ x @ x).sin()

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    y = selective(KEEP[name])(cubes, x).sum()
    once = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], once[0])
    assert torch.autograd.gradgradcheck(partial(selective(KEEP[name]), cubes), x)


@pytest.mark.few(6)
@pytest.mark.parametrize("outer", [checkpoint, selective(()), selective(MATMULS)])
@pytest.mark.parametrize("inner", [checkpoint, selective(MATMULS), selective(everything)])
def test_it_nests_with_itself_and_with_checkpoint_in_either_order(outer, inner):
    block, x = block_and_input()
    follower = copy.deepcopy(block)

    def both(x):
        return follower(inner(block, inner(block, x)))

    expected = gradients(plain, lambda x: follower(block(block(x))), x)
    assert torch.equal(gradients(outer, both, x)[0], expected[0])


def differentiated(fn):
    def derivative(x):
        return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]

    return derivative


@pytest.mark.few(15)
@pytest.mark.parametrize("name", KEEP)
@pytest.mark.parametrize("inner", [plain, checkpoint, selective(()), selective(everything)])
def test_a_function_may_have_a_backward_pass_inside(name, inner):
    def cubes(x):
        return (x @ x @ x).sin().exp()

    def scores(x):
        return differentiated(partial(inner, cubes))(x).cos()

    x = torch.randn(4, 4, requires_grad=True)
    expected = differentiated(differentiated(cubes))(x)
    around_both = partial(selective(KEEP[name]), differentiated(partial(inner, cubes)))
    assert torch.equal(differentiated(around_both)(x), expected)
    twice = differentiated(differentiated(partial(selective(KEEP[name]), scores)))
    assert torch.equal(twice(x), differentiated(differentiated(scores))(x))


def profiled(x):
    with torch.profiler.record_function("block"):
        return (x @ x).sin()


def with_cleanup(x):
    try:
        return (x @ x).sin().exp()
    finally:
        x.detach().sum()


@pytest.mark.parametrize("name", KEEP)
@pytest.mark.parametrize("fn", [profiled, with_cleanup, nn.DataParallel(nn.Linear(4, 4))])
def test_an_early_stop_leaves_a_function_that_calls_operators_at_its_end(name, fn):
    x = torch.randn(4, 4, requires_grad=True)
    assert torch.equal(gradients(selective(KEEP[name]), fn, x)[0], gradients(plain, fn, x)[0])


def test_without_gradients_nothing_is_kept():
    model, x = mlp()
    with torch.no_grad():
        assert kept_bytes(selective(everything), model, x) == 0


# ------------------------------------------------------------------ recomputation


def test_only_matmuls_that_are_not_kept_are_recomputed():
    """W2 relu(W1 x) has 4 matmuls in backward, and 5 with an early-stopping checkpoint."""
    model, x = mlp()
    assert matmuls_of_backward(plain, model, x) == 4
    assert matmuls_of_backward(checkpoint, model, x) == 5
    assert matmuls_of_backward(selective(()), model, x) == 5
    assert matmuls_of_backward(selective(MATMULS), model, x) == 4
    assert matmuls_of_backward(torchs(lambda op: op in MATMULS), model, x) == 4


@pytest.mark.parametrize(
    ("name", "again"), [("nothing", 7), ("matmuls", 1), ("attention", 6), ("both", 0)]
)
def test_kept_operators_of_a_transformer_block_are_not_recomputed(name, again):
    """Early stop skips the last of seven matmuls; there is one attention."""
    block, x = block_and_input()
    y = selective(KEEP[name])(block, x).sum()
    with Calls() as calls:
        y.backward()
    plain_matmuls = matmuls_of_backward(plain, block, x)
    attentions = sum(calls.count[func] for func in ATTENTION)
    assert calls.matmuls - plain_matmuls + attentions == again


def test_keeping_everything_reruns_only_views_and_in_place_writes():
    block, x = block_and_input()

    def backward(wrap) -> Counter:
        y = wrap(block, x).sum()
        with Calls() as calls:
            y.backward()
        return calls.count

    again = backward(selective(everything)) - backward(plain)
    views = {func for func in again if func.is_view or func is aten._unsafe_view.default}
    alike = {aten.empty_strided.default, aten.detach.default}
    in_place = {aten.add_.Scalar}  # the norm's + eps
    assert set(again) <= views | alike | in_place


# ------------------------------------------------------------------ kept bytes


def test_only_chosen_outputs_needed_by_backward_are_kept():
    model, x = mlp()
    assert kept_bytes(plain, model, x) == TENSOR  # relu's result
    assert kept_bytes(checkpoint, model, x) == 0
    assert kept_bytes(selective(()), model, x) == 0
    assert kept_bytes(selective(MATMULS), model, x) == TENSOR  # W1 x instead


def test_keeping_matmuls_and_attention_of_a_block_takes_the_predicted_bytes():
    block, x = block_and_input()
    config = PRESETS["tiny"]
    C, KV_D, H = config.hidden_size, config.kv_heads * config.head_dim, config.heads
    per_token = {
        "matmuls": C
        + 2 * KV_D
        + C
        + 2 * config.intermediate_size,  # the last one's output is not needed
        "attention": C + H,  # including its log-sum-exp
    }
    per_token["both"] = sum(per_token.values())
    for name, numbers in per_token.items():
        assert kept_bytes(selective(KEEP[name]), block, x) == 4 * 2 * 16 * numbers


def test_keeping_everything_keeps_as_much_as_a_plain_run_and_less_than_torch():
    model, x = mlp()
    assert kept_bytes(selective(everything), model, x) == kept_bytes(plain, model, x) == TENSOR
    assert kept_bytes(torchs(lambda op: True), model, x) == 2 * TENSOR
    block, x = block_and_input()
    assert kept_bytes(selective(everything), block, x) == kept_bytes(plain, block, x)


@pytest.mark.parametrize("name", KEEP)
def test_an_outer_checkpoint_drops_outputs_kept_by_an_inner_one(name):
    block, x = block_and_input()
    inner = partial(selective(KEEP[name]), block)
    assert kept_bytes(checkpoint, inner, x) == 0


def test_kept_outputs_are_freed_with_the_graph():
    model, x = mlp()
    with memlab.meter() as running:
        y = selective(everything)(model, x)
        y.sum().backward()
        del y
    gradients_bytes = TENSOR + 2 * 4 * WIDTH * WIDTH
    born = [event for event in running.trace.events if event.phase != "before"]
    assert sum(event.bytes for event in born) == gradients_bytes


# ------------------------------------------------------------------ a budget


def five_matmuls(x):
    """Each matmul's output is the next one's input."""
    for weight in WEIGHTS:
        x = x @ weight
    return x.sin()  # needs the last output too


WEIGHTS = [torch.full((WIDTH, WIDTH), 0.1, requires_grad=True) for _ in range(5)]


@pytest.mark.parametrize("tenths", range(11))
def test_a_budget_keeps_as_many_equal_matmuls_as_fit(tenths):
    """A budget of k tenths of ten tensors keeps k and recomputes 5 - k."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    numbers = best_within(operators_of(five_matmuls, x), 10 * TENSOR * tenths // 10)
    wrap = selective(numbers)
    kept = min(tenths, 5)
    assert kept_bytes(wrap, five_matmuls, x) == kept * TENSOR
    again = matmuls_of_backward(wrap, five_matmuls, x)
    assert again - matmuls_of_backward(plain, five_matmuls, x) == 5 - kept


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=9), st.integers(0, 60))
def test_the_knapsack_equals_brute_force_and_never_exceeds_its_budget(items, budget_bytes):
    operators = [Operator(n, None, *item) for n, item in enumerate(items)]
    subsets = chain.from_iterable(combinations(operators, n) for n in range(len(items) + 1))
    fitting = (s for s in subsets if sum(o.bytes for o in s) <= budget_bytes)
    best = max(sum(o.operations for o in s) for s in fitting)
    numbers = best_within(operators, budget_bytes)
    assert sum(operators[n].operations for n in numbers) == best
    assert sum(operators[n].bytes for n in numbers) <= budget_bytes


def test_an_operator_one_byte_over_the_budget_is_not_kept():
    """torch's dynamic program rounds each operator to a tenth and takes all ten."""
    operators = [Operator(n, None, 10_004, 1) for n in range(10)]
    assert len(best_within(operators, 100_000)) == 9


def test_any_budget_of_a_block_is_respected_and_saves_the_predicted_operations():
    check_every_budget(*block_and_input())


def check_every_budget(block: nn.Module, x: torch.Tensor) -> None:
    operators = operators_of(block, x)

    def again(wrap) -> int:
        y = wrap(block, x).sum()
        with Operations() as counter:
            y.backward()
        return counter.total

    nothing, spared = again(checkpoint), []
    for budget_bytes in range(0, 60_000, 5_000):
        numbers = best_within(operators, budget_bytes)
        wrap = selective(numbers)
        assert kept_bytes(wrap, block, x) <= budget_bytes
        spared.append(sum(o.operations for o in operators if o.number in numbers))
        assert nothing - again(wrap) == spared[-1]
    assert spared == sorted(spared)
    assert spared[-1] == nothing - again(plain)


def test_a_negative_budget_is_an_error():
    with pytest.raises(ValueError, match="got a budget of -1 bytes; give 0 or more"):
        best_within([], -1)


# ------------------------------------------------------------------ composite operators

BY_TILES = partial(flash_attention, tile=4)  # ten tiles for 16 tokens


def whole(fn):
    """Make the function a composite operator."""

    def announced(x):
        if has_torch_function((x,)):
            return handle_torch_function(announced, (x,), x)
        return fn(x)

    return announced


@pytest.mark.few(2)
@pytest.mark.parametrize("keep", [*KEEP.values(), {flash_attention}])
def test_flash_attention_keeps_its_results_but_no_tiles(keep):
    """It replaces torch's operators with the same bytes."""
    block, x = block_and_input(attention=BY_TILES)
    assert all(map(torch.equal, gradients(selective(keep), block, x), gradients(plain, block, x)))
    by_tiles = keep | {flash_attention} if keep in (ATTENTION, MATMULS | ATTENTION) else keep
    theirs = ATTENTION if keep == {flash_attention} else keep
    if not callable(keep):
        wanted = kept_bytes(selective(theirs), *block_and_input())
        assert kept_bytes(selective(by_tiles), block, x) == wanted


def test_keeping_everything_with_flash_attention_keeps_as_much_as_a_plain_run():
    block, x = block_and_input(attention=BY_TILES)
    assert kept_bytes(selective(everything), block, x) == kept_bytes(plain, block, x)


def test_flash_attention_is_recomputed_only_if_it_is_not_kept():
    block, x = block_and_input(attention=BY_TILES)
    matmuls = 10 * 2  # scores of ten tiles of two sequences; matmuls with values are in place
    kept, forgotten = (
        matmuls_of_backward(selective(keep), block, x)
        for keep in (MATMULS | {flash_attention}, MATMULS)
    )
    assert forgotten - kept == matmuls


def test_no_tile_is_held_until_the_first_run_is_over():
    x = torch.randn(1, 2, 64, 8, requires_grad=True)

    def peak_bytes(keep) -> int:
        step = partial(selective(keep), lambda x: BY_TILES(x, x, x), x)
        return memlab.measure(step).peak_bytes

    assert peak_bytes(MATMULS) == peak_bytes(())


@pytest.mark.slow
def test_flash_attention_is_one_operator_to_a_budget():
    block, x = block_and_input(attention=BY_TILES)
    (attention,) = (o for o in operators_of(block, x) if o.func is flash_attention)
    config = PRESETS["tiny"]
    assert attention.bytes == 4 * 2 * 16 * (
        config.hidden_size + config.heads
    )  # including log-sum-exp
    assert attention.operations == 2 * 2 * 10 * 2 * config.heads * 4 * 4 * config.head_dim
    check_every_budget(block, x)


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("keep", [MATMULS, MATMULS | ATTENTION], ids=["forgotten", "kept"])
def test_cudas_attention_kernels_are_recomputed_only_if_they_are_not_kept(keep, kernel):
    """Flash and cuDNN's attention return integers beside their tensors."""

    def build():
        block = GPT(replace(PRESETS["tiny"], kv_heads=4)).blocks[0].bfloat16()
        x = torch.randn(2, 16, PRESETS["tiny"].hidden_size, dtype=torch.bfloat16)
        x.requires_grad_()
        return (lambda: selective(keep)(block, x).sum().backward()), block, None

    trace = memlab.predict(build, kernels=memlab.Kernels(attention=kernel))
    name = f"_scaled_dot_product_{kernel}_attention.default"
    made = (event for event in trace.events if event.bytes > 0)
    phases = {event.phase for event in made if event.operator.endswith(name)}
    assert phases == {"forward"} | ({"backward"} if keep is MATMULS else set())


def test_a_number_beside_tensors_is_replayed():
    """So that code that reads it runs the same way again."""
    seen = []

    def with_length(x):
        out, _, _, _, rows, *_ = aten._scaled_dot_product_flash_attention(x, x, x, 0.0, True)
        seen.append(rows)
        return out

    def build():
        x = torch.randn(1, 2, 24, 8, dtype=torch.bfloat16, requires_grad=True)
        return (lambda: selective(ATTENTION)(with_length, x).sum().backward()), None, None

    memlab.predict(build)
    assert len(seen) % 2 == 0
    assert set(seen) == {24}


def test_flash_attention_with_dropout_is_recomputed_although_chosen():
    block, x = block_and_input(attention=partial(BY_TILES, dropout=0.5))
    keep = MATMULS | {flash_attention}
    assert all(map(torch.equal, gradients(selective(keep), block, x), gradients(plain, block, x)))
    assert flash_attention not in {operator.func for operator in operators_of(block, x)}
    assert kept_bytes(selective(keep), block, x) == kept_bytes(selective(MATMULS), block, x)


def in_place(x):
    return torch.zeros_like(x).add_(x).mul_(3)


def in_place_below_a_mask(x):
    return (x * 2).masked_fill_(x < 0, 0).sin()


def a_view(x):
    return in_place(x)[1:]


def two_results(x):
    y = in_place(x)
    return y, (y + 1).t()


def a_value(x):
    return x * (2 if x.sum() > 0 else 3)


@pytest.mark.parametrize("fn", [in_place, in_place_below_a_mask, a_view, two_results, a_value])
@pytest.mark.parametrize("is_written_over", [False, True])
def test_a_composite_operator_can_be_kept_for_any_kind_of_result(fn, is_written_over):
    announced = whole(fn)

    def function(x):
        results = announced(x.sin())
        first, *others = results if isinstance(results, tuple) else (results,)
        first = first.clone() if not is_written_over else first.mul_(2)
        return sum((other.sum() for other in others), first.cos().square())

    x = torch.randn(8, 8, requires_grad=True)
    expected = gradients(plain, function, x)
    assert all(map(torch.equal, gradients(selective({announced}), function, x), expected))


def test_the_result_of_a_composite_operator_is_kept_if_it_is_only_read():
    weight = torch.randn(WIDTH, WIDTH)
    announced = whole(lambda x: x @ weight)

    def function(x):
        return (announced(x) + 1).sin()

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    again, once = (matmuls_of_backward(w, function, x) for w in (selective({announced}), plain))
    assert again == once
    assert kept_bytes(selective({announced}), function, x) == TENSOR


def test_a_composite_operator_whose_inner_values_are_read_outside_is_recomputed():
    stash = []

    @whole
    def announced(x):
        stash[:] = [x.exp()]
        return stash[0] * 2

    def function(x):
        return announced(x).sin() * (stash[0] + 1).sin()  # the sum is recomputed

    x = torch.randn(8, requires_grad=True)
    expected = gradients(plain, function, x)
    assert all(map(torch.equal, gradients(selective({announced}), function, x), expected))


# ------------------------------------------------------------------ errors


def test_another_operator_in_the_second_run_is_an_error():
    turns = iter((True, False))

    def fickle(x):
        return x.sin().exp() if next(turns) else x.cos().exp()

    x = torch.randn(4, requires_grad=True)
    y = selective(())(fickle, x)
    with pytest.raises(CheckpointError, match=r"called aten\.cos\.default, but"):
        y.sum().backward()


def test_operations_of_cpu_attention_are_counted():
    q = torch.ones(2, 4, 8, 16)
    with Operations() as counter:
        nn.functional.scaled_dot_product_attention(q, q, q)
    assert counter.total == 2 * 2 * 2 * 4 * 8 * 8 * 16
