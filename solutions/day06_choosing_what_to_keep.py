# %% [markdown]
# # Day 6: Choosing what to keep
#
# **Which activations are worth their bytes?**
#
# After today you can find the schedule that recomputes least within a memory budget, explain why
# choosing operators beats choosing whole blocks, and say what `torch.compile` saves.
#
# About 90 minutes, 62 of them for four exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before, you **guess**, **measure**, and **build** what explains the gap. In an exercise,
# replace `raise NotImplementedError` with your own lines. The cell below it checks your answer. If
# you are stuck, type `memlab hint 6.1` in a terminal. You can skip an exercise and still run the
# rest.

# %% [markdown]
# ## The question
#
# Yesterday you checkpointed every block, so every block ran twice. To recompute less, the guide
# under *Sources* says: *checkpoint every other layer*. This advice treats a block as one unit. But
# a block has dozens of operators. A matmul needs many operations and a norm almost none, yet their
# outputs can have the same size.

# %%
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab import checkpointing
from memlab.checkpointing import ATTENTION, MATMULS, checkpoint, checkpoint_blocks, selective
from memlab.checkpointing.operations import Operations
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.bill import SETTING
from memlab.course.deep_models import dry_trace_of_blocks
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS, Block, scaled_dot_product_attention
from memlab.planner.block_costs import chain_costs
from memlab.train import TECHNIQUES, Plugs, build, combined, measured, to_bfloat16
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# Checkpoint a block of the 124M model, but keep the outputs of its **matmuls** and of
# **attention**. Everything else (norms, rotary embeddings, SiLU, residual sums) is recomputed. What
# percentage of the block's activations is freed? What percentage of the forward pass's operations
# runs again? (An operation is a FLOP of a matmul or of attention, as on Day 5.)

# %%
### BEGIN SOLUTION
guess("6.1", freed_percent=20, rerun_percent=20)  # a guess: most bytes are outputs of matmuls
### END SOLUTION
### BEGIN STUB
# guess("6.1", freed_percent=..., rerun_percent=...)
### END STUB

# %% [markdown]
# ## Measure
#
# Measure one block on 8 × 640 tokens with fake tensors in three ways: plain, selective
# checkpointing with the library, and yesterday's `checkpoint`. The plot shows the bytes held after
# the forward pass, by the operator that created them, and the share of forward's operations that
# run again.


# %%
KINDS = {".mm": "matmuls", "scaled_dot": "attention"}


def held_and_run(call, block, x):
    """Return allocations held for backward, and operations of forward and of both passes."""
    outputs = []
    trace = memlab.measure(lambda: outputs.append(call(block, x)), model=block)
    with Operations() as counter:
        y = call(block, x).sum()
        counter.begin_section()
        y.backward()
    block.zero_grad()
    return [e for e in trace.alive() if e.phase != "before"], counter.sections[0], counter.total


def keep_everything(block, x):
    return block(x)


keep_expensive = selective(MATMULS | ATTENTION)
ways = {"everything kept": keep_everything, "matmuls, attention": keep_expensive,
        "checkpoint": checkpoint}  # fmt: skip
with memlab.dry_run():
    block, x = GPT(replace(PRESETS["124m"], layers=1)).blocks[0], torch.randn(8, 640, 768)
    found = {name: held_and_run(call, block, x.requires_grad_()) for name, call in ways.items()}

# %%
kinds = [*KINDS.values(), "other"]
fig, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
bytes_of, rerun_share = {}, {}
_, forward, plain_total = found["everything kept"]
for name, (events, _, operations) in found.items():
    by_kind = dict.fromkeys(kinds, 0)
    for e in events:
        by_kind[next((k for part, k in KINDS.items() if part in e.operator), "other")] += e.bytes
    bytes_of[name] = sum(by_kind.values())
    rerun_share[name] = (operations - plain_total) / forward
    left = 0
    for kind, color in zip(kinds, ("#4477aa", "#cc6677", "#ccbb88"), strict=True):
        axes.barh(name, by_kind[kind] / 2**20, left=left, color=color)
        left += by_kind[kind] / 2**20
    axes.text(left + 4, name, f"{rerun_share[name]:.0%} of forward rerun", va="center")
axes.legend(kinds, frameon=False, loc="lower right")
axes.set(xlabel="MiB held for backward, by operator", xlim=(0, 400))
axes.set_title("One block on 8 × 640 tokens")
axes.invert_yaxis()
selected = "matmuls, attention"
freed_share = 1 - bytes_of[selected] / bytes_of["everything kept"]
reveal("6.1", freed_percent=100 * freed_share, rerun_percent=100 * rerun_share[selected])

# %% [markdown]
# **Nearly half of the activations are freed, and no matmul runs again.** A plain block also keeps
# the outputs of cheap operators: norms, rotary embeddings, SiLU, residual sums. Only matmuls and
# attention have counted operations, and you keep their outputs. (Time still rises: cheap operators
# read and write memory once more.)

# %% [markdown]
# The matmuls' part *grows* from 95 to 140 MiB: q and k before rotation and attention's output
# projection are kept, too. In the two lower bars, the 15 MiB of "other" are the block's output.
# The block's input is also alive, but existed before and is not counted.
#
# The day has two parts: choosing among whole blocks, and choosing among operators.

# %% [markdown]
# ## Unequal blocks
#
# Some models have unequal blocks: in OpenELM (2024) the MLPs grow from block to block. Does it then
# matter which blocks you checkpoint? Today's example is the tiny model with nine blocks, with
# `intermediate_size` from 32 to 288. Its data is torch's source code.

# %%
torch.manual_seed(0)
config = PRESETS["tiny"]
model = GPT(config)
model.blocks = nn.ModuleList(
    Block(
        replace(config, intermediate_size=32 * n),
        model.rotary,
        scaled_dot_product_attention,
        torch.float32,
    )
    for n in range(1, 10)
)
model.initialize_()
tokens, targets = next(batches(source_bytes("64 KiB"), batch=8, seq_len=64, seed=0))
chain = chain_costs(model, tokens, targets)  # measures every block
for n in (0, 4, 8):
    stage = chain.stages[n]
    print(f"block {n}: saves {format_bytes(stage.saved_bytes)}, output ", end="")
    print(f"{format_bytes(stage.output_bytes)}, forward {stage.forward / 1e6:.0f} M operations")

# %% [markdown]
# Each block is a *stage* of the chain, and `chain.stages[n]` has the **costs** of block n:
#
# | attribute | meaning |
# | --- | --- |
# | `forward` | operations of its forward pass |
# | `output_bytes` | bytes of its output |
# | `saved_bytes` | bytes it keeps without checkpointing (output included, input excluded) |
# | `tail` | operations after the last tensor that backward needs (part of `forward`) |
#
# The rerun of a segment stops early: it skips the tail of the segment's *last* stage. The earlier
# stages must compute their outputs.
#
# A **schedule** is a tuple: an int is a plain stage, a tuple a checkpointed segment. In `(0, (1,
# 2))`, stage 0 is plain. Stages 1 and 2 keep only the output of stage 2, and run again in backward.

# %% [markdown]
# ### Exercise 6.1: the costs of a schedule
#
# About 15 minutes. For a schedule of plain stages and segments (not nested), return a tuple of
# three: the bytes **held** after the forward pass, the **most** bytes at one moment of backward,
# and the operations that run **again**. When backward reaches a part (plain stage or segment), the
# `saved_bytes` of all its stages and everything held for earlier parts are in memory. All later
# parts are freed. Leave out temporaries and gradients.


# %%
def schedule_costs(schedule, stages):
    """Return (held, most, again): bytes, bytes, operations."""
    ### BEGIN SOLUTION
    held = most = again = 0
    for part in schedule:
        segment = (part,) if isinstance(part, int) else part
        in_full = sum(stages[i].saved_bytes for i in segment)
        most = max(most, held + in_full)
        if isinstance(part, int):
            held += in_full
        else:
            held += stages[segment[-1]].output_bytes
            again += sum(stages[i].forward for i in segment) - stages[segment[-1]].tail
    return held, most, again
    ### END SOLUTION


# %%
schedule_costs = exercise("6.1", schedule_costs)

# %% [markdown]
# Compare six schedules with the measurement. The measured peak also has temporaries and gradients,
# which the library's `predicted_peak_bytes` includes. "Every other block" is the guide's advice.
# torch's `checkpoint_sequential` never checkpoints its last segment.


# %%
def metered(loss_of):
    """Return the trace of forward and backward, and their operations."""
    trace = memlab.measure(lambda: loss_of().backward(), model=model)
    model.zero_grad()
    with Operations() as counter:
        loss_of().backward()
    model.zero_grad()
    return trace, counter.total


def loss_of():
    return model(tokens, targets)


def by_torch():
    x = model.embedding(tokens)
    x = torch_checkpoint.checkpoint_sequential(model.blocks, 3, x, use_reentrant=False)
    return model.loss(model.norm(x), model.unembedding_weight, targets)


# %%
schedules = {
    "everything kept": checkpointing.plain_schedule(9),
    "every block": checkpointing.uniform_schedule(9, every=1),
    "every 2 blocks": checkpointing.uniform_schedule(9, every=2),
    "√9 segments": checkpointing.sqrt_schedule(9),
    "every other block": tuple((n,) if n % 2 else n for n in range(9)),
    "checkpoint_sequential": ((0, 1, 2), (3, 4, 5), 6, 7, 8),
}

# %%
points, exact = {}, []
ends = chain.first.saved_bytes + chain.last.saved_bytes  # the embedding, the norm and the loss
for name, schedule in schedules.items():
    with checkpoint_blocks(model, schedule):
        trace, operations = metered(loss_of)
    peak, after_forward = trace.peak_bytes, [e.bytes for e in trace.events if e.phase == "forward"]
    held, _, again = schedule_costs(schedule, chain.stages)
    exact += [
        held + ends == sum(after_forward),
        again == operations - chain.operations,
        peak == checkpointing.predicted_peak_bytes(schedule, chain),
    ]
    points[name] = peak, operations / chain.operations - 1
    print(f"{name:22}{format_bytes(held):>12} held, peak {format_bytes(peak):>9}, ", end="")
    print(f"{points[name][1]:6.1%} run again")
print(f"held, again and the predicted peak equal the measurement exactly: {all(exact)}")
trace, by_torch_operations = metered(by_torch)
same = trace.peak_bytes == peak and by_torch_operations == operations
print(f"torch's checkpoint_sequential has the peak and operations of the last row: {same}")

# %% [markdown]
# (The percentages are of all operations of the step: forward, backward and loss.) √9 segments
# *hold* the least, but their peak is nearly twice as high as with every block checkpointed: in
# backward, a segment of three wide blocks is in memory in full. Longer segments also rerun more,
# because fewer segments skip fewer tails.

# %% [markdown]
# ## The best schedule
#
# When a segment runs again, it can follow its own schedule, with nested segments. Which schedule
# is best for a budget? A schedule of stages i … j begins either
#
# - with stage i, **plain**, followed by a schedule of i+1 … j; or
# - with a **segment** i … k−1, with a schedule *inside*, followed by a schedule of k … j.
#
# So build the best schedules of long ranges from the schedules of shorter ranges: dynamic
# programming.

# %% [markdown]
# `chain` computes the peak of each choice ([costs.py](../memlab/checkpointing/costs.py) explains
# how). The chain's last stage, number `len(chain.stages)`, is the loss. It is always plain.
#
# | call | returns |
# | --- | --- |
# | `chain.if_last(j)` | the peak of stage j alone |
# | `chain.if_plain(i, j, rest)` | the peak with i plain, if i+1 … j have the peak `rest` |
# | `chain.if_segment(i, k, j, own, rest)` | the peak with the segment i … k−1, followed by k … j |
# | `chain.rerun(i, k)` | operations of rerunning i … k−1, without the tail of k−1 |
# | `chain.in_all(peak)` | the peak with weights and embedding, to compare with a budget |
#
# `own` is the peak of the schedule inside the segment, `rest` the peak of k … j.
#
# The best schedule of a range depends on the bytes left in the budget. So keep the **Pareto
# front**: drop each *dominated* choice. Another choice needs no more bytes than it, and
# reruns no more operations.


# %%
def pareto_front(choices):
    """Sort (bytes, again, how) by bytes; keep each that reruns less than all before it."""
    best = []
    for choice in sorted(choices, key=lambda choice: choice[:2]):
        if not best or choice[1] < best[-1][1]:
            best.append(choice)
    return best


print(pareto_front([(10, 5, "a"), (8, 7, "b"), (12, 5, "c"), (9, 9, "d")]))

# %% [markdown]
# ### Exercise 6.2: the best schedule within a budget
#
# About 20 minutes. `choices(i, j)` returns the Pareto front of the stages i … j, a list of (peak,
# again, schedule). Write the lines that create and fill the list `found`. The last two lines return
# the schedule of the whole chain that fits the budget and reruns least, or None.


# %%
def best_schedule(chain, budget_bytes):
    """Return the schedule that reruns least within the budget, or None if none fits."""

    @cache
    def choices(i, j):
        if i == j:  # plain: backward starts here at once, so a checkpoint would save nothing
            return [(chain.if_last(j), 0, (j,))]
        ### BEGIN SOLUTION
        found = []
        for peak, again, rest in choices(i + 1, j):
            found.append((chain.if_plain(i, j, peak), again, (i, *rest)))
        for k in range(i + 1, j + 1):
            pairs = ((own, rest) for own in choices(i, k - 1) for rest in choices(k, j))
            for own, rest in pairs:
                peak = chain.if_segment(i, k, j, own[0], rest[0])
                found.append((peak, chain.rerun(i, k) + own[1] + rest[1], (own[2], *rest[2])))
        ### END SOLUTION
        return pareto_front(found)

    fitting = [c for c in choices(0, len(chain.stages)) if chain.in_all(c[0]) <= budget_bytes]
    return fitting[-1][2][:-1] if fitting else None  # without the loss


# %%
best_schedule = exercise("6.2", best_schedule)

# %% [markdown]
# Try three budgets and measure each schedule. "optimal: True" means that no schedule in the
# library's `tradeoffs`, the Pareto front of the whole chain, fits the budget and reruns less.

# %%
front = checkpointing.tradeoffs(chain)
for mib in (5, 6, 9):
    budget = int(mib * 2**20)
    schedule = best_schedule(chain, budget)
    with checkpoint_blocks(model, schedule):
        trace, operations = metered(loss_of)
    peak, again = trace.peak_bytes, operations - chain.operations
    same = again == min(t.recomputed for t in front if t.peak_bytes <= budget)
    print(f"{mib:4} MiB: {again / chain.operations:5.1%} rerun, ", end="")
    print(f"peak {format_bytes(peak)}, in budget: {peak <= budget}, optimal: {same}")
    print(f"          {schedule}")


# %%
def picture(points, lines, title):
    """Plot the share of operations rerun against the peak: named points and named lines."""
    _, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for (name, line), style in zip(lines.items(), ("k-", "r.--"), strict=False):
        axes.plot([x / 2**20 for x, _ in line], [100 * y for _, y in line], style, label=name)
    for name, (peak, share) in points.items():
        axes.plot(peak / 2**20, 100 * share, "o", color="tab:blue")
        offset = (-64, -4) if name == "every block" else (6, 5)
        axes.annotate(name, (peak / 2**20, 100 * share), offset, textcoords="offset points")
    axes.set(xlabel="MiB at the peak", ylabel="% of operations run again", title=title)
    axes.set(xlim=(3, 21.5), ylim=(-2, 42))
    axes.legend(frameon=False, loc="upper right")


best_of_blocks = {t.peak_bytes: t.recomputed / chain.operations for t in front}.items()
picture(points, {"best choice of whole blocks": best_of_blocks}, "Nine unequal blocks")

# %% [markdown]
# No schedule of whole blocks is below the line.
#
# - "Every other block" is on it. `checkpoint_sequential` is two percentage points above it.
# - Segments of 2 or 3 blocks (√9) are far above it: by 8.5 and 14.6 percentage points.
# - Left of "every block", all schedules have segments of several blocks, and most have nested ones.
#
# From 6 MiB on, the line is nearly straight: a byte spent on any block spares about the same number
# of operations. So it matters little which blocks you checkpoint. Look inside a block.

# %% [markdown]
# ## Inside a block
#
# Yesterday's `checkpoint` runs a block twice: the second run computes the tensors that backward
# needs. If you store the outputs of the expensive operators, only the cheap operators run again.
#
# A `TorchDispatchMode` intercepts every operator that runs inside `with`, below autograd: torch
# calls `__torch_dispatch__` with the operator as `func`, such as `torch.ops.aten.mm.default`.
# `func(*args, **(kwargs or {}))` runs it. Whatever `__torch_dispatch__` returns becomes the
# operator's result. Both runs of the block call the same operators in the same order.


# %%
def keeping(chosen, block, x):
    mode = Choosing(chosen)

    def run(x):
        with mode:
            return block(x)

    y = checkpoint(run, x)  # yesterday's: drops what `run` saves, and runs it again in backward
    mode.is_second = True
    return y


# %% [markdown]
# ### Exercise 6.3: keep the outputs of chosen operators
#
# About 15 minutes. In the first run, append the output of each *chosen* operator (in `self.chosen`)
# to `self.kept`. In the second run (`self.is_second`), remove and return this output, without
# running the operator. An output may be a tuple (attention returns two tensors):
# `torch.utils._pytree.tree_map_only(torch.Tensor, f, output)` applies f to each tensor. Autograd
# attaches its graph to the tensor that you return, so store a *detached* one.


# %%
class Choosing(TorchDispatchMode):
    def __init__(self, chosen):
        super().__init__()
        self.chosen, self.kept, self.is_second = chosen, [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ### BEGIN SOLUTION memlab.reference.selective_checkpointing.Choosing.__torch_dispatch__
        if self.is_second and func in self.chosen:
            return self.kept.pop(0)
        made = func(*args, **(kwargs or {}))
        if func in self.chosen:
            detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)
            self.kept.append(detached)
        return made
        ### END SOLUTION


# %%
Choosing = exercise("6.3", Choosing)

# %% [markdown]
# Compare your version with torch's and the library's, on the last of the nine blocks with 8 × 64
# tokens.

# %%
from functorch.compile import aot_module, make_boxed_func, min_cut_rematerialization_partition
from torch._functorch import config as compiler

EXPENSIVE = MATMULS | ATTENTION


def torch_selective(block, x):
    contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, list(EXPENSIVE))
    return torch_checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def print_way(name, call):
    events, _, operations = held_and_run(call, last_block, x)
    again = (operations - last_stage.forward - last_stage.backward) / last_stage.forward
    held = format_bytes(sum(e.bytes for e in events))
    print(f"{name:34}{held:>12} held, {again:4.0%} of forward rerun")


last_block, last_stage = model.blocks[8], chain.stages[8]
x = torch.randn(8, 64, 32, requires_grad=True)
print_way("everything kept", keep_everything)
print_way("only the output kept: checkpoint", checkpoint)
print_way("matmuls and attention: yours", partial(keeping, EXPENSIVE))
print_way("  torch's", torch_selective)
print_way("  the library's", selective(EXPENSIVE))

# %% [markdown]
# The library's version holds less than yours and torch's: it records the first run, then drops
# outputs that backward does not need. (The last matmul, `down`, is chosen, but backward needs its
# inputs, not its output.) `selective` also accepts numbers of operators, in running order:
# `selective({8, 42})` keeps the outputs of the first matmul and of attention.

# %% [markdown]
# ## What torch.compile saves instead
#
# torch.compile traces forward and backward into one graph, and cuts it in two. Tensors that cross
# the cut are saved. torch.compile looks for the **minimum cut**: the fewest bytes for which
# backward reruns only cheap operators that fuse into backward's kernels (no matmuls, reductions or
# long chains).
#
# `activation_memory_budget` moves the cut: 1 is the minimum cut, 0 saves only the inputs. Between
# 0 and 1, a solver chooses what to save. Here nothing is compiled: both graphs run unchanged.


# %%
def as_it_is(graph, _):
    return make_boxed_func(graph.forward)


def cut(budget, block):
    """Return the block as two graphs, cut by torch's partitioner."""
    partition = min_cut_rematerialization_partition
    with compiler.patch(activation_memory_budget=budget):
        graphs = aot_module(block, as_it_is, partition_fn=partition)
        graphs(x).sum().backward()  # the first call creates the graphs
        block.zero_grad()
    return graphs


for budget in (1.0, 0.5, 0.0):
    graphs = cut(budget, last_block)
    print_way(f"torch.compile, budget {budget}", lambda block, x, graphs=graphs: graphs(x))

# %% [markdown]
# At 1, the cut keeps more than matmuls and attention, because recomputation must cost no *time*.
# 0.5 limits the bytes to halfway between those at 0 and at 1, about 1.1 MiB. To stay below this
# limit, the solver also drops outputs of matmuls, so 38 % of forward runs again.
#
# Which outputs should you keep? Each output needs bytes and spares operations, and the budget
# limits the bytes: this is the **knapsack** problem.

# %% [markdown]
# ### Exercise 6.4: what to keep within a budget
#
# About 12 minutes. Each operator `o` has a number `o.number`, needs `o.bytes` if you keep its
# output, and reruns `o.operations` if you do not. Return the set of numbers to keep: at most
# `budget_bytes` in total, with the fewest operations rerun. Don't change the list `operators`. You
# can use `pareto_front`. Trying all sets is too slow: for the nine blocks there are 2⁶³.


# %%
def best_operators(operators, budget_bytes):
    """Return the set of numbers of the operators to keep."""
    ### BEGIN SOLUTION
    choices = [(0, sum(o.operations for o in operators), frozenset())]
    for o in operators:
        with_it = [
            (taken + o.bytes, again - o.operations, numbers | {o.number})
            for taken, again, numbers in choices
            if taken + o.bytes <= budget_bytes
        ]
        choices = pareto_front(choices + with_it)
    return choices[-1][2]
    ### END SOLUTION


# %%
best_operators = exercise("6.4", best_operators)

# %% [markdown]
# Apply it to the nine blocks at once. `operators_of` lists the operators that a checkpointed block
# reruns and could keep instead. Measure five budgets, from nothing to all matmuls and attention.


# %%
@contextmanager
def each_block(call_of):
    """Run block n through call_of(n)(block, x) inside `with`."""
    for n, block in enumerate(model.blocks):
        block.forward = partial(call_of(n), block.forward)
    yield
    for block in model.blocks:
        del block.forward


operators = [
    o._replace(number=1000 * n + o.number)  # unique across blocks
    for n, block in enumerate(model.blocks)
    for o in checkpointing.operators_of(block, x)
    if o.operations
]


def kept_of_each(numbers):
    return lambda n: selective({number - 1000 * n for number in numbers if number // 1000 == n})


# %%
by_operator = []
all_of_them = sum(o.bytes for o in operators)
for part in (0, 0.1, 1 / 3, 2 / 3, 1):
    numbers = best_operators(operators, int(part * all_of_them))
    with each_block(kept_of_each(numbers)):
        trace, operations = metered(loss_of)
    by_operator.append((trace.peak_bytes, operations / chain.operations - 1))
    taken = f"{len(numbers):2} of {len(operators)} operators kept"
    print(f"{taken}: peak {format_bytes(trace.peak_bytes):>9}, {by_operator[-1][1]:5.1%} run again")
points["matmuls and attention"] = by_operator[-1]

# %%
lines = {"best choice of whole blocks": best_of_blocks, "best choice of operators": by_operator}
picture(points, lines, "Nine unequal blocks: choosing blocks, choosing operators")

# %% [markdown]
# The red line starts at "every block" and falls to **zero** rerun operations, at 36 % less memory
# than with everything kept. Keeping more bytes would save only time, no counted operations.
#
# From about 5.7 MiB on, choosing operators beats choosing blocks. Between 5.3 and 5.7 MiB, the
# black line is lower, but by less than one percentage point.

# %% [markdown]
# ## The losses are identical
#
# Train six AdamW steps from the same weights in three ways: plain, the best schedule within 6 MiB,
# and selected operators.


# %%
def trained(around):
    """Return the losses of six steps, and restore the weights."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    text, losses = batches(source_bytes("64 KiB"), batch=8, seq_len=64, seed=1), []
    with around:
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(*next(text))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.load_state_dict(start)
    model.zero_grad()
    return losses


plain_losses = trained(each_block(lambda n: lambda block, x: block(x)))
by_schedule = trained(checkpoint_blocks(model, best_schedule(chain, 6 * 2**20)))
by_choice = trained(each_block(lambda n: partial(keeping, EXPENSIVE)))
print(f"the loss went down: {plain_losses[-1] < plain_losses[0]}")
print(f"the same losses, to the bit: {plain_losses == by_schedule == by_choice}")

# %% [markdown]
# ## At scale: seven billion
#
# Measure one block of Llama 2 7B on 1 × 4096 tokens in bfloat16, with fake tensors, and multiply by
# 32. Add two ways to the three from above: keep only attention's outputs, or keep the best
# operators for 4 GiB, on top of the 1 GiB of block outputs.

# %%
seven_ways = ways | {"attention only": selective(ATTENTION)}
seven, L = {}, PRESETS["llama-2-7b"].layers
with memlab.dry_run():
    small = replace(PRESETS["llama-2-7b"], layers=1)
    big_block = GPT(small, dtype=torch.bfloat16).blocks[0]
    x = torch.randn(1, 4096, 4096, dtype=torch.bfloat16, requires_grad=True)
    choice = best_operators(checkpointing.operators_of(big_block, x), 4 * 2**30 // L)
    for name, call in (seven_ways | {"4 GiB of operators": selective(choice)}).items():
        events, _, operations = held_and_run(call, big_block, x)
        seven[name] = L * sum(e.bytes for e in events), operations
for name, (held, operations) in seven.items():
    again = operations / seven["everything kept"][1] - 1
    print(f"{name:20}{format_bytes(held):>11} held in {L} blocks, {again:5.1%} of operations rerun")

# %% [markdown]
# The last line holds 1 GiB of block outputs and 3.70 GiB of chosen outputs. No other matmul fits
# into the remaining 0.30 GiB.
#
# bfloat16 weights need 12.6 GiB. If they are frozen (LoRA, Day 3), a 24 GiB GPU has room for the
# checkpoints and a few GiB more. Use these GiB to recompute less, not only for a larger batch.
# Gradients of all weights would need another 12.6 GiB, which does not fit.

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs Day 1's training step on it: with every block checkpointed, then
# also with the outputs of attention and matmuls kept.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    on_gpu = replace(SETTING, device=gpu.type)

    def keep_matmuls(model):
        for block in model.blocks:
            block.forward = partial(selective(EXPENSIVE), block.forward)

    selectively = Plugs(change_model=keep_matmuls)
    for name, how in (("every block", TECHNIQUES["checkpointing"]), ("selective", selectively)):
        training = build(on_gpu, how)
        training.step()
        trace = measured(training)
        print(f"{name}: {format_bytes(trace.peak_bytes)}, ", end="")
        print(f"reserved {format_bytes(trace.reserved_bytes or 0)}")
        del training
else:
    print(stored_on_a_gpu("day 6"))

# %% [markdown]
# ## Rules on trial
#
# The guide's table gives the memory saved and the compute added for checkpointing 0, 50 and 100 %
# of the layers. Test it on the bill's model, 124M on 8 × 640 tokens in float32. Its twelve blocks
# are equal, so measure one.

# %%
config = PRESETS["124m"]
with memlab.dry_run():
    one = GPT(replace(config, layers=1))
    batch = torch.zeros(8, 640, dtype=torch.long)
    measured_one = chain_costs(one, batch, batch)
[stage] = measured_one.stages
more_weights = (config.layers - 1) * stage.gradient_bytes  # a gradient has its weight's size
twelve = replace(
    measured_one,
    stages=12 * (stage,),
    held_bytes=measured_one.held_bytes + more_weights + 8 * config.parameters,  # and Adam's moments
)

# %%
no_blocks = checkpointing.plain_schedule(12)
half = tuple((n,) if n % 2 else n for n in range(12))
all_blocks = checkpointing.uniform_schedule(12, every=1)


def saved(schedule):
    """Return shares saved: of the blocks' activations, all activations, the peak with AdamW."""
    ends = twelve.first.saved_bytes + twelve.last.saved_bytes
    of_blocks, kept = (schedule_costs(s, twelve.stages)[0] for s in (no_blocks, schedule))
    peaks = [checkpointing.predicted_peak_bytes(s, twelve) for s in (no_blocks, schedule)]
    return 1 - kept / of_blocks, 1 - (kept + ends) / (of_blocks + ends), 1 - peaks[1] / peaks[0]


def in_words(shares):
    words = "saves {:.0%} of the blocks' activations, {:.0%} of all, {:.0%} of the peak"
    return words.format(*shares)


# %%
verdict(
    "16a",
    0.4 <= saved(half)[0] <= 0.5,
    in_words(saved(half)),
    condition="for the blocks' activations; weights, optimizer state and logits do not shrink",
)

# %%
verdict(
    "16b",
    0.6 <= saved(all_blocks)[1] <= 0.8,
    in_words(saved(all_blocks)),
    condition="for all activations, logits included; the blocks' activations shrink more",
)

# %%
costs = [checkpointing.recomputed(s, twelve) / twelve.operations for s in (half, all_blocks)]
of_block = stage.forward + stage.backward
early = [share * (stage.forward - stage.tail) / of_block for share in (0.5, 1)]
to_the_end = [share * stage.forward / of_block for share in (0.5, 1)]
reruns = (
    f"rerunning half or all blocks in full adds {to_the_end[0]:.0%} or {to_the_end[1]:.0%} to the "
    f"blocks' operations; with early stop {early[0]:.0%} or {early[1]:.0%}, which is "
    f"{costs[0]:.0%} or {costs[1]:.0%} of the step's operations"
)

# %%
verdict(
    "16c",
    0.15 <= to_the_end[0] <= 0.2 and 0.3 <= to_the_end[1] <= 0.4,
    reruns,
    condition="if blocks rerun in full, and only the blocks' operations count; an early stop skips "
    "each block's last matmul, and the logits never rerun",
)

# %%
by_layer = f"{saved(half)[0]:.0%} of the blocks' activations for {costs[0]:.0%} more operations"
by_operators = f"{freed_share:.0%} for {rerun_share[selected]:.0%} more"
verdict(
    "16d",
    costs[0] <= rerun_share[selected] or freed_share < 0.4,
    f"checkpointing every other block saves {by_layer}; keeping matmuls and attention saves "
    f"{by_operators}",
    otherwise="choose operators, not layers: this saves nearly as much and reruns no matmul",
)

# %% [markdown]
# ## What you can do now
#
# | activations to free | technique | 124M model's blocks |
# | --- | --- | --- |
# | less than half | keep matmuls and attention | −45 %, no matmul rerun |
# | more | knapsack: fill the budget with operators | between the rows above and below |
# | nearly all | checkpoint every block | −95 %, four fifths of forward rerun |
# | even more | a schedule with nested segments | the last few percent, expensive |
#
# Before you choose, count the bytes kept after forward, the operations rerun and the **peak**,
# which may occur in backward. Activations that do not raise the peak are free.

# %% [markdown]
# ## The running bill
#
# One training step of the 124M model on 8 × 640 tokens. Yesterday's peak is at the end of backward,
# where the only activation left is the loss (4 B). You can keep activations for free, as long as no
# other moment exceeds this peak. Attention's outputs fit, and spare the most operations per byte.
# The peak stays the same, and fewer operations run again. (Keeping all matmuls, too, would raise
# the peak to 1.46 GiB.)
#
# Two of the eight sequences are enough to measure: each further one repeats the second.


# %%
def keep_attention(model):
    to_bfloat16(model)
    for block in model.blocks:
        block.forward = partial(selective(ATTENTION), block.forward)


so_far = replace(combined("accumulation+fused-adamw"), change_model=keep_attention)
today = dry_trace_of_blocks(replace(SETTING, batch=2), so_far)
print(f"activations at the peak: {format_bytes(today.at_peak['activations'])}")
with memlab.dry_run():
    one_block, x = GPT(replace(config, layers=1)).blocks[0], torch.randn(8, 640, 768)
    for name, call in {"yesterday": checkpoint, "today": selective(ATTENTION)}.items():
        again = 12 * (held_and_run(call, one_block, x.requires_grad_())[2] - of_block)
        share = again / twelve.operations
        print(f"{name}: {again / 1e12:.2f} × 10¹² operations run again, {share:.1%} of all")

# %%
running_bill(6, today=today)

# %% [markdown]
# ## Sources
#
# - Chen et al. 2016: [Training Deep Nets with Sublinear Memory
#   Cost](https://arxiv.org/abs/1604.06174)
# - Korthikanti et al. 2022: [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198)
# - Beaumont et al. 2019: [Optimal checkpointing for heterogeneous
#   chains](https://arxiv.org/abs/1911.13214)
# - PyTorch: [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html)
#
# The rules on trial are from:
#
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
