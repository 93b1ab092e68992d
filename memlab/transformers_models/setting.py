"""A training of a transformers model on a device, as `memlab measure` and `memlab train` take it.

A Recipe stands in place of a technique.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from memlab import train
from memlab.configs.targets import TARGETS
from memlab.dry_runs import dry_run
from memlab.metering import measure
from memlab.trace import Trace
from memlab.transformers_models.measuring import predicted
from memlab.transformers_models.recipes import Recipe
from memlab.transformers_models.training import Training


@dataclass(frozen=True)
class TransformersSetting:
    """The training and its device."""

    training: Training
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.training}, {self.device}"

    @property
    def parameters(self) -> int:
        """The number of the model's weights."""
        return self.training.parameters

    def build(
        self, recipe: Recipe, *, on_loss: Callable[[Tensor], object] = lambda loss: None
    ) -> train.Training:
        """Build the training. `on_loss` is called with the loss of each step."""
        step, model, optimizer = self.training.build(recipe, self.device, on_loss=on_loss)
        return train.Training(step, model, optimizer, optimizer.step, ())

    def dry_trace(self, recipe: Recipe) -> Trace:
        """Return the trace of the second step, with nothing computed; of a GPU, predicted."""
        if self.device in TARGETS:
            card = TARGETS[self.device].gpu
            trace = predicted(self.training, recipe, self.device, card).measured.trace
            assert trace is not None
            return trace
        with dry_run():
            step, model, optimizer = self.training.build(recipe, "cpu")
            step()
            return measure(step, model=model, optimizer=optimizer)
