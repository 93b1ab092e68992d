"""What somebody gets who installs memlab without its repository."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_SOURCE = {"__pycache__"}
COURSE_FILES = ("lessons", "solutions", "benchmarks/results", "benchmarks/llama")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a wheel and an sdist, built without asking an index for anything."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("memlab", *COURSE_FILES):
        shutil.copytree(ROOT / name, folder / name, ignore=lambda *_: NO_SOURCE)
    (folder / "tests").mkdir()
    shutil.copy(__file__, folder / "tests")
    for kind in ("wheel", "sdist"):
        build = f"from setuptools.build_meta import build_{kind}; build_{kind}('out')"
        subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    return folder / "out"


@pytest.fixture(scope="module")
def wheel(built):
    """The content of each file in the wheel, by name."""
    (made,) = built.glob("*.whl")
    with zipfile.ZipFile(made) as files:
        return {name: files.read(name) for name in files.namelist()}


def test_a_wheel_has_every_file_of_the_package(wheel):
    """Code, and what it reads: the bill that the first lesson shows, the mark of typed packages."""
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "memlab").rglob("*")
        if path.is_file() and NO_SOURCE.isdisjoint(path.parts)
    }
    assert {"memlab/py.typed", "memlab/course/bill.json"} <= package
    package |= {
        f"memlab/course/files/{path.relative_to(ROOT).as_posix()}"
        for folder in COURSE_FILES
        for path in (ROOT / folder).iterdir()
        if path.suffix in (".ipynb", ".json", ".py")
    }
    assert {name for name in wheel if ".dist-info/" not in name} == package


def test_the_solutions_of_a_wheel_have_no_outputs(wheel):
    solutions = [name for name in wheel if name.startswith("memlab/course/files/solutions/day")]
    notebooks = [name for name in solutions if name.endswith(".ipynb")]
    assert len(notebooks) == len(list((ROOT / "solutions").glob("*.ipynb")))
    for name in notebooks:
        cells = json.loads(wheel[name])["cells"]
        assert not any(cell.get("outputs") for cell in cells)


def test_the_page_of_the_package_index_has_no_relative_links(wheel):
    (name,) = (name for name in wheel if name.endswith(".dist-info/METADATA"))
    page = wheel[name].decode()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert [link for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page) if "/blob/" in link] == []


def test_an_sdist_holds_no_tests(built):
    """Some tests without the rest of the repository fail."""
    (made,) = built.glob("*.tar.gz")
    with tarfile.open(made) as files:
        names = files.getnames()
    assert any(name.endswith("/memlab/__init__.py") for name in names)
    assert [name for name in names if "/tests/" in name] == []
