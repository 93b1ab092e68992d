"""What a notebook prints in sentences: lines as wide as its page, which break between words."""

from textwrap import fill

CHARACTERS = 96


def say(text: str, indent: str = "") -> None:
    """Print each line of the text; what goes on after a break is indented."""
    for line in text.splitlines():
        print(fill(line, CHARACTERS, subsequent_indent=indent, break_on_hyphens=False))
