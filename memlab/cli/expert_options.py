"""The options of `memlab plan` for mixtures of experts on several GPUs, checked without torch."""

from dataclasses import dataclass

from memlab.cli.errors import UsageError, quoted
from memlab.configs.config_json import NoShapeHere
from memlab.configs.mixtures import MIXTURES, MixtureConfig, mixture_from
from memlab.configs.shapes import GPTConfig
from memlab.planner.expert_parallel import CAPACITY, degrees
from memlab.transformers_models.sources import Source


@dataclass(frozen=True)
class Routing:
    """How a mixture is divided, and how unevenly its experts are chosen.

    imbalance   tokens of the busiest expert, relative to the average; None: CAPACITY
    degree      the only degree of expert parallelism to consider; None: all
    """

    imbalance: float | None = None
    degree: int | None = None

    @property
    def options(self) -> str:
        """The options that were given."""
        given = {"--imbalance": self.imbalance, "--expert-parallel": self.degree}
        return " and ".join(name for name, value in given.items() if value is not None)

    def imbalance_for(self, config: MixtureConfig, model: str) -> float:
        """Return the imbalance to plan for. Raises UsageError if a model cannot have it."""
        most = config.experts / config.chosen
        if self.imbalance is None:
            return min(CAPACITY, most)
        if self.imbalance > most:
            raise UsageError(
                f"got --imbalance {self.imbalance:g} for {quoted(model)}, whose experts get at "
                f"most {most:g} times their share, when every token chooses one of them; give 1 "
                f"to {most:g}"
            )
        return self.imbalance

    def degrees_for(self, config: MixtureConfig, model: str, gpus: int) -> list[int]:
        """Return the degrees to plan for. Raises UsageError for one that does not divide."""
        found = degrees(config, gpus)
        if self.degree is None:
            return found
        if self.degree not in found:
            raise UsageError(
                f"got --expert-parallel {self.degree} for {quoted(model)}; it must divide both the "
                f"{config.experts} experts and the {gpus} GPUs: give {_listed(found)}"
            )
        return [self.degree]


def imbalance_named(given: str | None) -> float | None:
    """Parse --imbalance."""
    try:
        imbalance = None if given is None else float(given)
    except ValueError:
        imbalance = 0.0
    if imbalance is not None and not 1 <= imbalance < float("inf"):
        raise UsageError(
            f"got --imbalance {quoted(str(given))}; expected the tokens of the busiest expert "
            f"relative to the average, a number from 1 such as 1.5"
        )
    return imbalance


def choose_mixture(
    model: str, config: GPTConfig | Source | None, gpus: int, routing: Routing
) -> MixtureConfig | None:
    """Return the mixture to plan expert parallelism for; None if another plan is meant.

    `config` is None for a preset of MIXTURES. Raises UsageError if the routing does not apply.
    """
    found, reason = MIXTURES.get(model), "which has no experts"
    if found is not None and gpus == 1:
        raise UsageError(
            f"got --model {model} for one GPU, and this preset is planned for several; give --gpus "
            f"8, or the path of the model's config.json to plan it for one"
        )
    if isinstance(config, Source):
        reason = "which is planned for one GPU with all experts"
    if isinstance(config, Source) and gpus > 1:
        try:
            found = mixture_from(config.fields(), source=config.path)
        except NoShapeHere as error:
            reason = str(error)
        except ValueError as error:
            raise UsageError(f"got --model {quoted(model)}: {error}") from error
    if found is None and routing.options:
        raise UsageError(f"got {routing.options} for {quoted(model)}, {reason}: leave it out")
    return found


def refuse_recipes(model: str, given: dict[str, object]) -> None:
    """Raise UsageError if options of other plans were given; `given` maps them to their values."""
    if names := " and ".join(name for name, value in given.items() if value is not None):
        raise UsageError(
            f"got {names} for {quoted(model)}, a mixture of experts on several GPUs, which is "
            f"planned with AdamW on all weights: leave it out"
        )


def _listed(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
