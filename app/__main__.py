"""`python -m app` is the command `trireme`, if no other `app` comes first on sys.path.

`python -m trireme` works everywhere.
"""

from app.cli import main

if __name__ == "__main__":
    main()
