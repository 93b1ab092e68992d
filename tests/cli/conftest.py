"""The command line, run in this process."""

import io
import math
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from memlab.cli import main, terminal

# What stands on standard error is not to depend on how long anything takes.
terminal.SECONDS_TO_A_LINE = math.inf


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str


def run_in(folder: Path, *arguments: object) -> Outcome:
    """What `memlab` does when it is called with these arguments in the folder."""
    out, err = io.StringIO(), io.StringIO()
    with (
        chdir(folder),
        patch.object(sys, "argv", ["memlab", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as exit_,
    ):
        main()
    return Outcome(exit_.value.code or 0, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch) -> None:
    """The same sentences on every machine: the CPU is all there is."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )


@pytest.fixture(scope="session")
def memlab_in() -> Callable[..., Outcome]:
    """Runs `memlab` in a folder."""
    return run_in


@pytest.fixture
def memlab_command(tmp_path) -> Callable[..., Outcome]:
    """Runs `memlab` in the test's own folder."""
    return partial(run_in, tmp_path)


@pytest.fixture
def in_one_line(memlab_command) -> Callable[..., str]:
    """Runs a command that is expected to fail as bad input does, and returns its one line."""

    def run(*arguments: object) -> str:
        outcome = memlab_command(*arguments)
        assert (outcome.status, outcome.out) == (2, "")
        [line] = outcome.err.splitlines()
        assert line.startswith("memlab: ")
        return line.removeprefix("memlab: ")

    return run
