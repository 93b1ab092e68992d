"""Find an operator's caller: the autograd engine, a torch function or a line of user code."""

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import numpy as np
import torch

_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_NOT_USERS = (_TORCH_FOLDER, str(Path(np.__file__).parent))  # lines there tell a user nothing
_MEMLAB_FOLDER = Path(__file__).parents[1]
_INTERNAL_FRAMES = (
    *(
        f"{_MEMLAB_FOLDER / part}{os.sep}"
        for part in ("metering", "dry_runs", "prediction", "scripts", "world")
    ),
    *(
        str(_MEMLAB_FOLDER / "internals" / file)
        for file in ("replacing.py", "threads.py", "torch_internals.py")
    ),
    f"{_TORCH_FOLDER}/_ops.py",
    f"{_TORCH_FOLDER}/_compile.py",
    f"{_TORCH_FOLDER}/_dynamo/eval_frame.py",
    f"{_TORCH_FOLDER}/utils/_python_dispatch.py",
    f"{_TORCH_FOLDER}/utils/_stats.py",
)


def called_by_engine() -> bool:
    """Return whether the autograd engine called the operator, not a hook or a recomputation.

    On the CPU the engine runs below `_engine_run_backward`; for other devices, in its own thread.
    """
    caller = next(frames(), None)
    return caller is None or caller.f_code.co_name == "_engine_run_backward"


def called_by(name: str) -> bool:
    """Return whether the function `name` called the operator."""
    caller = next(frames(), None)
    return caller is not None and caller.f_code.co_name == name


def user_line() -> str:
    """Return the line of user code that led to the operator, as `file.py:12 function`."""
    for frame in frames():
        if name := _shown(frame.f_code.co_filename, os.getcwd()):
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
    return "autograd's engine"


def user_line_of(stack: str) -> str:
    """Return the innermost line of user code in a stack as Python prints it, "" without one."""
    for file, number, function in reversed(_FRAME.findall(stack)):
        if name := _shown(file, os.getcwd()):
            return f"{name}:{number} {function}"
    return ""


@cache
def _shown(file: str, folder: str) -> str:
    """Return the name of a file as a user in the folder knows it; "" for torch's and numpy's."""
    path = Path(file)
    if any(map(path.is_relative_to, _NOT_USERS)):
        return ""
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name


def frames() -> Iterator[FrameType]:
    """Yield the Python frames that led to an operator, innermost first, without memlab's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_INTERNAL_FRAMES):
            yield frame
        frame = frame.f_back
