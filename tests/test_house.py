"""A function is one thought: no more than 40 lines of it. Comments name tests that exist."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES = 40


def lengths(root: Path) -> Iterator[tuple[str, int]]:
    """(qualified name, lines without the docstring) of each function in memlab and benchmarks."""
    for path in sorted([*root.glob("memlab/**/*.py"), *root.glob("benchmarks/**/*.py")]):
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        yield from inside(tree, module.removesuffix(".__init__"))


def inside(node: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    """The functions within a node called `name`, and the functions within them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name}.{child.name}", lines_of(child)
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from inside(child, f"{name}.{child.name}" if is_named else name)


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` on, the signature included, less the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return lines
    docstring = function.body[0]
    return lines - (docstring.end_lineno - docstring.lineno + 1)


def test_no_function_is_longer():
    assert {name: n for name, n in lengths(ROOT) if n > MOST_LINES} == {}


# ------------------------------------------------------------------ does it see them?

SOURCE = '''
class C:
    @property
    def short(self):
        """One line,
        whose docstring has two."""
        return 1

    def with_a_closure(self):
        if self:
            async def inner(x):
                # a comment
                return x

            return inner
'''


def test_lines_are_counted_without_decorators_and_docstrings_wherever_a_function_stands(tmp_path):
    for folder in ("memlab", "benchmarks"):
        path = tmp_path / folder / "sub" / "__init__.py"
        path.parent.mkdir(parents=True)
        path.write_text(SOURCE, encoding="utf-8")
    expected = {"short": 2, "with_a_closure": 7, "with_a_closure.inner": 3}
    assert dict(lengths(tmp_path)) == {
        f"{folder}.sub.C.{name}": lines
        for folder in ("memlab", "benchmarks")
        for name, lines in expected.items()
    }


# ------------------------------------------------------------------ tests that comments name


def named_in_comments(source: str) -> set[str]:
    """The words of a file's comments that look like tests."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = " ".join(token.string for token in tokens if token.type == tokenize.COMMENT)
    return set(re.findall(r"(?<![\w.])test_\w+", comments))


def test_every_test_that_a_comment_names_exists():
    tests = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")]
    known = {name for source in tests for name in re.findall(r"def (test_\w+)", source)}
    known |= {path.stem for path in ROOT.glob("tests/**/test_*.py")}
    missing = {
        (path.relative_to(ROOT).as_posix(), name)
        for folder in ("memlab", "benchmarks", "site", "tests")
        for path in ROOT.glob(f"{folder}/**/*.py")
        for name in named_in_comments(path.read_text(encoding="utf-8")) - known
    }
    assert missing == set()


def test_a_name_in_a_comment_is_found_and_one_in_a_string_is_not():
    source = 'x = "test_of_a_string"  # as (test_of_a_comment) shows\n'
    assert named_in_comments(source) == {"test_of_a_comment"}


# ------------------------------------------------------------------ what CONTRIBUTING.md names


def defined_in(source: str) -> set[str]:
    """The functions, classes, methods and variables of a module, methods with their class."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names |= {node.name}
            names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return names


def test_contributing_names_files_and_functions_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:memlab|tests|benchmarks|site|docs)/[\w./]+\.\w+)(?:::([\w.]+))?`", text
    )
    assert len([name for _, name in named if name]) > 10
    for path, name in named:
        if "NN" in path or "NAME" in path:
            continue
        assert (ROOT / path).is_file(), path
        if name:
            assert name in defined_in((ROOT / path).read_text(encoding="utf-8")), (path, name)
