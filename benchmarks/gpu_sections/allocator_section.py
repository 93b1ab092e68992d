"""Record CUDA allocator histories under several settings and replay them in the simulation.

Each history comes from its own process, which trains on sequences of varying length and so
fragments the cache. Some settings only act under a memory limit; their processes get one, between
the smallest limit that still works and the memory reserved without a limit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from common import SectionReport, table

from memlab.allocator import Replay, Settings, replay
from memlab.units import format_bytes

from .bench import Bench
from .configurations import CONFIGURATIONS
from .jobs import first_line
from .predictions import Prediction, predicted, settings_of

MISSES = 8  # shown per recording
HEADER = (
    *("setting", "decisions", "segments", "addresses", "released", "at the end"),
    *("reserved, recorded", "replayed", "retries"),
)
LENGTHS, SIDE_STREAM = "varying lengths", "batch copied on a side stream"


class PredictedRun(NamedTuple):
    """An allocator setting to record."""

    conf: str  # PYTORCH_ALLOC_CONF
    room: float | None = None  # limit: 0 is the smallest possible, 1 the uncapped need
    configuration: str = LENGTHS

    def __str__(self) -> str:
        words = [self.conf or "default"]
        words += [] if self.room is None else [f"capped ({self.room:.0%} of the room)"]
        words += [self.configuration] if self.configuration != LENGTHS else []
        return ", ".join(words)

    def cap_bytes(self, prediction: Prediction, total_bytes: int) -> int | None:
        """Return the simulated memory limit, at least 2 % above the smallest possible."""
        if self.room is None:
            return None
        settings = Settings.parse(self.conf, capacity_bytes=total_bytes)
        need = prediction.need_bytes(total_bytes, settings)
        least = prediction.least_cap_bytes(total_bytes, settings)
        return max(int(least + self.room * (need - least)), int(1.02 * least))


SETTINGS = (
    PredictedRun(""),
    PredictedRun("", configuration=SIDE_STREAM),
    PredictedRun("", room=0.5),
    PredictedRun("", room=0.1),
    PredictedRun("max_split_size_mb:20"),
    PredictedRun("max_split_size_mb:64"),
    PredictedRun("max_split_size_mb:64", room=0.3),
    PredictedRun("max_split_size_mb:32,max_non_split_rounding_mb:64"),
    PredictedRun("expandable_segments:True"),
    PredictedRun("expandable_segments:True", configuration=SIDE_STREAM),
    PredictedRun("expandable_segments:True", room=1.0),
    PredictedRun("expandable_segments:True,roundup_power2_divisions:8"),
    PredictedRun("roundup_power2_divisions:4"),
    PredictedRun("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"),
    PredictedRun("garbage_collection_threshold:0.6", room=1.0),
    PredictedRun("garbage_collection_threshold:0.8", room=0.3),
    PredictedRun("garbage_collection_threshold:0.7,max_split_size_mb:64", room=0.6),
)


def run(bench: Bench) -> SectionReport:
    prediction = predicted(CONFIGURATIONS[LENGTHS], bench.size, bench.target)
    answers = {
        setting: bench.submit(
            "record",
            setting.configuration,
            name=f"allocator: {setting}",
            conf=setting.conf,
            cap_bytes=setting.cap_bytes(prediction, bench.total_bytes),
        )
        for setting in SETTINGS
    }
    rows: list[dict[str, Any]] = []
    for setting, answer in answers.items():
        rows.append(row(bench, setting, answer.result()))
        bench.say(progress_line(rows[-1]))
        bench.keep_rows(rows)
    return report(rows)


def row(bench: Bench, setting: PredictedRun, recording: dict[str, Any]) -> dict[str, Any]:
    """Store a recording, replay it with its own settings, and return the result's row."""
    known: dict[str, Any] = {"setting": str(setting)}
    if "failure" in recording:
        return {**known, "failure": f"on the GPU: {recording['failure']}"}
    bench.keep_recording(recording)
    known |= {name: recording[name] for name in ("cap_bytes", "retries", "ran_out")}
    try:
        result = replayed(recording, bench.total_bytes)
    except Exception as error:
        return {**known, "failure": f"replaying: {type(error).__name__}: {first_line(str(error))}"}
    return {**known, **plain(result)}


def replayed(recording: dict[str, Any], total_bytes: int) -> Replay:
    """Replay a recording with its own settings."""
    conf, cap = recording["conf"], recording["cap_bytes"]
    return replay(recording, settings_of(conf, cap, total_bytes))


def plain(result: Replay) -> dict[str, Any]:
    return {
        "exact": result.exact,
        **{name: str(getattr(result, name)) for name in _SCORES},
        "recorded_reserved_bytes": result.recorded_reserved_bytes,
        "reserved_bytes": result.reserved_bytes,
        "misses": list(result.misses[:MISSES]),
        "missed": len(result.misses),
    }


_SCORES = ("decisions", "segment_sizes", "addresses", "releases", "blocks_at_end")


def progress_line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['setting']}: {row['failure']}"
    return (
        f"{row['setting']}: {'exact' if row['exact'] else str(row['missed']) + ' misses'}, "
        f"decisions {row['decisions']}, reserved {format_bytes(row['recorded_reserved_bytes'])}, "
        f"{row['retries']} retries{', ran out' if row['ran_out'] else ''}"
    )


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "failure" in row:
        return (row["setting"], *[""] * (len(HEADER) - 1))
    peaks = (f"{row[name]:,}" for name in ("recorded_reserved_bytes", "reserved_bytes"))
    return (row["setting"], *(row[name] for name in _SCORES), *peaks, str(row["retries"]))


def report(rows: Sequence[dict[str, Any]]) -> SectionReport:
    exact = sum(row.get("exact", False) for row in rows)
    sentence = (
        f"{exact} of {len(rows)} allocator histories are replayed exactly: every decision, address "
        f"and release, and the reserved peak."
    )
    notes = [
        *(f"- {row['setting']}: {row['failure']}" for row in rows if "failure" in row),
        *(f"- {row['setting']}: {miss}" for row in rows for miss in row.get("misses", ())),
    ]
    markdown = "\n".join([table(HEADER, map(cells, rows)), "", *notes])
    return SectionReport(sentence, markdown, {"exact": exact, "of": len(rows), "rows": list(rows)})
