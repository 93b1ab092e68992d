# %% [markdown]
# # Day 18: Beyond data parallelism
#
# **Data, tensor, sequence, pipeline and context parallelism: what does each divide, and what does
# it send?**
#
# Today you build a tensor-parallel MLP, a linear layer that gathers tokens, a pipeline's 1F1B
# schedule, and ring attention. Afterwards you can say which memory each kind of parallelism
# divides, what stays whole on every rank, and how many bytes a rank sends.
#
# About 105 minutes, 65 of them for five exercises. You need a laptop with two free cores. No GPU is
# needed, and nothing is downloaded.

# %% [markdown]
# In an exercise, replace `raise NotImplementedError` with your own lines; the cell below it checks
# them. If you are stuck, run `memlab hint 18.1` in a terminal. You can skip an exercise: the lesson
# then uses the reference.

# %% [markdown]
# ## The question
#
# In **data parallelism** (Days 12 and 13), each rank trains on its own sequences, and ZeRO shards
# the weights, gradients and optimizer state. But each rank still computes every layer in full. Four
# other kinds of parallelism divide the computation of L layers and T tokens among R ranks:
#
# | parallelism | what a rank computes |
# | --- | --- |
# | tensor | 1/R of the attention heads, MLP intermediate size and logits, for all tokens |
# | sequence (added to tensor) | the norms and the residual stream, for 1/R of the tokens |
# | pipeline | L/R layers, for one micro-batch after another |
# | context | all layers, for 1/R of the tokens of each sequence |
#
# A **rank** is a process with its own GPU; today, with its own memory on the CPU. The ranks of a
# pipeline are its **stages**.

# %% [markdown]
# You will compare two pipeline schedules. **GPipe** runs the forward passes of all micro-batches,
# then all backward passes. **1F1B** (one forward, one backward) runs the backward pass of a
# micro-batch as early as possible.

# %%
import warnings
from math import ceil

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from memlab import plot
from memlab.course import days, exercise, guess, model_parallel, reveal, running_bill, verdict
from memlab.model import PRESETS
from memlab.planner import memory_named
from memlab.reference.tiled_attention import attend as attend_in_tiles
from memlab.scripts.launch import Launch
from memlab.scripts.ranks import run_ranks as dry_run_ranks
from memlab.zero.launch import run_ranks

# %% [markdown]
# ## Guess
#
# Two ranks train a transformer with two blocks. Guess four percentages:
#
# 1. **Tensor parallelism**: the activations that a rank saves in the blocks, relative to one
#    process.
# 2. **Pipeline** with 1F1B and four micro-batches: the activations that the first of two stages
#    saves, relative to one process that trains with one micro-batch at a time.
# 3. **Bubble** (the idle time of a pipeline): 1F1B's bubble, relative to GPipe's.
# 4. **Sequence parallelism**: the bytes a rank sends for a block, relative to tensor parallelism.

# %%
### BEGIN SOLUTION
guess("18.1", tensor_percent=50, stage_percent=50, bubble_percent=50, sends_percent=100)
### END SOLUTION
### BEGIN STUB
# answers = {"tensor_percent": ..., "stage_percent": ..., "bubble_percent": ...}
# guess("18.1", **answers, sends_percent=...)
### END STUB

# %% [markdown]
# ## Measure: seven runs on two processes
#
# `memlab/course/model_parallel.py` trains one small model in seven runs: `one` without parallelism,
# the others divided over two processes. The model has an embedding, two blocks (its layers) and a
# **head** (the last norm, the logits and the loss). Each run uses the same 4 sequences of 16
# tokens; in the pipelines, each sequence is a micro-batch. Both processes measure their second step
# and count the bytes they send.

# %%
found = run_ranks("memlab.course.model_parallel:all_ways", 2, timeout=120)
right = model_parallel.right_gradients()


def differences(name):
    """Yield each gradient's largest difference from one process's gradient."""
    for rank, ways in enumerate(found):
        for weight, gradient in ways[name]["gradients"].items():
            divided = name in ("tensor", "sequence")
            dim = model_parallel.split_of(weight) if divided else None
            whole = right[weight]
            expected = whole if dim is None else whole.chunk(2, dim)[rank]
            yield (gradient - expected).abs().max().item()


same = all(max(differences(name)) < 1e-5 for name in found[0])
print(f"all runs' gradients equal one process's within 1e-5: {same}")

# %%
COLUMNS = ("parameters", "gradients", "optimizer_state", "activations", "logits", "sent")
print(f"{'KiB per rank':17}" + "".join(f"{name.split('_')[0]:>12}" for name in COLUMNS))
for name in found[0]:
    for rank in (0, 1) if name in ("GPipe", "1F1B") else (0,):
        who = f"{name}, stage {rank}" if name in ("GPipe", "1F1B") else name
        row = [found[rank][name]["bytes"][column] / 2**10 for column in COLUMNS]
        print(f"{who:17}" + "".join(f"{size:12.1f}" for size in row))

# %% [markdown]
# *Activations* are the most bytes that the blocks save at once; *logits* are what the head saves.
# No kind of parallelism divides everything:
#
# - Data and context: weights, gradients and optimizer state stay whole on each rank.
# - Tensor: the embedding stays whole. So does a part of the activations: a rank saves 178 KiB of
#   259.
# - Sequence: the embedding stays whole. Summing its gradient over ranks sends 64 of the 157 KiB.
# - Pipeline: only the last stage saves logits.

# %% [markdown]
# ## Tensor parallelism: column-parallel, then row-parallel
#
# An MLP computes Y = gelu(X Aᵀ) Bᵀ. As in `torch.nn.Linear`, A is (I, C) and B is (C, I), with
# hidden size C and intermediate size I. In code, A is `up` and B is `down`. Rank r has
#
# - I/R rows of A (*column-parallel*: they are columns of Aᵀ)
# - the matching I/R columns of B (*row-parallel*: they are rows of Bᵀ)
#
# gelu is elementwise, so the ranks send nothing between the two matmuls. Each rank computes one
# **term** of Y:
#
# $$Y = \sum_r \mathrm{gelu}(X A_r^T)\, B_r^T$$


# %%
def mlp(x, up, down):
    return F.gelu(x @ up.T) @ down.T


x, up, down = torch.randn(3, 4), torch.randn(8, 4), torch.randn(4, 8)
shards = zip(up.chunk(2), down.chunk(2, 1), strict=True)
terms = [mlp(x, rows, columns) for rows, columns in shards]
print("two ranks' terms add up to Y:", torch.allclose(sum(terms), mlp(x, up, down), atol=1e-5))

# %% [markdown]
# So forward needs one **all-reduce**: every rank receives the sum of all ranks' terms. In backward,
# each rank computes the gradient of X through its own A and B only. The full gradient of X is the
# sum over ranks: another all-reduce.
#
# Megatron-LM uses two **conjugate** functions, f and g. The forward of each is the backward of the
# other:
#
# | | forward | backward |
# | --- | --- | --- |
# | f, before the first matmul | identity | all-reduce |
# | g, after the second matmul | all-reduce | identity |

# %% [markdown]
# Autograd cannot differentiate `dist.all_reduce`, so f and g are autograd Functions. One class is
# enough for both.

# %% [markdown]
# ### Exercise 18.1: a tensor-parallel MLP
#
# About 14 minutes. First complete the Function: apply `in_forward` to `x`, and `in_backward` to the
# gradient. Then use it for f and g in one rank's MLP.
#
# - `x` (T, C) is whole on every rank.
# - `up` (I/R, C) and `down` (C, I/R) are this rank's shards.
# - `all_reduce(x)` returns the sum of all ranks' tensors, as a new tensor.
# - Return the full Y, with exactly one all-reduce in forward and one in backward.


# %%
class Conjugates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, in_forward, in_backward):
        ### BEGIN SOLUTION
        ctx.in_backward = in_backward
        return in_forward(x)
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 18.1, about 2 lines")
        ### END STUB

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return ctx.in_backward(gradient), None, None
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 18.1, about 1 line")
        ### END STUB


# %%
def identity(x):
    return x


def parallel_mlp(x, up, down, all_reduce):
    ### BEGIN SOLUTION
    x = Conjugates.apply(x, identity, all_reduce)  # f
    term = mlp(x, up, down)  # (T, C), this rank's
    return Conjugates.apply(term, all_reduce, identity)  # g
    ### END SOLUTION


# %%
parallel_mlp = exercise("18.1", parallel_mlp)

# %% [markdown]
# Attention is divided the same way. Queries, keys and values are column-parallel, so each rank has
# H/R of the H heads. The output projection is row-parallel. So a block has two pairs of matmuls,
# and needs **two all-reduces in forward and two in backward**, each of T · C elements.
#
# The model's output layer is column-parallel, too: each rank computes the logits of 1/R of the
# vocabulary.

# %% [markdown]
# ## What a tensor-parallel block saves
#
# Between the two matmuls of a pair, every tensor is divided by R. Outside the pairs, every rank has
# all T · C elements. Without parallelism, a block of this model saves on a CPU, per token:
#
# | | elements |
# | --- | --- |
# | each of the two norms: normalized input, output, 1/RMS | 2C + 1 |
# | residual stream, after attention and after the MLP | 2C |
# | attention: queries, keys, values, output; one log-sum-exp per head | 4C + H |
# | MLP: before and after gelu | 2I |

# %% [markdown]
# Tensor parallelism divides only the last two rows. **Sequence parallelism** divides the first two
# rows, too: each rank saves them for T/R tokens only. So a rank saves 1/R of all activations.

# %% [markdown]
# ### Exercise 18.2: saved elements of a block
#
# About 8 minutes. Return how many elements one rank saves for one block, as an integer.
#
# - `tokens` is T, all tokens of the batch.
# - `ranks` divides `tokens`, `hidden` (C), `heads` (H) and `intermediate` (I) without remainder.
# - `sequence` is True if the ranks add sequence parallelism to tensor parallelism.


# %%
def saved_elements(tokens, hidden, heads, intermediate, ranks, sequence):
    ### BEGIN SOLUTION
    whole = 2 * (2 * hidden + 1) + 2 * hidden  # norms, residual stream
    divided = 4 * hidden + heads + 2 * intermediate  # attention, MLP
    if sequence:
        return tokens * (whole + divided) // ranks
    return tokens * (whole + divided // ranks)
    ### END SOLUTION


# %%
saved_elements = exercise("18.2", saved_elements)

# %%
SIZES = (64, 32, 4, 96)  # tokens, C, H, I of the measured model
for name, ranks in {"one": 1, "tensor": 2, "sequence": 2}.items():
    formula = 2 * 4 * saved_elements(*SIZES, ranks, name == "sequence")  # two blocks, float32
    measured = found[0][name]["bytes"]["activations"]
    print(f"{name:9}{measured:8,} bytes saved by two blocks, {formula:8,} by formula")
whole, tensor, sequence = (
    found[0][name]["bytes"]["activations"] for name in ("one", "tensor", "sequence")
)
print(f"a rank saves {tensor / whole:.0%} with tensor parallelism, {sequence / whole:.0%} with "
      f"sequence parallelism added")  # fmt: skip

# %% [markdown]
# ## Sequence parallelism: all-gather, then reduce-scatter
#
# Outside the pairs of matmuls, a rank has T/R tokens. The first matmul of a pair needs all T: an
# **all-gather** gives every rank the tokens of all ranks. The second matmul computes one term for
# every token: a **reduce-scatter** gives each rank the sums for its own tokens.
#
# On a ring, each rank sends (R − 1)/R of the tensor in an all-gather or a reduce-scatter, and twice
# that in an all-reduce (Day 13).

# %% [markdown]
# The backward of an all-gather is a reduce-scatter, and vice versa.
#
# A linear layer saves its input, to compute the gradient of its weight. If autograd saves the
# *gathered* input, this activation is whole again. So save only the shard, and gather it **again**
# in backward.

# %% [markdown]
# ### Exercise 18.3: gather tokens, save the shard
#
# About 14 minutes. Complete the Function. `x` (T/R, in) has this rank's tokens; `weight` (out/R,
# in) has this rank's rows. Return the matmul of all tokens with this rank's rows, (T, out/R).
#
# - `all_gather` turns (T/R, …) into (T, …).
# - `reduce_scatter` sums (T, …) over ranks, and returns this rank's (T/R, …).
# - Save only `x` and `weight`.
# - Forward gathers once. Backward gathers once and reduce-scatters once.
# - The gradient of `weight` is not summed over ranks.


# %%
class GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, all_gather, reduce_scatter):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, weight)
        ctx.collectives = all_gather, reduce_scatter
        return all_gather(x) @ weight.T  # (T, out/R)
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 18.3, about 3 lines")
        ### END STUB

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        x, weight = ctx.saved_tensors
        all_gather, reduce_scatter = ctx.collectives
        weight_grad = gradient.T @ all_gather(x)  # (out/R, in)
        return reduce_scatter(gradient @ weight), weight_grad, None, None
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 18.3, about 4 lines")
        ### END STUB


def gather_linear(x, weight, all_gather, reduce_scatter):
    return GatherLinear.apply(x, weight, all_gather, reduce_scatter)


# %%
gather_linear = exercise("18.3", gather_linear)

# %% [markdown]
# A norm's weight is whole on every rank, but each rank applies it to its own tokens only. So its
# gradient must be summed over ranks: apply f to the weight.
#
# How much do tensor and sequence parallelism send per block? Count in **ring passes**: in a ring
# pass, a rank sends (R − 1)/R of T · C elements.

# %%
a_pass = SIZES[0] * SIZES[1] * 4 // 2  # bytes of a ring pass: (R − 1)/R is 1/2
passes = {}
for name in ("tensor", "sequence"):
    sent = dict(found[0][name]["sent by a block"])
    if name == "sequence":
        norms = sent.pop("all_reduce")
        print(f"sequence: summing two norms' gradients sends {norms} bytes (not counted below)")
    passes[name] = sum(sent.values()) // a_pass
    kinds = ", ".join(f"{size // a_pass} by {kind}" for kind, size in sorted(sent.items()))
    print(f"{name:9}{passes[name]:3} ring passes: {kinds}")

# %% [markdown]
# Sequence parallelism replaces each of the four all-reduces by an all-gather and a reduce-scatter:
# also 8 ring passes. Gathering the inputs of the two column-parallel matmuls again makes it 10.

# %% [markdown]
# ## Pipeline parallelism: idle time and micro-batches in flight
#
# A pipeline divides the **layers**: each of p stages (ranks) has 1/p of them. A batch is split into
# m **micro-batches**, so that the stages work at the same time: stage 1 runs micro-batch 0 while
# stage 0 runs micro-batch 1. Each stage sends its output to the next stage, and the gradient of its
# input to the previous one.
#
# A micro-batch is **in flight** on a stage from its forward pass to its backward pass there. During
# this time, the stage keeps the micro-batch's activations.

# %% [markdown]
# In **1F1B**, stage i of p runs
#
# 1. a **warm-up** of p − 1 − i forward passes (at most m)
# 2. pairs: a forward pass, then the backward pass of the oldest micro-batch in flight
# 3. the remaining backward passes
#
# For p = 3 and m = 4, where F2 and B2 are the passes of micro-batch 2:
#
# ```text
# stage 0     F0 F1 F2 B0 F3 B1 B2 B3
# stage 1     F0 F1 B0 F2 B1 F3 B2 B3
# stage 2     F0 B0 F1 B1 F2 B2 F3 B3
# ```

# %% [markdown]
# ### Exercise 18.4: the order of a stage
#
# About 12 minutes. Return the passes of stage `stage` in 1F1B's order, as a list of `("forward",
# n)` and `("backward", n)`, where n is the micro-batch. Stages and micro-batches count from 0.
# `stages` is p, `micro_batches` is m.


# %%
def one_forward_one_backward(stage, stages, micro_batches):
    ### BEGIN SOLUTION
    warm_up = min(stages - 1 - stage, micro_batches)
    order = [("forward", n) for n in range(warm_up)]
    for n in range(warm_up, micro_batches):
        order += [("forward", n), ("backward", n - warm_up)]
    return order + [("backward", n) for n in range(micro_batches - warm_up, micro_batches)]
    ### END SOLUTION


# %%
one_forward_one_backward = exercise("18.4", one_forward_one_backward)

# %% [markdown]
# Compare both schedules on a **timeline**. A pass starts as soon as its stage is free and its input
# has arrived from the neighboring stage. Assume that backward takes twice as long as forward, and
# that sending takes no time.


# %%
def gpipe(stage, stages, micro_batches):
    return [(kind, n) for kind in ("forward", "backward") for n in range(micro_batches)]


UNITS = {"forward": 1, "backward": 2}  # time of a pass


def timeline(order_of, stages, micro_batches):
    """Return the time at which each pass ends, by (stage, kind, micro-batch)."""
    orders = [list(order_of(stage, stages, micro_batches)) for stage in range(stages)]
    ends, free = {}, [0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            before = {"forward": stage - 1, "backward": stage + 1}
            while order:
                kind, n = order[0]
                needed = before[kind], kind, n
                if 0 <= needed[0] < stages and needed not in ends:
                    break  # the input has not arrived
                free[stage] = max(free[stage], ends.get(needed, 0)) + UNITS[kind]
                ends[stage, kind, n] = free[stage]
                order.pop(0)
    return ends


# %%
P, M = 4, 8
SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward}
COLOURS = {"forward": "#4477aa", "backward": "#ddaa33"}
fig, both = plt.subplots(2, 1, figsize=(9, 4.6), layout="constrained", sharex=True)
bubbles = {}
for axes, (name, order_of) in zip(both, SCHEDULES.items(), strict=True):
    ends = timeline(order_of, P, M)
    for (stage, kind, n), end in ends.items():
        units = UNITS[kind]
        axes.barh(stage, units, left=end - units, height=0.9, color=COLOURS[kind], edgecolor="w")
        axes.text(end - units / 2, stage, n, ha="center", va="center", color="white", fontsize=8)
    whole_time, busy = max(ends.values()), M * sum(UNITS.values())
    bubbles[name] = 1 - busy / whole_time
    axes.set(
        ylabel="stage", title=f"{name}: each stage is idle for {bubbles[name]:.0%} of the step"
    )
    axes.set_yticks(range(P))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
_ = both[1].set(
    xlabel="time in forward passes (blue: forward, yellow: backward, number: micro-batch)"
)


# %%
def most_in_flight(order):
    """Return the maximum number of micro-batches in flight."""
    signs = [1 if kind == "forward" else -1 for kind, _ in order]
    return max(sum(signs[:n]) for n in range(len(order) + 1))


for name, order_of in SCHEDULES.items():
    flights = [most_in_flight(order_of(stage, P, M)) for stage in range(P)]
    print(f"{name:6}maximum in flight, by stage: {flights}")

# %% [markdown]
# Both bubbles are (p − 1)/(m + p − 1): a step takes as long as m + p − 1 micro-batches on one
# stage, and each stage works for m of them. 1F1B saves **memory**: stage i has at most p − i
# micro-batches in flight, instead of m. More micro-batches make the bubble smaller, and with 1F1B
# they need no more memory once m ≥ p.
#
# But stage 0 keeps the activations of p micro-batches in 1/p of the layers. One GPU with *all*
# layers keeps as much for one micro-batch.

# %%
layer = 4 * saved_elements(16, 32, 4, 96, 1, False)  # bytes per micro-batch and layer
for stage in range(2):
    measured = found[stage]["1F1B"]["bytes"]["activations"]
    flights = most_in_flight(one_forward_one_backward(stage, 2, 4))
    print(f"1F1B, stage {stage}: {measured:,} bytes saved; formula, {flights} in flight: "
          f"{flights * layer:,}")  # fmt: skip
print(f"one process, two layers, one micro-batch at a time: {2 * layer:,} bytes")

# %% [markdown]
# ## Context parallelism: ring attention
#
# Each rank has 1/R of the tokens of every sequence, in *all* layers. Only attention reads other
# tokens: with a causal mask, the queries of rank r need the keys and values of ranks 0 to r.

# %% [markdown]
# In **ring attention**, each rank first attends to its own block of keys and values. Then, R − 1
# times, it sends its current block to the next rank and attends to the block that arrives. After
# step s, rank r has the block of rank r − s (modulo R).
#
# Day 10's online softmax merges two tiles; here it merges two blocks. For one head (T tokens, head
# dimension D), attention to a block gives `out` (T/R, D) and each query's log-sum-exp of the
# scores, `lse` (T/R). To merge block b:
#
# $$lse' = \ln(e^{lse} + e^{lse_b}) \qquad out' = out\,e^{lse - lse'} + out_b\,e^{lse_b - lse'}$$


# %%
def attend(q, k, v, shift):
    """Return `(out, lse)` of one block; query i attends to key j if j <= i + shift."""
    return attend_in_tiles(q, k, v, 4, shift)  # tiles of 4 tokens


# %% [markdown]
# ### Exercise 18.5: ring attention
#
# About 17 minutes. Return `(out, lse)` of causal attention for this rank's queries, over all ranks'
# keys and values.
#
# - `q`, `k`, `v` (T/R, D) belong to this rank's tokens. Rank 0 has the first T/R tokens.
# - `peer.rank` is r, `peer.ranks` is R.
# - `peer.send(x)` sends to the next rank. `peer.receive()` waits for the previous rank's tensor.
# - Send keys and values as one tensor (`torch.stack`), R − 1 times.
# - Leave `q`, `k`, `v` unchanged.
# - Pass on blocks of later tokens without attending to them.
# - Scores can be thousands: use `torch.logaddexp`.

# %% [markdown]
# Hold at most three blocks of keys and values at a time, and the scores of one.


# %%
def ring_attention(peer, q, k, v):
    ### BEGIN SOLUTION
    out, lse = attend(q, k, v, 0)
    for step in range(1, peer.ranks):
        peer.send(torch.stack((k, v)))
        k, v = peer.receive()
        if step <= peer.rank:
            out_b, lse_b = attend(q, k, v, step * len(q))  # every key is an earlier token
            both = torch.logaddexp(lse, lse_b)
            out = out * (lse - both).exp()[:, None] + out_b * (lse_b - both).exp()[:, None]
            lse = both
    return out, lse
    ### END SOLUTION


# %%
ring_attention = exercise("18.5", ring_attention)

# %% [markdown]
# In backward, a rank sends R − 1 blocks again, and R blocks of gradients, which must return to
# their owners. With the R − 1 blocks of forward, it sends 3R − 2 blocks, each 1/R of all keys and
# values.

# %%
ring_bytes = found[0]["context"]["sent"]["isend"]
keys_values = 2 * 4 * SIZES[0] * 2 * SIZES[1]  # bytes in two layers
print(f"sent around the ring: {ring_bytes:,} bytes; (3·2 − 2)/2 · {keys_values:,} = "
      f"{(3 * 2 - 2) * keys_values // 2:,}")  # fmt: skip

# %% [markdown]
# ## What each kind divides and sends
#
# The table compares R ranks (p stages) with one process that has the whole batch. It covers the
# blocks (without the norms' weights), the logits, and the embedding where named. A *pass* over a
# tensor sends (R − 1)/R of it.
#
# | | weights, gradients, optimizer state | activations | logits | sent per step |
# | --- | --- | --- | --- | --- |
# | data | whole (ZeRO shards them: Day 12) | 1/R | 1/R | 2 passes over the weights' gradients |
# | tensor | 1/R; embedding whole | 1/R; norms, residual whole | 1/R | 8 passes over T·C per block |
# | + sequence | as tensor | 1/R | 1/R | 10 passes over T·C per block |
# | 1F1B | 1/p | stage i: min(m, p − i)/m · 1/p | last stage: 1/m | T·C to each neighbor |
# | context | whole (ZeRO shards them) | 1/R | 1/R | as data; (3R − 2)/R of keys, values per block |

# %%
fig, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
NAMES = dict(zip(COLUMNS, ("weights", "gradients", "optimizer state", "activations", "logits"),
                 strict=False))  # fmt: skip
colours = plot.COLOURS | {"logits": "#882255"}
bars = [(name, 0) for name in ("one", "data", "tensor", "sequence", "context")]
bars += [(name, stage) for name in ("GPipe", "1F1B") for stage in range(2)]
for place, (name, rank) in enumerate(bars):
    start = 0
    for kind, label in NAMES.items():
        size = found[rank][name]["bytes"][kind] / 2**10
        axes.barh(place, size, left=start, color=colours[kind], label=None if place else label)
        start += size
ticks = [f"{name}, stage {rank}" if name in SCHEDULES else name for name, rank in bars]
axes.set_yticks(range(len(bars)), ticks)
axes.set(xlabel="KiB per rank", title="Memory by category: one process, or two ranks")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
_ = axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.45, -0.16))

# %% [markdown]
# ## At scale: dry runs of real scripts
#
# Day 16 used formulas for 70B on 8 GPUs and 405B on 128. A formula leaves out every tensor that its
# author forgot. `memlab run --ranks 8 train.py` runs a real script as one of eight ranks, on fake
# tensors and with collectives that send nothing. [docs/RANKS.md](../docs/RANKS.md) compares such
# predictions with real processes.

# %%
SCRIPTS = days.folder("benchmarks/llama")


def rank_0(script, ranks, *arguments):
    """Return the trace of rank 0's second step on an H100."""
    launch = Launch(str(SCRIPTS / script), arguments=tuple(map(str, arguments)))
    with warnings.catch_warnings(action="ignore"):  # torch warns about its own code
        return dry_run_ranks(launch.with_ranks(ranks), (0,), device="cuda:h100")[0].trace


# %%
def deeper(first, second, added):
    """Return `second`'s peak bytes by category, plus `added` times their growth since `first`."""
    names = {*first.at_peak, *second.at_peak}
    at = [{name: trace.at_peak.get(name, 0) for name in names} for trace in (first, second)]
    return {name: at[1][name] + added * (at[1][name] - at[0][name]) for name in names}


def shown(parts):
    """Return the categories above 0.1 GB as text, the largest first."""
    large = {name: size for name, size in parts.items() if size > 1e8}
    ordered = sorted(large.items(), key=lambda part: -part[1])
    return ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.1f}" for name, size in ordered)


def show_largest(trace, count):
    """Print the largest tensors at the peak."""
    for event in sorted(trace.alive(trace.peak_position), key=lambda e: -e.bytes)[:count]:
        print(f"  {event.bytes / 1e9:.2f} GB, {event.shape}, {event.operator} in {event.phase}")


# %% [markdown]
# **70B on 8 H100s**: `benchmarks/llama/fsdp2.py` uses FSDP2 around each block (ZeRO-3),
# checkpointing, bfloat16 weights and AdamW state, and two micro-batches of 4,096 tokens per rank.
#
# The next cell runs it with three and with four blocks, and assumes that each further block adds
# what the fourth added. (A dry run of all 80 blocks has the same peak within 0.1%.)

# %%
seventy = PRESETS["llama-3-70b"]
three, four = (rank_0("fsdp2.py", 8, "llama-3-70b", n, 4096, 2) for n in (3, 4))
of_seventy = deeper(three, four, seventy.layers - 4)
peak_70b = sum(of_seventy.values())
state = 8 * seventy.parameters // 8  # weights, gradients, two moments: 8 bytes; 8 ranks
inputs = seventy.layers * 4096 * seventy.hidden_size * 2  # one micro-batch's, in bfloat16
print(f"70B on 8: the script allocates {peak_70b / 1e9:.1f} GB: {shown(of_seventy)}")
print(f"by formula: state {state / 1e9:.2f} + block inputs {inputs / 1e9:.2f} = "
      f"{(state + inputs) / 1e9:.2f} GB")  # fmt: skip
h100 = memory_named("h100")
print(f"an H100 has {h100.total_bytes / 1e9:.1f} GB; the CUDA context leaves "
      f"{h100.budget_bytes / 1e9:.1f} GB")  # fmt: skip
print("largest tensors at the peak, with four blocks:")
show_largest(four, 5)

# %% [markdown]
# By formula (the state, and one micro-batch's block inputs) the model fits; the script does not.
# The formula leaves out unsharded tensors. The five largest, in the printed order:
#
# - the embedding and the output layer's weight, which FSDP2 keeps gathered during backward
# - the gradient of the output layer's weight
# - two FSDP2 buffers, each as large as a block's weights

# %% [markdown]
# **405B on 128 H100s**: `benchmarks/llama/three_d.py` combines torch's own modules:
#
# - tensor parallelism over 8 ranks, with sequence parallelism
# - a pipeline of 4 stages with 1F1B
# - data parallelism over 4 ranks, with FSDP2
#
# It uses bfloat16, checkpointing and four micro-batches of 8,192 tokens. The first stage has 32 of
# the 126 blocks. The next cell runs one and two blocks per stage.
#
# In a pipeline, torch keeps each block's gathered weights and unsharded gradients until the last
# micro-batch. So the next cell's formula assumes ZeRO-1, which shards only the optimizer state.

# %%
huge, TOKENS = PRESETS["llama-3-405b"], 8192
cut = ("llama-3-405b", 4, 4, 8)  # stages, data-parallel ranks, tensor-parallel ranks
one_block, two_blocks = (rank_0("three_d.py", 128, *cut, n, TOKENS, 4) for n in (1, 2))
blocks = ceil(huge.layers / 4)
of_huge = deeper(one_block, two_blocks, blocks - 2)
peak_405b = sum(of_huge.values())
embedding = huge.vocab_size * huge.hidden_size  # elements; the output layer has as many
block = (huge.parameters - 2 * embedding - huge.hidden_size) // huge.layers
own = (blocks * block + embedding) // 8  # rank 0's weights: the first stage's, divided by 8
zero_1 = 4 * own + 4 * own // 4  # weights, gradients; moments sharded over 4 ranks
kept = 4 * blocks * 2 * TOKENS * huge.hidden_size // 8  # inputs of four micro-batches
gaps = two_blocks.reserved_bytes - two_blocks.peak_bytes
print(f"405B on 128: the script allocates {peak_405b / 1e9:.1f} GB: {shown(of_huge)}")
print(f"reserved but not allocated, with only two blocks: {gaps / 1e9:.1f} GB")
print(f"by formula: ZeRO-1's state {zero_1 / 1e9:.2f} + block inputs {kept / 1e9:.2f} = "
      f"{(zero_1 + kept) / 1e9:.2f} GB")  # fmt: skip
print("largest tensors at the peak, with two blocks:")
show_largest(two_blocks, 2)

# %% [markdown]
# The tensors alone nearly fill an H100: 82.8 of 84.3 GB. With only two blocks, the allocator
# already reserves 7.6 GB more, so don't expect the script to fit.
#
# Here, activations include gathered weights, and backward temporaries include unsharded gradients.
# The formula mainly leaves out
#
# - the shards of the weights, which exist besides the gathered weights
# - two gradients of the **whole** embedding: the sum over earlier micro-batches, and the current
#   one's. DTensor divides the embedding by 8, but not its gradient.

# %% [markdown]
# ## Explain the gap

# %%
stage_0 = found[0]["1F1B"]["bytes"]["activations"]
reveal("18.1", tensor_percent=100 * tensor / whole, stage_percent=100 * stage_0 / (2 * layer),
       bubble_percent=100 * bubbles["1F1B"] / bubbles["GPipe"],
       sends_percent=100 * passes["sequence"] / passes["tensor"])  # fmt: skip

# %% [markdown]
# - **Tensor**: norms and the residual stream stay whole.
# - **Stage 0**: it has half of the layers, but two micro-batches in flight.
# - **Bubble**: with either schedule, the pipeline must fill and drain.
# - **Sequence**: backward gathers the inputs once more.

# %% [markdown]
# ## On your GPUs
#
# The first command needs no GPU, and predicts the memory of a rank that trains Llama 3 8B (32
# blocks, two micro-batches of 2,048 tokens). The second command measures all ranks on 8 GPUs:
#
# ```sh
# memlab run --ranks 8 benchmarks/llama/fsdp2.py llama-3-8b 32 2048 2
# torchrun --nproc-per-node 8 -m memlab run --real benchmarks/llama/fsdp2.py \
#     llama-3-8b 32 2048 2
# ```

# %% [markdown]
# ## Rules on trial
#
# Four common claims about parallel training:

# %%
verdict(
    "32a",
    2 * tensor <= whole,
    f"two blocks save {whole:,} bytes in one process and {tensor:,} on each of two ranks "
    f"({tensor / whole:.0%}); with sequence parallelism {sequence:,} ({sequence / whole:.0%})",
    otherwise="it divides only the activations inside attention and the MLP; norms and the "
    "residual stream stay whole unless you add sequence parallelism",
)

# %%
flights_of_0 = [most_in_flight(order_of(0, P, M)) for order_of in SCHEDULES.values()]
verdict(
    "32b",
    bubbles["1F1B"] < bubbles["GPipe"],
    f"{P} stages, {M} micro-batches: GPipe is idle for {bubbles['GPipe']:.1%} of the step, with "
    f"{flights_of_0[0]} micro-batches in flight on stage 0; 1F1B for {bubbles['1F1B']:.1%}, with "
    f"{flights_of_0[1]}",
    otherwise="the bubble is the same, (p − 1)/(m + p − 1); 1F1B has fewer micro-batches in flight",
)

# %%
last = found[1]["1F1B"]["bytes"]["activations"]
verdict(
    "32c",
    2 * stage_0 <= 2 * layer,
    f"two stages, four micro-batches, 1F1B: stage 0 saves {stage_0:,} bytes, stage 1 {last:,}; one "
    f"process with one micro-batch at a time saves {2 * layer:,}",
    otherwise="stage i saves min(m, p − i) micro-batches in 1/p of the layers; with m ≥ p, stage 0 "
    "saves as much as one GPU with all layers, and only the last stage saves 1/p of that",
)

# %%
verdict(
    "32d",
    passes["sequence"] <= passes["tensor"],
    f"ring passes per block: {passes['tensor']} with tensor parallelism, {passes['sequence']} with "
    f"sequence parallelism (with R ranks, a ring pass sends (R − 1)/R · tokens · hidden size "
    f"elements)",
    otherwise="an all-gather and a reduce-scatter send as much as an all-reduce, but gathering the "
    "inputs again in backward adds two ring passes; saving the gathered inputs avoids them",
)

# %% [markdown]
# ## What you can do now
#
# | problem | use |
# | --- | --- |
# | too many weights, few GPUs with fast links | tensor and sequence parallelism |
# | too many weights, slow links | a pipeline |
# | sequences too long for a GPU | context parallelism |
# | many sequences | data parallelism, with ZeRO |
#
# Before you choose, predict your script's memory with a dry run.

# %% [markdown]
# ## The running bill
#
# The bill's step uses one GPU, so there is nothing to divide, and the bill stays the same.

# %%
running_bill(18)

# %% [markdown]
# ## Sources
#
# - Shoeybi et al. 2019: [Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
#   Parallelism](https://arxiv.org/abs/1909.08053)
# - Korthikanti et al. 2022: [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198)
# - Huang et al. 2019: [GPipe: Efficient Training of Giant Neural Networks using Pipeline
#   Parallelism](https://arxiv.org/abs/1811.06965)
# - Narayanan et al. 2021: [Memory-Efficient Pipeline-Parallel DNN
#   Training](https://arxiv.org/abs/2006.09503)
# - Liu et al. 2023: [Ring Attention with Blockwise Transformers for Near-Infinite
#   Context](https://arxiv.org/abs/2310.01889)
# - PyTorch: [tensor
#   parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html),
#   [pipelines](https://docs.pytorch.org/docs/stable/distributed.pipelining.html)
