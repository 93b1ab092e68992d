"""Day 1's checks accept right answers written differently, and refuse wrong ones."""

import pytest

import memlab
from memlab.course import days, ledger
from memlab.course.exercises import WRONG, judge

COUNT, STATE, ACTIVATIONS, PEAK, BATCH = days.day(1).exercises


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


def test_one_norm_a_block_is_not_taken_for_the_last_norm():
    def one_norm_a_block(config):
        return COUNT.reference(config) - config.layers * config.hidden_size

    verdict = judge(COUNT, one_norm_a_block)
    assert "After the last block" not in verdict.text
    assert "A block has two norms" in verdict.text
