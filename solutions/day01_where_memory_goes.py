# %% [markdown]
# # Day 1: Where memory goes
#
# **My model is 0.5 GB. Why does training it need eight?**
#
# After today you can say what a training step of a transformer takes, before you start it and to
# the byte, and you know which part to look at first when it does not fit.
#
# About 75 minutes, 49 of them for five exercises. You need a laptop, and to have trained something
# with PyTorch before; a GPU is welcome and not needed. Nothing is downloaded.

# %% [markdown]
# How it works: you **guess**, then **measure**, then **build** what explains the gap. In an
# exercise, put your own lines in place of `raise NotImplementedError`. The cell below it checks
# your answer, by value and by bytes. If you are stuck, type `memlab hint 1.1` in a terminal (File,
# New, Terminal). An exercise left open blocks nothing: the lesson goes on with the reference.

# %% [markdown]
# ## The question
#
# The patient of this course is a small Llama, complete in one readable file
# ([memlab/model.py](../memlab/model.py)). At the size of GPT-2 its weights, in float32, come to
# half a gigabyte. (KiB, MiB, GiB and TiB are 2¹⁰, 2²⁰, 2³⁰ and 2⁴⁰ bytes; a GB is 10⁹.)

# %%
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import matplotlib.pyplot as plt
import torch

import memlab
from memlab import plot
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.deep_models import dry_trace_of_blocks
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS, GPTConfig
from memlab.trace import Trace
from memlab.train import TECHNIQUES, Setting, Technique, build, dry_trace, measured
from memlab.units import format_bytes

plain = TECHNIQUES["plain"]

# %%
config = PRESETS["124m"]
print(f"{config.parameters:,} weights, four bytes each: {format_bytes(4 * config.parameters)}")

# %% [markdown]
# ## Guess
#
# One training step: forward, backward, AdamW, on 8 sequences of 640 tokens, everything in float32.
# At its fullest moment, its *peak*, it holds just under 8 GiB. How much of that is **activations**,
# kept from the forward pass for the backward pass? Write a number in place of the dots, and do not
# look further down yet.

# %%
### BEGIN SOLUTION
guess("1.1", activations_gib=6.2)  # eight, less weights, gradients and Adam's two moments
### END SOLUTION
### BEGIN STUB
# guess("1.1", activations_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# `dry_trace` takes the step on *fake* tensors. They have a shape, a dtype and a size, and no
# memory behind them, so this runs on any laptop. The meter sees the same tensors come and go as
# in a real step. `setting` says what is trained, `plain` that no technique is on.

# %%
setting = Setting("124m", batch=8, seq_len=640)
trace = dry_trace(setting, plain)
reveal("1.1", trace)
print(trace)

# %%
plot.timeline(trace, title=f"One training step: {setting}")

# %% [markdown]
# Left to right, allocation by allocation: `zero_grad` throws away the last step's gradients,
# forward piles up activations, backward takes them down while gradients grow. The gap in the guess
# is made of two things: at the peak gradients are *not* there, and **backward temporaries** are,
# tensors that backward makes for itself. Today you write the formula of every band.

# %% [markdown]
# | band | what it is |
# | --- | --- |
# | parameters | the weights |
# | buffers | tensors that belong to the model and are not learnt: here, tables of angles |
# | optimizer state | AdamW's two moments for each weight |
# | inputs | the tokens |
# | activations | made in forward, still there when backward starts |
# | gradients | of the weights, one number for each |
# | temporaries | made on the way, in forward, backward or the optimizer, and soon gone |

# %% [markdown]
# ## Build, line 1: weights
#
# A ledger begins with what you own. In the names of the whole course: C is the width, L the number
# of blocks, H the heads, D = C / H the width of a head, KV the heads of key and value (several
# queries may share one), V the vocabulary.
#
# | part | matrices |
# | --- | --- |
# | embedding | V × C; the same matrix scores the tokens at the end if `tied`, else a second one |
# | attention, in each block | query, output: C × C; key, value: C × (KV · D) |
# | MLP, in each block | gate, up, down: C × `intermediate_size` |
# | norms | C each: two in a block, one at the end |

# %% [markdown]
# ### Exercise 1.1: count the weights
#
# About 8 minutes. `config` has `vocab_size`, `hidden_size`, `layers`, `heads`, `kv_heads`,
# `head_dim`, `intermediate_size` and `tied`.


# %%
def parameter_count(config: GPTConfig) -> int:
    """How many numbers there are to learn."""
    ### BEGIN SOLUTION
    C, KV_D = config.hidden_size, config.kv_heads * config.head_dim
    attention = 2 * C * C + 2 * C * KV_D
    mlp = 3 * C * config.intermediate_size
    norms = 2 * C
    embeddings = config.vocab_size * C * (1 if config.tied else 2)
    return embeddings + config.layers * (attention + mlp + norms) + C
    ### END SOLUTION


# %%
parameter_count = exercise("1.1", parameter_count)

# %%
for name in ("124m", "llama-2-7b", "llama-3-405b"):
    N = parameter_count(PRESETS[name])
    print(f"{name:14}{N:>16,} weights{format_bytes(4 * N):>14} in float32")

# %% [markdown]
# ## Line 2: what stays between steps
#
# Now a real model, small enough to train here: 56 thousand weights and a vocabulary of 256, for
# every byte is a token. It learns from the source of torch itself. Before the first step: how many
# bytes has Adam put aside for its two moments?

# %%
### BEGIN SOLUTION
guess("1.2", optimizer_kib=450)  # two float32 numbers a weight: right, but not yet
### END SOLUTION
### BEGIN STUB
# guess("1.2", optimizer_kib=...)
### END STUB

# %% [markdown]
# ### Exercise 1.2: count what stays
#
# About 8 minutes. Count tensors that are there at this moment, in bytes. A parameter `p` has
# `p.nbytes`, and `p.grad`, which may be `None`; `optimizer.state` is a dictionary with a dictionary
# of tensors for each parameter. It works for any model, so keep it for your own.


# %%
def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of "parameters", "gradients" and "optimizer_state" that are there now."""
    ### BEGIN SOLUTION
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [tensor for of_one in optimizer.state.values() for tensor in of_one.values()]
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(g.nbytes for g in gradients),
        "optimizer_state": sum(s.nbytes for s in state),
    }
    ### END SOLUTION


# %%
state_bytes = exercise("1.2", state_bytes)

# %% [markdown]
# Here is a training step as everybody writes it, then a model for it.

# %%
data = batches(source_bytes("64 KiB"), batch=8, seq_len=64, seed=0)
losses = []


def step() -> None:
    tokens, targets = next(data)
    optimizer.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


# %%
model = GPT(PRESETS["tiny"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)

before = state_bytes(model, optimizer)
first = memlab.measure(step, model=model, optimizer=optimizer)
after = state_bytes(model, optimizer)
second = memlab.measure(step, model=model, optimizer=optimizer)

reveal("1.2", optimizer_kib=before["optimizer_state"])
for name in before:
    print(f"{name:16}{format_bytes(before[name]):>12} before,{format_bytes(after[name]):>12} after")
print(f"peak of the first step {format_bytes(first.peak_bytes)}, ", end="")
print(f"of the second {format_bytes(second.peak_bytes)}")

# %% [markdown]
# **Adam's state appears only after the first step.** AdamW makes its moments when it first meets a
# gradient. So a first step may pass where the second one dies, by 8 bytes a weight: measure the
# second. (The few bytes over are a counter of 4 bytes for each tensor.)
#
# From then on nothing should grow: ten steps, what is alive after each, and what is learnt. (The
# loss is in *nats*: minus the natural logarithm of the right token's probability.)

# %%
steps = [memlab.measure(step, model=model, optimizer=optimizer) for _ in range(10)]
fig, (memory, learning) = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
memory.plot([t.peak_bytes / 2**20 for t in (first, second, *steps)], label="peak of the step")
memory.plot([t.live_bytes / 2**20 for t in (first, second, *steps)], label="alive after it")
memory.set(xlabel="step", ylabel="MiB", ylim=(0, None), title="Every step after the first is alike")
memory.legend(frameon=False, loc="center right")
learning.plot(losses)
learning.set(xlabel="step", ylabel="loss in nats", title="Loss on torch's own source")
print(f"different peaks after the first step: {len({t.peak_bytes for t in (second, *steps)})}")
print(f"the loss went down: {losses[-1] < losses[0]}")

# %% [markdown]
# ## Line 3: what forward keeps
#
# Backward needs what forward computed: to find the gradient of `w` in `x @ w` it needs `x`. All
# that is kept for it are the **activations**. The meter knows which operator of which module made
# each. This is what one block keeps, in the order it was made, for 8 × 64 tokens. Here C = 32,
# H = 4, KV = 2, D = 8 and `intermediate_size` = 96.

# %%
kept = [e for e in second.alive(second.peak_position) if e.category == "activations"]
for e in sorted(kept, key=lambda e: e.storage):
    if e.module.startswith("blocks.1"):
        operator, shape = e.operator.split(".")[1], "×".join(map(str, e.shape))
        print(f"{e.module.removeprefix('blocks.1'):18}{operator:44}{shape:>9}{e.bytes:>9,} B")

# %% [markdown]
# | kept for each token, in each block | numbers |
# | --- | --- |
# | each of the two norms: the normalised x, the weighted x, 1/rms | 2 · C + 1 |
# | attention: q and k after rotation (RoPE); v; the output; log-sum-exp | C + 2 · KV · D + C + H |
# | the sum after attention, the sum after the MLP | 2 · C |
# | MLP: gate, silu(gate), up, their product | 4 · `intermediate_size` |
#
# RoPE turns q and k by angles that tell a token's place. The log-sum-exp is one number for each
# head, with which backward computes attention's weights again. Outside of the blocks: the
# embedding's output (C), the last norm (2 · C + 1), the logits as log-probabilities (V), and the
# loss, which is one number.

# %% [markdown]
# ### Exercise 1.3: count what forward keeps
#
# About 15 minutes. Everything is float32. Begin with one token and one block; the check does so
# too.


# %%
def activation_bytes(config: GPTConfig, batch: int, seq_len: int) -> int:
    """Bytes that the forward pass keeps for backward."""
    ### BEGIN SOLUTION
    C, KV_D = config.hidden_size, config.kv_heads * config.head_dim
    norm = 2 * C + 1
    attention = C + 2 * KV_D + C + config.heads
    block = 2 * norm + attention + 2 * C + 4 * config.intermediate_size
    ends = C + norm + config.vocab_size
    return 4 * (batch * seq_len * (config.layers * block + ends) + 1)
    ### END SOLUTION


# %%
activation_bytes = exercise("1.3", activation_bytes)

# %% [markdown]
# One quantity, three numbers: your formula, the meter, and the allocator. The CPU's allocator
# itself keeps a record for `torch.profiler`. It knows nothing of activations, only of blocks, so
# what can be compared with it is the peak of the whole step.

# %%
from memlab.metering.profiler_recording import record

recording = record(step, warm_up=step)  # counts from what was there before the step
before_it = sum(e.bytes for e in second.events if e.phase == "before")
print(f"activations: formula {activation_bytes(PRESETS['tiny'], 8, 64):,}, ", end="")
print(f"meter {second.at_peak['activations']:,} bytes")
print(f"peak: meter {second.peak_bytes:,}, allocator {before_it + recording.peak_bytes:,} bytes")

# %% [markdown]
# ### Which one is the largest?
#
# Taken together, the MLPs keep most. But the largest single tensor is the logits', even in the tiny
# model, whose tokens are bytes: V numbers a token, and V is larger than any width. What blocks keep
# has Days 5 to 7; the logits have Day 11.

# %%
from memlab.course.ledger import activation_terms  # the same sum, its terms by name

for name, batch, seq_len in (("tiny", 8, 64), ("124m", 8, 640), ("llama-2-7b", 1, 2048)):
    terms = activation_terms(PRESETS[name], batch, seq_len)
    largest = sorted(terms, key=terms.get, reverse=True)[:3]
    shares = ", ".join(f"{term} {terms[term] / sum(terms.values()):.0%}" for term in largest)
    print(f"{name:12}{format_bytes(sum(terms.values())):>10}: {shares}")

for name, step_trace in (("tiny", second), ("124m", trace)):
    alive = step_trace.alive(step_trace.peak_position)  # the largest first
    kept = [e for e in alive if e.category == "activations"]
    print(f"{name}: the largest single one is of {kept[0].operator}, {format_bytes(kept[0].bytes)}")

# %% [markdown]
# ## Line 4: the peak
#
# Weights, gradients, Adam's state, activations: now add them up? When gradients are all there,
# activations are all gone. So it matters when the fullest moment is, and what is there then.

# %%
print(f"the peak lies in {trace.peak_phase}; there:")
for category, bytes_ in trace.at_peak.items():
    print(f"  {category:22}{format_bytes(bytes_):>12}")

# %% [markdown]
# Backward has only just begun. No gradient of a weight is there yet, and no activation is gone.
# `backward_temporaries` are backward's first two tensors: the gradient of the log-probabilities,
# and made from it the gradient of the logits. Each is as large as the logits themselves.

# %% [markdown]
# ### Exercise 1.4: say the peak before it happens
#
# About 8 minutes. The step is the second or a later one. You may leave out what is small (tokens,
# tables of angles, counters): 0.5 % is allowed. `parameter_count` and `activation_bytes` are yours
# to use.


# %%
def peak_bytes(config: GPTConfig, batch: int, seq_len: int) -> int:
    """Bytes that are alive when backward has just begun."""
    ### BEGIN SOLUTION
    logits = 4 * batch * seq_len * config.vocab_size
    always = 4 * parameter_count(config) + 8 * parameter_count(config)  # weights, Adam's moments
    return always + activation_bytes(config, batch, seq_len) + 2 * logits
    ### END SOLUTION


# %%
peak_bytes = exercise("1.4", peak_bytes)

# %% [markdown]
# Every formula has an edge. This one says what is alive when backward begins, and with *few* tokens
# that is not the fullest moment: gradients outweigh activations, and the peak moves to the end of
# backward, where the embedding has two gradients to add (it is used twice), or into the optimizer.


# %%
def second_step(setting: Setting, technique: Technique = plain) -> Trace:
    training = build(setting, technique)
    training.step()
    return measured(training)


few = second_step(Setting("tiny", batch=1, seq_len=4))
formula = peak_bytes(PRESETS["tiny"], 1, 4)
print(f"1 × 4 tokens: formula {format_bytes(formula)}, measured {format_bytes(few.peak_bytes)}")
plot.timeline(few, title="Four tokens: the peak is where the gradients are")

# %% [markdown]
# ## Turn it round
#
# The question people really have is the inverse: which batch fits? A measurement may take a
# second, so do not try them all.
#
# ### Exercise 1.5: find the largest batch
#
# About 10 minutes. `bytes_at(batch)` is any function that gives bytes and never falls: a formula,
# or a measurement. Ask it at most 60 times, even when the answer is forty million, and never for
# more than twice the batch that fits: a batch far too large takes the machine down.


# %%
def largest_batch(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    """The most sequences that fit; 0 if not even one does."""
    ### BEGIN SOLUTION
    fits, too_many = 0, 1
    while bytes_at(too_many) <= budget_bytes:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if bytes_at(middle) <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    return fits
    ### END SOLUTION


# %%
largest_batch = exercise("1.5", largest_batch)

# %%
for gib in (8, 12, 24):
    batch = largest_batch(lambda batch: peak_bytes(config, batch, 640), gib * 2**30)
    taken = format_bytes(peak_bytes(config, batch, 640))
    print(f"into {gib:2} GiB fit {batch:2} sequences of 640 tokens: {taken}")
print(f"measured with 8: {format_bytes(trace.peak_bytes)}")

# %% [markdown]
# ## What a batch and a length cost
#
# Tokens are what counts, not how they are cut into sequences, as long as attention is *fused*:
# one kernel that never stores its scores. Where they are stored (T × T for every head of every
# sequence), length has a price of its own. Day 10 removes it.


# %%
eager = TECHNIQUES["eager-attention"]
full = Setting("tiny", batch=8, seq_len=64)
half_batch, half_length = replace(full, batch=4), replace(full, seq_len=32)
costs = {
    "8 × 64": second_step(full),
    "4 × 64": second_step(half_batch),
    "8 × 32": second_step(half_length),
    "8 × 64, scores stored": second_step(full, eager),
    "8 × 32, scores stored": second_step(half_length, eager),
}
plot.breakdown(costs, title="One real step of the tiny model: batch × length")

# %% [markdown]
# 4 × 64 and 8 × 32 are 256 tokens either way, and take the same bytes: half of the activations.
# Where scores are stored, half the length takes off more than half: each T × T shrinks to a
# quarter.

# %% [markdown]
# ## At scale: seven billion
#
# The same line, a larger name. Weights, gradients and Adam's two moments of Llama 2 7B in float32
# exceed a card of 80 GB before the first activation.

# %%
seven_billion = Setting("llama-2-7b", batch=1, seq_len=4096)
seven = dry_trace_of_blocks(seven_billion, plain)
print(seven)
print(f"by your formula: {format_bytes(peak_bytes(PRESETS['llama-2-7b'], 1, 4096))}")

# %% [markdown]
# ## On your GPU
#
# Where there is a GPU, this takes the step of the question on it for real, and asks the GPU's
# allocator for a second opinion. What it has *reserved* is more than what tensors hold; why, is
# tomorrow's question.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    on_gpu = build(replace(setting, device=gpu.type), plain)
    on_gpu.step()
    print(measured(on_gpu))
else:
    print(stored_on_a_gpu("day 1"))

# %% [markdown]
# ## Rules on trial
#
# Rules of thumb from guides that people read today, quoted fairly and measured. GB are 10⁹ bytes,
# as the guides count; RULES.md has all verdicts. The first was just measured: 7B in float32.

# %%
GB = 1e9
N = PRESETS["llama-2-7b"].parameters
kinds = ("parameters", "gradients", "optimizer_state")
parts = [seven.at_end[kind] for kind in kinds]
verdict(
    "2a",
    all(abs(part / N - wanted) < 0.001 for part, wanted in zip(parts, (4, 4, 8), strict=True)),
    f"{' + '.join(f'{part / N:.3f}' for part in parts)} bytes a weight; for the {N / GB:.2f} "
    f"billion of Llama 2, {' + '.join(f'{part / GB:.1f}' for part in parts)} = "
    f"{sum(parts) / GB:.1f} GB",
    condition="for a round 7 billion weights, at rest; the peak of a step is higher",
)

# %% [markdown]
# Its weights alone, in four, two and one bytes.

# %%
sizes = [torch.empty(0, dtype=d).element_size() for d in (torch.float32, torch.bfloat16)]
sizes.append(torch.empty(0, dtype=torch.float8_e4m3fn).element_size())
verdict(
    "2b",
    sizes == [4, 2, 1],
    f"{', '.join(f'{7 * size} GB' for size in sizes)} for 7 billion weights in FP32, BF16, FP8",
    condition="for the weights alone: what else FP8 training holds is not in it",
)

# %% [markdown]
# The next is about mixed precision: weights and gradients in bfloat16, 2 bytes a number, and AdamW
# on float32 copies of the weights (*master weights*; Day 4 says why). Here it is by hand, with the
# 1B model. One step will do: what is asked for is what rests after it, and what forward keeps.


# %%
def mixed_precision(config: GPTConfig, batch: int, seq_len: int):
    model = GPT(config, dtype=torch.bfloat16)
    masters = [weight.detach().float() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, foreach=False)
    tokens = torch.zeros(batch, seq_len, dtype=torch.long)

    def step() -> None:
        model.zero_grad()
        model(tokens, tokens).backward()
        for weight, master in zip(model.parameters(), masters, strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        for weight, master in zip(model.parameters(), masters, strict=True):
            weight.data.copy_(master)
            master.grad = None

    return step, model, optimizer


with memlab.dry_run():
    step_1b, model_1b, adam_1b = mixed_precision(PRESETS["1b"], batch=6, seq_len=8192)
    mixed = memlab.measure(step_1b, model=model_1b, optimizer=adam_1b)

# %%
N = PRESETS["1b"].parameters
at_rest = sum(mixed.at_end[kind] for kind in kinds)
alive = accumulate(e.bytes for e in mixed.events)
in_adam = max(now for now, e in zip(alive, mixed.events, strict=True) if e.phase == "optimizer")
verdict(
    "1a",
    abs(at_rest / N - 16) < 0.001,
    f"{at_rest / N:.3f} bytes a weight at rest, {in_adam / N:.2f} while AdamW runs; at the peak "
    f"{mixed.at_peak['activations'] / GB:.0f} GB of activations, from 6 × 8192 tokens",
    condition="at rest; while AdamW runs, gradients in float32 and its scratch come on top",
)

# %% [markdown]
# "Memory-bound, not compute-bound" means two things. What *fits* is decided by memory. What is
# *fast* is decided by operations if each byte read is used often enough: an H100 can do 989 · 10¹²
# operations in bfloat16 while it reads 3.35 · 10¹² bytes, 295 to a byte (NVIDIA's data sheet).

# %%
from torch.utils.flop_counter import FlopCounterMode


def operations_per_byte(tokens: int, C: int) -> float:
    """Of the product of (tokens, C) with (C, C), in bfloat16."""
    with memlab.dry_run(), FlopCounterMode(display=False) as counter:
        x, weight = torch.empty(tokens, C).bfloat16(), torch.empty(C, C).bfloat16()
        y = x @ weight
    return counter.get_total_flops() / (x.nbytes + weight.nbytes + y.nbytes)


C, H100 = PRESETS["1b"].hidden_size, 989 / 3.35
few_tokens, many_tokens = (operations_per_byte(tokens, C) for tokens in (64, 6 * 8192))
verdict(
    "1b",
    many_tokens < H100,
    f"a product with a {C} × {C} matrix does {few_tokens:.0f} operations a byte with 64 tokens, "
    f"{many_tokens:.0f} with 6 × 8192; an H100 needs {H100:.0f} to be kept busy",
    otherwise="memory decides what fits; how long a step of many tokens takes, compute decides",
)

# %% [markdown]
# Twice the batch, the length, the width; and how many tensors of that size a block keeps.

# %%
without_one = replace(config, layers=config.layers - 1)
in_a_block = activation_bytes(config, 8, 640) - activation_bytes(without_one, 8, 640)
wide = replace(
    PRESETS["tiny"], hidden_size=64, intermediate_size=2 * PRESETS["tiny"].intermediate_size
)
kept = {name: t.at_peak["activations"] for name, t in costs.items()}
ratios = {
    "batch": kept["8 × 64"] / kept["4 × 64"],
    "length": kept["8 × 64"] / kept["8 × 32"],
    "length, scores stored": kept["8 × 64, scores stored"] / kept["8 × 32, scores stored"],
    "width": activation_bytes(wide, 8, 64) / kept["8 × 64"],
}
verdict(
    "3",
    abs(ratios["batch"] - 2) < 0.01 and abs(ratios["length"] - 2) < 0.01,
    f"twice the {', '.join(f'{name}: {ratio:.2f} ×' for name, ratio in ratios.items())}; a block "
    f"of 124m keeps {in_a_block / (4 * 8 * 640 * config.hidden_size):.1f} tensors of that size",
    condition="with fused attention, and for width all but the logits; the factor is about twenty",
)

# %% [markdown]
# 34 million weights (64 fewer than the guide's), torch's checkpointing around every block: it
# forgets what the block keeps, and computes it again (Day 5 builds it). The test that the guide
# quotes runs forward and backward and no optimizer.

# %%
checkpointed = dry_trace(Setting("34m", batch=2, seq_len=512), TECHNIQUES["checkpointing"])
adam = checkpointed.at_peak["optimizer_state"]
without = checkpointed.peak_bytes - adam
verdict(
    "4",
    abs(without / (0.63 * GB) - 1) < 0.15,
    f"{without / GB:.2f} GB without Adam's state, {checkpointed.peak_bytes / GB:.2f} GB with it",
    condition="roughly, if no optimizer is counted",
)

# %% [markdown]
# Beside that test the guide has a table: weights 0.5, Adam 1.0, gradients 0.5, activations 0.6 GB,
# in all 2.6 GB, where it was 32 GB before. Whose weights are 0.5 GB?

# %%
table = dry_trace_of_blocks(Setting("124m", batch=2, seq_len=512), TECHNIQUES["checkpointing"])
earlier = dry_trace_of_blocks(Setting("124m", batch=16, seq_len=1024), eager)
weights = {name: 4 * PRESETS[name].parameters / GB for name in ("34m", "124m")}
verdict(
    "5",
    abs(weights["34m"] / 0.5 - 1) < 0.15,
    f"34M weights are {weights['34m']:.2f} GB, 124M are {weights['124m']:.2f}; with 124M the step "
    f"peaks at {table.peak_bytes / GB:.2f} GB, and without checkpointing, its attention scores "
    f"stored, 16 × 1024 tokens at {earlier.peak_bytes / GB:.1f} GB",
    otherwise="the table is of a model of 125M weights, not of the 34M beside it; for 125M it is "
    "near, and high, for gradients and activations are never all there at once",
)

# %% [markdown]
# ## What you can do now
#
# | when | holds |
# | --- | --- |
# | always | 4 bytes a weight, and 8 for AdamW, from the second step on |
# | forward | + what is kept for each token: some twenty times C in a block, V at the end |
# | **backward begins** | + two tensors as large as the logits: **the peak, with many tokens** |
# | backward ends | + 4 bytes a weight, activations gone: the peak, with few tokens |
# | optimizer | + scratch for the largest weight: the peak, with few tokens and many weights |
#
# It was all float32, and everything was kept. The fifteen days to come take it apart.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. From tomorrow on, each day ends with what is
# left of it: with all that was built until then.

# %%
running_bill(1, today=trace)

# %% [markdown]
# ## Sources
#
# - Touvron et al. 2023: [LLaMA: Open and Efficient Foundation Language
#   Models](https://arxiv.org/abs/2302.13971)
# - Korthikanti et al. 2022: [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198)
# - NVIDIA: [H100, data sheet](https://www.nvidia.com/en-us/data-center/h100/)
#
# The rules on trial are from:
#
# - thINKblots: [Multi-Platform Memory
#   Optimization](https://github.com/thINKblots/gearhead/blob/d9730c481ff0cc18e9e2b2e6981495e233b9f7b1/MEMORY_OPTIMIZATIONS.md)
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
# - "Day 19: Memory Optimization", author and address unknown
