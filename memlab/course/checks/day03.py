"""Day 3: batch and sequence."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import accumulate, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.course.bill import SETTING
from memlab.course.exercises import Bill, Day, Exercise, WrongAnswer, require
from memlab.course.ledger import FLOAT32
from memlab.course.properties import ReadOnce, same_bytes, unchanged
from memlab.metering import measure
from memlab.model import PRESETS, GPTConfig
from memlab.trace import Trace
from memlab.train import TECHNIQUES, dry_trace

MASKED = -100  # a target that counts nothing: F.cross_entropy's own number for it
Batch = tuple[Tensor, Tensor]

# ------------------------------------------------------------------ 3.1: an epoch of windows

VOCABULARY = 16
TrainEpoch = Callable[
    [nn.Module, torch.optim.Optimizer, Iterable[Batch], int, float], Sequence[float]
]
NO_CLIP = 1e9  # a norm that no gradient here reaches


LEARNING = ("values", "gradients", "state")  # what a training changes


def _new_model(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Embedding(VOCABULARY, width), nn.Linear(width, 2 * width), nn.GELU())
    return nn.Sequential(*layers, nn.Linear(2 * width, VOCABULARY)).double()


def _micro_batches(seq_len: int, *masked: int, batch: int = 2) -> list[Batch]:
    """One for each number, of how many targets at the end of each sequence are masked: in the mean,
    where the one can have fewer than the other."""
    numbers = torch.Generator().manual_seed(1)
    made = []
    for padding in masked:
        text = torch.randint(VOCABULARY, (batch, seq_len + 1), generator=numbers)
        tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
        uneven = min(padding, seq_len - padding, 1)
        targets[::2, seq_len - padding + uneven :] = MASKED
        targets[1::2, seq_len - padding - uneven :] = MASKED
        made.append((tokens, targets))
    return made


# What a case has: the micro-batches, how many are a window, the largest norm of its gradient.
_EPOCHS: dict[str, tuple[list[Batch], int, float]] = {
    "1 micro-batch in a window of 1": (_micro_batches(6, 0), 1, NO_CLIP),
    "2 micro-batches of 12 tokens in a window of 2": (_micro_batches(6, 0, 0), 2, NO_CLIP),
    "4 micro-batches of 12 tokens in windows of 2": (_micro_batches(6, 0, 0, 0, 0), 2, NO_CLIP),
    "2 micro-batches of 12 and 4 tokens in a window of 2": (_micro_batches(6, 0, 4), 2, NO_CLIP),
    "2 micro-batches of 12 and no tokens in a window of 2": (_micro_batches(6, 0, 6), 2, NO_CLIP),
    "3 micro-batches of 12, 8 and 10 tokens in windows of 2": (
        _micro_batches(6, 0, 2, 1),
        2,
        NO_CLIP,
    ),
    "1 micro-batch of no tokens in a window of 1": (_micro_batches(6, 6), 1, NO_CLIP),
    "4 micro-batches, 2 of no tokens, in windows of 1": (
        _micro_batches(6, 0, 6, 3, 6),
        1,
        NO_CLIP,
    ),
    "2 micro-batches of 12 and 4 tokens in a window of 2, the norm at most 0.1": (
        _micro_batches(6, 0, 4),
        2,
        0.1,
    ),
}


def _check_train_epoch(answer: TrainEpoch) -> str:
    for name, (micro_batches, size, max_norm) in _EPOCHS.items():
        case = f"train_epoch with {name}"
        got = _trained(answer, micro_batches, size, max_norm)
        wanted = _full_batches(name)
        _numbers(case, got.losses, len(wanted.losses))
        require(
            got.steps == wanted.steps,
            f"{case} took {got.steps} optimizer steps; wanted {wanted.steps}, one a window.",
        )
        difference = _furthest(got.weights, wanted.weights)
        most = 1e-12 if max_norm == NO_CLIP else 1e-6  # torch adds 1e-6 to the norm
        off = (
            f"{case} leaves weights {difference:.2e} from those that the full batch gives (float64,"
            f" clip_grad_norm_ called {got.clips} times in {wanted.steps} windows); wanted less "
            f"than {most:g}."
        )
        why = "" if difference < most else _why_off(answer, name)
        require(difference < most, off + why, evidence=off)
        losses = [torch.tensor(each, dtype=torch.float64) for each in (got.losses, wanted.losses)]
        require(
            _furthest(losses[:1], losses[1:]) < 1e-5,  # a sum in float32 will do
            f"{case} gave {_in_digits(got.losses)}; wanted the mean loss of each window's tokens, "
            f"{_in_digits(wanted.losses)}.",
        )
    one = _check_activations(answer)
    _check_frozen(answer)
    return f"weights as by the full batch (within 1e-12) · activations of one of 4, {one:,} bytes"


def _check_activations(answer: TrainEpoch) -> int:
    """The bytes of one micro-batch's activations, which are there at a time."""
    one, four = (_most_activations(answer, number) for number in (1, 4))
    logits = 8 * VOCABULARY * _MEASURED[0].numel()  # a name may hold those before
    require(
        four - one <= logits + 64,
        f"train_epoch has up to {four:,} bytes of activations alive in a window of 4 micro-batches;"
        f" wanted the {one:,} of a window of one.",
    )
    most = _most_activations(_one_by_one, 1) * 3 // 2  # a loss can take more ways
    require(
        one <= most,
        f"train_epoch has up to {one:,} bytes of activations alive in a window of one micro-batch; "
        f"wanted those of one forward pass, at most {most:,}.",
        evidence="more than one forward pass",
    )
    return one


def _why_off(answer: TrainEpoch, name: str) -> str:
    """What can be seen of a wrong step: old gradients in it, or only its length is wrong."""
    micro_batches, size, max_norm = _EPOCHS[name]
    steps = {}
    for which, loop, old in (
        ("given", answer, 0.25),
        ("fresh", answer, None),
        ("wanted", partial(_in_windows, _one_by_one), None),
    ):
        model = _with_gradients(_new_model(), old)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loop(model, optimizer, iter(micro_batches), size, max_norm)
        steps[which] = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    if not torch.allclose(steps["given"], steps["fresh"], rtol=1e-6, atol=1e-9):
        return " It depends on the gradients that were there before the epoch: drop them first."
    times = (steps["given"] @ steps["wanted"] / steps["wanted"].square().sum()).item()
    if times > 0 and torch.allclose(steps["given"], times * steps["wanted"], rtol=1e-4, atol=1e-9):
        return f" Its way is right, and {times:.3g} times as long as wanted."
    return ""


def _in_windows(loop: TrainEpoch, model: nn.Module, *settings: Any) -> list[float]:
    """The loop, with each window as one batch."""
    optimizer, micro_batches, size, max_norm = settings
    return list(loop(model, optimizer, _joined(micro_batches, size), 1, max_norm))


def _joined(micro_batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    remaining = iter(micro_batches)
    while window := list(islice(remaining, size)):
        tokens, targets = zip(*window, strict=True)
        yield torch.cat(tokens), torch.cat(targets)


def _with_gradients(model: nn.Module, old: float | None) -> nn.Module:
    """The model with what a step before has left in its gradients."""
    for weight in model.parameters():
        weight.grad = None if old is None else torch.full_like(weight, old)
    return model


def _check_frozen(answer: TrainEpoch) -> None:
    """A weight without a gradient is left as it is, and the others learn as ever."""
    micro_batches, _, _ = _EPOCHS["2 micro-batches of 12 tokens in a window of 2"]
    batch = tuple(torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    got = _trained(answer, micro_batches, 2, NO_CLIP, frozen=True)
    wanted = _trained(_one_by_one, [batch], 1, NO_CLIP, frozen=True)
    difference = _furthest(got.weights, wanted.weights)
    require(
        difference < 1e-12,
        f"train_epoch of a model with a frozen embedding leaves weights {difference:.2e} from "
        f"those that the full batch gives; wanted less than 1e-12.",
    )


class _Epoch:
    """What came of one epoch from fresh weights."""

    def __init__(self, losses: Any, weights: list[Tensor], steps: int, clips: int) -> None:
        self.losses, self.weights, self.steps, self.clips = losses, weights, steps, clips


def _trained(
    answer: TrainEpoch,
    micro_batches: Iterable[Batch],
    size: int,
    max_norm: float,
    *,
    frozen: bool = False,
) -> _Epoch:
    model = _with_gradients(_new_model(), 0.25)
    if frozen:
        model[0].requires_grad_(False).zero_grad()
    groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    read: list[int] = []  # how many micro-batches, at each step
    case = f"train_epoch in windows of {size}"
    once = ReadOnce(case, list(micro_batches), alive_at_most=2 * size, name="micro_batches")
    hook = optimizer.register_step_post_hook(lambda *_: read.append(once.taken))
    with (
        _counted_clips() as clips,
        unchanged(case, may_change=LEARNING, model=model, optimizer=optimizer),
    ):
        losses = answer(model, optimizer, once, size, max_norm)
        once.finished()
    hook.remove()
    _read_in_time(case, read, size)
    return _Epoch(losses, [w.detach().clone() for w in model.parameters()], len(read), len(clips))


def _read_in_time(case: str, read: list[int], size: int) -> None:
    """No micro-batch of the next window before the step of this one."""
    for step, taken in enumerate(read, start=1):
        require(
            taken <= step * size,
            f"{case} has read {taken} micro-batches when it takes step {step}; wanted at most "
            f"{step * size}: the next window begins after the step.",
            evidence=(case, "read ahead"),
        )


@contextmanager
def _counted_clips() -> Iterator[list[int]]:
    """A list with an entry for each call of torch's clipping."""
    clip, calls = nn.utils.clip_grad_norm_, []

    def counting(*args: Any, **named: Any) -> Tensor:
        calls.append(1)
        return clip(*args, **named)

    nn.utils.clip_grad_norm_ = counting
    try:
        yield calls
    finally:
        nn.utils.clip_grad_norm_ = clip


@cache
def _full_batches(name: str) -> _Epoch:
    """The case with each window as one batch."""
    micro_batches, size, max_norm = _EPOCHS[name]
    return _trained(_one_by_one, list(_joined(micro_batches, size)), 1, max_norm)


def _one_by_one(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Batch],
    size: int,
    max_norm: float,
) -> list[float]:
    """Plain training, a step for each batch."""
    losses = []
    for tokens, targets in micro_batches:
        optimizer.zero_grad()
        loss, count = _sum_of_losses(model(tokens), targets)
        loss = loss / max(count, 1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _numbers(case: str, losses: Any, wanted: int) -> None:
    require(
        isinstance(losses, (list, tuple)),
        f"{case} gave {type(losses).__name__}; wanted a list with the loss of each window."
        f"{' Is there a return?' if losses is None else ''}",
    )
    require(
        len(losses) == wanted, f"{case} gave {len(losses)} losses; wanted {wanted}, one a window."
    )
    kinds = {type(loss).__name__ for loss in losses}
    require(
        kinds == {"float"},
        f"{case} gave a list of {', '.join(sorted(kinds))}; wanted plain floats: .item() makes "
        f"one of a tensor, without a graph.",
    )


def _furthest(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    differences = [(a - b).abs().max().item() for a, b in zip(some, others, strict=True)]
    return float("nan") if any(d != d for d in differences) else max(differences)


def _in_digits(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.5f}" for number in numbers)


_MEASURED = _micro_batches(32, 0)[0]


def _most_activations(answer: TrainEpoch, number: int) -> int:
    """The most bytes of activations at one moment of a window of so many equal micro-batches."""
    model = _new_model(width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = partial(answer, model, optimizer, iter([_MEASURED] * number), number, NO_CLIP)
    return most_alive(measure(step, model=model, optimizer=optimizer), "activations")


def most_alive(trace: Trace, category: str) -> int:
    """The most bytes of one category at one moment, wherever the peak of all is."""
    return max(accumulate(e.bytes for e in trace.events if e.category == category), default=0)


# One loop with places where it can be right or wrong.


def _sum_of_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """What is sent back for a micro-batch, and what the window is divided by for it."""
    flat = logits.flatten(0, 1), targets.flatten()
    loss = F.cross_entropy(*flat, ignore_index=MASKED, reduction="sum")
    return loss, int((targets != MASKED).sum())


def _mean_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    loss, tokens = _sum_of_losses(logits, targets)
    return loss / max(tokens, 1), 1


def _mean_times_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    _, tokens = _sum_of_losses(logits, targets)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * tokens, tokens


def _sum_by_all_places(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    loss, _ = _sum_of_losses(logits, targets)
    return loss, targets.numel()


def _train_epoch_but(
    loss_of: Callable[[Tensor, Tensor], tuple[Tensor, int]] = _sum_of_losses,
    *,
    zero: str = "window",
    divide: bool = True,
    clip: str = "divided",
    drop_last: bool = False,
    one_backward: bool = False,
    step: str = "window",
    noted: Callable[[Tensor], Any] = Tensor.item,
) -> TrainEpoch:
    def train_epoch(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: Iterable[Batch],
        size: int,
        max_norm: float,
    ) -> list[Any]:
        remaining, losses = iter(micro_batches), []
        if zero == "once":
            optimizer.zero_grad()
        while window := list(islice(remaining, size)):
            if drop_last and len(window) < size:
                break
            if zero == "window":
                optimizer.zero_grad()
            total, divisor = torch.zeros((), dtype=torch.float64), 0
            for tokens, targets in window:
                if zero == "micro-batch":
                    optimizer.zero_grad()
                loss, count = loss_of(model(tokens), targets)
                if not one_backward:
                    loss.backward()
                if clip == "each":
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                if step == "micro-batch":
                    optimizer.step()
                total, divisor = total + loss, divisor + count
            if one_backward:
                total.backward()
            if clip == "before":
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for weight in model.parameters():
                if divide and weight.grad is not None:  # a frozen weight has none
                    weight.grad /= max(divisor, 1)
            if clip == "divided":
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if step == "window":
                optimizer.step()
            losses.append(noted(total / max(divisor, 1)))
        return losses

    return train_epoch


_TRAIN_EPOCH = Exercise(
    id="3.1",
    title="Accumulate the gradient of a batch",
    minutes=20,
    difficulty=4,
    hints=(
        "What belongs to a micro-batch, what to a window? Forward and backward to the one; "
        "zero_grad, the division, clipping and the step to the other.",
        "Send back the sum of the losses (reduction='sum'), and add up how many targets are not "
        "MASKED. The window ends when `size` micro-batches are through, or when there are none "
        "left: itertools.islice(iterator, size) takes the next ones.",
        "remaining = iter(micro_batches); while window := list(itertools.islice(remaining, size)): "
        "zero_grad; for each micro-batch loss.backward(), total += loss.item(), count += "
        "int((targets != MASKED).sum()). In which order come, after the last micro-batch, "
        "the clip, the step, the division by max(count, 1)?",
    ),
    reference=_train_epoch_but(),
    check=_check_train_epoch,
    rebuilds=("memlab.accumulation.accumulate",),
    wrong_answers=(
        WrongAnswer(
            _train_epoch_but(_mean_loss),
            "The mean of means counts a token more where few others are: add up sums, and divide "
            "once by all tokens of the window.",
        ),
        WrongAnswer(
            _train_epoch_but(_mean_loss, divide=False),
            "Each micro-batch is divided by its own tokens, and so the sum of means is too large.",
        ),
        WrongAnswer(
            _train_epoch_but(_mean_times_tokens),
            "Where all targets are masked the mean is 0 / 0, and times 0 that is still NaN.",
        ),
        WrongAnswer(
            _train_epoch_but(_sum_by_all_places),
            "Masked targets are no tokens: do not divide by them.",
        ),
        WrongAnswer(
            _train_epoch_but(divide=False),
            "The gradients are those of the sum: divide them once, after the last micro-batch.",
        ),
        WrongAnswer(
            _train_epoch_but(clip="each"),
            "Clipped after every micro-batch, when the gradient of the window is not there yet.",
        ),
        WrongAnswer(
            _train_epoch_but(clip="before"),
            "Clipped before the division: it is the mean's gradient whose norm counts.",
        ),
        WrongAnswer(_train_epoch_but(clip="never"), "The gradient is never clipped to max_norm."),
        WrongAnswer(
            _train_epoch_but(drop_last=True),
            "The last window is shorter, and it is a window: nobody trains on it here.",
        ),
        WrongAnswer(
            _train_epoch_but(zero="once"),
            "Without zero_grad a window's gradient is added to that of the one before.",
        ),
        WrongAnswer(
            _train_epoch_but(zero="micro-batch"),
            "zero_grad in front of every micro-batch leaves the gradient of the last alone.",
        ),
        WrongAnswer(
            _train_epoch_but(_mean_loss, zero="micro-batch", step="micro-batch"),
            "One optimizer step a window, not one a micro-batch.",
        ),
        WrongAnswer(
            _train_epoch_but(one_backward=True),
            "One backward for the sum of all losses keeps every graph alive until then: send each "
            "micro-batch back at once.",
        ),
        WrongAnswer(
            _train_epoch_but(noted=lambda loss: loss),
            "A loss that is a tensor may keep its graph for as long as the list lives.",
        ),
    ),
)

# ------------------------------------------------------------------ 3.2: frozen layers

Bytes = dict[str, int]
TrainedBytes = Callable[[GPTConfig, int, int, range], Bytes]
TENSORS = 9  # of weights, in a block

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
        case = (
            f"trained_bytes of V={config.vocab_size} C={config.width} L={config.layers} "
            f"H={config.heads} KV={config.kv_heads} hidden={config.hidden}, {batch} × {seq_len} "
            f"tokens, {trained}"
        )
        got, wanted = (
            answer(config, batch, seq_len, trained),
            trained_bytes(config, batch, seq_len, trained),
        )
        require(
            isinstance(got, dict) and set(got) == set(wanted),
            f"{case} gave {got!r}; wanted a dictionary of {', '.join(wanted)}."
            f"{' Is there a return?' if got is None else ''}",
        )
        units = {
            "gradients": {"numbers a trained block": FLOAT32 * len(trained)},
            "optimizer_state": {"numbers": FLOAT32},
            "activations": {
                "numbers a token": FLOAT32 * batch * seq_len,
                "numbers in all": FLOAT32,
            },
        }
        for what, bytes_ in wanted.items():
            same_bytes(f"{case}: {what}", got[what], bytes_, units[what])
    return f"{len(_FREEZE_CASES)} cases to the byte"


def trained_bytes(config: GPTConfig, batch: int, seq_len: int, trained: range) -> Bytes:
    """Of a step in float32 with AdamW where the blocks of `trained` alone learn."""
    return _trained_bytes_but()(config, batch, seq_len, trained)


def _trained_bytes_but(
    *,
    gradients_of: str = "trained",
    state_of: str = "trained",
    below: str = "nothing",
    above: str = "passed",
    counters: bool = True,
    first_norm_keeps: Callable[[int], int] = lambda C: 0,  # numbers a token, of a width
    last_norm_learns: bool = False,
) -> TrainedBytes:
    def answer(config: GPTConfig, batch: int, seq_len: int, trained: range) -> Bytes:
        C, KV_D = config.width, config.kv_heads * config.head_width
        shared = 2 * C + 2 * KV_D + config.heads + 2 * C  # attention; the two sums
        numbers = {
            "learns": 2 * (2 * C + 1) + shared + 4 * config.hidden,
            "passed": 2 + shared + 3 * config.hidden,
            "nothing": 0,
        }
        blocks = len(trained) * numbers["learns"]
        blocks += (config.layers - trained.stop) * numbers[above] + trained.start * numbers[below]
        ends = first_norm_keeps(C) + config.vocab_size
        ends += 2 * C if last_norm_learns else 0
        block = 2 * C * C + 2 * C * KV_D + 3 * C * config.hidden + 2 * C
        weights = {"trained": len(trained) * block, "all": config.parameters}
        return {
            "gradients": FLOAT32 * weights[gradients_of],
            "optimizer_state": 2 * FLOAT32 * weights[state_of]
            + FLOAT32 * TENSORS * len(trained) * counters,
            "activations": FLOAT32 * (batch * seq_len * (blocks + ends) + 1),
        }

    return answer


_TRAINED_BYTES = Exercise(
    id="3.2",
    title="Freeze, and count what goes",
    minutes=15,
    difficulty=3,
    hints=(
        "Follow the gradient from the loss down: through which blocks does it have to pass, and "
        "where may it stop?",
        "Blocks above the last trained one are passed: they keep what a gradient needs to pass. "
        "Blocks below the first trained one, and the embedding, keep nothing.",
        "numbers a token = len(trained)·trained block + (L - trained.stop)·passed block + V; the "
        "two 1/rms at the ends cancel. activations = 4·(B·T·numbers + 1). With n weights in the "
        "trained blocks: gradients 4·n. What does Adam keep for them, and for each tensor?",
    ),
    reference=_trained_bytes_but(),
    check=_check_trained_bytes,
    rebuilds=("memlab.measure", "memlab.meter", "memlab.train.dry_trace"),
    wrong_answers=(
        WrongAnswer(
            _trained_bytes_but(state_of="all"),
            "Adam has no state for a frozen weight: it never meets a gradient of one.",
        ),
        WrongAnswer(
            _trained_bytes_but(gradients_of="all"), "A frozen weight has no gradient of its own."
        ),
        WrongAnswer(
            _trained_bytes_but(above="nothing"),
            "Frozen blocks above a trained one do keep: the gradient has to pass through them.",
        ),
        WrongAnswer(
            _trained_bytes_but(above="learns"),
            "A frozen matrix needs no input kept: that is what only its own gradient is made of.",
        ),
        WrongAnswer(
            _trained_bytes_but(below="passed"),
            "Below the lowest trained block no gradient passes, so nothing is kept there.",
        ),
        WrongAnswer(
            _trained_bytes_but(below="learns"),
            "Freezing from below frees activations too: there, this still has all of them.",
        ),
        WrongAnswer(
            _trained_bytes_but(counters=False), "Adam's counters: 4 bytes for each trained tensor."
        ),
        WrongAnswer(
            _trained_bytes_but(first_norm_keeps=lambda C: 1),
            "The first norm that learns passes nothing down: its own 1/rms is not kept.",
        ),
        WrongAnswer(
            _trained_bytes_but(first_norm_keeps=lambda C: C),
            "What comes in from below is the embedding's output: nothing there learns, and nobody "
            "keeps it.",
        ),
        WrongAnswer(
            _trained_bytes_but(first_norm_keeps=lambda C: C + 1),
            "The first trained norm passes no gradient down: it keeps neither its x nor 1/rms, and "
            "the embedding's output goes.",
        ),
        WrongAnswer(
            _trained_bytes_but(last_norm_learns=True),
            "The last norm is frozen, like the matrix behind it: of it only 1/rms is kept.",
        ),
    ),
)

# ------------------------------------------------------------------ 3.3: LoRA


class _LoRA(nn.Module):
    """Right; a wrong one has another `forward`, another `merge`, or begins otherwise."""

    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.scale = alpha / rank
        self.down = nn.Parameter(torch.randn_like(frozen.weight[:1]).expand(rank, -1).clone())
        nn.init.normal_(self.down, std=frozen.in_features**-0.5)
        self.up = nn.Parameter(frozen.weight.new_zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.scale * (x @ self.down.T @ self.up.T)

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        self.frozen.weight += self.scale * (self.up @ self.down)
        return self.frozen


LoRAClass = Callable[[nn.Linear, int, float], nn.Module]
WIDE = 128  # of the layer whose bytes are looked at


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)


def _check_lora(answer: LoRAClass) -> str:
    for rank, alpha in ((1, 1.0), (2, 2.0), (2, 6.0), (2, 3)):
        for bias in (False, True):
            _check_one(answer, rank, alpha, bias)
    _check_several(answer)
    return f"{_check_bytes(answer)} · merged, the same within 1e-12"


def _check_several(answer: LoRAClass) -> None:
    """Layers side by side, as in a model: each has random numbers and a scale of its own."""
    frozen = [_linear(6, 4) for _ in range(3)]
    weight = frozen[0].weight.detach().clone()
    first, second = (answer(layer, 2, 6.0) for layer in frozen[:2])
    answer(frozen[2], 1, 5.0)
    require(
        not torch.equal(first.down, second.down),
        "LoRA of two layers, one made after the other, begins both with the same `down`; wanted "
        "random numbers for each: set no seed in a layer.",
        evidence="seeded",
    )
    with torch.no_grad():
        first.up += 1.0
        wanted = weight + 3.0 * (first.up @ first.down)
    x = torch.eye(6, dtype=torch.float64)
    got = first(x) - frozen[0].bias
    require(
        torch.allclose(got, wanted.T, rtol=0, atol=1e-12),
        "LoRA with rank=2, alpha=6 gives something else once a layer with rank=1, alpha=5 is made; "
        "wanted each layer to keep its own scale and matrices: set them on self.",
        evidence="shared",
    )
    as_text = first(x.view(2, 3, 6))  # (B, T, C), as in a model
    require(
        torch.allclose(as_text, first(x).view(2, 3, 4), rtol=0, atol=1e-12),
        "LoRA gives other numbers for x of 2 × 3 × 6 than for the same rows as 6 × 6.",
        evidence="3 dimensions",
    )


def _check_one(answer: LoRAClass, rank: int, alpha: float, bias: bool) -> None:
    frozen = _linear(6, 4, bias)
    case = f"LoRA(nn.Linear(6, 4, bias={bias}), rank={rank}, alpha={alpha:g})"
    weight, added = frozen.weight.detach().clone(), frozen.bias if bias else 0
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6)
    before = (x @ weight.T + added).detach()
    layer = answer(frozen, rank, alpha)
    require(isinstance(layer, nn.Module), f"{case} gave {layer!r}; wanted a module.")
    _trains(case, layer, rank)
    _is_of_the_given(case, layer, frozen)
    at_first = layer(x)
    require(
        isinstance(at_first, Tensor) and at_first.shape == before.shape,
        f"{case} gave {_shape(at_first)} from x of 3 × 6; wanted 3 × 4. Is there a return?",
    )
    _near(f"{case} at first gives", at_first, before, "what the frozen layer gives")
    require(not layer.up.any(), f"{case} begins with an `up` of other numbers; wanted zeros.")
    require(at_first.requires_grad, f"{case} at first gives an output without a graph; wanted one.")
    at_first.square().sum().backward()
    require(
        any(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters()),
        f"{case} has no gradient but zeros at first; wanted one for `up`.",
    )
    with torch.no_grad():
        layer.up += torch.linspace(0.5, 1.5, layer.up.numel(), dtype=x.dtype).view_as(layer.up)
        product = layer.up @ layer.down
        detour = x @ product.T
    _detoured(f"{case} with another `up` gives W x +", layer(x) - before, detour, alpha / rank)
    _same_gradients(case, layer, x, weight + alpha / rank * product)
    merged = _merged(f"merge() of {case}", layer, bias)
    given = f"merge() of {case} makes a layer that gives W x +"
    _detoured(given, merged(x) - before, detour, alpha / rank)


def _merged(case: str, layer: nn.Module, bias: bool) -> nn.Linear:
    merged = layer.merge()
    require(isinstance(merged, nn.Linear), f"{case} gave {_shape(merged)}; wanted an nn.Linear.")
    _of_one_dtype(f"{case} gives a layer whose", merged)
    require(
        (merged.bias is not None) == bias,
        f"{case} gives a layer with bias={not bias}; wanted bias={bias}, as it was.",
    )
    return merged


def _of_one_dtype(whose: str, layer: nn.Module) -> None:
    """Require every weight of it in the dtype of the layer that was frozen, here float64."""
    for name, weight in layer.named_parameters():
        require(
            weight.dtype == torch.float64,
            f"{whose} {name} is {weight.dtype}; wanted torch.float64, as the frozen layer's weight "
            f"has it.",
        )


def _is_of_the_given(case: str, layer: nn.Module, frozen: nn.Linear) -> None:
    require(
        not any(p.requires_grad for p in frozen.parameters())
        and any(p is frozen.weight for p in layer.parameters()),
        f"{case} has not frozen the layer that it was given, or has a copy of it; wanted that "
        f"layer itself: a copy takes its bytes once more.",
        evidence=(case, "copy"),
    )
    require(
        bool((layer.down.detach()[0, :-1] != layer.down.detach()[0, 1:]).any()),
        f"{case} begins with a `down` whose numbers are all alike; wanted random numbers.",
        evidence=(case, "down"),
    )


def _same_gradients(case: str, layer: nn.Module, x: Tensor, changed: Tensor) -> None:
    """x has its gradient through both ways, whatever autograd did not record."""
    inputs = x.detach().clone().requires_grad_()
    given = layer(inputs)
    sent = torch.linspace(-2, 3, given.numel(), dtype=x.dtype).view_as(given)
    require(given.requires_grad, f"{case} gives an output without a graph; wanted one.")
    given.backward(sent)
    wanted = sent @ changed.detach()
    got = inputs.grad
    off = float("inf") if got is None else (got - wanted).abs().max().item()
    require(
        off < 1e-12,
        f"{case} gives x {'no gradient' if got is None else f'a gradient {off:.3f} off'}; wanted "
        f"the one of both ways: the layers in front learn by it.",
        evidence=(case, "gradient of x"),
    )


def _trains(case: str, layer: nn.Module, rank: int) -> None:
    """Require `down` and `up`, in their shapes, and no other weight, to be trained."""
    trained = {name: tuple(p.shape) for name, p in layer.named_parameters() if p.requires_grad}
    wanted = {"down": (rank, 6), "up": (4, rank)}
    require(
        trained == wanted,
        f"{case} trains {_shapes(trained)}; wanted {_shapes(wanted)} and nothing else.",
    )
    _of_one_dtype(f"{case} has weights of which", layer)


def _shapes(weights: dict[str, tuple[int, ...]]) -> str:
    named = [f"{name} ({' × '.join(map(str, shape))})" for name, shape in weights.items()]
    return ", ".join(named) or "nothing"


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return " × ".join(map(str, value.shape)) or "a scalar"
    return type(value).__name__


def _near(what: str, got: Tensor, wanted: Tensor, words: str) -> None:
    difference = (got - wanted).abs().max().item()
    require(
        difference < 1e-12, f"{what} numbers {difference:.3f} off; wanted {words}, within 1e-12."
    )


def _detoured(what: str, got: Tensor, detour: Tensor, scale: float) -> None:
    """Require the detour times the scale; where it is times another one, that is said."""
    difference = (got - scale * detour).abs().max().item()
    times = ((got * detour).sum() / detour.square().sum()).item()
    only_the_scale = torch.allclose(got, times * detour, rtol=0, atol=1e-9)
    gave = f"{times:.3g} · B A x" if only_the_scale else f"numbers {difference:.3f} off"
    require(
        difference < 1e-12,
        f"{what} {gave}; wanted {scale:.3g} · B A x, alpha / rank times.",
        evidence=(what, gave),
    )


def _check_bytes(answer: LoRAClass) -> str:
    """Forward and backward of a wide layer may hold nothing of the size of its matrix."""
    layer = answer(_linear(WIDE, WIDE), 2, 4.0)
    x = torch.ones(3, WIDE, dtype=torch.float64, requires_grad=True)
    trace = measure(lambda: layer(x).sum().backward(), model=layer)
    largest = max(e.bytes for e in trace.events if e.phase != "before")
    matrix = layer.frozen.weight.nbytes if hasattr(layer, "frozen") else 8 * WIDE**2
    require(
        largest < matrix,
        f"LoRA of a layer of {WIDE} × {WIDE} makes a tensor of {largest:,} bytes in a step, as "
        f"large as the matrix; wanted rank × width at most.",
    )
    trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return f"{trained} weights trained beside {WIDE**2 + WIDE:,}, no tensor above {largest:,} bytes"


class _BothRandom(_LoRA):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(frozen, rank, alpha)
        nn.init.ones_(self.up)


class _BothZero(_LoRA):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(frozen, rank, alpha)
        nn.init.zeros_(self.down)


class _DownIsZero(_LoRA):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(frozen, rank, alpha)
        nn.init.zeros_(self.down)
        nn.init.ones_(self.up)


class _Unscaled(_LoRA):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(frozen, rank, alpha)
        self.scale = 1.0


class _ScaledByAlpha(_LoRA):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(frozen, rank, alpha)
        self.scale = alpha


class _ScaledByWholes(_LoRA):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(frozen, rank, alpha)
        self.scale = alpha // rank


class _NotFrozen(_LoRA):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(frozen, rank, alpha)
        self.frozen.requires_grad_(True)


class _BiasTrained(_LoRA):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(frozen, rank, alpha)
        if frozen.bias is not None:
            frozen.bias.requires_grad_(True)


class _UpIsNoParameter(_LoRA):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(frozen, rank, alpha)
        up = self.up.detach()
        del self.up
        self.up = up


class _NoBypass(_LoRA):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.down.T @ self.up.T)


class _WholeChange(_LoRA):
    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.scale * (x @ (self.up @ self.down).T)


class _MergesUnscaled(_LoRA):
    @torch.no_grad()
    def merge(self) -> nn.Linear:
        self.frozen.weight += self.up @ self.down
        return self.frozen


class _MergesNothing(_LoRA):
    def merge(self) -> nn.Linear:
        return self.frozen


class _MergesWithoutBias(_LoRA):
    @torch.no_grad()
    def merge(self) -> nn.Linear:
        merged = nn.Linear(self.frozen.in_features, self.frozen.out_features, bias=False)
        merged.weight = nn.Parameter(self.frozen.weight + self.scale * (self.up @ self.down))
        return merged


_LORA = Exercise(
    id="3.3",
    title="A LoRA layer",
    minutes=15,
    difficulty=3,
    hints=(
        "Two small matrices side by side with the frozen one: x goes both ways, and the results "
        "are added.",
        "self.up begins at zero, so that nothing changes at first, and self.down at random, so "
        "that up gets a gradient. In forward multiply x by down first: (x A) B never has more "
        "than rank numbers a token in between, A B is a whole matrix.",
        "forward: self.frozen(x) + self.scale * (x @ self.down.T @ self.up.T), with scale = alpha "
        "/ rank. Both matrices are nn.Parameter, and frozen.requires_grad_(False). Which change of "
        "self.frozen.weight, under no_grad, gives the same without the detour?",
    ),
    reference=_LoRA,
    check=_check_lora,
    rebuilds=("memlab.lora",),
    wrong_answers=(
        WrongAnswer(
            _BothRandom, "`up` begins at zero: before the first step nothing may be changed."
        ),
        WrongAnswer(
            _BothZero,
            "With both matrices zero each one's gradient is zero, too: `down` begins at random.",
        ),
        WrongAnswer(
            _DownIsZero,
            "The two have changed places: `down` begins at random, and `up` at zero.",
        ),
        WrongAnswer(_Unscaled, "The detour is to be multiplied by alpha / rank."),
        WrongAnswer(_ScaledByAlpha, "The scale is alpha / rank, not alpha."),
        WrongAnswer(_ScaledByWholes, "alpha // rank cuts 1.5 down to 1: divide by /."),
        WrongAnswer(
            _NotFrozen, "The layer is still trained, and so are its gradient and Adam's state."
        ),
        WrongAnswer(_BiasTrained, "A bias is a weight, too: freeze the whole layer."),
        WrongAnswer(_UpIsNoParameter, "A plain tensor is not trained: make it an nn.Parameter."),
        WrongAnswer(
            _NoBypass,
            "The detour takes the frozen layer's place here: it is to be added to its output.",
        ),
        WrongAnswer(
            _WholeChange,
            "up @ down is as large as the frozen matrix, and so is its gradient: let x pass down, "
            "then up.",
        ),
        WrongAnswer(_MergesUnscaled, "merge forgets the scale that forward has."),
        WrongAnswer(_MergesNothing, "merge gives the frozen layer back without the change."),
        WrongAnswer(_MergesWithoutBias, "What merge gives has lost the bias."),
    ),
)

# ------------------------------------------------------------------ 3.4: validation

Validate = Callable[[nn.Module, Iterable[Batch]], float]
LAYERS = 6
MANY = 8  # batches


def _deep_model(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(VOCABULARY, width)]
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, VOCABULARY))


_HELD_OUT = {
    "one batch of 12 tokens": _micro_batches(6, 0),
    "batches of 12 and 4 tokens": _micro_batches(6, 0, 4),
    "batches of 12, 8 and no tokens": _micro_batches(6, 0, 2, 6),
    "one batch of no tokens": _micro_batches(6, 6),
}


def _check_validate(answer: Validate) -> str:
    for name, held_out in _HELD_OUT.items():
        case, model = f"validate on {name}", _deep_model()
        _check_mean(answer, case, model, held_out)
        require(
            model.training and all(module.training for module in model.modules()),
            f"{case} leaves the model in eval mode; wanted it in training mode, as it came.",
        )
        require(
            all(weight.requires_grad for weight in model.parameters()),
            f"{case} leaves weights that require no gradient; training has to go on after it.",
        )
        require(
            torch.is_grad_enabled(),
            f"{case} leaves gradients off for all that follows; training has to go on after it: "
            f"`with torch.no_grad():` ends by itself.",
        )
    model = _deep_model().eval()
    answer(model, iter(_HELD_OUT["one batch of 12 tokens"]))
    require(not model.training, "validate of a model in eval mode leaves it in training mode.")
    _check_training_goes_on(answer)
    most, allowed = _most(answer, MANY), _most(_validate, MANY)
    saved = _saved_for_backward(answer)
    graph = f"Autograd keeps a graph, with {saved} tensors of one batch in it" if saved else ""
    require(
        most <= 2 * allowed,
        f"validate on {MANY} batches of 64 tokens holds {most:,} bytes at its fullest moment; "
        f"wanted at most {2 * allowed:,}. {graph or 'Something of every batch stays'}.",
    )
    return f"means over tokens · {most:,} bytes at most, and {saved} tensors saved for backward"


def _check_mean(answer: Validate, case: str, model: nn.Module, held_out: list[Batch]) -> None:
    got, wanted = _validated(answer, case, model, held_out), _validate(_deep_model(), held_out)
    require(
        isinstance(got, float),
        f"{case} gave {'a Tensor' if isinstance(got, Tensor) else repr(got)}; wanted a plain "
        f"float.{' Is there a return?' if got is None else ''}",
    )
    off = f"{case} gave {got:.6f}; wanted {wanted:.6f}, the mean over all tokens, without dropout."
    is_near = abs(got - wanted) < 1e-5
    require(is_near, off + ("" if is_near else _why_off_mean(answer, held_out)), evidence=off)


def _why_off_mean(answer: Validate, held_out: list[Batch]) -> str:
    """A mean that hangs on random numbers has dropout in it."""
    means = []
    for seed in (1, 2):
        model = _deep_model()
        torch.manual_seed(seed)
        means.append(answer(model, iter(held_out)))
    same = means[0] == means[1] or means[0] != means[0]
    return "" if same else " Called again it gives another number, so some dropout is on."


def _check_training_goes_on(answer: Validate) -> None:
    model = _deep_model()
    model[0].requires_grad_(False)  # a model in training: a frozen part, and gradients
    for weight in list(model.parameters())[1:]:
        weight.grad = torch.full_like(weight, 0.5)
    case = "validate of a model in training"
    with unchanged(case, model=model):
        _validated(answer, case, model, _micro_batches(6, 0, 2, 1, 0))
    case = "validate, called under torch.no_grad(),"
    with torch.no_grad(), unchanged(case, model=model):
        _validated(answer, case, model, _micro_batches(6, 0))


def _validated(answer: Validate, case: str, model: nn.Module, held_out: list[Batch]) -> Any:
    once = ReadOnce(case, held_out, alive_at_most=2, name="held_out")
    got = answer(model, once)
    once.finished()
    return got


def _most(answer: Validate, batches: int) -> int:
    """The most bytes that validation holds at one moment, on top of the model and its text."""
    model, held_out = _deep_model(), _micro_batches(32, *[0] * batches)
    trace = measure(lambda: answer(model, iter(held_out)), model=model)
    own = ("parameters", "inputs")
    return max(accumulate(e.bytes for e in trace.events if e.category not in own))


def _saved_for_backward(answer: Validate) -> int:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        answer(_deep_model(), iter(_HELD_OUT["one batch of 12 tokens"]))
    return len(saved)


def _mean_over_tokens(sums: list[Tensor], counts: list[int]) -> Any:
    return sum(sums).item() / max(sum(counts), 1)


def _mean_of_means(sums: list[Tensor], counts: list[int]) -> float:
    means = [loss.item() / max(count, 1) for loss, count in zip(sums, counts, strict=True)]
    return sum(means) / len(means)


def _summed_at_once(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return _sum_of_losses(model(tokens), targets)[0]


def _graph_for_the_model(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.enable_grad():
        logits = model(tokens)
    return _sum_of_losses(logits, targets)[0]


def _validate_but(
    *,
    around: Callable[[], Any] = torch.no_grad,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] = _summed_at_once,
    note: Callable[[Tensor], Tensor] = Tensor.detach,
    mean: Callable[[list[Tensor], list[int]], Any] = _mean_over_tokens,
    to_eval: bool = True,
    back: str = "as it came",
    logits_first: bool = False,
    freeze: bool = False,
) -> Validate:
    def validate(model: nn.Module, held_out: Iterable[Batch]) -> float:
        training, sums, counts = model.training, [], []
        if freeze:
            model.requires_grad_(False)
        if to_eval:
            model.eval()
        with around():
            if logits_first:
                pairs = [(model(tokens), targets) for tokens, targets in held_out]
                sums = [_sum_of_losses(*pair)[0] for pair in pairs]
                counts = [int((targets != MASKED).sum()) for _, targets in pairs]
            else:
                for tokens, targets in held_out:
                    sums.append(note(loss_of(model, tokens, targets)))
                    counts.append(int((targets != MASKED).sum()))
        if back != "never":
            model.train(training or back == "always")
        return mean(sums, counts)

    return validate


_validate = _validate_but()


_VALIDATE = Exercise(
    id="3.4",
    title="Validate without a graph",
    minutes=10,
    difficulty=2,
    hints=(
        "Who keeps what forward makes? Autograd, for a backward that never comes.",
        "torch.no_grad() or inference_mode() has to be around the call of the model. model.eval() "
        "is something else: it turns dropout off.",
        "training = model.training; model.eval(); with torch.no_grad(): for each batch total += "
        "the sum of losses .item(), count += its tokens. What is put back, and by what do you "
        "divide where no token counts?",
    ),
    reference=_validate,
    check=_check_validate,
    wrong_answers=(
        WrongAnswer(
            _validate_but(around=nullcontext, note=lambda loss: loss),
            "Losses in a list, each with its graph: all that forward made for every batch stays.",
        ),
        WrongAnswer(
            _validate_but(around=nullcontext),
            "model.eval() turns dropout off, not the graph: while a batch is at work, all that "
            "backward would need is kept.",
        ),
        WrongAnswer(
            _validate_but(loss_of=_graph_for_the_model),
            "no_grad comes too late: the model's forward pass has to be inside.",
        ),
        WrongAnswer(
            _validate_but(logits_first=True),
            "The logits of all batches are held at once: reduce each batch to two numbers first.",
        ),
        WrongAnswer(
            _validate_but(mean=_mean_of_means),
            "The mean of means counts a token more where few others are.",
        ),
        WrongAnswer(_validate_but(to_eval=False), "Dropout is still on: call model.eval()."),
        WrongAnswer(
            _validate_but(back="never"), "Afterwards dropout stays off in training: go back."
        ),
        WrongAnswer(
            _validate_but(back="always"),
            "Go back to the mode that the model was in, whichever that was.",
        ),
        WrongAnswer(
            _validate_but(freeze=True),
            "requires_grad_(False) does without a graph, and then nothing is trained any more.",
        ),
        WrongAnswer(
            _validate_but(mean=lambda sums, counts: sum(sums) / max(sum(counts), 1)),
            "A tensor on a GPU is memory there, and hides a graph where there is one: .item().",
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def accumulated() -> Trace:
    """The bill's step, one sequence at a time."""
    return dry_trace(SETTING, TECHNIQUES["accumulation"])


DAY = Day(
    exercises=(_TRAIN_EPOCH, _TRAINED_BYTES, _LORA, _VALIDATE),
    bill=Bill("day 3: one sequence at a time", accumulated),
)
