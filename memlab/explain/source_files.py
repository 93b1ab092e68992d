"""What the user's source files say that a stack does not show, if they are on this machine.

A `with torch.no_grad():` block leaves no frame in a traceback, but the file has it. Files are
parsed, never run. A file counts only if it is the one that ran: each of its lines in the traceback
has the text and the function that the traceback names.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import decode_source
from pathlib import Path
from typing import Literal, NamedTuple

MOST_BYTES = 2**22  # of a file that a person wrote
WIDEST_SOURCE = 300  # characters read of a source line in a traceback
_SWITCH = re.compile(r"(\w*no_grad|inference_mode|_?set_grad_enabled)$")
_MENTIONS = re.compile(r"no_grad|inference_mode|set_grad_enabled")
# Context managers that leave gradients as they are; torch's others do too.
_NEUTRAL = {
    *("autocast", "nullcontext", "suppress", "catch_warnings", "open", "tqdm", "trange"),
    *("no_sync", "accumulate", "profile", "record_function"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Block = Function | ast.With | ast.AsyncWith
Effect = Literal["on", "off", "none", "unknown"]  # on gradients


class SourceLine(NamedTuple):
    """A line that ran. `source` is its text as a traceback prints it; a snapshot has none."""

    filename: str
    line: int
    name: str
    source: str | None = None


@dataclass(frozen=True, eq=False)
class _File:
    tree: ast.Module
    rows: tuple[str, ...]  # without indentation

    @cached_property
    def blocks(self) -> list[Block]:
        """The functions and `with` blocks, outer before inner ones."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Block)]

    @cached_property
    def switches_elsewhere(self) -> bool:
        """Whether a call switches gradients outside of decorators and `with` items."""
        expressions = [each for block in self.blocks for each in _expressions(block)]
        around = {id(node) for expression in expressions for node in ast.walk(expression)}
        return any(
            isinstance(node, ast.Call)
            and id(node) not in around
            and _SWITCH.search(ast.unparse(node.func))
            for node in ast.walk(self.tree)
        )


def gradients(lines: Sequence[SourceLine]) -> bool | None:
    """Return whether gradients are enabled at the last line, as far as the files say.

    Args:
        lines: the user's lines of a traceback, outermost first.

    Returns:
        False if a `with` block or a decorator around a line disables them. True if every file is
        the one that ran and nothing around the lines disables them. Otherwise None.
    """
    read = unchanged(lines)
    effects = [effect for line in read for effect in _effects_around(line)]
    switches = [effect for effect in effects if effect in ("on", "off")]
    if switches and switches[-1] == "off":
        return False
    if not lines or len(read) < len(lines) or "unknown" in effects:
        return None
    files = map(_read, {line.filename for line in lines})
    return None if any(file is None or file.switches_elsewhere for file in files) else True


def unchanged(lines: Sequence[SourceLine]) -> list[SourceLine]:
    """Return the lines whose files are here and are the ones that ran."""
    others = {line.filename for line in lines if not _is_as_it_ran(line)}
    return [line for line in lines if line.filename not in others]


def changed(lines: Sequence[SourceLine]) -> list[str]:
    """Return the files on this machine that differ from the ones that ran."""
    kept = {line.filename for line in unchanged(lines)}
    names = dict.fromkeys(line.filename for line in lines)
    return [name for name in names if name not in kept and _read(name) is not None]


def is_without_gradients(line: SourceLine) -> bool:
    """Whether a `with` block or a decorator around one line disables gradients."""
    return gradients([line]) is False


def class_of(line: SourceLine) -> str | None:
    """Return the class whose method holds a line, such as an nn.Module's, if its file is here."""
    file = _read(line.filename)
    if file is None or not _is_as_it_ran(line):
        return None
    names = [
        node.name  # outer before inner ones
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef) and node.lineno <= line.line <= (node.end_lineno or 0)
    ]
    return names[-1] if names else None


def calls_backward(lines: Sequence[SourceLine]) -> bool:
    """Whether a function that holds one of these lines calls backward."""
    functions = (_blocks_around(line)[:1] for line in lines)
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith((".backward", "autograd.grad"))
        for found in functions
        for function in found
        if isinstance(function, Function)
        for node in ast.walk(function)
    )


# ------------------------------------------------------------------ files


def _read(filename: str) -> _File | None:
    """Return a file's syntax tree and its lines; None if it is not here or no Python code."""
    try:
        status = Path(filename).stat()
        if not Path(filename).is_file() or status.st_size > MOST_BYTES:
            return None
        return _parsed(filename, status.st_mtime_ns)
    except (OSError, ValueError):
        return None


@cache
def _parsed(filename: str, _modified: int) -> _File | None:
    try:
        text = decode_source(Path(filename).read_bytes())
        with warnings.catch_warnings():  # of the user's string literals
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    return _File(tree, tuple(row.strip() for row in text.split("\n")))


def _is_as_it_ran(line: SourceLine) -> bool:
    """Whether the file has this line, in a function of this name."""
    file = _read(line.filename)
    if file is None or not 1 <= line.line <= len(file.rows):
        return False
    row = file.rows[line.line - 1]
    if line.source is not None and not (line.source and row[:WIDEST_SOURCE] == line.source):
        return False
    around, name = _blocks_around(line)[:1], line.name.rpartition(".")[2]
    function = around[0].name if around and isinstance(around[0], Function) else "<module>"
    return name == function or (name.startswith("<") and name != "<module>")  # <lambda>, <listcomp>


# ------------------------------------------------------------------ blocks


def _blocks_around(line: SourceLine) -> list[Block]:
    """Return the function that holds a line, and the `with` blocks around the line in it."""
    file = _read(line.filename)
    if file is None:
        return []
    around = [
        block
        for block in file.blocks
        if block.body[0].lineno <= line.line <= (block.end_lineno or block.lineno)
    ]
    functions = [index for index, node in enumerate(around) if isinstance(node, Function)]
    return around[functions[-1] :] if functions else around


def _effects_around(line: SourceLine) -> Iterator[Effect]:
    """Yield what each decorator and `with` item around a line does, outermost first.

    An unknown decorator has frames of its own in the traceback, so it is no gap.
    """
    file = _read(line.filename)
    if file is None:
        return
    for block in _blocks_around(line):
        for expression in _expressions(block):
            effect = _effect(expression, file.tree)
            is_decorator = isinstance(block, Function)
            unnamed = is_decorator and not _MENTIONS.search(ast.unparse(expression))
            yield "none" if effect == "unknown" and unnamed else effect


def _expressions(block: Block) -> list[ast.expr]:
    if isinstance(block, Function):
        return block.decorator_list
    return [item.context_expr for item in block.items]


def _effect(expression: ast.expr, tree: ast.Module) -> Effect:
    """Return what a context manager or a decorator does to gradients."""
    if isinstance(expression, ast.IfExp):
        return _common(_effect(e, tree) for e in (expression.body, expression.orelse))
    if isinstance(expression, ast.Name) and (values := _values_of(expression.id, tree)):
        return _common(_effect(value, tree) for value in values)
    called = expression.func if isinstance(expression, ast.Call) else expression
    path = ast.unparse(called)
    name = path.rpartition(".")[2]
    if name == "enable_grad":
        return "on"
    if name.endswith("no_grad"):
        return "off"
    if name in ("inference_mode", "set_grad_enabled"):
        return _effect_of_mode(name, expression)
    return "none" if path.startswith("torch.") or name in _NEUTRAL else "unknown"


def _effect_of_mode(name: str, expression: ast.expr) -> Effect:
    """Return what inference_mode(mode) or set_grad_enabled(mode) does."""
    arguments = []
    if isinstance(expression, ast.Call):
        arguments = [*expression.args, *(keyword.value for keyword in expression.keywords)]
    mode = arguments[0] if arguments else ast.Constant(name == "inference_mode")
    if not isinstance(mode, ast.Constant):
        return "unknown"
    if name == "inference_mode":
        return "off" if mode.value else "none"
    return "on" if mode.value else "off"


def _values_of(name: str, tree: ast.Module) -> list[ast.expr]:
    """Return what the file assigns to a name. A name never stands for itself."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        and not isinstance(node.value, ast.Name)
    ]


def _common(effects: Iterator[Effect]) -> Effect:
    found = set(effects)
    return found.pop() if len(found) == 1 else "unknown"
