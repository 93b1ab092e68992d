"""Pipeline parallelism: stage i of p runs the i-th part of the layers, one micro-batch at a time.

Saves    (p − 1)/p of the weights, gradients and optimizer state. With 1F1B, stage i saves the
         activations of min(m, p − i) micro-batches instead of all m.
Costs    stages are idle at the start and the end of a step, for (p − 1)/m of the compute time.
         Stage 0 saves p micro-batches of 1/p of the layers: as much as one GPU with all layers.
Source   Huang et al. 2019 (GPipe), arXiv 1811.06965; Harlap et al. 2018 (PipeDream), arXiv
         1806.03377; Narayanan et al. 2021 (1F1B with a flush), arXiv 2006.09503.

For p = 3 and m = 4 (F2 is the forward pass of micro-batch 2, B2 its backward pass):

    stage 0     F0 F1 F2 B0 F3 B1 B2 B3
    stage 1     F0 F1 B0 F2 B1 F3 B2 B3
    stage 2     F0 B0 F1 B1 F2 B2 F3 B3

Each stage is a process of the default process group. It receives its input from the stage before
and sends its output to the stage after. In backward, gradients go the other way. A sent output is
freed: backward needs only its node in the autograd graph. `torch.distributed.pipelining` is the
version to train with.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

Pass = tuple[str, int]  # ("forward" or "backward", the number of the micro-batch)


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Return GPipe's order for one stage: all forward passes, then all backward passes."""
    return [(kind, n) for kind in ("forward", "backward") for n in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Return 1F1B's order: after the warm-up, a backward pass follows each forward pass."""
    warm_up = min(stages - 1 - stage, micro_batches)
    order: list[Pass] = [("forward", n) for n in range(warm_up)]
    for n in range(warm_up, micro_batches):
        order += [("forward", n), ("backward", n - warm_up)]
    return order + [("backward", n) for n in range(micro_batches - warm_up, micro_batches)]


def most_in_flight(order: list[Pass]) -> int:
    """Return the most micro-batches that wait for their backward pass at once."""
    signs = [1 if kind == "forward" else -1 for kind, _ in order]
    return max(sum(signs[:n]) for n in range(len(order) + 1))


class Mailbox:
    """Exchange tensors with other stages. A send waits only for the send before it."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.sending: dict[int, dist.Work | None] = {}  # a work holds its tensor

    def send(self, x: Tensor, stage: int) -> None:
        self.wait(stage)
        self.sending[stage] = dist.isend(x.detach().contiguous(), stage)

    def wait(self, stage: int) -> None:
        """Wait until the stage has received what was sent, and free it."""
        if (work := self.sending.pop(stage, None)) is not None:
            work.wait()

    def receive(self, stage: int) -> Tensor:
        x = self.like.new_empty(self.like.shape)
        dist.recv(x, stage)
        return x


def run_stage(
    part: nn.Module,
    order: list[Pass],
    inputs: Sequence[Tensor],
    loss_of: Callable[[Tensor, int], Tensor],
    like: Tensor,
) -> list[Tensor]:
    """Run all passes of this rank's part of the model, and accumulate its gradients.

    inputs    the micro-batches; only stage 0 reads them
    loss_of   computes the loss from the last stage's output and the number of the micro-batch
    like      a tensor with the shape, dtype and device of the tensors between stages

    Returns the losses on the last stage, and [] on the others.
    """
    stage, last = dist.get_rank(), dist.get_world_size() - 1
    mail, in_flight, losses = Mailbox(like), {}, []
    for kind, n in order:
        if kind == "forward":
            x = inputs[n] if stage == 0 else mail.receive(stage - 1).requires_grad_()
            y = part(x) if stage < last else loss_of(part(x), n)
            in_flight[n] = x, get_gradient_edge(y)
            if stage < last:
                mail.send(y, stage + 1)
            else:
                losses.append(y.detach())
            del x, y
        else:
            x, node = in_flight.pop(n)
            dy = mail.receive(stage + 1) if stage < last else losses[-1].new_ones(())
            torch.autograd.backward([node], [dy])
            if stage > 0 and x.grad is not None:
                mail.send(x.grad, stage - 1)
            del x, node, dy
    for other in list(mail.sending):
        mail.wait(other)
    return losses
