"""Recover the settings of a recording from its stated settings and its events."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from memlab.allocator.settings import SHARES, Settings, fields_in
from memlab.allocator.sizes import POWERS

KEY = "allocator_settings"  # in torch.cuda.memory._snapshot()
_DEFAULTS = {field.name: field.default for field in fields(Settings)}
_STATED = {  # names in a snapshot; only memlab's recordings have the last two
    "max_split_size": "max_split_size_bytes",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "expandable_segments": "expandable_segments",
    "large_segment_size": "large_segment_bytes",
    "max_non_split_rounding_size": "max_non_split_rounding_bytes",
}
_UNSET = (None, -1, 0)  # torch's values for an unset size or fraction
_WHOLE = ("segment_alloc", "segment_free")
_BY_PAGES = ("segment_map", "segment_unmap")


def settings_of_recording(
    recording: Mapping[str, Any], events: Iterable[Mapping[str, Any]], given: Settings
) -> Settings:
    """Return `given`, completed with the recording's own settings.

    Fractions of the device's memory are ignored if no capacity is given: the events already show
    what the recording released. Raise ValueError if `given` contradicts the recording.
    """
    recorded = {**stated_settings(recording.get(KEY, {})), **_inferred(events)}
    missing = {}
    for name, value in recorded.items():
        wanted = getattr(given, name)
        if wanted == _DEFAULTS[name]:
            missing[name] = value
        elif _expanded(name, wanted) != _expanded(name, value):
            raise ValueError(
                f"the recording was made with {name}={value}, but {name}={wanted} was given; "
                f"leave it out, or use `simulate` to try other settings"
            )
    if given.capacity_bytes is None:
        missing = {name: value for name, value in missing.items() if name not in SHARES}
    return replace(given, **missing)


def stated_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Settings found in a snapshot's `allocator_settings`."""
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
    """Return settings in the form of torch's snapshot, plus the two that torch does not state."""
    values = {name: getattr(settings, field) for name, field in _STATED.items()}
    divisions = _expanded("roundup_power2_divisions", settings.roundup_power2_divisions)
    by_size = {str(2**power): divisions[power] for power in POWERS}
    return {**values, "roundup_power2_divisions": by_size}


def _inferred(events: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Infer `expandable_segments` from the events; empty if no event concerns a segment."""
    actions = {event["action"] for event in events}
    whole, by_pages = actions & {*_WHOLE}, actions & {*_BY_PAGES}
    if whole and by_pages:
        raise ValueError(
            "the recording has both ordinary and expandable segments; "
            "replay one that uses a single kind throughout"
        )
    return {"expandable_segments": bool(by_pages)} if whole or by_pages else {}


def _divisions(by_size: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return 16 divisions, given by size in MiB; None if all are 0."""
    numbers = tuple(by_size.get(str(2**power), 0) for power in POWERS)
    return numbers if any(numbers) else None


def _expanded(name: str, value: Any) -> Any:
    """Expand a single `roundup_power2_divisions` to one value per size."""
    if name != "roundup_power2_divisions":
        return value
    return value if isinstance(value, tuple) else (value or 0,) * len(POWERS)
