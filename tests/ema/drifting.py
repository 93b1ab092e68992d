"""Models whose weights reveal the composition of an average, and runs of them."""

import torch
from torch import Tensor, nn

from memlab.ema import PostHocEMA


class OneHot(nn.Module):
    """At step k, weight k is 1 and all others 0, so an average shows each step's contribution."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(steps, dtype=torch.float64))

    @torch.no_grad()
    def go_to(self, step: int) -> None:
        self.weight.zero_()[step - 1] = 1


def responses(steps: int, sigmas, every: int, folder) -> list[Tensor]:
    """Return each step's contribution to each average."""
    model = OneHot(steps)
    ema = PostHocEMA(model, folder, sigmas, every=every)
    for step in range(1, steps + 1):
        model.go_to(step)
        ema.update(step)
    return [average["weight"] for average in ema.averages.values()]


class Small(nn.Module):
    """Weights (one of them tied), a frozen weight, and buffers of floats, integers and bools."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.hidden = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("table", torch.ones(4), persistent=False)


@torch.no_grad()
def drift(model: nn.Module, step: int) -> None:
    """Change the model as training would."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter), alpha=0.1)
    for name, buffer in model.named_buffers():
        if "num_batches" in name:
            buffer.add_(1)
        elif buffer.is_floating_point():
            buffer.fill_(step / 3)


def trained(model: nn.Module, folder, steps: int, first: int = 1, **settings) -> PostHocEMA:
    """Run `steps` updates, with a snapshot at every tenth."""
    ema = PostHocEMA(model, folder, **{"snapshot_every": 10, **settings})
    go_on(model, ema, first, steps)
    return ema


def go_on(model: nn.Module, ema: PostHocEMA, first: int, last: int) -> None:
    for step in range(first, last + 1):
        drift(model, step)
        ema.update(step)
