"""The command `memlab`, and `python -m memlab`.

Importing the command line takes half a second, so it happens where Ctrl-C is caught.
"""

import sys


def main() -> None:
    try:
        from memlab.cli import main as run
    except KeyboardInterrupt:
        from memlab.internals.interrupts import INTERRUPTED, INTERRUPTED_MESSAGE

        print(f"memlab: {INTERRUPTED_MESSAGE}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
