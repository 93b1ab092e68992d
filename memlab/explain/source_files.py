"""What the user's source files say that a stack does not show, if they are on this machine."""

import ast
import re
from functools import cache
from pathlib import Path

_WITHOUT_GRADIENTS = re.compile(r"no_grad|inference_mode|set_grad_enabled\(False\)")


def is_without_gradients(filename: str, line: int) -> bool:
    """Whether a line is in a `with` block that disables gradients; False without the file."""
    return any(first <= line <= last for first, last in _blocks(filename))


@cache
def _blocks(filename: str) -> tuple[tuple[int, int], ...]:
    """Return the first and the last line of each `with` block that disables gradients."""
    try:
        tree = ast.parse(Path(filename).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return ()
    return tuple(
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, (ast.With, ast.AsyncWith))
        and any(_WITHOUT_GRADIENTS.search(ast.unparse(item)) for item in node.items)
    )
