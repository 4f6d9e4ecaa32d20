"""`python -m trireme` is the command `trireme`, even if the current folder has its own `app`."""

import trireme


def main() -> None:
    """The console script."""
    trireme.claim()
    from app.cli import main as command_line  # not before `claim` has made `app` Trireme's

    command_line()


if __name__ == "__main__":
    main()
