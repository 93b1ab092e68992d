"""The known causes of running out of memory, and what a finding says.

A finding names one cause with a confidence between 0 and 1, the evidence for it, and what to do.
"""

from dataclasses import dataclass, replace

CONFIDENT, LIKELY, POSSIBLE = 0.7, 0.4, 0.15  # least confidence of each word
CONTEXT_BYTES = 1_000_000_000  # at most, of one CUDA context


@dataclass(frozen=True)
class Cause:
    """A known cause: a short name, a title, and the remedies that always apply."""

    name: str
    title: str
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence. `advice`, if given, replaces the advice of the cause."""

    cause: Cause
    confidence: float
    evidence: tuple[str, ...]
    advice: tuple[str, ...] | None = None

    @property
    def todo(self) -> tuple[str, ...]:
        """What to do."""
        return self.cause.advice if self.advice is None else self.advice

    @property
    def word(self) -> str:
        """How sure the finding is."""
        if self.confidence >= CONFIDENT:
            return "high confidence"
        return "medium confidence" if self.confidence >= LIKELY else "low confidence"


CAUSES = {
    cause.name: cause
    for cause in (
        Cause(
            "batch",
            "the batch is too large",
            (
                "Halve the batch, and accumulate gradients over two batches.",
                "Use autocast in bfloat16, or in float16 before Ampere (T4, V100): most "
                "activations shrink to half.",
            ),
        ),
        Cause(
            "sequence",
            "the sequence is too long: attention scores grow with its square",
            (
                "Call F.scaled_dot_product_attention, which never stores the scores.",
                "Shorten or pack the sequences; half the length needs a quarter of the scores.",
            ),
        ),
        Cause(
            "logits",
            "the logits in float32: tokens × vocabulary",
            (
                "Compute the loss in chunks, so the full logits never exist "
                "(memlab.losses.chunked_cross_entropy, or Liger's fused linear cross-entropy).",
                "If the code casts the logits to float32, keep them in 16 bits: drop the cast "
                "before the loss.",
            ),
        ),
        Cause(
            "no-checkpointing",
            "no checkpointing: every layer keeps its activations for backward",
            (
                "Use activation checkpointing: torch.utils.checkpoint.checkpoint around each "
                "layer, or model.gradient_checkpointing_enable().",
                "Halve the batch, and accumulate gradients over two batches.",
            ),
        ),
        Cause(
            "optimizer-state",
            "the optimizer state, which the first step creates",
            (
                "Use an 8-bit optimizer (2 bytes a weight instead of AdamW's 8), or Lion.",
                "Train fewer weights (LoRA), or shard or offload the state (ZeRO, FSDP).",
            ),
        ),
        Cause(
            "no-grad",
            "evaluation without no_grad: it keeps activations for a backward that never comes",
            (
                "Wrap the evaluation in torch.no_grad() or torch.inference_mode(); "
                "model.eval() alone keeps the activations.",
            ),
        ),
        Cause(
            "kept-graphs",
            "losses kept with graphs: tensors of earlier steps stay alive",
            (
                "Append loss.item() or loss.detach(), not the loss, to lists and sums.",
                "Delete outputs that the next step does not need.",
            ),
        ),
        Cause(
            "kv-cache",
            "cached generations: a KV cache that grows with every token",
            (
                "Generate fewer tokens or sequences at once, and delete the cache after each call.",
                "Use a cache of fixed size, a sliding window, or a quantized cache.",
            ),
        ),
        Cause(
            "fragmentation",
            "fragmentation: enough memory is free, but not in one piece",
            (
                "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts.",
                "Pad to a few fixed lengths, so that freed blocks fit again.",
            ),
        ),
        Cause(
            "other-process",
            "another process on the card",
            (
                "Run nvidia-smi and end the other process, or choose another card with "
                "CUDA_VISIBLE_DEVICES.",
            ),
        ),
        Cause(
            "weights",
            "the weights alone fill the memory",
            (
                "Load the model in 16 or 4 bits (torch_dtype, BitsAndBytesConfig).",
                'Split it: device_map="auto" offloads layers to the CPU; FSDP or ZeRO-3 shards '
                "them over GPUs.",
                "Choose a smaller model, or a card with more memory.",
            ),
        ),
        Cause(
            "request",
            "one request is larger than the card",
            (
                "Print the shapes at this line: a missing dimension broadcasts to B × B or T × T.",
                "If the shapes are right, split the work: a lower resolution, shorter sequences, "
                "fused attention instead of T² scores, or the batch in parts.",
            ),
        ),
        Cause(
            "limit",
            "a limit of this process's memory, below what the card has free",
            (
                "Raise or remove torch.cuda.set_per_process_memory_fraction "
                "(per_process_memory_fraction in the allocator's settings).",
            ),
        ),
        Cause(
            "predictions",
            "predictions collected on the GPU: each evaluation batch adds its outputs",
            (
                "Move each batch's outputs to the CPU before you collect them: output.cpu().",
                "With transformers' Trainer, set eval_accumulation_steps, or reduce the outputs in "
                "preprocess_logits_for_metrics.",
            ),
        ),
    )
}


def finding(name: str, confidence: float, *evidence: str) -> Finding:
    """Return a finding, its confidence limited to 0.01..0.99."""
    return Finding(CAUSES[name], min(0.99, max(0.01, confidence)), tuple(filter(None, evidence)))


def with_advice(found: Finding, *advice: str) -> Finding:
    """Return the finding with advice of its own."""
    return replace(found, advice=tuple(filter(None, advice)))


def ranked(found: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings worth showing, the most confident first."""
    shown = [each for each in found if each.confidence >= POSSIBLE]
    return tuple(sorted(shown or found[:1], key=lambda each: -each.confidence))
