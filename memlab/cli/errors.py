"""What ends a command with one line on standard error, in place of a traceback."""


class UsageError(Exception):
    """What the user gave cannot be used; the message says what was got, wanted, and what to do."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory is out; the CPU and MPS have no exception of their own for it."""
    import torch  # takes seconds, and not all who raise a UsageError need it

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    told = ("can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in told)


def in_one_line(error: BaseException) -> str:
    """`ValueError: what it says`, without the further lines that torch's messages have."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
