"""Adam-mini: one second moment for a block of weights, not for each.

Saves    nearly half of AdamW's state: 4N bytes and 4 a block, not 8N.
Costs    a partition: someone has to say which weights are alike. A wrong one trains, and worse.
Source   Zhang et al. 2024, arXiv 2406.16793.

Adds to memlab.reference.adam_mini: partitions by rules for any model, by rows where there are no
names, and all that AdamW adds.

AdamW's v says how long a step each weight may take. Weights that work together see gradients of
about one size, and one v does for all of them: the mean of their g². In a Transformer these are

    a row       of an embedding (a token), of an unembedding, and of the value, output and MLP
                matrices (what makes one number of the output)
    a head      of a query or key matrix: D rows, for its attention scores depend on all of them
    a tensor    a norm's weights
    a number    a bias: plain AdamW

The partition is declared, a size of block for each parameter's name, and never guessed: of a layer
that is in no rule, one v for the whole of it trains without a word and slowly. `gpt_partition` and
`llama_partition` apply tables of rules; a mapping from names to sizes is a partition too. Without
one, every row has its own v, which needs no names and is never too coarse.

    AdamMini(model.named_parameters(), partition=gpt_partition(model.config.head_width))

The authors' package switches weight decay off wherever a name contains "norm", "ln" or "bias". Here
groups decide, as in AdamW: give such weights a group with weight_decay=0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import Tensor

from memlab.optim.adamw import AdamW, adam_settings
from memlab.optim.moments import Moment, PerBlock

Share = Literal["number", "row", "head", "tensor"]  # what shares one second moment
Partition = Mapping[str, int] | Callable[[str, Sequence[int]], int]

# The end of a parameter's name, and what shares a second moment there.
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
    "bias": "number",
}

# As Llama, Mistral, Qwen and Gemma are named in Hugging Face's transformers.
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
    "bias": "number",
}

# Queries, keys and values in one matrix, in an order that the name does not tell.
FUSED = ("c_attn", "qkv_proj", "query_key_value", "qkv", "Wqkv", "in_proj_weight")


# ------------------------------------------------------------------ the partition: plain data


@dataclass(frozen=True)
class ByRules:
    """The partition that asks, of each parameter, the rule for the end of its name.

    Of several such rules the longest counts. `head_width` is D, the rows of a head in a query or
    key matrix: not always the width over the number of heads. `default` is for parameters of which
    no rule knows.

    Called with a name and a shape, it raises ValueError for those where there is no default, for
    matrices that hold queries, keys and values at once and have no rule of their own, and for heads
    that don't fit.
    """

    rules: Mapping[str, Share]
    head_width: int
    default: Share | None = None

    def __call__(self, name: str, shape: Sequence[int]) -> int:
        """How many neighbours share a v in that parameter."""
        known = [end for end in self.rules if f".{name}".endswith(f".{end}")]
        if known:
            return block_size(self.rules[max(known, key=len)], name, shape, self.head_width)
        if not set(FUSED).isdisjoint(name.split(".")):
            raise ValueError(
                f"got {name} of shape {tuple(shape)}, which holds queries, keys and values at "
                f"once, in an order that its name does not tell; split it into three layers, or "
                f'give it a rule of its own: "row" if its shape is (out, in), else "number"'
            )
        if self.default is None:
            raise ValueError(
                f"got {name} of shape {tuple(shape)}, of which no rule knows: they are for names "
                f"that end in {', '.join(self.rules)}; give ByRules a further one, or default="
            )
        return block_size(self.default, name, shape, self.head_width)


def gpt_partition(head_width: int, *, default: Share | None = None) -> ByRules:
    """The paper's partition of memlab.model's GPT."""
    return ByRules(GPT_RULES, head_width, default)


def llama_partition(head_width: int, *, default: Share | None = None) -> ByRules:
    """The paper's partition of a Llama with Hugging Face's names."""
    return ByRules(LLAMA_RULES, head_width, default)


def by_rows(name: str, shape: Sequence[int]) -> int:
    """One v for each row of a matrix, (out, in): what makes one element of the output. Each element
    of a vector has its own."""
    return max(1, prod(shape[1:]))


def block_size(share: Share, name: str, shape: Sequence[int], head_width: int) -> int:
    """How many neighbours share a v in a weight of that shape, whose first dimension is the output.

    A row of a vector is a number: each makes one number of the output.
    """
    row = by_rows(name, shape)
    if share == "number":
        return 1
    if share == "row":
        return row
    if share == "tensor":
        return max(1, prod(shape))
    if share != "head":
        raise ValueError(
            f"got the rule {share!r} for {name}; give 'number', 'row', 'head' or 'tensor'"
        )
    if head_width < 1 or not shape or shape[0] % head_width:
        raise ValueError(
            f"got {name} of shape {tuple(shape)}, whose rows don't make whole heads of "
            f"{head_width}; give the model's head width, which need not be its width over its heads"
        )
    return head_width * row


# ------------------------------------------------------------------ the optimizer


class AdamMini(AdamW):
    """AdamW with one second moment for each block of a declared partition.

    `partition` maps a name, or is called with a name and a shape, and returns how many neighboring
    elements share a v. It needs names: pass `model.named_parameters()`, or groups of such pairs, as
    torch's optimizers accept them. A tied weight that comes twice counts once, by its first name.

    Without a partition `model.parameters()` will do: each row of a matrix shares a v, and each
    element of a vector has its own (`by_rows`). Queries and keys then have one v a row where the
    paper has one a head: finer, so as safe, for a few bytes more.

    Other arguments and their defaults are AdamW's. Raises TypeError for a partition and weights
    without names, and ValueError for a parameter that the partition does not cover or divide.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *adamw: Any,
        partition: Partition | None = None,
        **settings: Any,
    ) -> None:
        self._partition = partition
        self._sizes: dict[Tensor, int] = {}
        super().__init__(params, lr, *adamw, **settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for named weights of which the partition knows."""
        weights = param_group["params"]
        if not isinstance(weights, (Tensor, set)):  # of which torch says what is wrong
            param_group = {**param_group, "params": _each_once(weights)}
        super().add_param_group(param_group)
        try:
            self._sizes.update(self._sizes_of(self.param_groups[-1]))
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """The first for each number, the second for each block."""
        return self.number("exp_avg", group), PerBlock("exp_avg_sq", self.block(weight, group))

    def block(self, weight: Tensor, group: dict[str, Any]) -> int:
        """Those that share a second moment; of a copy that is stepped in a weight's place, by the
        name that stands for it in the group."""
        if weight in self._sizes:
            return self._sizes[weight]
        if self._partition is None or len(group.get("param_names", ())) == len(group["params"]):
            return self._sizes_of(group)[weight]
        raise ValueError(
            f"got a weight of shape {tuple(weight.shape)} that has no name, by which a partition "
            f"would know it"
        )

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """See `adam_mini_`."""
        adam_mini_(weight, gradient, *moments, step=step, **adam_settings(group))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the base's, and what is ours."""
        return {**super().__getstate__(), "_partition": self._partition, "_sizes": self._sizes}

    def _sizes_of(self, group: dict[str, Any]) -> dict[Tensor, int]:
        if self._partition is None:
            return {weight: by_rows("", weight.shape) for weight in group["params"]}
        if "param_names" not in group:
            raise TypeError(
                "got weights without names, by which a partition finds them; pass "
                "model.named_parameters(), or leave out partition= for one v a row"
            )
        named = zip(group["param_names"], group["params"], strict=True)
        return {weight: _size_in(self._partition, name, weight.shape) for name, weight in named}


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
    """AdamW's step in place, with a mean over each block where g² stood; `step` begins at 1.

    `exp_avg_sq` is (blocks, 1); the others are flat and hold as many blocks.
    """
    beta1, beta2 = betas
    weight, gradient, exp_avg = (t.view(len(exp_avg_sq), -1) for t in (weight, gradient, exp_avg))
    weight.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1 - beta1)  # (blocks, size)
    mean_square = gradient.square().mean(1, keepdim=True)  # (blocks, 1)
    exp_avg_sq.mul_(beta2).add_(mean_square, alpha=1 - beta2)
    root = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    weight.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))


def _size_in(partition: Partition, name: str, shape: Sequence[int]) -> int:
    if callable(partition):
        size = partition(name, shape)
    elif name in partition:
        size = partition[name]
    else:
        raise ValueError(
            f"got {name} of shape {tuple(shape)}, which the partition does not name; add how many "
            f"of its numbers share a second moment"
        )
    if size < 1 or prod(shape) % size:
        raise ValueError(
            f"got blocks of {size} for {name}, whose {prod(shape)} numbers they don't divide; give "
            f"a divisor, such as {max(1, prod(shape[1:]))} for its rows"
        )
    return size


def _each_once(weights: Iterable[Any]) -> list[Any]:
    """The weights, or pairs of name and weight, without those that came before."""
    first: dict[Any, Any] = {}
    for each in weights:
        first.setdefault(each[1] if isinstance(each, tuple) else each, each)
    return list(first.values())
