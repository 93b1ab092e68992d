"""What ends a command with one line on standard error, in place of a traceback."""

from collections.abc import Collection
from difflib import get_close_matches

LONGEST_VALUE, LONGEST_LINE = 80, 1000  # characters; of what is longer, the middle is left out
QUOTED = frozenset(" '\"")


class UsageError(Exception):
    """What the user gave cannot be used; the message says what was got, wanted, and what to do."""


def shown(given: str) -> str:
    """What the user gave, as a part of a sentence: in quotes unless it is a plain word."""
    is_plain = given and given.isprintable() and not QUOTED & set(given)
    return shortened(given if is_plain else repr(given), LONGEST_VALUE)


def choice(given: str, known: Collection[str]) -> str:
    """What there is, after what is nearest to what was given, if anything is near."""
    near = get_close_matches(given, known, n=1)
    return f"{f'did you mean {near[0]}? There are' if near else 'choose from'} {', '.join(known)}"


def shortened(text: str, longest: int) -> str:
    """At most so many characters of a text, of its beginning and of its end."""
    if len(text) <= longest:
        return text
    end = (longest - 1) // 3
    return f"{text[: longest - 1 - end]}…{text[len(text) - end :]}"


def one_line(message: str) -> str:
    """The message on one line that no terminal obeys: what cannot be printed is written out."""
    written = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    return shortened("".join(written), LONGEST_LINE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory is out; the CPU and MPS have no exception of their own for it."""
    import torch  # takes seconds, and not all who raise a UsageError need it

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    told = ("can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in told)


def said_by(error: BaseException) -> str:
    """Its message; nothing where a class of a script's own fails to give one."""
    try:
        return str(error)
    except Exception:
        return ""


def in_one_line(error: BaseException) -> str:
    """`ValueError: what it says`, without the further lines that torch's messages have."""
    lines = said_by(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
