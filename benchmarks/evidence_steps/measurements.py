"""Training steps that somebody measured on a GPU, read from benchmarks/evidence."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.internals.files import write_beside

EVIDENCE = Path(__file__).parents[1] / "evidence"
MIB = 2**20
_FULL_BATCH = 15  # from here on, some text of each batch has all 128 tokens
_SEQUENCES = "the lengths of the texts, which small batches draw at random"
# What decides the memory of our own steps, by words in their names; the first match counts.
OWN_KINDS = {
    "compiled": "compiled",
    "convolution": "convolutions",
    "network": "convolutions",
    "U-Net": "convolutions",
    "speech": "convolutions",
    "LSTM": "recurrent",
    "GRU": "recurrent",
    "AdamW, ": "perceptron",
    "SGD, ": "perceptron",
    "Adafactor": "perceptron",
    "": "transformers",
}
PEERS = {"xmem": "xMem", "dnnmem": "DNNMem", "schedtune": "SchedTune", "llmem": "LLMem"}


@dataclass(frozen=True)
class Measurement:
    """A measured step or run; sizes are in bytes."""

    name: str
    source: str  # "T4", "xMem", "H100", "torchao", "Liger" or a GPU's name
    kind: str  # what errors are summarized by, such as "LoRA"
    model: str
    reserved_bytes: float | None  # reserved by torch, or used on the device (xMem)
    allocated_bytes: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)  # bytes by estimator
    packages: str = ""  # the folders of .venv/evidence with the versions that were measured
    unrecorded: str = ""  # what decides the memory and was not recorded
    facts: Any = None  # how the step was run, for its builder


def measurements() -> list[Measurement]:
    of_others = *lora_steps(), *xmem_runs(), *compiled_runs(), *vision_runs(), *liger_kernels()
    return [*of_others, *own_steps()]


def _read(name: str) -> Any:
    return json.loads((EVIDENCE / name).read_text(encoding="utf-8"))


def lora_steps() -> Iterator[Measurement]:
    facts = _read("t4.json")
    for entry in facts["runs"]:
        run, shape = entry["run"], facts["model_configs"][entry["model_id"]]
        weights = run["quantization"].replace("none", "fp16")
        size = f"{run['batch_size']} × {run['seq_len']}"
        yield Measurement(
            f"{shape['name']}, {run['attn_impl']}, {weights}, {size}",
            "T4",
            "LoRA" if weights == "fp16" else "QLoRA",
            shape["name"],
            entry["measured"]["peak_reserved_mib"] * MIB,
            entry["measured"]["peak_allocated_mib"] * MIB,
            facts=(shape, run),
        )


def xmem_runs() -> Iterator[Measurement]:
    for row in _read("xmem.json")["rows"]:
        card = next(name for name in ("3060", "4060") if name in row["gpu"])
        model = row["model"].split("/")[-1]
        is_cnn = row["input"] is not None
        yield Measurement(
            f"{model}, {row['optimizer']}, batch {row['batch']}, RTX {card}",
            "xMem",
            "CNN" if is_cnn else "transformer",
            model,
            row["ground"],
            peers={
                name: row[key]["estimate"]
                for key, name in PEERS.items()
                if key in row and row[key]["estimate"] is not None
            },
            packages="torchvision" if is_cnn else "transformers",
            unrecorded="" if is_cnn or row["batch"] >= _FULL_BATCH else _SEQUENCES,
            facts=row,
        )


def compiled_runs() -> Iterator[Measurement]:
    for run in _read("h100.json")["runs"]:
        layers, width, steps = run["depth"], run["width"], run["micro_steps"]
        yield Measurement(
            f"compiled GPT, {layers} layers of {width}, micro-batches: {steps}, H100",
            "H100",
            "compiled",
            "GPT",
            None,
            run["allocated_mib"] * MIB,
            facts=run,
        )


def vision_runs() -> Iterator[Measurement]:
    """Yield torchao's trainings of vision transformers."""
    for run in _read("torchao.json")["runs"]:
        switches = ("checkpointed", "autocast", "compiled")
        choices = [run["optimizer"], *(name for name in switches if run[name])]
        if run["offloaded"]:
            choices.append(f"{run['offloaded']} offloaded")
        model = "ViT-H" if "huge" in run["model"] else "ViT-g"
        yield Measurement(
            f"{model}, {', '.join(choices)}, RTX 4070 Ti SUPER",
            "torchao",
            "vision transformer",
            model,
            None,
            run["peak_gb"] * 1e9,
            packages="torchvision timm",
            facts=run,
        )


def liger_kernels() -> Iterator[Measurement]:
    """Yield each size of Liger-Kernel's benchmarks, in the order in which one process ran them."""
    for run in _read("liger.json")["runs"]:
        model, varied = f"{run['kernel']}, {run['provider']}", run["varied"]
        for size, peak in run["peak_mib"].items():
            yield Measurement(
                f"{model}, {run['mode']}, {varied} = {size}, {run['gpu']}",
                "Liger",
                "Liger kernel" if run["provider"] == "liger" else "torch operator",
                model,
                None,
                peak * MIB,
                packages=f"transformers liger-{run['packages']}",
                facts={**run, "sizes": {**run["sizes"], varied: int(size)}},
            )


def kind_of(name: str) -> str:
    """Return what decides the memory of one of our own steps."""
    return next(kind for word, kind in OWN_KINDS.items() if word in name)


def own_steps() -> Iterator[Measurement]:
    """Yield the steps that `put_own_steps` wrote, one file for each GPU."""
    for path in sorted(EVIDENCE.glob("own-*.json")):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        for row in recorded["runs"]:
            name, gpu = row["configuration"], recorded["source"]["gpu"]
            kind = kind_of(name)
            yield Measurement(
                f"{name}, {gpu}",
                gpu,
                f"own {kind}",
                f"{kind}, {gpu}",
                row["measured"]["reserved_bytes"],
                row["measured"]["allocated_bytes"],
                packages="torch" if kind == "compiled" else "",
                facts=(recorded["source"], row),
            )


def put_own_steps(
    folder: Path, device: str, source: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]
) -> Path:
    """Write the steps that `python benchmarks/gpu.py` recorded on a GPU.

    Steps recorded earlier stay if they come from the same GPU, target, sizes and torch.
    """
    path, figures = folder / f"own-{device}.json", ("allocated_bytes", "reserved_bytes")
    runs = _recorded_runs(path, source)
    for row in rows:
        runs[row["configuration"]] = {name: row[name] for name in figures}
    content = {
        "source": dict(source),
        "runs": [{"configuration": name, "measured": it} for name, it in runs.items()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_beside(path) as beside:
        text = json.dumps(content, indent=1, ensure_ascii=False)
        beside.write_text(text + "\n", encoding="utf-8")
    return path


def _recorded_runs(path: Path, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the steps recorded before from the same source, by name."""
    if not path.exists():
        return {}
    recorded = json.loads(path.read_text(encoding="utf-8"))
    same = ("gpu", "target", "small", "torch")
    if any(recorded["source"].get(name) != source.get(name) for name in same):
        print(f"{path.name} is written anew; it was from {recorded['source']}", file=sys.stderr)
        return {}
    return {run["configuration"]: run["measured"] for run in recorded["runs"]}
