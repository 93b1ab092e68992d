"""`memlab run` on unmodified public training scripts: do they run, and does the dry peak equal the
real one?

    git clone https://github.com/karpathy/nanoGPT clones/nanoGPT  # and the others of REPOSITORIES
    pip install --no-deps --target clones/accelerate-0.34.2/site-packages accelerate==0.34.2
    python benchmarks/unmodified/run.py --clones clones [--only nanoGPT]

Each script runs three times in its own process, until its second training step has ended:

    predicted   for an A100, with fake tensors
    dry         on the CPU, with fake tensors
    real        on the CPU

In all three, missing data sets and weights are replaced by others of the same shapes. Prints
Markdown, and writes docs/SCRIPTS.md if every script was tried. The scripts in this folder are short
examples from packages' documentation; they need the extra `trainings`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from memlab.data import source_bytes
from memlab.internals.files import write_beside
from memlab.units import format_bytes

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "SCRIPTS.md"
REPOSITORIES = {
    "nanoGPT": "https://github.com/karpathy/nanoGPT",
    "minGPT": "https://github.com/karpathy/minGPT",
    "examples": "https://github.com/pytorch/examples",
    "transformers": "https://github.com/huggingface/transformers",
    "pytorch-image-models": "https://github.com/huggingface/pytorch-image-models",
    "diffusers": "https://github.com/huggingface/diffusers",
}
# Small models of the right kind, for names that scripts load from the Hub.
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4},
    "bert-base-cased": {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
}
CONFIGS["google-bert/bert-base-cased"] = CONFIGS["bert-base-cased"]
# A pipeline of diffusers is a folder of several configs.
CONFIGS["stable-diffusion"] = {
    "unet": {
        "_class_name": "UNet2DConditionModel",
        "block_out_channels": [32, 64],
        "cross_attention_dim": 32,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "layers_per_block": 1,
        "sample_size": 32,
    },
    "vae": {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [32, 64],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "latent_channels": 4,
    },
    "text_encoder": {
        "model_type": "clip_text_model",
        "architectures": ["CLIPTextModel"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
    },
    "scheduler": {"_class_name": "DDPMScheduler"},
}
LIMIT_S = 600


class Script(NamedTuple):
    """A script, its arguments, the ones that choose the device, and the stand-ins."""

    folder: str  # in the clones; "" for this folder
    path: str
    arguments: str = ""
    on_cpu: str = ""
    on_cuda: str = ""
    columns: str = ""
    configs: tuple[str, ...] = ()
    text: str = ""  # a file of any text that the script reads
    package: str = ""  # in the clones: an older version of a package, which the script is for

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.path}" if self.folder else f"benchmarks/unmodified/{self.path}"

    @property
    def title(self) -> str:
        """The first cell of its line."""
        model = self.arguments.partition("--model ")[2].split(" ")[0]
        parts = [f"`{self.name}`", f"`{model}`" if model else "", self.package]
        return ", ".join(filter(None, parts))


_HF = "examples/pytorch"
_SMALL_GPT = "--batch_size=4 --block_size=64 --n_layer=2 --n_head=4 --n_embd=128 --eval_iters=1"
SCRIPTS = (
    Script(
        "nanoGPT",
        "train.py",
        f"config/train_shakespeare_char.py --compile=False {_SMALL_GPT}",
        on_cpu="--device=cpu",
    ),
    Script("minGPT", "projects/adder/adder.py", "--trainer.num_workers=0"),
    Script("minGPT", "projects/chargpt/chargpt.py", "--trainer.num_workers=0", text="input.txt"),
    Script("examples", "mnist/main.py", on_cpu="--no-accel"),
    Script("examples", "imagenet/main.py", "/data/imagenet --batch-size 4 --workers 0"),
    Script("examples", "vae/main.py", on_cpu="--no-accel"),
    Script(
        "examples",
        "dcgan/main.py",
        "--dataset cifar10 --dataroot data --workers 0",
        on_cuda="--accel",
    ),
    Script("examples", "word_language_model/main.py", on_cuda="--accel"),
    Script("examples", "word_language_model/main.py", "--model Transformer", on_cuda="--accel"),
    Script("examples", "siamese_network/main.py", on_cpu="--no-accel"),
    Script(
        "transformers",
        f"{_HF}/language-modeling/run_clm.py",
        "--model_name_or_path gpt2 --dataset_name wikitext --do_train --output_dir out "
        "--block_size 128",
        columns="text=str:400",
        configs=("gpt2",),
    ),
    Script(
        "transformers",
        f"{_HF}/language-modeling/run_clm_no_trainer.py",
        "--model_name_or_path gpt2 --dataset_name wikitext --output_dir out --block_size 128",
        package="accelerate-0.34.2",
        columns="text=str:400",
        configs=("gpt2",),
    ),
    Script(
        "transformers",
        f"{_HF}/text-classification/run_glue.py",
        "--model_name_or_path bert-base-cased --task_name sst2 --do_train --max_seq_length 64 "
        "--output_dir out",
        columns="sentence=str:30,label=int:2",
        configs=("bert-base-cased",),
    ),
    Script(
        "pytorch-image-models",
        "train.py",
        "--dataset torch/cifar10 --data-dir data --dataset-download --model resnet18 "
        "--batch-size 8 --workers 0 --input-size 3 32 32",
        on_cpu="--device cpu",
    ),
    Script(
        "",
        "trainer.py",
        columns="text=str:100,label=int:5",
        configs=("google-bert/bert-base-cased",),
    ),
    Script("", "sft.py", columns="messages=chat:300", configs=("Qwen/Qwen2.5-0.5B",)),
    Script(
        "",
        "dpo.py",
        columns="prompt=str:50,chosen=str:100,rejected=str:100",
        configs=("Qwen/Qwen2.5-0.5B",),
    ),
    Script(
        "diffusers",
        "examples/text_to_image/train_text_to_image.py",
        "--pretrained_model_name_or_path stable-diffusion --dataset_name images --output_dir out "
        "--resolution 64 --train_batch_size 2",
        columns="image=image:64,text=str:20",
        configs=("stable-diffusion",),
    ),
    Script("", "accelerate_loop.py"),
    Script("", "lightning_fit.py"),
)


class Answer(NamedTuple):
    """The peak in bytes, or why there is none."""

    peak: int | None
    reason: str


def written(name: str, folder: Path) -> Path:
    """Write a config, or a pipeline's, into the folder."""
    config, place = CONFIGS[name], folder / name.replace("/", "-")
    parts = {"": config} if "model_type" in config else config
    for part, values in parts.items():
        (place / part).mkdir(parents=True)
        file = "scheduler_config.json" if part == "scheduler" else "config.json"
        (place / part / file).write_text(json.dumps(values))
    return place


def answer(script: Script, clones: Path, options: list[str], arguments: str) -> Answer:
    """Run a script once."""
    folder = clones / script.folder if script.folder else HERE
    path = folder / script.path
    with tempfile.TemporaryDirectory() as scratch:
        for name in script.configs:
            options = [*options, "--config", f"{name}={written(name, Path(scratch))}"]
        if script.text and not (path.parent / script.text).exists():
            (path.parent / script.text).write_bytes(bytes(source_bytes("64 KiB").tolist()))
        if script.columns:
            options = [*options, "--batch-like", script.columns]
        words = f"{script.arguments} {arguments}".split()
        line = ["run", "--json", "--out", scratch, *options, path.name, *words]
        older = [clones / script.package / "site-packages"] if script.package else []
        paths = [folder, *older, *sys.path]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "memlab", *line],
                cwd=path.parent,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Answer(None, f"took more than {LIMIT_S} s")
    if done.returncode:
        return Answer(None, done.stderr.strip().splitlines()[-1].removeprefix("memlab: "))
    return Answer(json.loads(done.stdout)["rows"][0]["peak_bytes"], "")


def row(script: Script, clones: Path) -> str:
    """Run a script three times, and return its line of the table."""
    predicted = answer(script, clones, ["--device", "cuda:a100-80"], script.on_cuda)
    dry = answer(script, clones, ["--device", "cpu"], script.on_cpu)
    real = answer(script, clones, ["--real"], script.on_cpu)
    cells = [format_bytes(each.peak) if each.peak else each.reason for each in (predicted, dry)]
    if dry.peak and real.peak:
        apart = dry.peak - real.peak
        cells.append(f"{apart:+,} B of {real.peak:,}" if apart else "equal")
    else:
        cells.append(real.reason or "not compared")
    return f"| {script.title} | {' | '.join(cells)} |"


HEADING = f"""# Training scripts that `memlab run` runs unmodified

Made by `python benchmarks/unmodified/run.py` with torch {torch.__version__} on a machine without a
GPU. Each script ran until the end of its second training step, with small settings (listed in
`benchmarks/unmodified/run.py`). Missing data sets and weights were replaced by others of the same
shapes.

- predicted: the peak of allocated memory on an A100, from fake tensors
- dry: the peak on the CPU, from fake tensors
- dry and real: whether the peak of the real step on the CPU is the same

| script | predicted | dry | dry and real |
| --- | ---: | ---: | --- |
"""


FOOTER = """
## Missing data sets

If a script loads a data set from the Hub that this machine does not have, `--batch-like` describes
its columns:

| column | its rows |
| --- | --- |
| `text=str:400` | texts of 400 words |
| `label=int:2` | classes 0 and 1 |
| `input_ids=ids:1024` | lists of 1,024 token ids |
| `image=image:512x512` | images, width × height |
| `audio=audio:16000` | recordings of 16,000 samples, a second at 16 kHz |
| `values=float:10` | lists of 10 numbers |
| `messages=chat:400` | conversations of a question and an answer with 400 words in all |
| `tokens=list:20:str:1` | lists of 20 texts of one word; any kind may follow `list:20:` |
| `translation.en=str:20` | dictionaries: a dot names a part of the column |

Commas join the columns: `tokens=list:20:str:1,ner_tags=list:20:int:9` for `run_ner.py`, and
`id=str:1,context=str:300,question=str:12,answers.text=list:1:str:3,answers.answer_start=list:1:int:40`
for `run_qa.py`.
"""


_BARS = 5  # in a line of the table of scripts


def stored_rows() -> dict[str, str]:
    """Return the lines of the document's table by their scripts."""
    if not DOCUMENT.exists():
        return {}
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    return {
        title(line): line for line in lines if line.startswith("| `") and line.count("|") == _BARS
    }


def title(line: str) -> str:
    """Return the first cell of a line."""
    return line.split("|")[1].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clones", type=Path, required=True, help="folder of the repositories")
    parser.add_argument(
        "--only", action="append", help="scripts whose name contains this; other rows are kept"
    )
    given = parser.parse_args()
    wanted = [
        script
        for script in SCRIPTS
        if not given.only or any(part in script.name for part in given.only)
    ]
    lines = stored_rows()
    for script in wanted:
        line = row(script, given.clones.resolve())
        print(line, flush=True)
        lines[title(line)] = line
    if {script.title for script in SCRIPTS} <= lines.keys():
        table = [lines[script.title] for script in SCRIPTS]
        DOCUMENT.parent.mkdir(exist_ok=True)
        with write_beside(DOCUMENT) as beside:
            beside.write_text(HEADING + "\n".join(table) + "\n" + FOOTER, encoding="utf-8")


if __name__ == "__main__":
    main()
