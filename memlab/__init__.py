"""memlab: where every byte of a training step goes, measured.

import memlab

trace = memlab.measure(step, model=model, optimizer=optimizer)
print(trace)                      # the peak, split by what holds it
memlab.plot.timeline(trace)       # the same over time
"""

from typing import TYPE_CHECKING

from memlab.internals.lazy import lazily

if TYPE_CHECKING:  # for type checkers and editors
    from memlab import explain as explain
    from memlab import plot as plot
    from memlab.configs.targets import Kernels as Kernels
    from memlab.dry_runs import dry_run as dry_run
    from memlab.metering import BudgetExceeded as BudgetExceeded
    from memlab.metering import budget as budget
    from memlab.metering import measure as measure
    from memlab.metering import meter as meter
    from memlab.monitoring import monitor as monitor
    from memlab.prediction import predict as predict
    from memlab.trace import Event as Event
    from memlab.trace import Trace as Trace

_HOME_OF = {
    "BudgetExceeded": "memlab.metering",
    "Event": "memlab.trace",
    "Kernels": "memlab.configs.targets",
    "Trace": "memlab.trace",
    "budget": "memlab.metering",
    "dry_run": "memlab.dry_runs",
    "measure": "memlab.metering",
    "meter": "memlab.metering",
    "monitor": "memlab.monitoring",
    "predict": "memlab.prediction",
    **dict.fromkeys(
        (
            *("allocator", "course", "dry_runs", "explain", "metering", "monitoring"),
            *("plot", "prediction", "trace"),
        ),
        "",
    ),
}

__version__ = "0.1.0"
__all__ = [
    *("BudgetExceeded", "Event", "Kernels", "Trace"),
    *("budget", "dry_run", "explain", "measure", "meter", "monitor", "plot", "predict"),
]


__getattr__ = lazily(__name__, _HOME_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
