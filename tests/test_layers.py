"""Imports point down: each part of memlab knows only the layers below it, and no neighbour."""

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up. A part is a module or a package right below memlab. `import memlab` imports
# `__init__`, the public names: the command line may, as any user of memlab may.
LAYERS = (
    ("reference",),  # the techniques as their papers have them, in torch alone
    ("units",),
    ("internals",),  # what any part may need
    # `world` is low because dry runs and predictions enter it; their stand-ins of devices and
    # values need the meter, and stay with them
    ("configs", "trace", "quantize", "rounding", "world"),
    (
        *("allocator", "model", "data", "checkpointing", "precision", "accumulation"),
        *("lora", "optim", "compression", "attention", "losses", "zero", "offload", "ema"),
        "packing",
    ),
    ("metering", "monitoring", "plot", "qlora", "explain"),
    ("dry_runs",),
    ("prediction",),
    ("train", "pytest_plugin"),
    ("planner",),
    ("course", "transformers_models", "scripts"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}


def violations(package: Path) -> list[str]:
    """Every import in `package` that does not point down, as `file:line: fault`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        where = path.relative_to(package.parent).as_posix()
        if part not in LAYER_OF:
            found.append(f"{where}:1: {part} stands in no layer")
            continue
        for line, target in memlab_imports(path, package):
            if complaint := judge(part, target):
                found.append(f"{where}:{line}: {complaint}")
    return found


def memlab_imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, imported module) of each import from memlab, anywhere in the file."""
    home = ".".join(path.relative_to(package.parent).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        for target in imported(node, home):
            if target.split(".")[0] == "memlab":
                yield node.lineno, target


def imported(node: ast.AST, home: str) -> list[str]:
    """The full names that an import in package `home` asks for; of other nodes, none."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        source = resolve_name("." * node.level + (node.module or ""), home)
        return [full_name(source, alias.name) for alias in node.names]
    return []


def full_name(source: str, imported_name: str) -> str:
    """What `from source import imported_name` asks for; for a public name, memlab as a whole."""
    if source == "memlab" and imported_name not in LAYER_OF:
        return source
    return f"{source}.{imported_name}"


def judge(part: str, target: str) -> str | None:
    """The fault of an import of `target` in `part`; None if there is none."""
    wanted = "__init__" if target == "memlab" else target.split(".")[1]
    if wanted == part:
        return None
    if wanted not in LAYER_OF:
        return f"{part} imports {target}, which stands in no layer"
    if LAYER_OF[wanted] < LAYER_OF[part]:
        return None
    return f"{part} (layer {LAYER_OF[part]}) imports {target} (layer {LAYER_OF[wanted]})"


def test_every_import_in_memlab_points_down():
    assert violations(ROOT / "memlab") == []


def test_no_part_stands_in_two_layers():
    assert len(LAYER_OF) == sum(map(len, LAYERS))


def test_what_plans_and_what_runs_scripts_prints_nothing():
    """A command prints their results: as text, or as one document with --json."""
    printing = [
        f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
        for part in ("planner", "scripts")
        for path in sorted((ROOT / "memlab" / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "print"
    ]
    assert printing == []


# ------------------------------------------------------------------ does it see them?


@pytest.fixture
def package(tmp_path):
    """Makes a package called memlab of {file: source}."""

    def make(sources: dict[str, str]) -> Path:
        for name, source in sources.items():
            path = tmp_path / "memlab" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        return tmp_path / "memlab"

    return make


@pytest.mark.parametrize(
    "source",
    [
        "import memlab.train",
        "import memlab.train as t",
        "import os, memlab.train",
        "from memlab import train",
        "from memlab import trace, train",
        "from memlab.train import step",
        "from memlab.train.parts import step",
        "from . import train",
        "from .train import step",
        "def f():\n    import memlab.train",
        "class C:\n    def f(self):\n        from .train import step",
        "if TYPE_CHECKING:\n    from memlab.train import step",
        "try:\n    import memlab.train\nexcept ImportError:\n    pass",
    ],
)
def test_an_upward_import_is_found_however_it_is_written(package, source):
    [violation] = violations(package({"plot.py": source}))
    assert "plot (layer 5) imports memlab.train" in violation


def test_an_upward_relative_import_is_found_inside_a_package(package):
    sources = {
        "zero/simulation.py": "from ..train import step",
        "zero/__init__.py": "from .. import train",
    }
    assert violations(package(sources)) == [
        "memlab/zero/__init__.py:1: zero (layer 4) imports memlab.train (layer 8)",
        "memlab/zero/simulation.py:1: zero (layer 4) imports memlab.train.step (layer 8)",
    ]


def test_an_import_of_a_neighbour_is_found(package):
    assert violations(package({"lora.py": "from memlab.optim import AdamW"})) == [
        "memlab/lora.py:1: lora (layer 4) imports memlab.optim.AdamW (layer 4)"
    ]


def test_a_module_that_stands_in_no_layer_is_found(package):
    assert violations(package({"helpers.py": "", "zero/partition.py": ""})) == [
        "memlab/helpers.py:1: helpers stands in no layer"
    ]


def test_an_import_of_a_module_that_stands_in_no_layer_is_found(package):
    assert violations(package({"cli.py": "import memlab.helpers"})) == [
        "memlab/cli.py:1: cli imports memlab.helpers, which stands in no layer"
    ]


@pytest.mark.parametrize(
    "source", ["import memlab", "from memlab import measure", "from . import x"]
)
def test_an_import_of_the_public_names_from_below_is_found(package, source):
    assert violations(package({"course.py": source})) == [
        "memlab/course.py:1: course (layer 10) imports memlab (layer 11)"
    ]


def test_public_names_that_come_from_the_command_line_are_found(package):
    assert violations(package({"__init__.py": "from .cli import main"})) == [
        "memlab/__init__.py:1: __init__ (layer 11) imports memlab.cli.main (layer 12)"
    ]


def test_every_violation_is_reported_with_its_line(package):
    source = "import memlab.plot\nimport memlab.train\n\n\ndef f():\n    import memlab.cli\n"
    assert [text.split(": ")[0] for text in violations(package({"trace.py": source}))] == [
        "memlab/trace.py:1",
        "memlab/trace.py:2",
        "memlab/trace.py:6",
    ]


def test_imports_of_lower_layers_of_its_own_part_and_of_others_are_no_violation(package):
    sources = {
        "__init__.py": "from memlab.trace import Trace",
        "__main__.py": "from memlab.cli import main",
        "cli.py": "import memlab\nfrom memlab import measure, plot",
        "train.py": "import torch\nfrom memlab import units\nfrom .zero import partition",
        "zero/simulation.py": "from . import partitioning\nfrom memlab.zero.processes import x",
        "zero/processes.py": "from .partitioning import partition\nfrom ..trace import Trace",
        "zero/partitioning.py": "from memlab_other import y",
    }
    assert violations(package(sources)) == []
