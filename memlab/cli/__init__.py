"""The `memlab` command line.

Importing torch takes seconds, so this module does not. Each command imports torch when it runs,
which keeps `--help` fast and lets `main` catch Ctrl-C during the import.
"""

import codecs
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NoReturn

import typer

from memlab.cli import terminal, torchrun
from memlab.cli.errors import RankLostError, UsageError, error_line
from memlab.cli.parsing import Command, Commands, ScriptCommand, integer_parser
from memlab.cli.requests import (
    ExplainRequest,
    PlanRequest,
    Request,
    RunRequest,
    TrainRequest,
    takes,
)
from memlab.internals.interrupts import INTERRUPTED, INTERRUPTED_MESSAGE
from memlab.world.confinement import fork, unconfined_reason

# The parameters of `memlab plan` that --script allows.
WITH_SCRIPT = (
    *("script", "gpus", "memory", "margin", "device", "assume"),
    *("out", "wide", "as_json"),
)
# The parameters of `memlab plan` that --deepspeed allows.
WITH_DEEPSPEED = (
    *("deepspeed", "model", "gpus"),
    *("out", "wide", "as_json"),
)
IN_ASCII = {
    "×": "x",
    "→": "->",
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
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Measure where every byte of a training step goes.\n\n"
    "Start with [bold]memlab measure[/]. It runs one training step of a small model, first without "
    "any technique and then with each one, and shows how much memory each technique saves and how "
    "much time it costs on this machine. "
    "[bold]memlab doctor[/] checks this machine. "
    "[bold]memlab start 1[/] begins the course.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from memlab import __version__

        print(f"memlab {__version__}")
        raise typer.Exit


@app.callback()
def _any_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options that come before a command."""


class _WithNames(Command):
    """A command whose help ends with the names of all models and techniques."""

    def format_help(self, *args: Any) -> None:
        from memlab.model import PRESETS
        from memlab.train import TECHNIQUES

        techniques = "\n\n".join(f"[bold]{name}[/]: {t.summary}" for name, t in TECHNIQUES.items())
        self.epilog = f"Models: {', '.join(PRESETS)}\n\nTechniques:\n\n{techniques}"
        super().format_help(*args)


@app.command("measure", cls=_WithNames)
@takes(Request)
def measure_command(request: Request) -> None:
    """Show where the bytes of one training step go, and what each technique saves and costs.

    Without options, memlab picks a model that suits this machine and takes about a minute: dry
    runs give the bytes of all techniques, and the ten that save most are timed. With --model and
    --dry-run it shows the plain step; --all adds the techniques. It measures the second step,
    because the first step creates the optimizer state.
    The exit status is 0, or 1 if a technique failed, or 2 if an option is wrong.

    [bold]memlab measure --technique checkpointing --batch 8[/]

    [bold]memlab measure --model llama-2-7b --dtype bfloat16 --batch 1 --seq 2048 --dry-run[/]

    [bold]memlab measure --model llama-3-8b --dtype bfloat16 --batch 1 --seq 2048 --ranks 8[/]

    [bold]memlab measure --script train.py:build --dry-run --device cuda[/]
    """
    _refuse_conflicts(request)
    _refuse_wide_json(request.wide, request.as_json)
    _check_allocator_settings()
    if request.script is not None:
        from memlab.cli.script import measure_script as measure
    elif request.ranks is not None:
        from memlab.cli.ranks import measure_ranks as measure
    else:
        from memlab.cli.measure import measure_model as measure
    with terminal.style(wide=request.wide, as_json=request.as_json):
        status = measure(request)
    raise typer.Exit(status)


def _refuse_wide_json(wide: bool, as_json: bool) -> None:
    if wide and as_json:
        raise UsageError("got --wide together with --json, which prints no table: leave one out")


def _check_allocator_settings() -> None:
    """Refuse what predictions cannot simulate, before a script runs for minutes."""
    from memlab.allocator.settings import configuration

    try:
        configuration()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _refuse_conflicts(request: Request) -> None:
    """Raise UsageError for options of `memlab measure` that exclude each other."""
    if request.ranks is not None and request.script is None:
        if given := " and ".join(request.options_given("device", "assume")):
            raise UsageError(
                f"got --ranks together with {given}; a rank is measured by a dry run of one of the "
                f"models, without a device: leave {given} out"
            )
        return
    _require_script_for(request.assume, request.script)
    if request.script is None:
        return
    if request.ranks is not None and not request.dry:
        raise UsageError(
            "got --script together with --ranks; several ranks are predicted, so add --dry-run, or "
            "measure real ones with torchrun and memlab run --real"
        )
    if given := ", ".join(
        request.options_given("model", "batch", "seq_len", "dtype", "techniques")
    ):
        raise UsageError(
            f"got --script together with {given}; a script brings its own model and batch, so "
            f"leave them out"
        )


@app.command("train", cls=_WithNames)
@takes(TrainRequest)
def train_command(request: TrainRequest) -> None:
    """Run real training steps and print their loss, peak memory and time.

    The weights are random. The text is PyTorch's own source code, one byte per token.
    Nothing is downloaded, and nothing is written. The loss is in nats and starts near the
    logarithm of the vocabulary size. To find the memory of a step without running it, use
    memlab measure --dry-run.

    [bold]memlab train --model 25m --steps 20[/]

    [bold]memlab train --model 25m --technique checkpointing+lion8bit[/]

    [bold]memlab train --model llama-2-7b --dtype bfloat16 --batch 1 --seq 2048 --memory 24GB \
--technique checkpointing+lion8bit+step-in-backward+chunked-loss[/]

    On several GPUs, torchrun starts a process for each. Every process takes its own batches;
    the first prints the mean loss, and the largest and smallest peak of all.

    [bold]torchrun --nproc-per-node 2 -m memlab train --model 25m --zero 3[/]
    """
    from memlab.cli.train import train

    train(request)


@app.command("plan", cls=Command)
@takes(PlanRequest)
def plan_command(request: PlanRequest) -> None:
    """Find recipes that make a model's training fit into a given amount of memory.

    memlab ranks all recipes by formula. It then predicts the fastest ones operator by
    operator, including reserved memory and the CUDA context. No GPU is needed. The output
    ends with the command that runs the training. The exit status is 0 if something fits,
    1 if nothing fits, and 2 if an option is wrong.

    With --gpus, memlab compares the ways to divide the model: data (FSDP) × tensor × pipeline ×
    context. It writes a script in plain torch for the best one, and prints its torchrun command.
    With --precision, --optimizer, --lora, --full, --qlora or --device cpu, it compares
    memlab's own recipes instead, sharded by ZeRO.

    To get the largest batch and sequence length of a script, give its function the parameters
    batch (or batch_size) and seq (or seq_len) with defaults, such as
    def build(batch=8, seq_len=1024), and use both for the inputs of the step.

    [bold]memlab plan --model llama-2-7b --memory 24GB[/]

    [bold]memlab plan --model llama-3-8b --gpu rtx4090 --lora --seq 4096[/]

    [bold]memlab plan --model path/to/config.json --gpu a100-80 --gpus 8[/]

    [bold]memlab plan --script train.py:build --memory 16GiB[/]

    [bold]memlab plan --model llama-2-7b --deepspeed ds_config.json[/]
    """
    _refuse_wide_json(request.wide, request.as_json)
    _check_allocator_settings()
    if request.memory == "list":
        if others := ", ".join(request.options_given_beside("memory")):
            raise UsageError(f"got {others} together with the list of GPUs; leave {others} out")
        from memlab.cli.gpu_list import show_gpus

        show_gpus()
        raise typer.Exit
    _refuse_beside(
        request, "script", WITH_SCRIPT, "a script brings its own model, batch and optimizer"
    )
    _require_script_for(request.assume, request.script)
    _refuse_beside(
        request,
        "deepspeed",
        WITH_DEEPSPEED,
        "the table follows from the model and the config alone",
    )
    if request.script is not None:
        from memlab.cli.plan_script import plan_script as plan
    elif request.deepspeed is not None:
        from memlab.cli.plan_deepspeed import plan_deepspeed as plan
    else:
        from memlab.cli.plan import plan_model as plan
    with terminal.style(wide=request.wide, as_json=request.as_json):
        status = plan(request)
    raise typer.Exit(status)


def _refuse_beside(request: PlanRequest, name: str, allowed: Sequence[str], reason: str) -> None:
    """Refuse options that make no sense beside one that decides what is planned."""
    if getattr(request, name) is None:
        return
    if others := ", ".join(request.options_given_beside(*allowed)):
        raise UsageError(
            f"got {request.given[name]} together with {others}; {reason}, so leave them out"
        )


@app.command("run", cls=ScriptCommand)
@takes(RunRequest)
def run_command(request: RunRequest) -> None:
    """Find the memory that a training script needs, without changing a line.

    The script runs with fake tensors until the end of its second training step. Nothing is
    computed, no GPU is needed, and memlab predicts the step's memory on a GPU. Put memlab's options
    before the script and the script's own options after it. memlab finds models, optimizers and
    steps while the script runs. Files that the script writes go to a temporary folder, and it
    connects to nothing. Missing torchvision data sets and memory-mapped files are replaced by
    others of the same size. The exit status is 0 if the step fits or no memory is given, 1 if it
    does not fit, and 2 if the script or an option is wrong.

    [bold]memlab run --gpu rtx4090 train.py --batch-size 8[/]

    [bold]memlab run --gpu t4 -m package.train --config small.yaml[/]

    [bold]memlab run --config gpt2=config.json --batch-like text=str:400 run_clm.py \
--model_name_or_path gpt2 --dataset_name wikitext --do_train --output_dir out[/]

    [bold]memlab run --real train.py --device cpu[/]

    [bold]memlab run torchrun --nproc-per-node 2 train_ddp.py[/]

    [bold]memlab run --gpu h100 --ranks 64 train_fsdp.py[/]

    If the script has several processes, rank 0 runs, and every rank that it sends tensors to (the
    stages of a pipeline). Collectives finish at once. To measure real ranks:

    [bold]torchrun --nproc-per-node 2 -m memlab run --real train_ddp.py[/]
    """
    _check_allocator_settings()
    confinement = None
    if not (request.allow_writes or unconfined_reason()):
        confinement = fork(request.out)  # before torch

    from memlab.cli.run import run_script

    with terminal.style(as_json=request.as_json):
        status = run_script(replace(request, confinement=confinement))
    raise typer.Exit(status)


@app.command("explain", cls=Command)
@takes(ExplainRequest)
def explain_command(request: ExplainRequest) -> None:
    """Explain why a training ran out of memory.

    FILE is a snapshot from torch.cuda.memory._dump_snapshot, the text of a torch.OutOfMemoryError
    or a log that contains one, or a memlab trace (Trace.to_dict() as JSON). memlab prints what the
    memory held, the likely causes with their evidence, and what each remedy would save. The report
    has an interactive timeline and a map of the segments, and loads nothing from the network.
    Snapshots are pickles; memlab reads plain data from them and runs no code.

    [bold]memlab explain snapshot.pickle[/]

    [bold]python train.py 2>&1 | tee log.txt | memlab explain -[/]

    To record a snapshot, add these lines to the training:

    torch.cuda.memory._record_memory_history(max_entries=200_000) before the model is made, and
    torch.cuda.memory._dump_snapshot("snapshot.pickle") when it fails.
    """
    from memlab.cli.explain import explain_file

    with terminal.style(as_json=request.as_json):
        explain_file(request)


@app.command("doctor", cls=Command)
def doctor_command(
    world: Annotated[
        bool,
        typer.Option("--world", help="Print what memlab run replaces in Python for a script."),
    ] = False,
) -> None:
    """Check this machine: print what it has and whether memlab works on it, OK or FAIL per line."""
    from memlab.cli.doctor import examine, show_world

    raise typer.Exit(show_world() if world else examine())


# ------------------------------------------------------------------ the course

COURSE = "The course"

DayNumber = Annotated[
    int,
    typer.Argument(
        metavar="DAY", help="The number of a day, such as 1.", parser=integer_parser("the day")
    ),
]
ExerciseId = Annotated[
    str, typer.Argument(metavar="EXERCISE", help="The number of an exercise, such as 1.2.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Don't ask for confirmation.")]


@app.command("start", cls=Command, rich_help_panel=COURSE)
def start_command(
    day: DayNumber,
    to_jupyter: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="Options to pass to JupyterLab."),
    ] = None,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Copy the lesson without opening it.")
    ] = False,
) -> None:
    """Copy a day's lesson into work/ and open the copy in JupyterLab.

    The copy is yours: guess before you measure, and fill in the missing code. memlab never
    overwrites it, even when the lesson has a newer version. JupyterLab runs until you
    press Ctrl-C.

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
            metavar="DAY|EXERCISE",
            help="The number of a day, such as 1, or an exercise, such as 1.2.",
        ),
    ],
) -> None:
    """Check the values and the memory of your answers.

    memlab reads your copy in work/ as you last saved it. It runs only the imports, constants,
    functions and classes in it, and passes each answer its inputs as arguments. The exit status
    is 0 if everything is right, 1 if not, and 2 if there is no such day or exercise.

    [bold]memlab check 1[/]

    [bold]memlab check 1.2[/]
    """
    from memlab.cli import course

    raise typer.Exit(course.check(what))


@app.command("hint", cls=Command, rich_help_panel=COURSE)
def hint_command(exercise: ExerciseId) -> None:
    """Show a hint: the first is a nudge, the third nearly gives the answer.

    Each call shows one more hint, below the earlier ones.

    [bold]memlab hint 1.2[/]
    """
    from memlab.cli import course

    raise typer.Exit(course.hint(exercise))


@app.command("diff", cls=Command, rich_help_panel=COURSE)
def diff_command(exercise: ExerciseId, yes: Yes = False) -> None:
    """Compare your answer with the solution: lines to remove (-) and lines to add (+).

    It asks for confirmation first if you have not tried the exercise yet.

    [bold]memlab diff 1.2[/]
    """
    from memlab.cli import course

    raise typer.Exit(course.diff(exercise, sure=yes))


@app.command("progress", cls=Command, rich_help_panel=COURSE)
def progress_command() -> None:
    """Show which exercises are done and how close your guesses are."""
    from memlab.cli import course

    raise typer.Exit(course.progress())


@app.command("reset", cls=Command, rich_help_panel=COURSE)
def reset_command(day: DayNumber, yes: Yes = False) -> None:
    """Start a day over. Your copy moves to work/backups/; nothing is deleted.

    You get a fresh copy of the lesson, and the day's checks, hints and guesses are cleared.
    The command says what it will do and asks for confirmation. If you answer no, nothing
    changes and the exit status is 1.

    [bold]memlab reset 1[/]
    """
    from memlab.cli import course

    raise typer.Exit(course.reset(day, sure=yes))


# ------------------------------------------------------------------ shared by all commands


def main() -> None:
    """Run the command line. A user's error becomes one line on standard error and status 2."""
    _replace_unencodable_characters()
    _require_existing_folder()
    _require_text(sys.argv[1:])
    try:
        status = app(prog_name="memlab", standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        from memlab.internals.files import FULL

        if error.errno not in (*FULL, errno.EIO) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest as it exits
        _fail(f"the output could not be written: {error.strerror}; send it elsewhere", 2)
    except (KeyboardInterrupt, typer.Abort):  # which of the two depends on typer's version
        status = INTERRUPTED
    except RankLostError as error:
        _fail(str(error), 2, is_lost=True)
    except UsageError as error:  # any other exception is a bug in memlab: keep its traceback
        _fail(str(error), 2)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _fail("PyTorch is not installed; run pip install torch", 2)
    if status == INTERRUPTED:
        _fail(INTERRUPTED_MESSAGE, INTERRUPTED)
    sys.exit(status)


def _require_script_for(assume: str | None, script: str | None) -> None:
    if assume is not None and script is None:
        raise UsageError(
            "got --assume without --script; plans of models assume that routing gives every expert "
            "the same number of tokens, so leave --assume out"
        )


def _fail(message: str, status: int, *, is_lost: bool = False) -> NoReturn:
    rank = torchrun.find_rank()
    if rank is not None and sys.argv[1:2] == ["train"]:
        torchrun.print_once(message, rank, waits=status != INTERRUPTED)
    elif rank is not None and sys.argv[1:2] == ["run"] and rank.ranks > 1:
        ended = status == INTERRUPTED  # by Ctrl-C, or by torchrun as another rank has ended
        torchrun.print_cause(torchrun.ENDED if ended else message, rank, is_lost=is_lost or ended)
    else:
        print(error_line(message), file=sys.stderr)
    sys.exit(status)


def _require_existing_folder() -> None:
    """Check this before importing torch, whose libraries abort in a folder that was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        _fail("the current folder has been deleted; change to a folder that exists", 2)


def _require_text(arguments: Iterable[str]) -> None:
    """Require UTF-8 arguments: a path may hold any bytes, but pictures and results hold text."""
    for argument in arguments:
        if not argument.isascii() and any("\ud800" <= c <= "\udfff" for c in argument):
            _fail(
                f"got {argument!r}, which is not UTF-8; rename the file or folder, or retype it", 2
            )


def _replace_unencodable_characters() -> None:
    """Print × as x if the terminal's encoding lacks it, instead of a UnicodeEncodeError."""
    codecs.register_error("memlab", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="memlab")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement for characters that cannot be encoded, and where to continue."""
    assert isinstance(error, UnicodeEncodeError)
    characters = error.object[error.start : error.end]
    return "".join(IN_ASCII.get(c, "?") for c in characters), error.end
