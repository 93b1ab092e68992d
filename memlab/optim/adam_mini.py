"""Adam-mini: one second moment per block of weights, instead of one per weight.

Saves nearly half of AdamW's state: 4N bytes plus 4 per block, not 8N. Costs a partition, which says
which weights share a second moment. A wrong one trains worse. Source Zhang et al. 2024, arXiv
2406.16793.

Adds to memlab.reference.adam_mini: partitions by rules for any model, by rows where there are no
names, and everything that AdamW adds.

AdamW's v sets each weight's step size. Weights that work together have gradients of similar size,
so they can share one v, the mean of their g². In a Transformer they are:

    row       of an embedding (a token), of an unembedding, and of the value, output and MLP
              matrices (one output element)
    head      of a query or key matrix: D rows, because a head's scores depend on all of them
    tensor    the weights of a norm
    element   of a bias, as in AdamW

The partition is declared: it maps each parameter name to a block size, and is never guessed. If a
layer wrongly shared one v, it would train slowly without an error. `gpt_partition` and
`llama_partition` use tables of rules; a mapping from names to block sizes works too. Without a
partition every row has its own v, which needs no names and is never too coarse.

    AdamMini(model.named_parameters(), partition=gpt_partition(model.config.head_dim))

The authors' package disables weight decay for names that contain "norm", "ln" or "bias". Here
groups decide, as in AdamW: put such weights in a group with weight_decay=0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import Tensor

from memlab.optim.adamw import AdamW, adam_settings
from memlab.optim.moments import Moment, SharedMoment

Share = Literal["element", "row", "head", "tensor"]  # weights that share a second moment
Partition = Mapping[str, int] | Callable[[str, Sequence[int]], int]

# The end of a parameter's name, and the weights that share a second moment.
GPT_RULES: dict[str, Share] = {
    "embedding.weight": "row",
    "unembedding.weight": "row",
    "attention.query.weight": "head",
    "attention.key.weight": "head",
    "attention.value.weight": "row",
    "attention.output.weight": "row",
    "mlp.gate.weight": "row",
    "mlp.up.weight": "row",
    "mlp.down.weight": "row",
    "attention_norm.weight": "tensor",
    "attention_post_norm.weight": "tensor",
    "query_norm.weight": "tensor",
    "key_norm.weight": "tensor",
    "mlp_norm.weight": "tensor",
    "mlp_post_norm.weight": "tensor",
    "norm.weight": "tensor",
    "bias": "element",
}

# The names of Llama, Mistral, Qwen and Gemma in Hugging Face transformers.
LLAMA_RULES: dict[str, Share] = {
    "embed_tokens.weight": "row",
    "lm_head.weight": "row",
    "q_proj.weight": "head",
    "k_proj.weight": "head",
    "v_proj.weight": "row",
    "o_proj.weight": "row",
    "gate_proj.weight": "row",
    "up_proj.weight": "row",
    "down_proj.weight": "row",
    "q_norm.weight": "tensor",
    "k_norm.weight": "tensor",
    "input_layernorm.weight": "tensor",
    "post_attention_layernorm.weight": "tensor",
    "pre_feedforward_layernorm.weight": "tensor",
    "post_feedforward_layernorm.weight": "tensor",
    "norm.weight": "tensor",
    "bias": "element",
}

# Queries, keys and values in one matrix; their order cannot be told from the name.
FUSED_NAMES = ("c_attn", "qkv_proj", "query_key_value", "qkv", "Wqkv", "in_proj_weight")


# ------------------------------------------------------------------ partitions


@dataclass(frozen=True)
class ByRules:
    """A partition by rules for the ends of parameter names; the longest matching rule applies.

    `head_dim` is the head dimension D, the rows of a head in a query or key matrix. It may differ
    from width / heads. `default` is for parameters without a matching rule.

    When called, raise ValueError for parameters without a rule or default, for matrices that fuse
    queries, keys and values without a rule, and for heads that don't divide the rows.
    """

    rules: Mapping[str, Share]
    head_dim: int
    default: Share | None = None

    def __call__(self, name: str, shape: Sequence[int]) -> int:
        """Return how many neighboring elements of a parameter share a v."""
        matching = [end for end in self.rules if f".{name}".endswith(f".{end}")]
        if matching:
            return block_size(self.rules[max(matching, key=len)], name, shape, self.head_dim)
        if not set(FUSED_NAMES).isdisjoint(name.split(".")):
            raise ValueError(
                f"got {name} of shape {tuple(shape)}, which fuses queries, keys and values in an "
                f"order that its name does not show; split it into three layers, or give it a "
                f'rule: "row" if its shape is (out, in), else "element"'
            )
        if self.default is None:
            raise ValueError(
                f"got {name} of shape {tuple(shape)}, which matches no rule; the rules are for "
                f"names that end in {', '.join(self.rules)}; add a rule, or pass default="
            )
        return block_size(self.default, name, shape, self.head_dim)


def gpt_partition(head_dim: int, *, default: Share | None = None) -> ByRules:
    """Return the paper's partition for memlab.model's GPT."""
    return ByRules(GPT_RULES, head_dim, default)


def llama_partition(head_dim: int, *, default: Share | None = None) -> ByRules:
    """Return the paper's partition for a Llama with Hugging Face names."""
    return ByRules(LLAMA_RULES, head_dim, default)


def by_rows(name: str, shape: Sequence[int]) -> int:
    """Return the row size of a matrix (out, in), or 1 for a vector: one v per output element."""
    return max(1, prod(shape[1:]))


def block_size(share: Share, name: str, shape: Sequence[int], head_dim: int) -> int:
    """Return how many neighboring elements of a weight share a v.

    The first dimension is the output. A row of a vector is one element.
    """
    row = by_rows(name, shape)
    if share == "element":
        return 1
    if share == "row":
        return row
    if share == "tensor":
        return max(1, prod(shape))
    if share != "head":
        raise ValueError(
            f"got the rule {share!r} for {name}; give 'element', 'row', 'head' or 'tensor'"
        )
    if head_dim < 1 or not shape or shape[0] % head_dim:
        raise ValueError(
            f"got {name} of shape {tuple(shape)}, whose rows {head_dim} does not divide; give "
            f"the model's head dimension, which may differ from its width over its heads"
        )
    return head_dim * row


# ------------------------------------------------------------------ the optimizer


class AdamMini(AdamW):
    """AdamW with one second moment per block of a declared partition.

    `partition` maps a name to how many neighboring elements share a v, or is called with a name and
    a shape. It needs names: pass `model.named_parameters()`, or groups of such pairs, as for
    torch's optimizers. A tied weight given twice counts once, by its first name.

    Without a partition `model.parameters()` is enough: each row of a matrix shares a v, and each
    element of a vector has its own (`by_rows`). Queries and keys then have one v per row instead of
    one per head, which is finer, equally safe, and takes a few bytes more.

    Other arguments and defaults are AdamW's. Raise TypeError for a partition with weights without
    names, and ValueError for a parameter that the partition does not contain or divide.
    """

    takes_dtensors = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *adamw: Any,
        partition: Partition | None = None,
        **settings: Any,
    ) -> None:
        self._partition = partition
        self._block_sizes: dict[Tensor, int] = {}
        super().__init__(params, lr, *adamw, **settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like torch.optim.Optimizer, after looking up its weights in the partition."""
        weights = param_group["params"]
        if not isinstance(weights, (Tensor, set)):  # torch reports the error
            param_group = {**param_group, "params": _without_duplicates(weights)}
        super().add_param_group(param_group)
        try:
            self._block_sizes.update(self._group_block_sizes(self.param_groups[-1]))
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return a first moment per element and a second moment per block."""
        return self.float_moment("exp_avg", group), SharedMoment(
            "exp_avg_sq", self.block_size(weight, group)
        )

    def block_size(self, weight: Tensor, group: dict[str, Any]) -> int:
        """Return how many elements share a second moment.

        A copy stepped in a weight's place is looked up by its name in the group.
        """
        if weight in self._block_sizes:
            return self._block_sizes[weight]
        if self._partition is None or len(group.get("param_names", ())) == len(group["params"]):
            return self._group_block_sizes(group)[weight]
        raise ValueError(
            f"got a weight of shape {tuple(weight.shape)} without a name, which the partition "
            f"needs; add it to its group's param_names"
        )

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """Call `adam_mini_`."""
        adam_mini_(weight, gradient, *moments, step=step, **adam_settings(group))

    def __getstate__(self) -> dict[str, Any]:
        """Add this class's attributes, for copies and pickles."""
        return {
            **super().__getstate__(),
            "_partition": self._partition,
            "_block_sizes": self._block_sizes,
        }

    def _group_block_sizes(self, group: dict[str, Any]) -> dict[Tensor, int]:
        if self._partition is None:
            return {weight: by_rows("", weight.shape) for weight in group["params"]}
        if "param_names" not in group:
            raise TypeError(
                "got weights without names, which a partition needs; pass "
                "model.named_parameters(), or omit partition= for one v per row"
            )
        named = zip(group["param_names"], group["params"], strict=True)
        return {
            weight: _named_block_size(self._partition, name, weight.shape) for name, weight in named
        }


def adam_mini_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW's step in place, with the mean of g² over each block instead of g²; `step` starts at 1.

    `exp_avg_sq` is (blocks, 1); the other tensors are flat, with the same number of blocks.
    """
    beta1, beta2 = betas
    weight, gradient, exp_avg = (t.view(len(exp_avg_sq), -1) for t in (weight, gradient, exp_avg))
    weight.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1 - beta1)  # (blocks, size)
    mean_square = gradient.square().mean(1, keepdim=True)  # (blocks, 1)
    exp_avg_sq.mul_(beta2).add_(mean_square, alpha=1 - beta2)
    root = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    weight.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))


def _named_block_size(partition: Partition, name: str, shape: Sequence[int]) -> int:
    if callable(partition):
        size = partition(name, shape)
    elif name in partition:
        size = partition[name]
    else:
        raise ValueError(
            f"got {name} of shape {tuple(shape)}, which the partition does not contain; add how "
            f"many of its elements share a second moment"
        )
    if size < 1 or prod(shape) % size:
        raise ValueError(
            f"got blocks of {size} for {name}, which do not divide its {prod(shape)} elements; "
            f"give a divisor, such as {max(1, prod(shape[1:]))} for its rows"
        )
    return size


def _without_duplicates(weights: Iterable[Any]) -> list[Any]:
    """Return the weights, or (name, weight) pairs, without repeated weights."""
    unique: dict[Any, Any] = {}
    for item in weights:
        unique.setdefault(item[1] if isinstance(item, tuple) else item, item)
    return list(unique.values())
