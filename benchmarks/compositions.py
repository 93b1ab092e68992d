"""What two techniques come to together: COMPOSITIONS.md and its picture.

    python benchmarks/compositions.py

Every pair of the rows of `memlab.train.TECHNIQUES` is measured in a dry run of the step that
README's table of savings is of, or refused; the sentence of each refusal stands below the table.
`tests/test_compositions.py` takes real steps of every pair, with a small model, and holds their
gradients, and what they leave in memory, against formulas.
"""

import sys
from itertools import combinations
from string import ascii_lowercase

import numpy as np
from common import RESULTS, ROOT, circumstances, progress, save, set_environment

from memlab import plot
from memlab.cli.choices import SUITABLE
from memlab.internals.files import write_beside
from memlab.train import TECHNIQUES, combined, dry_trace
from memlab.train.registry import exclusions
from memlab.units import format_bytes

SETTING = SUITABLE["cpu"]
PAGE = ROOT / "COMPOSITIONS.md"
PICTURE = ROOT / "images" / "compositions.png"
ROWS = [name for name in TECHNIQUES if name != "plain"]
REASONS = dict(zip(exclusions(), ascii_lowercase, strict=False))  # a letter for each

INTRODUCTION = """\
# Two techniques at once

![What each pair of techniques saves of a step's peak](images/compositions.png)

Of each pair of techniques, the share of a step's peak that the two save together; on the diagonal,
of each alone. The step is that of README's table: {setting}, {plain} at its peak without any of
them. Bytes are of dry runs, and the same on every CPU.

A dot stands where both fill one plug, such as two optimizers: a step has one of them. A letter
stands where the two don't go together, and the list below says why; the same sentence is what
`memlab measure --technique a+b` answers. All other pairs have, in `tests/test_compositions.py`, the
gradients of the plain step: to the bit, or as near as the two are alone; and weights, gradients and
optimizer state after a step take exactly what the formulas of both say. (The row bfloat16 has an
AdamW of its own; weights in bfloat16 and another optimizer are `--dtype bfloat16`.)

"""


def main() -> int:
    set_environment()
    plain = dry_trace(SETTING, combined("plain")).peak_bytes
    pairs = [*ROWS, *("+".join(pair) for pair in combinations(ROWS, 2))]
    peaks: dict[str, int] = {}
    with progress() as bar:
        for names in bar.track(pairs, description="pairs"):
            if not refusal(names):
                peaks[names] = dry_trace(SETTING, combined(names)).peak_bytes
    text = page(plain, peaks)
    with write_beside(PAGE) as beside:
        beside.write_text(text, encoding="utf-8")
    print(text)
    plot.save(picture(plain, peaks), PICTURE)
    save(RESULTS, "compositions", "peaks", {"plain": plain, "pairs": peaks})
    return 0


def refusal(names: str) -> str | None:
    """Why these rows don't go together; None if they do."""
    try:
        combined(names)
    except ValueError as error:
        return str(error)
    return None


def page(plain: int, peaks: dict[str, int]) -> str:
    """The whole as Markdown, from the peaks of each technique and each pair."""
    numbers = range(1, len(ROWS) + 1)
    lines = [["", *map(str, numbers)], ["---", *["---:"] * len(ROWS)]]
    for number, name in zip(numbers, ROWS, strict=True):
        known = [cell(one, name, plain, peaks) for one in ROWS[:number]]
        lines.append([f"**{number}** {name}", *known, *[""] * (len(ROWS) - number)])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    reasons = "\n".join(
        f"- **{letter}** {' and '.join(name for name in ROWS if name in pair)}: {reason}"
        for (pair, reason), letter in zip(exclusions().items(), REASONS.values(), strict=True)
    )
    words = circumstances()
    made = f"Made by `python benchmarks/compositions.py`, torch {words['torch']}, {words['date']}."
    intro = INTRODUCTION.format(setting=SETTING, plain=format_bytes(plain))
    return f"{intro}{table}\n\n{reasons}\n\n{made}\n"


def cell(one: str, other: str, plain: int, peaks: dict[str, int]) -> str:
    """What is saved, in per cent; or why the two don't meet."""
    names = one if one == other else f"{one}+{other}"
    if names in peaks:
        return f"{in_per_cent(peaks[names], plain)}%".replace("-", "−")
    return REASONS.get(frozenset((one, other)), "·")


def in_per_cent(peak: int, plain: int) -> int:
    """What is saved of the plain peak."""
    return round(100 * (1 - peak / plain))


def picture(plain: int, peaks: dict[str, int]):
    """A square for each pair: the darker, the more is saved."""
    from matplotlib.figure import Figure

    saved = np.full((len(ROWS), len(ROWS)), np.nan)
    for (row, one), (column, other) in combinations(enumerate(ROWS), 2):
        if f"{one}+{other}" in peaks:
            saved[column, row] = in_per_cent(peaks[f"{one}+{other}"], plain)
    for number, name in enumerate(ROWS):
        saved[number, number] = in_per_cent(peaks[name], plain)
    figure = Figure(figsize=(11, 9.5), layout="constrained")
    axes = figure.subplots()
    limit = np.nanmax(np.abs(saved))
    image = axes.imshow(saved, cmap="RdYlGn", vmin=-limit, vmax=limit)
    for row, column in zip(*np.tril_indices(len(ROWS)), strict=True):
        text = cell(ROWS[column], ROWS[row], plain, peaks).removesuffix("%")
        color = "white" if abs(saved[row, column]) > 0.65 * limit else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(ROWS)), ROWS, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"Saved of the peak by two techniques together, in per cent ({SETTING})\n"
        "a dot: both fill one plug; a letter: refused, for the reason in the list"
    )
    figure.colorbar(image, ax=axes, shrink=0.6, label="per cent of the plain step's peak")
    return figure


if __name__ == "__main__":
    sys.exit(main())
