"""Code that real ranks run: they measure a script together."""

import os
import warnings

import torch.distributed.pipelining  # noqa: F401 - holds a tensor of its own, from its import on

from memlab.scripts.launch import launch_of
from memlab.scripts.running import run


def peak(path: str) -> dict[str, int]:
    """Measure the script in this rank; return what its peak has, by category."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # as under torchrun
    warnings.simplefilter("ignore")
    return dict(run(launch_of([path]), real=True).trace.at_peak)
