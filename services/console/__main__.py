"""`python -m services.console`: the same as the `tetrarch` command."""

from services.console.cli import main

if __name__ == "__main__":
    main()
