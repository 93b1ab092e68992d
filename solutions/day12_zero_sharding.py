# %% [markdown]
# # Day 12: Sharding with ZeRO
#
# **Eight GPUs hold eight copies of the same tensors. Must each GPU hold all of them?**
#
# Today you build all three stages of ZeRO from two collectives. Afterwards you can compute what
# each GPU holds and sends in each stage, and how many GPUs it takes until each holds nearly 4×
# (stage 1) or 8× (stage 2) less than without ZeRO.
#
# About 105 minutes, 75 of them for five exercises. You need a laptop: all ranks run in one process.
# Nothing is downloaded.

# %% [markdown]
# You can split this day in two; the second half begins with stage 3. As before: **guess**,
# **measure**, then **build** what explains the gap. In an exercise, replace `raise
# NotImplementedError` with your own lines; the cell below it checks them. If you are stuck, run
# `memlab hint 12.1` in a terminal. You can skip an exercise: the lesson then uses the reference.

# %% [markdown]
# ## The question
#
# In *data parallel* training each GPU, called a **rank**, runs the same model on its own part of
# the batch. The gradients of all ranks are averaged, and every rank takes the same optimizer step.
# R is the number of ranks; they are numbered from 0 to R − 1.
#
# The next cell simulates eight ranks: eight models, eight optimizers, real tensors. How many of
# their bytes are copies after a step?

# %%
from dataclasses import replace
from itertools import accumulate as running_sums

import matplotlib.pyplot as plt
import torch
from torch import nn

import memlab
from memlab import plot
from memlab.accumulation import accumulate
from memlab.course import exercise, guess, reveal, running_bill, verdict
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.monitoring.counters import counters_for
from memlab.train import combined
from memlab.units import format_bytes
from memlab.zero import model_state_bytes, one_rank, simulate

# %%
RANKS = 8
text = source_bytes("128 KiB")


def sum_of_losses(model, batch):
    tokens, targets = batch
    return model(tokens, targets) * targets.numel(), targets.numel()


def make_model():
    torch.manual_seed(0)
    model = GPT(replace(PRESETS["tiny"], layers=2))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


data = batches(text, 1, 32, seed=0)
zero = simulate(*make_model(), RANKS, stage=0)  # stage 0: nothing is sharded yet
_ = zero.step([next(data) for _ in range(RANKS)], sum_of_losses)

# %%
held = [
    [*rank.model.parameters(), *(x for s in rank.optimizer.state.values() for x in s.values())]
    for rank in zero.ranks
]
total = sum(x.nbytes for tensors in held for x in tensors)
same = all(torch.equal(a, b) for others in held[1:] for a, b in zip(held[0], others, strict=True))
print(f"weights and AdamW's state on eight ranks: {format_bytes(total)}")
print(f"all ranks equal: {same}; so {format_bytes(total // RANKS * 7)} are copies")

# %% [markdown]
# Now Llama 2 7B in bfloat16, with float32 master weights for Adam (Day 4). Each weight needs 2
# bytes, its gradient 2, and its optimizer state K = 12: the float32 copy, m and v, 4 bytes each.
# The plot's dark parts together are one copy of each element. (A GB is 10⁹ bytes.)

# %%
KINDS = {"weights": "parameters", "gradients": "gradients", "optimizer state": "optimizer_state"}
COLOURS = {name: plot.COLOURS[kind] for name, kind in KINDS.items()}
N = PRESETS["llama-2-7b"].parameters
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
start = 0
for (kind, colour), size in zip(COLOURS.items(), (2, 2, 12), strict=True):
    width = size * N / 1e9
    for rank in range(RANKS):
        axes.barh(rank, width, left=start, color=colour, alpha=0.25)
        axes.barh(rank, width / RANKS, left=start + rank * width / RANKS, color=colour)
    axes.text(start + width / 2, -0.75, kind, ha="center", color=colour, fontsize=9)
    start += width
axes.set(xlabel="GB per rank", ylabel="rank", ylim=(7.6, -1.3), yticks=range(RANKS))
axes.set_title(f"Each of 8 ranks holds {start:.0f} GB: 7 of the 8 copies are redundant")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# **ZeRO** (*zero redundancy optimizer*) removes the copies of **model states** (weights, gradients,
# optimizer state) in three stages. Stage 1 *shards* the optimizer state: each rank keeps one part.
# Stage 2 also shards the gradients, stage 3 also the weights. Stage 0 is plain data parallel.
# Activations are not copies: each rank has its own tokens.

# %% [markdown]
# ## Guess
#
# In stage 0 a rank holds 108 GB when backward ends. By what factor does each stage reduce this on
# eight ranks? By what factor does stage 3 increase the bytes that a rank sends in a step? (One
# guide says 4× for stage 1 and 8× for stage 2.)

# %%
### BEGIN SOLUTION
guess("12.1", stage_1_times=4, stage_2_times=8, stage_3_times=8, stage_3_sends_times=2)
### END SOLUTION
### BEGIN STUB
# guess("12.1", stage_1_times=..., stage_2_times=..., stage_3_times=..., stage_3_sends_times=...)
### END STUB

# %% [markdown]
# ## Two collectives
#
# Ranks exchange data only through a communicator. An operation that all ranks do together is a
# **collective**:
#
# - **reduce-scatter**: each rank has a whole tensor of R equal pieces; rank r gets piece r of the
#   sum, its **shard**
# - **all-gather**: each rank has a shard; all ranks get the whole tensor
# - **all-reduce**: all ranks get the whole sum. It is a reduce-scatter followed by an all-gather.
#
# Ψ is the number of weights, as in ZeRO's paper.


# %%
class Communicator:
    """Copies tensors between ranks, and counts the bytes that each rank sends."""

    def __init__(self, ranks):
        self.sent, self.sums = [0] * ranks, 0

    def send(self, source, target, tensor):
        self.sent[source] += tensor.nbytes
        return tensor.clone()  # on the target rank

    def sum(self, values):
        """Return the sum of one value per rank, on all ranks."""
        self.sums += 1
        return sum(map(float, values))


# %% [markdown]
# ### Exercise 12.1: reduce-scatter and all-gather
#
# About 15 minutes. `wholes[r]` and `shards[r]` are 1-D tensors on rank r. R divides the length of
# `wholes[r]`. Return a list: entry r is a new tensor on rank r, not a view. Do not change the
# arguments.
#
# - Combine tensors of two ranks only after `self.comm.send(source, target, tensor)`.
# - In each collective a rank sends at most R − 1 pieces.


# %%
class Collectives:
    def __init__(self, comm):
        self.comm = comm

    def reduce_scatter(self, wholes):
        ### BEGIN SOLUTION memlab.reference.collectives.Collectives.reduce_scatter
        shards = []
        for rank in range(len(wholes)):
            total = 0
            for source, whole in enumerate(wholes):
                piece = whole.chunk(len(wholes))[rank]
                if source != rank:
                    piece = self.comm.send(source, rank, piece)
                total = total + piece
            shards.append(total)
        return shards
        ### END SOLUTION

    def all_gather(self, shards):
        ### BEGIN SOLUTION memlab.reference.collectives.Collectives.all_gather
        wholes = []
        for rank in range(len(shards)):
            pieces = [
                x if source == rank else self.comm.send(source, rank, x)
                for source, x in enumerate(shards)
            ]
            wholes.append(torch.cat(pieces))
        return wholes
        ### END SOLUTION


# %%
Collectives = exercise("12.1", Collectives)


# %%
def all_reduce_through_rank_0(comm, wholes):
    """The naive all-reduce: rank 0 adds, and sends the sum to every rank."""
    total = sum([wholes[0], *(comm.send(s, 0, wholes[s]) for s in range(1, len(wholes)))])
    return [total, *(comm.send(0, target, total) for target in range(1, len(wholes)))]


wholes = [torch.ones(80_000) for _ in range(RANKS)]
naive, ours = Communicator(RANKS), Communicator(RANKS)
wanted = all_reduce_through_rank_0(naive, wholes)
collectives = Collectives(ours)
sums = collectives.all_gather(collectives.reduce_scatter(wholes))
print("same sums:", all(torch.equal(a, b) for a, b in zip(sums, wanted, strict=True)))
for name, comm in (("through rank 0", naive), ("two collectives", ours)):
    busiest = max(comm.sent) / wholes[0].nbytes
    print(f"{name:16} total {format_bytes(sum(comm.sent))}, busiest rank sends {busiest:.2f} × Ψ")

# %% [markdown]
# Both send the same bytes in total. But through rank 0, the busiest rank sends four times as much,
# and all other ranks wait for it. With two collectives, each rank sends **(R − 1)/R · Ψ** elements
# twice: less than 2 Ψ for any R.
#
# Production libraries send the pieces around a *ring*, from each rank to its neighbor. A ring sends
# the same bytes, and each rank sends to only one other rank.

# %% [markdown]
# ## Stage 1: shard the optimizer state
#
# After an all-reduce, every rank updates all weights. But after the reduce-scatter alone, each rank
# has one shard of the summed gradients. With its shard of m and v, it can update its shard of the
# weights. The all-gather then sends **updated weights** instead of gradients: the same bytes.
# %% [markdown]
# Three traps:
#
# - If R does not divide the number of weights, pad the last piece.
# - Clipping needs the norm of *all* gradients, but a rank has only its shard.
# - Send gradients and weights in their own dtype, bfloat16, not in float32.

# %% [markdown]
# ### Exercise 12.2: shard Adam's state
#
# About 20 minutes. `weights[r]` is rank r's flat tensor of n weights, equal on all ranks. In the
# constructor, keep for each rank r a float32 copy of piece r only, and its
# `torch.optim.AdamW([copy], lr=lr, foreach=False)`.
#
# In `step`, don't change `gradients[r]`, rank r's flat gradient. Reduce-scatter, then divide by R
# in float32. Clip like `clip_grad_norm_`: multiply by min(1, max_norm / (norm + 1e-6)). Call
# `self.comm.sum` once, for the norm. Write the updated weights, detached, into every `weights[r]`.
# Between steps, keep only 12 bytes per element of the piece, and AdamW's step count.


# %%
class ShardedAdam:
    def __init__(self, weights, comm, lr):
        self.weights, self.comm, self.ranks = weights, comm, len(weights)
        ### BEGIN SOLUTION memlab.reference.sharded_optimizer.ShardedAdam.__init__
        pieces = [self.padded(w).chunk(self.ranks)[rank] for rank, w in enumerate(weights)]
        copies = [piece.to(torch.float32, copy=True) for piece in pieces]
        self.shards = [nn.Parameter(copy) for copy in copies]
        self.optimizers = [torch.optim.AdamW([s], lr=lr, foreach=False) for s in self.shards]
        ### END SOLUTION

    def padded(self, x):
        """Pad x with zeros to a multiple of R."""
        ### BEGIN SOLUTION memlab.reference.sharded_optimizer.ShardedAdam.padded
        return nn.functional.pad(x, (0, -len(x) % self.ranks))
        ### END SOLUTION

    def step(self, gradients, max_norm):
        ### BEGIN SOLUTION memlab.reference.sharded_optimizer.ShardedAdam.step
        together = Collectives(self.comm)
        sums = together.reduce_scatter([self.padded(g) for g in gradients])
        for shard, total in zip(self.shards, sums, strict=True):
            shard.grad = total.float() / self.ranks
        norm = self.comm.sum(s.grad.square().sum() for s in self.shards) ** 0.5
        for shard, optimizer in zip(self.shards, self.optimizers, strict=True):
            shard.grad *= min(1, max_norm / (norm + 1e-6))
            optimizer.step()
            shard.grad = None
        stepped = [s.detach().to(self.weights[0].dtype) for s in self.shards]
        for w, whole in zip(self.weights, together.all_gather(stepped), strict=True):
            w.copy_(whole[: len(w)])
        ### END SOLUTION


# %%
ShardedAdam = exercise("12.2", ShardedAdam)

# %% [markdown]
# Now train with `ShardedAdam`. Each of four ranks has a tiny model; the text is torch's own source
# code. The gray curve is one rank with the whole optimizer state, on the mean of the same four
# gradients.


# %%
def gradient(model, batch):
    """Return the flat gradient of all weights, and the loss."""
    loss = model(*batch)
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat, loss.item()


def train(ranks, steps=7):
    """Return each step's mean loss of four batches: one per rank, or all four on one rank."""
    models = [make_model()[0] for _ in range(ranks)]
    flat = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]
    adam = ShardedAdam(flat, Communicator(ranks), 3e-3)
    data, losses = batches(text, 4, 64, seed=1), []
    for _ in range(steps):
        results = [gradient(models[n % ranks], next(data)) for n in range(4)]
        losses.append(sum(loss for _, loss in results) / 4)
        gradients = [g for g, _ in results]
        adam.step(gradients if ranks == 4 else [sum(gradients) / 4], max_norm=1.0)
        for model, weights in zip(models, flat, strict=True):
            nn.utils.vector_to_parameters(weights, model.parameters())
    return losses


# %%
four_ranks, one_rank_alone = train(4), train(1)
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
steps = range(1, len(four_ranks) + 1)
axes.plot(steps, one_rank_alone, linewidth=5, color="#c9c9d0", label="one rank")
axes.plot(steps, four_ranks, linewidth=1.2, color="#00798c", label="four ranks, sharded AdamW")
axes.set(xlabel="step", ylabel="loss in nats", title="Loss on bytes of source code")
axes.legend(frameon=False)
difference = max(abs(a - b) for a, b in zip(four_ranks, one_rank_alone, strict=True))
print(f"the loss went down: {four_ranks[-1] < four_ranks[0]}", end="; ")
print(f"max difference below 1e-3: {difference < 1e-3}")

# %% [markdown]
# ## Stage 2: shard the gradients
#
# A rank updates one shard of the weights, so it needs only that shard of the summed gradients.
# When backward has computed a block's gradients, reduce them **immediately**: each rank keeps its
# shard and frees the rest.
#
# Weights sent together form a *unit*; in a transformer, a block. In Exercises 12.3 and 12.4 a model
# is a list of units, and a unit's weights are one flat tensor `w`. All ranks process the same unit,
# then the next.


# %%
def forward_of(w, x):
    """Run one unit. The flat w holds a matrix with one row per column of x."""
    return torch.tanh(x @ w.view(x.shape[1], -1))


def backward_of(w, x, dy):
    """Return the gradients of w (flat) and of x."""
    matrix = w.view(x.shape[1], -1)
    dz = dy * (1 - torch.tanh(x @ matrix) ** 2)
    return (x.T @ dz).flatten(), dz @ matrix.T


# %% [markdown]
# ### Exercise 12.3: shard the gradients
#
# About 12 minutes. You get `weights[rank][unit]`, `inputs[rank][unit]` (the unit's input in
# forward), and `dys[rank]`, the gradient of the last unit's output. R divides each unit's length.
#
# - Go through the units in reverse order.
# - Reduce one unit's gradients before you compute the next unit's.
# - Add shard r of the sum to `sums[r][unit]`, **in place**: it may hold the sums of earlier
#   micro-batches. (The step of Exercise 12.2 divides by R.)
# - Return a list: each rank's gradient of the first unit's input.
# - Change no other argument.


# %%
def add_gradients_(comm, weights, inputs, dys, sums):
    ### BEGIN SOLUTION memlab.reference.sharded_weights.add_gradients_
    dys, together = list(dys), Collectives(comm)
    for unit in reversed(range(len(weights[0]))):
        wholes = []
        for rank, dy in enumerate(dys):
            dw, dys[rank] = backward_of(weights[rank][unit], inputs[rank][unit], dy)
            wholes.append(dw)
        for rank, shard in enumerate(together.reduce_scatter(wholes)):
            sums[rank][unit] += shard
    return dys
    ### END SOLUTION


# %%
add_gradients_ = exercise("12.3", add_gradients_)

# %% [markdown]
# Stage 2 has a cost. Call one reduce-scatter or all-gather over all weights a **pass**. With k
# micro-batches, stage 1 accumulates whole gradients locally: 2 passes. Stage 2 stores no
# whole gradients, so it reduces in every micro-batch: k + 1 passes.
#
# ## Stage 3: shard the weights
#
# A rank needs a unit's whole weights only while the unit runs. So gather them for forward, free
# them, **gather them again** for backward, and free them. (Autograd would save them. So save only
# the unit's input, as in Day 5's checkpointing.)

# %% [markdown]
# ### Exercise 12.4: shard the weights
#
# About 18 minutes. `shards[rank][unit]` is the rank's shard of a unit, `xs[rank]` the first unit's
# input, and `dy_of(y)` returns the gradient of the last unit's output y. Run forward and backward.
# Add the gradients to `sums` as before. Change no other argument, and return nothing.
#
# - Gather each unit twice, and reduce its gradients once.
# - Hold at most one whole unit at a time: `del` its names, and lists that contain it, before you
#   gather the next.
# - `add_gradients_` also accepts lists of one unit.


# %%
def sharded_pass(comm, shards, xs, dy_of, sums):
    ### BEGIN SOLUTION memlab.reference.sharded_weights.sharded_pass
    together, inputs, units = Collectives(comm), [list(xs)], range(len(shards[0]))
    for unit in units:
        wholes = together.all_gather([mine[unit] for mine in shards])
        inputs.append([forward_of(w, x) for w, x in zip(wholes, inputs[-1], strict=True)])
        del wholes
    dys = [dy_of(y) for y in inputs[-1]]
    for unit in reversed(units):
        wholes = together.all_gather([mine[unit] for mine in shards])
        given = [[w] for w in wholes], [[x] for x in inputs[unit]]
        dys = add_gradients_(comm, *given, dys, [[mine[unit]] for mine in sums])
        del wholes, given
    ### END SOLUTION


# %%
sharded_pass = exercise("12.4", sharded_pass)

# %%
PARTS = 4
random = torch.Generator().manual_seed(0)
whole = [torch.randn(128 * 128, generator=random) / 12 for _ in range(16)]
shards = [[w.chunk(PARTS)[rank].clone() for w in whole] for rank in range(PARTS)]
sums = [[torch.zeros_like(s) for s in mine] for mine in shards]
xs, comm = [torch.randn(2, 128, generator=random) for _ in range(PARTS)], Communicator(PARTS)
trace = memlab.measure(lambda: sharded_pass(comm, shards, xs, lambda y: y, sums))
share = [n / PARTS / 2**10 for n in running_sums(event.bytes for event in trace.events)]
all_whole = 2 * sum(w.nbytes for w in whole) / 2**10
print(f"weights and gradients per rank: whole {all_whole:.0f} KiB, sharded", end=" ")
print(f"{all_whole / PARTS:.0f} KiB; peak of your pass {max(share):.0f} KiB")

# %%
teal, red, dark = "#00798c", "#cc6677", "0.25"
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", width_ratios=(1, 3))
bars = left.bar(
    ("all\nwhole", "your\npass", "all\nsharded"), (all_whole, max(share), all_whole / PARTS),
    color=(red, teal, dark),
)  # fmt: skip
left.bar_label(bars, fmt="{:,.0f}")
left.set(ylabel="KiB per rank", title="Weights and gradients", ylim=(0, 1.1 * all_whole))
first = next(n for n, event in enumerate(trace.events) if event.phase != "before")
right.plot(share[first:], color=teal, linewidth=1)
right.axhline(
    all_whole / PARTS, color=dark, linestyle="--", label="shards of weights and gradients"
)
right.set(xlabel="allocations and frees, in order", title="Stage 3: 16 units, forward and backward")
right.set(ylim=(500, 720), ylabel="KiB per rank")
right.legend(frameon=False, loc="upper left")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# On the right, each spike is one gathered unit: its weights and pieces in transit, in backward also
# its gradients. In forward the minimum rises, because the inputs are saved. (One process runs all
# four ranks, so the plot shows a quarter of its bytes.)
#
# ## Comparison with the library
#
# `memlab.zero.simulate` does the same for any model, with hooks. Run two steps of each stage on
# four ranks, with one batch per rank. Compare with one process that accumulates the same four
# gradients in the same order (`accumulate`, Day 3).


# %%
def micro_batches(count):
    data = batches(text, 1, 16, seed=2)
    return [next(data) for _ in range(count)]


def weights_of_one_process(steps=2):
    model, optimizer = make_model()
    for _ in range(steps):
        accumulate(micro_batches(PARTS), lambda b: sum_of_losses(model, b), model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def maximum(trace, category):
    return max(running_sums(e.bytes for e in trace.events if e.category == category))


# %%
exact, rank_0 = weights_of_one_process(), {}
kinds = ("parameters", "gradients", "optimizer_state")
psi = sum(p.numel() for p in make_model()[0].parameters())
print("rank 0, maximum of each kind".ljust(32) + "".join(f"{kind:>17}" for kind in kinds))
for stage in range(4):
    zero = simulate(*make_model(), PARTS, stage, meter=memlab.meter)
    for _ in range(2):
        step = zero.step(micro_batches(PARTS), sum_of_losses)
    equal = all(torch.equal(w, exact[name]) for name, w in zero.weights().items())
    trace = rank_0[f"stage {stage}"] = step.traces[0]
    row = "".join(f"{format_bytes(maximum(trace, kind)):>17}" for kind in kinds)
    sent = step.traffic[0].model_elements() / psi
    print(f"stage {stage}: equal bit for bit: {equal} {row}; sent {sent:.2f} × Ψ")

# %%
plot.breakdown(rank_0, title="Rank 0 of 4 at its peak (two tiny blocks, 16 tokens)")

# %% [markdown]
# The weights are bitwise equal to one process's: ZeRO is exact. Stages 0, 1 and 2 send 2 (R − 1)/R
# Ψ elements. Stage 3 sends 1.5 times as many.

# %% [markdown]
# Weights need 128.62 KiB. Why do gradients need more than this in stages 0 and 1, and more than a
# quarter of this in stages 2 and 3? Each gradient exists **twice** for a moment: as autograd's
# tensor, and in the flat send buffer.
#
# - Stages 0 and 1: all gradients (128.62 KiB), and the embedding's a second time (32 KiB).
# - Stages 2 and 3: one block's gradients twice (96.50 KiB), the other block's shard (12.06 KiB) and
#   a norm's gradient.

# %% [markdown]
# The table has each kind's own maximum; a bar shows one moment. Stage 3's peak is at the start of
# backward. The last block is gathered: 48.25 KiB in a flat buffer, and 48.25 KiB as weights. There
# are hardly any gradients yet. (The head and the embedding share one weight. The head's part of its
# gradient, 32 KiB, counts as a temporary until backward adds the embedding's part.)

# %% [markdown]
# Stage 0 peaks at 653.59 KiB, a single process at 580.84 KiB (measured in a test). Stage 0
# allocates a buffer for all gradients when the first one is computed. A single process allocates
# them one by one, while activations are freed.
#
# No stage reduces activations. For those, see Days 5 to 7 and 11.

# %% [markdown]
# ### Exercise 12.5: what a rank holds and sends
#
# About 10 minutes. Write formulas for stages 0 to 3. Return the tuple (held, sent), in bytes:
#
# - held: weights and gradients (2 bytes per element each), and the optimizer state (K bytes per
#   element), without gathered units
# - sent: what a rank sends in a step (2 bytes per element), with k micro-batches per rank
#
# A shard, held or sent, has ⌈Ψ/R⌉ elements, padding included. An unsharded tensor has Ψ.


# %%
def held_and_sent(parameters: int, ranks: int, stage: int, K: int, k: int) -> tuple[int, int]:
    ### BEGIN SOLUTION
    shard = -(-parameters // ranks)
    held = (
        2 * (shard if stage == 3 else parameters)
        + 2 * (shard if stage >= 2 else parameters)
        + K * (shard if stage >= 1 else parameters)
    )
    passes = (2, 2, k + 1, 3 * k)[stage]
    return held, 2 * passes * (ranks - 1) * shard
    ### END SOLUTION


# %%
held_and_sent = exercise("12.5", held_and_sent)

# %% [markdown]
# ## Explain the gap
#
# Check your formula with a dry run. `one_rank` runs only rank 0, on fake tensors, and counts the
# bytes that it holds and sends. The model is one block of Llama 2 7B with its embedding and head,
# in bfloat16 with float32 master weights.


# %%
def dry_run_of_rank_0(config, ranks, stage, tokens=2048, technique="plain", **settings):
    """Return the trace and the traffic of a step with one sequence."""
    with memlab.dry_run():
        model = GPT(config, dtype=torch.bfloat16)
        combined(technique).change_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        zero = one_rank(model, optimizer, ranks, stage, meter=memlab.meter, **settings)
        inputs = torch.zeros(1, tokens, dtype=torch.long)
        step = zero.step([(inputs, inputs)], lambda model, batch: (model(*batch), 1))
    return step.traces[0], step.traffic[0]


def after_backward(trace):
    """Return the bytes of weights, gradients and optimizer state at the end of backward."""
    last = max(n for n, event in enumerate(trace.events, 1) if event.phase == "backward")
    return sum(event.bytes for event in trace.events[:last] if event.category in kinds)


# %%
one_block = replace(PRESETS["llama-2-7b"], layers=1)
dry_runs = [dry_run_of_rank_0(one_block, RANKS, n, master_weights=True) for n in range(4)]
states = [after_backward(trace) for trace, _ in dry_runs]
formula = [held_and_sent(one_block.parameters, RANKS, n, K=12, k=1)[0] for n in range(4)]
error = max(abs(a / b - 1) for a, b in zip(states, formula, strict=True))
print(f"your formula matches the dry runs within 0.01%: {error < 1e-4}")
times = {f"stage_{stage}_times": states[0] / states[stage] for stage in (1, 2, 3)}
sends = dry_runs[3][1].model_bytes() / dry_runs[0][1].model_bytes()
reveal("12.1", **times, stage_3_sends_times=sends)

# %% [markdown]
# Stages 1 and 2 save less than 4× and 8×, because 4 of the 16 bytes per weight stay whole in stage
# 1, and 2 of 16 in stage 2. So 16/4 and 16/2 are **limits** for many ranks. How many ranks come
# within 10% of them?


# %%
def reduction(stage, ranks, K=12):
    """Return the factor by which a stage reduces the model states."""
    return round((4 + K) * N / held_and_sent(N, ranks, stage, K, 1)[0], 6)


enough = {}
for stage, limit in ((1, 4), (2, 8)):
    enough[stage] = next(r for r in range(1, 1000) if reduction(stage, r) >= 0.9 * limit)
    print(f"stage {stage}: {reduction(stage, 8):.2f}× less on 8 ranks, ", end="")
    print(f"{reduction(stage, enough[stage]):.1f}× less on {enough[stage]} ranks")

# %%
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
powers = [2**n for n in range(11)]
for stage, colour in zip((3, 2, 1), COLOURS.values(), strict=True):
    times = [reduction(stage, ranks) for ranks in powers]
    axes.plot(powers, times, "o-", color=colour, label=f"stage {stage}")
for stage, ranks in enough.items():
    axes.axhline(4 * stage, color="0.5", linestyle=":", linewidth=1)
    axes.plot(ranks, reduction(stage, ranks), "ks", markersize=6)
    axes.text(ranks * 1.08, 4 * stage - 2.0, f"{ranks} ranks")
axes.text(17.5, 15.6, "stage 3: R× less on R ranks", color=COLOURS["weights"])
axes.set_xscale("log", base=2)
axes.set_xticks(powers, map(str, powers))
axes.set_yticks((1, 4, 8, 16))
axes.set(ylim=(0, 17), xlabel="ranks", ylabel="reduction factor")
axes.set_title("16 bytes per weight: 4× and 8× are limits (squares: within 10%)")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## At scale: 7B on eight GPUs
#
# The next cell applies the formula to all 32 blocks, and runs eight blocks as a dry run:
# stage 3, one sequence of 2,048 tokens, every block checkpointed.

# %%
for stage in range(4):
    held_gb, sent_gb = (n / 1e9 for n in held_and_sent(N, RANKS, stage, K=12, k=1))
    print(f"7B, stage {stage}: each rank holds {held_gb:6.2f} GB and sends {sent_gb:.2f} GB")
eight = replace(PRESETS["llama-2-7b"], layers=8)
trace, traffic = dry_run_of_rank_0(eight, RANKS, 3, technique="checkpointing", master_weights=True)
held_gb, sent_gb = (n / 1e9 for n in held_and_sent(eight.parameters, RANKS, 3, K=12, k=1))
print(f"eight blocks: model states {held_gb:.3f} GB", end="; ")
print(f"peak {trace.peak_bytes / 1e9:.3f} GB, in {trace.peak_phase}")
for kind, count in trace.at_peak.items():
    if count > 1e5:
        print(f"  {kind:22}{count / 1e9:6.3f} GB")
print(f"sent {traffic.model_bytes() / 1e9:.2f} GB, formula {sent_gb:.2f} GB")

# %% [markdown]
# The peak is in the first block's backward. The 5.495 GB are:
#
# | tensors | sharded, GB | whole, GB |
# | --- | --- | --- |
# | weights | 0.470 | 0.929: first block, embedding and head |
# | m, v and float32 copies | 2.822 (the copies, 0.941, count as `parameters`) | |
# | gradients | 0.354: the other seven blocks | 0.533: the head and the first block's MLP |
# | temporaries, activations, buffers | | 0.387 |
#
# The embedding and head stay whole until backward ends. Gradients of the embedding and of the first
# block's attention don't exist yet.

# %% [markdown]
# The whole tensors don't grow with the number of blocks. With all 32 blocks the peak moves to the
# **optimizer step**: 15.50 GB (14.43 GiB), because AdamW needs float32 gradients (Day 4's 18 bytes
# per weight). Stages 1 and 2 peak at 40.43 and 27.29 GB. (Measured in a test.)

# %% [markdown]
# In a small model, activations, logits and whole units dominate, and they are not sharded. Compare
# stage 3 of the one-block model on 8 and on 64 ranks:

# %%
on_64, _ = dry_run_of_rank_0(one_block, 64, 3, master_weights=True)
peaks = {8: dry_runs[3][0].peak_bytes, 64: on_64.peak_bytes}
for ranks, peak in peaks.items():
    in_gb = held_and_sent(one_block.parameters, ranks, 3, K=12, k=1)[0] / 1e9
    print(f"{ranks:2} ranks: model states {in_gb:.2f} GB, peak {peak / 1e9:.2f} GB")

# %% [markdown]
# In production, use FSDP2: `fully_shard(block)` for each block, then `fully_shard(model)`. It
# shards each weight by rows and prefetches the next block, so communication and computation
# overlap. With `reshard_after_forward=False` it keeps the gathered weights until backward: two
# passes, but no longer stage 3. DeepSpeed has all three stages.
#
# ## On your GPU
#
# If you have a GPU, this cell prints for each stage whether the model states of one rank of eight
# fit on it.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    room = counters_for(gpu).capacity_bytes()
    for stage in range(4):
        states = held_and_sent(N, RANKS, stage, K=12, k=1)[0]
        fits = "fits" if states < room else "does not fit"
        print(f"7B, stage {stage}: model states {format_bytes(states)}, {fits} on this GPU")
else:
    print("No GPU here. No measurement is stored, because benchmarks/gpu.py uses a single GPU.")

# %% [markdown]
# ## Rules on trial
#
# One guide says for 8 GPUs, 7B, BF16: "no ZeRO 56 GB; ZeRO-1 31.5, ZeRO-2 19.25, ZeRO-3 7 GB". 56
# GB are 8 bytes per weight, so K is 4: m and v in bfloat16, without float32 copies. Check this with
# the formula, and with dry runs of the one-block model at the end of backward.

# %%
seven_b = [held_and_sent(7_000_000_000, RANKS, stage, K=4, k=1)[0] / 1e9 for stage in range(4)]
with_16 = [held_and_sent(7_000_000_000, RANKS, stage, K=12, k=1)[0] / 1e9 for stage in range(4)]
errors = []
for stage in (1, 2, 3):
    trace, _ = dry_run_of_rank_0(one_block, RANKS, stage)
    states = held_and_sent(one_block.parameters, RANKS, stage, K=4, k=1)[0]
    errors.append(abs(after_backward(trace) / states - 1))
at_8_bytes, at_16_bytes = (", ".join(f"{n:g}" for n in x) for x in (seven_b, with_16))

# %%
verdict(
    "21a",
    seven_b == [56, 31.5, 19.25, 7] and max(errors) < 0.001,
    f"8 bytes per weight: {at_8_bytes} GB (dry runs agree within 0.1%: {max(errors) < 0.001}); "
    f"16 bytes per weight: {at_16_bytes} GB",
    condition="at 8 bytes per weight (bfloat16 moments, no float32 copies), without activations",
)

# %%
at_8, at_1024 = (
    {K: " and ".join(f"{reduction(stage, ranks, K):.2f}×" for stage in (1, 2)) for K in (12, 4)}
    for ranks in (8, 1024)
)

# %%
verdict(
    "21b",
    reduction(1, 1024) > 3.6 and reduction(2, 1024) > 7.2,
    f"16 bytes per weight: {at_8[12]} on 8 GPUs, {at_1024[12]} on 1,024; "
    f"8 bytes per weight: {at_8[4]} on 8 GPUs, {at_1024[4]} on 1,024",
    condition="at 16 bytes per weight, as limits: within 10% "
    f"from {enough[1]} GPUs (stage 1) and {enough[2]} GPUs (stage 2) on",
)

# %%
by_states = reduction(3, 64) / reduction(3, 8)
verdict(
    "21c",
    abs(by_states - 8) < 0.01,
    f"from 8 to 64 GPUs: weights, gradients and optimizer state {by_states:.2f}× less; peak of "
    f"one 7B block with 2,048 tokens {peaks[8] / peaks[64]:.2f}× less",
    condition="for weights, gradients and optimizer state; activations, logits and the whole unit "
    "are not sharded",
)

# %% [markdown]
# What does ZeRO cost? Count the elements that rank 0 of four sends, with one and with three
# micro-batches per rank.

# %%
one_pass = (PARTS - 1) / PARTS * psi  # elements
passes = {}
for count in (1, 3):
    for stage in range(4):
        zero = simulate(*make_model(), PARTS, stage)
        step = zero.step(micro_batches(count * PARTS), sum_of_losses)
        passes[stage, count] = step.traffic[0].model_elements() / one_pass
one, three = (", ".join(f"{passes[stage, k]:.2f}" for stage in range(4)) for k in (1, 3))

# %%
verdict(
    "22",
    passes[3, 1] > 1.4 * passes[0, 1] and passes[3, 3] > 4 * passes[0, 3],
    f"passes of (R − 1)/R Ψ in stages 0 to 3: {one}; with 3 micro-batches: {three}",
    condition="with k micro-batches: 3k passes instead of 2; stage 1 costs nothing, stage 2 "
    "k + 1 passes",
)

# %% [markdown]
# ## What you can do now
#
# | stage | sharded | 16 bytes per weight become | passes, k micro-batches |
# | --- | --- | --- | --- |
# | 0 | nothing | 16 | 2 |
# | 1 | optimizer state | 4 + 12/R | 2 |
# | 2 | also gradients | 2 + 14/R | k + 1 |
# | 3 | also weights | 16/R, plus a whole unit | 3k |
#
# (In a pass each rank sends (R − 1)/R · Ψ elements.) You can say which tensors ZeRO shards, why
# stage 1 sends no more than stage 0, why stage 2 and gradient accumulation don't combine well, and
# which K a guide's sizes assume.
#
# Tomorrow: ZeRO on real processes.

# %% [markdown]
# ## The running bill
#
# The bill's step trains the 124M model on 8 × 640 tokens. It runs on one GPU, so there are no
# copies to remove, and the bill stays the same. How much of the model states would each of eight
# ranks hold? Weights and gradients are in bfloat16, and 8-bit Lion has K = 1.02.

# %%
small = PRESETS["124m"].parameters
for stage in range(4):
    states = model_state_bytes(small, ranks=RANKS, stage=stage, optimizer_bytes=1.02)
    print(f"stage {stage}, one of eight ranks: model states {format_bytes(states)}")

# %% [markdown]
# But 8-bit Lion stores one scale per quantization block, so a shard must end where a block ends.
# `simulate` does not support this and raises an error.

# %%
running_bill(12)

# %% [markdown]
# ## Sources
#
# - Rajbhandari et al. 2020: [ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models](https://arxiv.org/abs/1910.02054)
# - Zhao et al. 2023: [PyTorch FSDP: Experiences on Scaling Fully Sharded Data
#   Parallel](https://arxiv.org/abs/2304.11277)
# - PyTorch: [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html)
#
# The rules on trial are from:
#
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
# - "Day 19: Memory Optimization", author and address unknown
