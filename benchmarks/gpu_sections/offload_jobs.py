"""The bill's step with parts of it offloaded from the GPU, to the host and to the disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from offload import (
    EVERYTHING,
    NOTHING,
    WAYS,
    Plan,
    Way,
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
OF_BOTH = {name: way for name, way in WAYS.items() if name != NOTHING and not way.lasts}
ON_THE_HOST = {"all of the state, stepped on the host": Way({**EVERYTHING, "on": "host"})}
PAIRS: dict[str, tuple[str, Way]] = {
    f"{place}, {name}": (place, way)
    for place, ways in ((HOST, {**OF_BOTH, **ON_THE_HOST}), (DISK, OF_BOTH))
    for name, way in ways.items()
}
ROUNDS = 3
BUFFERS = 4  # copies on their way down at once


@contextmanager
def host_stores() -> Iterator[Callable[[Way], Store]]:
    yield lambda way: HostStore(buffers=BUFFERS)


def beside_nothing(name: str, small: bool, rehearsal: bool) -> Answer:
    """A step that offloads, beside one that doesn't; a rehearsal takes both on the CPU, where the
    host is no other memory."""
    place, way = PAIRS[name]
    setting = replace(SMALL_BILL if small else BILL, device="cpu" if rehearsal else "cuda")
    plan = Plan(setting, sub_group=2**13 if small else 2**23, alone_bytes=2**18 if small else 2**28)
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
        "time over nothing offloaded": slowdown(found, name).median,
        "hidden": hidden(found, name),
    }
