"""A script's own modules are never taken for a library's, and a run leaves none behind."""

import sys

import pytest

from memlab.internals.imports import of_a_new_process, when_imported
from memlab.internals.libraries import is_librarys

NAME = "a_library_of_this_test"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of that name into a folder of `sys.path`."""

    def write(folder, text="is_the_librarys = True\n"):
        path = tmp_path / folder / f"{NAME}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        monkeypatch.syspath_prepend(str(path.parent))
        return path.parent

    yield write
    sys.modules.pop(NAME, None)


def changed(when):
    """Import the module before or inside `when_imported`; return whether it was changed."""
    found = []
    if when == "before":
        __import__(NAME)
    with when_imported({NAME: found.append}):
        __import__(NAME)
    return found == [sys.modules[NAME]]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_scripts_own_module_with_a_librarys_name_stays_as_it_is(module, when):
    module("site-packages")
    module("scripts")
    assert not changed(when)


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "target", "sources"])
def test_an_installed_module_is_changed_wherever_it_lies(module, tmp_path, folder, when):
    lies_in = module(folder)
    if folder in ("target", "sources"):
        metadata = lies_in if folder == "target" else module("site-packages/empty").parent
        information = metadata / f"{NAME}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Name: {NAME}\nVersion: 1.0\n")
        (information / "RECORD").write_text("any\n")
        if folder == "sources":
            url = f'{{"url": "{lies_in.as_uri()}", "dir_info": {{"editable": true}}}}'
            (information / "direct_url.json").write_text(url)
            sys.path[:0] = [str(lies_in), str(metadata)]
    assert changed(when)


@pytest.mark.parametrize("folder", ["site-packages", "lib/site-packages/part"])
def test_an_environment_that_is_reached_through_a_link_has_librarys_files(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / folder)
    assert is_librarys(str(tmp_path / "link" / "worker.py"))
    assert not is_librarys(str(tmp_path / "worker.py"))


def test_a_module_beside_the_script_comes_before_an_imported_library(module):
    module("site-packages")
    library = __import__(NAME)
    folder = module("scripts", "is_the_librarys = False\n")
    with of_a_new_process(folder):
        assert not __import__(NAME).is_the_librarys
    assert sys.modules[NAME] is library


def test_a_scripts_modules_are_imported_again_by_the_next_run(module):
    folder = module("scripts", "of_the_run = []\n")
    for _ in range(2):
        with of_a_new_process(folder):
            of_the_run = __import__(NAME).of_the_run
            assert of_the_run == []
            of_the_run.append("a tensor")
        assert NAME not in sys.modules


def test_a_library_that_a_script_imports_stays_imported(module, tmp_path):
    module("site-packages")
    with of_a_new_process(tmp_path / "scripts"):
        library = __import__(NAME)
    assert sys.modules[NAME] is library
