"""memlab: where every byte of a training step goes, measured.

import memlab

trace = memlab.measure(step, model=model, optimizer=optimizer)
print(trace)                      # the peak, split by what holds it
memlab.plot.timeline(trace)       # the same over time
"""

from memlab.metering import BudgetExceeded, budget, dry_run, measure, meter
from memlab.trace import Event, Trace

__version__ = "0.1.0"
__all__ = ["BudgetExceeded", "Event", "Trace", "budget", "dry_run", "measure", "meter", "plot"]


def __getattr__(name: str):
    """Import `memlab.plot` when it is first used: measuring needs no matplotlib."""
    if name == "plot":
        from importlib import import_module

        return import_module("memlab.plot")
    raise AttributeError(f"module 'memlab' has no attribute {name!r}")
