"""Which snapshots to keep.

Saves    of the snapshots' bytes on disk all but every k-th.
Costs    a larger error of what is made of them, which is known before anything is removed.
Source   the error's closed form, memlab.ema.profiles.

A profile reaches far back: at σ = 0.15 a tenth of it lies before 0.6·t. So the last n know too
little of it. Of 100 snapshots, tracked at 0.05 and 0.10, 20 are kept; the error of what is made at
the end of training:

    σ                          0.07      0.15      0.25
    every 5th, and the last    6e-6      3e-5      4e-3
    the last 20                2e-5      9e-3      5e-1
    log-spaced from the end    4e-7      1e-4      4e-2

Even gaps do best for all widths together, and serve targets at other times as well. Whoever wants
short averages of the end alone does better with gaps that grow towards the begin.

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
    """What to keep, and the profile's error that is left for each sigma."""

    kept: list[Any]
    dropped: list[Any]
    every: int
    errors: dict[float, float]


def every_kth(times: Sequence[float], k: int) -> list[float]:
    """The k-th, 2k-th, … time, and the last."""
    if k < 1:
        raise ValueError(f"got every {k}-th; give 1 or more")
    kept = list(times[k - 1 :: k])
    return kept if kept and kept[-1] == times[-1] else [*kept, times[-1]]


def last_n(times: Sequence[float], count: int) -> list[float]:
    """The last so many."""
    return list(times[-_checked_count(count) :])


def log_spaced(times: Sequence[float], count: int) -> list[float]:
    """So many, with gaps that grow towards the begin: the distances from the end are nearly in
    geometric progression."""
    total, count = len(times), min(_checked_count(count), len(times))
    if count < 2:
        return list(times[-1:])
    back = [0]
    for number in range(1, count):
        wanted = round((total - 1) ** (number / (count - 1)))
        # Where the progression is denser than the times, the next one that is free.
        back.append(min(max(wanted, back[-1] + 1), total - count + number))
    return [times[total - 1 - distance] for distance in reversed(back)]


def prune(snapshots: Sequence[Any], sigmas: Sequence[float], *, error: float) -> Pruning:
    """Keep every k-th snapshot and the last, k the largest for which the profile's error at the end
    is at most `error` for each of `sigmas`.

    Snapshots are those of `find_snapshots`, or profiles. Nothing is removed. ValueError if even all
    of them have a larger error.
    """
    if isinstance(snapshots, (str, os.PathLike)):
        raise TypeError(f"got {str(snapshots)!r}; give find_snapshots({str(snapshots)!r})")
    sigmas = [sigmas] if isinstance(sigmas, Real) else sigmas
    times = sorted({_profile(snapshot).t for snapshot in snapshots})
    if not times:
        raise ValueError("got no snapshots to choose from; give some")
    for k in range(len(times), 0, -1):
        wanted = set(every_kth(times, k))
        kept = [snapshot for snapshot in snapshots if _profile(snapshot).t in wanted]
        errors = errors_at_end(kept, sigmas)
        if max(errors.values(), default=0.0) <= error:
            dropped = [snapshot for snapshot in snapshots if _profile(snapshot).t not in wanted]
            return Pruning(kept, dropped, k, errors)
    worst = max(errors, key=lambda sigma: errors[sigma])
    raise ValueError(
        f"got an error of {error:.2g}, and even all {len(times)} times leave {errors[worst]:.2g} "
        f"at sigma {worst}; allow more, or leave that sigma out"
    )


def errors_at_end(snapshots: Sequence[Any], sigmas: Sequence[float]) -> dict[float, float]:
    """The profile's error of each sigma, at the time of the last snapshot."""
    profiles = [_profile(snapshot) for snapshot in snapshots]
    end = max((profile.t for profile in profiles), default=math.nan)
    return {sigma: profile_error(profiles, power_profile(sigma, end)) for sigma in sigmas}


def _profile(snapshot: Any) -> Profile:
    return snapshot if isinstance(snapshot, Profile) else snapshot.profile


def _checked_count(count: int) -> int:
    if count < 1:
        raise ValueError(f"got {count} snapshots to keep; give 1 or more")
    return count
