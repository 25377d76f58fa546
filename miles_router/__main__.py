"""Run `miles-router` as `python -m miles_router`."""

from miles_router.cli import main

if __name__ == "__main__":
    main()
