"""Checks in a fresh process, as in `memlab check`.

pytest's own process has already imported torch._dynamo, which would hide these errors.
"""

import subprocess
import sys

import pytest

WRONG_ANSWERS = """
import sys
from dataclasses import replace
from memlab.course.days import exercise_of
from memlab.course.exercises import OK, WRONG, judge


assert "torch._dynamo" not in sys.modules
flash = exercise_of("10.4")
few = flash.wrong_answers[1], flash.wrong_answers[4]
flash = replace(flash, wrong_answers=few)  # to name one of twenty takes seconds
for known in few:
    verdict = judge(flash, known.answer)
    assert verdict.status == WRONG, verdict
    assert known.remark in verdict.text, verdict

known = exercise_of("11.3")
verdict = judge(known, known.reference)
assert verdict.status == OK, verdict
"""

TIME_LIMIT = """
import sys
from dataclasses import replace
from memlab.course import exercises
from memlab.course.days import exercise_of

def check(answer):
    assert "torch._dynamo" in sys.modules
    return "imported before the clock ran"

assert "torch._dynamo" not in sys.modules
verdict = exercises.judge(replace(exercise_of("11.3"), check=check), None)
assert verdict.status == exercises.OK, verdict
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_first_answer_in_a_process_is_checked_like_any_other():
    """While torch._dynamo creates operators they have no name, so hooks must not read it."""
    run(WRONG_ANSWERS)


def test_torch_dynamo_is_imported_before_the_time_limit_starts():
    run(TIME_LIMIT)
