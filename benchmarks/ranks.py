"""Does a rank's predicted peak equal the real one, and how long does a prediction take?

    python benchmarks/ranks.py            all of it, and the page
    python benchmarks/ranks.py peaks      the peaks, and the page; or times
    python benchmarks/ranks.py page       the page alone, from the results

Each script runs in real processes that meet through gloo, each measured by `memlab run --real`
under torchrun, and then in a dry run, one rank at a time. The scripts are in `benchmarks/parallel`
and `benchmarks/llama`, or written by `memlab plan --gpus`. `times` measures `memlab run` on a
Llama 3.1 405B for H100s; use an idle machine. Writes the results of this machine and docs/RANKS.md.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ranks_published
from common import RESULTS, save, table

from memlab.configs.shapes import PRESETS
from memlab.internals.files import write_beside
from memlab.planner.mesh_script import mesh_script
from memlab.planner.meshes import Mesh
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "RANKS.md"
MEASURED_ON = "cpu-x86_64-2-cores.json"
HEAD = """# Ranks: predicted and real peaks

`memlab run --ranks N train.py` predicts one rank at a time, with a process group that sends
nothing. This page compares its peaks on the CPU with the measured peaks of real gloo processes:

```sh
torchrun --nproc-per-node 2 -m memlab run --real train.py
memlab run --device cpu --ranks 2 train.py
```

The scripts are in `benchmarks/parallel` and `benchmarks/llama`, or written by
`memlab plan --gpus`. `benchmarks/ranks.py` writes this page, and
`tests/scripts/test_script_ranks.py` compares each category.

- The peaks exclude buffers that collectives allocate themselves: gloo copies the whole input of a
  reduce-scatter, and NCCL has buffers of a fixed size (`memlab/configs/nccl.py`).
- torch's context parallelism does not run on the CPU, because torch has no sharding strategy for
  its attention there. The first row uses memlab's ring attention instead.
- The 4 bytes in pipelines are a tensor that `torch.distributed.pipelining` creates on import. Only
  the real ranks count it.
- On a busy machine, a gloo thread sometimes holds a tensor a moment longer, which raises the real
  peak.

"""
TIMES = """
## How long a prediction takes

The time of `memlab run --device cuda:h100` on `benchmarks/llama/three_d.py`, a Llama 3.1 405B with
8,192 tokens in a micro-batch, on two CPU cores. Only the pipeline stages that differ run: the
first, the last, and one of each kind between them. So the time grows with the layers and
micro-batches of a stage, and hardly with the number of ranks.

"""
SMALL = replace(PRESETS["tiny"], tied=False)


class Case(NamedTuple):
    """A script to run: its title, its text or path, its arguments and ranks."""

    what: str
    script: Path | str
    arguments: tuple[str, ...] = ()
    ranks: int = 2


def cases() -> Iterator[Case]:
    for path in sorted((HERE / "parallel").glob("*.py")):
        what = (ast.get_docstring(ast.parse(path.read_text())) or "").rstrip(".")
        yield Case(what, path, ranks={"hybrid": 4, "two_d": 4}.get(path.stem, 2))
    llama, tiny = HERE / "llama", ("tiny",)
    yield Case("`llama/fsdp2.py`", llama / "fsdp2.py", (*tiny, "4", "32", "2"))
    for sizes in (("2", "1", "2"), ("2", "2", "1"), ("2", "2", "2")):
        named = " × ".join(sizes)
        what = f"`llama/three_d.py`, pipeline × data × tensor {named}"
        ranks = int(sizes[0]) * int(sizes[1]) * int(sizes[2])
        yield Case(what, llama / "three_d.py", (*tiny, *sizes, "2", "32", "4"), ranks)
    for mesh in (Mesh(2), Mesh(tensor=2), Mesh(2, 2), Mesh(pipeline=2), Mesh(2, 2, 2)):
        text = mesh_script(SMALL, mesh, sequences=2, seq_len=32)
        yield Case(f"`plan --gpus`: {mesh}", text, ranks=mesh.gpus)


class Timed(NamedTuple):
    """Arguments of three_d.py: pipeline × data × tensor, a stage's blocks, micro-batches."""

    pipeline: int
    data: int
    tensor: int
    blocks: int
    micro_batches: int

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*map(str, self[:4]), "8192", str(self.micro_batches))


TIMED = (
    Timed(16, 8, 8, 8, 16),
    Timed(16, 1, 8, 8, 16),
    Timed(16, 8, 8, 4, 16),
    Timed(16, 8, 8, 2, 16),
    Timed(8, 16, 8, 8, 16),
    Timed(8, 16, 8, 8, 8),
    Timed(4, 4, 8, 32, 4),
)


def main() -> None:
    wanted = sys.argv[1:] or ["peaks", "times"]
    if "peaks" in wanted:
        save(RESULTS, "ranks", "peaks", {"rows": list(map(compared, cases()))})
    if "times" in wanted:
        save(RESULTS, "ranks", "times", {"rows": list(map(timed, TIMED))})
    results = json.loads((RESULTS / MEASURED_ON).read_text(encoding="utf-8"))
    with write_beside(DOCUMENT) as beside:
        beside.write_text(page(results["ranks"]), encoding="utf-8")


def page(results: dict[str, Any]) -> str:
    """Return docs/RANKS.md."""
    peaks = [
        (row["what"], str(row["ranks"]), shown(row["real"]), shown(row["predicted"]), f"{off:,}")
        for row in results["peaks"]["rows"]
        for off in [max(abs(a - b) for a, b in zip(row["real"], row["predicted"], strict=True))]
    ]
    header = ("script", "ranks", "real peak of each rank, bytes", "predicted", "difference")
    times = [
        (
            f"{row['pipeline']} × {row['data']} × {row['tensor']}",
            *(f"{row[name]:,}" for name in ("ranks", "ran", "blocks", "micro_batches")),
            f"{row['seconds']:.0f} s",
            f"{row['highest_peak_bytes'] / 2**30:.2f} GiB",
        )
        for row in results.get("times", {"rows": []})["rows"]
    ]
    of_times = (
        *("pipeline × data × tensor", "ranks", "that ran", "blocks of a stage", "micro-batches"),
        *("time", "highest peak of a rank"),
    )
    parts = (table(header, peaks), TIMES + table(of_times, times), ranks_published.section())
    return HEAD + "\n\n".join(part.strip("\n") for part in parts) + "\n"


def shown(peaks: list[int]) -> str:
    return f"{peaks[0]:,}" if len(set(peaks)) == 1 else ", ".join(f"{peak:,}" for peak in peaks)


# ------------------------------------------------------------------ runs


def compared(case: Case) -> dict[str, Any]:
    """Return the peaks of a script's real and predicted ranks."""
    with tempfile.TemporaryDirectory() as folder:
        script = case.script
        if isinstance(script, str):
            script = Path(folder, "train.py")
            script.write_text(case.script, encoding="utf-8")
        words = (script, *case.arguments)
        real = measured(words, case.ranks, Path(folder))
        dry = predicted(words, case.ranks)
    print(case.what, shown(real), shown(dry), file=sys.stderr, flush=True)
    return {"what": case.what, "ranks": case.ranks, "real": real, "predicted": dry}


def measured(words: tuple[Any, ...], ranks: int, folder: Path) -> list[int]:
    """Return the peaks of real ranks."""
    torchrun = ("torch.distributed.run", f"--nproc-per-node={ranks}")
    run(*torchrun, "-m", "memlab", "run", "--real", "--out", folder, *words)
    return [peak(folder / f"rank{rank}" if rank else folder) for rank in range(ranks)]


def predicted(words: tuple[Any, ...], ranks: int) -> list[int]:
    """Return the peaks of the ranks' dry runs."""
    launch = launch_of([str(word) for word in words]).with_ranks(ranks)
    with warnings.catch_warnings(action="ignore"):
        outcomes = run_ranks(launch, range(ranks), device="cpu")
    return [outcome.trace.peak_bytes for outcome in outcomes.values()]


def timed(wanted: Timed) -> dict[str, Any]:
    """Return how long the prediction of the whole mesh takes, and its highest peak."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--device", "cuda:h100", "--ranks", str(wanted.ranks), "--no-advice")
        script = (HERE / "llama" / "three_d.py", "llama-3-405b", *wanted.arguments)
        before = time.perf_counter()
        output = run("memlab", "run", *options, "--out", folder, *script)
        seconds = time.perf_counter() - before
        highest = peak(Path(folder))
    ran = sum(line.split(" ")[0].isdigit() for line in output.splitlines())
    print(wanted, f"{seconds:.0f} s", file=sys.stderr, flush=True)
    found = {"ranks": wanted.ranks, "ran": ran, "seconds": seconds, "highest_peak_bytes": highest}
    return {**wanted._asdict(), **found}


def run(module: str, *words: object) -> str:
    """Run a module and return its standard output. It is shown if the module fails."""
    command = [sys.executable, "-m", module, *map(str, words)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def peak(folder: Path) -> int:
    return json.loads((folder / "run.json").read_text())["rows"][0]["peak_bytes"]


if __name__ == "__main__":
    main()
