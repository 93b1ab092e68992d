"""The simulated allocator: fidelity on recorded CUDA histories, and speed on a million events.

    python benchmarks/allocator.py [RECORDING.json.gz …] [--conf max_split_size_mb:128]

A recording is JSON (gzipped or not) or CUDA's own pickle; see `memlab.allocator.read_recording`.
Pass the allocator settings of the recording as --conf. Prints Markdown and writes the
speed to `benchmarks/results/<machine>.json`.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import heading, parser_with_results, save, spread, table

from memlab.allocator import Replay, Settings, read_recording, replay, simulate
from memlab.trace import Event
from memlab.units import format_bytes, parse_bytes

EVENTS = 1_000_000
ALIVE = 1_000  # most storages at once, about as many as in a step of 24 layers
ROUNDS = 3
MISSES = 5  # shown per recording
SETTINGS = {
    "torch's defaults": Settings(),
    "max_split_size_mb:64": Settings.parse("max_split_size_mb:64"),
    "expandable_segments:True": Settings.parse("expandable_segments:True"),
}
FIDELITY = (
    *("recording", "segment or cached", "segment sizes", "addresses", "released"),
    *("blocks at the end", "reserved peak, recorded", "simulated"),
)


# ------------------------------------------------------------------ fidelity


def fidelity_cells(name: str, result: Replay) -> tuple[str, ...]:
    """Return a row of the replay table."""
    scores = (result.decisions, result.segment_sizes, result.addresses, result.releases)
    peaks = (result.recorded_reserved_bytes, result.reserved_bytes)
    return (
        name,
        *map(str, (*scores, result.blocks_at_end)),
        *(f"{format_bytes(peak)} ({peak:,} B)" for peak in peaks),
    )


def fidelity(results: dict[str, Replay]) -> str:
    """Return the scores of all recordings, and the first misses."""
    lines = [table(FIDELITY, [fidelity_cells(*item) for item in results.items()])]
    for name, result in results.items():
        lines += [f"- {name}: {miss}" for miss in result.misses[:MISSES]]
    return "\n".join(lines)


# ------------------------------------------------------------------ speed


def generated(events: int, alive: int = ALIVE) -> list[Event]:
    """Return a trace with random allocations and frees of 64 B to 64 MiB."""
    rng = random.Random(0)
    living: list[Event] = []
    trace: list[Event] = []
    while len(trace) < events:
        if living and (len(living) >= alive or rng.random() < 0.45):
            index = rng.randrange(len(living))
            living[index], living[-1] = living[-1], living[index]
            gone = living.pop()
            trace.append(gone._replace(bytes=-gone.bytes))
        else:
            size = int(2 ** rng.uniform(6, 26))
            born = Event(size, len(trace), "activations", "", "", "forward", "uint8", (size,))
            living.append(born)
            trace.append(born)
    return trace


def seconds(trace: Sequence[Event], settings: Settings) -> float:
    """Return the CPU seconds of a simulation."""
    start = time.process_time()
    simulate(trace, settings)
    return time.process_time() - start


def speed(trace: Sequence[Event], rounds: int) -> dict[str, dict[str, float]]:
    """Return median seconds and events per second for each setting."""
    found = {}
    for name, settings in SETTINGS.items():
        median = spread([seconds(trace, settings) for _ in range(rounds)]).median
        found[name] = {"seconds": median, "events_per_second": len(trace) / median}
    return found


def speed_table(found: dict[str, dict[str, float]]) -> str:
    """Return the speeds as a Markdown table."""
    lines = [
        (name, f"{row['seconds']:.2f} s", f"{row['events_per_second']:,.0f}")
        for name, row in found.items()
    ]
    return table(("settings", "CPU time", "events per second"), lines)


# ------------------------------------------------------------------ the command


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__)
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--conf", default="", help="PYTORCH_ALLOC_CONF of the recordings")
    parser.add_argument("--capacity", type=parse_bytes, help="memory of the GPU that recorded them")
    parser.add_argument("--events", type=int, default=EVENTS, help="length of the generated trace")
    return parser.parse_args(words)


def replays(paths: Sequence[Path], settings: Settings) -> dict[str, Replay]:
    """Replay each recording; keys are file names without suffixes."""
    names = [path.name.removesuffix(".gz").removesuffix(".json") for path in paths]
    return dict(zip(names, [replay(read_recording(path), settings) for path in paths], strict=True))


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    try:
        settings = Settings.parse(given.conf, capacity_bytes=given.capacity)
        results = replays(given.recordings, settings)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(heading("Allocator"), end="\n\n")
    if results:
        print(fidelity(results), end="\n\n")
    found = speed(generated(given.events), ROUNDS)
    print(f"{given.events:,} events, at most {ALIVE:,} storages alive:", end="\n\n")
    print(speed_table(found))
    save(given.results, "allocator", "speed", {"events": given.events, "settings": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
