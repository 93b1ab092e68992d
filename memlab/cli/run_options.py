"""The options of `memlab run`, checked in the form that the run needs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memlab.cli.errors import UsageError, quoted
from memlab.cli.plan_options import choose_memory, choose_target
from memlab.cli.requests import RunRequest
from memlab.cli.script import check_assumption
from memlab.planner import Memory
from memlab.planner.cards import budget_bytes
from memlab.scripts.launch import launch_of
from memlab.scripts.runs import ScriptRun
from memlab.world.confinement import Confinement
from memlab.world.data.columns import columns_of


@dataclass(frozen=True)
class RunOptions:
    """The options of `memlab run`, resolved.

    memory   that the step has to fit into; None: none was given
    target   device whose memory that is
    advise   predict changes; None: if the step does not fit
    """

    script: ScriptRun
    memory: Memory | None
    target: str
    advise: bool | None
    folder: Path
    confinement: Confinement | None

    @property
    def budget_bytes(self) -> int | None:
        """What PyTorch may use of the memory."""
        return None if self.memory is None else budget_bytes(self.memory, self.target)


def check_options(request: RunRequest) -> None:
    """Raise UsageError for options that exclude each other, and for a wrong --assume."""
    if request.real and request.device:
        raise UsageError(
            f"got --real together with --device {request.device}; a real run uses the device that "
            f"the script chooses, so leave --device out"
        )
    if request.real and request.assume:
        raise UsageError("got --assume with --real; a real step knows its sizes, so leave it out")
    if request.gpus and (request.real or request.device == "cpu"):
        raise UsageError("got --gpus without a prediction for a GPU; leave it out")
    if request.margin is not None and request.memory is None:
        raise UsageError("got --margin without --gpu; name a GPU, such as --gpu rtx4090")
    check_assumption(request.assume)


def choose_script(request: RunRequest, device: str | None) -> ScriptRun:
    """Return the script that the words start, and how it runs.

    device   to predict for; None: run it for real
    """
    configs, columns = _configs(request.configs or ()), None
    try:
        launch = launch_of(request.words or [])
        if request.ranks is not None:
            launch = launch.with_ranks(request.ranks)
        if request.batch_like is not None:
            columns = columns_of(request.batch_like)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if launch.visible_gpus == 0 and request.device != "cpu" and not request.real:
        raise UsageError(
            "got CUDA_VISIBLE_DEVICES without a GPU, so the script would use the CPU; pass "
            "--device cpu, or leave the variable out"
        )
    if (most := max(request.rank or (0,))) >= (launch.ranks or 1) * launch.nodes:
        raise UsageError(
            f"got --rank {most} of {(launch.ranks or 1) * launch.nodes}; ranks count from "
            f"0, and --ranks says how many there are"
        )
    if request.real and (launch.ranks or 1) > 1:
        raise UsageError(
            "got --real with several ranks; start them with torchrun, such as torchrun "
            f"--nproc-per-node {launch.ranks} -m memlab run --real {launch}"
        )
    return ScriptRun(
        launch=launch,
        device=device,
        ranks=request.rank,
        steps=request.steps,
        gpus=request.gpus,
        assume=request.assume,
        allow_writes=request.allow_writes,
        configs=configs,
        columns=columns,
    )


def choose_room(request: RunRequest) -> tuple[Memory | None, str]:
    """Return the memory that the step has to fit into, if it is given, and what to predict for."""
    if request.memory is None:
        return None, choose_target(request.device) or "cuda"
    return choose_memory(request.memory, request.device, request.margin)


def _configs(given: Sequence[str]) -> dict[str, str]:
    """Return the paths of config.json files by the names that the script uses."""
    paths = {}
    for pair in given:
        name, _, path = pair.partition("=")
        if not name or not os.path.exists(path):
            raise UsageError(
                f"got --config {quoted(pair)}; give the model's name in the script and an existing "
                f"config.json or its folder, such as --config gpt2=gpt2/config.json"
            )
        paths[name] = path
    return paths
