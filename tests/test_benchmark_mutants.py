"""benchmarks/mutants.py: one-step edits, and whether a check accepts them."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from benchmark_scripts import script

from memlab.course.answers import cell_of
from memlab.course.days import exercise_of, notebook

ROOT = Path(__file__).parents[1]
benchmark = script("mutants")
import_module("torch._dynamo")  # once, not in each child process

SOURCE = """\
def mean(values, count):
    total = values.float().sum(0)
    if count > 1:
        total /= count
    return total
"""


def test_each_edit_is_one_step_and_differs():
    found = list(benchmark.edits(SOURCE))
    plain = ast.unparse(ast.parse(SOURCE))
    assert len(set(found)) == len(found)
    assert plain not in found
    for line in (
        "    total = values.float().mean(0)",
        "    total = values.sum(0)",
        "    total = values.float().sum()",
        "    if count >= 1:",
        "    if count > 2:",
        "    if True:",
        "        total *= count",
        "        total /= total",
        "    return count",
        "        pass",
    ):
        [edited] = [text for text in found if line in text.split("\n")]
        assert len(edited.split("\n")) == len(plain.split("\n"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("edit", "accepted"),
    [
        (("", ""), True),
        (("3 * logits", "2 * logits"), False),
        (("return 4", "import os; os._exit(1)\n    return 4"), False),
    ],
    ids=["the solution", "another factor", "ends the process"],
)
def test_an_edit_is_checked_in_its_own_process(edit, accepted):
    """From a fresh process, as the benchmark is. Once autograd has started threads, as for a deep
    chain of backward passes (tests/internals/test_replacing.py), torch refuses backward in a fork.
    """
    code = (
        "import sys, mutants; from memlab.course.answers import cell_of; "
        "from memlab.course.days import exercise_of, notebook; "
        "source = cell_of(notebook(11, 'solutions'), '11.1').replace(*sys.argv[1:]); "
        "sys.exit(mutants.is_accepted(exercise_of('11.1'), source))"
    )
    command = [sys.executable, "-c", code, *edit]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, check=False)
    assert done.returncode == accepted, done.stderr


def test_an_edit_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(benchmark, "SECONDS", 1)
    source = cell_of(notebook(11, "solutions"), "11.1")
    source = source.replace("return 4", "while True: pass\n    return 4")
    assert not benchmark.is_accepted(exercise_of("11.1"), source)
