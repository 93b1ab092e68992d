"""The options --lora-rank and --lora-targets. This module does not import torch."""

from collections.abc import Iterable
from typing import Annotated

import typer

from memlab.cli.errors import UsageError
from memlab.cli.parsing import integer_option
from memlab.train.adapters import LORA_RANK, Adapters

MAX_RANK = 10**6
WITH_ADAPTERS = frozenset({"lora", "qlora"})

Rank = Annotated[
    int | None,
    integer_option("--lora-rank", MAX_RANK, f"Rank of LoRA's adapters. Default: {LORA_RANK}."),
]
Targets = Annotated[
    str | None,
    typer.Option(
        "--lora-targets",
        help="Layers that get an adapter: all, attention, mlp, or names such as query,value. "
        "Default: all linear layers of the blocks.",
        metavar="all|attention|mlp|NAMES",
    ),
]


def choose_adapters(
    rank: int | None, targets: str | None, techniques: Iterable[str] | None = None
) -> Adapters:
    """Return the adapters that the options ask for; `techniques` must have some to train."""
    given = [
        option
        for option, value in (("--lora-rank", rank), ("--lora-targets", targets))
        if value is not None
    ]
    if given and techniques is not None and not _with_adapters(techniques):
        raise UsageError(
            f"got {' and '.join(given)} without adapters; add --technique lora or qlora, or leave "
            f"{'them' if len(given) > 1 else 'it'} out"
        )
    try:
        return Adapters(rank or LORA_RANK, targets or "all")
    except ValueError as error:
        raise UsageError(f"--lora-targets: {error}") from error


def list_adapters(techniques: Iterable[str], adapters: Adapters) -> str:
    """Return a line about the adapters, or nothing if no technique trains any."""
    found = _with_adapters(techniques)
    return f"{' and '.join(found)}: {adapters}" if found else ""


def _with_adapters(techniques: Iterable[str]) -> list[str]:
    parts = {part for name in techniques for part in name.split("+")}
    return sorted(parts & WITH_ADAPTERS)
