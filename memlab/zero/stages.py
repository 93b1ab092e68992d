"""The stages of ZeRO, and how large a shard is. This module does not import torch."""

STAGES = {
    0: "data parallel: everything on every rank",
    1: "sharded optimizer state",
    2: "sharded gradients too",
    3: "sharded weights too",
}


def require(ranks: int, stage: int) -> None:
    """Raise TypeError if `ranks` is not an integer, ValueError for invalid ranks or stages."""
    if not isinstance(ranks, int):
        raise TypeError(f"got {ranks!r} as number of ranks; pass an integer, such as 2")
    if ranks < 1:
        raise ValueError(f"got {ranks} ranks; pass at least 1")
    if stage not in STAGES:
        listed = "; ".join(f"{number}, {description}" for number, description in STAGES.items())
        raise ValueError(f"got stage {stage!r}; pass one of {listed}")


def ceil_div(count: int, parts: int) -> int:
    """Return ⌈count / parts⌉."""
    return -(-count // parts)
