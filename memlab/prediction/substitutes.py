"""Composite operators that decompose differently on CUDA.

torch implements `scaled_dot_product_attention`, `rms_norm`, `dropout`, `softmax` and the recurrent
layers (recurrent.py) with other operators, which depend on the device. During a prediction, a
registered kernel calls CUDA's choice. It is in the dispatcher, so it also applies to recomputation
in a checkpoint.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memlab.configs.targets import Kernels, Target
from memlab.internals.replacing import registered
from memlab.internals.torch_internals import call_composite
from memlab.prediction import recurrent

aten = torch.ops.aten


class Substitutes:
    """Replace composite operators, and record the chosen kernels."""

    def __init__(self, kernels: Kernels, target: Target) -> None:
        self.kernels, self.target = kernels, target
        self.used: set[str] = set()  # descriptions of the kernels that were used
        self.replacements: dict[Any, Callable[..., Any]] = {
            aten.scaled_dot_product_attention.default: self.attention,
            aten.softmax.int: _fused_half_softmax(aten.softmax.int, aten._softmax.default),
            aten.log_softmax.int: _fused_half_softmax(
                aten.log_softmax.int, aten._log_softmax.default
            ),
            aten.group_norm.default: _contiguous_group_norm,
            **recurrent.substitutes(partial(self.used.add, recurrent.LABEL)),
        }
        if kernels.norms == "fused":
            self.replacements[aten.rms_norm.default] = self.rms_norm
        if kernels.dropout == "fused":
            self.replacements[aten.dropout.default] = self.dropout

    @contextmanager
    def installed(self) -> Iterator["Substitutes"]:
        kernels = {
            (operator, "AutogradCPU"): _without_keys(substitute)
            for operator, substitute in self.replacements.items()
        }
        if self.kernels.norms == "fused":  # a registered kernel stops the decomposition
            kernels[aten._fused_rms_norm.default, "CPU"] = _no_kernel
        with registered(kernels):
            yield self

    # -------------------------------------------------------------- attention

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        tensors = (query, key, value)
        kernel = self.choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        self.used.add(f"{kernel} attention")
        if kernel == "flash":
            return _flash_attention(tensors, dropout_p, is_causal, scale)
        needs_statistics = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        mask = _as_bias(attn_mask, query.dtype)
        if kernel == "efficient":
            result = aten._scaled_dot_product_efficient_attention(
                *tensors, _aligned(mask, query, key), needs_statistics, dropout_p, is_causal,
                scale=scale,
            )  # fmt: skip
            return result[0]
        if kernel == "cudnn":
            result = aten._scaled_dot_product_cudnn_attention(
                *tensors, mask, needs_statistics, dropout_p, is_causal, scale=scale
            )
            return result[0]
        result = aten._scaled_dot_product_attention_math(
            *tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result[0]

    def choose(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        enable_gqa: bool,
    ) -> str:
        """Return the requested kernel, or torch's choice; "math" if the inputs rule it out."""
        if not _allows_fused_kernel(query, key, value, enable_gqa):
            return "math"
        kernels = self._fused(query, key, value, attn_mask, dropout_p, is_causal)
        requested = self.kernels.attention
        if requested != "auto":
            return requested if requested in kernels else "math"
        return kernels[0] if kernels else "math"

    def _fused(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> list[str]:
        """Return the fused kernels that take these inputs, in torch's order of preference."""
        of_target = self.target.fused_attention(
            str(query.dtype).removeprefix("torch."),
            query.shape[1],
            min(key.shape[1], value.shape[1]),
            (query.shape[-1], value.shape[-1]),
            trains=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
            dropout_p=dropout_p,
        )
        allowed = {
            "flash": attn_mask is None
            and (not is_causal or query.shape[-2] == key.shape[-2])
            and torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "cudnn": key.shape[-2] != 1 and torch.backends.cuda.cudnn_sdp_enabled(),
        }
        return [kernel for kernel in of_target if allowed[kernel]]

    # -------------------------------------------------------------- norms, dropout

    def rms_norm(
        self,
        input: torch.Tensor,
        normalized_shape: list[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if weight is not None and weight.dtype != input.dtype:
            return call_composite(aten.rms_norm.default, input, normalized_shape, weight, eps)
        self.used.add("fused RMSNorm")
        return aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]

    def dropout(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if train and 0 < p < 1 and input.numel():
            self.used.add("fused dropout")
            return aten.native_dropout(input, p, train)[0]
        return call_composite(aten.dropout.default, input, p, train)


def _without_keys(substitute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda keys, *args, **kwargs: substitute(*args, **kwargs)


def _allows_fused_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> bool:
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    if len({query.dtype, key.dtype, value.dtype}) > 1 or 0 in (*query.shape, *key.shape):
        return False
    if any(t.stride(-1) != 1 for t in (query, key, value)):
        return False
    heads, key_heads, value_heads = query.shape[1], key.shape[1], value.shape[1]
    if enable_gqa:
        return heads % key_heads == heads % value_heads == 0
    return heads == key_heads == value_heads and query.shape[0] == key.shape[0] == value.shape[0]


def _flash_attention(
    tensors: tuple[torch.Tensor, ...], dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Pad the head dimension to a multiple of 8 and run flash attention."""
    width = tensors[0].shape[-1]
    padded = [torch.constant_pad_nd(t, (0, -width % 8)) if width % 8 else t for t in tensors]
    result = aten._scaled_dot_product_flash_attention(
        *padded, dropout_p, is_causal, scale=width**-0.5 if scale is None else scale
    )
    return result[0][..., :width] if width % 8 else result[0]


def _as_bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Convert a bool mask to a bias for the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=dtype, device=mask.device))


def _aligned(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Expand the mask to all heads, with its rows padded to a multiple of 16 elements."""
    if mask is None:
        return None
    width = key.shape[-2]
    if width % 16:
        mask = torch.constant_pad_nd(mask, (0, -width % 16))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], width)


# ------------------------------------------------------------------ norms, softmax


def _no_kernel(*args: Any) -> Any:
    raise NotImplementedError("only fake tensors may reach this kernel")


def _fused_half_softmax(composite: Any, kernel: Any) -> Callable[..., torch.Tensor]:
    """Fuse the cast into softmax from float16 to float32, as CUDA does; the CPU casts first."""

    def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            return kernel(input, dim, True)
        return call_composite(composite, input, dim, dtype)

    return softmax


def _contiguous_group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """Normalize a contiguous copy of a channels-last input, which the CPU reads in place."""
    x = input.contiguous()
    return call_composite(aten.group_norm.default, x, num_groups, weight, bias, eps, cudnn_enabled)
