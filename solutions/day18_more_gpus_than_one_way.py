# %% [markdown]
# # Day 18: More GPUs than one way
#
# **Data, tensor, sequence, pipeline, context: which way of dividing a training shrinks what, and
# what does it send?**
#
# After today you have built the parts of four kinds of parallel training: a column- and
# row-parallel MLP, a linear layer that gathers tokens, the 1F1B order of a pipeline, and ring
# attention. You can say which memory each kind divides, which it leaves whole, and what it sends.
#
# About 105 minutes, 65 of them for five exercises. You need a laptop with two free cores; no GPU,
# no download.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 18.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# Days 12 and 13 had **data parallelism**: each rank trains on its own sequences, and ZeRO shards
# the weights, gradients and optimizer state. The computation of a block stayed whole on each rank.
# Four other ways divide the computation:
#
# | way | a rank computes |
# | --- | --- |
# | tensor | 1/R of the heads and of the MLP's elements, for all tokens |
# | sequence (with tensor) | also the norms, for 1/R of the tokens |
# | pipeline | L/R of the layers, one micro-batch after another |
# | context | everything, for 1/R of the tokens of each sequence |
#
# A **rank** is a process with its own GPU; here, with its own memory on the CPU. The ranks of a
# pipeline are its **stages**.

# %%
import warnings
from math import ceil

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from memlab import plot
from memlab.course import days, exercise, guess, model_parallel, reveal, running_bill, verdict
from memlab.course.peers import in_turns
from memlab.model import PRESETS
from memlab.planner import memory_named
from memlab.reference.tiled_attention import attend as attend_in_tiles
from memlab.scripts.launch import Launch
from memlab.scripts.ranks import run_ranks as dry_run_ranks
from memlab.zero.launch import run_ranks

# %% [markdown]
# ## Guess
#
# A transformer with two blocks is trained by two ranks.
#
# 1. **Tensor parallel**: how many percent of the blocks' activations does a rank save, compared
#    with one process?
# 2. **Pipeline**, 1F1B: how many percent does the first of two stages save, compared with one
#    process that takes the same micro-batches one after another?
# 3. A pipeline has idle time, the **bubble**. How large is 1F1B's, in percent of GPipe's?
# 4. **Sequence parallelism** divides more activations. How many percent of tensor parallelism's
#    bytes does it send?

# %% [markdown]
# **GPipe** runs the forward passes of all micro-batches, then all backward passes. **1F1B** (one
# forward, one backward) starts the backward pass of a micro-batch as early as possible.

# %%
### BEGIN SOLUTION
guess("18.1", tensor_percent=50, stage_percent=50, bubble_percent=50, sends_percent=100)
### END SOLUTION
### BEGIN STUB
# answers = {"tensor_percent": ..., "stage_percent": ..., "bubble_percent": ...}
# guess("18.1", **answers, sends_percent=...)
### END STUB

# %% [markdown]
# ## Measure: two processes, seven ways
#
# `memlab/course/model_parallel.py` trains one small model each way. It has an embedding, two
# blocks, and a **head**: the last norm, the logits and the loss. Each way gets the same 4 sequences
# of 16 tokens. Both processes meter their second step, and count what they send. (They are two
# processes with gloo, as on Day 13. It takes about ten seconds.)

# %%
found = run_ranks("memlab.course.model_parallel:all_ways", 2, timeout=120)
right = model_parallel.right_gradients()


def differences(name):
    """The largest difference of any weight's gradient from that of one process."""
    for rank, ways in enumerate(found):
        for weight, gradient in ways[name]["gradients"].items():
            divided = name in ("tensor", "sequence")
            dim = model_parallel.split_of(weight) if divided else None
            whole = right[weight]
            expected = whole if dim is None else whole.chunk(2, dim)[rank]
            yield (gradient - expected).abs().max().item()


for name in found[0]:
    print(f"{name:9} gradients equal within 1e-5: {max(differences(name)) < 1e-5}")

# %%
COLUMNS = ("parameters", "gradients", "optimizer_state", "activations", "logits", "sent")
print(f"{'KiB of a rank':17}" + "".join(f"{name.split('_')[0]:>12}" for name in COLUMNS))
for name in found[0]:
    for rank in (0, 1) if name in ("GPipe", "1F1B") else (0,):
        who = f"{name}, stage {rank}" if name in ("GPipe", "1F1B") else name
        row = [found[rank][name]["bytes"][column] / 2**10 for column in COLUMNS]
        print(f"{who:17}" + "".join(f"{size:12.1f}" for size in row))

# %% [markdown]
# All seven compute the same gradients. *Activations* are what the blocks save for backward;
# *logits* what the head saves. No way divides everything:
#
# - data and context leave weights, gradients and optimizer state whole;
# - tensor leaves part of the activations whole, 178 KiB of 259;
# - the pipeline's logits are all on the last stage.
#
# The rest of the day builds each way, and finds the formula behind its row.

# %% [markdown]
# ## Tensor parallelism: a column, then a row
#
# An MLP is Y = gelu(X Aᵀ) Bᵀ, with A (I, C) and B (C, I), as in `torch.nn.Linear`: C is the hidden
# size, I the intermediate size. Rank r gets
#
# - rows of A: I/R of the **output** elements (*column-parallel*, because it is a column of Aᵀ);
# - the same columns of B (*row-parallel*).
#
# gelu works on each element, so nothing is sent between the two. Each rank gets one **term** of Y:
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
# So forward needs one **all-reduce**: every rank gets the sum of all ranks' terms. And backward?
# Every rank computes the gradient of X through its own A and B only. The gradient of X is again a
# sum over ranks.
#
# The Megatron-LM paper names two functions, each the other's mirror image:
#
# | | forward | backward |
# | --- | --- | --- |
# | f, before the first matmul | copy | all-reduce |
# | g, after the second matmul | all-reduce | copy |

# %% [markdown]
# Autograd cannot differentiate an all-reduce: it sees one rank's graph only. So f and g are
# autograd Functions, of one kind: a function of x in forward, and its mirror image, the
# **conjugate**, in backward.
#
# `in_turns(program, given)` of Day 13 runs a program as R ranks in this process. The sum of all
# ranks' tensors is `peer.sum(x)`. It returns a new tensor.


# %%
def a_sum(peer, x):
    return peer.sum(x).tolist()


print(in_turns(a_sum, [(torch.tensor([1.0, 2.0]),), (torch.tensor([10.0, 20.0]),)]))

# %% [markdown]
# ### Exercise 18.1: a tensor-parallel MLP
#
# About 14 minutes. Write the Function: `in_forward` is a function of a tensor, applied to `x`, and
# `in_backward` one applied to the gradient. Then write this rank's MLP with it. `x` (T, C) is whole
# on every rank; `up` (I/R, C) and `down` (C, I/R) are this rank's. `all_reduce(x)` returns the sum
# of all ranks' tensors. Return the whole Y, with exactly one all-reduce in each pass.


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
def copied(x):
    return x.view_as(x)


def parallel_mlp(x, up, down, all_reduce):
    ### BEGIN SOLUTION
    x = Conjugates.apply(x, copied, all_reduce)  # f
    term = mlp(x, up, down)  # (T, C), of this rank
    return Conjugates.apply(term, all_reduce, copied)  # g
    ### END SOLUTION


# %%
parallel_mlp = exercise("18.1", parallel_mlp)

# %% [markdown]
# Attention is divided the same way: queries, keys and values are column-parallel, so a rank has
# H/R whole heads. The output matrix is row-parallel. A block has two such pairs: **two all-reduces
# in forward, two in backward**, each of tokens · C elements. All R ranks wait for each of them.

# %% [markdown]
# ## What a tensor-parallel block saves
#
# Between the two matmuls, everything is divided by R. Before f and after g, it is not: norms and
# the residual stream work on all tokens with all C elements, on every rank. A block of this model
# saves per token, on a CPU:
#
# | | elements |
# | --- | --- |
# | each of two norms: its normalized input, its output, 1/RMS | 2C + 1 |
# | the residual stream after attention, and after the MLP | 2C |
# | attention: queries, keys, values, output; the log-sum-exp of each head | 4C + H |
# | MLP: before and after gelu | 2I |

# %% [markdown]
# **Sequence parallelism** divides the first two rows, too: not by C, but by tokens. Each rank has
# T/R of the tokens there. Then everything that a block saves is divided by R.

# %% [markdown]
# ### Exercise 18.2: saved elements of a block
#
# About 8 minutes. Return how many elements one of `ranks` ranks saves for a block: an integer.
# `tokens` are all tokens of the batch. `sequence` says whether the ranks also use sequence
# parallelism. `ranks` divides `tokens`, `hidden` (C), `heads` (H) and `intermediate` (I).


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
SIZES = (64, 32, 4, 96)  # tokens, C, H, I of the model that was measured
for name, ranks in {"one": 1, "tensor": 2, "sequence": 2}.items():
    formula = 2 * 4 * saved_elements(*SIZES, ranks, name == "sequence")  # two blocks, float32
    measured = found[0][name]["bytes"]["activations"]
    print(f"{name:9}{measured:8,} bytes saved by two blocks; by formula {formula:8,}")
whole, tensor, sequence = (
    found[0][name]["bytes"]["activations"] for name in ("one", "tensor", "sequence")
)
print(f"a rank saves {tensor / whole:.0%} with tensor parallelism, {sequence / whole:.0%} with "
      f"sequence parallelism too")  # fmt: skip

# %% [markdown]
# ## Sequence parallelism: gather, then scatter
#
# Between the blocks a rank has T/R tokens. The first matmul of a pair needs all tokens: an
# **all-gather** gives every rank the tokens of all. The second matmul gives a term of every token:
# a **reduce-scatter** gives each rank the sums of its own tokens.
#
# A ring sends (R − 1)/R of the tensor for either, and an all-reduce is one of each (Day 13). So
# forward sends as many bytes as before.

# %% [markdown]
# In backward they are mirrored again: the gradient of an all-gather is a reduce-scatter, and the
# other way round.
#
# There is a trap. A linear layer saves its input for the gradient of its weight. If autograd saves
# the *gathered* input, the activations are whole again. So save the shard, and gather **again** in
# backward.

# %% [markdown]
# ### Exercise 18.3: gather, multiply, forget
#
# About 14 minutes. `x` (T/R, in) has this rank's tokens, `weight` (out/R, in) its rows. Return the
# product of all tokens with the weight, (T, out/R). `all_gather` makes (T/R, …) to (T, …).
# `reduce_scatter` makes (T, …), summed over ranks, to this rank's (T/R, …). Both return new
# tensors. Save only `x` and `weight`. Backward gathers once and scatters once. The gradient of the
# weight is this rank's own.


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
        of_weight = gradient.T @ all_gather(x)  # (out/R, in)
        return reduce_scatter(gradient @ weight), of_weight, None, None
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 18.3, about 4 lines")
        ### END STUB


def gather_linear(x, weight, all_gather, reduce_scatter):
    return GatherLinear.apply(x, weight, all_gather, reduce_scatter)


# %%
gather_linear = exercise("18.3", gather_linear)

# %% [markdown]
# One detail is left. A norm's weight (C) is whole on every rank, but each rank applies it to its
# own tokens. Its gradient is a sum over tokens, and so over ranks: the weight needs f, too. With
# plain tensor parallelism, every rank computes the whole gradient.
#
# What do the two send for a block? One **pass** is (R − 1)/R of tokens · C elements.

# %%
a_pass = SIZES[0] * SIZES[1] * 4 // 2  # bytes: (R − 1)/R is 1/2
passes = {}
for name in ("tensor", "sequence"):
    sent = dict(found[0][name]["sent by a block"])
    if name == "sequence":
        norms = sent.pop("all_reduce")
        print(f"gradients of two norms: {norms} bytes, as 2 · 2C/2 elements: {norms == 4 * 2 * 32}")
    passes[name] = sum(sent.values()) // a_pass
    kinds = ", ".join(f"{size // a_pass} by {kind}" for kind, size in sorted(sent.items()))
    print(f"{name:9}{passes[name]:3} passes: {kinds}")

# %% [markdown]
# Four all-reduces are 8 passes. Sequence parallelism replaces each by a gather and a scatter: 8
# again. Two more gather the inputs of the two column-parallel matmuls in backward: 10. torch's own
# modules (`ColwiseParallel` with a sharded input) save the gathered input, and send 8.

# %% [markdown]
# ## Pipeline parallelism: who waits, and with how much
#
# Now the **layers** are divided: stage i of p has the i-th part. A batch is cut into m
# **micro-batches**, so that stages work at the same time: stage 1 computes with micro-batch 0 while
# stage 0 computes with micro-batch 1. A stage sends its output on, and the gradient back.

# %% [markdown]
# Gradients are summed over the micro-batches, as in accumulation (Day 3). Only the *order* of a
# stage's passes is free. A micro-batch is **in flight** on a stage from its forward pass to its
# backward pass there, and its activations are saved.

# %% [markdown]
# **1F1B**: stage i starts with a **warm-up** of p − 1 − i forward passes (of m, if there are
# fewer). Then each forward pass is followed by a backward pass, of the oldest micro-batch in
# flight. At the end the remaining backward passes follow. For p = 3 and m = 4, F2 and B2 being the
# passes of micro-batch 2:
#
# ```text
# stage 0     F0 F1 F2 B0 F3 B1 B2 B3
# stage 1     F0 F1 B0 F2 B1 F3 B2 B3
# stage 2     F0 B0 F1 B1 F2 B2 F3 B3
# ```

# %% [markdown]
# ### Exercise 18.4: the order of a stage
#
# About 12 minutes. Return the list of a stage's passes in order, as `("forward", n)` and
# `("backward", n)`, n from 0. `stage` counts from 0.


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
# A **timeline** shows what the orders mean. A pass starts as soon as its stage is free and its
# input has arrived: a forward pass needs that of the stage before, a backward pass that of the
# stage after. Backward takes twice as long as forward. Sending takes no time here.


# %%
def gpipe(stage, stages, micro_batches):
    return [(kind, n) for kind in ("forward", "backward") for n in range(micro_batches)]


UNITS = {"forward": 1, "backward": 2}  # of time


def timeline(order_of, stages, micro_batches):
    """The time at which each pass ends, by (stage, kind, micro-batch)."""
    orders = [list(order_of(stage, stages, micro_batches)) for stage in range(stages)]
    ends, free = {}, [0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            before = {"forward": stage - 1, "backward": stage + 1}
            while order:
                kind, n = order[0]
                needed = before[kind], kind, n
                if 0 <= needed[0] < stages and needed not in ends:
                    break  # it has not arrived
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
_ = both[1].set(xlabel="time, in forward passes (blue); backward passes (yellow) take two")


# %%
def most_in_flight(order):
    signs = [1 if kind == "forward" else -1 for kind, _ in order]
    return max(sum(signs[:n]) for n in range(len(order) + 1))


for name, order_of in SCHEDULES.items():
    flights = [most_in_flight(order_of(stage, P, M)) for stage in range(P)]
    print(f"{name:6}in flight at most, by stage: {flights}; bubble {bubbles[name]:.4f}, "
          f"(p − 1)/(m + p − 1) = {(P - 1) / (M + P - 1):.4f}")  # fmt: skip

# %% [markdown]
# The same bubble, to the digit: 1F1B saves no time. It saves **memory**: stage i has p − i
# micro-batches in flight, not m. More micro-batches make the bubble smaller, and with 1F1B they
# cost no memory.
#
# But look at stage 0: p micro-batches of 1/p of the layers. That is as much as one GPU saves for
# one micro-batch of *all* layers.

# %%
layer = 4 * saved_elements(16, 32, 4, 96, 1, False)  # bytes of a micro-batch and layer
output = 4 * 16 * 32  # bytes of a micro-batch between the stages
for name, order_of in SCHEDULES.items():
    for stage in range(2):
        measured = found[stage][name]["bytes"]["activations"]
        flights = most_in_flight(order_of(stage, 2, 4))
        sent_off = 3 * output if (name, stage) == ("GPipe", 0) else 0
        print(f"{name:6}stage {stage}: {measured:7,} bytes saved; {flights} in flight: "
              f"{flights * layer - sent_off:7,}")  # fmt: skip
print(f"one process, a micro-batch at a time: {2 * layer:7,} bytes, two layers")

# %% [markdown]
# (With GPipe, stage 0 has sent three of its four outputs on when the last forward pass ends.
# Nothing in its own backward reads an output, so they are free.)
#
# ## Context parallelism: keys and values go round
#
# For very long sequences, each rank takes T/R tokens of every sequence, in *all* layers. Norms,
# matmuls and the MLP need nothing from other tokens. Only attention does: queries of rank r need
# the keys and values of ranks 0 to r (causal).

# %% [markdown]
# In **ring attention** each rank sends its block of keys and values to the next rank, R − 1 times,
# and attends to each block that arrives. At step s, rank r has the block of rank r − s. A block of
# later tokens is hidden by the causal mask.
#
# Day 10's online softmax merges two tiles. It merges two ranks' blocks, too. Attention to one block
# gives `out` (T/R, D) and the log-sum-exp `lse` (T/R) of its scores. For a second block b:
#
# $$lse' = \ln(e^{lse} + e^{lse_b}) \qquad out' = out\,e^{lse - lse'} + out_b\,e^{lse_b - lse'}$$


# %%
def attend(q, k, v, shift):
    """`(out, lse)` of one block: query i sees key j if j <= i + shift."""
    return attend_in_tiles(q, k, v, 4, shift)


# %% [markdown]
# ### Exercise 18.5: ring attention
#
# About 17 minutes. `q`, `k`, `v` (T/R, D) are this rank's tokens, `peer.rank` · T/R and following.
# Return `(out, lse)` of causal attention to all tokens up to one's own. As on Day 13,
# `peer.send(x)` sends to the next rank, and `peer.receive()` waits for the tensor of the rank
# before. Send keys and values as one tensor (`torch.stack`), R − 1 times. Scores can be as large as
# ±1,000: `torch.logaddexp`.


# %%
def ring_attention(peer, q, k, v):
    ### BEGIN SOLUTION
    out, lse = attend(q, k, v, 0)
    for step in range(1, peer.ranks):
        peer.send(torch.stack((k, v)))
        k, v = peer.receive()
        if step <= peer.rank:
            out_b, lse_b = attend(q, k, v, step * len(q))  # all keys are earlier tokens
            both = torch.logaddexp(lse, lse_b)
            out = out * (lse - both).exp()[:, None] + out_b * (lse_b - both).exp()[:, None]
            lse = both
    return out, lse
    ### END SOLUTION


# %%
ring_attention = exercise("18.5", ring_attention)

# %% [markdown]
# The backward pass sends the blocks round again, and with them the gradients of keys and values,
# which must arrive at their owner: R blocks of gradients. For r ranks that is (3r − 2)/r of all
# keys and values (`memlab/reference/ring_attention.py` has both passes).
#
# Rank 0 attends to one block and waits; rank R − 1 attends to R. Production versions give each rank
# an early and a late part of the sequence, so that all have the same work.

# %%
ring_bytes = found[0]["context"]["sent"]["isend"]
keys_values = 2 * 4 * SIZES[0] * 2 * SIZES[1]  # of two layers, in bytes
print(f"sent around the ring: {ring_bytes:,} bytes; (3·2 − 2)/2 · {keys_values:,} = "
      f"{(3 * 2 - 2) * keys_values // 2:,}")  # fmt: skip

# %% [markdown]
# ## Which way saves what
#
# Measured above, as formulas; n tokens, and R ranks each:
#
# | | weights, gradients, optimizer state | activations | logits | sent in a step |
# | --- | --- | --- | --- | --- |
# | data | whole (ZeRO: Day 12) | 1/R | 1/R | gradients: 2 passes |
# | tensor | matrices 1/R | heads, MLP 1/R; norms, stream whole | 1/R | 8 passes of n·C a block |
# | + sequence | the same | 1/R | 1/R | 10 passes of n·C a block |
# | pipeline | 1/R | stage i: min(m, R − i)/m · 1/R | last stage | n·C to each neighbour |
# | context | whole (ZeRO) | 1/R | 1/R | keys, values; gradients |

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
axes.set(xlabel="KiB", title="What a rank of two holds and saves (blocks and head)")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
_ = axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.45, -0.16))

# %% [markdown]
# ## At scale: a script's dry run instead of a formula
#
# Days 13 and 16 answered for 70B on 8 GPUs and 405B on 128 by formula. Formulas leave out what
# nobody thought of. `memlab run --ranks 8 train.py` runs a real script as one rank among eight, on
# tensors without values and with collectives that send nothing: every storage of that rank is
# counted. [docs/RANKS.md](../docs/RANKS.md) holds such predictions against real processes.

# %%
SCRIPTS = days.folder("benchmarks/llama")


def rank_0(script, ranks, *arguments):
    """The trace of rank 0's second step on an H100."""
    launch = Launch(str(SCRIPTS / script), arguments=tuple(map(str, arguments)))
    with warnings.catch_warnings(action="ignore"):  # torch's, about itself
        return dry_run_ranks(launch.with_ranks(ranks), (0,), device="cuda:h100")[0].trace


# %%
def deeper(few, more, blocks):
    """At the peak with `blocks` blocks, where `few` has one block less than `more`: (bytes of
    `more`) + `blocks` times the difference."""
    names = {*few.at_peak, *more.at_peak}
    at = [{name: trace.at_peak.get(name, 0) for name in names} for trace in (few, more)]
    return {name: at[1][name] + blocks * (at[1][name] - at[0][name]) for name in names}


def shown(parts):
    large = {name: size for name, size in parts.items() if size > 1e8}
    ordered = sorted(large.items(), key=lambda part: -part[1])
    return ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.1f}" for name, size in ordered)


def show_largest(trace, count):
    """Print the largest storages that are alive at the peak."""
    for event in sorted(trace.alive(trace.peak_position), key=lambda e: -e.bytes)[:count]:
        print(f"  {event.bytes / 1e9:.2f} GB, {event.shape}, {event.operator} in {event.phase}")


# %% [markdown]
# **70B on 8 × 80 GB**: `benchmarks/llama/fsdp2.py`, 40 lines. FSDP2 around each block
# (ZeRO-3), checkpointing, weights and AdamW in bfloat16, two micro-batches of 4,096 tokens. Three
# and four blocks are run; every further block adds what the fourth added. That is the only
# extrapolation, and `tests/course/test_day18.py` compares it with a run of all 80 blocks.

# %%
seventy = PRESETS["llama-3-70b"]
three, four = (rank_0("fsdp2.py", 8, "llama-3-70b", n, 4096, 2) for n in (3, 4))
of_seventy = deeper(three, four, seventy.layers - 4)
peak_70b = sum(of_seventy.values())
state = 8 * seventy.parameters // 8  # weights, gradients, two moments: 8 bytes; 8 ranks
inputs = seventy.layers * 2 * 4096 * seventy.hidden_size
print(f"70B on 8: {peak_70b / 1e9:.1f} GB allocated by the script; GB: {shown(of_seventy)}")
print(f"by formula: state {state / 1e9:.1f} + block inputs {inputs / 1e9:.1f} = "
      f"{(state + inputs) / 1e9:.1f}")  # fmt: skip
print(f"an H100 leaves {memory_named('h100').budget_bytes / 1e9:.1f}; largest at the peak:")
show_largest(four, 5)

# %% [markdown]
# By formula it fits, and the script needs more than an H100 has. What is whole at the peak is in no
# formula: the embedding and the output matrix, which FSDP2 gathers as one unit and keeps until
# backward has ended; the gradient of the output matrix; and two of FSDP2's buffers for a block's
# 856 million elements.

# %% [markdown]
# **405B on 128 × 80 GB**: `benchmarks/llama/three_d.py` is tensor 8 with sequence parallelism,
# pipeline 4 with 1F1B, data 4 with FSDP2, from torch's own modules. Four micro-batches of 8,192
# tokens, checkpointing. The first stage has 32 of the 126 blocks. One and two are run.

# %%
huge, TOKENS = PRESETS["llama-3-405b"], 8192
cut = ("llama-3-405b", 4, 4, 8)
one_block, two_blocks = (rank_0("three_d.py", 128, *cut, n, TOKENS, 4) for n in (1, 2))
blocks = ceil(huge.layers / 4)
of_huge = deeper(one_block, two_blocks, blocks - 2)
peak_405b = sum(of_huge.values())
end = huge.vocab_size * huge.hidden_size
block = (huge.parameters - 2 * end - huge.hidden_size) // huge.layers
own = (blocks * block + end) // 8  # weights of the first stage, divided by tensor
zero_1 = 4 * own + 4 * own // 4  # weights and gradients whole; moments over 4 ranks
kept = 4 * blocks * 2 * TOKENS * huge.hidden_size // 8  # inputs of four micro-batches
gaps = two_blocks.reserved_bytes - two_blocks.peak_bytes
print(f"405B on 128: {peak_405b / 1e9:.1f} GB allocated by the script; GB: {shown(of_huge)}")
print(f"reserved beyond that, already with two blocks: {gaps / 1e9:.1f}")
print(f"by formula, ZeRO-1: {zero_1 / 1e9:.1f} + block inputs {kept / 1e9:.1f} = "
      f"{(zero_1 + kept) / 1e9:.1f}")  # fmt: skip

# %%
whole_weights, whole_embedding = 2 * block // 8, 2 * end
grown = {
    name: two_blocks.at_peak.get(name, 0) - one_block.at_peak.get(name, 0)
    for name in ("activations", "backward_temporaries")
}
print(f"a block's weights after tensor parallelism: {whole_weights:,} bytes")
for name, size in grown.items():
    print(f"a block more adds {size / whole_weights:.2f} times that to {name.replace('_', ' ')}")
print(f"the embedding, not divided: {whole_embedding / 1e9:.2f} GB; largest at the peak:")
show_largest(two_blocks, 2)

# %% [markdown]
# The tensors alone nearly fill an H100, and the allocator's gaps don't fit beside them. The formula
# does not know two things.

# %% [markdown]
# - FSDP2 is ZeRO-3 *between* steps. Inside a pipeline, torch keeps a block's gathered weights and
#   whole gradients until the last micro-batch: a block more adds one of each, as activations and
#   as backward temporaries. So it peaks like ZeRO-1, with the shards beside.
# - DTensor divides the embedding by 8. But its backward first makes the gradient of the **whole**
#   embedding on each rank: the sum over micro-batches, and that of the current micro-batch.

# %% [markdown]
# ## Explain the gap

# %%
stage_0 = found[0]["1F1B"]["bytes"]["activations"]
reveal("18.1", tensor_percent=100 * tensor / whole, stage_percent=100 * stage_0 / (2 * layer),
       bubble_percent=100 * bubbles["1F1B"] / bubbles["GPipe"],
       sends_percent=100 * passes["sequence"] / passes["tensor"])  # fmt: skip

# %% [markdown]
# The gaps. **Tensor**: norms and the residual stream stay whole. **Stage 0**: half of the layers,
# but two micro-batches in flight. **Bubble**: the first micro-batch must reach the last stage, and
# the last one must come back, in either order. **Sequence**: the inputs are gathered once more.

# %% [markdown]
# ## On your GPUs
#
# Both scripts run for real under `torchrun`. On a machine with 8 GPUs, the first command predicts
# a rank of Llama 3 8B, the second one measures all eight ranks of the same script:
#
# ```sh
# memlab run --ranks 8 benchmarks/llama/fsdp2.py llama-3-8b 32 2048 2
# torchrun --nproc-per-node 8 -m memlab run --real benchmarks/llama/fsdp2.py \
#     llama-3-8b 32 2048 2
# ```
#
# NCCL's buffers come on top: the first command prints them.

# %% [markdown]
# ## Rules on trial
#
# Four claims about parallel training that you can hear everywhere.

# %%
verdict(
    "32a",
    2 * tensor <= whole,
    f"two blocks save {whole:,} bytes in one process and {tensor:,} on each of two ranks "
    f"({tensor / whole:.0%}); with sequence parallelism {sequence:,} ({sequence / whole:.0%})",
    otherwise="it divides what is between two matmuls; inputs and outputs of norms and the "
    "residual stream stay whole, and are divided only with sequence parallelism",
)

# %%
flights_of_0 = [most_in_flight(order_of(0, P, M)) for order_of in SCHEDULES.values()]
verdict(
    "32b",
    bubbles["1F1B"] < bubbles["GPipe"],
    f"{P} stages, {M} micro-batches: idle for {bubbles['GPipe']:.1%} of the step with GPipe and "
    f"{bubbles['1F1B']:.1%} with 1F1B; stage 0 has {flights_of_0[0]} and {flights_of_0[1]} "
    f"micro-batches in flight",
    otherwise="the bubble is the same, (p − 1)/(m + p − 1); 1F1B has fewer micro-batches in flight",
)

# %%
last = found[1]["1F1B"]["bytes"]["activations"]
verdict(
    "32c",
    2 * stage_0 <= 2 * layer,
    f"two stages, four micro-batches, 1F1B: stage 0 saves {stage_0:,} bytes, stage 1 {last:,}; one "
    f"process, a micro-batch at a time, {2 * layer:,}",
    otherwise="stage i saves min(m, p − i) micro-batches of 1/p of the layers, so with m ≥ p the "
    "first stage saves as much as one GPU with all layers, and only the last one 1/p",
)

# %%
verdict(
    "32d",
    passes["sequence"] <= passes["tensor"],
    f"a block sends {passes['tensor']} passes of (t − 1)/t · tokens · width elements with tensor "
    f"parallelism, {passes['sequence']} with sequence parallelism, 2 of them to gather the inputs "
    f"of two matmuls again in backward",
    otherwise="a gather and a scatter send as much as an all-reduce, so the claim holds if the "
    "gathered inputs are saved; to save only the shard costs two more passes",
)

# %% [markdown]
# ## What you can do now
#
# | you have | divide by |
# | --- | --- |
# | too many weights, fast links between few GPUs | tensor, with sequence |
# | too many weights, slow links | pipeline; or ZeRO |
# | too long sequences | context |
# | many sequences | data |
#
# Ask of any of them: what stays whole on each rank? What is sent, and does a rank wait for it? What
# does the *worst* rank hold: the first stage, or the one with the logits? Then run the script dry.

# %% [markdown]
# ## The running bill
#
# One GPU, one step: there is nothing to divide. Today's line is Day 17's.

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
