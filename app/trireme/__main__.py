"""`python -m trireme` is `trireme`, also where the current folder has an `app` of its own."""

import trireme


def main() -> None:
    """The console script."""
    trireme.claim()
    from app.cli import main as command_line  # not before Trireme's `app` is the one that is imported

    command_line()


if __name__ == "__main__":
    main()
