"""Recipes, and the code printed for them."""

import pytest
import transformers

import memlab
from memlab.transformers_models.memlab_code import memlab_code
from memlab.transformers_models.recipes import (
    METHODS,
    OPTIMIZERS,
    PRECISIONS,
    Loaded,
    Recipe,
    code,
)
from tests.quick import quick
from tests.transformers_models.configs import TINY

RECIPES = [
    Recipe(),
    Recipe(precision="autocast", optimizer="adam8bit"),
    Recipe(precision="bfloat16", checkpointing=True, optimizer="paged-adam8bit"),
    Recipe("lora", checkpointing=True, rank=4, targets="q_proj,v_proj"),
    Recipe("lora", attention="eager"),
    Recipe("qlora", checkpointing=True),
    Recipe("qlora"),
    Recipe(precision="bfloat16", optimizer="torchao-adam8bit"),
]


def weights_in(folder):
    """Write random weights, and return their folder."""
    config = transformers.AutoConfig.for_model("mistral", **TINY["mistral"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "weights")
    return folder / "weights"


def builder(training, lines):
    """Return a builder that runs the lines up to the last blank one, and a step of the others."""
    blank = len(lines) - lines[::-1].index("")
    setup, loop = "\n".join(lines[:blank]), "\n".join(lines[blank:])

    def build():
        names = {}
        exec(setup, names)
        batch = training.task.inputs(training.config, training.completed_size)
        names["batch"] = {name: tensor.cuda() for name, tensor in batch.items()}
        return lambda: exec(loop, names), names["model"], names["optimizer"]

    return build


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers will remove
@pytest.mark.filterwarnings(
    "ignore:inner dimension"
)  # tiny weights are too narrow for bitsandbytes
@pytest.mark.parametrize("recipe", quick(RECIPES[2:6:3], RECIPES), ids=str)
def test_the_printed_code_trains_as_predicted(recipe, training_of, tmp_path):
    """The code runs in a prediction, from a folder of weights, and allocates the same."""
    training = training_of("mistral")
    lines = list(code(recipe, training.loaded(name=str(weights_in(tmp_path)))))
    printed = memlab.predict(builder(training, lines))
    ours = memlab.predict(lambda: training.build(recipe))
    assert printed.allocated_bytes == ours.allocated_bytes


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:inner dimension")
@pytest.mark.parametrize("recipe", quick(RECIPES[3:4], RECIPES), ids=str)
def test_memlabs_code_trains_as_well(recipe, training_of, tmp_path):
    """It needs about the same: its adapters are in the weights' dtype, and other kernels run."""
    training = training_of("mistral")
    lines = memlab_code(recipe, training.loaded(name=str(weights_in(tmp_path))))
    printed = memlab.predict(builder(training, list(lines)))
    ours = memlab.predict(lambda: training.build(recipe))
    assert printed.allocated_bytes == pytest.approx(ours.allocated_bytes, rel=0.1)
    assert any(event.phase == "optimizer" for event in printed.events)


def test_lines_are_short_enough_to_read():
    for recipe in RECIPES:
        lines = list(code(recipe, Loaded("AutoModelForCausalLM", "Qwen/Qwen2.5-7B")))
        assert max(map(len, lines)) <= 78  # indented by two
        assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"method": "dora"}, f"got method='dora' in a recipe; choose one of {', '.join(METHODS)}"),
        ({"precision": "half"}, f"choose one of {', '.join(PRECISIONS)}"),
        ({"optimizer": "adam"}, f"choose one of {', '.join(OPTIMIZERS)}"),
        ({"rank": 0}, "got rank 0; give at least 1"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        Recipe(**words)
