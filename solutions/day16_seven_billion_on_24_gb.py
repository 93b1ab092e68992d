# %% [markdown]
# # Day 16: Seven billion on 24 GB
#
# **Does a given model fit on a given GPU?**
#
# After today you can:
#
# - estimate by formula, to a few percent, whether a model fits on a GPU
# - predict its allocated and reserved memory without a GPU
# - train all 7B weights on 24 GB, and say what that recipe gives up
#
# About 90 minutes, 59 of them for five exercises. You need a laptop, but no GPU. Nothing is
# downloaded.

# %% [markdown]
# As before, you **guess**, **measure**, and **build** what explains the gap. In an exercise,
# replace `raise NotImplementedError` with your own lines. The cell below it checks them. If you are
# stuck, type `memlab hint 16.1` in a terminal. You can skip an exercise and go on.

# %% [markdown]
# ## The question
#
# The guide under *Sources* ends with three configurations, all with flash attention:
#
# | model | GPUs | techniques | batch | memory |
# | --- | --- | --- | --- | --- |
# | 7B | 1 × 24 GB | BF16, checkpointing, 8-bit Adam | 1, 16 accumulation steps | ~20 GB |
# | 70B | 8 × 80 GB | BF16, checkpointing, ZeRO-3 | 1 × 4,096, 8 accumulation steps | ~60 GB each |
# | 405B | 128 H100 | FP8, checkpointing, ZeRO-1, TP 8, PP 4, DP 4 | not stated | not stated |
#
# TP, PP and DP are tensor, pipeline and data parallelism. Do these configurations fit?

# %%
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch

from memlab import planner, plot, train
from memlab.course import (
    bill,
    days,
    exercise,
    guess,
    reveal,
    running_bill,
    stored_on_a_gpu,
    verdict,
)
from memlab.model import PRESETS
from memlab.planner import CARDS, Recipe, memory_named, training_bytes
from memlab.planner.costs import step_seconds
from memlab.planner.recipes import recipes
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# 1. The first configuration at 1 × 2,048 tokens, without accumulation: how many GB at the peak?
# 2. How many GiB is 7B's buffer of gradients in bfloat16?
# 3. The fastest 8-bit Lion recipe that trains all 7B weights at 1 × 2,048 within 24 GB: how many
#    GiB does it reserve?
# 4. The third configuration: how many GB does a GPU of the first pipeline stage hold? Count weights
#    (FP8), gradients (BF16), optimizer state (float32 Adam and master weights) and block inputs
#    (BF16, 8,192 tokens a micro-batch, split among 8 GPUs).

# %%
### BEGIN SOLUTION
guess("16.1", guide_gb=20, buffer_gib=6, recipe_gib=23, rank_gb=60)
### END SOLUTION
### BEGIN STUB
# guess("16.1", guide_gb=..., buffer_gib=..., recipe_gib=..., rank_gb=...)
### END STUB

# %% [markdown]
# ## The peak is the larger of two moments
#
# The tensors of a step don't all exist at once. The peak is the larger of two **moments** (Day 1):
#
# | moment | weights, state | activations | gradients | scratch |
# | --- | --- | --- | --- | --- |
# | `"backward"` begins | yes | yes | no | no |
# | `"optimizer"` steps | yes | freed | yes | yes |
#
# *Scratch* is what an optimizer allocates while it steps one weight. torch's AdamW
# (`foreach=False`) in float32 allocates two tensors of the weight's size. memlab's optimizers step
# a weight in **pieces** and allocate 5 to 7.5 float32 elements per element of a piece.


# %%
@dataclass(frozen=True)
class Optimizer:
    state_elements: int  # per weight element
    state_itemsize: float  # bytes per state element
    scratch: float  # temporary float32 elements per element of the weight or piece
    piece: int | None = None  # elements updated at a time; None: the whole weight
    in_backward: bool = False  # step each weight as soon as its gradient exists


CODE = 1 + 4 / 256  # bytes: an 8-bit code, and one float32 absmax per 256 codes (Day 9)
PIECE = 2**22
adamw_in_32_bits = Optimizer(2, 4, scratch=2)
adamw_in_16_bits = Optimizer(2, 2, scratch=5, piece=PIECE)
adam_in_8_bits = Optimizer(2, CODE, scratch=7.5, piece=PIECE)
lion_in_8_bits = Optimizer(1, CODE, scratch=6.5, piece=PIECE)
lion_in_backward = Optimizer(1, CODE, scratch=6.5, piece=PIECE, in_backward=True)

# %% [markdown]
# ### Exercise 16.1: the largest moment
#
# About 12 minutes. `sizes` lists the number of elements of each weight tensor. A weight and its
# gradient have `itemsize` bytes per element. `activations` is in bytes. Return the moment of the
# peak and its bytes, such as `("backward", 1024)`. Count scratch for the largest weight or, if
# smaller, one piece. An optimizer that steps **in backward** holds one gradient at a time (Day 8):
# count the largest, and ignore the activations that still exist when it steps.


# %%
def peak(sizes, itemsize, optimizer, activations):
    ### BEGIN SOLUTION
    elements, largest = sum(sizes), max(sizes)
    held = elements * itemsize + elements * optimizer.state_elements * optimizer.state_itemsize
    gradients = itemsize * (largest if optimizer.in_backward else elements)
    scratch = 4 * optimizer.scratch * min(largest, optimizer.piece or largest)
    moments = {"backward": held + activations, "optimizer": held + gradients + scratch}
    moment = max(moments, key=moments.get)
    return moment, moments[moment]
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 16.1, about 7 lines")
    ### END STUB


# %%
peak = exercise("16.1", peak)


# %%
def sizes_of(config):
    """Return the number of elements of each weight of our GPT."""
    C, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    Q, K = config.heads * config.head_dim, config.kv_heads * config.head_dim
    block = [C * Q, C * K, C * K, Q * C, C * F, C * F, F * C, C, C]
    return [V * C] * (1 if config.tied else 2) + block * config.layers + [C]


seven = PRESETS["llama-2-7b"]
print("7B in bfloat16, without activations:")
for name, optimizer in (
    ("AdamW, state in bfloat16", adamw_in_16_bits),
    ("8-bit Adam", adam_in_8_bits),
    ("8-bit Lion", lion_in_8_bits),
    ("8-bit Lion, in backward", lion_in_backward),
):
    _, count = peak(sizes_of(seven), 2, optimizer, 0)
    print(f"  {name:32}{count / 2**30:7.2f} GiB, {count / 1e9:6.2f} GB")

# %% [markdown]
# With the guide's optimizer, 8-bit Adam, a step needs 40.8 GB even without activations: weights and
# gradients alone are 27.0 GB. Only 8-bit Lion with the **step in backward** needs less than 24 GB.

# %% [markdown]
# ## Activations
#
# On a GPU, with fused norms (Days 1, 4, 10), a block saves for each token:
#
# - in the activations' dtype: the input and output of both norms, q, k, v, attention's output, and
#   four tensors of the MLP's intermediate size
# - in float32: attention's log-sum-exp (one element per head) and one element per norm
#
# During backward, a block also has gradients in the activations' dtype: two of the MLP's
# intermediate size and one of the hidden size.


# %%
@dataclass(frozen=True)
class Block:
    elements: int  # elements saved per token, in the activations' dtype
    input_elements: int  # the block's input, part of `elements`; a checkpoint saves only this
    float32_elements: int  # float32 elements saved per token
    gradient_elements: int  # per token, in the activations' dtype, during the block's backward


def block_of(config, fused=True):
    """Return a block's elements per token. Without fused norms, each norm saves one more tensor."""
    C, F = config.hidden_size, config.intermediate_size
    Q, K = config.heads * config.head_dim, config.kv_heads * config.head_dim
    norms = 2 * C if fused else 4 * C
    elements = 2 * C + norms + 2 * Q + 2 * K + 4 * F
    return Block(elements, C, config.heads + 2, 2 * F + C)


saved = block_of(seven)
print(f"a block of 7B saves {2 * saved.elements + 4 * saved.float32_elements:,} bytes")
print(f"per token in bfloat16, {2 * seven.hidden_size:,} of them for its input")

# %% [markdown]
# ### Exercise 16.2: activations, saved or recomputed
#
# About 12 minutes. Return the most activation bytes that exist at once in backward. `itemsize` is
# the bytes of an element in the activations' dtype. Add two terms:
#
# 1. What forward saved of all `layers` blocks: everything they keep or, if `checkpointed`, only
#    their inputs.
# 2. The larger of `ends` (the bytes of the last norm, the logits and the loss) and the bytes of one
#    block at work: its gradients and, if checkpointed, everything it recomputes except its input.
#    The two never exist together.


# %%
def activations(block, layers, tokens, itemsize, checkpointed, ends):
    ### BEGIN SOLUTION
    made = tokens * (itemsize * block.elements + 4 * block.float32_elements)
    x = tokens * itemsize * block.input_elements
    kept, recomputed = (x, made - x) if checkpointed else (made, 0)
    return layers * kept + max(ends, recomputed + tokens * itemsize * block.gradient_elements)
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 16.2, about 4 lines")
    ### END STUB


# %%
activations = exercise("16.2", activations)


# %%
def ends_of(config, tokens, itemsize, fused=True):
    """Return the bytes of the last norm and the loss (three tensors of the logits' size)."""
    C, V = config.hidden_size, config.vocab_size
    return tokens * (itemsize * (2 if fused else 3) * C + 4 + 3 * itemsize * V)


def estimate(config, optimizer, tokens, itemsize=2, checkpointed=True, fused=True):
    """Return the moment of the peak, and its bytes."""
    ends = ends_of(config, tokens, itemsize, fused)
    block = block_of(config, fused)
    kept = activations(block, config.layers, tokens, itemsize, checkpointed, ends)
    return peak(sizes_of(config), itemsize, optimizer, kept)


# %% [markdown]
# Compare the formula with the meter for a small model in float32 on this CPU. The formula omits
# rotary tables, tokens and step counters, so the cell subtracts them from the meter's peak.

# %%
tiny = replace(PRESETS["tiny"], tied=False)
for batch, length, how in ((1, 4, "plain"), (16, 64, "checkpointing")):
    training = train.build(train.Setting(tiny, batch, length), train.combined(how))
    training.step()
    trace = train.measured(training)
    tokens, checkpointed = batch * length, how == "checkpointing"
    moment, count = estimate(tiny, adamw_in_32_bits, tokens, 4, checkpointed, fused=False)
    known = 4 * tiny.seq_len * tiny.head_dim + 16 * tokens + 4 * len(sizes_of(tiny))
    print(f"{how}, {batch} × {length}: formula {format_bytes(count)}, in {moment!r}; ", end="")
    print(f"meter {format_bytes(trace.peak_bytes)}, in {trace.peak_phase!r}")
    print(f"  unexplained: {trace.peak_bytes - known - count:,} bytes")


# %% [markdown]
# The plain step's 128 bytes are one temporary of the optimizer. The checkpointed step peaks in
# backward when some gradients already exist. The formula has no moment for that; the library's
# `training_bytes` has four moments. Apply it to the guide's recipe and to variants:

# %%
STEPS = {
    "AdamW in bfloat16": Recipe(),
    "+ checkpointing": Recipe(checkpointing="checkpointing"),
    "+ 8-bit Adam (the guide)": Recipe(optimizer="adam8bit", checkpointing="checkpointing"),
    "8-bit Lion instead": Recipe(optimizer="lion8bit", checkpointing="checkpointing"),
    "+ step in backward": Recipe(
        optimizer="lion8bit", checkpointing="checkpointing", step_in_backward=True
    ),
    "LoRA, checkpointing": Recipe(lora=True, checkpointing="checkpointing"),
}
estimates = {name: training_bytes(seven, recipe, 1, 2048) for name, recipe in STEPS.items()}

# %%
PARTS = {"weights": plot.COLOURS["parameters"]}
PARTS |= {part: plot.COLOURS[part] for part in ("optimizer_state", "gradients")}
REST = {"activations and temporaries": plot.COLOURS["activations"]}
fig, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for row, found in enumerate(estimates.values()):
    left = 0
    for part, colour in (PARTS | REST).items():
        known = sum(found.terms.get(p, 0) for p in PARTS)
        width = (found.terms.get(part, 0) if part in PARTS else found.peak_bytes - known) / 2**30
        axes.barh(row, width, left=left, color=colour, height=0.7,
                  label=None if row else part.replace("_", " "))  # fmt: skip
        left += width
    axes.text(left - 0.4, row, f"{left:.2f}", va="center", ha="right", color="white", fontsize=9)
axes.axvline(24e9 / 2**30, color="0.25", linestyle="--", linewidth=1)
axes.text(24e9 / 2**30 + 0.4, 5.65, "24 GB: 22.35 GiB", fontsize=9)
axes.set_yticks(range(len(estimates)), list(estimates))
axes.set(xlabel="GiB at the peak, by formula", ylim=(5.9, -0.6), xlim=(0, 58))
axes.set_title("7B, 1 × 2,048 tokens: which recipes need less than 24 GB")
axes.legend(frameon=False, loc="lower right", fontsize=9)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Two of the six recipes need less than 24 GB:
#
# - **LoRA** (Day 3) of rank 8, on every matrix of the blocks, trains 0.3 % of the weights.
# - **8-bit Lion with the step in backward** trains all weights.
#
# Checkpointing does not lower AdamW's peak (the top two bars), which is in the optimizer step, when
# activations are already freed.

# %% [markdown]
# ## Does it fit?
#
# A step needs more memory than its tensors: torch **reserves** segments with gaps (Day 2), and
# CUDA's *context* needs memory too. Vendors say "24 GB" and mean GiB, and the GPU reports less.

# %%
CONTEXT = 616 * 2**20  # bytes; the largest context that users report
UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}
for name, sold in (("rtx4090", 24), ("l4", 24), ("a10g", 24), ("h100", 80)):
    total = CARDS[name].total_bytes
    print(f"{name:8} sold with {sold} GiB, reports {format_bytes(total)}, ", end="")
    print(f"{total / 1e9:.2f} GB")
print(f"CUDA's context uses up to {format_bytes(CONTEXT)} of a GPU's memory")

# %% [markdown]
# ### Exercise 16.3: does it fit?
#
# About 10 minutes. `memory` is a key of `CARDS` (a card has `.total_bytes`), or a size with a unit
# of `UNITS`: `"24GB"`, `"1.5 GiB"`. Round its bytes to an integer. A step has `.allocated_bytes`
# (its tensors) and `.reserved_bytes`. CUDA's context also uses `CONTEXT` bytes of the GPU. Return
# how many bytes are **missing**, 0 if the step fits.


# %%
def lacks(memory, step):
    ### BEGIN SOLUTION
    if memory in CARDS:
        total = CARDS[memory].total_bytes
    else:
        unit = memory.lstrip("0123456789. ")
        total = round(float(memory.removesuffix(unit)) * UNITS[unit])
    return max(0, step.reserved_bytes + CONTEXT - total)
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 16.3, about 6 lines")
    ### END STUB


# %%
lacks = exercise("16.3", lacks)

# %% [markdown]
# ## The search
#
# For 7B with 8-bit Lion there are 34 recipes. They differ in checkpointing (none, selective, full),
# a chunked loss, the step in backward, and offloading. Formulas estimate each recipe's time and
# bytes. Measuring a recipe takes seconds. Which should you measure?

# %% [markdown]
# ### Exercise 16.4: the fastest that fits
#
# About 10 minutes. Candidates have `.seconds` and `.formula_bytes`. `measure(candidate)` returns
# the measured bytes, between 0.95 and 1.05 times the formula's. Return the fastest candidate whose
# *measured* bytes are at most `room`, or None. Don't measure a candidate twice, nor one that cannot
# fit or is slower than your answer. Don't change `candidates`.


# %%
class Candidate(NamedTuple):
    recipe: Any
    seconds: float
    formula_bytes: int


def fastest(candidates, room, measure):
    ### BEGIN SOLUTION
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        if 0.95 * candidate.formula_bytes <= room and measure(candidate) <= room:
            return candidate
    return None
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 16.4, about 4 lines")
    ### END STUB


# %%
fastest = exercise("16.4", fastest)

# %% [markdown]
# Now run the search: 7B, 1 × 2,048 tokens, 24 GB, 8-bit Lion, with time estimates for an RTX 4090.
# Here, to *measure* is to **predict**: run the step on tensors without data, through a simulated
# CUDA allocator. The 32 blocks are equal, so we run a model of three blocks and one of four. Their
# difference is one block, which is repeated for the other 28.

# %%
room = memory_named("24GB").budget_bytes
card = CARDS["rtx4090"]
candidates = []
for recipe in recipes(Recipe(optimizer="lion8bit"), sequences=1):
    seconds = step_seconds(seven, recipe, 1, 2048, gpus=1, card=card)
    count = training_bytes(seven, recipe, 1, 2048).peak_bytes
    candidates.append(Candidate(recipe, sum(seconds.values()), count))
found = {}


def measure(candidate):
    recipe = candidate.recipe
    setting = train.Setting(seven, 1, 2048, recipe.dtype, "cuda")
    found[recipe] = planner.measured(setting, recipe.techniques)
    return found[recipe].reserved_bytes


# %%
best = fastest(candidates, room, measure)
if best.recipe not in found:  # the formula was low enough, so it was not measured
    measure(best)
proof = found[best.recipe]
print(f"{len(candidates)} candidates, {len(found)} measured. Fastest that fits: {best.recipe}")
print(f"formula {format_bytes(best.formula_bytes)}, ", end="")
print(f"allocated {format_bytes(proof.allocated_bytes)}, ", end="")
print(f"reserved {format_bytes(proof.reserved_bytes)}")
for memory in ("24GB", "24GiB", "rtx4090", "l4", "a10g", "20GiB"):
    missing = lacks(memory, proof)
    print(f"  on {memory:8}{'it fits' if not missing else f'lacks {format_bytes(missing)}'}")

# %%
plot.timeline(proof.trace, title="Llama 2 7B, all weights trained, 1 × 2,048 tokens")

# %% [markdown]
# **All seven billion weights train on 24 GB**: 20.58 GiB reserved, plus the context. In the
# picture, each tooth is one recomputed block. The picture's peak, 19.92 GiB, omits the unused ends
# of the allocator's blocks (Day 2).

# %% [markdown]
# ## The batch
#
# The guide accumulates the gradients of 16 sequences. But a step in backward frees each gradient,
# so nothing can accumulate. Raise the batch instead, with a chunked loss, which lowers the reserved
# bytes from batch 2 on. (The predictions are stored.)


# %%
class Predicted(NamedTuple):
    allocated_bytes: int
    reserved_bytes: int


GROWN = {
    1: Predicted(21_776_457_728, 22_248_685_568),
    2: Predicted(22_366_748_672, 23_324_524_544),
    3: Predicted(23_175_054_336, 24_624_758_784),
}
print("         batch   allocated    reserved    24GB            rtx4090")
for batch, step in GROWN.items():
    verdicts = [lacks(memory, step) for memory in ("24GB", "rtx4090")]
    words = [f"lacks {format_bytes(n)}" if n else "fits" for n in verdicts]
    columns = f"{format_bytes(step.allocated_bytes):>12}{format_bytes(step.reserved_bytes):>12}"
    print(f"{batch:14}{columns}    {words[0]:16}{words[1]}")

# %% [markdown]
# A batch of 3 fits on neither, but by *allocated* bytes alone it would fit on both. For 16
# sequences without offloading (Day 14), you could accumulate gradients in a **buffer**, process all
# 16 at once, or train fewer weights.

# %%
buffer = 2 * seven.parameters
_, guide_bytes = estimate(seven, adam_in_8_bits, 2048)
_, lion_bytes = estimate(seven, lion_in_8_bits, 2048)
adapters = Recipe(lora=True, checkpointing="checkpointing", accumulation=True)
lora = training_bytes(seven, adapters, 16, 2048)
grown = Recipe(optimizer="lion8bit", checkpointing="checkpointing", chunked_loss=True,
               step_in_backward=True)  # fmt: skip
at_once = training_bytes(seven, grown, 16, 2048).peak_bytes
print(f"a buffer of gradients: {format_bytes(buffer)} in bfloat16, twice that in float32")
for name, count in (
    ("8-bit Adam, accumulates in bfloat16 (the guide), at least", guide_bytes),
    ("8-bit Lion, accumulates in bfloat16, at least", lion_bytes),
    ("8-bit Lion, step in backward, 16 × 2,048 at once", at_once),
    ("LoRA, accumulates in float32", lora.peak_bytes),
):
    print(f"{name:58}{format_bytes(count):>10}  {'fits on' if count <= room else 'exceeds'} 24GB")

# %% [markdown]
# "At least" means that the formula omits the activations that exist together with the buffer.
#
# Only LoRA fits: it trains 20 million weights, so its buffer is small. So choose between:
#
# - **all weights, up to 4,096 tokens a step**
# - **0.3 % of the weights, 32,768 tokens a step**
#
# The guide promises all weights and 16 sequences.

# %% [markdown]
# ## Your own model
#
# Set `MODEL` to a preset or the path of a `config.json`, and `MEMORY` to a GPU or a memory size.
# `planner.plan` runs the same search and finds:
#
# - the fastest recipe whose measured memory fits
# - its largest batch and length, also predicted, which takes a minute
# - a faster recipe that does not fit
#
# `learned` fixes the choices that change the result of training: here bfloat16 and 8-bit Lion.
# Remove it to try all recipes. In a terminal: `memlab plan --model llama-3-8b --memory 48GB`.

# %%
MODEL, MEMORY = "llama-2-7b", "24GB"
plan = planner.plan(MODEL, MEMORY, batch=1, seq_len=2048, learned=[Recipe(optimizer="lion8bit")])
print(plan)
if plan.best:
    print(f"batch up to {plan.best.largest_batch}, length up to {plan.best.longest:,}")

# %% [markdown]
# `planner.plan` leaves some memory free, so it allows fewer than the 4,096 tokens above.

# %% [markdown]
# ## At scale: 70 billion weights on eight GPUs
#
# ZeRO-3 divides the model states by eight (Day 12), except for the gathered weights. The guide
# names neither the GPU model nor the optimizer. By formula, on A100s of 80 GB, with 1 × 4,096
# tokens a rank and no accumulation yet:

# %%
seventy = PRESETS["llama-3-70b"]
ZERO = {
    "AdamW + master weights": Recipe("master-weights"),
    "AdamW in bfloat16": Recipe(),
    "8-bit Adam": Recipe(optimizer="adam8bit"),
    "8-bit Lion": Recipe(optimizer="lion8bit"),
}
a100_budget = memory_named("a100-80").budget_bytes
on_eight = {}
print(f"70B on 8 GPUs, GB per GPU; an A100 has {a100_budget / 1e9:.1f} GB for tensors")
for name, chosen in ZERO.items():
    recipe = Recipe(chosen.precision, chosen.optimizer, checkpointing="checkpointing",
                    zero_stage=3)  # fmt: skip
    on_eight[name] = training_bytes(seventy, recipe, 1, 4096, gpus=8)
    missing = max(0, on_eight[name].peak_bytes - a100_budget)
    print(f"  {name:22}{on_eight[name].peak_bytes / 1e9:7.1f} GB: ", end="")
    print(f"lacks {missing / 1e9:.1f} GB" if missing else "fits")

# %% [markdown]
# ## At scale: 405 billion weights on 128 GPUs
#
# Day 13 introduced the layout t · p · d:
#
# - tensor parallelism cuts each matrix into t parts
# - each of p pipeline stages has up to ⌈L/p⌉ of the L blocks
# - d ranks hold the same weights, and ZeRO shards among them
#
# The **first** stage holds the most: it has ⌈L/p⌉ blocks and the embedding, and it starts p
# micro-batches before the gradient of the first micro-batch returns. A pipeline accumulates
# gradients over its micro-batches, so here all gradients exist at once.

# %% [markdown]
# ### Exercise 16.5: one GPU of 128
#
# About 15 minutes. Return the bytes of a rank of the first pipeline stage: weights, gradients,
# optimizer state, and the block inputs of p micro-batches. A block has `block` weights. The
# embedding and the head have `end` weights each; the head is in the first stage only if p is 1.
#
# | argument | meaning |
# | --- | --- |
# | `degrees` | (t, p, d) |
# | `zero_stage` | shards the state from stage 1, gradients from 2, weights from 3 |
# | `bytes_each` | bytes per weight: (the weight, its gradient, its optimizer state) |
# | `input_bytes` | bytes of a block's input, per micro-batch |
#
# Divide the number of weights of the stage by t, and round up. For what ZeRO shards, divide the
# result by d, and round up. Divide `input_bytes` by t too (*sequence parallelism*).


# %%
def of_a_rank(block, end, layers, degrees, zero_stage, bytes_each, input_bytes):
    ### BEGIN SOLUTION
    tensor, pipeline, data = degrees
    blocks = -(-layers // pipeline)
    ends = 2 * end if pipeline == 1 else end
    weights = -(-(blocks * block + ends) // tensor)
    shard = -(-weights // data)
    held = pipeline * blocks * input_bytes // tensor
    for first_stage, count in zip((3, 2, 1), bytes_each, strict=True):
        held += count * (shard if zero_stage >= first_stage else weights)
    return held
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 16.5, about 8 lines")
    ### END STUB


# %%
of_a_rank = exercise("16.5", of_a_rank)

# %%
huge, TOKENS = PRESETS["llama-3-405b"], 8192
end = huge.vocab_size * huge.hidden_size
block = (huge.parameters - 2 * end - huge.hidden_size) // huge.layers
input_bytes = 2 * TOKENS * huge.hidden_size
h100_budget = memory_named("h100").budget_bytes
WAYS = {  # bytes per weight: the weight, its gradient in BF16, its optimizer state
    "BF16, float32 Adam and master weights": (2, 2, 12),
    "BF16 + FP8, float32 Adam and master weights": (3, 2, 12),
    "FP8 alone, float32 Adam and master weights": (1, 2, 12),
    "FP8 alone, 8-bit Adam": (1, 2, 2 * CODE),
}
ranks = {}
print(f"405B, 8 · 4 · 4 = {8 * 4 * 4}, ZeRO-1; an H100 has {h100_budget / 1e9:.1f} GB for tensors")
for name, bytes_each in WAYS.items():
    ranks[name] = of_a_rank(block, end, huge.layers, (8, 4, 4), 1, bytes_each, input_bytes)
    print(f"  {name:44}{ranks[name] / 1e9:6.1f} GB, {(h100_budget - ranks[name]) / 1e9:6.1f} left")
inputs = 4 * 32 * input_bytes / 1e9
print(
    f"block inputs in each row: {inputs / 8:.1f} GB; without sequence parallelism {inputs:.1f} GB"
)

# %% [markdown]
# The bytes "left" must hold the block at work, NCCL's buffers and the allocator's gaps. With FP8
# weights alone and float32 Adam, 1.9 GB is left, less than the formula's possible error (5 % is
# 4.1 GB). Frameworks that compute in FP8 usually keep BF16 weights too: 108.4 GB.
#
# Nothing in this section is measured on a GPU. `memlab plan --model llama-3-405b --gpu h100 --gpus
# 128` compares layouts of FSDP2 with tensor and pipeline parallelism.

# %% [markdown]
# ## Explain the gap
#
# `reveal` labels all four values *measured*, but here the recipe's memory is a prediction. The
# others come from formulas.

# %%
guide_rank = ranks["FP8 alone, float32 Adam and master weights"]
reveal("16.1", guide_gb=guide_bytes, buffer_gib=buffer, recipe_gib=proof.reserved_bytes,
       rank_gb=guide_rank)  # fmt: skip

# %% [markdown]
# What explains the four values:
#
# - 20 GB would be 3 bytes a weight. The guide's recipe needs 6: weights 2, gradients 2, 8-bit
#   Adam's state 2.03.
# - A buffer of gradients is as large as the weights.
# - Our recipe's weights and 8-bit momentum need 18.9 GiB. Each gradient is freed before the next
#   one exists, so the rest is only 1.7 GiB.
# - ZeRO-1 does not shard gradients: 26.0 GB of the 82.4 GB.

# %% [markdown]
# ## On your GPU
#
# On a GPU with 24 GB free (such as an RTX 4090), this cell runs the recipe within 24 GB: two steps
# with random 7B weights.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= 24e9 - CONTEXT:
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (24e9 - CONTEXT) / whole))
    setting = train.Setting("llama-2-7b", 1, 2048, best.recipe.dtype, "cuda")
    training = train.build(setting, train.combined(best.recipe.techniques))
    for _ in range(2):
        training.step()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"allocated {format_bytes(allocated)}, reserved {format_bytes(reserved)}")
else:
    print(stored_on_a_gpu("planner"))

# %% [markdown]
# ## Rules on trial
#
# The guide's three configurations:

# %%
by_formula = (
    f"by formula {guide_bytes / 1e9:.1f} GB, {2 * buffer / 1e9:.1f} GB of it weights and gradients"
    f"; with LoRA {lora.peak_bytes / 1e9:.1f} GB"
)
predicted = (
    f"8-bit Lion with the step in backward, predicted at 1 × 2,048: "
    f"{proof.allocated_bytes / 1e9:.1f} GB allocated, {proof.reserved_bytes / 1e9:.1f} GB reserved"
)
verdict(
    "27",
    guide_bytes <= room,
    f"{by_formula}; {predicted}",
    otherwise="weights and gradients alone exceed 24 GB; 8-bit Lion with the step in backward "
    "trains all weights there, but cannot accumulate; LoRA accumulates 16 steps there, but trains "
    "0.3 % of the weights",
)

# %%
shard = 2 * seventy.parameters / 8  # bytes: a rank's buffer of gradients in bfloat16
in_adam, in_lion = (  # later micro-batches peak at the loss, next to the buffer
    sum(on_eight[name].moments["loss"].values()) + shard for name in ("8-bit Adam", "8-bit Lion")
)
per_gpu = ", ".join(f"{name} {e.peak_bytes / 1e9:.1f}" for name, e in on_eight.items())
verdict(
    "28",
    in_lion <= 64e9,  # "about 60 GB"
    f"GB per GPU by formula, 1 × 4,096 tokens a rank, no accumulation: {per_gpu}; accumulating in "
    f"bfloat16: 8-bit Adam {in_adam / 1e9:.1f}, 8-bit Lion {in_lion / 1e9:.1f}",
    condition="with 8-bit Lion, no master weights, and gradients accumulated in bfloat16; "
    f"accumulating in float32 adds {shard / 1e9:.1f} GB; Adam in float32 with master weights needs "
    "more than twice 80 GB",
    otherwise="every optimizer needs more",
)

# %%
per_rank = "; ".join(f"{name}: {count / 1e9:.1f}" for name, count in ranks.items())
measured = (
    f"8 · 4 · 4 = {8 * 4 * 4}; GB per rank by formula, 8,192 tokens, sequence parallel, without "
    f"the block at work: {per_rank}; an H100 has {h100_budget / 1e9:.1f} for tensors"
)
verdict(
    "29",
    1.05 * guide_rank <= h100_budget,
    measured,
    otherwise="the number of GPUs is right, but with FP8 weights alone and Adam in float32, less "
    "memory is left than the formula's error; with BF16 weights too, it does not fit; with 8-bit "
    "state, it fits",
)

# %% [markdown]
# ## What you can do now
#
# | tool | time | tells you | error |
# | --- | --- | --- | --- |
# | formula | a second | which recipes to try | a few percent |
# | prediction | seconds | allocated and reserved bytes | below 1 % in most LLM steps |
# | GPU | a training step | the real memory | none |

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. Today the weights move to disk too, with a
# float32 copy for the optimizer, and come back one block at a time (Day 14). The peak is now in the
# optimizer step, which loads the embedding's float32 copy.

# %%
peaks = [bill.stored(days.day(n).bill).peak_bytes / 2**30 for n in range(1, 17)]
fig, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
axes.stairs(peaks, [n + 0.5 for n in range(17)], fill=True, color="#00798c", alpha=0.25)
axes.stairs(peaks, [n + 0.5 for n in range(17)], color="#00798c", linewidth=1.5)
for n, (before, now) in enumerate(zip([peaks[0] + 1, *peaks], peaks, strict=False), 1):
    if now < before:
        axes.text(n, now + 0.12, f"{now:.2f}", ha="center", fontsize=9)
axes.set(xlabel="day", ylabel="GiB at the peak", xticks=range(1, 17), ylim=(0, 8.8))
axes.set_title("One step of 124M weights, sixteen days")
axes.spines[["top", "right"]].set_visible(False)
print(f"from {peaks[0]:.2f} GiB to {peaks[-1]:.2f} GiB: {peaks[0] / peaks[-1]:.1f}× less")

# %% [markdown]
# The model and the tokens of each step never changed. Bfloat16 (Day 4), Lion (Day 8), its 8-bit
# momentum (Day 9) and today's float32 copies change what the model learns. The bytes of each day:

# %%
running_bill(16)

# %% [markdown]
# ## Sources
#
# - Korthikanti et al. 2022: [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198)
# - Rajbhandari et al. 2020: [ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models](https://arxiv.org/abs/1910.02054)
#
# The rules on trial are from:
#
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
