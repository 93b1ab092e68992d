"""The course: what its notebooks call, and what checks, builds and keeps them.

from memlab.course import exercise, guess, reveal
"""

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
