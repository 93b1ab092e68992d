"""Check notebooks for problems that nbval does not detect.

nbval (0.11) runs a notebook and compares its outputs. It passes a cell that was never executed, a
`raises-exception` cell that raises nothing, and everything tagged to be ignored. It also ignores
readability: long cells, and addresses and paths of the author's machine.
"""

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

CODE_LINES = 25  # a screenful, blank lines and comments included
PROSE_WORDS = 90
NEEDS_REASON = ("nbval-ignore-output", "nbval-skip", "raises-exception")

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_MACHINE_PATH = re.compile(
    r"(?:(?<![\w./~])|(?<=file://))"  # not in site.org/home/page, ./tmp/file or ~/tmp/file
    r"/(?:(?:home|Users|(?:private/)?(?:tmp|var/tmp|var/folders))/[\w.-]+|root\b)"
    r"|\b[A-Za-z]:\\+Users\b"
    r"|\bipykernel_\d+"
)
# Emoji, and the older blocks of symbols and dingbats.
_EMOJI = re.compile(
    "[\u231a\u231b\u23e9-\u23fa\u2600-\u27bf\u2b1b\u2b1c\u2b50\u2b55\ufe0f\U0001f000-\U0001faff]"
)
# Calls that print a GPU's measurement, the reader's or a stored one.
_ON_A_GPU = re.compile(
    r"\b(?:stored|time)_on_a_gpu\(|\btorch\.(?:cuda|accelerator)\.is_available\("
)
_IPYTHON = re.compile(r"\bget_ipython\s*\(")
_NBVAL_COMMENT = re.compile(r"\s*#+\s*((?:NBVAL|PYTEST_VALIDATE)_[A-Z_]+)\s*")
_NO_PROSE = re.compile(
    r"^(?P<fence>```|~~~).*?^(?P=fence)[^\n]*$"  # code
    r"|\$\$.*?\$\$|\$[^$\n]+\$"  # formulas
    r"|^\s*[#|][^\n]*$",  # headings, lines of tables
    re.MULTILINE | re.DOTALL,
)


def lint(notebook: dict[str, Any], *, executed: bool) -> list[str]:
    """Return one sentence per problem, with the cell's number and first line; [] if there is none.

    `notebook` is the JSON of a notebook of format 4. `executed` is True for a solution, whose cells
    must all have run, and False for a lesson, which must have no outputs.
    """
    return [
        f"cell {number} ({_first_line(_text(cell['source']))}): {finding}"
        for number, cell in enumerate(notebook["cells"], 1)
        for finding in _findings(cell, executed)
    ]


def words(prose: str) -> int:
    """Count the words of a prose cell, without headings, tables, code and formulas.

    A word has a letter or a digit, and is delimited by whitespace.
    """
    return sum(bool(re.search(r"\w", word)) for word in _NO_PROSE.sub(" ", prose).split())


def _findings(cell: dict[str, Any], executed: bool) -> Iterator[str]:
    source = _text(cell["source"])
    if found := _EMOJI.search(source):
        yield f"an emoji, U+{ord(found[0]):04X}; say it in words"
    if cell["cell_type"] == "markdown" and words(source) > PROSE_WORDS:
        yield f"{words(source)} words of prose, at most {PROSE_WORDS}; cut it or split the cell"
    if cell["cell_type"] != "code":
        return
    yield from _code_findings(source)
    yield from _tag_findings(cell)
    yield from _output_findings(cell) if executed else _lesson_findings(cell)


def _code_findings(source: str) -> Iterator[str]:
    lines = source.splitlines()
    if len(lines) > CODE_LINES:
        yield f"{len(lines)} lines of code, at most {CODE_LINES}; move some of it into memlab"
    try:
        # Parsing finds magics and shell lines, but not strings that only look like them.
        ast.parse(source)
    except SyntaxError as error:
        line = lines[(error.lineno or 1) - 1].strip() if lines else ""
        yield f"a magic, a shell line or invalid Python: {_first_line(line)}"
    if source.rstrip().endswith(";"):
        yield "a final ; hides a value from Jupyter, but not from nbval; write _ = before the line"
    if _IPYTHON.search(source):
        yield "get_ipython(), which hides a magic"


def _tag_findings(cell: dict[str, Any]) -> Iterator[str]:
    for tag in NEEDS_REASON:
        if tag in _tags(cell) and not cell["metadata"].get("reason"):
            yield f'the tag {tag} without a reason; add reason="..." to the cell\'s metadata'
    if "nbval-ignore-output" not in _tags(cell) and _ON_A_GPU.search(_text(cell["source"])):
        yield (
            "an output that depends on a GPU, the reader's or a stored one; add the tag "
            "nbval-ignore-output with that reason"
        )
    for line in _text(cell["source"]).splitlines():
        if found := _NBVAL_COMMENT.fullmatch(line):
            yield f"the comment {found[1]} controls nbval; use its tag, with a reason"


def _lesson_findings(cell: dict[str, Any]) -> Iterator[str]:
    if cell["outputs"] or cell["execution_count"] is not None:
        yield "a lesson's cell with outputs or an execution count; the learner should guess first"


def _output_findings(cell: dict[str, Any]) -> Iterator[str]:
    may_raise = "raises-exception" in _tags(cell)
    raised = [out for out in cell["outputs"] if out["output_type"] == "error"]
    if cell["execution_count"] is None:
        yield "never executed, which nbval accepts"
    elif may_raise and not raised:
        yield "tagged raises-exception, but its output has no error; nbval accepts that"
    if raised and not may_raise:
        yield f"an error output: {_first_line(_text(raised[0]['ename']))}"
    if any(out.get("name") == "stderr" for out in cell["outputs"]):
        yield "an output on stderr, which differs between machines"
    shown = "\n".join(text for output in cell["outputs"] for text in _texts(output))
    for pattern, what in (
        (_ADDRESS, "an address in an output, which differs in every run"),
        (_MACHINE_PATH, "a path of this machine in an output"),
        (_EMOJI, "an emoji in an output"),
    ):
        if found := pattern.search(shown):
            yield f"{what}: {found[0]}"


def _texts(output: dict[str, Any]) -> Iterator[str]:
    """Yield every text of an output that a reader may see. Of pictures, only SVG has text."""
    for key in ("text", "ename", "evalue", "traceback"):
        yield _text(output.get(key, ""))
    for kind, data in output.get("data", {}).items():
        if kind == "image/svg+xml" or not kind.startswith(("image/", "audio/", "video/")):
            yield _text(data) if isinstance(data, (str, list)) else json.dumps(data)


def _tags(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])


def _text(parts: str | list[str]) -> str:
    """Join a notebook's text, which a file may hold as a list of lines."""
    return "".join(parts)


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "empty")
    return line if len(line) <= 60 else line[:57] + "..."
