"""The registry: everything that memlab knows about each technique, one row each.

`memlab measure`, `train` and `plan`, the planner's formulas, docs/SAVINGS.md and COMPOSITIONS.md
read it. To add a technique, write its file, its test and its row here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import Any

from memlab.configs.block_size import BLOCK_SIZE
from memlab.internals.lazy import LazyModule
from memlab.train.technique import Code, MatrixStep, Technique

torch = LazyModule("torch")
attention = LazyModule("memlab.attention")
checkpointing = LazyModule("memlab.checkpointing")
losses = LazyModule("memlab.losses")
optim = LazyModule("memlab.optim")
plugs = LazyModule("memlab.train.plugs")
precision = LazyModule("memlab.precision")

# Slots: a step has one of each.
SCHEDULE = "recomputation schedule"
SAVED_TENSORS = "format of saved tensors"
ADAPTERS = "adapters"
AUTOCAST = "autocast"

# ------------------------------------------------------------------ reasons and formulas

FLOAT32 = 4  # bytes
ENCODED = 1 + FLOAT32 / BLOCK_SIZE  # bytes of an 8-bit element and its share of a scale

FLOAT16_MEETS_BFLOAT16 = (
    "adding a float16 and a bfloat16 tensor gives float32; use autocast, or float32 weights"
)
STEPPED_TOO_EARLY = (
    "weights are stepped before their gradients can be divided by the scale; use autocast, whose "
    "bfloat16 needs no scale"
)
GRADIENTS_LEAVE = (
    "gradients move to the disk during backward, before the scaler can divide them by the scale; "
    "use autocast, whose bfloat16 needs no scale"
)
NEIGHBORS_SHARE = "elements of a block share a scale, but the edge of a shard cuts through blocks"
WHOLE_MATRICES = "a step needs whole matrices, but a shard holds only part of one"
RANDOM_PER_SHARD = "stochastic rounding draws different random numbers for each shard"


def torch_code(*lines: str) -> Code:
    """The code of a technique that torch itself has."""
    return Code(lines, lines)


def quarter(hidden_size: int) -> int:
    """The rank that GaLore's paper uses for 350M, 1B and 7B weights."""
    return max(1, hidden_size // 4)


def newton_schulz_operations(short: int, long: int, steps: int = 5) -> int:
    """Two products with the long side and one of squares, in each step."""
    return steps * (2 * 2 * short * short * long + 2 * short**3)


def blockwise(bits: int) -> Callable[[int], int]:
    """Bytes of so many elements in `bits` bits each, with a float32 scale for each block."""
    return lambda elements: elements * bits // 8 + FLOAT32 * elements // BLOCK_SIZE


# ------------------------------------------------------------------ rows

TECHNIQUES: dict[str, Technique] = {
    "plain": Technique(
        "AdamW, fused attention, all activations kept", state_bytes=8, code=Code(())
    ),
    "checkpointing": Technique(
        "drops the activations of every block and recomputes them in backward",
        choice=("checkpointing", "checkpointing"),
        plugs={"change_model": lambda: plugs.scheduled(plugs.each_block)},
        slot=SCHEDULE,
        kept=lambda block: block.input,
        recomputed=1.0,
        costs="recomputes the forward pass of each checkpointed layer: about a third more time",
        code=Code(
            (
                "from functools import partial",
                "from memlab.checkpointing import checkpoint",
                "for layer in model.layers: layer.forward = partial(checkpoint, layer.forward)",
            ),
            (
                "model.gradient_checkpointing_enable()  # a transformers model; others:",
                "from torch.utils.checkpoint import checkpoint",
                "x = checkpoint(layer, x, use_reentrant=False)  # in the model's forward",
            ),
        ),
    ),
    "sqrt-checkpointing": Technique(
        "checkpoints segments of about √L of the L blocks",
        choice=("checkpointing", "sqrt-checkpointing"),
        plugs={"change_model": lambda: plugs.scheduled(checkpointing.sqrt_schedule)},
        slot=SCHEDULE,
        kept=lambda block: block.input,
        recomputed=1.0,
        costs="recomputes the forward pass: about a third more time",
        code=Code(
            (
                "from memlab.checkpointing import checkpoint_blocks, sqrt_schedule",
                "checkpoint_blocks(model, sqrt_schedule(len(model.blocks)))",
            ),
            (
                "from torch.utils.checkpoint import checkpoint_sequential",
                "x = checkpoint_sequential(model.layers, segments, x, use_reentrant=False)",
            ),
        ),
    ),
    "selective-checkpointing": Technique(
        "checkpoints every block, but keeps the outputs of its matmuls and attention",
        choice=("checkpointing", "selective-checkpointing"),
        whole_weights="recomputation must call the same operators, but ZeRO's third stage gathers "
        "weights in between; use checkpointing, or stage 2",
        plugs={"change_model": lambda: plugs.selectively_checkpointed(attention.flash_attention)},
        slot=SCHEDULE,
        exclusive_with={
            "streamed-layers": "recomputation must call the same operators, but a streamed block "
            "fetches its weights only once; use checkpointing"
        },
        kept=lambda block: block.input + block.matmuls,
        recomputed=0.05,
        costs="recomputes norms, rotary embeddings and activation functions: about 5 % more time",
        code=Code(
            (
                "from functools import partial",
                "from memlab.checkpointing import ATTENTION, MATMULS, selective",
                "keep = selective(MATMULS | ATTENTION)",
                "for layer in model.layers: layer.forward = partial(keep, layer.forward)",
            ),
            (
                "from functools import partial",
                "from torch.utils.checkpoint import checkpoint",
                "from torch.utils.checkpoint import create_selective_checkpoint_contexts",
                "kept = [torch.ops.aten.mm.default]",
                "contexts = partial(create_selective_checkpoint_contexts, kept)",
                "for layer in model.layers: layer.forward = partial(",
                "    checkpoint, layer.forward, use_reentrant=False, context_fn=contexts",
                ")",
            ),
        ),
    ),
    "int8-activations": Technique(
        "keeps activations for backward in 8 bits",
        choice=("activation_bits", 8),
        plugs={"around_forward": lambda: plugs.compressing(8)},
        slot=SAVED_TENSORS,
        encoded=blockwise(8),
        costs="gradients are computed from rounded activations; encoding and decoding take time",
        code=Code(
            (
                "from memlab.compression import compressed_activations",
                "with compressed_activations(bits=8): loss = loss_of(model, inputs, targets)",
            ),
        ),
    ),
    "int4-activations": Technique(
        "keeps activations for backward in 4 bits, with stochastic rounding",
        choice=("activation_bits", 4),
        plugs={"around_forward": lambda: plugs.compressing(4)},
        slot=SAVED_TENSORS,
        encoded=blockwise(4),
        costs="noisier gradients than 8 bits; encoding and decoding take time",
        code=Code(
            (
                "from memlab.compression import compressed_activations",
                "with compressed_activations(bits=4): loss = loss_of(model, inputs, targets)",
            ),
        ),
    ),
    "autocast": Technique(
        "torch's autocast to bfloat16 in the forward pass",
        choice=("precision", "autocast"),
        plugs={"around_forward": lambda: lambda device: torch.autocast(device, torch.bfloat16)},
        slot=AUTOCAST,
        matmul_dtype="bfloat16",
        costs="matmuls round to bfloat16; a bfloat16 copy of each weight lives until its backward",
        code=torch_code(
            'with torch.autocast("cuda", torch.bfloat16):',
            "    loss = loss_of(model, inputs, targets)",
        ),
    ),
    "loss-scaling": Technique(
        "autocast to float16, with the loss scaled so that gradients stay in float16's range",
        plugs={
            "around_forward": lambda: lambda device: torch.autocast(device, torch.float16),
            "scaler": lambda: precision.LossScaler,
        },
        slot=AUTOCAST,
        exclusive_with={
            "bfloat16": FLOAT16_MEETS_BFLOAT16,
            "master-weights": FLOAT16_MEETS_BFLOAT16,
            "step-in-backward": STEPPED_TOO_EARLY,
            "streamed-layers": GRADIENTS_LEAVE,
        },
        matmul_dtype="float16",
        costs="a step whose gradients overflow is skipped",
        code=Code(
            (
                "from memlab.precision import LossScaler",
                "scaler = LossScaler()",
                'with torch.autocast("cuda", torch.float16):',
                "    loss = loss_of(model, inputs, targets)",
                "scaler.scale(loss).backward()",
                "scaler.step(optimizer)",
                "scaler.update()",
            ),
            (
                'scaler = torch.amp.GradScaler("cuda")',
                'with torch.autocast("cuda", torch.float16):',
                "    loss = loss_of(model, inputs, targets)",
                "scaler.scale(loss).backward()",
                "scaler.step(optimizer)",
                "scaler.update()",
            ),
        ),
    ),
    "fp8": Technique(
        "matmuls of the blocks in FP8, with a scale per tensor; weights keep their dtype",
        plugs={"change_model": lambda: plugs.blocks_to_fp8},
        exclusive_with={
            "selective-checkpointing": "recomputation must call the same operators, but whether "
            "layers share an FP8 copy depends on the tensors alive; use checkpointing",
            "qlora": "qlora decodes its frozen 4-bit matrices for matmuls of its own; use lora, "
            "whose frozen matmuls can run in FP8",
        },
        costs="matmuls round to 4 significant bits, and gradients to 3; casts take time, which "
        "faster FP8 matmuls (H100, RTX 4090) can make up for",
        code=Code(
            (
                "from memlab.precision import convert_to_fp8",
                "convert_to_fp8(model)",
            ),
            (
                "from torchao.float8 import convert_to_float8_training",
                "convert_to_float8_training(model)  # faster, but saves no activations",
            ),
        ),
    ),
    "bfloat16": Technique(
        "pure bfloat16 weights and AdamW state, with stochastic rounding",
        choice=("rounded_adamw", True),
        plugs={
            "change_model": lambda: plugs.to_bfloat16,
            "optimizer": lambda: plugs.of_all_weights(optim.RoundedAdamW),
        },
        cannot_shard=RANDOM_PER_SHARD,
        matmul_dtype="bfloat16",
        state_bytes=4,
        costs="weights and state keep 8 significant bits; the loss can end slightly higher",
        code=Code(
            (
                "from memlab.optim import RoundedAdamW",
                "model.to(torch.bfloat16)",
                "optimizer = RoundedAdamW(model.parameters())",
            ),
            (
                "from torchao.optim import _AdamW",
                "model.to(torch.bfloat16)",
                "optimizer = _AdamW(model.parameters(), bf16_stochastic_round=True)",
            ),
        ),
    ),
    "master-weights": Technique(
        "bfloat16 model, stepped through float32 copies of its weights",
        choice=("precision", "master-weights"),
        plugs={
            "change_model": lambda: plugs.to_bfloat16,
            "optimizer": lambda: plugs.master_weights_optimizer,
        },
        exclusive_with={
            "step-in-backward": "the float32 copies are stepped after backward; use bfloat16, "
            "which rounds stochastically and needs no copies",
            "offloaded-optimizer": "MasterWeights keeps its copies on the weights' device; use "
            "bfloat16, or OffloadedOptimizer(weights=True), which keeps copies in its store",
            "streamed-layers": "streamed layers already keep float32 copies of their weights in "
            "their store; use bfloat16",
        },
        matmul_dtype="bfloat16",
        state_bytes=4 + 8,
        costs="16 bytes per weight, as in float32; only activations and matmul inputs are halved",
        code=Code(
            (
                "from memlab.precision import MasterWeights",
                "model.to(torch.bfloat16)",
                "optimizer = MasterWeights(model.parameters(), optimizer=torch.optim.AdamW)",
            ),
            (
                "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
                "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
            ),
        ),
    ),
    "eager-attention": Technique(
        "attention with its score matrix in memory",
        choice=("attention", "eager-attention"),
        plugs={"attention": lambda: attention.attention_reference},
        costs="memory that grows with the square of the sequence length",
        code=Code(
            ("from memlab.attention import attention_reference",),
            ('model.set_attn_implementation("eager")  # transformers',),
        ),
    ),
    "flash-attention": Technique(
        "our tiled attention (torch's fused attention is tiled too)",
        choice=("attention", "flash-attention"),
        plugs={"attention": lambda: attention.flash_attention},
        costs="in plain PyTorch it is slower than torch's kernel",
        code=Code(
            (
                "from memlab.attention import flash_attention",
                "out = flash_attention(query, key, value, causal=True)",
            ),
            (
                "from torch.nn.functional import scaled_dot_product_attention",
                "out = scaled_dot_product_attention(query, key, value, is_causal=True)",
            ),
        ),
    ),
    "chunked-loss": Technique(
        "computes the loss in chunks, so the full logits never exist",
        choice=("chunked_loss", True),
        plugs={"loss": lambda: losses.chunked_cross_entropy},
        costs="a float32 gradient of the unembedding, so it saves memory from a few thousand "
        "tokens on",
        code=Code(
            (
                "from memlab.losses import chunked_cross_entropy",
                "loss = chunked_cross_entropy(hidden, model.lm_head.weight, targets)",
            ),
            (
                "from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss",
                "loss = LigerFusedLinearCrossEntropyLoss()(model.lm_head.weight, hidden, targets)",
            ),
        ),
    ),
    "foreach-adamw": Technique(
        "torch's foreach AdamW: all weights at once",
        plugs={"optimizer": lambda: plugs.of_all_weights(torch.optim.AdamW, foreach=True)},
        state_bytes=8,
        costs="temporaries as large as all the weights",
        code=torch_code("optimizer = torch.optim.AdamW(model.parameters(), foreach=True)"),
    ),
    "fused-adamw": Technique(
        "torch's fused AdamW: one kernel",
        plugs={"optimizer": lambda: plugs.of_all_weights(torch.optim.AdamW, fused=True)},
        state_bytes=8,
        costs="nothing, where torch has this kernel",
        code=torch_code("optimizer = torch.optim.AdamW(model.parameters(), fused=True)"),
    ),
    "accumulation": Technique(
        "one sequence at a time, with accumulated gradients",
        choice=("accumulation", True),
        plugs={"micro_batch": lambda: 1},
        exclusive_with={
            "step-in-backward": "a weight is stepped with the first sequence's gradient, before "
            "the other sequences' gradients can be added; leave one of the two out",
            "streamed-layers": "gradients move to the disk during backward, before the next "
            "sequence's gradients can be added; leave one of the two out",
        },
        costs="small matmuls use a GPU less efficiently",
        code=Code(
            (
                "from memlab.accumulation import accumulate, split",
                "parts = split((inputs, targets), 1)",
                "accumulate(parts, loss_and_tokens_of, model.parameters())",
            ),
            (
                "from transformers import TrainingArguments",
                "TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=8)",
            ),
        ),
    ),
    "lora": Technique(
        "frozen weights, with a trained adapter of rank 8 beside each matrix",
        choice=("lora", True),
        plugs={"change_model": lambda: plugs.add_lora_to_blocks},
        slot=ADAPTERS,
        costs="trains less: only a low-rank change of each matrix is learned",
        code=Code(
            (
                "from memlab.lora import add_lora",
                "add_lora(model, rank=8, where=lambda name: True)",
            ),
            (
                "from peft import LoraConfig, get_peft_model",
                'model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))',
            ),
        ),
    ),
    "qlora": Technique(
        "LoRA beside frozen 4-bit weights, which are decoded for each use",
        choice=("qlora", True),
        plugs={"change_model": lambda: plugs.add_qlora_to_blocks},
        slot=ADAPTERS,
        exclusive_with={
            "streamed-layers": "4-bit weights stay on the device; use lora, whose frozen weights "
            "are streamed",
        },
        costs="trains less: frozen weights are rounded to 4 bits, and decoded in forward and "
        "again in backward",
        code=Code(
            (
                "from memlab.qlora import add_qlora, prepare_for_low_bits",
                "add_qlora(model, rank=8)",
                "prepare_for_low_bits(model)  # optional: norms, embeddings and head in float32",
            ),
            (
                "from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training",
                "from transformers import AutoModelForCausalLM, BitsAndBytesConfig",
                'four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",',
                "    bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)",
                "model = AutoModelForCausalLM.from_pretrained(name, quantization_config=four)",
                "model = prepare_model_for_kbit_training(model)",
                'model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))',
            ),
        ),
    ),
    "adam8bit": Technique(
        "AdamW with 8-bit state",
        choice=("optimizer", "adam8bit"),
        plugs={"optimizer": lambda: plugs.stochastically_rounded(optim.Adam8bit)},
        cannot_shard=NEIGHBORS_SHARE,
        state_bytes=2 * ENCODED,
        step_copies=7.5,  # codes are found in a table
        costs="AdamW's steps, up to the rounding of its state to 8 bits",
        code=Code(
            (
                "from memlab.optim import Adam8bit",
                'keys = ("params", "lr", "betas", "eps", "weight_decay")',
                "groups = [{key: group[key] for key in keys} for group in optimizer.param_groups]",
                'optimizer = Adam8bit(groups, rounding="stochastic")',
            ),
            (
                "from bitsandbytes.optim import AdamW8bit",
                "optimizer = AdamW8bit(model.parameters())",
            ),
        ),
    ),
    "lion": Technique(
        "Lion: one momentum per weight, in float32",
        choice=("optimizer", "lion"),
        plugs={"optimizer": lambda: plugs.stochastically_rounded(optim.Lion)},
        state_bytes=4,
        costs="another optimizer: tune its learning rate again",
        code=Code(
            ("from memlab.optim import Lion", "optimizer = Lion(model.parameters(), lr=1e-4)"),
            ("from lion_pytorch import Lion", "optimizer = Lion(model.parameters(), lr=1e-4)"),
        ),
    ),
    "lion8bit": Technique(
        "Lion: one momentum per weight, in 8 bits",
        choice=("optimizer", "lion8bit"),
        plugs={"optimizer": lambda: plugs.stochastically_rounded(optim.Lion8bit)},
        cannot_shard=NEIGHBORS_SHARE,
        state_bytes=ENCODED,
        step_copies=6.5,
        costs="another optimizer: tune its learning rate again",
        code=Code(
            (
                "from memlab.optim import Lion8bit",
                "groups = [  # Lion needs a fifth of Adam's rate, and five times its weight decay",
                "    {",
                '        "params": group["params"],',
                '        "lr": group["lr"] / 5,',
                '        "weight_decay": group["weight_decay"] * 5,',
                "    }",
                "    for group in optimizer.param_groups",
                "]",
                'optimizer = Lion8bit(groups, rounding="stochastic")',
            ),
            (
                "from bitsandbytes.optim import Lion8bit",
                "optimizer = Lion8bit(model.parameters(), lr=1e-4)",
            ),
        ),
    ),
    "adam-mini": Technique(
        "AdamW with one second moment per row or head",
        choice=("optimizer", "adam-mini"),
        plugs={"optimizer": lambda: plugs.adam_mini},
        cannot_shard="elements of a row share a second moment, but the edge of a shard cuts "
        "through rows",
        state_bytes=4,
        costs="another optimizer, which partitions the weights by the model's structure",
        code=Code(
            (
                "from memlab.optim import AdamMini",
                "optimizer = AdamMini(model.named_parameters())",
            ),
            (
                "from adam_mini import Adam_mini",
                "optimizer = Adam_mini(model.named_parameters(), dim=hidden_size, n_heads=heads)",
            ),
        ),
    ),
    "muon": Technique(
        "Muon: one momentum per matrix, orthogonalized; AdamW for all other weights",
        choice=("optimizer", "muon"),
        plugs={"optimizer": lambda: plugs.of_matrices(optim.Muon)},
        cannot_shard=WHOLE_MATRICES,
        state_bytes=8,
        matrix_step=MatrixStep(
            state_bytes=lambda short, long, rank: FLOAT32 * short * long,
            temporary_bytes=lambda short, long, rank: 4 * short * long + 2 * short**2,
            operations=lambda short, long, rank: newton_schulz_operations(short, long),
        ),
        costs="another optimizer; fifteen matmuls per matrix in every step, about 5 · width / "
        "tokens times the model's own operations, so it needs large batches",
        code=Code(
            (
                "from memlab.optim import Muon, matrix_groups",
                "optimizer = Muon(matrix_groups(model), lr=1e-3)",
            ),
            (
                "matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]",
                "others = [p for p in model.parameters() if all(p is not m for m in matrices)]",
                'muon = torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw")',
                "adamw = torch.optim.AdamW(others, lr=1e-3)  # step both",
            ),
        ),
    ),
    "galore": Technique(
        "GaLore: AdamW's moments of gradients projected to a quarter of the width",
        choice=("optimizer", "galore"),
        plugs={"optimizer": lambda: plugs.of_matrices(optim.GaLore, rank=quarter)},
        cannot_shard=WHOLE_MATRICES,
        state_bytes=8,
        matrix_step=MatrixStep(
            state_bytes=lambda short, long, rank: FLOAT32 * rank * (short + 2 * long),
            temporary_bytes=lambda short, long, rank: 0,
            operations=lambda short, long, rank: 2 * 2 * short * long * rank,
            rank=quarter,
            operations_dtype="float32",
        ),
        costs="another optimizer; every 200 steps an SVD of each matrix's gradient, whose time "
        "and memory these figures leave out",
        code=Code(
            (
                "from memlab.optim import GaLore, matrix_groups",
                "optimizer = GaLore(matrix_groups(model), lr=1e-3, rank=1024)",
            ),
            (
                "from transformers import TrainingArguments",
                'TrainingArguments(optim="galore_adamw", optim_target_modules=["attn", "mlp"],',
                '    optim_args="rank=1024, update_proj_gap=200, scale=0.25")',
            ),
        ),
    ),
    "apollo-mini": Technique(
        "APOLLO-Mini: gradients with one scale per matrix, from AdamW's moments at rank 1",
        choice=("optimizer", "apollo-mini"),
        plugs={"optimizer": lambda: plugs.apollo_mini},
        cannot_shard=WHOLE_MATRICES,
        state_bytes=8,
        matrix_step=MatrixStep(
            state_bytes=lambda short, long, rank: 2 * FLOAT32 * long + FLOAT32,
            temporary_bytes=lambda short, long, rank: 0,
            operations=lambda short, long, rank: 2 * short * long,
            rank=lambda hidden_size: 1,
            operations_dtype="float32",
        ),
        costs="another optimizer: tune its learning rate again; no full-size momentum",
        code=Code(
            (
                "from memlab.optim import Apollo, matrix_groups",
                "from memlab.optim.apollo import MINI",
                "optimizer = Apollo(matrix_groups(model), lr=1e-2, **MINI)",
            ),
            (
                "from transformers import TrainingArguments",
                'TrainingArguments(optim="apollo_adamw", optim_target_modules=["attn", "mlp"],',
                '    optim_args="rank=1, proj=random, scale_type=tensor, scale=128")',
            ),
        ),
    ),
    "step-in-backward": Technique(
        "steps each weight as soon as its gradient is complete",
        choice=("step_in_backward", True),
        plugs={"stepping": lambda: optim.step_in_backward},
        costs="frees each gradient during backward: no accumulation, no loss scaling, no clipping "
        "by the global norm; pass optimizer.optimizer to a scheduler",
        code=Code(
            (
                "from memlab.optim import step_in_backward",
                "optimizer = step_in_backward(optimizer)",
            ),
            (
                "for parameter in model.parameters():",
                "    own = torch.optim.AdamW([parameter])",
                "    parameter.register_post_accumulate_grad_hook(",
                "        lambda parameter, own=own: (own.step(), own.zero_grad())",
                "    )",
            ),
        ),
    ),
    "offloaded-optimizer": Technique(
        "optimizer state on the disk, a few weights' state at a time on the device",
        choice=("offload", "offloaded-optimizer"),
        plugs={"stepping": lambda: plugs.offloaded},
        on_disk=frozenset({"state"}),
        costs="each step reads the state from the disk and writes it back",
        code=Code(
            (
                "from memlab.offload import DiskStore, OffloadedOptimizer",
                "optimizer = OffloadedOptimizer(optimizer, DiskStore())",
            ),
            (
                "from torchao.optim import CPUOffloadOptimizer",
                "optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)",
            ),
        ),
    ),
    "offloaded-activations": Technique(
        "activations on the disk between forward and backward",
        choice=("offload", "offloaded-activations"),
        plugs={"around_forward": lambda: plugs.activations_offloaded},
        slot=SAVED_TENSORS,
        on_disk=frozenset({"activations"}),
        costs="each step writes saved tensors to the disk and reads them back; the files are in a "
        'temporary folder, or in the folder of DiskStore("folder")',
        code=Code(
            (
                "from memlab.offload import DiskStore, offloaded_activations",
                "store = DiskStore()",
                "with offloaded_activations(store): loss = loss_of(model, inputs, targets)",
            ),
            (
                "from torch.autograd.graph import save_on_cpu",
                "with save_on_cpu(pin_memory=True): loss = loss_of(model, inputs, targets)",
            ),
        ),
    ),
    "streamed-layers": Technique(
        "weights, gradients and state on the disk, one block at a time on the device",
        choice=("offload", "streamed-layers"),
        plugs={
            "change_model": lambda: plugs.streamed,
            "stepping": lambda: plugs.offloaded_with_weights,
        },
        on_disk=frozenset({"weights", "gradients", "state"}),
        costs="each step reads and writes all weights, gradients and state on the disk",
        code=Code(
            (
                "from memlab.offload import DiskStore, OffloadedOptimizer, stream_layers",
                "store = DiskStore()",
                "stream_layers(model, store)",
                "optimizer = OffloadedOptimizer(optimizer, store, weights=True, gradients=True)",
            ),
            (
                "import deepspeed",
                'nvme = {"device": "nvme", "nvme_path": "folder"}',
                'zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}',
                'config = {"zero_optimization": zero}',
                "engine, *_ = deepspeed.initialize(model=model, config=config)",
            ),
        ),
    ),
    "post-hoc-ema": Technique(
        "two averages of the weights; after training, others are synthesized from them",
        plugs={"after_step": lambda: plugs.averaged},
        exclusive_with={
            "streamed-layers": "averages need the weights on the device, but streamed weights are "
            "on the disk between steps; leave one of the two out",
        },
        costs="two float32 copies of the weights",
        code=Code(
            (
                "from memlab.ema import PostHocEMA",
                'ema = PostHocEMA(model, "snapshots")',
                "ema.update(step)  # after each step, counted from 1",
            ),
            (
                "from ema_pytorch import PostHocEMA",
                "ema = PostHocEMA(model, sigma_rels=(0.05, 0.28), update_every=1)",
                "ema.update()  # after each step",
            ),
        ),
    ),
    "sgd": Technique(
        "torch's SGD: no state",
        plugs={"optimizer": lambda: plugs.of_all_weights(torch.optim.SGD, lr=0.01)},
        state_bytes=0,
        costs="another optimizer; transformers rarely train well with it",
        code=torch_code("optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"),
    ),
    "momentum-sgd": Technique(
        "SGD with a bfloat16 momentum, stochastically rounded",
        plugs={"optimizer": lambda: plugs.stochastically_rounded(optim.MomentumSGD)},
        cannot_shard=RANDOM_PER_SHARD,
        state_bytes=2,
        costs="another optimizer: tune its learning rate again",
        code=Code(
            (
                "from memlab.optim import MomentumSGD",
                "optimizer = MomentumSGD(model.parameters(), lr=0.01, momentum=0.9)",
            ),
            ("optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)",),
        ),
    ),
}

# Shown beside the rows: techniques that people often combine, and their short names in a table.
COMBINATIONS = {
    "checkpointing+autocast": "ckpt+autocast",
    "checkpointing+int8-activations": "ckpt+int8",
    "checkpointing+flash-attention+chunked-loss": "ckpt+flash+chunked-loss",
    "checkpointing+lion8bit+step-in-backward": "ckpt+lion8bit+in-backward",
}

# Why a step that fills a plug does not run on ZeRO's ranks, sharded or not.
ONE_PROCESS = {
    "stepping": "gradients are freed, or moved to the disk, before they can be sent to other "
    "ranks; leave step-in-backward, offloaded-optimizer and streamed-layers out",
    "after_step": "averages need whole weights, which a rank of ZeRO's third stage doesn't have; "
    "leave post-hoc-ema out",
}


def _one_after_another(changes: Sequence[Callable[[Any], object]]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for each in changes:
            each(model)

    return change


def _one_inside_another(arounds: Sequence[Callable[[str], Any]]) -> Callable[[str], Any]:
    @contextmanager
    def around(device: str) -> Iterator[None]:
        with ExitStack() as stack:
            for each in arounds:
                stack.enter_context(each(device))
            yield

    return around


# The plugs that take several techniques at once, and how they are joined.
JOIN: dict[str, Callable[[Sequence[Any]], Any]] = {
    "change_model": _one_after_another,
    "around_forward": _one_inside_another,
}


def rows_of(names: str) -> dict[str, Technique]:
    """The rows that "a+b" names, in the registry's order.

    Raises KeyError for an unknown name, and ValueError, with the reason, for two that do not work
    together.
    """
    given = {name: TECHNIQUES[name] for name in names.split("+")}
    chosen = {name: row for name, row in TECHNIQUES.items() if name in given}
    if reason := why_not_together(chosen):
        raise ValueError(reason)
    return chosen


def whole_weights(chosen: Iterable[Technique]) -> str | None:
    """Why ZeRO's third stage cannot run with one of these rows; None if it can with all."""
    return next((row.whole_weights for row in chosen if row.whole_weights), None)


def why_not_together(chosen: Mapping[str, Technique]) -> str | None:
    """Why two of these rows do not work in one step; None if all do."""
    for (name, row), (other, of_other) in combinations(chosen.items(), 2):
        if row.slot is not None and row.slot == of_other.slot:
            return f"{name} and {other} each bring their own {row.slot}; leave one of the two out"
        if reason := row.exclusive_with.get(other) or of_other.exclusive_with.get(name):
            return f"{name} and {other} do not go together: {reason}"
        if plug := next((p for p in row.plugs if _is_taken_twice(p, of_other)), None):
            return _taken_twice(name, other, plug)
    return None


def exclusions() -> dict[frozenset[str], str]:
    """Every pair of rows that fill different plugs and still do not work together, and why."""
    return {
        frozenset((name, other)): reason
        for name, row in TECHNIQUES.items()
        for other, reason in row.exclusive_with.items()
    }


def _is_taken_twice(plug: str, other: Technique) -> bool:
    return plug in other.plugs and plug not in JOIN


def _taken_twice(name: str, other: str, plug: str) -> str:
    advice = ""
    if plug == "optimizer" and "bfloat16" in (name, other):
        rest = other if name == "bfloat16" else name
        advice = f"; for bfloat16 weights, give {rest} and --dtype bfloat16"
    return (
        f"{name} and {other} each bring their own {plug.replace('_', ' ')}; leave one of the two "
        f"out{advice}"
    )
