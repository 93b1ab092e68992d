"""Snapshots in torch's default mode, stacks="all": C++ and Python frames are mixed."""

import failing_scripts
import pytest
from cuda_recorder import record
from default_stacks import ALLOCATOR, START, as_dicts, backward, forward, operators
from torch.cuda import _memory_viz

from memlab.explain import explain_source, summary
from memlab.explain.answer import answer
from memlab.explain.categories import split_by_counts
from memlab.explain.frames import (
    in_backward,
    in_workspace,
    model_line,
    operator,
    stack_of,
    user_line,
)
from memlab.explain.histories import Block, history_of
from memlab.explain.reading import of_data
from memlab.explain.report_html import page_data

MIB = 2**20
SCRIPT, SITE = "/home/me/train.py", "/opt/env/lib/python3.10/site-packages"
LLAMA = f"{SITE}/transformers/models/llama/modeling_llama.py"
LORA = (
    (f"{SITE}/torch/nn/modules/linear.py", 114, "forward"),
    (f"{SITE}/torch/nn/modules/module.py", 1527, "_call_impl"),
    (f"{SITE}/peft/tuners/lora/bnb.py", 290, "forward"),
    (f"{SITE}/accelerate/hooks.py", 166, "new_forward"),
    (LLAMA, 617, "forward"),
    (f"{SITE}/peft/peft_model.py", 1430, "forward"),
    ("/tmp/ipykernel_114/3105878423.py", 21, "<module>"),
    (f"{SITE}/IPython/core/interactiveshell.py", 3577, "run_code"),
    ("/opt/env/lib/python3.10/runpy.py", 86, "_run_code"),
)


def test_a_stack_keeps_every_python_frame_and_of_cpp_the_operators():
    stack = stack_of(forward(*LORA, ops=("mm", "matmul", "linear")))
    assert [str(frame) for frame in stack[:3]] == ["aten::mm", "aten::matmul", "aten::linear"]
    assert [tuple(frame) for frame in stack[3:]] == list(LORA)
    assert operator(stack) == "aten::linear"


def test_the_users_line_is_theirs_and_the_models_line_is_no_wrappers():
    stack = stack_of(forward(*LORA, ops=("mm", "linear")))
    assert str(user_line(stack)) == "ipykernel_114/3105878423.py:21 <module>"
    assert str(model_line(stack)) == "llama/modeling_llama.py:617 forward"


def test_code_that_inductor_wrote_is_not_the_users():
    generated = ("/tmp/torchinductor_me/z3/cz3vcpg.py", 1229, "call")
    stack = stack_of(forward(generated, (SCRIPT, 20, "forward"), ops=("empty_strided",)))
    assert user_line(stack).filename == SCRIPT
    assert model_line(stack) is None


def test_backward_keeps_its_node_and_the_thread_has_no_line():
    stack = stack_of(backward("DivBackward0", "mul_Tensor"))
    assert list(map(str, stack)) == [
        "aten::mul_Tensor",
        "autograd::DivBackward0",
        "autograd::Engine",
    ]
    assert in_backward(stack)
    assert operator(stack) == "DivBackward0"
    assert user_line(stack) is None


def test_a_workspace_is_recognized_by_who_asks_for_it():
    asks = ("", 0, "at::cuda::getNewWorkspace()")
    assert in_workspace(stack_of(as_dicts(*ALLOCATOR, asks, *operators("mm"), *START)))


# ------------------------------------------------------------------ whole snapshots


class Trace:
    """A snapshot, written entry by entry. Each block has an address of its own."""

    def __init__(self) -> None:
        self.entries: list[dict] = []

    def alloc(self, size: int, frames: list[dict]) -> dict:
        address = 2**40 + 2**36 * len(self.entries)
        entry = {"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": frames}
        self.entries.append(entry)
        return entry

    def free(self, alloc: dict) -> None:
        for action in ("free_requested", "free_completed"):
            self.entries.append({**alloc, "action": action, "frames": []})

    def explained(self):
        return explain_source(of_data({"segments": [], "device_traces": [self.entries]}))


def written_out_attention(batch: int, tokens: int) -> Trace:
    """Attention with a softmax of the user's own, and half of its backward, in float32."""
    made, output, scores = Trace(), batch * tokens * 64, 4 * batch * tokens**2
    softmax, attention = (SCRIPT, 7, "custom_softmax"), (SCRIPT, 12, "custom_attention")

    def add(size: int, op: str, *inner: tuple) -> dict:
        return made.alloc(size, forward(*inner, attention, (SCRIPT, 43, "main"), ops=("bmm", op)))

    made.alloc(output, forward((SCRIPT, 35, "main"), ops=("randn",)))
    products = add(scores, "einsum")
    kept = [add(scores, "exp", softmax), add(4 * batch * tokens, "sum_dim_IntList", softmax)]
    kept.append(add(scores, "div_Tensor", softmax))
    made.free(products)
    kept.append(add(output, "einsum"))
    calls = ((f"{SITE}/torch/_tensor.py", 626, "backward"), (SCRIPT, 47, "main"))
    made.alloc(4, forward(*calls, ops=("ones_like",)))
    for op in ("div_Tensor", "neg", "mul_Tensor"):
        kept.append(made.alloc(scores, backward("DivBackward0", op)))
    for block in kept:
        made.free(block)
    return made


def test_attention_scores_and_their_gradients_are_found_with_their_tokens():
    found = written_out_attention(batch=8, tokens=1024).explained()
    assert found.cause == "sequence"
    assert found.situation.score_bytes == 5 * 8 * 1024**2 * 4
    assert found.situation.score_tokens == 1024
    assert "each block is batch × heads × 1,024² scores" in found.findings[0].evidence


def test_a_gather_of_a_graph_network_is_no_attention_score():
    made, layer = Trace(), (SCRIPT, 174, "update_nodes")
    outer = (SCRIPT, 231, "forward")
    for _ in range(3):
        made.alloc(4096, forward((SCRIPT, 153, "update"), outer, ops=("mul_Tensor",)))
        for op in ("index_Tensor", "relu"):
            made.alloc(512 * MIB, forward(layer, outer, ops=(op,)))
    found = made.explained()
    assert not found.situation.score_blocks
    assert found.cause == "batch"


def test_the_folder_of_a_project_on_attention_makes_no_scores():
    made, script = Trace(), ("/home/me/SQAttn/compression/entrance.py", 89, "compress_model")
    mlp = [(f"{SITE}/transformers/models/qwen2/modeling_qwen2.py", 54, "forward"), script]
    for op in ("linear", "silu", "mul_Tensor"):  # without gradients, each is freed soon
        made.alloc(1024 * MIB, forward(*mlp, ops=(op,)))
    for entry in made.entries[:]:
        made.free(entry)
    assert not made.explained().situation.score_blocks


def test_a_peak_in_backward_is_shown_at_the_line_that_called_it():
    found = written_out_attention(batch=8, tokens=1024).explained()
    assert list(summary.places(found)) == [
        "at me/train.py:47 main",
        "in DivBackward0",
        "most is held by me/train.py:7 custom_softmax: 64.03 MiB",
    ]


def test_a_module_on_this_machine_is_named_by_its_class(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("class Outer:\n    class Mlp:\n        def forward(self, x):\n            x\n")
    made = Trace()
    made.alloc(MIB, forward((str(file), 4, "forward"), ops=("linear",)))
    place, *_ = summary.places(made.explained())
    assert place.endswith("/model.py:4 Mlp.forward")


def test_the_answer_to_a_snapshot_fits_a_screen_and_has_code():
    lines = answer(written_out_attention(batch=8, tokens=1024).explained()).splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 80
    assert "  → attention without stored scores: saves 160.00 MiB of what is allocated" in lines
    assert "      y = F.scaled_dot_product_attention(q, k, v, is_causal=True)" in lines


def test_the_page_lists_a_stack_from_the_operator_to_where_the_users_code_begins():
    made = Trace()
    made.alloc(MIB, forward(*LORA, ops=("mm", "linear")))
    page = page_data(made.explained(), "snapshot.pickle")
    [[first, *frames]] = page["history"]["stacks"]
    assert first == "ipykernel_114/3105878423.py:21 <module> in llama/modeling_llama.py:617 forward"
    assert frames[:3] == ["aten::mm", "aten::linear", "modules/linear.py:114 forward"]
    assert frames[-1] == "ipykernel_114/3105878423.py:21 <module>"


def test_the_page_knows_which_ranges_are_parts_of_an_expandable_segment():
    snapshot, _ = record(failing_scripts.large_batch_gpt, expandable_segments=True)
    page = page_data(explain_source(of_data(snapshot)), "snapshot.pickle")
    assert {expandable for *_, expandable in page["history"]["spans"]} == {1}


# ------------------------------------------------------------------ blocks older than the record


@pytest.mark.parametrize(
    ("counts", "gradients", "names"),
    [  # {bytes: blocks}, as in the public snapshots named above and Wedsonlin/assignment2-systems
        ({8192: 45, 131072: 66, 2097152: 44, 5767168: 66, 262144000: 2}, {}, ("parameters",)),
        (
            {4096: 147, 262144: 1, 4194304: 288, 16777216: 216, 40960000: 6},
            {},
            ("parameters", "optimizer_state", "optimizer_state"),
        ),
        (  # two inputs are as large as a norm's weight
            {4096: 149, 4194304: 288, 16777216: 216, 40960000: 6},
            {4096: 49, 4194304: 96, 16777216: 72, 40960000: 2},
            ("parameters", "optimizer_state", "optimizer_state"),
        ),
        ({1728: 3, 4096: 6, 8192: 6, 20352000: 1}, {}, ("parameters",)),
    ],
)
def test_counts_of_equal_sizes_tell_weights_from_optimizer_state(counts, gradients, names):
    blocks = [
        Block(512 * number, size, 0, 0, ())
        for number, size in enumerate(size for size, n in counts.items() for _ in range(n))
    ]
    found = split_by_counts(blocks, set(), gradients)
    of_largest = [found[b].name for b in blocks if b.bytes == max(counts)]
    assert of_largest == [name for name in names for _ in range(len(of_largest) // len(names))]


def test_an_old_block_as_large_as_cublas_workspace_is_one():
    old = {"address": 2**40, "size": 8_519_680, "requested_size": 8_519_680}
    segment = {"address": 2**40, "total_size": 20 * MIB, "device": 0}
    segment["blocks"] = [{**old, "state": "active_allocated"}]
    found = explain_source(of_data({"segments": [segment], "device_traces": []}))
    assert found.situation.by_category == {"workspaces": 8_519_680}


# ------------------------------------------------------------------ torch's viewer


@pytest.mark.few(1)
@pytest.mark.parametrize("stacks", ["python", "all"])
@pytest.mark.parametrize("name", ["large_batch_gpt", "losses_kept", "fragmentation"])
def test_bytes_and_peak_are_those_of_torchs_viewer(name, stacks):
    snapshot, _ = record(getattr(failing_scripts, name), stacks=stacks)
    history = history_of(snapshot)
    lines = _memory_viz.memory(snapshot, format_flamegraph=str.splitlines)
    used = [line for line in lines if ";active_allocated;" in line and "<gaps>" not in line]
    sizes = [int(line.rpartition(" ")[2]) for line in used]
    assert sorted(sizes) == sorted(block.bytes for block in history.alive(history.length))
    shown = [*zip(history.allocated[1:], bytes_shown(snapshot), strict=True)]
    assert max(history.allocated) == max(viewed for _, (_, viewed) in shown)
    assert all(size == viewed for size, (action, viewed) in shown if action != "free_requested")


def bytes_shown(snapshot) -> list[tuple[str, int]]:
    """(action, bytes after it) of each entry, from the end back, as MemoryViz.js draws them.

    It draws a block until its free is completed, which on one stream is the next entry.
    """
    blocks = [b for segment in snapshot["segments"] for b in segment["blocks"]]
    size = sum(b["requested_size"] for b in blocks if b["state"] == "active_allocated")
    found = []
    for entry in reversed(snapshot["device_traces"][0]):
        found.append((entry["action"], size))
        change = {"alloc": -entry["size"], "free_completed": entry["size"]}
        size += change.get(entry["action"], 0)
    return found[::-1]
