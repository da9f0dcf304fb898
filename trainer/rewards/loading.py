"""A reward function of the user's own: found, imported, and checked for what it can be called with."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.config import ConfigError
from trainer.data.rows import Row
from trainer.data.tasks import RewardFunction
from trainer.rewards.code import users_code

_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
REWARD_MODULE = "cowroll_reward_"
"""What names of modules begin with that were made of reward files."""
_OURS = str(Path(__file__).parents[1]) + os.sep
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
STATE, LOG_EXTRA, LOG_METRIC = "trainer_state", "log_extra", "log_metric"
"""What a function may take besides columns, by TRL's names."""


def load_reward(path: str, key: str = "reward.path") -> RewardFunction:
    """A function of one's own: `package.module:function` (or `package.module.function`) or `FILE.py:function`.

    FILE.py is imported as if it were run: the files beside it can be imported, now and later. Raises ConfigError, which
    begins with the key, if the function is not there, cannot be called with lists, or importing it fails in any way,
    `exit()` included. What the import sets of torch, and the working directory, are put back.
    """
    module_name, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise ConfigError(f"{key}={path!r}: use package.module:function or FILE.py:function")
    file = Path(module_name).expanduser() if module_name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"{key}={path!r}: file {module_name!r} does not exist")
    try:
        with users_code(repr(path)):
            module = importlib.import_module(module_name) if file is None else _import_file(file.resolve())
            function = getattr(module, name, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's code may raise anything
        raise ConfigError(f"{key}={path!r}: {_import_failure(error, module_name)}") from error
    if not callable(function):
        raise ConfigError(f"{key}={path!r}: {module_name!r} has no function {name!r}")
    problem = _unfit(function)
    if problem is not None:
        raise ConfigError(f"{key}={path!r}: {problem}")
    loaded: RewardFunction = function
    return loaded


def reward_name(function: Callable[..., Any]) -> str:
    """A name for messages and metrics: a partial has that of what it calls, an instance that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def raised_at(error: BaseException) -> str | None:
    """FILE:LINE where the user's code raised it or called the library that did; None if none of theirs took part.

    For a syntax error it is where the text is wrong.
    """
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f"{error.filename}:{error.lineno}"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    others = [place for place in places if not place[0].startswith(("<", _OURS))]
    users = [place for place in others if not place[0].startswith(_LIBRARIES)]
    # a reward may be an installed package's
    chosen = (users or others)[-1:]
    return f"{chosen[0][0]}:{chosen[0][1]}" if chosen else None


def described(error: BaseException) -> str:
    """Its type and its message on one line."""
    try:
        message = " ".join(str(error).split())
    except Exception as another:  # noqa: BLE001 - a user's own type
        message = f"(its message cannot be had: __str__ raised {type(another).__name__})"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def takes(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the arguments that it is given; None: all that there are."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind in _BY_NAME)


def needs(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments that it cannot be called without."""
    parameters = inspect.signature(function).parameters.values()
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    return frozenset(parameter.name for parameter in required if parameter.kind in _BY_NAME)


def check_arguments(
    function: RewardFunction, rows: Sequence[Row], kind: str = "training", name: str | None = None
) -> None:
    """Refuse a reward that wants an argument which no row has. kind, name: which rows and function, for messages."""
    called = name or reward_name(function)
    columns = {name for row in rows for name in row.columns}
    known = {"prompts", "completions", "completion_ids", "answer", STATE, LOG_EXTRA, LOG_METRIC}
    clash = sorted(columns & {STATE, LOG_EXTRA, LOG_METRIC})
    if clash:
        raise ConfigError(f"task: field {clash[0]!r} of the {kind} rows is what rewards are called with; rename it")
    known |= columns
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not inspect.Parameter.empty or parameter.kind in variable:
            continue
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(f"reward: {called} takes {argument!r} by place only; arguments come by name")
        if argument not in known:
            file = rows[0].source.rpartition(":")[0] if rows else ""
            raise ConfigError(
                f"reward: {called} wants {argument!r}, which is no field of the {kind} rows"
                + (f" in {file}" if file else "")
                + "; add the field, or give the argument a default"
            )


_folders: set[Path] = set()
"""Folders of the reward files that were loaded."""


def _import_file(file: Path) -> ModuleType:
    """The file as a module of its own, whatever other files of that name are loaded, with its folder on sys.path."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"{REWARD_MODULE}{file.stem}_{digest}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _forget_neighbours(file.parent)
    path_before = sys.path[:]
    sys.path[:] = [str(file.parent), *(folder for folder in sys.path if folder != str(file.parent))]
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.path[:] = path_before
        sys.modules.pop(spec.name, None)
        raise
    _folders.add(file.parent)
    return module


def _forget_neighbours(folder: Path) -> None:
    """Of modules from beside other reward files, drop those that the files in this folder have the names of."""
    others = _folders - {folder}
    loaded = (
        [name for name in sys.modules if (folder / f"{name}.py").is_file() or (folder / name).is_dir()]
        if others
        else []
    )
    for top in loaded:
        origin = getattr(sys.modules[top], "__file__", None) or ""
        if others & {*Path(origin).parents[:2]}:
            for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
                del sys.modules[name]


def _import_failure(error: BaseException, module_name: str) -> str:
    place = raised_at(error)
    where = f"{place}: " if place else ""
    if isinstance(error, SystemExit):
        return (
            f"{where}exit({error.code!r}) while {module_name!r} is imported; keep it behind if __name__ == '__main__'"
        )
    if isinstance(error, ModuleNotFoundError):
        wanted = error.name or ""
        own = module_name == wanted or module_name.startswith(f"{wanted}.")
        return str(error) if own else f"{where}{error}; install it, or put its file beside {module_name!r}"
    if isinstance(error, SyntaxError):
        return f"{where}{error.msg}"
    return f"{where}{described(error)}"


def _unfit(function: Any) -> str | None:
    """What is wrong with something callable as a reward."""
    if inspect.isclass(function):
        return f"{function.__name__!r} is a class; name a function or an instance, as in scorer = {function.__name__}()"
    for called in (function, getattr(type(function), "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            return "it yields; a reward returns a list"
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        return f"the arguments it takes are not known ({error}); wrap it in a function of your own"
    return None
