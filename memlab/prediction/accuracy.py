"""The error that a prediction states: the error for measured steps of the same kind."""

from collections.abc import Collection

from memlab.configs.evidence import accuracy, confirmed_kernels
from memlab.dry_runs.compiled import COMPILED, UNCOMPILED
from memlab.trace import Trace

_KINDS = {  # by parts of operators' names: all parts of one of the tuples
    "recurrent layers": (("_rnn",),),
    "convolutions": (("convolution",),),
    # A softmax alone may be a policy or a classifier, an embedding alone a recommender.
    "transformers": (("attention",), ("aten._softmax", "aten.bmm")),
}


def kind_of(trace: Trace, has_four_bits: bool) -> str:
    """Return the kind of step, by its operators."""
    if any(note.startswith((COMPILED, UNCOMPILED)) for note in trace.notes):
        return "compiled code"
    if has_four_bits:
        return "4-bit weights"
    operators = {event.operator for event in (*trace.history, *trace.events)}
    for kind, ways in _KINDS.items():
        if any(all(any(part in op for op in operators) for part in way) for way in ways):
            return kind
    return "neither attention nor convolutions"


def accuracy_note(trace: Trace, has_four_bits: bool) -> str:
    """Return how far predictions of such steps were from GPU measurements."""
    return accuracy(kind_of(trace, has_four_bits))


def unconfirmed_note(kernels: Collection[str]) -> list[str]:
    """Return a note that names the kernels that no measured step used, if there are any."""
    names = sorted(set(kernels) - confirmed_kernels())
    return [f"not yet confirmed by a GPU: {', '.join(names)}"] if names else []
