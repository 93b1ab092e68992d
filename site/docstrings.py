"""A griffe extension: memlab's docstrings, which are plain text, as Markdown.

A paragraph whose lines are aligned or indented stays as it is, and so do statements of Python.
Sections (Args:, …) and lists are left to griffe. In other prose, characters that Markdown would
read are escaped.
"""

import ast
import inspect
import re
from typing import Any

import griffe

LEFT = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example):\s*\n|- |\d+\. ")
COLUMNS = re.compile(r"^ |\S {2,}\S", re.MULTILINE)
CODE_OR_EMPHASIS = re.compile(r"(`+[^`]+`+|(?<!\S)\*\w(?:[\w ]*\w)?\*(?!\w))")
STATEMENTS = (ast.Import, ast.ImportFrom, ast.Assign, ast.Call, ast.With, ast.For)


class Docstrings(griffe.Extension):
    """Rewrites the docstring of each object that griffe finds."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = inspect.cleandoc(obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(paragraph, re.split(r"\n[ \t]*\n", text)))

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstring of the package itself, which is no other object's member."""
        self.on_object(obj=pkg)


def paragraph(text: str) -> str:
    """Return one paragraph, which ends at an empty line, as Markdown."""
    if LEFT.match(text):
        return text
    if is_python(text):
        return f"```python\n{inspect.cleandoc(text)}\n```"
    if COLUMNS.search(text):
        return f"```text\n{text}\n```"
    parts = CODE_OR_EMPHASIS.split(text)
    parts[::2] = [re.sub(r"([\\*_>|\[\]#])", r"\\\1", p).replace("<", "&lt;") for p in parts[::2]]
    return "".join(parts)


def is_python(text: str) -> bool:
    """Whether the text is a call, an assignment or another statement, and no prose."""
    try:
        found = ast.parse(inspect.cleandoc(text)).body
    except SyntaxError:
        return False
    return bool(found) and isinstance(getattr(found[0], "value", found[0]), STATEMENTS)
