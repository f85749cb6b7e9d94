"""`python -m surgery`: the same as the command."""

from surgery.cli.main import entry

if __name__ == "__main__":
    entry()
