"""`python -m app` is `trireme`, where no other `app` comes first on sys.path; `python -m trireme` is so anywhere."""

from app.cli import main

if __name__ == "__main__":
    main()
