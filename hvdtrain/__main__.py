"""``python -m hvdtrain``: without arguments, train the built-in recipe."""

import sys

from hvdtrain.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
