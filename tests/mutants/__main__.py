"""``python -m tests.mutants [NAME ...]``: play the changes of the list."""

import sys

from tests.mutants.player import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
