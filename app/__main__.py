"""`python -m app` is `trireme`."""

from app.cli import main

if __name__ == "__main__":
    main()
