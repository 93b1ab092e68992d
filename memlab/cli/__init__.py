"""The command `memlab`."""

import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console

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


class UsageError(Exception):
    """What the user gave cannot be used; the message says what was got, wanted, and what to do."""


@app.command()
def measure(
    model: Annotated[
        str | None, typer.Option(help="A preset, such as 25m, 124m or llama-2-7b.", metavar="NAME")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences in a batch.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: float32, bfloat16 or float16.")
    ] = None,
    technique: Annotated[
        list[str] | None,
        typer.Option(help="Only this one, beside plain; may be given again.", metavar="NAME"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda (ROCm too), mps or xpu; found by itself.")
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
    out: Annotated[str, typer.Option(help="The folder for pictures and numbers.")] = "work",
) -> None:
    """Show where the bytes of one training step go, and what each technique saves and costs.

    Without options, it takes a model that suits this machine and about a minute.

    [bold]memlab measure --technique checkpointing --batch 8[/]

    [bold]memlab measure --model llama-2-7b --dtype bfloat16 --batch 1 --seq 2048 --dry-run[/]

    [bold]memlab measure --script train.py:build[/]

    The step that is measured is the second: the first creates the optimizer's state.
    """
    from memlab.cli.measure import measure_script, measure_techniques

    if script is not None:
        given = {"--model": model, "--batch": batch, "--seq": seq, "--dtype": dtype}
        clashing = [name for name, value in {**given, "--technique": technique}.items() if value]
        if clashing:
            raise UsageError(
                f"got --script together with {', '.join(clashing)}; a script brings its own model "
                f"and batch, so leave them out"
            )
        measure_script(script, device=device, dry=dry_run, out=out)
    else:
        measure_techniques(
            model=model,
            batch=batch,
            seq_len=seq,
            dtype=dtype,
            names=technique,
            device=device,
            dry=dry_run,
            out=out,
        )


@app.command()
def doctor() -> None:
    """Say what this machine has and what works on it, one OK or FAIL a line."""
    from memlab.cli.doctor import examine

    raise typer.Exit(examine())


def main() -> None:
    """Run the command line: what a user can cause ends as one line on standard error, status 2."""
    try:
        sys.exit(app(prog_name="memlab", standalone_mode=False))
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written", 130)
    except (UsageError, ValueError) as error:
        _fail(str(error), 2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what the parser of the command line raises
            raise
        message = error.format_message()  # empty after the help that no arguments bring
        _fail(f"{message} (memlab --help says more)", 2) if message else sys.exit(2)


def _fail(message: str, status: int) -> NoReturn:
    Console(stderr=True, highlight=False).print(f"memlab: {message}", markup=False, soft_wrap=True)
    sys.exit(status)
