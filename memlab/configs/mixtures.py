"""The shapes of mixtures of experts: a Llama with E experts in each layer instead of an MLP.

    N = the dense model's N + L·((E − 1)·3·C·F + C·E)

A router of C·E weights chooses k experts for each token. F is the intermediate size of one expert.

    MIXTURES["mixtral-8x7b"]      a published shape
    mixture_from(fields)          the shape that a config.json describes
"""

from dataclasses import dataclass

from memlab.configs.config_json import FILE, NoShapeHere, config_from
from memlab.configs.shapes import GPTConfig

MATRICES = 3  # of an expert: gate, up and down
DENSE = {"mixtral": "mistral", "qwen3_moe": "qwen3"}  # what each family is without experts
_COUNTS = ("num_local_experts", "num_experts")  # names of E in the files
_SIZES = ("moe_intermediate_size", "intermediate_size")  # names of F, the first if it is there


@dataclass(frozen=True)
class MixtureConfig:
    """The shape of a mixture of experts.

    dense    everything but the experts; intermediate_size is the size of one expert
    experts  E of each layer
    chosen   k experts for each token
    """

    dense: GPTConfig
    experts: int
    chosen: int

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(
                f"got {self.chosen} chosen of {self.experts} experts; choose 1 to all of them"
            )

    @property
    def expert(self) -> int:
        """The weights of one expert."""
        return MATRICES * self.dense.hidden_size * self.dense.intermediate_size

    @property
    def router(self) -> int:
        """The weights of a layer's router."""
        return self.dense.hidden_size * self.experts

    @property
    def parameters(self) -> int:
        """N, by the formula at the top of this file."""
        return self.dense.parameters + self.dense.layers * (
            (self.experts - 1) * self.expert + self.router
        )


# fmt: off
_SHAPES = {
    #                             V      C    L   H KV       F       T
    "mixtral-8x7b":  GPTConfig( 32_000, 4_096, 32, 32, 8, 14_336, 32_768, False, 1e6),
    "mixtral-8x22b": GPTConfig( 32_768, 6_144, 56, 48, 8, 16_384, 65_536, False, 1e6),
    "qwen3-30b-a3b": GPTConfig(151_936, 2_048, 48, 32, 4,    768, 40_960, False, 1e6, 1e-6, 128,
                               head_norms=True),
}
MIXTURES: dict[str, MixtureConfig] = {
    "mixtral-8x7b":  MixtureConfig(_SHAPES["mixtral-8x7b"], 8, 2),
    "mixtral-8x22b": MixtureConfig(_SHAPES["mixtral-8x22b"], 8, 2),
    "qwen3-30b-a3b": MixtureConfig(_SHAPES["qwen3-30b-a3b"], 128, 8),
}
# fmt: on


def mixture_from(fields: dict[str, object], *, source: str = FILE) -> MixtureConfig:
    """Return the shape that a `config.json` describes. Errors name it as `source`.

    Raises NoShapeHere for a family missing in DENSE and for layers without experts, ValueError for
    a file with a missing or wrong field.
    """
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in DENSE:
        raise NoShapeHere(
            f"{source} has model_type {family!r}; expert parallelism is planned for "
            f"{' and '.join(DENSE)}"
        )
    if fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1:
        raise NoShapeHere(f"{source} has layers without experts; give a model that has them in all")
    experts = _count(fields, source, *_COUNTS)
    chosen = _count(fields, source, "num_experts_per_tok")
    others = {name: value for name, value in fields.items() if name not in _COUNTS}
    size = _count(fields, source, *_SIZES)
    dense = {**others, "model_type": DENSE[family], "intermediate_size": size}
    if not fields.get("head_dim"):
        heads = _count(fields, source, "num_attention_heads")
        dense["head_dim"] = _count(fields, source, "hidden_size") // heads
    return MixtureConfig(config_from(dense, source=source), experts, chosen)


def _count(fields: dict[str, object], source: str, *names: str) -> int:
    """Return the first of these fields that the file has."""
    name = next((name for name in names if fields.get(name) is not None), names[0])
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{source} has {name} {value!r}, wanted an integer from 1")
    return value
