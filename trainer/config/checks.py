"""From what Hydra composed to a checked configuration; everything that is wrong is refused by its key."""

import math
import os
import types
import unicodedata
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollout import RolloutError, SamplingParams
from trainer.config.algorithm_options import AlgorithmConfig
from trainer.config.model_options import check_targets
from trainer.config.reward_options import check_reward_options
from trainer.config.schema import OPTIONS, TrainerConfig, default_option, every_key, options_with
from trainer.config.setting import ConfigError

# a rollout is a function of its own inputs, so the engine's sizes change its speed and nothing else
_ROLLOUT_SIZES = {
    f"rollout.{name}"
    for name in (
        "block_size",
        "num_blocks",
        "memory_fraction",
        "max_num_seqs",
        "max_num_batched_tokens",
        "prefill_chunk_size",
        "prefix_cache",
    )
}


def text_keys() -> dict[str, bool]:
    """Every key whose value is text, by its full name, and whether it may be null."""
    return {
        key: kind is not str
        for key, kind in every_key()
        if kind is str or (isinstance(kind, types.UnionType) and str in get_args(kind))
    }


def parse_config(raw: DictConfig | dict[str, Any]) -> TrainerConfig:
    """Check a composed configuration: unknown keys, types, ranges. Raises ConfigError naming the key."""
    raw = OmegaConf.create(raw) if isinstance(raw, dict) else raw
    for spec in fields(TrainerConfig):
        if is_dataclass(spec.type) and spec.name in raw and not OmegaConf.is_dict(raw[spec.name]):
            raise ConfigError(f"{spec.name}={raw[spec.name]!r}: is a group of keys, not a value")
    _check_text(raw)
    try:
        chosen = _chosen_options(raw)
        schema = OmegaConf.structured(TrainerConfig(**chosen))
        # OmegaConf takes a frozen dataclass for one that may not be filled in
        OmegaConf.set_readonly(schema.rollout, False)
        merged = OmegaConf.merge(schema, raw)
        # a merge fills open values of `raw` with defaults
        missing = OmegaConf.missing_keys(raw) | OmegaConf.missing_keys(merged)
        if missing:
            raise ConfigError(f"{min(missing)}: {_remedy(chosen, min(missing))}")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = error.full_key or error.key
        raise ConfigError(f"{key}: {str(error.msg or error).splitlines()[0]}") from error
    except RolloutError as error:
        raise ConfigError(f"rollout.{error}") from error
    assert isinstance(config, TrainerConfig)
    _check_ranges(config, "")
    _check_folders(config)
    _check_combinations(config)
    sampling_params(config)
    return config


def _chosen_options(raw: DictConfig) -> dict[str, Any]:
    """For each group whose options have keys of their own: the schema of the one that `raw` chooses, with its defaults.

    Raises ConfigError for an option that is none, and for a key that only another option has.
    """
    chosen = {}
    for group, options in OPTIONS.items():
        given = OmegaConf.to_container(raw[group], resolve=True) if group in raw else {}
        assert isinstance(given, dict)
        kind = given.get("kind", MISSING)
        if kind == MISSING:
            kind = default_option(group)  # one that is left open is refused below, with every other such key
        if not isinstance(kind, str) or kind not in options:
            raise ConfigError(f"{group}.kind={kind!r}: use one of {', '.join(options)}")
        for key, value in given.items():
            owners = options_with(group, str(key))
            if owners and kind not in owners:
                raise ConfigError(
                    f"{group}.{key!s}={value!r}: is for {group}={owners[0]}, and {group} is {kind}; add"
                    f" {group}={owners[0]}"
                )
        chosen[group] = options[kind](kind=kind)
    return chosen


def _remedy(chosen: dict[str, Any], key: str) -> str:
    """What to do about a key that has no value."""
    group, _, name = key.partition(".")
    for spec in fields(chosen[group]) if group in chosen else ():
        if spec.name == name and spec.metadata.get("needs"):
            return f"{group}={chosen[group].kind} needs {spec.metadata['needs']}"
    return "has no value; give one"


def sampling_params(config: TrainerConfig) -> SamplingParams:
    """The engine's own form of the sampling group, with the run's seed."""
    try:
        return SamplingParams(seed=config.seed, **asdict(config.sampling))
    except RolloutError as error:
        raise ConfigError(f"sampling.{error}") from error


def _check_text(raw: DictConfig) -> None:
    """Refuse what YAML took for something else than text: how it was written cannot be told any more."""
    values = OmegaConf.to_container(raw, resolve=False)
    for key, may_be_null in text_keys().items():
        node: Any = values
        for part in key.split("."):
            node = node.get(part, "") if isinstance(node, dict) else ""
        if isinstance(node, bool | float):
            raise ConfigError(f"{key}={node!r}: must be text; put it in quotes where it is written")
        if node is None and not may_be_null:
            raise ConfigError(f"{key}: must be text, not null; for the word itself write '{key}=\"null\"'")


def _check_folders(config: TrainerConfig) -> None:
    """Refuse names that no folder can have, or that no printed command could hold."""
    for key, value, parts in (
        ("name", config.name, (config.name,)),
        ("run_dir", config.run_dir, Path(config.run_dir).parts),
    ):
        problem = None
        if not value.strip():
            problem = "is empty"
        elif any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in value):
            problem = "has a control character, a line break or half a character"
        elif max(len(os.fsencode(part)) for part in parts) > 255:
            problem = "is longer than the 255 bytes that a folder's name may have"
        elif key == "name" and ("/" in value or value in (".", "..")):
            problem = "is not the name of one folder; run_dir says where the run lives"
        if problem is not None:
            shown = value if len(value) <= 80 else value[:77] + "..."
            raise ConfigError(f"{key}={shown!r}: {problem}")


def _check_ranges(node: Any, prefix: str) -> None:
    for spec in fields(node):
        value, key, limits = getattr(node, spec.name), f"{prefix}{spec.name}", spec.metadata
        if is_dataclass(value):
            _check_ranges(value, f"{key}.")
        elif value is None or not limits:
            continue
        elif limits["choices"] is not None and value not in limits["choices"]:
            raise ConfigError(f"{key}={value!r}: use one of {', '.join(limits['choices'])}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value!r}: must be finite")
        elif limits["at_least"] is not None and value < limits["at_least"]:
            raise ConfigError(f"{key}={value!r}: must be at least {limits['at_least']}")
        elif limits["above"] is not None and value <= limits["above"]:
            raise ConfigError(f"{key}={value!r}: must be more than {limits['above']}")
        elif limits["at_most"] is not None and value > limits["at_most"]:
            raise ConfigError(f"{key}={value!r}: must be at most {limits['at_most']}")


CONTENTS = ("data", "reward", "model")
"""What a run that goes on compares by contents, and may be told to take changed."""


def _check_combinations(config: TrainerConfig) -> None:
    for name in config.resume_changed:
        if name not in CONTENTS and name not in trajectory_keys(config):
            raise ConfigError(
                f"resume_changed={name!r}: use {', '.join(CONTENTS)} or keys of settings in a list, as in"
                f" [{CONTENTS[0]},optim.lr]"
            )
    if config.resume_changed and config.resume is None:
        raise ConfigError("resume_changed: is for a run that goes on; add resume=auto")
    for group in OPTIONS:
        option = getattr(config, group)
        for spec in fields(option):
            if spec.metadata.get("needs") and not getattr(option, spec.name):
                raise ConfigError(f"{group}.{spec.name}: {group}={option.kind} needs {spec.metadata['needs']}")
    check_reward_options(config.reward)
    if config.algorithm.kl_coef and sampling_params(config).cuts:
        raise ConfigError("algorithm.kl_coef: a KL term needs the whole vocabulary; switch off top_k, top_p and min_p")
    _check_algorithm(config.algorithm)
    if config.eval.samples > 1 and config.eval.temperature == 0.0:
        raise ConfigError(
            f"eval.samples={config.eval.samples}: greedy completions are all the same; set eval.temperature"
        )
    check_targets(config.adapter)
    best = config.checkpoint.keep_best
    if best is not None and best.startswith("eval/") and not config.eval.every:
        raise ConfigError(f"checkpoint.keep_best={best!r}: nothing is evaluated; set eval.every")
    if config.sampling.temperature == 0.0:
        raise ConfigError("sampling.temperature=0.0: greedy rollouts of a group are all equal and teach nothing")
    if config.optim.beta1 == 1.0 or config.optim.beta2 == 1.0:
        raise ConfigError("optim.beta1, optim.beta2: must be less than 1")


def _check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Refuse parts that do not go together."""
    alone = algorithm.group_size == 1
    if alone and algorithm.baseline in ("group", "leave_one_out"):
        raise ConfigError(
            f"algorithm.group_size=1: a rollout without others is worth nothing beside baseline={algorithm.baseline};"
            " sample more, or use baseline=batch"
        )
    if alone and algorithm.scale_rewards == "group":
        raise ConfigError("algorithm.group_size=1: one reward has no deviation; use scale_rewards=batch or none")
    if alone and algorithm.dynamic_sampling:
        raise ConfigError("algorithm.group_size=1: every group's rewards are equal; switch off dynamic_sampling")
    if algorithm.minibatches > algorithm.prompts_per_step:
        raise ConfigError(
            f"algorithm.minibatches={algorithm.minibatches}: there are only {algorithm.prompts_per_step} prompts in a"
            " step to deal out"
        )
    if algorithm.kind == "reinforce" and algorithm.epochs * algorithm.minibatches > 1:
        raise ConfigError(
            "algorithm.epochs, algorithm.minibatches: algorithm=reinforce has no ratio for a second update of the same"
            " rollouts; use one that has, such as algorithm=rloo"
        )
    if algorithm.correction_low > algorithm.correction_high:
        raise ConfigError(
            f"algorithm.correction_low={algorithm.correction_low}: is above"
            f" correction_high={algorithm.correction_high}, which would mask everything"
        )


def trajectory_keys(config: TrainerConfig) -> dict[str, Any]:
    """Every key that decides what a run computes, flat; a resumed run must have the same values."""
    # without exactness the engine's sizes change its bits
    flat = dict(_flatten(config, "", set() if config.rollout.exact == "off" else _ROLLOUT_SIZES))
    if config.optim.schedule != "constant":
        flat["steps"] = config.steps  # the learning rate of every step depends on where the run ends
    return flat


def _flatten(node: Any, prefix: str, without: set[str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for spec in fields(node):
        value, key = getattr(node, spec.name), f"{prefix}{spec.name}"
        if is_dataclass(value):
            found += _flatten(value, f"{key}.", without)
        elif spec.metadata.get("trajectory", True) and f"{prefix}{spec.name}" not in without:
            found.append((key, value))
    return found
