"""Who may change requests, pool and weights: one thread at a time, in the order in which they ask."""

import os
import threading
from collections.abc import Callable

from rollout.errors import RolloutError


class Turns:
    """A fair lock that is not taken twice, and whose waiters may be told that they need it no longer.

    An interrupt may come between any two lines, so the `try` whose `finally` sets `owner` back begins before take().
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held for moments only, by whoever looks at or changes what threads share without having the turn."""
        self.owner: int | None = None
        """The thread whose turn it is."""
        self._changed = threading.Condition(self.lock)
        self._line: list[int] = []
        self._process = os.getpid()

    @property
    def idle(self) -> bool:
        """Whether nobody has the turn or waits for it."""
        return self.owner is None and not self._line

    @property
    def elsewhere(self) -> bool:
        """Whether this is a forked process, where threads that held the lock or the turn no longer exist."""
        return os.getpid() != self._process

    def refuse_elsewhere(self) -> None:
        """Raise in a forked process, where waiting would never end."""
        if self.elsewhere:
            raise RolloutError(f"this engine was made in another process ({self._process}): make a new one in this one")

    def refuse_nesting(self) -> None:
        """Raise if this thread has the turn already, as in a hook of the model that calls the engine, or elsewhere."""
        self.refuse_elsewhere()
        if self.owner == threading.get_ident():
            raise RolloutError("this engine is already generating: call it from one place at a time")

    def take(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn and take it; False, without it, as soon as `unless` is true."""
        me = threading.get_ident()
        with self.lock:
            try:
                self._line.append(me)
                while not unless():
                    if self.owner is None and self._line[0] == me:
                        self.owner = me
                        return True
                    self._changed.wait(1.0)  # an interrupt may have swallowed what tell() had to say
                return False
            finally:
                if me in self._line:
                    self._line.remove(me)
                if self.owner is None:
                    self._changed.notify_all()  # the next in line may go

    def tell(self) -> None:
        """Something has happened: whoever waits looks again."""
        with self.lock:
            self._changed.notify_all()
