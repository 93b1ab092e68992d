"""Post-hoc EMA: choose the averaging length after training, from snapshots on disk."""

from memlab.ema.profiles import (
    Profile,
    decay,
    gamma_from_sigma,
    impulse_response,
    inner_product,
    power_profile,
    profile_error,
    relative_width,
    sigma_from_gamma,
    solve_weights,
)
from memlab.ema.pruning import Pruning, errors_at_end, every_kth, last_n, log_spaced, prune
from memlab.ema.snapshots import Snapshot, find_snapshots
from memlab.ema.synthesis import synthesize
from memlab.ema.tracker import PostHocEMA

__all__ = [
    "PostHocEMA",
    "Profile",
    "Pruning",
    "Snapshot",
    "decay",
    "errors_at_end",
    "every_kth",
    "find_snapshots",
    "gamma_from_sigma",
    "impulse_response",
    "inner_product",
    "last_n",
    "log_spaced",
    "power_profile",
    "profile_error",
    "prune",
    "relative_width",
    "sigma_from_gamma",
    "solve_weights",
    "synthesize",
]
