"""Families of vision models: peaks of dry runs against real steps.

    pip install torchvision timm        # builds that match your torch
    python benchmarks/trainings/families.py [--only regnet --only convnext] [--library timm]

Takes one model of each family in torchvision and timm, the smallest or close to it, with random
weights; nothing is downloaded. Measures the second training step (forward, backward, SGD with
momentum, batch size 2) for real and in a dry run. Both peaks must agree to the byte. The last
column says whether all allocations agree as well. They differ for models that write in place to
views with gradients: autograd replays the views of fake tensors, but uses `as_strided` on real
ones, which makes one more temporary tensor and does not affect the peak. torchvision's detection
models are left out because the number of boxes depends on the weights (with assume="most" the peak
of a Faster R-CNN's dry run is 87 % above the real one), and its quantized models because they do
not train.

Prints Markdown and writes `benchmarks/results/<machine>.json` if every family ran.
"""

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import heading, parser_with_results, progress, save, set_environment, table

import memlab
from memlab.trace import Event, Trace
from memlab.units import format_bytes

BATCH = 2
IMAGE = (3, 224, 224)

# Constructor arguments by library and name. `inputs` overrides the model's input size or IMAGE.
MODELS = Path(__file__).with_suffix(".json")


class FamilyCase(NamedTuple):
    """A model, and how to build it."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: list[list[int]] | None  # without the batch; None for the model's default


class FamilyRow(NamedTuple):
    """The two peaks, or an error."""

    library: str
    name: str
    real_bytes: int = 0
    dry_bytes: int = 0
    same_events: bool = False
    error: str = ""

    @property
    def is_exact(self) -> bool:
        return not self.error and self.real_bytes == self.dry_bytes


# ------------------------------------------------------------------ models


def cases(library: str) -> Iterator[FamilyCase]:
    """Yield the models of an installed library."""
    module = importlib.import_module("torchvision.models" if library == "torchvision" else "timm")
    create = module.get_model if library == "torchvision" else module.create_model
    for name, given in json.loads(MODELS.read_text(encoding="utf-8"))[library].items():
        options = dict(given)
        inputs = options.pop("inputs", None)

        def build(name: str = name, options: dict[str, Any] = options) -> nn.Module:
            return create(name, **options)

        yield FamilyCase(library, name, build, inputs)


def step_of(case: FamilyCase) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """Build a training step from seed 0."""
    torch.manual_seed(0)
    model = case.build().train()
    shapes = case.inputs or [getattr(model, "default_cfg", {}).get("input_size", IMAGE)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        made = model(*(torch.randn(BATCH, *shape) for shape in shapes))
        outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        torch.stack([output.float().mean() for output in outputs]).sum().backward()
        optimizer.step()

    return step, model, optimizer


# ------------------------------------------------------------------ comparison


def compared(case: FamilyCase) -> FamilyRow:
    """Measure the second step, real and dry."""
    traces = []
    try:
        for context in (nullcontext(), memlab.dry_run()):
            with context:
                step, model, optimizer = step_of(case)
                step()
                traces.append(memlab.measure(step, model=model, optimizer=optimizer))
                del step, model, optimizer
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        run = "the real step" if not traces else "the dry run"
        return FamilyRow(case.library, case.name, error=f"{run}: {str(error).splitlines()[0]}")
    real, dry = traces
    same = allocations(real) == allocations(dry)
    return FamilyRow(case.library, case.name, real.peak_bytes, dry.peak_bytes, same)


def allocations(trace: Trace) -> list[list[tuple[Any, ...]]]:
    """Return bytes, operator and storage of each event, with storages renumbered.

    Consecutive frees are sorted, because Python decides their order.
    """
    numbers: dict[int, int] = {}

    def plain(event: Event) -> tuple[Any, ...]:
        number = numbers.setdefault(event.storage, len(numbers))
        return event.bytes, str(event.operator), number, str(event.category)

    runs = groupby(map(plain, trace.events), key=lambda event: event[0] < 0)
    return [sorted(run) if frees else list(run) for frees, run in runs]


# ------------------------------------------------------------------ the command


def main() -> int:
    set_environment()
    options = arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # from the models
    chosen = []
    for library in options.library or ("torchvision", "timm"):
        try:
            chosen += [case for case in cases(library) if wanted(case, options.only)]
        except (ImportError, RuntimeError) as error:
            print(f"{library} cannot be loaded ({error}); install the build for your torch: "
                  f"pip install {library}", file=sys.stderr)  # fmt: skip
            return 2
    rows = run(chosen)
    print(report(rows))
    if not options.only and not options.library:
        save(options.results, "trainings", "families", {"rows": [row._asdict() for row in rows]})
    return 0 if all(row.is_exact for row in rows) else 1


def run(chosen: list[FamilyCase]) -> list[FamilyRow]:
    rows = []
    with progress() as bar:
        for case in bar.track(chosen, description="models"):
            rows.append(compared(case))
    return rows


def arguments() -> argparse.Namespace:
    parser = parser_with_results(__doc__)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="models whose name contains this"
    )
    parser.add_argument("--library", action="append", choices=("torchvision", "timm"))
    return parser.parse_args()


def wanted(case: FamilyCase, names: list[str] | None) -> bool:
    return names is None or any(name in case.name for name in names)


def report(rows: list[FamilyRow]) -> str:
    exact = sum(row.is_exact for row in rows)
    same = sum(row.same_events for row in rows)
    lines = [
        (
            f"{row.name} ({row.library})",
            row.error or format_bytes(row.real_bytes),
            "" if row.error else f"{row.dry_bytes - row.real_bytes:+,}",
            "" if row.error else "yes" if row.same_events else "no",
        )
        for row in rows
    ]
    header = ("model", "real peak", "dry run − real, bytes", "same allocations")
    summary = f"{exact} of {len(rows)} peaks are exact; {same} steps have the same allocations."
    title = heading("Families of vision models, dry run against real step")
    return f"{title}\n\n{summary}\n\n{table(header, lines)}"


if __name__ == "__main__":
    sys.exit(main())
