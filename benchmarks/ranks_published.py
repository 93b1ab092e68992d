"""Published memory of real GPUs beside predictions of one rank. Writes a part of docs/RANKS.md.

    python benchmarks/ranks_published.py

Each row is a figure that torchtitan's authors published with its settings. `published/llama.py`
trains with these settings in a dry run of rank 0, and the results are kept in
`published/predicted.json`. Takes about five minutes.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memlab.allocator import simulate
from memlab.internals.files import write_beside
from memlab.scripts.launch import Launch
from memlab.scripts.running import run

HERE = Path(__file__).parent
SCRIPT = HERE / "published" / "llama.py"
RESULTS = HERE / "published" / "predicted.json"
DOCUMENT = HERE.parent / "docs" / "RANKS.md"
HEADING = "## Published figures of real GPUs"
TITAN = "https://github.com/pytorch/torchtitan"
GPU_GIB = 95.0396  # of the H100s of #165, which gives percentages
GIB = 2**30


@dataclass(frozen=True)
class Published:
    """A published peak.

    what        was trained
    gpus        all of them
    options     of published/llama.py
    gib         the published peak, in GiB
    source      number or file in torchtitan's repository
    address     of the source, below the repository's
    counts      "reserved", or "allocated", which torchtitan calls active
    segments    "expandable" or "ordinary" if the source's launcher says; "" if nothing does
    steps       taken: at the end of the first, AdamW's state has just been allocated
    """

    what: str
    gpus: int
    options: str
    gib: float
    source: str
    address: str
    counts: str = "reserved"
    segments: str = ""
    steps: int = 2


def _of_822(what: str, reshard: str, gib: float, steps: int = 2) -> Published:
    options = f"--checkpointing selective --foreach --reshard {reshard}"
    return Published(what, 8, options, gib, "#822", "pull/822", "reserved", "expandable", steps)


def _of_165(what: str, checkpointing: str, counts: str, percent: float, more: str) -> Published:
    options = f"--model 7B --seq-len 2048 --checkpointing {checkpointing} {more}"
    options += " --keep-logits --foreach"
    gib = percent / 100 * GPU_GIB
    return Published(what, 8, options, gib, "#165", "pull/165", counts, "ordinary")


def _of_1881(what: str, gpus: int, options: str, gib: float) -> Published:
    options += " --checkpointing selective --groups ends --norm fused --attention cudnn"
    return Published(what, gpus, options.strip(), gib, "#1881", "pull/1881")


_BENCHMARKS = "benchmarks, December 2024", "blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_SELECTIVE = "--checkpointing selective"
ROWS = (
    _of_822("8B, FSDP2", "default", 49.59),
    _of_822("8B, FSDP2, first step", "default", 42.08, steps=1),
    _of_822("8B, FSDP2, all blocks resharded after forward", "always", 49.41),
    _of_822("8B, FSDP2, no block resharded after forward", "never", 62.18),
    Published(
        *("8B, FSDP2, loss in 8 chunks", 8, f"{_SELECTIVE} --loss chunked", 42.26),
        *("#996", "pull/996", "reserved", "expandable"),
    ),
    _of_165(
        "7B, FSDP2, 8 × 2,048 tokens, full checkpointing", "full", "allocated", 23.92, "--batch 8"
    ),
    _of_165(
        "7B, FSDP2, 8 × 2,048 tokens, full checkpointing", "full", "reserved", 32.64, "--batch 8"
    ),
    _of_165("7B, FSDP2, 8 × 2,048 tokens", "selective", "allocated", 52.13, "--batch 8"),
    _of_165("7B, FSDP2, 8 × 2,048 tokens", "selective", "reserved", 62.51, "--batch 8"),
    _of_165(
        "7B, FSDP2 of 4 × tensor parallel of 2, 16 × 2,048 tokens, full checkpointing",
        *("full", "allocated", 50.12, "--batch 16 --tensor 2"),
    ),
    Published("8B, FSDP2, batch 2", 8, f"{_SELECTIVE} --foreach --batch 2", 82.4, *_BENCHMARKS),
    Published("8B, FSDP2, batch 2", 128, f"{_SELECTIVE} --foreach --batch 2", 67.0, *_BENCHMARKS),
    _of_1881("8B, FSDP2, cuDNN's attention", 8, "", 47.82),
    _of_1881("8B, FSDP2, cuDNN's attention", 64, "", 31.41),
    _of_1881("8B, FSDP2 of 4 × tensor parallel of 2, cuDNN's attention", 8, "--tensor 2", 35.33),
    Published(
        *("8B, FSDP2, compiled", 8, _SELECTIVE, 47.65),
        *("#808", "pull/808", "reserved", "expandable"),
    ),
    Published(
        "70B, FSDP2 of 32 × tensor parallel of 8, batch 16, full checkpointing, compiled, float8",
        *(256, "--model 70B --tensor 8 --batch 16 --checkpointing full --foreach", 71.9),
        *_BENCHMARKS,
    ),
)
TEXT = f"""{HEADING}

[torchtitan]({TITAN})'s authors published peaks of Llama 2 7B, Llama 3 8B and Llama 3 70B on
H100s. The table compares them with memlab's prediction for rank 0, which needs no GPU.
`benchmarks/published/llama.py` trains with their settings: FSDP2, float32 weights and AdamW state,
weights gathered in bfloat16, gradients reduced in float32 and clipped, fused or foreach AdamW.
Unless a row says otherwise, the batch is 1 × 8,192 tokens and checkpointing is selective.
`benchmarks/ranks_published.py` writes the table.

- Reserved memory depends on the allocator's segments. In 2025, torchtitan's launcher for one
  machine set `expandable_segments:True`; in March 2024 it did not. If a source does not name its
  launcher, the table has both predictions.
- FSDP2 allocates gathered weights and reduced gradients on its own CUDA streams. The caching
  allocator has separate pools for each stream. The last column is the prediction with one pool
  for all streams.

| training | GPUs | peak | published, GiB | predicted, GiB | difference | source | \
predicted with one pool, GiB |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
AFTER = """
Causes of the larger differences:

- *compiled*: predicted as if it ran uncompiled, before memlab followed compiled code. The 70B run
  also used float8 matmuls, which the script does not.
- *7B, reserved*: allocated bytes agree, reserved bytes do not. The run predates FSDP2's release.
  It did not set `TORCH_NCCL_AVOID_RECORD_STREAMS`, so the allocator reused a collective's block
  only after the GPU had finished with it. That depends on timing, which a dry run does not have.
  Whether this explains the difference is not known.
- *7B, tensor parallel of 2*: the same commit. torchtitan set the variable later, with the comment
  that asynchronous collectives, "such as those in tensor parallelism", hold memory longer than
  they should. The share of this cause is not known either.
- *cuDNN's attention on 8 and 64 GPUs*: the two published peaks differ by 16.41 GiB, the shards of
  weights, gradients and AdamW state by 13.09 GiB. The source gives neither the allocator's
  settings nor the commit of each run.

Published figures not reproduced here:

- Pipeline and context parallel (tables 2, 5 and 6 of the benchmarks). All of these runs used
  compiled kernels and float8, most of them asynchronous tensor parallel as well.
- FSDP2 with tensor parallel and selective checkpointing in #165. That commit kept other results of
  collectives than the later ones that the script follows.
"""


def main() -> None:
    results = {}
    for row in ROWS:
        if key(row) not in results:
            results[key(row)] = predicted(row)
        print(row.what, row.gpus, row.gib, results[key(row)], flush=True)
    with write_beside(RESULTS) as beside:
        beside.write_text(
            json.dumps({"torch": torch.__version__, "rows": results}, indent=1) + "\n"
        )
    page = DOCUMENT.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
    with write_beside(DOCUMENT) as beside:
        beside.write_text(f"{page}\n\n{section(results)}", encoding="utf-8")


def key(row: Published) -> str:
    """Return what identifies a prediction: rows with other figures of one training share it."""
    return f"{row.gpus} GPUs, {row.steps} steps: {row.options}"


def predicted(row: Published) -> dict[str, int]:
    """Return the peaks of rank 0 in bytes, reserved also if all streams shared their pools."""
    launch = Launch(str(SCRIPT), arguments=tuple(row.options.split())).with_ranks(row.gpus)
    trace = run(launch, device="cuda:h100", steps=row.steps).trace
    assert trace is not None
    events, history = (
        tuple(event._replace(stream=0) for event in events)
        for events in (trace.events, trace.history)
    )
    one_stream = replace(trace, events=events, history=history)
    return {
        "allocated": trace.allocated_bytes,
        "ordinary": simulate(trace).reserved_bytes,
        "expandable": simulate(trace, expandable_segments=True).reserved_bytes,
        "one stream, ordinary": simulate(one_stream).reserved_bytes,
        "one stream, expandable": simulate(one_stream, expandable_segments=True).reserved_bytes,
    }


def section(results: dict[str, dict[str, int]] | None = None) -> str:
    """Return the part of docs/RANKS.md, by default of the results on disk."""
    if results is None:
        results = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return TEXT + "".join(_line(row, results[key(row)]) for row in ROWS) + AFTER


def _line(row: Published, peaks: dict[str, int]) -> str:
    if row.counts == "allocated":
        counted, chosen = "allocated", ["allocated"]
    else:
        chosen = [row.segments] if row.segments else ["expandable", "ordinary"]
        counted = f"reserved, {' or '.join(chosen)}"
    one_stream = [] if row.counts == "allocated" else [f"one stream, {name}" for name in chosen]
    differences = [_percent(peaks[name] / GIB / row.gib - 1) for name in chosen]
    cells = (
        *(row.what, row.gpus, counted, f"{row.gib:.2f}", _gib(peaks, chosen)),
        *(" or ".join(differences), f"[{row.source}]({TITAN}/{row.address})"),
        _gib(peaks, one_stream),
    )
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _percent(difference: float) -> str:
    text = f"{difference:+.1%}"
    return "0.0%" if text[1:] == "0.0%" else text


def _gib(peaks: dict[str, int], names: list[str]) -> str:
    return " or ".join(f"{peaks[name] / GIB:.2f}" for name in names)


if __name__ == "__main__":
    main()
