"""What a run depends on besides its keys, by contents: data, reward and model, each as a digest."""

import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from trainer.config import (
    ConfigError,
    CustomRewardConfig,
    DatasetConfig,
    FunctionsRewardConfig,
    HFModelConfig,
    LoraConfig,
    PromptedTaskConfig,
    ReasoningGymConfig,
    TrainerConfig,
    function_entries,
)
from trainer.data.prompts import PromptSettings
from trainer.data.rows import Row
from trainer.data.tasks import Task
from trainer.rewards.loading import REWARD_MODULE

logger = logging.getLogger(__name__)

_GROUPS = {
    "training data": "data",
    "held-out data": "data",
    "text around prompts": "data",
    "reward": "reward",
    "model": "model",
    "tokenizer": "model",
    "chat template": "model",
}
"""What is compared, and the word in resume_changed that lets it differ."""

_WHOLE = 256 * 2**20
_CHUNK, _STRIDE = 2**20, 64 * 2**20
_MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model")
_NOT_THE_USER_S = {"rollout_kernels", "rollout", "trainer", "__main__"} | sys.stdlib_module_names
_INSTALLED = {"site-packages", "dist-packages"}


def task_contents(config: TrainerConfig, task: Task) -> dict[str, str]:
    """Digests of the rows, of examples and tools beside them, and of reward functions of the user's own."""
    contents = {"training data": rows_digest(task.train_rows), "held-out data": rows_digest(task.eval_rows)}
    if isinstance(config.task, PromptedTaskConfig):
        contents["text around prompts"] = prompts_digest(task.prompts)
    paths = _reward_paths(config)
    if paths:
        contents["reward"] = "".join(map(reward_digest, paths))
    return contents


def _reward_paths(config: TrainerConfig) -> list[str]:
    if isinstance(config.reward, CustomRewardConfig):
        return [config.reward.path]
    if isinstance(config.reward, FunctionsRewardConfig):
        return [entry.path for entry in function_entries(config.reward.functions) if entry.path is not None]
    return []


def model_contents(directory: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digests of a model directory: config and weights, tokenizer, and chat template; for hf."""
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return {
        "model": weights_digest(directory),
        "tokenizer": files_digest(path for pattern in _TOKENIZER_FILES for path in directory.glob(pattern)),
        "chat template": hashlib.sha256(template.encode()).hexdigest(),
    }


def base_contents(config: TrainerConfig, began: Mapping[str, str] | None, directory: Path) -> dict[str, str]:
    """With an adapter, the digest of the weights that it is trained beside; ConfigError if the run began with others.

    No option allows such a change: without its own base an adapter is worth nothing.
    """
    if not isinstance(config.adapter, LoraConfig):
        return {}
    digest = weights_digest(directory)
    if began is not None and began.get("model") != digest:
        if isinstance(config.model, HFModelConfig):
            raise ConfigError(
                "model.path: the model has changed since the run began, and its adapter fits no other; put it back as"
                " it was"
            )
        raise ConfigError(
            "model: the tiny model that the run began with cannot be made here any more, and its adapter fits no other;"
            " go on with the threads, kernels and packages that the run began with"
        )
    return {"model": digest}


def weights_digest(directory: Path) -> str:
    """Of a model directory's config and weights."""
    return files_digest(path for pattern in _MODEL_FILES for path in directory.glob(pattern))


def check_contents(config: TrainerConfig, began: Mapping[str, str] | None, now: Mapping[str, str]) -> set[str]:
    """What differs from what the run began with, if it did; ConfigError unless resume_changed allows it."""
    if began is None:
        return set()
    changed = {name for name in now if began.get(name) != now[name]}
    for name in sorted(changed):
        group = _GROUPS[name]
        if group not in config.resume_changed:
            raise ConfigError(
                f"{_key(config, name)}: the {name} has changed since the run began; put it back as it was, or go on"
                f" all the same with resume_changed=[{','.join([*config.resume_changed, group])}]"
            )
        logger.warning("resume: the %s has changed since the run began, as resume_changed allows", name)
    return changed


def _key(config: TrainerConfig, name: str) -> str:
    if name == "held-out data" and isinstance(config.task, DatasetConfig):
        keys = [key for key in ("eval_path", "eval_split") if getattr(config.task, key) is not None]
        return f"task.{keys[0]}" if keys else "task.path"
    if name == "text around prompts":
        return "task.few_shot, task.tools"
    if _GROUPS[name] == "data" and isinstance(config.task, ReasoningGymConfig):
        return "task.name"
    reward = "reward.functions" if isinstance(config.reward, FunctionsRewardConfig) else "reward.path"
    return {"data": "task.path", "reward": reward, "model": "model.path"}[_GROUPS[name]]


def rows_digest(rows: Sequence[Row]) -> str:
    """Of the rows as they were parsed, in their order, whatever file they are from; its format does not count."""
    digest = hashlib.sha256()
    for row in rows:
        values = [row.prompt, row.answer, row.columns]
        # of a Parquet file there may be dates, decimal numbers and bytes
        digest.update(json.dumps(values, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def prompts_digest(settings: PromptSettings) -> str:
    """Of the examples before every prompt and the tools, from a file or not; other settings are keys of the run."""
    values = [[(example.prompt, example.answer) for example in settings.few_shot], settings.tools]
    return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()


def reward_digest(path: str) -> str:
    """Of the name of a function that is loaded, and the sources that it may be made of.

    These are the loaded modules whose files lie in its file's folder or below, for a module of a package in the
    package's; installed packages and other reward files apart. Modules that are first imported when it is called, and
    data files, cannot be known.
    """
    module_name, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if module_name.endswith(".py"):
        file: Path | None = Path(module_name).expanduser().resolve()
        levels = 0
    else:
        file = _source(sys.modules.get(module_name))
        # a module a.b.c lies two folders below that of a, if it is a package itself in one of its own
        levels = max(0, module_name.count(".") - 1 + (file is not None and file.name == "__init__.py"))
    digest = hashlib.sha256(name.encode())
    if file is not None:
        root = file.parents[levels]
        for source in sorted(_neighbours(root) | {file}):
            text = source.read_bytes()
            digest.update(f"{source.relative_to(root)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _source(module: object) -> Path | None:
    file = getattr(module, "__dict__", {}).get("__file__")
    return _resolved(file) if isinstance(file, str) and file.endswith(".py") else None


@cache
def _resolved(file: str) -> Path:
    """Remembered, since thousands of modules are looked at and each takes several calls of the system."""
    return Path(file).resolve()


def _neighbours(root: Path) -> set[Path]:
    """Files of the loaded modules at root and below; not of packages that are installed there, nor of reward files."""
    found = set[Path]()
    for name, module in list(sys.modules.items()):
        source = _source(module)
        if source is None or not source.is_relative_to(root) or name.startswith(REWARD_MODULE):
            continue
        if name.split(".")[0] not in _NOT_THE_USER_S and _INSTALLED.isdisjoint(source.relative_to(root).parts):
            found.add(source)
    return found


def files_digest(paths: Iterable[Path]) -> str:
    """Of names, sizes and contents. Of a file of more than 256 MiB the first of every 64 MiB, and the end, are read."""
    digest = hashlib.sha256()
    for path in sorted({path for path in paths if path.is_file()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        if path.name == "tokenizer_config.json":
            digest.update(_without_template(path))
            continue
        with path.open("rb") as file:
            for place in [*range(0, size, _CHUNK if size <= _WHOLE else _STRIDE), max(0, size - _CHUNK)]:
                file.seek(place)
                digest.update(file.read(_CHUNK))
    return digest.hexdigest()


def _without_template(path: Path) -> bytes:
    values = json.loads(path.read_text())
    return json.dumps({name: value for name, value in values.items() if name != "chat_template"}).encode()
