"""`python -m tanager`: the same as the command `tanager`."""

from tanager.cli import process


if __name__ == "__main__":
    process()
