"""How long a step takes, estimated: a sum of named terms, for ranking recipes against each other.

    products       2 operations for each weight and token forward, 4 backward, 2 with frozen weights
    attention      4·T·C for each token and block, half of them masked, twice as many backward
    recomputed     the forward pass of what is checkpointed, again
    compression    what is kept goes through memory once more to be encoded, and once to be decoded
    optimizer      weights, gradients and state read, weights and state written
    accumulation   gradients read and written again for each further micro-batch
    disk           what is offloaded, there and back, where the rows of `memlab.train` put it
    network        what ZeRO's collectives send, and what tensor parallelism adds up

Operations are taken at UTILIZATION of the card's peak, bytes at the card's bandwidths. Nothing is
taken to overlap, so a copy that a good implementation hides is counted in full: the estimate is
there to order recipes, and its ratios to a plain step say what each costs at most. It is no
measurement. `benchmarks/gpu.py --section planner` holds it against one.

Source   Kaplan et al. 2020, arXiv 2001.08361, section 2.1 (operations); Rajbhandari et al. 2020,
         arXiv 1910.02054, section 7 (communication).
"""

from memlab.configs.shapes import GPTConfig
from memlab.planner.cards import Card
from memlab.planner.formulas import Step
from memlab.planner.recipes import Recipe
from memlab.zero import communication_bytes

UTILIZATION = 0.5  # of the peak of operations: what well-fed cards reach in training
DISK_BANDWIDTH = 3e9  # bytes a second: a common NVMe disk, written and read at length
COMPRESSION_PASSES = 3  # read, written in float32, read: for each of encoding and decoding


def step_seconds(
    config: GPTConfig, recipe: Recipe, batch: int, seq_len: int, *, gpus: int, card: Card
) -> dict[str, float]:
    """Estimated seconds of a step of `batch` sequences a rank, by what they go to."""
    step = Step.of(config, recipe, batch, seq_len, gpus=gpus)
    rate = UTILIZATION * (card.float32_flops if recipe.precision == "float32" else card.flops)
    operations = _operations(config, step)
    gpus_of_model = recipe.tensor_parallel * recipe.pipeline_parallel
    seconds = {name: count / rate / gpus_of_model for name, count in operations.items()}
    moved = _moved_bytes(step, batch)
    seconds |= {name: count / card.memory_bandwidth for name, count in moved.items()}
    seconds["disk"] = _offloaded_bytes(step) / min(DISK_BANDWIDTH, card.host_bandwidth)
    seconds["network"] = _network_bytes(config, recipe, step, batch) / card.link_bandwidth
    return {name: value for name, value in seconds.items() if value}


def _operations(config: GPTConfig, step: Step) -> dict[str, float]:
    """Operations of all tokens."""
    recipe, tokens = step.recipe, step.batch_tokens
    backward = 2 if recipe.lora else 4  # with frozen weights, only the gradient of the input
    # Of the scores and of their mix, half of each is masked.
    attention = 2 * config.layers * step.seq_len * config.heads * config.head_width
    head = config.vocab_size * config.width
    forward_of_blocks = 2 * (step.weights.products - head) + attention
    recomputed = sum(row.recomputed for row in step.rows)
    return {
        "products": tokens * (2 + backward) * step.weights.products,
        "attention": tokens * 3 * attention,
        "recomputed": tokens * recomputed * forward_of_blocks,
    }


def _moved_bytes(step: Step, batch: int) -> dict[str, float]:
    """Bytes through the card's own memory."""
    recipe = step.recipe
    passes = 2 * COMPRESSION_PASSES if recipe.activation_bits else 0
    micro_batches = batch if recipe.accumulation else 1
    weights, gradients, state = step.stepped_bytes()
    return {
        "compression": passes * micro_batches * step.kept_bytes_uncompressed(),
        "optimizer": 2.0 * weights + gradients + 2.0 * state,
        "accumulation": 3.0 * (micro_batches - 1) * gradients,
    }


def _offloaded_bytes(step: Step) -> float:
    """Bytes there and back."""
    weights, gradients, state = step.stepped_bytes()
    moved = {
        "state": 2.0 * state,
        "activations": 2.0 * step.kept_bytes_uncompressed(),
        "gradients": 2.0 * gradients,
        "weights": 2.0 * step.streamed_bytes() + 2.0 * weights,  # frozen ones are read, too
    }
    return sum(moved[what] for what in step.on_disk)


def _network_bytes(config: GPTConfig, recipe: Recipe, step: Step, batch: int) -> float:
    """Bytes that a rank sends."""
    sent = 0.0
    if step.ranks > 1:
        sent += communication_bytes(
            step.trained,
            ranks=step.ranks,
            stage=recipe.zero_stage,
            micro_batches=batch if recipe.accumulation else 1,
            element_bytes=step.weight_bytes,
        )
    parts = recipe.tensor_parallel
    if parts > 1:  # two sums forward and two backward in each block, each an all-reduce
        of_a_sum = 2 * (parts - 1) / parts * step.batch_tokens * config.width
        sent += 4 * config.layers * of_a_sum * step.activation_bytes
    return sent
