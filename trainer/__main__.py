"""`python -m trainer`: compose the configuration, check it, train.

Exit status: 0 done, 1 a crash while training, 2 a configuration or input that cannot be run, 130 interrupted.
"""

import logging
import shlex
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from rollout import RolloutError
from trainer.config import ConfigError, parse_config
from trainer.writing import WriteError

_HERE = Path(__file__).resolve().parent
# shipped inside the package by a wheel, beside it in a checkout
CONFIG_DIRECTORY = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"

logger = logging.getLogger(__name__)


def run_training(raw: DictConfig) -> None:
    """Train as configured; SystemExit(2) for what the user can mend, SystemExit(130) for an interrupt."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    try:
        config = parse_config(raw)
        import transformers

        from trainer.loop import train
        from trainer.run import prepare

        transformers.utils.logging.disable_progress_bar()
        run = prepare(config)
    except (ConfigError, RolloutError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    try:
        train(run)
    except KeyboardInterrupt:
        again = [a for a in sys.argv[1:] if not a.startswith(("name=", "run_dir=", "resume="))]
        again += [f"name={config.name}", f"run_dir={run.run_dir}", "resume=auto"]
        print(f"interrupted; go on with: python -m trainer {shlex.join(again)}", file=sys.stderr)
        raise SystemExit(130) from None
    except WriteError as error:
        print(f"error: {error}; what was on the disk before is whole", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        run.close()


def main() -> None:
    composed = False

    @hydra.main(version_base="1.3", config_path=str(CONFIG_DIRECTORY), config_name="config")
    def entry(raw: DictConfig) -> None:
        nonlocal composed
        composed = True
        run_training(raw)

    try:
        entry()
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


if __name__ == "__main__":
    main()
