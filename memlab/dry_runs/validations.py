"""Conditions that decide whether an exception is raised.

    if not (boxes[:, 2:] >= boxes[:, :2]).all():
        raise ValueError(...)

A dry run without the boxes' values assumes that they are valid. The bytecode after the read shows
which answer means "valid": if every path after one answer ends in a `raise`, the other answer is
valid. This covers `assert`, and conditions through `not`, `and`, `or`, `bool()`, `.item()`, a local
variable or the return value of a checking function.
"""

import dis
import functools
import itertools
from types import CodeType
from typing import NamedTuple

from memlab.metering.frames import frames

_MAX_FRAMES = 8  # from the read to the `raise`
_RAISES = "raises"
_CALLS = ("CALL", "LOAD_ATTR")  # LOAD_ATTR can call a property
_RETURNS = ("RETURN_VALUE", "YIELD_VALUE")  # `all` and `any` read yielded values
_RAISE = ("RAISE_VARARGS", "RERAISE")
_FOR = ("FOR_ITER", "SEND")
# Instructions that do not change the bools on the stack.
_NO_EFFECT = ("NOP", "TO_BOOL", "NOT_TAKEN", "EXTENDED_ARG")


def valid_answer() -> bool | None:
    """Return the answer for which the current read of a bool raises no exception.

    None if both answers can go on, or both raise.
    """
    # The bytecode, because in the syntax tree the place is lost: in Python 3.11 the jump of `if not
    # x.all():` has the position of the whole statement, and a frame inside a call points at the
    # call's last cache entry.
    if_true, if_false = _certainly_raises(True), _certainly_raises(False)
    return None if if_true == if_false else if_false


def _certainly_raises(answer: bool) -> bool:
    """Return whether an exception follows if the current read of a bool gives `answer`."""
    for frame in itertools.islice(frames(), _MAX_FRAMES):
        ends = ends_of(frame.f_code, frame.f_lasti, answer)
        if ends == {_RAISES}:
            return True
        if ends not in ({True}, {False}):
            return False
        answer = True in ends
    return False


class _BytecodeState(NamedTuple):
    """A position in a function, and the location of the tracked bool."""

    offset: int
    stack: tuple[bool, ...]  # the known values on top of the stack
    variable: tuple[str, bool] | None


@functools.cache
def ends_of(code: CodeType, offset: int, answer: bool) -> frozenset[bool | str | None]:
    """Return how a function can end if this instruction reads `answer`, or its call returns it.

    Each end is _RAISES, a returned bool, or None for anything else.
    """
    ends: set[bool | str | None] = set()
    for state in _states(code, offset, answer):
        name = _instructions(code)[state.offset][0].opname
        if name in _RAISE:
            ends.add(_RAISES)
        elif _is_return(name):
            ends.add(state.stack[-1] if state.stack and name in _RETURNS else None)
    return frozenset(ends or {None})


@functools.cache
def can_iterate_again(code: CodeType, offset: int, answer: bool | None) -> bool:
    """Return whether a `while` around this instruction can iterate again after reading `answer`.

    None means an unknown answer. A `for` loop always ends.
    """
    return any(
        following.offset <= offset <= state.offset and not _iterates(code, following.offset)
        for state in _states(code, offset, answer, past_for=True)
        for following in _next(code, state)
    )


def _iterates(code: CodeType, offset: int) -> bool:
    instructions = _instructions(code)
    while instructions[offset][0].opname == "EXTENDED_ARG":  # prefix of a long jump
        offset += 2
    return instructions[offset][0].opname in _FOR


def _is_return(name: str) -> bool:
    return name.startswith("RETURN_") or name in _RETURNS


def _states(
    code: CodeType, offset: int, answer: bool | None, past_for: bool = False
) -> list[_BytecodeState]:
    """Return all reachable states; with `past_for`, only those after a `for` loop ends."""
    instructions = _instructions(code)
    if offset not in instructions:
        return []
    todo = [_start(code, offset, answer)]
    seen: dict[_BytecodeState, None] = {}
    while todo:
        state = todo.pop()
        if state not in seen:
            seen[state] = None
            name = instructions[state.offset][0].opname
            if name not in _RAISE and not _is_return(name):
                following = _next(code, state)
                todo += following[-1:] if past_for and name in _FOR else following
    return list(seen)


def _start(code: CodeType, offset: int, answer: bool | None) -> _BytecodeState:
    instruction, following = _instructions(code)[offset]
    stack = () if answer is None else (answer,)
    if instruction.opname.startswith(_CALLS):
        return _BytecodeState(following, stack, None)
    if instruction.opname == "CONTAINS_OP":  # compares the remaining elements in the same way
        return _BytecodeState(following, tuple(one != bool(instruction.arg) for one in stack), None)
    return _BytecodeState(offset, stack, None)


def _next(code: CodeType, state: _BytecodeState) -> list[_BytecodeState]:
    """Return the possible next states."""
    instruction, following = _instructions(code)[state.offset]
    name, stack = instruction.opname, state.stack
    top, below = stack[-1:], stack[:-1]
    if "JUMP_" in name and "_IF_" in name:
        return _branches(instruction, following, state)
    if name in _FOR:
        return [state._replace(offset=o, stack=()) for o in (following, instruction.argval)]
    if name.startswith("JUMP_"):
        return [state._replace(offset=instruction.argval)]
    variable = state.variable
    if name.startswith("STORE_") and (top or (variable and variable[0] == instruction.argval)):
        stack, variable = below, (instruction.argval, top[0]) if top else None
    elif name.startswith("LOAD_") and variable and variable[0] == instruction.argval:
        stack = (*stack, variable[1])
    elif name == "UNARY_NOT":
        stack = (*below, *(not one for one in top))
    elif name == "COPY":
        stack = (*stack, *top) if instruction.arg == 1 else ()
    elif name == "POP_TOP":
        stack = below
    elif name not in _NO_EFFECT:
        stack = ()
    return [_BytecodeState(following, stack, variable)]


def _branches(
    instruction: dis.Instruction, following: int, state: _BytecodeState
) -> list[_BytecodeState]:
    """Return the states after a conditional jump; only one if the tracked bool decides it."""
    below = state.stack[:-1]
    kept = state.stack if instruction.opname.endswith("_OR_POP") else below
    jumps = state._replace(offset=instruction.argval, stack=kept)
    goes_on = state._replace(offset=following, stack=below)
    if not state.stack or "NONE" in instruction.opname:
        return [jumps, goes_on]
    return [jumps if state.stack[-1] == ("IF_TRUE" in instruction.opname) else goes_on]


@functools.cache
def _instructions(code: CodeType) -> dict[int, tuple[dis.Instruction, int]]:
    """Return each instruction and the offset of the next one, by offset.

    An instruction's inline caches map to it too: during a call, a frame points to the last cache.
    """
    found = list(dis.get_instructions(code))
    ends = [*(instruction.offset for instruction in found[1:]), len(code.co_code)]
    return {
        offset: (instruction, end)
        for instruction, end in zip(found, ends, strict=True)
        for offset in range(instruction.offset, end, 2)
    }
