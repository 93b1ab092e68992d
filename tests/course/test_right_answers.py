"""Right answers that are written differently from the solution pass, though memory is measured.

Each row: the exercise, how the answer differs, and its edits of the solution.
"""

import pytest

from memlab.course.days import exercise_of
from memlab.course.exercises import OK, judge
from memlab.course.solutions import body, edited

TWO_FUNCTIONS = """
class EnterRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient)

class LeaveRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient

return LeaveRank.apply(mlp(EnterRank.apply(x), up, down))
"""
ONE_FUNCTION = """
class WholeMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, down):
        rows = x @ up.T
        ctx.save_for_backward(x, up, down, rows)
        return all_reduce(F.gelu(rows) @ down.T)

    @staticmethod
    def backward(ctx, gradient):
        x, up, down, rows = ctx.saved_tensors
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            active = F.gelu(rows)
        of_down = gradient.T @ active.detach()
        (of_rows,) = torch.autograd.grad(active, rows, gradient @ down)
        return all_reduce(of_rows @ up), of_rows.T @ x, of_down

return WholeMLP.apply(x, up, down)
"""
PLAIN_SCORES = """
n = len(q)
def block(k, v, causal):
    scores = q @ k.T / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
out, lse = block(k, v, True)
for step in range(1, peer.ranks):
    peer.send(torch.stack((k, v)))
    both = peer.receive()
    k, v = both[0], both[1]
    if step <= peer.rank:
        out_b, lse_b = block(k, v, False)
        new = torch.logaddexp(lse, lse_b)
        out = out * (lse - new).exp().unsqueeze(-1) + out_b * (lse_b - new).exp().unsqueeze(-1)
        lse = new
return out, lse
"""
COPIES_OF_A_BLOCK = """
current = torch.stack((k, v))
out, lse = attend(q, k, v, 0)
for step in range(1, peer.ranks):
    peer.send(current)
    arrived = peer.receive()
    current = arrived.clone()
    if step <= peer.rank:
        keys, values = current.unbind()
        out_b, lse_b = attend(q, keys.clone(), values.clone(), step * len(q))
        share = torch.sigmoid(lse - lse_b)[:, None]
        lse = torch.logaddexp(lse, lse_b)
        out = share * out + (1 - share) * out_b
return out, lse
"""
TILE_BY_TILE = """
n, k = x.shape
codes = torch.empty(n, k, dtype=dtype)
scales = torch.empty(-(-n // rows), -(-k // columns))
for i in range(scales.shape[0]):
    for j in range(scales.shape[1]):
        part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        codes[part], scales[i, j] = cast(x[part], dtype)
return codes, scales
"""
POOLED = """
n, k = x.shape
padded = nn.functional.pad(x.abs().float(), (0, -k % columns, 0, -n % rows))
amax = nn.functional.max_pool2d(padded[None, None], (rows, columns), (rows, columns))[0, 0]
scales = amax.clamp(min=SMALLEST) / torch.finfo(dtype).max
each = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
return (x.float() / each).to(dtype), scales
"""
ADDMM = """
a, b, c = COEFFICIENTS
is_tall = matrix.size(0) > matrix.size(1)
x = (matrix.mT if is_tall else matrix).clone()
x /= max(x.norm().item(), 1e-7)
for _ in range(steps):
    gram = x @ x.mT
    x = torch.addmm(x, b * gram + c * (gram @ gram), x, beta=a)
return x.mT.contiguous() if is_tall else x
"""
SMALLER_GRAM = """
a, b, c = COEFFICIENTS
x = matrix / torch.linalg.matrix_norm(matrix).clamp(1e-7)
for _ in range(steps):
    if x.shape[0] <= x.shape[1]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    else:
        gram = x.T @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
return x
"""
LERP = """
if "m" not in state:
    state["m"] = torch.zeros_like(gradient)
state["m"].lerp_(gradient, 1 - momentum)
ahead = gradient.lerp(state["m"], momentum)
step = newton_schulz(ahead.to(dtype)).to(weight.dtype)
weight.mul_(1 - lr * weight_decay)
weight.add_(step, alpha=-lr * max(1, weight.shape[0] / weight.shape[1]) ** 0.5)
"""
COPIED = """
old = state.get("momentum")
new = (1 - momentum) * gradient if old is None else old * momentum + gradient * (1 - momentum)
state["momentum"] = new.clone()
step = newton_schulz((gradient * (1 - momentum) + new * momentum).to(dtype=dtype)).to(weight)
rows, columns = weight.shape
if rows > columns:
    step = step * (rows / columns) ** 0.5
weight.copy_(weight * (1 - lr * weight_decay) - lr * step)
"""
MOMENTS_IN_PLACE = """
beta1, beta2 = betas
if weight.size(0) >= weight.size(1):
    weight, gradient = weight.T, gradient.T
t = state["t"] = state.get("t", 0) + 1
if (t - 1) % gap == 0:
    state["P"] = torch.linalg.svd(gradient, full_matrices=False).U[:, :rank].clone()
low = state["P"].T @ gradient
if "m" not in state:
    state["m"], state["v"] = torch.zeros_like(low), torch.zeros_like(low)
state["m"].mul_(beta1).add_(low, alpha=1 - beta1)
state["v"].mul_(beta2).addcmul_(low, low, value=1 - beta2)
step = (state["m"] / (1 - beta1**t)) / ((state["v"] / (1 - beta2**t)).sqrt() + eps)
weight.sub_(state["P"] @ step, alpha=lr * scale)
"""
NAIVE_ATTENTION = """
outputs = []
for start, end in pairwise(boundaries.tolist()):
    scores = q[:, :, start:end] @ k[:, :, start:end].mT / q.shape[-1] ** 0.5
    hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    outputs.append(scores.softmax(-1) @ v[:, :, start:end])
return torch.cat(outputs, 2)
"""
INTO_ONE_TENSOR = """
out = torch.empty_like(q)
for start, end in pairwise(boundaries.tolist()):
    parts = (x[:, :, start:end].contiguous() for x in (q, k, v))
    out[:, :, start:end] = F.scaled_dot_product_attention(*parts, is_causal=True)
return out
"""
SPLIT = """
parts = zip(*(x.split(boundaries.diff().tolist(), 2) for x in (q, k, v)))
return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)
"""
_SVD = "u, _, _ = torch.linalg.svd(gradient, full_matrices=False)"
_DIVISION = "weight.grad /= max(count, 1)"
_LOOP = f"""for weight in model.parameters():
            if weight.grad is not None:
                {_DIVISION}
"""
_SCALED = "return *(g.mul_(upstream / ctx.count) for g in ctx.saved_tensors), None, None"

RIGHT = (
    ("3.1", "divided one by one", (_DIVISION, "weight.grad = weight.grad / max(count, 1)")),
    (
        "3.1",
        "divided by foreach",
        (
            _LOOP,
            "torch._foreach_div_(\n            [w.grad for w in model.parameters() if "
            "w.grad is not None], max(count, 1)\n        )\n",
        ),
    ),
    (
        "3.1",
        "count first",
        (
            "total, count = 0.0, 0",
            "total, count = 0.0, sum(int((t != MASKED).sum()) for _, t in window)",
        ),
        ("loss.backward()", "(loss / max(count, 1)).backward()"),
        ("            count += int((targets != MASKED).sum())\n", ""),
        (_DIVISION, "pass"),
    ),
    (
        "3.3",
        "kaiming",
        (
            "torch.randn_like(weight[:1].expand(rank, -1)) / rank)",
            "weight.new_empty(rank, frozen.in_features))\n"
            "        nn.init.kaiming_uniform_(self.down, a=5**0.5)",
        ),
    ),
    (
        "3.3",
        "functional",
        ("self.frozen(x) +", "F.linear(x, self.frozen.weight, self.frozen.bias) +"),
    ),
    (
        "3.3",
        "scale as a buffer",
        (
            "self.scale = alpha / rank",
            "self.register_buffer('scale', torch.tensor(alpha / rank).to(frozen.weight))",
        ),
    ),
    (
        "11.3",
        "cast in backward",
        (
            _SCALED,
            "h, w = ctx.saved_tensors\n        by = upstream / ctx.count\n"
            "        return h.mul_(by).to(ctx.dtype), w.mul_(by).to(ctx.dtype), None, None",
        ),
        ("ctx.save_for", "ctx.dtype = hidden.dtype\n        ctx.save_for"),
    ),
    (
        "11.3",
        "divided in forward",
        (
            "ctx.save_for",
            "of_hidden /= ctx.count\n        of_weight /= ctx.count\n        ctx.save_for",
        ),
        ("g.mul_(upstream / ctx.count)", "g.mul_(upstream)"),
    ),
    (
        "17.4",
        "save_for_backward",
        ("ctx.weight = codes, absmax", "ctx.save_for_backward(codes, absmax)"),
        ("*ctx.weight", "*ctx.saved_tensors"),
    ),
    (
        "17.4",
        "float32 matmul",
        (
            "x @ decode(codes, absmax).view(out_features, -1).to(x.dtype).T",
            "(x.float() @ decode(codes, absmax).view(out_features, -1).T).to(x.dtype)",
        ),
    ),
    ("18.1", "a view", ("return in_forward(x)", "return in_forward(x).view_as(x)")),
    ("18.1", "two functions", body("parallel_mlp", TWO_FUNCTIONS)),
    ("18.1", "one function", body("parallel_mlp", ONE_FUNCTION)),
    (
        "18.3",
        "attributes",
        ("ctx.save_for_backward(x, weight)", "ctx.own = x, weight"),
        ("ctx.saved_tensors", "ctx.own"),
    ),
    (
        "18.3",
        "the gathered tokens have a name",
        (
            "return all_gather(x) @ weight.T",
            "whole = all_gather(x)\n        return F.linear(whole, weight)",
        ),
    ),
    (
        "18.3",
        "reduce-scatter first",
        (
            "weight_grad = gradient.T @ all_gather(x)",
            "of_x = reduce_scatter(torch.mm(gradient, weight))\n"
            "        weight_grad = torch.einsum('to,ti->oi', gradient, all_gather(x))",
        ),
        ("return reduce_scatter(gradient @ weight)", "return of_x"),
    ),
    ("18.5", "plain scores of a block", body("ring_attention", PLAIN_SCORES)),
    ("18.5", "copies of a block", body("ring_attention", COPIES_OF_A_BLOCK)),
    ("19.2", "tile by tile", body("cast_tiles", TILE_BY_TILE)),
    ("19.2", "pooled", body("cast_tiles", POOLED)),
    ("19.2", "divided", ("tiles.float() * (largest / amax)", "tiles.float() / (amax / largest)")),
    (
        "19.3",
        "attributes",
        ("ctx.save_for_backward(*x8, weight)", "ctx.kept = *x8, weight"),
        ("ctx.saved_tensors", "ctx.kept"),
    ),
    ("19.3", "cast after", body("matmul", "return FP8Matmul.apply(x, weight).to(x.dtype)")),
    (
        "19.3",
        "x's dtype",
        ("ctx.save_for", "ctx.dtype = x.dtype\n        ctx.save_for"),
        ("cast(weight, E4M3), gradient.dtype)", "cast(weight, E4M3), ctx.dtype)"),
    ),
    ("20.1", "addmm", body("newton_schulz", ADDMM)),
    ("20.1", "the smaller square, without transposing", body("newton_schulz", SMALLER_GRAM)),
    (
        "20.1",
        "by two matmuls with x",
        (
            "x = a * x + (b * gram + c * gram @ gram) @ x",
            "cubed = gram @ x\n        x = a * x + b * cubed + c * (gram @ cubed)",
        ),
    ),
    ("20.2", "lerp", body("muon_", LERP)),
    ("20.2", "copied", body("muon_", COPIED)),
    ("20.2", "setdefault", ('state.get("m", torch', 'state.setdefault("m", torch')),
    ("20.3", "eigh", (_SVD, "u = torch.linalg.eigh(gradient @ gradient.T)[1].flip(1)")),
    ("20.3", "torch.svd", (_SVD, "u = torch.svd(gradient)[0]")),
    ("20.3", "moments in place", body("galore_", MOMENTS_IN_PLACE)),
    ("21.3", "naive attention", body("attend_within", NAIVE_ATTENTION)),
    ("21.3", "into one tensor", body("attend_within", INTO_ONE_TENSOR)),
    ("21.3", "split", body("attend_within", SPLIT)),
)


@pytest.mark.parametrize(
    ("id_", "edits"), [pytest.param(row[0], row[2:], id=f"{row[0]} {row[1]}") for row in RIGHT]
)
def test_a_right_answer_written_differently_passes(id_, edits):
    verdict = judge(exercise_of(id_), edited(id_, *edits))
    assert verdict.status == OK, verdict
