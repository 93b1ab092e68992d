"""The parser of the command line: what it refuses, it says in one sentence, and at once.

typer brings the parser, as click or as a copy of it, by version. Its errors are told apart by what
they carry, and its own words are used only where there are no better ones.
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

from memlab.cli.errors import UsageError, choice, shown


def whole(option: str, most: int | None = None) -> Callable[[Any], int]:
    """Reads what is given for the option: a whole number, from 1 to `most` if there is a most."""

    def read(given: Any) -> int:  # a default is a number already
        try:
            count = int(given)
        except ValueError:
            count = None
        if count is None or (most is not None and not 1 <= count <= most):
            wanted = "a whole number" + (f" from 1 to {most:,}" if most else ", such as 1")
            raise UsageError(f"got {option} {shown(str(given))}; wanted {wanted}")
        return count

    return read


def number(option: str, most: int, meaning: str) -> Any:
    """An option that takes a whole number, from 1 to `most`."""
    return typer.Option(option, help=meaning, parser=whole(option, most), metavar="NUMBER")


class Command(TyperCommand):
    """A command that takes an option once, and no argument too many. Its docstring is its help,
    whose paragraphs are broken where the terminal ends."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", help or "")]
        super().__init__(*args, help="\n\n".join(paragraphs), **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _in_one_sentence(ctx):
            _refuse_options_as_values(ctx, args)
            _, rest, given = self.make_parser(ctx).parse_args(args=list(args))
            if not any(param.is_eager for param in given):  # --help
                _refuse_twice(given)
                _refuse_too_many(ctx, rest)
            return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """Commands, of which one has to be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _in_one_sentence(ctx):
            if not set(args) - {"--"}:
                if text := ctx.get_help():  # empty where it is printed at once
                    print(text)
                raise UsageError(f"got no command; choose from {', '.join(self.commands)}")
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _in_one_sentence(ctx):
            if self.get_command(ctx, args[0]) is None:
                raise UsageError(
                    f"got the command {shown(args[0])}; {choice(args[0], self.commands)}"
                )
            return super().resolve_command(ctx, args)


# ------------------------------------------------------------------ what is refused


def _refuse_options_as_values(ctx: Any, args: Sequence[str]) -> None:
    """In `--model --batch 3` a value is missing; the parser would take --batch for it."""
    options = _options(ctx)
    for name, value in pairwise(args):
        if name == "--":
            return
        if name in options and not options[name].is_flag and value in options:
            raise UsageError(f"got {name} without a value, for {value} follows it; give it one")


def _refuse_twice(given: Sequence[Any]) -> None:
    """What has a value, or an opposite, has one. To say --yes again says nothing new."""
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
    takes += ["options"] * (len(_options(ctx)) > 1)  # more than --help
    raise UsageError(
        f"got {' '.join(map(shown, rest))} too many; {ctx.command_path} takes "
        f"{' and '.join(takes) or 'nothing'}{' alone' if takes else ''}"
    )


@contextmanager
def _in_one_sentence(ctx: Any) -> Iterator[None]:
    """What is refused, with where to read on; the parser's own errors in better words."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{error}; see {ctx.command_path} --help") from error
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UsageError(f"{_sentence(error, ctx)}; see {ctx.command_path} --help") from error


def _sentence(error: Any, ctx: Any) -> str:
    """What the parser's error says, as we say it."""
    options, name = _options(ctx), getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        return f"got {shown(name)}; {choice(name, options)}"
    if name in options and options[name].is_flag:
        return f"got {name} with a value; it takes none: leave the value out"
    if name in options:
        return f"got {name} without a value; give it one"
    if hasattr(error, "param_type") and error.param is not None:
        wanted = (error.param.help or "a value").rstrip(".")
        return f"got no {error.param.metavar}; wanted {wanted[:1].lower()}{wanted[1:]}"
    message = error.format_message().rstrip(".")
    return message[:1].lower() + message[1:]


def _options(ctx: Any) -> dict[str, Any]:
    """The parameter that each option of the command sets."""
    return {
        name: param
        for param in ctx.command.get_params(ctx)
        if _is_option(param)
        for name in (*param.opts, *param.secondary_opts)
    }


def _is_option(param: Any) -> bool:
    return param.param_type_name == "option"


def choose_folder(out: str) -> Path:
    """The folder `out`, in which a file can be written: tried before measuring, and left as it was,
    so that nothing lies there unless something was measured."""
    if not out:
        raise UsageError("got --out ''; name a folder, or leave --out out, which is work/ then")
    folder = Path(out)
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UsageError(
            f"got --out {shown(out)}, where no file can be written ({error.strerror}); name "
            f"another folder"
        ) from error
    finally:
        for each in missing:
            with suppress(OSError):  # it was never made, or another program writes there, too
                each.rmdir()
