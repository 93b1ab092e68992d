"""What a rank sends to others in a dry run: the bytes of its collectives, as rings send them.

    all-reduce                   2 (n − 1) / n times the tensor
    all-gather                   n − 1 times its own part
    reduce-scatter               (n − 1) / n times the whole tensor
    all-to-all                   the tensor without its own part, the n-th without split sizes
    broadcast, scatter           the tensor, from the root alone
    gather, reduce               the tensor, to the root
    send                         the tensor; a receiver sends nothing

Source   Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH
         (2005), for rings of large tensors. NCCL may choose trees, which send as much.
"""

from typing import Any, NamedTuple

import torch.distributed as dist

from memlab.internals.torch_internals import process_group_named, tree_leaves
from memlab.metering.tensors import tensors_among

# By the operator's name without its endings: what it is called, and how often n - 1 ranks' parts
# of the input are sent, in n-ths of the input.
_KINDS = {
    "allreduce": ("all-reduce", 2),
    "all_reduce": ("all-reduce", 2),
    "allgather": ("all-gather", None),
    "all_gather_into_tensor": ("all-gather", None),
    "reduce_scatter": ("reduce-scatter", 1),
    "alltoall": ("all-to-all", 1),
    "all_to_all_single": ("all-to-all", 1),
}
_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("gather", "reduce")
_ENDINGS = ("_", "_base", "_coalesced", "_out", "_tensor", "_into")


class Transfer(NamedTuple):
    """A collective that this rank joined.

    kind   all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, scatter, gather, reduce,
           send or receive
    bytes  that this rank sent
    ranks  of the group, or of the one peer of a send or receive
    group  all ranks of the process group
    """

    kind: str
    bytes: int
    ranks: tuple[int, ...]
    group: tuple[int, ...]


def transfer_of(func: Any, args: Any) -> Transfer | None:
    """Return what a collective's operator sends; None for barriers and waits."""
    name, group = func.__name__.partition(".")[0], _group(args)
    if group is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    if name in ("send", "isend"):
        return Transfer("send", _bytes(args[0]), (ranks[args[_place(func, "dst")]],), ranks)
    if name in ("recv_", "irecv"):
        return Transfer("receive", 0, (ranks[args[_place(func, "src")]],), ranks)
    has_output = func._schema.arguments[0].name.startswith("output")
    size = _bytes(args[1] if has_output else args[0])
    kind = _shortened(name)
    if kind in _KINDS and (splits := _splits(func, args)):
        # Not (n − 1)/n of the tensor: a busy expert's rank sends back more, and torch's context
        # parallelism is an all-to-all where no part stays on its rank
        # (test_what_a_rank_sends_is_that_of_a_ring).
        own = size * splits[dist.get_rank(group)] // max(1, sum(splits))
        return Transfer("all-to-all", size - own, ranks, ranks)
    if kind in _KINDS:
        called, passes = _KINDS[kind]
        others = len(ranks) - 1
        sent = others * size if passes is None else passes * others * size // len(ranks)
        return Transfer(called, sent, ranks, ranks)
    root = next((args[_place(func, n)] for n in ("root_rank", "src") if _has(func, n)), None)
    if kind in (*_FROM_ROOT, *_TO_ROOT):
        sends = (dist.get_rank(group) == root) == (kind in _FROM_ROOT)
        return Transfer(kind, size * sends, ranks, ranks)
    return None


def _shortened(name: str) -> str:
    """Remove what distinguishes variants of one collective."""
    while name not in _KINDS and (end := next((e for e in _ENDINGS if name.endswith(e)), None)):
        name = name.removesuffix(end)
    return name.lstrip("_")


def _group(args: Any) -> Any:
    """Return the process group among an operator's arguments: an object, or a name at the end."""
    for argument in args:
        if hasattr(argument, "_type") and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    return process_group_named(args[-1]) if args and isinstance(args[-1], str) else None


def _splits(func: Any, args: Any) -> list[int]:
    """Return how many rows of an all-to-all go to each rank; nothing if all get the same."""
    has_splits = _has(func, "input_split_sizes")
    return list(args[_place(func, "input_split_sizes")]) if has_splits else []


def _place(func: Any, name: str) -> int:
    return [argument.name for argument in func._schema.arguments].index(name)


def _has(func: Any, name: str) -> bool:
    return any(argument.name == name for argument in func._schema.arguments)


def _bytes(value: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors_among(tree_leaves(value)))
