"""One launch of two ranks, and one of four, serve all tests of parallel training."""

from typing import Any

import pytest
from parallel_ranks import LAUNCH_TIME_OUT, all_parts
from quick import slow

from memlab.zero.launch import run_ranks


@pytest.fixture(scope="session")
def two() -> list[dict[str, Any]]:
    """What each of two ranks found, by the part that it ran: tensor, pipeline, ring."""
    return run_ranks(all_parts, 2, timeout=LAUNCH_TIME_OUT)


@pytest.fixture(scope="session")
def four() -> list[dict[str, Any]]:
    return run_ranks(all_parts, 4, timeout=LAUNCH_TIME_OUT)


@pytest.fixture(params=["two", slow("four")])
def launched(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return request.getfixturevalue(request.param)
