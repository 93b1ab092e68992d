"""Parts of a lesson after its exercises, which do not run here as a whole."""

import ast
from functools import cache
from typing import Any

from memlab.course import days


@cache
def _statements(day: int) -> list[ast.stmt]:
    source = days.notebook(day, "solutions").with_suffix(".py").read_text(encoding="utf-8")
    return ast.parse(source).body


def lesson_part(day: int, *names: str, **given: Any) -> Any:
    """Run the lesson's statements that bind these names, beside what is given; return its
    value, or a list for several names."""
    found = dict(given)
    wanted = [statement for statement in _statements(day) if _bound(statement) & {*names}]
    exec(compile(ast.Module(wanted, []), f"day {day}", "exec"), found)
    values = [found[name] for name in names]
    return values[0] if len(values) == 1 else values


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return {statement.name} if isinstance(statement, ast.FunctionDef | ast.ClassDef) else set()
