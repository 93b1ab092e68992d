"""Code that the tests run in real ranks: one function per launch, which returns its results."""

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranked import TIED, adamw, micro_batches, model_of, sum_of_losses, two_groups
from torch import Tensor, nn

import memlab
from memlab.precision import LossScaler
from memlab.zero import joining, processes
from memlab.zero.collectives import CollectiveTraffic

TIME_OUT = 60
STAGES = (0, 1, 2, 3)
HOW = [(stage, overlap) for stage in STAGES for overlap in (False, True)]


def mine(batches: list[Any], group: Any = None) -> list[Any]:
    """Return this rank's micro-batches, dealt out as in a simulation."""
    return batches[dist.get_rank(group) :: dist.get_world_size(group)]


def where() -> tuple[int, int]:
    """Return the process id and the port of the store where the ranks met."""
    return os.getpid(), int(os.environ["MASTER_PORT"])


def chunks(zero: processes.Zero, of: Callable[[Tensor], Tensor]) -> dict[Any, Tensor]:
    """Return `of` each tensor that this rank's optimizer steps, by weight and start."""
    found = {}
    for number, span, parameter in zero.rank.optimizer_shards:
        for chunk in zero.rank.chunks(number):
            start = max(chunk.at, span.start)
            stop = min(chunk.at + chunk.stop - chunk.start, span.stop)
            if start < stop:
                part = of(parameter)[start - span.start : stop - span.start]
                found[chunk.weight.name, chunk.start + start - chunk.at] = part.detach().clone()
    return found


def weights(zero: processes.Zero) -> dict[Any, Tensor]:
    return chunks(zero, lambda parameter: parameter)


@contextmanager
def calls_counted():
    """Count the calls of torch.distributed with tensors of more than one element."""
    from memlab.zero import process_group

    counts: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*tensors: Tensor, **settings: Any) -> Any:
            counts[name] += tensors[0].numel() > 1
            return call(*tensors, **settings)

        return counted

    kept = process_group._reduce_scatter, process_group._all_gather, dist.all_reduce
    names = "reduce_scatter", "all_gather", "all_reduce"
    replaced = [counting(name, call) for name, call in zip(names, kept, strict=True)]
    process_group._reduce_scatter, process_group._all_gather, dist.all_reduce = replaced
    try:
        yield counts
    finally:
        process_group._reduce_scatter, process_group._all_gather, dist.all_reduce = kept


# ------------------------------------------------------------------ two and four ranks


def two_ranks(folder: str) -> dict[str, Any]:
    """Run all cases for two ranks in one launch."""
    with processes.joined("gloo", timeout=TIME_OUT):
        return {
            "where": where(),
            "metered": {how: metered(*how) for how in HOW},
            "accumulated": {how: accumulated(*how) for how in HOW},
            "low precision": {stage: low_precision(stage) for stage in STAGES},
            "autocast": {stage: under_autocast(stage) for stage in STAGES},
            "wide": {how: wide(*how) for how in HOW},
            "fickle": {overlap: fickle(overlap) for overlap in (False, True)},
            "scaled": {stage: overflowing(stage) for stage in STAGES},
            "plain": {stage: plain_loop(stage) for stage in STAGES},
            "no sync": {sync: accumulated_in_a_loop(sync) for sync in (False, True)},
            "refused": refused(),
            "not finite": {
                (stage, where): not_finite(stage, where)
                for stage in (1, 2, 3)
                for where in ("loss", "gradient")
            },
            "order": {how: order(*how) for how in HOW},
            "saved": saved(folder),
            "beside": beside_fsdp2(),
        }


def four_ranks(folder: str) -> dict[str, Any]:
    """Compare with FSDP2, then resume two ranks' checkpoints in groups of three ranks and one."""
    with processes.joined("gloo", timeout=TIME_OUT) as rank:
        three, one = dist.new_group([0, 1, 2]), dist.new_group([3])
        group, stages = (three, (3, 1)) if rank < 3 else (one, (1, 3))
        return {
            "where": where(),
            "beside": beside_fsdp2(),
            "resumed": resumed(folder, dict(zip(SAVED, stages, strict=True)), group),
        }


def sharded(
    stage: int, overlap: bool = True, *, model: nn.Module | None = None, **settings: Any
) -> processes.Zero:
    model = model_of() if model is None else model
    optimizer = adamw(two_groups(model))
    return processes.shard(model, optimizer, stage, overlap=overlap, **settings)


def figures(trace: memlab.Trace) -> dict[str, Any]:
    return {"peak": trace.peak_bytes, "at_peak": trace.at_peak, "at_end": trace.at_end}


def metered(stage: int, overlap: bool) -> dict[str, Any]:
    """Meter the second step; the ranks' weights differ until rank 0's are copied."""
    torch.manual_seed(dist.get_rank())
    zero = sharded(stage, overlap)
    for number in range(2):
        batches = mine(micro_batches(dist.get_world_size(), seed=number))
        with calls_counted() as calls, memlab.meter(zero.model, zero.optimizer) as running:
            step = zero.step(batches, sum_of_losses)
    return {
        **figures(running.trace),
        "weights": weights(zero),
        "loss": (step.loss, step.tokens),
        "traffic": step.traffic,
        "calls": calls,
    }


def accumulated(
    stage: int, overlap: bool
) -> tuple[dict[Any, Tensor], list[float], CollectiveTraffic]:
    """Step in float64 with three micro-batches per rank and clipping."""
    zero, norms = sharded(stage, overlap, model=model_of().double()), []
    for number in range(3):
        batches = mine(micro_batches(3 * dist.get_world_size(), seed=number))
        step = zero.step(batches, sum_of_losses, clip_norm=0.1)
        norms.append(step.norm)
    return weights(zero), norms, step.traffic[0]


def low_precision(stage: int) -> dict[Any, Tensor]:
    zero = sharded(stage, model=model_of(dtype=torch.bfloat16), master_weights=True)
    for number in range(3):
        zero.step(mine(micro_batches(2, seed=number)), sum_of_losses)
    return weights(zero)


def autocast_sum(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return sum_of_losses(model, batch)


def under_autocast(stage: int) -> dict[Any, Tensor]:
    zero = sharded(stage)
    for number in range(3):
        zero.step(mine(micro_batches(2, seed=number)), autocast_sum)
    return weights(zero)


class Wide(nn.Module):
    """Three units of known sizes, the second by far the largest; no root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(6, 8), (8, 500), (500, 2)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mean_square(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), 1


def wide(stage: int, overlap: bool) -> dict[str, Any]:
    model = Wide()
    zero = processes.shard(model, adamw(model.parameters()), stage, overlap=overlap)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        batches = [torch.randn(1, 6)]
        with memlab.meter(model, zero.optimizer) as running:
            zero.step(batches, mean_square)
    return figures(running.trace)


class Fickle(nn.Module):
    """A model that runs its layers in a different order each time, so that prefetches go unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        for place in range(3):
            x = self.layers[place * self.runs % 3 if self.runs % 3 else place](x).tanh()
        return x


def fickle(overlap: bool) -> tuple[dict[Any, Tensor], int]:
    model = Fickle()
    zero = processes.shard(model, adamw(model.parameters()), 3, overlap=overlap)
    gathers = 0
    for number in range(4):
        batches = inputs_of(number)[dist.get_rank()]
        step = zero.step([batches], mean_square)
        gathers += sum(n for c, n in step.traffic[0].calls.items() if c.kind == "all_gather")
    return weights(zero), gathers


def inputs_of(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(2, 5, generator=generator) for _ in range(2)]


def spoil(weight: nn.Parameter, by: float, when: Callable[[], bool]) -> None:
    """Set one element of the weight's gradient to `by`."""

    def spoiled(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[2] = by
        return gradient

    weight.register_hook(lambda gradient: spoiled(gradient) if when() else gradient)


def overflowing(stage: int) -> dict[str, Any]:
    """Step while one element of rank 1's gradient is inf."""
    zero, scaler, stepped = sharded(stage), LossScaler(), []
    if dist.get_rank() == 1:
        spoil(zero.model.norm.weight, torch.inf, lambda: not stepped)

    before, found = weights(zero), []
    for number in range(2):
        step = zero.step(mine(micro_batches(2, seed=number)), sum_of_losses, scaler=scaler)
        stepped.append(step.stepped)
        now = weights(zero)
        found.append(all(torch.equal(now[key], before[key]) for key in now))
    return {"stepped": stepped, "unchanged": found, "scale": scaler.get_scale()}


def plain_loop(stage: int) -> dict[str, Any]:
    """Run a plain training loop with a mean loss; the schedule is made before `shard`."""
    model = model_of().double()
    optimizer = adamw(two_groups(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    zero, norms = processes.shard(model, optimizer, stage), []
    for number in range(3):
        [(tokens, targets)] = mine(micro_batches(2, seed=number))
        loss = zero(tokens, targets.clamp(min=0))
        loss.backward()
        norms.append(zero.clip_grad_norm_(0.5))
        zero.step()
        zero.zero_grad()
        schedule.step()
    return {"weights": weights(zero), "norms": norms, "lr": optimizer.param_groups[0]["lr"]}


def accumulated_in_a_loop(sync: bool) -> tuple[dict[Any, Tensor], int]:
    """Run stage 1 with two backward passes per step, the first with or without sync."""
    zero = sharded(1, model=model_of().double())
    for number in range(2):
        first, second = mine(micro_batches(4, seed=number))
        if sync:
            zero.backward(*sum_of_losses(zero, first))
        else:
            with zero.no_sync():
                zero.backward(*sum_of_losses(zero, first))
        zero.backward(*sum_of_losses(zero, second))
        step = zero.step()
    sent = sum(n for c, n in step.traffic[0].calls.items() if c.kind == "reduce_scatter")
    return weights(zero), sent


def refused() -> dict[str, str]:
    """Return the error of each invalid call; all ranks continue afterwards."""
    rank, found = dist.get_rank(), {}

    def note(name: str, do: Callable[[], Any]) -> None:
        try:
            do()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    def another_rate() -> processes.Zero:
        model = model_of()
        return processes.shard(model, torch.optim.SGD(model.parameters(), lr=1.0 + rank), 1)

    def another_optimizer() -> processes.Zero:
        model = model_of()
        kind = torch.optim.Adafactor if rank else torch.optim.SGD
        return processes.shard(model, kind(model.parameters(), lr=0.1), 1)

    other = model_of(replace(TIED, intermediate_size=TIED.intermediate_size + 2 * rank))
    note("model", lambda: sharded(2, model=other))
    note("settings", lambda: sharded(3, overlap=rank == 0))
    note("rate", another_rate)
    note("optimizer", another_optimizer)
    zero = sharded(1)
    note("direct step", zero.optimizer.step)
    note("no gradients", zero.step)
    note("no loss", partial(zero.step, mine(micro_batches(2))))
    for stage in (2, 3):
        step = partial(sharded(stage).step, mine(micro_batches(2)) * (1 + rank), sum_of_losses)
        note(f"micro-batches {stage}", step)
    return found


def not_finite(stage: int, where: str) -> tuple[str, bool]:
    """Return this rank's error, and whether it trains normally afterwards."""
    zero, steps = sharded(stage), []
    before = weights(zero)
    if dist.get_rank() == 1 and where == "gradient":
        spoil(zero.model.blocks[1].mlp_norm.weight, torch.nan, lambda: not steps)

    def summed(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss, tokens = sum_of_losses(model, batch)
        return (loss * torch.nan if dist.get_rank() == 1 and where == "loss" else loss), tokens

    try:
        zero.step(mine(micro_batches(2)), summed)
    except FloatingPointError as error:
        said = str(error)
    steps.append(said)
    unchanged = all(torch.equal(weight, before[key]) for key, weight in weights(zero).items())
    zero.step(mine(micro_batches(2)), sum_of_losses)
    trained = any(not torch.equal(weight, before[key]) for key, weight in weights(zero).items())
    return said, unchanged and trained


def order(stage: int, overlap: bool) -> list[str]:
    """Return the order of events in the second step: collectives, gradients, forward passes."""
    zero, events = sharded(stage, overlap), []
    zero.step(mine(micro_batches(2)), sum_of_losses)
    begin, complete = zero.comm._start, zero.comm._wait

    def noted_begin(doing: str, *rest: Any) -> Any:
        events.append(f"begin {doing}")
        return begin(doing, *rest)

    def noted_complete(doing: str, *rest: Any) -> None:
        events.append(f"wait for {doing}")
        complete(doing, *rest)

    zero.comm._start, zero.comm._wait = noted_begin, noted_complete
    for name, weight in zero.model.named_parameters():
        weight.register_post_accumulate_grad_hook(
            lambda _, name=name: events.append(f"gradient of {name}")
        )
    for number, block in enumerate(zero.model.blocks):
        block.mlp.register_forward_pre_hook(
            lambda *_, number=number: events.append(f"forward in blocks.{number}")
        )
    zero.step(mine(micro_batches(2)), sum_of_losses)
    return events


# ------------------------------------------------------------------ checkpoints

SAVED = {"stage 2": {"stage": 2}, "stage 3, bfloat16": {"stage": 3, "master_weights": True}}


def to_save(label: str, stage: int | None = None, group: Any = None) -> processes.Zero:
    settings = {**SAVED[label], "group": group}
    if stage is not None:
        settings["stage"] = stage
    low = settings.get("master_weights", False)
    model = model_of(dtype=torch.bfloat16) if low else model_of().double()
    return sharded(model=model, **settings)


def saved(folder: str) -> dict[str, Any]:
    """Save, then step with the original and with the loaded state."""
    found = {}
    for label in SAVED:
        zero = to_save(label)
        for number in range(2):
            zero.step(mine(micro_batches(12, seed=number)), sum_of_losses)
        for group in zero.optimizer.param_groups:
            group["lr"] /= 2
        zero.save(f"{folder}/{label}", steps=-1)
        zero.save(f"{folder}/{label}", steps=2)  # replaces the first one
        zero.step(mine(micro_batches(12, seed=2)), sum_of_losses)
        again = to_save(label)
        also = again.load(f"{folder}/{label}")
        again.step(mine(micro_batches(12, seed=2)), sum_of_losses)
        found[label] = weights(zero), weights(again), also
    return found


def resumed(folder: str, stages: dict[str, int], group: Any) -> dict[str, Any]:
    """Load with another number of ranks, in another stage, and step."""
    found: dict[str, Any] = {}
    for label, stage in stages.items():
        zero = to_save(label, stage, group)
        zero.load(f"{folder}/{label}")
        at_once = weights(zero)
        zero.step(mine(micro_batches(12, seed=2), group), sum_of_losses)
        found[label] = at_once, weights(zero)
    small = model_of(replace(TIED, intermediate_size=4))
    zero = processes.shard(small, adamw(two_groups(small)), 2, group=group)
    for case, path in (("refused", f"{folder}/stage 2"), ("nothing there", f"{folder}/nothing")):
        try:
            zero.load(path)
        except (OSError, ValueError) as error:
            found[case] = f"{type(error).__name__}: {error}"
    return found


# ------------------------------------------------------------------ comparison with FSDP2


def beside_fsdp2() -> dict[str, Any]:
    warnings.simplefilter("ignore")  # FSDP2 hooks a module whose inputs, tokens, need no gradient
    theirs, calls = fsdp2_steps(torch.float64, 10)
    ours, traffic = {}, {}
    for stage in (1, 2, 3):
        zero = sharded(stage, model=model_of().double())
        for number in range(10):
            step = zero.step(batches_of(number), sum_of_losses, clip_norm=0.1)
        ours[stage], traffic[stage] = weights(zero), step.traffic[0]
    return {
        "theirs": theirs,
        "ours": ours,
        "their calls": calls,
        "our calls": traffic[3].calls,
        "gradients": (fsdp2_gradients(), our_gradients()),
        "held": (fsdp2_held(), our_held()),
    }


def batches_of(number: int) -> list[Any]:
    return mine(micro_batches(dist.get_world_size(), seed=number))


def fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return model


def fsdp2_backward(model: nn.Module, number: int) -> None:
    """Scale the loss: FSDP2 averages over ranks, and the tests need the mean over all tokens."""
    ranks = dist.get_world_size()
    tokens = sum((targets >= 0).sum() for _, targets in micro_batches(ranks, seed=number))
    [batch] = batches_of(number)
    (sum_of_losses(model, batch)[0] * ranks / tokens).backward()


def fsdp2_steps(dtype: torch.dtype, steps: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    from torch.distributed.tensor.debug import CommDebugMode

    model = fsdp2(model_of().to(dtype))
    optimizer = adamw(two_groups(model))
    for number in range(steps):
        # Count only in the last step, because counting is slow.
        with CommDebugMode() if number == steps - 1 else nullcontext() as counted:
            fsdp2_backward(model, number)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: weight.full_tensor().detach() for name, weight in model.named_parameters()}
    return found, {str(name): count for name, count in counted.get_comm_counts().items()}


def fsdp2_gradients() -> dict[str, Tensor]:
    model = fsdp2(model_of())
    fsdp2_backward(model, 0)
    return {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}


def our_gradients() -> dict[int, dict[Any, Tensor]]:
    found = {}
    for stage in (1, 2, 3):
        zero = sharded(stage)
        [batch] = batches_of(0)
        zero.backward(*sum_of_losses(zero, batch))
        zero.clip_grad_norm_(1e9)
        found[stage] = chunks(zero, lambda parameter: parameter.grad)
        zero.zero_grad()
    return found


def fsdp2_held() -> dict[str, Any]:
    model = fsdp2(model_of())
    optimizer = adamw(two_groups(model))

    def step() -> None:
        fsdp2_backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # a meter sees a storage from its first use
        trace = memlab.measure(step, model=model, optimizer=optimizer)
    return figures(trace)


def our_held() -> dict[str, Any]:
    """Also count the stepped tensors and the padding elements of this rank's shards."""
    zero = sharded(3)
    for _ in range(2):
        with memlab.meter(zero.model, zero.optimizer) as running:
            zero.step(batches_of(0), sum_of_losses)
    owned = sum(part.numel() for part in weights(zero).values())
    return {
        **figures(running.trace),
        "stepped": len(zero.rank.optimizer_shards),
        "padding": zero.plan.shard_elements - owned,
    }


# ------------------------------------------------------------------ ranks that fail


CASES = {"raises": TIME_OUT, "leaves": TIME_OUT, "sleeps": 10, "goes on": 10, "dies": TIME_OUT}


def failures(folder: str) -> None:
    """Run three ranks; rank 1 fails in one way after another and is killed in the end."""
    joining.GRACE_SECONDS = 5
    rank, said = int(os.environ["RANK"]), {"where": where()}
    for how, time_out in CASES.items():
        try:
            with processes.joined("gloo", timeout=time_out):
                one_fails(how, rank)
        except Exception as error:
            said[how] = f"{type(error).__name__}: {error}"
        Path(folder, f"{rank}.txt").write_text(repr(said))
    raise RuntimeError("end of all cases")


def one_fails(how: str, rank: int) -> None:
    zero = sharded(2)
    zero.step(mine(micro_batches(3)), sum_of_losses)
    if rank == 1 and how == "leaves":
        return

    def summed(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if rank == 1 and how == "raises":
            raise OSError("the disk is full")
        if rank == 1 and how == "sleeps":
            time.sleep(13)
        if rank == 1 and how == "dies":
            os.kill(os.getpid(), 9)
        return sum_of_losses(model, batch)

    for _ in range(2 if rank == 1 and how == "goes on" else 1):
        zero.backward(*summed(zero.model, *mine(micro_batches(3))))
    zero.step()
