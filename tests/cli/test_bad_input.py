"""Bad input: wrong command lines of each command, each refused in one line without side effects.

The lines are generated from one seed. Each kind of mistake is a function that returns another
command line at each call, with values that people type and values that only programs produce.
Valid options stand beside the mistake, so that all lines differ.

Some input looks wrong but is valid, so it is left out:

    numbers         anything that Python's int() accepts, such as " 3 ", "1_000" and "٣"
    names           random text that happens to be a name, and repetitions such as "lora+lora"
    flags           a repeated flag changes nothing
    files           "~", ".", folders that can be created, and readable files (root reads all files)
    "--" alone      ends the options and is not an argument
    null characters a shell cannot pass them
    start           keeps a copy other than a notebook, reports it and continues
    progress        backs up an unreadable progress file, reports it and continues
"""

import json
import os
import random
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import pytest
import typer
from quick import slow

from memlab import cli
from memlab.cli.errors import quoted
from memlab.course import days, progress
from memlab.model import PRESETS
from memlab.train import TECHNIQUES
from memlab.train.registry import exclusions

COUNT = 200
COMMAND = typer.main.get_command(
    cli.app
)  # built once, because building takes most of a call's time
LONGEST_LINE = 1100  # characters of output: a few lines of a screen

Line = list[str]
Kind = Callable[[random.Random], Line]

# ------------------------------------------------------------------ what people type

HUGE = str(10**30)
JUNK = (
    *(
        "",
        " ",
        "\t",
        "\n",
        "two words",
        "two\nlines",
        "\x1b[31mred\x1b[0m",
        "\x07",
        "a\rb",
        "'",
        '"',
    ),
    *(
        "é",
        "日本語",
        "🚀",
        "\u202egnp",
        "\u200b",
        "\udcff",
        "\ufeff",
        "x" * 5000,
        "y " * 3000,
        "%s",
    ),
    *("{0}", "[bold]x[/]", "[/]", "null", "None", "true", "nan", "-", "$HOME", "a;b", "a|b", "\\"),
)
NO_NUMBERS = (
    *("", " ", "x", "three", "1.5", "1.0", "1e3", "1/2", "0x10", "½", "²", "1,000", "1 000", "NaN"),
    *("inf", "--", "-", "+", "_1", "1__0", "1_", "two\nlines", "\x1b[31m1", "9" * 5000, "٣.١"),
)
OUT_OF_RANGE = ("0", "-0", "00", "-1", "-3", HUGE, f"-{HUGE}", str(2**63), str(2**64), "-1_000")
NO_BYTES = (
    *("", " ", "GB", "24 XB", "24 gigs", "-3GB", "-1", "+24GB", "NaN GB", "inf", "infGB", "1e9"),
    *("24GB24", "24 G B", "1.2.3GB", ".5GB", "1,5GB", "٣ GB", "24g", "24.5", "0x10GB", "GB24"),
    *("0", "0GB", "1", "1 MB", "100MiB", "9" * 5000 + "GB", "9" * 400 + "GB", HUGE + "0" * 30),
    *("rtx", "rtx9999", "rtx 4909", "a10000", "h1000", "NVIDIA", "two\nlines", "\x1b[31m24GB"),
)
NO_EXERCISES = (
    *("1.99", "1.0", "0.1", "22.1", "99.99", "1..2", "1.2.3", ".", ".1", "1.", "..", "a.b", "1.b"),
    *(
        "٣.١",
        "²",
        "½",
        "-1.1",
        "1.-1",
        "1,2",
        "1:2",
        "1. 2",
        "1.2 ",
        " 1.2",
        "01.2",
        "1.02",
        "1.2a",
    ),
    *("1.1\n", "\x1b[31m1.1", "9" * 5000, "1." + "9" * 5000, "9" * 5000 + ".1", HUGE, f"{HUGE}.1"),
)
NO_DAYS = ("0", "18", "99", "1000", HUGE, "9" * 5000)
NO_FOLDERS = ("", "taken", "taken/below", "/dev/null/x", "d" * 300, "new/" + "d" * 300, "nowhere")

FILLS_THE_OPTIMIZER = (
    *("sgd", "lion", "lion8bit", "adam8bit", "adam-mini", "foreach-adamw"),
    *("muon", "galore", "apollo-mini"),
)
NO_SHARDS = (
    *("lion8bit", "adam-mini", "step-in-backward", "offloaded-optimizer", "post-hoc-ema"),
    *("muon", "galore", "apollo-mini"),
)
DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("float32", "autocast", "bfloat16", "master-weights")
OPTIMIZERS = (
    *("adamw", "adam8bit", "adam-mini", "lion", "lion8bit"),
    *("muon", "galore", "apollo-mini"),
)
COMMANDS = (
    *("measure", "train", "plan", "run", "explain", "doctor"),
    *("start", "check", "hint", "diff", "progress", "reset"),
)

OPTIONS = {  # of each command, with a right value; None: a flag
    "measure": {
        "--model": "tiny",
        "--batch": "2",
        "--seq": "16",
        "--dtype": "bfloat16",
        "--technique": "lora",
        "--device": "cpu",
        "--dry-run": None,
        "--ranks": "2",
        "--script": "good.py:build",
        "--out": "elsewhere",
        "--wide": None,
        "--json": None,
    },
    "train": {
        "--model": "tiny",
        "--technique": "lora",
        "--dtype": "bfloat16",
        "--batch": "2",
        "--seq": "16",
        "--steps": "2",
        "--memory": "24GB",
        "--device": "cpu",
    },
    "plan": {
        "--model": "tiny",
        "--memory": "24GB",
        "--margin": "2%",
        "--gpus": "2",
        "--batch": "2",
        "--seq": "16",
        "--precision": "bfloat16",
        "--optimizer": "lion",
        "--lora": None,
        "--full": None,
        "--recipes": "1",
        "--device": "cuda",
        "--script": "good.py:build",
        "--out": "elsewhere",
        "--wide": None,
        "--json": None,
    },
    "run": {
        "--memory": "24GB",
        "--margin": "2%",
        "--device": "cuda",
        "--real": None,
        "--steps": "2",
        "--allow-writes": None,
        "--config": "gpt2=good.py",
        "--batch-like": "text=str:4",
        "--out": "elsewhere",
        "--json": None,
    },
    "explain": {"--device": "0", "--memory": "24GB", "--out": "elsewhere"},
    "start": {"--no-open": None},
    "diff": {"--yes": None},
    "reset": {"--yes": None},
    **{command: {} for command in ("doctor", "check", "hint", "progress")},
}
ARGUMENTS = {  # right ones
    "run": ["good.py"],
    "explain": ["failed.log"],
    "start": ["1"],
    "check": ["1.1"],
    "hint": ["1.1"],
    "diff": ["1.1"],
    "reset": ["1"],
}
NUMBERS = {
    "measure": ("--batch", "--seq", "--ranks"),
    "train": ("--batch", "--seq", "--steps"),
    "run": ("--steps",),
    "plan": ("--batch", "--seq", "--gpus", "--recipes"),
}
# Valid options that can stand beside any mistake, because they do not change which check fails.
BESIDE = {
    "measure": ("--dtype", "--out", "--json"),
    "train": ("--dtype",),
    "plan": ("--recipes", "--out", "--json"),
    "run": ("--out", "--json"),
}


def misspelt(rng: random.Random, name: str) -> str:
    """Change one letter: drop, double, swap or replace it."""
    place = rng.randrange(len(name))
    head, letter, tail = name[:place], name[place], name[place + 1 :]
    other = rng.choice(string.ascii_lowercase + string.digits)
    changed = (head + tail, head + 2 * letter + tail, head + tail[:1] + letter + tail[1:])
    return rng.choice((*changed, head + other + tail, name.upper(), f"{name}{other}", f" {name}"))


def no_name(rng: random.Random, known: tuple[str, ...]) -> str:
    """Return a text that may resemble a known name."""
    while True:
        name = misspelt(rng, rng.choice(known)) if rng.random() < 0.6 else rng.choice(JUNK)
        if name not in known and set(name.split("+")) - set(known):
            return name


def word(rng: random.Random) -> str:
    """Return random letters, not a name."""
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) + "q"


def no_number(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice((*NO_NUMBERS, *OUT_OF_RANGE))
    if kind < 0.6:
        return str(-rng.randint(0, 10**6))
    if kind < 0.8:
        return f"{rng.randint(0, 999)}.{rng.randint(0, 99)}"
    return f"{rng.randint(1, 99)}{rng.choice(string.ascii_letters)}"


def no_bytes(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(NO_BYTES)
    unit = rng.choice(("XB", "gbit", "mbi", "GBs", "G", "bytes", "%", "GiB/s", "o"))
    return f"{rng.randint(1, 99)}{rng.choice(('', ' '))}{unit}"


# ------------------------------------------------------------------ mistakes in several commands


def given(command: str, *options: str) -> Line:
    """Return the options with valid values."""
    pairs = ([o, OPTIONS[command][o]] for o in options)
    return [part for pair in pairs for part in pair if part is not None]


def with_some(command: str, rng: random.Random, wrong: Line) -> Line:
    """Put valid options before or after the mistake."""
    named = {part.split("=")[0] for part in wrong}
    right = BESIDE.get(command, ()) if "--script" not in named else ("--out",)
    free = [o for o in right if o not in named]
    right = given(command, *rng.sample(free, rng.randint(0, len(free))))
    if command == "run":  # what follows the script is the script's
        return [*right, *wrong]
    return [*right, *wrong] if rng.random() < 0.5 else [*wrong, *right]


def unknown_option(command: str) -> Kind:
    names = (*OPTIONS[command], "--help")

    def line(rng: random.Random) -> Line:
        name = f"--{no_name(rng, tuple(n[2:] for n in names))}"
        if rng.random() < 0.2:
            name = f"-{rng.choice(string.ascii_letters.replace('h', ''))}"
        if name == "--" or name.split("=")[0] in names:
            name = "--nothing-of-the-kind"
        value = rng.choice(([], [word(rng)], [rng.choice(JUNK)]))
        before = [] if command == "run" else ARGUMENTS.get(command, [])
        return [*before, name, *value]

    return line


def too_many(command: str) -> Kind:
    def line(rng: random.Random) -> Line:
        more = [rng.choice((word(rng), rng.choice(JUNK), str(rng.randint(0, 99))))]
        if rng.random() < 0.3:
            more.append(word(rng))
        return [*ARGUMENTS.get(command, []), *more]

    return line


def value_of_a_flag(command: str) -> Kind:
    flags = [o for o, value in OPTIONS[command].items() if value is None]

    def line(rng: random.Random) -> Line:
        value = rng.choice(("", "1", "true", "yes", word(rng), rng.choice(JUNK)))
        if command == "run":
            return [f"{rng.choice(flags)}={value}", *ARGUMENTS["run"]]
        return [*ARGUMENTS.get(command, []), f"{rng.choice(flags)}={value}"]

    return line


def no_value(command: str) -> Kind:
    takes = [o for o, value in OPTIONS[command].items() if value is not None]

    def line(rng: random.Random) -> Line:
        if rng.random() < 0.5:
            return [rng.choice(takes)]
        option, *others = rng.sample(takes, rng.randint(2, 3))
        return [option, *given(command, *others)]

    return line


def twice(command: str) -> Kind:
    once = [o for o, value in OPTIONS[command].items() if value is not None]
    for repeated in {"--technique", "--config"} & set(once):
        once.remove(repeated)

    def line(rng: random.Random) -> Line:
        option = rng.choice(once)
        right = OPTIONS[command][option]
        return [
            option,
            rng.choice((right, word(rng))),
            f"{option}={rng.choice((right, word(rng)))}",
        ]

    return line


def bad_number(command: str) -> Kind:
    """Return a line with only the number wrong."""
    needed = given(command, "--model", "--memory") if command == "plan" else []

    def line(rng: random.Random) -> Line:
        option, value = rng.choice(NUMBERS[command]), no_number(rng)
        return [*needed, *rng.choice(([option, value], [f"{option}={value}"]))]

    return line


def bad_name(command: str, option: str, known: tuple[str, ...]) -> Kind:
    needed = given(command, "--model", "--memory") if command == "plan" else []
    needed = [] if option in needed else needed

    def line(rng: random.Random) -> Line:
        return [*needed, option, no_name(rng, known)]

    return line


def bad_model(command: str) -> Kind:
    known = tuple(PRESETS)
    memory = given(command, "--memory") if command == "plan" else []

    def line(rng: random.Random) -> Line:
        name = no_name(rng, known)
        if rng.random() < 0.4:
            name = rng.choice(
                ("nowhere.json", "no/such/config.json", "empty", "/dev/null", "./", "~x")
            )
        return ["--model", name, *memory]

    return line


def bad_config(command: str) -> Kind:
    """Return an existing file or folder other than a valid config.json."""
    memory = given(command, "--memory") if command == "plan" else []

    def line(rng: random.Random) -> Line:
        return ["--model", rng.choice(sorted(CONFIGS)), "--library", "memlab", *memory]

    return line


def too_long(command: str) -> Kind:
    """Return a sequence longer than the model's maximum."""
    memory = given(command, "--memory") if command == "plan" else []

    def line(rng: random.Random) -> Line:
        longest = PRESETS[(name := rng.choice(("tiny", "25m", "124m", "llama-2-7b")))].seq_len
        return ["--model", name, "--seq", str(longest + rng.randint(1, 10**4)), *memory]

    return line


def uncountable(command: str) -> Kind:
    """Return a valid model with tensors larger than torch can count."""
    memory = given(command, "--memory") if command == "plan" else []

    def line(rng: random.Random) -> Line:
        name = rng.choice(sorted(COUNTLESS))
        return ["--model", name, *memory, "--batch", str(rng.randint(1, 999))]

    return line


def two_optimizers(rng: random.Random) -> Line:
    pair = rng.sample(FILLS_THE_OPTIMIZER, 2)
    more = rng.choice(([], ["checkpointing"], ["lora"], ["autocast"]))
    return ["--technique", "+".join([*pair, *more])]


def not_together(rng: random.Random) -> Line:
    pair = list(rng.choice(sorted(map(sorted, exclusions()))))
    rng.shuffle(pair)
    return ["--technique", "+".join(pair)]


def half_a_sum(rng: random.Random) -> Line:
    name = rng.choice(tuple(TECHNIQUES))
    shape = rng.choice(
        ("{}+", "+{}", "+", "{}++lora", "{} + lora", "{},lora", "{}&lora", "{}+ lora")
    )
    return ["--technique", shape.format(name)]


def absent_device(command: str) -> Kind:
    present = {"plan": ("cpu", "cuda", "cuda:hopper")}.get(command, ("cpu",))
    needed = given(command, "--model", "--memory") if command == "plan" else []

    def line(rng: random.Random) -> Line:
        names = [
            n for n in ("cuda", "mps", "xpu", "tpu", "gpu", "cuda:zero", "CPU") if n not in present
        ]
        name = rng.choice(names) if rng.random() < 0.5 else no_name(rng, present)
        return [*needed, "--device", name]

    return line


def bad_folder(command: str) -> Kind:
    needed = given(command, "--model", "--memory") if command == "plan" else ["--model", "tiny"]

    def line(rng: random.Random) -> Line:
        name = rng.choice(NO_FOLDERS)
        if rng.random() < 0.4:
            name = f"taken/{word(rng)}"
        return [*needed, f"--out={name}"]

    return line


# ------------------------------------------------------------------ scripts


def script_and_more(command: str) -> Kind:
    apart = {
        "measure": ("--model", "--batch", "--seq", "--dtype", "--technique"),
        "plan": tuple(
            o
            for o in OPTIONS["plan"]
            if o
            not in ("--script", "--memory", "--margin", "--device", "--out", "--wide", "--json")
        ),
    }[command]

    def line(rng: random.Random) -> Line:
        some = rng.sample(apart, rng.randint(1, 3))
        memory = given(command, "--memory") if command == "plan" else []
        return ["--script", "good.py:build", *memory, *given(command, *some)]

    return line


def no_script(command: str) -> Kind:
    memory = given(command, "--memory") if command == "plan" else []
    names = (
        *(
            "",
            "good.py",
            "good.py:",
            ":build",
            "good:build",
            "good.py:1x",
            "good.py:a b",
            "good.py:a.b",
        ),
        *("nowhere.py:build", "folder.py:build", "taken:build", "good.py:built", "good.py:torch"),
        *(
            "good.py::build",
            "good.pyc:build",
            "a\nb.py:build",
            "\udcff.py:build",
            "n" * 300 + ".py:f",
        ),
    )

    def line(rng: random.Random) -> Line:
        name = rng.choice((*names, f"{word(rng)}.py:build", f"good.py:{word(rng)}"))
        return ["--script", name, *memory]

    return line


def failing_script(command: str) -> Kind:
    ways = {"measure": ([], ["--dry-run"], ["--dry-run", "--device", "cuda"]), "plan": ([],)}[
        command
    ]
    memory = given(command, "--memory") if command == "plan" else []

    def line(rng: random.Random) -> Line:
        return [
            "--script",
            f"{rng.choice(sorted(SCRIPTS))}:build",
            *memory,
            *rng.choice(ways),
        ]

    return line


# ------------------------------------------------------------------ mistakes in one command


def ranks_of_what_cannot_be_sharded(rng: random.Random) -> Line:
    names = [rng.choice(NO_SHARDS)]
    if rng.random() < 0.5:
        names.append(rng.choice(("checkpointing", "chunked-loss", "flash-attention")))
    return ["--model", "tiny", "--ranks", str(rng.randint(2, 9)), "--technique", "+".join(names)]


def ranks_and_more(rng: random.Random) -> Line:
    apart = rng.choice((["--device"], ["--script"], ["--script", "--device"]))
    return ["--ranks", str(rng.randint(1, 9)), *given("measure", *apart)]


def foreign_dry_run(rng: random.Random) -> Line:
    device = rng.choice(("mps", "xpu", "cuda:zero", "cuda:ampere", "tpu", "CPU", "", "hopper"))
    return ["--dry-run", "--device", device, "--batch", str(rng.randint(1, 99))]


def capped_cpu(rng: random.Random) -> Line:
    """Give a cap on the CPU. Only CUDA's allocator can be capped."""
    memory = no_bytes(rng) if rng.random() < 0.7 else f"{rng.randint(1, 99)}GB"
    return [f"--memory={memory}"]


def bad_memory(rng: random.Random) -> Line:
    option = rng.choice(("--memory", "--gpu"))
    return [*given("plan", "--model"), f"{option}={no_bytes(rng)}"]


def bad_margin(rng: random.Random) -> Line:
    wrong = ("", "%", "two", "-1%", "2 percent", "1.5", "2%%", "1000%", "5XB", "99TB", "0x10")
    return [*given("plan", "--model", "--memory"), f"--margin={rng.choice(wrong)}"]


def no_such_script(rng: random.Random) -> Line:
    return [rng.choice((f"{word(rng)}.py", word(rng), f"{word(rng)}/train.py"))]


def half_a_launcher(rng: random.Random) -> Line:
    number = rng.choice(("no", "0", "-1", "1.5"))
    return rng.choice(
        (
            ["torchrun"],
            ["torchrun", "--nproc_per_node", "2"],
            ["torchrun", f"--nproc_per_node={number}", "good.py"],
            ["accelerate", word(rng)],
            ["accelerate", "launch", "--multi_gpu"],
        )
    )


def wrong_stand_in(rng: random.Random) -> Line:
    columns = ("text", "text=str", "text=str:0", f"{word(rng)}=str:x", "text=words:4", "=str:4")
    option = rng.choice((f"--batch-like={rng.choice(columns)}", f"--config={word(rng)}"))
    return [option, "good.py"]


def wrong_run(rng: random.Random) -> Line:
    """Options that do not go together, or that name nothing."""
    options = (
        ["--real", "--device", "cpu"],
        ["--margin", "2%"],
        ["--device", word(rng)],
        ["--memory", no_bytes(rng)],
        ["--real", "--assume", "most"],
    )
    return [*rng.choice(options), "good.py"]


def unplanned(rng: random.Random) -> Line:
    """Leave out the model or the memory."""
    option = rng.choice(("--model", "--memory"))
    others = ("--gpus", "--batch", "--lora", "--optimizer", "--recipes")
    return [*given("plan", option), *given("plan", *rng.sample(others, rng.randint(0, 4)))]


def both_ways(rng: random.Random) -> Line:
    flags = rng.choices(("--lora", "--full"), k=rng.randint(2, 4))
    return [*given("plan", "--model", "--memory"), *flags]


def memory_twice(rng: random.Random) -> Line:
    """Give the memory by both of its option names."""
    given_ = [
        ["--memory", f"{rng.randint(8, 99)}GB"],
        ["--gpu", rng.choice(("t4", "h100", "l4"))],
    ]
    rng.shuffle(given_)
    return [*given("plan", "--model"), *given_[0], *given_[1]]


def no_day(command: str) -> Kind:
    def line(rng: random.Random) -> Line:
        kind = rng.random()
        if kind < 0.3:
            day = rng.choice([n for n in NO_NUMBERS if n not in ("--", "1.5", "1.0")])
        elif kind < 0.5:
            day = rng.choice(NO_DAYS)
        elif kind < 0.8:
            day = str(rng.randint(17, 10**6))
        else:
            day = word(rng)
        before = ["--"] if day.startswith("-") and rng.random() < 0.5 else []
        flags = [o for o in OPTIONS[command] if rng.random() < 0.5]
        return [*flags, *before, day]

    return line


def days_too_many(rng: random.Random) -> Line:
    """Give extra arguments without a dash, which are not options of JupyterLab."""
    second = rng.choice((str(rng.randint(0, 99)), word(rng), "lab", "1.2"))
    between = rng.choice(([], ["--"]))
    return [*rng.choice(([], ["--no-open"])), str(rng.randint(1, 16)), *between, second]


def no_exercise(command: str) -> Kind:
    """Return text other than an exercise's number. Each day has fewer than 50 exercises."""

    def line(rng: random.Random) -> Line:
        kind = rng.random()
        if kind < 0.4:
            id_ = rng.choice(NO_EXERCISES)
        elif kind < 0.6:
            id_ = f"{rng.randint(1, 2)}.{rng.randint(50, 10**5)}"
        elif kind < 0.7:
            id_ = f"{rng.randint(17, 10**5)}.{rng.randint(1, 5)}"
        elif kind < 0.8:
            id_ = rng.choice(JUNK)
        else:
            id_ = f"{word(rng)}{rng.choice(('', '.', '.1', ' 1'))}"
        id_ = {"-": "x"}.get(id_, id_)
        before = ["--"] if id_.startswith("-") else []
        flags = [o for o in OPTIONS[command] if rng.random() < 0.5]
        return [*flags, *before, id_]

    return line


def only_a_day(rng: random.Random) -> Line:
    """Give a day where an exercise is expected."""
    return [rng.choice((str(rng.randint(0, 99)), f"day{rng.randint(1, 16)}"))]


def not_begun(command: str) -> Kind:
    """Return a valid day or exercise without a copy. Only day 1 has one."""

    def line(rng: random.Random) -> Line:
        number = rng.randint(2, 16)
        whole_day = command == "check" and rng.random() < 0.5
        flags = [o for o in OPTIONS[command] if rng.random() < 0.5]
        return [*flags, str(number) if whole_day else f"{number}.1"]

    return line


def missing(command: str) -> Kind:
    def line(rng: random.Random) -> Line:
        return [
            *(o for o in OPTIONS[command] if rng.random() < 0.5),
            *rng.choice(([], ["--"])),
        ]

    return line


def not_explained(rng: random.Random) -> Line:
    """Return a missing file, or one without a snapshot, log or trace."""
    name = rng.choice((*sorted(CONFIGS), *sorted(SCRIPTS), "taken", "nowhere", "/dev/null"))
    return [name if rng.random() < 0.5 else f"{word(rng)}.pickle"]


def bad_card(rng: random.Random) -> Line:
    return ["failed.log", "--memory", no_bytes(rng)]


KINDS: dict[str, tuple[Kind, ...]] = {
    "measure": (
        *(make("measure") for make in (unknown_option, too_many, value_of_a_flag, no_value, twice)),
        *(make("measure") for make in (bad_number, bad_model, bad_config, too_long, uncountable)),
        *(make("measure") for make in (absent_device, bad_folder, script_and_more, no_script)),
        failing_script("measure"),
        bad_name("measure", "--technique", tuple(TECHNIQUES)),
        bad_name("measure", "--dtype", DTYPES),
        *(
            two_optimizers,
            not_together,
            half_a_sum,
            ranks_of_what_cannot_be_sharded,
            ranks_and_more,
        ),
        foreign_dry_run,
    ),
    "train": (
        *(make("train") for make in (unknown_option, too_many, no_value, twice, bad_number)),
        *(make("train") for make in (bad_model, bad_config, too_long, uncountable, absent_device)),
        bad_name("train", "--technique", tuple(TECHNIQUES)),
        bad_name("train", "--dtype", DTYPES),
        *(two_optimizers, not_together, half_a_sum, capped_cpu),
    ),
    "plan": (
        *(make("plan") for make in (unknown_option, too_many, value_of_a_flag, no_value, twice)),
        *(make("plan") for make in (bad_number, bad_model, bad_config, too_long, uncountable)),
        *(make("plan") for make in (absent_device, bad_folder, script_and_more, no_script)),
        failing_script("plan"),
        bad_name("plan", "--precision", PRECISIONS),
        bad_name("plan", "--optimizer", OPTIMIZERS),
        *(bad_memory, bad_margin, unplanned, both_ways, memory_twice),
    ),
    "run": (
        *(make("run") for make in (unknown_option, value_of_a_flag, twice, bad_number)),
        *(no_such_script, half_a_launcher, wrong_stand_in, wrong_run),
    ),
    "explain": (
        *(make("explain") for make in (unknown_option, too_many, no_value, twice)),
        not_explained,
        bad_card,
    ),
    "doctor": (unknown_option("doctor"), too_many("doctor")),
    "start": (
        *(make("start") for make in (unknown_option, value_of_a_flag, no_day, missing)),
        days_too_many,
    ),
    "check": (
        *(make("check") for make in (unknown_option, too_many, no_exercise, not_begun, missing)),
        no_day("check"),
    ),
    "hint": (
        *(make("hint") for make in (unknown_option, too_many, no_exercise, missing)),
        only_a_day,
    ),
    "diff": (
        *(make("diff") for make in (unknown_option, too_many, value_of_a_flag, no_exercise)),
        *(make("diff") for make in (not_begun, missing)),
        only_a_day,
    ),
    "progress": (unknown_option("progress"), too_many("progress")),
    "reset": (
        *(make("reset") for make in (unknown_option, too_many, value_of_a_flag, no_day, missing)),
    ),
}


def wrong_lines(command: str, count: int) -> list[Line]:
    """Return so many different lines from all kinds of mistakes in turn."""
    rng = random.Random(0)
    lines: dict[tuple[str, ...], None] = {}
    for kind in islice(cycle(KINDS[command]), 20 * count):
        lines[tuple(with_some(command, rng, kind(rng)))] = None
        if len(lines) == count:
            break
    return [[command, *line] for line in lines]


# ------------------------------------------------------------------ the files they name

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
NESTED = "[" * 400 + "]" * 400
WRONG_FIELDS = {
    "zero_heads": {"num_attention_heads": 0},
    "negative_layers": {"num_hidden_layers": -3},
    "words": {"hidden_size": "64"},
    "float": {"vocab_size": 256.0},
    "true": {"num_hidden_layers": True},
    "list": {"hidden_size": [[64]]},
    "huge": {"vocab_size": 10**30},
    "huge_heads": {"num_attention_heads": 10**30, "num_key_value_heads": 7},
    "huge_number": {"rms_norm_eps": 10**400},
    "infinite": {"rope_theta": float("inf")},
    "nan": {"rms_norm_eps": float("nan")},
    "negative_number": {"rms_norm_eps": -1e-6},
    "odd_heads": {"num_attention_heads": 3},
    "more_heads_than_width": {"num_attention_heads": 128},
    "uneven_keys": {"num_key_value_heads": 3},
    "no_flag": {"tie_word_embeddings": "yes"},
    "no_activation": {"hidden_act": "tanh"},
    "activations": {"hidden_act": ["silu"]},
    "experts": {"num_local_experts": 8},
    "bert": {"model_type": "bert"},
    "types": {"model_type": ["llama"]},
    "newline": {"model_type": "two\nlines\x1b[31m"},
    "rope": {"rope_parameters": {"rope_theta": "10000"}},
    "odd_width": {"head_dim": 15},
}
CONFIGS: dict[str, bytes | None] = {  # by path; None: a folder with nothing in it
    **{f"{name}.json": json.dumps(SHAPE | more).encode() for name, more in WRONG_FIELDS.items()},
    **{
        f"no_{field}.json": json.dumps({k: v for k, v in SHAPE.items() if k != field}).encode()
        for field in SHAPE
    },
    "empty.json": b"",
    "half.json": json.dumps(SHAPE).encode()[:40],
    "text.json": b"hidden_size: 64\n",
    "list.json": json.dumps([SHAPE]).encode(),
    "number.json": b"7",
    "null.json": b"null",
    "nested.json": NESTED.encode(),
    "nested_field.json": json.dumps(SHAPE)[:-1].encode() + f', "hidden_act": {NESTED}}}'.encode(),
    "deep_in_lists.json": b"[" * 100_000,
    "digits.json": b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}",
    "results.json": json.dumps({"what": "tiny", "rows": [], "on_cuda": []}).encode(),
    "binary.json": bytes(range(256)),
    "model.safetensors": b"\x10\0\0\0\0\0\0\0" + b"\xff" * 64,
    "folder": None,
    "folder.py": None,
    "new\nline.json": b"{}",
    "é.json": b"{}",
}
COUNTLESS = {
    "wide.json": SHAPE | {"hidden_size": 2**40, "intermediate_size": 2**40},
    "deep.json": SHAPE | {"num_hidden_layers": 10**12},
    "wordy.json": SHAPE | {"vocab_size": 10**17},
}

GOOD = """
import torch

def build():
    model = torch.nn.Linear(8, 8)
    return (lambda: model(torch.ones(4, 8)).sum().backward()), model, None
"""
RAISES = "class Odd({}):\n    {}\ndef build():\n    raise Odd('no')\n"
SCRIPTS = {
    "raises.py": b"def build():\n    raise ValueError('two\\nlines \\x1b[31m')\n",
    "raises_in_step.py": b"def build():\n    return (lambda: 1 / 0), None, None\n",
    "raises_at_once.py": b"1 / 0\n",
    "raises_nothing.py": b"def build():\n    raise ValueError\n",
    "raises_much.py": b"def build():\n    raise ValueError('x' * 100_000)\n",
    "raises_no_exception.py": RAISES.format("BaseException", "pass").encode(),
    "raises_without_a_word.py": RAISES.format(
        "Exception", "def __str__(self):\n        raise TypeError"
    ).encode(),
    "exits.py": b"import sys\n\ndef build():\n    sys.exit(0)\n",
    "recurses.py": b"def build():\n    return build()\n",
    "no_syntax.py": b"def build(:\n",
    "no_text.py": bytes(range(128, 256)),
    "null.py": b"def build():\0\n    return 3\n",
    "no_indent.py": b"def build():\nreturn 3\n",
    "no_build.py": b"def built():\n    return 3\n",
    "no_function.py": b"build = 3\n",
    "no_module.py": b"import nowhere_to_be_found\n",
    "wants_more.py": b"def build(size):\n    return size\n",
    "no_default.py": b"def build(batch):\n    return batch\n",
    "nothing.py": b"def build():\n    pass\n",
    "number.py": b"def build():\n    return 3\n",
    "text.py": b"def build():\n    return 'abc'\n",
    "two.py": b"def build():\n    return (lambda: None), None\n",
    "order.py": b"def build():\n    return None, None, (lambda: None)\n",
    "no_model.py": b"def build():\n    return (lambda: None), 'model', None\n",
    "empty.py": b"",
}


def notebook(*sources: str) -> str:
    cells = [{"cell_type": "code", "source": source} for source in sources]
    return json.dumps({"cells": cells, "metadata": {}})


def make_course(root: Path, days: Iterable[int]) -> None:
    """Write small lessons and solutions, and copy the first lesson."""
    for kind in ("lessons", "solutions"):
        (root / kind).mkdir()
        for number in days:
            text = notebook(f'answer = 1\nanswer = exercise("{number}.1", answer)')
            (root / kind / f"day{number:02}_small.ipynb").write_text(text)
    (root / "work").mkdir()
    shutil.copyfile(root / "lessons" / COPY, root / "work" / COPY)
    progress.update(root / "work", lambda p: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A repository with small lessons, a copy of the first, and all the files above."""
    for number in days.numbers():
        days.day(number)  # its checks come from the real solutions
    root = tmp_path_factory.mktemp("repository")
    make_course(root, days=range(1, 17))
    for name, contents in CONFIGS.items():
        if contents is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(contents)
    for name, fields in COUNTLESS.items():
        (root / name).write_text(json.dumps(fields))
    for name, text in SCRIPTS.items():
        (root / name).write_bytes(text)
    (root / "good.py").write_text(GOOD)
    (root / "failed.log").write_text("CUDA out of memory. Tried to allocate 2.00 GiB.")
    (root / "taken").write_text("a file")
    (root / "nowhere").symlink_to("nowhere/at/all")
    return root


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch, folder) -> None:
    """Fail if a bad command line reaches any real work."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a bad command line was accepted")

    monkeypatch.setattr(cli, "app", COMMAND)
    monkeypatch.setattr(days, "ROOT", folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for place in (
        "memlab.cli.measure.measured_rows",
        "memlab.cli.train.run",
        "memlab.planner.search._Search.options",
        "memlab.cli.course._run_jupyterlab",
        "memlab.cli.doctor.examine",
        "memlab.cli.explain._show",
    ):
        monkeypatch.setattr(place, fail)


# ------------------------------------------------------------------ bad lines are refused


def files_below(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, size and time of each file and folder, to detect changes."""
    found = {}
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(where, name)
            stat = os.lstat(path)
            time = (
                0 if name in folders else stat.st_mtime_ns
            )  # the check for writability changes a folder's time
            found[path] = (stat.st_mode, stat.st_size, time)
    return found


def complaints(run: Callable[[], object]) -> Iterator[str]:
    """Yield each defect in how a bad line was refused."""
    try:
        outcome = run()
    except (Exception, AssertionError, pytest.fail.Exception) as error:
        yield f"raised {type(error).__name__}: {str(error)[:200]}"
        return
    if outcome.status != 2:
        yield f"status {outcome.status}"
    if outcome.out:
        yield f"standard output {outcome.out[:200]!r}"
    if not outcome.err.endswith("\n") or outcome.err.count("\n") != 1:
        yield f"not one line {outcome.err[:300]!r}"
    line = outcome.err.removesuffix("\n")
    if not line.startswith("memlab: ") or not line.isprintable() or len(line) > LONGEST_LINE:
        yield f"not a plain sentence {line[:300]!r}"


def short(line: Line) -> str:
    return " ".join(repr(part if len(part) < 60 else f"{part[:50]}…") for part in line)


def refused(run_in: Callable[..., object], folder: Path, lines: list[Line]) -> str:
    """List the lines that were not refused properly; "" if all were."""
    before = files_below(folder)
    bad = []
    for line in lines:
        found = list(complaints(partial(run_in, folder, *line)))
        if (after := files_below(folder)) != before:
            found.append(f"files changed: {sorted(set(after.items()) ^ set(before.items()))[:3]}")
            before = after
        bad += [f"{short(line)}: {'; '.join(found)}"] if found else []
    return f"{len(bad)} of {len(lines)}:\n" + "\n".join(bad[:20]) if bad else ""


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [60, slow(COUNT)])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_bad_line_is_refused_in_one_sentence_without_effects(
    memlab_in, folder, command, count
):
    lines = wrong_lines(command, count)
    assert len({tuple(line) for line in lines}) == count
    assert not refused(memlab_in, folder, lines)


def test_every_bad_value_is_refused(memlab_in, folder):
    """Try all values of the tables above. The generated lines use only some."""
    plan = ["plan", "--model", "tiny"]
    lines = [[*plan, f"--memory={value}"] for value in NO_BYTES]
    lines += [[*plan, "--memory=24GB", f"--out={value}"] for value in NO_FOLDERS]
    lines += [["measure", "--model", "tiny", f"--out={value}"] for value in NO_FOLDERS]
    lines += [["train", f"--batch={value}"] for value in (*NO_NUMBERS, *OUT_OF_RANGE)]
    lines += [["hint", value] for value in NO_EXERCISES if not value.startswith("-")]
    lines += [["check", value] for value in (*NO_EXERCISES, *NO_DAYS) if not value.startswith("-")]
    lines += [["measure", "--technique", value] for value in JUNK]
    lines += [["train", "--model", value] for value in JUNK]
    assert not refused(memlab_in, folder, lines)


def test_every_bad_command_is_refused_in_one_sentence(memlab_in, folder):
    rng = random.Random(0)
    names = {no_name(rng, COMMANDS) for _ in range(3 * COUNT)}
    lines = [[name, *rng.choice(([], ["1"], ["--help"], ["--yes"]))] for name in sorted(names)]
    lines += [["--", "no"], ["-m"], ["--batch", "3"], ["--yes", "reset", "1"]]
    assert len(lines) >= COUNT
    assert not refused(memlab_in, folder, lines[:COUNT] + lines[-5:])


@pytest.mark.parametrize("line", [[], ["--"]])
def test_without_a_command_a_screen_says_what_to_do_first(memlab_in, folder, line):
    outcome = memlab_in(folder, *line)
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert set(re.findall(r"memlab ([a-z]+) ", outcome.out)) - {"shows"} <= set(COMMANDS)
    assert all(f"memlab {name}" in outcome.out for name in ("explain", "run", "plan", "start"))


def test_every_invalid_config_is_refused(memlab_in, folder):
    names = [*CONFIGS, *COUNTLESS]
    ours = ("--library", "memlab")  # transformers builds more
    lines = [["measure", "--model", name, "--dry-run", *ours] for name in names]
    lines += [["plan", "--model", name, "--memory", "24GB", *ours] for name in names]
    assert not refused(memlab_in, folder, lines)


def test_every_failing_script_is_refused(memlab_in, folder):
    ways = (["measure"], ["measure", "--dry-run"], ["measure", "--dry-run", "--device", "cuda"])
    lines = [[*way, "--script", f"{name}:build"] for way in ways for name in SCRIPTS]
    lines += [["plan", "--memory", "9GB", "--script", f"{name}:build"] for name in SCRIPTS]
    assert not refused(memlab_in, folder, lines)


@pytest.mark.parametrize(
    "line",
    [
        ["measure", "--model", "closed.json"],
        ["plan", "--model", "closed.json", "--memory", "24GB"],
        ["measure", "--script", "closed.py:build"],
        ["plan", "--script", "closed.py:build", "--memory", "24GB"],
        ["measure", "--model", "tiny", "--out", "closed"],
    ],
)
def test_files_without_permission_are_refused(memlab_in, tmp_path, line):
    for name in ("closed.json", "closed.py"):
        (tmp_path / name).write_text("{}")
        (tmp_path / name).chmod(0)
    (tmp_path / "closed").mkdir(mode=0o500)
    if os.access(tmp_path / "closed.json", os.R_OK):
        pytest.skip("root may read and write everything")
    assert not refused(memlab_in, tmp_path, [line])


def test_a_read_error_is_refused(memlab_in, folder, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("memlab.configs.config_json.open", fail, raising=False)
    line = ["train", "--model", "wide.json"]
    assert not refused(memlab_in, folder, [line])
    assert "wide.json cannot be read (Permission denied); give" in memlab_in(folder, *line).err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            ["measure", "--batch", "x"],
            "got --batch x; expected an integer from 1 to 1,000,000; see memlab measure --help",
        ),
        (
            ["train", "--steps", "-3"],
            "got --steps -3; expected an integer from 1 to 1,000,000,000; see memlab train "
            "--help",
        ),
        (
            ["plan", "--model", "--gpus", "2"],
            "got --model without a value, followed by --gpus; give it one; see memlab plan "
            "--help",
        ),
        (
            ["plan", "--lora", "--full"],
            "got --lora or --full 2 times; give it once; see memlab plan --help",
        ),
        (
            ["measure", "--seq"],
            "got --seq without a value; give it one; see memlab measure --help",
        ),
        (
            ["reset", "1", "--yes=no"],
            "got --yes with a value; it takes none: remove the value; see memlab reset --help",
        ),
        (["doctor", "a b", "c"], "got extra arguments 'a b' c; memlab doctor takes only options; "
         "see memlab doctor --help"),
        (["diff", "1.1", "1.2"], "got extra arguments 1.2; memlab diff takes only EXERCISE and "
         "options; see memlab diff --help"),
        (["hint"], "got no EXERCISE; expected the number of an exercise, such as 1.2; see memlab "
         "hint --help"),
        (["start", "one"], "got the day one; expected an integer, such as 1; see memlab start "
         "--help"),
        (["hint", "9" * 5000 + ".1"], f"got {'9' * 53}…{'9' * 24}.1; give the number of an "
         "exercise, such as 1.2"),
        (["check", "9" * 5000], f"got {'9' * 53}…{'9' * 26}; give a day, such as 1, or one of its "
         "exercises, such as 1.2"),
        (["measure", "--technique", "sgd, lora"], "got --technique 'sgd, lora'; join techniques "
         "with +: sgd+lora"),
        (["diff", "1.1", "--yess"], "got --yess; did you mean --yes? Choose from --yes, --help; "
         "see memlab diff --help"),
    ],
)  # fmt: skip
def test_an_error_names_the_input_the_expectation_and_the_help(memlab_in, folder, line, sentence):
    assert memlab_in(folder, *line).err == f"memlab: {sentence}\n"


@pytest.mark.parametrize(
    ("line", "near"),
    [
        (["mesure"], "measure"),
        (["measure", "--tecnique", "lora"], "--technique"),
        (["measure", "--technique", "checkpoiting"], "checkpointing"),
        (["measure", "--model", "llama2-7b"], "llama-2-7b"),
        (["plan", "--memory", "rtx409", "--model", "tiny"], "rtx4090"),
        (["plan", "--memory", "24GB", "--model", "tiny", "--optimizer", "adamw8bit"], "adam8bit"),
        (["train", "--dtype", "bfloat"], "bfloat16"),
        (["train", "--dtype", "fp16"], "float16"),
        (["train", "--dtype", "bf16"], "bfloat16"),
    ],
)
def test_a_typo_gets_the_nearest_name(memlab_in, folder, line, near):
    assert f"did you mean {near}?" in memlab_in(folder, *line).err


# ------------------------------------------------------------------ a damaged work folder

NO_NOTEBOOKS = (
    *(b"", b"<<<<<<< mine", b"[]", b"{}", b"null", b'"text"', b"\xff\xfe\0", b"[" * 100_000),
    *(b'{"cells": []}', b'{"cells": 5}', b'{"cells": [1]}', b'{"cells": "ab"}', b'{"cells": null}'),
    *(b'{"cells": [{"cell_type": "code"}]}', b'{"cells": [{"cell_type": 1, "source": 2}]}'),
    b'{"cells": ' + b"9" * 5000 + b"}",
)
NO_PROGRESS = (
    *(b"", b"half of it", b"[]", b"{}", b"null", b"7", b"\xff\xfe\0", b'{"version": 2}'),
    *(b'{"version": 1, "exercises": [], "guesses": {}}', b'{"version": 1, "exercises": {}}'),
    b'{"version": 1, "exercises": {"1.1": {"status": 3}}, "guesses": {}}',
    b'{"version": 1, "exercises": {"1.1": {"other": 3}}, "guesses": {}}',
    b'{"version": 1, "exercises": {}, "guesses": {"1.1": {"peak_gib": {"guessed": "much"}}}}',
    b'{"version": 1, "exercises": {}, "guesses": {"1.1": {"peak_gib": {"guessed": 1'
    + b"0" * 400
    + b"}}}}",
    b"[" * 100_000,
)
NO_GUESSES = ("x", "1", "1.", "", "1.b", "two\nlines")
COPY = "day01_small.ipynb"


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A repository with one small lesson and its copy."""
    make_course(tmp_path, days=(1,))
    monkeypatch.setattr(days, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [["check", "1"], ["check", "1.1"], ["diff", "1.1", "--yes"]])
def test_a_copy_that_is_not_a_notebook_is_refused_and_kept(memlab_in, course, command):
    for contents in NO_NOTEBOOKS:
        (course / "work" / COPY).write_bytes(contents)
        assert not refused(memlab_in, course, [command]), contents[:60]


@pytest.mark.parametrize(
    "command",
    [
        *(["check", "1"], ["hint", "1.1"], ["diff", "1.1", "--yes"], ["progress"]),
        *(["start", "1", "--no-open"], ["reset", "1", "--yes"]),
    ],
)
def test_unreadable_progress_is_never_lost(memlab_in, course, command):
    """Usually the file is backed up and the command continues. Otherwise the command fails."""
    for contents in NO_PROGRESS:
        (course / "work" / progress.FILE).write_bytes(contents)
        outcome = memlab_in(course, *command)
        assert outcome.status in (0, 1, 2), contents[:60]
        assert outcome.err.count("\n") == (outcome.status == 2), contents[:60]
        kept = [path.read_bytes() for path in (course / "work").glob("progress*.json")]
        assert contents in kept, contents[:60]


@pytest.mark.parametrize("id_", NO_GUESSES)
def test_guesses_without_an_exercise_are_refused_by_name(memlab_in, course, id_):
    guesses = {id_: {"peak_gib": {"guessed": 1.0}}}
    progress.update(course / "work", lambda p: p.guesses.update(guesses))
    assert not refused(memlab_in, course, [["progress"]])
    err = memlab_in(course, "progress").err
    assert err.startswith(
        f"memlab: work/progress.json has guesses for {quoted(id_)}, which is not an"
    )


def in_the_way(course: Path, name: str, how: str) -> None:
    """Replace a path by a file, a folder, a dangling link or a link to itself."""
    path = course / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if how == "folder":
        path.mkdir()
    elif how == "file":
        path.write_text("mine")
    else:
        path.symlink_to(path.name if how == "loop" else "nowhere/at/all")


@pytest.mark.parametrize(
    ("name", "how", "commands"),
    [
        ("work", "file", ("start", "check", "diff", "progress", "reset")),
        ("work", "link", ("start", "check", "diff", "reset")),
        ("work", "loop", ("start", "check", "diff", "progress", "reset")),
        (f"work/{COPY}", "folder", ("check", "diff")),
        (f"work/{COPY}", "link", ("check", "diff")),
        (f"work/{COPY}", "loop", ("check", "diff")),
        ("work/progress.json", "folder", ("hint", "diff", "progress")),
        ("work/progress.json", "loop", ("start", "diff", "progress")),
        ("work/backups", "file", ("reset",)),
        ("work/.progress.json.lock", "folder", ("hint",)),
        (f"lessons/{COPY}", "file", ("start", "reset")),
        (f"lessons/{COPY}", "folder", ("start", "reset")),
        (f"solutions/{COPY}", "file", ("diff",)),
    ],
)
def test_an_obstructing_path_is_reported_and_left_alone(memlab_in, course, name, how, commands):
    in_the_way(course, name, how)
    line_of = {
        "start": ["start", "1", "--no-open"],
        "check": ["check", "1"],
        "hint": ["hint", "1.1"],
        "diff": ["diff", "1.1", "--yes"],
        "progress": ["progress"],
        "reset": ["reset", "1", "--yes"],
    }
    assert not refused(memlab_in, course, [line_of[command] for command in commands])


# ------------------------------------------------------------------ separate processes


def in_a_process(folder: Path, *line: str) -> tuple[int, bytes, bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-m", "memlab", *line], cwd=folder, env=environment, capture_output=True
    )
    return process.returncode, process.stdout, process.stderr


def refused_in_a_process(folder: Path, *line: str) -> None:
    before = files_below(folder)
    status, out, err = in_a_process(folder, *line)
    assert (status, out) == (2, b"")
    assert err.startswith(b"memlab: got ")
    assert err.count(b"\n") == 1
    assert files_below(folder) == before


@pytest.mark.few(2)
@pytest.mark.parametrize("line", [["mesure"], ["doctor", "\udcff"], ["plan", "--gpus", "\x1b[31m"]])
def test_a_process_refuses_bad_input_like_the_function(folder, line):
    refused_in_a_process(folder, *line)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_process_refuses_a_line_of_each_command(folder, command):
    refused_in_a_process(folder, *wrong_lines(command, 1)[0])
