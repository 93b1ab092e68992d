"""The course: the functions that its notebooks call, and the code that checks and builds them.

from memlab.course import exercise, guess, reveal
"""

from typing import TYPE_CHECKING

from memlab.internals.lazy import lazily

if TYPE_CHECKING:
    from memlab.course.bill import running_bill
    from memlab.course.elsewhere import stored_on_a_gpu, time_on_a_gpu
    from memlab.course.gate import exercise, guess, reveal
    from memlab.course.rules import verdict

__all__ = [
    "exercise",
    "guess",
    "reveal",
    "running_bill",
    "stored_on_a_gpu",
    "time_on_a_gpu",
    "verdict",
]

__getattr__ = lazily(
    __name__,
    {
        "running_bill": "memlab.course.bill",
        **dict.fromkeys(("stored_on_a_gpu", "time_on_a_gpu"), "memlab.course.elsewhere"),
        **dict.fromkeys(("exercise", "guess", "reveal"), "memlab.course.gate"),
        "verdict": "memlab.course.rules",
    },
)
