"""A day's TOML file: what is read from it, and one clear sentence for each malformed table."""

import pytest

from memlab.course.texts import Change, Mistake, read

DAY = """
[[exercise]]
id = "3.1"
title = "Double"
minutes = 5
difficulty = 2
hints = '''
A nudge
in two lines.

A push.

A shove.
'''

[[exercise.wrong]]
remark = '''
Two
lines.
'''
edit = '''
- return 2 * x
+ y = x
+     return y
-     del x
+
'''

[[exercise.wrong]]
remark = "One line."
code = '''
def double(x):
    return x
'''
"""


@pytest.fixture
def texts_of(tmp_path):
    def write(text: str):
        path = tmp_path / "day03.toml"
        path.write_text(text, encoding="utf-8")
        return read.__wrapped__(path, 3)

    return write


def test_a_file_gives_texts_in_single_lines_and_changes(texts_of):
    (text,) = texts_of(DAY)
    assert text[:5] == (
        *("3.1", "Double", 5, 2),
        ("A nudge in two lines.", "A push.", "A shove."),
    )
    assert text.mistakes == (
        Mistake(
            "Two lines.",
            Change((("return 2 * x", "y = x\n    return y"), ("    del x", ""))),
        ),
        Mistake("One line.", Change(code="def double(x):\n    return x\n")),
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"3.1"', '"3.2"', "exercise 3.1: got id 3.2; expected 3.1"),
        ('"3.1"', "3.1", "exercise 3.1: got id = 3.1; expected a text"),
        ("minutes = 5", "minutes = true", "exercise 3.1: got minutes = True; expected an integer"),
        ("= 2", "= 6", "exercise 3.1: got difficulty 6; expected 1, 2, 3, 4, 5"),
        ("A push.\n\n", "A push.\n", "exercise 3.1: got number of hints 2; expected 3"),
        ("exercise.wrong", "wrong", "day03.toml: got exercise, wrong; expected exercise"),
        ("exercise.wrong", "exercise.right", "exercise 3.1: got id, title, minutes, difficulty, "),
        ('"One line."', "1", "wrong answer 2: got remark = 1; expected a text"),
        ("code", "text", "wrong answer 2: got remark, text; expected remark, edit"),
        (
            "edit = '''",
            "code = ''\nedit = '''",
            "wrong answer 1: got remark, code, edit; expected ",
        ),
        ("del x\n+\n", "del x\n", "wrong answer 1: got edit = '- return 2 * x\\n+ y = x"),
        ("- return", "return", "wrong answer 1: got edit = 'return 2 * x\\n+ y = x"),
        ("-     del", "\n-     del", 'expected lines that begin with "- ", each followed by'),
        ("title =", "title", "day03.toml: Expected '=' after a key"),
    ],
)
def test_a_malformed_table_is_an_error_with_its_place(texts_of, old, new, said):
    assert old in DAY
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        texts_of(DAY.replace(old, new))
    assert str(error.value).startswith("day03.toml")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
