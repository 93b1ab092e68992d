"""What autocast casts on CUDA, on tensors for which torch would follow the CPU's list.

torch keeps one list of operators per device (ATen/autocast_mode.h). CUDA's computes
normalizations, softmax, powers, exponentials, logarithms, sums and losses in float32, and casts an
einsum's inputs before the einsum; the CPU's does none of that, and has 88 operators of its own.
Here each operator that only one of them names gets CUDA's rule under the CPU's dispatch key.

    float32        its inputs are cast up
    float32 dtype  its result is asked for in float32, unless the caller named a dtype
    lower          its inputs are cast down; a weight's cast is cached until autocast ends
    promote        its inputs are cast to the widest among them

The rule for lowering also replaces the CPU's own, so that all operators share one cache of casts,
as they do on CUDA.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.library import Library
from torch.utils.weak import WeakIdKeyDictionary

from memlab.internals.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    dispatch_get_all_op_names,
    has_kernel,
    tree_map_only,
)
from memlab.metering.frames import user_line

_words = str.split  # a list of names, as ATen/autocast_mode.h groups them

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
FLOAT32 = _words(
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
REFUSED = ("binary_cross_entropy",)

_KEY = DispatchKey.AutocastCPU
_casts = WeakIdKeyDictionary()  # weight: its cast, until autocast ends


def operator(name: str) -> Any:
    """The operator of a name in the lists: `pow.Scalar`, or `mm` for `mm.default`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let the CPU's autocast follow CUDA's list."""
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it is overridden
            for func, rule in _rules():
                library.impl(func, rule, "AutocastCPU", with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()
        _casts.clear()


def forget_casts(clear: Callable[[], None]) -> Callable[[], None]:
    """What `torch.clear_autocast_cache` does, and the same to the casts cached here."""

    def clear_both() -> None:
        _casts.clear()
        clear()

    return clear_both


def _rules() -> Iterator[tuple[Any, Callable[..., Any]]]:
    of_the_cpu_alone = _of_the_cpu_alone()  # before the rules below are the CPU's, too
    for name in LOWER:
        yield operator(name), _casting(operator(name), _lower)
    for name in PACKED:
        yield operator(name), _casting(operator(name), _lower_anew)
    for name in FLOAT32:
        yield operator(name), _casting(operator(name), _to_float32)
    for name in FLOAT32_DTYPE:
        yield operator(name), _asking_for_float32(operator(name), operator(name))
    for name, with_dtype in APPENDS_DTYPE.items():
        yield operator(name), _asking_for_float32(operator(name), operator(with_dtype))
    for name in PROMOTE:
        yield operator(name), _casting(operator(name), _promoted)
    for name in REFUSED:
        yield operator(name), _refused
    for name in of_the_cpu_alone:
        yield operator(name), _untouched(operator(name))


@functools.cache
def _of_the_cpu_alone() -> tuple[str, ...]:
    names = (n for n in dispatch_get_all_op_names() if n.startswith("aten::"))
    return tuple(
        name.removeprefix("aten::")
        for name in names
        if has_kernel(name, "AutocastCPU") and not has_kernel(name, "AutocastCUDA")
    )


# ------------------------------------------------------------------ the rules


def _casting(func: Any, cast: Callable[[list[torch.Tensor]], Callable[[Any], Any]]) -> Any:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
            tensors: list[torch.Tensor] = []
            tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
            args, kwargs = tree_map_only(torch.Tensor, cast(tensors), (args, kwargs))
            return func(*args, **kwargs)

    return run


def _asking_for_float32(func: Any, with_dtype: Any) -> Any:
    position = [argument.name for argument in with_dtype._schema.arguments].index("dtype")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
            is_given = kwargs.get("dtype") is not None or len(args) > position
            if is_given or not _is_eligible(args[0]):
                return func(*args, **kwargs)
            return with_dtype(*args, **{**kwargs, "dtype": torch.float32})

    return run


def _refused(keys: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{user_line()}: autocast refuses binary_cross_entropy on CUDA; take the logits instead, "
        f"with binary_cross_entropy_with_logits or BCEWithLogitsLoss"
    )


def _untouched(func: Any) -> Any:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return func.redispatch(keys.remove(_KEY), *args, **kwargs)

    return run


def _is_eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype or not _is_eligible(tensor):
        return tensor
    return torch.ops.aten.to.dtype(tensor, dtype)


def _to_float32(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(_to, dtype=torch.float32)


def _promoted(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    widest = torch.get_autocast_dtype("cpu")
    if any(_is_eligible(tensor) and tensor.dtype != widest for tensor in tensors):
        widest = torch.float32  # bfloat16 and float16 together are it, too
    return functools.partial(_to, dtype=widest)


def _lower(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    dtype = torch.get_autocast_dtype("cpu")

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return _cached(tensor, dtype) if _is_cacheable(tensor) else _to(tensor, dtype)

    return cast


def _lower_anew(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(_to, dtype=torch.get_autocast_dtype("cpu"))


def _is_cacheable(tensor: torch.Tensor) -> bool:
    """Whether torch caches the tensor's cast (`cached_cast` of ATen/autocast_mode.cpp): only a
    float32 weight's, and never in inference mode, whose tensors no graph could use afterwards.

    torch also leaves out tensors that a CUDA graph's pool caches; a prediction has no graphs.
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
        with torch.enable_grad():  # what no_grad() caches, a later forward pass may train
            _casts[tensor] = _to(tensor, dtype)
    return _casts[tensor]
