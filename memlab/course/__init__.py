"""The course: what its notebooks call, and what checks, builds and keeps them.

from memlab.course import exercise, guess, reveal
"""

from memlab.course.gate import exercise, guess, reveal

__all__ = ["exercise", "guess", "reveal"]
