"""``python -m fedveil`` is the command ``fedveil``."""

from fedveil.cli import main

main()
