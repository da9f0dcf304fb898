"""The user's code, run so that the process it leaves behind is the one it found."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from trainer.signals import tell


@contextmanager
def users_code(name: str) -> Iterator[None]:
    """Load or call a reward. name: for messages.

    What it sets of torch for all that comes after (default dtype and device, gradients, autocast, threads) and the
    working directory are put back. A child that it forked and that comes out of it ends here, with
    the status of exit() if that was called, else 1: the run is its parent's.
    """
    owner = os.getpid()
    with ExitStack() as stack:
        _put_back_later(stack)
        try:
            yield
        except BaseException as error:
            if os.getpid() != owner:
                _end_child(name, error)
            raise
        if os.getpid() != owner:
            _end_child(name, None)


def _end_child(name: str, error: BaseException | None) -> None:
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        os._exit((error.code or 0) & 0xFF)
    how = "returned from it" if error is None else f"left it by {type(error).__name__}"
    tell(f"reward {name}: a child that it forked {how}, and is ended; a child ends with os._exit() in the reward")
    os._exit(1)


def _put_back_later(stack: ExitStack) -> None:
    folder = _folder()

    def go_back() -> None:
        if folder is not None and _folder() != folder:
            os.chdir(folder)

    stack.callback(go_back)
    # a worker process has no torch, unless the user's code has imported it
    torch = sys.modules.get("torch")
    if torch is not None:
        _put_torch_back_later(stack, torch)


def _put_torch_back_later(stack: ExitStack, torch: Any) -> None:
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())

    def put_back() -> None:
        torch.set_default_dtype(dtype)
        for kind, (enabled, autocast_dtype) in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, autocast_dtype)
        # only what differs: setting them has a price
        if torch.get_default_device() != device:
            torch.set_default_device(None if device == torch.device("cpu") else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    stack.callback(put_back)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
