"""`python -m cbatch`."""

from cbatch.cli.main import main

if __name__ == "__main__":
    main()
