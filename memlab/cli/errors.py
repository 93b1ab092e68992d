"""Errors that end a command with one line on standard error instead of a traceback."""

from collections.abc import Collection
from difflib import get_close_matches
from itertools import islice

MAX_VALUE_LENGTH, MAX_LINE_LENGTH = 80, 1000  # characters; longer text loses its middle
SHORT_LINE = 60
QUOTED = frozenset(" '\"")


class UsageError(Exception):
    """The user's input cannot be used. The message says what was received, what was expected and
    what to do."""


class RankLostError(UsageError):
    """This rank waited in a collective for another rank, which has ended and may report why."""


def quoted(given: str) -> str:
    """Format user input for use in a sentence: quoted unless it is a plain word."""
    is_plain = given and given.isprintable() and not QUOTED & set(given)
    return shortened(given if is_plain else repr(given), MAX_VALUE_LENGTH)


SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def suggestions(given: str, known: Collection[str]) -> str:
    """List the known names, after the one most similar to `given` if there is a similar one."""
    near = get_close_matches(SHORT_NAMES.get(given, given), known, n=1)
    return f"{f'did you mean {near[0]}? Choose from' if near else 'choose from'} {', '.join(known)}"


def require_known(option: str, given: str | None, known: Collection[str]) -> None:
    """Raise UsageError for a value that is not among the known ones."""
    if given is not None and given not in known:
        raise UsageError(f"got {option} {quoted(given)}; {suggestions(given, known)}")


def shortened(text: str, length: int) -> str:
    """Cut the middle out of a text longer than `length`."""
    if len(text) <= length:
        return text
    end = (length - 1) // 3
    return f"{text[: length - 1 - end]}…{text[len(text) - end :]}"


def escaped_line(message: str) -> str:
    """Put the message on one line and escape control characters."""
    written = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    return shortened("".join(written), MAX_LINE_LENGTH)


def error_line(message: str) -> str:
    """Return the message as a command prints it on standard error."""
    return f"memlab: {escaped_line(message)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Detect an out-of-memory error. The CPU and MPS raise a plain RuntimeError."""
    import torch  # takes seconds, and most users of this module don't need it

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    phrases = ("can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def message_of(error: BaseException) -> str:
    """Return the error's message, or "" if a user's exception class fails to produce one."""
    try:
        return str(error)
    except Exception:
        return ""


def error_summary(error: BaseException, most_lines: int = 1) -> str:
    """Return `ValueError: message`, with the first non-empty line of the message; more
    lines follow a short first one."""
    message = error.msg if isinstance(error, SyntaxError) else message_of(error)
    lines = list(islice(filter(None, map(str.strip, message.splitlines())), most_lines))
    if lines and len(lines[0]) > SHORT_LINE:
        del lines[1:]
    return f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__
