"""Day 14: offloading."""

import tempfile
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_

from memlab.course.bill_steps import offloaded_to_the_disk
from memlab.course.exercises import Bill, Day, Wrong, equal, require
from memlab.course.properties import (
    at_most_bytes,
    is_tensor,
    new_bytes,
    normal,
    peak_bytes,
    rounding,
    same_values,
    survives_a_reused_address,
    unchanged,
)
from memlab.course.solutions import checked, given, solution
from memlab.metering import measure
from memlab.offload import Store
from memlab.offload.records import Record, raw
from memlab.offload.stores import Wait, nothing
from memlab.reference.activation_compression import whole
from memlab.reference.offloaded_optimizer import OffloadedAdam
from memlab.reference.sharded_weights import backward_of, forward_of
from memlab.trace import Trace

# ------------------------------------------------------------------ a store outside of memory


class UnnamedFileStore(Store):
    """A store in one temporary file: its contents are in no tensor and no list."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file, self._at = file, dict[Any, tuple[Record, int]]()
        self.calls: list[tuple[str, Any]] = []  # in order
        self._lent: list[StorageWeakRef] = []
        self.most_lent = 0  # values alive at once that were read or prefetched

    def put(self, key: Any, value: Any, **settings: Any) -> None:
        values = value if isinstance(value, (list, tuple)) else [value]
        require(
            bool(values) and all(isinstance(x, Tensor) for x in values),
            f"store.put({key!r}, {type(value).__name__}): wanted a tensor, or a list of tensors.",
        )
        super().put(key, value, **settings)

    def prefetch(self, key: Any, out: Any = None, **settings: Any) -> None:
        self._require_key("prefetch", key)
        self.calls.append(("prefetch", key))
        super().prefetch(key, out, **settings)
        self._count_lent()

    def get(self, key: Any, out: Any = None, **settings: Any) -> Any:
        self._require_key("get", key)
        value = super().get(key, out, **settings)
        if isinstance(value, Tensor):
            self._lent.append(StorageWeakRef(value.untyped_storage()))
        self._count_lent()
        return value

    def _count_lent(self) -> None:
        self._lent = [ref for ref in self._lent if not ref.expired()]
        self.most_lent = max(self.most_lent, len(self._lent) + len(self._coming))

    def delete(self, key: Any) -> None:
        self.calls.append(("delete", key))
        super().delete(key)

    def _require_key(self, method: str, key: Any) -> None:
        require(key in self._at, f"store.{method}({key!r}): the store has nothing under this key.")

    def _put(self, key: Any, record: Record, tensors: list[Tensor], *_: Any) -> None:
        start = self._file.seek(0, 2)
        for spec, tensor in zip(record.specs, tensors, strict=True):
            self._file.seek(start + spec.offset)
            self._file.write(raw(tensor))
        self._at[key] = record, start

    def _record(self, key: Any) -> Record:
        return self._at[key][0]

    def _fill(self, key: Any, record: Record, tensors: list[Tensor]) -> Wait:
        start = self._at[key][1]
        for spec, tensor in zip(record.specs, tensors, strict=True):
            self._file.seek(start + spec.offset)
            self._file.readinto(raw(tensor))
        return nothing

    def _delete(self, key: Any) -> None:
        self._at.pop(key, None)

    def _keys(self) -> Sequence[Any]:
        return list(self._at)


@contextmanager
def _a_store(values: Mapping[str, Tensor] = MappingProxyType({})) -> Iterator[UnnamedFileStore]:
    with tempfile.TemporaryFile(buffering=0) as file:
        store = UnnamedFileStore(file)
        for key, value in values.items():
            store.put(key, value)
        store.traffic.reset()
        yield store


def _require_few_objects(call: str, run: Callable[[], Any], most: int) -> None:
    """NumPy arrays and lists use memory, too. The best of ten runs: Python and torch may
    allocate something once."""
    require(
        any(_traced_bytes(run) < most for _ in range(10)),
        f"{call} keeps more than {most // 1024:,} KiB outside of tensors and the store, in arrays, "
        f"bytes or lists; wanted less.",
        evidence=(call, "objects"),
    )


def _traced_bytes(run: Callable[[], Any]) -> int:
    """Bytes that Python has allocated more than before, while the result lives."""
    tracemalloc.start()
    try:
        kept = run()
        traced = tracemalloc.get_traced_memory()[0]
        del kept
    finally:
        tracemalloc.stop()
    return traced


def _require_close(what: str, got: Any, wanted: Any) -> None:
    same_values(
        what, got, wanted, within=rounding(wanted.dtype) if wanted.is_floating_point() else 0
    )


def _with_methods(call: str, made: Any, *names: str) -> Any:
    require(
        all(hasattr(made, name) for name in names),
        f"{call} gave {type(made).__name__}; wanted an object with {', '.join(names)}.",
    )
    return made


# ------------------------------------------------------------------ 14.1: the hooks

MINIMUM = 1024
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
MakeHooks = Callable[[Iterable[Tensor], Any, int], Hooks]


class GatedLayer(nn.Module):
    """Saves two views of one storage, a 2-byte tensor with swapped strides, and a small result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, dim=-1)  # (192, 64) each
        gate = second[:, :1].tanh()  # 192 elements
        mixed = first * second * gate
        turned = mixed.mT.bfloat16().tanh().mT  # (192, 64), column-major
        return self.down(turned.float() * mixed)


def _hooks_of(answer: MakeHooks, weights: Iterable[Tensor], store: Any, minimum: int) -> Hooks:
    made = answer(weights, store, minimum)
    require(
        isinstance(made, (tuple, list)) and len(made) == 2 and all(map(callable, made)),
        f"hooks(weights, store, minimum) gave {type(made).__name__}; wanted two functions, pack "
        f"and unpack.{' Is there a return?' if made is None else ''}",
    )
    return made[0], made[1]


def _check_hooks(answer: MakeHooks) -> str:
    for check in (_check_views, _check_what_stays, _check_reused_address, _check_two_stores):
        check(answer)
    return _check_layer(answer)


def _check_views(answer: MakeHooks) -> None:
    """Four views of one storage, two of them with their own dtypes."""
    base, case = torch.arange(12.0).view(3, 4), "pack of four views of 12 elements"
    views = {"base[1:]": base[1:], "base.mT": base.mT}
    views |= {"base.view(torch.int32)": base.view(torch.int32)}
    views |= {"base.view(torch.int16)[:, 1::2]": base.view(torch.int16)[:, 1::2]}
    with _a_store() as store:
        pack, unpack = _hooks_of(answer, [], store, 4)
        packed = [pack(view) for view in views.values()]
        equal(f"{case}, written to the store", store.traffic.written, base.nbytes, "bytes")
        for (name, view), kept in zip(views.items(), packed, strict=True):
            back = unpack(kept)
            _require_close(f"unpack of {name}", back, view)
            equal(f"unpack of {name}, strides", back.stride(), view.stride())
        there, read = weakref.ref(base.untyped_storage()), StorageWeakRef(back.untyped_storage())
        del base, views, view, back
        require(
            there() is None,
            f"{case}: the elements are in the store, but the packed tensor is still alive.",
        )
        require(
            read.expired(),
            f"{case}: the result of unpack stays alive after its last use; wanted it freed.",
        )
        del packed, kept
        equal(f"{case}, values in the store after the graph is gone", len(store.keys()), 0)


def _check_what_stays(answer: MakeHooks) -> None:
    weight, small = nn.Parameter(torch.zeros(8, 9)), torch.arange(15.0)
    sixteen, twenty = torch.zeros(16).bfloat16(), torch.zeros(20)  # at different addresses
    with _a_store() as store:
        pack, unpack = _hooks_of(answer, [weight], store, 16)
        for name, tensor in (
            ("a weight's last rows, transposed", weight[2:].mT),
            ("15 elements, with minimum 16", small),
        ):
            back = unpack(pack(tensor))
            equal(f"pack of {name}, written to the store", store.traffic.written, 0, "bytes")
            require(
                isinstance(back, Tensor) and back.data_ptr() == tensor.data_ptr(),
                f"pack and unpack of {name} gave a copy; wanted the same memory.",
            )
        for name, tensor, wanted in (
            ("16 elements in bfloat16, with minimum 16", sixteen, 32),
            ("a view of 2 of 20 elements, with minimum 16", twenty[:2], 80),
        ):
            store.traffic.reset()
            packed = pack(tensor)
            equal(f"pack of {name}, written to the store", store.traffic.written, wanted, "bytes")
            del packed


def _check_reused_address(answer: MakeHooks) -> None:
    """Two tensors, the second at the address of the first, which is gone."""
    with _a_store() as store:
        if not survives_a_reused_address(*_hooks_of(answer, [], store, 4)):
            raise Wrong(  # what follows would depend on addresses
                "hooks: a tensor was freed, another got its address, and unpack gives the elements "
                "of the freed tensor."
            )


def _check_two_stores(answer: MakeHooks) -> None:
    tensor = torch.arange(8.0)
    with _a_store() as first, _a_store() as second:
        packed = [_hooks_of(answer, [], store, 4)[0](tensor) for store in (first, second)]
        for store in (first, second):
            written = store.traffic.written
            equal("two pairs of hooks, written to each store", written, tensor.nbytes, "bytes")
        del packed


def _check_layer(answer: MakeHooks) -> str:
    case, x, losses = "hooks around a layer", normal(192, 64), list[Tensor]()
    plain, layer = GatedLayer(), GatedLayer()
    wanted, small = _saved_bytes(plain, x)
    with _a_store() as store:
        around, right = (
            _hooks_of(made, layer.parameters(), store, MINIMUM)
            for made in (answer, solution("14.1"))
        )

        def forward(pair: Hooks = around) -> None:
            with saved_tensors_hooks(*pair):
                losses.append(layer(x).square().sum())

        def forward_only() -> None:
            forward()
            losses.clear()

        before = new_bytes(measure(forward, model=layer)) - losses[0].nbytes
        equal(f"{case}, written to the store", store.traffic.written, wanted, "bytes")
        equal(f"{case}, alive when backward begins", before, small, "bytes")
        losses.pop().backward()
        for (name, w), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
            _require_close(f"{case}: the gradient of {name}.weight", w.grad, other.grad)
        equal(f"{case}, values in the store after backward", len(store.keys()), 0)
        left = new_bytes(measure(forward_only, model=layer))
        equal(f"{case}, alive after the loss is gone", left, 0, "bytes")
        most = min(_traced_bytes(partial(forward, right)) for _ in range(10))
        _require_few_objects(case, forward, most + 12 * 1024)  # half of the smallest saved tensor
        losses.clear()
        equal(f"{case}, values in the store after the loss is gone", len(store.keys()), 0)
    return (
        f"gradients equal · {wanted:,} bytes to the store, each storage once · {before:,} bytes "
        f"stay in memory until backward"
    )


def _saved_bytes(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes of the storages saved for backward, without weights: large and small ones."""
    weights = {w.untyped_storage() for w in layer.parameters()}
    storages: dict[Any, int] = {}  # and the number of elements

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()] = len(whole(tensor))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x).square().sum().backward()
    sizes = [(s.nbytes(), n) for s, n in storages.items() if s not in weights]
    large = sum(nbytes for nbytes, elements in sizes if elements >= MINIMUM)
    return large, sum(nbytes for nbytes, _ in sizes) - large


# ------------------------------------------------------------------ 14.2: ahead

SIZE = 1024
BYTES = 4 * SIZE


def _value_of(key: str) -> Tensor:
    return torch.arange(float(SIZE)) + 1000 * ord(key)


class ReadOrder(NamedTuple):
    case: str
    put: str  # the keys, in the order of put
    read: str  # in the order of get
    deleted: str = ""  # without a get


READ_ORDERS = (
    ReadOrder("key a", "a", "a"),
    ReadOrder("keys a and b", "ab", "ba"),
    ReadOrder("keys a, b, c and d", "abcd", "dcba"),
    ReadOrder("keys a, b and c, each read twice", "abc", "ccbbaa"),
    ReadOrder("keys c, a, d and b, read in another order", "cadb", "acbd"),
    ReadOrder("keys a, b, c and d, with key a read first and last", "abcd", "adcba"),
    ReadOrder("keys a, b, c and d, with c deleted unread", "abcd", "dba", deleted="c"),
)


def _check_ahead(answer: Any) -> str:
    for order in READ_ORDERS:
        _check_order(answer, order)
    _check_keys_used_again(answer)
    return (
        "prefetches in reverse order, one tensor at a time, also if keys are read twice or deleted "
        f"· at most {2 * BYTES:,} bytes alive"
    )


def _put_all(ahead: Any, keys: str) -> None:
    for key in keys:
        ahead.put(key, _value_of(key))


def _ahead_of(answer: Any, store: UnnamedFileStore) -> Any:
    return _with_methods("Ahead(store)", answer(store), "put", "get", "delete")


def _check_order(answer: Any, order: ReadOrder) -> None:
    with _a_store() as store:
        ahead = _ahead_of(answer, store)
        _put_all(ahead, order.put)
        _require_prefetched(f"{order.case}: after forward", store, "")
        _backward(ahead, store, order, checks_values=True)
        read = BYTES * (len(order.read) + len(order.deleted))
        equal(f"{order.case}: read from the store", store.traffic.read, read, "bytes")
    with _a_store() as store:
        ahead = _ahead_of(answer, store)
        left = new_bytes(measure(lambda: _put_all(ahead, order.put)))
        at_most_bytes(f"{order.case}: left in memory by forward", left, 64)
        peak = peak_bytes(measure(lambda: _backward(ahead, store, order, checks_values=False)))
        at_most_bytes(f"{order.case}: the tensor in use and the next", peak, 2 * BYTES + 64)
        equal(f"{order.case}: left in the store after backward", store.keys(), [])


def _backward(ahead: Any, store: UnnamedFileStore, order: ReadOrder, checks_values: bool) -> None:
    waiting = order.put
    for place, key in enumerate(order.read):
        got = ahead.get(key)
        if checks_values:
            _require_close(f"{order.case}: get({key!r})", got, _value_of(key))
        del got
        waiting = waiting.replace(key, "")
        _require_prefetched(f"{order.case}: after get({key!r})", store, waiting[-1:])
        if order.deleted and not place:
            ahead.delete(order.deleted)
            waiting = waiting.replace(order.deleted, "")
            _require_prefetched(f"{order.case}: after delete({order.deleted!r})", store, "")
        if key not in order.read[place + 1 :]:
            ahead.delete(key)


def _check_keys_used_again(answer: Any) -> None:
    """The next step may use the same keys."""
    with _a_store() as store:
        ahead = _ahead_of(answer, store)
        for step in ("first", "second"):
            case = f"keys a and b, in the {step} step: after"
            _put_all(ahead, "ab")
            ahead.get("b")
            _require_prefetched(f"{case} get('b')", store, "a")
            ahead.get("a")
            _put_all(ahead, "c")
            ahead.get("b")
            _require_prefetched(f"{case} put('c') and another get('b')", store, "c")
            for key in "abc":
                ahead.delete(key)


def _require_prefetched(when: str, store: UnnamedFileStore, wanted: str) -> None:
    equal(f"{when}, keys prefetched and not read yet", store.coming(), [*wanted])


# ------------------------------------------------------------------ 14.3: the optimizer's state

RATE = 0.01
NORMS = (40.0, 0.5, 9.0)  # of the gradients, per step


def _groups_of(sizes: Sequence[int], each: int) -> list[list[nn.Parameter]]:
    return [
        [nn.Parameter(normal(size, seed=each * n + place)) for place in range(each)]
        for n, size in enumerate(sizes)
    ]


def _give_gradients(groups: list[list[nn.Parameter]], step: int) -> None:
    weights = [w for group in groups for w in group]
    made = [normal(w.numel(), seed=100 * step + n) * (1 + n) for n, w in enumerate(weights)]
    norm = torch.cat(made).norm()
    for w, g in zip(weights, made, strict=True):
        w.grad = g * (NORMS[step] / norm)


def _check_adam(answer: Any) -> str:
    _check_steps(answer, "a sub-group of 3 elements", [3], each=1, max_norm=1e6)
    _check_steps(answer, "2 sub-groups of 2 weights each", [5, 4], each=2, max_norm=1e6)
    _check_steps(answer, "3 sub-groups, clipped to 1", [6, 4, 2], each=1, max_norm=1.0)
    _check_send_and_bring(answer)
    return _check_bytes(answer)


def _check_steps(answer: Any, case: str, sizes: list[int], each: int, max_norm: float) -> None:
    ours, theirs = _groups_of(sizes, each), _groups_of(sizes, each)
    mine, flat = ([w for group in groups for w in group] for groups in (ours, theirs))
    exact = torch.optim.AdamW(flat, lr=RATE, foreach=False)
    with _a_store() as store:
        optimizer = _adam_of(answer, ours, store)
        for step in range(3):
            for groups in (ours, theirs):
                _give_gradients(groups, step)
            clip_grad_norm_(flat, max_norm)
            exact.step()
            optimizer.step(max_norm)
            for n, (w, wanted) in enumerate(zip(mine, flat, strict=True)):
                _require_close(f"{case}: weight {n} after step {step + 1}", w.detach(), wanted)
                gone = f"{case}: the gradient of weight {n} is gone after step {step + 1}."
                require(w.grad is not None, gone)


def _adam_of(answer: Any, groups: list[list[nn.Parameter]], store: UnnamedFileStore) -> Any:
    call = "OffloadedAdam(groups, store, lr)"
    return _with_methods(call, answer(groups, store, RATE), "send", "bring", "step")


def _check_send_and_bring(answer: Any) -> None:
    """Each weight comes back with its own step counter and moments."""
    case, (group,) = "a sub-group of 3 weights, whose steps are 3, 4 and 5", _groups_of([4], 3)
    with _a_store() as store:
        optimizer = _adam_of(answer, [group], store)
        (adam,) = optimizer.adams
        for n, w in enumerate(group):
            moments = {"exp_avg": w.detach() + 1, "exp_avg_sq": w.detach() + 2}
            adam.state[w] = {"step": torch.tensor(3.0 + n), **moments}
        optimizer.send(0)
        require(not adam.state, f"{case}: after send(0) adams[0].state is not empty.")
        optimizer.bring(0)
        for n, w in enumerate(group):
            equal(f"{case}: step of weight {n}", float(adam.state[w].get("step", "nan")), 3.0 + n)
            for name, more in (("exp_avg", 1), ("exp_avg_sq", 2)):
                _require_close(f"{case}: {name} of weight {n}", adam.state[w].get(name), w + more)


def _check_bytes(answer: Any) -> str:
    groups, case = _groups_of([SIZE] * 6, each=2), "6 sub-groups of 2 × 1,024 weights"
    state = 2 * 2 * BYTES  # of a sub-group
    with _a_store() as store:
        optimizer = _adam_of(answer, groups, store)
        for step in range(3):
            _give_gradients(groups, step)
            trace = _measured_step(optimizer, store)
            left = new_bytes(trace)
            at_most_bytes(f"{case}: left on the device by step {step + 1}", left, 256)
            equal(f"{case}: prefetched and not read by step {step + 1}", store.coming(), [])
        moved = store.traffic
        equal(f"{case}: written in a step", moved.written, 6 * state, "bytes")
        equal(f"{case}: read in a step", moved.read, 6 * state, "bytes")
        allowed = 2 * state + 3 * BYTES + 1024
        words = f"{case}: the state of two sub-groups and AdamW's temporaries"
        at_most_bytes(words, peak_bytes(trace), allowed)
        ahead = min(moved.prefetched, 5 * state)
        equal(f"{case}: prefetched in a step, all but sub-group 0,", ahead, 5 * state, "bytes")
        _require_overlap(case, [call for call, _ in store.calls])
        _require_few_objects(f"{case}: a step", lambda: _one_step(answer, store), 32 * 1024)
    return (
        f"equal to AdamW on all weights, clipped by one norm · {6 * state:,} bytes written and "
        f"{6 * state:,} read, 8 and 8 per weight, all but the first prefetched · no state stays"
    )


def _measured_step(optimizer: Any, store: UnnamedFileStore) -> Trace:
    """A step of the answer. `store.calls` notes each adam.step(), too."""
    store.traffic.reset()
    store.calls.clear()
    hooks = [
        adam.register_step_pre_hook(lambda *_: store.calls.append(("step", None)))
        for adam in getattr(optimizer, "adams", [])
    ]
    trace = measure(lambda: optimizer.step(1.0))
    for hook in hooks:
        hook.remove()
    return trace


def _one_step(answer: Any, store: UnnamedFileStore) -> Any:
    groups = _groups_of([SIZE] * 6, each=2)
    _give_gradients(groups, 0)
    optimizer = _adam_of(answer, groups, store)
    optimizer.step(1.0)
    return optimizer


def _require_overlap(case: str, calls: list[str]) -> None:
    """Before each sub-group but the last is stepped, the next is prefetched."""
    steps = [place for place, call in enumerate(calls) if call == "step"]
    for n, place in enumerate(steps[:-1]):
        require(
            calls[:place].count("prefetch") > n,
            f"{case}: the state of sub-group {n + 1} is not prefetched when sub-group {n} is "
            f"stepped; wanted prefetch before adam.step().",
        )


# ------------------------------------------------------------------ 14.4: the weights


def _loss_gradient(y: Tensor) -> Tensor:
    return (y - 0.25) / y.numel()


def _layers_of(widths: Sequence[int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    pairs = enumerate(pairwise(widths))
    return {f"layer.{n}": normal(a * b, seed=n, dtype=dtype) / a**0.5 for n, (a, b) in pairs}


def _step_in_memory(
    weights: dict[str, Tensor], x: Tensor, lr: float
) -> tuple[dict[str, Tensor], Tensor]:
    inputs, stepped = [x], dict(weights)
    for w in weights.values():
        inputs.append(forward_of(w, inputs[-1]))
    dy = _loss_gradient(inputs.pop())
    for key, w in reversed(weights.items()):
        dw, dy = backward_of(w, inputs.pop(), dy)
        stepped[key] = w - lr * dw
    return stepped, dy


NETWORKS = (  # case, widths, lr, dtype
    ("one layer of 2 × 3", [2, 3], 0.5, torch.float32),
    ("two layers of 3 × 3", [3, 3, 3], 0.25, torch.float32),
    ("three layers, 4 to 5 to 3 to 2, in float64", [4, 5, 3, 2], 0.5, torch.float64),
)


def _check_stream(answer: Any) -> str:
    for network in NETWORKS:
        _check_network(answer, *network)
    layers, width, rows = 12, 64, 16
    layer = 4 * width**2  # bytes
    case, x = f"{layers} layers of {width} × {width}", normal(rows, width, seed=77)
    weights = _layers_of([width] * (layers + 1))
    keys = list(weights)
    with _a_store(weights) as store:
        weights.clear()
        forward = partial(_forward_alone, answer, store, keys, x)
        forward()  # what torch allocates once
        words = f"{case}: two layers and inputs, in forward"
        at_most_bytes(words, peak_bytes(measure(forward)), 2 * layer + (layers + 6) * x.nbytes)

        def step() -> None:
            answer(store, list(keys), x, _loss_gradient, 0.5)
            wrong_keys = f"{case}: the keys in the store changed to {str(store.keys())[:80]}."
            require(sorted(store.keys()) == sorted(keys), wrong_keys)

        step()  # what torch allocates once
        _require_two_layers_and_no_delete(case, store)
        store.traffic.reset()
        trace, moved = measure(step), store.traffic
        allowed = 5 * layer + (layers + 6) * x.nbytes
        words = f"{case}: two layers, a gradient, the updated weights, a temporary and inputs"
        at_most_bytes(words, peak_bytes(trace), allowed)
        equal(f"{case}: read in a step", moved.read, 2 * layers * layer, "bytes")
        equal(f"{case}: written in a step", moved.written, layers * layer, "bytes")
        left = new_bytes(trace)
        at_most_bytes(f"{case}: left by a step", left, 256)
        _require_few_objects(f"{case}: a step", lambda: _peak_of_objects(step), 128 * 1024)
    return (
        f"weights and gradient equal · {2 * layers} reads of a layer, {layers} writes · at most "
        f"two layers of {layers} in memory"
    )


def _require_two_layers_and_no_delete(case: str, store: UnnamedFileStore) -> None:
    require(
        store.most_lent <= 2,
        f"{case}: the weights of {store.most_lent} layers are in memory at once; wanted at most 2.",
    )
    deleted = [key for call, key in store.calls if call == "delete"]
    require(
        not deleted,
        f"{case}: store.delete({deleted[:1]}) was called. If the step ends before the next put, "
        f"these weights are lost. A put replaces the old value.",
    )


class ForwardIsOver(Exception):  # noqa: N818 - nothing has failed
    """Ends an answer where it asks for the gradient of the last output."""


def _forward_alone(answer: Any, store: UnnamedFileStore, keys: list[str], x: Tensor) -> None:
    def dy_of(y: Tensor) -> Tensor:
        raise ForwardIsOver

    with suppress(ForwardIsOver):
        answer(store, list(keys), x, dy_of, 0.5)
    for key in store.coming():
        store.cancel(key)


def _peak_of_objects(step: Callable[[], None]) -> bytearray:
    """As many bytes as Python had at the peak: lists that were dropped count, too."""
    tracemalloc.reset_peak()
    step()
    return bytearray(max(0, tracemalloc.get_traced_memory()[1] - 1))


def _check_network(
    answer: Any, case: str, widths: list[int], lr: float, dtype: torch.dtype
) -> None:
    weights, x = _layers_of(widths, dtype), normal(3, widths[0], seed=55, dtype=dtype)
    wanted, gradient = _step_in_memory(weights, x, lr)
    keys = list(weights)
    with _a_store(weights) as store:
        with unchanged(f"{case}: streamed_step", x=x, layers=keys):
            got = answer(store, keys, x, _loss_gradient, lr)
        is_tensor(f"{case}: streamed_step", got)
        for key in weights:
            _require_close(f"{case}: {key} in the store", store.get(key), wanted[key])
        _require_close(f"{case}: the gradient of x", got, gradient)


# ------------------------------------------------------------------ 14.5: a commit


class PowerFailure(BaseException):
    """Not an Exception: no program goes on after it."""


LessonDisk, resume = given(14, "Disk", "resume")


class FailingDisk:
    """The lesson's disk, with a power failure before operation number `fails_before`."""

    def __init__(self, fails_before: int | None = None, like: "FailingDisk | None" = None) -> None:
        self._disk, self.most_bytes = LessonDisk(), 0
        if like is not None:
            self._disk.files, self._disk.forced = dict(like.files), set(like.forced)
            self.most_bytes = like.most_bytes
        self._fails_before, self.operations = fails_before, 0
        self.failed, self.last = False, ""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Read-only: only an operation can fail, so every change must be one."""
        return MappingProxyType(self._disk.files)

    @property
    def forced(self) -> frozenset[str]:
        return frozenset(self._disk.forced)

    def names(self) -> list[str]:
        return list(self.files)

    def write(self, name: str, data: bytes) -> None:
        is_bytes = f"disk.write({name!r}, {type(data).__name__}): wanted bytes."
        require(isinstance(data, bytes), is_bytes)
        self._operate("write", name, data)
        self.most_bytes = max(self.most_bytes, sum(map(len, self.files.values())))

    def fsync(self, name: str) -> None:
        self._operate("fsync", name)

    def rename(self, old: str, new: str) -> None:
        self._operate("rename", old, new)

    def remove(self, name: str) -> None:
        self._operate("remove", name)

    def _operate(self, what: str, name: str, *more: Any) -> None:
        self.last = f"{what}({name!r}{', …' if more else ''})"
        self.failed = self.failed or self.operations == self._fails_before
        if self.failed:
            raise PowerFailure
        self.operations += 1
        exists = what == "write" or name in self.files
        require(exists, f"disk.{what}({name!r}): there is no such file.")
        getattr(self._disk, what)(name, *more)

    def after_power_failure(self) -> "FailingDisk":
        """The disk as found when the power is back."""
        found = FailingDisk()
        found._disk.files = {
            name: data if name in self.forced else data[: len(data) // 2]
            for name, data in self.files.items()
        }
        found._disk.forced = set(found.files)
        return found


def _values(step: int, *keys: str) -> dict[str, bytes]:
    return {key: f"{key} of step {step} ".encode() for key in keys}


TWO, PREFIXES = ("m", "v"), ("m", "m7", "7m")  # m7 of step 7 is not m of step 77
LIKELY_NAMES = ("manifest", "manifest.new", "manifest.tmp", "new", "tmp")


def _check_commit(answer: Any) -> str:
    first = FailingDisk()
    _commit(answer, first, 1, _values(1, *TWO), "commit of step 1")
    disk, points = _failing_anywhere(answer, first, (1, _values(1, *TWO)), (2, _values(2, *TWO)))
    generation = sum(map(len, _values(1, *TWO).values()))
    words = "commit of step 2: two generations of values and two manifests"
    at_most_bytes(words, disk.most_bytes, 2 * generation + 2 * 200)
    _commit(answer, disk, 7, _values(7, *PREFIXES), "commit of step 7, with keys m, m7 and 7m")
    disk, _ = _failing_anywhere(
        answer, disk, (7, _values(7, *PREFIXES)), (77, _values(77, *PREFIXES))
    )
    for left_over in ("m.6", "manifest.old", "half a file"):
        disk.write(left_over, b"of a crash")
    likely = _values(3, *LIKELY_NAMES) | {"empty": b""}
    _commit(answer, disk, 3, likely, "commit of step 3, with keys such as manifest.new")
    _commit(answer, disk, 4, {}, "commit of step 4, without values")
    return (
        f"power failures before each of {points} operations: step 1 or step 2 is always complete · "
        f"no other files left on the disk"
    )


def _commit(answer: Any, disk: FailingDisk, step: int, values: dict[str, bytes], when: str) -> None:
    """Commit without a power failure: one happens afterwards."""
    given_values = dict(values)
    answer(disk, step, given_values)
    require(
        not disk.failed, f"{when}: commit goes on after a power failure. Do not catch PowerFailure."
    )
    require(given_values == values, f"{when} changed `values`; wanted it unchanged.")
    _require_found(f"{when}, and then a power failure", disk, (step, values))
    files = sorted(name for name in disk.names() if name != "manifest")
    require(
        len(files) == len(values),
        f"{when}: besides the manifest, the disk has {', '.join(files) or 'no file'}; wanted "
        f"{len(values)} files, the step's values.",
    )


def _failing_anywhere(
    answer: Any, first: FailingDisk, *steps: tuple[int, dict[str, bytes]]
) -> tuple[FailingDisk, int]:
    """Commit the second step with a power failure before each operation in turn. Gives the disk
    after the whole commit, and the number of operations."""
    step, values = steps[1]
    for point in range(200):
        disk = FailingDisk(fails_before=point, like=first)
        when = f"commit of step {step}, power failed before operation {point + 1}"
        try:
            _commit(answer, disk, step, values, when)
        except PowerFailure:
            when = f"{when}, {disk.last}"
            _require_found(when, disk, *steps)
            fewer = dict(list(values.items())[:1])
            again = f"{when}; committed again, with one value"
            _commit(answer, disk.after_power_failure(), step, fewer, again)
        else:
            return FailingDisk(like=disk), point
    raise Wrong(f"commit of step {step} needs more than 200 operations.")


def _require_found(when: str, disk: FailingDisk, *steps: tuple[int, dict[str, bytes]]) -> None:
    """After a power failure: one of the steps, complete."""
    wanted = f"wanted {' or '.join(f'step {step}' for step, _ in steps)}, complete"
    on_again = disk.after_power_failure()
    if "manifest" not in on_again.names():
        raise Wrong(f"{when}: there is no manifest; {wanted}.")
    try:
        found = resume(on_again)
    except (ValueError, TypeError, AttributeError):
        raise Wrong(f"{when}: the manifest cannot be read; {wanted}.") from None
    except KeyError as error:
        raise Wrong(f"{when}: resume does not find {error}; {wanted}.") from None
    shown = {key: value.decode(errors="replace") for key, value in found[1].items()}
    require(found in steps, f"{when}: resume finds step {found[0]} with {shown}; {wanted}.")


# ------------------------------------------------------------------ the bill


DAY = Day(
    exercises=(
        checked("14.1", _check_hooks),
        checked("14.2", _check_ahead),
        checked("14.3", _check_adam, OffloadedAdam),
        checked("14.4", _check_stream),
        checked("14.5", _check_commit),
    ),
    bill=Bill("day 14: state, gradients, activations on disk", offloaded_to_the_disk),
)
