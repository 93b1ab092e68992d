# %% [markdown]
# # Day 8: What an optimizer keeps
#
# **Adam keeps two values per weight. Does it need both?**
#
# After today you can implement AdamW, implement two optimizers with half of its state, say what
# each of them gives up, and run the optimizer step inside backward, so that gradients never
# accumulate in memory.
#
# About 85 minutes, 57 of them for five exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before, you **guess**, **measure**, and **build** what explains the gap. In an exercise,
# replace `raise NotImplementedError` with your own lines. The cell below it checks your answer. If
# you are stuck, type `memlab hint 8.1` in a terminal. You can skip an exercise and still run the
# rest.

# %% [markdown]
# ## The question
#
# For each weight, Adam keeps two **moments**: the first, **m**, is a running mean of the weight's
# gradients; the second, **v**, is a running mean of their squares. In float32 they need 8 bytes per
# weight, twice as much as the weight. In Day 1's ledger, only activations can need more.
#
# A weight's gradient is needed only to update that weight. Yet every gradient stays in memory until
# the optimizer step.

# %%
from dataclasses import replace
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

import memlab
from memlab import optim, plot
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.bill import SETTING
from memlab.course.optional import MISSING, imported
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.train import Plugs, Setting, build, combined, dry_trace, measured, of_all_weights
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# The 25M model has 95 MiB of float32 weights and 191 MiB of AdamW state. Adam-mini keeps m for
# every weight, but one v per matrix row or per attention head. How many MiB is its state?
#
# Now update each weight as soon as its gradient is complete, and free the gradient. How many MiB
# of gradients are alive at once, at most?

# %%
### BEGIN SOLUTION
guess("8.1", state_mib=110, gradients_mib=3)  # v: a tenth of m; gradients: the largest MLP matrix
### END SOLUTION
### BEGIN STUB
# guess("8.1", state_mib=..., gradients_mib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# First measure the optimizer state alone, in dry runs with the library's optimizers.

# %%
SMALL = Setting("25m", batch=1, seq_len=256)


def adam_mini(model):
    partition = optim.gpt_partition(model.config.head_dim)
    return optim.AdamMini(model.named_parameters(), partition=partition)


def state_bytes(make):
    """Bytes of optimizer state for the 25M model."""
    with memlab.dry_run():
        model = GPT(PRESETS["25m"])
        optimizer = make(model)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        trace = memlab.measure(optimizer.step, model=model, optimizer=optimizer)
    return trace.at_end.get("optimizer_state", 0)


# %%
MAKE = {
    "SGD": of_all_weights(torch.optim.SGD, foreach=False),
    "SGD with momentum": of_all_weights(torch.optim.SGD, momentum=0.9, foreach=False),
    "Lion": of_all_weights(optim.Lion),
    "Adam-mini": adam_mini,
    "AdamW": of_all_weights(optim.AdamW),
}
N = PRESETS["25m"].parameters
per_weight = {name: state_bytes(make) / N for name, make in MAKE.items()}
fig, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
for name, size in per_weight.items():
    axes.barh(name, size, color=plot.COLOURS["optimizer_state"])
    axes.text(size + 0.1, name, f"{size:.2f}", va="center")
axes.set(xlabel="bytes of state per weight (float32, 25M model)", xlim=(0, 9))
_ = axes.set_title("Optimizer state of five optimizers")

# %% [markdown]
# Now a whole training step, with AdamW's step after backward and inside backward.


# %%
def peak_gradients(trace):
    """The most gradient bytes alive at once."""
    alive = peak = 0
    for event in trace.events:
        alive += event.bytes if event.category == "gradients" else 0
        peak = max(peak, alive)
    return peak


def inside(make):
    """The optimizer of `make`, with its step inside backward."""
    return lambda model: optim.step_in_backward(make(model))


def trace_of(setting, make):
    return dry_trace(setting, Plugs(optimizer=make))


ordinary = trace_of(SMALL, MAKE["AdamW"])
stepped_inside = trace_of(SMALL, inside(MAKE["AdamW"]))
print(f"ordinary step: at most {format_bytes(peak_gradients(ordinary))} of gradients alive at once")
state = round(per_weight["Adam-mini"] * N)
reveal("8.1", state_mib=state, gradients_mib=peak_gradients(stepped_inside))
print(f"Adam-mini: {(state - 4 * N) // 4:,} second moments for {N:,} weights")

# %% [markdown]
# Adam-mini has almost no second moments left. The 32 MiB of gradients are one matrix: the **tied**
# embedding, which is also the unembedding. (The unembedding's part of its gradient waits as a
# temporary until the end of backward: another 32 MiB.)
#
# So half of the state and nearly all gradients can go. What do you lose?

# %% [markdown]
# ## What m and v are for
#
# Consider two weights:
#
# - the first has a **noisy** gradient: random signs, size about 1;
# - the second has a **small, steady** gradient: always 0.01.
#
# Plain SGD steps by lr · gradient. SGD with momentum steps by lr · m, where m averages about the
# last ten gradients.

# %%
generator = torch.Generator().manual_seed(3)
noisy, steady = torch.randn(100, generator=generator), torch.full((100,), 0.01)
GRADIENTS = torch.stack([noisy, steady], 1)  # (steps, weights)


def sgd_(weight, gradient, state, lr):
    weight -= lr * gradient


def momentum_(weight, gradient, state, lr):
    state["m"] = 0.9 * state.get("m", 0 * gradient) + 0.1 * gradient
    weight -= lr * state["m"]


def walk(step_, **settings):
    """The two weights after each of 100 steps with lr = 1: (steps, weights)."""
    weight, state, path = torch.zeros(2), {}, []
    for gradient in GRADIENTS:
        step_(weight, gradient, state, lr=1.0, **settings)
        path.append(weight.clone())
    return torch.stack(path)


for name, step_ in {"SGD": sgd_, "momentum": momentum_}.items():
    print(f"{name}: the steady weight moved {walk(step_)[-1, 1].abs():.1f} · lr in 100 steps")

# %% [markdown]
# The noisy weight limits the learning rate, so the steady weight needs ten thousand steps to move
# by 100 · lr. Momentum smooths the noise, but does not make steps larger. (torch's momentum is a
# sum, not a mean: both weights move ten times as far.)
#
# **AdamW** divides m by √v, the gradient's typical size: 0.01 for the steady weight, 1 for the
# noisy one. So each weight has its own step size. (The W is decoupled *weight decay*: it shrinks
# the weight directly and is not added to the gradient.)

# %% [markdown]
# ### Exercise 8.1: AdamW, step by step
#
# About 12 minutes. Update one weight **in place**. `weight` and `gradient` are float32. `state` is
# a dict, empty at first. Keep only `state["m"]`, `state["v"]` (both in the weight's shape) and
# `state["t"]` in it. `betas` is (β₁, β₂). Start with m = v = 0; t = 1, 2, …
#
# - m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g²
# - w ← w − lr · weight_decay · w (with w before the step)
# - w ← w − lr · (m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ)) + eps)
#
# Store m and v without **bias correction**, the divisions by 1−βᵗ. Return nothing. Autograd is off.


# %%
def adamw_(weight, gradient, state, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    ### BEGIN SOLUTION memlab.reference.adamw.adamw_
    beta1, beta2 = betas
    if not state:
        state.update(t=0, m=torch.zeros_like(gradient), v=torch.zeros_like(gradient))
    state["t"] += 1
    t = state["t"]
    state["m"] = beta1 * state["m"] + (1 - beta1) * gradient
    state["v"] = beta2 * state["v"] + (1 - beta2) * gradient**2
    root = (state["v"] / (1 - beta2**t)).sqrt() + eps
    weight *= 1 - lr * weight_decay
    weight -= lr * state["m"] / (1 - beta1**t) / root
    ### END SOLUTION


# %%
adamw_ = exercise("8.1", adamw_)


# %%
def draw_walks(paths):
    _, axes = plt.subplots(1, len(paths), figsize=(9, 3), sharey=True, layout="constrained")
    for ax, (name, path) in zip(axes, paths.items(), strict=True):
        ax.plot(-path[:, 0], color="0.65", label="noisy gradient, size 1")
        ax.plot(-path[:, 1], color="#cc6677", linewidth=2.5, label="steady gradient, 0.01")
        ax.set(title=name, xlabel="step")
    axes[0].set_ylabel("distance from the start, in lr")
    axes[0].legend(frameon=False, loc="upper left")


paths = {"SGD": walk(sgd_), "momentum": walk(momentum_)}
paths["AdamW"] = walk(adamw_, weight_decay=0.0)
draw_walks(paths)
print(f"AdamW: the steady weight moved {paths['AdamW'][-1, 1].abs():.1f} · lr")

# %% [markdown]
# With AdamW the steady weight moves a hundred times as far as with SGD; the noisy weight moves
# about as far as before. So **m sets the direction, and v sets the scale**. Of today's other two
# optimizers, Lion gives up v, and Adam-mini gives up most of it.
#
# Now compare your function with torch's AdamW on a small language model, trained on torch's source
# code. `Stepping` calls your function for every weight.


# %%
class Stepping(torch.optim.Optimizer):
    """Updates every weight with `step_`. `sizes` has Adam-mini's block sizes (see below)."""

    def __init__(self, model, step_, sizes=None, **settings):
        super().__init__(model.parameters(), {})
        self.step_, self.sizes, self.settings = step_, sizes, settings

    @torch.no_grad()
    def update(self, weight):
        size = {"size": self.sizes[weight]} if self.sizes else {}
        self.step_(weight, weight.grad, self.state[weight], **size, **self.settings)

    def step(self):
        for weight in self.param_groups[0]["params"]:
            self.update(weight)


# %%
CONFIG = replace(PRESETS["tiny"], hidden_size=64, layers=2, kv_heads=4, intermediate_size=192)
TEXT = source_bytes("256 KiB")


def train(make, steps=40):
    """Return (model, optimizer, mean of the last five losses, weights before the last step)."""
    torch.manual_seed(0)
    model, losses, data = GPT(CONFIG), [], batches(TEXT, 8, 64, seed=1)
    optimizer = make(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*next(data))
        loss.backward()
        before = [weight.detach().clone() for weight in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, sum(losses[-5:]) / 5, before


def max_difference(model, other):
    """The largest difference between two models' weights."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


# %%
settings = {"lr": 3e-3, "weight_decay": 0.1}
ours, *_ = train(lambda model: Stepping(model, adamw_, **settings), steps=5)
torchs, *_ = train(of_all_weights(torch.optim.AdamW, **settings), steps=5)
print(f"after 5 steps: max difference below 1e-6: {max_difference(ours, torchs) < 1e-6}")

# %% [markdown]
# ## One moment per weight: Lion
#
# Does each weight need its own scale? Lion (2023), found by a program search over optimizers, uses
# **no scale**. It takes the sign of a mean of gradients, so every weight moves by lr, up or down.
# It needs no v.
#
# Lion has one m, but two betas: it mixes m with 10 % of the new gradient for the step (β₁ = 0.9),
# and with 1 % of it for the next m (β₂ = 0.99).

# %% [markdown]
# ### Exercise 8.2: Lion
#
# About 8 minutes. The arguments are as in 8.1. Keep only `state["m"]`, starting at zero. In this
# order:
#
# - u = sign(β₁m + (1−β₁)g), with sign(0) = 0
# - w ← w − lr · weight_decay · w (with w before the step)
# - w ← w − lr · u
# - m ← β₂m + (1−β₂)g


# %%
def lion_(weight, gradient, state, lr, betas=(0.9, 0.99), weight_decay=0.0):
    ### BEGIN SOLUTION memlab.reference.lion.lion_
    beta1, beta2 = betas
    m = state.get("m", torch.zeros_like(gradient))
    u = torch.sign(beta1 * m + (1 - beta1) * gradient)
    weight *= 1 - lr * weight_decay
    weight -= lr * u
    state["m"] = beta2 * m + (1 - beta2) * gradient
    ### END SOLUTION


# %%
lion_ = exercise("8.2", lion_)

# %% [markdown]
# How far does a weight move in one step of AdamW or Lion? Compare step 40 of the text model.

# %%
LR = 3e-3
model, adamw, adamw_loss, before = train(lambda m: Stepping(m, adamw_, lr=LR, weight_decay=0.0))
lion_model, _, _, lion_before = train(lambda m: Stepping(m, lion_, lr=LR / 5))


def last_step(model, before, lr):
    """|Δw| / lr of every weight."""
    pairs = zip(model.parameters(), before, strict=True)
    return torch.cat([(now.detach() - then).abs().flatten() for now, then in pairs]) / lr


adamw_steps = last_step(model, before, LR)
lion_steps = last_step(lion_model, lion_before, LR / 5)
print(f"mean step: AdamW {adamw_steps.mean():.1f} · lr, Lion {lion_steps.mean():.1f} · lr")

# %%
fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
axes.hist(adamw_steps.clamp(max=1.4).tolist(), bins=56, color="#4477aa")
axes.axvline(1, color="#cc6677", linewidth=3)
axes.text(0.98, axes.get_ylim()[1] * 0.85, "Lion: all weights", color="#882233", ha="right")
axes.text(0.22, axes.get_ylim()[1] * 0.85, "AdamW", color="#223355")
axes.set(xlabel="length of one step, in lr", ylabel="number of weights", xlim=(0, 1.4))
_ = axes.set_title(f"How far {len(adamw_steps):,} weights move in step 40")

# %% [markdown]
# Most weights have noisy gradients, so AdamW's m is small compared with √v: on average a weight
# moves by a fifth of lr. With Lion every weight moves by the full lr. So **Lion needs a smaller
# learning rate**: 3 to 10 times smaller than AdamW's, says the paper. Increase the weight decay by
# the same factor, because each step decays by lr · weight_decay.

# %% [markdown]
# (Forty steps do not show how well Lion learns. Day 9 trains four optimizers side by side.)
#
# `sign(0) = 0` matters for weights without a gradient: in an untied embedding, the row of a token
# that never occurs does not move.
#
# Now compare your Lion with lion-pytorch, an optional package. To install it and the package used
# below, run `pip install -e ".[oracles]"` in the repository.

# %% tags=["nbval-ignore-output"] reason="the package is optional"
if package := imported("lion_pytorch"):
    both = {"lr": 1e-3, "weight_decay": 0.1}
    theirs, *_ = train(of_all_weights(package.Lion, **both), steps=5)
    ours, *_ = train(lambda model: Stepping(model, lion_, **both), steps=5)
    print(f"lion-pytorch: max difference below 1e-6: {max_difference(ours, theirs) < 1e-6}")
else:
    print(f"lion-pytorch is {MISSING}")

# %% [markdown]
# ## One v per block: Adam-mini
#
# Lion drops v. Adam-mini (2024) keeps one v for a whole block of weights: it assumes that related
# weights have gradients of similar size. Which weights should share?
#
# Plot AdamW's √v after 40 steps for three matrices of the text model, of shape (out, in): a **row**
# holds the weights of one output.

# %%
roots = {n: adamw.state[w]["v"].clamp(min=1e-30).sqrt() for n, w in model.named_parameters()}
D = CONFIG.head_dim
shown = ("mlp.gate", "attention.query", "mlp.down")
fig, axes = plt.subplots(1, 3, figsize=(9, 4.2), width_ratios=(1, 1, 3), layout="constrained")
for ax, part in zip(axes, shown, strict=True):
    root = roots[f"blocks.0.{part}.weight"].log10()
    picture = ax.imshow(root, vmin=-5.25, vmax=-3, cmap="viridis", aspect="equal")
    rows, columns = root.shape
    ax.set(title=f"{part}\n({rows}, {columns})", xticks=[], yticks=[])
    ax.set(xlabel="inputs", ylabel="outputs")
for edge in range(D, CONFIG.hidden_size, D):
    axes[1].axhline(edge - 0.5, color="w", linewidth=1)
_ = fig.colorbar(picture, ax=axes, location="bottom", aspect=50, label="log₁₀ √v")

# %% [markdown]
# - `gate` has horizontal stripes: √v differs between rows.
# - `query` has horizontal stripes, too, even within a head (white lines).
# - `down` has *vertical* stripes: √v differs between its inputs, the MLP's hidden units.
#
# How wrong is one v per block? The table shows the typical ratio between a weight's √v and the root
# of its block's mean v. A ratio of 2 means a step half or twice as long as AdamW's.


# %%
def off_by(root, size):
    """The typical ratio between √v and the root of the mean v of a block of `size` elements."""
    blocks = root.reshape(-1, size)
    shared = (blocks**2).mean(1, keepdim=True).sqrt()
    return (blocks.log() - shared.log()).abs().mean().exp().item()


parts = ("attention.query", "attention.key", "mlp.gate", "mlp.up", "mlp.down")
names = ["embedding.weight", *(f"blocks.0.{part}.weight" for part in parts)]
print(f"{'one v per':32}matrix   head    row  column")
for name in names:
    root = roots[name]
    rows, columns = root.shape
    ways = [(root, root.numel()), (root, D * columns), (root, columns), (root.T, rows)]
    print(f"{name:32}" + "  ".join(f"{off_by(*way):4.1f} ×" for way in ways))

# %% [markdown]
# - **Embedding**: one v per matrix is off by a factor of 5.9, because rare tokens have small
#   gradients. One v per **row** (per token) is off by 1.3.
# - **`gate`, `up`**: one v per row is best, too.
# - **`down`**: one v per row is hardly better than one per matrix; one per column would be best.

# %% [markdown]
# The paper chooses blocks by the *Hessian*, which says how one weight's gradient depends on
# another weight: one v per **head** for queries and keys, one per row for all other matrices. (Our
# table suggests rows for queries and keys, too. Smaller blocks are closer to AdamW, and a row
# costs 4 bytes.) You will build the paper's blocks.
#
# ### Exercise 8.3: which weights share a v
#
# About 12 minutes. Given a parameter's name, its shape and `head_dim`, return how many
# neighbouring elements share a v, as an int. In `blocks.0.mlp.up.weight` the layer is `up`.
#
# | layer | elements that share a v |
# | --- | --- |
# | check first: any name that ends in `.bias` | 1 (no sharing) |
# | `query`, `key` | a head: `head_dim` rows |
# | `embedding`, `unembedding`, `value`, `output`, `gate`, `up`, `down` | a row |
# | `attention_norm`, `mlp_norm`, `norm`; shape (n,) | all elements |
# | any other layer, such as `q_norm`; `query`, `key` with shape[0] % head_dim ≠ 0 | ValueError |


# %%
def block_size(name, shape, head_dim):
    ### BEGIN SOLUTION memlab.reference.adam_mini.block_size
    layer, kind = name.split(".")[-2:]
    if kind == "bias":
        return 1
    if layer in ("query", "key"):
        if shape[0] % head_dim:
            raise ValueError(f"got {shape[0]} rows in {name}; give heads of {head_dim}")
        return head_dim * shape[1]
    if layer in ("attention_norm", "mlp_norm", "norm"):
        return shape[0]
    if layer in ("embedding", "unembedding", "value", "output", "gate", "up", "down"):
        return shape[1]
    raise ValueError(f"got {name}, which no rule covers; add a rule")
    ### END SOLUTION


# %%
block_size = exercise("8.3", block_size)

# %% [markdown]
# Why raise an error instead of guessing? Many models store queries, keys and values in **one**
# fused matrix. A guess would give that matrix a single v. Training would run without a warning, but
# learn worse.

# %% [markdown]
# ### Exercise 8.4: Adam-mini's step
#
# About 10 minutes. Adam-mini's step is AdamW's with one v per block of `size` neighbouring
# elements of the flattened weight. `size` divides the number of elements. Update v with the **mean
# of g²** over the block: v ← β₂v + (1−β₂) · mean(g²).
#
# The rest is as in 8.1, with an m for every weight and the same three keys: 4 bytes per weight, 4
# per block. `weight` and `gradient` are contiguous, so `view` and `reshape` share their memory.


# %%
def adam_mini_(weight, gradient, state, size, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    ### BEGIN SOLUTION memlab.reference.adam_mini.adam_mini_
    beta1, beta2 = betas
    squares = gradient.reshape(-1, size) ** 2  # (blocks, size)
    mean = squares.mean(1, keepdim=True)  # (blocks, 1)
    if not state:
        state.update(t=0, m=torch.zeros_like(gradient), v=torch.zeros_like(mean))
    state["t"] += 1
    t = state["t"]
    state["m"] = beta1 * state["m"] + (1 - beta1) * gradient
    state["v"] = beta2 * state["v"] + (1 - beta2) * mean
    root = (state["v"] / (1 - beta2**t)).sqrt() + eps
    weight *= 1 - lr * weight_decay
    weight -= lr * (state["m"].reshape(-1, size) / (1 - beta1**t) / root).view_as(weight)
    ### END SOLUTION


# %%
adam_mini_ = exercise("8.4", adam_mini_)

# %% [markdown]
# Train the text model for 40 steps with three ways of sharing:
#
# - one v per block, with the paper's blocks;
# - one v per matrix;
# - one m *and* one v per block, as a guide says: "share m, v".


# %%
def by_blocks(size_of, step_=adam_mini_, **settings):
    """Returns a function that makes an optimizer; size_of(name, shape, D) elements share a v."""

    def make(model):
        named = model.named_parameters()
        sizes = {weight: size_of(name, weight.shape, D) for name, weight in named}
        return Stepping(model, step_, sizes, **{"lr": LR, "weight_decay": 0.0} | settings)

    return make


def whole_matrix(name, shape, head_dim):
    return shape.numel()


def share_both_(weight, gradient, state, size, lr, weight_decay):
    """Adam with one m and one v per block; weight_decay is ignored."""
    blocks = gradient.view(-1, size)  # (blocks, size)
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * blocks.mean(1, keepdim=True)
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * (blocks**2).mean(1, keepdim=True)
    root = (state["v"] / (1 - 0.999**t)).sqrt() + 1e-8
    weight.view(-1, size).sub_(lr * state["m"] / (1 - 0.9**t) / root)


# %%
ways = {
    "the paper's blocks": by_blocks(block_size),
    "one v per matrix": by_blocks(whole_matrix),
    "m and v shared": by_blocks(block_size, share_both_),
}
above = {}
for name, make in ways.items():
    _, optimizer, loss, _ = train(make)
    above[name] = loss / adamw_loss - 1
    kept = sum(s[k].nbytes for s in optimizer.state.values() for k in "mv") / CONFIG.parameters
    marks = (0, 0.02, 0.05, 0.1, 0.2, 1)
    low, high = next((a, b) for a, b in pairwise(marks) if above[name] < b)
    print(f"{name:20} {kept:.2f} bytes per weight, loss {low:.0%} to {high:.0%} above AdamW's")

# %% [markdown]
# One v per matrix learns worse and saves almost nothing more. Sharing m, too, saves nearly all of
# the state, but loses what m is for: which weights of a block should go up, and which down. So
# **share v, but not m**. (Forty steps of a small model show large mistakes. They do not show that
# Adam-mini is as good as AdamW.)
#
# Now compare your Adam-mini with the authors' package.

# %% tags=["nbval-ignore-output"] reason="the package is optional"
if package := imported("adam_mini"):

    def theirs_of(model):
        # The package would take "mlp_norm" for an MLP matrix, and fail on a vector.
        named = [(n.replace("mlp_norm", "post_norm"), w) for n, w in model.named_parameters()]
        shape = {"dim": CONFIG.hidden_size, "n_heads": CONFIG.heads}
        return package.Adam_mini(named, lr=LR, weight_decay=0.0, verbose=False, **shape)

    theirs, *_ = train(theirs_of, steps=5)
    ours, *_ = train(by_blocks(block_size), steps=5)
    print(f"adam-mini: max difference below 1e-6: {max_difference(ours, theirs) < 1e-6}")
else:
    print(f"adam-mini is {MISSING}")

# %% [markdown]
# The package matches parts of parameter names. With Llama's names (`q_proj`, …) its blocks are
# right. But in version 1.1.1:
#
# - a matrix that it does not recognise, such as a fused `c_attn`, gets a single v;
# - the head dimension is always hidden size / heads.
#
# If your model uses other names, read what the package prints.

# %% [markdown]
# ## The step inside backward
#
# Now reduce the gradients. When a weight's gradient is complete, backward does not read that weight
# again, and only the optimizer needs the gradient. So update the weight immediately, and free the
# gradient. (PyTorch's tutorial calls this [*fusing the optimizer step into the backward
# pass*](https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html).)
#
# torch has two **hooks** for this:
#
# - `register_hook` runs before the gradient is stored in `.grad`;
# - `register_post_accumulate_grad_hook` runs when `.grad` is complete: summed over all uses of the
#   weight.

# %% [markdown]
# ### Exercise 8.5: the step inside backward
#
# About 15 minutes. `weights` is a list of parameters. `update(weight)` updates one weight with its
# `.grad`. Write `in_backward`. After `in_backward(weights, update)`, every `loss.backward()` calls
# `update` once for each weight that the loss uses, as soon as its gradient is complete, and leaves
# no gradient.
#
# Return a function `end_step()`; the caller calls it after each backward. If a weight gets a second
# gradient before that, free this gradient, update nothing with it, and raise RuntimeError: the
# first gradient has already been applied, so gradients cannot be accumulated.


# %%
def in_backward(weights, update):
    ### BEGIN SOLUTION memlab.reference.step_in_backward.in_backward
    stepped = set()

    def hook(weight):
        if weight in stepped:
            weight.grad = None
            raise RuntimeError("got a second gradient; call end_step() after each backward")
        stepped.add(weight)
        update(weight)
        weight.grad = None

    for weight in weights:
        weight.register_post_accumulate_grad_hook(hook)
    return stepped.clear
    ### END SOLUTION


# %%
in_backward = exercise("8.5", in_backward)


# %%
class SteppingInBackward(Stepping):
    """Updates weights inside backward. Call step() after each backward."""

    def __init__(self, model, *args, **settings):
        super().__init__(model, *args, **settings)
        self.end_step = in_backward(list(model.parameters()), self.update)

    def step(self):
        self.end_step()


ways = {"ordinary": Stepping, "inside": SteppingInBackward}
settings = {"lr": LR, "weight_decay": 0.1}
models = {name: train(lambda m, k=k: k(m, adamw_, **settings), 5)[0] for name, k in ways.items()}
print(f"the same weights, bit for bit: {max_difference(*models.values()) == 0}")
try:
    models["inside"](*next(batches(TEXT, 8, 64, seed=2))).backward()
    models["inside"](*next(batches(TEXT, 8, 64, seed=2))).backward()
except RuntimeError as error:
    print(f"two backwards: {error}")

# %% [markdown]
# Both runs give the same weights, bit for bit, because backward no longer reads a weight whose
# gradient is complete. (If it did, torch would detect the in-place change and raise an error.)
#
# How much memory does it save? Plot the memory of the 25M model during backward and step, on one
# sequence, without weights and AdamW's state.


# %%
ARROW = {"arrowstyle": "->"}
KINDS = {kind: plot.COLOURS[kind] for kind in ("activations", "gradients")}
KINDS["temporaries"] = plot.COLOURS["backward_temporaries"]


def heights_in_backward(trace):
    """MiB of each kind after each event, from the start of backward: (kinds, events)."""
    now, heights = dict.fromkeys(KINDS, 0), []
    for event in trace.events:
        kind = "temporaries" if event.category.endswith("temporaries") else event.category
        if kind in now:
            now[kind] += event.bytes / 2**20
        if event.phase in ("backward", "optimizer"):
            heights.append(list(now.values()))
    return torch.tensor(heights).T.tolist()


# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for ax, (name, trace) in zip(
    axes,
    {"step after backward": ordinary, "step inside backward": stepped_inside}.items(),
    strict=True,
):
    stacked = heights_in_backward(trace)
    along = [100 * n / len(stacked[0]) for n in range(len(stacked[0]))]
    bands = ax.stackplot(along, stacked, colors=KINDS.values(), labels=KINDS, step="post")
    for n, band in enumerate(bands):  # the edge makes a single allocation wide enough to see
        band.set(edgecolor="face", linewidth=0.8, zorder=-n)  # zorder hides edges of 0 MiB
    ax.set(title=name, xlabel="allocations of backward and step (%)", xlim=(0, 100))
    highest, at = max(zip(map(sum, zip(*stacked, strict=True)), along, strict=True))
    ax.annotate("peak", (at, highest), (50, highest), va="center", arrowprops=ARROW)
axes[0].set_ylabel("MiB, without weights and state")
axes[1].legend(frameon=False, loc="upper right")
for name, trace in {"after": ordinary, "inside": stepped_inside}.items():
    print(f"step {name} backward: peak {format_bytes(trace.peak_bytes)}")

# %% [markdown]
# - **Left**: gradients (green) accumulate while activations (orange) are freed.
# - **Right**: each gradient is alive only briefly. The dark red band is the unembedding's part of
#   the tied matrix's gradient, which waits for the embedding's part. At the spike, both parts and
#   their sum are alive.
#
# Does it also lower the **peak** with eight sequences?

# %%
for name, make in {"after": MAKE["AdamW"], "inside": inside(MAKE["AdamW"])}.items():
    peak = trace_of(replace(SMALL, batch=8), make).peak_bytes
    print(f"8 sequences, step {name} backward: peak {format_bytes(peak)}")

# %% [markdown]
# With many tokens, the peak is at the *start* of backward, before any gradient exists. There the
# step inside backward saves nothing. Use it for large models and few tokens per step.

# %% [markdown]
# The step inside backward rules out everything that needs all gradients before the first update:
#
# - **Gradient accumulation**: the first micro-batch's gradient has already been applied.
# - **Clipping by global norm**: the norm is known only after the last gradient. (LOMO, 2023, runs
#   backward twice for it.)
# - **Loss scaling** that skips a step on overflow: some weights have already been updated. Use
#   bfloat16, which needs no loss scaling.

# %% [markdown]
# ## At scale: seven billion
#
# Take Llama 2 7B with bfloat16 weights, float32 moments and one sequence of 2048 tokens, with
# every block checkpointed. Its 32 blocks are identical, so measure models with one and two blocks
# and extrapolate.


# %%
def step_of_7b(make, layers):
    """The trace of the second step of a 7B model cut to `layers` blocks."""
    config = replace(PRESETS["llama-2-7b"], layers=layers)
    setting = Setting(config, batch=1, seq_len=2048, dtype=torch.bfloat16)
    return dry_trace(setting, replace(combined("checkpointing"), optimizer=make))


def at_peak_of_7b(make):
    """Bytes by category at the peak, extrapolated to 32 blocks."""
    one, two = (step_of_7b(make, layers).at_peak for layers in (1, 2))
    return {kind: one.get(kind, 0) + 31 * (two[kind] - one.get(kind, 0)) for kind in two}


# %%
OPTIMIZERS = {
    "AdamW": MAKE["AdamW"],
    "Adam-mini": adam_mini,
    "Lion": MAKE["Lion"],
    "AdamW, inside": inside(MAKE["AdamW"]),
    "Lion, inside": inside(MAKE["Lion"]),
}
of_7b = {name: at_peak_of_7b(make) for name, make in OPTIMIZERS.items()}
colours = {k: plot.COLOURS[k] for k in ("parameters", "gradients", "optimizer_state")}
for name, held in of_7b.items():
    listed = [f"{kind.replace('_', ' ')} {format_bytes(held.get(kind, 0))}" for kind in colours]
    print(f"{name:14} {format_bytes(sum(held.values())):>9}: {', '.join(listed)}")

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, held in of_7b.items():
    left = 0
    rest = sum(held.values()) - sum(held.get(kind, 0) for kind in colours)
    for size, colour in [(held.get(k, 0), c) for k, c in colours.items()] + [(rest, "0.7")]:
        axes.barh(name, size / 2**30, left=left, color=colour)
        left += size / 2**30
    axes.text(left + 0.7, name, f"{left:.1f}", va="center")
axes.set(xlabel="GiB at the peak", xlim=(0, 84), title="Llama 2 7B, 1 × 2048 tokens")
axes.invert_yaxis()
_ = axes.legend(["weights", "gradients", "state", "other"], frameon=False, loc="lower right")

# %% [markdown]
# | change | saves | why |
# | --- | --- | --- |
# | Lion or Adam-mini | 25 of 75 GiB | m and v are two thirds of the peak; half of this goes |
# | step inside backward | 11.5 GiB | gradients shrink from 12.5 GiB to one matrix, 86 MiB |
#
# (The step inside backward does not save the whole 12.5 GiB: the peak moves into backward, where
# 0.9 GiB of block inputs and temporaries are alive, the grey part.) With both changes, the peak is
# half of AdamW's, and a third of it is weights. Day 9 shrinks the remaining moment to a quarter.

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs the bill's plain step on it with four optimizers. The peak is
# at the start of backward. What do you expect in the last line?

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    four = {name: MAKE[name] for name in ("AdamW", "Adam-mini", "Lion")}
    for name, make in (four | {"AdamW, inside": inside(MAKE["AdamW"])}).items():
        plugs = Plugs(optimizer=make)
        training = build(replace(SETTING, device=gpu.type), plugs)
        training.step()
        trace = measured(training)
        print(f"{name}: {format_bytes(trace.peak_bytes)}, ", end="")
        print(f"reserved {format_bytes(trace.reserved_bytes or 0)}")
        del training
else:
    print(stored_on_a_gpu("day 8"))

# %% [markdown]
# In a dry run, the last line has exactly AdamW's peak: at the start of backward there are no
# gradients to free. Adam-mini and Lion lower the peak, because optimizer state is always in
# memory.

# %% [markdown]
# ## Rules on trial
#
# A guide says: AdamW 12 bytes per parameter, Adam-mini 6, Lion 8. It does not say what it counts.
# It could count the moments alone, or the moments and a float32 **master copy** of the weights (Day
# 4), which adds 4 bytes. Does either reading fit all three numbers?

# %%
states = {name: per_weight[name] for name in ("AdamW", "Adam-mini", "Lion")}
both_ways = {
    name: f"{n:.2f} bytes without a master copy, {n + 4:.2f} with it" for name, n in states.items()
}
with_copy = "if you count a float32 master copy of the weights, too"


def fits(name, claimed):
    """Whether the claim is right to 0.1 byte, with or without a master copy."""
    return any(abs(states[name] + more - claimed) < 0.1 for more in (0, 4))


# %%
verdict(
    "18a",
    fits("AdamW", 12),
    both_ways["AdamW"],
    condition=f"{with_copy}; without the copy it is 8",
)

# %%
verdict(
    "18b",
    fits("Adam-mini", 6),
    both_ways["Adam-mini"],
    otherwise="8 bytes, counted like AdamW's 12: Adam-mini halves the state, not the master copy; "
    "6 bytes would need a bfloat16 momentum",
)

# %%
verdict(
    "18c", fits("Lion", 8), both_ways["Lion"], condition=f"{with_copy}; without the copy it is 4"
)

# %%
paper, both = above["the paper's blocks"], above["m and v shared"]
losses = f"v shared: less than 3 % above: {paper < 0.03}; m shared, too: more than 10 % above: "
verdict(
    "18d",
    both < 2 * paper,
    f"a text model's loss after 40 steps, compared with AdamW's: {losses}{both > 0.1}",
    otherwise="weights of a row or a head (not of a layer) share v, and no weights share m",
)

# %% [markdown]
# ## What you can do now
#
# | | keeps | bytes per weight | gives up |
# | --- | --- | --- | --- |
# | SGD | nothing | 0 | a scale for each weight |
# | SGD with momentum | m | 4 | a scale for each weight |
# | `optim.MomentumSGD` | m in bfloat16, stochastic rounding | 2 | a scale for each weight |
# | AdamW | m, v | 8 | |
# | Adam-mini | m, one v per block | 4.01 | a v for each weight; needs a rule for each layer |
# | Lion | m | 4 | a scale for each weight; needs its own lr |
# | step inside backward | | −2 to −4 (gradients) | accumulation, clipping, skipped steps |
#
# A smaller dtype also halves the state: bfloat16 moments, with stochastic rounding (Day 4).
# Tomorrow, both moments need one byte each.

# %% [markdown]
# ## The running bill
#
# One training step of the 124M model on 8 × 640 tokens. Until today AdamW's two bfloat16 moments
# needed 4 bytes per weight. Lion with one bfloat16 moment and stochastic rounding needs 2. (The
# bill does not say how well Lion learns.)
#
# - **Why not Adam-mini?** With a bfloat16 m it needs the same 2 bytes. Lion needs no rule for each
#   layer, and tomorrow its moment shrinks to 1 byte.
# - **Why not the step inside backward?** The bill accumulates gradients over one sequence at a
#   time.

# %%
running_bill(8)

# %% [markdown]
# ## Sources
#
# - Kingma and Ba 2015: [Adam: A Method for Stochastic
#   Optimization](https://arxiv.org/abs/1412.6980)
# - Loshchilov and Hutter 2019: [Decoupled Weight Decay
#   Regularization](https://arxiv.org/abs/1711.05101)
# - Zhang et al. 2024: [Adam-mini: Use Fewer Learning Rates To Gain
#   More](https://arxiv.org/abs/2406.16793)
# - Chen et al. 2023: [Symbolic Discovery of Optimization
#   Algorithms](https://arxiv.org/abs/2302.06675)
# - Lv et al. 2023: [Full Parameter Fine-tuning for Large Language Models with Limited
#   Resources](https://arxiv.org/abs/2306.09782)
#
# The rules on trial are from:
#
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
