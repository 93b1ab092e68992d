"""Which low-rank adapters LoRA and QLoRA train. Reading it imports no torch."""

from dataclasses import dataclass

LORA_RANK = 8
# The layers of a block of our GPT, by the name of the group that `targets` may give instead.
GROUPS = {"attention": ("query", "key", "value", "output"), "mlp": ("gate", "up", "down")}


@dataclass(frozen=True)
class Adapters:
    """The rank of the adapters, and the layers of a block that get one.

    `targets` is "all", a key of GROUPS, or names of layers joined by commas.

    Raises ValueError for a rank below 1 and for unknown layers.
    """

    rank: int = LORA_RANK
    targets: str = "all"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"got rank {self.rank!r} of adapters; give an integer from 1")
        known = [name for names in GROUPS.values() for name in names]
        if unknown := [name for name in self.layers if name not in known]:
            raise ValueError(
                f"got {unknown[0]!r} as a layer with adapters; give all, {', '.join(GROUPS)}, or "
                f"some of {', '.join(known)}, joined by commas"
            )

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers with an adapter, as the last part of their module's name."""
        if self.targets == "all":
            return tuple(name for names in GROUPS.values() for name in names)
        return GROUPS.get(self.targets) or tuple(self.targets.split(","))

    def selects(self, name: str) -> bool:
        """Return whether the module of this name in a GPT gets an adapter."""
        return name.startswith("blocks.") and name.rpartition(".")[2] in self.layers

    @property
    def options(self) -> dict[str, str]:
        """The options of the command line for them, without the defaults."""
        given = {"--lora-rank": str(self.rank), "--lora-targets": self.targets}
        usual = {"--lora-rank": str(LORA_RANK), "--lora-targets": "all"}
        return {option: value for option, value in given.items() if value != usual[option]}

    def __str__(self) -> str:
        return f"adapters of rank {self.rank} on {', '.join(self.layers)}"
