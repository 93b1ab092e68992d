# %% [markdown]
# # Day 1: Where memory goes
#
# **My model's weights are 0.5 GB. Why does training it need 8.5 GB?**
#
# After today you can predict, to within 0.5 %, how much memory a training step of a transformer
# needs. When a step does not fit, you know which part to reduce first.
#
# About 75 minutes, 49 of them for five exercises. You need a laptop and some experience of training
# with PyTorch. A GPU is optional. Nothing is downloaded.

# %% [markdown]
# How it works: you **guess**, then **measure**, then **build** the code that explains the gap. In
# each exercise, replace `raise NotImplementedError` with your own code. The cell below it checks
# the values and the bytes of your answer. If you are stuck, run `memlab hint 1.1` in a terminal
# (in JupyterLab: File, New, Terminal). You can skip an exercise: the rest of the lesson then uses
# the reference solution.

# %% [markdown]
# ## The question
#
# The course trains a small Llama, implemented in one readable file
# ([memlab/model.py](../memlab/model.py)). The preset `124m` has the size of GPT-2 small, and its
# float32 weights need about half a gigabyte. (KiB, MiB, GiB and TiB are 2¹⁰, 2²⁰, 2³⁰ and 2⁴⁰
# bytes; a GB is 10⁹ bytes.)

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
# Take one training step: forward, backward, AdamW, with 8 sequences of 640 tokens, in float32. Its
# *peak memory* is just under 8 GiB. How many GiB of the peak are **activations**, the tensors that
# forward saves for backward? Replace the dots with your guess before you read on.

# %%
### BEGIN SOLUTION
guess("1.1", activations_gib=6.2)  # 8 minus weights, gradients and Adam's two moments
### END SOLUTION
### BEGIN STUB
# guess("1.1", activations_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# `dry_trace` runs the step on *fake* tensors. Fake tensors have a shape and a dtype but no storage,
# so this runs on any laptop. memlab's *meter* records the same allocations and frees as in a real
# step. `setting` describes the model and the batch; `plain` means that no technique is applied.

# %%
setting = Setting("124m", batch=8, seq_len=640)
trace = dry_trace(setting, plain)
reveal("1.1", trace)
print(trace)

# %%
plot.timeline(trace, title=f"One training step: {setting}")

# %% [markdown]
# The x-axis counts allocations and frees. `zero_grad` frees the previous step's gradients, forward
# accumulates activations, and backward frees them while gradients grow.
#
# Two things explain the gap. At the peak there are *no* gradients, but there are **backward
# temporaries**: intermediate tensors of backward. Today you compute the memory of a step like a
# bill with four lines: weights, what stays between steps, activations, and the total at the peak.
# You write one function for each line.

# %% [markdown]
# | band in the plot | contents |
# | --- | --- |
# | parameters | the weights |
# | buffers | untrained tensors: here, the tables of RoPE (rotary position embedding) |
# | optimizer state | AdamW's two moments for each weight |
# | inputs | the tokens |
# | activations | tensors made in forward and still alive when backward starts |
# | gradients | one element for each weight |
# | temporaries | short-lived tensors of forward, backward or the optimizer |

# %% [markdown]
# ## Line 1: weights
#
# The whole course uses these symbols:
#
# - C: hidden size
# - L: number of blocks
# - H: number of query heads
# - D = C / H: head dimension
# - KV: number of key and value heads (several query heads may share one)
# - V: vocabulary size
# - B, T: sequences in a batch, tokens in a sequence
#
# | part | shape of each matrix |
# | --- | --- |
# | embedding | V × C; if `tied`, it also computes the logits; otherwise a second V × C does |
# | attention, in each block | query, output: C × C; key, value: C × (KV · D) |
# | MLP, in each block | gate, up, down: C × `intermediate_size` |
# | norms | C each: two in a block, one after the last block |

# %% [markdown]
# ### Exercise 1.1: count the weights
#
# About 8 minutes. `config` has `vocab_size`, `hidden_size`, `layers`, `heads`, `kv_heads`,
# `head_dim`, `intermediate_size` and `tied`. There are no biases. Do not allocate the model:
# `llama-3-405b` needs 1.5 TiB.


# %%
def parameter_count(config: GPTConfig) -> int:
    """Return the number of trainable weights."""
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
# Now train on real tensors, with a model small enough for a laptop. It has 58 thousand weights, and
# a vocabulary of 256 because every byte is a token. Its training data is torch's own source code.
# How many KiB of optimizer state does AdamW hold before the first step?

# %%
### BEGIN SOLUTION
guess("1.2", optimizer_kib=450)  # two float32 elements per weight
### END SOLUTION
### BEGIN STUB
# guess("1.2", optimizer_kib=...)
### END STUB

# %% [markdown]
# ### Exercise 1.2: count what stays
#
# About 8 minutes. Count the bytes of the model's parameters (without buffers), of their gradients,
# and of all tensors in `optimizer.state`, as they are at the time of the call. A parameter `p` has
# `p.nbytes` and `p.grad`, which may be `None`. `optimizer.state` maps each parameter to a
# dictionary of tensors. Your function must work for any model and optimizer, and
# change neither.


# %%
def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the current bytes of "parameters", "gradients" and "optimizer_state"."""
    ### BEGIN SOLUTION
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(g.nbytes for g in gradients),
        "optimizer_state": sum(s.nbytes for s in state),
    }
    ### END SOLUTION


# %%
state_bytes = exercise("1.2", state_bytes)

# %% [markdown]
# The next cells define a standard training step, then a model, and measure two steps.

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
print(f"first step's peak {format_bytes(first.peak_bytes)}, ", end="")
print(f"second step's peak {format_bytes(second.peak_bytes)}")

# %% [markdown]
# **AdamW allocates its state in the first step**, when `optimizer.step()` first updates a weight.
# The second step starts with 8 more bytes per weight, so it may run out of memory where the first
# step fits. Always measure the second step. (Another 152 bytes are one 4-byte step counter per
# parameter tensor.)
#
# After the second step, memory should not grow. The next cell runs ten more steps and plots memory
# and loss. (The loss is in *nats*: minus the natural logarithm of the correct token's probability.)

# %%
steps = [memlab.measure(step, model=model, optimizer=optimizer) for _ in range(10)]
fig, (memory, learning) = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
numbers, traces = range(1, 13), (first, second, *steps)
memory.plot(numbers, [t.peak_bytes / 2**20 for t in traces], label="peak of the step")
memory.plot(numbers, [t.live_bytes / 2**20 for t in traces], label="allocated after the step")
memory.set(xlabel="step", ylabel="MiB", ylim=(0, None), title="Memory is constant from step 2 on")
memory.legend(frameon=False, loc="center right")
learning.plot(numbers, losses)
learning.set(xlabel="step", ylabel="loss in nats", title="Loss on torch's source code")
print(f"distinct peaks after the first step: {len({t.peak_bytes for t in (second, *steps)})}")
print(f"the loss went down: {losses[-1] < losses[0]}")

# %% [markdown]
# ## Line 3: what forward saves
#
# Backward needs intermediate results of forward. For example, the gradient of `w` in `x @ w` needs
# `x`. These saved tensors are the **activations**. The meter records the module and the operator of
# each allocation.
#
# The next cell lists the activations of one block in the order of allocation, for 8 × 64 tokens.
# Here C = 32, H = 4, KV = 2, D = 8 and `intermediate_size` = 96.

# %%
kept = [e for e in second.alive(second.peak_position) if e.category == "activations"]
for e in sorted(kept, key=lambda e: e.storage):
    if e.module.startswith("blocks.1"):
        operator, shape = e.operator.split(".")[1], "×".join(map(str, e.shape))
        print(f"{e.module.removeprefix('blocks.1'):18}{operator:44}{shape:>9}{e.bytes:>9,} B")

# %% [markdown]
# | saved in each block | elements per token |
# | --- | --- |
# | each of the two norms: normalized x, scaled x, 1/rms | 2 · C + 1 |
# | attention: q and k after RoPE, v, the output, log-sum-exp | C + 2 · KV · D + C + H |
# | the residual sums after attention and after the MLP | 2 · C |
# | MLP: gate, silu(gate), up, their product | 4 · `intermediate_size` |
#
# RoPE rotates q and k by angles that encode the position. Log-sum-exp is one element per token and
# head. Backward uses it to recompute the attention probabilities.
#
# Outside the blocks, forward saves:
#
# - the embedding's output: C per token
# - the last norm: 2 · C + 1 per token
# - the log-probabilities (`log_softmax` of the logits): V per token
# - the loss: one element

# %% [markdown]
# ### Exercise 1.3: count the activations
#
# About 15 minutes. Every element is float32. Start with one token and one block, as the check does.


# %%
def activation_bytes(config: GPTConfig, batch: int, seq_len: int) -> int:
    """Return the bytes that forward saves for backward."""
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
# Compare your formula with the meter and with the CPU allocator. `torch.profiler` records the
# allocator's allocations and frees, but not which tensors are activations. So compare the peak of
# the whole step.

# %%
from memlab.metering.profiler_recording import record

recording = record(step, warm_up=step)  # its peak excludes memory allocated before the step
before_it = sum(e.bytes for e in second.events if e.phase == "before")
print(f"activations: formula {activation_bytes(PRESETS['tiny'], 8, 64):,}, ", end="")
print(f"meter {second.at_peak['activations']:,} bytes")
print(f"peak: meter {second.peak_bytes:,}, allocator {before_it + recording.peak_bytes:,} bytes")

# %% [markdown]
# ### Which activations are largest?
#
# Together, the MLPs save the most. But the largest single tensor holds the log-probabilities, even
# in the tiny model: V elements per token, and V is larger than C and `intermediate_size`. Days 5 to
# 7 reduce the activations of the blocks, and Day 11 reduces the logits.

# %%
from memlab.course.ledger import activation_terms  # your formula as a dictionary of terms

for name, batch, seq_len in (("tiny", 8, 64), ("124m", 8, 640), ("llama-2-7b", 1, 2048)):
    terms = activation_terms(PRESETS[name], batch, seq_len)
    largest = sorted(terms, key=terms.get, reverse=True)[:3]
    shares = ", ".join(f"{term} {terms[term] / sum(terms.values()):.0%}" for term in largest)
    print(f"{name:12}{format_bytes(sum(terms.values())):>10}: {shares}")

for name, step_trace in (("tiny", second), ("124m", trace)):
    alive = step_trace.alive(step_trace.peak_position)  # largest first
    kept = [e for e in alive if e.category == "activations"]
    print(f"{name}: largest tensor from {kept[0].operator}, {format_bytes(kept[0].bytes)}")

# %% [markdown]
# ## Line 4: the peak
#
# Can you just add weights, gradients, optimizer state and activations? No: when all gradients
# exist, all activations have been freed. Find the time of the peak first, then count the tensors
# alive at that time.

# %%
print(f"the peak is in {trace.peak_phase}:")
for category, bytes_ in trace.at_peak.items():
    print(f"  {category:22}{format_bytes(bytes_):>12}")

# %% [markdown]
# At the peak, backward has just begun. No weight has a gradient yet, and no activation has been
# freed. `backward_temporaries` are backward's first two tensors: the gradient of the
# log-probabilities and the gradient of the logits. Each is as large as the logits.

# %% [markdown]
# ### Exercise 1.4: predict the peak
#
# About 8 minutes. Compute the bytes alive when backward has just begun, in any step after the
# first. You may leave out small tensors (tokens, RoPE tables, step counters): an error of 0.5 % is
# accepted. You may call `parameter_count` and `activation_bytes`.


# %%
def peak_bytes(config: GPTConfig, batch: int, seq_len: int) -> int:
    """Return the bytes alive when backward has just begun."""
    ### BEGIN SOLUTION
    logits = 4 * batch * seq_len * config.vocab_size
    always = 4 * parameter_count(config) + 8 * parameter_count(config)  # weights, Adam's moments
    return always + activation_bytes(config, batch, seq_len) + 2 * logits
    ### END SOLUTION


# %%
peak_bytes = exercise("1.4", peak_bytes)

# %% [markdown]
# The formula has a limit: it counts the memory at the start of backward. With *few* tokens,
# gradients need more memory than activations, and the peak is later: at the end of backward, where
# autograd sums the two gradients of the tied embedding, or in the optimizer.


# %%
def second_step(setting: Setting, technique: Technique = plain) -> Trace:
    training = build(setting, technique)
    training.step()
    return measured(training)


few = second_step(Setting("tiny", batch=1, seq_len=4))
formula = peak_bytes(PRESETS["tiny"], 1, 4)
print(f"1 × 4 tokens: formula {format_bytes(formula)}, measured {format_bytes(few.peak_bytes)}")
plot.timeline(few, title="Four tokens: the peak is after the start of backward")

# %% [markdown]
# ## The largest batch that fits
#
# In practice you ask the inverse question: which batch size fits? A measurement may take a second,
# so trying every batch size is too slow.
#
# ### Exercise 1.5: find the largest batch
#
# About 10 minutes. `bytes_at(batch)` is a formula or a measurement. It returns bytes and never
# decreases as the batch grows. There are two limits:
#
# - Call it at most 60 times, even if the answer is forty million.
# - Never pass more than twice the largest batch that fits (1 is always allowed): a huge batch can
#   crash the machine.


# %%
def largest_batch(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    """Return the largest batch that fits in the budget, or 0 if none fits."""
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
    peak = format_bytes(peak_bytes(config, batch, 640))
    print(f"{gib:2} GiB: {batch:2} sequences of 640 tokens fit, {peak} by the formula")
print(f"8 sequences measured: {format_bytes(trace.peak_bytes)}")

# %% [markdown]
# ## Batch size and sequence length
#
# *Fused* attention is a single kernel that never stores the attention scores. With it, activation
# memory depends only on the number of tokens. Without it, attention stores T × T scores for every
# head of every sequence, so longer sequences need more memory per token.


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
plot.breakdown(costs, title="Peak memory of the tiny model: batch × length")

# %% [markdown]
# 4 × 64 and 8 × 32 are both 256 tokens, and both halve the activations. With stored scores, halving
# the length saves more than half of them, because each T × T matrix shrinks to a quarter. (In
# "Line 2", 8 × 64 tokens peaked at 7.72 MiB, not 7.66, because 64 KiB of text were in memory.)

# %% [markdown]
# ## At scale: 7 billion parameters
#
# `dry_trace_of_blocks` returns the same trace as `dry_trace`, but runs only a few of the identical
# blocks. In float32, weights, gradients and optimizer state of Llama 2 7B don't fit on a GPU with
# 80 GB, even without activations.

# %%
seven_billion = Setting("llama-2-7b", batch=1, seq_len=4096)
seven = dry_trace_of_blocks(seven_billion, plain)
print(seven)
print(f"by your formula: {format_bytes(peak_bytes(PRESETS['llama-2-7b'], 1, 4096))}")

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs the step from the guess on it. It also prints the caching
# allocator's numbers. *Reserved* memory is larger than allocated memory; Day 2 explains why.

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
# These rules of thumb come from published guides. Each is stated and then measured. RULES.md lists
# all verdicts. (One guide is called "Day 19: Memory Optimization"; it is not a day of this course.)
#
# Rule 2a is about the 7B model in float32 that you just measured.

# %%
GB = 1e9
N = PRESETS["llama-2-7b"].parameters
kinds = ("parameters", "gradients", "optimizer_state")
parts = [seven.at_end[kind] for kind in kinds]
per_weight = [round(part / N, 3) for part in parts]
in_gb = " + ".join(f"{part / GB:.1f}" for part in parts)
verdict(
    "2a",
    per_weight == [4, 4, 8],
    f"{' + '.join(f'{b:.3f}' for b in per_weight)} bytes per weight; Llama 2 7B has {N / GB:.2f} "
    f"billion weights and needs {in_gb} = {sum(parts) / GB:.1f} GB",
    condition="for exactly 7 billion weights, between steps; the peak of a step is higher",
)

# %% [markdown]
# Rule 2b gives the size of the weights alone, with four, two and one bytes per element.

# %%
sizes = [torch.empty(0, dtype=d).element_size() for d in (torch.float32, torch.bfloat16)]
sizes.append(torch.empty(0, dtype=torch.float8_e4m3fn).element_size())
verdict(
    "2b",
    sizes == [4, 2, 1],
    f"{', '.join(f'{7 * size} GB' for size in sizes)} for 7 billion weights in FP32, BF16, FP8",
    condition="for the weights alone; FP8 training needs further tensors",
)

# %% [markdown]
# Rule 1a is about mixed precision: weights and gradients in bfloat16 (2 bytes per element), and
# AdamW on float32 copies of the weights (*master weights*; Day 4 explains them). The next cell
# implements it for the 1B model. One step shows the activations and the memory after the step.


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
activations = mixed.at_peak["activations"]
verdict(
    "1a",
    abs(at_rest / N - 16) < 0.001,
    f"{at_rest / N:.3f} bytes per weight between steps, {in_adam / N:.2f} during AdamW's step; "
    f"{activations / GB:.0f} GB of activations at the peak with 6 × 8192 tokens",
    condition="between steps; AdamW's step also needs float32 gradients and temporaries",
)

# %% [markdown]
# For rule 1b, "memory-bound" can mean two things: memory *capacity* limits which model fits, or
# memory *bandwidth* limits a kernel's speed. An H100 does 989 · 10¹² FLOP/s in bfloat16 and moves
# 3.35 · 10¹² bytes/s (NVIDIA's data sheet). A kernel that does more than 295 FLOPs per byte is
# *compute-bound*.

# %%
from torch.utils.flop_counter import FlopCounterMode


def operations_per_byte(tokens: int, C: int) -> float:
    """Return FLOPs per byte of the bfloat16 matmul (tokens, C) @ (C, C)."""
    with memlab.dry_run(), FlopCounterMode(display=False) as counter:
        x, weight = torch.empty(tokens, C).bfloat16(), torch.empty(C, C).bfloat16()
        y = x @ weight
    return counter.get_total_flops() / (x.nbytes + weight.nbytes + y.nbytes)


C, H100 = PRESETS["1b"].hidden_size, 989 / 3.35
few_tokens, many_tokens = (operations_per_byte(tokens, C) for tokens in (64, 6 * 8192))
verdict(
    "1b",
    many_tokens < H100,
    f"a matmul with a {C} × {C} weight does {few_tokens:.0f} FLOPs per byte with 64 tokens and "
    f"{many_tokens:.0f} with 6 × 8192; above {H100:.0f}, an H100 is compute-bound",
    otherwise="memory limits what fits, but compute limits the speed of a step with many tokens",
)

# %% [markdown]
# For rule 3, double the batch, the length and the width (C and `intermediate_size`) in turn. Then
# count how many B × T × C tensors a block saves.

# %%
one_less = replace(config, layers=config.layers - 1)
in_a_block = activation_bytes(config, 8, 640) - activation_bytes(one_less, 8, 640)
per_block = in_a_block / (4 * 8 * 640 * config.hidden_size)
wide = replace(
    PRESETS["tiny"], hidden_size=64, intermediate_size=2 * PRESETS["tiny"].intermediate_size
)
kept = {name: t.at_peak["activations"] for name, t in costs.items()}
ratios = {
    "batch": kept["8 × 64"] / kept["4 × 64"],
    "length": kept["8 × 64"] / kept["8 × 32"],
    "length with stored scores": kept["8 × 64, scores stored"] / kept["8 × 32, scores stored"],
    "width": activation_bytes(wide, 8, 64) / kept["8 × 64"],
}
verdict(
    "3",
    abs(ratios["batch"] - 2) < 0.01 and abs(ratios["length"] - 2) < 0.01,
    f"doubling the {', '.join(f'{name}: {ratio:.2f}×' for name, ratio in ratios.items())}; a "
    f"block of 124m saves {per_block:.1f} tensors of B × T × C elements",
    condition="with fused attention; the logits do not grow with the width",
)

# %% [markdown]
# Rule 4 is about a model of 34 million weights (our preset has 64 weights fewer) with torch's
# activation checkpointing around every block. Checkpointing discards a block's activations and
# recomputes them in backward (Day 5 builds it). The guide's test runs forward and backward without
# an optimizer.

# %%
checkpointed = dry_trace(Setting("34m", batch=2, seq_len=512), TECHNIQUES["checkpointing"])
adam = checkpointed.at_peak["optimizer_state"]
without = checkpointed.peak_bytes - adam
verdict(
    "4",
    abs(without / (0.63 * GB) - 1) < 0.15,
    f"{without / GB:.2f} GB without Adam's state, {checkpointed.peak_bytes / GB:.2f} GB with it",
    condition="roughly, without an optimizer",
)

# %% [markdown]
# Rule 5 is the guide's table beside that test: weights 0.5, Adam 1.0, gradients 0.5, activations
# 0.6 GB, a peak of 2.6 GB, and 32 GB without checkpointing. Which model has weights of 0.5 GB?

# %%
small_batch = dry_trace_of_blocks(
    Setting("124m", batch=2, seq_len=512), TECHNIQUES["checkpointing"]
)
large_batch = dry_trace_of_blocks(Setting("124m", batch=16, seq_len=1024), eager)
of_34m, of_124m = (4 * PRESETS[name].parameters / GB for name in ("34m", "124m"))
found = (
    f"34M weights are {of_34m:.2f} GB, 124M are {of_124m:.2f} GB; 124M peaks at "
    f"{small_batch.peak_bytes / GB:.2f} GB, or at {large_batch.peak_bytes / GB:.1f} GB with "
    f"16 × 1024 tokens, stored attention scores and no checkpointing"
)
actual = (
    "the table fits a 124M model, not the 34M model of the test; it adds gradients and "
    "activations, which never all exist at once, so its peak is too high"
)
verdict("5", abs(of_34m / 0.5 - 1) < 0.15, found, otherwise=actual)

# %% [markdown]
# ## Summary
#
# | when | memory |
# | --- | --- |
# | always | 4 bytes per weight, and from the second step on 8 more for AdamW |
# | forward | + activations: about 21 · C elements per token and block, V per token at the end |
# | **backward begins** | + two tensors as large as the logits: **the peak with many tokens** |
# | backward ends | + 4 bytes per weight, activations freed: the peak with few tokens |
# | optimizer | + temporaries of the largest weight tensor: peak with few tokens, many weights |
#
# The step was in float32, and all activations were saved. The following days reduce each part.

# %% [markdown]
# ## The running bill
#
# The running bill is the peak of one training step of the 124M model with 8 × 640 tokens. From Day
# 2 on, each day ends with the bill after all techniques so far.

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
