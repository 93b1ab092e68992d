"""Watch a training's memory while it runs: `memlab.monitor()` and callbacks for trainers."""

from memlab.monitoring.reports import StepMemory
from memlab.monitoring.steps import monitor
from memlab.monitoring.texts import FragmentationWarning, LeakWarning, MemoryWarning

__all__ = ["FragmentationWarning", "LeakWarning", "MemoryWarning", "StepMemory", "monitor"]
