"""The planner: which recipe fits a model into a memory, measured, and at what cost.

print(plan("llama-2-7b", "24GB"))                     # recipes that fit, the fastest first
training_bytes(PRESETS["llama-2-7b"], Recipe()).terms # what a step holds, by formula, named

recipes      what can be turned on, as plain data
cards        what fits into a GPU, and how fast it is
formulas     bytes, each term with its name
costs        seconds, estimated, each term with its name
outside      what can be put around a training that somebody else wrote
roofline     its seconds, estimated, operator by operator
repetition   the trace of a deep model out of those of shallow ones
measuring    what a prediction says that a recipe takes
options      a recipe that was tried, and the plan, which says what fits
processes    several measurements at once
search       the fastest recipe that is measured to fit
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
