"""Find the training steps of a script from outside: no line of the script is changed.

A step ends with an optimizer's step. With several optimizers (a GAN), it ends when all of them have
stepped. A script without an optimizer of torch.optim updates its weights by hand: there a step ends
with `backward`, and the script is watched for two of them at least.

The measured step lasts from the end of one step to the end of the next, so it has everything in the
loop: loading, forward, backward, the update, and what an earlier step left alive.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from memlab.internals.replacing import replaced
from memlab.internals.threads import only_where_asked
from memlab.scripts.changes import running_framework
from memlab.scripts.evaluations import Evaluations

_MOST_UNUSED = 20  # steps of one optimizer until another one counts as unused


class Finished(BaseException):
    """Ends the script after its last wanted step. Not an Exception: scripts catch those."""


def _call_if_alive(method: Any, *arguments: Any) -> None:
    if (function := method()) is not None:
        function(*arguments)


class StepWatcher:
    """Count a script's steps. With `steps=0` the script ends when it has made its first optimizer.

    on_begin    called at the end of the step before the measured one; its argument says whether
                an optimizer's hook calls it
    on_end      called at the end of the measured step; then Finished is raised
    on_step     called with the number of each finished step
    """

    def __init__(
        self,
        steps: int,
        on_begin: Callable[[bool], None],
        on_end: Callable[[], None],
        on_step: Callable[[int], object] = lambda number: None,
    ) -> None:
        if steps < 0:
            raise ValueError(f"got {steps} steps; give at least 0")
        self.steps, self._on_step = steps, on_step
        self._on_begin, self._on_end = on_begin, on_end
        self._made: WeakSet[Optimizer] = WeakSet()
        self._taken: dict[Optimizer, int] = {}  # by the order of their first steps
        self._last: Optimizer | None = None  # whose step ended the one before the measured
        self._replaced: WeakSet[Optimizer] = WeakSet()  # by others, so that they never step
        self.framework = "plain"
        self.evaluations = Evaluations()
        self.has_ended = False
        self.finished = 0  # steps
        self.backwards = 0

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped; with `steps=0`, the first that was made."""
        return list(self._taken)

    def replaceable(self) -> list[Optimizer]:
        """Return the optimizers that exist. From now on, they need not step."""
        self._replaced.update(self._made)
        return list(self._made)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all optimizers and backward passes inside `with`."""
        if self.steps == 1:
            self._begin(False)
        handle = register_optimizer_step_pre_hook(only_where_asked(self._before_step))
        try:
            with (
                self.evaluations.watching(),
                replaced(
                    {
                        (Optimizer, "__init__"): self._noting_optimizers,
                        (torch.autograd, "backward"): self._counting_backwards,
                    }
                ),
            ):
                yield
        finally:
            handle.remove()

    def _noting_optimizers(self, initialize: Callable[..., None]) -> Callable[..., None]:
        def initialized(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            initialize(optimizer, *args, **kwargs)
            self._made.add(optimizer)
            if self.steps == 0:
                self._taken[optimizer] = 0
                self._end()

        return initialized

    def _counting_backwards(self, run: Callable[..., None]) -> Callable[..., None]:
        def backward(*args: Any, **kwargs: Any) -> None:
            run(*args, **kwargs)
            self.backwards += 1
            self.evaluations.backward_ran()
            if not self._made and not self._taken:
                # No optimizer steps, as in PyTorch's word_language_model, which updates weights by
                # hand.
                # The first may be a warm-up before the model is made, as in modded-nanogpt.
                self._end_step(self.backwards, may_be_last=self.backwards > 1)

        return backward

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Follow an optimizer from its first step on.

        Its own hook runs before the global ones, so that a meter may end or start there.
        """
        if optimizer not in self._taken:
            self._taken[optimizer] = 0
            self._replaced.discard(optimizer)
            self.framework = running_framework()
            # What an optimizer's hooks reach counts as its own.
            hook = partial(_call_if_alive, WeakMethod(self._after_step))
            # Not a global hook: adding a meter's global hooks while global ones run would fail
            # (`OrderedDict mutated during iteration`).
            optimizer.register_step_post_hook(hook)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._taken[optimizer] += 1
        if self._last is None:
            waiting = set(self._made) - set(self._replaced) - set(self._taken)
            # All optimizers of a GAN step first; else the second one would create its state in the
            # measured step.
            unused = bool(waiting) and max(self._taken.values()) < _MOST_UNUSED
            if not unused:
                self._last = optimizer
                self._end_step(1)
        elif optimizer is self._last:
            self._end_step(self.finished + 1)

    def _end_step(self, number: int, may_be_last: bool = True) -> None:
        self.finished = number
        self._on_step(number)
        if self.has_ended or (may_be_last and number >= self.steps):
            self._end()
        elif number == self.steps - 1:
            self._begin(bool(self._taken))

    def _begin(self, in_step: bool) -> None:
        self._on_begin(in_step)

    def _end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            if self.steps:
                self._on_end()
        raise Finished
