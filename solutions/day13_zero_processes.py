# %% [markdown]
# # Day 13: ZeRO on real processes
#
# **Yesterday's ranks were lists in one process. Do real ones hold and send the same?**
#
# After today you have run ZeRO in two processes that metered themselves, can hide the wire behind
# backward, know what a NaN or a death at one rank does, can go on with other ranks than before, and
# can read "tensor 8, pipeline 4, data 4".
#
# About 115 minutes, 85 of them for five exercises. A laptop with two free cores will do; no GPU, no
# download.

# %% [markdown]
# The day divides well into two: the second begins when one rank sees a NaN. As before: you
# **guess**, **measure**, and **build** what explains the gap. In an exercise, put your own lines in
# place of `raise NotImplementedError`; the cell below it checks them. If you are stuck, type
# `memlab hint 13.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# A simulation knows everything: all ranks are in its lists, and nobody is late. A real rank is a
# **process**: it has its own memory, and of the others it has what comes by a socket. It can wait
# for ever, and it can die.
#
# So today's model, tiny as it is, is trained by two processes. Whatever they do stands in the next
# cells: each rank runs the same text, and only its number is another. (They talk by *gloo*, torch's
# way between CPUs; between GPUs it is NCCL.)


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
def a_model(dtype=torch.float32):
    torch.manual_seed(0)
    model = GPT(replace(PRESETS["tiny"], layers=2), dtype=dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def micro_batches(number):
    """Two of each step; rank r of R takes each R-th, from r on."""
    drawn = batches(source_bytes("128 KiB"), 1, 16, seed=number)
    return [next(drawn), next(drawn)]


def mine(number):
    return micro_batches(number)[dist.get_rank() :: dist.get_world_size()]


def sum_of_losses(model, batch):
    tokens, targets = batch
    return model(tokens, targets) * targets.numel(), targets.numel()


# %% [markdown]
# `processes.shard` takes over a model and its optimizer: this rank's part of them. Then
# `zero.step` is what Day 12's `simulate` did, for one rank. The meter is in the process, and sees
# what this one holds.
#
# With `overlap`, gradients travel while backward goes on, and the next unit comes while one is at
# work. That costs bytes: guess how many.


# %%
def metered(stage, overlap):
    """The second step: its trace, its traffic, its loss."""
    zero = processes.shard(*a_model(), stage, overlap=overlap)
    for number in range(2):
        batch = mine(number)
        with memlab.meter(zero.model, zero.optimizer) as running:
            step = zero.step(batch, sum_of_losses)
    return running.trace, step.traffic[0], step.loss


# %% [markdown]
# Beside it runs what people use: PyTorch's **FSDP2**, which is stage 3. `fully_shard` of each block
# makes it a unit, and `fully_shard(model)` one of all that is left, the *root*. `CommDebugMode`
# counts the collectives that it calls. (In float64, too, where nothing hides in the last digits.)


# %%
def with_fsdp2(dtype=torch.float32):
    model, _ = a_model(dtype)
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=True)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def fsdp2_step(model, optimizer, number):
    (batch,) = mine(number)
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def beside_fsdp2():
    """Two steps: the trace of the second, its collectives; and in float64 the weights."""
    made, exact = with_fsdp2(), with_fsdp2(torch.float64)
    for number in range(2):
        fsdp2_step(*exact, number)
        with memlab.meter(*made) as running, CommDebugMode() as called:
            fsdp2_step(*made, number)
    counts = {str(name): count for name, count in called.get_comm_counts().items()}
    whole = {name: p.full_tensor().detach() for name, p in exact[0].named_parameters()}
    return running.trace, counts, whole


# %% [markdown]
# Then things go wrong, on purpose. In `with_a_nan`, rank 1's loss is no number. `train` saves after
# every second step, each rank its own shards; and rank 1 is killed, as the system does it when
# memory runs out: no exception, no last word.


# %%
def with_a_nan(stage):
    """What this rank says."""
    zero = processes.shard(*a_model(), stage)

    def spoiled(model, batch):
        loss, tokens = sum_of_losses(model, batch)
        return (loss * float("nan") if dist.get_rank() == 1 else loss), tokens

    try:
        zero.step(mine(0), spoiled)
    except FloatingPointError as error:
        return str(error)


def train(zero, first, last, folder=None, killed_in=None):
    """The losses of steps first to last."""
    losses = []
    for number in range(first, last):
        if number == killed_in and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(zero.step(mine(number), sum_of_losses).loss)
        if folder and number % 2:
            zero.save(folder, done=number + 1, losses=losses)
    return losses


# %% [markdown]
# All of it in one start, for starting a process costs seconds. A rank that dies returns nothing,
# so each writes what it found to a file, as real runs write logs.


# %%
HOW = ((0, False), (1, False), (2, False), (2, True), (3, False), (3, True))  # stage, overlap
STEPS, KILLED_IN = 8, 5


def main(folder):
    with processes.joined("gloo", timeout=60) as rank:
        found = {how: metered(*how) for how in HOW}
        found["FSDP2"] = beside_fsdp2()
        found["nan"] = with_a_nan(stage=2)
        zero = processes.shard(*a_model(), 2, overlap=False)
        found["losses"] = train(zero, 0, STEPS)
        found["weights"] = {n: p.detach().clone() for n, p in zero.model.named_parameters()}
        torch.save(found, Path(folder) / f"found-{rank}.pt")
        zero = processes.shard(*a_model(), 2, overlap=False)
        train(zero, 0, STEPS, folder=Path(folder) / "checkpoint", killed_in=KILLED_IN)


# %% [markdown]
# ## Guess
#
# By how many bytes will a real rank's peak in stage 3 differ from the simulated one's, which is
# metered beside it? By how many percent is it higher with overlap? How many times in a step does
# FSDP2 gather each unit?

# %% [markdown]
# The last guess is about a 405B model on 128 GPUs, cut as "tensor 8, pipeline 4, data 4". *Tensor*:
# eight GPUs share every matrix, and add up their parts of activations in each block. *Data*: four
# such sets train on other tokens each, and add up their gradients once a step. How many times as
# much does a GPU send for tensor as for data?

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
# The text of the functions above goes to both. One of the two will be killed: `RanksFailed` says
# which, and what the other had to say. (It takes about half a minute.)

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
    *(a_model, micro_batches, mine, sum_of_losses, metered, with_fsdp2, fsdp2_step),
    *(beside_fsdp2, with_a_nan, train, main),
)
SOURCE = f"{IMPORTS}\nHOW, STEPS, KILLED_IN = {HOW}, {STEPS}, {KILLED_IN}\n\n"
SOURCE += "\n\n".join(map(getsource, PARTS))

temporary = tempfile.TemporaryDirectory()
try:
    run_ranks(SOURCE, 2, temporary.name, timeout=120)
except RanksFailed as failed:
    print(failed)
    said_by_0 = failed.errors[0]

# %%
found = [torch.load(f"{temporary.name}/found-{r}.pt", weights_only=False) for r in range(2)]
simulated = {}
for stage in range(4):
    zero = simulate(*a_model(), 2, stage, meter=memlab.meter)
    for number in range(2):
        step = zero.step(micro_batches(number), sum_of_losses)
    simulated[stage] = step
    real = [found[rank][stage, False] for rank in range(2)]
    same_bytes = all(
        (trace.peak_bytes, trace.at_peak, trace.at_end)
        == (other.peak_bytes, other.at_peak, other.at_end)
        for (trace, _, _), other in zip(real, step.traces, strict=True)
    )
    same_wire = [traffic for _, traffic, _ in real] == list(step.traffic)
    print(f"stage {stage}: peaks {[format_bytes(t.peak_bytes) for t, _, _ in real]}", end="; ")
    print(f"bytes equal {same_bytes}, wire equal {same_wire}, loss", real[0][2] == step.loss)

# %%
NAMES = {
    "parameters": "weights", "gradients": "gradients", "optimizer_state": "optimizer's state",
    "activations": "activations",
}  # fmt: skip
fig, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for stage in range(4):
    bars = {f"process {rank}": found[rank][stage, False][0] for rank in range(2)}
    bars["simulated"] = simulated[stage].traces[0]
    for place, (who, trace) in enumerate(bars.items(), 4 * stage):
        start = 0
        for kind, name in NAMES.items():
            size = trace.at_peak.get(kind, 0) / 2**10
            label = None if place else name
            axes.barh(place, size, left=start, color=plot.COLOURS[kind], label=label)
            start += size
        whole = trace.peak_bytes / 2**10
        label = None if place else "the rest"
        axes.barh(place, whole - start, left=start, color="#c9c9d0", label=label)
        axes.text(whole + 8, place, who, va="center", fontsize=8)
axes.set_yticks([1, 5, 9, 13], [f"stage {stage}" for stage in range(4)])
axes.set(xlabel="KiB", title="At the peak of a step: each process by its own meter")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
_ = axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.18))

# %% [markdown]
# Equal to the byte, each kind of them, at the peak and at the end; equal calls on the wire; and the
# loss bit for bit. So what Day 12 says of ranks it says of processes. (Two ranks: a sum of two has
# one order. A sum of more can be added up in several, and its last bit may differ.)
#
# *Not* on the meter is what torch does not allocate as tensors: gloo's own copies, the libraries,
# on a GPU its context (Day 2).

# %% [markdown]
# Why does stage 3 peak higher than stage 2 here? While backward begins, the root (embedding and
# last norm) and a block are whole beside the shards, and of two tiny blocks that is more than all
# weights. With many blocks, as in Day 12, one block is little.

# %% [markdown]
# ## A ring
#
# Yesterday a rank sent to any other. Sockets and cables are fewer: a **ring** has one to the next
# rank, and one from the last. And a program is now *one* rank's: no list has all of them.
#
# `in_turns(program, given)` runs a program as R ranks in this process, one at a time. `peer` has
# `rank`, `ranks`, `send(numbers)` to the next rank (after the last comes 0), and `receive()` from
# the one before, which waits. Where all wait, it says so: it never hangs.


# %%
def two_ways(peer, polite):
    if polite:  # after you!
        return peer.receive() + peer.rank
    peer.send(torch.tensor(10 * peer.rank))
    return int(peer.receive())


print(in_turns(two_ways, [(False,)] * 3))
try:
    in_turns(two_ways, [(True,)] * 3)
except Stuck as stuck:
    print(fill(str(stuck), 96))

# %% [markdown]
# ### Exercise 13.1: reduce-scatter on a ring
#
# About 18 minutes. `whole` is this rank's, 1-D, and R divides its length: return piece `peer.rank`
# of the sum over all ranks, as a tensor of its own. Each rank sends R − 1 messages, of a piece
# each. What it was given stays as it is.


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
for ranks in (2, 8, 64):
    peers = []
    got = in_turns(ring_reduce_scatter, [(torch.ones(6400),)] * ranks, peers=peers)
    sent = [number for event, number in peers[0].events if event == "send"]
    print(f"{ranks:2} ranks: {len(sent):2} messages of {format_bytes(sent[0]):>9}", end=", ")
    print(f"{sum(sent) / 25_600:.2f} × Ψ; sums right {all((x == ranks).all() for x in got)}")

# %% [markdown]
# (R − 1)/R Ψ, as by Day 12's formula. But there are R − 1 messages, one after the other, and each
# takes its time to set out, however short it is. So small gradients are laid end to end in one flat
# tensor, a *bucket*, and sent as one.
#
# ## Hide it
#
# Backward makes the last block's gradients first, and has much to do after that. Meanwhile a bucket
# can travel: **begin** a sum, go on, and **wait** only when its place is needed.

# %% [markdown]
# ### Exercise 13.2: buckets that travel while backward goes on
#
# About 20 minutes. `made` yields (name, gradient); `buckets`, lists of names, stays as it is.
# `peer.begin(flat)` begins a sum over ranks; `.wait()` of what it gives is the sum. Return the
# sums.
#
# - Begin a bucket with its last gradient, flat, in the order of its names.
# - Begin them in the list's order, even if a later one is complete before.
# - At most two are on their way: just before a third begins, wait for the older.
# - Keep nothing that was sent: no gradient, no copy, no name for `flat`.


# %%
def reduce_in_buckets(peer, made, buckets):
    ### BEGIN SOLUTION
    there, way, sums, left = {}, [], [], list(buckets)
    for name, gradient in made:
        there[name] = gradient
        del gradient
        while left and all(n in there for n in left[0]):
            if len(way) == 2:
                sums.append(way.pop(0).wait())
            way.append(peer.begin(torch.cat([there.pop(n).flatten() for n in left.pop(0)])))
    return sums + [work.wait() for work in way]
    ### END SOLUTION


# %%
reduce_in_buckets = exercise("13.2", reduce_in_buckets)


# %%
class Impatient:
    """A peer whose sums are waited for as soon as they are begun."""

    def __init__(self, peer):
        self.peer = peer

    def begin(self, flat):
        self.total = self.peer.begin(flat).wait()
        return self

    def wait(self):
        return self.total


# %%
def events_of(peer_of):
    """What rank 0 does with eight gradients, in its order."""

    def program(peer):
        def made():
            for name in "hgfedcba":
                peer.events.append(("made", name))
                yield name, torch.ones(1000)

        reduce_in_buckets(peer_of(peer), made(), [[*pair] for pair in ("hg", "fe", "dc", "ba")])
        return peer.events

    return in_turns(program, [(), ()])[0]


# %%
fig, both = plt.subplots(2, 1, figsize=(9, 3.8), layout="constrained", sharex=True)
ways = {"Wait at once": Impatient, "Begin, go on, wait late: yours": lambda peer: peer}
for axes, (title, peer_of) in zip(both, ways.items(), strict=True):
    now, there = 0, []  # when the wire has brought each bucket: it takes as long as two gradients
    waited = 0
    for event, name in events_of(peer_of):
        if event == "made":
            axes.barh(0, 0.94, left=now, color="#4477aa")
            axes.text(now + 0.47, 0, name, ha="center", va="center", color="white", fontsize=9)
            now += 1
        if event == "begin":
            start = max([now, *there])
            axes.barh(1, 1.94, left=start, color="#999933")
            axes.text(start + 0.97, 1, f"bucket {len(there)}", ha="center", va="center", fontsize=8)
            there.append(start + 2)
        if event == "wait":
            now, waited = max(now, there[waited]), waited + 1
    axes.axvline(now, color="0.3", linestyle=":")
    axes.text(now + 0.1, 0.5, f"done: {now}", va="center")
    axes.set(yticks=(0, 1), yticklabels=("backward makes", "on the wire"), title=title)
    axes.set(xlim=(-0.2, 18), xticks=range(0, 17, 2))
    axes.spines[["top", "right"]].set_visible(False)
_ = both[1].set_xlabel("if a bucket travels as long as two gradients are made")

# %% [markdown]
# The events are your function's; the lengths are drawn as if a bucket travels for as long as two
# gradients are made. Wait at once, and backward stands still meanwhile. Wait late, and all travel
# but the last is hidden. And there may be two, so that the next stands ready when the first has
# come.
#
# The price is memory: a second bucket. Stage 3 does it with weights, too: the next unit is gathered
# while one is at work.
#
# What did the two processes pay, by their own meters?


# %%
block = sum(p.nbytes for p in a_model()[0].blocks[1].parameters())
print(f"a block's weights, or their gradients: {block:,} bytes")
for stage in (2, 3):
    (plain, one, _), (hidden, other, _) = (found[0][stage, overlap] for overlap in (False, True))
    more = hidden.peak_bytes - plain.peak_bytes
    print(f"stage {stage}: {more:,} bytes more at the peak with overlap;", end=" ")
    print(f"collectives and bytes sent equal: {one == other}")

# %% [markdown]
# In stage 3 exactly one block: the first block's weights are gathered while the second, which comes
# first in backward, is still at work. In stage 2 nothing: two buckets are there together, too, but
# not at the moment of the peak.

# %% [markdown]
# ## FSDP2 beside it

# %%
trace, counts, whole = found[0]["FSDP2"]
ours = found[0][3, False][1]
for kind, name in (("all_gather", "_allgather_base_"), ("reduce_scatter", "_reduce_scatter_base_")):
    called = sum(n for what, n in ours.calls.items() if what.kind == kind)
    print(f"{kind:15} ours {called}, FSDP2 {counts[f'c10d.{name}']}")
zero = simulate(*a_model(torch.float64), 2, 3)
for number in range(2):
    _ = zero.step(micro_batches(number), sum_of_losses)
furthest = max((w - whole[name]).abs().max().item() for name, w in zero.weights().items())
print(f"weights after two steps: max difference below 1e-12: {furthest < 1e-12}")
for kind in ("parameters", "optimizer_state"):
    held = (found[0][3, False][0].at_end[kind], trace.at_end[kind])
    print(f"{kind} between steps: ours {held[0]:,} bytes, FSDP2 {held[1]:,}")
all_weights = sum(p.nbytes for p in a_model()[0].parameters())
at_once = trace.at_peak["inputs"] >= all_weights  # gathered ones are no parameters of the optimizer
print(f"at FSDP2's peak, in {trace.peak_phase}, all weights are whole: {at_once}")
ratio = trace.peak_bytes / found[0][3, True][0].peak_bytes
print(f"its peak is 1.1 to 1.4 times as high as ours with overlap: {1.1 < ratio < 1.4}")

# %% [markdown]
# The same shards, collectives and weights. The 68 bytes more are Adam's step counters: FSDP2 has
# one for each weight, ours one for each unit. FSDP2 gathers a block ahead in backward, and here are
# only two blocks: with the root, *all* weights are whole at its peak. With 32 blocks, one ahead is
# 3 % of them. (The exact peak differs by some KiB from run to run, so only its range is printed.)

# %% [markdown]
# What to call in production:
#
# | stage | call |
# | --- | --- |
# | 0 | `DistributedDataParallel`: buckets of 25 MiB, sent in backward |
# | 1 | with it `ZeroRedundancyOptimizer`, or DeepSpeed |
# | 2 | `fully_shard(block, reshard_after_forward=False)`: weights stay from forward on |
# | 3 | `fully_shard(block)`, for each, then `fully_shard(model)`; DeepSpeed |

# %% [markdown]
# And beside it:
#
# | for | call |
# | --- | --- |
# | clipping | torch's `clip_grad_norm_`; of `zero` that finds none: `zero.clip_grad_norm_` |
# | bfloat16 | `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)` |
# | k micro-batches | `model.set_requires_gradient_sync(False)`: whole gradients, fewer sums |
# | files | `torch.distributed.checkpoint` |
# | start, and start again | `torchrun --nproc-per-node 8 --max-restarts 3 train.py` |

# %% [markdown]
# ## When one rank sees a NaN
#
# Rank 1's loss was NaN. What did each process say?

# %%
for rank in range(2):
    print(f"rank {rank}:", found[rank]["nan"].partition(";")[0])

# %% [markdown]
# Both the same. That is no matter of course: rank 0's own loss was fine. Had rank 1 skipped the
# step by itself, who would have come to rank 0's next sum? It is no better at the end, when one
# rank has a batch more than another. So ranks decide **together**: what one does next must never
# depend on what it alone has seen.

# %% [markdown]
# ### Exercise 13.3: one decision of all ranks
#
# About 15 minutes. `gradients` iterates over this rank's; another rank may have more. A round takes
# one, and ends in one of three ways:
#
# - some rank has none left: all stop and return the number of steps;
# - a gradient is not finite (inf, nan): all skip the round (no step), none is sent;
# - else `weight -= lr *` the **mean** of the ranks' gradients: in place, at once.
#
# `peer.most(number)` is the greatest of all ranks' numbers: call it once a round.
# `peer.sum(tensor)` adds up over ranks. Leave gradients as they are.


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
def by_itself(peer, weight, gradients, lr):
    """Each rank decides alone."""
    for gradient in gradients:
        if gradient.isfinite().all():
            weight -= lr * peer.sum(gradient) / peer.ranks


def of_two_ranks():
    rows = [1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]
    return [(torch.zeros(1), iter(torch.tensor(row).split(1)), 0.1) for row in rows]


given = of_two_ranks()
print("together:", in_turns(agreed_steps, given), f"steps, to {given[0][0].item():.2f}")
given = of_two_ranks()
try:
    in_turns(by_itself, given)
except Stuck as stuck:
    print(fill(f"each by itself: {stuck}", 96))
    print(f"and until then to {given[0][0].item():.2f}")

# %% [markdown]
# Worse than the hang is what came before it: −0.35 is −0.1 · 1 and then −0.1 · (2 + 3)/2. Rank 0's
# second gradient was added to rank 1's *third*, and nobody complained. One number a round is cheap:
# it can travel with the number of tokens, which ranks tell each other anyway.
#
# ## When one dies
#
# A killed process says nothing. What did the other one say, and what is on the disk?

# %%
print(said_by_0.rpartition(": ")[0])  # and then what it waited for just then
checkpoint = Path(temporary.name) / "checkpoint"
files = sorted(path.name for path in checkpoint.glob("*.distcp"))
print(f"in the checkpoint: {', '.join(files)}, a file of each rank")

# %% [markdown]
# Rank 0 names who is gone. (If a rank hangs and does not die, its socket
# stays open: that is what the `timeout` of `joined` is for.)
#
# A run that lost a rank must go on, with fewer if need be. But the files hold shards of *two*
# ranks.

# %% [markdown]
# ### Exercise 13.4: shards of R ranks for R′ ranks
#
# About 12 minutes. n numbers were written by `old` ranks, ⌈n/old⌉ each, zeros behind the last.
# Return what rank `rank` of `new` has of them: ⌈n/new⌉ numbers, zeros behind. `read(source, start,
# stop)` gives numbers of the file of rank `source`, from `start` to before `stop` in that file.
# Read what you need of a file at once, and nothing else: no padding, no number twice. A rank can
# have zeros alone; they, too, have the files' dtype, as every read has, also an empty one.


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
    asked = []

    def read(source, start, stop, asked=asked):
        if start < stop:
            asked.append((source, start, stop))
        return shards[source][start:stop]

    got = resharded(read, n, old, new, rank)
    axes.bar(9 * rank, 0.8, min(9, n - 9 * rank) - 0.1, align="edge", color=colours[rank])
    axes.bar(9 * rank, 0.8, 8.9, align="edge", fill=False, edgecolor="0.2")
    axes.text(9 * rank + 4.4, 0.4, f"rank {rank} of 3", ha="center", va="center", color="white")
    for source, start, stop in asked:
        at, length = 4 * source + start, stop - start
        axes.bar(at + 0.05, 0.8, length - 0.1, 1.6, align="edge", color=colours[rank])
for source in range(old):
    axes.bar(4 * source, 1.0, 3.95, 1.5, align="edge", fill=False, edgecolor="0.2")
    axes.text(4 * source + 2, 2.75, f"file {source}", ha="center", fontsize=9)
axes.set(xlim=(-0.5, 32.5), ylim=(-0.1, 3.2))
axes.set_title("26 numbers, from eight files to three ranks (white: zeros behind the last)")
_ = axes.axis("off")

# %% [markdown]
# Each rank reads what has its colour, and nothing else: files 2 and 4 are read by two ranks each,
# file 7 by none.

# %% [markdown]
# ## Going on
#
# The library does this for weights and for both moments, by torch's distributed checkpoint: any
# number of ranks, any stage. Two ranks in stage 2 wrote it. This notebook goes on from it: as
# **one** rank, in stage 1, with both micro-batches of a step. Beside it stands the run of two
# processes that nobody killed.

# %%
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
zero = processes.shard(*a_model(), 1, overlap=False)
known = zero.load(checkpoint)
resumed = train(zero, known["done"], STEPS)
dist.destroy_process_group()
temporary.cleanup()
whole_run, never_killed = found[0]["losses"], found[0]["weights"]
print(f"{KILLED_IN} steps were done, {known['done']} saved: one is done again")
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
axes.set(xlabel="step", ylabel="loss in nats", title="Loss of each step's two batches")
axes.legend(frameon=False, loc="lower left")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Other ways to cut
#
# ZeRO cuts what a rank *holds*; every rank still computes with whole blocks. Two other ways cut the
# computing:
#
# - **tensor parallel**, t ranks: each has 1/t of every matrix of a block. What attention gives, and
#   what the MLP gives, is a sum of t parts: an all-reduce after each. In backward it is the
#   gradient of each one's *input* that is a sum of t parts: two all-reduces more;
# - **pipeline parallel**, p ranks in a line: each has ⌈L/p⌉ blocks, sends their output on, and its
#   gradient back.

# %% [markdown]
# Together with data parallel, d ranks: t · p · d GPUs. Each way sends something else:
#
# | | what | how often |
# | --- | --- | --- |
# | tensor | an activation, four all-reduces a block | every micro-batch |
# | pipeline | an activation to each neighbour in the line | every micro-batch |
# | data | the rank's gradients, then its stepped weights | once a step |

# %% [markdown]
# An activation here is what one block hands to the next: tokens · width numbers. After the
# all-reduce each of the t ranks has it whole. So t equal lines run side by side, and each rank
# sends all of it to the next rank of its own line.

# %% [markdown]
# ### Exercise 13.5: tensor × pipeline × data, of one rank
#
# About 20 minutes. Return four byte counts of the rank with most: what it **holds** in weights,
# gradients and Adam's state; and what it **sends** in a step for tensor, pipeline and data.
#
# - `block` is the number of weights of a block; embedding and head are left out. A rank has its
#   blocks' weights over `tensor`, rounded down.
# - Numbers have 2 bytes, Adam's state 12 bytes a weight.
# - Data parallel is ZeRO's stage 1; a shard is rounded up.
# - In a step `k` micro-batches of `tokens` tokens pass each line.


# %%
def of_a_rank(block, layers, width, tensor, pipeline, data, k, tokens):
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
of_a_rank = exercise("13.5", of_a_rank)

# %% [markdown]
# ## At scale: 405B on 128 GPUs
#
# One guide has it "tensor 8, pipeline 4, data 4, ZeRO-1". Here it is in bfloat16, with 16
# micro-batches of 8,192 tokens down each line: half a million tokens a step. Beside it, other ways
# to cut for the same 128 GPUs.

# %%
huge, K, TOKENS = PRESETS["llama-3-405b"], 16, 8192
block = (huge.parameters - 2 * huge.vocab_size * huge.hidden_size - huge.hidden_size) // huge.layers


def cut(tensor, pipeline, data):
    """In GB; all GPUs together see as many tokens, however they are cut."""
    k = 4 * K // data
    given = block, huge.layers, huge.hidden_size, tensor, pipeline, data, k, TOKENS
    return [n / 1e9 for n in of_a_rank(*given)]


print(f"{'tensor · pipeline · data':26}{'held':>8}{'sent: tensor':>16}{'pipeline':>10}{'data':>8}")
for ways in ((8, 4, 4), (8, 1, 16), (1, 4, 32), (8, 16, 1), (32, 1, 4)):
    held, *sent = cut(*ways)
    print(f"{' · '.join(map(str, ways)):26}{held:8.1f}{sent[0]:16.1f}{sent[1]:10.1f}{sent[2]:8.1f}")

# %%
fig, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
us = (1, 2, 3)  # data, pipeline, tensor: whose bytes are drawn
held, *sent = cut(8, 4, 4)
ways = {
    "tensor": "#4477aa", "pipeline": "#cc6677", "data": "#999933",
}  # fmt: skip
for data in range(4):
    for stage in range(4):
        for tensor in range(8):
            apart = [a != b for a, b in zip((tensor, stage, data), us[::-1], strict=True)]
            near = sum(apart) == 1 and (not apart[1] or abs(stage - us[1]) == 1)
            colour = list(ways.values())[apart.index(True)] if near else "#e4e4ea"
            x, y = 9.5 * data + tensor, stage
            axes.bar(x, 0.8, 0.85, y, color="black" if not any(apart) else colour)
    axes.text(9.5 * data + 3.5, -0.35, f"data {data}", ha="center")
axes.set_yticks([n + 0.4 for n in range(4)], [f"pipeline {n}" for n in range(4)])
axes.set(ylim=(6.2, -0.7), xticks=(), title="128 ranks: with whom the black one talks")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
for place, (way, number) in enumerate(zip(ways, sent, strict=True)):
    axes.bar(13 * place, 0.5, 0.8, 4.6, color=ways[way])
    axes.text(13 * place + 0.8, 4.85, f"{way}: {number:,.1f} GB a step", va="center", fontsize=11)
held_in_words = f"it holds {held:.1f} GB of weights, gradients and Adam's state, as much as any"
_ = axes.text(-0.4, 5.75, held_in_words, va="center", fontsize=11)

# %% [markdown]
# A row of eight is a machine: tensor parallel sends most, in every block, and somebody waits for it
# each time; so it stays where GPUs have their own fast links. Pipeline sends next to nothing, and
# goes between machines. Its price is waiting: with k micro-batches, (p − 1)/(k + p − 1) of the time
# a stage has nothing to do. Data sends once a step, and can hide it.

# %% [markdown]
# The other rows: without tensor parallelism, or without a line, a rank holds far too much; tensor
# parallel over four machines sends most by the slowest wires. A line of 16 holds least of states.
# But in the usual order, **one forward, one backward** (1F1B), a stage begins as many micro-batches
# as there are stages from it to the end, before the first comes back: the first of 16 keeps the
# activations of 16.

# %% [markdown]
# And 89.3 GB, at the rank with most, are more than a GPU of 80 GB has. It takes more ranks, or
# fewer bytes a number: that is for Day 16.

# %% [markdown]
# ## Explain the gap

# %%
real, (hidden, *_) = found[0][3, False][0], found[0][3, True]
measured = {
    "differs_bytes": abs(real.peak_bytes - simulated[3].traces[0].peak_bytes),
    "overlap_more_percent": 100 * (hidden.peak_bytes / real.peak_bytes - 1),
    "fsdp2_gathers_times": counts["c10d._allgather_base_"] / 3,
    "tensor_times": sent[0] / sent[2],
}
reveal("13.1", **measured)
bubble = (4 - 1) / (K + 4 - 1)
print(f"the line of four stages waits {bubble:.0%} of the time")

# %% [markdown]
# The gaps: **none** between a process and its simulation. With overlap, one block of two; of 32 it
# is far less. FSDP2 gathers for forward and again for backward, like yours. And tensor parallelism
# sends activations, k times and for every block, where data parallelism sends gradients, then
# weights, once.

# %% [markdown]
# ## On your GPU
#
# The same text, by NCCL: on two GPUs, or as one rank on one.

# %%
ON_GPUS = """

def main():
    with processes.joined("nccl", timeout=60) as rank:
        torch.cuda.set_device(rank)
        model, optimizer = a_model()
        zero = processes.shard(model.to("cuda"), optimizer, 3)
        batches = [tuple(x.to("cuda") for x in batch) for batch in mine(0)]
        loss = zero.step(batches, sum_of_losses).loss
        return loss, torch.cuda.max_memory_allocated()
"""

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPUs"
if torch.cuda.is_available():
    gpus = min(2, torch.cuda.device_count())
    for rank, (loss, peak) in enumerate(run_ranks(SOURCE + ON_GPUS, gpus, timeout=120)):
        same = abs(loss - whole_run[0]) < 1e-4
        print(f"rank {rank} of {gpus}: loss as on the CPU {same}, peak {format_bytes(peak)}")
else:
    print("No GPU here; and benchmarks/gpu.py, which measures one GPU, has no part for ranks.")

# %% [markdown]
# ## Rules on trial
#
# Rule 22, "ZeRO-3 costs communication", was tried yesterday on ranks in lists. What did the two
# processes send? In passes of (R − 1)/R Ψ, counted where torch's collectives are called.

# %%
psi = sum(p.numel() for p in a_model()[0].parameters())
for stage in range(4):
    traffic = found[0][stage, False][1]
    calls = ", ".join(
        f"{count} × {what.kind.replace('_', '-')}"
        for what, count in sorted(traffic.calls.items())
        if what.payload != "numbers"
    )
    print(f"stage {stage}: {traffic.model_elements() / (psi / 2):.2f} passes ({calls})")

# %% [markdown]
# As simulated: 2, 2, 2 and 3. It holds for processes, too. (These are the collectives that were
# asked for. How a library makes them of messages, and how much goes by the sockets, is not counted
# here.)

# %% [markdown]
# ## What you can do now
#
# | of a rank | is |
# | --- | --- |
# | bytes | those of the simulation |
# | collectives | in one order at all ranks, or all wait |
# | overlap | begin early, wait late |
# | decisions | by the worst of all ranks |
# | files | shards of n numbers, for any R′ |
#
# And you can read t · p · d: what a rank holds, what it sends to whom, and which needs the fast
# wire.
#
# Tomorrow: the GPU is full; the host is not.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens, on one machine with one GPU. Real processes
# hold what simulated ones do, so today's line is yesterday's.

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
