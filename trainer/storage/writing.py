"""A file of the run that cannot be written: one error with its path and the reason, whoever noticed it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


class WriteError(OSError):
    """The disk is full, or the place has become read-only; the message names path and reason."""

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(f"{path} could not be written: {getattr(error, 'strerror', None) or error}")
        self.path = path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what fails inside into a WriteError about `path`."""
    try:
        yield
    except WriteError:
        raise
    except (OSError, SafetensorError) as error:
        raise WriteError(path, error) from error
    except Exception as error:
        if type(error) is not Exception:  # tokenizers reports a failed write as a bare Exception
            raise
        raise WriteError(path, error) from error
