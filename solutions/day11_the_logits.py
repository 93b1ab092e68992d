# %% [markdown]
# # Day 11: The logits
#
# **The logits are often the largest tensor. How do you train without storing all of them?**
#
# Today you build a cross-entropy loss that never holds all logits. Afterwards you can compute to
# the byte what a loss needs, choose the number of rows in a chunk, and say when chunks don't pay.
#
# About 85 minutes, 55 of them for four exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before: **guess**, **measure**, then **build** what explains the gap. In an exercise, replace
# `raise NotImplementedError` with your own lines; the cell below it checks them. If you are stuck,
# run `memlab hint 11.1` in a terminal. You can skip an exercise: the lesson then uses the
# reference.

# %% [markdown]
# ## The question
#
# A language model ends with a matmul: `hidden` (rows, width) times the transpose of `weight`
# (vocab, width). The results are the *logits*, one row of scores for each token of the batch. Width
# is the hidden size; rows = batch size × sequence length. The loss then reduces all logits to a
# single value.
#
# How large is a row of logits, compared with the activations that a block saves for the same token?
# (64 tokens, float32)

# %%
from dataclasses import replace
from functools import cache, partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import memlab
from memlab import plot
from memlab.checkpointing.operations import Operations
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.bill import SETTING
from memlab.course.ledger import activation_bytes
from memlab.data import batches, source_bytes
from memlab.losses import chunked_cross_entropy
from memlab.model import GPT, PRESETS
from memlab.planner import memory_named
from memlab.planner.cards import budget_bytes
from memlab.train import TECHNIQUES, Setting, build, combined, dry_trace, measured
from memlab.units import format_bytes

# %%
for name in ("124m", "25m", "llama-2-7b", "llama-3-8b", "llama-3-405b"):
    shape = PRESETS[name]
    fewer = replace(shape, layers=shape.layers - 1)
    block_bytes = activation_bytes(shape, 1, 64) - activation_bytes(fewer, 1, 64)
    ratio = 4 * 64 * shape.vocab_size / block_bytes
    print(f"{name:13}{shape.vocab_size:>8,} logits per token = {ratio:.2f} × a block's activations")

# %% [markdown]
# ## Guess
#
# Take a small output layer (*head*): 512 rows, width 64, a vocabulary of 8,192 tokens, float32. The
# logits are 16 MiB. What is the peak of `F.cross_entropy`, forward and backward, beyond hidden,
# weight and targets? And if you process the 512 rows in chunks of 64?

# %%
### BEGIN SOLUTION
guess("11.1", peak_mib=32, in_chunks_mib=2)  # logits and their gradient; an eighth of the logits
### END SOLUTION
### BEGIN STUB
# guess("11.1", peak_mib=..., in_chunks_mib=...)
### END STUB

# %% [markdown]
# ## Measure

# %%
ROWS, WIDTH, VOCAB = 512, 64, 8192


def head(dtype=torch.float32, ignored=0):
    """Return hidden, weight, and targets whose first `ignored` entries are −100."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (ROWS, VOCAB))
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    targets[:ignored] = -100
    weight = weight / 8
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def all_logits(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight), targets)


# %%
def trace_and_peak(loss, dtype=torch.float32):
    """Return the trace of forward and backward, and its peak beyond the arguments."""
    inputs = head(dtype)
    trace = memlab.measure(lambda: loss(*inputs).backward())
    return trace, trace.peak_bytes - sum(x.nbytes for x in inputs)


naive, naive_bytes = trace_and_peak(all_logits)
ratio = naive_bytes / (4 * ROWS * VOCAB)
print(f"peak {format_bytes(naive_bytes)} beyond the arguments, {ratio:.2f} × the logits; alive:")
for event in naive.alive(naive.peak_position):
    if event.bytes >= 2**20 and event.phase != "before":
        print(f"  {format_bytes(event.bytes)}, {event.phase:8} by {event.operator}")

# %%
plot.timeline(naive, title=f"Cross-entropy of {ROWS} rows, all logits at once")

# %% [markdown]
# The peak has three tensors of the logits' size. The logits themselves are already freed:
#
# 1. **log-softmax**, computed from the logits and saved for backward
# 2. the gradient of the log-probabilities, which is 0 except for one element per row
# 3. the gradient of the logits
#
# (The picture's peak includes hidden, weight and targets, 2.13 MiB.)
#
# Two habits make it worse. If you return the logits or assign them to a variable, they stay alive.
# And bfloat16 logits are often cast to float32 (`logits.float()`), because a bfloat16 loss is
# imprecise.


# %%
held = []


def kept_logits(hidden, weight, targets):
    held[:] = [F.linear(hidden, weight)]
    return F.cross_entropy(held[0], targets)


def upcast(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def upcast_and_kept(hidden, weight, targets):
    held[:] = [F.linear(hidden, weight)]
    return F.cross_entropy(held[0].float(), targets)


# %%
BF16 = torch.bfloat16
for name, loss, dtype in (
    ("float32", all_logits, torch.float32),
    ("float32, logits kept in a list", kept_logits, torch.float32),
    ("bfloat16", all_logits, BF16),
    ("bfloat16, logits.float()", upcast, BF16),
    ("bfloat16, logits.float(), logits kept", upcast_and_kept, BF16),
):
    print(f"{name:38}{trace_and_peak(loss, dtype)[1] / (ROWS * VOCAB):6.2f} bytes per logit")
    held.clear()

# %% [markdown]
# ### Exercise 11.1: what the loss needs
#
# About 5 minutes. Write a formula for the peak bytes of `all_logits` in float32, forward and
# backward, beyond hidden, weight and targets. Ignore the few bytes of the loss itself. The peak is
# at one of two moments:
#
# - when backward begins: the three tensors above
# - later: the logits' gradient, and the gradients of hidden and weight computed from it


# %%
def all_logits_bytes(rows: int, width: int, vocab: int) -> int:
    ### BEGIN SOLUTION
    logits, gradients = rows * vocab, (rows + vocab) * width
    return 4 * max(3 * logits, logits + gradients)
    ### END SOLUTION


# %%
all_logits_bytes = exercise("11.1", all_logits_bytes)

# %% [markdown]
# ## Rows are independent
#
# For one row x of logits and its target y, with p = softmax(x):
#
# - loss = log Σ exp x − x[y]
# - gradient = p − onehot(y)
#
# Neither depends on another row. So **forward** can already compute the gradient, overwrite the
# logits with it, and then reuse the memory for the next rows.
#
# A row with target −100 is *ignored* (padding, a prompt): its loss and gradient are 0.
# `F.cross_entropy` does the same, and divides by the number of non-ignored rows.

# %% [markdown]
# ### Exercise 11.2: compute a chunk's gradient in place
#
# About 15 minutes. Given logits x (n, V) in float32 and targets (n,), some of them −100, return the
# losses (n,), 0 for ignored rows. Overwrite x, **in place**, with the gradients of the losses' sum.
#
# - Allocate at most 128 bytes per row beside x: no second (n, V) tensor.
# - Logits of ±1,000 must not overflow: subtract the row's largest logit before exp. Subtract it
#   before you read x[y], too; otherwise a loss near 1 loses digits.


# %%
def loss_and_gradient_(x, targets):
    ### BEGIN SOLUTION memlab.reference.chunked_loss.loss_and_gradient_
    ignored = targets == -100
    labels = targets.masked_fill(ignored, 0).unsqueeze(1)
    at_label = x.sub_(x.amax(1, keepdim=True)).gather(1, labels)
    z = x.exp_().sum(1, keepdim=True)
    losses = (z.log() - at_label).squeeze(1)
    x.div_(z).scatter_add_(1, labels, -torch.ones_like(z))
    x.masked_fill_(ignored.unsqueeze(1), 0)
    return losses.masked_fill(ignored, 0)
    ### END SOLUTION


# %%
loss_and_gradient_ = exercise("11.2", loss_and_gradient_)

# %% [markdown]
# ## A loop is not enough
#
# The obvious solution is a loop over chunks that sums the losses. A single chunk needs little
# memory. But autograd saves every chunk's log-softmax for backward, so at the end all of them are
# alive.


# %%
def chunk_loop(hidden, weight, targets, chunk=64):
    parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    total = sum(F.cross_entropy(F.linear(h, weight), t, reduction="sum") for h, t in parts)
    return total / (targets != -100).sum()


loop, loop_bytes = trace_and_peak(chunk_loop)
print(f"all logits {format_bytes(naive_bytes)}, chunk loop {format_bytes(loop_bytes)}; ", end="")
kept = sum(e.bytes for e in loop.events if "softmax.default" in e.operator and e.bytes > 0)
print(f"the log-softmaxes alone: {format_bytes(kept)}")

# %% [markdown]
# Three matmuls compute the logits and both gradients. Checkpointing each chunk (Day 5) would help,
# but it needs a fourth, to recompute the logits. Instead, compute the gradients in forward, in an
# autograd *Function* (Day 5).
#
# - `forward` records no graph; you choose what to save: the **gradients**.
# - `backward` gets the gradient of the loss, `upstream` (1, or the factor that the loss was
#   multiplied by, such as Day 4's loss scale), and multiplies the saved gradients by it.

# %% [markdown]
# ### Exercise 11.3: chunked cross-entropy
#
# About 25 minutes. Return the mean loss over the non-ignored rows, or 0 if there are none. The last
# chunk may be shorter.
#
# - Use three matmuls per chunk. At the peak, hold both gradients and **one** chunk of logits x:
#   `del x` before the next. (The check allows two.)
# - Sum weight's gradient with `dw.addmm_(a, b)`: `dw += a @ b` allocates.
# - With bfloat16 inputs, x and sums are float32. Cast weight if needed, but not all of hidden.
# - Save only both gradients. `backward` returns four, None for the last two. Use `mul_`.


# %%
class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        ### BEGIN SOLUTION memlab.reference.chunked_loss.ChunkedLoss.forward
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            x = (hidden[rows] @ weight.mT).float()
            total += loss_and_gradient_(x, targets[rows]).sum()
            of_hidden[rows] = x.to(weight.dtype) @ weight
            of_weight.addmm_(x.mT, hidden[rows].float())
            del x  # before the next chunk is made
        ctx.count = (targets != -100).sum().clamp(min=1)
        ctx.save_for_backward(of_hidden, of_weight)
        return total / ctx.count
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 11.3, about 12 lines")
        ### END STUB

    @staticmethod
    def backward(ctx, upstream):
        ### BEGIN SOLUTION memlab.reference.chunked_loss.ChunkedLoss.backward
        return *(g.mul_(upstream / ctx.count) for g in ctx.saved_tensors), None, None
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 11.3, about 1 line")
        ### END STUB


# %%
def chunked_loss(hidden, weight, targets, chunk):
    return ChunkedLoss.apply(hidden, weight, targets, chunk)


chunked_loss = exercise("11.3", chunked_loss)

# %%
chunks, chunks_bytes = trace_and_peak(partial(chunked_loss, chunk=64))
reveal("11.1", peak_mib=naive_bytes, in_chunks_mib=chunks_bytes)
gradients = 4 * (ROWS + VOCAB) * WIDTH
print(f"both gradients: {format_bytes(gradients)}, one chunk: {format_bytes(4 * 64 * VOCAB)}")
plot.timeline(chunks, title=f"Cross-entropy of {ROWS} rows, 64 rows at a time")

# %% [markdown]
# All logits at once need 48 MiB, three tensors of 16 MiB. In chunks, 4.14 MiB are enough: both
# gradients, one chunk of logits, and the chunk's part of hidden's gradient. The gradients are
# allocated in *forward*. Eight chunks follow; in the thin gaps between them no logits are alive.
# Backward only multiplies in place.
#
# Between forward and backward, the naive loss saves the log-softmax, and the chunked loss saves the
# gradients. Backward needs the gradients anyway.

# %% [markdown]
# ## How many rows in a chunk?
#
# With chunks of c rows, the peak in float32 is
#
# 4 · c · (vocab + width) + 4 · (rows + vocab) · width
#
# bytes. The first term is the chunk's logits and its part of hidden's gradient. The second term is
# the two gradients, the **floor**: no chunk size goes below it. Small chunks cost time, because
# each chunk reads and writes all of weight's gradient (64 times with chunks of 8 rows).

# %% [markdown]
# ### Exercise 11.4: how many rows in a chunk
#
# About 10 minutes. Given a budget of bytes, use as few chunks as the formula above allows, and make
# them as even as possible. Return the rows of the longest chunk, or 0 if not even one row fits.
#
# Example: if 5 of 12 rows fit, you need 3 chunks; 3 even chunks have 4 rows each.


# %%
def chunk_rows(rows: int, width: int, vocab: int, budget_bytes: int) -> int:
    ### BEGIN SOLUTION
    room = budget_bytes - 4 * (rows + vocab) * width
    most = room // (4 * (vocab + width))
    if most < 1:
        return 0
    chunks = -(-rows // most)  # rounded up
    return -(-rows // chunks)
    ### END SOLUTION


# %%
chunk_rows = exercise("11.4", chunk_rows)

# %%
sizes = (8, 32, 64, 128, 256, 512)
peaks = [trace_and_peak(partial(chunked_loss, chunk=n))[1] / 2**20 for n in sizes]
by_formula = [(4 * n * (VOCAB + WIDTH) + gradients) / 2**20 for n in sizes]
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
axes.loglog(sizes, by_formula, color="0.7", linewidth=5, label="formula")
axes.loglog(sizes, peaks, "o-", color="#00798c", label="yours, measured")
axes.axhline(naive_bytes / 2**20, color="#cc6677", label="all logits")
axes.axhline(gradients / 2**20, color="0.3", linestyle="--", label="floor: both gradients")
axes.set_xticks(sizes, map(str, sizes))
axes.set_yticks((2, 5, 10, 20, 50), ("2", "5", "10", "20", "50"))
axes.minorticks_off()
axes.spines[["top", "right"]].set_visible(False)
axes.set(xlabel="rows per chunk", ylabel="peak, MiB", title=f"Peak of the loss of {ROWS} rows")
axes.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, 0.88))
for n, mib in zip(sizes, peaks, strict=True):
    print(f"{n:4} rows: {mib:6.2f} MiB, {mib * 2**20 / gradients:.2f} × the floor")
print(f"a budget of 3 MiB: {chunk_rows(ROWS, WIDTH, VOCAB, 3 * 2**20)} rows at a time")

# %% [markdown]
# Is your curve one chunk above the formula at every size? Then two chunks are alive at once: add
# `del x` at the end of the loop body.
#
# Even a single chunk with all rows needs about a third of the naive loss: one tensor of logits
# instead of three. Smaller chunks soon save little. The library's default chunk has about width / 2
# rows, so its logits are half as large as the gradients. It has at most an eighth of all rows, or
# 64 if that is more.

# %% [markdown]
# ## Comparison with torch
#
# torch 2.13 has `F.linear_cross_entropy`, and memlab has `chunked_cross_entropy`. Compare the peak
# and the errors against float64: of the loss (absolute), and of weight's gradient (relative). A
# quarter of the rows is ignored, and the loss is multiplied by 0.1.


# %%
@cache
def exact_results(dtype):
    """Return the loss and weight's gradient, computed in float64 from the same inputs."""
    hidden, weight, targets = head(dtype, ignored=ROWS // 4)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = all_logits(*exact, targets)
    (0.1 * loss).backward()
    return loss.item(), exact[1].grad


def peak_and_errors(loss, dtype):
    """Return the peak, the error of the loss, and the relative error of weight's gradient."""
    inputs, losses = head(dtype, ignored=ROWS // 4), []

    def step():
        losses.append(loss(*inputs))
        (0.1 * losses[0]).backward()

    peak = memlab.measure(step).peak_bytes - sum(x.nbytes for x in inputs)
    wanted, gradient = exact_results(dtype)
    error = (inputs[1].grad.double() - gradient).norm() / gradient.norm()
    return peak, abs(losses[0].item() - wanted), error.item()


# %% tags=["nbval-ignore-output"] reason="needs torch 2.13; last digits differ between machines"
versions = {"F.cross_entropy": all_logits}
if hasattr(F, "linear_cross_entropy"):
    options = torch.nn.LinearCrossEntropyOptions()
    versions["F.linear_cross_entropy"] = F.linear_cross_entropy
    versions["  with options"] = partial(F.linear_cross_entropy, options=options)
versions |= {"memlab": chunked_cross_entropy, "yours, 64 rows": partial(chunked_loss, chunk=64)}
for dtype in (torch.float32, BF16):
    print(f"{f'{dtype}:':26}{'peak':>10}{'loss error':>12}{'gradient error':>16}")
    for name, loss in versions.items():
        peak, loss_error, gradient_error = peak_and_errors(loss, dtype)
        print(f"  {name:24}{format_bytes(peak):>10}{loss_error:12.0e}{gradient_error:16.0e}")
all_ignored = torch.full((ROWS,), -100)
for name, loss in versions.items():
    print(f"all rows ignored, {name.strip()}: {loss(*head()[:2], all_ignored).item()}")

# %% [markdown]
# Three results for torch's function:
#
# - Without `options=` it needs **as much memory** as `F.cross_entropy`: it computes all logits
#   first.
# - With options, it accumulates in the dtype of its inputs. In bfloat16, 8 significant bits are too
#   few to sum hundreds of losses: the loss is off by 0.3.
# - If all rows are ignored, its loss is NaN, like `F.cross_entropy`'s.
#
# In bfloat16, torch's peak is lower: its gradients use 2 bytes per element, yours 4 until they are
# rounded. In return, your error is smaller.

# %% [markdown]
# ## Train a model
#
# The text is torch's own source code. A token is a pair of bytes. The 2,047 most common pairs have
# their own token; all other pairs are token 0, which is ignored as a target. Train once with all
# logits, and once in chunks of 100 of the 512 rows.

# %%
text = source_bytes("256 KiB").long()
pairs = text[: len(text) // 2 * 2].view(-1, 2) @ torch.tensor([256, 1])
common = pairs.bincount(minlength=65_536).argsort(descending=True, stable=True)[:2047]
token_of = torch.zeros(65_536, dtype=torch.long)
token_of[common] = torch.arange(1, 2048)
tokens = token_of[pairs]
print(f"{len(tokens):,} tokens; {(tokens == 0).float().mean():.1%} are token 0")


# %%
def in_chunks(hidden, weight, targets):
    return chunked_loss(hidden.flatten(0, 1), weight, targets.flatten(), 100)


def train(steps=8, **loss):
    torch.manual_seed(0)
    model, losses = GPT(replace(PRESETS["tiny"], vocab_size=2048, hidden_size=64), **loss), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    data = batches(tokens, 8, 64, seed=0)
    for _ in range(steps):
        inputs, targets = next(data)
        step_loss = model(inputs, targets.masked_fill(targets == 0, -100))
        optimizer.zero_grad()
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    return losses


# %%
naive_losses, chunked_losses = train(), train(loss=in_chunks)
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.plot(naive_losses, linewidth=5, color="#c9c9d0", label="all logits")
axes.plot(chunked_losses, linewidth=1.2, color="#00798c", label="in chunks")
axes.set(xlabel="step", ylabel="loss in nats", title="Loss on pairs of bytes")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
difference = max(abs(a - b) for a, b in zip(naive_losses, chunked_losses, strict=True))
print(f"the loss went down: {chunked_losses[-1] < chunked_losses[0]}")
print(f"max difference below 1e-3: {difference < 1e-3}")

# %% [markdown]
# The losses differ only in the last digits, because the order of summation differs. Chunking is
# exact, not an approximation.
#
# ## At scale: Llama 3 8B
#
# A vocabulary of 128,256, hidden size 4,096, 32 blocks, bfloat16, one sequence of 8,192 tokens. Dry
# runs give the bytes that a block saves (two blocks minus one; all 32 are identical), and the peak
# of the loss at full size.


# %%
def saved_bytes(technique, layers, length=8192):
    """Return the bytes that a forward pass saves for backward, with a vocabulary of 256."""
    small = replace(PRESETS["llama-3-8b"], layers=layers, vocab_size=256)
    with memlab.dry_run():
        model, kept = GPT(small, dtype=BF16), []
        combined(technique).change_model(model)
        tokens = torch.zeros(1, length, dtype=torch.long)
        trace = memlab.measure(lambda: kept.append(model(tokens, tokens)), model=model)
    always = ("parameters", "buffers", "inputs")
    return sum(n for kind, n in trace.at_end.items() if kind not in always)


block_bytes = saved_bytes("plain", 2) - saved_bytes("plain", 1)
input_bytes = saved_bytes("checkpointing", 2) - saved_bytes("checkpointing", 1)
print(f"a block saves {format_bytes(block_bytes)}, with checkpointing {format_bytes(input_bytes)}")


# %%
@cache
def head_bytes(loss, rows=8192):
    """Return the peak of the head's loss, beyond its arguments."""
    with memlab.dry_run():
        C, V = PRESETS["llama-3-8b"].hidden_size, PRESETS["llama-3-8b"].vocab_size
        hidden, weight = (torch.zeros(n, C, dtype=BF16, requires_grad=True) for n in (rows, V))
        targets = torch.zeros(rows, dtype=torch.long)
        trace = memlab.measure(lambda: loss(hidden, weight, targets).backward())
    return trace.peak_bytes - hidden.nbytes - weight.nbytes - targets.nbytes


logits = 8192 * 128_256
bars = {
    "32 blocks": 32 * block_bytes,
    "32 blocks, checkpointed": 32 * input_bytes + block_bytes,
    "head, logits.float()": head_bytes(upcast),
    "head, bfloat16": head_bytes(all_logits),
    "head, in chunks": head_bytes(chunked_cross_entropy),
}
print(f"the logits: {format_bytes(2 * logits)} in bfloat16, {format_bytes(4 * logits)} in float32")
for name, size in bars.items():
    print(f"{name:27}{format_bytes(size):>10}")

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
colours = ("#4477aa", "#88aacc", "#cc6677", "#dd99a0", "#00798c")
for (name, size), colour in zip(bars.items(), colours, strict=True):
    axes.barh(name, size / 2**30, color=colour)
    axes.text(size / 2**30 + 0.5, name, format_bytes(size), va="center")
axes.set(xlabel="GiB", xlim=(0, 60), title="Llama 3 8B, 1 × 8,192 tokens: blocks and head")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Without checkpointing, the head with `logits.float()` needs about a fifth of the blocks' memory.
# With checkpointing, it needs **three times** as much as all blocks (32 inputs, and one block being
# recomputed).
#
# In chunks (of the library's default size), weight's gradient needs 2.94 GiB: the float32 sum, and
# the bfloat16 gradient that it is rounded to.
#
# How does this change with the number of tokens?

# %%
for rows in (512, 2048, 4096, 8192, 16_384):
    chunked = head_bytes(chunked_cross_entropy, rows)
    print(f"{rows:6,} tokens: in chunks {format_bytes(chunked)}, ", end="")
    for name, loss, end in (("logits.float()", upcast, ", "), ("bfloat16", all_logits, "\n")):
        size = head_bytes(loss, rows)
        print(f"{name} {format_bytes(size):>9} ({size / chunked:.2f}×)", end=end)

# %% [markdown]
# With chunks, only hidden's gradient grows with the tokens, and it is small. But the floor is high:
# 6 bytes per element of weight, compared with autograd's 2. So with few tokens, chunks need
# **more** memory. The break-even is at
#
# - 2,048 tokens, half the width, with `logits.float()`
# - 4,096 tokens, the width, with bfloat16 logits

# %% [markdown]
# ## When chunks don't pay
#
# In float32, weight's gradient needs 4 bytes per element either way. It has vocab · width elements,
# compared with 3 · rows · vocab in the three tensors of logits. So the ratio of rows to width
# decides. For the 124M model's head in float32, your formulas give:

# %%
C, V = 768, 50_257
for rows in (128, 256, 640, 5120):
    naive, floor = all_logits_bytes(rows, C, V), 4 * (rows + V) * C
    chunked = floor + 4 * 64 * (V + C)
    print(f"{rows:5,} rows: all logits {format_bytes(naive):>10}, ", end="")
    print(f"64 at a time {format_bytes(chunked):>10}, {naive / chunked:4.2f}× less")

# %% [markdown]
# With fewer rows than a third of the width, chunks save little: weight's gradient dominates. With
# 640 rows, fewer than the width of 768, chunks save 2.28× in float32.
#
# In bfloat16 the chunked sums use 4 bytes per element, compared with 2 for autograd's gradient. So
# chunks need *more* memory below half the width with `logits.float()`, and below the full width
# without it (Llama's head above).

# %% [markdown]
# The library's loss has more options. Label smoothing, a z-loss (which keeps log Σ exp x near 0)
# and a soft cap (which limits logits to ± cap) are one more line each. Only the soft cap needs more
# memory:

# %%
settings = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-4},
    "soft cap": {"soft_cap": 30.0},
    "a loss per row": {"reduction": "none"},
}
for name, setting in settings.items():
    inputs = head()
    run = partial(chunked_cross_entropy, *inputs, chunk=64, **setting)
    with Operations() as counter:  # a multiply-add counts as two
        trace = memlab.measure(lambda run=run: run().sum().backward())
    above_floor = trace.peak_bytes - sum(x.nbytes for x in inputs) - gradients
    matmuls = counter.total / (2 * ROWS * WIDTH * VOCAB)
    print(f"{name:20}{format_bytes(above_floor)} above the floor, {matmuls:.2f} matmuls")

# %% [markdown]
# The soft cap needs its derivative, as large as a second chunk. With a loss per row, backward gets
# one upstream gradient per row, but forward has already summed weight's gradient over the rows. So
# backward recomputes the logits, which costs a fourth matmul.
#
# ## On your GPU
#
# If you have a GPU, this cell runs the step of the running bill on it.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    for name in ("plain", "chunked-loss"):
        training = build(replace(SETTING, device=gpu.type), TECHNIQUES[name])
        training.step()
        trace = measured(training)
        print(f"{name}: {format_bytes(trace.peak_bytes)}, ", end="")
        print(f"reserved {format_bytes(trace.reserved_bytes or 0)}")
        del training
else:
    print(stored_on_a_gpu("day 11"))

# %% [markdown]
# ## Rules on trial
#
# No rule of the guides mentions the logits. Their lists have checkpointing, 8-bit optimizer states
# and flash attention, but none of these changes the loss. Two earlier results involved the logits:
# under autocast the log-probabilities stay float32 (Day 4), and in a small model with checkpointing
# they are most of the remaining activations (Day 5).

# %% [markdown]
# So here is our own rule. A loss needs three tensors of tokens × vocabulary; in float32 they use 12
# bytes per logit. Use chunks if there are more tokens than
#
# - a third of the width, in float32
# - half the width, in bfloat16 with `logits.float()`
# - the width, in bfloat16 without it

# %% [markdown]
# A guide for several platforms reports a peak of 4–5 GB for the same small model, with
# checkpointing, on two machines: an RTX 3060 with 8 sequences of 1,024 tokens, and an Apple M2 with
# 4 sequences of 512 tokens. Its weights of 0.5 GB match our 124M model (Day 1). The next cell
# measures that model with and without checkpointing, and with today's loss.

# %%
GB, STEPS = 10**9, ("plain", "checkpointing", "checkpointing+chunked-loss")
peaks = {}
for batch, seq_len, steps in ((8, 1024, STEPS), (4, 512, STEPS[:2]), (2, 512, STEPS[1:2])):
    for name in steps:
        trace = dry_trace(Setting("124m", batch, seq_len), combined(name))
        peaks[batch, name] = trace.peak_bytes / GB
        logits_gb = 4 * batch * seq_len * V / GB
        print(f"{batch} × {seq_len:4} {name:27}{peaks[batch, name]:6.2f} GB, ", end="")
        print(f"activations {trace.at_peak['activations'] / GB:.2f} GB")
    print(f"  one tensor of logits: {logits_gb:.2f} GB")

# %%
plain, recomputed, chunked = (peaks[8, name] for name in STEPS)
verdict(
    "30a",
    4 <= recomputed <= 5,
    f"124M, float32: peak {plain:.2f} GB; with checkpointing {recomputed:.2f} GB; with "
    f"checkpointing and a chunked loss {chunked:.2f} GB",
    otherwise="the guide leaves out the logits and their gradient",
)

# %%
without, with_checkpointing = (peaks[4, name] for name in STEPS[:2])
verdict(
    "30b",
    4 <= with_checkpointing <= 5,
    f"peak {without:.2f} GB without checkpointing, {with_checkpointing:.2f} GB with it (dry run)",
    otherwise="this is the peak without checkpointing; Apple's allocator was not measured",
)

# %% [markdown]
# The guide also says "works on 8 GB and more". On a small Mac, Metal recommends using at most two
# thirds of the memory; the system needs the rest.

# %%
tensor_gb = {
    name: budget_bytes(memory_named(name), device) / GB
    for name, device in (("rtx3060-8", "cuda"), ("m2-8", "mps"))
}
reduced = peaks[2, "checkpointing"]
rtx, mac = tensor_gb["rtx3060-8"], tensor_gb["m2-8"]
verdict(
    "30c",
    recomputed < rtx and reduced < mac,
    f"8 × 1,024 tokens peak at {recomputed:.2f} GB, an RTX 3060 with 8 GB has {rtx:.2f} GB for "
    f"tensors; 2 × 512 tokens peak at {reduced:.2f} GB, an M2 with 8 GB has {mac:.2f} GB",
    condition="with checkpointing; reserved but unallocated memory comes on top",
)

# %% [markdown]
# Finally, compare today's four losses, with chunks of 128 rows:


# %%
def checkpointed(hidden, weight, targets, chunk):
    def chunk_sum(h, t):
        return F.cross_entropy(F.linear(h, weight), t, reduction="sum")

    parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    total = sum(checkpoint(chunk_sum, h, t, use_reentrant=False) for h, t in parts)
    return total / (targets != -100).sum()


both, one_chunk = (ROWS + VOCAB) * WIDTH, 128 * VOCAB  # elements of gradients, of logits
for name, loss, elements in (
    ("all logits", all_logits, 3 * ROWS * VOCAB),
    ("a loop over chunks", partial(chunk_loop, chunk=128), ROWS * VOCAB + 2 * one_chunk),
    ("checkpointed chunks", partial(checkpointed, chunk=128), both + 3 * one_chunk),
    ("gradients in forward", partial(chunked_loss, chunk=128), both + one_chunk),
):
    peak = format_bytes(trace_and_peak(loss)[1])
    print(f"{name:21}{peak:>10}, formula {format_bytes(4 * elements):>10}")

# %% [markdown]
# ## What you can do now
#
# | loss | elements at the peak | matmuls |
# | --- | --- | --- |
# | all logits | 3 · rows · vocab | 3 |
# | a loop over chunks | rows · vocab, and two chunks | 3 |
# | checkpointed chunks | both gradients, and three chunks | 4 |
# | gradients in forward | both gradients, and one chunk | 3 |
#
# Both gradients have (rows + vocab) · width elements; a chunk has its rows · vocab. (If a chunk has
# fewer rows than the width, the second and third loss need up to three tensors of weight's size,
# because autograd adds weight's gradient of each chunk.)

# %% [markdown]
# You can compute the memory of a head before you run it. You know three mistakes of chunked losses:
# a mean of means, counting ignored rows, and dropping the upstream gradient. In a library's loss,
# check whether chunking is on, and which dtype accumulates the sums.
#
# Tomorrow: eight GPUs that hold the same tensors eight times.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. Since Day 3 the step processes one sequence
# at a time, because of the blocks' activations and the logits. Day 5 removed the activations. One
# sequence has 640 rows of bfloat16 logits, fewer than the width of 768. So for one sequence, chunks
# don't pay (in float32, above, they did):

# %%
print(f"logits of one sequence in bfloat16: {format_bytes(2 * 640 * V)}; ", end="")
print(f"gradient of the weight in float32: {format_bytes(4 * V * C)}")
print(f"logits of all eight sequences: 3 × {format_bytes(2 * 5120 * V)}; ", end="")
with memlab.dry_run():
    weights = sum(weight.numel() for weight in GPT(PRESETS["124m"]).parameters())
print(f"float32 sum of gradients: {format_bytes(4 * weights)}")

# %% [markdown]
# Chunks alone would not lower the bill. But gradient accumulation has its own cost: a float32 sum
# of the gradients. With chunks, all eight sequences fit **at once**, so the sum is not needed.
# (Without chunks, the three tensors of their logits would need more memory than the sum.)
#
# Attention's outputs, kept since Day 6, are dropped: for eight sequences they would be alive at the
# peak. The step inside backward (Day 8) would be possible now, but today's line changes only the
# loss.

# %%
running_bill(11)

# %% [markdown]
# ## Sources
#
# - Hsu et al. 2024: [Liger Kernel: Efficient Triton Kernels for LLM
#   Training](https://arxiv.org/abs/2410.10989)
# - Milakov and Gimelshein 2018: [Online normalizer calculation for
#   softmax](https://arxiv.org/abs/1805.02867)
#
# The rules on trial are from:
#
# - thINKblots: [Multi-Platform Memory
#   Optimization](https://github.com/thINKblots/gearhead/blob/d9730c481ff0cc18e9e2b2e6981495e233b9f7b1/MEMORY_OPTIMIZATIONS.md)
