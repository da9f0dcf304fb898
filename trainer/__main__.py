"""`python -m trainer`: compose the configuration, check it, train.

Exit status: 0 done, 1 a crash while training, 2 a configuration or input that cannot be run, and for a signal 128 and
its number (130 interrupt, 143 termination). What takes time to import is imported where signals are heeded already.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.signals import Interrupted, interrupts

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.config import TrainerConfig
    from trainer.run import Run

_HERE = Path(__file__).resolve().parent
# shipped inside the package by a wheel, beside it in a checkout
CONFIG_DIRECTORY = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"


def run_training(raw: "DictConfig") -> None:
    """Train as configured; SystemExit(2) for what the user can mend, SystemExit(128 + N) for signal N."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    import transformers

    from rollout import RolloutError
    from trainer.config import ConfigError, parse_config
    from trainer.loop import train
    from trainer.run import prepare
    from trainer.storage.writing import WriteError

    transformers.utils.logging.disable_progress_bar()
    try:
        config = parse_config(raw)
    except ConfigError as error:
        raise refused(error) from error
    run, status = None, 1
    try:
        with interrupts.raised(), _exits_are_crashes():
            run = prepare(config)
            train(run)
        status = 0
    except (ConfigError, RolloutError) as error:
        if run is not None:
            raise
        raise refused(error) from error
    except KeyboardInterrupt as stop:
        status = stop.status if isinstance(stop, Interrupted) else 130
        with suppress(OSError):  # a signal to the group may have ended who reads it
            print(f"interrupted; go on with: {_again(config, run)}", file=sys.stderr)
        raise SystemExit(status) from None
    except WriteError as error:
        print(f"error: {error}; what was on the disk before is whole", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        if run is not None:
            run.close(status)


@contextmanager
def _exits_are_crashes() -> Iterator[None]:
    """Whatever code calls exit(0), a run that has not come to its end does not end with 0."""
    try:
        yield
    except SystemExit as stop:
        raise RuntimeError(f"exit({stop.code!r}) was called in the middle of the run") from stop


def refused(error: Exception) -> SystemExit:
    """Says on standard error what is wrong; to be raised."""
    print(f"error: {error}", file=sys.stderr)
    return SystemExit(2)


def _again(config: "TrainerConfig", run: "Run | None") -> str:
    """The command that goes on with an interrupted run."""
    from trainer.config.names import command_line

    arguments, resume = sys.argv[1:], config.resume
    run_dir = Path(config.run_dir).expanduser().absolute()
    if resume in (None, "auto") or (run is not None and run.saved_step is not None):
        resume = "auto"
    elif (run_dir / "metrics.jsonl").exists() and run_dir not in Path(f"{resume}/x").expanduser().absolute().parents:
        # begun from another run's checkpoint, and nothing of its own to go on from yet: again, in another folder
        return command_line(arguments, resume=resume)
    return command_line(arguments, name=config.name, run_dir=str(run_dir), resume=resume)


def compose(work: Callable[["DictConfig"], None]) -> None:
    """Call `work` with the configuration that the command line asks for; SystemExit(2) if it cannot be composed."""
    import hydra

    from trainer.config import ConfigError
    from trainer.config.names import as_typed

    composed = False

    @hydra.main(version_base="1.3", config_path=str(CONFIG_DIRECTORY), config_name="config")
    def entry(raw: "DictConfig") -> None:
        nonlocal composed
        composed = True
        work(raw)

    try:
        sys.argv[1:] = as_typed(sys.argv[1:])
        entry()
    except ConfigError as error:
        raise refused(error) from error
    except SystemExit as stop:
        # Hydra ends with 1 when it cannot compose; here that is a mistake in the configuration
        if stop.code == 1 and not composed:
            print(
                "hint: quote values with special characters for Hydra and for the shell, as in"
                " 'task.path=\"a=b,c.jsonl\"'",
                file=sys.stderr,
            )
            raise SystemExit(2) from stop
        raise


def main() -> None:
    with interrupts.handled():
        compose(run_training)


if __name__ == "__main__":
    main()
