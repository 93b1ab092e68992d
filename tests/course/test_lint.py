"""The lint finds problems that nbval accepts, and nothing else."""

import pytest

from memlab.course.lint import CODE_LINES, PROSE_WORDS, lint, words


def code(source="x = 1", outputs=(), *, count=1, **metadata):
    return {
        "cell_type": "code",
        "execution_count": count,
        "metadata": metadata,
        "outputs": list(outputs),
        "source": source,
    }


def markdown(source):
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def prints(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def shows(**data):
    kinds = {"plain": "text/plain", "html": "text/html", "svg": "image/svg+xml", "png": "image/png"}
    data = {kinds.get(kind, kind): value for kind, value in data.items()}
    return {"output_type": "display_data", "metadata": {}, "data": data}


def raises(name="ValueError", message="no", traceback=("ValueError: no",)):
    return {
        "output_type": "error",
        "ename": name,
        "evalue": message,
        "traceback": list(traceback),
    }


def findings(cell, executed=True):
    """Return the findings in a one-cell notebook, without the cell's number and first line."""
    found = lint({"cells": [cell]}, executed=executed)
    assert all(finding.startswith("cell 1 (") for finding in found)
    return [finding.split("): ", 1)[1] for finding in found]


def lesson(source="x = 1", **metadata):
    return code(source, count=None, **metadata)


# ------------------------------------------------------------------ format of findings


def test_a_finding_names_the_cell_by_its_number_and_first_line():
    cells = [markdown("# Day 1"), code(), code("\n# why\ny = 2", count=None)]
    assert lint({"cells": cells}, executed=True) == [
        "cell 3 (# why): never executed, which nbval accepts"
    ]


def test_a_long_first_line_is_cut():
    [finding] = lint({"cells": [code(f"x = '{'a' * 80}'", count=None)]}, executed=True)
    assert finding.startswith(f"cell 1 (x = '{'a' * 52}...): ")


def test_texts_may_be_lists_of_lines_as_in_a_file():
    cell = code(["x = 1\n", "!ls"], [prints(["a\n", "at 0x7f00aa11\n"])])
    assert len(findings(cell)) == 2


def test_a_good_notebook_has_no_findings():
    cells = [
        markdown("# Day 1\n\nWhat is measured: 3 × 4 bytes, i.e. 0x3f is 63."),
        code("x = 1\nx", [prints("24.0 MiB\n"), shows(plain="1", png="0x12345678")]),
        code("raise ValueError", [raises()], tags=["raises-exception"], reason="shows it"),
    ]
    assert lint({"cells": cells}, executed=True) == []
    assert lint({"cells": [cells[0], lesson()]}, executed=False) == []


# ------------------------------------------------------------------ outputs of a solution


def test_a_cell_that_was_never_executed_is_found():
    assert findings(code(count=None)) == ["never executed, which nbval accepts"]


def test_an_output_on_stderr_is_found():
    outputs = [prints("a\n"), prints("warning\n", "stderr")]
    assert findings(code(outputs=outputs)) == [
        "an output on stderr, which differs between machines"
    ]


def test_an_unexpected_error_is_found():
    assert findings(code(outputs=[raises()])) == ["an error output: ValueError"]
    assert findings(code(outputs=[raises()], tags=["raises-exception"], reason="so")) == []


def test_a_cell_that_should_raise_but_did_not_is_found():
    assert findings(code(outputs=[prints("fine\n")], tags=["raises-exception"], reason="so")) == [
        "tagged raises-exception, but its output has no error; nbval accepts that"
    ]


@pytest.mark.parametrize(
    "output",
    [
        prints("<object at 0x7f00aa11bb22>\n"),
        shows(plain="<object at 0x7f00aa11bb22>"),
        shows(html="<p>0x7f00aa11bb22</p>"),
        shows(svg="<text>0x7f00aa11bb22</text>"),
        shows(**{"application/json": {"at": "0x7f00aa11bb22"}}),
    ],
)
def test_an_address_is_found_in_every_kind_of_text(output):
    assert findings(code(outputs=[output])) == [
        "an address in an output, which differs in every run: 0x7f00aa11bb22"
    ]


def test_an_address_is_found_in_an_expected_error():
    cell = code(outputs=[raises(message="0x7f00aa")], tags=["raises-exception"], reason="so")
    assert findings(cell) == ["an address in an output, which differs in every run: 0x7f00aa"]


@pytest.mark.parametrize("text", ["0x7f00a", "a0x7f00aa11", "0xtensor", "#7f00aa"])
def test_a_short_hexadecimal_number_is_not_an_address(text):
    assert findings(code(outputs=[prints(text)])) == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("File /home/ada/memlab/trace.py", "/home/ada"),
        ("saved to '/Users/ada/x'", "/Users/ada"),
        ("in /root/.cache", "/root"),
        ("in /root", "/root"),
        (r"C:\Users\ada", r"C:\Users"),
        ("/tmp/ipykernel_12/34.py:1: UserWarning", "/tmp/ipykernel_12"),
        ("/private/tmp/x", "/private/tmp/x"),
        ("/var/folders/ab/c", "/var/folders/ab"),
        ("file:///home/ada/x", "/home/ada"),
        (r"D:\scratch\ipykernel_12\34.py", "ipykernel_12"),
    ],
)
def test_a_path_of_the_machine_is_found(text, path):
    assert findings(code(outputs=[prints(text)])) == [
        f"a path of this machine in an output: {path}"
    ]


@pytest.mark.parametrize(
    "text",
    ["https://site.org/home/page", "memlab/home/x", "/rooted", "./tmp/x", "~/tmp/x", "a/tmp/b"],
)
def test_other_paths_are_no_finding(text):
    assert findings(code(outputs=[prints(text)])) == []


def test_outputs_in_a_lesson_are_found():
    wanted = "a lesson's cell with outputs or an execution count; the learner should guess first"
    assert findings(code(count=None, outputs=[prints("1\n")]), executed=False) == [wanted]
    assert findings(code(count=1), executed=False) == [wanted]


# ------------------------------------------------------------------ code


@pytest.mark.parametrize(
    "line",
    ["%time x = 1", "%%bash", "!ls", "  !ls", "%matplotlib inline", "x = !ls", "x?", "x = %pwd"],
)
def test_magics_and_shell_lines_are_found_in_both(line):
    wanted = [f"a magic, a shell line or invalid Python: {line.strip()}"]
    assert findings(code(f"y = 1\n{line}")) == wanted
    assert findings(lesson(f"y = 1\n{line}"), executed=False) == wanted


@pytest.mark.parametrize(
    "source",
    [
        "y = (7\n    % 4)",
        'text = """\n%time\n!ls\n"""',
        "# !ls",
        "assert (1\n    != 2)",
        "await f()",
    ],
)
def test_python_that_looks_like_a_magic_is_no_finding(source):
    assert findings(code(source)) == []


def test_get_ipython_is_found():
    assert findings(code("get_ipython().run_line_magic('time', 'x')")) == [
        "get_ipython(), which hides a magic"
    ]


def test_a_final_semicolon_is_found_because_nbval_shows_the_value_anyway():
    wanted = ["a final ; hides a value from Jupyter, but not from nbval; write _ = before the line"]
    assert findings(code("plot(1);\n")) == wanted
    assert findings(code("x = 1; y = 2")) == []


def test_a_cell_of_more_than_25_lines_is_found():
    assert CODE_LINES == 25
    assert findings(code("x = 1\n" * 25)) == []
    assert findings(code("x = 1\n" * 25 + "\n# y")) == [
        "27 lines of code, at most 25; move some of it into memlab"
    ]


@pytest.mark.parametrize("tag", ["nbval-ignore-output", "nbval-skip"])
def test_an_nbval_tag_needs_a_reason_in_both(tag):
    wanted = [f'the tag {tag} without a reason; add reason="..." to the cell\'s metadata']
    assert findings(code(tags=[tag])) == wanted
    assert findings(code(tags=[tag], reason="")) == wanted
    assert findings(lesson(tags=[tag]), executed=False) == wanted
    assert findings(code(tags=[tag], reason="a time")) == []


@pytest.mark.parametrize(
    "source",
    [
        'print(stored_on_a_gpu("day 1"))',
        "text = f\"{time_on_a_gpu('lion')}\"",
        "if torch.cuda.is_available():\n    pass",
    ],
)
def test_an_output_that_depends_on_a_gpu_needs_the_ignore_tag(source):
    [finding] = findings(code(source))
    assert finding.startswith("an output that depends on a GPU, the reader's or a stored one; add")
    assert findings(code(source, tags=["nbval-ignore-output"], reason="a GPU's")) == []
    assert findings(code("from memlab.course import stored_on_a_gpu")) == []


def test_the_raises_exception_tag_needs_a_reason():
    cell = code(outputs=[raises()], tags=["raises-exception"])
    assert findings(cell) == [
        'the tag raises-exception without a reason; add reason="..." to the cell\'s metadata'
    ]


def test_other_tags_need_no_reason():
    assert findings(code(tags=["hide-input"])) == []


@pytest.mark.parametrize("comment", ["NBVAL_IGNORE_OUTPUT", "NBVAL_SKIP", "NBVAL_RAISES_EXCEPTION"])
def test_an_nbval_comment_is_found(comment):
    assert findings(code(f"x = 1\n  # {comment}")) == [
        f"the comment {comment} controls nbval; use its tag, with a reason"
    ]


# ------------------------------------------------------------------ prose


def test_a_prose_cell_of_more_than_90_words_is_found():
    assert PROSE_WORDS == 90
    assert findings(markdown("word " * 90)) == []
    assert findings(markdown("word " * 91)) == [
        "91 words of prose, at most 90; cut it or split the cell"
    ]


@pytest.mark.parametrize(
    ("prose", "count"),
    [
        ("three plain words", 3),
        ("**bold** and `code`", 3),
        ("a × b — c", 3),
        ("# A heading\n\ntwo words", 2),
        ("two words\n\n## A heading", 2),
        ("| a | table |\n|---|---|\n| of | words |\n\none", 1),
        ("before\n```python\nx = 1 + 2\n```\nafter", 2),
        ("before\n~~~\nx ``` y\n~~~\nafter", 2),
        ("that is $a + b$ bytes", 3),
        ("that is\n$$\na + b\n$$\nbytes", 3),
        ("costs 5 # of them", 4),
        ("", 0),
    ],
)
def test_headings_tables_code_and_formulas_do_not_count_as_prose(prose, count):
    assert words(prose) == count


@pytest.mark.parametrize("emoji", ["\U0001f680", "\u2705", "\u26a0\ufe0f", "\u2b50", "\U0001f1ec"])
def test_emoji_are_found_in_prose_code_and_outputs(emoji):
    wanted = f"an emoji, U+{ord(emoji[0]):04X}; say it in words"
    assert findings(markdown(f"go {emoji}")) == [wanted]
    assert findings(lesson(f"x = '{emoji}'"), executed=False) == [wanted]
    assert findings(code(outputs=[prints(emoji)])) == [f"an emoji in an output: {emoji[0]}"]


def test_mathematical_symbols_are_not_emoji():
    assert findings(markdown("· × ÷ ≤ ≥ ≈ √ ∑ → ← ½ ² ₂ ⌈x⌉ ⟨x⟩ … – α ∂ ∞ █ ▁ ─ │")) == []
