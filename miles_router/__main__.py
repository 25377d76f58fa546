"""`python -m miles_router` is `miles-router`."""

from miles_router.cli import main

if __name__ == "__main__":
    main()
