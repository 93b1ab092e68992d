# %% [markdown]
# # Day 3: Batch and sequence
#
# **What do I turn down first?**
#
# After today you know what each of the knobs that everybody has takes off a training step, and what
# it leaves: the batch, the length, accumulation, freezing, LoRA, validation, the host.
#
# About 90 minutes, 60 of them for four exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 3.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# The step of the running bill: 124M weights, 8 sequences of 640 tokens, float32, AdamW. It takes
# 7.94 GiB, and your card has 6. Everybody says: *take a smaller batch*.
#
# ## Guess
#
# What is the peak with **half** the batch, 4 sequences? And with one sequence at a time, eight
# times, their gradients added up before the optimizer steps? (That is *gradient accumulation*, and
# each of the eight is a *micro-batch*.) Write numbers in place of the dots.

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
guess("3.1", half_gib=4, one_at_a_time_gib=1)  # a half and an eighth of eight
### END SOLUTION
### BEGIN STUB
# guess("3.1", half_gib=..., one_at_a_time_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# A dry run, as on Day 1: fake tensors, exact bytes. One at a time, two sequences are enough to
# measure: from the second on, each does what the last one did, its tokens aside.

# %%
fused, plain = combined("fused-adamw"), TECHNIQUES["plain"]
setting = Setting("124m", batch=8, seq_len=640)
in_turn = combined("fused-adamw+accumulation")  # AdamW in one operator is the quickest to measure
all_eight = dry_trace(setting, fused)
half = dry_trace(replace(setting, batch=4), fused)
one_at_a_time = dry_trace(replace(setting, batch=2), in_turn)
reveal("3.1", half_gib=half.peak_bytes, one_at_a_time_gib=one_at_a_time.peak_bytes)

# %%
three = {"8 at once": all_eight, "4 at once": half, "8, one at a time": one_at_a_time}
plot.breakdown(three, title=f"The batch of {setting}")

# %% [markdown]
# Half the batch saves half of what belongs to *tokens*: activations, and backward's copies of the
# logits. It saves nothing of what belongs to *weights*: they and Adam's moments stay, 1.4 GiB. Your
# card of 6 has room for it, and with one at a time for much more.
#
# One at a time has a band that the others lack at their peak: **gradients**. From the second
# micro-batch on, the sum of those before has to wait while activations pile up. That is what
# accumulation costs, 4 bytes a weight.

# %% [markdown]
# ## Where the straight line begins
#
# The tiny model, for real this time: its peak by batch and by length, and what is there. Its
# weights are few, so few tokens already outweigh them.


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
for axes, traces, places in zip(
    panels, (by_batch, by_length), (sizes, [4 * size for size in sizes]), strict=True
):
    bands = [[t.at_peak.get(kind, 0) / MIB for t in traces] for kind in kinds]
    labels, colours = [k.replace("_", " ") for k in kinds], [plot.COLOURS[k] for k in kinds]
    axes.stackplot(places, bands, labels=labels, colors=colours)
panels[1].plot(places, [t.peak_bytes / MIB for t in stored_scores], "k--", label="scores stored")
panels[0].set(
    xlabel="sequences of 8 tokens", ylabel="MiB at the peak", title="Batch: flat, then straight"
)
panels[1].set(xlabel="tokens in each of 2 sequences", title="Length: the same")
panels[1].legend(frameon=False, loc="upper left", fontsize=9)
for batch, trace in zip(sizes, by_batch, strict=True):
    gradients = format_bytes(trace.at_peak.get("gradients", 0))
    print(f"{batch:2} × 8 tokens: {format_bytes(trace.peak_bytes):>11} at the peak, ", end="")
    print(f"gradients {gradients:>10}")

# %% [markdown]
# With few tokens there is a **floor**: the peak lies at the end of backward, when all gradients are
# there, and a smaller batch saves nothing. With more tokens it lies where backward begins, and the
# line is straight. Length does the same as batch, unless attention stores its scores (dashed): they
# grow with its square.

# %% [markdown]
# ## The loop that everybody copies
#
# Accumulation saves the memory. Does it learn the same? Real text has sequences of many lengths:
# here, pieces of torch's own source, 5 to 64 bytes long. A micro-batch is padded to its longest,
# and padding is *masked*: a target of −100 counts nothing (`F.cross_entropy` leaves it out).

# %%
MASKED = -100
lengths = torch.randint(5, 65, (5000,), generator=torch.Generator().manual_seed(0))
pieces = source_bytes("256 KiB").long()[: lengths.sum()].split(lengths.tolist())


def micro_batch(pieces):
    """(tokens, targets), padded to the longest piece."""
    padded = nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=MASKED)
    return padded[:, :-1].clamp(min=0), padded[:, 1:]


def micro_batches(start, count, size=2):
    """Micro-batches of `size` pieces each, from piece `start` on."""
    places = range(start, start + count * size, size)
    return [micro_batch(pieces[place : place + size]) for place in places]


for tokens, targets in micro_batches(100, 4):
    print(f"{tuple(tokens.shape)}: {int((targets != MASKED).sum())} tokens that count")

# %% [markdown]
# And this is the loop, as it stands in a thousand repositories.


# %%
def copied(model, optimizer, micro_batches, size, max_norm):
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
# Its mistakes: the **mean of means** (a token counts more in a micro-batch where few others do);
# the last window, if it is shorter, never steps, and its gradient leaks into the next epoch; a
# micro-batch in which all is masked has a loss of 0/0, NaN; and the list keeps tensors. Right is
#
#     loss = sum of the losses of all the window's tokens / their number
#
# The number is known when the window ends. So send back *sums*, and divide the gradients once.

# %% [markdown]
# ### Exercise 3.1: accumulate the gradient of a batch
#
# About 20 minutes. A window is `size` micro-batches, the last may be shorter. For each window: the
# gradient of the mean loss over all its tokens that count, clipped once to `max_norm`, and one
# optimizer step. Return the mean loss of each window, as plain floats (0 where no token counts).
# Never more than one micro-batch's activations may be alive. `micro_batches` is any iterable,
# without a length: `itertools.islice(iterator, size)` takes the next ones. Take a window's step
# before you read on. A frozen weight has no gradient.


# %%
def train_epoch(model, optimizer, micro_batches, size, max_norm):
    """Train on all micro-batches; the mean loss of each window."""
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
# Both loops against the full batch of 8 pieces, in float64: how far are the gradients off? No clip,
# and SGD with a rate of 1, so that the step *is* the gradient.


# %%
def gradient(loop, parts, size):
    torch.manual_seed(0)
    model = GPT(PRESETS["tiny"], dtype=torch.float64)
    before = [weight.detach().clone() for weight in model.parameters()]
    loop(model, torch.optim.SGD(model.parameters(), lr=1.0), parts, size, 1e9)
    return torch.cat([(b - w).flatten() for b, w in zip(before, model.parameters(), strict=True)])


full = gradient(train_epoch, micro_batches(100, 1, size=8), 1)
mine, theirs = (gradient(loop, micro_batches(100, 4), 4) for loop in (train_epoch, copied))
off = [((g - full).norm() / full.norm()).item() for g in (mine, theirs)]
print(f"yours, difference below 1e-6: {off[0] < 1e-6}")
print(f"the copied loop is off by more than 10 % of the gradient: {off[1] > 0.1}")

# %% [markdown]
# ## Learn something
#
# Your loop trains the tiny model on 192 pieces, twice: a window has 2 micro-batches of 8. Then its
# bytes: the most that activations took at one moment of a window of 16 pieces, cut into 1, 4 and 8
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
axes.set(xlabel="window", ylabel="loss in nats", title="Loss on torch's own source")
print(f"the loss went down: {sum(losses[-10:]) < sum(losses[:10])}")
for parts in (1, 4, 8):
    most = format_bytes(most_activations(parts))
    print(f"16 pieces in {parts}: {most:>10} of activations at most")

# %% [markdown]
# ## In bfloat16, sums drift
#
# Autograd adds to `.grad` in the dtype of the weights, and bfloat16 has 8 significant bits: the
# next number after 128 is 129. Add 0.4 to 128 as often as you like.

# %%
total = torch.zeros((), dtype=torch.bfloat16)
for _ in range(2000):
    total += 0.4
print(f"0.4, added 2000 times in bfloat16: {total.item():g}, in place of 800")

# %% [markdown]
# The library's `memlab.accumulation.accumulate` keeps float32 sums, 4 bytes a weight, and rounds
# once. It is given the micro-batches, a function that returns the *sum* of a micro-batch's losses
# and its tokens (here a gradient and 1), and the weights. The mean of these gradients is 1, one in
# six is negative: roundings up and down mostly cancel.

# %%
torch.manual_seed(0)
weight = nn.Parameter(torch.zeros(20_000, dtype=torch.bfloat16))
micro_gradients = [(torch.randn(20_000) + 1).bfloat16() for _ in range(256)]
exact = sum(g.double() for g in micro_gradients)


def off(gradient) -> float:
    return ((gradient.double() - exact).norm() / exact.norm()).item()


for g in micro_gradients:
    (g * weight).sum().backward()
drift = off(weight.grad)
weight.grad = None
accumulate(micro_gradients, lambda g: ((g * weight).sum(), 1), [weight])
print(f"256 gradients, added in bfloat16: {drift:.1%} off")
print(f"added in float32, rounded once:   {off(256 * weight.grad.double()):.1%} off")

# %% [markdown]
# ## Freeze
#
# The next knob: train only some blocks. Take the tiny model, with 4 blocks, on 8 × 64 tokens, its
# embedding and last norm frozen. Compared with training all of it, how much of the **activations**
# goes if the upper half of the blocks is frozen? And if the lower half is?

# %%
### BEGIN SOLUTION
guess("3.2", upper_frozen_percent=50, lower_frozen_percent=50)  # half of the blocks, either way
### END SOLUTION
### BEGIN STUB
# guess("3.2", upper_frozen_percent=..., lower_frozen_percent=...)
### END STUB

# %% [markdown]
# A frozen weight has no gradient and no Adam state. For activations two questions decide, in each
# layer:
#
# - Does a gradient have to **pass**, because something below it learns?
# - Does it **learn** itself? To find the gradient of a matrix, backward needs the matrix's input;
#   to let a gradient pass, the matrix alone.
#
# If neither, it keeps nothing.

# %% [markdown]
# What a block keeps, in numbers for each token. As on Day 1, C is the width, KV · D that of key and
# value, H the heads, V the vocabulary.
#
# | in a block | it learns | it is passed |
# | --- | --- | --- |
# | each of the two norms | 2 · C + 1 | 1 |
# | attention: q, k, v, output, log-sum-exp | 2 · C + 2 · KV · D + H | the same |
# | the two sums | 2 · C | the same |
# | MLP | 4 · `intermediate_size` | 3 · `intermediate_size` |
#
# Above the blocks, frozen: the last norm keeps 1 (its 1/rms), the loss V log-probabilities. Below
# them nothing learns, so nothing has to pass the first norm that learns: its own 1/rms is not kept,
# nor is what comes in from below.

# %% [markdown]
# ### Exercise 3.2: freeze, and count what goes
#
# About 15 minutes. Only the blocks in the range `trained`, without gaps, learn; the others, the
# embedding, the last norm and the unembedding are frozen. Bytes in float32, with AdamW (its
# counters: 4 bytes for each of a block's 9 tensors). A block has 2·C² + 2·C·KV·D + 3·C·F + 2·C
# weights, with F for `intermediate_size`. The loss is one more number.


# %%
def trained_bytes(config, batch, seq_len, trained):
    """Bytes of "gradients", "optimizer_state" and "activations"."""
    ### BEGIN SOLUTION
    C, KV_D = config.hidden_size, config.kv_heads * config.head_dim
    shared = 2 * C + 2 * KV_D + config.heads + 2 * C
    learns = 2 * (2 * C + 1) + shared + 4 * config.intermediate_size
    passed = 2 + shared + 3 * config.intermediate_size
    above = config.layers - trained.stop
    # The last norm's 1/rms is one more, the first trained norm's is one less.
    per_token = len(trained) * learns + above * passed + config.vocab_size
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
# Held against the meter: a real step of the tiny model, 8 × 64 tokens, with its lower or its upper
# half frozen.


# %%
def frozen_but(trained: range):
    def change(model: GPT) -> None:
        model.requires_grad_(False)
        for place in trained:
            model.blocks[place].requires_grad_(True)

    return Plugs(change_model=change)


freezing = {"all of it learns": real_step(8, 64)}
for name, trained in (("lower half learns", range(2)), ("upper half learns", range(2, 4))):
    trace = freezing[name] = real_step(8, 64, frozen_but(trained))
    formula = trained_bytes(PRESETS["tiny"], 8, 64, trained)
    got = {kind: trace.at_end[kind] for kind in ("gradients", "optimizer_state")}
    got["activations"] = trace.at_peak["activations"]
    print(f"{name}: formula = meter, to the byte: {formula == got}; ", end="")
    print(f"activations {format_bytes(got['activations'])}")
whole, *halves = (trace.at_peak["activations"] for trace in freezing.values())
upper_frozen, lower_frozen = (100 - 100 * kept / whole for kept in halves)
reveal("3.2", upper_frozen_percent=upper_frozen, lower_frozen_percent=lower_frozen)
plot.breakdown(freezing, title="Which half is frozen decides: the tiny model, 8 × 64 tokens")

# %% [markdown]
# Gradients and Adam's state are the same in both cases. Activations are not: **freeze from below**,
# and what lies below the lowest trained layer keeps nothing. One trained layer at the bottom, and
# the gradient has to pass through all.

# %% [markdown]
# ## LoRA
#
# Train a *change* of a frozen matrix instead, and a change of low rank: two narrow matrices.
#
#     W x    becomes    W x + (alpha / r) · B A x        A: (r, in), B: (out, r)
#
# A (`down`) begins at random and B (`up`) at zero, so at first nothing is changed. `alpha` scales
# the change. It trains r · (in + out) weights in place of in · out: with 4096 × 4096 and rank 8,
# 65,536 in place of 16.8 million. Afterwards it is *merged*: W + (α/r) B A is one matrix again.

# %% [markdown]
# ### Exercise 3.3: a LoRA layer
#
# About 15 minutes. Two `nn.Parameter`s, `down` (rank, in) and `up` (out, rank), in the dtype and on
# the device of the frozen layer's weight. Freeze that layer, the one that is given, not a copy. x
# gets its gradient through both ways. `merge` returns an `nn.Linear`. The check looks at the bytes
# of a step, too: nothing in it may be as large as the frozen matrix.


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
# Put to work: the model that has learnt source as it is written is to learn it in CAPITALS. Each
# matrix of its blocks gets a LoRA layer of rank 4.


# %%
def replace_linear(model: GPT, kind: type, new) -> None:
    """Put `new(layer)` in the place of each layer of a kind in the blocks."""
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, layer in list(part.named_children()):
                if isinstance(layer, kind):
                    setattr(part, name, new(layer))


def held(model, optimizer):
    learning = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    return state_bytes(model, optimizer) | {"gradients": learning}


all_learn = held(model, optimizer)
model.zero_grad()  # freezing a weight does not free the gradient that it has
model.requires_grad_(False)
replace_linear(model, nn.Linear, lambda layer: LoRA(layer, rank=4, alpha=8))
trained = [weight for weight in model.parameters() if weight.requires_grad]
small_adam = torch.optim.AdamW(trained, lr=1e-2, foreach=False)


# %%
def in_capitals(tokens, targets):
    return [torch.where((t >= 97) & (t <= 122), t - 32, t) for t in (tokens, targets)]


capitals = [in_capitals(*part) for part in micro_batches(1000, 8, size=8)]
first, *_, last = (sum(train_epoch(model, small_adam, capitals, 2, 1.0)) for _ in range(3))
with_lora = held(model, small_adam)
for kind in with_lora:
    print(f"{kind:16}{format_bytes(all_learn[kind]):>11}, ", end="")
    print(f"with LoRA {format_bytes(with_lora[kind]):>11}")
print(f"the loss on capitals went down: {last < first}")
tokens, _ = capitals[0]
before_merging = model(tokens)
replace_linear(model, LoRA, LoRA.merge)
difference = (model(tokens) - before_merging).abs().max().item()
print(f"merged, it gives the same, difference below 1e-4: {difference < 1e-4}")

# %% [markdown]
# ## Validate
#
# Nothing is sent back, so nothing has to be kept. Yet autograd cannot know: it keeps what forward
# makes for as long as anything refers to the loss.
#
# ### Exercise 3.4: validate without a graph
#
# About 10 minutes. The mean loss over all tokens that count, of all batches, as a plain float (0
# where no token counts); without dropout, and with the model afterwards as it came: its gradients,
# and the mode of each module. `held_out` is any iterable. Memory: that of one batch, and no graph.


# %%
def validate(model, held_out):
    """The mean loss of the held-out tokens."""
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
# `torch.inference_mode()` goes further than `no_grad`: what is made in it can never enter a graph,
# so torch leaves out more of its book-keeping. Does that save bytes?
#
# One training step of 16 pieces, beside validations on as many at once: 2 batches of them, and 8,
# in both modes. Then the same with a graph that a list of losses keeps.


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
# The two modes hold the same bytes, for neither keeps a graph: inference mode saves time, a little
# for each operator, and its tensors cannot be trained on. So validation stays far below a training
# step, and more batches add no more than their own text, which is held here. With a list of losses,
# each batch adds what a forward pass keeps.

# %% [markdown]
# ## The host
#
# The other memory: the computer's own. Its size is often quoted as *RSS*, resident memory, and that
# counts two things. Pages of **mapped files** can be dropped at any time, for the file has them.
# **Anonymous** pages are the process's own, and no one else has them. What has to fit are those.
#
# A data set of 100 MiB: mapped, all of it read once, then loaded.


# %%
def anonymous() -> int:
    return anonymous_bytes() or 0  # where the system does not tell, zeros


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "tokens.bin")
    path.write_bytes(bytes(100 * MIB))
    before = anonymous()
    mapped = mapped_bytes(path)
    touched = int(mapped[::4096].sum())  # a byte of every page: all of it is read
    by_mapping = anonymous() - before
    in_memory = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    by_loading = anonymous() - before - by_mapping
    del mapped
measurable = anonymous_bytes() is not None
for how, taken in (("mapped and read", by_mapping), ("loaded", by_loading)):
    answer = taken > 50 * MIB if measurable else "not measured on this system"
    print(f"{how}, it takes more than 50 MiB of anonymous memory: {answer}")

# %% [markdown]
# **Workers** are processes that prepare batches ahead: each has `prefetch_factor` batches ready (2,
# if not set). A worker that is forked begins as a copy that shares all pages with its parent,
# until one of the two changes them. So a tensor is there once, however many workers read it. Beside
# it each worker has what it changes, and its batches.

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
# **Pinned** memory (`pin_memory=True`) is host memory that the system promises not to move, so that
# a GPU can fetch from it by itself. It can't be measured without one; torch's source says what it
# takes. A thread copies each batch of the workers into pinned memory. That allocator rounds every
# tensor up to the next **power of two**, and keeps what is freed for the next batch.


# %%
def pinned_bytes(count):
    """What torch's pinned allocator takes for a tensor (ATen/core/CachingHostAllocator.h)."""
    return 1 << (count - 1).bit_length()


BATCHES = {"text, 16 × 2048 in int64": 8 * 16 * 2048,
           "images, 32 × 3 × 224 × 224 in float32": 4 * 32 * 3 * 224 * 224}  # fmt: skip
for name, count in BATCHES.items():
    print(f"{name}: {format_bytes(count)}, pinned {format_bytes(pinned_bytes(count))}")

# %% [markdown]
# *workers · prefetch_factor + 1* batches wait at most, whether pinned or not. The pinned copies
# come on top of them: of a batch of text that is next to nothing, of one of images 32 MiB.

# %% [markdown]
# ## At scale: seven billion
#
# Llama 2 7B in bfloat16, 1 × 2048 tokens: all weights trained, and LoRA of rank 8 beside query and
# value, as in its paper.

# %%
seven = Setting("llama-2-7b", batch=1, seq_len=2048, dtype=torch.bfloat16)
query_value = partial(add_lora, rank=8, where=lambda name: name.endswith(("query", "value")))
at_scale = {
    "all weights": dry_trace_of_blocks(seven, fused),
    "LoRA": dry_trace_of_blocks(seven, replace(fused, change_model=query_value)),
}
plot.breakdown(at_scale, title="Llama 2 7B in bfloat16, AdamW, 1 × 2048 tokens")

# %% [markdown]
# The first bar peaks early in backward, with hardly a gradient there. When Adam steps, activations
# are gone and gradients are there: that floor is nearly as high, 50.2 GiB. Of gradients and state
# LoRA leaves a thousandth here. Of the tiny model's it left a sixth: its matrices are 64 wide, and
# 4 of 64 is no low rank.
#
# A batch of 16, one sequence at a time? In bfloat16 accumulation has a price: the float32 sums of
# the gradients.

# %%
all_weights, lora_peak = at_scale.values()
print(f"all weights: {format_bytes(all_weights.peak_bytes)} at the peak, ", end="")
print(f"{format_bytes(all_weights.live_bytes)} at the floor")
N = PRESETS["llama-2-7b"].parameters
trained_weights = 32 * 2 * added_weights(4096, 4096, rank=8)  # 32 blocks, query and value
one_sequence = max(trace.at_peak["activations"] for trace in at_scale.values())
print(f"activations of one sequence:   {format_bytes(one_sequence):>10}")
print(f"float32 sums, all {N:,}: {format_bytes(4 * N):>9}")
print(f"float32 sums, LoRA's {trained_weights:,}: {format_bytes(4 * trained_weights):>6}")
accumulated = lora_peak.peak_bytes + 4 * trained_weights
print(f"LoRA, one sequence at a time, whatever the batch: {format_bytes(accumulated)}")

# %% [markdown]
# For all weights the sums take as much as the activations of two sequences; LoRA has almost nothing
# to sum. So "a batch of 16 on a small card" has an honest answer: LoRA, one sequence at a time.
# What is left are the weights and most activations: a frozen matrix keeps no input, but the
# gradient passes through every layer. Those are Day 5's.
#
# ## On your GPU
#
# Where there is a GPU, this takes the first and the last of the question's three steps on it.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    on_gpu = replace(setting, device=gpu.type)
    for name, how in (("8 at once", plain), ("8, one at a time", TECHNIQUES["accumulation"])):
        training = build(on_gpu, how)
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
# From the same guides; "peak" is that of what tensors hold. (Rule 5's table was tried on Day 1.)
#
# The first: batch 1 and two steps of accumulation in place of batch 2, with the 25M model, and the
# larger step of the guess.

# %%
two = Setting("25m", batch=2, seq_len=512)
at_once, by_turns = (dry_trace(two, how).peak_bytes for how in (fused, in_turn))
from_eight = 1 - one_at_a_time.peak_bytes / all_eight.peak_bytes
verdict(
    "9a",
    abs(by_turns / at_once - 0.5) < 0.1,
    f"25m, 2 × 512 tokens: {1 - by_turns / at_once:.0%} less; 124m, 8 × 640 one at a time: "
    f"{from_eight:.0%} less",
    otherwise="what belongs to weights stays, and the sum of gradients has to wait beside the "
    "activations; the more sequences were at once, the more it saves",
)

# %%
sums, means = (((g - full).norm() / full.norm()).item() for g in (mine, theirs))
verdict(
    "9b",
    sums < 1e-6,
    f"against the gradient of the full batch, sums divided once by the window's tokens are off by "
    f"less than 1e-6: {sums < 1e-6}; the mean of means by more than 10 %: {means > 0.1}; 256 "
    f"gradients added in bfloat16 are {drift:.1%} off",
    condition="if losses are summed over the window's tokens and gradients added in float32, and "
    "no layer looks across the batch (BatchNorm)",
)

# %% [markdown]
# Deleting the step's variables at the end of the loop. Without that, the names keep the logits and
# the loss until the next step gives them new values.


# %%
on_a_gpu = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)  # the default there


def plain_loop(size, length, deleted, steps=2):
    """Train on micro-batches cut to this length; delete the step's variables here or there."""
    for tokens, targets in micro_batches(100, steps, size):
        on_a_gpu.zero_grad()
        logits = model(tokens[:, :length])
        kept = targets[:, :length].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), kept, ignore_index=MASKED)
        loss.backward()
        if deleted == "before the optimizer":
            del logits
        on_a_gpu.step()
        if deleted == "at the end":
            del logits, loss


# %%
places = ("nowhere", "at the end", "before the optimizer")
plain_loop(1, 8, "nowhere")  # makes the optimizer's state
many, few = (
    [peak(partial(plain_loop, size, length, place)) for place in places]
    for size, length in ((8, 32), (1, 8))
)
gained = many[0] - many[1]
verdict(
    "8c",
    gained > 0,
    f"8 × 32 tokens: {format_bytes(many[0])} at the peak, {gained:,} bytes less with loss and "
    f"logits deleted at the end of each step; 1 × 8 tokens, the peak in the optimizer: "
    f"{few[0] - few[1]:,} less, and {few[0] - few[2]:,} if the logits ({4 * 8 * 256:,} bytes) are "
    f"deleted before it",
    otherwise="the peak is in backward, and by then each name has a new value; backward frees the "
    "graph by itself. Where the optimizer makes the peak, delete the logits before "
    "optimizer.step(), or write forward and backward as a function",
)

# %% [markdown]
# Shorter sequences. The guide's peaks are the tokens of its spectra.

# %%
halves = [real_step(8, 32), freezing["all of it learns"]]
halves += [real_step(8, length, eager) for length in (32, 64)]
kept = [trace.at_peak["activations"] for trace in halves]
less = 1 - halves[0].peak_bytes / halves[1].peak_bytes
verdict(
    "10a",
    abs(kept[0] / kept[1] - 0.5) < 0.01,
    f"half the length: {kept[0] / kept[1]:.2f} of the activations, {kept[2] / kept[3]:.2f} where "
    f"scores are stored; the whole peak of the tiny model is {less:.0%} less, that of 124m with "
    f"half its tokens {1 - half.peak_bytes / all_eight.peak_bytes:.0%}",
    condition="for activations: by half with fused attention, by more where scores are stored; "
    "weights, gradients and Adam's state stay",
)

# %%
hundred = dry_trace(Setting("25m", batch=2, seq_len=100), fused)
of_tokens = hundred.at_peak["activations"] / hundred.peak_bytes
kept = {n: activation_bytes(PRESETS["25m"], 2, n) for n in (100, 90, 80)}
verdict(
    "10b",
    of_tokens > 0.05,
    f"of all activations {1 - kept[90] / kept[100]:.0%} less with 90 and "
    f"{1 - kept[80] / kept[100]:.0%} with 80, but they are {of_tokens:.1%} of the peak of the 25M "
    f"model with batch 2, which lies at the end of backward: the floor",
    otherwise="with so few tokens the peak is made of weights, their gradients and Adam's state; "
    "where activations make it, 20 % fewer tokens take 20 % of those",
)

# %%
wide = PRESETS["25m"]
narrow = replace(wide, hidden_size=448, intermediate_size=1204)  # an eighth less of both
fewer = activation_bytes(narrow, 2, 512) / activation_bytes(wide, 2, 512)
features = 4 * 2 * 512 * wide.hidden_size / activation_bytes(wide, 2, 512)
verdict(
    "10c",
    fewer < 1 and narrow.parameters < wide.parameters,
    f"an eighth less width: {1 - narrow.parameters / wide.parameters:.0%} fewer weights, "
    f"{1 - fewer:.0%} less activations (the logits stay); the input, a tensor of the model's "
    f"width, is {features:.1%} of the activations",
    condition="for the width, which every layer has; an input's features are one tensor of many",
)

# %% [markdown]
# Validation, checkpoints, the host, and the second GPU.

# %%
few, many = (validation_peaks["no_grad", count] for count in (2, 8))
leaking = validation_peaks["losses in a list", 8]
verdict(
    "11a",
    max(few, many) > training_peak,
    f"2 batches {format_bytes(few)}, 8 batches {format_bytes(many)}, a training step of the same "
    f"size {format_bytes(training_peak)}; with a graph kept by a list of losses "
    f"{format_bytes(leaking)} for 8",
    otherwise="without a graph validation stays below training's peak, however often and on "
    "however many batches (their text was held here); if fewer batches help, a graph is kept: mend "
    "that",
)

# %%
verdict(
    "11b",
    by_mapping < 50 * MIB < by_loading or not anonymous(),
    f"100 MiB of data take more than 50 MiB of anonymous memory when they are loaded: "
    f"{by_loading > 50 * MIB}; when they are mapped: {by_mapping > 50 * MIB}",
    condition="for the host's memory; the GPU holds a batch either way",
)

# %%
waiting = [workers * 2 + 1 for workers in (1, 4)]
images = BATCHES["images, 32 × 3 × 224 × 224 in float32"]
verdict(
    "11c",
    waiting[0] < waiting[1],
    f"a worker has a second copy of a data set that is one tensor: {by_worker > 100 * MIB}; by "
    f"formula {waiting[0]} batches wait with 1 worker, {waiting[1]} with 4, and a pinned copy of "
    f"32 images takes {pinned_bytes(images) / images:.2f} × their bytes",
    condition="for the host's memory: the batches that wait, their pinned copies (by torch's "
    "source, not measured), and what a worker changes; the GPU's memory does not change",
)

# %%
verdict(
    "11d",
    all_eight.peak_bytes < half.peak_bytes,
    f"8 sequences on two GPUs are 4 on each, {format_bytes(half.peak_bytes)}; on one they are 8, "
    f"{format_bytes(all_eight.peak_bytes)}",
    otherwise="each data-parallel GPU has a whole copy of the model: one in place of two holds no "
    "less, but for DistributedDataParallel's own copy of the gradients, and at the same effective "
    "batch it has twice the tokens",
)

# %%
with tempfile.TemporaryDirectory() as folder:
    states = model.state_dict(), optimizer.state_dict()
    saving = peak(partial(torch.save, states, Path(folder, "checkpoint.pt")))
    verdict(
        "11e",
        saving > training_peak,
        f"while it is saved, the tensors take {format_bytes(saving)}; a training step "
        f"{format_bytes(training_peak)}",
        otherwise="saving writes what is there and makes no tensor on the device; fewer "
        "checkpoints save disk",
    )

# %%
lower, upper = (freezing[f"{half} half learns"] for half in ("lower", "upper"))
everything = freezing["all of it learns"]
shares = {
    kind: [1 - trace.at_end[kind] / everything.at_end[kind] for trace in (lower, upper)]
    for kind in ("gradients", "optimizer_state")
}
shares["activations"] = [
    1 - trace.at_peak["activations"] / everything.at_peak["activations"] for trace in (lower, upper)
]
verdict(
    "12",
    min(shares["gradients"] + shares["optimizer_state"]) >= 0.5,
    "with the upper and with the lower half of the blocks frozen: "
    + "; ".join(f"{k.replace('_', ' ')} {u:.0%} and {d:.0%} less" for k, (u, d) in shares.items()),
    condition="and more: frozen from below, the activations there go as well",
)

# %% [markdown]
# ## What you can do now
#
# | turn down | saves | does not save |
# | --- | --- | --- |
# | batch, length | what belongs to tokens, in proportion | weights, gradients, Adam: the floor |
# | micro-batch (accumulation) | tokens of all but one | the floor; gradients join the peak |
# | frozen layers | their gradients, Adam; activations below the lowest trained | the rest |
# | LoRA | gradients and Adam, but for a thousandth (7B) | weights, most activations |
# | validation's size | nothing, without a graph | |
# | data in memory, workers | host memory | the GPU's |
#
# So: **first the micro-batch**. It costs time, and changes nothing that is learnt if you sum,
# divide once, add in float32, and no layer looks across the batch. Then validation without a graph,
# which costs nothing. At the floor, freeze or use LoRA; if all weights are to learn, lower the
# floor itself (Days 4, 8 and 9).

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. Today: one sequence at a time.

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
