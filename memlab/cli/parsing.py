"""The command-line parser. It reports every bad input at once, in one sentence.

typer contains the parser, as click or as a copy of it depending on the version. So this module
recognizes errors by their attributes, and replaces their text if it has a better one.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from memlab.cli.errors import UsageError, quoted, suggestions

FIRST_STEPS = """\
memlab shows where the memory of a training step goes, and what to change.

  my training ran out of memory   memlab explain log.txt
  will my script fit on a GPU?    memlab run --gpu rtx4090 train.py
  how do I train this model?      memlab plan --model llama-2-7b --gpu rtx4090
  what does a technique save?     memlab measure
  I want to learn how it works    memlab start 1

memlab doctor checks this machine. memlab --help lists all commands.
memlab COMMAND --help explains one, with examples."""


def integer_parser(
    option: str, maximum: int | None = None, minimum: int = 1
) -> Callable[[Any], int]:
    """Return a parser for an integer, which is in minimum..maximum if there is a maximum."""

    def parse(given: Any) -> int:  # a default is already an int
        try:
            count = int(given)
        except ValueError:
            count = None
        if count is None or (maximum is not None and not minimum <= count <= maximum):
            wanted = f" from {minimum} to {maximum:,}" if maximum else ", such as 1"
            raise UsageError(f"got {option} {quoted(str(given))}; expected an integer{wanted}")
        return count

    return parse


def integer_option(option: str, maximum: int, help: str, minimum: int = 1) -> Any:
    """Declare an option that takes an integer from `minimum` to `maximum`."""
    parser = integer_parser(option, maximum, minimum)
    return typer.Option(option, help=help, parser=parser, metavar="NUMBER")


def integers_option(option: str, maximum: int, help: str, minimum: int = 0) -> Any:
    """Declare an option that takes one integer or several, separated by commas."""
    one = integer_parser(option, maximum, minimum)

    def parse(given: Any) -> tuple[int, ...]:
        return tuple(dict.fromkeys(map(one, str(given).split(","))))

    return typer.Option(option, help=help, parser=parse, metavar="NUMBER,…")


class _FlagsWithoutValues:
    """Hide the type of flags in the help: `--dry-run <bool>` reads as if a value had to follow."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]  # of the command
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_FlagsWithoutValues, TyperCommand):
    """A command that refuses repeated options and extra arguments. Its help is its docstring, with
    paragraphs wrapped to the terminal's width."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", help or "")]
        super().__init__(*args, help="\n\n".join(paragraphs), **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _as_usage_errors(ctx):
            _refuse_options_as_values(ctx, args)
            _, rest, given = self.make_parser(ctx).parse_args(args=list(args))
            if not any(param.is_eager for param in given):  # --help
                _refuse_twice(given)
                _refuse_too_many(ctx, rest)
            return super().parse_args(ctx, args)


class ScriptCommand(Command):
    """A command whose first argument is a script, or -m and a module; the rest is its own."""

    allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = _with_module_as_argument(ctx, args)
        with _as_usage_errors(ctx):
            _, rest, given = self.make_parser(ctx).parse_args(args=list(args))
            own = args[: len(args) - len(rest)]
            _refuse_options_as_values(ctx, own)
            if not any(param.is_eager for param in given):  # --help
                _refuse_twice(given)
            return TyperCommand.parse_args(self, ctx, args)


class Commands(_FlagsWithoutValues, TyperGroup):
    """The group of all commands. It requires the name of one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _as_usage_errors(ctx):
            if not set(args) - {"--"}:
                print(FIRST_STEPS)
                raise typer.Exit
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _as_usage_errors(ctx):
            if self.get_command(ctx, args[0]) is None:
                raise UsageError(
                    f"got the command {quoted(args[0])}; {suggestions(args[0], self.commands)}"
                )
            return super().resolve_command(ctx, args)


# ------------------------------------------------------------------ errors


def _with_module_as_argument(ctx: Any, args: list[str]) -> list[str]:
    """Put `--` before `-m MODULE`, so that the parser takes it and what follows as arguments."""
    options, place = _options(ctx), 0
    while place < len(args) and args[place].startswith("-") and args[place] != "--":
        if args[place] == "-m":
            return [*args[:place], "--", *args[place:]]
        option = options.get(args[place])
        place += 2 if option is not None and not option.is_flag else 1
    return args


def _refuse_options_as_values(ctx: Any, args: Sequence[str]) -> None:
    """Refuse `--model --batch 3`, where the parser would take --batch as the model."""
    options = _options(ctx)
    for name, value in pairwise(args):
        if name == "--":
            return
        if name in options and not options[name].is_flag and value in options:
            raise UsageError(f"got {name} without a value, followed by {value}; give it one")


def _refuse_twice(given: Sequence[Any]) -> None:
    """Refuse a repeated option unless it is a flag without an opposite."""
    times = Counter(
        " or ".join((*param.opts, *param.secondary_opts))
        for param in given
        if _is_option(param) and not param.multiple and (not param.is_flag or param.secondary_opts)
    )
    for option, count in times.items():
        if count > 1:
            raise UsageError(f"got {option} {count} times; give it once")


def _refuse_too_many(ctx: Any, rest: Sequence[str]) -> None:
    if not rest:
        return
    takes = [param.metavar for param in ctx.command.get_params(ctx) if not _is_option(param)]
    takes += ["options"] * (len(set(_options(ctx).values())) > 1)  # more than --help
    allowed = f"only {' and '.join(takes)}" if takes else "no arguments"
    raise UsageError(
        f"got extra arguments {' '.join(map(quoted, rest))}; {ctx.command_path} takes {allowed}"
    )


@contextmanager
def _as_usage_errors(ctx: Any) -> Iterator[None]:
    """Add a pointer to the help to each error, and reword the parser's own errors."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{error}; see {ctx.command_path} --help") from error
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UsageError(f"{_sentence(error, ctx)}; see {ctx.command_path} --help") from error


def _sentence(error: Any, ctx: Any) -> str:
    """Reword an error of the parser."""
    options = _options(ctx)
    name: Any = getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        long_names = [option for option in options if option.startswith("--")]
        return f"got {quoted(name)}; {suggestions(name, long_names)}"
    if name in options and options[name].is_flag:
        return f"got {name} with a value; it takes none: remove the value"
    if name in options:
        return f"got {name} without a value; give it one"
    if hasattr(error, "param_type") and error.param is not None:
        wanted = (error.param.help or "a value").rstrip(".")
        return f"got no {error.param.metavar}; expected {wanted[:1].lower()}{wanted[1:]}"
    message = error.format_message().rstrip(".")
    return message[:1].lower() + message[1:]


def _options(ctx: Any) -> dict[str, Any]:
    """Return the parameter that each option of the command sets."""
    return {
        name: param
        for param in ctx.command.get_params(ctx)
        if _is_option(param)
        for name in (*param.opts, *param.secondary_opts)
    }


def _is_option(param: Any) -> bool:
    return param.param_type_name == "option"


def choose_folder(out: str) -> Path:
    """Return the folder `out`. Check before measuring that it is writable, and leave no trace of
    the check, so that the folder exists only if something was measured."""
    if not out:
        raise UsageError("got --out ''; name a folder, or leave --out out for the default, work/")
    folder = Path(out)
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UsageError(
            f"got --out {quoted(out)}, which is not writable ({error.strerror}); name another "
            f"folder"
        ) from error
    finally:
        for each in missing:
            with suppress(OSError):  # it was never made, or another program uses it
                each.rmdir()
