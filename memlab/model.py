"""A small Llama in one file, the model for trying every technique.

    x = embedding[tokens]                          # (B, T, C)
    x = x + attention(norm(x)) ;  x = x + mlp(norm(x))        L times
    logits = norm(x) @ unembeddingᵀ                # (B, T, V)

The architecture follows Llama 2 and 3: RMSNorm before each branch, rotary positions, SwiGLU,
grouped-query attention, and no biases. Later model families changed small parts of it:
memlab.configs.shapes lists the fields and counts the weights.

Techniques are applied from outside the model. Attention and loss are functions passed in. A block
maps (B, T, C) to (B, T, C), so any function wrapper can wrap `model.blocks[3]`. Production models
differ in speed, not in shape: they fuse query, key and value into one matrix, gate and up into
another, and run norm and rotation as single kernels.

`with torch.device("cuda"): GPT(config, dtype=torch.bfloat16)` creates the model directly on that
device and in that dtype. `"meta"` creates only shapes.

Source   Touvron et al. 2023, arXiv 2302.13971; Su et al. 2021 (rotary positions), 2104.09864;
         Shazeer 2020 (SwiGLU), 2002.05202; Ainslie et al. 2023 (grouped queries), 2305.13245.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.configs.shapes import PRESETS as PRESETS
from memlab.configs.shapes import GPTConfig

INITIAL_STD = 0.02
ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # the names in shapes.ACTIVATIONS
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}

AttentionFunction = Callable[..., Tensor]  # see scaled_dot_product_attention
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # see cross_entropy


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Call torch's fused attention, the default.

    q is (B, H, T, D), k and v are (B, KV, T, D); returns (B, H, T, D).
    """
    grouped = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats from all logits, the default.

    hidden is (B, T, C), weight (V, C), targets (B, T). The loss has the dtype of `hidden`;
    bfloat16 has steps of 1/16 near 10.
    """
    logits = F.linear(hidden, weight)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of each head by the angles of their position.

    x is (B, T, H, D), the tables are (T, 1, D/2). Afterwards q·k depends on the distance between
    two tokens instead of their positions. Autograd saves only the tables.
    """
    x1, x2 = x.chunk(2, dim=-1)  # (B, T, H, D/2)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)  # (B, T, H, D)


class Linear(nn.Linear):
    """A linear layer, without bias by default, left uninitialized for `GPT.initialize_`.

    nn.Linear would initialize it too, so a 7B model would draw its 7 billion elements twice.
    """

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)

    def reset_parameters(self) -> None: ...


class Embedding(nn.Embedding):
    """A token embedding, left uninitialized like `Linear`."""

    def reset_parameters(self) -> None: ...


def rms_norm(config: GPTConfig, width: int, dtype: torch.dtype) -> nn.Module:
    """Return an RMSNorm.

    Gemma stores w - 1 and multiplies by 1 + w. That detail is left out: the tensors and bytes
    are the same.
    """
    return nn.RMSNorm(width, eps=config.norm_eps, dtype=dtype)


def identity(x: Tensor) -> Tensor:
    """Do nothing, in place of a norm that this model family lacks."""
    return x


class Rotary(nn.Module):
    """Tables of cos and sin of every position's angles, shared by all blocks.

    Angles are computed in at least float32 (bfloat16 would round position 257 to 256). Only the
    tables are rounded to the model's dtype, also by `model.to(...)`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        D = config.head_dim
        precise = torch.promote_types(dtype, torch.float32)
        positions = torch.arange(config.seq_len, dtype=precise)
        frequencies = config.rope_theta ** (-torch.arange(0, D, 2, dtype=precise) / D)
        angles = torch.outer(positions, frequencies).unsqueeze(1)  # (T, 1, D/2)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return both tables up to `length`, in the dtype of the tensor to rotate.

        Under autocast, q is bfloat16 but the tables are float32. Uncast tables would promote q and
        k to float32: twice the bytes, and a dtype mismatch with v. A fused kernel can rotate in
        float32 at no cost. Without one, casting the small tables is cheapest.
        """
        return self.cos[:length].to(dtype), self.sin[:length].to(dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(
        self, config: GPTConfig, rotary: Rotary, attend: AttentionFunction, dtype: torch.dtype
    ) -> None:
        super().__init__()
        C, H, KV, D = config.hidden_size, config.heads, config.kv_heads, config.head_dim
        biased = config.attention_biases
        self.head_dim = D
        self.rotary = rotary
        self.attend = attend
        self.query = Linear(C, H * D, dtype, bias="query" in biased)
        self.key = Linear(C, KV * D, dtype, bias="key" in biased)
        self.value = Linear(C, KV * D, dtype, bias="value" in biased)
        self.output = Linear(H * D, C, dtype, bias="output" in biased)
        self.query_norm = rms_norm(config, D, dtype) if config.head_norms else identity
        self.key_norm = rms_norm(config, D, dtype) if config.head_norms else identity

    def forward(self, x: Tensor) -> Tensor:
        D = self.head_dim
        q = self.query_norm(self.query(x).unflatten(-1, (-1, D)))  # (B, T, H, D)
        k = self.key_norm(self.key(x).unflatten(-1, (-1, D)))  # (B, T, KV, D)
        v = self.value(x).unflatten(-1, (-1, D))  # (B, T, KV, D)
        cos, sin = self.rotary.tables(x.shape[1], q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Transpose after the rotation: fused kernels use q's memory layout for their output, so
        # merging the heads below is a view rather than a copy that backward would keep.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or KV, T, D)
        out = self.attend(q, k, v, causal=True)  # (B, H, T, D)
        return self.output(out.transpose(1, 2).flatten(2))  # (B, T, C)


class MLP(nn.Module):
    """SwiGLU (or GeGLU): an up projection multiplied by an activated gate projection."""

    def __init__(self, config: GPTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, config.intermediate_size, dtype)
        self.up = Linear(config.hidden_size, config.intermediate_size, dtype)
        self.down = Linear(config.intermediate_size, config.hidden_size, dtype)
        self.activation = ACTIVATION_FUNCTIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then MLP, each with a residual connection: (B, T, C) to (B, T, C)."""

    def __init__(
        self, config: GPTConfig, rotary: Rotary, attend: AttentionFunction, dtype: torch.dtype
    ) -> None:
        super().__init__()
        C, after = config.hidden_size, config.post_norms
        self.attention_norm = rms_norm(config, C, dtype)
        self.attention = Attention(config, rotary, attend, dtype)
        self.attention_post_norm = rms_norm(config, C, dtype) if after else identity
        self.mlp_norm = rms_norm(config, C, dtype)
        self.mlp = MLP(config, dtype)
        self.mlp_post_norm = rms_norm(config, C, dtype) if after else identity

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x)))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A Llama: tokens (B, T) in; logits (B, T, V) out, or the mean loss if targets are given.

    `attention` and `loss` replace `scaled_dot_product_attention` and `cross_entropy` and take the
    same arguments. Weights have `dtype` (None: torch's default).
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        attention: AttentionFunction = scaled_dot_product_attention,
        loss: LossFunction = cross_entropy,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or torch.get_default_dtype()
        V, C = config.vocab_size, config.hidden_size
        self.config = config
        self.loss = loss
        self.rotary = Rotary(config, dtype)
        self.embedding = Embedding(V, C, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(config, self.rotary, attention, dtype) for _ in range(config.layers)
        )
        self.norm = rms_norm(config, C, dtype)
        self.unembedding = None if config.tied else Linear(C, V, dtype)
        self.initialize_()

    @torch.no_grad()
    def initialize_(self) -> None:
        """Draw every matrix from N(0, 0.02²), like GPT-2.

        The 2·L matrices that write to the residual stream use 0.02 / √(2·L), so that the variance
        of their sum does not grow with depth. Biases start at zero.
        """
        residual_std = INITIAL_STD / math.sqrt(2 * self.config.layers)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.ndim == 2:  # weights of norms are vectors and stay at 1
                residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                weight.normal_(std=residual_std if residual else INITIAL_STD)

    @property
    def unembedding_weight(self) -> Tensor:
        """The matrix (V, C) that computes logits; the embedding itself if tied."""
        return self.embedding.weight if self.unembedding is None else self.unembedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        length, longest = tokens.shape[1], self.config.seq_len
        if length > longest:
            raise ValueError(
                f"got sequences of {length} tokens, wanted at most seq_len={longest}; cut them, "
                f"or build the model with dataclasses.replace(config, seq_len={length})"
            )
        x = self.embedding(tokens)  # (B, T, C)
        if self.config.scaled_embeddings:
            x = x * math.sqrt(self.config.hidden_size)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return F.linear(x, self.unembedding_weight)  # (B, T, V)
        return self.loss(x, self.unembedding_weight, targets)
