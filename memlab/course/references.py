"""Insert the code of memlab/reference into the solutions that show it.

Each technique is written once, in memlab/reference. A region of a lesson names the function, and
the builder fills the region with the function's body:

    def lion_(weight, gradient, state, lr):
        ### BEGIN SOLUTION memlab.reference.lion.lion_
        ...
        ### END SOLUTION

The lesson may give the learner some lines above the region. The reference's function must begin
with the same lines.
"""

import ast
import re
import textwrap
from pathlib import Path

from memlab.course.functions import body_lines, body_span, function_in
from memlab.course.source import SourceError

PACKAGE = "memlab.reference"
_REGION = re.compile(
    r"^(?P<begin>(?P<indent> *)### BEGIN SOLUTION (?P<name>\S+)\n).*?(?P<end>^ *### END SOLUTION$)",
    re.MULTILINE | re.DOTALL,
)


def with_references(text: str, root: Path) -> str:
    """Return the source with each region that names a reference filled with its code.

    Raises SourceError for an unknown name, and for a region whose function begins with other lines
    than the reference.
    """

    def filled(region: re.Match[str]) -> str:
        line = text.count("\n", 0, region.start()) + 1
        try:
            code = _body(region["name"], root)
            given = _given(text, line)
            if code[: len(given)] != given:
                raise ValueError(f"{region['name']} does not begin with the line {given[-1]!r}")
        except ValueError as error:
            raise SourceError(str(error), line) from None
        rest = textwrap.indent("\n".join(code[len(given) :]), region["indent"])
        return f"{region['begin']}{rest}\n{region['end']}"

    return _REGION.sub(filled, text)


def _body(name: str, root: Path) -> list[str]:
    """Return the lines of memlab.reference.MODULE.FUNCTION below its docstring; raise ValueError if
    there is no such function."""
    module, _, function = name.removeprefix(f"{PACKAGE}.").partition(".")
    path = root / "memlab" / "reference" / f"{module}.py"
    if not (name.startswith(f"{PACKAGE}.") and path.exists()):
        raise ValueError(f"got {name!r}; name a function of a module of {PACKAGE}")
    text = path.read_text(encoding="utf-8")
    found = function_in(text, function)
    if found is None:
        raise ValueError(f"{path.name} in memlab/reference has no function {function}")
    return body_lines(text, found)


def _given(text: str, line: int) -> list[str]:
    """Return the lines between a region and the docstring of the function around it."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    around = [n for n in functions if n.lineno < line <= (n.end_lineno or 0)]
    if not around:
        return []
    begin, given = body_span(around[-1])[0], line - 1
    lines = text.split("\n")[begin:given]
    return textwrap.dedent("\n".join(lines)).split("\n") if lines else []
