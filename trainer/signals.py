"""SIGINT, SIGTERM and SIGHUP: a run ends in order, and the exit status says by which (128 and the signal's number).

While there is nothing to lose (imports, closing) a signal ends the process at once. In a run it raises Interrupted,
where a step is being written down only after that; a second signal does not wait. All this is for the run's process
alone, not for children that a reward forks.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal that asks the run to end; at_once: the second one."""

    def __init__(self, signum: int, *, at_once: bool = False) -> None:
        super().__init__(signal.Signals(signum).name)
        self.status = 128 + signum
        self.at_once = at_once


class Interrupts:
    """What signals do at the moment; one for the process."""

    def __init__(self) -> None:
        self._raises = self._holds = False
        self._received: int | None = None
        os.register_at_fork(after_in_child=self._let_go)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Take the signals over; one that is ignored (nohup, a script's background job) stays ignored."""
        before = {signum: signal.getsignal(signum) for signum in _HANDLED}
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, self._handle)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            self._received = None

    @contextmanager
    def raised(self) -> Iterator[None]:
        """From here on a signal raises Interrupted, so that what it cuts short can be put in order."""
        self._raises, self._holds = True, False
        try:
            yield
        finally:
            self._raises = False

    def hold(self) -> None:
        """What follows must not be cut in two: a first signal waits for release()."""
        self._holds = True

    def release(self) -> None:
        """Raise Interrupted if a signal came, also one that was raised where Python or a user's code swallowed it."""
        self._holds = False
        if self._received is not None:
            raise Interrupted(self._received)

    def _let_go(self) -> None:
        """In a forked child: a signal ends it, as it does any process, and is none of the run's."""
        for signum in _HANDLED:
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, signal.SIG_DFL)
        self._received = None

    def _handle(self, signum: int, _: FrameType | None) -> None:
        first, self._received = self._received is None, signum
        if not self._raises:
            tell("interrupted")
            os._exit(128 + signum)
        if self._holds and first:
            tell("interrupted: the step is being finished; a second signal ends at once")
            return
        raise Interrupted(signum, at_once=not first)


def tell(text: str) -> None:
    """A line on the standard error, if anybody still reads it: a signal to the group may have ended who did."""
    with suppress(OSError):
        # not through sys.stderr, since a handler may run in the middle of a write to it
        os.write(2, f"{text}\n".encode(errors="replace"))


interrupts = Interrupts()
