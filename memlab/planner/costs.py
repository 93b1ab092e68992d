"""Estimate the time of a step as a sum of named terms, to rank recipes.

    matmuls        2 operations per weight and token forward, 4 backward, 2 with frozen weights
    attention      4·T·C per token and block forward, half of them masked; twice as many backward
    recomputed     the forward pass of checkpointed parts, again
    decoding       4-bit weights decoded in forward, backward and recomputation, by our operators
    compression    saved tensors are read and written once more to encode and once to decode
    optimizer      weights, gradients and state read, weights and state written
    matrix step    the matmuls of an optimizer that steps matrices as a whole
    accumulation   gradients read and written again for each further micro-batch
    disk           offloaded tensors written and read, by the `on_disk` of the registry's rows
    network        ZeRO's collectives, and tensor parallelism's all-reduces

Operations run at UTILIZATION of the card's peak, and bytes at its bandwidths. Nothing overlaps, so
a copy that a good implementation hides is counted in full. Use the estimate to order recipes: a
ratio to the plain step is an upper bound of a recipe's cost.

Source   Kaplan et al. 2020, arXiv 2001.08361, section 2.1 (operations); Rajbhandari et al. 2020,
         arXiv 1910.02054, section 7 (communication).
"""

from memlab.configs.shapes import GPTConfig
from memlab.planner.cards import Card
from memlab.planner.formulas import StepFormula
from memlab.planner.parallel import tensor_parallel_elements
from memlab.planner.recipes import Recipe
from memlab.zero import communication_bytes

UTILIZATION = 0.5  # of peak operations, as well-fed GPUs reach in training
DISK_BANDWIDTH = 3e9  # bytes per second: a common NVMe disk, sequential
# Bytes per decoded weight that pass through memory before it is written: half a byte of codes read,
# two as int32 written and read, a float32 written, read and written by its absmax, and read.
DECODE_BYTES = 0.5 + 2 * 2 + 4 * 4
COMPRESSION_PASSES = 3  # encode and decode each: read, write in float32, read


def step_seconds(
    config: GPTConfig, recipe: Recipe, batch: int, seq_len: int, *, gpus: int, card: Card
) -> dict[str, float]:
    """Return the estimated seconds of a step of `batch` sequences per rank, by term."""
    step = StepFormula.of(config, recipe, batch, seq_len, gpus=gpus)
    rate = _matmul_rate(card, recipe.precision)
    operations = _operations(config, step)
    gpus_of_model = recipe.tensor_parallel * recipe.pipeline_parallel
    seconds = {name: count / rate / gpus_of_model for name, count in operations.items()}
    count, dtype = step.matrix_operations()
    own_rate = _matmul_rate(card, dtype)
    # Muon's are 5 · width / tokens times the model's own: ten times as many at width 4,096 with
    # 2,048 tokens, half a percent with 4 million.
    seconds["matrix step"] = count / own_rate / gpus_of_model
    moved = _moved_bytes(step, batch)
    seconds |= {name: count / card.memory_bandwidth for name, count in moved.items()}
    seconds["disk"] = _offloaded_bytes(step) / min(DISK_BANDWIDTH, card.host_bandwidth)
    seconds["network"] = _network_bytes(config, recipe, step, batch) / card.link_bandwidth
    return {name: value for name, value in seconds.items() if value}


def _matmul_rate(card: Card, precision: str) -> float:
    """Return the operations per second of matmuls in float32, or else in bfloat16."""
    return UTILIZATION * (card.float32_flops if precision == "float32" else card.bfloat16_flops)


def _operations(config: GPTConfig, step: StepFormula) -> dict[str, float]:
    """Return the operations of all tokens."""
    recipe, tokens = step.recipe, step.batch_tokens
    backward = 2 if recipe.has_adapters else 4  # with frozen weights, only the input's gradient
    # The causal mask hides half of the scores and half of their products with the values.
    attention = 2 * config.layers * step.seq_len * config.heads * config.head_dim
    head = config.vocab_size * config.hidden_size
    forward_of_blocks = 2 * (step.weights.matmuls - head) + attention
    recomputed = sum(row.recomputed for row in step.rows)
    return {
        "matmuls": tokens * (2 + backward) * step.weights.matmuls,
        "attention": tokens * 3 * attention,
        "recomputed": tokens * recomputed * forward_of_blocks,
    }


def _moved_bytes(step: StepFormula, batch: int) -> dict[str, float]:
    """Return the bytes that pass through the card's memory."""
    recipe = step.recipe
    passes = 2 * COMPRESSION_PASSES if recipe.activation_bits else 0
    micro_batches = batch if recipe.accumulation else 1
    weights, gradients, state = step.stepped_bytes()
    uses = 3 if recipe.checkpointing else 2
    decoded_bytes = DECODE_BYTES + step.activation_bytes
    return {
        "decoding": 1.0 * uses * micro_batches * decoded_bytes * step.decoded_elements(),
        "compression": passes * micro_batches * step.saved_bytes_uncompressed(),
        "optimizer": 2.0 * weights + gradients + 2.0 * state,
        "accumulation": 3.0 * (micro_batches - 1) * gradients,
    }


def _offloaded_bytes(step: StepFormula) -> float:
    """Return the bytes written to and read from the disk."""
    weights, gradients, state = step.stepped_bytes()
    moved = {
        "state": 2.0 * state,
        "activations": 2.0 * step.saved_bytes_uncompressed(),
        "gradients": 2.0 * gradients,
        "weights": 2.0 * step.streamed_bytes() + 2.0 * weights,  # frozen weights are read, too
    }
    return sum(moved[what] for what in step.on_disk)


def _network_bytes(config: GPTConfig, recipe: Recipe, step: StepFormula, batch: int) -> float:
    """Return the bytes that a rank sends."""
    sent = 0.0
    if step.ranks > 1:
        sent += communication_bytes(
            step.trained,
            ranks=step.ranks,
            stage=recipe.zero_stage,
            micro_batches=batch if recipe.accumulation else 1,
            element_bytes=step.weight_bytes,
        )
    if recipe.tensor_parallel > 1:
        stream = step.batch_tokens, config.hidden_size
        elements = tensor_parallel_elements(*stream, recipe.tensor_parallel)
        sent += config.layers * elements * step.activation_bytes
    return sent
