"""DTensors, as FSDP2's `fully_shard` and tensor parallelism make them: each rank holds a shard."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memlab.internals.torch_internals import has_values


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


@torch.no_grad()
def shard_of(tensor: Any, like: Any = None) -> Tensor:
    """Return this rank's shard, which shares its memory with a DTensor; or a plain tensor itself.

    With `like`, the shard is of the same part as the shard of that DTensor.
    """
    if not is_dtensor(tensor):
        return tensor
    if like is not None and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)  # such as an unreduced gradient
    return tensor.to_local()


def is_true_on_any_rank(flag: bool, tensors: Iterable[Any]) -> bool:
    """Return whether the flag is True on any rank that holds a part of these tensors."""
    # In the tensors' order, which all ranks share. A set's order differs, and they would deadlock.
    for mesh, device in dict.fromkeys((t.device_mesh, t.device) for t in tensors if is_dtensor(t)):
        found = torch.tensor(flag, dtype=torch.float32, device=device)
        for group in mesh.get_all_groups():
            dist.all_reduce(found, dist.ReduceOp.MAX, group)
        flag = bool(found.item())
    return flag


def new_by_shard(weight: Any, dtype: torch.dtype, elements_each: int) -> Any:
    """Return zeros, `⌈n / elements_each⌉` for a shard of n elements, as a DTensor.

    All ranks hold as many as the largest shard needs, so that the DTensor has a global shape.
    """
    from torch.distributed.tensor import DTensor, Shard

    largest = list(weight.shape)
    for ranks, placement in zip(weight.device_mesh.shape, weight.placements, strict=True):
        if not placement.is_replicate():  # is_shard() is False for FSDP2 over tensor parallelism
            largest[placement.dim] = -(-largest[placement.dim] // ranks)
    count = -(-torch.Size(largest).numel() // elements_each)
    placements = [p if p.is_replicate() else Shard(0) for p in weight.placements]
    zeros = torch.zeros(count, dtype=dtype, device=weight.to_local().device)
    return DTensor.from_local(zeros, weight.device_mesh, placements, run_check=False)


def generator_of_replicas(weight: Any, generator: torch.Generator | None) -> Any:
    """Return a generator that draws the same numbers on all ranks that hold the same shard.

    Each rank has drawn as many numbers as its shards need, so their own generators differ.
    """
    replicas = [
        weight.device_mesh.get_group(dim)
        for dim, placement in enumerate(weight.placements)
        if placement.is_replicate() and weight.device_mesh.size(dim) > 1
    ]
    if not replicas or not has_values(weight.to_local()):
        return generator
    seed = torch.randint(2**62, (1,), generator=generator, device=weight.device)
    for group in replicas:
        dist.broadcast(seed, dist.get_global_rank(group, 0), group)
    return torch.Generator(weight.device).manual_seed(int(seed.item()))


def require_no_dtensors(name: str, tensors: Iterable[Any]) -> None:
    """Raise TypeError if one of the tensors is a DTensor, whose values a store cannot read."""
    for tensor in filter(is_dtensor, tensors):
        raise TypeError(
            f"got a DTensor of shape {tuple(tensor.shape)}, of which each rank holds a part; "
            f"{name} takes plain tensors: use fully_shard(..., offload_policy=CPUOffloadPolicy())"
        )
