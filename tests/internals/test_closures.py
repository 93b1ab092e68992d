"""An optimizer is refused exactly if its step cannot do without a closure."""

import pytest
import torch
from torch import nn

from memlab.internals.closures import require_no_closure


def test_a_step_that_needs_a_closure_is_refused_by_its_name():
    optimizer = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="got LBFGS, whose step needs a closure that runs backward"):
        require_no_closure(optimizer)


class Without(torch.optim.SGD):
    def step(self):
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Without])
def test_a_step_that_can_do_without_is_not(kind):
    require_no_closure(kind(nn.Linear(2, 2).parameters(), lr=0.1))
