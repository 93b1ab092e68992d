"""Whether an answer does its own work: calls of the functions that an exercise rebuilds are seen.

`rebuilds` of an exercise names them: "torch.amp.GradScaler", "memlab.course.ledger.state_bytes", or
a whole module. A name that ends in * is every function that begins so: "torch._foreach_*". Of
packages other than memlab, torch and numpy only modules can be named: "bitsandbytes". A call
counts if the learner's code made it, itself or through a library; the check's own calls, and those
of its reference, do not. A private function counts only where the learner's own line calls it:
`clip_grad_norm_`, which everybody may use, calls `torch._foreach_norm`.
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
    """Whether the frame runs code of a library: neither of a notebook nor of a learner's file."""
    return frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES


@contextmanager
def watched(check: Callable[..., Any], rebuilds: Sequence[str]) -> Iterator[list[str]]:
    """A list that receives the name of the first call that `check`'s answer must not make.

    The call itself raises NotOwnWork; an answer that catches it is in the list all the same.
    """
    seen: list[str] = []
    if not rebuilds:
        yield seen
        return
    targets, check_code = _targets(tuple(rebuilds)), getattr(check, "__code__", None)

    def look(frame: FrameType, event: str, called: Any) -> None:
        if seen or event not in ("call", "c_call"):
            return
        name = targets.called(frame, event, called)
        if name is None:
            return
        caller = frame if event == "c_call" else frame.f_back
        direct = caller is not None and not is_a_librarys(caller)
        if (direct or not _is_private(name)) and _is_the_learners(caller, check_code):
            seen.append(name)
            raise NotOwnWork(name)

    before = sys.getprofile()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def is_rebuilt(answer: Any, rebuilds: Sequence[str]) -> str | None:
    """The name of the library's function that is handed over as the answer, if it is one."""
    while isinstance(answer, partial):
        answer = answer.func
    return _targets(tuple(rebuilds)).name_of(answer) if rebuilds else None


class NotOwnWork(Exception):  # noqa: N818 - the name of a verdict
    """Raised in the learner's call of what the exercise rebuilds."""


def _is_private(name: str) -> bool:
    return name.rpartition(".")[2].startswith("_")


def _is_the_learners(frame: FrameType | None, check_code: CodeType | None) -> bool:
    """Whether the innermost caller that is neither torch's nor memlab's is the learner's code,
    not a check's: checks hand over functions of their own, which may call what they like."""
    while frame is not None:
        home = frame.f_globals.get("__name__", "")
        if frame.f_code is check_code or home.startswith("memlab.course"):
            return False
        if not is_a_librarys(frame):
            return True
        frame = frame.f_back
    return False


class _Targets:
    """The code of every function that must not be called, by name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._codes: dict[CodeType, str] = {}
        # By identity, since the hash of a code is slow; the code beside its name keeps it alive.
        self._seen: dict[int, tuple[CodeType, str | None]] = {}
        self._builtins: dict[str, list[tuple[Any, str]]] = {}  # by their last name
        self._modules: tuple[str, ...] = ()
        for name in (full for short in names for full in _spelled_out(short)):
            if name.split(".")[0] not in LIBRARIES:
                self._modules += (f"{name}.",)  # known by name alone: importing it may take seconds
                continue
            found = _resolved(name)
            if isinstance(found, ModuleType):
                self._modules += (f"{name}.",)
            elif found is not None:
                self._add(name, found)

    def _add(self, name: str, found: Any) -> None:
        functions = [found]
        if inspect.isclass(found):
            functions = [getattr(part, "__func__", part) for part in vars(found).values()]
        for function in functions:
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else 0
            if isinstance(code, CodeType):
                self._codes[code] = name
            elif inspect.isroutine(function) and function is found:
                self._builtins.setdefault(function.__name__, []).append((function, name))
        assert inspect.isclass(found) or callable(found), f"{name} cannot be called"

    def called(self, frame: FrameType, event: str, called: Any) -> str | None:
        """The name under which the exercise forbids what is called here, or None."""
        if event == "c_call":
            is_alike = getattr(called, "__name__", "") in self._builtins
            return self._builtin(called) if is_alike else None
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


def _spelled_out(name: str) -> list[str]:
    """The name, or all that "torch._foreach_*" stands for."""
    if not name.endswith("*"):
        return [name]
    home, _, start = name[:-1].rpartition(".")
    found = [f"{home}.{part}" for part in dir(_resolved(home)) if part.startswith(start)]
    assert found, f"nothing begins with {name}"
    return found


def _resolved(name: str) -> Any:
    """What the dotted name stands for; None where its package is not installed."""
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
