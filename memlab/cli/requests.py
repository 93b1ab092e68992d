"""The options of each command as one record, which typer fills. This module does not import torch.

    @app.command("plan")
    @takes(PlanRequest)
    def plan_command(request: PlanRequest) -> None: ...

A field of a record that is annotated with a typer option or argument is one of the command; `given`
has those that the user gave.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, get_type_hints

import typer

from memlab.cli import adapter_options
from memlab.cli.models import LIBRARY
from memlab.cli.parsing import integer_option, integers_option
from memlab.world.confinement import Confinement

# A larger value is a typo, and would take too long to process.
MAX_SEQUENCES, MAX_TOKENS, MAX_STEPS = 10**6, 10**8, 10**9
MAX_PIXELS = 10**5
MAX_RANKS = 100_000  # with more ranks, shards hold nothing but padding
MAX_STAGE = 3  # of ZeRO
MAX_RECIPES = 100
MODEL = (
    "a name listed below, a config.json in Hugging Face's format or its folder, or an id on the "
    "Hub such as Qwen/Qwen2.5-7B, whose config.json is in the local cache."
)
WIDE = "Print each row of a table on one line, even if it is longer than 80 columns."
AS_JSON = (
    "Print one JSON document instead of text; progress goes to standard error. Its fields are "
    "described in memlab/cli/schema.json."
)
ASSUME = (
    "Size to assume if a tensor's size depends on its values, as with boolean indexing: 'most' "
    "selects every element, 0.15 selects 15% of them, and imbalance:2 gives the busiest expert of "
    "a mixture twice the average number of tokens. Only with --script."
)

# Options of several commands.
Library = Annotated[str | None, typer.Option(help=LIBRARY, metavar="NAME")]
Image = Annotated[
    int | None,
    integer_option("--image", MAX_PIXELS, "Height and width of images, in pixels."),
]
Batch = Annotated[
    int | None,
    integer_option("--batch", MAX_SEQUENCES, "Sequences per batch."),
]
SeqLen = Annotated[
    int | None,
    integer_option("--seq", MAX_TOKENS, "Tokens per sequence."),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="Dtype of the weights: float32, bfloat16 or float16.", metavar="NAME"),
]
Assume = Annotated[str | None, typer.Option(help=ASSUME, metavar="most|FRACTION|imbalance:N")]
Wide = Annotated[bool, typer.Option("--wide", help=WIDE)]
AsJson = Annotated[bool, typer.Option("--json", help=AS_JSON)]


@dataclass(frozen=True)
class Options:
    """What all records have: the options that the user gave, by field."""

    given: dict[str, str] = field(default_factory=dict, kw_only=True, compare=False)

    def options_given(self, *names: str) -> list[str]:
        """Return the options among these fields that the user gave, with any value."""
        return [self.given[name] for name in names if name in self.given]

    def options_given_beside(self, *names: str) -> list[str]:
        """Return the options that the user gave, except for those of these fields."""
        return [option for name, option in self.given.items() if name not in names]


@dataclass(frozen=True)
class Request(Options):
    """The options of `memlab measure`; `memlab train` shares some.

    An option that was not given is None; memlab.cli.choices replaces it by a suitable value.
    """

    model: Annotated[
        str | None,
        typer.Option(help=f"Model to measure: {MODEL}", metavar="NAME|PATH|ID"),
    ] = None
    library: Library = None
    image: Image = None
    batch: Batch = None
    seq_len: SeqLen = None
    dtype: Dtype = None
    techniques: Annotated[
        list[str] | None,
        typer.Option(
            "--technique",
            help="Technique to compare with the plain step (default: all of them). Join names "
            "with + to combine techniques. Repeat the option to compare several.",
            metavar="NAME",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda (also ROCm), mps or xpu. Default: the accelerator if there is one, "
            "else the CPU. With --dry-run, cuda (most GPUs), cuda:hopper, a GPU such as "
            "cuda:rtx3060 or cuda:t4, or an architecture such as cuda:sm_86 predicts the memory "
            "needed there.",
            metavar="NAME",
        ),
    ] = None
    dry: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Compute nothing and allocate nothing: exact bytes for a model of any size.",
        ),
    ] = False
    ranks: Annotated[
        int | None,
        integer_option(
            "--ranks",
            MAX_RANKS,
            "Show what one rank of this many holds and sends in each ZeRO stage. Uses a dry run "
            "of one of the models. With --script: run the function as rank 0 of this many "
            "processes, whose collectives send nothing.",
        ),
    ] = None
    script: Annotated[
        str | None,
        typer.Option(
            help="Measure your own training step: a function that returns (step, model, "
            "optimizer).",
            metavar="PATH.py:FUNCTION",
        ),
    ] = None
    assume: Assume = None
    lora_rank: adapter_options.Rank = None
    lora_targets: adapter_options.Targets = None
    all: Annotated[
        bool,
        typer.Option(
            "--all", help="Print and time every technique, with every note, not one screen of them."
        ),
    ] = False
    out: Annotated[
        str, typer.Option(help="Folder for the pictures and the results.", metavar="FOLDER")
    ] = "work"
    wide: Wide = False
    as_json: AsJson = False
    zero: int | None = None  # only of `memlab train`


@dataclass(frozen=True)
class TrainRequest(Options):
    """The options of `memlab train`."""

    model: Annotated[
        str | None,
        typer.Option(help=f"Model to train: {MODEL}", metavar="NAME|PATH|ID"),
    ] = None
    library: Library = None
    image: Image = None
    technique: Annotated[
        str,
        typer.Option(
            help="Technique to train with. Join names with + to combine techniques.", metavar="NAME"
        ),
    ] = "plain"
    dtype: Dtype = None
    batch: Batch = None
    seq_len: SeqLen = None
    steps: Annotated[
        int,
        integer_option("--steps", MAX_STEPS, "Training steps to run, each on a new batch."),
    ] = 10
    memory: Annotated[
        str | None,
        typer.Option(
            help="Limit on the memory that CUDA's caching allocator may reserve, such as 24GB. "
            "The CUDA context needs memory in addition.",
            metavar="BYTES",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda (also ROCm), mps or xpu. Default: the accelerator if there is one, "
            "else the CPU.",
            metavar="NAME",
        ),
    ] = None
    zero: Annotated[
        int | None,
        integer_option(
            "--zero",
            MAX_STAGE,
            "Train on several GPUs with this stage of ZeRO, 0 (data parallel) to 3. Needs "
            "torchrun.",
            minimum=0,
        ),
    ] = None
    ranks: Annotated[
        int | None,
        integer_option(
            "--ranks",
            MAX_RANKS,
            "Processes that the recipe was planned for. With another number of them, nothing is "
            "trained.",
        ),
    ] = None
    lora_rank: adapter_options.Rank = None
    lora_targets: adapter_options.Targets = None
    dry: bool = False  # no option: whether the setting is chosen for a dry run

    @property
    def techniques(self) -> tuple[str, ...]:
        """Return the technique as `memlab measure` has them."""
        return (self.technique,)


StepRequest = Request | TrainRequest


@dataclass(frozen=True)
class PlanRequest(Options):
    """The options of `memlab plan`."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Model to plan for: a preset (memlab measure --help lists them), a config.json in "
            "Hugging Face's format or its folder, or an id on the Hub such as Qwen/Qwen2.5-7B.",
            metavar="NAME|PATH|ID",
        ),
    ] = None
    library: Library = None
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--gpu",
            help="Memory of each GPU: 24GB (24·10⁹ bytes), 24GiB (24·2³⁰ bytes), or a GPU's name "
            "such as rtx4090 or m3-max-64; list prints all names.",
            metavar="BYTES|GPU|list",
        ),
    ] = None
    margin: Annotated[
        str | None,
        typer.Option(
            help="Memory to leave free: a percentage such as 2% or bytes such as 500MiB. Default: "
            "as much as measured steps needed above their prediction.",
            metavar="PERCENT|BYTES",
        ),
    ] = None
    gpus: Annotated[
        int,
        integer_option(
            "--gpus",
            MAX_RANKS,
            "Number of GPUs. With --script: run the function as rank 0 of this many processes.",
        ),
    ] = 1
    batch: Annotated[
        int,
        integer_option("--batch", MAX_SEQUENCES, "Sequences per batch on each GPU."),
    ] = 1
    seq_len: Annotated[
        int | None,
        integer_option(
            "--seq",
            MAX_TOKENS,
            "Tokens per sequence. Default: 2048, or the model's maximum if it is smaller.",
        ),
    ] = None
    image: Image = None
    code: Annotated[
        str | None,
        typer.Option(
            help="Whose techniques the printed code of a transformers model uses: production "
            "(transformers, peft, bitsandbytes; the default) or memlab.",
            metavar="NAME",
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            help="Consider only this precision: float32, autocast, bfloat16 or master-weights.",
            metavar="NAME",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Consider only this optimizer: adamw, adam8bit, lion, lion8bit, adam-mini, muon, "
            "galore or apollo-mini.",
            metavar="NAME",
        ),
    ] = None
    lora: Annotated[
        bool | None,
        typer.Option("--lora/--full", help="Consider only LoRA, or only training all weights."),
    ] = None
    qlora: Annotated[
        bool,
        typer.Option("--qlora", help="Consider only QLoRA: LoRA beside frozen 4-bit weights."),
    ] = False
    lora_rank: adapter_options.Rank = None
    lora_targets: adapter_options.Targets = None
    recipes: Annotated[
        int,
        integer_option(
            "--recipes",
            MAX_RECIPES,
            "Recipes to predict operator by operator, alternating between full fine-tuning, LoRA "
            "and QLoRA. A formula only ranks them.",
        ),
    ] = 3
    device: Annotated[
        str | None,
        typer.Option(
            help="Device to predict for: cuda (most GPUs), cuda:hopper, a GPU such as "
            "cuda:rtx3060, an architecture such as cuda:sm_86, or cpu for a machine without a "
            "GPU. Default: the GPU given by --gpu, else cuda.",
            metavar="NAME",
        ),
    ] = None
    script: Annotated[
        str | None,
        typer.Option(
            help="Plan your own training step: a function that returns (step, model, optimizer).",
            metavar="PATH.py:FUNCTION",
        ),
    ] = None
    assume: Assume = None
    deepspeed: Annotated[
        str | None,
        typer.Option(
            help="List what a DeepSpeed training holds, and the keys that decide it, by formula.",
            metavar="CONFIG.json",
        ),
    ] = None
    out: Annotated[
        str, typer.Option(help="Folder for the picture and the results.", metavar="FOLDER")
    ] = "work"
    wide: Wide = False
    as_json: AsJson = False


@dataclass(frozen=True)
class RunRequest(Options):
    """The options of `memlab run`."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ITS OWN ARGUMENTS]",
            help="A script, -m and a module, or torchrun, accelerate launch or deepspeed with "
            "their options and a script.",
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--gpu",
            help="Memory that the step should fit into: 24GB (24·10⁹ bytes), 24GiB (24·2³⁰ bytes), "
            "or a GPU's name such as rtx4090.",
            metavar="BYTES|GPU",
        ),
    ] = None
    margin: Annotated[
        str | None,
        typer.Option(
            help="Memory to leave free: a percentage such as 2% or bytes such as 500MiB.",
            metavar="PERCENT|BYTES",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="Device to predict for: cuda (most GPUs), a GPU such as cuda:rtx3060, or cpu. "
            "Default: the GPU given by --gpu, else cuda.",
            metavar="NAME",
        ),
    ] = None
    gpus: Annotated[
        int | None,
        integer_option(
            "--gpus",
            MAX_RANKS,
            "Number of GPUs that the script finds. memlab predicts the first one. Default: one, or "
            "the number of processes that torchrun would start.",
        ),
    ] = None
    ranks: Annotated[
        int | None,
        integer_option(
            "--ranks",
            MAX_RANKS,
            "Run the script as one of this many torchrun processes, one rank at a time: rank 0, "
            "and for a pipeline each stage that differs. Above 8 ranks, a node has 8.",
        ),
    ] = None
    rank: Annotated[
        Any,
        integers_option(
            "--rank",
            MAX_RANKS,
            "Ranks to run instead of these, such as 0 or 0,960.",
        ),
    ] = None
    real: Annotated[
        bool,
        typer.Option("--real", help="Run the script for real, and measure it on its device."),
    ] = False
    steps: Annotated[
        int,
        integer_option(
            "--steps",
            MAX_STEPS,
            "Training steps to run. The last one is measured; the first allocates the optimizer's "
            "state.",
        ),
    ] = 2
    assume: Annotated[
        str | None,
        typer.Option(help=ASSUME.removesuffix(" Only with --script."), metavar="most|FRACTION"),
    ] = None
    allow_writes: Annotated[
        bool,
        typer.Option(
            "--allow-writes",
            help="Let the script write files, open connections and start programs.",
        ),
    ] = False
    advise: Annotated[
        bool | None,
        typer.Option(
            "--advise/--no-advice",
            help="Predict what LoRA, checkpointing, autocast, a chunked loss and a fused or 8-bit "
            "optimizer would save, with their code. Takes one more run for each. Default: if the "
            "step does not fit.",
        ),
    ] = None
    configs: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            help="config.json, or its folder, of a Hub model missing on this machine. Its weights "
            "are random. Can be repeated.",
            metavar="NAME=PATH",
        ),
    ] = None
    batch_like: Annotated[
        str | None,
        typer.Option(
            help="Columns of a Hub data set missing on this machine: "
            "text=str:400 (400 words), label=int:2 (2 classes), input_ids=ids:1024, "
            "image=image:512x512, audio=audio:16000 (samples at 16 kHz), values=float:10 or "
            "messages=chat:400, joined by commas. Lists: tokens=list:20:str:1,"
            "ner_tags=list:20:int:9. Dictionaries: translation.en=str:20,translation.de=str:20.",
            metavar="COLUMNS",
        ),
    ] = None
    out: Annotated[
        str, typer.Option(help="Folder for the pictures and the results.", metavar="FOLDER")
    ] = "work"
    as_json: AsJson = False
    confinement: Confinement | None = None  # no option: of the child process


@dataclass(frozen=True)
class ExplainRequest(Options):
    """The options of `memlab explain`."""

    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A memory snapshot, a log with an out-of-memory message (- for standard input), "
            "or a memlab trace as JSON.",
        ),
    ]
    device: Annotated[
        int | None,
        integer_option(
            "--device",
            MAX_RANKS,
            "The GPU's number, if a snapshot has several. Default: the GPU that ran out of memory.",
            minimum=0,
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--gpu",
            help="Memory of the GPU, which a snapshot does not state: 24GB, 24GiB, or a GPU's "
            "name such as rtx4090. It shows what other processes used.",
            metavar="BYTES|GPU",
        ),
    ] = None
    all: Annotated[
        bool,
        typer.Option("--all", help="Print every cause, remedy and size, not one screen of them."),
    ] = False
    out: Annotated[
        str, typer.Option(help="Folder for the report, explain.html.", metavar="FOLDER")
    ] = "work"
    as_json: AsJson = False


def takes(record: type[Options]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Decorate a command: its options are the record's, and it gets one."""
    hints = get_type_hints(record, include_extras=True)
    options = [each for each in fields(record) if hasattr(hints[each.name], "__metadata__")]

    def decorate(command: Callable[[Any], None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            command(record(**values, given=_given_by_the_user(context)))

        parameters = [inspect.Parameter("context", _NAMED, annotation=typer.Context)]
        for each in options:
            default = each.default if each.default is not MISSING else inspect.Parameter.empty
            parameters.append(
                inspect.Parameter(each.name, _NAMED, default=default, annotation=hints[each.name])
            )
        vars(run)["__signature__"] = inspect.Signature(parameters)  # what typer reads
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


_NAMED = inspect.Parameter.KEYWORD_ONLY


def _given_by_the_user(context: typer.Context) -> dict[str, str]:
    """Return the option of each field that the user gave, in the order of the command line."""
    typed = {word.partition("=")[0] for word in sys.argv}
    option_of = {
        param.name: next(filter(typed.__contains__, spellings), spellings[0])
        for param in context.command.params
        if (spellings := [*param.opts, *param.secondary_opts])
    }
    source_of = context.get_parameter_source
    named = [name for name in context.params if getattr(source_of(name), "name", "") == _BY_USER]
    return {name: option_of[name] for name in named}


_BY_USER = "COMMANDLINE"  # of typer's ParameterSource
