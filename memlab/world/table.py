"""What a script or a dry run finds in place of the machine: each replaced name, in table.csv.

It has six rooms: devices, values, files, processes, network and data. A name has one row, and
`enter` (entering.py) replaces it. Where the kernel confines a script, the rows of files, processes
and the network let it go on: it finds its own files, and reads why a connection or a program is
missing. Elsewhere they also protect the machine.

Not in the table: the meter's hooks (memlab/metering) and operators with other kernels on CUDA
(prediction/substitutes.py). A script finds the same with and without them.
"""

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

EVERY_CACHE = "*"  # instead of names: the functions of a module that cache their answers
_SEEN = {
    "torch": "2.13",
    "numpy": "2.4",
    "accelerate": "1.15",
    "bitsandbytes": "0.50",
    "datasets": "5.2",
    "diffusers": "0.42",
    "evaluate": "0.4",
    "huggingface_hub": "2.4",
    "safetensors": "0.8",
    "tiktoken": "0.14",
    "timm": "1.0",
    "tokenizers": "0.23",
    "torchvision": "0.28",
    "transformers": "5.23",
    "triton": "3.7",
}


class Row(NamedTuple):
    """A replacement.

    room      what it belongs to
    owner     a module, or `module:Class`
    names     of its attributes; `Class.method` where a module has many
    stand_in  the name of what replaces them
    why       what would happen otherwise
    also_in   an expression for other modules that have imported the same object under its name
    lacks     which versions or systems lack some of the names
    """

    room: str
    owner: str
    names: tuple[str, ...]
    stand_in: str
    why: str
    also_in: str
    lacks: str

    @property
    def module(self) -> str:
        return self.owner.partition(":")[0]

    @property
    def seen(self) -> str:
        """The version of the owner's library that has the names."""
        library = self.module.partition(".")[0]
        return f"{library} {_SEEN[library]}" if library in _SEEN else "Python 3.11"

    @property
    def is_added(self) -> bool:
        """Return whether the name is new where it is missing."""
        return self.lacks.endswith("added there")

    def places(self) -> Iterator[tuple[Any, str]]:
        """Yield the owner of each name that exists, and the name; the module is imported."""
        owner: Any = sys.modules[self.module]
        for part in filter(None, self.owner.partition(":")[2].split(".")):
            owner = getattr(owner, part, None)
        for name in self.names:
            if name == EVERY_CACHE:
                yield from ((owner, n) for n, f in vars(owner).items() if hasattr(f, "cache_clear"))
                continue
            outer, _, last = name.rpartition(".")
            holder = getattr(owner, outer, None) if outer else owner
            if holder is not None and (self.is_added or hasattr(holder, last)):
                yield holder, last

    def is_in(self, module: str) -> bool:
        """Return whether the row also replaces the name where this module has imported it."""
        return re.fullmatch(self.also_in, module) is not None


def _rows() -> Iterator[Row]:
    lines = (Path(__file__).parent / "table.csv").read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        room, owner, names, *others = row.values()
        yield Row(room, owner, tuple(names.split()), *others)


TABLE = tuple(_rows())
