"""The entry point of `python -m miles_router`, the same command as `miles-router`."""

from miles_router.cli import main

if __name__ == "__main__":
    main()
