"""Which cells of a notebook run to find its answers, and how the answers are checked."""

import json
import linecache
import os
import sys
import warnings
from pathlib import Path
from textwrap import dedent

import pytest

from memlab.course.answers import answers, cell_of, judged
from memlab.course.cells import Unusable
from memlab.course.exercises import NOT_ATTEMPTED, OK, WRONG, Exercise, equal, judge

CALL = 'double = exercise("7.1", double)'
RIGHT = "def double(x):\n    return 2 * x"


def check_double(answer) -> str:
    equal("double(3)", answer(3), 6)
    return "one case"


def check_quadruple(answer) -> str:
    equal("quadruple(3)", answer(3), 12)
    return "one case"


DOUBLE = Exercise(
    id="7.1",
    title="Double",
    minutes=5,
    difficulty=1,
    hints=("nudge", "push", "shove"),
    reference=lambda x: x + x,
    check=check_double,
    wrong_answers=(),
)
QUADRUPLE = Exercise(
    id="7.2",
    title="Double twice",
    minutes=5,
    difficulty=2,
    hints=("nudge", "push", "shove"),
    reference=lambda x: 4 * x,
    check=check_quadruple,
    wrong_answers=(),
)
BOTH = (DOUBLE, QUADRUPLE)


@pytest.fixture
def notebook(tmp_path):
    """Write a notebook with a heading and code cells."""

    def write(*sources: str) -> Path:
        found = [{"cell_type": "markdown", "source": ["# The title\n", "text"]}]
        found += [{"cell_type": "code", "source": dedent(source).strip()} for source in sources]
        path = tmp_path / "day07_test.ipynb"
        path.write_text(json.dumps({"cells": found}), encoding="utf-8")
        return path

    return write


@pytest.fixture
def verdict(notebook):
    """Return the verdict on exercise 7.1 in a notebook with these cells."""

    def judge_it(*sources: str):
        [verdict] = judged(notebook(*sources), [DOUBLE])
        return verdict

    return judge_it


# ------------------------------------------------------------------ which code runs


@pytest.mark.parametrize(
    "use", [answers, lambda path: judged(path, [DOUBLE]), lambda path: cell_of(path, "7.1")]
)
def test_a_file_that_is_not_a_notebook_is_refused_at_once(tmp_path, use):
    (tmp_path / "day07_test.ipynb").write_text("[1]")
    with pytest.raises(ValueError, match="cannot be read as a notebook"):
        use(tmp_path / "day07_test.ipynb")


def test_an_answer_is_the_learners_own_function(notebook):
    assert answers(notebook(RIGHT, CALL))["7.1"](5) == 10


def test_an_answer_can_use_definitions_of_earlier_cells(notebook):
    path = notebook(
        "import math\nfrom math import floor as down",
        "SCALE = 2\nhalf, third = 0.5, -3\nSIZES = {'a': [1, 2]}\nMIB = 4 * SCALE**20\nn: int = 7",
        "import torch\nFLOAT = torch.float32.itemsize\nLOW, TURN = torch.bfloat16, 2 * math.pi",
        "class Doubler:\n    def double(self, x):\n        return helper(x)",
        "def helper(x):\n    return SCALE * x",
        "shorthand = lambda x: Doubler().double(x)\nother_name = shorthand",
        """
        def double(x):
            assert (half, third, SIZES["a"][1], MIB, n) == (0.5, -3, 2, 2**22, 7)
            assert (FLOAT, LOW.itemsize, int(TURN)) == (4, 2, 6)
            return down(other_name(x)) + int(math.sin(0))
        """,
        CALL,
    )
    assert answers(path)["7.1"](5) == 10


@pytest.mark.parametrize(
    "statement",
    [
        "open('made', 'w')",
        "made = open('made', 'w')",
        "for i in range(1): open('made', 'w')",
        "with open('made', 'w') as file: pass",
        "if True: open('made', 'w')",
        "while open('made', 'w') is None: pass",
        "x = [open('made', 'w')]",
        "x = f'{open(str(1), str(2))}'",
        "try:\n    open('made', 'w')\nexcept OSError:\n    pass",
        "import os\nos.environ['MEMLAB_MADE'] = '1'",
        "import sys\nsys.made = 1",
        "import os\nos.environ['MEMLAB_MADE']: str = '1'",
        "guess('7.1', peak_gib=1)",
        "raise SystemExit",
        "await something",
    ],
)
def test_other_statements_do_not_run(notebook, tmp_path, monkeypatch, statement):
    monkeypatch.chdir(tmp_path)
    path = notebook(statement, f"from memlab.course import exercise, guess\n\n{RIGHT}", CALL)
    before = set(tmp_path.iterdir())
    assert answers(path)["7.1"](5) == 10
    assert set(tmp_path.iterdir()) == before
    assert "MEMLAB_MADE" not in os.environ
    assert not hasattr(sys, "made")


def test_the_calls_of_exercise_do_not_run(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "progress.json").write_text("not JSON, so it would be renamed")
    answers(notebook("from memlab.course import exercise, guess, reveal", RIGHT, CALL))
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "progress.json").exists()


def test_the_answer_is_its_value_at_the_call_of_exercise(notebook):
    path = notebook(RIGHT, CALL, "def double(x):\n    return 'later'")
    assert answers(path)["7.1"](5) == 10


def test_the_last_of_two_calls_for_one_exercise_counts(notebook):
    path = notebook("def double(x):\n    return 'earlier'", CALL, RIGHT, CALL)
    assert answers(path)["7.1"](5) == 10
    [verdict] = judged(path, [DOUBLE])
    assert verdict.status == OK


@pytest.mark.parametrize(
    "call",
    [
        'exercise("7.1", double)',
        'other = exercise("7.1", double)',
        'import memlab.course as course\ndouble = course.exercise("7.1", double)',
        'print("before")\ndouble = exercise("7.1", double)\nprint("after")',
    ],
)
def test_a_call_is_found_in_every_form(notebook, call):
    assert answers(notebook(RIGHT, call))["7.1"](5) == 10


def test_the_result_of_a_call_is_bound_to_its_name(notebook):
    path = notebook(
        RIGHT,
        'twice = exercise("7.1", double)',
        "def quadruple(x):\n    return twice(twice(x))",
        'exercise("7.2", quadruple)',
    )
    assert [verdict.status for verdict in judged(path, BOTH)] == [OK, OK]


@pytest.mark.parametrize(
    "cell",
    [
        "%matplotlib inline",
        "%%time",
        "!ls -l",
        "    # indented\nif True:\n    %time 3",
        "import math\nmath?",
        "?print",
        "print??",
    ],
)
def test_ipython_lines_are_dropped(notebook, cell):
    assert answers(notebook(f"{cell}\n\n{RIGHT}", CALL))["7.1"](5) == 10


def test_a_line_of_plain_python_may_begin_with_a_percent_sign(notebook):
    answer = 'def double(x):\n    return 2 * int("%d"\n      % x)'
    assert answers(notebook(answer, CALL))["7.1"](5) == 10


def test_a_module_beside_the_notebook_can_be_imported(notebook, tmp_path):
    (tmp_path / "beside_the_lesson.py").write_text("FACTOR = 2")
    before = sys.path[:]
    cell = "from beside_the_lesson import FACTOR\ndef double(x):\n    return FACTOR * x"
    assert answers(notebook(cell, CALL))["7.1"](5) == 10
    assert sys.path == before


def test_a_module_beside_the_notebook_can_be_imported_while_an_answer_runs(verdict, tmp_path):
    (tmp_path / "late_beside_the_lesson.py").write_text("FACTOR = 2")
    cell = "def double(x):\n    import late_beside_the_lesson as m\n    return m.FACTOR * x"
    assert verdict(cell, CALL).status == OK


def test_an_optional_import_may_fail(notebook):
    cell = "try:\n    import no_such_module as m\nexcept ImportError:\n    m = None"
    answer = "def double(x):\n    assert m is None\n    return 2 * x"
    assert answers(notebook(cell, answer, CALL))["7.1"](5) == 10


def test_compiler_warnings_are_ignored(notebook):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        answers(notebook('pattern = "\\d"', "assert (RIGHT, 'always true')", RIGHT, CALL))
    assert said == []


# ------------------------------------------------------------------ verdicts


def test_a_right_answer_is_right(verdict):
    assert verdict(RIGHT, CALL).status == OK


def test_a_stub_is_not_attempted(verdict):
    stub = 'def double(x):\n    raise NotImplementedError("exercise 7.1, about 1 line")'
    assert verdict(stub, CALL).status == NOT_ATTEMPTED


def test_an_answer_that_raises_names_the_learners_line(verdict):
    given = verdict("import math", "def double(x):\n    return math.sqrt(-x)  # mine", CALL)
    assert given.status == WRONG
    assert given.text.endswith("at `return math.sqrt(-x)  # mine`, where x is 3.")


def test_linecache_keeps_a_notebooks_lines(notebook):
    path = notebook("x = 1")
    answers(path)
    linecache.checkcache()
    assert linecache.getline(f"<{path}, code cell 1>", 1).strip() == "x = 1"


def test_a_missing_function_is_wrong(verdict):
    given = verdict("x = 1", CALL)
    assert given.status == WRONG
    assert given.text == (
        'No function double is defined in the cells before exercise("7.1", double).'
    )


def test_an_answer_made_by_skipped_code_does_not_keep_its_old_value(verdict):
    given = verdict(RIGHT, "double = print(double)", CALL)
    assert "No function double is defined" in given.text


def test_an_exercise_without_a_call_is_wrong(notebook):
    given = list(judged(notebook(RIGHT, CALL), BOTH))
    assert [(v.exercise.id, v.status) for v in given] == [("7.1", OK), ("7.2", WRONG)]
    assert 'has no line `name = exercise("7.2", name)`' in given[1].text


@pytest.mark.parametrize(
    ("broken", "line", "number"),
    [
        ("def double(x):\n    y = 2 *\n    return y", "y = 2 *", 2),
        ("import math\ndef double(x)\n    return 2 * x", "def double(x)", 2),
        ("def double(x, x):\n    return 2 * x", "def double(x, x):", 1),
        ("double = lambda x: x\nreturn 3", "return 3", 2),
        (f"def double(x):\n    return (x\n{CALL}", "return (x", 2),
        (f"{RIGHT}\n{CALL}\n3 = x", "3 = x", 4),
    ],
)
def test_a_cell_that_does_not_parse_names_the_line(notebook, broken, line, number):
    calls = [] if CALL in broken else [CALL]
    other = ("def quadruple(x):\n    return 4 * x", 'quadruple = exercise("7.2", quadruple)')
    given = {v.exercise.id: v for v in judged(notebook(broken, *calls, *other), BOTH)}
    assert given["7.1"].status == WRONG
    assert f"line {number}, `{line}` is not Python" in given["7.1"].text
    assert given["7.2"].status == OK


def test_a_broken_cell_that_only_calls_exercise_does_not_matter(verdict):
    assert verdict(RIGHT, f"{CALL}\n3 = x").status == OK


def test_a_missing_import_of_a_broken_cell_explains_a_failure(verdict):
    given = verdict("import math\n3 = x", "def double(x):\n    return math.floor(2 * x)", CALL)
    assert given.text.startswith("Its cell cannot be read: line 2, `3 = x` is not Python (cannot")


def test_a_failed_import_explains_a_failure(verdict):
    given = verdict("import no_such_module as m", "def double(x):\n    return m.f(x)", CALL)
    assert given.status == WRONG
    assert given.text == (
        "ModuleNotFoundError: No module named 'no_such_module', at `import no_such_module as m`."
    )


def test_a_definition_that_raises_explains_a_failure(verdict):
    given = verdict("def double(x, factor=1 / 0):\n    return factor * x", CALL)
    assert given.text.startswith("ZeroDivisionError: division by zero, at `def double(x, factor")


@pytest.mark.parametrize("use", ["answer.step", "answer(1)", "answer == answer()", "answer.a.b"])
def test_every_use_of_a_missing_answer_raises_the_reason(use):
    def check(answer):
        eval(use, {"answer": answer})

    exercise = Exercise("7.1", "T", 1, 1, ("a", "b", "c"), None, check, ())
    given = judge(exercise, Unusable(ValueError("the reason")))
    assert (given.status, given.text[:22]) == (WRONG, "ValueError: the reason")


ADVICE = "`memlab check` runs only a notebook's imports, functions, classes and plain constants:"


@pytest.mark.parametrize(
    "cells",
    [
        ("factor = len('ab')", "def double(x):\n    return factor * x", CALL),
        ("factor = len('ab')", "def double(x, by=factor):\n    return by * x", CALL),
        ("factor = 3\nfactor = len('ab')", "def double(x):\n    return factor * x", CALL),
        ("factor = 3\nfactor -= len('a')", "def double(x):\n    return factor * x", CALL),
        ("factor = 3\nfor factor in (2,): pass", "def double(x):\n    return factor * x", CALL),
    ],
)
def test_names_that_only_a_full_run_defines_get_advice(verdict, cells):
    given = verdict(*cells)
    assert given.text.startswith("NameError: name 'factor' is not defined, at `")
    assert ADVICE in given.text
    assert given.text.endswith(
        "if another line defines factor, move that line into the function, or pass factor as an "
        "argument."
    )


@pytest.mark.parametrize(
    "table",
    [
        "FACTORS = {'two': two, 'three': lambda x: 3 * x}",
        "FACTORS = {name: two for name in 'one two'.split()}",
        "FACTORS = dict.fromkeys(('one', 'two'), two)",
        "FACTORS = {}\nFACTORS |= {name: two for name in ('one', 'two')}",
        "NAMES = ['one', 'two']\nFACTORS = dict(zip(NAMES, [two] * 2))",
    ],
)
def test_an_answer_can_use_a_table_of_functions(verdict, table):
    cell = f"def two(x):\n    return 2 * x\n{table}\ndef double(x):\n    return FACTORS['two'](x)"
    assert verdict(cell, CALL).status == OK


@pytest.mark.parametrize(
    "line",
    [
        "FACTORS = [print(2)]",
        "FACTORS = [print(n) for n in range(2)]",
        "FACTORS = dict(two=print(2))",
        "FACTORS = []\nFACTORS += [print(2)]",
    ],
)
def test_calls_in_a_table_do_not_run(verdict, line, capsys):
    assert verdict(f"{line}\n{RIGHT}", CALL).status == OK
    assert not capsys.readouterr().out


@pytest.mark.parametrize("cell", ["print([factor for factor in 'abc'])", "print.factor = 3"])
def test_binding_the_name_in_another_scope_keeps_the_constant(verdict, cell):
    cells = ("factor = 2", cell, "def double(x):\n    return factor * x")
    assert verdict(*cells, CALL).status == OK


def test_other_failures_get_no_advice(verdict):
    assert ADVICE not in verdict("def double(x):\n    return x.y", CALL).text


# ------------------------------------------------------------------ exercises that build on others

QUADRUPLE_CELLS = (
    "def quadruple(x):\n    return double(double(x))",
    'quadruple = exercise("7.2", quadruple)',
)


@pytest.mark.parametrize(
    "first", [RIGHT, "def double(x):\n    return 3 * x", "def double(x)\n    return", "x = 1"]
)
def test_later_exercises_use_the_reference_after_a_wrong_answer(notebook, first):
    given = list(judged(notebook(first, CALL, *QUADRUPLE_CELLS), BOTH))
    assert [v.status for v in given] == [OK if first == RIGHT else WRONG, OK]


def test_later_exercises_use_a_right_answer(notebook):
    first = "def double(x, times=1):\n    return 2**times * x"
    second = "def quadruple(x):\n    return double(x, times=2)"
    given = judged(notebook(first, CALL, second, QUADRUPLE_CELLS[1]), BOTH)
    assert [v.status for v in given] == [OK, OK]


def test_a_single_exercise_uses_the_references_of_wrong_answers(notebook):
    path = notebook("def double(x):\n    return 3 * x", CALL, *QUADRUPLE_CELLS)
    [given] = judged(path, BOTH, only=[QUADRUPLE])
    assert (given.exercise, given.status) == (QUADRUPLE, OK)


def test_a_single_exercise_uses_right_answers(notebook):
    first = "def double(x, times=1):\n    return 2**times * x"
    second = "def quadruple(x):\n    return double(x, times=2)"
    path, said = notebook(first, CALL, second, QUADRUPLE_CELLS[1]), []
    [given] = judged(path, BOTH, only=[QUADRUPLE], announce=lambda each: said.append(each.id))
    assert (given.exercise, given.status, said) == (QUADRUPLE, OK, ["7.2"])


def test_a_recursive_answer_calls_itself_and_not_the_reference(verdict):
    wrong = "def double(x):\n    return 1 if x == 0 else 2 + double(x - 1)"
    assert verdict(wrong, CALL).text.startswith("double(3) gave 7, wanted 6")


def test_each_exercise_is_announced_before_it_is_checked(notebook):
    said = []
    path = notebook(RIGHT, CALL, *QUADRUPLE_CELLS)
    for given in judged(path, BOTH, announce=lambda exercise: said.append(exercise.id)):
        said.append(given.status)
    assert said == ["7.1", OK, "7.2", OK]


# ------------------------------------------------------------------ the cell of an answer


def test_the_cell_of_an_answer_defines_it(notebook):
    path = notebook("x = 1", f"%time 3\nimport math\n{RIGHT}", CALL, *QUADRUPLE_CELLS)
    assert cell_of(path, "7.1") == f"%time 3\nimport math\n{RIGHT}"
    assert cell_of(path, "7.2") == QUADRUPLE_CELLS[0]


def test_the_last_definition_before_the_call_counts(notebook):
    path = notebook("def double(x): 1", RIGHT, CALL, "def double(x): 3")
    assert cell_of(path, "7.1") == RIGHT


def test_a_cell_with_a_syntax_error_is_found(notebook):
    broken = "def double(x):\n    return (x"
    assert cell_of(notebook(broken, CALL), "7.1") == broken


@pytest.mark.parametrize("cells", [(RIGHT,), (CALL,), (CALL, RIGHT)])
def test_an_answer_without_a_definition_has_no_cell(notebook, cells):
    with pytest.raises(ValueError, match=r"no cell that defines the answer to exercise 7\.1"):
        cell_of(notebook(*cells), "7.1")
