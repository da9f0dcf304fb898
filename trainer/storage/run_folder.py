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
from trainer.storage.writing import writing
from trainer.tracking.tracking import read_metrics

logger = logging.getLogger(__name__)

_FILES = ("config.yaml", "metrics.jsonl", "metrics.tmp", "summary.json", folders.METRICS_ASIDE)
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

    def set_metrics_aside(self, found: Path | None, start: int) -> None:
        """Make metrics.jsonl the file that the run goes on from; what it has beyond step `start` is kept aside.

        found: the checkpoint, this run's or another's. The lines aside go when a new checkpoint has replaced the
        later ones: until then a run may still go on from those.
        """
        metrics, aside = self.path / "metrics.jsonl", self.path / folders.METRICS_ASIDE
        if found is None:
            for path in (metrics, aside):
                if _steps(path):
                    with writing(path):
                        kept = path.rename(_free_name(self.path))
                    logger.warning("no checkpoint in %s: starting over; earlier metrics are in %s", self.path, kept)
            return
        source = found.resolve().parent.parent
        names = (metrics.name, aside.name)
        chosen = next((source / name for name in names if start in _steps(source / name)), None)
        if chosen is None:
            logger.warning("resume: no metrics of step %d are beside %s; earlier lines are missing", start, found)
            return
        own = source == self.path.resolve()
        if own and chosen.name == metrics.name and not aside.exists() and max(_steps(metrics)) > start:
            _copy(metrics, aside)
        if not own or chosen.name != metrics.name:
            _copy(chosen, metrics)


def _steps(path: Path) -> list[float]:
    try:
        return [line["step"] for line in read_metrics(path)]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"run_dir: {path} is damaged ({error}); move it away to go on without the earlier steps' metrics"
        ) from error


def _free_name(folder: Path) -> Path:
    count = 1
    path = folder / "metrics.before-restart.jsonl"
    while path.exists():
        count += 1
        path = folder / f"metrics.before-restart-{count}.jsonl"
    return path


def _copy(source: Path, target: Path) -> None:
    partial = target.with_suffix(".tmp")
    with writing(target):
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
