"""Day 14: offloading."""

import json
import tempfile
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_

from memlab.course.checks.day11 import in_chunks
from memlab.course.exercises import Bill, Day, Exercise, Wrong, equal, require
from memlab.course.solutions import Edit, body, mistakes, solution
from memlab.metering import measure
from memlab.offload import DiskStore, OffloadedOptimizer, Store, offloaded_activations
from memlab.offload.records import Record, raw
from memlab.offload.stores import Wait, nothing
from memlab.reference.activation_compression import whole
from memlab.reference.offloaded_optimizer import OffloadedAdam
from memlab.reference.sharded_weights import backward_of, forward_of
from memlab.trace import Trace

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# ------------------------------------------------------------------ a store that can't be fooled


class Elsewhere(Store):
    """A store of one file without a name: what is in there is in no tensor and no list."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file, self._at = file, dict[Any, tuple[Record, int]]()
        self.asked: list[tuple[str, Any]] = []  # of it, in order

    def put(self, key: Any, value: Any, **settings: Any) -> None:
        values = value if isinstance(value, (list, tuple)) else [value]
        require(
            bool(values) and all(isinstance(x, Tensor) for x in values),
            f"store.put({key!r}, {_briefly(value)}): wanted a tensor, or a list of tensors.",
        )
        self.asked.append(("put", key))
        super().put(key, value, **settings)

    def prefetch(self, key: Any, out: Any = None, **settings: Any) -> None:
        self._require_there("prefetch", key)
        self.asked.append(("prefetch", key))
        super().prefetch(key, out, **settings)

    def get(self, key: Any, out: Any = None, **settings: Any) -> Any:
        self._require_there("get", key)
        self.asked.append(("get", key))
        return super().get(key, out, **settings)

    def delete(self, key: Any) -> None:
        self.asked.append(("delete", key))
        super().delete(key)

    def _require_there(self, what: str, key: Any) -> None:
        require(key in self._at, f"store.{what}({key!r}): the store has nothing of that key.")

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
def _elsewhere() -> Iterator[Elsewhere]:
    with tempfile.TemporaryFile(buffering=0) as file:
        yield Elsewhere(file)


def _outside_of_tensors(call: str, run: Callable[[], Any], most: int) -> None:
    """Arrays of numpy and lists of numbers are in memory all the same. What Python and torch make
    once, whenever that is, is not in the least of three runs."""
    require(
        any(_outside(run) < most for _ in range(3)),
        f"{call} keeps more than {most // 1024:,} KiB outside of tensors and the store, in arrays, "
        f"bytes or lists; wanted less.",
    )


def _outside(run: Callable[[], Any]) -> int:
    """Bytes of Python's that are there beside what was there before, while the result lives."""
    tracemalloc.start()
    try:
        kept = run()
        outside = tracemalloc.get_traced_memory()[0]
        del kept
    finally:
        tracemalloc.stop()
    return outside


def _grown(trace: Trace) -> int:
    """Bytes that are alive at the end and were not before."""
    return sum(event.bytes for event in trace.events if event.phase != "before")


def _most(trace: Trace) -> int:
    """The most bytes that were alive beside those before."""
    made = (event.bytes for event in trace.events if event.phase != "before")
    return max(accumulate(made), default=0)


def _briefly(value: Any) -> str:
    return f"{type(value).__name__}" if value is not None else "None"


def _require_close(what: str, got: Any, wanted: Tensor) -> None:
    require(
        isinstance(got, Tensor) and got.shape == wanted.shape and got.dtype == wanted.dtype,
        f"{what} is {_kind(got)}; wanted {_kind(wanted)}.",
    )
    off = (got.double() - wanted.double()).abs() > 1e-5 * (1 + wanted.double().abs())
    if off.any() or not got.isfinite().all():
        at = int(off.flatten().nonzero()[0]) if off.any() else 0
        raise Wrong(
            f"{what}, number {at} of {got.numel()}, is {got.flatten()[at].item():.5f}; wanted "
            f"{wanted.flatten()[at].item():.5f}."
        )


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return _briefly(value)
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ 14.1: the hooks

MINIMUM = 1024
MakeHooks = Callable[[Iterable[Tensor], Any, int], Hooks]


class _Halves(nn.Module):
    """Saves two views of one storage, numbers of two bytes, and a few small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, dim=-1)  # (48, 64) each
        gate = second[:, :1].tanh()  # 48 numbers, a result that is saved
        mixed = first * second * gate
        turned = mixed.mT.bfloat16().tanh().mT  # (48, 64), columns first
        return self.down(turned.float() * mixed)


def _hooks_of(answer: MakeHooks, weights: Iterable[Tensor], store: Any, minimum: int) -> Hooks:
    made = answer(weights, store, minimum)
    require(
        isinstance(made, (tuple, list)) and len(made) == 2 and all(map(callable, made)),
        f"hooks(weights, store, minimum) gave {_briefly(made)}; wanted two functions, pack and "
        f"unpack.{' Is there a return?' if made is None else ''}",
    )
    return made[0], made[1]


def _check_hooks(answer: MakeHooks) -> str:
    with _elsewhere() as store:
        _check_views(answer, store)
    with _elsewhere() as store:
        _check_what_stays(answer, store)
    with _elsewhere() as store:
        _require_nobody_elses(answer, store)
    return _check_layer(answer)


def _check_views(answer: MakeHooks, store: Elsewhere) -> None:
    """Four views of one storage, two of them in dtypes of their own."""
    pack, unpack = _hooks_of(answer, [], store, 4)
    base = torch.arange(12.0).view(3, 4)
    views = {"base[1:]": base[1:], "base.mT": base.mT}
    views |= {"base.view(torch.int32)": base.view(torch.int32)}
    views |= {"base.view(torch.int16)[:, 1::2]": base.view(torch.int16)[:, 1::2]}
    packed = [pack(view) for view in views.values()]
    case = "pack of four views of 12 numbers"
    equal(f"{case}, written to the store", store.traffic.written, base.nbytes, "bytes")
    for (name, view), kept in zip(views.items(), packed, strict=True):
        back = unpack(kept)
        require(isinstance(back, Tensor), f"unpack of {name} gave {_briefly(back)}.")
        require(
            back.shape == view.shape and back.stride() == view.stride(),
            f"unpack of {name} gave {tuple(back.shape)} with strides {back.stride()}; wanted "
            f"{tuple(view.shape)} with {view.stride()}.",
        )
        _require_close(f"unpack of {name}", back, view)
    there, brought = weakref.ref(base.untyped_storage()), StorageWeakRef(back.untyped_storage())
    del base, views, view, back
    require(there() is None, f"{case}: the numbers are in the store, and their tensor still lives.")
    require(
        brought.expired(),
        f"{case}: what unpack brought back still lives when nothing uses it; wanted it gone, since "
        f"it is in the store.",
    )
    del packed, kept
    require(
        not store.keys(),
        f"{case}: the store still has {len(store.keys())} of them when nothing packed is left.",
    )


def _check_what_stays(answer: MakeHooks, store: Elsewhere) -> None:
    weight = nn.Parameter(torch.zeros(8, 8))
    pack, unpack = _hooks_of(answer, [weight], store, 16)
    small = torch.arange(15.0)
    for name, given in (("a weight's mT", weight.mT), ("15 numbers, fewer than 16", small)):
        back = unpack(pack(given))
        equal(f"pack of {name}, written to the store", store.traffic.written, 0, "bytes")
        require(
            isinstance(back, Tensor) and back.data_ptr() == given.data_ptr(),
            f"pack and unpack of {name} gave a copy; wanted the numbers where they are.",
        )
    sixteen, twenty = torch.zeros(16), torch.zeros(20)  # both alive: no address is another's
    exactly = pack(sixteen)
    equal("pack of 16 numbers, written to the store", store.traffic.written, 64, "bytes")
    store.traffic.reset()
    part = pack(twenty[:2])
    equal("pack of 2 numbers of 20, written to the store", store.traffic.written, 80, "bytes")
    del exactly, part


def _require_nobody_elses(answer: MakeHooks, store: Elsewhere) -> None:
    """Two tensors, the second at the address of the first, which has died."""
    place = torch.zeros(512).numpy()
    pack, unpack = _hooks_of(answer, [], store, 4)
    first = torch.from_numpy(place).requires_grad_()
    kept = pack(first)
    del first
    place += 1
    second = torch.from_numpy(place).requires_grad_()
    if not torch.equal(unpack(pack(second)), second):
        raise Wrong(  # what comes after it would hang on addresses
            "hooks: a tensor died, another took its address, and comes back with the first one's "
            "numbers."
        )
    del kept


def _check_layer(answer: MakeHooks) -> str:
    case, x = "hooks around a layer", _random(48, 64)
    plain, layer = _Halves(), _Halves()
    wanted, small = _saved_by(plain, x)
    with _elsewhere() as store:
        around = _hooks_of(answer, layer.parameters(), store, MINIMUM)
        losses: list[Tensor] = []

        def forward() -> None:
            with saved_tensors_hooks(*around):
                losses.append(layer(x).square().sum())

        before = _grown(measure(forward, model=layer)) - losses[0].nbytes
        equal(f"{case}, written to the store", store.traffic.written, wanted, "bytes")
        equal(f"{case}, alive when backward begins", before, small, "bytes")
        losses.pop().backward()
        for (name, w), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
            assert w.grad is not None
            assert other.grad is not None
            _require_close(f"{case}: the gradient of {name}.weight", w.grad, other.grad)
        equal(f"{case}, left in the store when backward has ended", len(store.keys()), 0)

        def there_and_gone() -> None:
            forward()
            losses.clear()

        left = _grown(measure(there_and_gone, model=layer))
        equal(f"{case}, left alive when the loss is dropped", left, 0, "bytes")
        _outside_of_tensors(case, forward, 16 * 1024)
        losses.clear()
        equal(f"{case}, left in the store when the loss is dropped", len(store.keys()), 0)
    return (
        f"gradients equal · {wanted:,} bytes to the store, each storage once, {before:,} stay · "
        f"nothing is left in either"
    )


def _saved_by(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes of the storages that are saved for backward, no weight's: large and small ones."""
    weights = {w.untyped_storage() for w in layer.parameters()}
    storages: dict[Any, int] = {}  # and how many numbers each has

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()] = len(whole(tensor))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x).square().sum().backward()
    sizes = [(s.nbytes(), n) for s, n in storages.items() if s not in weights]
    large = sum(nbytes for nbytes, numbers in sizes if numbers >= MINIMUM)
    return large, sum(nbytes for nbytes, _ in sizes) - large


_CPU_COPIES = 'return (lambda tensor: tensor.detach().cpu()), (lambda kept: kept.to("cpu"))'
_EACH_VIEW = """
left_alone = {weight.untyped_storage() for weight in weights}

def pack(tensor):
    if tensor.untyped_storage() in left_alone or len(whole(tensor)) < minimum:
        return tensor.detach()
    return Kept(store, tensor.detach().contiguous())

return pack, lambda kept: kept if isinstance(kept, torch.Tensor) else kept.get()
"""
_IS_SMALL, _OF_VIEW = "len(whole(tensor)) < minimum", ".as_strided(*view)"
_KNOWN, _NOTED = "weakref.WeakKeyDictionary()", "known[storage] = weakref.ref(kept)"
_LOOKED_UP = "known[storage]() if storage in known else None"


def _beside(kept: str) -> tuple[Edit, ...]:
    """Something more is packed with the Kept, and has no use."""
    return (
        ("return kept, tensor.dtype", f"return kept, {kept}, tensor.dtype"),
        ("kept, dtype, *view", "kept, _, dtype, *view"),
    )


_HOOKS = Exercise(
    id="14.1",
    title="Saved tensors wait in a store",
    minutes=20,
    difficulty=4,
    hints=(
        "It is Exercise 7.5 with Kept(store, whole(tensor)) in the place of "
        "compress(whole(tensor)), and kept.get() in that of decompress. (7.5's pack: the numbers "
        "of a storage go once, and what is returned is that and the view's size, stride and "
        "offset.) What goes: all storages of at least `minimum` numbers that are no weight's.",
        "A storage is found again in a WeakKeyDictionary, so that nobody's numbers are taken for "
        "another's. But as a value there, a Kept would live as long as the storage: as long as x, "
        "which you hold. Keep weakref.ref(kept), and ask it: known[storage]() is the Kept, or "
        "None if no graph has it any more.",
        "pack: if storage in left_alone or len(whole(tensor)) < minimum: return tensor.detach(). "
        "kept = known[storage]() if storage in known else None. If it is None: kept = Kept(store, "
        "whole(tensor)); known[storage] = weakref.ref(kept). return kept, tensor.dtype, "
        "tensor.size(), tensor.stride(), tensor.storage_offset(). unpack: a Tensor is returned as "
        "it is; else kept.get().view(dtype) has all numbers of the storage, and as_strided makes "
        "the view of them.",
    ),
    reference=solution("14.1"),
    check=_check_hooks,
    wrong_answers=mistakes(
        "14.1",
        (
            ".cpu() of a tensor that is on the CPU is that very tensor: nothing has moved, and "
            "nothing is saved.",
            body("hooks", _CPU_COPIES),
        ),
        (
            "Each view was put by itself: a storage goes once, whole(tensor), however many views "
            "of it are saved.",
            body("hooks", _EACH_VIEW),
        ),
        (
            "What you packed still holds the tensor, or your closure does: keep the Kept and plain "
            "facts: dtype, size, stride and offset.",
            *_beside("tensor.detach()"),
        ),
        (
            "Nobody deletes, or the hooks themselves hold every Kept: only what pack returns may "
            "hold one.",
            ("    known =", "    hoard = []\n    known ="),
            (_NOTED, f"{_NOTED}; hoard.append(kept)"),
        ),
        (
            "A strong reference to the Kept stands beside its storage: of x there is a copy in the "
            "store for as long as x lives. Keep weakref.ref(kept).",
            ("weakref.ref(kept)", "lambda: kept"),
        ),
        (
            "The offset is lost: the second view begins elsewhere in the storage. as_strided(size, "
            "stride, offset).",
            (_OF_VIEW, "[: view[0].numel()].view(view[0])"),
        ),
        (
            "The strides are lost: .contiguous() makes a copy with others. Give the view as it is.",
            (_OF_VIEW, f"{_OF_VIEW}.contiguous()"),
        ),
        (
            "Weights stay alive whoever saved them: to put them too moves their bytes and saves "
            "none.",
            ("{weight.untyped_storage() for weight in weights}", "set()"),
        ),
        (
            "`minimum` is not looked at: a small tensor costs more to move than to keep.",
            (f" or {_IS_SMALL}", ""),
        ),
        (
            "Two numbers of a large storage keep all of it alive: compare len(whole(tensor)).",
            (_IS_SMALL, "tensor.numel() < minimum"),
        ),
        (
            "A storage of `minimum` numbers goes, too: at least so many, <.",
            (_IS_SMALL, "len(whole(tensor)) <= minimum"),
        ),
        (
            "A storage's views may differ in dtype, and what comes back has that of the first: "
            "kept.get().view(dtype).",
            (".view(dtype)", ""),
        ),
        (
            "Two views of one storage begin at two addresses, data_ptr(): remember storages, "
            "tensor.untyped_storage(), in a weakref.WeakKeyDictionary.",
            (_KNOWN, "{}"),
            ("known[storage]", "known[tensor.data_ptr()]"),
            ("if storage in known", "if tensor.data_ptr() in known"),
        ),
        (
            "An address is soon another's, and so is an id: what you know something by must be the "
            "storage itself, in a weakref.WeakKeyDictionary.",
            (_KNOWN, "weakref.WeakValueDictionary()"),
            (_LOOKED_UP, "known.get(storage.data_ptr())"),
            (_NOTED, "known[storage.data_ptr()] = kept"),
        ),
        (
            "What stays must be detached: a result that its own operator saves holds its graph, "
            "and the graph holds it (Day 6).",
            ("return tensor.detach()", "return tensor"),
        ),
        (
            "Arrays of numpy are in the same memory, though this meter does not see them: the "
            "store is the place.",
            *_beside("whole(tensor).view(torch.uint8).numpy().copy()"),
        ),
    ),
)

# ------------------------------------------------------------------ 14.2: ahead

SIZE = 1024
BYTES = 4 * SIZE


def _numbers_of(key: str) -> Tensor:
    return torch.arange(float(SIZE)) + 1000 * ord(key)


def _check_ahead(answer: Any) -> str:
    _check_chain(answer, "one tensor, a", "a", "a")
    _check_chain(answer, "a and b", "ab", "ba")
    _check_chain(answer, "a, b, c and d", "abcd", "dcba")
    _check_chain(answer, "a, b and c, each asked for twice", "abc", "ccbbaa")
    _check_chain(answer, "a, b, c and d, asked for in another order", "abcd", "acbd")
    _check_chain(answer, "a, b, c and d, of which c is dropped", "abcd", "dba", dropped="c")
    _check_again(answer)
    return (
        "in reverse, one ahead of the one in use, never two · asked for twice, read twice · at "
        f"most {2 * BYTES:,} bytes there"
    )


def _put_all(ahead: Any, keys: str) -> None:
    for key in keys:
        ahead.put(key, _numbers_of(key))


def _ahead_of(answer: Any, store: Elsewhere) -> Any:
    made = answer(store)
    require(
        all(hasattr(made, name) for name in ("put", "get", "delete")),
        f"Ahead(store) gave {_briefly(made)}; wanted put, get and delete.",
    )
    return made


def _check_chain(answer: Any, case: str, keys: str, asked: str, dropped: str = "") -> None:
    with _elsewhere() as store:
        ahead = _ahead_of(answer, store)
        _put_all(ahead, keys)
        _require_coming(f"{case}: after forward", store, [])
        _backward(ahead, store, case, keys, asked, dropped)
        read = BYTES * (len(asked) + len(dropped))
        equal(f"{case}: read from the store", store.traffic.read, read, "bytes")
    with _elsewhere() as store:
        ahead = _ahead_of(answer, store)
        here = _grown(measure(lambda: _put_all(ahead, keys)))
        require(
            here <= 64,
            f"{case}: after forward {here:,} bytes of what was put are still here; wanted none: "
            f"they are in the store.",
        )
        most = _most(measure(lambda: _backward(ahead, store, case, keys, asked, dropped, False)))
        require(
            most <= 2 * BYTES + 64,
            f"{case}: {most:,} bytes are there at once; wanted at most {2 * BYTES:,}, the one in "
            f"use and the next.",
        )
        equal(f"{case}: left in the store after backward", store.keys(), [])


def _backward(
    ahead: Any, store: Elsewhere, case: str, keys: str, asked: str, dropped: str, looks: bool = True
) -> None:
    waiting = list(keys)
    for place, key in enumerate(asked):
        got = _asked_for(ahead.get, f"{case}: get({key!r})", key)
        if looks:
            _require_close(f"{case}: what get({key!r}) gave", got, _numbers_of(key))
        del got
        if key in waiting:
            waiting.remove(key)
        _require_coming(f"{case}: after get({key!r})", store, waiting[-1:])
        if dropped and not place:
            _asked_for(ahead.delete, f"{case}: delete({dropped!r})", dropped)
            waiting.remove(dropped)
            _require_coming(f"{case}: after delete({dropped!r})", store, [])
        if key not in asked[place + 1 :]:
            _asked_for(ahead.delete, f"{case}: delete({key!r})", key)


def _asked_for(method: Callable[[str], Any], call: str, key: str) -> Any:
    """Lists and sets say no more than that something is not in them."""
    try:
        return method(key)
    except (KeyError, ValueError, IndexError) as error:
        raise Wrong(f"{call} raised {type(error).__name__}: {error}.") from error


def _check_again(answer: Any) -> None:
    """The next step's keys may be the same."""
    with _elsewhere() as store:
        ahead = _ahead_of(answer, store)
        for step in ("first", "second"):
            _put_all(ahead, "ab")
            ahead.get("b")
            _require_coming(f"a and b, in the {step} step: after get('b')", store, ["a"])
            ahead.get("a")
            ahead.put("c", _numbers_of("c"))
            ahead.get("b")
            again = f"a and b, in the {step} step: after put('c') and another get('b')"
            _require_coming(again, store, ["c"])
            for key in "abc":
                ahead.delete(key)


def _require_coming(when: str, store: Elsewhere, wanted: list[str]) -> None:
    require(
        store.coming() == wanted,
        f"{when}, on their way are {', '.join(store.coming()) or 'none'}; wanted "
        f"{', '.join(wanted) or 'none'}.",
    )


_PREFETCHED = "self.store.prefetch(self.waiting[-1])"
_OFF_THE_LIST = "if key in self.waiting:\n            self.waiting.remove(key)"
_THEN = "\n        if self.waiting:"  # as get goes on, and delete does not
_THE_ONE_BEFORE = """
tensor = self.store.get(key)
if key in self.waiting:
    place = self.waiting.index(key)
    self.waiting.remove(key)
    if place:
        self.store.prefetch(self.waiting[place - 1])
elif self.waiting:
    self.store.prefetch(self.waiting[-1])
return tensor
"""

_AHEAD = Exercise(
    id="14.2",
    title="One ahead",
    minutes=10,
    difficulty=3,
    hints=(
        "Note keys as they are put. Backward asks in the reverse of that order: once the last is "
        "there, the one noted before it is next.",
        "store.prefetch(key) begins to bring it, and takes its bytes at once; a later get(key) "
        "waits for that. Ask for one after each get, the last key that still waits. A key that was "
        "asked for, or deleted, waits no more.",
        "get: tensor = self.store.get(key); if key in self.waiting: self.waiting.remove(key); then "
        "prefetch the last that waits, if any does, and return tensor. delete has two lines, and "
        "the same question before the second.",
    ),
    reference=solution("14.2"),
    check=_check_ahead,
    wrong_answers=mistakes(
        "14.2",
        (
            "Nothing is asked for ahead of its get: backward waits for each tensor, idle.",
            (_PREFETCHED, "pass"),
        ),
        (
            "All that waits is asked for at once, and is on the device again: one is enough.",
            (_PREFETCHED, "[self.store.prefetch(key) for key in reversed(self.waiting)]"),
        ),
        (
            "Two ahead take the bytes of three, and one is enough to keep a road busy.",
            (_PREFETCHED, "[self.store.prefetch(key) for key in self.waiting[:-3:-1]]"),
        ),
        (
            "Backward goes the other way: the next is the one that was put last.",
            ("self.waiting[-1]", "self.waiting[0]"),
        ),
        (
            "What is asked for as soon as it was put is back before it has left: begin with the "
            "first get.",
            ("self.waiting.append(key)", "self.waiting.append(key); self.store.prefetch(key)"),
        ),
        (
            "delete has to reach the store: its bytes stay there.",
            ("        self.store.delete(key)\n", ""),
        ),
        (
            "It was deleted and nobody will ask for it: take it off the list of what waits.",
            body("Ahead.delete", "self.store.delete(key)"),
        ),
        (
            "A key may be asked for again, when another operator saved a view of it: remove that "
            "key, not whichever is last.",
            (f"{_OFF_THE_LIST}{_THEN}", f"if self.waiting: self.waiting.pop(){_THEN}"),
        ),
        (
            "get may come twice for one key, and the second time it is on no list: look before you "
            "remove.",
            (f"{_OFF_THE_LIST}{_THEN}", f"self.waiting.remove(key){_THEN}"),
        ),
        (
            "What was asked for has left the list before it is deleted: look before you remove.",
            body("Ahead.delete", "self.store.delete(key)\nself.waiting.remove(key)"),
        ),
        (
            "Backward need not ask in order: of all keys that wait the one that was put last is "
            "next, not the one put before the key that is asked for.",
            body("Ahead.get", _THE_ONE_BEFORE),
        ),
        (
            "All that was brought stays with you: give it, and keep no reference.",
            ("self.waiting = store, []", "self.waiting, self.brought = store, [], {}"),
            ("return tensor", "return self.brought.setdefault(key, tensor)"),
        ),
    ),
)

# ------------------------------------------------------------------ 14.3: the optimizer's state


RATE = 0.01
NORMS = (40.0, 0.5, 9.0)  # of the gradients in each step


def _groups_of(sizes: Sequence[int], each: int) -> list[list[nn.Parameter]]:
    numbers = count()
    return [[nn.Parameter(_random(n, seed=next(numbers))) for _ in range(each)] for n in sizes]


def _give_gradients(groups: list[list[nn.Parameter]], step: int) -> None:
    weights = [w for group in groups for w in group]
    made = [_random(w.numel(), seed=100 * step + n) * (1 + n) for n, w in enumerate(weights)]
    norm = torch.cat(made).norm()
    for w, g in zip(weights, made, strict=True):
        w.grad = g * (NORMS[step] / norm)


def _check_adam(answer: Any) -> str:
    _check_steps(answer, "a sub-group of 3 numbers", [3], each=1, max_norm=1e6)
    _check_steps(answer, "2 sub-groups, of 2 weights each", [5, 4], each=2, max_norm=1e6)
    _check_steps(answer, "3 sub-groups, clipped to 1", [6, 4, 2], each=1, max_norm=1.0)
    return _check_bytes(answer)


def _check_steps(answer: Any, case: str, sizes: list[int], each: int, max_norm: float) -> None:
    ours, theirs = _groups_of(sizes, each), _groups_of(sizes, each)
    flat = [w for group in theirs for w in group]
    exact = torch.optim.AdamW(flat, lr=RATE, foreach=False)
    with _elsewhere() as store:
        optimizer = _adam_of(answer, ours, store)
        for step in range(3):
            for groups in (ours, theirs):
                _give_gradients(groups, step)
            clip_grad_norm_(flat, max_norm)
            exact.step()
            optimizer.step(max_norm)
            mine = [w for group in ours for w in group]
            for n, (w, wanted) in enumerate(zip(mine, flat, strict=True)):
                what = f"{case}: weight {n} after step {step + 1}"
                _require_close(what, w.detach(), wanted.detach())


def _adam_of(answer: Any, groups: list[list[nn.Parameter]], store: Elsewhere) -> Any:
    made = answer(groups, store, RATE)
    require(
        hasattr(made, "step"), f"OffloadedAdam(groups, store, lr) gave {_briefly(made)}; wanted "
        f"step(max_norm)."
    )  # fmt: skip
    return made


def _check_bytes(answer: Any) -> str:
    groups = _groups_of([SIZE] * 6, each=2)
    state = 2 * 2 * BYTES  # of a sub-group
    case = "6 sub-groups of 2 × 1,024 weights"
    with _elsewhere() as store:
        optimizer = _adam_of(answer, groups, store)
        for step in range(3):
            _give_gradients(groups, step)
            store.traffic.reset()
            store.asked.clear()
            with _steps_noted(optimizer, store):
                trace = measure(lambda: optimizer.step(1.0))
            stays = _grown(trace)
            require(
                stays <= 256,
                f"{case}: step {step + 1} leaves {stays:,} bytes on the device; wanted none but "
                f"the numbers of steps.",
            )
            require(
                not store.coming(),
                f"{case}: after step {step + 1} sub-group {store.coming()[:1]} is on its way.",
            )
        asked = [what for what, _ in store.asked]
        written, read = store.traffic.written, store.traffic.read
        equal(f"{case}: written in a step", written, 6 * state, "bytes")
        equal(f"{case}: read in a step", read, 6 * state, "bytes")
        allowed = 2 * state + 3 * BYTES + 1024
        require(
            _most(trace) <= allowed,
            f"{case}: a step takes {_most(trace):,} bytes beside weights and gradients; wanted at "
            f"most {allowed:,}: two sub-groups' state, and what AdamW takes for one weight.",
        )
        ahead = store.traffic.prefetched
        require(
            ahead >= 5 * state,
            f"{case}: read ahead in a step gave {ahead:,}, wanted {5 * state:,} bytes: all "
            f"sub-groups but the first.",
        )
        _require_overlap(case, asked)
        tracked = _groups_of([SIZE] * 6, each=2)
        _give_gradients(tracked, 0)

        def a_step() -> Any:
            offloaded = _adam_of(answer, tracked, store)
            offloaded.step(1.0)
            return offloaded

        a_step()  # whatever torch makes once
        _outside_of_tensors(f"{case}: a step", a_step, 32 * 1024)
    return (
        f"as AdamW on all weights, clipped as one · {written:,} bytes written and {read:,} read, 8 "
        f"and 8 a weight, all but the first ahead · nothing stays"
    )


def _require_overlap(case: str, asked: list[str]) -> None:
    """Before each sub-group but the last is stepped, the next is on its way."""
    stepped = [place for place, what in enumerate(asked) if what == "step"]
    for n, place in enumerate(stepped[:-1], 1):
        require(
            asked[:place].count("prefetch") >= n,
            f"{case}: when sub-group {n} of {len(stepped)} was stepped, the next was not on its "
            f"way; wanted it asked for before adam.step().",
        )


@contextmanager
def _steps_noted(optimizer: Any, store: Elsewhere) -> Iterator[None]:
    """Each adam's step among what is asked of the store, in order."""
    noted = [
        adam.register_step_pre_hook(lambda *_: store.asked.append(("step", None)))
        for adam in getattr(optimizer, "adams", [])
    ]
    yield
    for handle in noted:
        handle.remove()


_CLIPPED = "clip_grad_norm_([w for group in self.groups for w in group], max_norm)"
_NEXT = "            if n + 1 in self.steps:\n                self.store.prefetch(n + 1)\n"
_LOOP, _STEPPED = "        for n, adam in enumerate(", "            adam.step()\n"
_STEPS = '[kept["step"] for kept in of_each]'
_IN_NUMPY = '[kept["exp_avg"].numpy().copy() for kept in of_each]'
_MOMENTS = '[kept[m] for kept in of_each for m in ("exp_avg", "exp_avg_sq")]'

_ADAM = Exercise(
    id="14.3",
    title="The optimizer's state, a sub-group at a time",
    minutes=20,
    difficulty=4,
    hints=(
        "Clip first, once, all gradients together. Then for each sub-group: bring its state, ask "
        "for that of the next, step, send it. In the first step there is nothing to bring.",
        "adam.state[w] is {'step', 'exp_avg', 'exp_avg_sq'}: send takes these out with pop, puts "
        "the moments of all the sub-group's weights as one list, and keeps the step counters. "
        "bring makes the same dicts of what store.get(n) gives, in the same order.",
        "send: of_each = [self.adams[n].state.pop(w) for w in self.groups[n]]; self.steps[n] = "
        "[kept['step'] for kept in of_each]; self.store.put(n, [kept[m] for kept in of_each for m "
        "in ('exp_avg', 'exp_avg_sq')]). bring: moments = iter(self.store.get(n)); for w, step in "
        "zip(self.groups[n], self.steps[n]): m, v = next(moments), next(moments); "
        "self.adams[n].state[w] = {'step': step, 'exp_avg': m, 'exp_avg_sq': v}. step: "
        "clip_grad_norm_ of all; for each n bring, prefetch (if n + 1 is in self.steps), step and "
        "send, in the one order in which the next state travels while this one is stepped.",
    ),
    reference=OffloadedAdam,
    check=_check_adam,
    wrong_answers=mistakes(
        "14.3",
        (
            "The next state is asked for after adam.step(), so that nothing travels while it "
            "works: ask first.",
            (_NEXT, ""),
            (_STEPPED, f"{_STEPPED}{_NEXT}"),
        ),
        (
            "The state is in the store and on the device: put copies it, and adam.state.pop(w) "
            "lets go of it.",
            ("self.adams[n].state.pop(w)", "dict(self.adams[n].state[w])"),
        ),
        (
            "One of the two moments stays: both are 4 bytes a weight.",
            (_STEPS, '[(kept["step"], kept["exp_avg_sq"]) for kept in of_each]'),
            (_MOMENTS, '[kept["exp_avg"] for kept in of_each]'),
            ("for w, step in", "for w, (step, v) in"),
            ("m, v = next(moments), next(moments)", "m = next(moments)"),
        ),
        (
            "The step counter begins anew each time, and with it Adam's bias correction: keep it "
            "with you, it is 4 bytes a weight tensor.",
            ('{"step": step', '{"step": torch.tensor(0.0)'),
        ),
        (
            "The weights of a sub-group share one step counter, a tensor to which each of them "
            "adds 1: keep one for each weight.",
            (_STEPS, '[of_each[0]["step"]] * len(of_each)'),
        ),
        (
            "The state was read, and Adam began with none: put it into adam.state.",
            body("OffloadedAdam.bring", "self.store.get(n)"),
        ),
        (
            "The moments come back in another order than that of the put.",
            ('"exp_avg": m, "exp_avg_sq": v', '"exp_avg": v, "exp_avg_sq": m.abs()'),
        ),
        (
            "What was stepped must be put again: the store has the state of step 1.",
            (
                "        self.steps[n] =",
                "        if n in self.steps: return\n        self.steps[n] =",
            ),
        ),
        ("Nothing is clipped: max_norm is there to be used.", (_CLIPPED, "pass")),
        (
            "Each sub-group is clipped by itself: the norm is that of all gradients together.",
            (_CLIPPED, "[clip_grad_norm_(group, max_norm) for group in self.groups]"),
        ),
        ("No weight has moved: is adam.step() called?", body("OffloadedAdam.step", "pass")),
        ("Nothing is ahead: while one sub-group is stepped, the road is idle.", (_NEXT, "")),
        (
            "All state is there at once: bring, step and send one sub-group before the next, with "
            "no more than one on its way.",
            (_NEXT, ""),
            (_LOOP, f"        for n in self.steps: self.store.prefetch(n)\n{_LOOP}"),
        ),
        (
            "In the first step the store has no state yet: ask for the next only if it was sent.",
            ("if n + 1 in self.steps", "if n + 1 < len(self.adams)"),
        ),
        (
            "In the first step self.steps is soon not empty, and yet this sub-group has no state "
            "to bring: ask `n in self.steps`.",
            ("if n in self.steps", "if self.steps"),
        ),
        (
            "The first sub-group waits on the device from one step to the next: begin in the step.",
            (_NEXT, ""),
            ("self.send(n)", "self.send(n)\n        self.store.prefetch(0)"),
        ),
        (
            "Arrays of numpy take the same bytes as tensors, and the meter's blindness is no "
            "saving.",
            ("store, {}", "store, {}; self.arrays = {}"),
            ("self.store.put(", f"self.arrays[n] = {_IN_NUMPY}; self.store.put("),
        ),
    ),
)

# ------------------------------------------------------------------ 14.4: the weights


def _half(y: Tensor) -> Tensor:
    """The gradient of a loss."""
    return (y - 0.25) / y.numel()


def _layers_of(widths: Sequence[int]) -> dict[str, Tensor]:
    pairs = enumerate(pairwise(widths))
    return {f"layer.{n}": _random(a * b, seed=n) / a**0.5 for n, (a, b) in pairs}


def _plain_step(weights: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    inputs, stepped = [x], dict(weights)
    for w in weights.values():
        inputs.append(forward_of(w, inputs[-1]))
    dy = _half(inputs.pop())
    for key, w in reversed(weights.items()):
        dw, dy = backward_of(w, inputs.pop(), dy)
        stepped[key] = w - 0.5 * dw
    return stepped, dy


def _check_stream(answer: Any) -> str:
    _check_small(answer, "one layer of 2 × 3", [2, 3])
    _check_small(answer, "two layers of 3 × 3", [3, 3, 3])
    _check_small(answer, "three layers, 4 to 5 to 3 to 2", [4, 5, 3, 2])
    layers, width, rows = 12, 32, 2
    case = f"{layers} layers of {width} × {width}"
    weights, x = _layers_of([width] * (layers + 1)), _random(rows, width, seed=77)
    with _elsewhere() as store:
        for key, w in weights.items():
            store.put(key, w)
        keys = list(weights)
        weights.clear()
        store.traffic.reset()
        _step_of(answer, case, store, keys, x)  # whatever torch makes once
        store.traffic.reset()
        trace = measure(lambda: _step_of(answer, case, store, keys, x))
        one, inputs = BYTES, (layers + 6) * x.nbytes
        allowed = 5 * one + inputs
        require(
            _most(trace) <= allowed,
            f"{case}: a step takes {_most(trace):,} bytes; wanted at most {allowed:,}: two layers' "
            f"weights, a gradient, the stepped weights and what makes them, and the inputs.",
        )
        read, written = store.traffic.read, store.traffic.written
        equal(f"{case}: read in a step", read, 2 * layers * one, "bytes")
        equal(f"{case}: written in a step", written, layers * one, "bytes")
        stays = _grown(trace)
        require(stays <= 256, f"{case}: a step leaves {stays:,} bytes; wanted none.")
        _outside_of_tensors(
            f"{case}: a step", lambda: _peak_outside(answer, store, keys, x), 40 * 1024
        )
    return (
        f"weights and gradient as without · {read // one} reads of a layer, {written // one} "
        f"writes · at most two layers of {layers} there"
    )


def _peak_outside(answer: Any, store: Elsewhere, keys: list[str], x: Tensor) -> Any:
    """What is held outside at the peak, made to stay: a list that is dropped counts, too."""
    tracemalloc.reset_peak()
    answer(store, keys, x, _half, 0.5)
    return bytearray(max(0, tracemalloc.get_traced_memory()[1] - 1))


def _step_of(answer: Any, case: str, store: Elsewhere, keys: list[str], x: Tensor) -> None:
    answer(store, list(keys), x, _half, 0.5)
    require(sorted(store.keys()) == sorted(keys),
            f"{case}: the store has other keys than before: {str(store.keys())[:80]}.")  # fmt: skip


def _check_small(answer: Any, case: str, widths: list[int]) -> None:
    weights, x = _layers_of(widths), _random(3, widths[0], seed=55)
    given = x.clone()
    wanted, gradient = _plain_step(weights, x)
    with _elsewhere() as store:
        for key, w in weights.items():
            store.put(key, w)
        keys = list(weights)
        got = answer(store, keys, x, _half, 0.5)
        require(torch.equal(x, given), f"{case}: x was changed.")
        require(keys == list(weights), f"{case}: the list of layers was changed.")
        require(got is not None, f"{case} gave nothing; wanted the gradient of x. Is there a "
                f"return?")  # fmt: skip
        for key in weights:
            _require_close(f"{case}: {key} in the store", store.get(key), wanted[key])
        _require_close(f"{case}: the gradient of x", got, gradient)


_INPUTS, _GONE = "inputs = [x]", "        del w\n"
_KEPT = ((_INPUTS, "inputs, kept = [x], {}"), (_GONE, "        kept[key] = w\n"))
_KEEPS_A_LIST = """
weights, inputs = [], [x]
for key in layers:
    weights.append(store.get(key))
    inputs.append(forward_of(weights[-1], inputs[-1]))
dy = dy_of(inputs[-1])
for n in reversed(range(len(layers))):
    dw, dy = backward_of(weights[n], inputs[n], dy)
    store.put(layers[n], weights[n] - lr * dw)
return dy
"""

_STREAM = Exercise(
    id="14.4",
    title="A layer's weights at a time",
    minutes=12,
    difficulty=3,
    hints=(
        "Forward: get a layer's weights, note its output as the next one's input, and let go of "
        "the weights. Backward, in reverse: get them again, and put what they have become.",
        "inputs = [x], and each output is added to it; the last output goes to dy_of. In backward "
        "inputs.pop() is what the layer was given. A name holds what it names until it is given "
        "something else, so del w.",
        "for key in layers: w = store.get(key); inputs.append(forward_of(w, inputs[-1])); del w. "
        "dy = dy_of(inputs.pop()). for key in reversed(layers): w = store.get(key); dw, dy = "
        "backward_of(w, inputs.pop(), dy). What the layer has become goes into the store, and w "
        "and dw go.",
    ),
    reference=solution("14.4"),
    check=_check_stream,
    wrong_answers=mistakes(
        "14.4",
        (
            "All layers' weights are kept from forward to backward: get them again there.",
            *_KEPT,
            ("w = store.get(key)\n        dw", "w = kept[key]\n        dw"),
        ),
        (
            "All layers' weights are kept, though backward gets them again: del w, and every list "
            "that it is in.",
            *_KEPT,
        ),
        (
            "No stepped weight has reached the store: gradients that are put nowhere are lost.",
            ("        store.put(key, w - lr * dw)\n", ""),
        ),
        (
            "The gradient was put in the weight's place: w - lr * dw.",
            ("w - lr * dw", "lr * dw"),
        ),
        ("Uphill: w - lr * dw.", ("w - lr * dw", "w + lr * dw")),
        (
            "The inputs are taken from the wrong end: the last layer's comes first.",
            ("inputs.pop(), dy)", "inputs.pop(0), dy)"),
        ),
        (
            "The output itself was taken for its gradient: dy_of(y).",
            ("dy_of(inputs.pop())", "inputs.pop()"),
        ),
        (
            "Gradients of all layers are kept to the end: a layer's is used as soon as it is made.",
            (_INPUTS, "inputs, made = [x], {}"),
            ("dw, dy =", "made[key], dy ="),
            ("lr * dw", "lr * made[key]"),
            ("del w, dw", "del w"),
        ),
        (
            "A list holds what is in it: all weights are here at once, and all inputs to the end. "
            "Get weights again for backward, and pop() each input.",
            body("streamed_step", _KEEPS_A_LIST),
        ),
        (
            "Every layer got the gradient of the last output: the dy of one layer is what "
            "backward_of gives with the dw of the layer after it.",
            ("dw, dy =", "dw, dx ="),
            ("return dy", "return dx"),
        ),
        (
            "Wanted is the gradient of x, which the first layer's backward gives last.",
            ("dy = dy_of(inputs.pop())", "y = inputs.pop()\n    dy = dy_of(y)"),
            ("return dy", "return y[..., :1].expand(x.shape).contiguous()"),
        ),
        (
            "Weights as bytes or arrays are on the device, too; the meter sees tensors alone.",
            (_INPUTS, "inputs, kept = [x], {}"),
            (_GONE, f"        kept[key] = w.numpy().tobytes()\n{_GONE}"),
        ),
    ),
)

# ------------------------------------------------------------------ 14.5: a commit

VALUES = {1: {"m": b"m of step 1 ", "v": b"v of step 1 "}, 2: {"m": b"m of step 2 ",
          "v": b"v of step 2 "}}  # fmt: skip
# Keys that are likely names of a temporary manifest, and a value that is empty; then no values.
VALUES[3] = {key: f"{key} of step 3".encode() for key in ("manifest", "manifest.new", "new", "tmp")}
VALUES[3] |= {"manifest.tmp": b"the last of step 3", "empty": b""}
VALUES[4] = {}
# Not every step is committed.
VALUES[12] = {"m": b"m of step 12", "v": b"v of step 12"}


class PowerFailure(BaseException):
    """No Exception: nobody goes on after it."""


def _refused(*_: Any, **__: Any) -> Any:
    raise Wrong("disk.files is to be looked at; change files by write, rename and remove.")


class _LookedAt(dict):
    """Files by name, as they are now."""

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = _refused


class Disk:
    """Files by name. A power failure halves what was written and not forced down by fsync; names
    are kept at once."""

    def __init__(self, fails_before: int | None = None) -> None:
        self._files: dict[str, bytes] = {}
        self._forced: set[str] = set()
        self._fails_before, self.operations = fails_before, 0
        self.failed = False
        self.most_bytes = 0
        self.last = ""

    @property
    def files(self) -> Mapping[str, bytes]:
        """To be looked at: what is changed past the operations could not fail."""
        return _LookedAt(self._files)

    @property
    def forced(self) -> frozenset[str]:
        """Names of files whose bytes are on the disk."""
        return frozenset(self._forced)

    def write(self, name: str, data: bytes) -> None:
        self._operation(f"write({name!r}, …)")
        require(isinstance(data, bytes), f"disk.write({name!r}, {_briefly(data)}): wanted bytes.")
        self._files[name] = data
        self._forced.discard(name)
        self.most_bytes = max(self.most_bytes, sum(map(len, self._files.values())))

    def fsync(self, name: str) -> None:
        self._operation(f"fsync({name!r})")
        self._require(name, "fsync")
        self._forced.add(name)

    def rename(self, old: str, new: str) -> None:
        self._operation(f"rename({old!r}, {new!r})")
        self._require(old, "rename")
        self._files[new] = self._files.pop(old)
        self._forced.discard(new)
        if old in self._forced:
            self._forced = self._forced - {old} | {new}

    def remove(self, name: str) -> None:
        self._operation(f"remove({name!r})")
        self._require(name, "remove")
        del self._files[name]
        self._forced.discard(name)

    def read(self, name: str) -> bytes:
        self._require(name, "read")
        return self._files[name]

    def names(self) -> list[str]:
        return list(self._files)

    def _operation(self, what: str) -> None:
        self.last = what
        self.failed = self.failed or self.operations == self._fails_before
        if self.failed:
            raise PowerFailure
        self.operations += 1

    def _require(self, name: str, what: str) -> None:
        require(name in self._files, f"disk.{what}({name!r}): there is no such file.")

    def after_power_failure(self) -> "Disk":
        """What is found when it is on again."""
        found = Disk()
        for name, data in self._files.items():
            found._files[name] = data if name in self._forced else data[: len(data) // 2]
        found._forced = set(found._files)
        return found

    def copy(self, fails_before: int | None) -> "Disk":
        other = Disk(fails_before)
        other._files, other._forced = dict(self._files), set(self._forced)
        return other


def resume(disk: Any) -> tuple[int, dict[str, bytes]] | None:
    """The lesson's: the step of the manifest, and its values; None where there is no manifest."""
    if "manifest" not in disk.names():
        return None
    manifest = json.loads(disk.read("manifest"))
    return manifest["step"], {key: disk.read(file) for key, file in manifest["files"].items()}


_SYNCED = '    disk.fsync("manifest.new")\n'
_RENAMED = '    disk.rename("manifest.new", "manifest")\n'
_WRITTEN = """    for key, data in values.items():
        disk.write(files[key], data)
        disk.fsync(files[key])
"""
_UNNAMED = 'name not in ("manifest", *files.values())'
_TIDIED = f"    for name in disk.names():\n        if {_UNNAMED}:\n            disk.remove(name)"


def _check_commit(answer: Any) -> str:
    first = Disk()
    answer(first, 1, dict(VALUES[1]))
    _require_found("commit of step 1, and then a power failure", first, (1,))
    disk, points = _failing_anywhere(answer, first, 1, 2)
    _require_found("commit of step 2, and then a power failure", disk, (2,))
    _require_tidy("commit of step 2", disk)
    _failing_anywhere(answer, disk, 2, 12)
    one = sum(map(len, VALUES[1].values()))
    peak = disk.most_bytes - 2 * 200
    require(
        peak <= 2 * one,
        f"commit of step 2 has {disk.most_bytes:,} bytes on the disk; wanted two generations of "
        f"{one}, and two manifests.",
    )
    disk = disk.copy(None)
    for left_over in ("m.7", "manifest.old", "half a file"):
        disk.write(left_over, b"of a crash")
    for step, what in ((3, "of keys such as manifest.new"), (4, "of no values")):
        answer(disk, step, dict(VALUES[step]))
        _require_found(f"commit of step {step}, {what}, and then a power failure", disk, (step,))
        _require_tidy(f"commit of step {step}, {what}", disk, len(VALUES[step]))
    return (
        f"{points} places for the power to fail, and each time step 1 or step 2, whole · nothing "
        f"else left on the disk"
    )


def _failing_anywhere(answer: Any, first: Disk, before: int, step: int) -> tuple[Disk, int]:
    """The disk after a commit, and how many places there were for the power to fail."""
    points = 0
    while True:
        disk, values = first.copy(fails_before=points), dict(VALUES[step])
        try:
            answer(disk, step, values)
        except PowerFailure:
            when = f"commit of step {step}, power failed before operation {points + 1}, {disk.last}"
            require(
                points < 200,
                f"commit of step {step} has asked 200 things of the disk, and asks on.",
            )
            _require_found(when, disk, (before, step))
            again = disk.after_power_failure()
            answer(again, step, dict(VALUES[step]))
            _require_found(f"{when}; committed again", again, (step,))
            _require_tidy(f"{when}; committed again", again)
            points += 1
        else:
            require(
                not disk.failed,
                f"commit of step {step}, power failed before operation {points + 1}: commit went "
                f"on all the same. After a power failure nobody does: let PowerFailure pass.",
            )
            require(
                values == VALUES[step],
                f"commit of step {step} changed the values that it was given.",
            )
            return disk, points


def _require_found(when: str, disk: Disk, steps: tuple[int, ...]) -> None:
    """One of the steps, whole."""
    wanted = " or ".join(f"step {step}" for step in steps)
    try:
        found = resume(disk.after_power_failure())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Wrong(f"{when}: the manifest cannot be read; wanted {wanted}, whole.") from None
    except Wrong as wrong:
        raise Wrong(f"{when}: resume finds a manifest, and then {wrong} Wanted {wanted}.") from None
    if found is None:
        raise Wrong(f"{when}: there is no manifest; wanted {wanted}, whole.")
    step, values = found
    shown = {key: value.decode(errors="replace") for key, value in values.items()}
    require(
        step in steps and values == VALUES[step],
        f"{when}: resume finds step {step} with {shown}; wanted {wanted}, whole.",
    )


def _require_tidy(when: str, disk: Disk, values: int = 2) -> None:
    files = [name for name in disk.names() if name != "manifest"]
    require(
        len(files) == values,
        f"{when}: beside the manifest there are {', '.join(sorted(files))}; wanted {values} files, "
        f"those of the step.",
    )


_COMMIT = Exercise(
    id="14.5",
    title="A commit that survives",
    minutes=15,
    difficulty=3,
    hints=(
        "Nothing that the manifest names may be written over or removed until another manifest "
        "stands in its place. So values go into new files, and a new manifest beside the old.",
        "Five things, in this order: values, each written under a name of this step and forced "
        "down by fsync; the manifest, written as manifest.new, forced down; rename; and only then "
        "are files removed which the new manifest does not name.",
        "files = {key: f'{key}.{step}' for key in values}. For each: disk.write(files[key], data); "
        "disk.fsync(files[key]). disk.write('manifest.new', json.dumps({'step': step, 'files': "
        "files}).encode()); disk.fsync('manifest.new'); disk.rename('manifest.new', 'manifest'). "
        "Last, of disk.names(), whatever is neither the manifest nor named by it goes.",
    ),
    reference=solution("14.5"),
    check=_check_commit,
    wrong_answers=mistakes(
        "14.5",
        (
            "Values are written over those of the last step: give each step's files names of their "
            "own.",
            ('f"{key}.{step}"', "key"),
        ),
        (
            "The manifest comes first and names files that are not there yet: it comes last.",
            (_WRITTEN, ""),
            (_RENAMED, f"{_RENAMED}{_WRITTEN}"),
        ),
        (
            "The old step's files are removed while the old manifest still names them: rename "
            "first.",
            (_RENAMED, ""),
            (_TIDIED, f"{_TIDIED}\n{_RENAMED}"),
        ),
        (
            "The values were written and not forced down: half of them is lost with the power, and "
            "the manifest names them. fsync each.",
            ("        disk.fsync(files[key])\n", ""),
        ),
        (
            "The manifest was renamed before its bytes were forced down: fsync, then rename.",
            (_SYNCED, ""),
        ),
        (
            "The manifest is forced down after the rename: between the two a power failure finds "
            "half of it.",
            (_SYNCED, ""),
            (_RENAMED, f'{_RENAMED}    disk.fsync("manifest")\n'),
        ),
        (
            "The manifest is written in place: while that goes on there is neither the old nor the "
            "new one. Write it beside, and rename.",
            (_RENAMED, ""),
            ("manifest.new", "manifest"),
        ),
        (
            "The old manifest is removed before the rename, and for a moment there is none: rename "
            "takes its place in one go.",
            (_RENAMED, f'    if step > 1: disk.remove("manifest")\n{_RENAMED}'),
        ),
        (
            "Files of earlier steps are never removed: the disk is full one day.",
            (_TIDIED, ""),
        ),
        (
            "A value's file has the name of the new manifest, and is written over by it: a key may "
            "be any string, manifest too.",
            ('"manifest.new"', 'f"manifest.{step}"'),
        ),
        (
            "Empty values are left out: no bytes are a value, too.",
            ("    files =", "    values = {k: v for k, v in values.items() if v}\n    files ="),
        ),
        (
            "Only files of the step before are removed; an earlier crash has left others.",
            (_UNNAMED, f'name.endswith(f".{{step - 1}}") and {_UNNAMED}'),
        ),
        ("Nothing was written: there is no manifest.", body("commit", "return None")),
    ),
)


# ------------------------------------------------------------------ the bill


def offloaded_to_the_disk(**plugs: Any) -> Trace:
    """Day 11's step, with what is kept for backward, gradients and Lion's state on the disk."""
    store = DiskStore()
    stepping = partial(OffloadedOptimizer, store=store, sub_group=2**20, gradients=True)
    around = {"around_forward": lambda device: offloaded_activations(store)}
    return in_chunks(**around, stepping=stepping, **plugs)


DAY = Day(
    exercises=(_HOOKS, _AHEAD, _ADAM, _STREAM, _COMMIT),
    bill=Bill("day 14: state, gradients and activations on the disk", offloaded_to_the_disk),
)
