# %% [markdown]
# # Day 13: ZeRO on real processes
#
# **Yesterday all ranks ran in one process. Do real ranks hold and send the same bytes?**
#
# After today you can run ZeRO in two processes and measure each, overlap communication with
# backward, handle a NaN and a killed rank, resume with a different number of ranks, and read
# "tensor 8, pipeline 4, data 4".
#
# About 115 minutes, 85 of them for five exercises. You need a laptop with two free cores. No GPU
# and no downloads are needed.

# %% [markdown]
# You can split this day in two; the second half begins with the NaN. As before: **guess**,
# **measure**, then **build** what explains the gap. In an exercise, replace `raise
# NotImplementedError` with your own lines; the cell below it checks them. If you are stuck, run
# `memlab hint 13.1` in a terminal. You can skip an exercise: the lesson then uses the reference.

# %% [markdown]
# ## The question
#
# In a simulation all ranks share one process, and no rank is late. A real rank is a **process**
# with its own memory. It receives data from other ranks only as messages, can wait forever, and can
# be killed.
#
# Today two processes train the tiny model with the code of the next cells. They communicate with
# *gloo*, torch's backend for CPUs. (For GPUs it is NCCL.)


# %%
import os
import signal
import tempfile
from dataclasses import replace
from inspect import getsource
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import memlab
from memlab import plot
from memlab.course import exercise, guess, reveal, running_bill
from memlab.course.peers import Stuck, in_turns
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.units import format_bytes
from memlab.zero import processes, simulate
from memlab.zero.launch import RanksFailed, run_ranks


# %%
def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    model = GPT(replace(PRESETS["tiny"], layers=2), dtype=dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def micro_batches(number):
    """Return the two micro-batches of step `number`."""
    data = batches(source_bytes("128 KiB"), 1, 16, seed=number)
    return [next(data), next(data)]


def own_batches(number):
    """Return micro-batches rank, rank + R, rank + 2R, … of step `number` (R: number of ranks)."""
    return micro_batches(number)[dist.get_rank() :: dist.get_world_size()]


def sum_of_losses(model, batch):
    tokens, targets = batch
    return model(tokens, targets) * targets.numel(), targets.numel()


# %% [markdown]
# `processes.shard` takes a model and its optimizer, keeps this rank's shards, and returns `zero`.
# `zero.step` works as on Day 12, but runs only this rank. The meter measures only this process.
#
# With `overlap`, gradients are sent while backward continues. Stage 3 also *prefetches*: it gathers
# the next unit's weights while the current unit runs.


# %%
def measure_step(stage, overlap):
    """Return the trace, the traffic and the loss of the second step."""
    zero = processes.shard(*make_model(), stage, overlap=overlap)
    for number in range(2):
        batch = own_batches(number)
        with memlab.meter(zero.model, zero.optimizer) as running:
            step = zero.step(batch, sum_of_losses)
    return running.trace, step.traffic[0], step.loss


# %% [markdown]
# For comparison, each process also runs PyTorch's **FSDP2**, which is stage 3. `fully_shard(block)`
# makes each block a unit; `fully_shard(model)` makes a unit of the remaining weights, the *root*.
# `CommDebugMode` counts the collectives of a step. The float64 weights will be compared with our
# stage 3's.


# %%
def make_fsdp2(dtype=torch.float32):
    model, _ = make_model(dtype)
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=True)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def fsdp2_step(model, optimizer, number):
    (batch,) = own_batches(number)
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_fsdp2():
    """Return the second step's trace and collectives, and the float64 weights after it."""
    training, in_float64 = make_fsdp2(), make_fsdp2(torch.float64)
    for number in range(2):
        fsdp2_step(*in_float64, number)
        with memlab.meter(*training) as running, CommDebugMode() as collectives:
            fsdp2_step(*training, number)
    counts = {str(name): count for name, count in collectives.get_comm_counts().items()}
    weights = {name: p.full_tensor().detach() for name, p in in_float64[0].named_parameters()}
    return running.trace, counts, weights


# %% [markdown]
# Then two failures. In `step_with_a_nan`, rank 1's loss is NaN. In `train`, each rank saves its
# shards after every second step, until rank 1 is killed with SIGKILL, as Linux does when memory
# runs out.


# %%
def step_with_a_nan(stage):
    """Return this rank's error message."""
    zero = processes.shard(*make_model(), stage)

    def loss_with_nan(model, batch):
        loss, tokens = sum_of_losses(model, batch)
        return (loss * float("nan") if dist.get_rank() == 1 else loss), tokens

    try:
        zero.step(own_batches(0), loss_with_nan)
    except FloatingPointError as error:
        return str(error)


def train(zero, first, last, folder=None, killed_in=None):
    """Return the losses of steps first to last − 1."""
    losses = []
    for number in range(first, last):
        if number == killed_in and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(zero.step(own_batches(number), sum_of_losses).loss)
        if folder and number % 2:
            zero.save(folder, done=number + 1, losses=losses)
    return losses


# %% [markdown]
# Everything runs in one launch. A killed rank returns nothing, so each rank writes its results to a
# file.


# %%
RUNS = ((0, False), (1, False), (2, False), (2, True), (3, False), (3, True))  # stage, overlap
STEPS, KILLED_IN = 8, 5


def main(folder):
    with processes.joined("gloo", timeout=60) as rank:
        results = {run: measure_step(*run) for run in RUNS}
        results["FSDP2"] = measure_fsdp2()
        results["nan"] = step_with_a_nan(stage=2)
        zero = processes.shard(*make_model(), 2, overlap=False)
        results["losses"] = train(zero, 0, STEPS)
        results["weights"] = {n: p.detach().clone() for n, p in zero.model.named_parameters()}
        torch.save(results, Path(folder) / f"results-{rank}.pt")
        zero = processes.shard(*make_model(), 2, overlap=False)
        train(zero, 0, STEPS, folder=Path(folder) / "checkpoint", killed_in=KILLED_IN)


# %% [markdown]
# ## Guess
#
# - Stage 3: by how many bytes does a real rank's peak differ from the simulated peak?
# - Stage 3: by how many percent does overlap raise the peak?
# - FSDP2: how many times does it gather each unit per step?

# %% [markdown]
# The last guess is about a 405B model on 128 GPUs, split as "tensor 8, pipeline 4, data 4".
#
# - *Tensor*: eight GPUs split each matrix, and all-reduce partial activations in every block.
# - *Pipeline*: four groups of GPUs have a quarter of the blocks each.
# - *Data*: four copies of the model, 32 GPUs each. In each step a copy trains on its own 16
#   micro-batches of 8,192 tokens, then the copies sum their gradients once.
#
# How many times more bytes does a GPU send for tensor than for data parallelism?

# %%
### BEGIN SOLUTION
guess("13.1", differs_bytes=4096, overlap_more_percent=5, fsdp2_gathers_times=1, tensor_times=1)
### END SOLUTION
### BEGIN STUB
# answers = {"differs_bytes": ..., "overlap_more_percent": ..., "fsdp2_gathers_times": ...}
# guess("13.1", **answers, tensor_times=...)
### END STUB

# %% [markdown]
# ## Two processes
#
# Both processes run the source code of the functions above. Rank 1 is killed: `RanksFailed` says
# which rank failed and why. (This takes about half a minute.)

# %%
IMPORTS = """
import os, signal
from dataclasses import replace
from pathlib import Path
import torch, memlab
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.zero import processes
"""
PARTS = (
    *(make_model, micro_batches, own_batches, sum_of_losses, measure_step, make_fsdp2),
    *(fsdp2_step, measure_fsdp2, step_with_a_nan, train, main),
)
SOURCE = f"{IMPORTS}\nRUNS, STEPS, KILLED_IN = {RUNS}, {STEPS}, {KILLED_IN}\n\n"
SOURCE += "\n\n".join(map(getsource, PARTS))

temporary = tempfile.TemporaryDirectory()
try:
    run_ranks(SOURCE, 2, temporary.name, timeout=120)
except RanksFailed as failed:
    print(failed)
    error_of_0 = failed.errors[0]

# %%
results = [torch.load(f"{temporary.name}/results-{r}.pt", weights_only=False) for r in range(2)]
simulated = {}
for stage in range(4):
    zero = simulate(*make_model(), 2, stage, meter=memlab.meter)
    for number in range(2):
        step = zero.step(micro_batches(number), sum_of_losses)
    simulated[stage] = step
    real = [results[rank][stage, False] for rank in range(2)]
    same_bytes = all(
        (trace.peak_bytes, trace.at_peak, trace.at_end)
        == (other.peak_bytes, other.at_peak, other.at_end)
        for (trace, _, _), other in zip(real, step.traces, strict=True)
    )
    same_traffic = [traffic for _, traffic, _ in real] == list(step.traffic)
    print(f"stage {stage}: peaks {[format_bytes(t.peak_bytes) for t, _, _ in real]}", end="; ")
    equal = f"bytes {same_bytes}, traffic {same_traffic}, loss {real[0][2] == step.loss}"
    print(f"equal to simulation: {equal}")

# %%
NAMES = {
    "parameters": "weights", "gradients": "gradients", "optimizer_state": "optimizer state",
    "activations": "activations",
}  # fmt: skip
fig, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for stage in range(4):
    bars = {f"process {rank}": results[rank][stage, False][0] for rank in range(2)}
    bars["simulated"] = simulated[stage].traces[0]
    for place, (who, trace) in enumerate(bars.items(), 4 * stage):
        start = 0
        for kind, name in NAMES.items():
            size = trace.at_peak.get(kind, 0) / 2**10
            label = None if place else name
            axes.barh(place, size, left=start, color=plot.COLOURS[kind], label=label)
            start += size
        whole = trace.peak_bytes / 2**10
        label = None if place else "buffers, inputs, temporaries"
        axes.barh(place, whole - start, left=start, color="#c9c9d0", label=label)
        axes.text(whole + 8, place, who, va="center", fontsize=8)
axes.set_yticks([1, 5, 9, 13], [f"stage {stage}" for stage in range(4)])
axes.set(xlabel="KiB", title="Peak of a step: two processes, and simulated")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
_ = axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.18))

# %% [markdown]
# The processes match the simulation: the bytes of each kind, at the peak and at the end; the
# collectives and their bytes (traffic); and the loss, bit for bit.
#
# (`zero` hides gloo's internal copies of gradients from the meter.)

# %% [markdown]
# Why is stage 3's peak higher than stage 2's? The model has only two blocks. One gathered block and
# its flat buffer use 97 KiB, all weights only 129 KiB. With many blocks, one block is a small part
# of the weights.

# %% [markdown]
# ## A ring
#
# On a **ring** a rank sends to the next rank and receives from the previous one. Today you write
# the program of *one* rank.
#
# `in_turns(program, arguments)` runs all ranks in this process, one at a time. `arguments` is a
# list with one tuple per rank. The program's first argument, `peer`, has `rank`, `ranks`,
# `send(tensor)` to the next rank (the last sends to rank 0), and `receive()`, which waits for the
# previous rank. If all ranks wait, `in_turns` raises `Stuck`.


# %%
def exchange(peer, receive_first):
    if receive_first:
        return peer.receive() + peer.rank
    peer.send(torch.tensor(10 * peer.rank))
    return int(peer.receive())


print(in_turns(exchange, [(False,)] * 3))
try:
    in_turns(exchange, [(True,)] * 3)
except Stuck as stuck:
    print(fill(str(stuck), 96))

# %% [markdown]
# ### Exercise 13.1: reduce-scatter on a ring
#
# About 18 minutes. `whole` is this rank's 1-D tensor of R equal pieces (R ranks). Return piece
# `peer.rank` of the sum over all ranks, as a tensor with its own memory. Each rank sends R − 1
# messages of one piece each, in the input's dtype. Do not change the input.


# %%
def ring_reduce_scatter(peer, whole):
    ### BEGIN SOLUTION
    pieces = list(whole.chunk(peer.ranks))
    for turn in range(peer.ranks - 1):
        peer.send(pieces[(peer.rank - turn - 1) % peer.ranks])
        coming = (peer.rank - turn - 2) % peer.ranks
        pieces[coming] = peer.receive() + pieces[coming]
    return pieces[peer.rank].clone()
    ### END SOLUTION


# %%
ring_reduce_scatter = exercise("13.1", ring_reduce_scatter)

# %%
whole = torch.ones(6400)
for ranks in (2, 8, 64):
    peers = []  # in_turns adds each rank's peer, which records its events
    got = in_turns(ring_reduce_scatter, [(whole,)] * ranks, peers=peers)
    sent = [nbytes for event, nbytes in peers[0].events if event == "send"]
    print(f"{ranks:2} ranks: each sends {len(sent):2} × {format_bytes(sent[0])}", end=", ")
    print(f"{sum(sent) / whole.nbytes:.2f} of the tensor; ", end="")
    print(f"sums correct: {all((x == ranks).all() for x in got)}")

# %% [markdown]
# Each rank sends (R − 1)/R of the tensor, as in Day 12's formula. But it sends R − 1 messages, one
# after another, and even a small message has a latency. So small gradients are concatenated into
# one flat tensor, a *bucket*, and sent together.

# %% [markdown]
# ## Overlap
#
# Backward computes the last block's gradients first. They can be sent while backward continues:
# **begin** a bucket's sum, and **wait** for it later. `peer.begin(flat)` starts a sum over ranks;
# `.wait()` on its result returns the sum. A sum *in flight* (begun, not yet waited for) uses
# memory.

# %% [markdown]
# ### Exercise 13.2: overlap buckets with backward
#
# About 20 minutes. `gradients` yields (name, gradient); `buckets` is a list of lists of names.
# Return a list of the flat sums, in order. Do not change `buckets` or dtypes.
#
# - Begin a bucket when its last gradient arrives: one flat tensor, in the order of its names.
# - Begin in the list's order, even if a later one is complete.
# - At most two are in flight: wait for the older just before you begin a third.
# - After `begin`, keep no reference to a sent gradient, a copy of it, or `flat`.


# %%
def reduce_in_buckets(peer, gradients, buckets):
    ### BEGIN SOLUTION
    grads, work, sums, pending = {}, [], [], list(buckets)
    for name, gradient in gradients:
        grads[name] = gradient
        del gradient
        while pending and all(n in grads for n in pending[0]):
            if len(work) == 2:
                sums.append(work.pop(0).wait())
            work.append(peer.begin(torch.cat([grads.pop(n).flatten() for n in pending.pop(0)])))
    return sums + [w.wait() for w in work]
    ### END SOLUTION


# %%
reduce_in_buckets = exercise("13.2", reduce_in_buckets)


# %%
class WaitAtOnce:
    """A peer whose `begin` waits for the sum."""

    def __init__(self, peer, total=None):
        self.peer, self.total = peer, total

    def begin(self, flat):
        return WaitAtOnce(self.peer, self.peer.begin(flat).wait())

    def wait(self):
        return self.total


# %%
def events_of(wrap):
    """Run your function with `wrap(peer)` on eight gradients, and return rank 0's events."""

    def program(peer):
        def gradients():
            for name in "hgfedcba":
                peer.events.append(("made", name))
                yield name, torch.ones(1000)

        buckets = [[*pair] for pair in ("hg", "fe", "dc", "ba")]
        reduce_in_buckets(wrap(peer), gradients(), buckets)
        return peer.events

    return in_turns(program, [(), ()])[0]


# %%
fig, both = plt.subplots(2, 1, figsize=(9, 3.8), layout="constrained", sharex=True)
ways = {"Wait at once": WaitAtOnce, "Wait late (yours)": lambda peer: peer}
for axes, (title, wrap) in zip(both, ways.items(), strict=True):
    now, waited, arrivals = 0, 0, []
    for event, name in events_of(wrap):
        if event == "made":
            axes.barh(0, 0.94, left=now, color="#4477aa")
            axes.text(now + 0.47, 0, name, ha="center", va="center", color="white", fontsize=9)
            now += 1
        if event == "begin":
            start = max([now, *arrivals])
            axes.barh(1, 1.94, left=start, color="#999933")
            label = f"bucket {len(arrivals)}"
            axes.text(start + 0.97, 1, label, ha="center", va="center", fontsize=8)
            arrivals.append(start + 2)
        if event == "wait":
            now, waited = max(now, arrivals[waited]), waited + 1
    axes.axvline(now, color="0.3", linestyle=":")
    axes.text(now + 0.1, 0.5, f"done: {now}", va="center")
    axes.set(yticks=(0, 1), yticklabels=("backward", "sending"), title=title)
    axes.set(xlim=(-0.2, 18), xticks=range(0, 17, 2))
    axes.spines[["top", "right"]].set_visible(False)
_ = both[1].set_xlabel("time (assumed: 1 per gradient computed, 2 per bucket sent)")

# %% [markdown]
# If you wait at once, backward stalls. If you wait late, only the last bucket is not hidden.
#
# Overlap needs memory: for a second bucket, and in stage 3 for prefetched weights. How much did it
# need in the two processes?


# %%
block = sum(p.nbytes for p in make_model()[0].blocks[1].parameters())
print(f"weights of a block: {block:,} bytes")
for stage in (2, 3):
    without, with_overlap = (results[0][stage, overlap] for overlap in (False, True))
    more = with_overlap[0].peak_bytes - without[0].peak_bytes
    print(f"stage {stage}: overlap adds {more:,} bytes to the peak;", end=" ")
    print(f"same collectives and bytes sent: {without[1] == with_overlap[1]}")

# %% [markdown]
# Stage 3 needs one block's weights more: while backward runs the second block, it prefetches the
# first. In stage 2 the second bucket does not exist at the peak.

# %% [markdown]
# ## Comparison with FSDP2

# %%
trace, counts, fsdp2_weights = results[0]["FSDP2"]
ours = results[0][3, False][1]
for kind, name in (("all_gather", "_allgather_base_"), ("reduce_scatter", "_reduce_scatter_base_")):
    calls = sum(n for what, n in ours.calls.items() if what.kind == kind)
    print(f"{kind:15} ours {calls}, FSDP2 {counts[f'c10d.{name}']}")
zero = simulate(*make_model(torch.float64), 2, 3)
for number in range(2):
    _ = zero.step(micro_batches(number), sum_of_losses)
difference = max((w - fsdp2_weights[n]).abs().max().item() for n, w in zero.weights().items())
print(f"weights after two steps: max difference below 1e-12: {difference < 1e-12}")
for kind in ("parameters", "optimizer_state"):
    held = (results[0][3, False][0].at_end[kind], trace.at_end[kind])
    print(f"{kind} between steps: ours {held[0]:,} bytes, FSDP2 {held[1]:,} bytes")
copies = sum(p.nbytes for p in make_model()[0].parameters())  # gloo copies all gradients
ratio = (trace.peak_bytes - copies) / results[0][3, True][0].peak_bytes
close = 0.85 < ratio < 1.15
print(f"FSDP2's peak without gloo's copies is within 15% of ours with overlap: {close}")

# %% [markdown]
# FSDP2 needs 68 bytes more for AdamW's step counters: one per parameter tensor, not per unit.
#
# FSDP2 also prefetches in backward, so its peak is compared with our stage 3 *with* overlap. In
# FSDP2's run the meter counts gloo's copies of gradients, so the cell subtracts them.

# %% [markdown]
# Use these in production:
#
# | stage | call |
# | --- | --- |
# | 0 | `DistributedDataParallel`: buckets of 25 MiB, sent during backward |
# | 1 | `DistributedDataParallel` with `ZeroRedundancyOptimizer`, or DeepSpeed |
# | 2 | `fully_shard(block, reshard_after_forward=False)`: keeps gathered weights after forward |
# | 3 | `fully_shard(block)` for each block, then `fully_shard(model)`; or DeepSpeed |

# %% [markdown]
# For other needs:
#
# | for | call |
# | --- | --- |
# | clipping | torch's `clip_grad_norm_`; with `zero`, call `zero.clip_grad_norm_` instead |
# | bfloat16 | `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)` |
# | gradient accumulation | `set_requires_gradient_sync(False)`: whole gradients, fewer reductions |
# | checkpoints | `torch.distributed.checkpoint` |
# | launch and restart | `torchrun --nproc-per-node 8 --max-restarts 3 train.py` |

# %% [markdown]
# ## When one rank gets a NaN
#
# Rank 1's loss was NaN. What did each process report?

# %%
for rank in range(2):
    print(f"rank {rank}:", results[rank]["nan"].partition(";")[0])

# %% [markdown]
# Both ranks report the same error, although rank 0's own loss was finite. If rank 1 had skipped the
# step alone, rank 0 would have waited for it in the next collective. The same happens when one rank
# has one more batch. So ranks decide **together**: whether a rank runs the next collective must
# never depend on its own data alone.

# %% [markdown]
# ### Exercise 13.3: one decision for all ranks
#
# About 15 minutes. In each round take one gradient from this rank's iterator `gradients`; another
# rank may have more. The first case that applies ends the round:
#
# - A rank has none left: all return the number of steps, without skipped rounds.
# - A gradient is not finite (inf, nan): all skip the round and send no gradient.
# - Otherwise: `weight -= lr *` the **mean** of the ranks' gradients, in place.
#
# `peer.most(number)` returns the maximum over ranks: call it once per round. `peer.sum(tensor)`
# returns the sum. Do not change gradients or their dtype.


# %%
def agreed_steps(peer, weight, gradients, lr):
    ### BEGIN SOLUTION
    steps = 0
    while True:
        gradient = next(gradients, None)
        mine = 2 if gradient is None else 0 if gradient.isfinite().all() else 1
        worst = peer.most(mine)
        if worst == 2:
            return steps
        if worst == 0:
            weight -= lr * peer.sum(gradient) / peer.ranks
            steps += 1
    ### END SOLUTION


# %%
agreed_steps = exercise("13.3", agreed_steps)


# %%
def steps_without_agreement(peer, weight, gradients, lr):
    """Each rank decides alone."""
    for gradient in gradients:
        if gradient.isfinite().all():
            weight -= lr * peer.sum(gradient) / peer.ranks


def two_ranks():
    rows = [1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]
    return [(torch.zeros(1), iter(torch.tensor(row).split(1)), 0.1) for row in rows]


arguments = two_ranks()
print("together:", in_turns(agreed_steps, arguments), end=" steps, ")
print(f"weight {arguments[0][0].item():.2f}")
arguments = two_ranks()
try:
    in_turns(steps_without_agreement, arguments)
except Stuck as stuck:
    print(fill(f"each rank alone: {stuck}", 96))
    print(f"weight of rank 0 before the hang: {arguments[0][0].item():.2f}")

# %% [markdown]
# The hang is not the worst part. −0.35 is −0.1 · 1 − 0.1 · (2 + 3)/2: rank 0's second gradient was
# averaged with rank 1's *third*, without any error. The agreement costs one value per round.
#
# ## When a rank is killed
#
# A killed process reports nothing. What did the other rank report, and which files did both write?

# %%
print(error_of_0.rpartition(": ")[0])  # omits the collective that rank 0 waited in
checkpoint = Path(temporary.name) / "checkpoint"
files = sorted(path.name for path in checkpoint.glob("*.distcp"))
print(f"in the checkpoint: {', '.join(files)}, one file per rank")

# %% [markdown]
# Rank 0 reports which rank is gone: a killed process's connections close. (For a rank that hangs,
# `joined` has a `timeout`.)
#
# A training run that lost a rank must continue, possibly with fewer ranks. But the files hold the
# shards of *two* ranks.

# %% [markdown]
# ### Exercise 13.4: shards of R ranks for R′ ranks
#
# About 12 minutes. `old` ranks wrote n elements, ⌈n/old⌉ each, padded with zeros at the end. Return
# the shard of rank `rank` of `new`: a tensor of ⌈n/new⌉ elements with its own memory, padded with
# zeros.
#
# `read(source, start, stop)` returns elements `start` to `stop` − 1 of the file of rank `source`.
# Read only your shard's elements, no padding, with at most one call per file. Even a shard of only
# padding has the files' dtype: `read(0, 0, 0)` returns an empty tensor of this dtype, and does not
# count.


# %%
def resharded(read, n, old, new, rank):
    ### BEGIN SOLUTION
    size, share = -(-n // old), -(-n // new)
    start, stop = min(rank * share, n), min((rank + 1) * share, n)
    parts = [read(0, 0, 0)]
    for source in range(old):
        first, last = max(start, source * size), min(stop, (source + 1) * size)
        if first < last:
            parts.append(read(source, first - source * size, last - source * size))
    found = torch.cat(parts)
    return F.pad(found, (0, share - len(found)))
    ### END SOLUTION


# %%
resharded = exercise("13.4", resharded)

# %%
n, old, new = 26, 8, 3
shards = F.pad(torch.arange(1, n + 1), (0, -n % old)).chunk(old)
fig, axes = plt.subplots(figsize=(9, 1.9), layout="constrained")
colours = ("#4477aa", "#cc6677", "#999933")
for rank in range(new):
    ranges = []

    def read(source, start, stop, ranges=ranges):
        if start < stop:
            ranges.append((source, start, stop))
        return shards[source][start:stop]

    resharded(read, n, old, new, rank)
    axes.bar(9 * rank, 0.8, min(9, n - 9 * rank) - 0.1, align="edge", color=colours[rank])
    axes.bar(9 * rank, 0.8, 8.9, align="edge", fill=False, edgecolor="0.2")
    axes.text(9 * rank + 4.4, 0.4, f"rank {rank} of 3", ha="center", va="center", color="white")
    for source, start, stop in ranges:
        at, length = 4 * source + start, stop - start
        axes.bar(at + 0.05, 0.8, length - 0.1, 1.6, align="edge", color=colours[rank])
for source in range(old):
    axes.bar(4 * source, 1.0, 3.95, 1.5, align="edge", fill=False, edgecolor="0.2")
    axes.text(4 * source + 2, 2.75, f"file {source}", ha="center", fontsize=9)
axes.set(xlim=(-0.5, 32.5), ylim=(-0.1, 3.2))
axes.set_title("26 elements, from eight files to three ranks (white: padding)")
_ = axes.axis("off")

# %% [markdown]
# ## Resume
#
# The library reshards weights and both moments of AdamW, with torch's distributed checkpoint. Two
# ranks in stage 2 wrote the checkpoint. This notebook resumes from it as **one** rank, in stage 1,
# with both micro-batches of each step. Compare it with the uninterrupted run of two processes.

# %%
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
zero = processes.shard(*make_model(), 1, overlap=False)
known = zero.load(checkpoint)
resumed = train(zero, known["done"], STEPS)
dist.destroy_process_group()
temporary.cleanup()
whole_run, never_killed = results[0]["losses"], results[0]["weights"]
print(f"{KILLED_IN} steps done, {known['done']} in the checkpoint: one step is repeated")
print("losses equal bit for bit:", known["losses"] + resumed == whole_run)
weights = dict(zero.model.named_parameters())
print(
    "weights equal bit for bit:", all(torch.equal(weights[n], w) for n, w in never_killed.items())
)

# %%
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.plot(range(STEPS), whole_run, linewidth=6, color="#c9c9d0", label="two ranks, never killed")
axes.plot(range(known["done"]), known["losses"], "o-", color="#4477aa", label="two ranks, saved")
axes.plot(range(known["done"], STEPS), resumed, "s-", color="#cc6677", label="one rank, resumed")
axes.axvline(KILLED_IN - 0.5, color="0.3", linestyle=":")
axes.text(KILLED_IN - 0.45, max(whole_run), "rank 1 is killed", va="top")
axes.set(xlabel="step", ylabel="loss in nats", title="Loss of each step")
axes.legend(frameon=False, loc="lower left")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Other ways to split a model
#
# ZeRO shards what a rank *holds*, but every rank still computes whole blocks. Two other ways split
# the computation:
#
# - **Tensor parallel**, t ranks: each has 1/t of every matrix of a block. The outputs of attention
#   and of the MLP are sums of t parts: one all-reduce each. In backward the gradients of their
#   *inputs* are sums of t parts: two more all-reduces.
# - **Pipeline parallel**, p ranks (*stages*): each has up to ⌈L/p⌉ of L blocks. It sends outputs to
#   the next stage, and gradients to the previous one.

# %% [markdown]
# With d data-parallel ranks, there are t · p · d GPUs. Each way sends different tensors:
#
# | | tensors sent | how often |
# | --- | --- | --- |
# | tensor | an activation, or its gradient, in four all-reduces per block | every micro-batch |
# | pipeline | an activation, or its gradient, to each neighbor | every micro-batch |
# | data | the rank's gradients, then its updated weights | once per step |

# %% [markdown]
# An activation has tokens · width elements (width: the hidden size). An all-reduce is a
# reduce-scatter and an all-gather. After it, each of a stage's t ranks has the whole activation,
# and sends all of it to one rank of the next stage.

# %% [markdown]
# ### Exercise 13.5: tensor × pipeline × data, per rank
#
# About 20 minutes. Return four byte counts, each the maximum over all ranks: what a rank **holds**
# (weights + gradients + optimizer state), and what it **sends** per step for tensor, pipeline and
# data.
#
# - `block` is the number of weights of a block; ignore embedding and head. A rank has its blocks'
#   weights divided by `tensor`, rounded down.
# - Optimizer state has 12 bytes per weight, other tensors 2 bytes per element.
# - Data parallel uses ZeRO stage 1; round shards up.
# - Per step, each model copy runs `k` micro-batches of `tokens` tokens.


# %%
def bytes_per_rank(block, layers, width, tensor, pipeline, data, k, tokens):
    ### BEGIN SOLUTION
    blocks = -(-layers // pipeline)
    weights = blocks * block // tensor
    shard = -(-weights // data)
    activation = 2 * tokens * width
    held = 4 * weights + 12 * shard
    by_tensor = k * blocks * 4 * 2 * (tensor - 1) * (activation // tensor)
    by_pipeline = k * min(pipeline - 1, 2) * activation
    by_data = 2 * 2 * (data - 1) * shard
    return held, by_tensor, by_pipeline, by_data
    ### END SOLUTION


# %%
bytes_per_rank = exercise("13.5", bytes_per_rank)

# %% [markdown]
# ## At scale: 405B on 128 GPUs
#
# Compare the split of the guess with others of the same 128 GPUs. All use ZeRO stage 1, bfloat16,
# and half a million tokens per step.

# %%
huge, MICRO_BATCHES, TOKENS = PRESETS["llama-3-405b"], 16, 8192
block = (huge.parameters - 2 * huge.vocab_size * huge.hidden_size - huge.hidden_size) // huge.layers


def gb_per_rank(tensor, pipeline, data):
    """Return what a rank holds and sends, in GB; the tokens per step are always the same."""
    k = 4 * MICRO_BATCHES // data
    shape = block, huge.layers, huge.hidden_size, tensor, pipeline, data, k, TOKENS
    return [n / 1e9 for n in bytes_per_rank(*shape)]


print(f"{'GB per rank':34}{'held':>7}{'sent: tensor':>14}{'pipeline':>10}{'data':>8}")
for split in ((8, 4, 4), (8, 1, 16), (1, 4, 32), (8, 16, 1), (32, 1, 4)):
    held, *sent = gb_per_rank(*split)
    print(f"{'tensor {} · pipeline {} · data {}'.format(*split):34}{held:7.1f}", end="")
    print(f"{sent[0]:14.1f}{sent[1]:10.1f}{sent[2]:8.1f}")

# %%
fig, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
black = (1, 2, 3)  # data, pipeline, tensor index of the black rank
held, *sent = gb_per_rank(8, 4, 4)
ways = {
    "tensor": "#4477aa", "pipeline": "#cc6677", "data": "#999933",
}  # fmt: skip
for data in range(4):
    for stage in range(4):
        for tensor in range(8):
            apart = [a != b for a, b in zip((tensor, stage, data), black[::-1], strict=True)]
            linked = sum(apart) == 1 and (not apart[1] or abs(stage - black[1]) == 1)
            colour = list(ways.values())[apart.index(True)] if linked else "#e4e4ea"
            x, y = 9.5 * data + tensor, stage
            axes.bar(x, 0.8, 0.85, y, color="black" if not any(apart) else colour)
    axes.text(9.5 * data + 3.5, -0.35, f"data {data}", ha="center")
axes.set_yticks([n + 0.4 for n in range(4)], [f"pipeline {n}" for n in range(4)])
axes.set(ylim=(6.2, -0.7), xticks=(), title="The black rank communicates with the colored ranks")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
for place, (way, gb) in enumerate(zip(ways, sent, strict=True)):
    axes.bar(13 * place, 0.5, 0.8, 4.6, color=ways[way])
    axes.text(13 * place + 0.8, 4.85, f"{way}: {gb:,.1f} GB per step", va="center", fontsize=11)
held_in_words = f"held per rank, at most: {held:.1f} GB of weights, gradients and optimizer state"
_ = axes.text(-0.4, 5.75, held_in_words, va="center", fontsize=11)

# %% [markdown]
# In the figure, a row of eight is one machine. Tensor parallel sends the most, in every block, and
# its ranks wait each time. So it belongs inside a machine, on its fast links. Pipeline parallel
# sends the least, so it can cross machines. But its stages idle: with k micro-batches, for
# (p − 1)/(k + p − 1) of the time. Data parallel sends once per step, and can overlap this with
# backward.

# %% [markdown]
# The other rows of the table (an H100 has 80 GB):
#
# - Pipeline 1 with tensor 8, or tensor 1 with pipeline 4: a rank holds far more than 80 GB.
# - Tensor 32 crosses four machines: it sends the most, over the slowest links.
# - Only pipeline 16 holds less than 80 GB. Its price: stages idle 15/79 = 19% of the time (one
#   copy runs all 64 micro-batches), instead of 3/19 = 16%.
#
# "Tensor 8, pipeline 4, data 4" holds 89.3 GB, so it needs fewer bytes per weight (Day 16).

# %% [markdown]
# ## Explain the gap

# %%
real, overlapped = results[0][3, False][0], results[0][3, True][0]
measured = {
    "differs_bytes": abs(real.peak_bytes - simulated[3].traces[0].peak_bytes),
    "overlap_more_percent": 100 * (overlapped.peak_bytes / real.peak_bytes - 1),
    "fsdp2_gathers_times": counts["c10d._allgather_base_"] / 3,
    "tensor_times": sent[0] / sent[2],
}
reveal("13.1", **measured)

# %% [markdown]
# - Real and simulated peaks do **not** differ.
# - Overlap costs one block's weights: much with two blocks, little with 32.
# - FSDP2 gathers each unit twice, for forward and for backward, as our stage 3 does.
# - Tensor parallelism sends activations for every block and micro-batch, data parallelism sends
#   only once per step.

# %% [markdown]
# ## On your GPU
#
# The same code with NCCL: two ranks on two GPUs, or one rank on one GPU.

# %%
ON_GPUS = """

def main():
    with processes.joined("nccl", timeout=60) as rank:
        torch.cuda.set_device(rank)
        model, optimizer = make_model()
        zero = processes.shard(model.to("cuda"), optimizer, 3)
        batches = [tuple(x.to("cuda") for x in batch) for batch in own_batches(0)]
        loss = zero.step(batches, sum_of_losses).loss
        return loss, torch.cuda.max_memory_allocated()
"""

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPUs"
if torch.cuda.is_available():
    gpus = min(2, torch.cuda.device_count())
    for rank, (loss, peak) in enumerate(run_ranks(SOURCE + ON_GPUS, gpus, timeout=120)):
        same = abs(loss - whole_run[0]) < 1e-4
        print(f"rank {rank} of {gpus}: loss equals the CPU's: {same}, peak {format_bytes(peak)}")
else:
    print("No GPU here, so this cell measures nothing.")

# %% [markdown]
# ## Rules on trial
#
# Yesterday you tested rule 22, "ZeRO-3 costs communication", on simulated ranks. How much did the
# two processes send? A *pass* is one reduce-scatter or all-gather over all Ψ weights: with two
# ranks, each sends Ψ/2 elements.

# %%
psi = sum(p.numel() for p in make_model()[0].parameters())
for stage in range(4):
    traffic = results[0][stage, False][1]
    calls = ", ".join(
        f"{count} × {what.kind.replace('_', '-')}"
        for what, count in sorted(traffic.calls.items())
        if what.payload != "numbers"
    )
    print(f"stage {stage}: {traffic.model_elements() / (psi / 2):.2f} passes ({calls})")

# %% [markdown]
# These are the simulation's passes, so rule 22 holds for processes too.

# %% [markdown]
# ## What you can do now
#
# | on a real rank | |
# | --- | --- |
# | bytes | equal to the simulation |
# | collectives | same order on all ranks, or all ranks hang |
# | overlap | begin early, wait late |
# | decisions | by the maximum over all ranks |
# | checkpoints | shards that any number of ranks can load |
#
# You can also read t · p · d: what a rank holds and sends, and which part needs the fastest links.
#
# Tomorrow: the GPU's memory is full, the host's is not.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens, on one GPU. There is nothing to shard, so the
# bill stays the same.

# %%
running_bill(13)

# %% [markdown]
# ## Sources
#
# - Rajbhandari et al. 2020: [ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models](https://arxiv.org/abs/1910.02054)
# - Zhao et al. 2023: [PyTorch FSDP: Experiences on Scaling Fully Sharded Data
#   Parallel](https://arxiv.org/abs/2304.11277)
# - Shoeybi et al. 2019: [Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
#   Parallelism](https://arxiv.org/abs/1909.08053)
# - Korthikanti et al. 2022: [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198)
# - PyTorch: [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)
