# %% [markdown]
# # Day 8: What an optimizer keeps
#
# **Adam keeps two numbers a weight. Must it?**
#
# After today you have built AdamW and two optimizers with half of its state, know what each gives
# up for that, and can step a weight inside backward, so that gradients never pile up.
#
# About 85 minutes, 57 of them for five exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 8.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# Each weight has a gradient, and Adam keeps two more numbers beside it: **m**, a running mean of
# its gradients, and **v**, a running mean of their squares. In float32 that is 8 bytes a weight,
# twice the weight itself. Day 1's ledger has them as the largest line that does not depend on the
# tokens.
#
# Then there is the gradient. It is needed for an instant: when the weight is stepped. Yet all of
# them wait until the last one is there.

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
# The 25M model: 95 MiB of weights in float32, and 191 MiB of AdamW's state. Adam-mini keeps every
# m, but one v for a whole row of a matrix, or for a whole head. How many MiB is its state?
#
# And if each weight is stepped as soon as its gradient is there, and the gradient dropped: how many
# MiB of gradients are there at once, at most?

# %%
### BEGIN SOLUTION
guess("8.1", state_mib=110, gradients_mib=3)  # a tenth for the v's; the largest MLP matrix
### END SOLUTION
### BEGIN STUB
# guess("8.1", state_mib=..., gradients_mib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# Dry runs, with the library's optimizers. First the state alone.

# %%
SMALL = Setting("25m", batch=1, seq_len=256)


def mini(model):
    partition = optim.gpt_partition(model.config.head_dim)
    return optim.AdamMini(model.named_parameters(), partition=partition)


def state_of(make):
    """The bytes that the optimizer keeps of the 25M model."""
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
    "Adam-mini": mini,
    "AdamW": of_all_weights(optim.AdamW),
}
N = PRESETS["25m"].parameters
per_weight = {name: state_of(make) / N for name, make in MAKE.items()}
fig, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
for name, number in per_weight.items():
    axes.barh(name, number, color=plot.COLOURS["optimizer_state"])
    axes.text(number + 0.1, name, f"{number:.2f}", va="center")
axes.set(xlabel="bytes of state a weight, float32, 25M model", xlim=(0, 9))
_ = axes.set_title("What five optimizers keep")

# %% [markdown]
# Then a whole step, with AdamW as ever and with AdamW inside backward.


# %%
def most_gradients(trace):
    """The most bytes of gradients at one moment."""
    running = most = 0
    for event in trace.events:
        running += event.bytes if event.category == "gradients" else 0
        most = max(most, running)
    return most


def inside(make):
    return lambda model: optim.step_in_backward(make(model))


def step_of(setting, make):
    return dry_trace(setting, Plugs(optimizer=make))


ordinary = step_of(SMALL, MAKE["AdamW"])
in_turn = step_of(SMALL, inside(MAKE["AdamW"]))
print(f"ordinary: {format_bytes(most_gradients(ordinary))} of gradients")
state = round(per_weight["Adam-mini"] * N)
reveal("8.1", state_mib=state, gradients_mib=most_gradients(in_turn))
print(f"{(state - 4 * N) // 4:,} second moments for {N:,} weights")

# %% [markdown]
# The v's have all but gone. And the gap in the gradients is one matrix: the **tied** one, which is
# both embedding and unembedding, 32 MiB. (Its two parts come at both ends of backward: the first
# waits as a temporary, another 32 MiB.)
#
# So half of the state can go, and nearly all gradients. What is lost?

# %% [markdown]
# ## What m and v are for
#
# Two weights. One has a **noisy** gradient: to and fro, of size 1. The other a **small and steady**
# one: always 0.01. Plain SGD steps by the gradient. With momentum it steps by m, a mean of the last
# ten or so.

# %%
random = torch.Generator().manual_seed(3)
TWO = torch.stack([torch.randn(100, generator=random), torch.full((100,), 0.01)], 1)  # (100, 2)


def sgd_(weight, gradient, state, lr):
    weight -= lr * gradient


def momentum_(weight, gradient, state, lr):
    state["m"] = 0.9 * state.get("m", 0 * gradient) + 0.1 * gradient
    weight -= lr * state["m"]


def walked(step_, **settings):
    """Where the two weights are after each of 100 steps, in lr: (100, 2)."""
    weight, state, path = torch.zeros(2), {}, []
    for gradient in TWO:
        step_(weight, gradient, state, lr=1.0, **settings)
        path.append(weight.clone())
    return torch.stack(path)


for name, step_ in {"SGD": sgd_, "momentum": momentum_}.items():
    print(f"{name}: the steady weight went {walked(step_)[-1, 1].abs():.1f} · lr in 100 steps")

# %% [markdown]
# The noisy weight decides how large lr may be, and the steady one has to live with it: to go
# 100 · lr it needs ten thousand steps. Momentum smooths the noise; it makes nothing larger.
# (torch's SGD adds up and does not average: both weights go ten times as far.)
#
# **AdamW** divides m by √v, the gradient's typical size: the steady weight's own 0.01, the noisy
# one's 1. Each gets steps of its own scale. (The W: *weight decay*, taken from the weight itself,
# not put into its gradient.)

# %% [markdown]
# ### Exercise 8.1: AdamW, step by step
#
# About 12 minutes. Write one step of one weight, **in place**: `weight` and `gradient` of one
# shape, float32; `state`, a dict, empty at first: keep `state["m"]`, `state["v"]`, of that shape,
# and `state["t"]`, no more. `betas` is (β₁, β₂). With t = 1, 2, … and m, v from zeros:
#
# - m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g²
# - w ← w − lr · weight_decay · w (of the w before the step)
# - w ← w − lr · (m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ)) + eps)
#
# What is kept is m and v as in the first line. Return nothing; autograd is off.


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
    for one, (name, path) in zip(axes, paths.items(), strict=True):
        one.plot(-path[:, 0], color="0.65", label="noisy, size 1")
        one.plot(-path[:, 1], color="#cc6677", linewidth=2.5, label="steady, 0.01")
        one.set(title=name, xlabel="step")
    axes[0].set_ylabel("way of the weight, in lr")
    axes[0].legend(frameon=False, loc="upper left")


paths = {"SGD": walked(sgd_), "momentum": walked(momentum_)}
paths["AdamW"] = walked(adamw_, weight_decay=0.0)
draw_walks(paths)
print(f"AdamW: the steady weight went {paths['AdamW'][-1, 1].abs():.1f} · lr")

# %% [markdown]
# A hundred times as far, and the noisy weight goes about as far as it did. That is what v is for:
# **the direction comes from m, and v sets the scale**. Keep that in mind; of today's two optimizers
# one gives v up, the other most of it.
#
# Held against torch's, on a small text model that reads torch's own source. `Stepping` calls your
# function for every weight.


# %%
class Stepping(torch.optim.Optimizer):
    """Steps every weight by a function of ours; `sizes` is Adam-mini's, see below."""

    def __init__(self, model, step_, sizes=None, **settings):
        super().__init__(model.parameters(), {})
        self.step_, self.sizes, self.settings = step_, sizes, settings

    @torch.no_grad()
    def update(self, weight):
        more = {"size": self.sizes[weight]} if self.sizes else {}
        self.step_(weight, weight.grad, self.state[weight], **more, **self.settings)

    def step(self):
        for weight in self.param_groups[0]["params"]:
            self.update(weight)


# %%
CONFIG = replace(PRESETS["tiny"], hidden_size=64, layers=2, kv_heads=4, intermediate_size=192)
TEXT = source_bytes("256 KiB")


def learn(make, steps=40):
    """The model, its optimizer, the mean of the last five losses, and the weights before the last
    step."""
    torch.manual_seed(0)
    model, losses, drawn = GPT(CONFIG), [], batches(TEXT, 8, 64, seed=1)
    optimizer = make(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*next(drawn))
        loss.backward()
        before = [weight.detach().clone() for weight in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, sum(losses[-5:]) / 5, before


def farthest(one, other):
    """The largest difference between the weights of two models."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


# %%
decaying = {"lr": 3e-3, "weight_decay": 0.1}
ours, *_ = learn(lambda model: Stepping(model, adamw_, **decaying), steps=5)
torchs, *_ = learn(of_all_weights(torch.optim.AdamW, **decaying), steps=5)
print(f"after 5 steps: max difference below 1e-6: {farthest(ours, torchs) < 1e-6}")

# %% [markdown]
# ## One number: Lion
#
# Must each weight have a scale of its own? Lion (2023) was found by a program that tried
# optimizers. It says: **no scale at all**. Take the sign of a mean of gradients; every weight goes
# by lr, up or down. v is not needed.
#
# Two betas for one m: the step looks at a *mix* in which today's gradient weighs 1 − β₁ = 0.1; what
# is kept is another, in which it weighs 1 − β₂ = 0.01.

# %% [markdown]
# ### Exercise 8.2: Lion
#
# About 8 minutes. As in 8.1; what you keep is `state["m"]` alone, from zeros. In this order:
#
# - u = sign(β₁m + (1−β₁)g), with sign(0) = 0
# - w ← w − lr · weight_decay · w (of the w before the step)
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
# On the text model: how long is a step of Lion, how long one of AdamW? All weights, after 40 steps.

# %%
LR = 3e-3
model, adamw, adamw_loss, before = learn(lambda m: Stepping(m, adamw_, lr=LR, weight_decay=0.0))
lions_model, _, _, lions_before = learn(lambda m: Stepping(m, lion_, lr=LR / 5))


def last_step(model, before, lr):
    """|Δw| / lr of every weight."""
    pairs = zip(model.parameters(), before, strict=True)
    return torch.cat([(now.detach() - then).abs().flatten() for now, then in pairs]) / lr


lengths = last_step(model, before, LR)
lions = last_step(lions_model, lions_before, LR / 5)
print(f"AdamW: mean {lengths.mean():.1f} · lr; Lion: mean {lions.mean():.1f} · lr")

# %%
fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
axes.hist(lengths.clamp(max=1.4).tolist(), bins=56, color="#4477aa")
axes.axvline(1, color="#cc6677", linewidth=3)
axes.text(0.98, axes.get_ylim()[1] * 0.85, "Lion: all weights", color="#882233", ha="right")
axes.text(0.22, axes.get_ylim()[1] * 0.85, "AdamW", color="#223355")
axes.set(xlabel="length of one step, in lr", ylabel="weights", xlim=(0, 1.4))
_ = axes.set_title(f"How far {len(lengths):,} weights go in step 40")

# %% [markdown]
# AdamW's noisy weights have a small m against √v: a fifth of lr in the mean. Lion's go the whole
# way. So **Lion's learning rate has to be smaller**: the paper says 3 to 10 times, and the weight
# decay larger by the same factor, for what decays in a step is lr · weight_decay. It is a search of
# its own: AdamW's number cannot be taken over. (How well it learns, forty steps do not tell. Day 9
# trains four optimizers side by side.)

# %% [markdown]
# `sign(0) = 0` matters for weights without a gradient: of an untied embedding, a token that never
# came stays where it is. (Here the embedding is tied: every token has a gradient.)
#
# Held against lion-pytorch, which is optional: `pip install -e ".[oracles]"` in the repository's
# folder brings it, and the package below.

# %% tags=["nbval-ignore-output"] reason="the package is optional"
if package := imported("lion_pytorch"):
    both = {"lr": 1e-3, "weight_decay": 0.1}
    theirs, *_ = learn(of_all_weights(package.Lion, **both), steps=5)
    ours, *_ = learn(lambda model: Stepping(model, lion_, **both), steps=5)
    print(f"lion-pytorch: max difference below 1e-6: {farthest(ours, theirs) < 1e-6}")
else:
    print(f"lion-pytorch is {MISSING}")

# %% [markdown]
# ## One v for many: Adam-mini
#
# Lion gives v up. Adam-mini (2024) keeps it, but not one for each weight: weights that work
# together see gradients of about one size, and may share a v. Who works together with whom?
# Here are AdamW's √v after 40 steps, in three matrices of the text model. The shape is (out, in): a
# **row** is all that makes one output.

# %%
roots = {n: adamw.state[w]["v"].clamp(min=1e-30).sqrt() for n, w in model.named_parameters()}
D = CONFIG.head_dim
shown = ("mlp.gate", "attention.query", "mlp.down")
fig, axes = plt.subplots(1, 3, figsize=(9, 4.2), width_ratios=(1, 1, 3), layout="constrained")
for one, part in zip(axes, shown, strict=True):
    root = roots[f"blocks.0.{part}.weight"].log10()
    picture = one.imshow(root, vmin=-5.25, vmax=-3, cmap="viridis", aspect="equal")
    rows, columns = root.shape
    one.set(title=f"{part}\n({rows}, {columns})", xticks=[], yticks=[])
    one.set(xlabel="inputs", ylabel="outputs")
for edge in range(D, CONFIG.hidden_size, D):
    axes[1].axhline(edge - 0.5, color="w", linewidth=1)
_ = fig.colorbar(picture, ax=axes, location="bottom", aspect=50, label="√v, as a power of ten")

# %% [markdown]
# `gate`: stripes across. What differs is the row. `query`: stripes too, and its four heads (white
# lines) are not one colour each. `down`: stripes *downwards*; there its inputs differ, the hidden
# units.
#
# How wrong would one v for a block be? By what factor does a weight's √v typically differ from the
# root of its block's mean? A factor of 2: a step half as long, or twice as long, as AdamW's.


# %%
def off_by(root, size):
    """The typical factor between a √v and the root of the mean v of its `size` neighbours."""
    blocks = root.reshape(-1, size)
    of_block = (blocks**2).mean(1, keepdim=True).sqrt()
    return (blocks.log() - of_block.log()).abs().mean().exp().item()


parts = ("attention.query", "attention.key", "mlp.gate", "mlp.up", "mlp.down")
names = ["embedding.weight", *(f"blocks.0.{part}.weight" for part in parts)]
print(f"{'one v for':32}matrix   head    row  column")
for name in names:
    root = roots[name]
    rows, columns = root.shape
    ways = [(root, root.numel()), (root, D * columns), (root, columns), (root.T, rows)]
    print(f"{name:32}" + "  ".join(f"{off_by(*way):4.1f} ×" for way in ways))

# %% [markdown]
# The embedding: one v for all is off by 6 ×, for rare tokens have small gradients. By **row**, that
# is by token, 1.3 ×. In `gate` and `up` rows do it, too. In `down` they do not: there columns
# would.

# %% [markdown]
# The paper draws its blocks from something else: the *Hessian*, which says how one weight's
# gradient depends on another's. By that, queries and keys go by **head**, all else by row. Here v
# itself would ask for rows in queries and keys as well. Finer is closer to AdamW, and a row costs 4
# bytes. We build the paper's.
#
# ### Exercise 8.3: which weights share a v
#
# About 12 minutes. From a parameter's name, its shape and the head width: how many neighbours share
# a v? Return an int. `blocks.0.mlp.up.weight`: the layer is `up`.
#
# | layer | share a v |
# | --- | --- |
# | first: any whose name ends in `.bias` | none: 1 |
# | `query`, `key` | a head: `head_dim` rows |
# | `embedding`, `unembedding`, `value`, `output`, `gate`, `up`, `down` | a row |
# | `attention_norm`, `mlp_norm`, `norm`; shape (n,) | all |
# | any other, `q_norm`, too; rows that make no whole heads | ValueError |


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
    raise ValueError(f"got {name}, of which no rule knows; add one")
    ### END SOLUTION


# %%
block_size = exercise("8.3", block_size)

# %% [markdown]
# Why an error, and no guess? Many models hold queries, keys and values in **one** fused matrix. As
# one block it would have one v; it trains without a word, and worse.

# %% [markdown]
# ### Exercise 8.4: Adam-mini's step
#
# About 10 minutes. AdamW's step, where each block of `size` neighbours (of the flattened weight,
# whose number `size` divides) has one v: v ← β₂v + (1−β₂) · **mean of g²** over the block. Every
# weight keeps its m. All else is as in 8.1, the three keys, too: 4 bytes a weight, and 4 a block.
# `weight` and `gradient` are contiguous, so `view` and `reshape` both share their memory.


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
# Three ways of sharing, on the text model for 40 steps: the paper's; one v for a whole matrix; and,
# as a guide words it, "share m, v": m is one number a block, too.


# %%
def by_blocks(size_of, step_=adam_mini_, **settings):
    """Makes the optimizer in which size_of(name, shape, D) neighbours share a v."""

    def make(model):
        named = model.named_parameters()
        sizes = {weight: size_of(name, weight.shape, D) for name, weight in named}
        return Stepping(model, step_, sizes, **{"lr": LR, "weight_decay": 0.0} | settings)

    return make


def whole(name, shape, head_dim):
    return shape.numel()


def share_both_(weight, gradient, state, size, lr, weight_decay):
    """Adam with one m and one v a block, and no decay."""
    blocks = gradient.view(-1, size)  # (blocks, size)
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * blocks.mean(1, keepdim=True)
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * (blocks**2).mean(1, keepdim=True)
    root = (state["v"] / (1 - 0.999**t)).sqrt() + 1e-8
    weight.view(-1, size).sub_(lr * state["m"] / (1 - 0.9**t) / root)


# %%
ways = {
    "the paper's blocks": by_blocks(block_size),
    "a v for each matrix": by_blocks(whole),
    "m and v shared": by_blocks(block_size, share_both_),
}
above = {}
for name, make in ways.items():
    _, optimizer, loss, _ = learn(make)
    above[name] = loss / adamw_loss - 1
    kept = sum(s[k].nbytes for s in optimizer.state.values() for k in "mv") / CONFIG.parameters
    marks = (0, 0.02, 0.05, 0.1, 0.2, 1)
    low, high = next((a, b) for a, b in pairwise(marks) if above[name] < b)
    print(f"{name:20} {kept:.2f} bytes a weight, loss {low:.0%} to {high:.0%} above AdamW's")

# %% [markdown]
# A v for each matrix saves no more: v's bytes are gone either way. And to share m as well saves
# nearly everything and loses what m is for: which of the weights in a block should go up, and which
# down. So **v may be shared, m may not**. (Forty steps of a small model. It says which mistakes are
# large, not that Adam-mini is as good as AdamW.)
#
# Held against the authors' package.

# %% tags=["nbval-ignore-output"] reason="the package is optional"
if package := imported("adam_mini"):

    def theirs_of(model):
        # In "mlp_norm" it would find "mlp", and fail on a vector.
        named = [(n.replace("mlp_norm", "post_norm"), w) for n, w in model.named_parameters()]
        shape = {"dim": CONFIG.hidden_size, "n_heads": CONFIG.heads}
        return package.Adam_mini(named, lr=LR, weight_decay=0.0, verbose=False, **shape)

    theirs, *_ = learn(theirs_of, steps=5)
    ours, *_ = learn(by_blocks(block_size), steps=5)
    print(f"adam-mini: max difference below 1e-6: {farthest(ours, theirs) < 1e-6}")
else:
    print(f"adam-mini is {MISSING}")

# %% [markdown]
# The package goes by letters in names: what it does not recognise gets one v, a fused `c_attn`
# among others (version 1.1.1), and its heads have width / heads rows. With the names of Llama
# (`q_proj`, …) it is right; look at what it prints before you trust it with others.

# %% [markdown]
# ## The step inside backward
#
# Now the gradients. Backward comes to a weight, adds up its gradient, and never looks at that
# weight again. Nothing but the optimizer waits for it. So step at once, and drop the gradient.
#
# torch calls **hooks** of a tensor while backward runs: `register_hook` before the gradient is put
# into `.grad`, `register_post_accumulate_grad_hook` when it is there, complete, with the parts of
# all uses of the weight.

# %% [markdown]
# ### Exercise 8.5: the step inside backward
#
# About 15 minutes. `weights`: a list of parameters; `update(weight)` steps one by its `.grad`.
# Write `in_backward`, after which every `loss.backward()` calls `update` once for each weight that
# the loss uses, as soon as its gradient is complete, and leaves no gradient.
#
# It returns a function `end_step()`. If a weight gets a second gradient before that is called, a
# RuntimeError is raised, nothing is stepped by that gradient, and it is dropped. Somebody is
# accumulating: the first part has been stepped by already, and is gone.


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
    """The same, inside backward; step() ends the step."""

    def __init__(self, model, *args, **settings):
        super().__init__(model, *args, **settings)
        self.end_step = in_backward(list(model.parameters()), self.update)

    def step(self):
        self.end_step()


ways = {"ordinary": Stepping, "inside": SteppingInBackward}
settings = {"lr": LR, "weight_decay": 0.1}
models = {name: learn(lambda m, k=k: k(m, adamw_, **settings), 5)[0] for name, k in ways.items()}
print(f"the same weights, to the bit: {farthest(*models.values()) == 0}")
try:
    models["inside"](*next(batches(TEXT, 8, 64, seed=2))).backward()
    models["inside"](*next(batches(TEXT, 8, 64, seed=2))).backward()
except RuntimeError as error:
    print(f"two backwards: {error}")

# %% [markdown]
# Bit for bit the same training: backward is done with a weight when its gradient is complete. (If
# it were not: torch notes that a weight was written to, and raises an error rather than go on with
# the new one.)
#
# And the memory? The 25M model's backward, on one sequence: what is there beside weights and
# AdamW's state.


# %%
ARROW = {"arrowstyle": "->"}
KINDS = {kind: plot.COLOURS[kind] for kind in ("activations", "gradients")}
KINDS["temporaries"] = plot.COLOURS["backward_temporaries"]


def heights_in_backward(trace):
    """MiB of each kind after each event, from the beginning of backward."""
    now, found = dict.fromkeys(KINDS, 0), []
    for event in trace.events:
        kind = "temporaries" if event.category.endswith("temporaries") else event.category
        if kind in now:
            now[kind] += event.bytes / 2**20
        if event.phase in ("backward", "optimizer"):
            found.append(list(now.values()))
    return torch.tensor(found).T.tolist()  # (3, events)


# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for one, (name, trace) in zip(
    axes, {"step after backward": ordinary, "step inside backward": in_turn}.items(), strict=True
):
    stacked = heights_in_backward(trace)
    along = [100 * n / len(stacked[0]) for n in range(len(stacked[0]))]
    bands = one.stackplot(along, stacked, colors=KINDS.values(), labels=KINDS, step="post")
    for n, band in enumerate(bands):  # an edge: a single allocation is too thin to be seen
        band.set(edgecolor="face", linewidth=0.8, zorder=-n)  # and a kind of 0 MiB shows none
    one.set(title=name, xlabel="backward and step, % of their allocations", xlim=(0, 100))
    highest, at = max(zip(map(sum, zip(*stacked, strict=True)), along, strict=True))
    one.annotate("peak", (at, highest), (50, highest), va="center", arrowprops=ARROW)
axes[0].set_ylabel("MiB beside weights and state")
axes[1].legend(frameon=False, loc="upper right")
for name, trace in {"after": ordinary, "inside": in_turn}.items():
    print(f"{name:7} peak {format_bytes(trace.peak_bytes)}")

# %% [markdown]
# On the left the green piles up while the orange goes; on the right there are specks of green. (The
# dark red band is the unembedding's share of the tied matrix: it waits for the embedding's. The
# spike is their sum: for a moment all three are there.)
#
# But look where the **peak** is. Eight sequences, and the same two:

# %%
for name, make in {"after": MAKE["AdamW"], "inside": inside(MAKE["AdamW"])}.items():
    peak = step_of(replace(SMALL, batch=8), make).peak_bytes
    print(f"8 sequences, {name:7} peak {format_bytes(peak)}")

# %% [markdown]
# With many tokens the peak is where backward *begins*, when there are no gradients yet: nothing is
# saved. It is for large models and few tokens at a time.

# %% [markdown]
# And it excludes whatever looks at all gradients before the first step:
#
# - **accumulation**: the first part's gradient is gone;
# - **clipping by the global norm**: the norm is known when the last gradient is there (LOMO, 2023,
#   runs backward twice for it);
# - **loss scaling** that skips a step with an overflow: half the weights have moved by then. Use
#   bfloat16, which needs no scale.

# %% [markdown]
# ## At scale: seven billion
#
# Llama 2 7B, weights in bfloat16, one sequence of 2048 tokens, every block checkpointed. Its 32
# blocks are alike, so models of one and of two are enough. The moments are float32.


# %%
def step_of_7b(make, layers):
    """The trace of a second step of a 7B model with so many of its blocks."""
    config = replace(PRESETS["llama-2-7b"], layers=layers)
    setting = Setting(config, batch=1, seq_len=2048, dtype=torch.bfloat16)
    return dry_trace(setting, replace(combined("checkpointing"), optimizer=make))


def at_peak_of_7b(make):
    """Bytes by category at the peak, of 32 blocks."""
    one, two = (step_of_7b(make, layers).at_peak for layers in (1, 2))
    return {kind: one.get(kind, 0) + 31 * (two[kind] - one.get(kind, 0)) for kind in two}


# %%
SEVEN = {
    "AdamW": MAKE["AdamW"],
    "Adam-mini": mini,
    "Lion": MAKE["Lion"],
    "AdamW, inside": inside(MAKE["AdamW"]),
    "Lion, inside": inside(MAKE["Lion"]),
}
of_7b = {name: at_peak_of_7b(make) for name, make in SEVEN.items()}
colours = {k: plot.COLOURS[k] for k in ("parameters", "gradients", "optimizer_state")}
for name, held in of_7b.items():
    words = [f"{kind.replace('_', ' ')} {format_bytes(held.get(kind, 0))}" for kind in colours]
    print(f"{name:14} {format_bytes(sum(held.values())):>9}: {', '.join(words)}")

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, held in of_7b.items():
    left = 0
    rest = sum(held.values()) - sum(held.get(kind, 0) for kind in colours)
    for number, colour in [(held.get(k, 0), c) for k, c in colours.items()] + [(rest, "0.7")]:
        axes.barh(name, number / 2**30, left=left, color=colour)
        left += number / 2**30
    axes.text(left + 0.7, name, f"{left:.1f}", va="center")
axes.set(xlabel="GiB at the peak", xlim=(0, 84), title="Llama 2 7B, 1 × 2048 tokens")
axes.invert_yaxis()
_ = axes.legend(["weights", "gradients", "state", "all else"], frameon=False, loc="lower right")

# %% [markdown]
# Of 75 GiB, m and v are two thirds. Half of them is 25 GiB. The step inside backward takes another
# 11.5: 12.5 of gradients, of which one matrix is left, less a GiB (grey), for the peak is now in
# backward, where the blocks' inputs still wait, and temporaries. Both together: half of what it
# was, and a third of that are the weights themselves. Day 9 makes the one moment that is left a
# quarter of its size.

# %% [markdown]
# ## On your GPU
#
# Where there is a GPU, this takes the bill's plain step on it, with four optimizers. The peak is at
# the beginning of backward: what do you expect of the last line?

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    four = {name: MAKE[name] for name in ("AdamW", "Adam-mini", "Lion")}
    for name, make in (four | {"AdamW, inside": inside(MAKE["AdamW"])}).items():
        how = Plugs(optimizer=make)
        training = build(replace(SETTING, device=gpu.type), how)
        training.step()
        trace = measured(training)
        print(f"{name}: {format_bytes(trace.peak_bytes)}, ", end="")
        print(f"reserved {format_bytes(trace.reserved_bytes or 0)}")
        del training
else:
    print(stored_on_a_gpu("day 8"))

# %% [markdown]
# By a dry run, the last line has AdamW's own peak, to the byte: where backward begins there are no
# gradients that could be dropped. Adam-mini and Lion take less there: AdamW's state is present at
# every moment.

# %% [markdown]
# ## Rules on trial
#
# A guide counts AdamW at 12 bytes a parameter, Adam-mini at 6, Lion at 8. Which bytes? The moments
# alone, or with a float32 **master copy** of the weights (Day 4), 4 more? One of the two should fit
# all three.

# %%
states = {name: per_weight[name] for name in ("AdamW", "Adam-mini", "Lion")}
both_ways = {name: f"{n:.2f} alone, {n + 4:.2f} with a master copy" for name, n in states.items()}


def fits(name, claimed):
    """Alone, or with a master copy, to a tenth of a byte."""
    return any(abs(states[name] + more - claimed) < 0.1 for more in (0, 4))


copies = "if a float32 master copy of the weights is counted with the state"
verdict("18a", fits("AdamW", 12), both_ways["AdamW"], condition=f"{copies}; alone it is 8")

# %%
verdict(
    "18b",
    fits("Adam-mini", 6),
    both_ways["Adam-mini"],
    otherwise="half of AdamW's state goes, not half of state and copy: counted as AdamW's 12 it is "
    "8; for 6 the momentum has to be bfloat16, which that 12 has not",
)

# %%
verdict("18c", fits("Lion", 8), both_ways["Lion"], condition=f"{copies}; alone it is 4")

# %%
paper, both = above["the paper's blocks"], above["m and v shared"]
verdict(
    "18d",
    both < 2 * paper,
    f"a text model's loss after 40 steps, against AdamW's: v shared within a block: less than 3 % "
    f"above: {paper < 0.03}; m shared as well: more than 10 % above: {both > 0.1}",
    otherwise="v is shared, m is not; and among the weights of a row or a head, not of a layer",
)

# %% [markdown]
# ## What you can do now
#
# | | keeps | bytes a weight | gives up |
# | --- | --- | --- | --- |
# | SGD, with momentum | nothing, m | 0, 4 | a scale for each weight |
# | `optim.MomentumSGD` | m in bfloat16, stochastically rounded | 2 | a scale for each weight |
# | AdamW | m, v | 8 | |
# | Adam-mini | m, v for a block | 4.01 | a partition that fits is needed |
# | Lion | m | 4 | a scale for each weight; needs its own lr |
# | step inside backward | | −2 to −4: gradients | accumulation, clipping, skipped steps |
#
# Halved by dtype, too: moments of bfloat16, if rounded at random (Day 4). Tomorrow: both moments,
# in a byte each.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. Until today AdamW's two moments were
# bfloat16: 4 bytes a weight. Lion with one moment of bfloat16, rounded at random: 2. (The bill
# counts bytes; how well Lion learns is not in it.)
#
# Why not Adam-mini? With an m of bfloat16 it takes the same 2 bytes; Lion needs no partition, and
# tomorrow makes its one moment a byte. Why not the step inside backward? The bill
# takes one sequence at a time and adds their gradients up.

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
