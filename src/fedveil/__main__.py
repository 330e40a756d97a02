"""Run the command ``fedveil`` as ``python -m fedveil``."""

from fedveil.cli.app import main

main()
