"""``python -m fedveil`` is the command ``fedveil``."""

from fedveil.cli.app import main

main()
