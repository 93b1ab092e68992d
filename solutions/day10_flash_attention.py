# %% [markdown]
# # Day 10: Flash attention
#
# **How does attention work without the T × T score matrix?**
#
# Today you build tiled attention, forward and backward. Afterwards you can compute to the byte what
# it saves for backward and what the score matrix would need, and you know which tiles a causal mask
# skips.
#
# About 90 minutes, 65 of them for four exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before: **guess**, **measure**, then **build** what explains the gap. In an exercise, replace
# `raise NotImplementedError` with your own lines; the cell below it checks them. If you are stuck,
# run `memlab hint 10.1` in a terminal. You can skip an exercise: the lesson then uses the
# reference.

# %% [markdown]
# ## The question
#
# Attention compares each query with each key: T tokens give T² *scores*. A *softmax* turns each row
# of scores into probabilities, and the output is the weighted sum of the values:
#
# out = softmax(scale · q kᵀ) v, with scale = 1 / √D
#
# D is the head dimension. Every head of every layer has T² scores. Days 1 and 3 measured attention
# that stores them; *fused* attention stores none. But softmax divides by a sum over a **whole
# row**. How can fused attention compute the softmax without storing the row?

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
# Take one layer of a 7B model: 32 heads with head dimension 128, one sequence of 8,192 tokens,
# float32, a causal mask (no query sees a later key).
#
# - Attention with the score matrix: how many GiB does it save for backward, and how many GiB does
#   it use at its peak?
# - torch's fused attention: how many MiB does it save, beyond q, k and v?

# %%
### BEGIN SOLUTION
guess("10.1", matrix_gib=8, peak_gib=8, fused_mib=0)  # 32 · 8192² · 4 bytes; 0
### END SOLUTION
### BEGIN STUB
# guess("10.1", matrix_gib=..., peak_gib=..., fused_mib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# A dry run needs no memory: its q, k and v have shapes but no values.


# %%
def layer_inputs(dtype=torch.float32, heads=32, kv_heads=32, T=8192, D=128):
    """Return [q, k, v], each (1, heads, T, D), and dout, the gradient of the output."""
    zeros = (torch.zeros(1, T, h, D, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads))
    *qkv, dout = (x.transpose(1, 2) for x in zeros)
    return [x.requires_grad_() for x in qkv], dout


def saved_bytes(attention, **layer):
    """Return the bytes saved for backward beyond q, k and v, the output included."""
    with memlab.dry_run():
        (qkv, _), kept = layer_inputs(**layer), []
        trace = memlab.measure(lambda: kept.append(attention(*qkv, causal=True)))
    return trace.live_bytes - sum(x.nbytes for x in qkv)


def both_passes_peak(attention, **layer):
    """Return the peak of both passes, beyond q, k, v and dout."""
    with memlab.dry_run():
        qkv, dout = layer_inputs(**layer)
        trace = memlab.measure(lambda: torch.autograd.grad(attention(*qkv, causal=True), qkv, dout))
    return trace.peak_bytes - sum(x.nbytes for x in (*qkv, dout))


# %%
matrix, peak = saved_bytes(attention_reference), both_passes_peak(attention_reference)
fused = saved_bytes(scaled_dot_product_attention)
reveal("10.1", matrix_gib=matrix, peak_gib=peak, fused_mib=fused)

# %% [markdown]
# Attention with the score matrix saves 8.31 GiB:
#
# - the probabilities: 8 GiB
# - the scaled q and the output: 128 MiB each
# - the causal mask: 64 MiB
#
# At the peak there are **three** matrices of 8 GiB: the probabilities, their gradient, and the
# gradient of the scores.
#
# Fused attention saves 129 MiB: the output (128 MiB), and one element for each query of each head
# (1 MiB, explained below).

# %% [markdown]
# ## Online softmax
#
# e^1000 overflows to infinity, so softmax first subtracts the highest score of a row, `row_max`:
#
# probability = e^(score − row_max) / row_sum, with row_sum = Σ e^(score − row_max)
#
# This needs two passes over the row: one for row_max, one for row_sum. **Online softmax** needs one
# pass, over one part of the row (a *tile*) at a time. When a tile has a higher score, **correct**
# the sum so far: multiply it by e^(old row_max − new row_max).

# %%
row = 1.5 * torch.randn(32, generator=torch.Generator().manual_seed(3)) + torch.arange(32) / 16
row_max = row.cummax(0).values
row_sum = torch.stack([(row[: n + 1] - row_max[n]).exp().sum() for n in range(32)])
fig, (above, below) = plt.subplots(2, sharex=True, figsize=(9, 3.6), layout="constrained")
above.bar(range(32), row, color=[f"C{n // 8}" for n in range(32)], width=0.8)
above.step(range(32), row_max, where="mid", color="k", label="row_max so far")
above.set(ylabel="score", title="Online softmax: a row of scores in four tiles")
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
print(f"row_sum after each tile, relative to the row_max so far: {', '.join(at_ends)}")
print(f"row_sum of ordinary softmax, in two passes: {(row - row.max()).exp().sum():.2f}")

# %% [markdown]
# Where row_max jumps up, row_sum falls, because the earlier scores now count for less. At the end,
# row_sum equals the sum of ordinary softmax.
#
# The weighted sum of the values is updated in the same way. The state of a row has three parts,
# however long the row is: row_max, row_sum, and the **accumulator** acc = Σ e^(score − row_max) ·
# value. At the end the output is acc / row_sum.

# %% [markdown]
# ### Exercise 10.1: online softmax
#
# About 12 minutes. You get the state of R rows, `row_max` and `row_sum` (…, R, 1) and `acc` (…, R,
# D), and a tile of K keys, `scores` (…, R, K) and `values` (…, K, D). Return the new row_max,
# row_sum and acc as new tensors. Leave the arguments as they are, and build no tensor of R × K × D
# elements.
#
# Before its first key, a row has row_max −∞. Masked scores are −∞ too. If a row has seen only
# masked scores, row_max stays −∞, and row_sum and acc stay 0.


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
# Keys can be processed in tiles, as you just saw. So can queries, because rows are independent.
# Only one **tile** of the score matrix (some queries × some keys) exists at a time. You compute it,
# add it to the state of its rows, and free it before the next tile.
#
# With a causal mask, nearly half of the tiles are fully masked. You skip them.

# %%
noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
x = noise.cumsum(0) / 3  # neighbours are similar
scores = (x @ x.T / 8**0.5).masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -torch.inf)
shades = (scores - scores.amax(-1, keepdim=True)).exp().sqrt()  # sqrt: small ones stay visible
visited = [tile for tile in tiles(64, 64, 16, causal=True) if tile.kind != "skipped"]
fig, panels = plt.subplots(2, 5, figsize=(9, 3.9), layout="constrained")
for number, axes in enumerate(panels.flat):
    for earlier in visited[:number]:
        corner = earlier.keys.start, earlier.queries.start
        axes.add_patch(Rectangle(corner, 16, 16, facecolor="0.88", edgecolor="w"))
    rows, columns = visited[number].queries, visited[number].keys
    extent = (columns.start, columns.stop, rows.stop, rows.start)
    shown = shades[rows.start : rows.stop, columns.start : columns.stop]
    axes.imshow(shown.where(shown > 0, torch.nan), extent=extent, cmap="plasma", vmin=0, vmax=1)
    axes.set(xlim=(0, 64), ylim=(64, 0), xticks=range(0, 65, 16), yticks=range(0, 65, 16))
    axes.tick_params(labelbottom=False, labelleft=False, length=0)
    axes.grid(color="0.8", linewidth=0.6)
    axes.set_title(f"tile {number + 1}", fontsize=9)
    axes.set(ylabel="queries" if number % 5 == 0 else "", xlabel="keys" if number > 4 else "")
_ = fig.suptitle(
    "64 × 64 scores, causal, one tile at a time (colour: √e^(score − row_max); grey: freed)"
)

# %% [markdown]
# Ten of sixteen tiles are visited. In each panel, only the coloured tile exists.

# %% [markdown]
# ## Two causal alignments
#
# With as many queries as keys, causal means that query i sees the keys 0 … i. With more keys than
# queries, for example with a *KV cache*, there are two conventions:
#
# - *Top-left*: query i still sees the keys 0 … i. torch's `is_causal=True` does this.
# - *Bottom-right*: the last query sees the last key, so query i sees the keys 0 … i + keys −
#   queries. The flash-attn package does this since version 2.1.

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
print(f"torch, 2 queries, 5 keys: the queries see {seen.count_nonzero(1).tolist()} keys")

# %% [markdown]
# One integer, `shift`, describes both: **query i sees the keys up to i + shift**.
#
# | shift | mask |
# | --- | --- |
# | 0 | top-left |
# | keys − queries | bottom-right |
# | keys or more | no mask |
#
# With a KV cache, top-left is wrong, and no error warns you: with 3 cached and 2 new tokens,
# torch's first query sees one key instead of four. Bottom-right with more queries than keys (right
# panel) hides every key from the first queries.

# %% [markdown]
# ### Exercise 10.2: which tiles are visited
#
# About 12 minutes. Cut `queries` × `keys` scores into tiles of `tile` × `tile`. The last tiles may
# be smaller: slices end at `queries` and `keys`.
#
# Return a list of the rows of tiles, from top to bottom. Each row is a pair: a slice of queries,
# and the list of slices of keys to visit, from left to right. Query i sees the keys up to i +
# `shift`. Visit a tile if any of its queries sees any of its keys. A row that sees no keys has an
# empty list.


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
# Of n × n tiles, a causal mask leaves n · (n + 1) / 2: the diagonal and the tiles below it.

# %%
for size in (8192, 2048, 512, 128):
    n = 8192 // size
    count = sum(len(columns) for _, columns in plan(8192, 8192, size, 0))
    print(f"tiles of {size:4}: {count:5,} of {n * n:5,}, {count / n**2:4.0%}", end="")
    print(f"; formula: {n * (n + 1) // 2:,}")

# %% [markdown]
# ## Forward
#
# A tile on the diagonal is partly masked. Its masked scores become −∞:


# %%
def hide(scores, row, column, shift):
    """Mask a tile's scores (…, R, K): −∞ where the key is beyond query + shift."""
    pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    hidden = pairs.triu(row.start - column.start + shift + 1)
    return scores.masked_fill(hidden, -torch.inf)


# %% [markdown]
# At the end of a row, compute one more value for backward, the **log-sum-exp** of all scores that
# the query sees:
#
# lse = ln Σ e^score = row_max + ln row_sum
#
# Backward can recompute each probability from its score and lse: e^(score − lse). So lse replaces
# both row_max and row_sum.

# %% [markdown]
# ### Exercise 10.3: forward, tile by tile
#
# About 16 minutes. q is (…, Tq, D), k and v are (…, Tk, D). Return `out` (…, Tq, D) and `lse` (…,
# Tq) in q's dtype. Use `plan`, `hide` and `add_tile`.
#
# - The scores are q kᵀ / √D.
# - No tensor has more elements than q, and no tile is kept.
# - A query that sees no keys gets out 0 and lse **+∞** (explained below).
# - No matmul uses more than `tile` queries and `tile` keys.
# - Index with the slices of `plan`: `q[..., row, :]`, `lse[..., row]`.


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
# Is autograd's backward good enough? Measure the bytes saved for backward, beyond q, k and v: 4
# heads with head dimension 64, 1,024 tokens, causal, tiles of 128.


# %%
def random_qkv(T, heads=4, D=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    *qkv, dout = (torch.randn(1, heads, T, D, generator=generator).to(dtype) for _ in range(4))
    return [x.requires_grad_() for x in qkv], dout


def saved_by(call):
    """Return the bytes saved for backward, the output included."""
    kept = []
    trace = memlab.measure(lambda: kept.append(call()))
    kept.clear()
    return sum(event.bytes for event in trace.events if event.phase != "before")


qkv, _ = random_qkv(1024)
loop_bytes = saved_by(lambda: attend(*qkv, 128, 0)[0])
matrix_bytes = saved_by(partial(attention_reference, *qkv, causal=True))
fused_bytes = saved_by(partial(scaled_dot_product_attention, *qkv, causal=True))
print(f"score matrix {format_bytes(matrix_bytes):>10}")
print(f"torch        {format_bytes(fused_bytes):>10}")
print(f"your loop    {format_bytes(loop_bytes):>10}")

# %% [markdown]
# **The T² elements are back**, as many small tensors. Autograd saves what each operator of each
# tile needs: masks, probabilities, intermediate states.
#
# Checkpointing the loop, as on Day 5, would not help: the recomputation in backward would save
# every tile again. Backward has to go tile by tile, too.

# %% [markdown]
# ## Backward
#
# dout is the gradient of the output. For one head, with the probabilities P = e^(scores − lse) and
# ∘ for the elementwise product:
#
# | gradient of | formula |
# | --- | --- |
# | v | dv = Pᵀ dout |
# | the probabilities | dP = dout vᵀ |
# | the scores | dS = P ∘ (dP − delta), delta = rowsum(dout ∘ out) |
# | q | dq = scale · dS k |
# | k | dk = scale · dSᵀ q |

# %% [markdown]
# Softmax's gradient needs Σ P ∘ dP over a **whole row**, but a tile has only part of the row. The
# output helps: Σⱼ Pᵢⱼ dPᵢⱼ = Σⱼ Pᵢⱼ (doutᵢ · vⱼ) = doutᵢ · outᵢ. So delta is one element per query,
# computed before the first tile.

# %% [markdown]
# For a query that sees no keys, the scores are −∞. The formula gives lse = −∞, and e^(−∞ − (−∞))
# would be NaN. Any other lse makes its probabilities 0, and with them its gradients. We use +∞, as
# the flash-attn package does: then the probability is 0 for every score.

# %% [markdown]
# ### Exercise 10.4: backward, tile by tile
#
# About 25 minutes. Write the `torch.autograd.Function`; `flash(q, k, v, tile, shift)` returns
# `out`.
#
# - Save only q, k, v, out and lse, with `save_for_backward`.
# - No tensor has more elements than q.
# - Each visited tile needs 2 matmuls in forward and 5 in backward (scores, dv, dP, dq, dk).
# - `backward` returns dq, dk and dv, and `None` for tile and shift. It does not change `dout`.


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
# ## Comparison with torch
#
# First compare the values of out, dq, dk and dv with float64. Every implementation rounds, so none
# is exact. The flash-attn package's own tests allow, in bfloat16, at most twice the error of the
# score matrix in the same dtype (three times for gradients). We use the same limits.


# %%
def tiled(q, k, v, *, causal, tile=128):
    return flash(q, k, v, tile, 0 if causal else k.shape[-2])


def passes(attention, qkv, dout):
    out = attention(*qkv, causal=True)
    return out.detach(), *torch.autograd.grad(out, qkv, dout)


def errors(attention, dtype, T=300):
    """Return the largest errors of out, dq, dk and dv."""
    qkv, dout = random_qkv(T, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    wanted = passes(attention_reference, exact, dout.double())
    found = passes(attention, qkv, dout)
    return [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]


# %%
VERSIONS = {"score matrix": attention_reference, "yours": tiled, "memlab": flash_attention}
VERSIONS["torch"] = scaled_dot_product_attention
matrix_errors = errors(attention_reference, torch.bfloat16)
limits = [factor * error for factor, error in zip((2, 3, 3, 3), matrix_errors, strict=True)]
for name, attention in VERSIONS.items():
    is_near = max(errors(attention, torch.float32)) < 1e-5
    pairs = zip(errors(attention, torch.bfloat16), limits, strict=True)
    within = all(error <= limit for error, limit in pairs)
    print(f"{name:13} float32 error below 1e-5: {is_near}, bfloat16 error within limits: {within}")

# %% [markdown]
# Now compare bytes and operations, for 1,024 tokens and 4 heads with head dimension 64, causal. The
# saved bytes are beyond q, k and v; the peak of both passes is beyond q, k, v and dout.


# %%
def peak_bytes(attention, qkv, dout):
    return memlab.measure(partial(passes, attention, qkv, dout)).peak_bytes - 4 * dout.nbytes


qkv, dout = random_qkv(1024)
matmul = 2 * 4 * 1024**2 * 64  # operations of one matmul over all scores
measured = {name: peak_bytes(attention, qkv, dout) for name, attention in VERSIONS.items()}
for name, attention in VERSIONS.items():
    saved = saved_by(partial(attention, *qkv, causal=True))
    with Operations() as counter:
        passes(attention, qkv, dout)
    print(f"{name:13}saves {format_bytes(saved):>9}, ", end="")
    print(f"peak {format_bytes(measured[name]):>9}, ", end="")
    print(f"{counter.total / matmul:.2f} matmuls")

# %% [markdown]
# Your version saves exactly as many bytes as torch's: 4 heads × 1,024 queries × (64 + 1) elements.
#
# | implementation | matmuls over all scores |
# | --- | --- |
# | score matrix | 6: backward has the saved probabilities |
# | yours | 7 with recomputation; the mask leaves 36 of 64 tiles: 7 · 36/64 = 3.94 |
# | memlab | 7; with tiles of 256 the mask leaves 10 of 16: 7 · 10/16 = 4.38 |
# | torch | 7: the counter's formula ignores the mask |
#
# Recomputation pays off here for the same reason as on Day 6: the probabilities need the most
# memory, and are among the cheapest tensors to recompute.

# %% [markdown]
# ## Quadratic and linear growth
#
# Vary the sequence length and measure the peak of both passes, beyond q, k, v and dout. On log-log
# axes a power of the length is a straight line, and its slope is the exponent.
#
# Your version runs for real. The other three are dry runs, which reach longer sequences. (In a dry
# run the library visits only one tile of each shape. The last line compares it with a real run.)

# %%
LENGTHS = [2**n for n in range(10, 15)]
small = {"heads": 4, "kv_heads": 4, "D": 64}
peaks = {
    name: [both_passes_peak(VERSIONS[name], T=T, **small) for T in LENGTHS]
    for name in ("score matrix", "memlab", "torch")
}
peaks["yours"] = [measured["yours"], peak_bytes(tiled, *random_qkv(2048))]
for name, sizes in peaks.items():
    longest, slope = LENGTHS[len(sizes) - 1], math.log2(sizes[-1] / sizes[-2])
    print(f"{name:13} {format_bytes(sizes[-1]):>9} at {longest:6,} tokens, last slope {slope:.2f}")
equal = measured["memlab"] == peaks["memlab"][0]
print(f"memlab at 1,024 tokens, dry run equals real run: {equal}")

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
    ylabel="peak bytes beyond q, k, v, dout",
    title="Causal attention, forward and backward: 4 heads, head dimension 64",
)
axes.legend(frameon=False, loc="upper left")
axes.grid(alpha=0.3)

# %% [markdown]
# At 16,384 tokens the score matrix needs 12.30 GiB, and memlab's tiles 66.51 MiB. Of these, 64.25
# MiB are the output, lse and three gradients, all proportional to the length.
#
# The tiles themselves add a constant, so memlab's line bends at short lengths. torch's kernel keeps
# its tiles in scratch memory outside of tensors, so its line is straight.

# %% [markdown]
# Now compare the time: the best of three rounds on this machine, relative to the score matrix, for
# 1,024 tokens, causal.


# %%
def seconds(attention, qkv, dout):
    times = []
    for _ in range(3):
        start = time.process_time()
        passes(attention, qkv, dout)
        times.append(time.process_time() - start)
    return min(times)


inputs = random_qkv(1024)
times = {name: seconds(attention, *inputs) for name, attention in VERSIONS.items()}

# %% tags=["nbval-ignore-output"] reason="times differ between machines"
for name, spent in times.items():
    print(f"{name:13} {spent / times['score matrix']:.2f} × the time of the score matrix")

# %% [markdown]
# Tiling can be faster here, because nearly half of the tiles are skipped and a tile fits in the
# CPU's cache. (Your version launches many small operators from Python, which can cost more than
# this gain.)
#
# Without a mask, tiling needs 7 matmuls instead of 6. On a GPU it is faster even then: writing the
# matrix to memory and reading it back takes longer than the extra matmul.
#
# ## In a model
#
# Train the tiny model for 8 steps on torch's own source code, once with your attention and once
# with torch's.


# %%
def train(attention, steps=8):
    torch.manual_seed(0)
    model, losses = GPT(PRESETS["tiny"], attention=attention), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = batches(source_bytes("64 KiB"), 8, 64, seed=0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def tiled_grouped(q, k, v, *, causal):
    """Copy k and v for each query head that shares them."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return tiled(q, k, v, causal=causal, tile=24)


yours, torchs = train(tiled_grouped), train(scaled_dot_product_attention)
print(f"the loss fell from {yours[0]:.1f} to {yours[-1]:.1f}")
print(f"all 8 losses equal torch's to 1e-4: {torch.allclose(yours, torchs, atol=1e-4)}")

# %% [markdown]
# The tiny model uses *grouped-query attention*: two query heads share a key head. `tiled_grouped`
# copies k and v for each query head. The library instead stacks the queries of a group in one
# matrix, so the matmuls for dk and dv also sum over the group.
#
# `memlab.attention.flash_attention` also has sliding windows, dropout with a mask recomputed from a
# seed, and float32 accumulation for bfloat16. `memlab.attention.package_interface` takes the
# arguments of the package's `flash_attn_func`: its q is (batch, tokens, heads, head dimension), and
# causal is bottom-right.

# %% [markdown]
# ## At scale: 7B models
#
# How much does one layer save for backward, including q, k and v, for one sequence of 8,192 tokens
# in bfloat16? Compare the formula with dry runs. In Llama 3 8B, 4 query heads share a key head.


# %%
def tiled_bytes(config, tokens, element=2):
    """Return the bytes of q, k, v, the output, and a float32 for each query of each head."""
    q, kv = config.hidden_size, config.kv_heads * config.head_dim
    return tokens * ((2 * q + 2 * kv) * element + 4 * config.heads)


def qkv_bytes(config, tokens, element=2):
    return tokens * (config.hidden_size + 2 * config.kv_heads * config.head_dim) * element


for name in ("llama-2-7b", "llama-3-8b"):
    config, qkv_size = PRESETS[name], qkv_bytes(PRESETS[name], 8192)
    print(f"{name}: formula for tiles: {format_bytes(tiled_bytes(config, 8192))}")
    for kind in ("score matrix", "memlab", "torch"):
        layer = {"dtype": torch.bfloat16, "kv_heads": config.kv_heads}
        saved, highest = (f(VERSIONS[kind], **layer) for f in (saved_bytes, both_passes_peak))
        print(f"  {kind:13} saves {format_bytes(saved + qkv_size):>10}, ", end="")
        print(f"peak {format_bytes(highest + qkv_size):>10}")

# %% [markdown]
# 32 layers save 140 GiB with the score matrix. With tiles they save 8 GiB (Llama 2 7B), or 5 GiB
# with grouped-query attention (Llama 3 8B).
#
# The score matrix gains nothing from grouping: k and v are 96 MiB smaller, but their copies for
# each query head add 128 MiB. (The peaks include gradients; the library accumulates dk and dv in
# float32.)
#
# Checkpointing each block also frees the probabilities, but one block still needs some 12 GiB at
# its peak. Use tiles and checkpointing together.

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs both passes of attention on it, in bfloat16. torch's own
# kernels keep a tile of scores in registers.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    qkv, dout = random_qkv(4096, heads=8, D=64, dtype=torch.bfloat16)
    qkv, dout = [x.detach().to(gpu).requires_grad_() for x in qkv], dout.to(gpu)
    for name, attention in VERSIONS.items():
        trace = memlab.measure(partial(passes, attention, qkv, dout), device=gpu.type)
        print(f"{name:13} {format_bytes(trace.peak_bytes - 4 * dout.nbytes)}")
else:
    print(stored_on_a_gpu("day 10"))

# %% [markdown]
# ## Rules on trial
#
# A guide states the bytes of both kinds of attention, for one layer at 8,192 tokens. It does not
# state the head dimension; we use 32 heads × 128, as in Llama 2 7B. A GB is 10⁹ bytes.

# %%
MB, GB = 10**6, 10**9
one_head = 8192**2 * 4
qkv_16 = qkv_bytes(PRESETS["llama-2-7b"], 8192)
saved_16 = saved_bytes(attention_reference, dtype=torch.bfloat16)
peak_16 = both_passes_peak(attention_reference, dtype=torch.bfloat16)
in_16, in_32 = (saved_bytes(flash_attention, dtype=d) for d in (torch.bfloat16, torch.float32))
growth = saved_bytes(flash_attention, dtype=torch.bfloat16, T=16384) / in_16

# %%
verdict(
    "20a",
    round(one_head / 2**20) == 256 and abs(matrix / 2**30 - 8) < 0.5,
    f"one head's matrix: {format_bytes(one_head)}; 32 heads save {matrix / GB:.1f} GB in float32 "
    f"and {saved_16 / GB:.1f} GB in bfloat16; peak {peak / GB:.1f} and {peak_16 / GB:.1f} GB",
    condition="roughly, in MiB and GiB, for bytes saved in float32; the peak has three matrices",
)

# %%
verdict(
    "20b",
    100 * MB / 1.5 < in_16 < in_32 < 100 * MB * 1.5 and growth == 2,
    f"output and lse: {in_16 / MB:.0f} MB in bfloat16, {in_32 / MB:.0f} MB in float32, "
    f"{growth:.2f} × at twice the length; with q, k and v {(in_16 + qkv_16) / MB:.0f} and "
    f"{(in_32 + 2 * qkv_16) / MB:.0f} MB",
    condition="roughly (±1/3), without q, k and v, which backward needs as well",
)

# %% [markdown]
# ## What you can do now
#
# One layer with T tokens, H heads with head dimension D, KV key heads, C = H · D:
#
# | saved for backward | elements | 7B at 8,192 tokens, bfloat16 |
# | --- | --- | --- |
# | q, k, v | T · (C + 2 · KV · D) | 192 MiB |
# | tiles: output and lse | T · C + T · H (float32) | 65 MiB |
# | score matrix: the probabilities | H · T² | 4 GiB; three at the peak |
#
# Tiling trades T² memory for time: each score is computed twice, and only the current tile of
# scores exists. You can say which tiles a mask skips, which alignment a library uses, and why
# backward needs one element per query.
#
# Tomorrow: the logits, often the largest tensor.

# %% [markdown]
# ## The running bill
#
# One training step of 124M parameters on 8 × 640 tokens. Today saves nothing: torch's attention is
# tiled too, and the bill has used it since Day 1. This is what Day 1 would have needed with the
# score matrix:

# %%
eager = dry_trace(SETTING, combined("fused-adamw+eager-attention"))
print(f"Day 1's step with the score matrix: peak {format_bytes(eager.peak_bytes)}", end="")
print(f", activations {format_bytes(eager.at_peak['activations'])}")
all_probs = 12 * 8 * 12 * 640**2 * 4
print(f"probabilities, 12 layers × 8 × 12 heads × 640² × 4 bytes: {format_bytes(all_probs)}")

# %% [markdown]
# The score matrix adds 1.76 GiB: 9.70 GiB instead of Day 1's 7.94 GiB.
#
# In today's step the matrix would cost nothing. The step runs one sequence at a time and recomputes
# each block, so a matrix is only 12 · 640² · 2 bytes (9.4 MiB), and it is gone before the peak.
# With one sequence of 5,120 tokens a matrix is 600 MiB and does raise the peak.
# (`tests/course/test_day10.py` measures both.)

# %% [markdown]
# With the library's tiles, today's step has the same peak, to the byte.
#
# Day 6's selective checkpointing keeps the outputs of torch's attention operators. It can keep
# `flash_attention`'s outputs too. But it does not recognize your own Function, and would recompute
# it. So the bill stays with torch's attention.

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
