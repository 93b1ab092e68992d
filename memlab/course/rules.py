"""The rules of thumb that the course tests, each in the notebook of a day.

A notebook measures, and calls `verdict` with the result. benchmarks/rules.py collects all verdicts
into docs/RULES.md.
"""

from typing import NamedTuple

from memlab.course import guides
from memlab.course.page import say


class Rule(NamedTuple):
    """A claim, the guide that makes it (or who else does), and the day that tests it."""

    claim: str
    guide: str
    day: int


class RuleVerdict(NamedTuple):
    """The measured verdict on a rule or on a part of one."""

    rule: str
    words: str
    measured: str


# A rule with several claims has a letter for each. A rule tested on two days has the first day. If
# a later day tests it again with other means, its number there ends with the letter b.
_DAY_19, _MEMORY_GUIDE = guides.DAY_19.title, guides.MEMORY_GUIDE.title
_PLATFORMS, _DREAMS, _EMA = guides.PLATFORMS.title, guides.DREAMS.title, guides.EMA.title
NO_GUIDE = "often said of parallel training"  # in none of the guides
RULES: dict[str, Rule] = {
    "1a": Rule(
        "Mixed-precision Adam takes 16 bytes a parameter: 1B parameters are 16 GB before "
        "activations, which can be 100 GB and more.",
        _DAY_19,
        1,
    ),
    "1b": Rule("Training is memory-bound, not compute-bound.", _DAY_19, 1),
    "2a": Rule(
        "A 7B model in float32 takes 28 + 28 + 56 = 112 GB without activations.", _MEMORY_GUIDE, 1
    ),
    "2b": Rule(
        "The weights of a 7B model are 28, 14 or 7 GB in FP32, BF16 or FP8.", _MEMORY_GUIDE, 1
    ),
    "2c": Rule("FP8: 1 byte a parameter, 7 GB for 7B (H100).", _MEMORY_GUIDE, 19),
    "3": Rule("Activations scale with batch × length × width.", _DAY_19, 1),
    "4": Rule(
        "A model of 34,083,904 parameters with checkpointing, batch 2, length 512, peaks at "
        "0.63 GB in forward and backward.",
        _PLATFORMS,
        1,
    ),
    "5": Rule(
        "Beside a test of a 34M-parameter model: weights 0.5, AdamW 1.0, gradients 0.5, "
        "activations 0.6 GB, a peak of 2.6 GB with checkpointing at 2 × 512; without it, "
        "16 × 1024 took 32 GB.",
        _PLATFORMS,
        1,
    ),
    "6a": Rule(
        "Clearing the cache in every batch and validation step, and collecting garbage every 10 to "
        "25 steps, saves an additional 10–20 %, at slightly more time.",
        _DREAMS,
        2,
    ),
    "6b": Rule(
        "Monitor the memory of a training run with nvidia-smi, once a second (rocm-smi on AMD, "
        "vm_stat on a Mac).",
        _PLATFORMS,
        2,
    ),
    "7a": Rule(
        "To save memory, limit the process to 95 % of what is available (memory fraction).",
        _DREAMS,
        2,
    ),
    "7b": Rule("To save memory, configure the CUDA allocator for smaller chunks.", _DREAMS, 2),
    "7c": Rule("Many small allocations cause fragmentation.", _MEMORY_GUIDE, 2),
    "7d": Rule("Against fragmentation, use memory pools and larger batch sizes.", _MEMORY_GUIDE, 2),
    "8a": Rule(
        "`del tensor; torch.cuda.empty_cache()` fixes a memory leak (tensors not freed).",
        _MEMORY_GUIDE,
        2,
    ),
    "8b": Rule(
        "If training runs out of memory around epoch 60, first use batch 1 instead of 2, with two "
        "steps of accumulation: about 50 % less at the peak.",
        _DREAMS,
        2,
    ),
    "8c": Rule(
        "Reference cleanup, the explicit deletion of batch variables, saves memory (with cache "
        "clearing and garbage collection 10–20 %).",
        _DREAMS,
        3,
    ),
    "9a": Rule(
        "Batch 1 with two steps of accumulation in place of batch 2: about 50 % less memory at the "
        "peak.",
        _DREAMS,
        3,
    ),
    "9b": Rule(
        "Accumulation keeps the effective batch size, and should give the same results.", _DREAMS, 3
    ),
    "10a": Rule(
        "To save memory, shorten the sequences: 512 in place of 1024, then 256.", _PLATFORMS, 3
    ),
    "10b": Rule("If still out of memory: 80–90 peaks (tokens) in place of 100.", _DREAMS, 3),
    "10c": Rule(
        "If memory is still insufficient: fewer Fourier features, a slightly narrower model "
        "(d_peak).",
        _DREAMS,
        3,
    ),
    "11a": Rule(
        "To save memory, validate only twice an epoch, on half of the validation data or on 100 "
        "batches.",
        _DREAMS,
        3,
    ),
    "11b": Rule("For large datasets: in_mem=False, so that the data stay on disk.", _DREAMS, 3),
    "11c": Rule(
        "Fewer data workers save CPU memory, and pin_memory=False reduces memory pressure.",
        _DREAMS,
        3,
    ),
    "11d": Rule("If still running out of memory: use only 1 GPU instead of 2.", _DREAMS, 3),
    "11e": Rule(
        "Checkpoint strategy against running out of memory: save less often, every 2000 steps, and "
        "keep one.",
        _DREAMS,
        3,
    ),
    "12": Rule(
        "If memory is still insufficient: freeze some layers during fine-tuning.", _DREAMS, 3
    ),
    "13a": Rule("Mixed precision (FP16, BF16) halves activation and gradient memory.", _DAY_19, 4),
    "13b": Rule(
        "BF16 in place of FP16: better numerical stability, same memory usage.", _PLATFORMS, 4
    ),
    "13c": Rule("Mixed precision uses tensor cores: up to 8 × faster.", _DAY_19, 4),
    "13d": Rule(
        "BF16 saves on all memory and costs nothing, if the hardware supports it.", _DAY_19, 4
    ),
    "14a": Rule(
        "Training in BF16, under autocast or with model.to(torch.bfloat16), goes through a "
        "GradScaler.",
        _MEMORY_GUIDE,
        4,
    ),
    "14b": Rule("In BF16 training gradients are in FP32, for stability.", _MEMORY_GUIDE, 4),
    "14c": Rule(
        "Loss scaling is required for FP16, to prevent underflow, and not needed for BF16.",
        _DAY_19,
        4,
    ),
    "15a": Rule(
        "Checkpointing stores only a few activations, such as the input of each block: memory goes "
        "from O(N) to O(√N).",
        _DAY_19,
        5,
    ),
    "15b": Rule(
        "Checkpointing increases compute by about 33 %: one extra forward pass.", _DAY_19, 5
    ),
    "15c": Rule(
        "With checkpointing, training runs at about 0.7–0.8 × the speed: 20–30 % slower.",
        _PLATFORMS,
        5,
    ),
    "15d": Rule("Checkpointing allows training with 3–4 × larger batches.", _DAY_19, 5),
    "15e": Rule(
        "Gradient checkpointing: about 50–70 % reduction in activation memory.", _PLATFORMS, 5
    ),
    "16a": Rule(
        "Checkpointing half of the layers (a ratio of 50 %) saves 40–50 % of memory.",
        _MEMORY_GUIDE,
        6,
    ),
    "16b": Rule(
        "Checkpointing all layers (a ratio of 100 %) saves 60–80 % of memory.", _MEMORY_GUIDE, 6
    ),
    "16c": Rule(
        "Checkpointing none, half or all of the layers costs 0, 15–20 or 30–40 % more compute.",
        _MEMORY_GUIDE,
        6,
    ),
    "16d": Rule("Selective checkpointing: checkpoint every other layer.", _MEMORY_GUIDE, 6),
    "17a": Rule("INT8 activations: 50 % reduction.", _MEMORY_GUIDE, 7),
    "17b": Rule(
        "INT8 activations combined with checkpointing: 70–80 % reduction.", _MEMORY_GUIDE, 7
    ),
    "18a": Rule("AdamW takes 12 bytes a parameter.", _MEMORY_GUIDE, 8),
    "18b": Rule("Adam-mini takes 6 bytes a parameter.", _MEMORY_GUIDE, 8),
    "18c": Rule("Lion takes 8 bytes a parameter: it has no v.", _MEMORY_GUIDE, 8),
    "18d": Rule("Adam-mini shares m and v across parameters in the same layer.", _MEMORY_GUIDE, 8),
    "19a": Rule("8-bit Adam takes 8 bytes a parameter instead of 12.", _MEMORY_GUIDE, 9),
    "19b": Rule(
        "8-bit Adam takes 2 bytes a parameter instead of 8: for 1B parameters it saves 6 GB.",
        _DAY_19,
        9,
    ),
    "19c": Rule("8-bit optimizers: a negligible drop in performance.", _DAY_19, 9),
    "19d": Rule("8-bit Adam costs a slight CPU overhead.", _DAY_19, 9),
    "20a": Rule(
        "Standard attention at length 8192: a matrix of 8192 × 8192 × 4 bytes, 256 MB a head; with "
        "32 heads 8 GB a layer.",
        _MEMORY_GUIDE,
        10,
    ),
    "20b": Rule(
        "Flash attention at length 8192: no attention matrix in memory; O(N), about 100 MB a "
        "layer.",
        _MEMORY_GUIDE,
        10,
    ),
    "21a": Rule(
        "8 GPUs, a 7B model, BF16: 56 GB a GPU without ZeRO, with ZeRO-1 31.5, with ZeRO-2 19.25, "
        "with ZeRO-3 7 GB.",
        _MEMORY_GUIDE,
        12,
    ),
    "21b": Rule("ZeRO stage 1: 4x memory reduction; stage 2: 8x.", _DAY_19, 12),
    "21c": Rule("ZeRO stage 3: linear reduction with the number of GPUs.", _DAY_19, 12),
    "22": Rule(
        "ZeRO-3 saves weight, gradient and optimizer memory, and costs communication.", _DAY_19, 12
    ),
    "23a": Rule("CPU offload: 50–80 % memory savings, 2–3 × slower.", _MEMORY_GUIDE, 14),
    "23b": Rule("NVMe offload: 90 % and more memory savings, 5–10 × slower.", _MEMORY_GUIDE, 14),
    "23c": Rule(
        "ZeRO-Offload, optimizer states and update in CPU RAM, allows training 13B models on a "
        "single GPU.",
        _DAY_19,
        14,
    ),
    "23d": Rule(
        "DeepSpeed ZeRO-Offload: stage 3 with optimizer and parameters on the CPU; for even larger "
        "models, stage 3 with the optimizer on NVMe.",
        _MEMORY_GUIDE,
        14,
    ),
    "24": Rule(
        "For extreme cases, process transformer layers sequentially rather than in parallel "
        "(requires code modification).",
        _DREAMS,
        14,
    ),
    "25a": Rule(
        "The synthesis fundamentally requires all checkpoints; memory scales with both model size "
        "and their number, and a full state dict is needed during synthesis.",
        _EMA,
        15,
    ),
    "25b": Rule(
        "Calculating the weights requires loading all checkpoints to solve the linear system, "
        "whose matrix operations can be memory intensive.",
        _EMA,
        15,
    ),
    "25c": Rule(
        "Less effective: processing checkpoints one after another, as all weights are still "
        "needed.",
        _EMA,
        15,
    ),
    "25d": Rule(
        "Ideas for the future: stream the parameters, update only some layers, update in place, "
        "compress the checkpoints.",
        _EMA,
        15,
    ),
    "25e": Rule(
        "Effective: parameters one at a time, CPU in place of VRAM, no deepcopy, state dicts in "
        "place of models, clearing the cache; the spikes are in copying the model, making the "
        "state dict, and the synthesis.",
        _EMA,
        15,
    ),
    "25f": Rule(
        "Batches of parameters add complexity without significant memory savings.", _EMA, 15
    ),
    "25g": Rule(
        "Reduced precision (float16) saves little memory compared with better algorithms.",
        _EMA,
        15,
    ),
    "25h": Rule(
        "Streaming one parameter at a time has a challenge: consistency across parameters.",
        _EMA,
        15,
    ),
    "25i": Rule("Compressed checkpoints trade decompression time against memory.", _EMA, 15),
    "25j": Rule("CPU operations are slower but help avoid spikes of the GPU's memory.", _EMA, 15),
    "25k": Rule(
        "Updating only some layers could reduce memory, when only a part of the model needs an "
        "average.",
        _EMA,
        15,
    ),
    "26": Rule(
        "Checkpoints cannot be pruned: the synthesis needs all of them for accurate results.",
        _EMA,
        15,
    ),
    "27": Rule(
        "A 7B model on one GPU of 24 GB: BF16, checkpointing, batch 1 with 16 steps of "
        "accumulation, 8-bit Adam, flash attention; about 20 GB.",
        _MEMORY_GUIDE,
        16,
    ),
    "28": Rule(
        "A 70B model on 8 GPUs of 80 GB: BF16, ZeRO-3, checkpointing, batch 1 with 8 steps of "
        "accumulation, flash attention, length 4096; about 60 GB a GPU.",
        _MEMORY_GUIDE,
        16,
    ),
    "29": Rule(
        "A 405B model on 128 H100: FP8, tensor parallel 8, pipeline parallel 4, data parallel 4, "
        "ZeRO-1, checkpointing, flash attention 3.",
        _MEMORY_GUIDE,
        16,
    ),
    "29b": Rule(
        "A 405B model on 128 H100 in FP8, with tensor parallel 8, pipeline parallel 4, data "
        "parallel 4, ZeRO-1 and checkpointing.",
        _MEMORY_GUIDE,
        19,
    ),
    "30a": Rule(
        "An RTX 3060 with 12 GB, 8 × 1,024 tokens: weights 0.5, AdamW 1.0, gradients 0.5, "
        "activations 2–3 GB, a peak of 4–5 GB.",
        _PLATFORMS,
        11,
    ),
    "30b": Rule(
        "An Apple M2 with 16 GB, 4 × 512 tokens: a peak of 4–5 GB of unified memory.",
        _PLATFORMS,
        11,
    ),
    "30c": Rule(
        "It works on NVIDIA GPUs with 8 GB and more, and on Macs with 8 GB and more with a smaller "
        "batch.",
        _PLATFORMS,
        11,
    ),
    "31": Rule(
        "`model.gradient_checkpointing_enable()` reduces activation memory by 50–70 %.",
        _PLATFORMS,
        17,
    ),
    "32a": Rule("Tensor parallelism over t GPUs divides activations by t.", NO_GUIDE, 18),
    "32b": Rule("1F1B has a smaller bubble than GPipe.", NO_GUIDE, 18),
    "32c": Rule("A pipeline of p stages divides activations by p.", NO_GUIDE, 18),
    "32d": Rule("Sequence parallelism costs no extra communication.", NO_GUIDE, 18),
}

verdicts: list[RuleVerdict] = []  # of this process, in order


def verdict(
    rule: str, holds: bool, measured: str, *, condition: str = "", otherwise: str = ""
) -> None:
    """Record and print the result of a test.

    `condition` says when the rule holds ("for …", "if …"), and is printed if `holds` is true.
    Otherwise `otherwise` is printed, the true statement.
    """
    if rule not in RULES:
        raise ValueError(f"got rule {rule}; RULES has {', '.join(RULES)}")
    if not (holds or otherwise):
        raise ValueError(f"rule {rule} does not hold: {measured}; give the true one, otherwise=...")
    words = " ".join(("holds", condition)).strip() if holds else f"wrong: {otherwise}"
    result = RuleVerdict(rule, words, measured)
    verdicts.append(result)
    say(f"Rule {rule}. {RULES[rule].claim} ({RULES[rule].guide})")
    say(f"Measured: {measured}")
    say(f"Verdict: {words}")
