"""How a script is started: the arguments after `memlab run`, as on the user's own command line.

train.py --lr 0.1                                python train.py --lr 0.1
-m package.train --lr 0.1                        python -m package.train --lr 0.1
SEED=1 python -u train.py                        the same, with that variable
torchrun --nproc_per_node=2 train.py             the same script as rank 0 of 2
deepspeed --num_gpus 2 train.py                  as well
accelerate launch --config_file c.yaml train.py  with accelerate's own variables
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from memlab.scripts.accelerate_launch import accelerated

# Options of torchrun and deepspeed that have no value.
_FLAGS = frozenset(
    {
        *("--standalone", "--no-python", "--run-path", "--run_path", "--no_python"),
        *("--rdzv_conf", "--no_local_rank", "--no_ssh", "--save_pid", "--force_multi"),
        "--enable_cpu_affinity",
    }
)
_PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
_NODES = ("--nnodes", "--num_machines", "--num-machines", "--num_nodes")
_PREFIXES, _RUNNERS = ("nohup", "time", "exec", "srun"), ("uv", "poetry", "pixi", "pdm", "hatch")
_SHELLS = ("sh", "bash", "zsh", "sbatch")
GPUS_PER_NODE = 8
_PYTHON_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Launch:
    """A script to run.

    script      the path of a file, or the name of a module
    is_module   whether it is a module (`-m`)
    arguments   the script's own
    ranks       processes that the user's launcher would start on each node
    nodes       machines of the training
    rank        of the process that runs, among all
    variables   of the environment, set on the command line
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    ranks: int | None = None
    nodes: int = 1
    rank: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"-m {self.script}" if self.is_module else self.script

    @property
    def visible_gpus(self) -> int | None:
        """How many GPUs CUDA_VISIBLE_DEVICES names; None: all."""
        given = {**os.environ, **self.variables}.get("CUDA_VISIBLE_DEVICES")
        if given is None:
            return None
        return len([name for name in given.split(",") if name.strip() not in ("", "-1")])

    def with_ranks(self, count: int) -> "Launch":
        """Return the same script as torchrun would start it: on nodes of 8 GPUs, if they fill them,
        else on one. Raises ValueError if a launcher starts it."""
        if self.ranks is not None:
            raise ValueError("got --ranks with a launcher; leave --ranks out")
        nodes = count // GPUS_PER_NODE if count % GPUS_PER_NODE == 0 else 1
        return replace(self, ranks=count // nodes, nodes=nodes)

    @property
    def folder(self) -> Path:
        """The folder that Python puts first on sys.path."""
        return Path.cwd() if self.is_module else Path(self.script).resolve().parent

    @property
    def environment(self) -> dict[str, str]:
        """The variables on the command line, and torchrun's for the rank."""
        if self.ranks is None:
            return dict(self.variables)
        node, local = divmod(self.rank, self.ranks)
        return {
            **self.variables,
            **dict.fromkeys(("RANK", "ROLE_RANK"), str(self.rank)),
            "LOCAL_RANK": str(local),
            "GROUP_RANK": str(node),
            **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(self.ranks * self.nodes)),
            "LOCAL_WORLD_SIZE": str(self.ranks),
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
    if variable := _VARIABLE.fullmatch(first):
        launch, (name, value) = launch_of(others), variable.groups()
        return replace(launch, variables={name: value, **launch.variables})
    if re.fullmatch(r"python(3(\.\d+)?)?", os.path.basename(first)):
        return launch_of(_without_python_options(others))
    if first in _PREFIXES:
        return launch_of(others)
    if first in _RUNNERS and others[:1] == ["run"]:
        return launch_of(others[1:])
    if first in _SHELLS:
        raise ValueError(f"got {first}, a shell; give the python command that it runs")
    if first in ("torchrun", "deepspeed"):
        return _launched(others, ranks=1)
    if list(words[:2]) == ["-m", "torch.distributed.run"]:
        return _launched(others[1:], ranks=1)
    if first == "accelerate":
        if others[:1] != ["launch"]:
            raise ValueError(f"got accelerate {' '.join(others[:1])}; only accelerate launch runs")
        return _accelerated(others[1:])
    if first == "-m":
        if not others:
            raise ValueError("got -m without a module; give one, such as -m package.train")
        return Launch(others[0], True, tuple(others[1:]))
    return _file(first, others)


def _accelerated(words: Sequence[str]) -> Launch:
    found = accelerated(words)
    launch = launch_of(found.words)
    per_node = None if found.ranks is None else found.ranks // found.nodes
    variables = {**found.variables, **launch.variables}
    return replace(launch, ranks=per_node, nodes=found.nodes, variables=variables)


def _without_python_options(words: Sequence[str]) -> Sequence[str]:
    """Leave out the options of `python` itself, such as -u."""
    while words and words[0].startswith("-") and words[0] != "-m":
        if words[0] in ("-c", "-"):
            raise ValueError(f"got python {words[0]}; give a script's path, or -m and a module")
        words = words[2 if words[0] in _PYTHON_WITH_VALUE else 1 :]
    return words


def _launched(words: list[str], ranks: int) -> Launch:
    """Return the script among a launcher's words, after its options."""
    nodes = 1

    def found(launch: Launch) -> Launch:
        return replace(launch, ranks=ranks, nodes=nodes)

    while words:
        word = words.pop(0)
        if word in ("-m", "--module"):
            if not words:
                break
            return found(Launch(words[0], True, tuple(words[1:])))
        if not word.startswith("-"):
            return found(_file(word, words))
        name, equals, value = word.partition("=")
        if not equals and name not in _FLAGS and words and not words[0].startswith("-"):
            value = words.pop(0)
        if name in _PER_NODE:
            ranks = _count(name, value)
        elif name in _NODES:
            nodes = _count(name, value.split(":")[-1])  # 1:4 is from 1 to 4
    raise ValueError("got a launcher without a script; give one after its options")


def _count(name: str, value: str) -> int:
    if value in ("auto", "gpu", "cpu"):
        return 1
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"got {name} {value!r}; give a number from 1")
    return int(value)


def _file(path: str, arguments: Sequence[str]) -> Launch:
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "__main__.py")):
        raise ValueError(f"got {path!r}, a folder; give the script in it, such as {path}/train.py")
    if not os.path.exists(path):
        raise ValueError(f"got {path!r}; there is no such file: give a script, or -m and a module")
    if path.endswith(".ipynb"):
        raise ValueError(
            f"got {path!r}, a notebook; make a script of it (jupyter nbconvert --to script "
            f"{path}) and give that"
        )
    if path.endswith((".sh", ".bash", ".sbatch")):
        raise ValueError(f"got {path!r}, a shell script; give the python command in it")
    return Launch(path, False, tuple(arguments))
