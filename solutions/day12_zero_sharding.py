# %% [markdown]
# # Day 12: Sharding with ZeRO
#
# **Eight GPUs, eight copies of the same thing. Must each hold all of it?**
#
# After today you can say what a rank holds and sends in each stage of ZeRO, have built all three
# from two collectives, and know from how many GPUs on "4 ×" and "8 ×" are true.
#
# About 105 minutes, 75 of them for five exercises. You need a laptop: all ranks are in one process.
# Nothing is downloaded.

# %% [markdown]
# The day divides well into two: the second begins with stage 3. As before: you **guess**,
# **measure**, and **build** what explains the gap. In an exercise, put your own lines in place of
# `raise NotImplementedError`; the cell below it checks them. If you are stuck, type `memlab hint
# 12.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# In *data parallel* training each GPU, called a **rank**, runs the same model on another part of
# the batch. The gradients of all ranks are added up, and every rank takes the same step. R is the
# number of ranks, which are counted from 0 to R − 1.
#
# Here are eight ranks, simulated: eight models, eight optimizers, real tensors. How many of their
# bytes differ after a step?

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


def a_model():
    torch.manual_seed(0)
    model = GPT(replace(PRESETS["tiny"], layers=2))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


drawn = batches(text, 1, 32, seed=0)
zero = simulate(*a_model(), RANKS, stage=0)
_ = zero.step([next(drawn) for _ in range(RANKS)], sum_of_losses)

# %%
held = [
    [*rank.model.parameters(), *(x for s in rank.optimizer.state.values() for x in s.values())]
    for rank in zero.ranks
]
total = sum(x.nbytes for of_rank in held for x in of_rank)
same = all(torch.equal(a, b) for others in held[1:] for a, b in zip(held[0], others, strict=True))
print(f"eight ranks hold {format_bytes(total)} of weights and Adam's state")
print(f"each the very same numbers: {same}; so {format_bytes(total // RANKS * 7)} are copies")

# %% [markdown]
# The same for Llama 2 7B, in bfloat16 with float32 copies of the weights for Adam (Day 4: 2 bytes
# a weight, 2 for its gradient, and K = 12 for the optimizer: copy, m and v). Dark is what would be
# enough: every number once, an eighth of each kind at each rank. GB are 10⁹ bytes today, as the
# guides have it.

# %%
KINDS = {"weights": "parameters", "gradients": "gradients", "optimizer's state": "optimizer_state"}
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
axes.set(xlabel="GB at a rank", ylabel="rank", ylim=(7.6, -1.3), yticks=range(RANKS))
axes.set_title(
    f"Eight times {start:.0f} GB: {8 * start:.0f} GB, and {7 * start:.0f} of them are copies"
)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# **ZeRO** (*zero redundancy optimizer*) takes copies away in three stages: the optimizer's state is
# in *shards* (stage 1), the gradients too (2), the weights too (3). Activations are no copies: each
# rank has its own tokens.
#
# ## Guess
#
# How many times less than 108 GB does one of eight ranks hold in each stage, when backward ends?
# And how many times as much as without ZeRO does it send in stage 3? (One guide says 4 × and 8 ×
# for stages 1 and 2.)

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
# Ranks reach each other by a wire alone. What they do on it together is a **collective**:
#
# - **reduce-scatter**: each rank has n numbers; rank r gets piece r of their sum;
# - **all-gather**: each rank has a piece; all get all pieces;
# - **all-reduce**: all get the whole sum. It is the first two, one after the other.
#
# What is sent are weights or their gradients. The number of weights is called Ψ in ZeRO's paper,
# and today here.


# %%
class Wire:
    """Carries numbers from rank to rank, and counts the bytes that each has sent."""

    def __init__(self, ranks):
        self.sent, self.sums = [0] * ranks, 0

    def send(self, source, target, numbers):
        self.sent[source] += numbers.nbytes
        return numbers.clone()  # which lies at the target

    def sum(self, numbers):
        """Of one number of each rank the sum, which all of them get."""
        self.sums += 1
        return sum(map(float, numbers))


# %% [markdown]
# ### Exercise 12.1: reduce-scatter and all-gather
#
# About 15 minutes. `wholes[r]` and `shards[r]` lie at rank r, are 1-D, and R divides their length.
# Give a list, what stands at place r lying at rank r, and leave alone what was given. Numbers of
# two ranks meet only by `self.wire.send(source, target, numbers)`. No rank sends more than (R − 1)
# pieces in a collective.


# %%
class Collectives:
    def __init__(self, wire):
        self.wire = wire

    def reduce_scatter(self, wholes):
        ### BEGIN SOLUTION memlab.reference.collectives.Collectives.reduce_scatter
        shards = []
        for rank in range(len(wholes)):
            total = 0
            for source, whole in enumerate(wholes):
                piece = whole.chunk(len(wholes))[rank]
                if source != rank:
                    piece = self.wire.send(source, rank, piece)
                total = total + piece
            shards.append(total)
        return shards
        ### END SOLUTION

    def all_gather(self, shards):
        ### BEGIN SOLUTION memlab.reference.collectives.Collectives.all_gather
        wholes = []
        for rank in range(len(shards)):
            pieces = [
                x if source == rank else self.wire.send(source, rank, x)
                for source, x in enumerate(shards)
            ]
            wholes.append(torch.cat(pieces))
        return wholes
        ### END SOLUTION


# %%
Collectives = exercise("12.1", Collectives)


# %%
def by_rank_0(wire, wholes):
    """The obvious all-reduce: one rank adds, and tells the others."""
    total = sum([wholes[0], *(wire.send(s, 0, wholes[s]) for s in range(1, len(wholes)))])
    return [total, *(wire.send(0, target, total) for target in range(1, len(wholes)))]


wholes = [torch.ones(80_000) for _ in range(RANKS)]
obvious, ours = Wire(RANKS), Wire(RANKS)
sums = by_rank_0(obvious, wholes)
together = Collectives(ours)
found = together.all_gather(together.reduce_scatter(wholes))
print("same sums:", all(torch.equal(a, b) for a, b in zip(sums, found, strict=True)))
for name, wire in (("by way of rank 0", obvious), ("two collectives", ours)):
    busiest = max(wire.sent) / wholes[0].nbytes
    print(f"{name:17} all send {format_bytes(sum(wire.sent))}, the busiest {busiest:.2f} × Ψ")

# %% [markdown]
# The same bytes in all, and four times as many on one rank's wire, for which all others wait. With
# Ψ weights, a collective sends **(R − 1)/R · Ψ** from each rank, and an all-reduce twice that: less
# than 2 Ψ, however many ranks there are.
#
# Production sends pieces round a *ring*, each rank to its neighbour: as many bytes, and no rank
# needs seven wires.

# %% [markdown]
# ## Stage 1: the optimizer's state
#
# After an all-reduce, every rank steps all weights. But an all-reduce is two halves. Between them
# each rank has a piece of the summed gradients: so it can step that piece, with its piece of m and
# v, and the second half gathers **stepped weights** in place of gradients. Nothing more is sent.
#
# %% [markdown]
# Three traps. If R does not divide the weights, the last piece is padded. To clip, one needs the
# norm of *all* gradients, of which a rank has an eighth. And weights travel as they are kept, in
# bfloat16.

# %% [markdown]
# ### Exercise 12.2: a shard of Adam
#
# About 20 minutes. `weights[r]`: all n weights, flat, the same at each rank r. Keep there a float32
# copy of piece r alone, and `torch.optim.AdamW([copy], lr=lr, foreach=False)`. In `step`,
# `gradients[r]` (flat) are rank r's: use their **mean**, clip it to max_norm (one call of
# `self.wire.sum` for the norm), and write the stepped weights into every `weights[r]`. What stays
# is 12 bytes for each element of the piece, and AdamW's step count.


# %%
class ShardedAdam:
    def __init__(self, weights, wire, lr):
        self.weights, self.wire, self.ranks = weights, wire, len(weights)
        ### BEGIN SOLUTION memlab.reference.sharded_optimizer.ShardedAdam.__init__
        pieces = [self.padded(w).chunk(self.ranks)[rank] for rank, w in enumerate(weights)]
        copies = [piece.to(torch.float32, copy=True) for piece in pieces]
        self.shards = [nn.Parameter(copy) for copy in copies]
        self.optimizers = [torch.optim.AdamW([s], lr=lr, foreach=False) for s in self.shards]
        ### END SOLUTION

    def padded(self, x):
        """x, with zeros behind it, so that R divides its length."""
        ### BEGIN SOLUTION memlab.reference.sharded_optimizer.ShardedAdam.padded
        return nn.functional.pad(x, (0, -len(x) % self.ranks))
        ### END SOLUTION

    def step(self, gradients, max_norm):
        ### BEGIN SOLUTION memlab.reference.sharded_optimizer.ShardedAdam.step
        together = Collectives(self.wire)
        sums = together.reduce_scatter([self.padded(g) for g in gradients])
        for shard, total in zip(self.shards, sums, strict=True):
            shard.grad = total.float() / self.ranks
        norm = self.wire.sum(s.grad.square().sum() for s in self.shards) ** 0.5
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
# It trains. Four ranks with a tiny model each, on torch's own source; the gray curve is one rank
# alone, with all of Adam, on the mean of the same four gradients.


# %%
def gradient(model, batch):
    """Of all weights, flat, and the loss."""
    loss = model(*batch)
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat, loss.item()


def learn(ranks, steps=7):
    """The mean loss of four batches in each step: a batch a rank, or all four at one."""
    models = [a_model()[0] for _ in range(ranks)]
    flat = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]
    adam, drawn, losses = ShardedAdam(flat, Wire(ranks), 3e-3), batches(text, 4, 64, seed=1), []
    for _ in range(steps):
        made = [gradient(models[n % ranks], next(drawn)) for n in range(4)]
        losses.append(sum(loss for _, loss in made) / 4)
        gradients = [g for g, _ in made]
        adam.step(gradients if ranks == 4 else [sum(gradients) / 4], max_norm=1.0)
        for model, weights in zip(models, flat, strict=True):
            nn.utils.vector_to_parameters(weights, model.parameters())
    return losses


# %%
four, alone = learn(4), learn(1)
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.plot(alone, linewidth=5, color="#c9c9d0", label="one rank")
axes.plot(four, linewidth=1.2, color="#00798c", label="four ranks, a quarter of Adam each")
axes.set(xlabel="step", ylabel="loss in nats", title="Loss on bytes of source")
axes.legend(frameon=False)
furthest = max(abs(a - b) for a, b in zip(four, alone, strict=True))
print(f"the loss went down: {four[-1] < four[0]}; max difference below 1e-3: {furthest < 1e-3}")

# %% [markdown]
# ## Stage 2: the gradients
#
# A rank steps one piece, and needs the summed gradients of that piece alone. So why keep all? When
# backward has made the gradients of a block, they are reduced **at once**: a shard is kept, the
# rest is freed.
#
# Weights that travel together are a *unit*: in a transformer, a block. Here a model is a list of
# units, each a flat w and two functions. In lists, all ranks go in step: the same unit at every
# rank, then the next.


# %%
def forward_of(w, x):
    """One unit: w, flat, is a matrix of (width of x, …)."""
    return torch.tanh(x @ w.view(x.shape[1], -1))


def backward_of(w, x, dy):
    """The gradients of w, flat, and of x."""
    matrix = w.view(x.shape[1], -1)
    dz = dy * (1 - torch.tanh(x @ matrix) ** 2)
    return (x.T @ dz).flatten(), dz @ matrix.T


# %% [markdown]
# ### Exercise 12.3: gradients in shards
#
# About 12 minutes. `weights[rank][unit]` and `inputs[rank][unit]` (what the unit was given in
# forward) are there, and of each rank `dys[rank]`, the gradient of the last unit's output. Go
# through all units, backwards. Of each one's gradients add rank r's piece of the sum over ranks to
# `sums[r][unit]`, **in place**: earlier micro-batches may be in it. (The mean is for the step.)
# Reduce the gradients of one unit before you compute those of the next. Return a list: each rank's
# gradient of the first unit's input. R divides every unit.


# %%
def add_gradients_(wire, weights, inputs, dys, sums):
    ### BEGIN SOLUTION memlab.reference.sharded_weights.add_gradients_
    dys, together = list(dys), Collectives(wire)
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
# The price: stage 1 could add up k micro-batches at home and reduce once. Stage 2 has no place for
# whole gradients, and reduces in every backward pass: k + 1 passes on the wire, not 2.
#
# ## Stage 3: the weights
#
# Last, the weights. A unit needs all of its own while it runs, and not before or after. So they are
# gathered for forward, freed, **gathered again** for backward, and freed. (Autograd would keep what
# it saved of them. As with Day 5's checkpoints, only the inputs are kept here.)

# %% [markdown]
# ### Exercise 12.4: weights in shards
#
# About 18 minutes. `shards[rank][unit]` is rank's piece of a unit, `xs[rank]` its input, and
# `dy_of(y)` gives the gradient of an output y. Run forward and backward; the gradients go into
# `sums` as before, and nothing is returned. Each unit is gathered twice and reduced once. At no
# time is more than one unit whole: `del` its names, and lists that it is in, before you gather the
# next. `add_gradients_` takes lists of one unit, too.


# %%
def sharded_pass(wire, shards, xs, dy_of, sums):
    ### BEGIN SOLUTION memlab.reference.sharded_weights.sharded_pass
    together, inputs, units = Collectives(wire), [list(xs)], range(len(shards[0]))
    for unit in units:
        wholes = together.all_gather([mine[unit] for mine in shards])
        inputs.append([forward_of(w, x) for w, x in zip(wholes, inputs[-1], strict=True)])
        del wholes
    dys = [dy_of(y) for y in inputs[-1]]
    for unit in reversed(units):
        wholes = together.all_gather([mine[unit] for mine in shards])
        given = [[w] for w in wholes], [[x] for x in inputs[unit]]
        dys = add_gradients_(wire, *given, dys, [[mine[unit]] for mine in sums])
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
xs, wire = [torch.randn(2, 128, generator=random) for _ in range(PARTS)], Wire(PARTS)
trace = memlab.measure(lambda: sharded_pass(wire, shards, xs, lambda y: y, sums))
share = [n / PARTS / 2**10 for n in running_sums(event.bytes for event in trace.events)]
all_whole = 2 * sum(w.nbytes for w in whole) / 2**10
print(f"at a rank: weights and gradients whole {all_whole:.0f} KiB, in shards", end=" ")
print(f"{all_whole / PARTS:.0f} KiB; at the peak of your pass {max(share):.0f} KiB")

# %%
teal, red, dark = "#00798c", "#cc6677", "0.25"
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", width_ratios=(1, 3))
bars = left.bar(
    ("all\nwhole", "your\npass", "all in\nshards"), (all_whole, max(share), all_whole / PARTS),
    color=(red, teal, dark),
)  # fmt: skip
left.bar_label(bars, fmt="{:,.0f}")
left.set(ylabel="KiB at a rank", title="Weights and gradients", ylim=(0, 1.1 * all_whole))
given = next(n for n, event in enumerate(trace.events) if event.phase != "before")
right.plot(share[given:], color=teal, linewidth=1)
right.axhline(all_whole / PARTS, color=dark, linestyle="--", label="shards of both")
right.set(xlabel="allocations and frees, in order", title="Stage 3: 16 units forward, and back")
right.set(ylim=(500, 720), ylabel="KiB at a rank")
right.legend(frameon=False, loc="upper left")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# On the right each tooth is a unit that is whole for a while: in forward its weights, in backward
# its gradients, too. (A rank's share is a quarter of what the meter sees, for one process runs all
# four. The line rises by the units' inputs, which are kept for backward.)
#
# ## Held against the library
#
# `memlab.zero.simulate` does the same with any model, by hooks. Four ranks, a batch each, two steps
# in each stage, against one process that adds up the same four gradients in the same order
# (`accumulate`, Day 3).


# %%
def micro_batches(count):
    drawn = batches(text, 1, 16, seed=2)
    return [next(drawn) for _ in range(count)]


def in_one_process(steps=2):
    model, optimizer = a_model()
    for _ in range(steps):
        accumulate(micro_batches(PARTS), lambda b: sum_of_losses(model, b), model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def most(trace, category):
    return max(running_sums(e.bytes for e in trace.events if e.category == category))


# %%
exact, ranks_of = in_one_process(), {}
kinds = ("parameters", "gradients", "optimizer_state")
psi = sum(p.numel() for p in a_model()[0].parameters())
print("the most at a time".ljust(30) + "".join(f"{kind:>17}" for kind in kinds))
for stage in range(4):
    zero = simulate(*a_model(), PARTS, stage, meter=memlab.meter)
    for _ in range(2):
        step = zero.step(micro_batches(PARTS), sum_of_losses)
    equal = all(torch.equal(w, exact[name]) for name, w in zero.weights().items())
    trace = ranks_of[f"stage {stage}"] = step.traces[0]
    row = "".join(f"{format_bytes(most(trace, kind)):>17}" for kind in kinds)
    sent = step.traffic[0].model_elements() / psi
    print(f"stage {stage}: equal bit for bit {equal}{row}; sent {sent:.2f} × Ψ")

# %%
plot.breakdown(ranks_of, title="Rank 0 of 4 at its peak: two tiny blocks, 16 tokens")

# %% [markdown]
# Not nearly equal: **equal**. It is no approximation. And 2 (R − 1)/R Ψ are sent in stages 0, 1 and
# 2, as much as without ZeRO; in stage 3 half as much again.

# %% [markdown]
# Why more gradients than weights, and in stages 2 and 3 more than a quarter? For a moment each is
# there **twice**: as autograd made it, and in the run of numbers that is sent. In stages 0 and 1,
# that adds the embedding's 32 KiB to 128.62. In stages 2 and 3 a block is there twice, 96.50 KiB,
# beside the other block's shard of 12.06 (and a norm).

# %% [markdown]
# A bar of the picture is one moment, and the table has each kind's own. Stage 3 peaks when backward
# begins: the last block is gathered, 48.25 KiB in a run and again as weights, and hardly a gradient
# is there. (The head's half of the tied embedding's gradient, 32 KiB, is a temporary until the
# other half is added to it.)

# %% [markdown]
# Less than what? Than stage 0, which makes room for all gradients with the first of them, as does
# torch's DistributedDataParallel. One process alone makes it by and by: when all gradients are
# there, activations are gone. It peaks at 580.84 KiB, not at 653.59.
#
# Activations no stage touches: they are what Days 5 to 7 and 11 are for.

# %% [markdown]
# ### Exercise 12.5: what a rank holds, and sends
#
# About 10 minutes. By formula, for each stage, 0 to 3: the bytes that a rank holds of weights and
# gradients (2 a number each) and of the optimizer's state (K a number); and the bytes that it sends
# in a step, 2 a number, with k micro-batches at each rank. A shard is ⌈Ψ/R⌉ numbers, for padding is
# held and sent, too. Return (held, sent).


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
# Measured by dry run: `one_rank` is rank 0 alone, on fake tensors, with the true bytes of what it
# holds and would send. One of Llama 2 7B's blocks, its embeddings and its head, in bfloat16 with
# float32 copies.


# %%
def a_rank(config, ranks, stage, tokens=2048, how="plain", **settings):
    """The trace of a step of one sequence, and what was sent."""
    with memlab.dry_run():
        model = GPT(config, dtype=torch.bfloat16)
        combined(how).change_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        zero = one_rank(model, optimizer, ranks, stage, meter=memlab.meter, **settings)
        inputs = torch.zeros(1, tokens, dtype=torch.long)
        step = zero.step([(inputs, inputs)], lambda model, batch: (model(*batch), 1))
    return step.traces[0], step.traffic[0]


def after_backward(trace):
    """Bytes of weights, gradients and optimizer's state when backward has ended."""
    last = max(n for n, event in enumerate(trace.events, 1) if event.phase == "backward")
    return sum(event.bytes for event in trace.events[:last] if event.category in kinds)


# %%
one_block = replace(PRESETS["llama-2-7b"], layers=1)
ran = [a_rank(one_block, RANKS, stage, master_weights=True) for stage in range(4)]
states = [after_backward(trace) for trace, _ in ran]
of_formula = [held_and_sent(one_block.parameters, RANKS, n, K=12, k=1)[0] for n in range(4)]
off = max(abs(a / b - 1) for a, b in zip(states, of_formula, strict=True))
print(f"your formula is within 0.01 %: {off < 1e-4}")
times = {f"stage_{stage}_times": states[0] / states[stage] for stage in (1, 2, 3)}
sends = ran[3][1].model_bytes() / ran[0][1].model_bytes()
reveal("12.1", **times, stage_3_sends_times=sends)

# %% [markdown]
# The gaps of stages 1 and 2: what is *not* in shards. 4 bytes a weight stay in stage 1, 2 in stage
# 2, on however many ranks. So 16/4 and 16/2 are **limits**: from how many ranks on are they true to
# 10 %?


# %%
def saved(stage, ranks, K=12):
    """How many times less than without ZeRO."""
    return round((4 + K) * N / held_and_sent(N, ranks, stage, K, 1)[0], 6)


enough = {}
for stage, limit in ((1, 4), (2, 8)):
    enough[stage] = next(r for r in range(1, 1000) if saved(stage, r) >= 0.9 * limit)
    print(f"stage {stage}: {saved(stage, 8):.2f} × on 8 ranks, ", end="")
    print(f"{saved(stage, enough[stage]):.1f} × on {enough[stage]}")

# %%
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
powers = [2**n for n in range(11)]
for stage, colour in zip((3, 2, 1), COLOURS.values(), strict=True):  # of what it shards
    times = [saved(stage, ranks) for ranks in powers]
    axes.plot(powers, times, "o-", color=colour, label=f"stage {stage}")
for stage, ranks in enough.items():
    axes.axhline(4 * stage, color="0.5", linestyle=":", linewidth=1)
    axes.plot(ranks, saved(stage, ranks), "ks", markersize=6)
    axes.text(ranks * 1.08, 4 * stage - 2.0, f"{ranks} ranks")
axes.text(17.5, 15.6, "stage 3 goes on: R × on R ranks", color=COLOURS["weights"])
axes.set_xscale("log", base=2)
axes.set_xticks(powers, map(str, powers))
axes.set_yticks((1, 4, 8, 16))
axes.set(ylim=(0, 17), xlabel="ranks", ylabel="times less than without ZeRO")
axes.set_title("16 bytes a weight: 4 × and 8 × are limits (squares: within 10 % of them)")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## At scale: seven billion on eight GPUs
#
# All 32 blocks by formula; eight of them by dry run (all would take four times as long): stage 3,
# one sequence of 2,048 tokens, every block checkpointed.

# %%
for stage in range(4):
    held_gb, sent_gb = (n / 1e9 for n in held_and_sent(N, RANKS, stage, K=12, k=1))
    print(f"7B, stage {stage}: a rank of eight holds {held_gb:6.2f} GB, and sends {sent_gb:.2f} GB")
eight = replace(PRESETS["llama-2-7b"], layers=8)
trace, traffic = a_rank(eight, RANKS, 3, how="checkpointing", master_weights=True)
held_gb, sent_gb = (n / 1e9 for n in held_and_sent(eight.parameters, RANKS, 3, K=12, k=1))
print(f"eight blocks: {held_gb:.3f} GB of states", end="; ")
print(f"peak {trace.peak_bytes / 1e9:.3f} GB, in {trace.peak_phase}")
for kind, count in trace.at_peak.items():
    if count > 1e5:
        print(f"  {kind:22}{count / 1e9:6.3f} GB")
print(f"sent {traffic.model_bytes() / 1e9:.2f} GB, by formula {sent_gb:.2f}")

# %% [markdown]
# What is there at the peak, the first block's backward? In **shards**: 0.470 GB of weights, 2.822
# for Adam (its float32 copies, 0.941, are counted with `parameters`), and 0.354, the gradients of
# seven blocks. **Whole**: 0.929 of weights, which is one block, and embedding and head, which stay
# until the end; and 0.533 of gradients, the head's and those of the block's MLP. The others are not
# made yet. With 0.387 of temporaries, activations and buffers that is 5.495.

# %% [markdown]
# What is whole does not grow with the blocks. With all 32 the peak is another: 15.50 GB while the
# rank **steps**, for there its gradients are float32 (Day 4's 18 bytes). Stages 1 and 2 peak at
# 40.43 and 27.29. (A test measures these; GB is not GiB: 15.50 GB are 14.43 GiB.)

# %% [markdown]
# Where there are few weights, one sees what R does not divide: activations, logits, whatever is
# whole. Stage 3 of the one block again, on 8 ranks and on 64:

# %%
many, _ = a_rank(one_block, 64, 3, master_weights=True)
peaks = {8: ran[3][0].peak_bytes, 64: many.peak_bytes}
for ranks, peak in peaks.items():
    in_gb = held_and_sent(one_block.parameters, ranks, 3, K=12, k=1)[0] / 1e9
    print(f"{ranks:2} ranks: states {in_gb:.2f} GB, peak {peak / 1e9:.2f} GB")

# %% [markdown]
# In production this is FSDP2: `fully_shard(block)` for each block, then `fully_shard(model)`. It
# cuts each weight by rows and gathers a block ahead, so that the wire works while the GPU does; its
# `reshard_after_forward=False` keeps the weights from forward on: two passes, and no stage 3.
# DeepSpeed has all three stages. Tomorrow both sides are real: processes, and FSDP2 beside yours.
#
# ## On your GPU
#
# One GPU has nobody to share with. Where there is one, this says which rank of eight would fit.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    room = counters_for(gpu).capacity_bytes()
    for stage in range(4):
        states = held_and_sent(N, RANKS, stage, K=12, k=1)[0]
        fits = "fits" if states < room else "does not fit"
        print(f"stage {stage} of 7B: {format_bytes(states)} of states, {fits} this {gpu.type}")
else:
    print("No GPU here; and what benchmarks/gpu.py measures is one GPU, which shares with nobody.")

# %% [markdown]
# ## Rules on trial
#
# One guide: 8 GPUs, 7B, BF16, "no ZeRO 56 GB; ZeRO-1 31.5, ZeRO-2 19.25, ZeRO-3 7 GB". 56 GB are 8
# bytes a weight, so K is 4: m and v in bfloat16, and no float32 copies. By formula, and by dry run
# of the one block: what is there when backward has ended.

# %%
seven_b = [held_and_sent(7_000_000_000, RANKS, stage, K=4, k=1)[0] / 1e9 for stage in range(4)]
with_16 = [held_and_sent(7_000_000_000, RANKS, stage, K=12, k=1)[0] / 1e9 for stage in range(4)]
off = []
for stage in (1, 2, 3):
    trace, _ = a_rank(one_block, RANKS, stage)
    of_states = held_and_sent(one_block.parameters, RANKS, stage, K=4, k=1)[0]
    off.append(abs(after_backward(trace) / of_states - 1))
verdict(
    "21a",
    seven_b == [56, 31.5, 19.25, 7] and max(off) < 0.001,
    f"by formula with K = 4: {', '.join(f'{n:g}' for n in seven_b)} GB; dry runs of a rank hold "
    f"what the formula says within 0.1 %: {max(off) < 0.001}; with K = 12: "
    f"{', '.join(f'{n:g}' for n in with_16)} GB",
    condition="for moments in bfloat16 and no float32 copies, which is 8 bytes a weight, and "
    "without activations; at 16 bytes a weight it is the figures for K = 12",
)

# %%
at_8, at_1024 = (
    {K: " and ".join(f"{saved(stage, ranks, K):.2f} ×" for stage in (1, 2)) for K in (12, 4)}
    for ranks in (8, 1024)
)
verdict(
    "21b",
    saved(1, 1024) > 3.6 and saved(2, 1024) > 7.2,
    f"at 16 bytes a weight on 8 GPUs {at_8[12]}, on 1,024 {at_1024[12]}; at 8 bytes a weight "
    f"{at_8[4]}, and {at_1024[4]}",
    condition="as limits, at 16 bytes a weight, as the guide counts: true to 10 % from "
    f"{enough[1]} and {enough[2]} GPUs on, not on 8; at 8 bytes a weight limits are 2 × and 4 ×",
    otherwise="the limits are others",
)

# %%
by_states = saved(3, 64) / saved(3, 8)
verdict(
    "21c",
    abs(by_states - 8) < 0.01,
    f"from 8 to 64 GPUs weights, gradients and state: {by_states:.2f} × less; a rank's peak, with "
    f"one block of 7B and 2,048 tokens: {peaks[8] / peaks[64]:.2f} × less",
    condition="for weights, gradients and state, and not for the peak: activations, logits and the "
    "unit that is whole are the same on any number of GPUs, and are what is left in the end",
    otherwise="not even weights, gradients and state are",
)

# %% [markdown]
# And what it costs: counted on the wire of four ranks, with one micro-batch a rank and with three.

# %%
ring = (PARTS - 1) / PARTS * psi
passes = {}
for count in (1, 3):
    for stage in range(4):
        zero = simulate(*a_model(), PARTS, stage)
        step = zero.step(micro_batches(count * PARTS), sum_of_losses)
        passes[stage, count] = step.traffic[0].model_elements() / ring
in_words = [", ".join(f"{passes[stage, k]:.2f}" for stage in range(4)) for k in (1, 3)]
verdict(
    "22",
    passes[3, 1] > 1.4 * passes[0, 1] and passes[3, 3] > 4 * passes[0, 3],
    f"(R − 1)/R Ψ are sent so many times in stages 0 to 3: {in_words[0]}; with 3 micro-batches: "
    f"{in_words[1]}",
    condition="and costs 3 where 2 are sent without ZeRO: half as much again, and 3k against 2 for "
    "k micro-batches; stage 1 costs nothing, stage 2 k + 1, which with one micro-batch is nothing",
    otherwise="stage 3 sends no more than data parallel does",
)

# %% [markdown]
# ## What you can do now
#
# | stage | in shards | 16 bytes a weight become | sent, k micro-batches |
# | --- | --- | --- | --- |
# | 0 | nothing | 16 | 2 |
# | 1 | optimizer's state | 4 + 12/R | 2 |
# | 2 | and gradients | 2 + 14/R | k + 1 |
# | 3 | and weights | 16/R, and a unit | 3k |
#
# (Sent: times (R − 1)/R of the weights, from each rank.) You can tell what R divides and what it
# does not, why stage 1 is free, why stage 2 and accumulation don't go well together, and which K a
# table of gigabytes means.
#
# Tomorrow: the same on real processes.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. It is one machine's, with one GPU: nobody to
# share with, and today's line is yesterday's. What would each of eight ranks hold of that step's
# states? They are small by now: bfloat16 weights and gradients, a Lion of 8 bits, K = 1.02.

# %%
small = PRESETS["124m"].parameters
for stage in range(4):
    states = model_state_bytes(small, ranks=RANKS, stage=stage, optimizer_bytes=1.02)
    print(f"stage {stage}, one of eight ranks: {format_bytes(states)} of weights, gradients, state")

# %% [markdown]
# And a sequence each, not eight. But a Lion whose codes share a scale by blocks is no optimizer to
# cut anywhere: shards have to end where blocks do, and `simulate` refuses it.

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
