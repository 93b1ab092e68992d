"""Memory saved by every pair of techniques: writes docs/COMPOSITIONS.md and its picture.

    python benchmarks/compositions.py

Every pair of rows in `memlab.train.TECHNIQUES` is measured in a dry run of the training step in
docs/SAVINGS.md. docs/COMPOSITIONS.md gives the reason for each pair that does not work.
`tests/test_compositions.py` takes real steps with a small model for every pair, and compares
gradients and memory with formulas.
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
PAGE = ROOT / "docs" / "COMPOSITIONS.md"
PICTURE = ROOT / "images" / "compositions.png"
ROWS = [name for name in TECHNIQUES if name != "plain"]
REASONS = dict(zip(exclusions(), ascii_lowercase, strict=False))  # a letter for each reason

INTRODUCTION = """\
# Two techniques at once

![What each pair of techniques saves of a step's peak](../images/compositions.png)

Each square shows how much of a training step's peak memory two techniques save together, in per
cent. The diagonal shows each technique alone.

The step is the one in [SAVINGS.md](SAVINGS.md): {setting}.
Its peak without techniques is {plain}. All bytes come from dry runs and are the same on every CPU.

- A number: the pair works. `tests/test_compositions.py` compares its gradients with the plain
  step's, and its weights, gradients and optimizer state with the sum of both formulas.
- A dot: both techniques fill the same place in a step, such as two optimizers. Use one of them.
- A letter: the pair does not work. The list below gives the reason, and
  `memlab measure --technique one+other` prints it too.

The technique bfloat16 brings its own AdamW. For bfloat16 weights with another optimizer, use
`--dtype bfloat16`.

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
    """Return the reason why these techniques exclude each other, or None."""
    try:
        combined(names)
    except ValueError as error:
        return str(error)
    return None


def page(plain: int) -> str:
    """Return the page as Markdown: the picture, and why some pairs do not work."""
    reasons = "\n".join(
        f"- **{letter}** {' and '.join(name for name in ROWS if name in pair)}: {reason}"
        for (pair, reason), letter in zip(exclusions().items(), REASONS.values(), strict=True)
    )
    words = circumstances()
    made = f"Made by `python benchmarks/compositions.py`, torch {words['torch']}, {words['date']}."
    intro = INTRODUCTION.format(setting=SETTING, plain=format_bytes(plain))
    return f"{intro}{reasons}\n\n{made}\n"


def cell(one: str, other: str, plain: int, peaks: dict[str, int]) -> str:
    """Return the saving in per cent, or the letter of the reason why the pair does not work."""
    names = one if one == other else f"{one}+{other}"
    if names in peaks:
        return f"{in_per_cent(peaks[names], plain)}%".replace("-", "−")
    return REASONS.get(frozenset((one, other)), "·")


def in_per_cent(peak: int, plain: int) -> int:
    """Return the saved share of the plain peak, in per cent."""
    return round(100 * (1 - peak / plain))


def picture(plain: int, peaks: dict[str, int]):
    """Draw a square for each pair; darker means more saved."""
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
        f"Peak memory saved by pairs of techniques, in per cent ({SETTING})\n"
        "dot: both fill the same place in a step; letter: see the reason in the list"
    )
    figure.colorbar(image, ax=axes, shrink=0.6, label="per cent of the plain step's peak")
    return figure


if __name__ == "__main__":
    sys.exit(main())
