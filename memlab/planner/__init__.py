"""The planner: find recipes that make a model's training fit into memory, and their cost.

print(plan("llama-2-7b", "24GB"))                      # recipes that fit, the fastest first
training_bytes(PRESETS["llama-2-7b"], Recipe()).terms  # memory of a step by formula, term by term

recipes      the techniques of one training, as plain data
cards        memory and speed of GPUs
formulas     bytes by formula, term by term
costs        estimated seconds, term by term
outside      techniques applied to a user's own training
roofline     its estimated seconds, operator by operator
repetition   the trace of a deep model, extrapolated from two shallow ones
measuring    the bytes of a recipe, by a dry run or a prediction
options      what planners take and return: a query, the options tried, the plan
deepspeed    what a DeepSpeed training holds, and the keys that decide it
meshes       the ways to divide a Llama over several GPUs, and mesh_script, which trains so
mesh_search  the fastest of them predicted to fit
processes    several measurements at once
search       the fastest recipe measured to fit
"""

from typing import TYPE_CHECKING

from memlab.internals.lazy import lazily

if TYPE_CHECKING:
    from memlab.planner.cards import CARDS, Card, Memory, card_named, memory_named
    from memlab.planner.formulas import Estimate, training_bytes
    from memlab.planner.measuring import Measured, measured
    from memlab.planner.options import Option, Plan
    from memlab.planner.recipes import Recipe, usual_kinds
    from memlab.planner.search import plan

_HOME_OF = {
    **dict.fromkeys(("CARDS", "Card", "Memory"), "memlab.planner.cards"),
    **dict.fromkeys(("card_named", "memory_named"), "memlab.planner.cards"),
    **dict.fromkeys(("Estimate", "training_bytes"), "memlab.planner.formulas"),
    **dict.fromkeys(("Measured", "measured"), "memlab.planner.measuring"),
    **dict.fromkeys(("Option", "Plan"), "memlab.planner.options"),
    **dict.fromkeys(("Recipe", "usual_kinds"), "memlab.planner.recipes"),
    "plan": "memlab.planner.search",
}

__all__ = [
    "CARDS",
    "Card",
    "Estimate",
    "Measured",
    "Memory",
    "Option",
    "Plan",
    "Recipe",
    "card_named",
    "measured",
    "memory_named",
    "plan",
    "training_bytes",
    "usual_kinds",
]

__getattr__ = lazily(__name__, _HOME_OF)
