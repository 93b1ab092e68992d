"""The table of what stands in for the machine, and its entrance."""

import importlib
import sys
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from beside import another_thread
from quick import together

import memlab
from memlab.world.entering import enter
from memlab.world.table import EVERY_CACHE, TABLE

ROOMS = ("devices", "values", "files", "processes", "network", "data")


def is_installed(module: str) -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec(module.partition(".")[0]) is not None
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems lack more of os")
@together("row", TABLE)
def test_each_name_exists_unless_the_row_says_where_it_does_not(row):
    if not is_installed(row.module):
        return
    importlib.import_module(row.module)
    found = [name for _, name in row.places()]
    if EVERY_CACHE in row.names:
        assert found
    elif not row.lacks:
        assert found == [name.rpartition(".")[2] for name in row.names]


def test_no_name_has_two_rows():
    counts = Counter((row.owner, name) for row in TABLE for name in row.names)
    once_more = {  # what other libraries import of torch.hub, timm must not get
        ("timm.models._builder", "load_state_dict_from_url")
    }
    assert {place for place, count in counts.items() if count > 1} <= once_more
    assert list(dict.fromkeys(row.room for row in TABLE)) == list(ROOMS)


def test_each_stand_in_of_the_table_is_given_somewhere():
    files = Path(memlab.__file__).parent.rglob("*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert [row.stand_in for row in TABLE if f'"{row.stand_in}": ' not in text] == []


def test_a_librarys_name_is_replaced_when_it_is_imported(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "tiktoken"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def get_encoding(name):\n    return name\n")
    monkeypatch.syspath_prepend(folder.parent)
    with another_thread() as elsewhere:
        with enter({"encoding": lambda real: lambda name: f"not {real(name)}"}):
            library = importlib.import_module("tiktoken")
            assert library.get_encoding("gpt2") == "not gpt2"
            assert elsewhere(lambda: library.get_encoding("gpt2")) == "gpt2"
        assert library.get_encoding("gpt2") == "gpt2"
    del sys.modules["tiktoken"]


def test_another_thread_that_imports_a_library_does_not_wait_for_the_world_to_end(
    tmp_path, monkeypatch
):
    folder = tmp_path / "site-packages" / "tiktoken"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def get_encoding(name):\n    return name\n")
    monkeypatch.syspath_prepend(folder.parent)
    with another_thread() as elsewhere, enter({"encoding": lambda real: lambda name: "stand-in"}):
        assert elsewhere(lambda: importlib.import_module("tiktoken").get_encoding("gpt2")) == "gpt2"
        assert sys.modules["tiktoken"].get_encoding("gpt2") == "stand-in"
    del sys.modules["tiktoken"]
