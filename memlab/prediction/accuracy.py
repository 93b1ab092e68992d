"""What a prediction says about its own error: that of measured steps of its kind."""

from collections.abc import Collection

from memlab.configs.evidence import accuracy, confirmed_kernels
from memlab.trace import Trace

NO_EVIDENCE = "no step of this kind ({}) has been measured on a GPU yet"
_KINDS = {
    "bitsandbytes": "4-bit weights",
    "_rnn": "recurrent layers",
    "convolution": "convolutions",
}


def kind_of(trace: Trace) -> str:
    """Return the kind of step, by its operators."""
    operators = {event.operator for event in (*trace.history, *trace.events)}
    for part, kind in _KINDS.items():
        if any(part in operator for operator in operators):
            return kind
    return "transformers"


def accuracy_note(trace: Trace) -> str:
    """Return how far predictions of such steps were from GPU measurements."""
    kind = kind_of(trace)
    return NO_EVIDENCE.format(kind) if kind == "recurrent layers" else accuracy(kind)


def unconfirmed_note(kernels: Collection[str]) -> list[str]:
    """Return a note that names the kernels that no measured step used, if there are any."""
    names = sorted(set(kernels) - confirmed_kernels())
    return [f"not yet confirmed by a GPU: {', '.join(names)}"] if names else []
