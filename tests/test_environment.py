"""One set-up, written down once: the other files that speak of it agree with pyproject.toml."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from quick import together

import memlab

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What one benchmark alone imports, some gigabytes of it, what `make site` installs, and cuDNN: its
# libraries have 1.6 GB, for one file of tests.
NOT_BY_MAKE = {"trainings", "site", "cudnn"}
CORE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {
    extra: [Requirement(text) for text in texts]
    for extra, texts in PROJECT["optional-dependencies"].items()
}
# cuDNN has no pin, which would contradict the one that a CUDA build of torch makes.
DECLARED = [*CORE, *(r for extra, listed in EXTRAS.items() if extra != "cudnn" for r in listed)]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


def pin_of(requirement: Requirement) -> str | None:
    """The version that constraints.txt gives it."""
    for pin in PINS:
        if name(pin) == name(requirement):
            return str(pin.specifier).removeprefix("==")
    return None


# ------------------------------------------------------------------ constraints.txt


@together("requirement", DECLARED)
def test_each_declared_dependency_is_pinned_to_a_version_that_it_allows(requirement):
    assert requirement.specifier.contains(pin_of(requirement))


@together("pin", PINS)
def test_each_pin_is_one_version_of_any_build(pin):
    assert re.fullmatch(r"==[0-9.]+", str(pin.specifier))
    assert (pin.extras, pin.url, pin.marker) == (set(), None, None)


def test_nothing_is_pinned_twice():
    assert len({name(pin) for pin in PINS}) == len(PINS)


@pytest.mark.skipif(
    sys.platform != "linux" or bool(torch.version.cuda or torch.version.hip),
    reason="other systems and builds of torch install more, which torch itself pins",
)
def test_all_that_gets_installed_is_pinned_down_to_the_last_dependency():
    assert sorted(str(r) for r in needed(DECLARED) if pin_of(r) is None) == []


def needed(requirements: list[Requirement]) -> list[Requirement]:
    """The requirements, theirs, and so on; only the name of packages not installed here."""
    found, waiting = {}, list(requirements)
    while waiting:
        requirement = waiting.pop()
        known = found.setdefault(name(requirement), (requirement, set()))[1]
        if not known or requirement.extras - known:
            known.update({""} | requirement.extras)
            waiting += dependencies(requirement)
    return [requirement for requirement, _ in found.values()]


def dependencies(requirement: Requirement) -> Iterator[Requirement]:
    """The dependencies of the installed package here, with the requested extras."""
    try:
        texts = requires(requirement.name) or []
    except PackageNotFoundError:
        return
    for text in texts:
        wanted = Requirement(text)
        extras = {"", *requirement.extras}
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in extras):
            yield wanted


# ------------------------------------------------------------------ environment.yml, Makefile


def conda_lists() -> tuple[list[str], list[str]]:
    """What environment.yml leaves to conda, and what to pip."""
    [by_pip] = [entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict)]
    return [entry for entry in CONDA["dependencies"] if isinstance(entry, str)], by_pip


def test_conda_users_get_what_make_installs_and_nothing_else():
    _, (constraints, project) = conda_lists()
    assert constraints == "-c constraints.txt"
    editable = Requirement(project.removeprefix("-e ").replace(".", PROJECT["name"], 1))
    assert project.startswith("-e .[")
    assert editable.extras == set(EXTRAS) - NOT_BY_MAKE


def test_conda_itself_brings_only_python_and_pip_in_an_environment_named_like_the_project():
    by_conda, _ = conda_lists()
    assert [re.match(r"\w+", package)[0] for package in by_conda] == ["python", "pip"]
    assert CONDA["name"] == PROJECT["name"]


def test_condas_python_is_the_oldest_that_memlab_supports():
    [python, *_] = conda_lists()[0]
    assert python.replace("=", ">=", 1) == "python" + PROJECT["requires-python"]


def test_make_installs_every_extra_but_the_two_for_one_purpose():
    by_make = [extra for extra in EXTRAS if extra not in NOT_BY_MAKE]
    assert re.search(r"^EXTRAS := (.*)$", MAKEFILE, re.M)[1].split(",") == by_make


def test_make_asks_for_the_python_that_memlab_supports():
    [(major, minor)] = re.findall(r"sys\.version_info < \((\d+), (\d+)\)", MAKEFILE)
    assert PROJECT["requires-python"] == f">={major}.{minor}"


@pytest.mark.skipif(shutil.which("make") is None, reason="Windows has no make, and uses conda")
def test_make_alone_lists_its_targets():
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  make (\w+) +\S", listed, re.M) == [
        *("help", "measure", "check", "test", "slow", "evidence", "bench"),
        *("solutions", "lessons", "cpus", "floats", "site", "lab"),
    ]


def test_make_lets_threads_spin_in_what_it_times():
    spinning = re.findall(r"^(\w+): .*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    recipes = {target: recipe for target, recipe in spinning if target in ("measure", "bench")}
    assert len(recipes) == 2
    assert not re.search(r"SLEEPING|RUN_|OMP_", "".join(recipes.values()))
    assert not re.search(r"^(export|[a-z]+: export) *OMP", MAKEFILE, re.M)


def test_the_citation_names_the_version_and_licence_that_get_installed():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_memlab_itself_says_the_version_that_gets_installed():
    assert memlab.__version__ == PROJECT["version"]


# ------------------------------------------------------------------ what the code imports


def imports_of(folder: str) -> set[str]:
    """The packages from outside that the Python files in `folder` import, by import name."""
    files = list((ROOT / folder).rglob("*.py"))
    own = {PROJECT["name"], *(name for path in files for name in (path.stem, path.parent.name))}
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return found - own - set(sys.stdlib_module_names)


def import_names(requirements: list[Requirement]) -> set[str]:
    """What the requirements are called in an import statement."""
    names = {name(requirement) for requirement in requirements}
    installed = {
        module
        for module, distributions in packages_distributions().items()
        if names & {canonicalize_name(distribution) for distribution in distributions}
    }
    return installed | {name.replace("-", "_") for name in names}  # where it is not installed


@pytest.mark.few(1)
@pytest.mark.parametrize("folder", ["memlab", "tests", "benchmarks"])
def test_whatever_is_imported_is_declared(folder):
    assert imports_of(folder) - import_names(DECLARED) == set()


def test_memlab_and_its_command_line_start_without_any_extra():
    optional = import_names(DECLARED) - import_names(needed(CORE))
    assert "matplotlib" in optional
    script = (
        f"import sys\nsys.modules.update(dict.fromkeys({sorted(optional)}))\n"
        "import memlab, memlab.cli"
    )
    started = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
