"""Commands and examples of README.md and of the pages in docs/ run; their links lead somewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quick import slow, together

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")))
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in sorted(NAMES)}
README = PAGES["README.md"]
# CONTRIBUTING.md shows a cell of a notebook, RANKS.md commands for scripts of benchmarks/parallel.
NO_EXAMPLES = {"CONTRIBUTING.md", "docs/RANKS.md"}
ALL = "\n\n".join(text for name, text in PAGES.items() if name not in NO_EXAMPLES)

# Commands not run, by how they start, and why.
NOT_RUN = {
    "git clone": "the repository is here",
    "pip install": "installs into another environment",
    "cd": "each command runs in a copy of the repository",
    "conda": "sets up; test_environment holds environment.yml against pyproject.toml",
    "source .venv/bin/activate": "each command finds this environment's programs first",
    "make": "sets up and runs these tests; `make -n` proves that the target is there",
}
OUTPUT = re.compile(r"^```sh\n([^\n]+)\n```\n\n```\n(.*?)^```$", re.M | re.S)
FENCE = re.compile(r"^ *```(\S*)[^\n]*\n(.*?)^ *```$", re.M | re.S)
NAMES_OF_SHELLS = {"bash", "shell", "zsh", "fish", "shell-session", "powershell"}


def blocks(markdown: str, *languages: str) -> list[str]:
    """The contents of the fenced blocks in one of `languages`."""
    return [body for language, body in FENCE.findall(markdown) if language in languages]


def commands(markdown: str) -> list[str]:
    """Each command of the ```sh blocks, and of the ```console blocks where `$ ` is before it."""
    lines = [line for body in blocks(markdown, "sh") for line in logical_lines(body)]
    for body in blocks(markdown, "console"):
        lines += [line[2:] for line in logical_lines(body) if line.startswith("$ ")]
    parts = [part.strip() for line in lines for part in line.split(" && ")]
    return list(dict.fromkeys(part for part in parts if part and not part.startswith("#")))


def logical_lines(body: str) -> list[str]:
    return [line.strip() for line in body.replace("\\\n", " ").splitlines()]


def outputs(markdown: str) -> dict[str, str]:
    """The output shown below each command in a block of its own."""
    return dict(OUTPUT.findall(markdown))


def files(markdown: str) -> dict[str, str]:
    """Python examples that begin with the name of a file, which commands then take."""
    named = (re.match(r"# (\w+\.py)\n", body) for body in blocks(markdown, "python"))
    return {found[1]: found.string for found in named if found}


def starts_with(command: str, *beginnings: str) -> bool:
    return any(command == start or command.startswith(start + " ") for start in beginnings)


def to_run(markdown: str) -> list[str]:
    return [command for command in commands(markdown) if not starts_with(command, *NOT_RUN)]


def make_targets(markdown: str) -> list[str]:
    return [command for command in commands(markdown) if starts_with(command, "make")]


def local_links(markdown: str) -> list[str]:
    """Paths that links and images lead to, outside fenced blocks; no addresses, no anchors."""
    prose = FENCE.sub("", markdown)
    targets = re.findall(
        r"\]\(([^)\s]+)|^\[[^\]]+\]: *(\S+)|(?:src|srcset|href)=\"([^\"]+)", prose, re.M
    )
    paths = ["".join(target).split("#")[0] for target in targets]
    return [path for path in dict.fromkeys(paths) if path and not re.match(r"\w+:", path)]


# ------------------------------------------------------------------ these pages


@pytest.fixture(scope="module")
def copy_of_the_repository(tmp_path_factory):
    """Where a command may write; its .venv is the environment that runs the tests."""
    copy = tmp_path_factory.mktemp("readme") / "memlab"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "work", "__pycache__"))
    (copy / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    for name, text in files(ALL).items():
        (copy / name).write_text(text, encoding="utf-8")
    return copy


def run(command: list[str], folder: Path) -> str:
    """Run it as a reader would after setting up, and return its output; a failure shows all of the
    output."""
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(programs), "PYTHONPATH": str(folder)}
    environment.pop("MAKEFLAGS", None)  # of the `make test` around us
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_readme_has_a_memlab_command_to_run():
    programs = [command.split()[0] for command in to_run(README)]
    assert {"memlab", ".venv/bin/memlab"} & set(programs), f"no memlab command in {programs}"


# Commands for larger models or several predictions wait for `make slow`; those for tiny do not.
SLOW = (
    *("memlab measure --model llama", "memlab measure --model 124m", "memlab plan"),
    "memlab doctor",  # which test_doctor tries
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "command",
    [slow(command) if command.startswith(SLOW) else command for command in to_run(ALL)],
)
def test_each_command_runs_and_prints_what_is_shown(command, copy_of_the_repository):
    printed = run(["sh", "-c", command], copy_of_the_repository)
    shown = [outputs(page).get(command, "") for page in PAGES.values()]
    assert all(text in re.sub(r" +$", "", printed, flags=re.M) for text in shown)


def test_outputs_that_are_shown_are_of_commands_that_run():
    assert outputs(ALL).keys() <= set(to_run(ALL))


@pytest.mark.parametrize("command", make_targets(ALL))
def test_each_make_target_is_there(command, copy_of_the_repository):
    run(["sh", "-c", command.replace("make", "make -n", 1)], copy_of_the_repository)


# PLAN.md's examples predict dozens of steps.
GUIDES = "".join(PAGES[f"docs/{name}.md"] for name in ("HOWTO", "FRAMEWORKS", "PLAN"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "example",
    [slow(text) if text in blocks(GUIDES, "python") else text for text in blocks(ALL, "python")],
)
def test_each_python_example_runs(example, copy_of_the_repository):
    run([sys.executable, "-c", example], copy_of_the_repository)


LINKS = [(page, path) for page, text in PAGES.items() for path in local_links(text)]


@together(("page", "path"), LINKS)
def test_each_local_link_and_image_leads_somewhere(page, path):
    assert ((ROOT / page).parent / path).exists()


ANCHORS = [
    (page, path or Path(page).name, anchor)
    for page, text in PAGES.items()
    for path, anchor in re.findall(r"\]\(([^)\s:]*)#([^)\s]+)\)", text)
]


@together(("page", "path", "anchor"), ANCHORS)
def test_each_anchor_is_a_heading(page, path, anchor):
    text = ((ROOT / page).parent / path).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    assert anchor in {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in headings}


def test_the_readme_is_short():
    assert len(README.split()) <= 1000


def test_commands_stand_in_blocks_that_are_run():
    assert NAMES_OF_SHELLS & {language for language, _ in FENCE.findall(ALL)} == set()


# ------------------------------------------------------------------ does it see them?

SAMPLE = """
![picture](assets/figure.svg) and [![badge](badge.svg)](https://example.org), a [part](#part),
<img src="assets/dark.png">, [the notes](notes/LOG.md#2024 "dated"), [reference][r]

[r]: docs/reference.md

```sh
git clone somewhere/memlab && cd memlab
make measure        # about a minute
memlab plan \\
    --gpu rtx4090
```

1. In a list:

   ```console
   $ memlab doctor
   OK   [not a link](no/link.md)
   ```

```python
import memlab
```
"""


def test_commands_are_taken_from_blocks_one_by_one():
    assert commands(SAMPLE) == [
        "git clone somewhere/memlab",
        "cd memlab",
        "make measure        # about a minute",
        "memlab plan      --gpu rtx4090",
        "memlab doctor",
    ]


def test_set_up_is_not_run_and_everything_else_is():
    assert to_run(SAMPLE) == ["memlab plan      --gpu rtx4090", "memlab doctor"]


def test_a_program_that_only_begins_like_set_up_is_run():
    assert to_run("```sh\nmakeshift\ncdparanoia\n```\n") == ["makeshift", "cdparanoia"]


def test_targets_of_make_are_found():
    assert make_targets(SAMPLE) == ["make measure        # about a minute"]


def test_an_output_belongs_to_the_command_above_it():
    markdown = "```sh\nmemlab doctor\n```\n\n```\nOK\nall\n```\n\n```sh\na\nb\n```\n\n```\nx\n```\n"
    assert outputs(markdown) == {"memlab doctor": "OK\nall\n"}


def test_an_example_that_begins_with_its_name_is_a_file():
    markdown = "```python\n# train.py\nx = 1\n```\n\n```python\n# a comment\n```\n"
    assert files(markdown) == {"train.py": "# train.py\nx = 1\n"}


def test_python_examples_are_found():
    assert blocks(SAMPLE, "python") == ["import memlab\n"]


def test_links_and_images_of_every_form_are_found_but_none_in_blocks():
    assert sorted(local_links(SAMPLE)) == [
        *("assets/dark.png", "assets/figure.svg", "badge.svg", "docs/reference.md"),
        "notes/LOG.md",
    ]


def test_a_command_that_fails_is_noticed_with_what_it_printed(tmp_path):
    with pytest.raises(AssertionError, match="the reason"):
        run(["sh", "-c", "echo the reason >&2; exit 3"], tmp_path)


def test_a_make_target_that_is_not_there_is_noticed(copy_of_the_repository):
    with pytest.raises(AssertionError, match="No rule to make target"):
        run(["make", "-n", "no-such-target"], copy_of_the_repository)


def test_the_readmes_accuracy_is_that_of_the_evidence_page():
    """Each row has the figures of memlab's and of xMem's line for the same trainings."""
    evidence = (ROOT / "docs/EVIDENCE.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (.*?), (.*?) \| (\d+) \| (.*?) \| .*? \| (.*?) \|$", evidence, re.M)
    figures = {(kind, what): rest for kind, what, *rest in lines}
    header = "| trainings | memory | rows |"
    table = README[README.index(header) :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 12
    for line in table:
        kind, figure, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        xmem = figures.get((kind, "xMem"), ["", "–", "–"])
        assert shown == [*figures[kind, figure], *xmem[1:]]
