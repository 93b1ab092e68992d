"""What somebody gets who installs memlab without its repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_SOURCE = {"__pycache__"}
COURSE_FILES = ("lessons", "solutions", "benchmarks/results", "benchmarks/llama")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names of the files in a wheel, built without asking an index for anything."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("memlab", *COURSE_FILES):
        shutil.copytree(ROOT / name, folder / name, ignore=lambda *_: NO_SOURCE)
    build = "from setuptools.build_meta import build_wheel; build_wheel('out')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (made,) = (folder / "out").glob("*.whl")
    with zipfile.ZipFile(made) as files:
        return set(files.namelist())


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
