"""The public names: found when they are first used, and known to whoever only reads the source."""

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


@pytest.mark.parametrize("name", HOMES)
def test_a_public_name_is_what_its_home_calls_so(name):
    assert getattr(memlab, name) is getattr(HOMES[name], name)


def test_every_public_name_is_found_and_listed():
    assert set(HOMES) | {"plot"} == set(memlab.__all__)
    assert memlab.plot.__name__ == "memlab.plot"
    assert set(memlab.__all__) <= set(dir(memlab))


def test_what_is_no_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'memlab' has no attribute 'measrue'"):
        memlab.measrue  # noqa: B018 - asking for it is the test


def test_type_checkers_find_each_name_where_it_is_found():
    tree = ast.parse(inspect.getsource(memlab))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    read = {name.asname: line.module for line in block.body for name in line.names}
    assert read == {**{name: home.__name__ for name, home in HOMES.items()}, "plot": "memlab"}


def test_importing_memlab_imports_no_torch():
    program = "import sys, memlab; assert 'torch' not in sys.modules; memlab.Trace; memlab.meter"
    subprocess.run([sys.executable, "-c", program], check=True)
