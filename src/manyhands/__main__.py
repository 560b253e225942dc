"""`python -m manyhands`: the command."""

from manyhands.cli import main

main()
