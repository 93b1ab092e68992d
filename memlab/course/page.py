"""Print sentences in a notebook, wrapped to the width of its page."""

from textwrap import fill

CHARACTERS = 96


def say(text: str, indent: str = "") -> None:
    """Print each line of the text; continuation lines are indented."""
    for line in text.splitlines():
        print(fill(line, CHARACTERS, subsequent_indent=indent, break_on_hyphens=False))
