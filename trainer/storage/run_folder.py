"""A run's folder: made, tried and locked before anything else, so that it belongs to one living process."""

import errno
import fcntl
import logging
import os
import shutil
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from rollout.model import flush_directory
from trainer.config import ConfigError
from trainer.storage import folders
from trainer.storage.lines import iterate_lines
from trainer.storage.writing import writing

logger = logging.getLogger(__name__)

_METRICS, _COMPLETIONS = "metrics.jsonl", "completions.jsonl"
_ASIDE = {_COMPLETIONS: "completions.before-resume.jsonl", _METRICS: folders.METRICS_ASIDE}
"""Files of lines by step, and where those of steps that a resumed run does again are kept. Metrics come last: by them
it is known which lines there are."""
_PARTIAL = tuple(str(Path(name).with_suffix(".tmp")) for pair in _ASIDE.items() for name in pair)
_FILES = ("config.yaml", "summary.json", *_ASIDE, *_ASIDE.values(), *_PARTIAL)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

_claimed: "weakref.WeakSet[RunFolder]" = weakref.WeakSet()


class RunFolder:
    """run_dir, locked until close(). The kernel takes the lock from a process that dies, however it dies."""

    def __init__(self, run_dir: str) -> None:
        """Raises ConfigError if the folder cannot be made or written, or if another process has it."""
        self._made: list[Path] = []
        try:
            self.path = Path(run_dir).expanduser().absolute()
            self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            _claimed.add(self)
            self._check_names()
            folders.recover(self.path)
        except BaseException as error:
            self.close()
            if isinstance(error, ConfigError) or not isinstance(error, OSError | ValueError | RuntimeError):
                raise
            reason = getattr(error, "strerror", None) or error
            place = getattr(error, "filename", None)
            if place is not None and str(place) != str(self.path):
                reason = f"{reason} ({place})"
            raise ConfigError(f"run_dir: {run_dir} cannot be made and written to: {reason}") from error

    def _take_lock(self) -> IO[str]:
        path = self.path / ".lock"
        if path.is_dir():
            raise ConfigError(f"run_dir: {path} is a folder, and the run writes a file of that name")
        while True:
            lock = path.open("a+")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().strip() or "another process"
                lock.close()
                raise ConfigError(
                    f"run_dir: {self.path} is in use by {owner}; wait until that run has ended, or give another name="
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning("run_dir: %s has no locks (%s): see to it that one process uses it", self.path, error)
            # the one before may have removed the file between our open and our lock
            if path.exists() and os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                break
            lock.close()
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        return lock

    def _check_names(self) -> None:
        for path in (self.path / name for name in _FILES):
            if path.is_dir():
                raise ConfigError(f"run_dir: {path} is a folder, and the run writes a file of that name")
        root = folders.checkpoint_root(self.path)
        if root.exists() and not root.is_dir():
            raise ConfigError(f"run_dir: {root} is a file, and the run makes a folder of that name")
        for path in (root, *(self.path / name for name in _FILES)):
            if path.exists() and not os.access(path, os.W_OK):
                raise ConfigError(f"run_dir: {path} cannot be written to")

    def close(self) -> None:
        """Give the lock back; folders that were made for the run and stayed empty go too."""
        if self in _claimed:
            _claimed.discard(self)
            with suppress(OSError):  # the place may have become read-only
                (self.path / ".lock").unlink()
            self._lock.close()
        for path in self._made:
            with suppress(OSError, ValueError):  # not empty, or never made
                path.rmdir()
        self._made = []

    def _let_go(self) -> None:
        self._lock.close()

    def set_aside(self, found: Path | None, start: int) -> None:
        """Make the files of lines those that the run goes on from; what they have beyond step `start` is kept aside.

        found: the checkpoint, this run's or another's. The lines aside go when a new checkpoint has replaced the
        later ones: until then a run may still go on from those.
        """
        if found is None:
            self._set_all_aside()
            return
        source, metrics_aside = found.resolve().parent.parent, _ASIDE[_METRICS]
        chosen = next((name for name in (_METRICS, metrics_aside) if start in _steps(source / name)), None)
        if chosen is None:
            logger.warning("resume: no metrics of step %d are beside %s; earlier lines are missing", start, found)
            return
        own, goes_back = source == self.path.resolve(), chosen == metrics_aside
        beyond = own and not goes_back and not (self.path / metrics_aside).exists()
        beyond = beyond and max(_steps(self.path / _METRICS)) > start
        for name, aside in _ASIDE.items():
            if beyond:
                _copy(self.path / name, self.path / aside)
            if not own or goes_back:
                _copy(source / (aside if goes_back else name), self.path / name)
            _steps(self.path / name)

    def _set_all_aside(self) -> None:
        for name, aside in _ASIDE.items():
            for path in (self.path / name, self.path / aside):
                if _steps(path):
                    with writing(path):
                        kept = path.rename(_free_name(path.with_name(name)))
                    logger.warning("no checkpoint in %s: starting over; earlier lines are in %s", self.path, kept)

    def drop_completions_aside(self) -> None:
        """To be called when a new checkpoint is on the disk; metrics aside have gone with what it replaced."""
        (self.path / _ASIDE[_COMPLETIONS]).unlink(missing_ok=True)


def _steps(path: Path) -> list[float]:
    try:
        return [line["step"] for line in iterate_lines(path)]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"run_dir: {path} is damaged ({error}); move it away to go on without the earlier steps' lines"
        ) from error


def _free_name(path: Path) -> Path:
    count = 1
    free = path.with_name(f"{path.stem}.before-restart.jsonl")
    while free.exists():
        count += 1
        free = path.with_name(f"{path.stem}.before-restart-{count}.jsonl")
    return free


def _copy(source: Path, target: Path) -> None:
    """Put a copy in the target's place; if there is no source, nothing."""
    partial = target.with_suffix(".tmp")
    with writing(target):
        if not source.is_file():
            target.unlink(missing_ok=True)
            return
        shutil.copyfile(source, partial)
        with partial.open("rb") as copied:
            os.fsync(copied.fileno())
        partial.replace(target)
        flush_directory(target.parent)


def _let_go_in_child() -> None:
    # a forked child shares the lock, and may outlive the run
    for folder in list(_claimed):
        folder._let_go()
    _claimed.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
