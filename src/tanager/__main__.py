"""`python -m tanager`: the same as the command `tanager`."""

import sys

from tanager.cli import main


if __name__ == "__main__":
    sys.exit(main())
