"""Find functions by name in the text of a program, and extract their bodies."""

import ast
import textwrap


def function_in(text: str, name: str) -> ast.FunctionDef | None:
    """Return the function "f", or the method "Class.f"; None if the text does not define it."""
    scope: ast.AST | None = ast.parse(text)
    for part in name.split("."):
        inside = getattr(scope, "body", [])
        scope = next((each for each in inside if getattr(each, "name", None) == part), None)
    return scope if isinstance(scope, ast.FunctionDef) else None


def body_span(function: ast.FunctionDef) -> tuple[int, int]:
    """Return the 0-based first line of the body below its docstring, and its end line."""
    first, last = function.body[0], function.body[-1]
    begin = first.end_lineno if _is_docstring(first) else first.lineno - 1
    return int(begin or 0), int(last.end_lineno or 0)


def body_lines(text: str, function: ast.FunctionDef) -> list[str]:
    """Return the lines of the body, below the docstring and without indentation."""
    begin, end = body_span(function)
    return textwrap.dedent("\n".join(text.split("\n")[begin:end])).split("\n")


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
