"""The table of what `memlab run` replaces in Python."""

import inspect
import sys

import pytest

from memlab.scripts import isolation
from memlab.world.table import TABLE, missing

ROWS = [row for rows in TABLE.values() for row in rows]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems lack more of os")
def test_each_name_exists_in_this_python():
    assert [(row.owner, name) for row in ROWS for name in missing(row)] == [("os", "startfile")]


def test_no_name_is_replaced_twice():
    names = [(row.owner, name) for row in ROWS for name in row.names]
    assert len(set(names)) == len(names)


def test_each_stand_in_of_the_table_is_one_that_isolation_has():
    source = inspect.getsource(isolation)
    assert [row.stand_in for row in ROWS if f'"{row.stand_in}": ' not in source] == []
