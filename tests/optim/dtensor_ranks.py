"""Code that the tests of optimizers and loss scaling of DTensors run in real ranks."""

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
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from memlab.checkpointing import checkpoint
from memlab.internals.shards import shard_of
from memlab.offload import (
    DiskStore,
    HostStore,
    OffloadedOptimizer,
    offloaded_activations,
    stream_layers,
)
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


class Model(nn.Module):
    """Rows that two ranks cannot share evenly: 131, and 1, of which the second rank has none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(70), nn.Linear(70, width)
        self.down, self.out = nn.Linear(width, 70, bias=False), nn.Linear(70, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(torch.tanh(self.up(self.norm(x)))))


def model_of(cls: type, width: int = 131) -> Model:
    torch.manual_seed(0)
    return Model(width).to(torch.bfloat16 if cls is RoundedAdamW else torch.float32)


def sharded(cls: type, **options: Any) -> Model:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model_of(cls), mesh=mesh, **options)


def in_host_memory(cls: type) -> Model:
    return sharded(cls, offload_policy=CPUOffloadPolicy(pin_memory=False))


def over_a_mesh(cls: type) -> Model:
    """Return a model of four ranks: two of tensor parallelism, times two of FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = model_of(cls, width=240)  # shards of 4,200 elements, whose moments are quantized
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])


def backward(model: nn.Module, step: int) -> None:
    """All ranks have the same batch, so the mean over ranks is the gradient itself."""
    x = torch.randn(4, 70, generator=torch.Generator().manual_seed(step))
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def locals_of(model: nn.Module) -> list[Tensor]:
    return [weight.to_local().detach().clone() for weight in model.parameters()]


def full(tensor: Any) -> Tensor:
    return tensor.detach().full_tensor()


def steps_of(cls: type, folder: str, make: Callable[[type], Model] = sharded) -> dict[str, Any]:
    """Step a sharded model, its shards as plain weights, and the whole model."""
    model = make(cls)
    optimizer = cls(model.parameters(), generator=generator())
    whole = [nn.Parameter(full(weight).clone()) for weight in model.parameters()]
    shards = [nn.Parameter(shard.contiguous()) for shard in locals_of(model)]
    plain = [cls(weights, generator=generator()) for weights in (whole, shards)]
    for number in range(STEPS):
        backward(model, number)
        for weight, one, shard in zip(model.parameters(), whole, shards, strict=True):
            one.grad, shard.grad = full(weight.grad), shard_of(weight.grad, weight).clone()
        for each in (optimizer, *plain):
            each.step()
            each.zero_grad()
    state = optimizer.state[model.up.weight]
    return {
        "as shards": all(map(torch.equal, locals_of(model), shards)),
        "as the whole": all(map(torch.equal, map(full, model.parameters()), whole)),
        "bytes": {name: local_bytes(value) for name, value in state.items() if name != "step"},
    } | restored(cls, model, optimizer, f"{folder}/{make.__name__}/{cls.__name__}", make)


def local_bytes(value: Any) -> int:
    return getattr(value, "_local_tensor", value).nbytes


def restored(
    cls: type, model: nn.Module, optimizer: Any, folder: str, make: Callable[[type], Model]
) -> dict[str, bool]:
    """Continue from a checkpoint of torch.distributed: does the next step have the same bits?"""
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    again = make(cls)
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


def overflowed(make: Callable[[type], Model] = sharded) -> dict[str, Any]:
    """Step with a gradient that is infinite on the last rank alone."""
    found = {}
    for name, wrap in WRAPPERS.items():
        model, scaler = make(AdamW), LossScaler(8.0)
        optimizer, before = wrap(model), locals_of(model)
        backward(model, 0)
        if dist.get_rank() == dist.get_world_size() - 1:
            model.up.weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        found[name] = all(map(torch.equal, before, locals_of(model))), scaler.get_scale()
    return found


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: AdamW(model.parameters()),
    "master weights": lambda model: MasterWeights(model.parameters(), AdamW),
}


def replicas() -> dict[str, bool]:
    """Step a weight that all ranks hold, with random numbers that differ: is it still equal?"""
    found = {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    makers = {
        "RoundedAdamW": RoundedAdamW,
        "MomentumSGD": MomentumSGD,
        "rounding": lambda weights, **options: Lion(weights, rounding="stochastic", **options),
    }
    for name, make in makers.items():
        value = torch.linspace(-1, 1, 500).to(torch.bfloat16)
        weight = nn.Parameter(distribute_tensor(value, mesh, [Replicate()]))
        own = torch.Generator().manual_seed(dist.get_rank())
        optimizer = make([weight], lr=1e-3, generator=own)
        for _ in range(STEPS):
            weight.grad = distribute_tensor(value.square(), mesh, [Replicate()])
            optimizer.step()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, weight.detach().to_local())
        found[name] = all(torch.equal(every[0], other) for other in every)
    return found


def refusals_of_offloading() -> list[str]:
    model = sharded(AdamW)
    attempts: list[Callable[[], Any]] = [
        lambda: stream_layers(model, HostStore(), [model.up]),
        lambda: OffloadedOptimizer(torch.optim.AdamW(model.parameters()), DiskStore()),
        lambda: DiskStore().put("weight", model.up.weight),
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
        except TypeError as error:
            found.append(str(error))
    return found


def checkpointed(make: Callable[[type], Model]) -> bool:
    """Return whether checkpointing and offloading the activations changes no gradient."""
    found = []
    for around in (lambda model, x: model(x), checkpoint, offloaded):
        model = make(AdamW)
        around(model, torch.linspace(-1, 1, 280).view(4, 70)).square().mean().backward()
        found.append([weight.grad.to_local() for weight in model.parameters()])
    return all(all(map(torch.equal, found[0], other)) for other in found[1:])


def offloaded(model: nn.Module, x: Tensor) -> Tensor:
    with offloaded_activations(HostStore(), minimum=1):
        return model(x)


def all_results(folder: str) -> dict[str, Any]:
    with joined("gloo"):
        return {
            "steps": {cls.__name__: steps_of(cls, folder) for cls in ELEMENTWISE},
            "in host memory": {
                cls.__name__: steps_of(cls, folder, in_host_memory) for cls in ELEMENTWISE
            },
            "refusals": {cls.__name__: refusal_of(cls) for cls in REFUSING},
            "refusals of offloading": refusals_of_offloading(),
            "overflowed": overflowed(),
            "checkpointed": checkpointed(sharded),
            "replicas": replicas(),
        }


def results_of_a_mesh(folder: str) -> dict[str, Any]:
    with joined("gloo"):
        return {
            "steps": {cls.__name__: steps_of(cls, folder, over_a_mesh) for cls in ELEMENTWISE},
            "overflowed": overflowed(over_a_mesh),
            "checkpointed": checkpointed(over_a_mesh),
        }
