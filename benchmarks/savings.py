"""Memory and time of each technique on this machine: the table and pictures of docs/SAVINGS.md.

    python benchmarks/savings.py

Measures the rows of `memlab measure` on a CPU and predicts their memory on CUDA. Prints Markdown,
draws `images/` and writes `benchmarks/results/<machine>.json`.
"""

from dataclasses import replace

from common import RESULTS, ROOT, heading, save, table

from memlab import plot
from memlab.allocator import simulate
from memlab.cli.choices import SUITABLE, choose_techniques
from memlab.cli.requests import Request
from memlab.cli.rows import Row, measured_rows
from memlab.cli.terminal import progress
from memlab.trace import Trace
from memlab.train import TECHNIQUES
from memlab.units import format_bytes

SETTING = SUITABLE["cpu"]
ON_CUDA = replace(SETTING, device="cuda")
IMAGES = ROOT / "images"
HEADER = (
    *("technique", "peak", "saved", "peak in", "time"),
    *("on CUDA, predicted: allocated", "reserved"),
)


def cells(row: Row, plain: Row, predicted: Row) -> tuple[str, ...]:
    """Return a row of docs/SAVINGS.md."""
    saved = 1 - row.trace.peak_bytes / plain.trace.peak_bytes
    return (
        row.name if "+" in row.name else f"{row.name}: {TECHNIQUES[row.name].summary}",
        format_bytes(row.trace.peak_bytes),
        "" if row is plain else f"{saved:+.1%}",
        row.trace.peak_phase,
        "1 ×" if row is plain else f"{row.time_ratio:.2f} ×" if row.time_ratio else "",
        format_bytes(predicted.trace.allocated_bytes),
        format_bytes(predicted.trace.reserved_bytes),
    )


def draw(traces: dict[str, Trace], on_cuda: Trace) -> None:
    """Draw the page's pictures."""
    step = f"{SETTING.model}, {SETTING.batch} × {SETTING.seq_len} tokens"
    pictures = {
        "measure-timeline.png": plot.timeline(
            traces["plain"], title=f"What one training step holds ({step})"
        ),
        "measure.png": plot.breakdown(traces, title=f"What holds the bytes at the peak ({step})"),
        "measure-blocks.png": plot.blocks(
            simulate(on_cuda), title=f"What CUDA's allocator would reserve ({step})"
        ),
    }
    for name, picture in pictures.items():
        plot.save(picture, IMAGES / name)


def main() -> None:
    chosen = choose_techniques(Request())
    with progress(stages=2 * len(chosen)) as announce:
        rows = measured_rows(SETTING, chosen, False, announce)
        predicted = measured_rows(ON_CUDA, chosen, True, announce)
    print(heading(f"Savings: {SETTING}"), end="\n\n")
    lines = [cells(row, rows[0], on_cuda) for row, on_cuda in zip(rows, predicted, strict=True)]
    print(table(HEADER, lines))
    IMAGES.mkdir(exist_ok=True)
    draw({row.name: row.trace for row in rows}, predicted[0].trace)
    numbers = {
        row.name: {
            "peak_bytes": row.trace.peak_bytes,
            "at_peak": row.trace.at_peak,
            "time_ratio": row.time_ratio,
            "gradient_difference": row.gradient_difference,
            "predicted_allocated_bytes": on_cuda.trace.allocated_bytes,
            "predicted_reserved_bytes": on_cuda.trace.reserved_bytes,
        }
        for row, on_cuda in zip(rows, predicted, strict=True)
    }
    save(RESULTS, "savings", "techniques", numbers)


if __name__ == "__main__":
    main()
