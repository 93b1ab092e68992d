"""Kernels as Liger-Kernel's benchmarks run them (benchmarks/evidence/liger.json).

Each is one operator with torch's own code or with Liger's, forward and backward in a loop. A row is
the peak of torch.cuda.max_memory_allocated in one process that ran many sizes one after the other.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

Row = Mapping[str, Any]
Setup = tuple[Callable[[], Any], Callable[[Any], object]]  # forward, and backward of its result
KERNELS: dict[str, Callable[..., Setup]] = {}


def build(row: Row) -> tuple[Callable[[], object], None, None]:
    """Return (step, None, None) of a row, whose `mode` says what the loop repeats."""
    sizes = {name: _dtype(value) for name, value in row["sizes"].items()}
    with torch.device("cuda"):
        if row["kernel"] in WITH_MATMULS:
            _fill_workspaces(torch.randn(2, 2, dtype=torch.bfloat16, requires_grad=True))
        forward, backward = KERNELS[row["kernel"]](row["provider"], **sizes)
        if row["mode"] == "forward":
            return forward, None, None
        if row["mode"] == "full":
            return lambda: backward(forward()), None, None
        out = forward()
        gradient = torch.randn_like(out)
        return lambda: out.backward(gradient, retain_graph=True), None, None


# The times of both providers were measured before, in the same process: by then cuBLAS had a
# workspace in the thread of forward and in that of backward.
WITH_MATMULS = ("fused_linear_cross_entropy", "geglu", "swiglu")


def _fill_workspaces(x: Tensor) -> None:
    (x @ x).sum().backward()


def _dtype(value: Any) -> Any:
    return getattr(torch, value.removeprefix("torch.")) if "torch." in str(value) else value


of_loss = partial(Tensor.backward, retain_graph=True)


def with_new(gradient: Callable[[Tensor], Tensor]) -> Callable[[Tensor], object]:
    return lambda out: out.backward(gradient(out), retain_graph=True)


def of_liger(module: str, name: str) -> Any:
    with torch.device("cpu"):  # a first import creates tensors of its own
        return getattr(import_module(f"liger_kernel.transformers.{module}"), name)


def kernel(builder: Callable[..., Setup]) -> Callable[..., Setup]:
    KERNELS[builder.__name__] = builder
    return builder


# ------------------------------------------------------------------ losses


@kernel
def cross_entropy(provider: str, B: int, T: int, V: int) -> Setup:
    liger = of_liger("cross_entropy", "LigerCrossEntropyLoss")()
    losses = {"liger": liger, "huggingface": nn.CrossEntropyLoss()}
    logits, targets = torch.randn(B * T, V, requires_grad=True), torch.randint(V, (B * T,))
    return lambda: losses[provider](logits, targets), Tensor.backward


@kernel
def fused_linear_cross_entropy(provider: str, BT: int, H: int, V: int, dtype: torch.dtype) -> Setup:
    loss = of_liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss")()
    heads = {}
    for name in ("liger", "huggingface"):  # both are on the GPU
        heads[name] = nn.Linear(H, V, bias=False, dtype=dtype)
    x, targets = torch.randn(BT, H, dtype=dtype, requires_grad=True), torch.randint(V, (BT,))
    if provider == "liger":
        return lambda: loss(heads["liger"].weight, x, targets), Tensor.backward
    return lambda: F.cross_entropy(heads["huggingface"](x), targets), Tensor.backward


def _distributions(rows: int, V: int, first: Callable[..., Tensor], second: Any) -> Any:
    x = torch.randn(rows, V, requires_grad=True)
    return first(x, dim=-1), second(torch.randn(rows, V), dim=-1)


@kernel
def kl_div(provider: str, B: int, T: int, V: int) -> Setup:
    losses = {"liger": of_liger("kl_div", "LigerKLDIVLoss")(reduction="batchmean")}
    losses["torch"] = nn.KLDivLoss(reduction="batchmean")
    pair = _distributions(B * T, V, F.log_softmax, F.softmax)
    return lambda: losses[provider](*pair), of_loss


@kernel
def jsd(provider: str, B: int, T: int, V: int) -> Setup:
    losses = {"liger": of_liger("jsd", "LigerJSD")(), "torch": _jensen_shannon}
    pair = _distributions(B * T, V, F.log_softmax, F.log_softmax)
    return lambda: losses[provider](*pair), of_loss


def _jensen_shannon(log_q: Tensor, log_p: Tensor) -> Tensor:
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
    divergence = nn.KLDivLoss(reduction="none", log_target=True)
    m = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    p_side, q_side = divergence(torch.log(m), log_p), divergence(torch.log(m), log_q)
    return (torch.lerp(q_side, p_side, 0.5).sum(-1)).sum() / log_q.shape[0]


@kernel
def tvd(provider: str, B: int, T: int, V: int) -> Setup:
    liger = of_liger("tvd", "LigerTVDLoss")(reduction="batchmean")
    losses = {"liger": liger, "torch": _total_variation}
    pair = _distributions(B * T, V, F.softmax, F.softmax)
    return lambda: losses[provider](*pair), of_loss


def _total_variation(p: Tensor, q: Tensor) -> Tensor:
    return torch.sum(torch.abs(p - q) / 2.0) / p.size(0)


# ------------------------------------------------------------------ layers


@kernel
def geglu(
    provider: str, bsz: int, T: int, hidden_size: int, dtype: torch.dtype, **shape: Any
) -> Setup:
    config = LlamaConfig(hidden_size=hidden_size, **shape)
    kind = modeling_llama.LlamaMLP
    if provider == "liger":
        is_silu = config.hidden_act == "silu"
        kind = (
            of_liger("swiglu", "LigerSwiGLUMLP") if is_silu else of_liger("geglu", "LigerGEGLUMLP")
        )
    x = torch.randn(bsz, T, hidden_size, dtype=dtype, requires_grad=True)
    layer = kind(config=config).to(dtype)
    return lambda: layer(x), with_new(torch.randn_like)


@kernel
def swiglu(provider: str, B: int, **sizes: Any) -> Setup:
    return geglu(provider, B, **sizes)


def _layers(provider: str, liger: nn.Module, own: nn.Module, x: Any, dtype: torch.dtype) -> Setup:
    """Both layers are on the GPU, one of them is used."""
    given = torch.randn(*x, dtype=dtype)
    gradient = torch.randn_like(given)
    given.requires_grad_(True)
    used = liger if provider == "liger" else own
    kept = liger, own
    return lambda: used(given), lambda out: (out.backward(gradient, retain_graph=True), kept)


@kernel
def rms_norm(provider: str, M: int, H: int, dtype: torch.dtype, eps: float) -> Setup:
    liger = of_liger("rms_norm", "LigerRMSNorm")(hidden_size=H, eps=eps)
    return _layers(provider, liger, modeling_llama.LlamaRMSNorm(H, eps=eps), (M, H), dtype)


@kernel
def layer_norm(provider: str, M: int, N: int, dtype: torch.dtype, eps: float) -> Setup:
    liger = of_liger("layer_norm", "LigerLayerNorm")(hidden_size=N)
    return _layers(provider, liger, nn.LayerNorm(N, eps=eps), (M, N), dtype)


@kernel
def group_norm(provider: str, M: int, H: int, C: int, **sizes: Any) -> Setup:
    groups, eps = C // sizes["channels_per_group"], sizes["eps"]
    liger = of_liger("group_norm", "LigerGroupNorm")(C, groups, eps=eps)
    own = nn.GroupNorm(groups, C, eps=eps)
    return _layers(provider, liger, own, (M, C, H), sizes["dtype"])


@kernel
def rope(provider: str, H: int, T: int, num_q_heads: int, num_kv_heads: int, dtype: Any) -> Setup:
    D, rotate = H // num_q_heads, {"liger": of_liger("rope", "liger_rotary_pos_emb")}
    shapes = [(1, T, heads, D) for heads in (num_q_heads, num_kv_heads)]
    given = [torch.randn(s, requires_grad=True, dtype=dtype).transpose(1, 2) for s in shapes]
    gradients = [torch.randn_like(each) for each in given]
    frequencies, positions = torch.randn(1, D // 2), torch.arange(T)
    angles = (frequencies.T @ positions[None].float()).T.repeat(1, 2)[None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    del angles

    def forward() -> tuple[Tensor, Tensor]:
        return rotate.get(provider, modeling_llama.apply_rotary_pos_emb)(*given, cos, sin)

    def backward(out: tuple[Tensor, Tensor]) -> object:
        kept = frequencies, positions
        return torch.autograd.grad(out, given, gradients, retain_graph=True), kept

    return forward, backward
