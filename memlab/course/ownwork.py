"""Detect answers that call the functions that their exercise rebuilds.

An exercise's `rebuilds` names these functions: "torch.amp.GradScaler", "memlab.course.ledger.
state_bytes", a whole module, or a prefix such as "torch._foreach_*". In packages other than memlab,
torch and numpy, only modules can be named: "bitsandbytes". Calls from the learner's code count,
directly or through a library. Calls from the check and from its reference don't, and neither do
calls of a reference that the lesson handed out in place of another exercise's answer. A private
function counts only if the learner's own line calls it, because permitted functions may call it:
`clip_grad_norm_` calls `torch._foreach_norm`.
"""

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType, FrameType, ModuleType
from typing import Any

LIBRARIES = frozenset({"memlab", "torch", "numpy", *sys.stdlib_module_names})


def is_a_librarys(frame: FrameType) -> bool:
    """Return True if the frame runs library code, not a notebook's or a learner's file."""
    return frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES


@contextmanager
def watched(
    check: Callable[..., Any], rebuilds: Sequence[str], handed_out: Sequence[Any] = ()
) -> Iterator[list[str]]:
    """Yield a list that receives the name of the first forbidden call by `check`'s answer.

    The call raises NotOwnWork. The list has its name even if the answer catches that. Functions and
    classes that were `handed_out` may be called, and may call anything.
    """
    from memlab.internals.threads import asked, scope  # torch, which hints do without

    seen: list[str] = []
    if not rebuilds:
        yield seen
        return
    targets, check_code = _targets(tuple(rebuilds)), getattr(check, "__code__", None)
    permitted = {code for each in handed_out for code in _codes_of(each)}

    def trace_call(frame: FrameType, event: str, called: Any) -> None:
        if seen or event not in ("call", "c_call"):
            return
        name = targets.called(frame, event, called)
        if name is None or any(each.f_code in permitted for each in _stack(frame)):
            return
        caller = frame if event == "c_call" else frame.f_back
        direct = caller is not None and not is_a_librarys(caller)
        if (direct or not _is_private(name)) and _is_the_learners(caller, check_code):
            seen.append(name)
            raise NotOwnWork(name)

    before, of_new_threads = sys.getprofile(), threading.getprofile()

    def start_in_thread(frame: FrameType, event: Any, called: Any) -> None:
        own = trace_call if asked() else of_new_threads
        sys.setprofile(own)
        if own is not None:
            own(frame, event, called)

    with scope():
        threading.setprofile(start_in_thread)
        sys.setprofile(trace_call)
        try:
            yield seen
        finally:
            sys.setprofile(before)
            threading.setprofile(of_new_threads)


def is_rebuilt(answer: Any, rebuilds: Sequence[str]) -> str | None:
    """Return the name of the library function that was passed as the answer, if it is one."""
    while isinstance(answer, partial):
        answer = answer.func
    return _targets(tuple(rebuilds)).name_of(answer) if rebuilds else None


class NotOwnWork(Exception):  # noqa: N818 - names a verdict
    """The learner's code called a function that the exercise rebuilds."""


def _is_private(name: str) -> bool:
    return name.rpartition(".")[2].startswith("_")


def _is_the_learners(frame: FrameType | None, check_code: CodeType | None) -> bool:
    """Return True if the innermost caller outside torch and memlab is the learner's code. A check's
    own functions may call anything."""
    for each in _stack(frame):
        home = each.f_globals.get("__name__", "")
        if each.f_code is check_code or home.startswith("memlab.course"):
            return False
        if not is_a_librarys(each):
            return True
    return False


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _codes_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of a class's methods."""
    for part in _functions_of(function):
        code = getattr(inspect.unwrap(part), "__code__", None) if callable(part) else None
        if isinstance(code, CodeType):
            yield code


def _functions_of(found: Any) -> list[Any]:
    if not inspect.isclass(found):
        return [found]
    return [getattr(part, "__func__", part) for part in vars(found).values()]


class _Targets:
    """The code objects of all forbidden functions, with their names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._codes: dict[CodeType, str] = {}
        # Keyed by id, because hashing a code object is slow. The value keeps the code object alive.
        self._seen: dict[int, tuple[CodeType, str | None]] = {}
        self._builtins: dict[str, list[tuple[Any, str]]] = {}  # by the last part of their name
        self._modules: tuple[str, ...] = ()
        for name in (full for short in names for full in _expanded(short)):
            if name.split(".")[0] not in LIBRARIES:
                self._modules += (f"{name}.",)  # not resolved: importing it may take seconds
                continue
            found = _resolved(name)
            if isinstance(found, ModuleType):
                self._modules += (f"{name}.",)
            elif found is not None:
                self._add(name, found)

    def _add(self, name: str, found: Any) -> None:
        codes = dict.fromkeys(_codes_of(found), name)
        self._codes |= codes
        if not codes and inspect.isroutine(found):
            self._builtins.setdefault(found.__name__, []).append((found, name))
        assert inspect.isclass(found) or callable(found), f"{name} cannot be called"

    def called(self, frame: FrameType, event: str, called: Any) -> str | None:
        """Return the forbidden name of the called function, or None."""
        if event == "c_call":
            is_known = getattr(called, "__name__", "") in self._builtins
            return self._builtin(called) if is_known else None
        known = self._seen.get(id(frame.f_code))
        if known is None:
            name = self._codes.get(frame.f_code) or self._module_of(frame)
            known = self._seen[id(frame.f_code)] = frame.f_code, name
        return known[1]

    def _module_of(self, frame: FrameType) -> str | None:
        home = frame.f_globals.get("__name__", "")
        return f"{home}.{frame.f_code.co_name}" if self._is_inside(home) else None

    def _is_inside(self, home: str) -> bool:
        return f"{home}.".startswith(self._modules)

    def _builtin(self, called: Any) -> str | None:
        for function, name in self._builtins.get(getattr(called, "__name__", ""), ()):
            of_its_type = getattr(type(getattr(called, "__self__", None)), called.__name__, None)
            if called is function or of_its_type is function:
                return name
        return None

    def name_of(self, answer: Any) -> str | None:
        """The name of the function or class that the answer is, or derives from."""
        if not (inspect.isclass(answer) or inspect.isfunction(answer) or inspect.ismethod(answer)):
            return None
        for part in inspect.getmro(answer) if inspect.isclass(answer) else [answer]:
            if self._is_inside(str(part.__module__)):
                return f"{part.__module__}.{part.__qualname__}"
        parts = vars(answer).values() if inspect.isclass(answer) else [answer]
        codes = [getattr(part, "__code__", None) for part in parts]
        return next((self._codes[code] for code in codes if code in self._codes), None)


@cache
def _targets(names: tuple[str, ...]) -> _Targets:
    return _Targets(names)


def _expanded(name: str) -> list[str]:
    """Return the name, or all names that a pattern such as "torch._foreach_*" matches."""
    if not name.endswith("*"):
        return [name]
    home, _, start = name[:-1].rpartition(".")
    found = [f"{home}.{part}" for part in dir(_resolved(home)) if part.startswith(start)]
    assert found, f"nothing begins with {name}"
    return found


def _resolved(name: str) -> Any:
    """Return the object with the dotted name; None if its package is not installed."""
    parts = name.split(".")
    try:
        found = importlib.import_module(parts[0])
    except ImportError:
        return None
    for place, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:place]))
        found = getattr(found, part)
    return found
