"""Day 1's checks accept right answers written differently, and refuse wrong ones."""

import pytest
import torch
from edited import each, verdict_on

import memlab
from memlab.course import days, ledger
from memlab.course.exercises import OK, WRONG, judge
from memlab.model import GPT

COUNT, STATE, ACTIVATIONS, PEAK, BATCH = days.day(1).exercises
FIRST = "parameters = list(model.parameters())"
MIDDLE = "if bytes_at(middle) <= budget_bytes:"
OF_THE_FIRST_GROUP = (
    '(optimizer.state[p] for p in optimizer.param_groups[0]["params"] if p in optimizer.state)'
)
OF_THE_MODEL = "(optimizer.state.get(p, {}) for p in parameters)"

REFUSED = [
    (
        "1.2",
        "gradients of one dtype",
        ("g.nbytes for g", "g.numel() * parameters[0].itemsize for g"),
    ),
    (
        "1.2",
        "frozen weights have no gradient",
        ("if p.grad is not None", "if p.requires_grad and p.grad is not None"),
    ),
    (
        "1.4",
        "never less than the end of backward",
        ("return always +", "return max(16 * parameter_count(config), always +"),
        ("+ 2 * logits", "+ 2 * logits)"),
    ),
    ("1.1", "no groups", ("config.kv_heads * config.head_dim", "config.hidden_size")),
    ("1.2", "a step", (FIRST, f"optimizer.step(); {FIRST}")),
    ("1.2", "gradients dropped", (FIRST, f"optimizer.zero_grad(); {FIRST}")),
    ("1.2", "the first group alone", ("optimizer.state.values()", OF_THE_FIRST_GROUP)),
    ("1.2", "mode changed", (FIRST, f"model.eval(); {FIRST}")),
    ("1.2", "all made trainable", (FIRST, f"model.requires_grad_(True); {FIRST}")),
    ("1.2", "a shared matrix twice", (FIRST, "parameters = list(model.state_dict().values())")),
    ("1.2", "no state of master weights", ("optimizer.state.values()", OF_THE_MODEL)),
    ("1.3", "no 1/rms", ("norm = 2 * C + 1", "norm = 2 * C")),
    ("1.3", "untied logits twice", ("config.vocab_size", "config.vocab_size * (2 - config.tied)")),
    ("1.3", "one norm a block", ("block = 2 * norm +", "block = norm +")),
    ("1.3", "heads of keys", (" + config.heads\n", " + config.kv_heads\n")),
    ("1.3", "a loss a token", ("+ ends) + 1)", "+ ends + 1))")),
    ("1.4", "no moments", ("+ 8 * parameter_count(config)", "+ 0")),
    ("1.4", "one temporary", ("+ 2 * logits", "+ logits")),
    ("1.4", "one sequence", ("activation_bytes(config, batch,", "activation_bytes(config, 1,")),
    ("1.5", "a fixed bound", ("fits, too_many = 0, 1", "fits, too_many = 0, 2**24")),
    ("1.5", "a larger bound", ("fits, too_many = 0, 1", "fits, too_many = 0, 2**40")),
    ("1.5", "bytes as a bound", ("fits, too_many = 0, 1", "fits, too_many = 0, budget_bytes + 1")),
    ("1.5", "one always fits", ("fits, too_many = 0, 1", "fits, too_many = 1, 2")),
    ("1.5", "below, not up to", (MIDDLE, MIDDLE.replace("<=", "<"))),
    ("1.5", "stops early", ("while too_many - fits > 1:", "while too_many - fits > 2:")),
]


@each(REFUSED)
def test_a_wrong_answer_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


def measured(model, optimizer):
    trace = memlab.measure(lambda: None, model=model, optimizer=optimizer)
    return {k: trace.at_end.get(k, 0) for k in ("parameters", "gradients", "optimizer_state")}


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (STATE, measured),
        (STATE, lambda model, optimizer: ledger.state_bytes(model, optimizer)),
        (ACTIVATIONS, lambda *shape: ledger.activation_bytes(*shape)),
        (PEAK, lambda *shape: ledger.start_of_backward_bytes(*shape)),
        (BATCH, lambda *given: ledger.largest_batch(*given)),
    ],
)
def test_the_librarys_function_is_refused(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert "memlab." in verdict.text, verdict


def built_on_meta(config):
    with torch.device("meta"):
        return sum(weight.numel() for weight in GPT(config).parameters())


def state_of_the_state_dict(model, optimizer):
    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    state = [t for of_one in optimizer.state_dict()["state"].values() for t in of_one.values()]
    return {
        "parameters": size(model.parameters()),
        "gradients": size(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer_state": size(t for t in state if isinstance(t, torch.Tensor)),
    }


def by_powers(bytes_at, budget_bytes):
    step, best = 1, 0
    while bytes_at(step) <= budget_bytes:
        step *= 2
    while step:
        if bytes_at(best + step) <= budget_bytes:
            best += step
        step //= 2
    return best


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [(COUNT, built_on_meta), (STATE, state_of_the_state_dict), (BATCH, by_powers)],
)
def test_a_right_answer_written_differently_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


def test_one_norm_a_block_is_not_taken_for_the_last_norm():
    def one_norm_a_block(config):
        return COUNT.reference(config) - config.layers * config.hidden_size

    verdict = judge(COUNT, one_norm_a_block)
    assert "After the last block" not in verdict.text
    assert "A block has two norms" in verdict.text
