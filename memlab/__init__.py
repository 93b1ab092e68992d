"""memlab: where every byte of a training step goes, measured.

import memlab

trace = memlab.measure(step, model=model, optimizer=optimizer)
print(trace)                      # the peak, split by what holds it
memlab.plot.timeline(trace)       # the same over time
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for whoever reads the source and doesn't run it
    from memlab import plot as plot
    from memlab.metering import BudgetExceeded as BudgetExceeded
    from memlab.metering import Kernels as Kernels
    from memlab.metering import budget as budget
    from memlab.metering import dry_run as dry_run
    from memlab.metering import measure as measure
    from memlab.metering import meter as meter
    from memlab.metering import predict as predict
    from memlab.trace import Event as Event
    from memlab.trace import Trace as Trace

# A name is imported when it is first used: torch takes seconds, `memlab --help` needs none of it,
# and measuring needs no matplotlib.
_HOME_OF = {
    "BudgetExceeded": "memlab.metering",
    "Event": "memlab.trace",
    "Kernels": "memlab.metering",
    "Trace": "memlab.trace",
    "budget": "memlab.metering",
    "dry_run": "memlab.metering",
    "measure": "memlab.metering",
    "meter": "memlab.metering",
    "predict": "memlab.metering",
}
_MODULES = ("allocator", "course", "metering", "plot", "trace")

__version__ = "0.1.0"
__all__ = [
    *("BudgetExceeded", "Event", "Kernels", "Trace"),
    *("budget", "dry_run", "measure", "meter", "plot", "predict"),
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"memlab.{name}")
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'memlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})
