"""Programs that a script starts, and that it can have.

    mkdir, cp, mv, ln, rm, touch   are done here, so that the script finds the files that they make
    stty size, tput, hostname      are answered here
    git's commands that only read, cat, cut, echo, grep, head, sort, tail, tr, uniq and wc, and
                                   pipes and sequences of these start

The kernel would confine every program, but one that does not list or stat the script's own files
would not find them.
"""

import glob
import os
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

# The default size of a terminal.
_TERMINAL = {"stty size": "24 80", "tput lines": "24", "tput cols": "80"}
_FROM_TERMINAL = re.compile(r" *(2>|<) */dev/(null|tty)")
_NOISE = re.compile(r" *2> *(/dev/null|&1)")
_READING = re.compile(
    r"git (rev-parse|describe|log|show|status|diff)( (?!--output)[\w./~^=%@:-]+)*"
    r"|git branch( (--show-current|--list|--all|-a|-r|-v|-vv))*"
    r"|(cat|cut|grep|head|tail|tr|wc|echo)( [^;&|<>$`(){}\n]*)?"
    r"|(sort|uniq)( -[bcdfhinrtuV]+| --reverse| --unique)*"  # both write with other arguments
)
_BETWEEN = re.compile(r"\|\|?|&&|;")
_LONG = {"--parents": "p", "--recursive": "r", "--archive": "a", "--force": "f", "--symbolic": "s"}


class Done(NamedTuple):
    """What a program that was done here returned and printed."""

    status: int = 0
    output: str = ""
    error: str = ""


def refused_program(command: str) -> str | None:
    """Return the first program of a shell's command that may change something; None if none may."""
    for part in _BETWEEN.split(_NOISE.sub("", command)):
        if not _READING.fullmatch(part.strip()):
            return part.split()[0] if part.split() else part
    return None


def done_here(command: str | Sequence[str], folder: str = "") -> Done | None:
    """Do a shell's command, or the words of a program; return None if it is another one.

    folder  where the program would start
    """
    if os.name != "posix":
        return None
    text = command if isinstance(command, str) else " ".join(command)
    text = _FROM_TERMINAL.sub("", text)
    if answer := platform.node() if text == "hostname" else _TERMINAL.get(text):
        return Done(output=f"{answer}\n")
    try:
        programs = [*_programs(command, folder)]
    except ValueError:  # a quotation without an end
        return None
    actions = [_action(words, folder) for words in programs]
    if not actions or None in actions:
        return None
    for action in filter(None, actions):
        try:
            action()
        except (OSError, shutil.Error) as error:
            return Done(1, error=f"{error}\n")
    return Done()


def _programs(command: str | Sequence[str], folder: str) -> Iterator[list[str]]:
    """Yield the words of each program that a shell would start one after another; of what only a
    shell understands, the first word is no program's name."""
    if not isinstance(command, str):
        yield list(command)
        return
    if re.search(r"[`$]", command):
        yield ["$"]
        return
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in map(os.path.expanduser, lexer):
        if word in ("&&", ";"):
            yield words
            words = []
        elif set(word) & set("()<>|&;"):
            words = ["$"]
        else:
            has_pattern = glob.has_magic(word)
            found = sorted(glob.glob(word, root_dir=folder or None)) if has_pattern else []
            words += found or [word]
    if words:
        yield words


def _action(words: list[str], folder: str) -> Callable[[], None] | None:
    """Return what a program does; None if it or an option is another."""
    if not words or (known := _PROGRAMS.get(os.path.basename(words[0]))) is None:
        return None
    function, letters = known
    options = [_LONG.get(word, word.lstrip("-")) for word in words[1:] if word.startswith("-")]
    given = set("".join(options))
    paths = [os.path.join(folder, word) for word in words[1:] if not word.startswith("-")]
    if not paths or given - set(letters):
        return None
    return lambda: function(given, paths)


def _mkdir(options: set[str], paths: list[str]) -> None:
    for path in paths:
        os.makedirs(path, exist_ok=True) if "p" in options else os.mkdir(path)


def _touch(options: set[str], paths: list[str]) -> None:
    for path in paths:
        with open(path, "a"):
            pass


def _rm(options: set[str], paths: list[str]) -> None:
    for path in paths:
        if options & set("rR") and os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path) or "f" not in options:
            os.remove(path)


def _to_target(paths: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each source with where it goes: into the last path if that is a folder."""
    *sources, target = paths
    for source in sources:
        name = os.path.basename(source.rstrip("/"))
        yield source, os.path.join(target, name) if os.path.isdir(target) else target


def _cp(options: set[str], paths: list[str]) -> None:
    for source, target in _to_target(paths):
        if options & set("rRa") and os.path.isdir(source):
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


def _mv(options: set[str], paths: list[str]) -> None:
    for source, target in _to_target(paths):
        shutil.move(source, target)


def _ln(options: set[str], paths: list[str]) -> None:
    for source, link in _to_target(paths):
        if "f" in options and os.path.lexists(link):
            os.remove(link)
        (os.symlink if "s" in options else os.link)(source, link)


_PROGRAMS: dict[str, tuple[Callable[[set[str], list[str]], Any], str]] = {  # with their options
    "mkdir": (_mkdir, "p"),
    "touch": (_touch, ""),
    "rm": (_rm, "rRf"),
    "cp": (_cp, "rRafp"),
    "mv": (_mv, "f"),
    "ln": (_ln, "sf"),
}
