"""Tiled attention against attention with a full score matrix, and against torch's fused kernel.

    time    forward and backward at 4,096 tokens, 4 heads of dimension 64, float32, two threads.
            Goals, as ratios to the score matrix: at most 0.4 causal and 0.6 full. The ratio to
            torch and the fastest tile size have no goal
    bytes   peak memory beyond the arguments by sequence length, and the exponent of its growth:
            2 for the score matrix, 1 for tiles
    error   largest error of the output and of each gradient, against float64. Goals, as in the
            flash-attn package: at most 2 times the score matrix's error for the output, 3 times for
            gradients

    python benchmarks/attention.py [--section time] [--quick]

Prints Markdown and writes each section to `benchmarks/results/<machine>.json`.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from common import (
    THREADS,
    SectionReport,
    Spread,
    parser_of_sections,
    print_reports,
    ratios,
    set_environment,
    side_by_side,
    table,
)
from rich.progress import Progress
from torch import Tensor

import memlab
from memlab.attention import attention_reference, flash_attention, tiles
from memlab.internals.cycles import no_cycle_collection
from memlab.units import format_bytes

Attend = Callable[..., Tensor]  # attend(q, k, v, causal=…)

GOALS = {"causal": 0.4, "full": 0.6}  # time ratio to the score matrix
ERROR_RATIOS = {"result": 2, "dq": 3, "dk": 3, "dv": 3}  # error ratio to the score matrix
ABSOLUTE_ERROR = 1e-5  # allowed in addition
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def torchs(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


NAIVE, FLASH, TORCH = "score matrix", "tiles", "torch"
WAYS: dict[str, Attend] = {NAIVE: attention_reference, FLASH: flash_attention, TORCH: torchs}


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of the benchmark."""

    seq_len: int
    heads: int
    width: int
    tiles: tuple[int, ...]  # tile sizes to compare
    lengths: tuple[int, ...]  # for the section "bytes"
    error_length: int  # for the section "error"
    rounds: int


FULL = AttentionSizes(4096, 4, 64, (128, 256, 512, 1024), (1024, 2048, 4096, 8192), 512, 9)
QUICK = AttentionSizes(64, 2, 8, (16, 32), (512, 1024), 64, 2)


def arguments_of_attention(
    plan: AttentionSizes, length: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, plan.heads, length, plan.width)
    *qkv, dout = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    return [x.requires_grad_() for x in qkv], dout


def forward_backward(
    attend: Attend, qkv: list[Tensor], dout: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    """Return the output, dq, dk and dv."""
    out = attend(*qkv, causal=causal)
    return out.detach(), *torch.autograd.grad(out, qkv, dout)


# ------------------------------------------------------------------ time


@dataclass(frozen=True)
class AttentionTimes:
    """Seconds of each implementation in each round, for one mask."""

    mask: str
    seconds: dict[str, list[float]]

    def ratio(self, of: str, to: str) -> Spread:
        return ratios(self.seconds[of], self.seconds[to])

    @property
    def verdict(self) -> str:
        return "met" if self.ratio(FLASH, NAIVE).median <= GOALS[self.mask] else "missed"


def timed(run: Callable[[], object]) -> float:
    with no_cycle_collection():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


def times(plan: AttentionSizes, mask: str, rounds: Iterable[int]) -> AttentionTimes:
    """Time every implementation and tile size, after one warm-up round."""
    qkv, dout = arguments_of_attention(plan, plan.seq_len)
    ways = WAYS | {f"tiles of {size}": partial(flash_attention, tile=size) for size in plan.tiles}
    runs = {
        name: partial(timed, partial(forward_backward, attend, qkv, dout, mask == "causal"))
        for name, attend in ways.items()
    }
    side_by_side(runs, range(1))
    return AttentionTimes(mask, side_by_side(runs, rounds))


def time_section(plan: AttentionSizes, bar: Progress) -> SectionReport:
    found = {
        mask: times(plan, mask, bar.track(range(plan.rounds), description=mask)) for mask in GOALS
    }
    both = " and ".join(
        f"{row.ratio(FLASH, NAIVE).median:.2f} × ({mask})" for mask, row in found.items()
    )
    sentence = (
        f"{plan.seq_len} tokens, {plan.heads} heads of dimension {plan.width}: forward and "
        f"backward with tiles take {both} the time with the score matrix."
    )
    header = ("mask", f"{FLASH} / {NAIVE}", "goal", f"{TORCH} / {NAIVE}", f"{FLASH} / {TORCH}")
    rows = [
        (
            mask,
            f"{row.ratio(FLASH, NAIVE)} ×",
            f"≤ {GOALS[mask]} × {row.verdict}",
            f"{row.ratio(TORCH, NAIVE)} ×",
            f"{row.ratio(FLASH, TORCH)} ×",
        )
        for mask, row in found.items()
    ]
    markdown = f"{table(header, rows)}\n\n{tile_table(plan, found)}"
    plain = {
        mask: {
            "seconds": row.seconds,
            "flash_to_naive": row.ratio(FLASH, NAIVE)._asdict(),
            "flash_to_torch": row.ratio(FLASH, TORCH)._asdict(),
            "verdict": row.verdict,
        }
        for mask, row in found.items()
    }
    return SectionReport(sentence, markdown, plain)


def tile_table(plan: AttentionSizes, found: dict[str, AttentionTimes]) -> str:
    rows = []
    for size in plan.tiles:
        kinds = [t.kind for t in tiles(plan.seq_len, plan.seq_len, size, causal=True)]
        visited = 1 - kinds.count("skipped") / len(kinds)
        to_naive = (f"{row.ratio(f'tiles of {size}', NAIVE)} ×" for row in found.values())
        rows.append((str(size), f"{visited:.0%}", *to_naive))
    return table(("tile", "computed if causal", *(f"{mask} / {NAIVE}" for mask in found)), rows)


# ------------------------------------------------------------------ bytes


def peak_bytes(attend: Attend, plan: AttentionSizes, length: int) -> int:
    """Return the peak beyond q, k, v and dout, measured in a dry run."""
    with memlab.dry_run():
        qkv, dout = arguments_of_attention(plan, length)
        trace = memlab.measure(lambda: forward_backward(attend, qkv, dout, causal=True))
    return trace.peak_bytes - 4 * dout.nbytes


def slope(lengths: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the growth exponent between the last two lengths."""
    return math.log(sizes[-1] / sizes[-2]) / math.log(lengths[-1] / lengths[-2])


def bytes_section(plan: AttentionSizes, bar: Progress) -> SectionReport:
    found = {
        name: [peak_bytes(WAYS[name], plan, T) for T in bar.track(plan.lengths, description=name)]
        for name in (NAIVE, FLASH)
    }
    slopes = {name: slope(plan.lengths, sizes) for name, sizes in found.items()}
    sentence = (
        f"At {plan.lengths[-1]} tokens, tiles need {format_bytes(found[FLASH][-1])} and the "
        f"score matrix {format_bytes(found[NAIVE][-1])} beyond the arguments ({plan.heads} heads "
        f"of dimension {plan.width}, causal, forward and backward)."
    )
    rows = [
        (name, *map(format_bytes, sizes), f"{slopes[name]:.2f}") for name, sizes in found.items()
    ]
    header = ("peak beyond the arguments", *(f"{T} tokens" for T in plan.lengths), "last slope")
    plain = {"lengths": plan.lengths, "peak_bytes": found, "slopes": slopes}
    return SectionReport(sentence, table(header, rows), plain)


# ------------------------------------------------------------------ error


def errors(attend: Attend, plan: AttentionSizes, dtype: torch.dtype) -> dict[str, float]:
    """Return the largest error of the output and of each gradient, against float64."""
    qkv, dout = arguments_of_attention(plan, plan.error_length, dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    found = forward_backward(attend, qkv, dout, causal=True)
    wanted = forward_backward(attention_reference, exact, dout.double(), causal=True)
    return {
        name: (a - b).abs().max().item()
        for name, a, b in zip(ERROR_RATIOS, found, wanted, strict=True)
    }


def is_within(ours: dict[str, float], naive: dict[str, float]) -> bool:
    return all(
        ours[name] <= most * naive[name] + ABSOLUTE_ERROR for name, most in ERROR_RATIOS.items()
    )


def error_section(plan: AttentionSizes, bar: Progress) -> SectionReport:
    found = {
        str(dtype).removeprefix("torch."): {
            name: errors(attend, plan, dtype) for name, attend in WAYS.items()
        }
        for dtype in bar.track(DTYPES, description="error")
    }
    within = {dtype: is_within(ways[FLASH], ways[NAIVE]) for dtype, ways in found.items()}
    sentence = (
        f"With tiles, {sum(within.values())} of {len(within)} dtypes meet the error bound of the "
        f"flash-attn package at {plan.error_length} tokens."
    )
    rows = [
        (dtype, name, *(f"{error:.1e}" for error in of_way.values()))
        for dtype, ways in found.items()
        for name, of_way in ways.items()
    ]
    header = ("dtype", "implementation", *ERROR_RATIOS)
    return SectionReport(sentence, table(header, rows), {"errors": found, "within": within})


# ------------------------------------------------------------------ the command

SECTIONS: dict[str, Callable[[AttentionSizes, Progress], SectionReport]] = {
    "time": time_section,
    "bytes": bytes_section,
    "error": error_section,
}


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = parser_of_sections(__doc__, SECTIONS, quick="short sequences").parse_args(words)
    threads = torch.get_num_threads()
    torch.set_num_threads(int(THREADS))
    try:
        print_reports("Attention", "attention", SECTIONS, given, FULL, QUICK)
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
