"""What the user typed, as one record that is built once. Reading it imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """The options of `memlab measure`, and those that `memlab train` shares with it.

    An option that was not given is None, and a suitable value takes its place later: see
    memlab.cli.choices.
    """

    model: str | None = None
    batch: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    techniques: tuple[str, ...] = ()
    device: str | None = None
    dry: bool = False
    ranks: int | None = None
    script: str | None = None
    assume: str | None = None
    kernels: bool = False
    out: str = "work"
