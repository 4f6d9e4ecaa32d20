"""The application, from the configuration to the command line; app/README.md lists its parts."""

from app import names as _names

_names.claim()
