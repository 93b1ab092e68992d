"""The command `memlab`."""

import codecs
import sys
from typing import Annotated, NoReturn

import typer

from memlab.cli.errors import UsageError
from memlab.model import PRESETS
from memlab.train import TECHNIQUES

INTERRUPTED = 130  # as shells count: 128 and the number of the signal
IN_ASCII = {"×": "x", "█": "#", "·": "-", "–": "-", "—": "-", "…": "...", "³": "^3", "²": "^2"}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Where every byte of a training step goes, measured.\n\n"
    "Start with [bold]memlab measure[/]: it takes one step of a small model, plain and with each "
    "memory technique, and shows what each saves and costs on this machine. "
    "[bold]memlab doctor[/] says what this machine has.",
)


@app.command(
    "measure",
    epilog="The techniques:\n\n"
    + "\n\n".join(f"[bold]{name}[/]: {t.summary}" for name, t in TECHNIQUES.items()),
)
def measure_command(
    model: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PRESETS)}.", metavar="NAME")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences in a batch.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: float32, bfloat16 or float16.", metavar="NAME"),
    ] = None,
    technique: Annotated[
        list[str] | None,
        typer.Option(help="Only this one, beside plain; may be given again.", metavar="NAME"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda (ROCm too), mps or xpu; found by itself.", metavar="NAME"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Compute nothing: exact bytes of models of any size."),
    ] = False,
    script: Annotated[
        str | None,
        typer.Option(
            help="A step of your own: a function that returns (step, model, optimizer).",
            metavar="PATH.py:FUNCTION",
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(help="The folder for pictures and numbers.", metavar="FOLDER")
    ] = "work",
) -> None:
    """Show where the bytes of one training step go, and what each technique saves and costs.

    Without options, it takes a model that suits this machine, and about a minute. The step that is
    measured is the second: the first creates the optimizer's state.

    [bold]memlab measure --technique checkpointing --batch 8[/]

    [bold]memlab measure --model llama-2-7b --dtype bfloat16 --batch 1 --seq 2048 --dry-run[/]

    [bold]memlab measure --script train.py:build[/]
    """
    if script is None:
        from memlab.cli.measure import measure_techniques

        status = measure_techniques(
            model=model,
            batch=batch,
            seq_len=seq,
            dtype=dtype,
            names=technique,
            device=device,
            dry=dry_run,
            out=out,
        )
        raise typer.Exit(status)

    from memlab.cli.script import measure_script

    given = {
        "--model": model,
        "--batch": batch,
        "--seq": seq,
        "--dtype": dtype,
        "--technique": technique or None,
    }
    if clashing := [option for option, value in given.items() if value is not None]:
        raise UsageError(
            f"got --script together with {', '.join(clashing)}; a script brings its own model "
            f"and batch, so leave them out"
        )
    measure_script(script, device=device, dry=dry_run, out=out)


@app.command("doctor")
def doctor_command() -> None:
    """Say what this machine has and what works on it, one OK or FAIL a line."""
    from memlab.cli.doctor import examine

    raise typer.Exit(examine())


def main() -> None:
    """Run the command line: what a user can cause ends as one line on standard error, status 2."""
    _print_what_the_terminal_can()
    try:
        status = app(prog_name="memlab", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):  # which of the two depends on typer's version
        status = INTERRUPTED
    except UsageError as error:
        _fail(str(error), 2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what the parser of the command line raises
            raise
        message = error.format_message()  # empty after the help that no arguments bring
        _fail(f"{message} (memlab --help says more)", 2) if message else sys.exit(2)
    if status == INTERRUPTED:
        _fail("interrupted; nothing was written", INTERRUPTED)
    sys.exit(status)


def _fail(message: str, status: int) -> NoReturn:
    print(f"memlab: {message}", file=sys.stderr)
    sys.exit(status)


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
