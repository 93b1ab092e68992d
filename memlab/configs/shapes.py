"""The shapes of models, which determine the bytes of a training step.

A Llama has

    N = V·C (2·V·C untied) + C + L·(2·C·H·D + 2·C·KV·D + 3·C·F + 2·C)

weights, with V vocab_size, C hidden_size, F intermediate_size, L layers, H heads, KV key/value
heads, and head_dim D = C/H.
Later families change this, each by a field of the shape:

    Mistral    some models set D themselves
    Qwen2      biases on query, key and value                        + L·(H + 2·KV)·D
    Qwen3      sets D; a norm on each query and key head             + L·2·D
    Gemma      sets D; GELU in the gate; embeddings times √C
    Gemma 3    as Gemma; norms on heads, and after each branch too   + L·(2·D + 2·C)
"""

from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu_tanh")

MAX_LAYERS = 10_000  # a dry run goes through every layer: more layers take hours
MAX_ELEMENTS = 2**59  # the largest tensor whose bytes torch can still count


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Together with the dtype it determines the bytes of the weights."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int  # of the MLP
    seq_len: int  # the longest sequence
    tied: bool = True  # one matrix for embedding and unembedding
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    custom_head_dim: int | None = None  # D if it is not hidden_size / heads
    attention_biases: tuple[str, ...] = ()  # the matrices with a bias: query, key, value, output
    head_norms: bool = False  # a norm on each query and key head, before rotation
    post_norms: bool = False  # a norm after each branch too, before the residual addition
    activation: str = "silu"  # of the MLP's gate: one of ACTIVATIONS
    scaled_embeddings: bool = False  # multiplied by √hidden_size

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "layers",
            "heads",
            "kv_heads",
            "intermediate_size",
            "seq_len",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"got {name}={getattr(self, name)}; give at least 1")
        self._check_head_dim()
        if self.heads % self.kv_heads:
            divisors = [str(n) for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly; "
                f"use kv_heads={', '.join(divisors)}"
            )
        if unknown := set(self.attention_biases) - set(self.attention_sizes):
            raise ValueError(
                f"got attention_biases for {', '.join(map(repr, sorted(unknown)))}; "
                f"the matrices are {', '.join(self.attention_sizes)}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"got activation={self.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )

    def require_countable(self, batch: int, seq_len: int) -> None:
        """Raise ValueError for a depth that no dry run can walk, or tensors that torch cannot
        count."""
        if self.layers > MAX_LAYERS:
            raise ValueError(
                f"got a model of {self.layers:,} layers; give one of at most {MAX_LAYERS:,}"
            )
        tokens = batch * seq_len
        rows = max(self.hidden_size, tokens)
        columns = max(self.vocab_size, self.intermediate_size, self.heads * self.head_dim)
        largest = max(rows * columns, batch * self.heads * seq_len**2)
        if largest > MAX_ELEMENTS:
            raise ValueError(
                f"got a tensor of {largest:.1e} elements, from this model with {batch:,} × "
                f"{seq_len:,} tokens; torch counts up to {MAX_ELEMENTS:.1e}: give a smaller model "
                f"or batch"
            )

    @property
    def beyond_llama(self) -> str | None:
        """What it has and a Llama does not; None if it is one."""
        others = {
            "biases": self.attention_biases,
            "norms on heads": self.head_norms,
            "norms after branches": self.post_norms,
            "GELU": self.activation != "silu",
            "scaled embeddings": self.scaled_embeddings,
        }
        return next((name for name, has in others.items() if has), None)

    def _check_head_dim(self) -> None:
        """Require an even head_dim, because rotary embeddings rotate pairs of elements."""
        if self.custom_head_dim is not None:
            if self.custom_head_dim < 2 or self.custom_head_dim % 2:
                raise ValueError(
                    f"got custom_head_dim={self.custom_head_dim}; rotary embeddings rotate pairs: "
                    f"give an even integer from 2"
                )
            return
        pair = 2 * self.heads
        if self.hidden_size % pair:
            below, above = self.hidden_size // pair * pair, (self.hidden_size // pair + 1) * pair
            raise ValueError(
                f"hidden_size={self.hidden_size} does not split into {self.heads} heads of an even "
                f"head_dim (rotary embeddings rotate pairs); use "
                f"{f'{below} or ' if below else ''}{above}"
            )

    @property
    def head_dim(self) -> int:
        return self.custom_head_dim or self.hidden_size // self.heads

    @property
    def attention_sizes(self) -> dict[str, int]:
        """The number of output elements per token of each attention matrix."""
        D = self.head_dim
        keys = self.kv_heads * D
        return {"query": self.heads * D, "key": keys, "value": keys, "output": self.hidden_size}

    @property
    def parameters(self) -> int:
        """N, by the formula at the top of this file; a tied matrix counts once."""
        C, D = self.hidden_size, self.head_dim
        biases = sum(self.attention_sizes[name] for name in set(self.attention_biases))
        attention = 2 * C * self.heads * D + 2 * C * self.kv_heads * D + biases
        mlp = 3 * C * self.intermediate_size
        norms = (4 if self.post_norms else 2) * C + (2 * D if self.head_norms else 0)
        block = attention + mlp + norms
        embeddings = self.vocab_size * C * (1 if self.tied else 2)
        return embeddings + self.layers * block + C


# Every vocabulary here includes the 256 byte values, so all presets can train on memlab.data.
#
# 25m   Llama 3 8B's proportions where they matter for memory: the vocabulary is 32 × hidden_size,
#       so the logits have the same share, and there are 4 query heads per key head.
# 34m   34,083,840 weights, 64 fewer than the 34,083,904 of a published memory test. Every tensor
#       here is a multiple of hidden_size; that number is not. Token 32,000 would add 320 too many.
# 124m  GPT-2 small's weights without its position table and biases. The intermediate size is 2/3
#       of GPT-2's 3072, because SwiGLU has three matrices where GPT-2 has two.
#
# The rest are published shapes. Llama 3 has its first context length of 8,192 tokens, before it was
# extended to 131,072 by scaling the rotary angles.
# fmt: off
PRESETS: dict[str, GPTConfig] = {
    #                               V       C    L    H   KV       F      T
    "tiny":         GPTConfig(    256,     32,   4,   4,   2,     96,    64),
    "5m":           GPTConfig(  8_192,    256,   4,   8,   4,    704,   512),
    "25m":          GPTConfig( 16_384,    512,   6,   8,   2,  1_376,   512),
    "34m":          GPTConfig( 31_999,    384,  12,   6,   6,  1_064,   512),
    "124m":         GPTConfig( 50_257,    768,  12,  12,  12,  2_048, 1_024),
    "1b":           GPTConfig(128_256,  2_048,  16,  32,   8,  8_192, 8_192, True, 5e5),
    "llama-2-7b":   GPTConfig( 32_000,  4_096,  32,  32,  32, 11_008, 4_096, False),
    "llama-3-8b":   GPTConfig(128_256,  4_096,  32,  32,   8, 14_336, 8_192, False, 5e5),
    "llama-3-70b":  GPTConfig(128_256,  8_192,  80,  64,   8, 28_672, 8_192, False, 5e5),
    "llama-3-405b": GPTConfig(128_256, 16_384, 126, 128,   8, 53_248, 8_192, False, 5e5),
}
# fmt: on
