"""Who may change requests, pool and weights: one thread at a time, in the order in which they ask."""

import threading
from collections.abc import Callable

from rollout.errors import RolloutError


class Turns:
    """A fair lock that is not taken twice, and whose waiters may be told that they need it no longer.

    An interrupt may come between any two lines, so the `try` of a `finally` that gives the turn back begins before it
    is taken.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held for moments only, by whoever looks at or changes what threads share without having the turn."""
        self._changed = threading.Condition(self.lock)
        self._line: list[int] = []
        self._owner: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    def refuse_nesting(self) -> None:
        """Raise if this thread has the turn already, as in a hook of the model that calls the engine."""
        if self.mine:
            raise RolloutError("this engine is already generating: call it from one place at a time")

    def take(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn and take it; False, without it, as soon as `unless` is true."""
        me = threading.get_ident()
        with self.lock:
            try:
                self._line.append(me)
                while not unless():
                    if self._owner is None and self._line[0] == me:
                        self._owner = me
                        return True
                    self._changed.wait()
                return False
            finally:
                if me in self._line:
                    self._line.remove(me)
                if self._owner is None:
                    self._changed.notify_all()  # the next in line may go

    def take_if_free(self) -> None:
        """Take the turn, before those in line, if nobody has it."""
        with self.lock:
            if self._owner is None:
                self._owner = threading.get_ident()

    def give_back(self) -> None:
        """Let the next in line have the turn, which is this thread's."""
        self._owner = None
        self.tell()

    def tell(self) -> None:
        """Something has happened: whoever waits looks again."""
        with self.lock:
            self._changed.notify_all()
