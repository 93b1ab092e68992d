"""Try every one-step edit of the course's solutions: which of them does a check accept?

    python benchmarks/mutants.py             # all exercises
    python benchmarks/mutants.py 9.3 12.2

An edit swaps an operator, changes a constant, drops a call, an argument or a statement, swaps two
statements, or takes another variable. Almost all of them are wrong answers. The output lists the
accepted ones to read: most are equal to the solution (`max(a, b)` as `max(b, a)`), and every
other one is a hole in a check. Each edit is checked in a process of its own, on POSIX only.
"""

import argparse
import ast
import copy
import difflib
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from common import progress, set_environment, table

from memlab.course import days, exercises, solutions
from memlab.course.answers import cell_of
from memlab.course.exercises import OK, Exercise, judge
from memlab.course.texts import Change

SECONDS = 40  # of CPU for one edit: an endless loop counts as refused

OPERATORS = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    **{ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr},
}
FUNCTIONS = {
    **{"max": "min", "min": "max", "amax": "mean", "mean": "sum", "sum": "mean", "all": "any"},
    **{"any": "all", "floor": "round", "round": "floor", "float": "half", "zeros": "ones"},
    **{"zeros_like": "ones_like", "no_grad": "enable_grad", "enable_grad": "no_grad"},
    **{"argmin": "argmax", "argmax": "argmin", "sorted": "list", "reversed": "list"},
}
Edit = Callable[[Any], Any]  # changes a node in place, or returns another for its place


def main() -> None:
    set_environment()
    import_module("torch._dynamo")
    chosen = _arguments()
    rows, accepted = [], []
    with progress() as bar:
        for exercise in bar.track(chosen, description="exercises"):
            source = ast.unparse(ast.parse(cell_of(_notebook(exercise), exercise.id)))
            tried = list(edits(source))
            passed = [text for text in tried if is_accepted(exercise, text)]
            rows.append([exercise.id, str(len(tried)), str(len(passed))])
            accepted += [f"{exercise.id}\n{_difference(source, text)}" for text in passed]
    print(table(["exercise", "edits", "accepted"], rows))
    print("\n\n".join(["", *accepted]))


def _arguments() -> list[Exercise]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ids", nargs="*", metavar="EXERCISE", help="such as 9.3; default: all")
    ids = parser.parse_args().ids
    known = {e.id: e for number in days.numbers() for e in days.day(number).exercises}
    if unknown := [id_ for id_ in ids if id_ not in known]:
        parser.error(f"got {', '.join(unknown)}; expected exercises such as 9.3")
    return [known[id_] for id_ in ids or known]


def _notebook(exercise: Exercise) -> Any:
    return days.notebook(days.day_of(exercise.id), "solutions")


def _difference(source: str, text: str) -> str:
    lines = difflib.unified_diff(source.splitlines(), text.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


# ------------------------------------------------------------------ one-step edits


def edits(source: str) -> Iterator[str]:
    """Yield the source after each edit. Of equal results only one is left."""
    tree = ast.parse(source)
    seen = {ast.unparse(tree)}
    for place, node in enumerate(ast.walk(tree)):
        for edit in _edits_of(node, tree):
            text = _edited(tree, place, edit)
            if text not in seen:
                seen.add(text)
                yield text


def _edited(tree: ast.Module, place: int, edit: Edit) -> str:
    changed = copy.deepcopy(tree)
    node = list(ast.walk(changed))[place]
    if (other := edit(node)) is not None:
        for parent in ast.walk(changed):
            for name, value in ast.iter_fields(parent):
                if value is node:
                    setattr(parent, name, other)
                elif isinstance(value, list) and any(each is node for each in value):
                    value[[each is node for each in value].index(True)] = other
    return ast.unparse(ast.fix_missing_locations(changed))


def _edits_of(node: ast.AST, tree: ast.Module) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in OPERATORS:
        yield lambda n: setattr(n, "op", OPERATORS[type(n.op)]())
    if isinstance(node, ast.BinOp):
        yield lambda n: n.left
        yield lambda n: n.right
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield lambda n: n.ops.__setitem__(0, OPERATORS[type(n.ops[0])]())
    if isinstance(node, ast.UnaryOp):
        yield lambda n: n.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for value in {0, node.value + 1, node.value - 1, 2 * node.value} - {node.value}:
            yield lambda n, value=value: setattr(n, "value", value)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda n: setattr(n, "value", not n.value)
    if isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
        yield lambda n: setattr(n, "attr", FUNCTIONS[n.attr])
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        if node.id in FUNCTIONS:
            yield lambda n: setattr(n, "id", FUNCTIONS[n.id])
        for name in _variables(tree, node.lineno) - {node.id}:
            yield lambda n, name=name: setattr(n, "id", name)
    if isinstance(node, ast.Call):
        yield from _edits_of_call(node)
    if isinstance(node, ast.IfExp):
        yield lambda n: n.body
        yield lambda n: n.orelse
    if isinstance(node, ast.If):
        for value in (True, False):
            yield lambda n, value=value: setattr(n, "test", ast.Constant(value))
    if isinstance(node, ast.Slice):
        yield lambda n: setattr(n, "lower", None)
        yield lambda n: setattr(n, "upper", None)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield lambda n: n.value
    if isinstance(node, ast.stmt):
        yield from _edits_of_body(getattr(node, "body", []))


def _edits_of_body(body: list[ast.stmt]) -> Iterator[Edit]:
    for place, statement in enumerate(body):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        yield lambda n, place=place: n.body.__setitem__(place, ast.Pass())
        if place + 1 < len(body):
            yield lambda n, place=place: n.body.insert(place, n.body.pop(place + 1))


def _variables(tree: ast.Module, line: int) -> set[str]:
    """Return the variables and arguments of the function that contains the line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = [f for f in functions if f.lineno <= line <= f.end_lineno]
    if not inside:
        return set()
    names = {node for node in ast.walk(inside[-1]) if isinstance(node, ast.Name)}
    stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return stored | {each.arg for each in inside[-1].args.args} - {"self"}


def _edits_of_call(node: ast.Call) -> Iterator[Edit]:
    for place in range(len(node.args)):
        yield lambda n, place=place: n.args.pop(place) and None
    for place in range(len(node.keywords)):
        yield lambda n, place=place: n.keywords.pop(place) and None
    if len(node.args) > 1:
        yield lambda n: n.args.insert(0, n.args.pop(1))
    if node.args:
        yield lambda n: n.args[0]
    if isinstance(node.func, ast.Attribute):
        yield lambda n: n.func.value  # x.clone() becomes x


# ------------------------------------------------------------------ checking an edit


def is_accepted(exercise: Exercise, source: str) -> bool:
    """Check the answer in a child process, which may crash or never end."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        os._exit(0 if _passes(exercise, source) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _passes(exercise: Exercise, source: str) -> bool:
    exercises.CPU_SECONDS = SECONDS
    exercises._mistake = lambda *_: ""  # naming the mistake takes longer than the check
    try:
        answer = solutions.changed(exercise.id, Change(code=source))
        return judge(exercise, answer).status == OK
    except BaseException:
        return False


if __name__ == "__main__":
    sys.exit(main())
