"""What a worker process does: load the functions, then answer calls until it is ended. Imports no torch."""

import os
import pickle
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from trainer.config import ConfigError
from trainer.data.tasks import RewardFunction
from trainer.rewards.calling import Failure, call
from trainer.rewards.loading import described, load_reward

Source = tuple[str, str | bytes]
"""A function's name, and the path to load it from or its pickled copy."""
Question = tuple[int, dict[str, Any], list[str], int]
"""Which function, and the other arguments of `call`."""


def main(fd: int) -> None:
    """Serve the pool at the other end of the socket. Ends by os._exit: threads that a function left do not hold it."""
    connection = Connection(fd)
    # a child that a function forks must not keep the pool from seeing this process end
    os.register_at_fork(after_in_child=connection.close)
    try:
        sources: list[Source] = connection.recv()
        problem, functions = _load(sources)
        connection.send(problem)
        while problem is None:
            which, arguments, wanted, count = connection.recv()
            answer = call(functions[which], sources[which][0], arguments, wanted, count)
            # an exception of the user's own need not survive the way
            connection.send(replace(answer, cause=None) if isinstance(answer, Failure) else answer)
    except (EOFError, ConnectionError):
        pass  # the trainer has ended
    os._exit(0)


def _load(sources: list[Source]) -> tuple[str | None, list[RewardFunction]]:
    """What is wrong, if anything is, and the functions."""
    functions = []
    for name, source in sources:
        try:
            functions.append(load_reward(source) if isinstance(source, str) else pickle.loads(source))
        except ConfigError as error:
            return str(error), []
        except Exception as error:  # noqa: BLE001 - whatever a copy raises that is made anew
            return f"reward {name}: {described(error)}", []
    return None, functions
