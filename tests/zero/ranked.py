"""Shared by the ZeRO tests: a small model of odd sizes, its data, and one process to compare."""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.accumulation import accumulate
from memlab.model import GPT, GPTConfig

MASKED = -100
TIED = GPTConfig(
    vocab_size=37, hidden_size=12, layers=3, heads=3, kv_heads=1, intermediate_size=10, seq_len=16
)
VOCABULARY, TOKENS = TIED.vocab_size, 8


def model_of(config: GPTConfig = TIED, **settings) -> GPT:
    torch.manual_seed(0)
    return GPT(config, **settings)


def micro_batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches of two sequences, with different numbers of masked tokens."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        tokens, targets = torch.randint(VOCABULARY, (2, 2, TOKENS), generator=generator)
        targets[0, : number % 5] = MASKED
        found.append((tokens, targets))
    return found


def sum_of_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens, targets = batch
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum"), (targets != MASKED).sum()


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def two_groups(model: nn.Module) -> list[dict]:
    """Return two groups, matrices with decay and vectors without; the model interleaves them."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


class OneProcess:
    """Train a copy of the model in one process, on the micro-batches of all ranks."""

    def __init__(self, model: nn.Module, optimizer: Callable, groups=two_groups) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = optimizer(groups(self.model))

    def gradients(self, batches: Sequence, ranks: int, stage: int, summed=sum_of_losses) -> None:
        """Set `.grad` to the gradient of the mean loss, accumulated in the order of the stage."""
        if stage >= 2:  # in the order of the micro-batches
            accumulate(batches, lambda b: summed(self.model, b), self.model.parameters())
            return
        total: dict[nn.Parameter, Tensor] = {}
        tokens = 0
        for rank in range(ranks):
            for batch in batches[rank::ranks]:
                loss, count = summed(self.model, batch)
                loss.backward()
                tokens += count
            for parameter in self.model.parameters():
                gradient, parameter.grad = parameter.grad, None
                total[parameter] = total[parameter] + gradient if rank else gradient
        for parameter, gradient in total.items():
            parameter.grad = gradient.div_(tokens)

    def step(self, batches: Sequence, ranks: int, stage: int) -> None:
        self.gradients(batches, ranks, stage)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.model.named_parameters()}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names of weights that differ in any bit."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]
