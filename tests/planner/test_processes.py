"""A map over processes gives what `map` gives, and Ctrl-C stays with the one that waits."""

import os
import signal

import pytest

from memlab.planner.processes import processes


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_in_the_order_of_what_was_asked(count):
    with processes(count) as each:
        assert list(each(abs, range(-9, 0))) == [9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_one_is_this_process_and_more_are_others():
    for count, is_here in ((1, True), (2, False)):
        with processes(count) as each:
            assert (list(each(eval, ["__import__('os').getpid()"])) == [os.getpid()]) is is_here


def test_they_ignore_ctrl_c_and_this_process_does_not():
    before = signal.getsignal(signal.SIGINT)
    with processes(2) as each:
        assert list(each(signal.getsignal, [signal.SIGINT])) == [signal.SIG_IGN]
        assert signal.getsignal(signal.SIGINT) is before
