"""A callback for Lightning's Trainer that watches the memory of each step.

    from memlab.monitoring.lightning import MemoryCallback

    Trainer(..., callbacks=[MemoryCallback()])

Each logger of the Trainer gets memory/peak_allocated, memory/reserved and memory/growth, in bytes,
every `log_every_n_steps`.
"""

import importlib
from typing import Any

from memlab.monitoring.reports import Interval
from memlab.monitoring.steps import monitor


def _callback_class() -> Any:
    """Return the Callback of `lightning`, or of the older package `pytorch_lightning`."""
    try:
        return importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        return importlib.import_module("pytorch_lightning").Callback


_Callback: Any = _callback_class()


class MemoryCallback(_Callback):
    """Pass a monitor for other settings: `MemoryCallback(memlab.monitor(history=True))`.

    A step ends with the optimizer's step, as in `trainer.global_step`. With gradient accumulation,
    several batches are one step.
    """

    def __init__(self, running: monitor | None = None) -> None:
        super().__init__()
        self.monitor = running or monitor()
        self._since_log = Interval(None)
        self._last_step = 0
        self._enters = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last_step = trainer.global_step
        self._enters = not self.monitor.is_running
        if self._enters:
            self.monitor.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._last_step:  # gradients accumulate
            return
        self._last_step = step
        self._since_log.add(self.monitor.step(step))
        if step % trainer.log_every_n_steps == 0:
            report = self._since_log.take()
            assert report is not None  # it has this step
            for logger in trainer.loggers:
                logger.log_metrics(report.values(), step=report.step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._enters:
            self.monitor.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._enters:  # else the `with` around the training reports it
            self.monitor.__exit__(type(exception), exception, exception.__traceback__)
