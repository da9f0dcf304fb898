"""What cannot be written is one error, whichever library noticed it: on a device that is always full."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tiny_models import byte_tokenizer
from trainer.storage.writing import WriteError, writing

FULL, FILE = "/dev/full", Path("run/file")
pytestmark = pytest.mark.skipif(not Path(FULL).exists(), reason=f"no {FULL} here")


@pytest.mark.parametrize(
    "write", [lambda: Path(FULL).write_text("a"), lambda: byte_tokenizer().backend_tokenizer.save(FULL)]
)
def test_a_failed_write_names_the_file_and_the_reason(write: Callable[[], object]) -> None:
    with pytest.raises(WriteError, match=r"^run/file could not be written: .*No space left on device"), writing(FILE):
        write()


def test_the_innermost_file_is_named() -> None:
    with pytest.raises(WriteError, match=r"^run/file "), writing(Path("run")), writing(FILE):
        Path(FULL).write_text("a")


def test_a_mistake_is_no_failed_write() -> None:
    with pytest.raises(KeyError), writing(FILE):
        raise KeyError("mine")
