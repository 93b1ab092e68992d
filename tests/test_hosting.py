"""The files for GitHub: each command, file and version in them is there."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def commands(path: Path) -> list[str]:
    """Each line of each `run` of a workflow."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    return [line.strip() for text in runs for line in text.splitlines() if line.strip()]


def test_there_are_workflows_and_forms():
    assert {path.stem for path in WORKFLOWS} >= {"tests", "release"}
    assert {path.stem for path in FORMS} >= {"wrong-number", "out-of-memory", "gpu-measurement"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_target_extra_and_folder_of_a_command_exists(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands(path):
        for target in re.findall(r"\bmake (\w+)", command):
            assert re.search(rf"^{target}:", makefile, re.M), command
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys(), command
        for folder in re.findall(r"--nbval (\w+)", command):
            assert list((ROOT / folder).glob("*.ipynb")), command


def test_each_version_of_python_that_the_package_names_is_tried():
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    named = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each}
    assert named <= set(re.findall(r'"(3\.\d+)"', text))


@pytest.mark.parametrize("path", [p for p in FORMS if p.stem != "config"], ids=lambda p: p.stem)
def test_a_form_has_what_github_requires(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0


def test_the_changelog_begins_with_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.M)[0] == PROJECT["version"]


def test_each_hook_before_a_commit_runs_a_program_of_the_project():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    programs = {hook["entry"].split()[0] for repo in config["repos"] for hook in repo["hooks"]}
    assert programs <= {"ruff", "python", "make"}


def test_types_are_checked_by_make_before_each_push_and_in_ci():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = dict(re.findall(r"^(\w+):(.*(?:\n\t.*)*)", makefile, re.M))
    assert "-m mypy" in rules["static"]
    assert all(rules[target].split()[0] == "static" for target in ("check", "test"))
    for name in (".pre-commit-config.yaml", ".github/workflows/tests.yml"):
        assert "make check" in (ROOT / name).read_text(encoding="utf-8")
