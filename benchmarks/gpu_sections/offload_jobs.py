"""A training step with parts offloaded from the GPU to the host or the disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from offload import (
    EVERYTHING,
    NOTHING,
    WAYS,
    OffloadedParts,
    OffloadSizes,
    ahead,
    compared,
    disk_stores,
    hidden,
    saved,
    slowdown,
)

from memlab.offload import HostStore, Store

from .day_jobs import BILL, SMALL_BILL

Answer = dict[str, Any]

HOST, DISK = "host", "disk"
TO_BOTH = {name: way for name, way in WAYS.items() if name != NOTHING and not way.persistent}
ON_THE_HOST = {"all state, stepped on the host": OffloadedParts({**EVERYTHING, "on": "host"})}
PAIRS: dict[str, tuple[str, OffloadedParts]] = {
    f"{place}, {name}": (place, way)
    for place, ways in ((HOST, {**TO_BOTH, **ON_THE_HOST}), (DISK, TO_BOTH))
    for name, way in ways.items()
}
ROUNDS = 3
BUFFERS = 4  # concurrent copies to the host


@contextmanager
def host_stores() -> Iterator[Callable[[OffloadedParts], Store]]:
    yield lambda way: HostStore(buffers=BUFFERS)


def compare(name: str, small: bool, rehearsal: bool) -> Answer:
    """Compare a step with and without offloading; a rehearsal runs both on the CPU."""
    place, way = PAIRS[name]
    setting = replace(SMALL_BILL if small else BILL, device="cpu" if rehearsal else "cuda")
    plan = OffloadSizes(
        setting, sub_group=2**13 if small else 2**23, alone_bytes=2**18 if small else 2**28
    )
    with (host_stores if place == HOST else disk_stores)() as made:
        found = compared({NOTHING: WAYS[NOTHING], name: way}, plan, made, range(ROUNDS))
    row = found[name]
    return {
        "what": str(setting),
        "peak_bytes": row.peak_bytes,
        "saved": saved(found, name),
        "written_bytes": row.written,
        "read_bytes": row.read,
        "ahead": ahead(row),
        "time / nothing offloaded": slowdown(found, name).median,
        "hidden": hidden(found, name),
    }
