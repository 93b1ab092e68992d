"""CUDA's autocast rules, applied to CPU tensors.

torch has one autocast operator list per device (ATen/autocast_mode.h). CUDA's list computes norms,
softmax, powers, exponentials, logarithms, sums and losses in float32, and casts an einsum's inputs
before the einsum. The CPU's list does not, and has 88 other operators. This module registers CUDA's
rules under the CPU's dispatch key.

    float32        cast the inputs to float32
    float32 dtype  request a float32 result, unless the caller set a dtype
    lower          cast the inputs down; a weight's cast is cached until autocast ends
    promote        cast the inputs to the widest input dtype

The lower rule also replaces the CPU's own, so that all operators share one cast cache, as on CUDA.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, reduce
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memlab.internals.replacing import registered
from memlab.internals.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    dispatch_get_all_op_names,
    has_kernel,
    tree_map_only,
)
from memlab.metering.frames import user_line

_words = str.split  # the lists below are grouped as in ATen/autocast_mode.h

LOWER = _words(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)
PACKED = ("_cudnn_rnn",)  # torch casts its weights into a new buffer at each call
FLOAT32 = _words(  # rms_norm since torch 2.12 or 2.13
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
    """
)
FLOAT32_DTYPE = _words(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
APPENDS_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
PROMOTE = _words(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
UNSUPPORTED = ("binary_cross_entropy",)

_KEY = DispatchKey.AutocastCPU
# Python's dispatcher, which traces for torch.compile, would start from the first key again.
_NEXT = (_KEY, DispatchKey.PythonDispatcher)
_casts = WeakIdKeyDictionary()  # weight to cast, until autocast ends


def operator(name: str) -> Any:
    """Return the operator for a name in the lists: `pow.Scalar`, or `mm` for `mm.default`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Apply CUDA's autocast rules to CPU tensors inside `with`."""
    try:
        with registered({(func, "AutocastCPU"): rule for func, rule in _rules()}):
            yield
    finally:
        _casts.clear()


def forget_casts(clear: Callable[[], None]) -> Callable[[], None]:
    """Wrap `torch.clear_autocast_cache` to also clear the casts cached here."""

    def clear_both() -> None:
        _casts.clear()
        clear()

    return clear_both


def _rules() -> Iterator[tuple[Any, Callable[..., Any]]]:
    cpu_only, float32 = _cpu_only_operators(), _float32_operators()  # before rules are registered
    for name in LOWER:
        yield operator(name), _with_cast(operator(name), _lower)
    for name in PACKED:
        yield operator(name), _with_cast(operator(name), _lower_uncached)
    for name in float32:
        yield operator(name), _with_cast(operator(name), _to_float32)
    for name in FLOAT32_DTYPE:
        yield operator(name), _with_float32_dtype(operator(name), operator(name))
    for name, with_dtype in APPENDS_DTYPE.items():
        yield operator(name), _with_float32_dtype(operator(name), operator(with_dtype))
    for name in PROMOTE:
        yield operator(name), _with_cast(operator(name), _promote)
    for name in UNSUPPORTED:
        yield operator(name), _reject
    for name in cpu_only:
        yield operator(name), _untouched(operator(name))


@cache
def _float32_operators() -> tuple[str, ...]:
    return tuple(name for name in FLOAT32 if has_kernel(f"aten::{name}", "AutocastCUDA"))


@cache
def _cpu_only_operators() -> tuple[str, ...]:
    names = (n for n in dispatch_get_all_op_names() if n.startswith("aten::"))
    return tuple(
        name.removeprefix("aten::")
        for name in names
        if has_kernel(name, "AutocastCPU") and not has_kernel(name, "AutocastCUDA")
    )


# ------------------------------------------------------------------ the rules


def _with_cast(func: Any, cast: Callable[[list[torch.Tensor]], Callable[[Any], Any]]) -> Any:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
            tensors: list[torch.Tensor] = []
            tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
            each = partial(tree_map_only, torch.Tensor, cast(tensors))
            # torch casts inside one C++ call, whose arguments compilers evaluate from the last on.
            kwargs = {name: each(value) for name, value in reversed(kwargs.items())}
            args = tuple([each(value) for value in reversed(args)][::-1])
            return func(*args, **kwargs)

    return run


def _with_float32_dtype(func: Any, with_dtype: Any) -> Any:
    position = [argument.name for argument in with_dtype._schema.arguments].index("dtype")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
            is_given = kwargs.get("dtype") is not None or len(args) > position
            if is_given or not _is_eligible(args[0]):
                return func(*args, **kwargs)
            return with_dtype(*args, **{**kwargs, "dtype": torch.float32})

    return run


def _reject(keys: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{user_line()}: autocast does not support binary_cross_entropy on CUDA; use logits with "
        f"binary_cross_entropy_with_logits or BCEWithLogitsLoss"
    )


def _untouched(func: Any) -> Any:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return func.redispatch(reduce(DispatchKeySet.remove, _NEXT, keys), *args, **kwargs)

    return run


def _is_eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype or not _is_eligible(tensor):
        return tensor
    return torch.ops.aten.to.dtype(tensor, dtype)


def _to_float32(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(_to, dtype=torch.float32)


def _promote(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    widest = torch.get_autocast_dtype("cpu")
    if any(_is_eligible(tensor) and tensor.dtype != widest for tensor in tensors):
        # So bfloat16 weights under float16 autocast give a residual stream of 4 bytes per element.
        widest = torch.float32  # also for bfloat16 with float16
    return partial(_to, dtype=widest)


def _lower(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    dtype = torch.get_autocast_dtype("cpu")

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return _cached(tensor, dtype) if _is_cacheable(tensor) else _to(tensor, dtype)

    return cast


def _lower_uncached(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(_to, dtype=torch.get_autocast_dtype("cpu"))


def _is_cacheable(tensor: torch.Tensor) -> bool:
    """Return whether torch caches the tensor's cast (`cached_cast` in ATen/autocast_mode.cpp).

    torch caches casts of float32 weights only, and not in inference mode, because autograd cannot
    use inference tensors later. It also skips tensors in a CUDA graph's pool, which do not occur.
    """
    return (
        tensor.dtype == torch.float32
        and tensor.requires_grad
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
        and tensor.is_leaf
        and not tensor._is_view()
    )


def _cached(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor not in _casts:
        # torch caches a weight's cast with gradients on even under `no_grad`
        # (test_a_cast_cached_under_no_grad_still_gets_a_gradient). It never caches activations, so
        # a norm's output is saved once for each matmul that reads it.
        with torch.enable_grad():  # a later forward with gradients may use the cached cast
            _casts[tensor] = _to(tensor, dtype)
    return _casts[tensor]
