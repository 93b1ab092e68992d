"""A callback for transformers' Trainer that watches the memory of each step.

    from memlab.monitoring.transformers import MemoryCallback

    Trainer(..., callbacks=[MemoryCallback()])

The bytes join the Trainer's own logs as memory/peak_allocated, memory/reserved and memory/growth:
its log history, its progress bar, and each service in `report_to`. An out-of-memory error that
leaves `trainer.train()` is reported. transformers does not tell callbacks of errors, so the first
callback wraps `Trainer.train`.
"""

import functools
import sys
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from memlab.monitoring.reports import Interval
from memlab.monitoring.steps import monitor


class MemoryCallback(TrainerCallback):
    """Pass a monitor for other settings: `MemoryCallback(memlab.monitor(history=True))`."""

    def __init__(self, running: monitor | None = None) -> None:
        self.monitor = running or monitor()
        self._since_log = Interval(None)
        self._enters = False
        _report_errors()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _move_to_front(self, sys._getframe(1).f_locals.get("self"))
        self._leave(None)  # a training before failed, as when auto_find_batch_size tries again
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
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Stop the monitor if this callback started it."""
        if self._enters:
            self._enters = False
            traceback = None if error is None else error.__traceback__
            self.monitor.__exit__(type(error) if error else None, error, traceback)


def _report_errors() -> None:
    """Let `Trainer.train` tell its memory callbacks of the error that leaves it."""
    train = Trainer.train
    if getattr(train, "tells_memory_callbacks", False):
        return

    @functools.wraps(train)
    def train_and_report(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(trainer, *args, **kwargs)
        except BaseException as error:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, MemoryCallback):
                    callback._leave(error)
            raise

    train_and_report.tells_memory_callbacks = True  # type: ignore[attr-defined]
    trainers: Any = Trainer
    trainers.train = train_and_report


def _move_to_front(callback: MemoryCallback, handler: Any) -> None:
    """Let the callback add its values to the logs before TensorBoard's and W&B's read them.

    A Trainer calls these before the callbacks that you pass, and does not pass the list of
    callbacks. So the list is read from the caller's frame.
    """
    if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)
