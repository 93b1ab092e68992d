"""Explain why a training ran out of memory, from the file that it left.

    explain(file)          a memory snapshot, an out-of-memory log, or a memlab trace
    explain_text(text)     an out-of-memory message
    memlab.explain(error)  an exception; memlab.explain() the last one, in a notebook's next cell

The file is a snapshot of `torch.cuda.memory._dump_snapshot`, a log with an out-of-memory message in
any wording of torch, or `Trace.to_dict()` as JSON. The known causes are in `findings.CAUSES`. Most
have a rule for histories (`causes`) and one for texts (`rules`), with evidence in bytes.
Where a history is available, remedies are replayed through the simulated allocator (`remedies`).

Snapshots are pickles. They are read with an unpickler that allows plain data only.
"""

import sys
from os import PathLike
from pathlib import Path
from types import ModuleType

from memlab.explain.explanation import (
    RECORD_NEXT,
    Explanation,
    explain,
    explain_error,
    explain_source,
    explain_text,
)
from memlab.explain.findings import CAUSES, Cause, Finding
from memlab.explain.reading import Source, of_bytes, of_text, read_file, read_stream

__all__ = [
    "CAUSES",
    "RECORD_NEXT",
    "Cause",
    "Explanation",
    "Finding",
    "Source",
    "explain",
    "explain_error",
    "explain_source",
    "explain_text",
    "of_bytes",
    "of_text",
    "read_file",
    "read_stream",
]


class _Callable(ModuleType):
    """This module, which is also a function."""

    def __call__(
        self, what: BaseException | str | PathLike[str] | None = None, **options: int | None
    ) -> Explanation:
        """Explain an exception (the last one by default), a file, or the text of a log."""
        if what is None or isinstance(what, BaseException):
            return explain_error(what)
        if isinstance(what, str) and (set("\n:") & set(what[2:]) or not Path(what).exists()):
            return explain_text(what)
        return explain(Path(what), **options)


sys.modules[__name__].__class__ = _Callable
