"""Explain why a training ran out of memory, from the file that it left.

    explain(file)       a memory snapshot, an out-of-memory log, or a memlab trace
    explain_text(text)  an out-of-memory message

The file is a snapshot of `torch.cuda.memory._dump_snapshot`, a log with an out-of-memory message in
any wording of torch, or `Trace.to_dict()` as JSON. The known causes are in `findings.CAUSES`. Most
have a rule for histories (`causes`) and one for texts (`text_causes`), with evidence in bytes.
Where a history is available, remedies are replayed through the simulated allocator (`remedies`).

Snapshots are pickles. They are read with an unpickler that allows plain data only.
"""

from memlab.explain.explanation import (
    RECORD_NEXT,
    Explanation,
    explain,
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
    "explain_source",
    "explain_text",
    "of_bytes",
    "of_text",
    "read_file",
    "read_stream",
]
