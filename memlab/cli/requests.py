"""The options of a command as one record. This module does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """The options of `memlab measure`; `memlab train` shares some.

    An option that was not given is None; memlab.cli.choices replaces it by a suitable value.
    """

    model: str | None = None
    batch: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    library: str | None = None
    image: int | None = None
    techniques: tuple[str, ...] = ()
    device: str | None = None
    dry: bool = False
    ranks: int | None = None
    zero: int | None = None
    script: str | None = None
    assume: str | None = None
    lora_rank: int | None = None
    lora_targets: str | None = None
    out: str = "work"
