"""How a script is started: the arguments after `memlab run`, as on the user's own command line.

train.py --lr 0.1                                python train.py --lr 0.1
-m package.train --lr 0.1                        python -m package.train --lr 0.1
torchrun --nproc_per_node=2 train.py             the same script as rank 0 of 2
accelerate launch --config_file c.yaml train.py  python train.py
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Options of torchrun and of accelerate launch that have no value.
_FLAGS = frozenset(
    {
        *("--standalone", "--no-python", "--run-path", "--run_path"),
        *("--cpu", "--multi_gpu", "--tpu", "--use_deepspeed", "--use_fsdp", "--use_megatron_lm"),
        *("--quiet", "-q", "--debug", "--same_network", "--rdzv_conf", "--no_python"),
        *("--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--use_xpu", "--enable_cpu_affinity"),
    }
)
_PROCESSES = ("--nproc_per_node", "--nproc-per-node", "--num_processes", "--num-processes")


@dataclass(frozen=True)
class Launch:
    """A script to run.

    script      the path of a file, or the name of a module
    is_module   whether it is a module (`-m`)
    arguments   the script's own
    ranks       processes that the user's launcher would start; rank 0 of them runs
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    ranks: int | None = None

    def __str__(self) -> str:
        return f"-m {self.script}" if self.is_module else self.script

    @property
    def folder(self) -> Path:
        """The folder that Python puts first on sys.path."""
        return Path.cwd() if self.is_module else Path(self.script).resolve().parent

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torchrun sets for rank 0."""
        if self.ranks is None:
            return {}
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0"),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(self.ranks)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "memlab",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }


def launch_of(words: Sequence[str]) -> Launch:
    """Return what the words after `memlab run` start.

    Raises ValueError for a script that does not exist, and for a launcher's option without a
    script.
    """
    if not words:
        raise ValueError("got no script; give one, such as memlab run train.py --batch-size 8")
    first, *others = words
    if first in ("python", "python3"):
        return launch_of(others)
    if first == "torchrun":
        return _launched(others, ranks=1)
    if list(words[:2]) == ["-m", "torch.distributed.run"]:
        return _launched(others[1:], ranks=1)
    if first == "accelerate":
        if others[:1] != ["launch"]:
            raise ValueError(f"got accelerate {' '.join(others[:1])}; only accelerate launch runs")
        return _launched(others[1:], ranks=None)
    if first == "-m":
        if not others:
            raise ValueError("got -m without a module; give one, such as -m package.train")
        return _module(others[0], others[1:], None)
    return _file(first, others, None)


def _launched(words: list[str], ranks: int | None) -> Launch:
    """Return the script among a launcher's words, after its options."""
    while words:
        word = words.pop(0)
        if word in ("-m", "--module"):
            if not words:
                break
            return _module(words[0], words[1:], ranks)
        if not word.startswith("-"):
            return _file(word, words, ranks)
        name, equals, value = word.partition("=")
        if not equals and name not in _FLAGS and words and not words[0].startswith("-"):
            value = words.pop(0)
        if name in _PROCESSES:
            ranks = _ranks(name, value)
    raise ValueError("got a launcher without a script; give one after its options")


def _ranks(name: str, value: str) -> int | None:
    if value in ("auto", "gpu", "cpu"):
        return 1
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"got {name} {value!r}; give the number of processes, from 1")
    return int(value)


def _file(path: str, arguments: Sequence[str], ranks: int | None) -> Launch:
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "__main__.py")):
        raise ValueError(f"got {path!r}, a folder; give the script in it, such as {path}/train.py")
    if not os.path.exists(path):
        raise ValueError(f"got {path!r}; there is no such file: give a script, or -m and a module")
    return Launch(path, False, tuple(arguments), ranks)


def _module(name: str, arguments: Sequence[str], ranks: int | None) -> Launch:
    return Launch(name, True, tuple(arguments), ranks)
