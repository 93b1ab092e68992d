"""A map over processes equals `map`, and only the parent handles Ctrl-C."""

import os
import signal

import pytest

from memlab.planner.processes import ProcessEndedError, processes


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


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL, as the system does when its memory"),
        ("os._exit(3)", "ended with status 3; its error is printed above"),
    ],
)
def test_a_process_that_ends_is_reported_instead_of_waited_for(ending, reason):
    with (
        pytest.raises(ProcessEndedError, match=f"one of 2 processes that predict steps {reason}"),
        processes(2) as each,
    ):
        list(each(exec, [f"import os; {ending}", "import time; time.sleep(600)"]))


def test_an_error_ends_processes_that_are_still_busy():
    with pytest.raises(ZeroDivisionError), processes(2) as each:
        list(each(eval, ["1 / 0", "__import__('time').sleep(600)"]))
