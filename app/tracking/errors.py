"""What calls to MLflow raise, in two kinds: try again later, or leave it out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from mlflow.exceptions import MlflowException

from app.masking import mask_uri

_PERMANENT = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "INVALID_STATE"}
_PERMANENT |= {"RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"}
_CAUSES = r"refused|timed out|timeout|not known|name resolution|CERTIFICATE\w*|reset|closed|aborted|too many \d+ error"


class TransientError(Exception):
    """MLflow cannot take it now; the message is a sentence for a person."""


class PermanentError(Exception):
    """MLflow will never take this."""


@contextlib.contextmanager
def mlflow_errors(uri: str) -> Iterator[None]:
    """Sorts what calls may raise into `TransientError` and `PermanentError`."""
    try:
        yield
    except (TransientError, PermanentError):
        raise
    except Exception as error:  # artifact stores raise errors of their own libraries
        text = " ".join(mask_uri(str(error)).split())
        code = error.error_code if isinstance(error, MlflowException) else ""
        # requests' errors are OSErrors, and some of them ValueErrors as well
        ours = isinstance(error, (TypeError, ValueError, AttributeError, KeyError)) and not isinstance(error, OSError)
        if code in _PERMANENT or ours:
            raise PermanentError(f"MLflow at {mask_uri(uri)} said: {text[:300] or type(error).__name__}") from error
        what = f"said: {text[:300] or type(error).__name__}"
        if "failed with exception" in text or "failed with timeout" in text:
            what = f"does not answer ({', '.join(dict.fromkeys(re.findall(_CAUSES, text))) or text[:200]})"
        raise TransientError(f"MLflow at {mask_uri(uri)} {what}") from error
