"""Choose which snapshots to keep.

Saves    disk: only every k-th snapshot stays.
Costs    a larger error in synthesized averages, computed before any file is removed.
Source   the closed form of the error in memlab.ema.profiles.

Profiles reach far back: at σ = 0.15, a tenth of the profile lies before 0.6·t. The last n snapshots
therefore do not suffice. The error at the end of training with 20 of 100 snapshots, tracked at 0.05
and 0.10:

    σ                          0.07      0.15      0.25
    every 5th, and the last    6e-6      3e-5      4e-3
    the last 20                2e-5      9e-3      5e-1
    log-spaced from the end    4e-7      1e-4      4e-2

Equal gaps are best over all widths and also serve earlier target times. For short averages at the
end only, use gaps that grow towards the start.

    pruned = prune(find_snapshots(folder), (0.05, 0.15), error=1e-3)
    print(pruned.errors)
    for snapshot in pruned.dropped:
        snapshot.path.unlink()
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from memlab.ema.profiles import Profile, power_profile, profile_error


@dataclass(frozen=True)
class Pruning:
    """The snapshots to keep and to drop, and the remaining profile error per sigma."""

    kept: list[Any]
    dropped: list[Any]
    every: int
    errors: dict[float, float]


def every_kth(times: Sequence[float], k: int) -> list[float]:
    """Return the k-th, 2k-th, … time, and the last."""
    if k < 1:
        raise ValueError(f"got every {k}-th; give 1 or more")
    kept = list(times[k - 1 :: k])
    return kept if kept and kept[-1] == times[-1] else [*kept, times[-1]]


def last_n(times: Sequence[float], count: int) -> list[float]:
    """Return the last `count` times."""
    return list(times[-_checked_count(count) :])


def log_spaced(times: Sequence[float], count: int) -> list[float]:
    """Return `count` times with gaps that grow towards the start.

    Distances from the end follow a geometric progression, where the times allow it.
    """
    total, count = len(times), min(_checked_count(count), len(times))
    if count < 2:
        return list(times[-1:])
    back = [0]
    for number in range(1, count):
        wanted = round((total - 1) ** (number / (count - 1)))
        # Take the next free time where the progression is denser than the times.
        back.append(min(max(wanted, back[-1] + 1), total - count + number))
    return [times[total - 1 - distance] for distance in reversed(back)]


def prune(snapshots: Sequence[Any], sigmas: Sequence[float], *, error: float) -> Pruning:
    """Keep the last and every k-th snapshot, with the largest k that satisfies the error limit.

    Nothing is deleted.

    Args:
        snapshots: from `find_snapshots`, or profiles.
        error: the largest profile error at the last snapshot's time, for each of `sigmas`.

    Raises:
        ValueError: if even all snapshots have a larger error.
    """
    if isinstance(snapshots, (str, os.PathLike)):
        raise TypeError(f"got {str(snapshots)!r}; give find_snapshots({str(snapshots)!r})")
    widths: Any = [sigmas] if isinstance(sigmas, Real) else sigmas
    times = sorted({_profile(snapshot).t for snapshot in snapshots})
    if not times:
        raise ValueError("got no snapshots to choose from; give some")
    for k in range(len(times), 0, -1):
        wanted = set(every_kth(times, k))
        kept = [snapshot for snapshot in snapshots if _profile(snapshot).t in wanted]
        errors = errors_at_end(kept, widths)
        if max(errors.values(), default=0.0) <= error:
            dropped = [snapshot for snapshot in snapshots if _profile(snapshot).t not in wanted]
            return Pruning(kept, dropped, k, errors)
    worst = max(errors, key=lambda sigma: errors[sigma])
    raise ValueError(
        f"got an error of {error:.2g}, but even all {len(times)} times leave {errors[worst]:.2g} "
        f"at sigma {worst}; allow a larger error, or leave out this sigma"
    )


def errors_at_end(snapshots: Sequence[Any], sigmas: Sequence[float]) -> dict[float, float]:
    """Return the profile error of each sigma at the time of the last snapshot."""
    profiles = [_profile(snapshot) for snapshot in snapshots]
    end = max((profile.t for profile in profiles), default=math.nan)
    return {sigma: profile_error(profiles, power_profile(sigma, end)) for sigma in sigmas}


def _profile(snapshot: Any) -> Profile:
    return snapshot if isinstance(snapshot, Profile) else snapshot.profile


def _checked_count(count: int) -> int:
    if count < 1:
        raise ValueError(f"got {count} snapshots to keep; give 1 or more")
    return count
