"""A map over processes equals `map`, and only the parent handles Ctrl-C."""

import os
import signal

import pytest

from memlab.planner.processes import processes


@pytest.mark.parametrize("count", [1, 2])
def test_results_keep_the_order(count):
    with processes(count) as each:
        assert list(each(abs, range(-9, 0))) == [9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_a_count_of_one_uses_this_process():
    for count, is_here in ((1, True), (2, False)):
        with processes(count) as each:
            assert (list(each(eval, ["__import__('os').getpid()"])) == [os.getpid()]) is is_here


def test_workers_ignore_ctrl_c_and_this_process_does_not():
    before = signal.getsignal(signal.SIGINT)
    with processes(2) as each:
        assert list(each(signal.getsignal, [signal.SIGINT])) == [signal.SIG_IGN]
        assert signal.getsignal(signal.SIGINT) is before
