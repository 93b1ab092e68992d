"""Day 3: batch and sequence."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.course.bill import SETTING
from memlab.course.exercises import Bill, Day, distinct, require
from memlab.course.ledger import FLOAT32
from memlab.course.properties import (
    SLACK,
    ReadOnce,
    as_little_memory,
    dimensions,
    furthest,
    gradients,
    is_tensor,
    left_bytes,
    new_bytes,
    rough,
    same_byte_counts,
    same_gradients,
    same_values,
    unchanged,
)
from memlab.course.solutions import checked, solution
from memlab.metering import measure
from memlab.model import PRESETS, GPTConfig
from memlab.trace import Trace
from memlab.train import combined, dry_trace

MASKED = -100  # the default ignore_index of F.cross_entropy
Batch = tuple[Tensor, Tensor]

# ------------------------------------------------------------------ 3.1: an epoch of windows

VOCABULARY = 16
TrainEpoch = Callable[
    [nn.Module, torch.optim.Optimizer, Iterable[Batch], int, float], Sequence[float]
]
NO_CLIP = 1e9  # above the norm of every gradient in these cases
TRAINED_KINDS = ("values", "gradients", "state")  # what training may change


def _new_model(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Embedding(VOCABULARY, width), nn.Linear(width, 2 * width), nn.GELU())
    return nn.Sequential(*layers, nn.Linear(2 * width, VOCABULARY)).double()


def _micro_batches(seq_len: int, *masked: int, batch: int = 2) -> list[Batch]:
    """One micro-batch per entry of `masked`: the mean number of masked targets at the end of each
    sequence. The sequences of a micro-batch differ in it where possible."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for padding in masked:
        text = torch.randint(VOCABULARY, (batch, seq_len + 1), generator=generator)
        tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
        uneven = min(padding, seq_len - padding, 1)
        targets[::2, seq_len - padding + uneven :] = MASKED
        targets[1::2, seq_len - padding - uneven :] = MASKED
        made.append((tokens, targets))
    return made


class _Epoch(NamedTuple):
    """A case: an epoch on micro-batches of 2 × 6 tokens."""

    masked: tuple[int, ...]  # the mean number of masked targets per sequence of each micro-batch
    size: int
    max_norm: float = NO_CLIP

    def __str__(self) -> str:
        tokens = ", ".join(f"{12 - 2 * masked}" for masked in self.masked)
        clip = "" if self.max_norm == NO_CLIP else f", max_norm {self.max_norm}"
        return f"train_epoch on micro-batches of {tokens} tokens, windows of {self.size}{clip}:"

    def micro_batches(self) -> list[Batch]:
        return _micro_batches(6, *self.masked)


_EPOCHS = (
    _Epoch((0,), 1),
    _Epoch((0, 0), 2),
    _Epoch((0, 0, 0, 0), 2),
    _Epoch((0, 4), 2),
    _Epoch((0, 6), 2),
    _Epoch((0, 2, 1), 2),
    _Epoch((6,), 1),
    _Epoch((0, 6, 3, 6), 1),
    _Epoch((0, 4), 2, max_norm=0.1),
)


def _check_train_epoch(answer: TrainEpoch) -> str:
    for epoch in _EPOCHS:
        _check_epoch(answer, epoch)
    one = _check_activations(answer)
    _check_gradients(answer)
    _check_frozen(answer)
    return f"weights match the full batch within 1e-12 · at most {one:,} bytes of activations"


def _check_epoch(answer: TrainEpoch, epoch: _Epoch) -> None:
    got, wanted = _trained(answer, epoch), _full_batches(epoch)
    _floats(str(epoch), got.losses, len(wanted.losses))
    require(
        got.steps == wanted.steps,
        f"{epoch} {got.steps} optimizer steps; wanted {wanted.steps}, one per window.",
    )
    most = 1e-12 if epoch.max_norm == NO_CLIP else 1e-6  # torch adds 1e-6 to the norm
    difference = _difference(got, wanted)
    off = (
        f"{epoch} trained weights differ from full-batch training by {difference:.2e}; wanted less "
        f"than {most:g}."
    )
    why = "" if difference < most else _why_off(answer, epoch)
    require(difference < most, off + why, evidence=(str(epoch), f"{difference:.4e}"))
    losses = [torch.tensor(each, dtype=torch.float64) for each in (got.losses, wanted.losses)]
    mine, right = distinct(got.losses, wanted.losses, 6)
    require(
        furthest(*losses) < 1e-5,  # a sum in float32 is accurate enough
        f"{epoch} the losses are {mine}; wanted the mean over the tokens of each window, {right}.",
    )


def _floats(case: str, losses: Any, wanted: int) -> None:
    require(
        isinstance(losses, (list, tuple)),
        f"{case} returned {type(losses).__name__}; wanted a list with the loss of each window."
        f"{' Is there a return?' if losses is None else ''}",
    )
    require(
        len(losses) == wanted,
        f"{case} returned {len(losses)} losses; wanted {wanted}, one per window.",
    )
    kinds = {type(loss).__name__ for loss in losses}
    require(
        kinds == {"float"},
        f"{case} returned a list of {', '.join(sorted(kinds))}; wanted plain floats: .item() "
        f"converts a tensor and drops its graph.",
    )


class _Trained(NamedTuple):
    losses: Any
    weights: list[Tensor]
    steps: int
    embedding_gradient: Tensor | None


def _trained(answer: TrainEpoch, epoch: _Epoch, *, frozen: bool = False) -> _Trained:
    """Train fresh weights, and require that nothing is read ahead or changed beside them."""
    model: Any = _with_gradients(_new_model(), 0.25)
    if frozen:
        model[0].requires_grad_(False).zero_grad()
    groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    read: list[int] = []  # the number of micro-batches read before each step
    case = f"train_epoch in windows of {epoch.size}"
    parts = epoch.micro_batches()
    once = ReadOnce(case, parts, alive_at_most=2 * epoch.size, name="micro_batches")
    hook = optimizer.register_step_post_hook(lambda *_: read.append(once.taken))
    with unchanged(case, may_change=TRAINED_KINDS, model=model, optimizer=optimizer):
        losses = answer(model, optimizer, once, epoch.size, epoch.max_norm)
        once.finished()
    hook.remove()
    _require_not_read_ahead(case, read, epoch.size)
    weights = [weight.detach().clone() for weight in model.parameters()]
    return _Trained(losses, weights, len(read), model[0].weight.grad)


def _require_not_read_ahead(case: str, read: list[int], size: int) -> None:
    for step, taken in enumerate(read, start=1):
        require(
            taken <= step * size,
            f"{case} read {taken} micro-batches before step {step}; wanted at most "
            f"{step * size}: take the step, then read the next window.",
            evidence=(case, "read ahead"),
        )


@cache
def _full_batches(epoch: _Epoch, *, frozen: bool = False) -> _Trained:
    return _trained(_full_batch_training, epoch, frozen=frozen)


def _full_batch_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Batch],
    size: int,
    max_norm: float,
) -> list[float]:
    """Plain training, with each window as one batch."""
    remaining, losses = iter(micro_batches), []
    while window := list(islice(remaining, size)):
        tokens, targets = (torch.cat(parts) for parts in zip(*window, strict=True))
        optimizer.zero_grad()
        flat = model(tokens).flatten(0, 1), targets.flatten()
        loss = F.cross_entropy(*flat, reduction="sum") / max(int((targets != MASKED).sum()), 1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _difference(got: _Trained, wanted: _Trained) -> float:
    return max(furthest(a, b) for a, b in zip(got.weights, wanted.weights, strict=True))


def _why_off(answer: TrainEpoch, epoch: _Epoch) -> str:
    """Whether old gradients leak into a wrong update, or only its length is wrong."""
    given, fresh = (_change(answer, epoch, old) for old in (0.25, None))
    wanted = _change(_full_batch_training, epoch, None)
    if not torch.allclose(given, fresh, rtol=1e-6, atol=1e-9):
        return " They depend on gradients from before the epoch: clear these first."
    times = (given @ wanted / wanted.square().sum()).item()
    if times > 0 and torch.allclose(given, times * wanted, rtol=1e-4, atol=1e-9):
        length = distinct(times, 1.0, 3)[0]
        return f" The update has the right direction and {length} times the right length."
    return ""


def _change(loop: TrainEpoch, epoch: _Epoch, old: float | None) -> Tensor:
    """How an epoch moves the weights, with `old` in every gradient before it."""
    model = _with_gradients(_new_model(), old)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loop(model, optimizer, iter(epoch.micro_batches()), epoch.size, epoch.max_norm)
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def _with_gradients(model: nn.Module, old: float | None) -> nn.Module:
    for weight in model.parameters():
        weight.grad = None if old is None else torch.full_like(weight, old)
    return model


def _check_frozen(answer: TrainEpoch) -> None:
    """A frozen weight gets no gradient, and the others learn as before."""
    epoch = _Epoch((0, 0), 2)
    got, wanted = (
        train(epoch, frozen=True) for train in (partial(_trained, answer), _full_batches)
    )
    difference = _difference(got, wanted)
    case = "train_epoch of a model with a frozen embedding"
    require(
        difference < 1e-12,
        f"{case}: trained weights differ from full-batch training by {difference:.2e}; wanted less "
        f"than 1e-12.",
    )
    require(
        got.embedding_gradient is None,
        f"{case} gives the embedding a gradient; wanted None: zeros need memory too, and AdamW "
        f"decays every weight with a gradient.",
        evidence="gradient of a frozen weight",
    )


_MEASURED = _micro_batches(32, 0)[0]


def _check_activations(answer: TrainEpoch) -> int:
    """Require the activations of one micro-batch at a time; returns their bytes."""
    one, four, in_turn = (_most_activations(answer, *case) for case in ((1, 1), (4, 4), (4, 1)))
    logits = 8 * VOCABULARY * _MEASURED[0].numel()  # a variable may keep the previous ones
    require(
        four - one <= logits + 64,
        f"train_epoch has up to {four:,} bytes of activations alive in a window of 4 micro-batches;"
        f" wanted {one:,} bytes, as in a window of 1.",
    )
    require(
        in_turn - one <= logits + 64,
        f"train_epoch has up to {in_turn:,} bytes of activations alive in 4 windows of 1 "
        f"micro-batch; wanted {one:,} bytes, as in one window.",
        evidence=("windows", rough(in_turn)),
    )
    # The loss can be written in ways that keep more than cross_entropy does.
    most = _most_activations(_full_batch_training, 1, 1) * 3 // 2
    require(
        one <= most,
        f"train_epoch has up to {one:,} bytes of activations alive in a window of 1 micro-batch; "
        f"wanted at most {most:,} bytes, as one forward pass saves.",
        evidence="more than one forward pass",
    )
    return one


def _check_gradients(answer: TrainEpoch) -> None:
    """Compare the peak with the reference's, for equal layers with more weights than activations.
    Another way to divide may hold a new gradient of a layer or two. In a second window, a list of
    the first one's gradients may be alive."""
    torch.manual_seed(0)
    layers = [nn.Linear(VOCABULARY, VOCABULARY) for _ in range(8)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), *layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    parts, room = _micro_batches(3, 0, 0, 0, 0), 3 * 8 * VOCABULARY**2

    def run(train: TrainEpoch) -> None:
        optimizer.zero_grad()
        train(model, optimizer, iter(parts), len(parts), NO_CLIP)

    run(solution("3.1"))  # so that each measured run frees the gradients of one before
    runs = (partial(run, train) for train in (answer, solution("3.1")))
    size = sum(weight.nbytes for weight in model.parameters())
    case = f"train_epoch in one window, with {size:,} bytes of weights and of gradients,"
    as_little_memory(case, *runs, room=room, kept=room)


def _most_activations(answer: TrainEpoch, number: int, size: int) -> int:
    """The most bytes of activations at one moment of windows of equal micro-batches."""
    model = _new_model(width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = partial(answer, model, optimizer, iter([_MEASURED] * number), size, NO_CLIP)
    events = measure(step, model=model, optimizer=optimizer).events
    return max(accumulate(e.bytes for e in events if e.category == "activations"), default=0)


# ------------------------------------------------------------------ 3.2: frozen layers

TrainedBytes = Callable[[GPTConfig, int, int, range], dict[str, int]]
trained_bytes: TrainedBytes = solution("3.2")

_FREEZE_CASES = (
    #         V  C  L  H KV hidden T      B  T  trained
    (GPTConfig(10, 8, 1, 2, 2, 5, 4), 1, 3, range(1)),
    (GPTConfig(10, 8, 3, 2, 2, 5, 4), 2, 4, range(3)),
    (GPTConfig(10, 16, 3, 8, 2, 5, 4), 2, 4, range(2, 3)),
    (GPTConfig(10, 16, 3, 8, 2, 5, 4), 2, 4, range(1)),
    (GPTConfig(10, 16, 4, 8, 2, 5, 4), 2, 4, range(1, 3)),
    (PRESETS["124m"], 8, 640, range(6, 12)),
)


def _check_trained_bytes(answer: TrainedBytes) -> str:
    for config, batch, seq_len, trained in _FREEZE_CASES:
        case = f"trained_bytes of {dimensions(config)}, {batch} × {seq_len} tokens, {trained}"
        units = {
            "gradients": {"elements per trained block": FLOAT32 * len(trained)},
            "optimizer_state": {"elements": FLOAT32},
            "activations": {
                "elements per token": FLOAT32 * batch * seq_len,
                "elements in total": FLOAT32,
            },
        }
        wanted = trained_bytes(config, batch, seq_len, trained)
        same_byte_counts(case, answer(config, batch, seq_len, trained), wanted, units)
    return f"{len(_FREEZE_CASES)} cases to the byte"


# ------------------------------------------------------------------ 3.3: LoRA

LoRAClass = Callable[[nn.Linear, int, float], Any]
WIDE = 128  # the width of the layer in the memory check


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)


def _check_lora(answer: LoRAClass) -> str:
    for rank, alpha in ((1, 1.0), (2, 2.0), (2, 6.0), (2, 3)):
        for bias in (False, True):
            _check_one(answer, rank, alpha, bias)
    _check_several(answer)
    _check_modes_and_shapes(answer)
    return f"{_check_bytes(answer)} · merged, the same within 1e-12"


def _check_one(answer: LoRAClass, rank: int, alpha: float, bias: bool) -> None:
    frozen = _linear(6, 4, bias)
    case = f"LoRA(nn.Linear(6, 4, bias={bias}), rank={rank}, alpha={alpha:g})"
    weight, added = frozen.weight.detach().clone(), frozen.bias if bias else 0
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6)
    before = (x @ weight.T + added).detach()
    layer = answer(frozen, rank, alpha)
    require(isinstance(layer, nn.Module), f"{case} gave {layer!r}; wanted a module.")
    _trains(case, layer, rank)
    _wraps_the_given(case, layer, frozen)
    _changes_nothing_at_first(case, layer, x, before)
    with torch.no_grad():
        layer.up += torch.linspace(0.5, 1.5, layer.up.numel(), dtype=x.dtype).view_as(layer.up)
        product = layer.up @ layer.down
        change = x @ product.T
    _changed_by(f"{case} with another `up` gives W x +", layer(x) - before, change, alpha / rank)
    changed = weight + alpha / rank * product
    wanted = gradients(lambda x: F.linear(x, changed, frozen.bias), x=x)
    same_gradients(case, gradients(lambda x: layer(x), x=x), wanted, within=1e-12)
    merged = _merged(f"merge() of {case}", layer, bias)
    given = f"merge() of {case} returns a layer that gives W x +"
    _changed_by(given, merged(x) - before, change, alpha / rank)


def _trains(case: str, layer: Any, rank: int) -> None:
    """Require that only `down` and `up` are trained, in the right shapes."""
    trained = {name: tuple(p.shape) for name, p in layer.named_parameters() if p.requires_grad}
    wanted: dict[str, tuple[int, ...]] = {"down": (rank, 6), "up": (4, rank)}
    require(
        trained == wanted,
        f"{case} trains {_shapes(trained)}; wanted {_shapes(wanted)} and nothing else.",
    )
    _all_float64(f"{case} has a weight", layer)


def _shapes(weights: dict[str, tuple[int, ...]]) -> str:
    named = [f"{name} ({' × '.join(map(str, shape))})" for name, shape in weights.items()]
    return ", ".join(named) or "nothing"


def _all_float64(case: str, layer: Any) -> None:
    for name, weight in layer.named_parameters():
        require(
            weight.dtype == torch.float64,
            f"{case}, {name}, of dtype {weight.dtype}; wanted torch.float64, the dtype of the "
            f"frozen layer's weight.",
        )


def _wraps_the_given(case: str, layer: Any, frozen: nn.Linear) -> None:
    require(
        not any(p.requires_grad for p in frozen.parameters())
        and any(p is frozen.weight for p in layer.parameters()),
        f"{case} does not freeze the given layer, or copies it; freeze and keep the layer itself: "
        f"a copy needs the same memory again.",
        evidence=(case, "copy"),
    )
    require(
        bool((layer.down.detach()[0, :-1] != layer.down.detach()[0, 1:]).any()),
        f"{case} initializes all elements of `down` with the same value; wanted random values.",
        evidence=(case, "down"),
    )


def _changes_nothing_at_first(case: str, layer: Any, x: Tensor, before: Tensor) -> None:
    out = layer(x)
    is_tensor(f"{case}(x)", out, dtype=x.dtype, shape=tuple(before.shape))
    same_values(f"{case}(x) at first", out, before, within=1e-12)
    require(not layer.up.any(), f"{case} does not initialize `up` with zeros.")
    require(out.requires_grad, f"{case} at first gives an output without a graph; wanted a graph.")
    out.square().sum().backward()
    require(
        any(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters()),
        f"{case} at first has only zero gradients; wanted a gradient for `up`.",
    )


def _changed_by(what: str, got: Tensor, change: Tensor, scale: float) -> None:
    """Require the change times the scale; the message names a wrong scale."""
    difference = (got - scale * change).abs().max().item()
    times = ((got * change).sum() / change.square().sum()).item()
    only_the_scale = torch.allclose(got, times * change, rtol=0, atol=1e-9)
    mine, right = distinct(times, scale, 3)
    gave = f"{mine} · B A x" if only_the_scale else f"values up to {difference:.2e} off"
    require(
        bool(difference < 1e-12 * scale * change.abs().max()),
        f"{what} {gave}; wanted {right} · B A x: the scale is alpha / rank.",
        evidence=(what, gave),
    )


def _merged(case: str, layer: Any, bias: bool) -> nn.Linear:
    merged = layer.merge()
    require(
        isinstance(merged, nn.Linear),
        f"{case} gave a {type(merged).__name__}; wanted an nn.Linear.",
    )
    _all_float64(f"{case} returns a layer with a weight", merged)
    require(
        (merged.bias is not None) == bias,
        f"{case} returns a layer with bias={not bias}; wanted bias={bias}, as before.",
    )
    return merged


def _check_several(answer: LoRAClass) -> None:
    """Each of several layers has random values and a scale of its own."""
    frozen = [_linear(6, 4) for _ in range(3)]
    weight = frozen[0].weight.detach().clone()
    first, second = (answer(layer, 2, 6.0) for layer in frozen[:2])
    answer(frozen[2], 1, 5.0)
    require(
        not torch.equal(first.down, second.down),
        "LoRA initializes two layers with the same `down`; wanted new random values for each: do "
        "not set a seed in a layer.",
        evidence="seeded",
    )
    with torch.no_grad():
        first.up += 1.0
        wanted = weight + 3.0 * (first.up @ first.down)
    x = torch.eye(6, dtype=torch.float64)
    require(
        furthest(first(x) - frozen[0].bias, wanted.T) < 1e-12,
        "LoRA with rank=2, alpha=6 gives another output once a layer with rank=1, alpha=5 exists; "
        "wanted each layer to keep its own scale and matrices: set them on self.",
        evidence="shared",
    )


def _check_modes_and_shapes(answer: LoRAClass) -> None:
    layer = answer(_linear(6, 4), 2, 6.0)
    with torch.no_grad():
        layer.up += 1.0
    x = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)
    rows = layer.train()(x)
    require(
        furthest(layer(x.view(2, 3, 6)), rows.view(2, 3, 4)) < 1e-12,
        "LoRA gives another output for x of 2 × 3 × 6 than for the same rows as 6 × 6.",
        evidence="3 dimensions",
    )
    require(
        furthest(layer.eval()(x), rows) < 1e-12,
        "LoRA gives another output in eval mode than in training mode; wanted the same.",
        evidence="eval mode",
    )


def _check_bytes(answer: LoRAClass) -> str:
    """The layer adds `down` and `up` only, and no tensor of forward or backward may be as large as
    the frozen matrix."""
    frozen, made, added = _linear(WIDE, WIDE), [], 8 * 2 * 2 * WIDE
    kept = new_bytes(measure(lambda: made.append(answer(frozen, 2, 4.0)), model=frozen))
    require(
        kept <= 2 * added,
        f"LoRA of a layer of {WIDE} × {WIDE} adds {kept:,} bytes to it; wanted {added:,}, those of "
        f"`down` and `up`.",
        evidence=("added", rough(kept)),
    )
    (layer,) = made
    x = torch.ones(3, WIDE, dtype=torch.float64, requires_grad=True)
    trace = measure(lambda: layer(x).sum().backward(), model=layer)
    largest = max(e.bytes for e in trace.events if e.phase != "before")
    require(
        largest < 8 * WIDE**2,
        f"LoRA of a layer of {WIDE} × {WIDE} allocates a tensor of {largest:,} bytes in a step, as "
        f"large as the matrix; wanted at most rank × width elements.",
    )
    left = left_bytes(trace)
    require(
        left <= 64,
        f"LoRA of a layer of {WIDE} × {WIDE} leaves {left:,} bytes in memory after a step, beside "
        f"the gradients; wanted none.",
        evidence=("left", rough(left)),
    )
    trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return f"{trained} weights trained beside {WIDE**2 + WIDE:,}, no tensor above {largest:,} bytes"


# ------------------------------------------------------------------ 3.4: validation

Validate = Callable[[nn.Module, Iterable[Batch]], float]
validate: Validate = solution("3.4")
LAYERS = 6
MANY = 8  # batches


class _Dropout(nn.Module):
    """Not nn.Dropout: only its mode turns it off."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, self.training)


def _deep_model(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(VOCABULARY, width)]
    for _ in range(LAYERS):
        layers.append(nn.Sequential(nn.Linear(width, width), nn.GELU(), _Dropout()))
    return nn.Sequential(*layers, nn.Linear(width, VOCABULARY))


_HELD_OUT = {
    "one batch of 12 tokens": _micro_batches(6, 0),
    "batches of 12 and 4 tokens": _micro_batches(6, 0, 4),
    "batches of 12, 8 and no tokens": _micro_batches(6, 0, 2, 6),
    "one batch of no tokens": _micro_batches(6, 6),
}


def _check_validate(answer: Validate) -> str:
    for name, held_out in _HELD_OUT.items():
        _check_mean(answer, f"validate on {name}", held_out)
    one = _HELD_OUT["one batch of 12 tokens"]
    _validated(answer, "validate of a model in eval mode", _deep_model().eval(), one)
    _check_training_goes_on(answer)
    _require_no_graph(answer)
    few, most, allowed = _most(answer, 3), _most(answer, MANY), 2 * _most(validate, MANY)
    require(
        most - few <= SLACK,
        f"validate on {MANY} batches of 64 tokens has up to {most:,} bytes alive, and {few:,} on 3 "
        f"batches; wanted the same: a tensor of every batch stays alive.",
    )
    require(
        most <= allowed,
        f"validate on {MANY} batches of 64 tokens has up to {most:,} bytes alive, beside the model "
        f"and the batches; wanted at most {allowed:,}.",
    )
    return f"means over tokens · no tensor saved for backward · up to {most:,} bytes alive"


def _check_mean(answer: Validate, case: str, held_out: list[Batch]) -> None:
    got, wanted = (_validated(of, case, _deep_model(), held_out) for of in (answer, validate))
    require(
        isinstance(got, float),
        f"{case} gave {'a Tensor' if isinstance(got, Tensor) else repr(got)}; wanted a plain "
        f"float.{' Is there a return?' if got is None else ''}",
    )
    mine, right = distinct(got, wanted, 6)
    off = f"{case} gave {mine}; wanted {right}, the mean over all tokens, without dropout."
    is_near = abs(got - wanted) < 1e-5
    require(is_near, off + ("" if is_near else _why_off_mean(answer, held_out)), evidence=off)


def _why_off_mean(answer: Validate, held_out: list[Batch]) -> str:
    """Whether the mean depends on random numbers: then dropout is on."""
    means = []
    for seed in (1, 2):
        model = _deep_model()
        torch.manual_seed(seed)
        means.append(answer(model, iter(held_out)))
    same = means[0] == means[1] or means[0] != means[0]
    return "" if same else " A second call gives another result, so dropout is on."


def _check_training_goes_on(answer: Validate) -> None:
    model = _deep_model()
    model[0].requires_grad_(False).eval()  # a frozen part in eval mode, and gradients
    for weight in list(model.parameters())[1:]:
        weight.grad = torch.full_like(weight, 0.5)
    case = "validate of a model in training"
    with unchanged(case, rng=True):
        _validated(answer, case, model, _micro_batches(6, 0, 2, 1, 0))
    with torch.no_grad():
        _validated(answer, "validate, called under torch.no_grad(),", model, _micro_batches(6, 0))


def _validated(answer: Validate, case: str, model: nn.Module, held_out: list[Batch]) -> Any:
    """What it returns; it must read once, and leave the model and torch's modes as they came."""
    once = ReadOnce(case, held_out, alive_at_most=2, name="held_out")
    with unchanged(case, model=model):
        got = answer(model, once)
    once.finished()
    return got


def _most(answer: Validate, batches: int) -> int:
    """The most bytes alive during validation, beside the model and the batches."""
    model, held_out = _deep_model(), _micro_batches(32, *[0] * batches)
    trace = measure(lambda: answer(model, iter(held_out)), model=model)
    return max(accumulate(e.bytes for e in trace.events if e.phase != "before"))


def _require_no_graph(answer: Validate) -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        answer(_deep_model(), iter(_HELD_OUT["one batch of 12 tokens"]))
    require(
        not saved,
        f"validate on one batch saves {len(saved)} tensors for backward; wanted none: call the "
        f"model without a graph.",
    )


# ------------------------------------------------------------------ the bill


def accumulated() -> Trace:
    """The bill's step, one sequence at a time."""
    return dry_trace(SETTING, combined("accumulation"))


DAY = Day(
    exercises=(
        checked("3.1", _check_train_epoch, rebuilds=("memlab.accumulation.accumulate",)),
        checked(
            "3.2",
            _check_trained_bytes,
            trained_bytes,
            rebuilds=("memlab.measure", "memlab.meter", "memlab.train.dry_trace"),
        ),
        checked("3.3", _check_lora, rebuilds=("memlab.lora",)),
        checked("3.4", _check_validate, validate),
    ),
    bill=Bill("day 3: one sequence at a time", accumulated),
)
