"""Start ranks and return their results, without a process group."""

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
        os.read(os.pipe()[0], 1)  # blocks forever
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}")
    return rank * number
"""


@pytest.fixture
def started(monkeypatch):
    """Collect the processes that a test starts, and check that all have ended."""
    found, start = [], launch._start
    monkeypatch.setattr(launch, "_start", lambda *given: found.append(start(*given)) or found[-1])
    yield found
    assert found
    assert not any(psutil.pid_exists(process.pid) for process in found)


def test_results_and_output_come_in_the_order_of_ranks(started, capfd):
    assert run_ranks(SOURCE, 2, 21) == [0, 21]
    assert capfd.readouterr().out == "rank 0 of 2\nrank 1 of 2\n"


def listening():
    """Return the ports where this process listens; other tests may have left some."""
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def test_a_failing_rank_ends_all_ranks(started, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.1)
    before = listening()
    with pytest.raises(RanksFailed, match=r"^rank 1 of 2 failed: ValueError: no 21$") as failed:
        run_ranks(SOURCE, 2, 21, fails=True)
    assert "line 7, in main" in failed.value.traceback
    assert failed.value.errors[0] == "still ran when it was ended"
    assert listening() <= before  # even while the error is still referenced


def test_no_rank_runs_after_the_timeout(started):
    """Ranks cannot finish in so short a time."""
    with pytest.raises(TimeoutError, match=r"ranks 0, 1 of 2 still ran after 0\.01 s"):
        run_ranks(SOURCE, 2, 21, timeout=0.01)


def test_a_function_that_other_processes_cannot_import_is_refused():
    with pytest.raises(TypeError, match=r"which other processes cannot import; pass source text"):
        run_ranks(lambda: 1, 2)


def test_zero_ranks_are_refused():
    with pytest.raises(ValueError, match="got 0 ranks; pass at least 1"):
        run_ranks(SOURCE, 0)
