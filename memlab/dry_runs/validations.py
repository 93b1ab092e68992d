"""Conditions that decide whether an exception is raised.

    if not (boxes[:, 2:] >= boxes[:, :2]).all():
        raise ValueError(...)

A dry run that does not know the boxes assumes that they are valid. Which answer means "valid" is
found in the bytecode that follows the read: it is the answer after which some path goes on, where
after the other one every path ends in a `raise`. An `assert` is such a condition, and so is one
behind `not`, `and`, `or`, `bool()`, `.item()`, a local variable or the return value of a function
that was called to check.
"""

import dis
import functools
import itertools
from types import CodeType
from typing import NamedTuple

from memlab.metering.frames import frames

_MOST_FRAMES = 8  # between the read and the `raise`
_RAISES = "raises"
_CALLS = ("CALL", "LOAD_ATTR")  # a property is called, too
_RETURNS = ("RETURN_VALUE", "YIELD_VALUE")  # the latter to `all` and `any`
_RAISE = ("RAISE_VARARGS", "RERAISE")
_FOR = ("FOR_ITER", "SEND")
# These leave the stack as it is, in truth values.
_KEEP = ("NOP", "TO_BOOL", "NOT_TAKEN", "EXTENDED_ARG")


def valid_answer() -> bool | None:
    """What the truth value that is being read has to be so that no exception is raised.

    None where it decides about none.
    """
    if_true, if_false = _certainly_raises(True), _certainly_raises(False)
    return None if if_true == if_false else if_false


def _certainly_raises(answer: bool) -> bool:
    """Whether an exception follows if the truth value that is being read is `answer`."""
    for frame in itertools.islice(frames(), _MOST_FRAMES):
        ends = ends_of(frame.f_code, frame.f_lasti, answer)
        if ends == {_RAISES}:
            return True
        if ends not in ({True}, {False}):
            return False
        (answer,) = ends
    return False


class _State(NamedTuple):
    """A place in a function, and where the truth value is that we follow."""

    offset: int
    stack: tuple[bool, ...]  # the topmost values, as far as we know them
    variable: tuple[str, bool] | None


@functools.cache
def ends_of(code: CodeType, offset: int, answer: bool) -> frozenset[bool | str | None]:
    """How a function can end if this instruction reads `answer`, or calls what returns it.

    Each is _RAISES, a truth value that is returned, or None for anything else.
    """
    ends = set()
    for state in _states(code, offset, answer):
        name = _instructions(code)[state.offset][0].opname
        if name in _RAISE:
            ends.add(_RAISES)
        elif _is_return(name):
            ends.add(state.stack[-1] if state.stack and name in _RETURNS else None)
    return frozenset(ends or {None})


@functools.cache
def begins_another_round(code: CodeType, offset: int, answer: bool | None) -> bool:
    """Whether a `while` around this instruction can go on after it has read `answer`.

    None stands for an answer that is not known. A `for` ends by itself.
    """
    return any(
        following.offset <= offset <= state.offset and not _iterates(code, following.offset)
        for state in _states(code, offset, answer, past_for=True)
        for following in _next(code, state)
    )


def _iterates(code: CodeType, offset: int) -> bool:
    instructions = _instructions(code)
    while instructions[offset][0].opname == "EXTENDED_ARG":  # of an instruction that jumps far
        offset += 2
    return instructions[offset][0].opname in _FOR


def _is_return(name: str) -> bool:
    return name.startswith("RETURN_") or name in _RETURNS


def _states(
    code: CodeType, offset: int, answer: bool | None, past_for: bool = False
) -> list[_State]:
    """All states that can follow, with the rounds of every `for`, or as after the last one."""
    instructions = _instructions(code)
    if offset not in instructions:
        return []
    todo, seen = [_start(code, offset, answer)], {}
    while todo:
        state = todo.pop()
        if state not in seen:
            seen[state] = None
            name = instructions[state.offset][0].opname
            if name not in _RAISE and not _is_return(name):
                following = _next(code, state)
                todo += following[-1:] if past_for and name in _FOR else following
    return list(seen)


def _start(code: CodeType, offset: int, answer: bool | None) -> _State:
    instruction, following = _instructions(code)[offset]
    stack = () if answer is None else (answer,)
    if instruction.opname.startswith(_CALLS):
        return _State(following, stack, None)
    if instruction.opname == "CONTAINS_OP":  # the other elements are compared in the same way
        return _State(following, tuple(one != bool(instruction.arg) for one in stack), None)
    return _State(offset, stack, None)


def _next(code: CodeType, state: _State) -> list[_State]:
    """The states that may follow."""
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
    elif name not in _KEEP:
        stack = ()
    return [_State(following, stack, variable)]


def _branches(instruction: dis.Instruction, following: int, state: _State) -> list[_State]:
    """After a jump under a condition: both ways, or one if the condition is what we follow."""
    below = state.stack[:-1]
    kept = state.stack if instruction.opname.endswith("_OR_POP") else below
    jumps = state._replace(offset=instruction.argval, stack=kept)
    goes_on = state._replace(offset=following, stack=below)
    if not state.stack or "NONE" in instruction.opname:
        return [jumps, goes_on]
    return [jumps if state.stack[-1] == ("IF_TRUE" in instruction.opname) else goes_on]


@functools.cache
def _instructions(code: CodeType) -> dict[int, tuple[dis.Instruction, int]]:
    """By its offset, each instruction and the offset of the following one.

    An instruction's caches stand for it: a frame that has called another points to the last one.
    """
    found = list(dis.get_instructions(code))
    ends = [*(instruction.offset for instruction in found[1:]), len(code.co_code)]
    return {
        offset: (instruction, end)
        for instruction, end in zip(found, ends, strict=True)
        for offset in range(instruction.offset, end, 2)
    }
