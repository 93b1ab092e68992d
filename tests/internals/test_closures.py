"""An optimizer is refused exactly if its step requires a closure."""

import pytest
import torch
from torch import nn

from memlab.internals.closures import require_no_closure


def test_a_step_that_needs_a_closure_is_refused():
    optimizer = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="got LBFGS, whose step needs a closure that runs backward"):
        require_no_closure(optimizer)


class StepWithoutClosure(torch.optim.SGD):
    def step(self):
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, StepWithoutClosure])
def test_other_steps_are_accepted(kind):
    require_no_closure(kind(nn.Linear(2, 2).parameters(), lr=0.1))
