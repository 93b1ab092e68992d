"""Starting ranks and bringing back what they return; without a process group, so without torch's
part of it."""

import psutil
import pytest

from memlab.zero import launch
from memlab.zero.launch import RanksFailed, run_ranks

SOURCE = """
import os

def main(number, *, fails=False):
    rank = int(os.environ["RANK"])
    if fails and rank == 1:
        raise ValueError(f"no {number}")
    if fails:
        os.read(os.pipe()[0], 1)  # for ever
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}")
    return rank * number
"""


@pytest.fixture
def started(monkeypatch):
    """The processes that a test starts, and has ended."""
    found, start = [], launch._start
    monkeypatch.setattr(launch, "_start", lambda *given: found.append(start(*given)) or found[-1])
    yield found
    assert found
    assert not any(psutil.pid_exists(process.pid) for process in found)


def test_results_and_what_was_printed_come_in_the_order_of_ranks(started, capfd):
    assert run_ranks(SOURCE, 2, 21) == [0, 21]
    assert capfd.readouterr().out == "rank 0 of 2\nrank 1 of 2\n"


def listening():
    """The ports at which this process waits for others; other tests may have left some."""
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def test_one_that_fails_ends_all(started, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.1)
    before = listening()
    with pytest.raises(RanksFailed, match=r"^rank 1 of 2 failed: ValueError: no 21$") as failed:
        run_ranks(SOURCE, 2, 21, fails=True)
    assert "line 7, in main" in failed.value.traceback
    assert failed.value.errors[0] == "still ran when it was ended"
    assert listening() <= before  # while the error is still held


def test_after_the_time_out_nobody_runs_on(started):
    """Started or not: nothing begins and ends in so short a time."""
    with pytest.raises(TimeoutError, match=r"ranks 0, 1 of 2 still ran after 0\.01 s"):
        run_ranks(SOURCE, 2, 21, timeout=0.01)


def test_a_function_that_only_this_process_has_cannot_be_sent():
    with pytest.raises(TypeError, match=r"which other processes cannot import; give source text"):
        run_ranks(lambda: 1, 2)


def test_there_is_at_least_one_rank():
    with pytest.raises(ValueError, match="got 0 ranks; give at least 1"):
        run_ranks(SOURCE, 0)
