"""The planner page's answers. It runs in the browser, on memlab's own formulas."""

import json
import math
from bisect import bisect_right
from dataclasses import fields

from memlab.configs.config_json import config_from
from memlab.configs.gpus import GPUS
from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.planner.cards import budget_bytes, memory_named
from memlab.planner.formulas import RESERVED_MOST, training_bytes
from memlab.planner.recipes import OFFLOAD, OPTIMIZERS, PRECISIONS, STAGES, Recipe, words_for
from memlab.units import format_bytes

LONGEST = 2**24  # tokens
ADAPTERS = {"": {}, "LoRA": {"lora": True}, "QLoRA": {"qlora": True}}

# The settings of the page, and their values before a reader changes them.
DEFAULTS = {
    "model": "llama-2-7b",
    "config": "",
    "gpu": "rtx4090",
    "gpus": "1",
    "batch": "1",
    "seq": "2048",
    "precision": "bfloat16",
    "optimizer": "adamw",
    "checkpointing": "",
    "adapters": "",
    "offload": "",
    "zero_stage": "0",
    "chunked_loss": "",
    "accumulation": "",
    "step_in_backward": "",
}
FLAGS = ("chunked_loss", "accumulation", "step_in_backward")
NUMBERS = {
    "batch": "sequences per GPU",
    "seq": "the sequence length",
    "gpus": "the number of GPUs",
    "zero_stage": "the ZeRO stage",
}
EXACT = 2**53  # a browser's numbers are exact below it

# The words of the page for the formula's terms.
WORDS = {
    "blocks_kept": "activations of the blocks",
    "ends_kept": "activations of the last norm and the loss",
    "cast_weights": "bfloat16 copies of weights (autocast)",
    "rotary_tables": "tables of rotary angles",
    "workspace": "cuBLAS workspaces",
    "stepped_copy": "float32 copy of a streamed weight",
}


def choices() -> str:
    """Return the values of each list of the page, and all defaults, as JSON."""
    lists = {
        "model": list(PRESETS),
        "gpu": list(GPUS),
        "precision": list(PRECISIONS),
        "optimizer": list(OPTIMIZERS),
        "checkpointing": ["", *words_for("checkpointing")],
        "adapters": list(ADAPTERS),
        "offload": ["", *(value for value in OFFLOAD if value)],
        "zero_stage": [str(stage) for stage in STAGES],
    }
    return json.dumps({"lists": lists, "defaults": DEFAULTS})


def answer(given: str) -> str:
    """Return the step's bytes for the settings in a JSON object, as JSON.

    A wrong setting gives {"error": sentence}.
    """
    try:
        return json.dumps(answered({**DEFAULTS, **json.loads(given)}))
    except ValueError as error:
        return json.dumps({"error": str(error)})


def answered(settings: dict[str, str]) -> dict[str, object]:
    """Return the bytes at each moment, the peak, the budget and the longest sequence.

    The formula counts allocated memory, and the allocator needs more. So a step fits for certain
    only if the most that predictions needed beyond the formula fits too, and the longest sequence
    is a range. Raises ValueError for a wrong setting.
    """
    config, recipe = config_of(settings), recipe_of(settings)
    memory = memory_named(settings["gpu"])
    batch, gpus = integer(settings, "batch"), integer(settings, "gpus")
    budget = budget_bytes(memory, memory.target)

    def estimate(seq_len: int):
        return training_bytes(config, recipe, batch, seq_len, gpus=gpus, target=memory.target)

    found = estimate(integer(settings, "seq"))
    if found.peak_bytes >= EXACT:
        raise ValueError(f"{format_bytes(found.peak_bytes)} are too many; give smaller numbers")
    most = math.ceil((1 + RESERVED_MOST) * found.peak_bytes)
    longest = [
        bisect_right(range(1, LONGEST), budget / share, key=lambda n: estimate(n).peak_bytes)
        for share in (1 + RESERVED_MOST, 1)
    ]
    return {
        "parameters": config.parameters,
        "recipe": recipe.words,
        "moments": found.moments,
        "moment": found.moment,
        "terms": {WORDS.get(name, name.replace("_", " ")): n for name, n in found.terms.items()},
        "peak": found.peak_bytes,
        "budget": budget,
        "most": most,
        "fits": "yes" if most <= budget else "maybe" if found.peak_bytes <= budget else "no",
        "longest": longest,
        "made_for": config.seq_len,
        "shown": {str(n): format_bytes(n) for n in numbers(found, most, budget)},
    }


def numbers(found, most: int, budget: int) -> set[int]:
    """Return every number of bytes that the page shows."""
    sums = {sum(terms.values()) for terms in found.moments.values()}
    return {*found.terms.values(), *sums, most, budget, abs(budget - found.peak_bytes)}


def config_of(settings: dict[str, str]) -> GPTConfig:
    """Return the shape of the pasted config.json, else of the preset."""
    if not settings["config"].strip():
        return PRESETS[settings["model"]]
    try:
        read = json.loads(settings["config"])
    except ValueError as error:
        raise ValueError(
            f"the pasted config.json is not valid JSON ({error}); paste the whole file"
        ) from error
    return config_from(read, source="the pasted config.json")


def recipe_of(settings: dict[str, str]) -> Recipe:
    """Return the recipe; an empty setting leaves the default."""
    known = {field.name for field in fields(Recipe)} & DEFAULTS.keys() - {"adapters"}
    given = {name: settings[name] for name in known if settings[name]}
    given |= {name: True for name in FLAGS if settings[name]}
    given["zero_stage"] = integer(settings, "zero_stage")
    return Recipe(**given, **ADAPTERS[settings["adapters"]])


def integer(settings: dict[str, str], name: str) -> int:
    try:
        return int(settings[name])
    except ValueError:
        got = settings[name]
        raise ValueError(f"got {got!r} as {NUMBERS[name]}; give an integer") from None
