"""Worker processes that reward functions run in, so that a call can be ended whatever it does.

Each is started afresh (no fork: nothing of torch's threads or the model's memory is in it) as the leader of a process
group of its own, and has a thread here that asks it one thing at a time. A call that takes too long ends by SIGKILL to
the group, what the function started included; the next call finds a new process. A keeper, a process that does nothing
but wait, ends the groups should the trainer be gone, however that happened.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollout import RolloutError
from trainer.config import ConfigError
from trainer.rewards.calling import Failure, Reply
from trainer.rewards.functions import WeightedFunction
from trainer.rewards.worker import Question, Source

_START_LIMIT = 120.0
"""Seconds for a process to load the functions, which this process could load: imports may be slow, not endless."""
_GRACE = 1.0
"""Seconds from the end of a process's socket to its own."""
_WORKER = """
import sys
fd, sys.path[:] = int(sys.argv[1]), sys.argv[2:]
del sys.argv[1:]
from trainer.rewards.worker import main
main(fd)
"""
# a line with a group's id for one that has begun, and with a minus for one that has ended
_KEEPER = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    number = int(line)
    groups.add(number) if number > 0 else groups.discard(-number)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class WorkerPool:
    """Calls of reward functions, by at most `workers` processes at a time, which start when they are first needed.

    timeout: seconds of wall clock for a call, start of the process apart; None: no limit. Raises ConfigError for a
    function that no other process can get.
    """

    def __init__(self, functions: Sequence[WeightedFunction], workers: int, timeout: float | None) -> None:
        self._sources = [_source(one) for one in functions]
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._processes: set[_Process] = set()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._closed = False

    def submit(
        self, which: int, arguments: Mapping[str, Any], wanted: list[str], count: int
    ) -> "Future[Reply | Failure]":
        """What trainer.rewards.calling.call gives, in some process, some time."""
        return self._threads.submit(self._ask, (which, dict(arguments), wanted, count))

    def close(self) -> None:
        """End every process, whatever it is doing."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end()
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait()

    def _ask(self, question: Question) -> Reply | Failure:
        process: _Process | None = getattr(self._own, "process", None)
        if process is None or process.has_ended():
            if process is not None:
                self._end(process)
            process = self._own.process = self._start()
        answer = process.ask(question, self._timeout)
        if isinstance(answer, Reply | Failure):
            return answer
        self._own.process = None
        how = self._end(process)
        if answer:
            return Failure("timeout", f"took more than reward.timeout={self._timeout:g} s and was ended")
        return Failure("timeout", f"ended its process ({how})")

    def _start(self) -> "_Process":
        with self._lock:
            if self._closed:
                raise RolloutError("the reward's worker processes have been closed")
            if self._keeper is None:
                command = [sys.executable, "-I", "-S", "-c", _KEEPER]
                quiet = subprocess.DEVNULL
                self._keeper = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
                )
            process = _Process()
            self._processes.add(process)
            self._tell_keeper(process.pid)
        problem = process.ask(self._sources, _START_LIMIT)
        if problem is not None:
            how = self._end(process)
            why = problem if isinstance(problem, str) else f"it ended while loading ({how})"
            raise RolloutError(f"reward.workers: a worker process could not start: {why}")
        return process

    def _end(self, process: "_Process") -> str:
        how = process.end()
        with self._lock:
            self._processes.discard(process)
            self._tell_keeper(-process.pid)
        return how

    def _tell_keeper(self, number: int) -> None:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        os.write(self._keeper.stdin.fileno(), b"%d\n" % number)


class _Process:
    """A worker process and the socket to it; used by one thread, and killed by any."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {"OMP_NUM_THREADS": "1", **os.environ}  # there may be as many of them as cores
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _WORKER, str(theirs.fileno()), *sys.path],
                # what a function prints is no output of the trainer
                stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self._gone = False
        self.pid = self._process.pid

    def ask(self, question: Any, limit: float | None) -> Any:
        """The answer; for a process that ended instead, True if it was for the limit, and False if by itself."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.kill()

        timer = None if limit is None else threading.Timer(limit, stop)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            self._connection.send(question)
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            return late.is_set()
        finally:
            if timer is not None:
                timer.cancel()
        # one that came at the last moment is of a process that is being ended
        return True if late.is_set() else answer

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process and all of its group."""
        with self._lock:
            if not self._gone:
                # macOS says that what has ended is not permitted
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> str:
        """How the process has ended, for messages. It is given a moment to, and what it leaves behind is ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self.kill()
        status = self._process.wait()
        with self._lock:
            self._gone = True
        self._connection.close()
        return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def _source(one: WeightedFunction) -> Source:
    if one.path is not None:
        file, _, function = one.path.rpartition(":")
        return one.name, f"{Path(file).expanduser().resolve()}:{function}" if file.endswith(".py") else one.path
    try:
        return one.name, pickle.dumps(one.function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"reward.workers: {one.name} cannot be handed to another process ({error}); give it by path, or"
            " reward.workers=0"
        ) from error
