"""A callback for transformers' Trainer that watches the memory of each step.

    from memlab.monitoring.transformers import MemoryCallback

    Trainer(..., callbacks=[MemoryCallback()])

The bytes join the Trainer's own logs as memory/peak_allocated, memory/reserved and memory/growth:
its log history, its progress bar, and each service in `report_to`. For the report of an
out-of-memory error, train inside the monitor:

    with callback.monitor:
        trainer.train()
"""

import sys
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from memlab.monitoring.reports import Interval
from memlab.monitoring.steps import monitor


class MemoryCallback(TrainerCallback):
    """Pass a monitor for other settings: `MemoryCallback(memlab.monitor(history=True))`."""

    def __init__(self, running: monitor | None = None) -> None:
        self.monitor = running or monitor()
        self._since_log = Interval(None)
        self._enters = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _move_to_front(self, sys._getframe(1).f_locals.get("self"))
        self._enters = not self.monitor.is_running
        if self._enters:
            self.monitor.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since_log.add(self.monitor.step(state.global_step))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs is None or "loss" not in logs:  # an evaluation, or the summary at the end
            return
        report = self._since_log.take()
        if report is not None:
            logs.update(report.values())
            if state.log_history:  # the Trainer has copied its logs there
                state.log_history[-1].update(report.values())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._enters:
            self.monitor.__exit__(None, None, None)


def _move_to_front(callback: MemoryCallback, handler: Any) -> None:
    """Let the callback add its values to the logs before TensorBoard's and W&B's read them.

    A Trainer calls these before the callbacks that you pass, and does not pass the list of
    callbacks. So the list is read from the caller's frame.
    """
    if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)
