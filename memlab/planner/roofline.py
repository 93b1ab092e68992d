"""Estimate the time of any step: each operator is bound by its compute or by its memory traffic.

    an operator's seconds  =  max( operations / (UTILIZATION · peak),  bytes / bandwidth )
    a step's seconds       =  the sum over its operators  +  bytes to and from disk / bandwidth

A user's own training has no formula, but a dry run lists all its operators. A recomputed operator
is counted twice, and an optimizer's temporaries count as memory traffic. As in `costs`, nothing
overlaps. Kernel launches take no time here, so the estimate is too low for many small operators.
Use it to order ways of training. `benchmarks/roofline.py` compares it with measured times.

An operator's bytes are the tensors that it reads and writes, each counted once. An operator on some
rows of a table counts only these rows. Views move nothing.

Source   Williams et al. 2009, "Roofline" (doi 10.1145/1498765.1498785).
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memlab.checkpointing.operations import operations
from memlab.dry_runs.fake_tensors import dry_run
from memlab.internals.chunks import repeat_count
from memlab.internals.torch_internals import OpOverload
from memlab.metering.tensors import tensors_among
from memlab.planner.cards import Card
from memlab.planner.costs import DISK_BANDWIDTH, UTILIZATION
from memlab.planner.outside import KeptOnDisk

aten = torch.ops.aten

# Operators that read or change only some rows of their first argument.
_ROW_OPERATORS = frozenset(
    {
        *(aten.embedding, aten.index_select, aten.index, aten.gather),
        *(aten.index_add_, aten.index_copy_, aten.index_fill_, aten.index_put_),
        *(aten._index_put_impl_, aten.scatter_, aten.scatter_add_),
    }
)
_FILL = frozenset({aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_})
_ALLOCATE = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty})


class Roofline:
    """Estimates the seconds of a step on a card.

    seconds   by bound: "compute", "memory", "disk"
    """

    def __init__(self, card: Card) -> None:
        self.card = card
        self.seconds: dict[str, float] = defaultdict(float)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def counted(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return the step with counting added. Each call under a dry run starts a new count."""

        def run() -> Any:
            assert dry_run.active is not None
            self.seconds.clear()
            before = _offloaded_bytes(step)
            with dry_run.active.observed(self.count):
                result = step()
            if moved := _offloaded_bytes(step) - before:
                self.seconds["disk"] = moved / min(DISK_BANDWIDTH, self.card.host_bandwidth)
            return result

        return run

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one operator call. Higher-order operators are skipped; their parts are counted."""
        if not isinstance(func, OpOverload):
            return
        computing = 0.0
        if count := operations(func, args, kwargs, result):
            computing = count / (UTILIZATION * peak(self.card, func, args))
        moving = moved_bytes(func, args, kwargs, result) / self.card.memory_bandwidth
        if computing or moving:
            bound = "compute" if computing > moving else "memory"
            self.seconds[bound] += max(computing, moving) * repeat_count()


def _offloaded_bytes(step: Callable[[], Any]) -> int:
    """Return the bytes written and read so far."""
    if not isinstance(step, KeptOnDisk):
        return 0
    return step.store.traffic.written + step.store.traffic.read


def peak(card: Card, func: Any, args: Any) -> float:
    """Return operations per second for the inputs' precision. TF32 reaches half of bfloat16."""
    dtypes = {x.dtype for x in tensors_among(args) if x.is_floating_point()}
    if all(dtype.itemsize <= 2 for dtype in dtypes):
        return card.bfloat16_flops if torch.bfloat16 in dtypes else card.flops
    is_convolution = func.overloadpacket in (aten.convolution, aten.convolution_backward)
    flags = torch.backends.cudnn if is_convolution else torch.backends.cuda.matmul
    return card.flops / 2 if flags.allow_tf32 and card.has_bfloat16 else card.float32_flops


def moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that one operator call reads and writes."""
    packet = func.overloadpacket
    if func.is_view or func.namespace == "prim" or packet in _ALLOCATE:
        return 0
    places = [(i, a) for i, a in enumerate(func._schema.arguments) if a.is_write]
    out = {a.name for _, a in places if a.kwarg_only}  # not read
    given = tensors_among([*args, *(x for name, x in kwargs.items() if name not in out)])
    changed = tensors_among(args[i] if i < len(args) else kwargs.get(a.name) for i, a in places)
    known = {x.untyped_storage()._cdata for x in (*given, *changed)}
    made = [x for x in tensors_among([result]) if x.untyped_storage()._cdata not in known]
    if not made and not changed:
        return 0  # a view not declared as one, or a query without an output tensor
    if packet in _ROW_OPERATORS:
        rows = made or given[1:]
        return sum(map(_bytes, [*given[1:], *rows, *rows]))
    read = given[1:] if packet in _FILL else given
    return sum(map(_bytes, [*read, *changed, *made]))


def _bytes(x: Tensor) -> int:
    """Return the tensor's bytes. An expanded tensor has fewer than its shape suggests."""
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())
