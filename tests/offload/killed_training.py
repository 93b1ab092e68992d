"""Kill a training on disk again and again; run as a script, it prints the results.

    python killed_training.py FOLDER SEED KILLS

The script imports torch once and forks: each training, kill and restart is a child process. A child
counts its disk operations (writes, fsyncs, renames, removals) and kills itself with SIGKILL before
the n-th. A kill keeps data that the system has cached; a power failure does not. So before some
kills, a power failure is simulated: unsynced data is truncated, and renames in an unsynced folder
are undone.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import nn

from memlab.offload import DiskStore, OffloadedOptimizer

STEPS = 4
Weights = list[torch.Tensor]


def a_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 2)
    )


def an_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def rate(step: int) -> float:
    return 0.05 / (1 + step)


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Run one step; the seed makes data and dropout depend only on the step's number."""
    torch.manual_seed(step)
    inputs = torch.randn(5, 6)
    optimizer.param_groups[0]["lr"] = rate(step)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def weights_of(model: nn.Module) -> Weights:
    return [weight.detach().clone() for weight in model.parameters()]


def without_offloading() -> list[Weights]:
    """Return the weights before the first step and after each step."""
    model = a_model()
    optimizer = an_optimizer(model)
    found = [weights_of(model)]
    for step in range(STEPS):
        a_step(model, optimizer, step)
        found.append(weights_of(model))
    return found


def train(folder: Path, right: list[Weights], done=lambda step: None) -> dict:
    """Resume from the folder; return the first step and whether all weights were right."""
    model = a_model()
    with DiskStore(folder) as store:
        optimizer = OffloadedOptimizer(an_optimizer(model), store, sub_group=64, weights=True)
        began = optimizer.resume()
        is_right = [same(weights_of(model), right[began])]
        if began:
            is_right.append(optimizer.param_groups[0]["lr"] == rate(began - 1))
        for step in range(began, STEPS):
            a_step(model, optimizer, step)
            done(step)
            is_right.append(same(weights_of(model), right[step + 1]))
    return {"began": began, "right": all(is_right)}


def same(some: Weights, others: Weights) -> bool:
    return all(map(torch.equal, some, others))


# ------------------------------------------------------------------ counting disk operations


class Disk:
    """Count disk operations, and kill the process before operation `kill_at`."""

    def __init__(self, kill_at: int | None, power_fails: bool) -> None:
        self.kill_at, self.power_fails = kill_at, power_fails
        self.log: list[tuple[str, str]] = []
        self.not_forced: set[str] = set()
        self.forced: set[str] = set()
        self.undo: dict[str, tuple[str, str, bytes | None]] = {}  # renames, by folder
        self.most_bytes = 0
        for name in ("write", "fsync", "replace", "unlink"):
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name, real):
        def run(*args, **kwargs):
            path = self._path(args[0])
            if name == "write" and not self._is_file(args[0]):
                return real(*args, **kwargs)
            if len(self.log) == self.kill_at:
                self._end()
            self.log.append((name, Path(path).name))
            if name == "write":
                self.not_forced.add(path)
                self._update_most_bytes(path)
            if name == "fsync":
                self.forced.add(path)
                self.not_forced.discard(path)
                self.undo.pop(path, None)
            if name == "replace":
                to = os.fspath(args[1])
                before = Path(to).read_bytes() if os.path.exists(to) else None
                self.undo[os.path.dirname(to)] = (path, to, before)
                if path not in self.forced:
                    self.not_forced.add(to)
            return real(*args, **kwargs)

        return run

    def _is_file(self, descriptor) -> bool:
        path = self._path(descriptor)
        return os.path.isfile(path)

    def _path(self, of) -> str:
        return os.readlink(f"/proc/self/fd/{of}") if isinstance(of, int) else os.fspath(of)

    def _update_most_bytes(self, path: str) -> None:
        files = Path(path).parent.glob("state.*")
        sizes = 0
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                sizes += file.stat().st_size
        self.most_bytes = max(self.most_bytes, sizes)

    def _end(self) -> None:
        if self.power_fails:
            for path in self.not_forced:
                if os.path.exists(path):
                    os.truncate(path, 0)
            for _, to, before in self.undo.values():
                if before is None:
                    os.remove(to)
                else:
                    Path(to).write_bytes(before)
        os.kill(os.getpid(), signal.SIGKILL)


def child(work) -> tuple[int, int, dict]:
    """Run `work` in a forked process; return its status, its completed steps and its result.

    The result is empty if the process was killed.
    """
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            answer = json.dumps(work(lambda step: os.write(write, b".")))
            os.write(write, answer.encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    found = answer.lstrip(b".")
    return status, len(answer) - len(found), json.loads(found) if found else {}


def killed_from_outside(folder: Path, right: list[Weights]) -> int:
    """Kill a training from outside as soon as its first step is committed."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            train(folder, right)
            signal.pause()
        os._exit(1)
    while not (folder / "manifest.json").exists():
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def main(folder: Path, seed: int, kills: int) -> dict:
    torch.set_num_threads(1)
    an_optimizer(a_model())  # triggers torch's lazy imports once for all children
    with contextlib.suppress(FileNotFoundError):
        os.remove(folder / "right.pt")

    def write_right(done):
        torch.save(without_offloading(), folder / "right.pt")
        return {}

    child(write_right)
    right = torch.load(folder / "right.pt")

    def whole(done):
        disk = Disk(None, power_fails=False)
        return {**train(folder / "whole", right), "log": disk.log, "most_bytes": disk.most_bytes}

    _, _, found = child(whole)
    draw = random.Random(seed)
    last = len(found["log"]) - 8  # the number of operations varies by a few, because of the thread
    points = sorted(draw.sample(range(last), kills))
    rows = []
    for n, point in enumerate(points):
        where = folder / f"killed{n}"

        def killed(done, where=where, point=point, n=n):
            Disk(point, power_fails=n % 2 == 0)
            return train(where, right, done)

        status, completed, _ = child(killed)
        _, _, again = child(lambda done, where=where: train(where, right))
        rows.append({"point": point, "status": status, "completed": completed, **again})
    outside = []
    for n in range(3):
        where = folder / f"outside{n}"
        status = killed_from_outside(where, right)
        _, _, again = child(lambda done, where=where: train(where, right))
        outside.append({"status": status, **again})
    left = sorted(path.name for path in (folder / "killed0").iterdir())
    named = json.loads((folder / "killed0" / "manifest.json").read_text().split("\n")[1])
    files = sorted(entry["file"] for entry in named["entries"].values())
    state_bytes = sum((folder / "killed0" / file).stat().st_size for file in files)
    return {"whole": found, "killed": rows, "outside": outside, "left": left, "files": files,
            "state_bytes": state_bytes}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
