"""The public names: found on first use, and visible to tools that only read the source."""

import ast
import inspect
import subprocess
import sys

import pytest

import memlab
from memlab import dry_runs, metering, monitoring, prediction, trace
from memlab.configs import targets

HOMES = {
    **dict.fromkeys(("BudgetExceeded", "budget", "measure", "meter"), metering),
    "dry_run": dry_runs,
    "monitor": monitoring,
    "predict": prediction,
    "Kernels": targets,
    **dict.fromkeys(("Event", "Trace"), trace),
}
MODULES = ("explain", "plot")  # public as modules; `explain` is called, too


@pytest.mark.parametrize("name", HOMES)
def test_a_public_name_is_what_its_home_calls_so(name):
    assert getattr(memlab, name) is getattr(HOMES[name], name)


def test_every_public_name_is_found_and_listed():
    assert {*HOMES, *MODULES} == set(memlab.__all__)
    for name in MODULES:
        assert getattr(memlab, name).__name__ == f"memlab.{name}"
    assert callable(memlab.explain)
    assert set(memlab.__all__) <= set(dir(memlab))


def test_what_is_no_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'memlab' has no attribute 'measrue'"):
        memlab.measrue  # noqa: B018 - asking for it is the test


def test_type_checkers_find_each_name_where_it_is_found():
    tree = ast.parse(inspect.getsource(memlab))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    read = {name.asname: line.module for line in block.body for name in line.names}
    homes = {name: home.__name__ for name, home in HOMES.items()}
    assert read == {**homes, **dict.fromkeys(MODULES, "memlab")}


def test_importing_memlab_imports_no_torch():
    program = "import sys, memlab; assert 'torch' not in sys.modules; memlab.Trace; memlab.meter"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_planners_formulas_need_no_installed_package():
    """They run in a browser, too: for every row of the registry, on every kind of ranks."""
    program = """
import sys
sys.modules.update(dict.fromkeys(("torch", "numpy", "rich", "typer", "filelock", "xxhash")))
from memlab.configs.shapes import PRESETS
from memlab.planner.cards import budget_bytes, memory_named
from memlab.planner.formulas import training_bytes
from memlab.planner.recipes import recipes, usual_kinds
for kind in usual_kinds():
    for recipe in recipes(kind, sequences=2, gpus=8):
        training_bytes(PRESETS["5m"], recipe, 2, gpus=8)
assert budget_bytes(memory_named("rtx4090"), "cuda:rtx4090") > 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)
