"""Is the predicted peak of a rank that of a real one? Writes docs/RANKS.md.

    python benchmarks/ranks.py

Each script of benchmarks/parallel runs in real processes that meet through gloo, each measured by
`memlab run --real` under torchrun, and then in a dry run, one rank at a time.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import ranks_published

from memlab.internals.files import write_beside

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "RANKS.md"
RANKS = {"hybrid": 4, "two_d": 4}  # of the others 2
HEAD = """# Ranks: predicted and real peaks

`memlab run --ranks N train.py` runs one rank at a time under a process group that sends nothing.
Here its peak on the CPU is held against that of real processes with gloo, which memlab measures:

```sh
torchrun --nproc-per-node 2 -m memlab run --real train.py
memlab run --device cpu --ranks 2 train.py
```

The scripts are in `benchmarks/parallel`, the table is written by `benchmarks/ranks.py`, and
`tests/scripts/test_script_ranks.py` compares each category. Collectives' own buffers are left out:
gloo reduces a copy of a reduce-scatter's whole input, and NCCL has buffers of a fixed size
(`memlab/configs/nccl.py`). torch's context parallel does not run on the CPU (no strategy for its
attention there), so it has no row.

| script | ranks | real peak of each rank, bytes | predicted | difference |
| --- | --- | --- | --- | --- |
"""


def main() -> None:
    rows = []
    for script in sorted((HERE / "parallel").glob("*.py")):
        ranks = RANKS.get(script.stem, 2)
        real, dry = measured(script, ranks), predicted(script, ranks)
        what = (ast.get_docstring(ast.parse(script.read_text())) or "").rstrip(".")
        apart = max(abs(a - b) for a, b in zip(real, dry, strict=True))
        cells = (what, ranks, shown(real), shown(dry), f"{apart:,}")
        rows.append("| " + " | ".join(map(str, cells)) + " |")
        print(rows[-1], flush=True)
    with write_beside(DOCUMENT) as beside:
        beside.write_text(
            HEAD + "\n".join(rows) + "\n\n" + ranks_published.section(), encoding="utf-8"
        )


def shown(peaks: list[int]) -> str:
    return f"{peaks[0]:,}" if len(set(peaks)) == 1 else ", ".join(f"{peak:,}" for peak in peaks)


def measured(script: Path, ranks: int) -> list[int]:
    """Return the peaks of real ranks."""
    with tempfile.TemporaryDirectory() as folder:
        each = f"import os, sys; sys.argv[3] += os.environ['RANK']; {START}"
        Path(folder, "rank.py").write_text(each)
        run("torch.distributed.run", f"--nproc-per-node={ranks}", f"{folder}/rank.py", *(
            "--real", "--out", f"{folder}/", script
        ))  # fmt: skip
        return [peak(Path(folder, str(rank))) for rank in range(ranks)]


def predicted(script: Path, ranks: int) -> list[int]:
    """Return the peaks of a dry run of each rank."""
    peaks = []
    for rank in range(ranks):
        with tempfile.TemporaryDirectory() as folder:
            options = ("--device", "cpu", "--ranks", str(ranks), "--rank", str(rank))
            run("memlab", "run", *options, "--no-advice", "--out", folder, script)
            peaks.append(peak(Path(folder)))
    return peaks


START = "sys.argv[1:1] = ['run']; from memlab.cli import main; main()"


def run(module: str, *words: object) -> None:
    """Run a module. Its output is shown if it fails."""
    command = [sys.executable, "-m", module, *map(str, words)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def peak(folder: Path) -> int:
    return json.loads((folder / "run.json").read_text())["rows"][0]["peak_bytes"]


if __name__ == "__main__":
    main()
