# %% [markdown]
# # Day 10: Flash attention
#
# **Where did N² go?**
#
# After today you have built attention by tiles, forward and backward, can say to the byte what it
# keeps and what the score matrix would take, and know which half of the tiles a causal mask spares.
#
# About 90 minutes, 65 of them for four exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 10.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# Each query of a sequence is compared with each key: T tokens (the N of the question), T² *scores*.
# A *softmax* makes a row of them into probabilities, and these mix the values:
#
# out = softmax(scale · q kᵀ) v, with scale = 1 / √D
#
# D is the width of a head. T² numbers for every head of every layer: Days 1 and 3 showed what they
# take ("scores stored"), and said that *fused* attention stores none. But softmax divides by a sum
# over a **whole row**. So where did N² go?

# %%
import math
import time
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.patches import Patch, Rectangle

import memlab
from memlab.attention import attention_reference, flash_attention, tiles
from memlab.checkpointing.operations import Operations
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.bill import SETTING
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS, scaled_dot_product_attention
from memlab.train import combined, dry_trace
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# One layer of a 7B model: 32 heads of 128, one sequence of 8,192 tokens, in float32, causal (no
# query sees a later key). How many GiB does attention by way of the score matrix keep for backward,
# and how many at its fullest? And how many MiB does torch's fused attention keep, beyond q, k and
# v?

# %%
### BEGIN SOLUTION
guess("10.1", matrix_gib=8, fullest_gib=8, fused_mib=0)  # 32 · 8192² · 4 bytes; nothing
### END SOLUTION
### BEGIN STUB
# guess("10.1", matrix_gib=..., fullest_gib=..., fused_mib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# A dry run, which needs no memory: q, k and v have shapes and no values.


# %%
def of_a_layer(dtype=torch.float32, heads=32, kv_heads=32, T=8192, D=128):
    """q, k and v, and the gradient of the result."""
    made = (torch.zeros(1, T, h, D, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads))
    *qkv, dout = (x.transpose(1, 2) for x in made)
    return [x.requires_grad_() for x in qkv], dout


def kept_bytes(attend_by, **layer):
    """Beyond q, k and v: what waits for backward, the result among it."""
    with memlab.dry_run():
        (qkv, _), kept = of_a_layer(**layer), []
        trace = memlab.measure(lambda: kept.append(attend_by(*qkv, causal=True)))
    return trace.live_bytes - sum(x.nbytes for x in qkv)


def fullest_bytes(attend_by, **layer):
    """Beyond q, k, v and dout: the most in both passes."""
    with memlab.dry_run():
        qkv, dout = of_a_layer(**layer)
        trace = memlab.measure(lambda: torch.autograd.grad(attend_by(*qkv, causal=True), qkv, dout))
    return trace.peak_bytes - sum(x.nbytes for x in (*qkv, dout))


# %%
matrix, fullest = kept_bytes(attention_reference), fullest_bytes(attention_reference)
fused = kept_bytes(scaled_dot_product_attention)
reveal("10.1", matrix_gib=matrix, fullest_gib=fullest, fused_mib=fused)

# %% [markdown]
# 8 GiB are attention's probabilities. What is above 8: the scaled q, the result and the causal
# mask, 128, 128 and 64 MiB. At the fullest moment there are **three** such matrices: the
# probabilities, their gradient, and the scores' gradient.
#
# Fused attention keeps 129 MiB: the result, 128; and one number for each query of each head, 1.
# Which number?

# %% [markdown]
# ## Online softmax
#
# e^1000 is infinite, so softmax first subtracts the highest score of a row, `row_max`:
#
# probability = e^(score − row_max) / row_sum, with row_sum = Σ e^(score − row_max)
#
# That takes two passes over the row: one for row_max, one for row_sum. But a sum that was computed
# with a smaller row_max is off by a known factor. So one pass is enough, tile by tile: where a
# higher score turns up, **correct** the sum so far by e^(old row_max − new row_max). This is the
# **online softmax**.

# %%
row = 1.5 * torch.randn(32, generator=torch.Generator().manual_seed(3)) + torch.arange(32) / 16
row_max = row.cummax(0).values
row_sum = torch.stack([(row[: n + 1] - row_max[n]).exp().sum() for n in range(32)])
fig, (above, below) = plt.subplots(2, sharex=True, figsize=(9, 3.6), layout="constrained")
above.bar(range(32), row, color=[f"C{n // 8}" for n in range(32)], width=0.8)
above.step(range(32), row_max, where="mid", color="k", label="row_max so far")
above.set(ylabel="score", title="A row of scores in four tiles")
above.legend(frameon=False)
below.step(range(32), row_sum, where="mid", color="#882233")
ends = [7, 15, 23, 31]
at_ends = [f"{row_sum[n]:.2f}" for n in ends]
below.plot(ends, row_sum[ends], "o", color="#882233", label="after each tile")
for n, text in zip(ends, at_ends, strict=True):
    below.annotate(text, (n, row_sum[n]), (0, 5), textcoords="offset points", ha="center")
    above.axvline(n + 0.5, color="0.8", linewidth=0.8, zorder=0)
    below.axvline(n + 0.5, color="0.8", linewidth=0.8, zorder=0)
below.set(xlabel="key", ylabel="row_sum so far", ylim=(0, 1.25 * row_sum.max()))
below.legend(frameon=False, loc="upper left")
print(f"row_sum after each tile, with the row_max so far: {', '.join(at_ends)}")
print(f"softmax's own sum, with the last row_max: {(row - row.max()).exp().sum():.2f}")

# %% [markdown]
# Where row_max jumps up, row_sum falls: the scores before count for less. At the end row_sum is
# softmax's own sum.
#
# The weighted sum of the values is updated in the same way. Whatever a row's length, its state is
# three things: row_max, row_sum, and the **accumulator** acc = Σ e^(score − row_max) · value. At
# the end the output is acc / row_sum.

# %% [markdown]
# ### Exercise 10.1: online softmax
#
# About 12 minutes. You get the state of R rows so far: `row_max` and `row_sum` (…, R, 1), `acc`
# (…, R, D); and a tile of K keys: `scores` (…, R, K), `values` (…, K, D). Return the new row_max,
# row_sum and acc; do not change the arguments. A row that has seen no key yet has row_max −∞.
# Scores can be −∞ too, for keys that a query must not see. Then row_max may still be −∞ afterwards,
# and row_sum and acc are 0.


# %%
def add_tile(row_max, row_sum, acc, scores, values):
    ### BEGIN SOLUTION memlab.reference.tiled_attention.add_tile
    new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
    safe_max = new_max.masked_fill(new_max == -torch.inf, 0)  # −∞ − (−∞) is NaN
    probs, correction = (scores - safe_max).exp(), (row_max - safe_max).exp()
    row_sum = correction * row_sum + probs.sum(-1, keepdim=True)
    return new_max, row_sum, correction * acc + probs @ values
    ### END SOLUTION


# %%
add_tile = exercise("10.1", add_tile)

# %% [markdown]
# ## Tiles
#
# So the keys can come in pieces. Queries can anyway: rows don't know each other. What is left of
# the score matrix is a **tile**, some queries times some keys. It is computed, added to the state
# of its rows, and forgotten before the next one. Of a causal mask nearly half of the tiles need no
# visit: nobody sees anything there.

# %%
noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
x = noise.cumsum(0) / 3  # neighbours are alike
scores = (x @ x.T / 8**0.5).masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -torch.inf)
weights = (scores - scores.amax(-1, keepdim=True)).exp().sqrt()  # for the eye
visited = [tile for tile in tiles(64, 64, 16, causal=True) if tile.kind != "skipped"]
fig, panels = plt.subplots(2, 5, figsize=(9, 3.9), layout="constrained")
for number, axes in enumerate(panels.flat):
    for earlier in visited[:number]:
        corner = earlier.keys.start, earlier.queries.start
        axes.add_patch(Rectangle(corner, 16, 16, facecolor="0.88", edgecolor="w"))
    lit = visited[number]
    extent = (lit.keys.start, lit.keys.stop, lit.queries.stop, lit.queries.start)
    part = weights[lit.queries.start : lit.queries.stop, lit.keys.start : lit.keys.stop]
    axes.imshow(part.where(part > 0, torch.nan), extent=extent, cmap="plasma", vmin=0, vmax=1)
    axes.set(xlim=(0, 64), ylim=(64, 0), xticks=range(0, 65, 16), yticks=range(0, 65, 16))
    axes.tick_params(labelbottom=False, labelleft=False, length=0)
    axes.grid(color="0.8", linewidth=0.6)
    axes.set_title(f"tile {number + 1}", fontsize=9)
    axes.set(ylabel="queries" if number % 5 == 0 else "", xlabel="keys" if number > 4 else "")
_ = fig.suptitle(
    "64 × 64 scores, causal, a tile at a time (colour: the root of e^(score − row_max)); grey: gone"
)

# %% [markdown]
# Ten of sixteen are visited, and never is more there than the one in colour.

# %% [markdown]
# ## Which diagonal?
#
# Where there are as many queries as keys, causal means: query i sees the keys 0 … i. Where there
# are more keys, as with a *cache* of earlier tokens, there are two conventions. *Top-left*: still
# 0 … i. That is torch's `is_causal=True`. *Bottom-right*: the last query sees the last key, so
# query i sees 0 … i + keys − queries. That is the flash-attn package's, since 2.1.

# %%
kinds = [("top-left", 3, 8), ("bottom-right", 3, 8), ("bottom-right", 5, 3)]
ratios = (8.4, 8.4, 3.4)
fig, panels = plt.subplots(1, 3, figsize=(9, 2.6), width_ratios=ratios, layout="constrained")
for axes, (name, queries, keys) in zip(panels, kinds, strict=True):
    shift = 0 if name == "top-left" else keys - queries
    seen = torch.ones(queries, keys).tril(shift)
    axes.imshow(seen, cmap="Blues", vmin=0, vmax=1.6)
    for t in sorted(
        tiles(queries, keys, 2, causal=True, alignment=name), key=lambda t: t.kind != "skipped"
    ):
        corner, size = (t.keys.start - 0.5, t.queries.start - 0.5), (len(t.keys), len(t.queries))
        look = {"edgecolor": "0.6", "linestyle": ":"} if t.kind == "skipped" else {"edgecolor": "k"}
        axes.add_patch(Rectangle(corner, *size, fill=False, linewidth=1.5, **look))
    axes.set(xlim=(-0.7, keys - 0.3), ylim=(queries - 0.3, -0.7), anchor="N")
    axes.set(xticks=range(keys), yticks=range(queries), xlabel="key", ylabel="query")
    axes.spines[:].set_visible(False)
    axes.set_title(f"{name}: shift = {shift}".replace("-2", "−2"), fontsize=10)
legend = [Patch(facecolor="#4191c6", label="seen")]
legend += [Patch(fill=False, edgecolor="k", label="tile visited")]
legend += [Patch(fill=False, edgecolor="0.6", linestyle=":", label="skipped")]
fig.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
marks = torch.eye(5).view(1, 1, 5, 5)
seen = F.scaled_dot_product_attention(q, k, marks, is_causal=True)[0, 0]
print(f"torch, 2 queries, 5 keys: they see {seen.count_nonzero(1).tolist()} keys")

# %% [markdown]
# One number tells them apart, `shift`: **query i sees the keys up to i + shift**, those that there
# are. 0 is top-left, keys − queries is bottom-right, and keys (or more) hides nothing. With a cache
# top-left is wrong: of 2 new tokens behind 3 old ones, torch's first sees one key in place of
# four. No error tells you so. And bottom-right with more queries than keys (at the right) leaves
# the first ones nothing to see.

# %% [markdown]
# ### Exercise 10.2: which tiles are visited
#
# About 12 minutes. Cut `queries` × `keys` scores into tiles of `tile` × `tile`; the last may be
# smaller: slices end at `queries` and `keys`. Return a list of rows of tiles, from the top: each a
# pair of a slice of queries, and the list of the slices of keys that are visited, from the left.
# Visit a tile if one of its queries sees one of its keys, up to i + `shift`. A row in which nobody
# sees anything is there, with an empty list.


# %%
def plan(queries, keys, tile, shift):
    ### BEGIN SOLUTION memlab.reference.tiled_attention.plan
    rows = []
    for first in range(0, queries, tile):
        last = min(first + tile, queries)
        seen = min(last + shift, keys)  # by the last of these queries
        visited = [slice(n, min(n + tile, keys)) for n in range(0, seen, tile)]
        rows.append((slice(first, last), visited))
    return rows
    ### END SOLUTION


# %%
plan = exercise("10.2", plan)

# %% [markdown]
# Of n × n tiles a causal mask leaves n · (n + 1) / 2: the diagonal, and half of the rest.

# %%
for size in (8192, 2048, 512, 128):
    n = 8192 // size
    count = sum(len(columns) for _, columns in plan(8192, 8192, size, 0))
    print(f"tiles of {size:4}: {count:5,} of {n * n:5,}, {count / n**2:4.0%}", end="")
    print(f"; by the formula: {n * (n + 1) // 2:,}")

# %% [markdown]
# ## Forward
#
# On the diagonal a tile is seen in part. There its hidden scores become −∞:


# %%
def hide(scores, row, column, shift):
    """scores (…, R, K) of a tile: −∞ where the key is beyond query + shift."""
    pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    hidden = pairs.triu(row.start - column.start + shift + 1)
    return scores.masked_fill(hidden, -torch.inf)


# %% [markdown]
# At the end of a row there is one number more, that backward will need: the **log-sum-exp**, of
# all scores that the query sees:
#
# lse = ln Σ e^score = row_max + ln row_sum
#
# With it each weight can be made again from its score alone: e^(score − lse). One number has both
# row_max and row_sum in it.

# %% [markdown]
# ### Exercise 10.3: forward, tile by tile
#
# About 16 minutes. q is (…, Tq, D), k and v (…, Tk, D); the scores are q kᵀ / √D. Return `out`
# (…, Tq, D) and `lse` (…, Tq), in q's dtype, by `plan`, `hide` and `add_tile`. No tensor may have
# more numbers than q, and no tile stays. A query that sees nothing gets out 0 and lse **+∞** (you
# will see why). No product takes more than `tile` queries and `tile` keys. A slice goes into the
# brackets as it is: `q[..., row, :]`, `lse[..., row]`.


# %%
def attend(q, k, v, tile, shift):
    ### BEGIN SOLUTION memlab.reference.tiled_attention.attend
    out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])
    for row, columns in plan(q.shape[-2], k.shape[-2], tile, shift):
        part = q[..., row, :] * q.shape[-1] ** -0.5
        row_max = torch.full_like(part[..., :1], -torch.inf)
        row_sum, acc = torch.zeros_like(row_max), torch.zeros_like(part)
        for column in columns:
            scores = hide(part @ k[..., column, :].mT, row, column, shift)
            row_max, row_sum, acc = add_tile(row_max, row_sum, acc, scores, v[..., column, :])
        nothing = row_sum == 0
        out[..., row, :] = acc / row_sum.masked_fill(nothing, 1)
        lse[..., row] = (row_max + row_sum.log()).masked_fill(nothing, torch.inf).squeeze(-1)
    return out, lse
    ### END SOLUTION


# %%
attend = exercise("10.3", attend)

# %% [markdown]
# That is a forward pass. Will autograd do the rest? 4 heads of 64, 1,024 tokens, causal, by tiles
# of 128: the bytes that wait for backward, beyond q, k and v.


# %%
def random_qkv(T, heads=4, D=64, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, heads, T, D, generator=random).to(dtype) for _ in range(4))
    *qkv, dout = drawn
    return [x.requires_grad_() for x in qkv], dout


def waiting(call):
    """Bytes that wait for backward, the result among them."""
    kept = []
    trace = memlab.measure(lambda: kept.append(call()))
    kept.clear()
    return sum(event.bytes for event in trace.events if event.phase != "before")


qkv, _ = random_qkv(1024)
loop = waiting(lambda: attend(*qkv, 128, 0)[0])
for name, way in (("score matrix", attention_reference), ("torch", scaled_dot_product_attention)):
    print(f"{name:19}{format_bytes(waiting(partial(way, *qkv, causal=True))):>10}")
print(f"{'your loop of tiles':19}{format_bytes(loop):>10}")

# %% [markdown]
# **N² is back**, in small pieces. Autograd saves what each operator of each tile will need: its
# mask, its probabilities, the states in between. Forgetting has to be said. That is Day 5 once
# more, but a checkpoint around the loop would not do: its second run would have all tiles again.
# Backward has to go tile by tile, too.

# %% [markdown]
# ## Backward
#
# dout is the gradient of the result. For one head, with the probabilities P =
# e^(scores − lse); ∘ multiplies element by element:
#
# | gradient of | is |
# | --- | --- |
# | v | dv = Pᵀ dout |
# | the probabilities | dP = dout vᵀ |
# | the scores | dS = P ∘ (dP − delta), delta = rowsum(dout ∘ out) |
# | q | dq = scale · dS k |
# | k | dk = scale · dSᵀ q |

# %% [markdown]
# Softmax's gradient wants Σ P ∘ dP over a **whole row**, which no tile has. But Σⱼ Pᵢⱼ dPᵢⱼ =
# Σⱼ Pᵢⱼ (doutᵢ · vⱼ) = doutᵢ · outᵢ: the result has that sum in it already. So delta is one number
# a query, made before any tile is.

# %% [markdown]
# And a query that sees nothing: its scores are −∞, and with lse = −∞, which the formula gives,
# e^(−∞ − (−∞)) would be NaN. Any other lse makes its probabilities 0, and so all of its
# gradients. We take +∞, as the flash-attn package does: the probability is then 0 for any score.

# %% [markdown]
# ### Exercise 10.4: backward, tile by tile
#
# About 25 minutes. Write the Function: `flash(q, k, v, tile, shift)` gives `out`. Between forward
# and backward only q, k, v, out and lse are held, by `save_for_backward`; no tensor ever has more
# numbers than q. Each visited tile costs 2 products of matrices forward and 5 backward (the scores
# again, dv, dP, dq, dk). `backward` returns a gradient for each input of `forward`, `None` where it
# is no tensor, and leaves `dout` as it is.


# %%
class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, tile, shift):
        ### BEGIN SOLUTION memlab.reference.tiled_attention.Flash.forward
        out, lse = attend(q, k, v, tile, shift)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tile, ctx.shift = tile, shift
        return out
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 10.4, about 4 lines")
        ### END STUB

    @staticmethod
    def backward(ctx, dout):
        ### BEGIN SOLUTION memlab.reference.tiled_attention.Flash.backward
        q, k, v, out, lse = ctx.saved_tensors
        scale, delta = q.shape[-1] ** -0.5, (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for row, columns in plan(q.shape[-2], k.shape[-2], ctx.tile, ctx.shift):
            for column in columns:
                scores = scale * q[..., row, :] @ k[..., column, :].mT
                probs = (hide(scores, row, column, ctx.shift) - lse[..., row, None]).exp()
                dv[..., column, :] += probs.mT @ dout[..., row, :]
                dprobs = dout[..., row, :] @ v[..., column, :].mT
                dscores = scale * probs * (dprobs - delta[..., row, :])
                dq[..., row, :] += dscores @ k[..., column, :]
                dk[..., column, :] += dscores.mT @ q[..., row, :]
        return dq, dk, dv, None, None
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 10.4, about 13 lines")
        ### END STUB


# %%
def flash(q, k, v, tile, shift):
    return Flash.apply(q, k, v, tile, shift)


# %%
flash = exercise("10.4", flash)

# %% [markdown]
# ## Held against torch
#
# Values first: out, dq, dk and dv beside float64. Each way rounds, and none is exact. The
# flash-attn package asks of itself, in bfloat16, to be at most twice as far off as the score matrix
# in the same dtype (gradients three times), and so do we.


# %%
def by_tiles(q, k, v, *, causal, tile=128):
    return flash(q, k, v, tile, 0 if causal else k.shape[-2])


def passes(attend_by, qkv, dout):
    out = attend_by(*qkv, causal=True)
    return out.detach(), *torch.autograd.grad(out, qkv, dout)


def errors(attend_by, dtype, T=300):
    """The largest of out, dq, dk and dv."""
    qkv, dout = random_qkv(T, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    wanted = passes(attention_reference, exact, dout.double())
    found = passes(attend_by, qkv, dout)
    return [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]


# %%
WAYS = {"score matrix": attention_reference, "yours": by_tiles, "memlab": flash_attention}
WAYS["torch"] = scaled_dot_product_attention
naive = errors(attention_reference, torch.bfloat16)
for name, way in WAYS.items():
    is_near = max(errors(way, torch.float32)) < 1e-5
    halved = zip(errors(way, torch.bfloat16), naive, (2, 3, 3, 3), strict=True)
    within = all(off <= most * matrix_off for off, matrix_off, most in halved)
    print(f"{name:13} float32 off by less than 1e-5: {is_near}, bfloat16 within the rule: {within}")

# %% [markdown]
# And bytes and operations: 1,024 tokens, 4 heads of 64, causal; what is kept beyond q, k and v, and
# the peak of both passes beyond these and dout.


# %%
def peak_bytes(way, qkv, dout):
    return memlab.measure(partial(passes, way, qkv, dout)).peak_bytes - 4 * dout.nbytes


qkv, dout = random_qkv(1024)
product = 2 * 4 * 1024**2 * 64  # operations of one, over all scores
real = {name: peak_bytes(way, qkv, dout) for name, way in WAYS.items()}
for name, way in WAYS.items():
    held = waiting(partial(way, *qkv, causal=True))
    with Operations() as counter:
        passes(way, qkv, dout)
    print(f"{name:13}keeps {format_bytes(held):>10}, peak {format_bytes(real[name]):>10}, ", end="")
    print(f"{counter.total / product:.2f} products")

# %% [markdown]
# Yours keeps what torch's keeps, to the byte: 4 heads × 1,024 queries × (64 + 1) numbers. By way of
# the matrix it is 6 products, as backward has the probabilities. Tiles recompute them: 7. Of 8 × 8
# tiles the mask leaves 36, and 7 · 36/64 = 3.94; memlab's tiles are of 256, so 7 · 10/16 = 4.38,
# and one takes more room. (torch's is a formula, as if nothing were skipped.) That is Day 6's
# bargain: the probabilities take the most memory and are among the cheapest to recompute.

# %% [markdown]
# ## Slopes 2 and 1
#
# Now the lengths: the peak of both passes, beyond q, k, v and dout. On these axes a power of the
# length is a straight line, and its slope is the power. Yours is run; the others go further, by dry
# runs. (In those the library visits one tile of each shape only; the last line compares.)

# %%
LENGTHS = [2**n for n in range(10, 15)]
small = {"heads": 4, "kv_heads": 4, "D": 64}
peaks = {
    name: [fullest_bytes(WAYS[name], T=T, **small) for T in LENGTHS]
    for name in ("score matrix", "memlab", "torch")
}
peaks["yours"] = [real["yours"], peak_bytes(by_tiles, *random_qkv(2048))]
for name, sizes in peaks.items():
    longest, slope = LENGTHS[len(sizes) - 1], math.log2(sizes[-1] / sizes[-2])
    print(f"{name:13} {format_bytes(sizes[-1]):>9} at {longest:6,} tokens, last slope {slope:.2f}")
print(f"memlab at 1,024, dry run and real run alike: {real['memlab'] == peaks['memlab'][0]}")

# %%
fig, axes = plt.subplots(figsize=(9, 4), layout="constrained")
looks = {"score matrix": ("o-", "#cc6677"), "memlab": ("o-", "C0"), "torch": ("s--", "0.4")}
looks["yours"] = ("D-", "#ddaa33")
for name, (marker, colour) in looks.items():
    sizes = peaks[name]
    axes.loglog(LENGTHS[: len(sizes)], sizes, marker, color=colour, label=name)
axes.text(4096, 1.6e9, "slope 2", color="#882233", rotation=37, ha="center")
axes.text(9000, 1.0e7, "slope 1", color="0.3", rotation=20, ha="center")
axes.set_xticks(LENGTHS, [f"{T:,}" for T in LENGTHS])
axes.minorticks_off()
powers = [2**n for n in range(20, 37, 2)]
axes.set_yticks(powers, [format_bytes(size).replace(".00", "") for size in powers])
axes.set(
    xlabel="tokens",
    ylabel="peak beyond q, k, v, dout",
    title="Causal attention, both passes: 4 heads of 64",
)
axes.legend(frameon=False, loc="upper left")
axes.grid(alpha=0.3)

# %% [markdown]
# At 16,384 tokens 12 GiB against 66 MiB. What is left grows with the length as q does: the result,
# lse and three gradients. The tiles are a constant, which bends the line at its short end. torch's
# kernel has its tiles in a scratch of its own, which are no tensors: its line is straight.

# %% [markdown]
# And the time? A ratio, on this machine, of the best of three rounds: 1,024 tokens, causal.


# %%
def seconds(way, qkv, dout):
    found = []
    for _ in range(3):
        start = time.process_time()
        passes(way, qkv, dout)
        found.append(time.process_time() - start)
    return min(found)


shorter = random_qkv(1024)
took = {name: seconds(way, *shorter) for name, way in WAYS.items()}

# %% tags=["nbval-ignore-output"] reason="a time"
for name, spent in took.items():
    print(f"{name:13} {spent / took['score matrix']:.2f} × the time of the score matrix")

# %% [markdown]
# Fewer products here, as nearly half of the tiles is skipped; and a tile stays in the processor's
# cache. (Yours starts many small operators from Python, which eats up part of that, or all.)
# Without a mask it is 7 products against 6. The name says *flash* all the same: on a GPU the
# matrix's way to memory and back takes longer than the products.
#
# ## In a model
#
# The model takes it as it took torch's: 8 steps of the tiny one on torch's own source.


# %%
def learn(attend_by, steps=8):
    torch.manual_seed(0)
    model, losses = GPT(PRESETS["tiny"], attention=attend_by), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    drawn = batches(source_bytes("64 KiB"), 8, 64, seed=0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*next(drawn))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def repeated(q, k, v, *, causal):
    """Two query heads share a key here: a copy for each."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return by_tiles(q, k, v, causal=causal, tile=24)


mine, torchs = learn(repeated), learn(scaled_dot_product_attention)
print(f"the loss fell from {mine[0]:.1f} to {mine[-1]:.1f}")
print(f"all 8 losses equal torch's to 1e-4: {torch.allclose(mine, torchs, atol=1e-4)}")

# %% [markdown]
# The tiny model's heads are *grouped*: two query heads share a key head. You can copy k and v for
# each query head. The library instead makes the queries of a group rows of one matrix, so that the
# product for dk and dv also sums over the group.
#
# `memlab.attention.flash_attention` also has windows, dropout with a mask recomputed from a seed,
# and float32 sums for bfloat16. `memlab.attention.package_interface` takes the arguments of the
# package's `flash_attn_func`: there q is (batch, tokens, heads, width), and causal means the
# bottom-right diagonal.

# %% [markdown]
# ## At scale: seven billion
#
# What one layer keeps for backward, q, k and v with it, for one sequence of 8,192 tokens, in
# bfloat16: by formula and by dry runs. Llama 3 8B has 4 query heads to a key head.


# %%
def kept_by_tiles(config, tokens, element=2):
    """q and the result; k and v; a float32 for each query of each head."""
    q, kv = config.hidden_size, config.kv_heads * config.head_dim
    return tokens * ((2 * q + 2 * kv) * element + 4 * config.heads)


def given_bytes(config, tokens, element=2):
    return tokens * (config.hidden_size + 2 * config.kv_heads * config.head_dim) * element


for name in ("llama-2-7b", "llama-3-8b"):
    config, given = PRESETS[name], given_bytes(PRESETS[name], 8192)
    print(f"{name}: by formula {format_bytes(kept_by_tiles(config, 8192))}")
    for way in ("score matrix", "memlab", "torch"):
        layer = {"dtype": torch.bfloat16, "kv_heads": config.kv_heads}
        held, most = (f(WAYS[way], **layer) for f in (kept_bytes, fullest_bytes))
        print(f"  {way:13} keeps {format_bytes(held + given):>10}, ", end="")
        print(f"at its fullest {format_bytes(most + given):>10}")

# %% [markdown]
# For 32 layers that is 140 GiB against 8, or against 5 with grouped heads. The matrix gains nothing
# from groups: k and v are 96 MiB smaller, and copied for each query head they are 128 more. (At the
# fullest moment all have gradients of q, k and v, too; the library sums dk and dv in float32.)
#
# A checkpoint around each block forgets the probabilities as well; but one block's are there at a
# time, some 12 GiB at their fullest. Tiles and checkpoints go together.

# %% [markdown]
# ## On your GPU
#
# Where there is a GPU, this takes both passes of attention on it, in bfloat16. (There, a tile of
# scores belongs into registers: see `memlab/kernels/attention.py`, in Triton.)

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    qkv, dout = random_qkv(4096, heads=8, D=64, dtype=torch.bfloat16)
    qkv, dout = [x.detach().to(gpu).requires_grad_() for x in qkv], dout.to(gpu)
    for name, way in WAYS.items():
        trace = memlab.measure(partial(passes, way, qkv, dout), device=gpu.type)
        print(f"{name:13} {format_bytes(trace.peak_bytes - 4 * dout.nbytes)}")
else:
    print(stored_on_a_gpu("day 10"))

# %% [markdown]
# ## Rules on trial
#
# A guide has both numbers of this day's question, of one layer at 8,192 tokens. It names no width:
# 32 heads of 128, as in Llama 2 7B, are meant here. GB are 10⁹ bytes.

# %%
MB, GB = 10**6, 10**9
one_head = 8192**2 * 4
halved = [f(attention_reference, dtype=torch.bfloat16) for f in (kept_bytes, fullest_bytes)]
verdict(
    "20a",
    round(one_head / 2**20) == 256 and abs(matrix / 2**30 - 8) < 0.5,
    f"one head's matrix: {format_bytes(one_head)} ({one_head / MB:.0f} MB) in float32, half of it "
    f"in bfloat16; kept for backward by 32 heads, with the scaled q, mask and result: "
    f"{matrix / GB:.1f} GB, in bfloat16 {halved[0] / GB:.1f}; at its fullest {fullest / GB:.1f} "
    f"and {halved[1] / GB:.1f} GB",
    condition="roughly, in MiB and GiB, for what is kept of one sequence in float32; in bfloat16 "
    "it is half, and at the fullest moment, in backward, there are three such matrices",
)

# %%
in_16, in_32 = (kept_bytes(flash_attention, dtype=d) for d in (torch.bfloat16, torch.float32))
qkv_bytes = given_bytes(PRESETS["llama-2-7b"], 8192)
twice = kept_bytes(flash_attention, dtype=torch.bfloat16, T=16384)
verdict(
    "20b",
    100 * MB / 1.5 < in_16 < in_32 < 100 * MB * 1.5 and twice == 2 * in_16,
    f"beyond q, k and v, the result and lse: {in_16 / MB:.0f} MB in bfloat16, {in_32 / MB:.0f} in "
    f"float32, at twice the length {twice / in_16:.2f} ×; with q, k and v "
    f"{(in_16 + qkv_bytes) / MB:.0f} and {(in_32 + 2 * qkv_bytes) / MB:.0f} MB",
    condition="roughly, for what attention adds to q, k and v: a third less in bfloat16, a third "
    "more in float32; backward needs those, too, and with them it is some 270 MB in bfloat16",
)

# %% [markdown]
# ## What you can do now
#
# Of one layer, with T tokens, H heads of width D, KV of them for keys and values, C = H · D:
#
# | kept for backward | numbers | of 7B at 8,192, bfloat16 |
# | --- | --- | --- |
# | q, k, v | T · (C + 2 · KV · D) | 192 MiB |
# | by tiles: result and lse | T · C + T · H (float32) | 65 MiB |
# | by matrix: the probabilities | H · T² | 4 GiB, three such at the fullest |
#
# N² went into time: each score is computed twice, and lives as long as its tile. You can say which
# tiles a mask spares, which of two diagonals a library means, and why backward needs one number a
# query.
#
# Tomorrow: the largest tensor of a modern model.

# %% [markdown]
# ## The running bill
#
# One training step of 124M parameters on 8 × 640 tokens. Today it gets no shorter: torch's
# attention goes by tiles as well, and has since Day 1. So here is what Day 1 would have been by way
# of the score matrix:

# %%
eager = dry_trace(SETTING, combined("fused-adamw+eager-attention"))
print(f"Day 1's step with the score matrix: {format_bytes(eager.peak_bytes)}", end="")
print(f", of it activations {format_bytes(eager.at_peak['activations'])}")
weights_of_all = 12 * 8 * 12 * 640**2 * 4
print(f"12 layers × 8 × 12 heads × 640² × 4 bytes: {format_bytes(weights_of_all)}")

# %% [markdown]
# 1.76 GiB more, and what goes with them. In today's step one sequence is there at a time and every
# block is computed again: one block's scores, 12 · 640² · 2 bytes or 9.4 MiB a matrix, and they are
# gone where the peak lies. So there the matrix would cost nothing; at one sequence of 5,120 tokens
# they are 600 MiB a matrix, and it would. (`tests/course/test_day10.py` measures both.)

# %% [markdown]
# The same test takes that step with the library's tiles: the same peak as with torch's, to the
# byte. Day 6's selection has to be told to keep `flash_attention`, beside torch's operators; then
# it keeps as many bytes as of torch's. Your own Function it does not know: that would run once
# more. The bill stays with torch's.

# %%
running_bill(10)

# %% [markdown]
# ## Sources
#
# - Vaswani et al. 2017: [Attention Is All You Need](https://arxiv.org/abs/1706.03762)
# - Milakov and Gimelshein 2018: [Online normalizer calculation for
#   softmax](https://arxiv.org/abs/1805.02867)
# - Dao et al. 2022: [FlashAttention: Fast and Memory-Efficient Exact Attention with
#   IO-Awareness](https://arxiv.org/abs/2205.14135)
# - Dao 2023: [FlashAttention-2: Faster Attention with Better Parallelism and Work
#   Partitioning](https://arxiv.org/abs/2307.08691)
# - PyTorch:
#   [scaled_dot_product_attention](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html)
# - Dao-AILab: [flash-attention, the package](https://github.com/Dao-AILab/flash-attention)
#
# The rules on trial are from:
#
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
