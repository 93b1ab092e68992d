"""Parse the code cells of a notebook, and run only their definitions.

Imports, functions, classes and plain constants run, cell by cell and in order. Training runs, plots
and guesses are skipped, so a notebook's definitions are available at once.
"""

import ast
import builtins
import dis
import linecache
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from memlab.course.exercises import Wrong
from memlab.course.notebooks import code_cells

# IPython syntax, one line each: %magics, !commands, and the questions `name?`.
_IPYTHON = re.compile(r"^(\s*)(?:[%!].*|\?{1,2}[\w.]+|[\w.]+\?{1,2})\s*$", re.MULTILINE)
# In a cell that cannot be parsed, these find top-level definitions line by line.
_DEFINITION = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)", re.MULTILINE)
_CALL = re.compile(
    r"""^(?:(\w+)\s*=\s*)?(?:\w+\.)*exercise\(\s*["']([\d.]+)["']\s*,\s*(\w+)""", re.MULTILINE
)


class Unusable:
    """Stands for a missing or broken answer. Any use of it raises the reason."""

    def __init__(self, reason: Exception):
        self._reason = reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._reason

    def __getattr__(self, name: str) -> Any:
        raise self._reason


# ------------------------------------------------------------------ parsing cells


@dataclass(frozen=True)
class Call:
    """`target = exercise(id, answer)`; the target is "_" if the result is not assigned."""

    id: str
    answer: str
    target: str


@dataclass(frozen=True)
class CodeCell:
    """A code cell. If it cannot be parsed, `body` is empty and `error` has the reason."""

    source: str
    filename: str  # the name in tracebacks
    body: Sequence[ast.stmt] = ()
    error: SyntaxError | None = None

    @cached_property
    def calls(self) -> list[Call]:
        if self.error is None:
            return [call for statement in self.body if (call := _call_in(statement))]
        found = _CALL.findall(self.source)
        return [Call(id_, answer, target or "_") for target, id_, answer in found]

    @cached_property
    def defines(self) -> set[str]:
        """The names that it binds, except ones that only pass through `exercise`."""
        if self.error is None:
            kept = (statement for statement in self.body if _call_in(statement) is None)
            return set().union(*(_names_bound(statement, self.filename) for statement in kept))
        names = definitions(self.source)
        for line in self.source.splitlines():
            with suppress(SyntaxError, ValueError):
                if not _CALL.match(line):
                    names.update(*(_names_bound(s, "<line>") for s in _parsed(line, "<line>")))
        return names

    @property
    def complaint(self) -> Wrong:
        """A Wrong that quotes the line that cannot be parsed."""
        assert self.error is not None
        lines, number = self.source.splitlines(), self.error.lineno or 1
        line = lines[number - 1].strip() if number <= len(lines) else ""
        text = f"`{line}` is not Python" if line else "it is not Python"
        return Wrong(f"Its cell cannot be read: line {number}, {text} ({self.error.msg}).")


def parsed_cells(path: Path) -> list[CodeCell]:
    """Return a notebook's code cells; raise ValueError if the file is not a notebook."""
    return [
        parsed(source, f"<{path}, code cell {number}>")
        for number, source in enumerate(code_cells(path), 1)
    ]


def parsed(source: str, filename: str) -> CodeCell:
    """Parse the cell, and register its lines for tracebacks."""
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)  # no mtime: never reloaded
    try:
        with suppress(SyntaxError):  # first unchanged: a line of plain Python may begin with %
            return CodeCell(source, filename, _parsed(source, filename))
        return CodeCell(source, filename, _parsed(_IPYTHON.sub(r"\1pass", source), filename))
    except SyntaxError as error:
        return CodeCell(source, filename, error=error)
    except ValueError as error:  # a null character, before Python 3.12
        return CodeCell(source, filename, error=SyntaxError(str(error)))


def _parsed(source: str, filename: str) -> list[ast.stmt]:
    """Return the top-level statements; raise SyntaxError also for errors of the compiler."""
    with _ignored_warnings():
        body = ast.parse(source, filename).body
    _compiled(body, filename)
    return body


def _compiled(statements: Sequence[ast.stmt], filename: str) -> CodeType:
    tree = ast.Module([*statements], [])
    with _ignored_warnings():
        return compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def definitions(source: str) -> set[str]:
    """Return the names of the top-level functions and classes, also of a cell with an error."""
    return set(_DEFINITION.findall(source))


def answering(found: Sequence[CodeCell], id_: str) -> tuple[Call, int] | None:
    """Return the last call that passes an answer to an exercise, and the index of the cell that
    defines the answer; None if there is no such pair."""
    for place in reversed(range(len(found))):
        for call in found[place].calls:
            defining = [n for n in range(place + 1) if call.answer in found[n].defines]
            if call.id == id_ and defining:
                return call, defining[-1]
    return None


@contextmanager
def _ignored_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _names_bound(statement: ast.stmt, filename: str) -> set[str]:
    """Return the names that the statement binds at the top level. Bytecode shows them without the
    names inside functions and comprehensions."""
    code = _compiled([statement], filename)
    return {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}


def _call_in(statement: ast.stmt) -> Call | None:
    """Return the call of `exercise` if the statement is one."""
    match statement:
        case ast.Assign(targets=[ast.Name(target)], value=value):
            pass
        case ast.Expr(value=value):
            target = "_"
        case _:
            return None
    match value:
        case ast.Call(
            func=ast.Name("exercise") | ast.Attribute(attr="exercise"),
            args=[ast.Constant(str(id_)), ast.Name(answer), *_],
        ):
            return Call(id_, answer, target)
    return None


# ------------------------------------------------------------------ running definitions


def run(found: Sequence[CodeCell], folder: Path) -> Iterator[tuple[Call, Any, dict[str, Any]]]:
    """Run the definitions. At the last call of `exercise` for each id, yield the call, the answer
    and the namespace at that point."""
    namespace: dict[str, Any] = {"__name__": "notebook", "__builtins__": builtins}
    last = {call.id: call for cell in found for call in cell.calls}
    with _importable(folder):
        for cell in found:
            for call in _run_cell(cell, namespace):
                answer = namespace.get(call.answer, _undefined(call))
                namespace[call.target] = answer
                if call is last[call.id]:
                    yield call, answer, namespace


def define(cell: CodeCell, namespace: dict[str, Any]) -> None:
    """Run the cell's definitions in this namespace."""
    for _ in _run_cell(cell, namespace):
        pass


def _run_cell(cell: CodeCell, namespace: dict[str, Any]) -> Iterator[Call]:
    if cell.error is not None:
        namespace.update(dict.fromkeys(cell.defines, Unusable(cell.complaint)))
        yield from cell.calls
    calls = iter(cell.calls)
    for statement in cell.body:
        if _call_in(statement):
            yield next(calls)
        else:
            _run_statement(statement, cell.filename, namespace)


def _run_statement(statement: ast.stmt, filename: str, namespace: dict[str, Any]) -> None:
    """Run a definition. For any other statement, remove the names that it would have bound."""
    names = _names_bound(statement, filename)
    if not _defines_only(statement, namespace):
        for name in names:
            namespace.pop(name, None)
        return
    try:
        exec(_compiled([statement], filename), namespace)
    except (Exception, SystemExit) as error:
        reason = error if isinstance(error, Exception) else RuntimeError("SystemExit")
        namespace.update(dict.fromkeys(names, Unusable(reason)))


def _defines_only(statement: ast.stmt, namespace: dict[str, Any]) -> bool:
    """Return True for an import, a function, a class, a plain constant, or a `try` of these."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return True
        case ast.Assign(targets=[target], value=value):
            return _binds_names_only(target) and _is_plain(value, namespace)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            return _binds_names_only(target) and _is_plain(value, namespace)
        case ast.AugAssign(target=ast.Name(name), value=value):
            is_one = isinstance(namespace.get(name), (int, float, str, *_CONTAINERS))
            return is_one and _is_plain(value, namespace)
        case ast.Try(body, handlers, orelse, finalbody):
            parts = [*body, *orelse, *finalbody, *(s for h in handlers for s in h.body)]
            return all(_defines_only(part, namespace) for part in parts)
    return False


_PLAIN = (
    *(ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
    *(ast.operator, ast.unaryop, ast.expr_context, ast.Starred, ast.keyword),
)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_CONSTANTS = (int, float, str, ModuleType, FunctionType, type, *_CONTAINERS)
_CONTAINER_NAMES = {"range", "zip", *(container.__name__ for container in _CONTAINERS)}


def _binds_names_only(target: ast.expr) -> bool:
    """Return False if an attribute or item is set, as by `torch.backends... = True`."""
    return not any(isinstance(n, (ast.Attribute, ast.Subscript)) for n in ast.walk(target))


def _is_plain(value: ast.expr, namespace: dict[str, Any]) -> bool:
    """Return True for another name, a lambda, a constant, a module's (`torch.float32.itemsize`), or
    an expression of constants and functions only, as `4 * 2**20`, `HEADS * 64` or a table."""
    parts = list(_parts(value))
    bound = {n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return isinstance(value, ast.Name) or all(
        isinstance(node, _PLAIN)
        or (isinstance(node, ast.Call) and _builds_container(node.func))
        or (isinstance(node, ast.Attribute) and _is_module_attribute(node, namespace))
        or (isinstance(node, ast.Name) and node.id in bound)
        or (isinstance(node, ast.Name) and isinstance(namespace.get(node.id), _CONSTANTS))
        for node in parts
    )


def _parts(value: ast.AST) -> Iterator[ast.AST]:
    """Yield its nodes, except a lambda's body and the function of a container call."""
    yield value
    if isinstance(value, ast.Lambda):
        return
    makes = isinstance(value, ast.Call) and _builds_container(value.func)
    for name, child in ast.iter_fields(value):
        for node in child if isinstance(child, list) else [child]:
            if isinstance(node, ast.AST) and not (makes and name == "func"):
                yield from _parts(node)


def _builds_container(function: ast.expr) -> bool:
    """Return True if calling it makes a container of its arguments: dict(…), dict.fromkeys(…),
    "a b".split()."""
    match function:
        case ast.Name(name):
            return name in _CONTAINER_NAMES
        case ast.Attribute(value=ast.Name("dict"), attr="fromkeys"):
            return True
        case ast.Attribute(value=ast.Constant(str())):
            return True
    return False


def _is_module_attribute(value: ast.expr, namespace: dict[str, Any]) -> bool:
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and isinstance(namespace.get(value.id), ModuleType)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make files beside a notebook importable."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _undefined(call: Call) -> Unusable:
    return Unusable(
        Wrong(
            f"No function {call.answer} is defined in the cells before "
            f'exercise("{call.id}", {call.answer}).'
        )
    )
