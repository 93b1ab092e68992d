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

Each square is the share of a training step's peak memory that two techniques save together. The
diagonal shows each technique alone. The step is the one of README's table: {setting}, with a peak
of {plain} without any technique. All bytes come from dry runs and are the same on every CPU.

- A number: the pair works. `tests/test_compositions.py` holds its gradients to those of the plain
  step, and its weights, gradients and optimizer state to the sum of both formulas.
- A dot: both techniques fill the same place in a step, such as two optimizers. Use one of them.
- A letter: the pair does not work, for the reason below. `memlab measure --technique a+b` prints
  the same reason.

(The technique bfloat16 brings its own AdamW. For bfloat16 weights with another optimizer, use
`--dtype bfloat16`.)

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
    text = page(plain)
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


def page(plain: int) -> str:
    """The picture, and why some pairs do not work, as Markdown."""
    reasons = "\n".join(
        f"- **{letter}** {' and '.join(name for name in ROWS if name in pair)}: {reason}"
        for (pair, reason), letter in zip(exclusions().items(), REASONS.values(), strict=True)
    )
    words = circumstances()
    made = f"Made by `python benchmarks/compositions.py`, torch {words['torch']}, {words['date']}."
    intro = INTRODUCTION.format(setting=SETTING, plain=format_bytes(plain))
    return f"{intro}{reasons}\n\n{made}\n"


def cell(one: str, other: str, plain: int, peaks: dict[str, int]) -> str:
    """The saving in per cent, or the letter of the reason why the pair does not work."""
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
