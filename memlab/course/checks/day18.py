"""Day 18: tensor, sequence, pipeline and context parallelism."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memlab.checkpointing.operations import Operations
from memlab.course.bill_steps import everything_elsewhere
from memlab.course.exercises import Bill, Day, equal, require
from memlab.course.peers import EchoPeer, Peer, case_in_turns, counted
from memlab.course.properties import as_little_memory, normal, same_values
from memlab.course.solutions import checked, solution
from memlab.reference.pipeline import one_forward_one_backward

_LIBRARIES = ("memlab.reference", "memlab.planner", "torch.distributed")


_random = partial(normal, dtype=torch.float64)


def _require_equal(what: str, got: Any, wanted: Tensor) -> None:
    """Require the values within rounding; scores of thousands lose three digits."""
    same_values(what, got, wanted, within=1e-5 if wanted.dtype == torch.float32 else 1e-9)


def _require_value(what: str, got: Any, wanted: Tensor) -> None:
    """As _require_equal, of an output or a gradient, which may be missing."""
    require(got is not None, f"{what} is None.")
    if got is not None:
        _require_equal(what, got, wanted)


# ------------------------------------------------------------------ 18.1: a tensor-parallel MLP

MLPS = ((2, 1, 2, 2), (2, 3, 5, 4), (3, 4, 2, 6), (1, 2, 3, 4))  # ranks, T, C, I


class RankOutcome(NamedTuple):
    """The result of a rank's program: values by name, and the tensors all-reduced in each pass."""

    values: dict[str, Any]
    has_graph: bool
    forward: list[tuple[int, ...]]  # shapes
    backward: list[tuple[int, ...]]


def _mlp_of_a_rank(answer: Any) -> Callable[..., RankOutcome]:
    def program(peer: Peer, x: Tensor, up: Tensor, down: Tensor, dy: Tensor) -> RankOutcome:
        reduced: list[tuple[int, ...]] = []

        def all_reduce(given: Tensor) -> Tensor:
            reduced.append(tuple(given.shape))
            return peer.sum(given.detach())

        x, up, down = (w.clone().requires_grad_() for w in (x, up, down))
        y = answer(x, up, down, all_reduce)
        in_forward = len(reduced)
        has_graph = isinstance(y, Tensor) and y.requires_grad
        if has_graph and y.shape == dy.shape:
            y.backward(dy)
        grads = {"x": x.grad, "up": up.grad, "down": down.grad}
        values = {"Y": y.detach() if isinstance(y, Tensor) else y} | {
            f"gradient of {name}": gradient for name, gradient in grads.items()
        }
        return RankOutcome(values, has_graph, reduced[:in_forward], reduced[in_forward:])

    return program


def _check_mlp(answer: Any) -> str:
    for ranks, tokens, hidden, intermediate in MLPS:
        call = f"parallel_mlp on {counted(ranks, 'rank')}, T={tokens}, C={hidden}, I={intermediate}"
        x, dy = _random(tokens, hidden, seed=1), _random(tokens, hidden, seed=2)
        up, down = _random(intermediate, hidden, seed=3), _random(hidden, intermediate, seed=4)
        ups, downs = up.chunk(ranks), down.chunk(ranks, 1)
        given = [(x, ups[r], downs[r], dy) for r in range(ranks)]
        found = case_in_turns(call, _mlp_of_a_rank(answer), given)
        whole = [w.clone().requires_grad_() for w in (x, up, down)]
        y = F.gelu(whole[0] @ whole[1].T) @ whole[2].T
        y.backward(dy)
        whole_gradients: list[Any] = [w.grad for w in whole]
        of_x, of_up, of_down = whole_gradients
        for rank, outcome in enumerate(found):
            wanted = {
                "Y": y.detach(),
                "gradient of x": of_x,
                "gradient of up": of_up.chunk(ranks)[rank],
                "gradient of down": of_down.chunk(ranks, 1)[rank],
            }
            require(outcome.has_graph, f"{call}: the Y of rank {rank} does not require grad.")
            for name, right in wanted.items():
                _require_value(f"{call}: the {name} of rank {rank}", outcome.values[name], right)
            for which in ("forward", "backward"):
                shapes = getattr(outcome, which)
                require(
                    shapes == [(tokens, hidden)],
                    f"{call}: rank {rank} all-reduces {_shapes(shapes)} in {which}; wanted one "
                    f"tensor of shape ({tokens}, {hidden}).",
                )
    _check_memory_of_mlp(answer)
    return (
        f"{len(MLPS)} MLPs on 1 to 3 ranks: Y and all gradients equal one process's · one "
        f"all-reduce in forward, one in backward"
    )


def _check_memory_of_mlp(answer: Any) -> None:
    """Measure one of two ranks, whose all-reduce only copies."""
    tokens, hidden, own = 16, 8, 12
    x, up, down = (
        _random(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate([(tokens, hidden), (own, hidden), (hidden, own)])
    )
    as_little_memory(
        f"parallel_mlp on one of 2 ranks, T={tokens}, C={hidden}, I={2 * own}",
        *(partial(mlp, x, up, down, _copied) for mlp in (answer, solution("18.1"))),
        room=4 * 8 * tokens * own,
    )


def _copied(given: Tensor) -> Tensor:
    return given.detach().clone()


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    if not shapes:
        return "nothing"
    return f"{counted(len(shapes), 'tensor')} of {', '.join(map(str, dict.fromkeys(shapes)))}"


# ------------------------------------------------------------------ 18.2: saved elements

BLOCKS = (  # tokens, hidden, heads, intermediate, ranks, sequence
    (1, 1, 1, 1, 1, False),
    (2, 2, 2, 6, 2, False),
    (2, 2, 2, 6, 2, True),
    (12, 6, 3, 21, 3, False),
    (12, 6, 3, 21, 3, True),
    (4096, 4096, 32, 11008, 8, False),
    (4096, 4096, 32, 11008, 8, True),
)


def _wanted_elements(
    tokens: int, hidden: int, heads: int, intermediate: int, ranks: int, sequence: bool
) -> int:
    """Add up the shapes of the tensors that a rank saves."""
    own = tokens // ranks if sequence else tokens
    of_a_norm = [(own, hidden), (own, hidden), (own, 1)]
    attention = [(tokens, hidden // ranks)] * 4 + [(tokens, heads // ranks)]
    mlp = [(tokens, intermediate // ranks)] * 2
    shapes = of_a_norm * 2 + [(own, hidden)] * 2 + attention + mlp
    return sum(rows * columns for rows, columns in shapes)


def _check_saved(answer: Any) -> str:
    for given in BLOCKS:
        tokens, hidden, heads, intermediate, ranks, sequence = given
        call = (
            f"saved_elements(tokens={tokens}, hidden={hidden}, heads={heads}, "
            f"intermediate={intermediate}, ranks={ranks}, sequence={sequence})"
        )
        equal(call, answer(*given), _wanted_elements(*given), "elements")
    return f"{len(BLOCKS)} blocks on 1 to 8 ranks: exact numbers of elements"


# ------------------------------------------------------------------ 18.3: gather tokens

GATHERS = ((2, 2, 2, 2), (2, 6, 5, 4), (3, 6, 4, 9), (1, 3, 2, 4))  # ranks, T, in, out


class GatherOutcome(NamedTuple):
    """The result of a rank's program."""

    values: dict[str, Any]
    forward: list[str]  # collectives
    backward: list[str]
    gathered_alive: bool  # after the forward pass
    saved: int  # elements, without the weight


def _gather_of_a_rank(answer: Any) -> Callable[..., GatherOutcome]:
    def program(peer: Peer, x: Tensor, weight: Tensor, dy: Tensor) -> GatherOutcome:
        calls: list[str] = []
        gathered: list[StorageWeakRef] = []

        def all_gather(own: Tensor) -> Tensor:
            calls.append("all_gather")
            parts = own.new_zeros(peer.ranks, *own.shape)
            parts[peer.rank] = own.detach()
            whole = peer.sum(parts).flatten(0, 1)
            gathered.append(StorageWeakRef(whole.untyped_storage()))
            return whole

        def reduce_scatter(whole: Tensor) -> Tensor:
            calls.append("reduce_scatter")
            return peer.sum(whole.detach()).chunk(peer.ranks)[peer.rank].clone()

        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        sizes: dict[int, int] = {}

        def pack(saved: Tensor) -> Tensor:
            if saved.data_ptr() != weight.data_ptr():
                sizes[saved.data_ptr()] = saved.numel()
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved):
            y = answer(x, weight, all_gather, reduce_scatter)
        alive = any(not ref.expired() for ref in gathered)
        in_forward = len(calls)
        if isinstance(y, Tensor) and y.requires_grad and y.shape == dy.shape:
            y.backward(dy)
        values = {
            "output": y.detach() if isinstance(y, Tensor) else y,
            "gradient of x": x.grad,
            "gradient of weight": weight.grad,
        }
        saved = sum(sizes.values())
        return GatherOutcome(values, calls[:in_forward], calls[in_forward:], alive, saved)

    return program


def _check_gather(answer: Any) -> str:
    for ranks, tokens, width, out in GATHERS:
        call = f"gather_linear on {counted(ranks, 'rank')}, T={tokens}, in={width}, out={out}"
        x, weight = _random(tokens, width, seed=1), _random(out, width, seed=2)
        dys = _random(tokens, out, seed=3).chunk(ranks, 1)
        xs, ws = x.chunk(ranks), weight.chunk(ranks)
        given = [(xs[r], ws[r], dys[r]) for r in range(ranks)]
        found = case_in_turns(call, _gather_of_a_rank(answer), given)
        of_x: Any = sum(dy @ w for dy, w in zip(dys, ws, strict=True))
        for rank, outcome in enumerate(found):
            wanted = {
                "output": x @ ws[rank].T,
                "gradient of x": of_x.chunk(ranks)[rank],
                "gradient of weight": dys[rank].T @ x,
            }
            for name, right in wanted.items():
                _require_value(f"{call}: the {name} of rank {rank}", outcome.values[name], right)
            _require_forgotten(f"{call}: rank {rank}", outcome, tokens * width // ranks, ranks)
    _check_memory_of_gather(answer)
    return (
        f"{len(GATHERS)} layers on 1 to 3 ranks: output and both gradients equal one process's "
        f"· the gathered tokens are freed · one all-gather in forward, one all-gather and one "
        f"reduce-scatter in backward"
    )


def _check_memory_of_gather(answer: Any) -> None:
    """Measure one of two ranks, whose all-gather repeats its own tokens."""
    own, width, out = 16, 8, 12
    x, weight = _random(own, width, seed=1), _random(out, width, seed=2)
    x.requires_grad_(), weight.requires_grad_()
    as_little_memory(
        f"gather_linear on one of 2 ranks, T={2 * own}, in={width}, out={2 * out}",
        *(
            partial(gather, x, weight, lambda own: own.detach().repeat(2, 1), _first_half)
            for gather in (answer, solution("18.3"))
        ),
        room=2 * 8 * 2 * own * width,
    )


def _first_half(whole: Tensor) -> Tensor:
    return whole.detach().chunk(2)[0].clone()


def _require_forgotten(at: str, outcome: GatherOutcome, own: int, ranks: int) -> None:
    require(
        not outcome.gathered_alive,
        f"{at} keeps the gathered tokens alive after forward; wanted them freed.",
    )
    require(
        outcome.saved <= own,
        f"{at} saves {outcome.saved} elements besides the weight; wanted {own}, its own tokens.",
        evidence=(at, "saved", outcome.saved),
    )
    require(
        outcome.forward == ["all_gather"],
        f"{at} calls {_calls(outcome.forward)} in forward; wanted all_gather once.",
    )
    require(
        sorted(outcome.backward) == ["all_gather", "reduce_scatter"],
        f"{at} calls {_calls(outcome.backward)} in backward; wanted all_gather and reduce_scatter "
        f"once each.",
    )


def _calls(calls: list[str]) -> str:
    return " and ".join(sorted(calls)) if calls else "no collective"


# ------------------------------------------------------------------ 18.4: the order of a stage

PIPELINES = ((1, 1), (1, 3), (2, 2), (3, 4), (4, 8), (4, 2), (3, 1), (8, 32))  # stages, m


def _passes(order: Any) -> str:
    """Return the passes as text for a message, like F0 F1 B0."""
    shown = " ".join(
        f"{kind[0].upper()}{n}" if kind in ("forward", "backward") else str((kind, n))
        for kind, n in order[:16]
    )
    return f"{shown or 'an empty list'}{' …' if len(order) > 16 else ''}"


def _is_order(order: Any) -> bool:
    return isinstance(order, (list, tuple)) and all(
        isinstance(each, (list, tuple)) and len(each) == 2 for each in order
    )


def _check_order(answer: Any) -> str:
    most = 0
    for stages, micro_batches in PIPELINES:
        for stage in range(stages):
            call = f"one_forward_one_backward({stage}, {stages}, {micro_batches})"
            got = answer(stage, stages, micro_batches)
            require(
                _is_order(got),
                f'{call} gave {type(got).__name__}; wanted a list of pairs like ("forward", 0).'
                f"{' Is there a return?' if got is None else ''}",
            )
            if not _is_order(got):
                continue
            wanted = one_forward_one_backward(stage, stages, micro_batches)
            require(
                [tuple(each) for each in got] == wanted,
                f"{call} gave {_passes(got)}; wanted {_passes(wanted)}.",
                evidence=(call, tuple(map(tuple, got))),
            )
            most = max(most, _in_flight(wanted) if stage == 0 else 0)
    return (
        f"{len(PIPELINES)} pipelines of 1 to 8 stages, also with fewer micro-batches than stages · "
        f"at most {most} of 32 micro-batches in flight"
    )


def _in_flight(order: list[tuple[str, int]]) -> int:
    signs = [1 if kind == "forward" else -1 for kind, _ in order]
    return max(sum(signs[:n]) for n in range(len(order) + 1))


# ------------------------------------------------------------------ 18.5: ring attention

RINGS = (  # ranks, tokens per rank, head dimension, scale of the queries, dtype
    (1, 3, 2, 1.0, torch.float64),
    (2, 2, 3, 1.0, torch.float64),
    (3, 4, 2, 1.0, torch.float64),
    (4, 5, 4, 1.0, torch.float64),
    (2, 6, 4, 1e3, torch.float64),
    (3, 5, 8, 1.0, torch.float32),
)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q.double() @ k.double().T * q.shape[-1] ** -0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v.double()).to(q.dtype), scores.logsumexp(-1).to(q.dtype)


def _check_ring(answer: Any) -> str:
    for ranks, rows, width, scale, dtype in RINGS:
        large = f", queries × {scale:g}" if scale > 1 else ""
        call = f"ring_attention on {counted(ranks, 'rank')} of {rows} tokens, D={width}{large}"
        q, k, v = (_random(ranks * rows, width, seed=seed, dtype=dtype) for seed in (1, 2, 3))
        q = q * scale
        wanted = _causal_attention(q, k, v)
        given = [tuple(x.chunk(ranks)[r].clone() for x in (q, k, v)) for r in range(ranks)]
        peers: list[Peer] = []
        found = case_in_turns(call, answer, given, peers=peers)
        for rank, (got, peer) in enumerate(zip(found, peers, strict=True)):
            at = f"{call}, rank {rank},"
            is_pair = isinstance(got, tuple) and len(got) == 2
            require(
                is_pair,
                f"{at} gave {'nothing' if got is None else type(got).__name__}; wanted (out, lse)."
                f"{' Is there a return?' if got is None else ''}",
            )
            if is_pair:
                for name, mine, right in zip(("out", "lse"), got, wanted, strict=True):
                    _require_equal(f"{at} {name}", mine, right.chunk(ranks)[rank])
            _require_sent(at, peer, 2 * rows * width * q.element_size())
            for mine, right in zip(given[rank], (q, k, v), strict=True):
                require(torch.equal(mine, right.chunk(ranks)[rank]), f"{at} changed q, k or v.")
    _check_operations_of_ring(answer)
    _check_memory_of_ring(answer)
    return (
        f"{len(RINGS)} rings of 1 to 4 ranks: out and lse equal one process's, also for scores of "
        f"thousands · each rank sends R − 1 blocks of keys and values"
    )


LONG_RINGS = ((6, 8, 64), (6, 16, 2))  # ranks, tokens per rank, D: large blocks, many scores


def _check_memory_of_ring(answer: Any) -> None:
    """Measure the last rank. It may keep two more blocks than the reference, and all scores of one
    block, but not every block, or the scores of all keys."""
    for ranks, rows, width in LONG_RINGS:
        q, k, v = (_random(rows, width, seed=seed, dtype=torch.float32) for seed in (1, 2, 3))
        as_little_memory(
            f"ring_attention on the last of {ranks} ranks, {rows} tokens each, D={width}",
            *(partial(_attended, ring, ranks, q, k, v) for ring in (answer, solution("18.5"))),
            room=2 * (k.nbytes + v.nbytes) + 4 * 4 * rows**2,
        )


def _check_operations_of_ring(answer: Any) -> None:
    """The first rank only passes on what it receives, so it computes as much as on its own."""
    q, k, v = (_random(8, 4, seed=seed) for seed in (1, 2, 3))
    counts = {}
    for ranks in (1, 4):
        with Operations() as counter:
            answer(EchoPeer(0, ranks), q, k, v)
        counts[ranks] = counter.total
    require(
        counts[4] == counts[1],
        f"ring_attention on the first of 4 ranks takes {counts[4]:,} operations; wanted "
        f"{counts[1]:,}, as on one rank: blocks of later tokens are only passed on.",
    )


def _attended(ring: Any, ranks: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return ring(EchoPeer(ranks - 1, ranks), q, k, v)


def _require_sent(at: str, peer: Peer, block: int) -> None:
    sent = [size for event, size in peer.events if event == "send"]
    require(
        sent == [block] * (peer.ranks - 1),
        f"{at} sent {counted(len(sent), 'message')}, {sum(sent)} bytes in total; wanted "
        f"{counted(peer.ranks - 1, 'message')} of {block} bytes, each a block of keys and values.",
    )


# ------------------------------------------------------------------ the bill

DAY = Day(
    exercises=(
        checked("18.1", _check_mlp, rebuilds=_LIBRARIES),
        checked("18.2", _check_saved),
        checked("18.3", _check_gather, rebuilds=_LIBRARIES),
        checked("18.4", _check_order, rebuilds=("memlab.reference",)),
        checked(
            "18.5",
            _check_ring,
            rebuilds=(
                "memlab.reference.ring_attention",
                "torch.nn.functional.scaled_dot_product_attention",
            ),
        ),
    ),
    bill=Bill("day 18: nothing to shard on one GPU, unchanged", everything_elsewhere),
)
