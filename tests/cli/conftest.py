"""Fixtures that run the command line in this process."""

import io
import json
import math
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from memlab.cli import main, terminal
from memlab.planner import search
from memlab.planner.formulas import training_bytes
from memlab.planner.measuring import Measured
from memlab.planner.options import AS_IT_IS
from memlab.planner.recipes import recipes, usual_kinds

# Standard error must not depend on timing.
terminal.SECONDS_BETWEEN_LINES = math.inf


@dataclass(frozen=True)
class Outcome:
    """A command's output and exit status."""

    status: int
    out: str
    err: str


def run_in(folder: Path, *arguments: object) -> Outcome:
    """Run `memlab` with the arguments in the folder."""
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
    """Hide accelerators, so that messages are the same on every machine."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )


@pytest.fixture(scope="session")
def schema() -> Any:
    """A validator of what `--json` prints."""
    import jsonschema  # its grammars take four seconds, in each process if a file imports it

    text = (files("memlab.cli") / "schema.json").read_text(encoding="utf-8")
    return jsonschema.Draft202012Validator(json.loads(text))


@pytest.fixture(scope="session")
def memlab_in() -> Callable[..., Outcome]:
    """Run `memlab` in a given folder."""
    return run_in


@pytest.fixture
def memlab_command(tmp_path) -> Callable[..., Outcome]:
    """Run `memlab` in the test's temporary folder."""
    return partial(run_in, tmp_path)


@pytest.fixture
def usage_error(memlab_command) -> Callable[..., str]:
    """Run a command with bad input and return its one line on standard error."""

    def run(*arguments: object) -> str:
        outcome = memlab_command(*arguments)
        assert (outcome.status, outcome.out) == (2, "")
        [line] = outcome.err.splitlines()
        assert line.startswith("memlab: ")
        return line.removeprefix("memlab: ")

    return run


@pytest.fixture
def by_formula(monkeypatch) -> None:
    """Plan in one process, with formulas instead of predictions, to test the output only."""

    def answer(setting, names, ranks=1, stage=0, adapters=None):
        everything = (r for each in usual_kinds() for r in recipes(each, sequences=setting.batch))
        recipe = next(
            r for r in (*everything, AS_IT_IS) if (r.techniques, r.dtype) == (names, setting.dtype)
        )
        peak = training_bytes(setting.config, recipe, setting.batch, setting.seq_len).peak_bytes
        return Measured(peak, peak, {"parameters": peak}, "backward", False, None)

    monkeypatch.setattr(search, "measured", answer)
    monkeypatch.setattr("memlab.cli.plan_recipes.MAX_WORKERS", 1)
