"""Who made a call that memlab replaces."""

import sys
from collections.abc import Iterator, Set
from pathlib import Path
from types import FrameType

from memlab.internals.libraries import is_librarys, is_pythons

_MEMLAB = Path(__file__).parents[1]
_REPLACING = (str(_MEMLAB / "world"), str(_MEMLAB / "internals" / "replacing.py"))


def is_the_scripts_call() -> bool:
    """Return whether the script itself made the call, and neither memlab nor a library of its own
    accord, such as one that looks for nvidia-smi."""
    callers = list(_frames(sys._getframe(1)))
    if any(frame.f_code is is_the_scripts_call.__code__ for frame in callers):
        return False  # this function looks for files, too
    for frame in callers:
        file = frame.f_code.co_filename
        if not file.startswith(_REPLACING) and not is_pythons(file):
            return not file.startswith(str(_MEMLAB)) and not is_librarys(file)
    return False


def is_called_by(modules: Set[str]) -> bool:
    return any(frame.f_globals.get("__name__") in modules for frame in _frames(sys._getframe(1)))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
