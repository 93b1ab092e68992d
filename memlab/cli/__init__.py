"""The command `memlab`."""

import codecs
import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any, NoReturn

import typer

from memlab.cli.errors import UsageError, one_line
from memlab.cli.parsing import Command, Commands, number, whole
from memlab.cli.requests import Request

# Nothing here imports torch, which takes seconds: each command does so when it is called. The help
# comes at once then, and Ctrl-C during those seconds is caught in `main`.

INTERRUPTED = 130  # as shells count: 128 and the number of the signal
# What is more than this is a slip, and takes longer to refuse than to type.
MOST_SEQUENCES, MOST_TOKENS, MOST_STEPS = 10**6, 10**8, 10**9
MOST_RANKS = 100_000  # beyond, all is padding
MOST_RECIPES = 100
ASSUME = (
    "With --script, where a dry run meets a size that depends on values, as in x[mask]: most "
    "(every element is chosen) or a fraction of them."
)
KERNELS = (
    "Take flash-attention, chunked-loss, int8-activations, int4-activations, adam8bit and lion8bit "
    "by their Triton kernels, on CUDA."
)
IN_ASCII = {
    "×": "x",
    "█": "#",
    "·": "-",
    "–": "-",
    "—": "-",
    "…": "...",
    "³": "^3",
    "²": "^2",
    "≈": "~",
    "●": "*",
    "○": ".",
}

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Where every byte of a training step goes, measured.\n\n"
    "Start with [bold]memlab measure[/]: it takes one step of a small model, plain and with each "
    "memory technique, and shows what each saves and costs on this machine. "
    "[bold]memlab doctor[/] says what this machine has. "
    "[bold]memlab start 1[/] begins the course.",
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from memlab import __version__

        print(f"memlab {__version__}")
        raise typer.Exit


@app.callback()
def _any_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say which this is."),
    ] = False,
) -> None:
    """What can be said before a command."""


class _WithNames(Command):
    """A command whose help ends with the names of the models and of the techniques."""

    def format_help(self, *args: Any) -> None:
        from memlab.model import PRESETS
        from memlab.train import TECHNIQUES

        techniques = "\n\n".join(f"[bold]{name}[/]: {t.summary}" for name, t in TECHNIQUES.items())
        self.epilog = f"The models: {', '.join(PRESETS)}\n\nThe techniques:\n\n{techniques}"
        super().format_help(*args)


@app.command("measure", cls=_WithNames)
def measure_command(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="One of those below, small to large.", metavar="NAME")
    ] = None,
    batch: Annotated[
        int | None,
        number("--batch", MOST_SEQUENCES, "Sequences in a batch."),
    ] = None,
    seq: Annotated[
        int | None,
        number("--seq", MOST_TOKENS, "Tokens in a sequence."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: float32, bfloat16 or float16.", metavar="NAME"),
    ] = None,
    technique: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this one, beside plain; a+b is both at once. May be given again.",
            metavar="NAME",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda (ROCm too), mps or xpu; found by itself. With --dry-run, cuda or "
            "cuda:hopper predicts what such a card would need.",
            metavar="NAME",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Compute nothing: exact bytes of models of any size."),
    ] = False,
    ranks: Annotated[
        int | None,
        number(
            "--ranks",
            MOST_RANKS,
            "What one of so many ranks holds and sends in each stage of ZeRO, by a dry run of "
            "one of the models.",
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            help="A step of your own: a function that returns (step, model, optimizer).",
            metavar="PATH.py:FUNCTION",
        ),
    ] = None,
    assume: Annotated[str | None, typer.Option(help=ASSUME, metavar="most|FRACTION")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help=KERNELS)] = False,
    out: Annotated[
        str, typer.Option(help="The folder for pictures and numbers.", metavar="FOLDER")
    ] = "work",
) -> None:
    """Show where the bytes of one training step go, and what each technique saves and costs.

    Without options, it takes a model that suits this machine, and a minute or two. The step
    that is measured is the second: the first creates the optimizer's state.

    [bold]memlab measure --technique checkpointing --batch 8[/]

    [bold]memlab measure --model llama-2-7b --dtype bfloat16 --batch 1 --seq 2048 --dry-run[/]

    [bold]memlab measure --model llama-3-8b --dtype bfloat16 --batch 1 --seq 2048 --ranks 8[/]

    [bold]memlab measure --script train.py:build --dry-run --device cuda[/]
    """
    request = Request(
        model=model,
        batch=batch,
        seq_len=seq,
        dtype=dtype,
        techniques=tuple(technique or ()),
        device=device,
        dry=dry_run,
        ranks=ranks,
        script=script,
        assume=assume,
        kernels=kernels,
        out=out,
    )
    _refuse_conflicts(request, context)
    if ranks is not None:
        from memlab.cli.ranks import measure_ranks as measure
    elif script is not None:
        from memlab.cli.script import measure_script as measure
    else:
        from memlab.cli.measure import measure_techniques as measure
    raise typer.Exit(measure(request))


def _refuse_conflicts(request: Request, context: typer.Context) -> None:
    """Options of `memlab measure` that do not go together."""
    if request.ranks is not None:
        if given := " and ".join(_given(context, "script", "device", "kernels", "assume")):
            raise UsageError(
                f"got --ranks together with {given}; a rank is measured by a dry run of one of the "
                f"models, on no device: leave {given} out"
            )
        return
    _require_script_for(request.assume, request.script)
    if request.script is None:
        return
    if request.kernels:
        raise UsageError(
            "got --script together with --kernels; call memlab.kernels in the script, and leave "
            "--kernels out"
        )
    if given := ", ".join(_given(context, "model", "batch", "seq", "dtype", "technique")):
        raise UsageError(
            f"got --script together with {given}; a script brings its own model and batch, so "
            f"leave them out"
        )


@app.command("train", cls=_WithNames)
def train_command(
    model: Annotated[
        str | None,
        typer.Option(help="One of those below, or a file of a shape.", metavar="NAME|CONFIG.json"),
    ] = None,
    technique: Annotated[
        str, typer.Option(help="One of those below; a+b is both at once.", metavar="NAME")
    ] = "plain",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: float32, bfloat16 or float16.", metavar="NAME"),
    ] = None,
    batch: Annotated[
        int | None,
        number("--batch", MOST_SEQUENCES, "Sequences in a batch."),
    ] = None,
    seq: Annotated[
        int | None,
        number("--seq", MOST_TOKENS, "Tokens in a sequence."),
    ] = None,
    steps: Annotated[
        int,
        number("--steps", MOST_STEPS, "How many, each on a new batch."),
    ] = 10,
    memory: Annotated[
        str | None,
        typer.Option(
            help="On CUDA: the most that the allocator may reserve, such as 24GB. The context "
            "that CUDA itself takes in a process comes on top.",
            metavar="BYTES",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda (ROCm too), mps or xpu; found by itself.", metavar="NAME"),
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help=KERNELS)] = False,
) -> None:
    """Take real training steps: their loss, their peak and their seconds.

    The weights are random and the text is torch's own source, a byte a token: nothing is
    downloaded, and nothing is written. The loss is in nats and starts near the logarithm of the
    vocabulary. What a step takes, without taking it, says memlab measure --dry-run.

    [bold]memlab train --model 25m --steps 20[/]

    [bold]memlab train --model 25m --technique checkpointing+lion8bit[/]

    [bold]memlab train --model llama-2-7b --dtype bfloat16 --batch 1 --seq 2048 --memory 24GB \
--technique checkpointing+lion8bit+step-in-backward+chunked-loss[/]
    """
    from memlab.cli.train import train

    request = Request(
        model=model,
        batch=batch,
        seq_len=seq,
        dtype=dtype,
        techniques=(technique,),
        device=device,
        kernels=kernels,
    )
    train(request, steps=steps, memory=memory)


@app.command("plan", cls=Command)
def plan_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset (memlab measure --help names them), or the path of a config.json in "
            "Hugging Face's format.",
            metavar="NAME|PATH",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--gpu",
            help="Of each GPU: 24GB (24·10⁹ bytes), 24GiB (24·2³⁰), or a card such as rtx4090.",
            metavar="BYTES|CARD",
        ),
    ] = None,
    gpus: Annotated[
        int,
        number("--gpus", MOST_RANKS, "How many of them."),
    ] = 1,
    batch: Annotated[
        int,
        number("--batch", MOST_SEQUENCES, "Sequences in the batch of each GPU."),
    ] = 1,
    seq: Annotated[
        int | None,
        number(
            "--seq",
            MOST_TOKENS,
            "Tokens in a sequence; 2048, or what the model takes, unless given.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Only this one: float32, autocast, bfloat16 or master-weights.", metavar="NAME"
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Only this one: adamw, adam8bit, adam-mini, lion or lion8bit.", metavar="NAME"
        ),
    ] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Only LoRA, or only all weights.")
    ] = None,
    tensor_parallel: Annotated[
        int,
        number(
            "--tensor-parallel",
            MOST_RANKS,
            "Parts of each matrix on as many GPUs; by formula alone.",
        ),
    ] = 1,
    pipeline_parallel: Annotated[
        int,
        number("--pipeline-parallel", MOST_RANKS, "Parts of the model's depth; by formula alone."),
    ] = 1,
    count: Annotated[
        int,
        number("--recipes", MOST_RECIPES, "How many to measure; the others are by formula."),
    ] = 2,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Measure the largest batch and length, too: some minutes."),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:hopper, or cpu for the memory of a machine without a GPU; as the card "
            "has it.",
            metavar="NAME",
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            help="A step of your own: a function that returns (step, model, optimizer).",
            metavar="PATH.py:FUNCTION",
        ),
    ] = None,
    assume: Annotated[str | None, typer.Option(help=ASSUME, metavar="most|FRACTION")] = None,
    out: Annotated[
        str, typer.Option(help="The folder for the picture and the numbers.", metavar="FOLDER")
    ] = "work",
) -> None:
    """Say whether a model's training fits into a memory, with which recipe, at what cost.

    Recipes are compared by formula, the fastest of them predicted operator by
    operator, and what is said to fit was predicted to, reserved bytes and CUDA's
    own share included. No GPU is needed. The last line is the command that trains
    so. The exit status is 1 if nothing fits.

    [bold]memlab plan --model llama-2-7b --memory 24GB[/]

    [bold]memlab plan --model llama-3-8b --gpu rtx4090 --lora --seq 4096[/]

    [bold]memlab plan --model path/to/config.json --gpu a100-80 --gpus 8[/]

    [bold]memlab plan --script train.py:build --memory 16GiB[/]
    """
    if script is not None:
        from memlab.cli.plan_script import plan_script

        its_own = ("script", "memory", "device", "assume", "out")
        others = [n for n in context.params if n not in its_own]
        if given := ", ".join(_given(context, *others)):
            raise UsageError(
                f"got --script together with {given}; a script brings its own model, batch and "
                f"optimizer, and is planned for one GPU, so leave them out"
            )
        raise typer.Exit(plan_script(script, memory=memory, target=device, out=out, assume=assume))

    _require_script_for(assume, script)
    from memlab.cli.plan import plan_model

    status = plan_model(
        model=model,
        memory=memory,
        gpus=gpus,
        batch=batch,
        seq_len=seq,
        precision=precision,
        optimizer=optimizer,
        lora=lora,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        count=count,
        exact=exact,
        target=device,
        out=out,
    )
    raise typer.Exit(status)


@app.command("doctor", cls=Command)
def doctor_command() -> None:
    """Say what this machine has and what works on it, one OK or FAIL a line."""
    from memlab.cli.doctor import examine

    raise typer.Exit(examine())


# ------------------------------------------------------------------ the course

COURSE = "The course"

DayNumber = Annotated[
    int,
    typer.Argument(metavar="DAY", help="The number of a day, such as 1.", parser=whole("the day")),
]
ExerciseId = Annotated[
    str, typer.Argument(metavar="EXERCISE", help="A day and a number in it, such as 1.2.")
]
Sure = Annotated[bool, typer.Option("--yes", help="Don't ask.")]


@app.command("start", cls=Command, rich_help_panel=COURSE)
def start_command(
    day: DayNumber,
    to_jupyter: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="What is handed on to JupyterLab."),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Make the copy, no more.")] = False,
) -> None:
    """Copy a day's lesson into work/ and open the copy in JupyterLab.

    The copy is yours: guess before you measure, write what is missing. It is
    never overwritten, and a newer version of the lesson leaves it as it is.
    JupyterLab runs until Ctrl-C.

    [bold]memlab start 1[/]

    [bold]memlab start 1 --no-open[/]

    [bold]memlab start 1 -- --no-browser --port 8890[/]
    """
    from memlab.cli import course

    raise typer.Exit(course.start(day, opens=not no_open, to_jupyter=to_jupyter or []))


@app.command("check", cls=Command, rich_help_panel=COURSE)
def check_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="DAY|EXERCISE", help="A day, such as 1, or one exercise, such as 1.2."
        ),
    ],
) -> None:
    """Say which of your answers are right, on their values and on their bytes.

    Your copy in work/ is read as it was last saved. Of it only imports, constants,
    functions and classes are run: what an answer needs, it gets as arguments.
    The exit status is 0 if everything is right, 1 if not, and 2 for what is no day or exercise.

    [bold]memlab check 1[/]

    [bold]memlab check 1.2[/]
    """
    from memlab.cli import course

    raise typer.Exit(course.check(what))


@app.command("hint", cls=Command, rich_help_panel=COURSE)
def hint_command(exercise: ExerciseId) -> None:
    """Show a hint: the first is a nudge, the third is nearly the answer.

    Each time it is one more, together with those before it.

    [bold]memlab hint 1.2[/]
    """
    from memlab.cli import course

    raise typer.Exit(course.hint(exercise))


@app.command("diff", cls=Command, rich_help_panel=COURSE)
def diff_command(exercise: ExerciseId, yes: Sure = False) -> None:
    """Show your answer beside the solution: what to take out (-), what to put in (+).

    It asks first if you have not tried the exercise yet.

    [bold]memlab diff 1.2[/]
    """
    from memlab.cli import course

    raise typer.Exit(course.diff(exercise, sure=yes))


@app.command("progress", cls=Command, rich_help_panel=COURSE)
def progress_command() -> None:
    """Show what is done, what is left, and how your guesses come closer."""
    from memlab.cli import course

    raise typer.Exit(course.progress())


@app.command("reset", cls=Command, rich_help_panel=COURSE)
def reset_command(day: DayNumber, yes: Sure = False) -> None:
    """Begin a day again: your copy moves to work/backups/, nothing is deleted.

    A fresh copy takes its place, and the day's checks, hints and guesses are
    forgotten. It says what it will do and asks; if the answer is no, nothing
    changes and the exit status is 1.

    [bold]memlab reset 1[/]
    """
    from memlab.cli import course

    raise typer.Exit(course.reset(day, sure=yes))


# ------------------------------------------------------------------ what all commands share


def main() -> None:
    """Run the command line: what a user can cause ends as one line on standard error, status 2."""
    _print_what_the_terminal_can()
    _require_a_folder_to_work_in()
    _require_text(sys.argv[1:])
    try:
        status = app(prog_name="memlab", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):  # which of the two depends on typer's version
        status = INTERRUPTED
    except UsageError as error:  # anything else is a mistake of ours, and keeps its traceback
        _fail(str(error), 2)
    if status == INTERRUPTED:
        _fail("interrupted; nothing was written", INTERRUPTED)
    sys.exit(status)


def _given(context: typer.Context, *names: str) -> list[str]:
    """The options of those parameters that were given, whatever their value."""
    option_of = {param.name: param.opts[0] for param in context.command.params}
    source_of = context.get_parameter_source
    return [option_of[n] for n in names if getattr(source_of(n), "name", "") == "COMMANDLINE"]


def _require_script_for(assume: str | None, script: str | None) -> None:
    if assume is not None and script is None:
        raise UsageError(
            "got --assume without --script; in memlab's own models no size depends on values, so "
            "leave --assume out"
        )


def _fail(message: str, status: int) -> NoReturn:
    print(f"memlab: {one_line(message)}", file=sys.stderr)
    sys.exit(status)


def _require_a_folder_to_work_in() -> None:
    """Before torch is imported, whose libraries end the process in a folder that is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        _fail("the folder that this runs in has been removed; change to one that is there", 2)


def _require_text(arguments: Iterable[str]) -> None:
    """A path may be any bytes; pictures and results, which hold it as text, may not."""
    for argument in arguments:
        if not argument.isascii() and any("\ud800" <= c <= "\udfff" for c in argument):
            _fail(
                f"got {argument!r}, which is not UTF-8; rename the file or folder, or retype it", 2
            )


def _print_what_the_terminal_can() -> None:
    """Write × as x where the encoding has none, rather than end with a UnicodeEncodeError."""
    codecs.register_error("memlab", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="memlab")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """What to write for what the encoding has not, and where to go on."""
    assert isinstance(error, UnicodeEncodeError)
    characters = error.object[error.start : error.end]
    return "".join(IN_ASCII.get(c, "?") for c in characters), error.end
