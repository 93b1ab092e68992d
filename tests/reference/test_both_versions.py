"""The reference and library versions of each technique agree in values and bytes."""

import ast
import importlib
import io
import pkgutil
import random
import re
import sys
import tokenize
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_close
from quick import together
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import memlab
from memlab import ema, optim, reference, zero
from memlab.allocator import simulate
from memlab.attention import flash_attention
from memlab.checkpointing import checkpoint, selective
from memlab.compression import compressed_activations
from memlab.course.checks.day08 import most_of
from memlab.lora import LoRALinear
from memlab.losses import chunked_cross_entropy, token_log_probs
from memlab.model import GPT, PRESETS
from memlab.offload import HostStore, OffloadedOptimizer
from memlab.optim.adam_mini import gpt_partition
from memlab.precision import LossScaler, convert_to_fp8
from memlab.precision.fp8 import quantize_fp8
from memlab.qlora import NF4Linear, add_qlora
from memlab.quantize import dequantize_nf4, nf4_code, quantize_nf4
from memlab.reference import (
    activation_compression,
    caching_allocator,
    fp8,
    nf4,
    offloaded_optimizer,
    post_hoc_ema,
    selective_checkpointing,
    tiled_attention,
)
from memlab.reference.adam8bit import Adam8bit, dynamic_code
from memlab.reference.adam_mini import adam_mini_, block_size
from memlab.reference.adamw import adamw_
from memlab.reference.apollo import apollo_
from memlab.reference.checkpointing import forget
from memlab.reference.chunked_loss import chunked_loss
from memlab.reference.collectives import Communicator
from memlab.reference.galore import galore_
from memlab.reference.lion import lion_
from memlab.reference.log_probs import log_probs, of_rows
from memlab.reference.loss_scaling import Scaler
from memlab.reference.meter import Meter
from memlab.reference.muon import muon_
from memlab.reference.qlora import QLoRALinear
from memlab.reference.sharded_optimizer import ShardedAdam
from memlab.reference.sharded_weights import sharded_pass
from memlab.reference.step_in_backward import in_backward
from memlab.trace import Event

NAMES = [module.name for module in pkgutil.iter_modules(reference.__path__)]
each_reference = pytest.mark.parametrize("name", NAMES)


def source(name: str) -> str:
    return Path(importlib.import_module(f"memlab.reference.{name}").__file__).read_text("utf-8")


# ------------------------------------------------------------------ size and imports


def code_lines(text: str) -> int:
    """Count lines without blank lines, comments and docstrings."""
    of_docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            of_docstrings.update(range(first.lineno, first.end_lineno + 1))
    empty = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if tokenize.tok_name[token.type] not in empty
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - of_docstrings)


def test_code_lines_exclude_comments_docstrings_and_blank_lines():
    assert code_lines('"""Doc.\n\nMore."""\n\nx = (\n    1  # one\n)\n# comment\n') == 3


@together("name", NAMES)
def test_a_reference_has_at_most_sixty_lines_of_code(name):
    assert code_lines(source(name)) <= 60


@together("name", NAMES)
def test_a_reference_imports_only_torch(name):
    nodes = list(ast.walk(ast.parse(source(name))))
    imported = [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
    imported += [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    mine = {"numpy"} if name == "post_hoc_ema" else set()  # its docstring says why
    known = {*sys.stdlib_module_names, "torch", *mine}
    others = {each for each in imported if each.split(".")[0] not in known}
    assert all(each.startswith("memlab.reference.") for each in others)


def test_each_reference_is_in_the_packages_table():
    rows = reference.__doc__.split("library version")[1]
    assert all(name in rows for name in NAMES)


LIBRARY_FILES = {
    "memlab/optim/adamw.py": "adamw",
    "memlab/optim/lion.py": "lion",
    "memlab/optim/adam_mini.py": "adam_mini",
    "memlab/optim/adam8bit.py": "adam8bit",
    "memlab/optim/muon.py": "muon",
    "memlab/optim/galore.py": "galore",
    "memlab/optim/apollo.py": "apollo",
    "memlab/optim/in_backward.py": "step_in_backward",
    "memlab/precision/scaling.py": "loss_scaling",
    "memlab/precision/fp8.py": "fp8",
    "memlab/checkpointing/recompute.py": "checkpointing",
    "memlab/checkpointing/selection.py": "selective_checkpointing",
    "memlab/compression.py": "activation_compression",
    "memlab/attention/flash.py": "tiled_attention",
    "memlab/losses.py": "chunked_loss",
    "memlab/zero/simulation.py": "sharded_optimizer",
    "memlab/offload/optimizer.py": "offloaded_optimizer",
    "memlab/ema/profiles.py": "post_hoc_ema",
    "memlab/quantize/nf4.py": "nf4",
    "memlab/qlora.py": "qlora",
    "memlab/metering/storages.py": "meter",
    "memlab/allocator/caching.py": "caching_allocator",
}


@pytest.mark.parametrize("path", LIBRARY_FILES)
def test_a_library_version_names_its_reference_and_its_additions_first(path):
    text = (Path(__file__).parents[2] / path).read_text("utf-8")
    first_lines = " ".join(ast.get_docstring(ast.parse(text)).split("\n")[:16])
    assert f"memlab.reference.{LIBRARY_FILES[path]}" in first_lines
    assert re.search(r"\badds?\b", first_lines, re.IGNORECASE)


# ------------------------------------------------------------------ optimizers


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state_bytes(tensors: Any) -> int:
    """Return the bytes of a state's tensors without scalars. Shared storages count once."""
    leaves = torch.utils._pytree.tree_leaves(tensors)
    storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes() > 8}.values())


@torch.no_grad()
def stepped(step_: Callable[..., None], shapes: list[tuple[int, ...]], **more: Any):
    """Return weights and states after six steps of the reference."""
    weights, states = [seeded(*s, seed=n) for n, s in enumerate(shapes)], [{} for _ in shapes]
    for step in range(6):
        for n, (weight, state) in enumerate(zip(weights, states, strict=True)):
            own = {name: values[n] for name, values in more.items()}
            step_(weight, seeded(*weight.shape, seed=10 * step + n), state, **own, **SETTINGS)
    return weights, states


def stepped_by_library(make: Callable[..., torch.optim.Optimizer], shapes: list[tuple[int, ...]]):
    weights = [nn.Parameter(seeded(*s, seed=n)) for n, s in enumerate(shapes)]
    optimizer = make(weights)
    for step in range(6):
        for n, weight in enumerate(weights):
            weight.grad = seeded(*weight.shape, seed=10 * step + n)
        optimizer.step()
    return [w.detach() for w in weights], [dict(optimizer.state[w]) for w in weights]


SETTINGS = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
SHAPES = [(30, 40), (7,), (3, 5, 2)]


@pytest.mark.parametrize(("step_", "kind"), [(adamw_, optim.AdamW), (lion_, optim.Lion)])
def test_adamw_and_lion(step_, kind):
    weights, states = stepped(step_, SHAPES)
    theirs, their_states = stepped_by_library(lambda w: kind(w, **SETTINGS), SHAPES)
    assert_close(weights, theirs, terms=16)
    assert state_bytes(states) == state_bytes(their_states)


def test_adam_mini():
    model = GPT(PRESETS["tiny"])
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    head = PRESETS["tiny"].hidden_size // PRESETS["tiny"].heads
    sizes = [block_size(name, torch.Size(shape), head) for name, shape in shapes.items()]
    weights, states = stepped(adam_mini_, list(shapes.values()), size=sizes)

    def mini(parameters):
        named = list(zip(shapes, parameters, strict=True))
        return optim.AdamMini(named, partition=gpt_partition(head), **SETTINGS)

    theirs, their_states = stepped_by_library(mini, list(shapes.values()))
    assert_close(weights, theirs, terms=16)
    assert state_bytes(states) == state_bytes(their_states)


MATRICES = [(30, 40), (40, 30), (20, 20)]


@pytest.mark.parametrize(
    ("step_", "kind", "settings", "bound"),
    [
        # Newton–Schulz has five steps in bfloat16. Six updates of at most lr are added up.
        (
            muon_,
            partial(optim.Muon, adjust_lr="original"),
            {"weight_decay": 0.1},
            {"dtype": torch.bfloat16, "terms": 5, "summed": 6 * 0.01},
        ),
        (galore_, partial(optim.GaLore, weight_decay=0), {"rank": 4, "gap": 3}, {}),
        (apollo_, partial(optim.Apollo, weight_decay=0), {"rank": 4, "gap": 3}, {}),
    ],
)
def test_muon_galore_and_apollo(step_, kind, settings, bound):
    settings = {"lr": 0.01, **settings}
    weights = [seeded(*shape, seed=n) for n, shape in enumerate(MATRICES)]
    states: list[dict[str, Any]] = [{} for _ in weights]
    for step in range(6):
        for n, (weight, state) in enumerate(zip(weights, states, strict=True)):
            step_(weight, seeded(*weight.shape, seed=10 * step + n), state, **settings)
    theirs, their_states = stepped_by_library(lambda w: kind(w, **settings), MATRICES)
    assert_close(weights, theirs, **bound)
    assert state_bytes(states) == state_bytes(their_states)


def test_adam8bit():
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3}
    shapes = [(64, 80), (37, 139), (4095,)]
    weights, states = stepped_by_library(lambda w: Adam8bit(w, **settings), shapes)
    theirs, their_states = stepped_by_library(
        lambda w: optim.Adam8bit(w, weight_decay=0, **settings), shapes
    )
    for mine, other in zip(weights, theirs, strict=True):
        off = (mine - other).abs() > 1e-3 * settings["lr"]  # rounding can flip a code
        assert off.float().mean() < 0.01
    codebooks = 2 * 256 * 4  # stored once for all weights in the library's state
    assert state_bytes(states) + codebooks == state_bytes(their_states)


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), *more, nn.Linear(96, 32))


def test_step_in_backward():
    mine, theirs = net(), net()
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    stepping = optim.step_in_backward(sgd)

    @torch.no_grad()
    def update(weight: Tensor) -> None:
        weight.sub_(weight.grad, alpha=0.1)

    end_step = in_backward(mine.parameters(), update)

    def two_steps(model, end):
        for seed in range(2):
            model(seeded(8, 64, seed=seed)).square().mean().backward()
            end()

    traces = [
        memlab.measure(lambda m=model, e=end: two_steps(m, e), model=model)
        for model, end in ((mine, end_step), (theirs, stepping.step))
    ]
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert_close(one, other)
        assert one.grad is other.grad is None
    most = [most_of(trace, "gradients") for trace in traces]
    assert most[0] == most[1]


def test_loss_scaling():
    scales = []
    for library in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = LossScaler(8.0, growth_interval=2) if library else Scaler(8.0, 2)
        seen = []
        for step in range(7):
            x = seeded(4, 3, seed=step) * (float("inf") if step == 3 else 1)
            loss = layer(x).square().mean()
            if library:
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                seen.append(scaler.get_scale())
            else:
                scaler.train(optimizer, [loss], 1.0)
                seen.append(scaler.scale)
        scales.append((seen, layer.weight.detach().clone()))
    assert scales[0][0] == scales[1][0] == [8, 16, 16, 8, 8, 16, 16]
    assert torch.equal(scales[0][1], scales[1][1])


# ------------------------------------------------------------------ activations


def passed(call: Callable[[nn.Module, Tensor], Tensor], *more: nn.Module):
    """Return gradients, the bytes held between forward and backward, and the peak of both."""
    model, x = net(*more), seeded(128, 64).requires_grad_()
    held = []

    def both() -> None:
        with memlab.meter() as running:
            y = call(model, x)
        held.append(running.trace.live_bytes)
        y.square().mean().backward()

    both()
    return [x.grad, *(weight.grad for weight in model.parameters())], held[0]


def test_checkpointing():
    (mine, held), (theirs, their_held) = passed(forget), passed(checkpoint)
    assert all(map(torch.equal, mine, theirs))
    assert held == their_held < passed(lambda model, x: model(x))[1]


def test_selective_checkpointing():
    matmuls = [torch.ops.aten.addmm.default]
    mine, held = passed(lambda f, x: selective_checkpointing.keeping(matmuls, f, x))
    theirs, their_held = passed(selective(matmuls))
    assert all(map(torch.equal, mine, theirs))
    assert held == their_held > passed(checkpoint)[1]


def test_activation_compression():
    def by_reference(model, x):
        with saved_tensors_hooks(*activation_compression.hooks([*model.parameters(), x])):
            return model(x)

    def by_library(model, x):
        with compressed_activations(bits=8, mode="nearest", min_numel=256):
            return model(x)

    (mine, held), (theirs, their_held) = passed(by_reference), passed(by_library)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
    exact_held = passed(lambda model, x: model(x))[1]
    assert held == their_held == exact_held - 98304 + 98304 // 4 + 98304 // 4 // 256 * 4


@pytest.mark.parametrize("shift", [0, 1000], ids=["causal", "full"])
def test_tiled_attention(shift):
    found = []
    for library in (False, True):
        q, k, v = (seeded(1, 3, 76, 8, seed=n).requires_grad_() for n in range(3))
        with memlab.meter() as running:
            if library:
                out = flash_attention(q, k, v, causal=not shift, tile=16)
            else:
                out = tiled_attention.flash(q, k, v, 16, shift)
        (out * seeded(*out.shape, seed=3)).sum().backward()
        found.append(([out, q.grad, k.grad, v.grad], running.trace.live_bytes))
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        assert_close(mine, theirs)
    assert found[0][1] == found[1][1] == 4 * 3 * 76 * (3 * 8 + 8 + 1)  # q, k, v, out and lse


def test_chunked_loss():
    found, peaks = [], []
    for library in (False, True):
        hidden, weight = seeded(100, 16).requires_grad_(), seeded(50, 16, seed=1).requires_grad_()
        targets = torch.randint(50, (100,), generator=torch.Generator().manual_seed(2))
        targets[::7] = -100

        losses: list[Tensor] = []

        def both(given=(hidden, weight, targets), library=library, losses=losses):
            loss = chunked_cross_entropy(*given, chunk=32) if library else chunked_loss(*given, 32)
            loss.backward()
            losses.append(loss.detach())

        peaks.append(memlab.measure(both).peak_bytes)
        found.append([losses[0], hidden.grad, weight.grad])
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs)
    a_few_a_row = 17 * 100
    assert abs(peaks[0] - peaks[1]) <= a_few_a_row


@pytest.mark.parametrize("rows", [1, 90, 100])
def test_log_probs(rows):
    """Both against all logits at once; a chunk of 32 needs less memory than all rows."""
    found, peaks = [], []
    tokens = torch.randint(50, (rows,), generator=torch.Generator().manual_seed(2))

    def library(hidden, weight):
        return token_log_probs(hidden, weight, tokens, chunk=32)

    for compute in (
        library,
        lambda hidden, weight: log_probs(hidden, weight, tokens, 32),
        lambda hidden, weight: of_rows(hidden, weight, tokens),
    ):
        hidden, weight = seeded(rows, 16).requires_grad_(), seeded(50, 16, seed=1).requires_grad_()
        upstream, outputs = seeded(rows, seed=3), []

        def both(given=(hidden, weight), compute=compute, outputs=outputs, upstream=upstream):
            out = compute(*given)
            out.backward(upstream)
            outputs.append(out.detach())

        peaks.append(memlab.measure(both).peak_bytes)
        found.append([outputs[0], hidden.grad, weight.grad])
    for mine, theirs, all_at_once in zip(*found, strict=True):
        assert_close(mine, all_at_once)
        assert_close(theirs, all_at_once)
    if rows == 100:
        assert max(peaks[:2]) < peaks[2]


# ------------------------------------------------------------------ ranks, stores, averages


class Flat(nn.Module):
    """One weight whose gradients are the micro-batches."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(n))


def test_sharded_optimizer():
    ranks, n = 4, 30  # 4 does not divide 30
    gradients = [(seeded(n, seed=5 + r) * 8).round() / 16 for r in range(ranks)]
    mine, comm = [seeded(n) for _ in range(ranks)], Communicator(ranks)
    ShardedAdam(mine, comm, lr=0.01).step(gradients, max_norm=0.5)
    model = Flat(n)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    simulation = zero.simulate(model, adamw, ranks, stage=1)
    result = simulation.step(
        gradients, lambda model, gradient: ((model.weight * gradient).sum(), 1), clip_norm=0.5
    )
    assert torch.equal(mine[0], simulation.weights()["weight"])
    padded = -(-n // ranks) * ranks
    assert (
        comm.sent
        == [zero.communication_bytes(padded, ranks=ranks, stage=1, element_bytes=4)] * ranks
    )
    assert [4 * each.model_elements() for each in result.traffic] == comm.sent


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_weights_send_what_the_formula_says(ranks):
    C, units = 8, 3
    shards = [[seeded(C * C, seed=u).chunk(ranks)[r] for u in range(units)] for r in range(ranks)]
    sums = [[torch.zeros(C * C // ranks) for _ in range(units)] for _ in range(ranks)]
    xs, comm = [seeded(5, C, seed=10 + r) for r in range(ranks)], Communicator(ranks)
    sharded_pass(comm, shards, xs, lambda y: y, sums)
    weights = [seeded(C * C, seed=u).requires_grad_() for u in range(units)]
    for x in xs:
        for w in weights:
            x = torch.tanh(x @ w.view(C, C))
        (x.square().sum() / 2).backward()
    for u, w in enumerate(weights):
        assert_close(torch.cat([mine[u] for mine in sums]), w.grad)
    wanted = zero.communication_bytes(units * C * C, ranks=ranks, stage=3, element_bytes=4)
    assert comm.sent == [wanted] * ranks


def test_offloaded_optimizer():
    found = []
    for library in (False, True):
        model = net()
        weights = list(model.parameters())
        store = HostStore() if library else offloaded_optimizer.Host()
        if library:
            adamw = torch.optim.AdamW(weights, lr=0.01, foreach=False)
            optimizer = OffloadedOptimizer(adamw, store, sub_group=4096)
        else:
            groups = [weights[:2], weights[2:]]
            optimizer = offloaded_optimizer.OffloadedAdam(groups, store, lr=0.01)
        for seed in range(3):
            model.zero_grad()
            model(seeded(8, 64, seed=seed)).square().mean().backward()
            if library:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step(*(() if library else (1.0,)))
        kept = store.kept if not library else None
        found.append((weights, state_bytes(list(kept.values())) if kept else store.nbytes))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1] == 8 * sum(w.numel() for w in net().parameters())


def test_post_hoc_ema(tmp_path):
    sigmas = (0.05, 0.1)
    gammas = [post_hoc_ema.exponent(sigma) for sigma in sigmas]
    assert gammas == pytest.approx([ema.gamma_from_sigma(sigma) for sigma in sigmas])
    model = nn.Linear(4, 3)
    tracker = ema.PostHocEMA(
        model, tmp_path, sigmas=sigmas, snapshot_every=10, snapshot_dtype=torch.float32
    )
    averages = [post_hoc_ema.Average(model.parameters(), gamma) for gamma in gammas]
    profiles, snapshots = [], []
    for step in range(1, 41):
        with torch.no_grad():
            for n, weight in enumerate(model.parameters()):
                weight.copy_(seeded(*weight.shape, seed=2 * step + n))
        tracker.update(step)
        for gamma, average in zip(gammas, averages, strict=True):
            average.update(model.parameters(), step)
            if step % 10 == 0:
                profiles.append(post_hoc_ema.Profile(step, gamma))
                values = zip(("weight", "bias"), average.values, strict=True)
                snapshots.append(InMemory({name: v.clone() for name, v in values}))
    target = post_hoc_ema.Profile(40, post_hoc_ema.exponent(0.08))
    shares = post_hoc_ema.solve(profiles, target)
    known, wanted = [ema.Profile(*p) for p in profiles], ema.Profile(*target)
    error, least = (ema.profile_error(known, wanted, x) for x in (shares, None))
    assert least <= error < 1.1 * least < 0.01  # coefficients are scaled to sum to one
    best = [[share] for share in ema.solve_weights(known, wanted)]
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    made = {name: torch.empty(size) for name, size in sizes.items()}

    def write(target, name, start, part):
        made[name][start : start + len(part)] = part

    post_hoc_ema.synthesize(snapshots, best, sizes, write, chunk_size=5)
    (theirs,) = ema.synthesize(tmp_path, [0.08])
    for name, mine in made.items():
        assert_close(mine, theirs[name].flatten())


class InMemory:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name].flatten()[start:stop]


# ------------------------------------------------------------------ meter and allocator


def conv_step(model, x):
    return lambda: model(x).square().mean().backward()


STEPS = {
    "linear": lambda: conv_step(net(), seeded(16, 64)),
    "dropout": lambda: conv_step(net(nn.Dropout()), seeded(16, 64)),
    "convolution": lambda: conv_step(nn.Conv2d(3, 8, 3), seeded(2, 3, 9, 9)),
    "attention": lambda: conv_step(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), seeded(2, 5, 16)
    ),
}


@pytest.mark.parametrize("kind", STEPS)
def test_meter(kind):
    """Measure a second step, because the first one allocates .grad."""
    peaks = []
    for library in (False, True):
        step = STEPS[kind]()
        step()
        if library:
            made = [e for e in memlab.measure(step).events if e.phase != "before"]
            peaks.append(max(accumulate(e.bytes for e in made)))
        else:
            with Meter() as meter:
                step()
            peaks.append(meter.peak_bytes)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("seed", range(8))
def test_caching_allocator(seed):
    """Requests of all sizes, freed in random order."""
    drawn = random.Random(seed)
    cache, alive, events = caching_allocator.Cache(), {}, []
    for storage in range(300):
        nbytes = int(2 ** drawn.uniform(6, 25))
        cache.malloc(storage, nbytes)
        alive[storage] = nbytes
        events.append(event(storage, nbytes))
        while alive and drawn.random() < 0.47:
            freed = drawn.choice(list(alive))
            cache.free(freed)
            events.append(event(freed, -alive.pop(freed)))
    blocks = simulate(events)
    assert cache.reserved == blocks.reserved_bytes
    assert cache.segments == blocks.segment_allocations


def event(storage: int, nbytes: int) -> Event:
    return Event(nbytes, storage, "activations", "aten.empty", "", "forward", "uint8", (nbytes,))


# ------------------------------------------------------------------ 4-bit weights


def nf4_weights() -> list[Tensor]:
    """Usual weights, and ones as large as float32's largest number, whose sum overflows."""
    return [seeded(512, 256), seeded(512, 256).clamp(-1, 1) * torch.finfo(torch.float32).max]


@pytest.mark.parametrize("weight", nf4_weights(), ids=["usual", "largest"])
def test_both_nf4_versions_store_the_same_bits(weight):
    codebook = dynamic_code(True)
    codes, absmax = nf4.encode(weight)
    single, double = quantize_nf4(weight, double=False), quantize_nf4(weight)
    assert torch.equal(codes, single.codes)
    assert torch.equal(absmax, single.absmax)
    small, scales, mean = nf4.double_encode(absmax, codebook)
    for mine, theirs in zip(
        (small, scales, mean), (double.absmax, double.scales, double.mean), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert state_bytes([codes, small, scales]) + 4 == double.nbytes
    decoded = nf4.decode(codes, nf4.double_decode(small, scales, mean, codebook))
    assert decoded.isfinite().all()
    assert_close(decoded.view_as(weight), dequantize_nf4(double))
    assert_close(nf4.levels(), nf4_code())


def test_both_qlora_versions_compute_the_same():
    linear = nn.Linear(128, 64, bias=False)
    mine = QLoRALinear(linear, rank=4, alpha=8)
    model = nn.Sequential(linear)
    add_qlora(model, 4, double=False)
    [theirs] = model
    assert isinstance(theirs, LoRALinear)
    assert isinstance(theirs.frozen, NF4Linear)
    with torch.no_grad():
        mine.A.copy_(theirs.down)
        theirs.up.copy_(seeded(64, 4, seed=1))
        mine.B.copy_(theirs.up)
    ours, other = (seeded(5, 128, seed=2).requires_grad_() for _ in range(2))
    mine(ours).square().sum().backward()
    theirs(other).square().sum().backward()
    for got, wanted in ((mine.A, theirs.down), (mine.B, theirs.up), (ours, other)):
        assert_close(got.grad, wanted.grad)


# ------------------------------------------------------------------ FP8


@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2], ids=str)
def test_both_fp8_casts_store_the_same_bits(dtype):
    x = seeded(40, 300)
    for mine, theirs in (
        (fp8.cast(x, dtype), quantize_fp8(x, dtype)),
        (fp8.cast_tiles(x, dtype, 16, 128), quantize_fp8(x, dtype, (16, 128))),
    ):
        assert torch.equal(mine[0].view(torch.uint8), theirs.codes.view(torch.uint8))
        assert torch.equal(mine[1], theirs.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_fp8_layers_compute_and_keep_the_same(dtype):
    found = []
    for library in (False, True):
        torch.manual_seed(0)
        linear = nn.Linear(96, 64, bias=False).to(dtype)
        model = nn.Sequential(linear if library else fp8.FP8Linear(linear))
        if library:
            convert_to_fp8(model)
        leaf, outputs = seeded(2, 8, 96).to(dtype).requires_grad_(), []
        trace = memlab.measure(lambda m=model, x=leaf, o=outputs: o.append(m(x * 1)), model=model)
        held = sum(event.bytes for event in trace.events if event.phase != "before")
        (outputs[0] * seeded(2, 8, 64, seed=1)).sum().backward()
        found.append(([outputs[0], leaf.grad, linear.weight.grad], held - outputs[0].nbytes))
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        assert_close(mine, theirs, terms=256 if dtype == torch.float32 else 1)
    assert found[0][1] == found[1][1] == 16 * 96 + 4
