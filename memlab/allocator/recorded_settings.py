"""The settings that a recording was made with: what it says, and what its events show."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from memlab.allocator.settings import Settings, fields_in
from memlab.allocator.sizes import POWERS

KEY = "allocator_settings"  # in torch.cuda.memory._snapshot()
_DEFAULTS = {field.name: field.default for field in fields(Settings)}
_STATED = {  # the names in a snapshot; the last two are in recordings of ours alone
    "max_split_size": "max_split_size_bytes",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "expandable_segments": "expandable_segments",
    "large_segment_size": "large_segment_bytes",
    "max_non_split_rounding_size": "max_non_split_rounding_bytes",
}
_UNSET = (None, -1, 0)  # how torch writes that there is no such size or share
_SHARES = ("garbage_collection_threshold", "memory_fraction")  # of the card's memory
_WHOLE = ("segment_alloc", "segment_free")
_BY_PAGES = ("segment_map", "segment_unmap")


def of_recording(
    recording: Mapping[str, Any], events: Iterable[Mapping[str, Any]], given: Settings
) -> Settings:
    """`given`, completed by what the recording says of its own settings.

    A share of the card's memory is left out where the capacity is not given: what the recording
    gave back is in its events. ValueError where `given` says something else than the recording.
    """
    recorded = {**stated(recording.get(KEY, {})), **_shown(events)}
    missing = {}
    for name, value in recorded.items():
        wanted = getattr(given, name)
        if wanted == _DEFAULTS[name]:
            missing[name] = value
        elif _expanded(name, wanted) != _expanded(name, value):
            raise ValueError(
                f"the recording was made with {name}={value}, and {name}={wanted} was given; "
                f"leave it out, or ask `simulate` what a trace takes with other settings"
            )
    if given.capacity_bytes is None:
        missing = {name: value for name, value in missing.items() if name not in _SHARES}
    return replace(given, **missing)


def stated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Settings that a snapshot's `allocator_settings` state."""
    found: dict[str, Any] = {}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        found |= fields_in(settings.get(name) or "")
    for name, field in _STATED.items():
        if name in settings:
            value = settings[name]
            found[field] = value if value not in _UNSET else _DEFAULTS[field]
    if divisions := settings.get("roundup_power2_divisions"):
        found["roundup_power2_divisions"] = _divisions(divisions)
    return found


def as_stated(settings: Settings) -> dict[str, Any]:
    """The same settings as torch's snapshot states them, and those it has no word for."""
    values = {name: getattr(settings, field) for name, field in _STATED.items()}
    divisions = _expanded("roundup_power2_divisions", settings.roundup_power2_divisions)
    by_size = {str(2**power): divisions[power] for power in POWERS}
    return {**values, "roundup_power2_divisions": by_size}


def _shown(events: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Whether segments expand, as the events show it; nothing where no event is of a segment."""
    actions = {event["action"] for event in events}
    whole, by_pages = actions & {*_WHOLE}, actions & {*_BY_PAGES}
    if whole and by_pages:
        raise ValueError(
            "the recording has both whole segments and expandable ones; "
            "replay one that keeps to expandable_segments or does without from start to end"
        )
    return {"expandable_segments": bool(by_pages)} if whole or by_pages else {}


def _divisions(by_size: Mapping[str, int]) -> tuple[int, ...] | None:
    """Of 16 numbers, by size in MiB; None where all are 0."""
    numbers = tuple(by_size.get(str(2**power), 0) for power in POWERS)
    return numbers if any(numbers) else None


def _expanded(name: str, value: Any) -> Any:
    """One number of divisions as the 16 that it stands for."""
    if name != "roundup_power2_divisions":
        return value
    return value if isinstance(value, tuple) else (value or 0,) * len(POWERS)
