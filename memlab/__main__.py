"""`python -m memlab` is the command `memlab`."""

from memlab.cli import main

main()
