# %% [markdown]
# # Day 5: Gradient checkpointing
#
# **Can you discard the activations and recompute them?**
#
# After today you have built gradient checkpointing (also called activation checkpointing) twice.
# For any model you can predict how much memory remains, how much is recomputed, and when √N
# segments pay off.
#
# About 90 minutes, 63 of them for four exercises. You need a laptop. A GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** the code that explains the gap. In each
# exercise, replace `raise NotImplementedError` with your own code; the cell below it checks your
# answer. If you are stuck, run `memlab hint 5.1` in a terminal. You can skip an exercise.

# %% [markdown]
# ## The question
#
# Forward saves activations for backward. But you can recompute them from the block's input. So save
# only the **input** of each block and discard the rest. When backward reaches a block, run its
# forward again, then its backward. This is *gradient checkpointing*; the saved inputs are the
# *checkpoints*.
#
# Take the step of Day 1: 124M weights, 12 blocks, 8 × 640 tokens, float32. Its peak is 7.94 GiB,
# with 4.64 GiB of activations.

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
from memlab.course.checks.day05 import activation_peak
from memlab.course.deep_models import trace_of_blocks
from memlab.course.ledger import activation_bytes
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS, Block, GPTConfig, Rotary, scaled_dot_product_attention
from memlab.train import TECHNIQUES, Setting, build, combined, dry_trace, measured
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# Put a checkpoint around each of the 12 blocks. How many of the 4.64 GiB of activations remain? To
# how many GiB does the peak of 7.94 GiB fall? Replace the dots with your guesses.

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
fused = "fused-adamw"  # same peak as AdamW, faster to measure
all_saved, every_block = (
    dry_trace(setting, combined(technique)) for technique in (fused, f"{fused}+checkpointing")
)
reveal("5.1", every_block)
for module, kinds in every_block.by_module(depth=1).items():
    if "activations" in kinds:
        name = "the loss" if module == "GPT" else module
        print(f"  {name:10}{format_bytes(kinds['activations']):>12}")

# %%
plot.timeline(every_block, title=f"Every block recomputed: {setting}")

# %% [markdown]
# These activations remain:
#
# - 13 tensors of 15 MiB: the inputs of the blocks and the last block's output
# - the last norm, 30 MiB
# - the **logits** (as log-probabilities), 982 MiB, outside the blocks; Day 11 reduces them
#
# If you guessed one twelfth, your gap is mostly the logits. The peak also has backward's two
# temporaries of the same size.
#
# After the peak there are twelve spikes, one for each recomputed block. (The meter counts these
# tensors as backward temporaries.)

# %% [markdown]
# ## Build
#
# How do you discard activations? Inside an autograd *Function*, `forward` records no graph, so its
# intermediate tensors are freed. `backward` receives the gradient of the output. It returns one
# gradient for each input of `forward`, or `None` for non-tensors.
#
# - `ctx.save_for_backward(...)` saves tensors; set anything else as an attribute of `ctx`.
# - `backward` records no graph, either, except under `torch.enable_grad()`.
# - `torch.autograd.backward(y, gradient)` backpropagates from y and fills `.grad`.

# %% [markdown]
# The recomputation must equal the first run, even with dropout. `torch.get_rng_state()` returns the
# state of the random number generator, and `torch.set_rng_state` restores it. Random numbers
# *after* the recomputation must not change: `with torch.random.fork_rng([]):` restores the
# generator's state on exit. (The list names the GPUs whose generators are restored, too.)

# %% [markdown]
# ### Exercise 5.1: discard and recompute
#
# About 20 minutes. `forget(fn, *inputs)` returns the same tensor as `fn(*inputs)`. The gradients of
# the inputs and of the weights in `fn` are bitwise equal to a plain call, even with dropout.
#
# - Between forward and backward, save only the inputs, with `save_for_backward`, and the random
#   state (5,056 bytes per call, not counted here).
# - Run `fn` twice in total.
# - In backward, keep the activations of one call at a time.
# - Some inputs may need no gradient, such as a tensor of integers.


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
# ## Limits of a Function
#
# This version has three limits:
#
# - If no *input* needs a gradient (the first block after a frozen embedding), autograd never calls
#   `backward`, and the weights in `fn` silently get no gradient.
# - Its inner backward fills `.grad` of all weights, even if you request only some gradients.
# - It always runs `fn` to the end.
#
# A second version keeps the graph and discards only the saved tensors.

# %%
layer = nn.Linear(4, 4)
no_gradient = torch.randn(2, 4)
print(f"requires_grad of the output: plain {layer(no_gradient).requires_grad}, ", end="")
print(f"forget {forget(layer, no_gradient).requires_grad}")

# %% [markdown]
# ## Saved-tensor hooks
#
# Autograd passes each tensor that it saves to a pack hook and stores the hook's **return value**.
# In backward, an unpack hook receives this value and must return the tensor. Here both hooks return
# the tensor and print its shape.


# %%
def pack(tensor):
    print(f"  pack {tuple(tensor.shape)}")
    return tensor


def unpack(tensor):
    print(f"  unpack {tuple(tensor.shape)}")
    return tensor


x = torch.randn(2, 4, requires_grad=True)
wide, narrow = nn.Linear(4, 8), nn.Linear(8, 4)
print("forward:")
with saved_tensors_hooks(pack, unpack):
    y = narrow(wide(x).relu())
print("backward:")
y.sum().backward()

# %% [markdown]
# A matmul saves both operands, sometimes transposed. Saved weights use no extra memory. `(2, 8)`
# appears twice but is a single tensor: relu saves its output, which is also the next matmul's
# input.

# %% [markdown]
# For checkpointing, the pack hook in forward returns only a **slot index**, and the tensor is
# freed. When backward unpacks the first tensor, run `fn` again with other hooks. The n-th tensor
# that it saves belongs in slot n, so one run fills all slots. The graph of this run is not needed,
# so its pack hook may return `None`, like `slots.append`.

# %% [markdown]
# ### Exercise 5.2: checkpointing with hooks
#
# About 25 minutes. Implement exercise 5.1 with hooks. In addition:
#
# - Weights get gradients even if no input needs one.
# - Empty a slot when you return its tensor. Then the graph needs no extra memory after
#   `backward(retain_graph=True)`, and backward can run again.
#
# `fn` runs once in forward and once per backward pass.


# %%
def forget_by_hooks(fn, *inputs):
    ### BEGIN SOLUTION
    slots, state = [], torch.get_rng_state()

    def pack(tensor):
        slots.append(None)
        return len(slots) - 1

    def unpack(index):
        if slots[index] is None:
            slots.clear()
            with (
                torch.random.fork_rng([]),
                torch.enable_grad(),
                saved_tensors_hooks(slots.append, lambda unused: unused),
            ):
                torch.set_rng_state(state)
                fn(*inputs)
        tensor, slots[index] = slots[index], None
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return fn(*inputs)
    ### END SOLUTION


# %%
forget_by_hooks = exercise("5.2", forget_by_hooks)

# %% [markdown]
# ## Comparison with torch
#
# Run forward and backward of the tiny model in five versions: plain, with your two functions, with
# the library's `checkpoint`, and with torch's. With `use_reentrant=False` torch uses hooks, with
# `True` a Function.

# %%
tokens, targets = next(batches(source_bytes("64 KiB"), 8, 64, seed=0))
torch.manual_seed(0)
model = GPT(PRESETS["tiny"])
versions = {
    "plain": lambda fn, *inputs: fn(*inputs),
    "forget": forget,
    "forget_by_hooks": forget_by_hooks,
    "memlab": checkpoint,
    "torch": partial(torch_checkpoint, use_reentrant=False),
}


def forward_and_backward(checkpoint_fn) -> None:
    x = model.embedding(tokens)
    for block in model.blocks:
        x = checkpoint_fn(block, x)
    model.loss(model.norm(x), model.unembedding_weight, targets).backward()


# %%
runs, expected = [], []
hooks = [block.register_forward_pre_hook(lambda *_: runs.append(1)) for block in model.blocks]
for name, checkpoint_fn in versions.items():
    model.zero_grad()
    runs.clear()
    peak = memlab.measure(partial(forward_and_backward, checkpoint_fn), model=model).peak_bytes
    gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()]).tolist()
    expected = expected or gradients
    print(f"{name:16}peak {peak:,} bytes, {len(runs)} block runs, ", end="")
    print(f"gradients equal: {gradients == expected}")
for hook in hooks:
    hook.remove()

# %% [markdown]
# All gradients are bitwise equal. All three versions with hooks have the same peak: yours, the
# library's and torch's. `Forget` needs one more tensor: the *output* of the recomputation, to
# backpropagate from it.
#
# Your hooks have one limit. Their closure keeps the inputs, so outer hooks do not receive them. If
# you nest checkpoints, the inner inputs stay in memory. The library saves its inputs through
# autograd, so its checkpoints nest (Day 6).

# %% [markdown]
# ## Early stop
#
# Backward needs the tensors that a function *saved*, not its output. So recomputation can stop when
# the last slot is filled: in a block, before the last matmul. For W₂ relu(W₁ x), backward without
# checkpointing needs 4 matmuls: two gradients for each of two matrices.

# %%
first, second = (nn.Linear(64, 64, bias=False) for _ in range(2))
x, unit = torch.randn(32, 64, requires_grad=True), 2 * 32 * 64 * 64
to_the_end = Checkpoint(early_stop=False)
for name, checkpoint_fn in {**versions, "memlab, to the end": to_the_end}.items():
    y = checkpoint_fn(lambda x: second(first(x).relu()), x)
    with Operations() as counter:
        y.sum().backward()
    print(f"{name:20}{counter.total / unit:4.0f} matmuls in backward")

# %% [markdown]
# Now count the FLOPs of matmuls and attention in forward and backward of one 124M block:

# %%
config = PRESETS["124m"]
with memlab.dry_run():
    block = Block(
        config, Rotary(config, torch.float32), scaled_dot_product_attention, torch.float32
    )
    operations = {}
    compared = {"plain": versions["plain"], "early": checkpoint, "to the end": to_the_end}
    for name, checkpoint_fn in compared.items():
        x = torch.randn(8, 640, config.hidden_size, requires_grad=True)
        with Operations() as counter:
            checkpoint_fn(block, x).sum().backward()
        operations[name] = counter.total
more = {name: count / operations["plain"] - 1 for name, count in operations.items()}
print(f"FLOPs: {more['to the end']:+.1%} without an early stop, {more['early']:+.1%} with it")

# %% [markdown]
# Without an early stop the overhead is one extra forward: about a third, because backward needs
# twice the FLOPs of forward. It is slightly less here because attention's backward needs 2.5× its
# forward. The early stop skips the MLP's last matmul. (If the MLP has two matrices and a 4×
# intermediate size, this matmul is a third of forward, and +22 % remain.)
#
# ## What goes wrong
#
# Recomputation may differ from the first run. torch's checkpoint restores torch's random state, but
# not Python's. BatchNorm updates its statistics twice.


# %%
def noisy(x):
    return (layer(x) * torch.full_like(x, random.random())).tanh()


def gradient_with(checkpoint_fn):
    random.seed(0)
    layer.zero_grad()
    checkpoint_fn(noisy, no_gradient).square().sum().backward()
    return layer.weight.grad


plain = gradient_with(versions["plain"])
with_python = Checkpoint(random=("torch", "python"))
compared = {"torch": versions["torch"], "memlab": checkpoint, "memlab, random=": with_python}
for name, checkpoint_fn in compared.items():
    print(f"{name:16} gradient correct: {torch.equal(gradient_with(checkpoint_fn), plain)}")
try:
    gradient_with(Checkpoint(check="hash"))
except CheckpointError as error:
    which = str(error).partition(" as ")[2].partition(" (")[0]
    print(f"check='hash': saved {which} has another hash in the second run")
for name in ("torch", "memlab"):
    norm = nn.BatchNorm1d(4)
    versions[name](norm, no_gradient.clone().requires_grad_()).sum().backward()
    print(f"{name}: BatchNorm counted {norm.num_batches_tracked} batches")

# %% [markdown]
# The gradient is wrong without an error, because the shapes match. Either list the generators that
# you use, `random=("torch", "python", "numpy")`, or compare the values: `check="hash"` stores a
# 64-bit hash of every saved tensor. With the library, BatchNorm updates its statistics once,
# because recomputation uses copies of its buffers.

# %% [markdown]
# ## From N to √N
#
# With a checkpoint around every block, memory still grows linearly with the number of blocks N: one
# input each. A checkpoint around a **segment** of several blocks stores one input for all of them.
# But the recomputation of a segment needs memory for the activations of all its blocks at once.

# %% [markdown]
# ### Exercise 5.3: the best number of segments
#
# About 8 minutes. Split n equal blocks into segments as evenly as possible. The peak is the input
# of each segment (`input_bytes` each) plus the activations of all blocks in the longest segment
# (`block_bytes` per block). Return the number of segments from 1 to n with the lowest peak, and
# that peak. In a tie, return the fewest segments.


# %%
def best_segments(blocks: int, input_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Return (segments, bytes)."""
    ### BEGIN SOLUTION
    peaks = {}
    for segments in range(1, blocks + 1):
        longest = -(-blocks // segments)  # rounded up
        peaks[segments] = segments * input_bytes + longest * block_bytes
    best = min(peaks, key=peaks.get)
    return best, peaks[best]
    ### END SOLUTION


# %%
best_segments = exercise("5.3", best_segments)

# %% [markdown]
# With s segments, input size x and activations a, the peak s · x + (n / s) · a is lowest at s = √(n
# · a / x). (If n / s is not an integer, another s may be better.) If a = x, then s = √n, and the
# peak is 2 · x · √n bytes: the well-known O(√N).
#
# A *schedule* groups the blocks in nested tuples: `((0, 1), (2, 3))` has two segments. An integer
# outside an inner tuple is a block without checkpointing.

# %% [markdown]
# ### Exercise 5.4: a schedule of even segments
#
# About 10 minutes. Split blocks 0 to n − 1 into the given number of segments, as evenly as
# possible, longer segments first: 7 blocks in 3 segments are `((0, 1, 2), (3, 4), (5, 6))`. Every
# segment is checkpointed. The check runs your schedule on real blocks and measures the peak and the
# number of runs.


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
# (`torch.utils.checkpoint.checkpoint_sequential` puts the remainder in the last segment and does
# not checkpoint it: 12 blocks in 5 segments become 2, 2, 2, 2 and 4 without checkpointing. It is
# better to put longer segments first: when they are recomputed, the inputs of all later segments
# have been freed.)

# %% [markdown]
# ## Memory by number of blocks
#
# Measure a chain of N equal blocks without logits. Each block saves 9 times its input. The plot
# shows the peak of activations and their gradients. Its axes are logarithmic: a power of N is a
# straight line, and the slope is the exponent.


# %%
class Residual(nn.Module):
    def __init__(self, C: int = 16):
        super().__init__()
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def peak_of(schedule, count: int) -> int:
    blocks = nn.ModuleList(Residual() for _ in range(count))
    x = torch.randn(8, 16, requires_grad=True)

    def step() -> None:
        y = x
        for part in schedule:
            y = run(part, blocks, y)
        y.sum().backward()

    return activation_peak(memlab.measure(step, model=blocks))


# %%
counts = (4, 16, 49, 100)
root = {n: round(n**0.5) for n in counts}
schedules = {
    "no checkpointing": plain_schedule,
    "every block": partial(uniform_schedule, every=1),
    "√N segments": lambda n: even_schedule(n, root[n]),
    "the best number of segments": lambda n: even_schedule(n, best_segments(n, 1, 9)[0]),
}
fig, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
slopes = {}
for name, schedule in schedules.items():
    peaks = [peak_of(schedule(n), n) / 512 for n in counts]  # in units of a block's input
    line = "o--" if name.startswith("the best") else "o-"  # it starts on the "every block" line
    axes.loglog(counts, peaks, line, label=f"{name}: {peaks[-1]:.0f} at N = 100")
    ends = torch.tensor([counts[-2:], peaks[-2:]]).log()
    slopes[name] = ((ends[1, 1] - ends[1, 0]) / (ends[0, 1] - ends[0, 0])).item()
    print(f"{name:28}{peaks[-1]:6.0f} block inputs at N = 100, slope {slopes[name]:.2f}")
axes.set(xlabel="blocks", ylabel="peak, in block inputs", title="Peak memory of a chain of blocks")
axes.set_xticks(counts, map(str, counts), minor=False)
heights = (10, 20, 50, 100, 200, 500, 1000)
axes.set_yticks(heights, map(str, heights), minor=False)
axes.minorticks_off()
_ = axes.legend(frameon=False)

# %% [markdown]
# Without checkpointing the slope is 1, with √N segments it is ½. With a checkpoint around every
# block it approaches 1. Yet this schedule needs **less** memory than √N segments up to about 80
# blocks, because only one block is recomputed at a time. (Up to 400 blocks, if a block saves 20
# times its input.) So √N describes growth. Which schedule is best for *your* N?
#
# A transformer block saves about 20 times its input (Day 1). Apply your formula:

# %%
best_per_block = []
for name in ("25m", "124m", "llama-2-7b", "llama-3-70b", "llama-3-405b"):
    shape = PRESETS[name]
    fewer = replace(shape, layers=shape.layers - 1)
    block_bytes = activation_bytes(shape, 1, 64) - activation_bytes(fewer, 1, 64)
    one_input = 4 * 64 * shape.hidden_size
    segments, _ = best_segments(shape.layers, one_input, block_bytes)
    best_per_block += [shape.layers] if segments == shape.layers else []
    saves = f"{block_bytes / one_input:.1f}× its input"
    print(f"{name:13}{shape.layers:4} blocks, each saves {saves}: ", end="")
    print(f"best: {segments:3} segments of {-(-shape.layers // segments)}")

# %% [markdown]
# Up to about forty blocks, a checkpoint around every block is best. There is one exception. In the
# step from the guess, the peak is at the logits, before any block is recomputed. So only the stored
# inputs count. Fewer segments are then better, as long as a recomputed segment needs less memory
# than the logits and their gradients.

# %%
by_root = dry_trace(setting, combined(f"{fused}+sqrt-checkpointing"))
compared = {"no checkpointing": all_saved, "every block": every_block, "3 segments of 4": by_root}
plot.breakdown(compared, title=f"Peak memory by schedule: {setting}")

# %% [markdown]
# Three segments store 9 inputs fewer than twelve do, 15 MiB each. The logits need the same memory
# in all three bars.

# %% [markdown]
# ## Train with checkpointing
#
# Checkpointing does not change the result. Train the tiny model on torch's source code, without
# checkpointing and with your schedule of two segments.


# %%
def losses_of(schedule, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = GPT(PRESETS["tiny"])
    checkpoint_blocks(model, schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    data, losses = batches(source_bytes("256 KiB"), 8, 64, seed=0), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
plain_losses, losses = losses_of(plain_schedule(4)), losses_of(even_schedule(4, 2))
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.plot(plain_losses, linewidth=4, color="#c9c9d0", label="no checkpointing")
axes.plot(losses, linewidth=1.2, color="#00798c", label="two checkpointed segments")
axes.set(
    xticks=range(0, 20, 5),
    xlabel="step",
    ylabel="loss in nats",
    title="Loss on torch's source code",
)
axes.legend(frameon=False)
print(f"the loss went down: {losses[-1] < losses[0]}")
print(f"all 20 losses are bitwise equal: {losses == plain_losses}")

# %% [markdown]
# ## At scale: 7 billion parameters
#
# Take Llama 2 7B in bfloat16 on 1 × 2048 tokens. Measure forward with all activations saved, then
# forward and backward with a checkpoint around every block. Leave out the optimizer state, which is
# constant (25.10 GiB). `trace_of_blocks` runs models of three and four blocks and extrapolates.


# %%
def trace_without_optimizer(setting: Setting, technique: str, backward: bool):
    def run_once(config: GPTConfig):
        with memlab.dry_run():
            model = GPT(config, dtype=setting.dtype)
            combined(technique).change_model(model)
            tokens = torch.zeros(setting.batch, setting.seq_len, dtype=torch.long)
            losses = []

            def passes() -> None:
                losses.append(model(tokens, tokens))
                if backward:
                    losses.pop().backward()

            return memlab.measure(passes, model=model)

    return trace_of_blocks(run_once, setting.config)


def saved_bytes(trace) -> int:
    """Return the bytes that a forward pass saved for backward."""
    at_end = trace.at_end.items()
    return sum(n for kind, n in at_end if kind not in ("parameters", "buffers", "inputs"))


# %%
seven = Setting("llama-2-7b", batch=1, seq_len=2048, dtype=torch.bfloat16)
logits = 2 * seven.seq_len * PRESETS[seven.model].vocab_size
plain_7b = saved_bytes(trace_without_optimizer(seven, "plain", backward=False)) + 2 * logits
one, eight = (
    trace_without_optimizer(replace(seven, batch=n), "checkpointing", backward=True) for n in (1, 8)
)
peaks_7b = plain_7b, activation_peak(one)
for name, peak in zip(("no checkpointing", "every block"), peaks_7b, strict=True):
    print(f"{name:18}{format_bytes(peak):>12} of activations and temporaries per sequence")
each_adds = (eight.peak_bytes - one.peak_bytes) // 7
print(f"every block, peak of the step: {format_bytes(one.peak_bytes)}, ", end="")
print(f"plus {format_bytes(each_adds)} per additional sequence, up to 8")
plot.timeline(one, title="Llama 2 7B in bfloat16, 1 × 2048 tokens: every block recomputed")

# %% [markdown]
# On Days 3 and 4 this step needed 50.50 GiB. Now it needs 50.22 GiB: 25.12 plus 25.10 for AdamW's
# state. The peak has moved to the **floor** at the end of backward: weights, all gradients and
# optimizer state.
#
# With one sequence, checkpointing saves only 0.3 GiB. But each additional sequence adds 0.5 GiB
# instead of 12.8 GiB. Days 8, 9 and 12 reduce the floor.

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs the step from the guess on it.

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
# The rules come from the guides under *Sources*. The first two are about growth and FLOPs.

# %%
in_words = ", ".join(f"{name} {slope:.2f}" for name, slope in list(slopes.items())[:3])
best_for = ", ".join(map(str, best_per_block))
verdict(
    "15a",
    abs(slopes["√N segments"] - 0.5) < 0.05,
    f"log-log slopes from N = 49 to 100: {in_words}; every block is best for models of {best_for} "
    f"blocks",
    condition="for √N segments; checkpointing every block is O(N), but in transformers it needs "
    "less than √N segments up to about 400 blocks; the logits are the same in both",
)

# %%
verdict(
    "15b",
    abs(more["to the end"] - 1 / 3) < 0.02,
    f"FLOPs of a 124m block, forward and backward: {more['to the end']:+.1%} without an early "
    f"stop, {more['early']:+.1%} with it",
    condition="for the blocks, as an upper bound: an early stop saves a fifth of the overhead, and "
    "embedding and logits are not recomputed",
)

# %% [markdown]
# How much slower is training? This cell measures a ratio on this machine, the minimum of three
# rounds, with an early stop. It may differ from the ratio of FLOPs, which counts only matmuls and
# attention: norms, activation functions and sums are recomputed, too.

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
print(f"forward and backward take {ratio:.2f}× the time, at {1 / ratio:.2f}× the speed")

# %%
speeds = {name: 1 / (1 + share) for name, share in more.items()}
verdict(
    "15c",
    all(0.7 <= speeds[name] <= 0.8 for name in ("to the end", "early")),
    f"if time is proportional to FLOPs, the blocks run at {speeds['to the end']:.2f}× the speed, "
    f"or {speeds['early']:.2f}× with an early stop (times: benchmarks/checkpointing.py)",
    condition="for the blocks, with and without an early stop; a whole step with logits and "
    "optimizer slows down less",
)

# %%
always = sum(every_block.at_peak[kind] for kind in ("parameters", "buffers", "optimizer_state"))
room = all_saved.peak_bytes - always
sequences = 8 * room / (every_block.peak_bytes - always)
held_less, adds_less = (plain_7b / after for after in (peaks_7b[1], each_adds))
verdict(
    "15d",
    held_less >= 3,
    f"124M in the memory of 8 sequences: {sequences:.1f} sequences ({sequences / 8:.1f}×); 7B, "
    f"activations per sequence: {held_less:.0f}× less, and {adds_less:.0f}× less added to the peak",
    condition="for large models, far beyond 4×, if weights, gradients and optimizer state fit; if "
    "logits are half of the memory, 2×",
)

# %%
small = Setting("34m", batch=2, seq_len=512)
two = [
    trace_without_optimizer(small, technique, backward=False)
    for technique in ("plain", "checkpointing")
]
pairs = {
    "34m": [saved_bytes(trace) for trace in two],
    "124m": [trace.at_peak["activations"] for trace in (all_saved, every_block)],
    "124m with backward temporaries": [activation_peak(t) for t in (all_saved, every_block)],
    "7B with backward temporaries": peaks_7b,
}
less = {name: 1 - after / before for name, (before, after) in pairs.items()}
verdict(
    "15e",
    0.5 <= less["124m with backward temporaries"] <= 0.7,
    "activations: " + "; ".join(f"{name} {share:.0%} less" for name, share in less.items()),
    condition="at the peak of a small model with a large vocabulary, where the logits remain; "
    "saved activations, and large models, shrink more",
)

# %% [markdown]
# ## Summary
#
# | schedule of n blocks | peak in bytes | recomputed |
# | --- | --- | --- |
# | no checkpointing | n · a | nothing |
# | every block | n · x + a | all, +33 % FLOPs at most |
# | s segments | s · x + (n / s) · a | the same |
#
# x is a block's input and a its activations, about 20 · x. Use **a checkpoint around every block**
# up to about forty blocks, unless the peak is at the logits. It costs up to a third more FLOPs in
# the blocks. Results are bitwise equal if all random states are restored.
#
# Tomorrow: which activations are worth saving?

# %% [markdown]
# ## The running bill
#
# The bill's step trains the 124M model on 8 × 640 tokens. Today every block is checkpointed, in
# addition to Days 3 and 4. The peak is now at the floor, which has no activations.

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
