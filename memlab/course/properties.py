"""Properties that a check requires of an answer; each failure is one sentence.

    with unchanged("train(…)", may_change={"values", "gradients"}, model=model, rows=rows):
        answer(model, rows)
    same_gradients("layer(x)", gradients(mine, x=x), gradients(reference, x=x))
    limited("layer(x)", peaks(lambda: mine(x)), forward=4096, backward=8192)

Symmetric cases hide mistakes: equal sizes, one parameter, default betas, one dtype. `SIZES`,
`elements`, `parameters` and `ADAM_SETTINGS` avoid them. Functions that an answer must not call are
listed in its exercise's `rebuilds` (see ownwork.py).
"""

import gc
import random
import tracemalloc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from memlab.configs.shapes import GPTConfig
from memlab.course.exercises import Wrong, distinct, equal, first_line, require
from memlab.metering import measure
from memlab.trace import Event, Trace

# ------------------------------------------------------------------ arguments stay unchanged

# The kinds of facts that `unchanged` compares; `may_change` takes some of these.
KINDS = ("values", "gradients", "requires_grad", "storage", "hooks", "mode", "settings", "state")
_HOOKS = ("hooks", "hooks_with_kwargs", "hooks_always_called")
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


class _Fact(NamedTuple):
    """A fact to compare before and after: its kind, its name in messages, its value."""

    kind: str
    words: str
    value: Any


@contextmanager
def unchanged(
    case: str, *, may_change: Iterable[str] = (), rng: bool = False, **things: Any
) -> Iterator[None]:
    """Require the named things to be unchanged; `may_change` leaves kinds of facts out.

    Tensors keep values, version, dtype, storage, requires_grad and gradient. Modules keep their
    tensors, hooks and every submodule's mode. Optimizers keep their groups and state. Lists and
    dicts keep their items. Grad mode, default dtype and autocast are always compared, and with
    `rng` the random states too.
    """
    left_out = set(may_change)
    assert left_out <= set(KINDS), f"{left_out - set(KINDS)} are no kinds; there are {KINDS}"
    before = _all_facts(things, rng)
    yield
    after = {(fact.kind, fact.words): fact.value for fact in _all_facts(things, rng)}
    for kind, words, value in before:
        if kind not in left_out:
            now = after.pop((kind, words), "missing")
            message = _changed(kind, words, value, now)
            require(_equal(value, now), f"{case} {message}", evidence=(case, kind, words))
    known = {(fact.kind, fact.words) for fact in before}
    for kind, words in after:
        if kind not in left_out and (kind, words) not in known:
            require(False, f"{case} adds {words}; wanted it as it was.", evidence=(case, kind))


def _changed(kind: str, words: str, before: Any, after: Any) -> str:
    if kind == "values" and isinstance(before, int):
        return f"writes into {words}; wanted it as it was."
    if words.startswith("the memory of "):
        return f"moves {words.removeprefix('the memory of ')} to new memory; wanted it in place."
    is_id = words.startswith(("which object ", "which tensor "))
    if is_id or kind in ("values", "gradients") or isinstance(before, (Tensor, np.ndarray)):
        return f"changes {words}; wanted it as it was."
    return f"changes {words} from {_short(before)} to {_short(after)}; wanted it as it was."


def _short(value: Any) -> str:
    text = "others" if isinstance(value, tuple) else " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:80]} …"


def _all_facts(things: Mapping[str, Any], rng: bool) -> list[_Fact]:
    seen: dict[int, Any] = {}  # keeps objects alive, so that no id is reused
    facts = [fact for name, thing in things.items() for fact in _facts(name, thing, seen)]
    return facts + list(_ambient(rng))


def _facts(path: str, thing: Any, seen: dict[int, Any]) -> Iterator[_Fact]:
    if isinstance(thing, _PLAIN):
        yield _Fact("settings", path, thing)
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, Tensor):
        yield from _tensor_facts(path, thing)
    elif isinstance(thing, nn.Module):
        yield from _module_facts(path, thing, seen)
    elif isinstance(thing, torch.optim.Optimizer):
        yield from _optimizer_facts(path, thing, seen)
    elif isinstance(thing, torch.Generator):
        yield _Fact("state", f"the state of {path}", thing.get_state())
    elif isinstance(thing, Mapping):
        yield _Fact("settings", f"the keys of {path}", list(thing))
        for key, part in thing.items():
            yield from _item_facts(f"{path}[{key!r}]", part, seen)
    elif isinstance(thing, (list, tuple)):
        yield _Fact("settings", f"the length of {path}", len(thing))
        for place, part in enumerate(thing):
            yield from _item_facts(f"{path}[{place}]", part, seen)


def _item_facts(path: str, part: Any, seen: dict[int, Any]) -> Iterator[_Fact]:
    if not isinstance(part, _PLAIN):
        yield _Fact("settings", f"which object {path} is", id(part))
    yield from _facts(path, part, seen)


def _tensor_facts(path: str, tensor: Tensor) -> Iterator[_Fact]:
    layout = {"dtype": tensor.dtype, "device": tensor.device, "shape": list(tensor.shape)}
    for name, value in layout.items():
        yield _Fact("storage", f"the {name} of {path}", value)
    yield _Fact("values", f"the values of {path}", tensor.detach().clone())
    if not tensor.is_inference():
        yield _Fact("values", f"{path} in place", tensor._version)
    yield _Fact("storage", f"the memory of {path}", (tensor.data_ptr(), tensor.stride()))
    yield _Fact("requires_grad", f"requires_grad of {path}", tensor.requires_grad)
    if tensor.is_leaf:
        gradient = None if tensor.grad is None else tensor.grad.detach().clone()
        yield _Fact("gradients", f"the gradient of {path}", gradient)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name, None) or {}
        yield _Fact("hooks", f"{path}.{name}", tuple(map(id, hooks.values())))


def _module_facts(path: str, module: nn.Module, seen: dict[int, Any]) -> Iterator[_Fact]:
    for name, part in module.named_modules():
        place = f"{path}.{name}" if name else path
        yield _Fact("mode", f"{place}.training", part.training)
        yield _Fact("settings", f"the class of {place}", type(part))
        for attribute, value in vars(part).items():
            if attribute.endswith(_HOOKS) and isinstance(value, Mapping):
                ids = tuple(map(id, value.values()))
                yield _Fact("hooks", f"{place}.{attribute}", ids)
            elif not attribute.startswith("_") and attribute != "training":
                yield from _item_facts(f"{place}.{attribute}", value, seen)
        yield _Fact("settings", f"the parts of {place}", [n for n, _ in part.named_children()])
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield _Fact("storage", f"which tensor {path}.{name} is", id(tensor))
        yield from _facts(f"{path}.{name}", tensor, seen)


def _optimizer_facts(
    path: str, optimizer: torch.optim.Optimizer, seen: dict[int, Any]
) -> Iterator[_Fact]:
    for place, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            kept = tuple(map(id, value)) if key == "params" else value
            yield _Fact("settings", f"{path}.param_groups[{place}][{key!r}]", kept)
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    yield _Fact("state", f"the state of {path}", [_copied(value) for value in state])
    for name, value in vars(optimizer).items():
        if name.endswith("hooks") and isinstance(value, Mapping):
            yield _Fact("hooks", f"{path}.{name}", tuple(map(id, value.values())))


def _ambient(rng: bool) -> Iterator[_Fact]:
    yield _Fact("mode", "whether gradients are recorded", torch.is_grad_enabled())
    yield _Fact("mode", "inference mode", torch.is_inference_mode_enabled())
    yield _Fact("mode", "the default dtype", torch.get_default_dtype())
    yield _Fact("mode", "autocast", torch.is_autocast_enabled("cpu"))
    if rng:
        yield _Fact("state", "torch's random state", torch.get_rng_state())
        yield _Fact("state", "Python's random state", [random.getstate()])
        of_numpy: Any = np.random.get_state()
        yield _Fact("state", "numpy's random state", of_numpy[1].copy())


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _equal(before: Any, after: Any) -> bool:
    """Compare bit for bit: NaN equals itself, and -0.0 differs from 0.0."""
    if type(before) is not type(after):
        return False
    if isinstance(before, Tensor):
        alike = before.dtype == after.dtype and before.shape == after.shape
        return alike and torch.equal(_bits(before), _bits(after))
    if isinstance(before, np.ndarray):
        return np.array_equal(before, after)
    if isinstance(before, list):
        return len(before) == len(after) and all(map(_equal, before, after))
    return bool(before == after)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


# ------------------------------------------------------------------ iterables read once


class ReadOnce:
    """An iterable that creates its items on demand, as a data loader does.

    It can be iterated over once. At most `alive_at_most` items may be in memory at one time; a
    `for` loop briefly holds two, the last and the next. `finished()` requires that it was read to
    its end.
    """

    def __init__(
        self, case: str, items: Sequence[Any], *, alive_at_most: int, name: str = "the iterable"
    ) -> None:
        self._case, self._name, self._limit = case, name, alive_at_most
        self._items = items
        self._alive: list[list[StorageWeakRef]] = []
        self._starts = self.taken = self.most_alive = 0
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        self._starts += 1
        self._require_one_start()
        return self._handed_out()

    def _handed_out(self) -> Iterator[Any]:
        for item in self._items:
            self.taken += 1
            box = [_fresh(item)]
            self._alive.append([StorageWeakRef(t.untyped_storage()) for t in _tensors_in(box)])
            self._count()
            yield box.pop()  # the box no longer holds it afterwards
        self._ended = True

    def _count(self) -> None:
        if self._number_alive() > self._limit:
            gc.collect()  # reference cycles of the learner's objects are not held by the loop
        self.most_alive = max(self.most_alive, self._number_alive())
        self._require_few_alive()

    def _number_alive(self) -> int:
        self._alive = [refs for refs in self._alive if not all(ref.expired() for ref in refs)]
        return len(self._alive)

    def _require_one_start(self) -> None:
        require(
            self._starts <= 1,
            f"{self._case} iterates over {self._name} a second time; wanted one pass: a stream can "
            f"be read only once.",
            evidence=(self._case, "second pass"),
        )

    def _require_few_alive(self) -> None:
        require(
            self.most_alive <= self._limit,
            f"{self._case} has {self.most_alive} items of {self._name} in memory at once; wanted "
            f"at most {self._limit}: read them as you use them.",
            evidence=(self._case, "items alive"),
        )

    def finished(self) -> None:
        """Require one full pass, even of an answer that caught an earlier failure."""
        self._require_one_start()
        self._require_few_alive()
        require(
            self._ended or self.taken == len(self._items),
            f"{self._case} read {self.taken} of the {len(self._items)} items of {self._name}; "
            f"wanted all of them.",
            evidence=(self._case, "items read"),
        )


def _fresh(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.clone()
    if isinstance(item, (list, tuple)):
        return type(item)(_fresh(part) for part in item)
    return item


def _tensors_in(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item]
    return (
        [t for part in item for t in _tensors_in(part)] if isinstance(item, (list, tuple)) else []
    )


# ------------------------------------------------------------------ values and gradients


def same_values(case: str, got: Any, wanted: Tensor, *, within: float = 0.0) -> float:
    """Require equal shape and dtype, and values within this share of the largest |wanted|; return
    the difference."""
    is_tensor(case, got, dtype=wanted.dtype, shape=tuple(wanted.shape))
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        return float("nan")
    largest = wanted.detach().double().abs().max() if within and wanted.numel() else 0.0
    require_none_wrong(case, got, wanted, differences(got, wanted) > within * largest)
    return furthest(got, wanted)


def rounding(dtype: torch.dtype, *, terms: float = 256) -> float:
    """Return how far a sum of `terms` terms may be off on another CPU, which adds in another order,
    as a share of the size of what was summed (as in tests/close.py)."""
    return terms * torch.finfo(dtype).eps


def require_none_wrong(case: str, got: Tensor, wanted: Tensor, wrong: Tensor) -> None:
    """Require a mask without True. The message shows the first element that it marks, with as many
    digits as it takes to tell the two values apart."""
    places = wrong.nonzero().tolist()
    if not places:
        return
    place = tuple(places[0])
    at = f": element {place[0] if len(place) == 1 else place}" if place else ""
    mine, right = distinct(got[place].item(), wanted[place].item())
    count = f" {len(places):,} of {wrong.numel():,} elements are wrong." if len(wrong.shape) else ""
    require(False, f"{case}{at} is {mine}; wanted {right}.{count}")


def distinct_elements(got: Tensor, wanted: Tensor, most: int = 8) -> tuple[str, str]:
    """Format up to `most` elements of two unequal tensors, the one that differs most among them,
    with as many digits as it takes to tell the two texts apart."""
    comparable = got.shape == wanted.shape and got.numel() > 0
    place = int(differences(got, wanted).argmax()) if comparable else 0
    begin = 0 if place < most else place
    shown = [x.detach().flatten()[begin : begin + most].tolist() for x in (got, wanted)]
    before, after = "…, " * (begin > 0), ", …" * (begin + most < got.numel())
    mine, right = (f"[{before}{text[1:-1]}{after}]" for text in distinct(shown[0], shown[1]))
    return mine, right


def furthest(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference. NaN and infinity equal only themselves."""
    apart = differences(got, wanted)
    return apart.max().item() if apart.numel() else 0.0


def differences(got: Tensor, wanted: Tensor) -> Tensor:
    """Return the differences of all elements. NaN and infinity equal only themselves."""
    a, b = got.detach().double(), wanted.detach().double()
    alike = (a == b) | (a.isnan() & b.isnan())
    return torch.where(alike, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)


def gradients(
    call: Callable[..., Any], *, module: nn.Module | None = None, seed: int = 0, **inputs: Any
) -> dict[str, Tensor | None]:
    """Return the gradient of every input and parameter by name, and each output as "output 0",
    with the requires_grad that the call gave it.

    `call(**inputs)` gets copies of the inputs, and floating-point copies require gradients. Each
    element of each output gets a random upstream gradient. Requires that neither pass changes the
    inputs.
    """
    given = {name: _as_leaf(value) for name, value in inputs.items()}
    weights = dict(module.named_parameters()) if module is not None else {}
    for weight in weights.values():
        weight.grad = None
    outputs = _tensors_in(_as_tuple(call(**given)))
    random_weights = torch.Generator().manual_seed(seed)
    sent = [out for out in outputs if out.requires_grad]
    upstream = [torch.randn(o.shape, generator=random_weights).to(o.dtype) for o in sent]
    if sent:
        torch.autograd.backward(sent, upstream)
    for name, tensor in given.items():
        is_kept = not isinstance(tensor, Tensor) or _equal(inputs[name].detach(), tensor.detach())
        require(is_kept, f"the values of {name} change in a call; wanted them as they were.")
    found: dict[str, Tensor | None] = {}
    for place, out in enumerate(outputs):
        found[f"output {place}"] = out.detach().requires_grad_(out.requires_grad)
    for name, tensor in (*given.items(), *weights.items()):
        if isinstance(tensor, Tensor) and tensor.is_leaf and tensor.requires_grad:
            found[name] = tensor.grad
    return found


def _as_leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _as_tuple(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


def same_gradients(
    case: str,
    got: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    *,
    within: float = 0.0,
) -> None:
    """Require the results of `gradients` for an answer to equal those for the reference, within
    this share of the largest element of each."""
    outputs = [value for name, value in got.items() if name.startswith("output ")]
    is_cut_off = bool(outputs) and not any(out is not None and out.requires_grad for out in outputs)
    for name, right in wanted.items():
        mine = got.get(name)
        what = name if name.startswith("output ") else f"gradient of {name}"
        why = " (its result does not require grad)" if is_cut_off and mine is None else ""
        require(
            (mine is None) == (right is None),
            f"{case} gives {'no' if mine is None else 'a'} {what}{why}; wanted "
            f"{'none' if right is None else 'one'}.",
        )
        if mine is not None and right is not None:
            same_values(f"{case}: the {what}", mine, right, within=within)


def same_second_backward(case: str, out: Tensor, x: Tensor) -> None:
    """Require a second backward pass through one graph to give the gradient of x again."""
    again = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2)]
    require(
        torch.equal(*again),
        f"{case} gives a different gradient in a second backward pass; wanted the same.",
    )


# ------------------------------------------------------------------ memory of both passes


class Peaks(NamedTuple):
    """The peak bytes in each pass, without the bytes alive before, and what stays alive: `held`
    between the passes besides the outputs, `left` besides the gradients when the outputs are gone,
    with or without backward."""

    forward: int
    backward: int
    held: int = 0
    left: int = 0


def peaks(forward: Callable[[], Any], *, model: nn.Module | None = None) -> Peaks:
    """Measure `forward()`, and then `forward()` and backward from its outputs. The upstream
    gradient is ones, and counts unless the output has a single element."""
    outputs: list[Tensor] = []

    def run() -> None:
        outputs[:] = _tensors_in(_as_tuple(forward()))

    def run_and_clear() -> None:
        run()
        outputs.clear()

    def step() -> None:
        run()
        sent = [out for out in outputs if out.requires_grad]
        ones = [None if out.numel() == 1 else torch.ones_like(out) for out in sent]
        torch.autograd.backward(sent, ones)
        outputs.clear()

    trace = measure(run, model=model)
    held = new_bytes(trace) - storage_bytes(outputs)
    has_graph = any(out.requires_grad for out in outputs)
    outputs.clear()
    # A Function whose ctx holds its own result keeps both, in a cycle.
    left = new_bytes(measure(run_and_clear, model=model))
    if has_graph:
        trace = measure(step, model=model)
        left = max(left, left_bytes(trace))
    alive, most = 0, {"forward": 0, "backward": 0}
    for event in _new(trace):
        alive += event.bytes
        phase = "backward" if event.phase == "backward" else "forward"
        most[phase] = max(most[phase], alive)
    return Peaks(**most, held=max(held, 0), left=max(left, 0))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def new_bytes(trace: Trace) -> int:
    """Bytes alive at the end of a trace that were not there before its step."""
    return sum(event.bytes for event in _new(trace))


def left_bytes(trace: Trace) -> int:
    """Return `new_bytes` without those of gradients."""
    return sum(event.bytes for event in _new(trace) if event.category != "gradients")


def _new(trace: Trace) -> list[Event]:
    return [event for event in trace.events if event.phase != "before"]


def returned_gradients(result: Tensor) -> tuple[Any, ...]:
    """Return the gradients that a Function's backward gives, before autograd casts them to the
    dtypes of its inputs; nothing if the result is not a Function's own."""
    node = result.grad_fn
    if not isinstance(node, BackwardCFunction):
        return ()
    sent = node.apply(torch.ones_like(result))
    return sent if isinstance(sent, tuple) else (sent,)


def most_alive(trace: Trace, sizes: Collection[int]) -> int:
    """Return the most bytes alive at once in tensors with one of these numbers of elements, beside
    those from before the step."""
    alive: dict[int, int] = {}
    most = 0
    for event in trace.events:
        if event.bytes < 0:
            alive.pop(event.storage, None)
        elif event.phase != "before" and prod(event.shape) in sizes:
            alive[event.storage] = event.bytes
            most = max(most, sum(alive.values()))
    return most


def peak_bytes(trace: Trace) -> int:
    """Return the most bytes alive at once, beside those from before the step."""
    return max(accumulate(event.bytes for event in _new(trace)), default=0)


def survives_a_reused_address(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> bool:
    """Return whether saved-tensor hooks hand a tensor back unchanged if it reuses the address of an
    earlier tensor, whose packed form is still there."""
    memory = torch.zeros(512).numpy()
    first = torch.from_numpy(memory).requires_grad_()
    kept = pack(first)  # noqa: F841 - alive until the second tensor has come back
    del first
    memory += 1
    second = torch.from_numpy(memory).requires_grad_()
    return torch.equal(unpack(pack(second)), second)


def limited(case: str, measured: Peaks, **limits: int | None) -> None:
    """Require figures of `Peaks`, such as forward=4096, to stay within their limits in bytes."""
    for name, limit in limits.items():
        bytes_ = getattr(measured, name)
        require(
            limit is None or bytes_ <= limit,
            f"{case} {_WHEN_ALIVE[name].format(f'{bytes_:,}')}; wanted at most {limit or 0:,}.",
            evidence=(case, name, rough(bytes_)),
        )


def rough(bytes_: int) -> str:
    """Return two digits of a number of bytes, as evidence: two codings of one mistake may differ by
    a few bytes, and two mistakes by more."""
    return f"{bytes_:.1e}"


_WHEN_ALIVE = {
    "forward": "has up to {} bytes alive in forward, beside its arguments",
    "backward": "has up to {} bytes alive in backward, beside its arguments",
    "held": "holds {} bytes between forward and backward, beside its result",
    "left": "leaves {} bytes in memory when its result is gone, beside the gradients",
}


SLACK = 64  # bytes, for a counter or a scale in a tensor


def as_little_memory(
    case: str,
    answer: Callable[[], Any],
    reference: Callable[[], Any],
    *,
    room: int,
    kept: int = SLACK,
) -> Peaks:
    """Require the answer to keep at most `kept` bytes more than the reference, and to peak at most
    `room` bytes above it: enough for another way to write it, too little for what the technique
    avoids."""
    most, got = peaks(reference), peaks(answer)
    limited(case, got, held=most.held + kept, left=most.left + kept)
    limited(case, got, forward=most.forward + room, backward=most.backward + room)
    return got


def no_tensor_above(case: str, run: Callable[[], Any], most: int) -> None:
    """Require each tensor that a run allocates to have at most `most` bytes."""
    largest = max((event.bytes for event in _new(measure(run))), default=0)
    require(
        largest <= most,
        f"{case} allocates a tensor of {largest:,} bytes; wanted none above {most:,}.",
        evidence=(case, "largest tensor", rough(largest)),
    )


def limited_outside_of_tensors(case: str, run: Callable[[], Any], most: int) -> None:
    """Require a run to allocate fewer than `most` bytes in numpy arrays, lists and other Python
    objects, which the meter does not see."""
    tracemalloc.start()
    try:
        run()
        outside = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    require(
        outside < most,
        f"{case} takes {outside:,} bytes outside of tensors; wanted less than {most:,}.",
        evidence=(case, "bytes outside of tensors"),
    )


def same_bytes(case: str, got: Any, wanted: int, units: Mapping[str, int]) -> None:
    """Require a number of bytes. The message gives the difference in the first unit that divides
    it: {"elements per token": 4 * tokens, "elements": 4}."""
    gap = f" {_gap(got - wanted, units)}" if type(got) is int and got != wanted else ""
    equal(case, got, wanted, "bytes", also=gap)


def _gap(off: int, units: Mapping[str, int]) -> str:
    words, size = next(
        ((words, size) for words, size in units.items() if off % size == 0), ("bytes", 1)
    )
    number = abs(off) // size
    if number == 1:
        for many in ("elements", "numbers", "bytes"):
            words = words.replace(many, many[:-1], 1)
    return f"That is {number:,} {words} too {'many' if off > 0 else 'few'}."


def same_byte_counts(
    case: str, got: Any, wanted: Mapping[str, int], units: Mapping[str, Mapping[str, int]]
) -> None:
    """Require a dictionary of byte counts. Each count has its own units."""
    has_keys(case, got, wanted)
    for name, bytes_ in wanted.items():
        same_bytes(f"{case}: {name}", got[name], bytes_, units[name])


def dimensions(config: GPTConfig) -> str:
    """Format a model's sizes for a message: "V=10 C=8 L=1 H=2 KV=2 intermediate_size=5"."""
    return (
        f"V={config.vocab_size} C={config.hidden_size} L={config.layers} H={config.heads} "
        f"KV={config.kv_heads} intermediate_size={config.intermediate_size}"
    )


def at_most_bytes(what: str, got: int, limit: int) -> None:
    """Require at most `limit` bytes; `what` names their purpose."""
    require(got <= limit, f"{what}: {got:,} bytes; wanted at most {limit:,}.")


# ------------------------------------------------------------------ types and storage of results


def is_tensor(
    case: str,
    got: Any,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    device: str | None = None,
    contiguous: bool = False,
) -> None:
    """Require a tensor with the given properties."""
    gave = "None" if got is None else _an(type(got).__name__)
    require(isinstance(got, Tensor), f"{case} gave {gave}; wanted a tensor.")
    if not isinstance(got, Tensor):
        return
    wanted = {"dtype": dtype, "shape": shape, "device": device}
    given = {"dtype": got.dtype, "shape": tuple(got.shape), "device": got.device.type}
    for name, right in wanted.items():
        require(
            right is None or given[name] == right,
            f"{case} gave a tensor of {name} {given[name]}; wanted {right}.",
        )
    require(
        got.is_contiguous() or not contiguous,
        f"{case} gave a non-contiguous tensor; wanted a contiguous one.",
    )


@contextmanager
def named_errors(case: str, *, when: bool) -> Iterator[None]:
    """Make an error of the answer a failure of this case, which a named wrong answer may have."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not when or isinstance(error, NotImplementedError):
            raise
        raise Wrong(f"{case} raised {type(error).__name__}: {first_line(error)}.") from None


def increasing(case: str, got: Tensor) -> None:
    """Require entries that increase."""
    for k in (got.diff() <= 0).nonzero().flatten().tolist()[:1]:
        one, following = distinct(got[k].item(), got[k + 1].item(), 6)
        require(
            False,
            f"{case}: entry {k} is {one}, and entry {k + 1} is {following}; wanted entries that "
            f"increase.",
        )


def same_block_maxima(case: str, name: str, got: Tensor, x: Tensor, block: int) -> None:
    """Require the largest |element| of each block; `name` is what the exercise calls it."""
    for n, part in enumerate(x.flatten().float().split(block)):
        mine, wanted = got[n].item(), part.abs().max().item()
        if mine != wanted:
            shown, right = distinct(mine, wanted)
            require(False, f"{case}: the {name} of block {n} is {shown}; wanted {right}.")
            return


def is_tuple(case: str, got: Any, length: int, parts: str) -> None:
    """Require a tuple of this length; `parts` names its elements."""
    require(
        isinstance(got, tuple) and len(got) == length,
        f"{case} gave {type(got).__name__}; wanted a tuple of {parts}.{_question(got)}",
    )


def has_keys(case: str, got: Any, keys: Iterable[str]) -> None:
    """Require a dictionary with these keys."""
    require(
        isinstance(got, dict) and set(got) == set(keys),
        f"{case} gave {got!r}; wanted a dictionary with the keys {', '.join(keys)}."
        f"{_question(got)}",
    )


def _question(got: Any) -> str:
    return " Is there a return?" if got is None else ""


def _an(name: str) -> str:
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def keep_no_more(case: str, results: Iterable[Any]) -> None:
    """Require results that are no slices: a slice keeps its whole tensor alive."""
    tensors = [result for result in results if isinstance(result, Tensor)]
    kept, wanted = storage_bytes(tensors), sum(tensor.nbytes for tensor in tensors)
    require(
        kept <= wanted,
        f"{case} gave tensors that keep {kept:,} bytes alive; wanted {wanted:,}. A slice keeps the "
        f"whole tensor alive; .clone() does not.",
        evidence=(case, "a slice"),
    )


def shares_no_storage(case: str, result: Tensor, **tensors: Tensor) -> None:
    """Require a result whose storage is none of the tensors'."""
    for name, tensor in tensors.items():
        require(
            not _share(result, tensor),
            f"{case} gave a view of {name}, which shares its storage; wanted memory of its own.",
        )


def shares_storage(case: str, result: Tensor, **tensors: Tensor) -> None:
    """Require a result in the tensors' storage."""
    for name, tensor in tensors.items():
        require(
            _share(result, tensor),
            f"{case} gave a tensor with memory of its own; wanted a view of {name}.",
        )


def _share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0


# ------------------------------------------------------------------ data without symmetry


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed elements, drawn in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


MAGNITUDES = (1e-30, 1e-12, 1e6)  # unlike data near 1, they show a constant such as eps=1e-8
SIZES = (5, 3, 7, 11, 2, 13)  # all different, and none a multiple of another
ADAM_SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": 3e-3, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.2},
    {"lr": 0.02, "betas": (0.6, 0.8), "eps": 1e-5, "weight_decay": 0.0},
)
_SHAPES = ((5, 3), (7,), (2, 3, 11), (1,), ())


def elements(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return elements of both signs and many magnitudes; with 8 or more, also 0, -0 and a subnormal
    number."""
    drawn = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=drawn) * 4 ** torch.randn(shape, generator=drawn)
    made = made.to(dtype)
    if made.numel() >= 8 and dtype.is_floating_point:
        tiny = torch.finfo(dtype).smallest_normal / 4
        made.view(-1)[[1, 3, 4]] = torch.tensor([0.0, -0.0, tiny], dtype=torch.float64).to(dtype)
    return made


def parameters(
    *dtypes: torch.dtype, shapes: Sequence[tuple[int, ...]] = _SHAPES, seed: int = 0
) -> list[nn.Parameter]:
    """Return a parameter of each shape, with the dtypes in turn."""
    of = dtypes or (torch.float32,)
    return [
        nn.Parameter(elements(*shape, dtype=of[place % len(of)], seed=seed + place))
        for place, shape in enumerate(shapes)
    ]
