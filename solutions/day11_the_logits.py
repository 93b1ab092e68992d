# %% [markdown]
# # Day 11: The logits
#
# **Why is the largest tensor of a modern model one you never look at?**
#
# After today you know what a loss holds, to the byte, have built a cross-entropy that never has all
# of its logits, know how few rows it needs at once, and can say when it is not worth it.
#
# About 85 minutes, 55 of them for four exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 11.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# A model ends in a product: `hidden` (rows, width) times the matrix that scores every token of the
# vocabulary, `weight` (vocab, width). The scores are the *logits*, a row for each token of the
# batch. They become one number, the loss, and nobody looks at them. (As ever: vocab · width
# weights; rows are batch · length.)
#
# How wide is a row beside all that a block keeps for it? (64 tokens, all in float32.)

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
    of_a_block = activation_bytes(shape, 1, 64) - activation_bytes(fewer, 1, 64)
    ratio = 4 * 64 * shape.vocab_size / of_a_block
    print(f"{name:13}{shape.vocab_size:>8,} logits a token: as much as {ratio:.2f} blocks keep")

# %% [markdown]
# ## Guess
#
# A small head: 512 rows, 64 wide, 8,192 tokens of vocabulary, in float32. The logits are 16 MiB.
# What does `F.cross_entropy` of them hold at once, at its peak, forward and backward, beyond
# hidden, weight and targets? And if the 512 rows are taken 64 at a time?

# %%
### BEGIN SOLUTION
guess("11.1", peak_mib=32, in_chunks_mib=2)  # logits and their gradient; an eighth
### END SOLUTION
### BEGIN STUB
# guess("11.1", peak_mib=..., in_chunks_mib=...)
### END STUB

# %% [markdown]
# ## Measure

# %%
ROWS, WIDTH, VOCAB = 512, 64, 8192


def head(dtype=torch.float32, ignored=0):
    """hidden and weight, which want gradients, and targets; the first of those are ignored."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=random) for n in (ROWS, VOCAB))
    targets = torch.randint(VOCAB, (ROWS,), generator=random)
    targets[:ignored] = -100
    weight = weight / 8
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def all_logits(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight), targets)


# %%
def passed(loss, dtype=torch.float32):
    """The trace of forward and backward, and its peak beyond what is handed in."""
    given = head(dtype)
    trace = memlab.measure(lambda: loss(*given).backward())
    return trace, trace.peak_bytes - sum(x.nbytes for x in given)


naive, naive_bytes = passed(all_logits)
times = naive_bytes / (4 * ROWS * VOCAB)
print(f"{format_bytes(naive_bytes)} beyond what is given, {times:.2f} × the logits; alive are")
for event in naive.alive(naive.peak_position):
    if event.bytes >= 2**20 and event.phase != "before":
        print(f"  {format_bytes(event.bytes)}, {event.phase:8} by {event.operator}")

# %%
plot.timeline(naive, title=f"The loss of {ROWS} rows by all their logits, and what it is given")

# %% [markdown]
# Three tensors of the logits' size. The logits themselves are no longer among them:
# **log-softmax** is made of them, and kept for backward. Then come the gradient of the
# log-probabilities, which is 0 but for one number a row, and made of it the gradient of the logits.
# (The picture's peak has hidden, weight and targets in it, 2.13 MiB.)
#
# It gets worse. Logits that are returned, or that a name holds, live on; and bfloat16 logits are
# often made float32 first (`logits.float()`), for a loss in bfloat16 is coarse.


# %%
held = []


def held_by_a_name(hidden, weight, targets):
    held[:] = [F.linear(hidden, weight)]
    return F.cross_entropy(held[0], targets)


def upcast(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def upcast_and_held(hidden, weight, targets):
    held[:] = [F.linear(hidden, weight)]
    return F.cross_entropy(held[0].float(), targets)


# %%
BF16 = torch.bfloat16
for name, loss, dtype in (
    ("float32", all_logits, torch.float32),
    ("float32, logits held by a name", held_by_a_name, torch.float32),
    ("bfloat16", all_logits, BF16),
    ("bfloat16, logits.float()", upcast, BF16),
    ("bfloat16, logits.float(), and held", upcast_and_held, BF16),
):
    print(f"{name:36}{passed(loss, dtype)[1] / (ROWS * VOCAB):6.2f} bytes a logit")
    held.clear()

# %% [markdown]
# ### Exercise 11.1: what the loss holds
#
# About 5 minutes. By formula: the bytes of forward and backward of `all_logits` in float32 at the
# fullest moment, beyond hidden, weight and targets, and without the few bytes of the loss itself.
# Two moments can be the fullest: when backward begins (the three above), and later, when of these
# only the logits' gradient is left, and the gradients of both its factors have been made of it.


# %%
def all_logits_bytes(rows: int, width: int, vocab: int) -> int:
    ### BEGIN SOLUTION
    logits, gradients = rows * vocab, (rows + vocab) * width
    return 4 * max(3 * logits, logits + gradients)
    ### END SOLUTION


# %%
all_logits_bytes = exercise("11.1", all_logits_bytes)

# %% [markdown]
# ## Rows know nothing of each other
#
# For one row x of logits and its target y, with p = softmax(x):
#
# - loss = log Σ exp x − x[y]
# - gradient = p − onehot(y)
#
# No other row comes into either. So the gradient can be had **at once**, in forward, before anybody
# asks for it, and be written over the logits. Then the next rows may have their place.
#
# A row with target −100 is *ignored* (padding, a prompt): no loss, no gradient. `F.cross_entropy`
# does so, too, and divides by the number of rows that count.

# %% [markdown]
# ### Exercise 11.2: a chunk's gradient, in its own logits
#
# About 15 minutes. x: logits (n, V), float32; targets (n,), some −100. Return the losses (n,), 0
# for ignored rows, and leave in x, **in place**, the gradients of their sum. Take at most 128 bytes
# a row beside x: no second (n, V). Logits of ±1,000 must not overflow: subtract the row's largest
# before you exponentiate, and before you take x[y]: beside 1,000 a loss of 1 loses digits.


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
# The obvious way to chunks is a loop, and a sum of losses. Its forward pass is small while it runs.
# But every chunk's log-softmax is kept for backward, so that in the end all of them are there.


# %%
def by_loop(hidden, weight, targets, chunk=64):
    parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    total = sum(F.cross_entropy(F.linear(h, weight), t, reduction="sum") for h, t in parts)
    return total / (targets != -100).sum()


loop, loop_bytes = passed(by_loop)
print(f"all logits {format_bytes(naive_bytes)}, by a loop {format_bytes(loop_bytes)}; ", end="")
kept = sum(e.bytes for e in loop.events if "softmax.default" in e.operator and e.bytes > 0)
print(f"the log-softmaxes alone are {format_bytes(kept)}")

# %% [markdown]
# A checkpoint around each chunk (Day 5) would help: backward makes its logits again, at the price
# of a fourth product beside the three. But nothing has to be made twice. Gradients made in forward
# need an autograd *Function*, as on Day 5: its `forward` makes no graph, and what it saves is up to
# you: here the **gradients**. Its `backward` is handed one number, the gradient of the loss
# (*upstream*: 1, or what the loss was multiplied by, such as Day 4's scale), and multiplies.

# %% [markdown]
# ### Exercise 11.3: chunked cross-entropy
#
# About 25 minutes. The mean over rows that count, its gradients; 0 if none counts. Chunks need not
# divide the rows. Three matmuls; at the peak both gradients and **one** chunk of logits (two may
# pass): `dw.addmm_(a, b)` makes no tensor of its own, `dw += a @ b` does; `del x` before the next
# chunk. In bfloat16, `x` and sums stay float32 (a float32 copy of weight may exist, not of all of
# hidden). `backward` returns a gradient for each argument, None for the last two; multiply in place
# (`mul_`).


# %%
class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        ### BEGIN SOLUTION memlab.reference.chunked_loss.ChunkedLoss.forward
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
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
chunks, chunks_bytes = passed(partial(chunked_loss, chunk=64))
reveal("11.1", peak_mib=naive_bytes, in_chunks_mib=chunks_bytes)
gradients = 4 * (ROWS + VOCAB) * WIDTH
print(f"both gradients are {format_bytes(gradients)}, a chunk {format_bytes(4 * 64 * VOCAB)}")
plot.timeline(chunks, title="The same, 64 rows at a time, and what it is given")

# %% [markdown]
# Who guessed 32 and 2 left out a third tensor, and both gradients, which are there in any case (and
# a chunk's part of hidden's). They are there first, in *forward*; on top of them lie eight
# chunks, one after another, and at the hairline gaps between them no logit is alive. What is left
# for backward is one multiplication in place.
#
# What waits for backward is new, too: all the logits waited as log-softmax, now the gradients wait.
# Backward is called at once, so that costs nothing.

# %% [markdown]
# ## How many rows?
#
# At the peak are, in float32, for a chunk of c rows,
#
# 4 · c · (vocab + width) + 4 · (rows + vocab) · width
#
# bytes: the chunk's logits and its part of hidden's gradient; and the two gradients, which are the
# **floor**. Below it no chunk can go. And each chunk reads and writes all of weight's gradient:
# chunks of 8 rows do so 64 times.

# %% [markdown]
# ### Exercise 11.4: how many rows
#
# About 10 minutes. As few chunks as fit into a budget of bytes, by the formula above; and of so
# many chunks as even ones as can be. How many rows has the longest? 0 if not even one row fits.
# Example: if 5 of 12 rows would fit, that makes 3 chunks, and 3 even ones have 4 rows.


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
found = [passed(partial(chunked_loss, chunk=n))[1] / 2**20 for n in sizes]
by_formula = [(4 * n * (VOCAB + WIDTH) + gradients) / 2**20 for n in sizes]
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
axes.loglog(sizes, by_formula, color="0.7", linewidth=5, label="the formula")
axes.loglog(sizes, found, "o-", color="#00798c", label="yours, measured")
axes.axhline(naive_bytes / 2**20, color="#cc6677", label="all the logits")
axes.axhline(gradients / 2**20, color="0.3", linestyle="--", label="the floor: both gradients")
axes.set_xticks(sizes, map(str, sizes))
axes.set_yticks((2, 5, 10, 20, 50), ("2", "5", "10", "20", "50"))
axes.minorticks_off()
axes.spines[["top", "right"]].set_visible(False)
axes.set(xlabel="rows of a chunk", ylabel="MiB", title=f"The loss of {ROWS} rows, at its peak")
axes.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, 0.88))
for n, mib in zip(sizes, found, strict=True):
    print(f"{n:4} rows: {mib:6.2f} MiB, {mib * 2**20 / gradients:.2f} × the floor")
print(f"a budget of 3 MiB: {chunk_rows(ROWS, WIDTH, VOCAB, 3 * 2**20)} rows at a time")

# %% [markdown]
# Does your curve lie above the formula's, by one more chunk at each size? Then two are alive at
# once: `del x` at the end of a turn.
#
# Even with all rows in one chunk it holds a good third of what autograd's way does: one tensor of
# logits, not three. Beyond that, halving the chunk soon saves little. The library's default: half
# as many logits as the gradients have numbers, about width / 2 rows; but at most an eighth of all
# rows (or 64).

# %% [markdown]
# ## Held against torch
#
# torch 2.13 has it, too: `F.linear_cross_entropy`. And the library: `chunked_cross_entropy`. Peak,
# errors against float64 (of the loss; of weight's gradient, relative), a quarter of the rows
# ignored, and the loss multiplied by 0.1.


# %%
@cache
def right(dtype):
    """The loss and weight's gradient, from the same numbers in float64."""
    hidden, weight, targets = head(dtype, ignored=ROWS // 4)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = all_logits(*exact, targets)
    (0.1 * loss).backward()
    return loss.item(), exact[1].grad


def compared(loss, dtype):
    """Peak, error of the loss, relative error of weight's gradient."""
    given, losses = head(dtype, ignored=ROWS // 4), []

    def step():
        losses.append(loss(*given))
        (0.1 * losses[0]).backward()

    peak = memlab.measure(step).peak_bytes - sum(x.nbytes for x in given)
    wanted, gradient = right(dtype)
    off = (given[1].grad.double() - gradient).norm() / gradient.norm()
    return peak, abs(losses[0].item() - wanted), off.item()


# %% tags=["nbval-ignore-output"] reason="needs torch 2.13, and last digits are the machine's"
ways = {"F.cross_entropy": all_logits}
if hasattr(F, "linear_cross_entropy"):
    options = torch.nn.LinearCrossEntropyOptions()
    ways["F.linear_cross_entropy"] = F.linear_cross_entropy
    ways["the same, with options"] = partial(F.linear_cross_entropy, options=options)
ways |= {"memlab": chunked_cross_entropy, "yours, 64 rows": partial(chunked_loss, chunk=64)}
for dtype in (torch.float32, BF16):
    print(f"{f'{dtype}:':26}{'peak':>10}{'loss off':>11}{'gradient off':>13}")
    for name, loss in ways.items():
        peak, loss_off, gradient_off = compared(loss, dtype)
        print(f"  {name:24}{format_bytes(peak):>10}{loss_off:11.0e}{gradient_off:13.0e}")
none = torch.full((ROWS,), -100)
for name, loss in ways.items():
    print(f"no row counts, {name}: {loss(*head()[:2], none).item()}")

# %% [markdown]
# Three things to know. Without `options=` torch's function saves **nothing**: it is the product and
# `F.cross_entropy`. With them, it adds in the dtype of its inputs: in bfloat16, where hundreds of
# losses outgrow 8 bits, the loss is off by 0.3. And a mean over no rows is NaN.
#
# In bfloat16 torch's takes less: its gradients have 2 bytes, yours 4 until they are rounded. That
# is what the smaller error costs.

# %% [markdown]
# ## Learn something
#
# The text is torch's own source, and a token two bytes: the 2,047 commonest pairs, and 0 for all
# others. As targets, those are ignored. All logits, and in chunks of 100 rows, which do not divide
# the 512.

# %%
text = source_bytes("256 KiB").long()
pairs = text[: len(text) // 2 * 2].view(-1, 2) @ torch.tensor([256, 1])
common = pairs.bincount(minlength=65_536).argsort(descending=True, stable=True)[:2047]
token_of = torch.zeros(65_536, dtype=torch.long)
token_of[common] = torch.arange(1, 2048)
tokens = token_of[pairs]
print(f"{len(tokens):,} tokens, {(tokens == 0).float().mean():.1%} of them rare")


# %%
def in_chunks(hidden, weight, targets):
    return chunked_loss(hidden.flatten(0, 1), weight, targets.flatten(), 100)


def learn(steps=8, **plug):
    torch.manual_seed(0)
    model, losses = GPT(replace(PRESETS["tiny"], vocab_size=2048, hidden_size=64), **plug), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    drawn = batches(tokens, 8, 64, seed=0)
    for _ in range(steps):
        inputs, targets = next(drawn)
        loss = model(inputs, targets.masked_fill(targets == 0, -100))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
by_all, by_chunks = learn(), learn(loss=in_chunks)
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.plot(by_all, linewidth=5, color="#c9c9d0", label="all the logits")
axes.plot(by_chunks, linewidth=1.2, color="#00798c", label="in chunks")
axes.set(xlabel="step", ylabel="loss in nats", title="Loss on pairs of bytes")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
furthest = max(abs(a - b) for a, b in zip(by_all, by_chunks, strict=True))
print(f"the loss went down: {by_chunks[-1] < by_chunks[0]}")
print(f"max difference below 1e-3: {furthest < 1e-3}")

# %% [markdown]
# Not equal to the bit: sums in another order. It is no approximation.
#
# ## At scale: Llama 3 8B
#
# 128,256 tokens of vocabulary, 4,096 wide, 32 blocks, in bfloat16, one sequence of 8,192 tokens.
# By dry run: what the blocks keep (of models with one block and with two; all 32 are alike), and
# the head's loss at its full size.


# %%
def waiting(how, layers, length=8192):
    """What a forward pass leaves for backward, with a vocabulary of 256."""
    small = replace(PRESETS["llama-3-8b"], layers=layers, vocab_size=256)
    with memlab.dry_run():
        model, kept = GPT(small, dtype=BF16), []
        combined(how).change_model(model)
        tokens = torch.zeros(1, length, dtype=torch.long)
        trace = memlab.measure(lambda: kept.append(model(tokens, tokens)), model=model)
    always = ("parameters", "buffers", "inputs")
    return sum(n for kind, n in trace.at_end.items() if kind not in always)


a_block, an_input = (waiting(how, 2) - waiting(how, 1) for how in ("plain", "checkpointing"))
print(f"a block keeps {format_bytes(a_block)}, checkpointed {format_bytes(an_input)}")


# %%
@cache
def head_bytes(loss, rows=8192):
    """The peak of the head's loss, beyond what it is handed."""
    with memlab.dry_run():
        C, V = PRESETS["llama-3-8b"].hidden_size, PRESETS["llama-3-8b"].vocab_size
        hidden, weight = (torch.zeros(n, C, dtype=BF16, requires_grad=True) for n in (rows, V))
        targets = torch.zeros(rows, dtype=torch.long)
        trace = memlab.measure(lambda: loss(hidden, weight, targets).backward())
    return trace.peak_bytes - hidden.nbytes - weight.nbytes - targets.nbytes


one = 8192 * 128_256
bars = {
    "32 blocks, all kept": 32 * a_block,
    "32 blocks, computed again": 32 * an_input + a_block,
    "head, logits.float()": head_bytes(upcast),
    "head, bfloat16": head_bytes(all_logits),
    "head, in chunks": head_bytes(chunked_cross_entropy),
}
print(f"the logits: {format_bytes(2 * one)} in bfloat16, {format_bytes(4 * one)} in float32")
for name, held in bars.items():
    print(f"{name:27}{format_bytes(held):>10}")

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
colours = ("#4477aa", "#88aacc", "#cc6677", "#dd99a0", "#00798c")
for (name, held), colour in zip(bars.items(), colours, strict=True):
    axes.barh(name, held / 2**30, color=colour)
    axes.text(held / 2**30 + 0.5, name, format_bytes(held), va="center")
axes.set(xlabel="GiB", xlim=(0, 60), title="Llama 3 8B, 1 × 8,192 tokens: blocks, and one loss")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# With everything kept, the head is a fifth of the blocks. With checkpointing, which such a step
# needs, **one** line of code takes three times what all blocks hold: 32 inputs, and one block that
# runs again. In chunks (the library's default), 2.94 GiB are the gradient of the weight: in
# float32, and beside it the bfloat16 one that it is rounded to.
#
# And with fewer tokens, or more?

# %%
for rows in (512, 2048, 4096, 8192, 16_384):
    ways = (upcast, all_logits, chunked_cross_entropy)
    by_float, by_bf16, by_chunks = (head_bytes(loss, rows) for loss in ways)
    print(f"{rows:6,} tokens: logits.float() {format_bytes(by_float):>10}, ", end="")
    print(f"bfloat16 {format_bytes(by_bf16):>9}, in chunks {format_bytes(by_chunks):>8}, ", end="")
    print(f"{by_float / by_chunks:5.2f} and {by_bf16 / by_chunks:5.2f} ×")

# %% [markdown]
# In chunks what grows is hidden's gradient, and that is small. But the floor is high: 6 bytes for
# each number of the weight, of which autograd's gradient has 2. So with few tokens chunks take
# **more**. They break even at 2,048 tokens, half the width, if the logits are made float32; at
# 4,096, the width, if they stay bfloat16.

# %% [markdown]
# ## When it is not worth it
#
# In float32 the weight's gradient has 4 bytes a number by either way: vocab · width numbers,
# against the three tensors' rows · vocab each. So it is rows against width. The 124M model's head
# in float32, by your formulas:

# %%
C, V = 768, 50_257
for rows in (128, 256, 640, 5120):
    whole, floor = all_logits_bytes(rows, C, V), 4 * (rows + V) * C
    best = floor + 4 * 64 * (V + C)
    print(f"{rows:5,} rows: all the logits {format_bytes(whole):>10}, ", end="")
    print(f"64 at a time {format_bytes(best):>10}, {whole / best:4.2f} ×")

# %% [markdown]
# With fewer rows than a third of the width there is little to win: what is large then is the
# weight's gradient, however it is made. With 640, fewer than the model is wide, chunks win clearly,
# in float32. In bfloat16 their sums have 4 bytes a number where autograd's gradient has 2; so they
# *lose* below half the width if logits are made float32, below all of it if they are not (Llama's
# head above).

# %% [markdown]
# And more than a plain loss: label smoothing, a z-loss (it keeps log Σ exp x near 0) and a soft cap
# (logits stay within ± cap) are a line each, of the same row. Only the soft cap costs bytes:

# %%
settings = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-4},
    "soft cap": {"soft_cap": 30.0},
    "a loss for each row": {"reduction": "none"},
}
for name, setting in settings.items():
    given = head()
    run = partial(chunked_cross_entropy, *given, chunk=64, **setting)
    with Operations() as counter:  # two for each product of numbers that is added
        trace = memlab.measure(lambda run=run: run().sum().backward())
    more = trace.peak_bytes - sum(x.nbytes for x in given) - gradients
    products = counter.total / (2 * ROWS * WIDTH * VOCAB)
    print(f"{name:20}{format_bytes(more)} above the floor, {products:.2f} products")

# %% [markdown]
# The cap's slope is a second chunk. A loss for each row gets a factor for each row in backward,
# which a sum over rows cannot take afterwards: so its logits are made twice, and a fourth product
# is its price.
#
# ## On your GPU
#
# Where there is a GPU, this takes the step of the running bill on it. (`memlab.kernels` makes a
# chunk's logits into gradients in one kernel.)

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
# No rule of the guides mentions the logits. Their lists have checkpointing, 8-bit states and flash
# attention, and none of these changes the loss. Two rules left the logits over: under autocast the
# log-probabilities stay float32 (Day 4), and in a small model with checkpointing they are most of
# what stays (Day 5).

# %% [markdown]
# So here is one to take along: *a loss holds three tensors of tokens · vocabulary, in float32 12
# bytes for each logit. Make them in chunks where there are more tokens than a third of the width if
# all is float32, than half of it in bfloat16 with logits.float(), than all of it without.*

# %% [markdown]
# A guide of several platforms gives the same small model, with checkpointing, a peak of 4–5 GB on
# two machines: an RTX 3060 with 8 sequences of 1,024 tokens, and an Apple M2 with 4 of 512. Its
# weights of 0.5 GB are those of our 124M model (Day 1). Here is the model, with and without
# checkpointing, and with today's loss.

# %%
GB, WAYS = 10**9, ("plain", "checkpointing", "checkpointing+chunked-loss")
peaks = {}
for batch, seq_len, ways in ((8, 1024, WAYS), (4, 512, WAYS[:2]), (2, 512, WAYS[1:2])):
    for name in ways:
        trace = dry_trace(Setting("124m", batch, seq_len), combined(name))
        peaks[batch, name] = trace.peak_bytes / GB
        logits_gb = 4 * batch * seq_len * V / GB
        print(f"{batch} × {seq_len:4} {name:27}{peaks[batch, name]:6.2f} GB, ", end="")
        print(f"of which {trace.at_peak['activations'] / GB:.2f} activations")
    print(f"  one tensor of its logits: {logits_gb:.2f} GB")

# %%
plain, again, in_chunks = (peaks[8, name] for name in WAYS)
verdict(
    "30a",
    4 <= again <= 5,
    f"8 × 1,024 tokens of 124M in float32 peak at {plain:.2f} GB, with checkpointing at "
    f"{again:.2f}, and with a loss in chunks, too, at {in_chunks:.2f}",
    otherwise="the table leaves out the logits and their gradient; with a loss in chunks the peak "
    "is below the range",
)
apple = [peaks[4, name] for name in WAYS[:2]]
verdict(
    "30b",
    4 <= apple[1] <= 5,
    f"4 × 512 tokens peak at {apple[0]:.2f} GB without checkpointing, and at {apple[1]:.2f} with",
    otherwise="it is the peak without checkpointing; an Apple GPU's own allocator was not measured",
)

# %% [markdown]
# And "works on 8 GB and more". On a Mac, Metal recommends two thirds of a small machine's memory;
# the rest is for the system, which shares it.

# %%
room = {
    name: budget_bytes(memory_named(name), device) / GB
    for name, device in (("rtx3060-8", "cuda"), ("m2-8", "mps"))
}
reduced = peaks[2, "checkpointing"]
verdict(
    "30c",
    again < room["rtx3060-8"] and reduced < room["m2-8"],
    f"an RTX 3060 with 8 GB has {room['rtx3060-8']:.2f} GB for tensors, an M2 with 8 GB "
    f"{room['m2-8']:.2f}; 8 × 1,024 tokens with checkpointing peak at {again:.2f} GB, "
    f"2 × 512 at {reduced:.2f}",
    condition="with checkpointing, and on a Mac with the small batch; reserved memory comes on top",
)

# %% [markdown]
# Last, the four ways of today side by side, the 512 rows in chunks of 128:


# %%
def checkpointed(hidden, weight, targets, chunk):
    def of_chunk(h, t):
        return F.cross_entropy(F.linear(h, weight), t, reduction="sum")

    parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    total = sum(checkpoint(of_chunk, h, t, use_reentrant=False) for h, t in parts)
    return total / (targets != -100).sum()


numbers, a_chunk = (ROWS + VOCAB) * WIDTH, 128 * VOCAB
for name, loss, by_table in (
    ("all the logits", all_logits, 3 * ROWS * VOCAB),
    ("a loop of chunks", partial(by_loop, chunk=128), ROWS * VOCAB + 2 * a_chunk),
    ("checkpointed chunks", partial(checkpointed, chunk=128), numbers + 3 * a_chunk),
    ("gradients in forward", partial(chunked_loss, chunk=128), numbers + a_chunk),
):
    held_at_peak = format_bytes(passed(loss)[1])
    print(f"{name:21}{held_at_peak:>10}, by the table {format_bytes(4 * by_table):>10}")

# %% [markdown]
# ## What you can do now
#
# | loss | holds at its peak, in numbers | products |
# | --- | --- | --- |
# | all the logits | 3 · rows · vocab | 3 |
# | a loop of chunks | rows · vocab, and two chunks | 3 |
# | checkpointed chunks | both gradients, and three chunks | 4 |
# | gradients in forward | both gradients, and a chunk | 3 |
#
# Both gradients are (rows + vocab) · width, a chunk is its rows · vocab. (In chunks shorter than
# the width, the second and third take up to three of weight's gradient: autograd adds up each
# chunk's.)

# %% [markdown]
# You can say what a head holds before it runs, which three mistakes make a chunked loss wrong (a
# mean of means, ignored rows that are counted, an upstream gradient that is not used), and what to
# ask of a library's: whether it is switched on, and in which dtype it adds.
#
# Tomorrow: eight GPUs, eight copies of the same thing.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. Since Day 3 it takes one sequence at a time.
# Of what that was for, the blocks' activations are gone since Day 5, and the logits are left. But
# those are bfloat16 now, and one sequence has 640 rows, fewer than the model is wide, 768. There
# chunks do not pay (in float32 they did, above):

# %%
print(f"logits of one sequence in bfloat16: {format_bytes(2 * 640 * V)}; ", end="")
print(f"gradient of the weight in float32: {format_bytes(4 * V * C)}")
print(f"logits of all eight: {format_bytes(2 * 5120 * V)}, three times; ", end="")
with memlab.dry_run():
    weights = sum(weight.numel() for weight in GPT(PRESETS["124m"]).parameters())
print(f"sums of gradients over micro-batches: {format_bytes(4 * weights)}")

# %% [markdown]
# So chunks alone would not lower the bill. But accumulation has a price of its own: a sum of
# gradients, in float32. In chunks all eight sequences fit **at once**, and it goes; all their
# logits, three times, would take more than it did. Attention's outputs, kept since Day 6, go, too:
# of eight sequences they would be alive at the peak.
#
# Day 8 left the step inside backward out, for the bill accumulated. It could come back now; but
# this line is about logits.

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
