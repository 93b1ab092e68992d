"""A check in a process that has imported nothing yet, as `memlab check` is.

pytest's own process has long imported torch._dynamo, which hides what only a fresh one shows.
"""

import subprocess
import sys

WRONG_ANSWERS = """
import sys
from memlab.course.days import exercise_of
from memlab.course.exercises import OK, WRONG, judge

assert "torch._dynamo" not in sys.modules
flash = exercise_of("10.4")
for known in flash.wrong_answers[1], flash.wrong_answers[4]:
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


def test_the_first_answer_of_a_process_is_judged_as_any_other():
    """Operators that torch._dynamo is just making have no name yet: no hook may ask for it."""
    run(WRONG_ANSWERS)


def test_what_torch_imports_late_is_imported_before_the_time_limit_runs():
    run(TIME_LIMIT)
