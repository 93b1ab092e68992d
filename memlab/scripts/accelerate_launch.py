"""Read the options and the config file of `accelerate launch`, as it does before a script.

accelerate's own code does it, so that every option of the installed version has its effect: mixed
precision, gradient accumulation, FSDP. The result is environment variables, which `Accelerator`
and transformers' `Trainer` read.
"""

import argparse
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

NO_DEEPSPEED = (
    "got accelerate launch with DeepSpeed, whose engine memlab does not run; "
    "memlab plan --deepspeed ds_config.json predicts it by formula"
)
# Of the process that accelerate starts, not of the training.
_OF_THE_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


class Accelerated(NamedTuple):
    """The script's words, the number of processes and machines, and each process's variables.

    ranks is None for a script without distributed training.
    """

    words: tuple[str, ...]
    ranks: int | None
    nodes: int
    variables: dict[str, str]


def _refuse(message: str) -> NoReturn:
    """Raise what argparse would print before it ends the process."""
    raise ValueError(f"accelerate launch: {message}")


def accelerated(words: Sequence[str]) -> Accelerated:
    """Return what the words after `accelerate launch` start.

    Raises ValueError if accelerate is not installed, for options and config files that it refuses,
    and for DeepSpeed, Megatron and TPUs.
    """
    try:
        from accelerate.commands import launch
    except ImportError as error:
        raise ValueError("accelerate is not installed; run pip install accelerate") from error
    parser = launch.launch_command_parser()
    parser.error = _refuse
    given = parser.parse_args(list(words))
    args = _validated(launch, given)
    if args.use_deepspeed:
        raise ValueError(NO_DEEPSPEED)
    if args.use_megatron_lm or args.tpu:
        raise ValueError("got accelerate launch with Megatron or a TPU, which memlab does not run")
    script = ("-m", args.training_script) if args.module else (args.training_script,)
    ranks = max(1, args.num_processes) if args.use_fsdp or args.num_processes > 1 else None
    return Accelerated(
        (*script, *args.training_script_args),
        ranks,
        args.num_machines or 1,
        _variables(launch, args, is_distributed=ranks is not None),
    )


def _validated(launch: Any, given: argparse.Namespace) -> Any:
    """Add the config file's values, and accelerate's defaults."""
    logger = logging.getLogger("accelerate.commands.launch")
    was_disabled, logger.disabled = logger.disabled, True  # it lists the defaults
    try:
        args, *_ = launch._validate_launch_command(given)
    except Exception as error:  # of many kinds: a missing file, YAML, contradicting options
        raise ValueError(f"accelerate launch: {' '.join(str(error).split())}") from error
    finally:
        logger.disabled = was_disabled
    return args


def _variables(launch: Any, args: Any, *, is_distributed: bool) -> dict[str, str]:
    args.main_process_port, args.machine_rank = 0, 0  # any: no process listens
    if is_distributed and not args.cpu:
        # `Accelerator` and `Trainer` read these ACCELERATE_… and FSDP_… variables. Without them an
        # FSDP2 script was predicted as DDP, 114 MiB instead of 54
        # (test_accelerates_fsdp2_has_the_bytes_of_fully_shard).
        found = launch.prepare_multi_gpu_env(args)
    else:
        _, found = launch.prepare_simple_launcher_cmd_env(args)
    return {
        name: value
        for name, value in found.items()
        if os.environ.get(name) != value and name not in _OF_THE_LAUNCHER
    }
