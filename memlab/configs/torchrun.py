"""The command that starts a process for each GPU. This module does not import torch."""

MAX_GPUS_PER_MACHINE = 8


def torchrun(ranks: int, what: str = "-m memlab") -> str:
    """Return the command that runs a script or a module in so many processes; memlab by default.

    More than 8 are spread evenly over machines of up to 8 GPUs; HOST is the first machine.
    """
    on_each = max(n for n in range(1, MAX_GPUS_PER_MACHINE + 1) if ranks % n == 0)
    machines = ranks // on_each
    meet = f" --nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun{meet if machines > 1 else ''} --nproc-per-node {on_each} {what}"
