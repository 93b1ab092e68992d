# %% [markdown]
# # Day 3: Batch and sequence
#
# **What should you reduce first when a step does not fit?**
#
# After today you know how much memory each common setting saves, and what it does not reduce: batch
# size, sequence length, gradient accumulation, frozen layers, LoRA, validation, host memory.
#
# About 90 minutes, 60 of them for four exercises. You need a laptop. A GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** the code that explains the gap. In each
# exercise, replace `raise NotImplementedError` with your own code; the cell below it checks your
# answer. If you are stuck, run `memlab hint 3.1` in a terminal. You can skip an exercise.

# %% [markdown]
# ## The question
#
# The step of the running bill (124M weights, 8 sequences of 640 tokens, float32, AdamW) needs 7.94
# GiB, and your GPU has 6 GiB. The usual advice is: *use a smaller batch*.
#
# ## Guess
#
# What is the peak with **half** the batch, 4 sequences? What is it with eight *micro-batches* of
# one sequence, whose gradients are added before the optimizer step? (This is *gradient
# accumulation*.) Replace the dots with your guesses.

# %%
import itertools
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memlab
from memlab import plot
from memlab.accumulation import accumulate
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.deep_models import dry_trace_of_blocks
from memlab.course.host_memory import anonymous_bytes
from memlab.course.ledger import activation_bytes, state_bytes
from memlab.data import mapped_bytes, source_bytes
from memlab.lora import add_lora, added_weights
from memlab.model import GPT, PRESETS
from memlab.trace import Trace
from memlab.train import TECHNIQUES, Plugs, Setting, Technique, build, combined, dry_trace, measured
from memlab.units import format_bytes

# %%
### BEGIN SOLUTION
guess("3.1", half_gib=4, one_at_a_time_gib=1)  # 8 / 2 and 8 / 8
### END SOLUTION
### BEGIN STUB
# guess("3.1", half_gib=..., one_at_a_time_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# Use a dry run, as on Day 1: fake tensors, exact bytes. For micro-batches of one sequence, measure
# only two of them, because memory is the same in every micro-batch after the first.

# %%
fused, plain = combined("fused-adamw"), TECHNIQUES["plain"]
setting = Setting("124m", batch=8, seq_len=640)
accumulation = combined("fused-adamw+accumulation")  # same peak as plain, faster to measure
all_eight = dry_trace(setting, fused)
half = dry_trace(replace(setting, batch=4), fused)
one_at_a_time = dry_trace(replace(setting, batch=2), accumulation)
reveal("3.1", half_gib=half.peak_bytes, one_at_a_time_gib=one_at_a_time.peak_bytes)

# %%
steps = {"8 at once": all_eight, "4 at once": half, "8, one at a time": one_at_a_time}
plot.breakdown(steps, title=f"Peak memory by batch: {setting}")

# %% [markdown]
# Half the batch halves everything that grows with *tokens*: activations and backward's temporaries.
# It does not reduce anything that grows with *weights*: weights and optimizer state stay at 1.4
# GiB. Both smaller versions fit in your 6 GiB.
#
# With micro-batches there is one more band at the peak: **gradients**. From the second micro-batch
# on, the accumulated gradients stay allocated while activations grow. This is the memory cost of
# accumulation: 4 bytes per weight.

# %% [markdown]
# ## Peak by batch and length
#
# Now measure real steps of the tiny model, for several batch sizes and lengths. It has so few
# weights that the activations of a few tokens need more memory than the weights.


# %%
def real_step(batch: int, seq_len: int, technique: Technique = plain) -> Trace:
    training = build(Setting("tiny", batch=batch, seq_len=seq_len), technique)
    training.step()
    return measured(training)


eager = TECHNIQUES["eager-attention"]
MIB = 2**20
sizes = (1, 2, 4, 8, 16)
by_batch = [real_step(batch, 8) for batch in sizes]
by_length = [real_step(2, 4 * size) for size in sizes]
stored_scores = [real_step(2, 4 * size, eager) for size in sizes]

# %%
kinds = ("parameters", "optimizer_state", "gradients", "activations", "backward_temporaries")
fig, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for axes, traces, xs in zip(
    panels, (by_batch, by_length), (sizes, [4 * size for size in sizes]), strict=True
):
    bands = [[t.at_peak.get(kind, 0) / MIB for t in traces] for kind in kinds]
    labels, colours = [k.replace("_", " ") for k in kinds], [plot.COLOURS[k] for k in kinds]
    axes.stackplot(xs, bands, labels=labels, colors=colours)
panels[1].plot(xs, [t.peak_bytes / MIB for t in stored_scores], "k--", label="scores stored")
panels[0].set(
    xlabel="sequences of 8 tokens", ylabel="MiB at the peak", title="Batch: flat, then linear"
)
panels[1].set(xlabel="tokens in each of 2 sequences", title="Length: flat, then linear")
panels[1].legend(frameon=False, loc="upper left", fontsize=9)
for batch, trace in zip(sizes, by_batch, strict=True):
    gradients = format_bytes(trace.at_peak.get("gradients", 0))
    print(f"{batch:2} × 8 tokens: {format_bytes(trace.peak_bytes):>11} at the peak, ", end="")
    print(f"gradients {gradients:>10}")

# %% [markdown]
# With few tokens the peak has a **floor**: it lies at the end of backward, when all gradients
# exist, so a smaller batch saves nothing. With more tokens the peak lies at the start of backward
# and grows linearly.
#
# Length has the same effect as batch size. But if attention stores its scores (dashed line), the
# peak grows with the square of the length.

# %% [markdown]
# ## The usual accumulation loop
#
# Accumulation saves memory. Does it compute the same gradient? Real sequences have different
# lengths. Here they are 5 to 64 bytes of torch's source code. Each micro-batch is padded to its
# longest sequence. Padding is *masked*: `F.cross_entropy` ignores targets of −100.

# %%
MASKED = -100
lengths = torch.randint(5, 65, (5000,), generator=torch.Generator().manual_seed(0))
sequences = source_bytes("256 KiB").long()[: lengths.sum()].split(lengths.tolist())


def micro_batch(parts):
    """Return (tokens, targets), padded to the longest sequence."""
    padded = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=MASKED)
    return padded[:, :-1].clamp(min=0), padded[:, 1:]


def micro_batches(start, count, size=2):
    """Return `count` micro-batches of `size` sequences each, from sequence `start` on."""
    starts = range(start, start + count * size, size)
    return [micro_batch(sequences[first : first + size]) for first in starts]


for tokens, targets in micro_batches(100, 4):
    print(f"{tuple(tokens.shape)}: {int((targets != MASKED).sum())} unmasked tokens")

# %% [markdown]
# This is the usual loop. You find it in many repositories.


# %%
def usual_loop(model, optimizer, micro_batches, size, max_norm):
    losses = []
    for i, (tokens, targets) in enumerate(micro_batches):
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / size
        loss.backward()
        losses.append(loss)
        if (i + 1) % size == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses


# %% [markdown]
# It has four bugs:
#
# - **Mean of means**: a token has more weight in a micro-batch with few unmasked tokens.
# - If fewer than `size` micro-batches are left at the end, they trigger no step. Their gradient
#   leaks into the next epoch.
# - If all tokens of a micro-batch are masked, the loss is 0/0, NaN.
# - The list of losses keeps tensors alive.

# %% [markdown]
# The micro-batches of one optimizer step are a *window*. The correct loss is the sum over all
# unmasked tokens of the window, divided by their count, which is known only at the end. So
# backpropagate *sums*, then divide the gradients once.

# %% [markdown]
# ### Exercise 3.1: accumulate the gradient of a batch
#
# About 20 minutes. A window has `size` micro-batches; the last may be shorter. For each window,
# compute the gradient of the mean loss over unmasked tokens, clip it once to `max_norm`, and take
# one optimizer step. Return each window's mean loss as a float (0 if all tokens are masked).
#
# - Keep the activations of one micro-batch at a time.
# - `micro_batches` is an iterable without a length; `itertools.islice(iterator, size)` returns the
#   next ones. Step before you read the next window.
# - Weights may have old gradients. Frozen weights must not get any.


# %%
def train_epoch(model, optimizer, micro_batches, size, max_norm):
    """Train on all micro-batches; return the mean loss of each window."""
    ### BEGIN SOLUTION
    remaining, losses = iter(micro_batches), []
    while window := list(itertools.islice(remaining, size)):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for tokens, targets in window:
            flat = model(tokens).flatten(0, 1), targets.flatten()
            loss = F.cross_entropy(*flat, ignore_index=MASKED, reduction="sum")
            loss.backward()
            total += loss.item()
            count += int((targets != MASKED).sum())
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad /= max(count, 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(total / max(count, 1))
    return losses
    ### END SOLUTION


# %%
train_epoch = exercise("3.1", train_epoch)

# %% [markdown]
# Compare both loops with the full batch of 8 sequences, in float64. Without clipping, and with SGD
# at a learning rate of 1, a step subtracts exactly the gradient.


# %%
def gradient(loop, parts, size):
    torch.manual_seed(0)
    model = GPT(PRESETS["tiny"], dtype=torch.float64)
    before = [weight.detach().clone() for weight in model.parameters()]
    loop(model, torch.optim.SGD(model.parameters(), lr=1.0), parts, size, 1e9)
    return torch.cat([(b - w).flatten() for b, w in zip(before, model.parameters(), strict=True)])


full = gradient(train_epoch, micro_batches(100, 1, size=8), 1)
mine, usual = (gradient(loop, micro_batches(100, 4), 4) for loop in (train_epoch, usual_loop))
errors = [((g - full).norm() / full.norm()).item() for g in (mine, usual)]
print(f"your loop: relative error below 1e-6: {errors[0] < 1e-6}")
print(f"usual loop: relative error above 10 %: {errors[1] > 0.1}")

# %% [markdown]
# ## Train with your loop
#
# Train the tiny model with your loop on 192 sequences for two epochs; a window has 2 micro-batches
# of 8. Then measure the peak of the activations for a window of 16 sequences, split into 1, 4 and 8
# micro-batches.

# %%
torch.manual_seed(0)
model = GPT(PRESETS["tiny"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
epoch = micro_batches(1000, 24, size=8)
losses = [loss for _ in range(2) for loss in train_epoch(model, optimizer, epoch, 2, 1.0)]


def most_activations(parts: int) -> int:
    window = micro_batches(100, parts, size=16 // parts)
    step = partial(train_epoch, model, optimizer, window, parts, 1.0)
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    return max(itertools.accumulate(e.bytes for e in trace.events if e.category == "activations"))


fig, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
axes.plot(losses)
axes.set(xlabel="window", ylabel="loss in nats", title="Loss on torch's source code")
print(f"the loss went down: {sum(losses[-10:]) < sum(losses[:10])}")
for parts in (1, 4, 8):
    most = format_bytes(most_activations(parts))
    print(f"{parts} × {16 // parts:2} sequences: activations peak at {most:>10}")

# %% [markdown]
# ## Accumulation dtype
#
# Autograd accumulates `.grad` in the dtype of the weights. bfloat16 has 8 significant bits, so the
# next value after 128 is 129. If you add 0.4 to 128, the sum stays 128.

# %%
total = torch.zeros((), dtype=torch.bfloat16)
for _ in range(2000):
    total += 0.4
print(f"0.4 added 2000 times in bfloat16: {total.item():g} instead of 800")

# %% [markdown]
# The library's `memlab.accumulation.accumulate` keeps float32 accumulators, 4 bytes per weight, and
# rounds once. Its arguments are the micro-batches, a function, and the weights. The function
# returns the *sum* of a micro-batch's losses, and its token count. In the next cell the loss is
# `g * weight`, with the gradient `g`, and the count is 1.
#
# These gradients vary around 1, so their rounding errors partly cancel.

# %%
torch.manual_seed(0)
weight = nn.Parameter(torch.zeros(20_000, dtype=torch.bfloat16))
micro_gradients = [(torch.randn(20_000) + 1).bfloat16() for _ in range(256)]
exact = sum(g.double() for g in micro_gradients)


def relative_error(gradient) -> float:
    return ((gradient.double() - exact).norm() / exact.norm()).item()


for g in micro_gradients:
    (g * weight).sum().backward()
drift = relative_error(weight.grad)
weight.grad = None
accumulate(micro_gradients, lambda g: ((g * weight).sum(), 1), [weight])
rounded_once = relative_error(256 * weight.grad.double())
print(f"256 gradients accumulated in bfloat16:  error {drift:.1%}")
print(f"accumulated in float32, rounded once:   error {rounded_once:.1%}")

# %% [markdown]
# ## Frozen layers
#
# You can also train only some blocks. Take the tiny model with 4 blocks on 8 × 64 tokens, with its
# embedding and last norm frozen. Freeze also the upper half of the blocks, near the loss. What
# percentage of the **activations** does this save, compared with training everything? And freezing
# the lower half instead?

# %%
### BEGIN SOLUTION
guess("3.2", upper_frozen_percent=50, lower_frozen_percent=50)  # half of the blocks, either way
### END SOLUTION
### BEGIN STUB
# guess("3.2", upper_frozen_percent=..., lower_frozen_percent=...)
### END STUB

# %% [markdown]
# A frozen weight has no gradient and no optimizer state. Which activations a layer saves depends on
# two questions:
#
# - Must a gradient **pass through** the layer, because an earlier layer is trained? Backward then
#   needs the layer's weight, but not its input.
# - Is the layer itself **trained**? The gradient of its weight needs its input.
#
# If both answers are no, the layer saves nothing.

# %% [markdown]
# This table lists the elements that a block saves per token, with Day 1's symbols: C is the hidden
# size, KV · D the width of key and of value, H the number of heads.
#
# | in a block | trained | frozen, gradient passes through |
# | --- | --- | --- |
# | each of the two norms | 2 · C + 1 | 1 |
# | attention: q, k, v, output, log-sum-exp | 2 · C + 2 · KV · D + H | the same |
# | the two residual sums | 2 · C | the same |
# | MLP | 4 · `intermediate_size` | 3 · `intermediate_size` |
#
# Above the blocks, the frozen last norm saves its 1/rms (1 element), and the loss V
# log-probabilities. The first trained norm does not save its 1/rms, and the embedding's output is
# not saved either, because no gradient passes below this norm.

# %% [markdown]
# ### Exercise 3.2: count the bytes of frozen layers
#
# About 15 minutes. Only the blocks in the range `trained` (without gaps) are trained. All other
# blocks, the embedding, the last norm and the unembedding are frozen. Everything is float32.
# AdamW's step counters need 4 bytes for each of a block's 9 tensors. A block has 2·C² + 2·C·KV·D +
# 3·C·F + 2·C weights, with F for `intermediate_size`. The loss is one more saved element.


# %%
def trained_bytes(config, batch, seq_len, trained):
    """Return the bytes of "gradients", "optimizer_state" and "activations"."""
    ### BEGIN SOLUTION
    C, KV_D = config.hidden_size, config.kv_heads * config.head_dim
    shared = 2 * C + 2 * KV_D + config.heads + 2 * C
    trained_block = 2 * (2 * C + 1) + shared + 4 * config.intermediate_size
    frozen_block = 2 + shared + 3 * config.intermediate_size
    above = config.layers - trained.stop
    # The last norm saves its 1/rms, the first trained norm does not: they cancel.
    per_token = len(trained) * trained_block + above * frozen_block + config.vocab_size
    weights = len(trained) * (2 * C * C + 2 * C * KV_D + 3 * C * config.intermediate_size + 2 * C)
    return {
        "gradients": 4 * weights,
        "optimizer_state": 8 * weights + 4 * 9 * len(trained),
        "activations": 4 * (batch * seq_len * per_token + 1),
    }
    ### END SOLUTION


# %%
trained_bytes = exercise("3.2", trained_bytes)

# %% [markdown]
# Compare your formula with the meter, in a real step of the tiny model on 8 × 64 tokens with half
# of the blocks frozen.


# %%
def train_only(trained: range):
    def change(model: GPT) -> None:
        model.requires_grad_(False)
        for index in trained:
            model.blocks[index].requires_grad_(True)

    return Plugs(change_model=change)


freezing = {"all trained": real_step(8, 64)}
for name, trained in (("lower half trained", range(2)), ("upper half trained", range(2, 4))):
    trace = freezing[name] = real_step(8, 64, train_only(trained))
    formula = trained_bytes(PRESETS["tiny"], 8, 64, trained)
    got = {kind: trace.at_end[kind] for kind in ("gradients", "optimizer_state")}
    got["activations"] = trace.at_peak["activations"]
    print(f"{name}: formula equals meter: {formula == got}; ", end="")
    print(f"activations {format_bytes(got['activations'])}")
everything, *halves = (trace.at_peak["activations"] for trace in freezing.values())
upper_frozen, lower_frozen = (100 - 100 * half / everything for half in halves)
reveal("3.2", upper_frozen_percent=upper_frozen, lower_frozen_percent=lower_frozen)
plot.breakdown(freezing, title="Tiny model, 8 × 64 tokens, half of the blocks frozen")

# %% [markdown]
# Gradients and optimizer state are the same in both cases, but activations are not. **Freeze the
# lower layers**: below the lowest trained layer, no activations are saved. If even one layer at the
# bottom is trained, the gradient has to pass through all layers above it.

# %% [markdown]
# ## LoRA
#
# LoRA (low-rank adaptation) freezes a matrix and trains a low-rank *update*, the product of two
# narrow matrices:
#
#     W x    becomes    W x + (alpha / r) · B A x        A: (r, in), B: (out, r)
#
# A (`down`) starts random and B (`up`) starts at zero, so the update starts at zero. `alpha` scales
# it. LoRA trains r · (in + out) weights instead of in · out: for 4096 × 4096 and rank 8, 65,536
# instead of 16.8 million. After training you *merge* W + (alpha / r) · B A into one matrix.

# %% [markdown]
# ### Exercise 3.3: a LoRA layer
#
# About 15 minutes. Create two `nn.Parameter`s, `down` (rank, in) and `up` (out, rank), with the
# dtype and device of the frozen layer's weight. Freeze the given layer itself, not a copy. The
# gradient of x flows through both paths. `merge` returns an `nn.Linear` with the same output. The
# check also measures a step: no tensor in it may be as large as the frozen matrix.


# %%
class LoRA(nn.Module):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float):
        super().__init__()
        ### BEGIN SOLUTION
        self.frozen = frozen.requires_grad_(False)
        self.scale = alpha / rank
        weight = frozen.weight
        self.down = nn.Parameter(torch.randn_like(weight[:1].expand(rank, -1)) / rank)
        self.up = nn.Parameter(weight.new_zeros(frozen.out_features, rank))
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        return self.frozen(x) + self.scale * (x @ self.down.T @ self.up.T)
        ### END SOLUTION

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        ### BEGIN SOLUTION
        self.frozen.weight += self.scale * (self.up @ self.down)
        return self.frozen
        ### END SOLUTION


# %%
LoRA = exercise("3.3", LoRA)

# %% [markdown]
# Use it: fine-tune the model, which was trained on source code, on the same text in CAPITALS. Each
# matrix of its blocks gets a LoRA layer of rank 4.


# %%
def replace_layers(model: GPT, layer_type: type, new) -> None:
    """Replace each layer of this type in the blocks with `new(layer)`."""
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, layer in list(part.named_children()):
                if isinstance(layer, layer_type):
                    setattr(part, name, new(layer))


def training_bytes(model, optimizer):
    gradients = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    return state_bytes(model, optimizer) | {"gradients": gradients}


all_weights = training_bytes(model, optimizer)
model.zero_grad()  # freezing a weight does not free its gradient
model.requires_grad_(False)
replace_layers(model, nn.Linear, lambda layer: LoRA(layer, rank=4, alpha=8))
trained = [weight for weight in model.parameters() if weight.requires_grad]
lora_optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)


# %%
def in_capitals(tokens, targets):
    return [torch.where((t >= 97) & (t <= 122), t - 32, t) for t in (tokens, targets)]


capitals = [in_capitals(*part) for part in micro_batches(1000, 8, size=8)]
first, *_, last = (sum(train_epoch(model, lora_optimizer, capitals, 2, 1.0)) for _ in range(3))
with_lora = training_bytes(model, lora_optimizer)
for kind in with_lora:
    print(f"{kind:16}{format_bytes(all_weights[kind]):>11}, ", end="")
    print(f"with LoRA {format_bytes(with_lora[kind]):>11}")
print(f"the loss on capitals went down: {last < first}")
tokens, _ = capitals[0]
before_merging = model(tokens)
replace_layers(model, LoRA, LoRA.merge)
difference = (model(tokens) - before_merging).abs().max().item()
print(f"merged model: outputs differ by less than 1e-4: {difference < 1e-4}")

# %% [markdown]
# ## Validation
#
# Validation has no backward, so it needs no saved activations. But autograd saves them anyway, and
# keeps them as long as the loss tensor exists.
#
# ### Exercise 3.4: validate without a graph
#
# About 10 minutes. Return the mean loss over the unmasked tokens of all batches, as a float (0 if
# all are masked). Disable dropout. Leave the model unchanged: its gradients, and the mode of each
# module. `held_out` is any iterable. Use the memory of one batch, and build no graph.


# %%
def validate(model, held_out):
    """Return the mean loss of the held-out tokens."""
    ### BEGIN SOLUTION
    modes = [(module, module.training) for module in model.modules()]
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for tokens, targets in held_out:
            flat = model(tokens).flatten(0, 1), targets.flatten()
            loss = F.cross_entropy(*flat, ignore_index=MASKED, reduction="sum")
            total += loss.item()
            count += int((targets != MASKED).sum())
    for module, training in modes:
        module.training = training
    return total / max(count, 1)
    ### END SOLUTION


# %%
validate = exercise("3.4", validate)

# %% [markdown]
# `torch.inference_mode()` is stricter than `no_grad`: its tensors can never enter a graph, so torch
# does less bookkeeping. Does it save memory?
#
# The next cell compares a training step on 16 sequences with validation on 2 and 8 batches of 16,
# in both modes. Then it validates with a list of losses, which keeps every graph alive.


# %%
@torch.inference_mode()
def in_inference_mode(model, held_out):
    return validate(model, held_out)


def with_graph(model, held_out):
    losses = [F.cross_entropy(model(t).flatten(0, 1), y.flatten()) for t, y in held_out]
    return sum(losses).item() / len(losses)


def peak(work) -> int:
    return memlab.measure(work, model=model, optimizer=optimizer).peak_bytes


# %%
model.requires_grad_(True)
training_peak = peak(partial(train_epoch, model, optimizer, micro_batches(100, 1, 16), 1, 1.0))
validation_peaks = {}
for name, work in {
    "no_grad": validate,
    "inference_mode": in_inference_mode,
    "losses in a list": with_graph,
}.items():
    for count in (2, 8):
        held_out = micro_batches(4000, count, 16)
        validation_peaks[name, count] = peak(partial(work, model, held_out))
        print(f"{name}, {count} batches: {format_bytes(validation_peaks[name, count])}")
print(f"a training step: {format_bytes(training_peak)}")

# %% [markdown]
# Both modes have the same peak, because neither keeps a graph. Inference mode only saves a little
# time per operator, and its tensors cannot be used in training. Validation stays far below a
# training step, and more batches add only their tokens, which this cell keeps in memory. With a
# list of losses, each batch adds the activations of a forward pass.

# %% [markdown]
# ## Host memory
#
# Host memory is often reported as *RSS*, resident set size. It counts two kinds of pages. Pages of
# **mapped files** can be dropped at any time, because the file still has the data. **Anonymous**
# pages exist only in memory, so they must fit in RAM.
#
# The next cell maps a data set of 100 MiB, reads all of it once, and then loads it.


# %%
def anonymous() -> int:
    return anonymous_bytes() or 0  # 0 if the system does not report it


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "tokens.bin")
    path.write_bytes(bytes(100 * MIB))
    before = anonymous()
    mapped = mapped_bytes(path)
    touched = int(mapped[::4096].sum())  # one byte of every page reads the whole file
    by_mapping = anonymous() - before
    in_memory = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    by_loading = anonymous() - before - by_mapping
    del mapped
measurable = anonymous_bytes() is not None
for name, size in (("mapped and read", by_mapping), ("loaded", by_loading)):
    answer = size > 50 * MIB if measurable else "not measured on this system"
    print(f"{name}: more than 50 MiB of anonymous memory: {answer}")

# %% [markdown]
# **Workers** are processes that load batches ahead of time, `prefetch_factor` batches each (2 by
# default). A forked worker shares all pages with its parent until one of them writes to a page. So
# a tensor exists once, even if many workers read it. Each worker adds only the pages that it
# changes, and its batches.

# %%
before = anonymous()
loader = iter(DataLoader(TensorDataset(in_memory.view(-1, 2**16)), batch_size=16, num_workers=1))
next(loader)
worker = sum(anonymous_bytes(process.pid) or 0 for process in loader._workers)
by_worker = anonymous() + worker - before
del loader
answer = by_worker > 100 * MIB if measurable else "not measured on this system"
print(f"one worker has a second copy of the data: {answer}")

# %% [markdown]
# **Pinned** memory (`pin_memory=True`) is host memory that stays at a fixed physical address, so
# that a GPU can copy from it directly. A thread copies each batch from the workers into pinned
# memory.
#
# You need a GPU to measure it, but torch's source gives the size: the pinned allocator rounds each
# tensor up to the next **power of two** and caches freed blocks for later batches.


# %%
def pinned_bytes(count):
    """Return the bytes of torch's pinned allocation (ATen/core/CachingHostAllocator.h)."""
    return 1 << (count - 1).bit_length()


BATCHES = {"text, 16 × 2048 in int64": 8 * 16 * 2048,
           "images, 32 × 3 × 224 × 224 in float32": 4 * 32 * 3 * 224 * 224}  # fmt: skip
for name, count in BATCHES.items():
    print(f"{name}: {format_bytes(count)}, pinned {format_bytes(pinned_bytes(count))}")

# %% [markdown]
# At most *workers · prefetch_factor + 1* batches are in flight, pinned or not: the batches loaded
# ahead and the batch in use. A pinned copy needs additional memory: 256 KiB for a batch of text, 32
# MiB for a batch of images.

# %% [markdown]
# ## At scale: 7 billion parameters
#
# Compare two ways to train Llama 2 7B in bfloat16 on 1 × 2048 tokens: all weights, or LoRA of rank
# 8 on query and value, as in the LoRA paper.

# %%
seven = Setting("llama-2-7b", batch=1, seq_len=2048, dtype=torch.bfloat16)
query_value = partial(add_lora, rank=8, where=lambda name: name.endswith(("query", "value")))
at_scale = {
    "all weights": dry_trace_of_blocks(seven, fused),
    "LoRA": dry_trace_of_blocks(seven, replace(fused, change_model=query_value)),
}
plot.breakdown(at_scale, title="Llama 2 7B in bfloat16, AdamW, 1 × 2048 tokens")

# %% [markdown]
# With all weights trained, the peak lies early in backward, when almost no gradients exist. The
# floor at AdamW's step, with gradients but no activations, is nearly as high: 50.2 GiB. LoRA
# reduces gradients and optimizer state by 1,600×. In the tiny model it was only 6×, because rank 4
# is not low for matrices of 32 × 32 or 32 × 96.
#
# How much memory does a batch of 16 need, one sequence at a time? In bfloat16, accumulation needs
# float32 accumulators for the gradients.

# %%
full_step, lora_step = at_scale.values()
print(f"all weights: {format_bytes(full_step.peak_bytes)} at the peak, ", end="")
print(f"{format_bytes(full_step.live_bytes)} at the floor")
N = PRESETS["llama-2-7b"].parameters
trained_weights = 32 * 2 * added_weights(4096, 4096, rank=8)  # 32 blocks, query and value
one_sequence = max(trace.at_peak["activations"] for trace in at_scale.values())
print(f"activations of one sequence: {format_bytes(one_sequence)}")
print(f"float32 accumulators of all {N:,} weights: {format_bytes(4 * N)}")
print(f"float32 accumulators of LoRA's {trained_weights:,}: {format_bytes(4 * trained_weights)}")
accumulated = lora_step.peak_bytes + 4 * trained_weights
print(f"peak with LoRA, one sequence at a time, for any batch: {format_bytes(accumulated)}")

# %% [markdown]
# With all weights trained, the accumulators need as much memory as the activations of two
# sequences. With LoRA they need 16 MiB. So to train a batch of 16 on a small GPU, use LoRA with
# one sequence at a time.
#
# LoRA keeps all weights and most activations: a frozen matrix does not save its input, but the
# gradient passes through every layer. Day 5 reduces the activations.

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs the step from the guess with the full batch and with one
# sequence at a time.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    on_gpu = replace(setting, device=gpu.type)
    for name, technique in (("8 at once", plain), ("one at a time", TECHNIQUES["accumulation"])):
        training = build(on_gpu, technique)
        training.step()
        trace = measured(training)
        print(f"{name}: {format_bytes(trace.peak_bytes)}, ", end="")
        print(f"reserved {format_bytes(trace.reserved_bytes or 0)}")
        del training
else:
    print(stored_on_a_gpu("day 3"))

# %% [markdown]
# ## Rules on trial
#
# The rules come from the guides under *Sources*. "Peak" is the peak of allocated memory.
#
# Rule 9a replaces batch 2 with batch 1 and two accumulation steps. Test it on the 25M model and on
# the step from the guess.

# %%
two = Setting("25m", batch=2, seq_len=512)
at_once, in_two_steps = (dry_trace(two, how).peak_bytes for how in (fused, accumulation))
from_eight = 1 - one_at_a_time.peak_bytes / all_eight.peak_bytes
verdict(
    "9a",
    abs(in_two_steps / at_once - 0.5) < 0.1,
    f"25m, 2 × 512 tokens: {1 - in_two_steps / at_once:.0%} less; 124m, 8 × 640 one at a time: "
    f"{from_eight:.0%} less",
    otherwise="weights and optimizer state stay, and accumulated gradients add to the peak; "
    "splitting a larger batch saves more",
)

# %%
sums, means = (((g - full).norm() / full.norm()).item() for g in (mine, usual))
verdict(
    "9b",
    sums < 1e-6,
    f"relative to the full batch's gradient: sums divided once, error below 1e-6: {sums < 1e-6}; "
    f"mean of means, error above 10 %: {means > 0.1}; accumulation in bfloat16: {drift:.1%}",
    condition="if losses are summed and divided once, gradients are accumulated in float32, and no "
    "layer mixes the batch (BatchNorm)",
)

# %% [markdown]
# Rule 8c deletes the step's variables at the end of the loop. Without that, the logits and the loss
# stay alive until the next step reassigns their names. Two other places are tried as well.


# %%
gpu_default = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def plain_loop(size, length, deleted, steps=2):
    """Train on micro-batches cut to `length`; `deleted` says when to delete the variables."""
    for tokens, targets in micro_batches(100, steps, size):
        gpu_default.zero_grad()
        logits = model(tokens[:, :length])
        kept = targets[:, :length].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), kept, ignore_index=MASKED)
        if deleted == "before backward":
            del logits
        loss.backward()
        if deleted == "before the optimizer":
            del logits
        gpu_default.step()
        if deleted == "at the end":
            del logits, loss


# %%
places = ("nowhere", "at the end", "before the optimizer", "before backward")
plain_loop(1, 8, "nowhere")  # allocates the optimizer state
many, few = (
    [peak(partial(plain_loop, size, length, place)) for place in places]
    for size, length in ((8, 32), (1, 8))
)
at_the_end, early = many[0] - many[1], many[0] - many[3]
found = (
    f"8 × 32 tokens, with the peak in backward: {format_bytes(many[0])}; {at_the_end:,} bytes less "
    f"with loss and logits deleted at the end, {early:,} with the logits deleted before backward; "
    f"1 × 8 tokens, with the peak in the optimizer: {few[0] - few[1]:,} less, or "
    f"{few[0] - few[2]:,} with the logits deleted before the optimizer"
)
verdict(
    "8c",
    early > at_the_end,
    found,
    condition="if the logits are deleted before backward, which does not need them, or are local "
    "to a function that returns the loss. At the end of the loop, deletion saves nothing",
)

# %% [markdown]
# The next rules shorten the sequences and reduce the model's width. (The guide's model reads mass
# spectra: a "peak" in rule 10b is one token.)

# %%
halves = [real_step(8, 32), freezing["all trained"]]
halves += [real_step(8, length, eager) for length in (32, 64)]
kept = [trace.at_peak["activations"] for trace in halves]
tiny, large = (1 - a.peak_bytes / b.peak_bytes for a, b in (halves[:2], (half, all_eight)))
verdict(
    "10a",
    abs(kept[0] / kept[1] - 0.5) < 0.01,
    f"half the length: {kept[0] / kept[1]:.2f}× the activations, {kept[2] / kept[3]:.2f}× with "
    f"stored scores; half the tokens: {tiny:.0%} lower peak for tiny, {large:.0%} for 124m",
    condition="for activations: half with fused attention, less than half with stored scores; "
    "weights, gradients and optimizer state stay",
)

# %%
hundred = dry_trace(Setting("25m", batch=2, seq_len=100), fused)
share = hundred.at_peak["activations"] / hundred.peak_bytes
kept = {n: activation_bytes(PRESETS["25m"], 2, n) for n in (100, 90, 80)}
less = [1 - kept[n] / kept[100] for n in (90, 80)]
verdict(
    "10b",
    share > 0.05,
    f"{less[0]:.0%} less activations with 90 tokens, {less[1]:.0%} with 80; but activations are "
    f"{share:.1%} of the 25M model's peak with batch 2, at the end of backward (the floor)",
    otherwise="with few tokens, weights, gradients and optimizer state make the peak; only above "
    "the floor do 20 % fewer tokens save 20 % of the activations",
)

# %%
wide = PRESETS["25m"]
narrow = replace(wide, hidden_size=448, intermediate_size=1204)  # an eighth less of both
fewer = activation_bytes(narrow, 2, 512) / activation_bytes(wide, 2, 512)
features = 4 * 2 * 512 * wide.hidden_size / activation_bytes(wide, 2, 512)
verdict(
    "10c",
    fewer < 1 and narrow.parameters < wide.parameters,
    f"1/8 less width: {1 - narrow.parameters / wide.parameters:.0%} fewer weights, "
    f"{1 - fewer:.0%} less activations (the logits stay); the model's input is {features:.1%} of "
    f"the activations",
    condition="for the width, which affects every layer; input features affect only one tensor",
)

# %% [markdown]
# The remaining rules are about validation, host memory, GPUs, checkpoints and frozen layers.

# %%
few, many = (validation_peaks["no_grad", count] for count in (2, 8))
leaking = validation_peaks["losses in a list", 8]
verdict(
    "11a",
    max(few, many) > training_peak,
    f"2 batches {format_bytes(few)}, 8 batches {format_bytes(many)}, a training step "
    f"{format_bytes(training_peak)}; 8 batches with a list of losses {format_bytes(leaking)}",
    otherwise="without a graph, validation stays below training's peak for any number of batches; "
    "if fewer batches help, your code keeps a graph: fix it",
)

# %%
verdict(
    "11b",
    by_mapping < 50 * MIB < by_loading or not anonymous(),
    f"100 MiB of data use more than 50 MiB of anonymous memory: loaded {by_loading > 50 * MIB}, "
    f"mapped {by_mapping > 50 * MIB}",
    condition="for host memory; the GPU holds one batch in both cases",
)

# %%
waiting = [workers * 2 + 1 for workers in (1, 4)]
images = BATCHES["images, 32 × 3 × 224 × 224 in float32"]
verdict(
    "11c",
    waiting[0] < waiting[1],
    f"a worker copies a one-tensor data set: {by_worker > 100 * MIB}; by formula, {waiting[0]} "
    f"batches in flight with 1 worker, {waiting[1]} with 4; a pinned copy of 32 images needs "
    f"{pinned_bytes(images) / images:.2f}× their bytes",
    condition="for host memory: batches in flight, pinned copies (from torch's source, not "
    "measured) and pages that a worker changes; GPU memory stays the same",
)

# %%
verdict(
    "11d",
    all_eight.peak_bytes < half.peak_bytes,
    f"8 sequences on two GPUs: {format_bytes(half.peak_bytes)} on each; on one GPU: "
    f"{format_bytes(all_eight.peak_bytes)}",
    otherwise="each data-parallel GPU has a full copy of the model; a single GPU saves only DDP's "
    "extra copy of the gradients, and at the same effective batch it has twice the tokens",
)

# %%
with tempfile.TemporaryDirectory() as folder:
    states = model.state_dict(), optimizer.state_dict()
    saving = peak(partial(torch.save, states, Path(folder, "checkpoint.pt")))
verdict(
    "11e",
    saving > training_peak,
    f"peak while saving {format_bytes(saving)}, in a training step {format_bytes(training_peak)}",
    otherwise="saving allocates no tensors on the device; fewer checkpoints save disk space",
)

# %%
lower, upper = (freezing[f"{half} half trained"] for half in ("lower", "upper"))
everything = freezing["all trained"]
shares = {
    kind: [1 - trace.at_end[kind] / everything.at_end[kind] for trace in (lower, upper)]
    for kind in ("gradients", "optimizer_state")
}
shares["activations"] = [
    1 - trace.at_peak["activations"] / everything.at_peak["activations"] for trace in (lower, upper)
]
saved = (f"{k.replace('_', ' ')} {u:.0%} and {d:.0%} less" for k, (u, d) in shares.items())
verdict(
    "12",
    min(shares["gradients"] + shares["optimizer_state"]) >= 0.5,
    f"upper and lower half of the blocks frozen: {'; '.join(saved)}",
    condition="and freezing the lower layers also saves their activations",
)

# %% [markdown]
# ## Summary
#
# | reduce | saves | does not save |
# | --- | --- | --- |
# | batch, length | activations and logits, in proportion | weights, gradients, Adam: the floor |
# | micro-batch (accumulation) | activations, in proportion | the floor; gradients add to the peak |
# | trained layers | gradients, Adam state; activations below the lowest trained layer | weights |
# | LoRA | gradients and Adam state, by 1,600× (7B) | weights, most activations |
# | validation batches | nothing, if no graph is kept | |
# | data in memory, workers | host memory | GPU memory |
#
# **Reduce the micro-batch first.** It costs time, but the result is the same if you sum the losses,
# divide once, accumulate in float32, and no layer mixes the batch. Then validate without a graph,
# which costs nothing. At the floor, freeze layers or use LoRA. To train all weights, lower the
# floor (Days 4, 8 and 9).

# %% [markdown]
# ## The running bill
#
# The bill's step trains the 124M model on 8 × 640 tokens. Today: one sequence at a time.

# %%
running_bill(3, today=one_at_a_time)

# %% [markdown]
# ## Sources
#
# - Hu et al. 2021: [LoRA: Low-Rank Adaptation of Large Language
#   Models](https://arxiv.org/abs/2106.09685)
# - transformers: [pull request 34191, on accumulated
#   losses](https://github.com/huggingface/transformers/issues/34191)
# - PyTorch: [torch.utils.data, memory pinning](https://docs.pytorch.org/docs/stable/data.html)
#
# The rules on trial are from:
#
# - maxvdboom: [DreaMS Memory Optimization
#   Strategies](https://github.com/maxvdboom/DreaMS/blob/757a414db1b8430e3ebed6665aa1f9d1b19eb376/MEMORY_OPTIMIZATION_GUIDE.md)
# - thINKblots: [Multi-Platform Memory
#   Optimization](https://github.com/thINKblots/gearhead/blob/d9730c481ff0cc18e9e2b2e6981495e233b9f7b1/MEMORY_OPTIMIZATIONS.md)
