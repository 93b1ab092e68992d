"""Print the anonymous memory that synthesis takes in this process: `… FOLDER`."""

import re
import sys
import threading
import time
from pathlib import Path

import torch

from memlab.ema import Snapshot, synthesize
from memlab.ema.snapshots import file_name, snapshot_metadata
from memlab.ema.tensor_files import create_file

SHAPES = {f"layers.{number}.weight": (2048, 2048) for number in range(8)}  # 128 MiB in float32
STEPS = range(100, 1001, 100)  # for two averages: 20 snapshots
SIGMAS = (0.06, 0.07, 0.08, 0.12)


def anonymous() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024


def empty_snapshot(folder: Path, step: int, sigma: float) -> Snapshot:
    """A file of zeros without disk blocks, whose pages are mapped normally."""
    path = folder / file_name(step, sigma)
    about = snapshot_metadata(
        run="a", clock="steps", step=step, sigma=sigma, model="b", followed=(), tied={}
    )
    with create_file(path, {name: (torch.float16, shape) for name, shape in SHAPES.items()}, about):
        pass
    return Snapshot.open(path, verify=False)  # no element was written, so no checksum fits


def main(folder: Path) -> None:
    snapshots = [empty_snapshot(folder, step, sigma) for step in STEPS for sigma in (0.05, 0.10)]
    out = [folder / f"out-{sigma}.safetensors" for sigma in SIGMAS]
    synthesize(snapshots, SIGMAS, out=out, only="layers.0", dtype=torch.float16)  # warms up
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.005)

    watching = threading.Thread(target=watch)
    watching.start()
    synthesize(snapshots, SIGMAS, out=out, dtype=torch.float16)
    done.set()
    watching.join()
    print(peak - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
