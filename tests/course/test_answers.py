"""What is run of a notebook to find its answers, and how they are judged."""

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
    """Writes a notebook of a heading and code cells."""

    def write(*sources: str) -> Path:
        found = [{"cell_type": "markdown", "source": ["# The title\n", "text"]}]
        found += [{"cell_type": "code", "source": dedent(source).strip()} for source in sources]
        path = tmp_path / "day07_test.ipynb"
        path.write_text(json.dumps({"cells": found}), encoding="utf-8")
        return path

    return write


@pytest.fixture
def verdict(notebook):
    """The one verdict on exercise 7.1 in a notebook of these cells."""

    def judge_it(*sources: str):
        [verdict] = judged(notebook(*sources), [DOUBLE])
        return verdict

    return judge_it


# ------------------------------------------------------------------ what is run


@pytest.mark.parametrize(
    "use", [answers, lambda path: judged(path, [DOUBLE]), lambda path: cell_of(path, "7.1")]
)
def test_what_is_no_notebook_is_refused_at_once(tmp_path, use):
    (tmp_path / "day07_test.ipynb").write_text("[1]")
    with pytest.raises(ValueError, match="cannot be read as a notebook"):
        use(tmp_path / "day07_test.ipynb")


def test_an_answer_is_the_learners_own_function(notebook):
    assert answers(notebook(RIGHT, CALL))["7.1"](5) == 10


def test_an_answer_finds_imports_functions_classes_and_constants_of_earlier_cells(notebook):
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
def test_nothing_else_of_the_notebook_is_run(notebook, tmp_path, monkeypatch, statement):
    monkeypatch.chdir(tmp_path)
    path = notebook(statement, f"from memlab.course import exercise, guess\n\n{RIGHT}", CALL)
    before = set(tmp_path.iterdir())
    assert answers(path)["7.1"](5) == 10
    assert set(tmp_path.iterdir()) == before
    assert "MEMLAB_MADE" not in os.environ
    assert not hasattr(sys, "made")


def test_the_calls_of_exercise_are_not_run(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "progress.json").write_text("no JSON: it would be put aside")
    answers(notebook("from memlab.course import exercise, guess, reveal", RIGHT, CALL))
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "progress.json").exists()


def test_the_answer_is_what_it_is_where_it_is_handed_over(notebook):
    path = notebook(RIGHT, CALL, "def double(x):\n    return 'later'")
    assert answers(path)["7.1"](5) == 10


def test_of_two_calls_for_one_exercise_the_last_counts(notebook):
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
def test_a_call_is_found_however_it_is_written(notebook, call):
    assert answers(notebook(RIGHT, call))["7.1"](5) == 10


def test_what_a_call_gives_is_there_under_its_name(notebook):
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
def test_lines_for_ipython_are_dropped(notebook, cell):
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


def test_warnings_of_the_compiler_are_left_to_jupyter(notebook):
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


def test_lines_of_notebooks_stay_known_when_files_are_looked_up(notebook):
    path = notebook("x = 1")
    answers(path)
    linecache.checkcache()
    assert linecache.getline(f"<{path}, code cell 1>", 1).strip() == "x = 1"


def test_a_function_that_is_not_defined_is_wrong(verdict):
    given = verdict("x = 1", CALL)
    assert given.status == WRONG
    assert given.text == (
        'No function double is defined in the cells before exercise("7.1", double).'
    )


def test_an_answer_that_is_made_by_running_something_is_not_an_old_one(verdict):
    given = verdict(RIGHT, "double = print(double)", CALL)
    assert "No function double is defined" in given.text


def test_an_exercise_that_the_notebook_does_not_hand_over_is_wrong(notebook):
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


def test_a_broken_cell_that_only_hands_an_answer_over_does_not_spoil_it(verdict):
    assert verdict(RIGHT, f"{CALL}\n3 = x").status == OK


def test_what_a_broken_cell_would_have_imported_is_why_an_answer_fails(verdict):
    given = verdict("import math\n3 = x", "def double(x):\n    return math.floor(2 * x)", CALL)
    assert given.text.startswith("Its cell cannot be read: line 2, `3 = x` is not Python (cannot")


def test_what_cannot_be_imported_is_why_an_answer_fails(verdict):
    given = verdict("import no_such_module as m", "def double(x):\n    return m.f(x)", CALL)
    assert given.status == WRONG
    assert given.text == (
        "ModuleNotFoundError: No module named 'no_such_module', at `import no_such_module as m`."
    )


def test_a_definition_that_raises_is_why_an_answer_fails(verdict):
    given = verdict("def double(x, factor=1 / 0):\n    return factor * x", CALL)
    assert given.text.startswith("ZeroDivisionError: division by zero, at `def double(x, factor")


@pytest.mark.parametrize("use", ["answer.step", "answer(1)", "answer == answer()", "answer.a.b"])
def test_whatever_is_done_with_an_answer_that_is_not_there_says_why(use):
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
def test_what_only_a_whole_run_defines_is_named_with_advice(verdict, cells):
    given = verdict(*cells)
    assert given.text.startswith("NameError: name 'factor' is not defined, at `")
    assert ADVICE in given.text
    assert given.text.endswith(
        "if another line makes factor, put that line into the function, or hand factor over as an "
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
def test_a_table_of_functions_may_stand_before_an_answer(verdict, table):
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
def test_what_a_table_is_made_of_is_not_called(verdict, line, capsys):
    assert verdict(f"{line}\n{RIGHT}", CALL).status == OK
    assert not capsys.readouterr().out


@pytest.mark.parametrize("cell", ["print([factor for factor in 'abc'])", "print.factor = 3"])
def test_what_binds_the_name_elsewhere_takes_no_constant_away(verdict, cell):
    cells = ("factor = 2", cell, "def double(x):\n    return factor * x")
    assert verdict(*cells, CALL).status == OK


def test_other_failures_come_without_the_advice(verdict):
    assert ADVICE not in verdict("def double(x):\n    return x.y", CALL).text


# ------------------------------------------------------------------ exercises that build on others

QUADRUPLE_CELLS = (
    "def quadruple(x):\n    return double(double(x))",
    'quadruple = exercise("7.2", quadruple)',
)


@pytest.mark.parametrize(
    "first", [RIGHT, "def double(x):\n    return 3 * x", "def double(x)\n    return", "x = 1"]
)
def test_what_follows_goes_on_with_the_reference_as_in_the_notebook(notebook, first):
    given = list(judged(notebook(first, CALL, *QUADRUPLE_CELLS), BOTH))
    assert [v.status for v in given] == [OK if first == RIGHT else WRONG, OK]


def test_what_follows_a_right_answer_goes_on_with_it(notebook):
    first = "def double(x, times=1):\n    return 2**times * x"
    second = "def quadruple(x):\n    return double(x, times=2)"
    given = judged(notebook(first, CALL, second, QUADRUPLE_CELLS[1]), BOTH)
    assert [v.status for v in given] == [OK, OK]


def test_one_exercise_alone_goes_on_with_the_reference_of_the_others(notebook):
    path = notebook("def double(x):\n    return 3 * x", CALL, *QUADRUPLE_CELLS)
    [given] = judged(path, BOTH, only=[QUADRUPLE])
    assert (given.exercise, given.status) == (QUADRUPLE, OK)


def test_an_answer_that_calls_itself_calls_itself_and_not_the_reference(verdict):
    wrong = "def double(x):\n    return 1 if x == 0 else 2 + double(x - 1)"
    assert verdict(wrong, CALL).text.startswith("double(3) gave 7, wanted 6")


def test_each_exercise_is_announced_before_it_is_judged(notebook):
    said = []
    path = notebook(RIGHT, CALL, *QUADRUPLE_CELLS)
    for given in judged(path, BOTH, announce=lambda exercise: said.append(exercise.id)):
        said.append(given.status)
    assert said == ["7.1", OK, "7.2", OK]


# ------------------------------------------------------------------ the cell of an answer


def test_the_cell_of_an_answer_is_the_one_that_defines_it(notebook):
    path = notebook("x = 1", f"%time 3\nimport math\n{RIGHT}", CALL, *QUADRUPLE_CELLS)
    assert cell_of(path, "7.1") == f"%time 3\nimport math\n{RIGHT}"
    assert cell_of(path, "7.2") == QUADRUPLE_CELLS[0]


def test_of_two_cells_that_define_an_answer_the_last_one_before_it_is_handed_over_counts(notebook):
    path = notebook("def double(x): 1", RIGHT, CALL, "def double(x): 3")
    assert cell_of(path, "7.1") == RIGHT


def test_a_cell_that_does_not_parse_is_found_all_the_same(notebook):
    broken = "def double(x):\n    return (x"
    assert cell_of(notebook(broken, CALL), "7.1") == broken


@pytest.mark.parametrize("cells", [(RIGHT,), (CALL,), (CALL, RIGHT)])
def test_an_answer_that_no_cell_defines_has_none(notebook, cells):
    with pytest.raises(ValueError, match=r"no cell that defines the answer to exercise 7\.1"):
        cell_of(notebook(*cells), "7.1")
