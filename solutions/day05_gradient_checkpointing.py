# %% [markdown]
# # Day 5: Gradient checkpointing
#
# **What if I forget the activations and compute them again?**
#
# After today you have built checkpointing twice, and can say of any model what it still holds, how
# much it computes again, when segments of √N blocks pay, and when they do not.
#
# About 90 minutes, 63 of them for four exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 5.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# Forward keeps what backward will need. But whatever forward made of a block's input, it can make
# of it again. So keep the **input** of every block and forget the rest. When backward comes to a
# block, run it once more, then go back through it. That is *gradient checkpointing*; what is kept
# are the *checkpoints*.
#
# The step of Day 1 again: 124M weights, 12 blocks, 8 × 640 tokens at once, in float32. Of its
# 7.94 GiB activations are 4.64.

# %%
import random
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memlab
from memlab import plot
from memlab.checkpointing import Checkpoint, CheckpointError, checkpoint
from memlab.checkpointing.execution import checkpoint_blocks, run
from memlab.checkpointing.operations import Operations
from memlab.checkpointing.schedules import plain_schedule, uniform_schedule
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.checks.day05 import most_for_tokens
from memlab.course.deep_models import trace_of_blocks
from memlab.course.ledger import activation_bytes
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS, Block, GPTConfig, Rotary, scaled_dot_product_attention
from memlab.train import TECHNIQUES, Setting, build, combined, dry_trace, measured
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# With a checkpoint around each of the 12 blocks: what is left of the 4.64 GiB? And what is the
# step's peak, 7.94 GiB without? Write numbers in place of the dots.

# %%
### BEGIN SOLUTION
guess("5.1", activations_gib=0.4, peak_gib=3.7)  # a twelfth
### END SOLUTION
### BEGIN STUB
# guess("5.1", activations_gib=..., peak_gib=...)
### END STUB

# %% [markdown]
# ## Measure

# %%
setting = Setting("124m", batch=8, seq_len=640)
fused = "fused-adamw"  # the optimizer in one operator is the quickest to measure
kept_all, every_block = (
    dry_trace(setting, combined(how)) for how in (fused, f"{fused}+checkpointing")
)
reveal("5.1", every_block)
for module, kinds in every_block.by_module(depth=1).items():
    if "activations" in kinds:
        name = "the loss" if module == "GPT" else module
        print(f"  {name:10}{format_bytes(kinds['activations']):>12}")

# %%
plot.timeline(every_block, title=f"Every block computed again: {setting}")

# %% [markdown]
# What stays: 13 tensors of 15 MiB, the inputs of the blocks and the last one's output; the last
# norm; and the **logits**, which belong to no block: 982 MiB, and at the peak backward's two copies
# of them. If you guessed a twelfth, your gaps are made of those (Day 11 takes them on).
#
# Behind the peak there are twelve teeth. In each a block has run again: **one** block's activations
# in place of twelve. (The meter calls them backward temporaries, as they are made in backward.)

# %% [markdown]
# ## Build
#
# How does one forget? Inside an autograd *Function* no graph is made: what `forward` computes on
# its way dies. `backward` gets the gradient of the output and returns one for each input of
# `forward`: `None` where it is no tensor.
#
# - `ctx.save_for_backward(...)` keeps tensors; other things go on `ctx` by name.
# - `backward` runs without a graph, too, unless `torch.enable_grad()` is around it.
# - `torch.autograd.backward(y, gradient)` goes back from y, and fills `.grad`.

# %% [markdown]
# A second run has to be the same as the first, dropout included. `torch.get_rng_state()` says where
# the stream of random numbers stands, `torch.set_rng_state` puts it there. What comes *after* must
# not notice: `with torch.random.fork_rng([]):` lets the stream go on afterwards as if nothing had
# been drawn inside. (In the brackets are the GPUs whose streams are kept, too.)

# %% [markdown]
# ### Exercise 5.1: forget, and compute again
#
# About 20 minutes. Write the Function: `forget(fn, *inputs)` gives what `fn(*inputs)` gives, one
# tensor. All gradients, the weights' in `fn` too, are those of the plain call to the bit, with
# dropout. Between forward and backward nothing is held but the inputs, by `save_for_backward`, and
# the random state (5,056 bytes a call, not counted here); `fn` runs twice in all. In backward, the
# activations of one call are in memory at a time. Any input may want no gradient (a table of
# integers, say).


# %%
class Forget(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ### BEGIN SOLUTION memlab.reference.checkpointing.Forget.forward
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return fn(*inputs)
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 5.1, about 3 lines")
        ### END STUB

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION memlab.reference.checkpointing.Forget.backward
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.random.fork_rng([]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            output = ctx.fn(*inputs)
        torch.autograd.backward(output, gradient)
        return None, *(x.grad for x in inputs)  # None: fn is no tensor
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 5.1, about 6 lines")
        ### END STUB


def forget(fn, *inputs):
    return Forget.apply(fn, *inputs)


# %%
forget = exercise("5.1", forget)

# %% [markdown]
# ## What a Function cannot
#
# It is the oldest way, and has corners. If no *input* wants a gradient (the first block after a
# frozen embedding), autograd never calls `backward`, and the weights inside get nothing, silently.
# Its inner backward fills `.grad` of all weights, asked for or not. And it always runs `fn` to the
# end.
#
# A second way leaves the graph alone, and forgets only what hangs on it.

# %%
layer = nn.Linear(4, 4)
no_gradient = torch.randn(2, 4)
print(f"a gradient can pass: {layer(no_gradient).requires_grad}, ", end="")
print(f"through forget: {forget(layer, no_gradient).requires_grad}")

# %% [markdown]
# ## Hooks for saved tensors
#
# Autograd hands every tensor that it saves to a hook, if there is one, and keeps what the hook
# **returns**. In backward another hook is handed that, and has to come up with the tensor. Here
# they keep all and print.


# %%
def saved(tensor):
    print(f"  saved {tuple(tensor.shape)}")
    return tensor


def wanted(tensor):
    print(f"  wanted {tuple(tensor.shape)}")
    return tensor


x = torch.randn(2, 4, requires_grad=True)
wide, narrow = nn.Linear(4, 8), nn.Linear(8, 4)
with saved_tensors_hooks(saved, wanted):
    y = narrow(wide(x).relu())
print("backward:")
y.sum().backward()

# %% [markdown]
# A matrix product saves both factors, transposed at times: of those the weights are there anyway.
# `(2, 8)` comes twice and is one tensor, not two: relu saves its result, the next product its
# factor.

# %% [markdown]
# So: in forward the first hook returns the **number of an empty slot**, and the tensor dies. When
# backward wants the first one back, run `fn` again, with other hooks: the n-th tensor that it saves
# now belongs into the n-th slot. One run fills all. The inner graph is of no use: its hook may
# return `None`, as `slots.append` does.

# %% [markdown]
# ### Exercise 5.2: the same by hooks
#
# About 25 minutes. As in 5.1, and besides: weights get their gradients where no input wants one;
# and a slot is empty again once its tensor was handed out, so that a graph that is retained
# (`backward(retain_graph=True)`) holds no more than before, and can be walked again. `fn` runs once
# forward, and once for each backward pass.


# %%
def forget_by_hooks(fn, *inputs):
    ### BEGIN SOLUTION
    slots, state = [], torch.get_rng_state()

    def leave_a_slot(tensor):
        slots.append(None)
        return len(slots) - 1

    def tensor_of(number):
        if slots[number] is None:
            slots.clear()
            with (
                torch.random.fork_rng([]),
                torch.enable_grad(),
                saved_tensors_hooks(slots.append, lambda nothing: nothing),
            ):
                torch.set_rng_state(state)
                fn(*inputs)
        tensor, slots[number] = slots[number], None
        return tensor

    with saved_tensors_hooks(leave_a_slot, tensor_of):
        return fn(*inputs)
    ### END SOLUTION


# %%
forget_by_hooks = exercise("5.2", forget_by_hooks)

# %% [markdown]
# ## Held against torch
#
# Forward and backward of the tiny model, its blocks called in five ways: plainly, by your two, by
# the library's `checkpoint` and by torch's. `use_reentrant=False` asks torch for hooks; with `True`
# it is a Function.

# %%
tokens, targets = next(batches(source_bytes("64 KiB"), 8, 64, seed=0))
torch.manual_seed(0)
model = GPT(PRESETS["tiny"])
ways = {
    "plain": lambda fn, *inputs: fn(*inputs),
    "forget": forget,
    "forget_by_hooks": forget_by_hooks,
    "memlab": checkpoint,
    "torch": partial(torch_checkpoint, use_reentrant=False),
}


def pass_by(way) -> None:
    x = model.embedding(tokens)
    for block in model.blocks:
        x = way(block, x)
    model.loss(model.norm(x), model.unembedding_weight, targets).backward()


# %%
runs, expected = [], []
hooks = [block.register_forward_pre_hook(lambda *_: runs.append(1)) for block in model.blocks]
for name, way in ways.items():
    model.zero_grad()
    runs.clear()
    peak = memlab.measure(partial(pass_by, way), model=model).peak_bytes
    gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()]).tolist()
    expected = expected or gradients
    print(f"{name:16}peak {peak:,} bytes, {len(runs)} block runs, ", end="")
    print(f"gradients equal: {gradients == expected}")
for hook in hooks:
    hook.remove()

# %% [markdown]
# All gradients are equal to the bit, and hooks have one peak: yours, the library's and torch's.
# `Forget` takes a tensor more: it needs the second run's *output*, to go back from it.
#
# One thing your hooks cannot: they hold their inputs in a closure, where no other hook sees them.
# Put one checkpoint inside another, and the inner inputs stay. The library saves inputs as autograd
# saves tensors, so that checkpoints nest (Day 6).

# %% [markdown]
# ## Stopping early
#
# Backward needs what a function *saved*, not what it returns. So the second run may stop as soon as
# the last slot is filled: in a block, before the last product. In units of one product, backward of
# W₂ relu(W₁ x) takes 4: two gradients for each of two matrices.

# %%
first, second = (nn.Linear(64, 64, bias=False) for _ in range(2))
x, unit = torch.randn(32, 64, requires_grad=True), 2 * 32 * 64 * 64
to_the_end = Checkpoint(early_stop=False)
for name, way in {**ways, "memlab, to the end": to_the_end}.items():
    y = way(lambda x: second(first(x).relu()), x)
    with Operations() as counter:
        y.sum().backward()
    print(f"{name:20}{counter.total / unit:4.0f} products in backward")

# %% [markdown]
# And for a block of the 124M model, forward and backward, in operations of products and attention:

# %%
config = PRESETS["124m"]
with memlab.dry_run():
    block = Block(
        config, Rotary(config, torch.float32), scaled_dot_product_attention, torch.float32
    )
    operations = {}
    for name, way in (("plain", ways["plain"]), ("early", checkpoint), ("to the end", to_the_end)):
        x = torch.randn(8, 640, config.hidden_size, requires_grad=True)
        with Operations() as counter:
            way(block, x).sum().backward()
        operations[name] = counter.total
more = {name: count / operations["plain"] - 1 for name, count in operations.items()}
print(f"to the end {more['to the end']:+.1%}, with an early stop {more['early']:+.1%}")

# %% [markdown]
# One extra forward pass is a third, for backward is twice a forward; here a little less, for
# attention's backward is 2½ times its forward. The early stop saves the MLP's last matrix. (Where
# an MLP has two matrices, 4 times as wide inside, that one is a third of the block: +22 % remain.)
#
# ## What goes wrong
#
# A second run that differs. Torch's checkpoint puts back torch's random numbers, not Python's; and
# BatchNorm sees the batch twice.


# %%
def noisy(x):
    return (layer(x) * torch.full_like(x, random.random())).tanh()


def gradient_by(way):
    random.seed(0)
    layer.zero_grad()
    way(noisy, no_gradient).square().sum().backward()
    return layer.weight.grad


careful = Checkpoint(random=("torch", "python"))
for name, way in (("torch", ways["torch"]), ("memlab", checkpoint), ("memlab, told so", careful)):
    right = torch.equal(gradient_by(way), gradient_by(ways["plain"]))
    print(f"{name:16} the gradient is right: {right}")
try:
    gradient_by(Checkpoint(check="hash"))
except CheckpointError as error:
    what = str(error).partition("backward, it ")[2].partition(", hash")[0]
    print(f"check='hash' says: it {what}, with another hash")
for name in ("torch", "memlab"):
    norm = nn.BatchNorm1d(4)
    ways[name](norm, no_gradient.clone().requires_grad_()).sum().backward()
    print(f"{name}: BatchNorm has counted {norm.num_batches_tracked} batches")

# %% [markdown]
# The wrong gradient comes without a word: shapes are the same, so nothing is noticed. Name what you
# draw from, `random=("torch", "python", "numpy")`, or have values compared: `check="hash"` keeps 64
# bits of every tensor. BatchNorm counts once with the library, as its second run works on copies of
# the norm's buffers, and throws them away.

# %% [markdown]
# ## From N to √N
#
# With a checkpoint around every block, memory still grows with N, the number of blocks: an input
# each. A checkpoint around a **segment** of several blocks keeps one input for all of them. The
# price: when it runs again, all its blocks' activations are there at once.

# %% [markdown]
# ### Exercise 5.3: how many segments?
#
# About 8 minutes. n equal blocks, in segments as even as they can be. At most there are held the
# input of each segment, `input_bytes` each, and the activations of the longest segment's blocks,
# `block_bytes` each. How many segments, from 1 to n, hold the least, and how much? Of several that
# are as good, the fewest.


# %%
def best_segments(blocks: int, input_bytes: int, block_bytes: int) -> tuple[int, int]:
    """(segments, bytes)"""
    ### BEGIN SOLUTION
    held = {}
    for segments in range(1, blocks + 1):
        longest = -(-blocks // segments)  # rounded up
        held[segments] = segments * input_bytes + longest * block_bytes
    best = min(held, key=held.get)
    return best, held[best]
    ### END SOLUTION


# %%
best_segments = exercise("5.3", best_segments)

# %% [markdown]
# By hand: s · x + (n / s) · a is least at s = √(n · a / x); roughly, for where n / s is no whole
# number the best may be another. If a block keeps as much as its input (a = x), that is √n, and
# 2 · x · √n bytes are held: the famous O(√N).
#
# A *schedule* says which blocks belong together, in nested tuples: `((0, 1), (2, 3))` are two
# segments; a plain number is a block that is kept.

# %% [markdown]
# ### Exercise 5.4: a schedule of even segments
#
# About 10 minutes. All blocks, 0 to n − 1, in so many segments, as even as they can be, the longer
# ones first: 7 blocks in 3 are `((0, 1, 2), (3, 4), (5, 6))`. Every segment is checkpointed. The
# check runs your schedule on real blocks, and looks at the peak and at how often they ran.


# %%
def even_schedule(blocks: int, segments: int) -> tuple[tuple[int, ...], ...]:
    ### BEGIN SOLUTION
    size, longer = divmod(blocks, segments)
    start, parts = 0, []
    for number in range(segments):
        end = start + size + (number < longer)
        parts.append(tuple(range(start, end)))
        start = end
    return tuple(parts)
    ### END SOLUTION


# %%
even_schedule = exercise("5.4", even_schedule)

# %% [markdown]
# (`torch.utils.checkpoint.checkpoint_sequential` gives the whole rest to the last segment, and does
# not checkpoint it: 12 blocks in 5 segments are 2, 2, 2, 2, and 4 that are kept. Longer ones first
# is better: when the first segment runs again, the inputs of all later ones are gone.)

# %% [markdown]
# ## The slope
#
# A chain of N equal blocks, without logits, so that nothing else is in the picture; each keeps 9
# times its input. What is held for tokens at the fullest moment, against N, both on a logarithmic
# scale: there a power is a straight line, and its exponent the slope.


# %%
class Residual(nn.Module):
    def __init__(self, C: int = 16):
        super().__init__()
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def held_by(schedule, count: int) -> int:
    blocks = nn.ModuleList(Residual() for _ in range(count))
    x = torch.randn(8, 16, requires_grad=True)

    def step() -> None:
        y = x
        for part in schedule:
            y = run(part, blocks, y)
        y.sum().backward()

    return most_for_tokens(memlab.measure(step, model=blocks))


# %%
counts = (4, 16, 49, 100)
root = {n: round(n**0.5) for n in counts}
schedules = {
    "all kept": plain_schedule,
    "every block": partial(uniform_schedule, every=1),
    "√N segments": lambda n: even_schedule(n, root[n]),
    "the best number of segments": lambda n: even_schedule(n, best_segments(n, 1, 9)[0]),
}
fig, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
slopes = {}
for name, schedule in schedules.items():
    held = [held_by(schedule(n), n) / 512 for n in counts]  # in inputs of a block
    line = "o--" if name.startswith("the best") else "o-"  # at first it lies on "every block"
    axes.loglog(counts, held, line, label=f"{name}: {held[-1]:.0f} at N = 100")
    ends = torch.tensor([counts[-2:], held[-2:]]).log()
    slopes[name] = ((ends[1, 1] - ends[1, 0]) / (ends[0, 1] - ends[0, 0])).item()
    print(f"{name:28}{held[-1]:6.0f} inputs at N = 100, slope {slopes[name]:.2f}")
axes.set(xlabel="blocks", ylabel="held, in inputs of a block", title="What tokens hold in a chain")
axes.set_xticks(counts, map(str, counts), minor=False)
heights = (10, 20, 50, 100, 200, 500, 1000)
axes.set_yticks(heights, map(str, heights), minor=False)
axes.minorticks_off()
_ = axes.legend(frameon=False)

# %% [markdown]
# All kept: slope 1. Segments: ½. Every block: towards 1 in the end, and yet **below** √N's line up
# to some 80 blocks, for beside the inputs it never holds more than one block. (80, as a block keeps
# 9 inputs here; with 20 it is 400.) So √N is about growth. What is best for *your* N?
#
# A block of a transformer keeps some twenty times its input (Day 1). By your formula:

# %%
each_alone = []
for name in ("25m", "124m", "llama-2-7b", "llama-3-70b", "llama-3-405b"):
    shape = PRESETS[name]
    fewer = replace(shape, layers=shape.layers - 1)
    own = activation_bytes(shape, 1, 64) - activation_bytes(fewer, 1, 64)
    one_input = 4 * 64 * shape.hidden_size
    segments, _ = best_segments(shape.layers, one_input, own)
    each_alone += [shape.layers] if segments == shape.layers else []
    print(f"{name:13}{shape.layers:4} blocks, each keeps {own / one_input:.1f} inputs: ", end="")
    print(f"best in {segments:3} segments of {-(-shape.layers // segments)}")

# %% [markdown]
# Up to some forty blocks, no number of segments is better than each by itself. There is one
# exception, where something else makes the peak. In the step of the guess it is the logits. While
# they are there no segment runs again, and only its inputs count: the fewer the better, as long as
# a segment fits into the logits' room.

# %%
by_root = dry_trace(setting, combined(f"{fused}+sqrt-checkpointing"))
three = {"all kept": kept_all, "every block": every_block, "3 segments of 4": by_root}
plot.breakdown(three, title=f"Schedules of {setting}")

# %% [markdown]
# Nine inputs of 15 MiB fewer wait, and what the logits take is the same in all three bars.

# %% [markdown]
# ## Learn something
#
# Nothing that is learnt changes: the tiny model on torch's own source, all kept, and by your
# schedule of two segments.


# %%
def losses_of(schedule, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    learning = GPT(PRESETS["tiny"])
    checkpoint_blocks(learning, schedule)
    optimizer = torch.optim.AdamW(learning.parameters(), lr=3e-3, foreach=False)
    drawn, losses = batches(source_bytes("256 KiB"), 8, 64, seed=0), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = learning(*next(drawn))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
all_kept, by_two = losses_of(plain_schedule(4)), losses_of(even_schedule(4, 2))
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.plot(all_kept, linewidth=4, color="#c9c9d0", label="all kept")
axes.plot(by_two, linewidth=1.2, color="#00798c", label="computed again")
axes.set(
    xticks=range(0, 20, 5),
    xlabel="step",
    ylabel="loss in nats",
    title="Loss on torch's own source",
)
axes.legend(frameon=False)
print(f"the loss went down: {by_two[-1] < by_two[0]}")
print(f"equal to the bit, all 20: {all_kept == by_two}")

# %% [markdown]
# ## At scale: seven billion
#
# Llama 2 7B in bfloat16, 1 × 2048 tokens: forward with all kept, then forward and backward with
# every block computed again. Without an optimizer: its 25.10 GiB are always there. Three and four
# blocks run; the other blocks do equal things (`trace_of_blocks`).


# %%
def passes(setting: Setting, how: str, backward: bool):
    def run_once(config: GPTConfig):
        with memlab.dry_run():
            model = GPT(config, dtype=setting.dtype)
            combined(how).change_model(model)
            tokens = torch.zeros(setting.batch, setting.seq_len, dtype=torch.long)
            alive = []

            def run_through() -> None:
                alive.append(model(tokens, tokens))
                if backward:
                    alive.pop().backward()

            return memlab.measure(run_through, model=model)

    return trace_of_blocks(run_once, setting.config)


def waiting(trace) -> int:
    """What a forward pass has left for backward."""
    left = trace.at_end.items()
    return sum(n for kind, n in left if kind not in ("parameters", "buffers", "inputs"))


# %%
seven = Setting("llama-2-7b", batch=1, seq_len=2048, dtype=torch.bfloat16)
logits = 2 * seven.seq_len * PRESETS[seven.model].vocab_size
all_of_it = waiting(passes(seven, "plain", backward=False)) + 2 * logits
again, eight = (passes(replace(seven, batch=n), "checkpointing", backward=True) for n in (1, 8))
tokens_7b = all_of_it, most_for_tokens(again)
for name, held in zip(("all kept", "every block again"), tokens_7b, strict=True):
    print(f"{name:18}{format_bytes(held):>12} for a sequence, at its fullest")
each_adds = (eight.peak_bytes - again.peak_bytes) // 7
print(f"again, at the peak: {format_bytes(again.peak_bytes)}, ", end="")
print(f"and {format_bytes(each_adds)} for each further sequence, up to 8")
plot.timeline(again, title="Llama 2 7B in bfloat16, 1 × 2048 tokens: every block again")

# %% [markdown]
# On Days 3 and 4 its step took 50.50 GiB, with 12.46 of these 12.83 at the peak. Now it takes 25.12
# GiB and Adam's 25.10: the peak has moved to the end of backward, to the **floor**, where weights,
# all gradients and Adam's moments are. With one sequence nothing seems to be saved; but each
# further one adds 0.5 GiB, in place of 12.8. (Its fullest moment comes early in backward, when few
# gradients are there.) What is left belongs to weights, and to Days 8, 9 and 12.

# %% [markdown]
# ## On your GPU
#
# Where there is a GPU, this takes the question's step on it.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    for name in ("plain", "checkpointing", "sqrt-checkpointing"):
        training = build(replace(setting, device=gpu.type), TECHNIQUES[name])
        training.step()
        trace = measured(training)
        print(f"{name}: {format_bytes(trace.peak_bytes)}, ", end="")
        print(f"reserved {format_bytes(trace.reserved_bytes or 0)}")
        del training
else:
    print(stored_on_a_gpu("day 5"))

# %% [markdown]
# ## Rules on trial
#
# From the same guides. First the growth, and the operations.

# %%
verdict(
    "15a",
    abs(slopes["√N segments"] - 0.5) < 0.05,
    f"slopes in a chain of N blocks, from 49 to 100: all kept {slopes['all kept']:.2f}, in √N "
    f"segments {slopes['√N segments']:.2f}, every block by itself {slopes['every block']:.2f}; "
    f"for the {', '.join(map(str, each_alone))} blocks of our models up to 7B that holds the least",
    condition="for √N segments; an input kept for each block is O(N), with a term so small that "
    "for transformers it beats √N segments up to some 400 blocks, and every other number of "
    "segments up to forty; logits grow with neither",
)

# %%
verdict(
    "15b",
    abs(more["to the end"] - 1 / 3) < 0.02,
    f"operations of a 124m block, forward and backward: {more['to the end']:+.1%} if the second "
    f"run goes to its end, {more['early']:+.1%} if it stops with the last tensor needed",
    condition="for the blocks, as an upper bound: an early stop takes a fifth off it, and "
    "embedding and logits never run again",
)

# %% [markdown]
# How much slower? A time is no number to keep: here is a ratio, on this machine, of three rounds,
# with an early stop. It need not be that of the operations: norms, activations and sums run again,
# too, and none of them is a product.

# %% tags=["nbval-ignore-output"] reason="a time"
import time

timed_model = GPT(replace(PRESETS["25m"], layers=2, vocab_size=256))
text = next(batches(source_bytes("64 KiB"), 1, 128, seed=0))


def seconds() -> float:
    start = time.process_time()
    timed_model(*text).backward()
    return time.process_time() - start


def rounds(schedule) -> float:
    with checkpoint_blocks(timed_model, schedule):
        return min(seconds() for _ in range(3))


ratio = rounds(uniform_schedule(2, 1)) / rounds(plain_schedule(2))
print(f"forward and backward take {ratio:.2f} × the time: {1 / ratio:.2f} × the speed")

# %%
speeds = {name: 1 / (1 + share) for name, share in more.items()}
verdict(
    "15c",
    all(0.7 <= speeds[name] <= 0.8 for name in ("to the end", "early")),
    f"if time goes as operations do, the blocks run at {speeds['to the end']:.2f} × the speed to "
    f"the end, at {speeds['early']:.2f} × with an early stop (times: benchmarks/checkpointing.py)",
    condition="for the blocks, with an early stop and without; with logits and optimizer in the "
    "step, less is lost",
)

# %%
always = sum(every_block.at_peak[kind] for kind in ("parameters", "buffers", "optimizer_state"))
room = kept_all.peak_bytes - always
sequences = 8 * room / (every_block.peak_bytes - always)
verdict(
    "15d",
    tokens_7b[0] / tokens_7b[1] >= 3,
    f"in the room of 8 sequences of 640 tokens the 124M model has {sequences:.1f} "
    f"({sequences / 8:.1f} ×); a sequence of 7B holds {tokens_7b[0] / tokens_7b[1]:.0f} × less "
    f"at its fullest, and adds {tokens_7b[0] / each_adds:.0f} × less to the peak",
    condition="for large models, and then far more than 4 ×, once the floor of weights, gradients "
    "and Adam's state fits; where logits are half of it, 2 ×",
)

# %%
small = Setting("34m", batch=2, seq_len=512)
two = [passes(small, how, backward=False) for how in ("plain", "checkpointing")]
pairs = {
    "34m": [waiting(trace) for trace in two],
    "124m": [trace.at_peak["activations"] for trace in (kept_all, every_block)],
    "124m, backward's own with them": [most_for_tokens(t) for t in (kept_all, every_block)],
    "7B, backward's own with them": tokens_7b,
}
less = {name: 1 - after / before for name, (before, after) in pairs.items()}
verdict(
    "15e",
    0.5 <= less["124m, backward's own with them"] <= 0.7,
    "of the activations, " + "; ".join(f"{name}: {share:.0%} less" for name, share in less.items()),
    condition="at the fullest moment of a small model with a large vocabulary: what is left are "
    "its logits; of what waits for backward, and in large models, more goes",
)

# %% [markdown]
# ## What you can do now
#
# | schedule of n blocks | held, in bytes | runs again |
# | --- | --- | --- |
# | all kept | n · a | nothing |
# | every block | n · x + a | all, +33 % at most |
# | s segments | s · x + (n / s) · a | the same |
#
# x is a block's input, a what it keeps: some 20 · x. **Every block by itself** is the schedule for
# up to forty blocks, unless the logits make the peak. It costs up to a third of the blocks'
# operations and changes no bit of what is learnt, if everything random is put back.
#
# Tomorrow: which activations are worth their bytes?

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. Today: on top of Days 3 and 4, every block
# computed again. At its peak no activation is left: it has moved to the floor.

# %%
running_bill(5)

# %% [markdown]
# ## Sources
#
# - Chen et al. 2016: [Training Deep Nets with Sublinear Memory
#   Cost](https://arxiv.org/abs/1604.06174)
# - PyTorch: [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html)
# - PyTorch: [Autograd mechanics, hooks for saved
#   tensors](https://docs.pytorch.org/docs/stable/notes/autograd.html)
#
# The rules on trial are from:
#
# - thINKblots: [Multi-Platform Memory
#   Optimization](https://github.com/thINKblots/gearhead/blob/d9730c481ff0cc18e9e2b2e6981495e233b9f7b1/MEMORY_OPTIMIZATIONS.md)
# - "Day 19: Memory Optimization", author and address unknown
