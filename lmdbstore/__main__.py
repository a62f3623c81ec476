"""`python -m lmdbstore`."""

from lmdbstore.cli import main

if __name__ == "__main__":
    main()
