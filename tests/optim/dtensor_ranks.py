"""Code that the tests of optimizers and loss scaling of DTensors run in real ranks."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from memlab.optim import (
    Adam8bit,
    AdamMini,
    AdamW,
    Apollo,
    GaLore,
    Lion,
    Lion8bit,
    MomentumSGD,
    Muon,
    RoundedAdamW,
)
from memlab.precision import LossScaler, MasterWeights
from memlab.zero.processes import joined

TIME_OUT = 300  # generous: the machine may be busy
STEPS = 3
ELEMENTWISE = (AdamW, Lion, Adam8bit, Lion8bit, MomentumSGD, RoundedAdamW)
REFUSING = (AdamMini, Apollo, GaLore, Muon)


def model_of(cls: type) -> nn.Module:
    """Rows that two ranks cannot share evenly: 131, and 1, of which the second rank has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 131), nn.Tanh(), nn.Linear(131, 1))
    return model.to(torch.bfloat16 if cls is RoundedAdamW else torch.float32)


def backward(model: nn.Module, step: int) -> None:
    """All ranks have the same batch, so the mean over ranks is the gradient itself."""
    x = torch.randn(4, 70, generator=torch.Generator().manual_seed(step))
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def mine(whole: Tensor) -> Tensor:
    """Return this rank's rows, as FSDP2 divides them."""
    parts = whole.detach().chunk(dist.get_world_size())
    rank = dist.get_rank()
    return (parts[rank] if rank < len(parts) else whole[:0]).clone()


def sharded(cls: type) -> nn.Module:
    return fully_shard(model_of(cls), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def locals_of(model: nn.Module) -> list[Tensor]:
    return [weight.to_local().detach().clone() for weight in model.parameters()]


def steps_of(cls: type, folder: str) -> dict[str, Any]:
    """Step a sharded model, its shards as plain weights, and the whole model."""
    model = sharded(cls)
    optimizer = cls(model.parameters(), generator=generator())
    whole = model_of(cls)
    of_whole = cls(whole.parameters(), generator=generator())
    shards = [nn.Parameter(mine(weight)) for weight in whole.parameters()]
    of_shards = cls(shards, generator=generator())
    for number in range(STEPS):
        step(model, optimizer, number)
        backward(sharded_copy := copy_of(whole, shards), number)
        for shard, weight in zip(shards, sharded_copy.parameters(), strict=True):
            shard.grad = mine(weight.grad)
        of_shards.step()
        step(whole, of_whole, number)
    found = locals_of(model)
    state = next(iter(optimizer.state.values()))
    return {
        "as shards": all(map(torch.equal, found, shards)),
        "as the whole": all(map(torch.equal, found, map(mine, whole.parameters()))),
        "bytes": {name: local_bytes(value) for name, value in state.items() if name != "step"},
    } | restored(cls, model, optimizer, f"{folder}/{cls.__name__}")


def copy_of(model: nn.Module, shards: list[nn.Parameter]) -> nn.Module:
    """Return the whole model with the weights of all ranks' shards."""
    whole = copy.deepcopy(model)
    for weight, shard in zip(whole.parameters(), shards, strict=True):
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, shard.detach())
        weight.data = torch.cat(every)
        weight.grad = None
    return whole


def local_bytes(value: Any) -> int:
    return getattr(value, "_local_tensor", value).nbytes


def restored(cls: type, model: nn.Module, optimizer: Any, folder: str) -> dict[str, bool]:
    """Continue from a checkpoint of torch.distributed: does the next step have the same bits?"""
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    again = sharded(cls)
    of_again = cls(again.parameters(), generator=generator())
    with torch.no_grad():
        for weight, value in zip(again.parameters(), model.parameters(), strict=True):
            weight.copy_(value)
    loaded = {"optimizer": get_optimizer_state_dict(again, of_again)}
    dcp.load(loaded, checkpoint_id=folder)
    set_optimizer_state_dict(again, of_again, loaded["optimizer"])
    for each in (optimizer, of_again):
        each.generator.manual_seed(9)
    step(model, optimizer, STEPS)
    step(again, of_again, STEPS)
    return {"restored": all(map(torch.equal, locals_of(model), locals_of(again)))}


def refusal_of(cls: type) -> str:
    try:
        cls(sharded(cls).parameters())
    except TypeError as error:
        return str(error)
    return ""


def overflowed() -> dict[str, Any]:
    """Step with a gradient that is infinite on the second rank alone."""
    found = {}
    for name, wrap in WRAPPERS.items():
        model, scaler = sharded(AdamW), LossScaler(8.0)
        optimizer, before = wrap(model), locals_of(model)
        backward(model, 0)
        if dist.get_rank() == 1:
            next(model.parameters()).grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        found[name] = all(map(torch.equal, before, locals_of(model))), scaler.get_scale()
    return found


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: AdamW(model.parameters()),
    "master weights": lambda model: MasterWeights(model.parameters(), AdamW),
}


def all_results(folder: str) -> dict[str, Any]:
    with joined("gloo"):
        return {
            "steps": {cls.__name__: steps_of(cls, folder) for cls in ELEMENTWISE},
            "refusals": {cls.__name__: refusal_of(cls) for cls in REFUSING},
            "overflowed": overflowed(),
        }
