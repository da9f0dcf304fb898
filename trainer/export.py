"""`python -m trainer.export CHECKPOINT DIR [merge=true] [base=DIR]`: a checkpoint's model as a plain directory.

A model whose weights were all trained is copied; an adapter is copied as peft has it, or, with merge=true, added to its
base: in fp32, rounded once to the base's dtype. Exit status: 0 done, 1 it could not be
written, 2 something that cannot be used.
"""

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rollout import RolloutError
from rollout.model import find_damage, find_directory, flush, load_model
from trainer.config import ConfigError
from trainer.storage.checkpoint import find_checkpoint
from trainer.storage.digests import weights_digest
from trainer.storage.weights import ADAPTER_CONFIG
from trainer.storage.writing import WriteError, writing
from trainer.weights.adapter import check_peft
from trainer.weights.generation import keep_special_ids

USAGE = "python -m trainer.export CHECKPOINT DIR [merge=true] [base=DIR]"


@dataclass(frozen=True)
class ExportOptions:
    """What is said on the command line."""

    checkpoint: Path
    """A checkpoint, or a run's folder, whose last one is meant."""
    target: Path
    """Where the model goes; empty, or not there yet."""
    merge: bool = False
    """Add the adapter to its base."""
    base: str = ""
    """Where the base is now; left out: where it was when the run began."""


def parse_options(arguments: list[str]) -> ExportOptions:
    """Raises ConfigError naming what is wrong."""
    named = [argument.partition("=") for argument in arguments if argument.partition("=")[0] in ("merge", "base")]
    values = {name: value for name, _, value in named}
    places = [argument for argument in arguments if argument.partition("=")[0] not in ("merge", "base")]
    if len(places) != 2 or len(named) != len(values):
        raise ConfigError(f"say where from and where to, and each option once; usage: {USAGE}")
    merge = values.get("merge", "false").lower()
    if merge not in ("true", "false"):
        raise ConfigError(f"merge={values['merge']}: say true or false")
    if "base" in values and (merge == "false" or not values["base"]):
        raise ConfigError(f"base={values['base']}: is the directory of the model that merge=true adds an adapter to")
    source, target = (Path(place).expanduser() for place in places)
    return ExportOptions(_checkpoint(source), target.resolve(), merge == "true", values.get("base", ""))


def _checkpoint(path: Path) -> Path:
    try:
        found = find_checkpoint(str(path.absolute()), path)
    except ConfigError as error:
        raise ConfigError(f"{path}: neither a checkpoint nor a run directory with checkpoints") from error
    assert found is not None
    damage = find_damage(found)
    if damage is not None:
        raise ConfigError(f"{found} is damaged: {damage}")
    return found


def export(options: ExportOptions) -> None:
    """Write options.target. Raises ConfigError, RolloutError, or WriteError, and then leaves nothing behind."""
    model = options.checkpoint / "model"
    if options.target.exists() and (not options.target.is_dir() or any(options.target.iterdir())):
        raise ConfigError(f"{options.target} is there already; name a directory that is empty or not there yet")
    adapter = (model / ADAPTER_CONFIG).is_file()
    if options.merge and not adapter:
        raise ConfigError(f"merge=true: {options.checkpoint} has no adapter, all of its weights were trained")
    merged = _merged(options) if options.merge else None
    with _whole_or_not(options.target) as partial:
        if merged is None:
            shutil.copytree(model, partial)
            return
        merged.save_pretrained(partial)
        for path in model.iterdir():  # the tokenizer
            if not path.name.startswith("adapter_"):
                shutil.copy2(path, partial)


@torch.no_grad()
def _merged(options: ExportOptions) -> PreTrainedModel:
    check_peft()
    from peft import PeftModel

    adapter = options.checkpoint / "model"
    directory = _base(options, json.loads((adapter / ADAPTER_CONFIG).read_text())["base_model_name_or_path"])
    base = load_model(directory)
    dtype = base.dtype
    keep_special_ids(base)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # which peft asks
        wrapped = PeftModel.from_pretrained(base.float(), adapter)  # peft adds in the dtype of the weights
    merged: PreTrainedModel = wrapped.merge_and_unload().to(dtype)
    return merged


def _base(options: ExportOptions, recorded: str) -> Path:
    """The directory of the adapter's own base."""
    named = options.base or recorded
    try:
        directory = find_directory(named)
    except RolloutError as error:
        raise ConfigError(f"base={named}: {error}; say base=DIR if the model has moved") from error
    began = json.loads((options.checkpoint / "trainer.json").read_text())["contents"].get("model")
    if began != weights_digest(directory):
        raise ConfigError(f"base={named}: is not the model that the run began with, and the adapter fits no other")
    return directory


@contextmanager
def _whole_or_not(target: Path) -> Iterator[Path]:
    """A place beside `target` to write to, which takes its name when all is there."""
    partial = target.with_name(f".writing-{target.name}")
    with writing(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
            yield partial
            flush(partial)
            if target.exists():
                target.rmdir()
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def main(arguments: list[str]) -> int:
    disable_progress_bar()
    try:
        options = parse_options(arguments)
        export(options)
    except (ConfigError, RolloutError, WriteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, WriteError) else 2
    print(f"{options.checkpoint} is in {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
