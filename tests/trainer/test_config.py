"""The typed configuration: what ships in conf/ is what the dataclasses hold, and a bad value is named by its key."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rollout import RolloutConfig, SamplingParams
from trainer.config import ConfigError, SamplingConfig, TinyModelConfig, TrainerConfig, parse_config, trajectory_keys
from trainer.config.names import as_typed
from trainer.config.schema import OPTIONS

CONF = Path(__file__).resolve().parents[2] / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
_OTHERS = (CONF, *(CONF / name for name in ("experiment", "experiment_model", "parts")))
OPTION_FILES = [path for path in FILES if path.parent not in _OTHERS]
NEEDED = {
    "model=hf": "model.path=DIR",
    "reward=custom": "reward.path=module:function",
    "reward=regex": "reward.pattern=a",
    "reward=functions": "reward.functions=[numeric]",
    "task=reasoning_gym": "task.name=chain_sum",
}
NEEDED |= {f"task={name}": "task.path=FILE" for name in ("dataset", "gsm8k", "jsonl")}
"""What an option of a group may need beside itself."""


def _name(path: Path) -> str:
    return f"{path.parent.name}={path.stem}"


def _values(path: Path) -> dict[str, Any]:
    """What an option's file sets, on top of the option that it begins with."""
    own = yaml.safe_load(path.read_text())
    below = [name for name in own.pop("defaults", []) if name != "_self_"]
    values: dict[str, Any] = {k: v for base in below for k, v in _values(path.with_stem(base)).items()} | own
    return values


def _parse(*overrides: str) -> TrainerConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return parse_config(compose("config", list(overrides)))


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _get(config: TrainerConfig, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


# -- what ships ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", OPTION_FILES, ids=_name)
def test_every_option_arrives_as_its_file_says(path: Path) -> None:
    needed = NEEDED.get(_name(path))
    config = _parse(_name(path), *([needed] if needed else []))
    given = yaml.safe_load(path.read_text())
    given.pop("defaults", None)
    if needed:
        name, value = needed.split(".", 1)[1].split("=")
        given |= {name: yaml.safe_load(value)}
    assert {name: getattr(getattr(config, path.parent.name), name) for name in given} == given


@pytest.mark.parametrize("path", OPTION_FILES, ids=_name)
def test_every_option_has_all_keys_of_its_schema_and_no_other(path: Path) -> None:
    group = next(f for f in dataclasses.fields(TrainerConfig) if f.name == path.parent.name)
    schema: Any = OPTIONS.get(group.name, {}).get(path.stem, group.type)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed = compose("config", [_name(path)])
    assert set(composed[group.name]) == {f.name for f in dataclasses.fields(schema)}


@pytest.mark.parametrize("group", OPTIONS)
def test_an_option_has_a_schema_and_its_name_is_its_kind(group: str) -> None:
    assert {path.stem for path in (CONF / group).glob("*.yaml")} == OPTIONS[group].keys()
    assert {yaml.safe_load(path.read_text())["kind"] for path in (CONF / group).glob("*.yaml")} == OPTIONS[group].keys()


@pytest.mark.parametrize(
    ("overrides", "own", "others"),
    [
        ([], {"model.warm_start_steps", "task.finished_fraction"}, {"model.path", "task.path", "reward.path"}),
        (["model=hf", "model.path=D"], {"model.path"}, {"model.warm_start_steps", "model.warm_start_lr"}),
        (["task=jsonl", "task.path=F"], {"task.path", "task.eval_path"}, {"task.finished_fraction"}),
        (["reward=custom", "reward.path=F"], {"reward.path", "reward.shuffle"}, set()),
        (["tracking=none"], {"tracking.kind", "tracking.completions"}, {"tracking.mode", "tracking.project"}),
    ],
)
def test_no_option_carries_a_key_of_another(overrides: list[str], own: set[str], others: set[str]) -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed: Any = OmegaConf.to_container(compose("config", overrides))
    for keys in (_leaves(composed), _leaves(dataclasses.asdict(_parse(*overrides)))):
        assert own <= keys.keys()
        assert not others & keys.keys()


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=_name)
def test_every_experiment_arrives_as_its_file_says(path: Path) -> None:
    given = _leaves({k: v for k, v in yaml.safe_load(path.read_text()).items() if k != "defaults"})
    config = _parse(_name(path))
    assert {key: _get(config, key) for key in given} == given


def test_smoke_sets_no_key_that_its_model_has_not() -> None:
    assert _parse("experiment=smoke").model == TinyModelConfig(
        warm_start_steps=20, warm_start_batch_size=64, warm_start_lr=2e-3
    )
    assert _parse("experiment=smoke", "model=hf", "model.path=D").steps == 3


def test_default_options_and_top_level_keys() -> None:
    shipped = yaml.safe_load((CONF / "config.yaml").read_text())
    config = _parse()
    plain = [f.name for f in dataclasses.fields(TrainerConfig) if not dataclasses.is_dataclass(f.type)]
    assert set(shipped) - {"defaults", "hydra"} == set(plain)
    assert (config.seed, config.steps, config.resume) == (0, 240, None)
    assert (config.model.kind, config.task.kind, config.tracking.kind) == ("tiny", "arithmetic", "wandb")
    assert re.fullmatch(r"tiny-arithmetic-\d{8}-\d{6}-\d{6}", config.name)
    assert config.run_dir == f"outputs/{config.name}"


def test_engine_keys_are_the_engine_s_own() -> None:
    rollout = yaml.safe_load((CONF / "rollout/default.yaml").read_text())
    assert set(rollout) == {f.name for f in dataclasses.fields(RolloutConfig)}
    assert RolloutConfig(**rollout) == _parse().rollout == RolloutConfig()
    for path in (CONF / "sampling").glob("*.yaml"):
        keys = {f.name for f in dataclasses.fields(SamplingParams)} - {"seed"}
        assert set(yaml.safe_load(path.read_text())) == keys


def test_sampling_defaults_are_the_engine_s() -> None:
    assert SamplingParams(**dataclasses.asdict(SamplingConfig())) == SamplingParams()


@pytest.mark.parametrize(
    ("overrides", "sampling", "optim"),
    [
        ([], "tiny", "tiny"),
        (["model=hf", "model.path=DIR"], "hf", "hf"),
        (["model=hf", "model.path=DIR", "optim=tiny"], "hf", "tiny"),
        (["experiment=smoke"], "tiny", "tiny"),
    ],
)
def test_sampling_and_optim_follow_the_model(overrides: list[str], sampling: str, optim: str) -> None:
    config = _parse(*overrides)
    assert dataclasses.asdict(config.sampling) == yaml.safe_load((CONF / f"sampling/{sampling}.yaml").read_text())
    assert dataclasses.asdict(config.optim) == yaml.safe_load((CONF / f"optim/{optim}.yaml").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_value_is_explained_on_the_line_above(path: Path) -> None:
    lines = path.read_text().split("\nhydra:\n")[0].splitlines()
    values = [i for i, line in enumerate(lines) if re.match(r"\s*\w+: *\S", line)]
    assert values
    unexplained = [lines[i] for i in values if not re.match(r"\s*# [^@]", lines[i - 1] if i else "")]
    # what a part explains need not be explained where it is set otherwise
    parts = [CONF / f"{name}.yaml" for name in re.findall(r"^  - /(parts/\w+)@_here_$", path.read_text(), re.MULTILINE)]
    explained = {key for part in parts for key in yaml.safe_load(part.read_text())}
    unexplained = [line for line in unexplained if line.partition(":")[0] not in explained]
    assert unexplained == []


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+nosuch=1", "nosuch: Key 'nosuch' not in"),
        ("+optim.nosuch=1", "optim.nosuch: Key"),
        ("+rollout.nosuch=1", "rollout.nosuch: Key"),
        ("steps=many", "steps: Value 'many'"),
        ("steps=3.5", "steps: Value '3.5'"),
        ("steps=true", "steps: Value 'True'"),
        ("optim.lr=fast", "optim.lr: Value 'fast'"),
        ("optim.lr={a:1}", "optim.lr: "),
        ("+optim.lr.x=1", "optim.lr: "),
        ("seed=null", "seed: "),
        ("name=null", "name: "),
        ("name='${nosuch}'", "name: "),
        ("reward.shuffle=maybe", "reward.shuffle: "),
        ("task.eval_rows=[a]", "task.eval_rows: "),
        ("sampling.stop_token_ids=[1,a]", "sampling.stop_token_ids"),
        ("sampling.stop_token_ids=3", "sampling.stop_token_ids: "),
        ("rollout.block_size=abc", "rollout.block_size: "),
        ("model.kind=huge", "model.kind='huge': use one of tiny, hf"),
        ("tracking.mode=loud", "tracking.mode='loud': use one of offline, online, disabled"),
        ("optim.schedule=warm", "optim.schedule='warm': use one of constant, linear, cosine"),
        ("rollout.exact=maybe", "rollout.exact='maybe': use auto, require or off"),
        ("rollout.device=cuda:", "rollout.device='cuda:'"),
        ("seed=-1", "seed=-1: must be at least 0"),
        ("seed=4294967296", "seed=4294967296: must be at most 4294967295"),
        ("steps=0", "steps=0: must be at least 1"),
        ("algorithm.group_size=0", "algorithm.group_size=0: must be at least 1"),
        ("algorithm.group_size=1", "algorithm.group_size=1: a rollout without others is worth nothing"),
        ("algorithm.minibatches=33", "algorithm.minibatches=33: there are only 32 prompts in a step"),
        ("algorithm.correction_low=3", "algorithm.correction_low=3.0: is above correction_high=2.0"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip=1.0: must be more than 1"),
        ("algorithm.clip_low=1.5", "algorithm.clip_low=1.5: must be at most 1"),
        ("sampling.top_p=0", "sampling.top_p=0.0: must be more than 0"),
        ("sampling.top_p=1.01", "sampling.top_p=1.01: must be at most 1"),
        ("sampling.temperature=0", "sampling.temperature=0.0: "),
        ("optim.lr=nan", "optim.lr=nan: must be finite"),
        ("optim.lr=-1e-6", "optim.lr=-1e-06: must be at least 0"),
        ("optim.beta1=1", "optim.beta1"),
        ("optim.beta2=1.0", "optim.beta1, optim.beta2: must be less than 1"),
        ("eval.max_new_tokens=0", "eval.max_new_tokens=0: must be at least 1"),
        ("checkpoint.keep=0", "checkpoint.keep=0: must be at least 1"),
        ("rollout.num_blocks=0", "rollout.num_blocks=0: "),
        ("rollout.memory_fraction=nan", "rollout.memory_fraction=nan: "),
        ("rollout.max_num_seqs=4096", "rollout.max_num_batched_tokens=2048: must be at least max_num_seqs (4096)"),
        ("model=hf", "model.path: model=hf needs a directory, as in model.path=DIR"),
        ("task=jsonl", "task.path: task=jsonl needs a file, a directory or a dataset of the hub, as in task.path=FILE"),
        ("task=gsm8k", "task.path: task=gsm8k needs a file"),
        ("task=reasoning_gym", "task.name: task=reasoning_gym needs a dataset of that library, or a list"),
        ("+task.max_prompt_tokens=0", "task.max_prompt_tokens=0: is for task=dataset, and task is arithmetic"),
        ("reward=custom", "reward.path: reward=custom needs package.module:function or FILE.py:function"),
    ],
)
def test_bad_value_is_named_by_its_full_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _parse(override)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# exposes: parse_config lets values through that SamplingParams refuses only after the model was loaded and warm-started
@pytest.mark.parametrize("override", ["sampling.stop_token_ids=[-1]", "sampling.temperature=1e-20"])
def test_what_the_engine_would_refuse_is_refused_early(override: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(override.split("=")[0])):
        _parse(override)


# exposes: a group that is not a mapping ends in "None: Merge error: ...", without its key
@pytest.mark.parametrize("value", [5, [1], "text"])
def test_group_that_is_not_a_mapping_is_named(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^optim\b"):
        parse_config({"name": "a", "run_dir": "b", "optim": value})


# exposes: a value that a user's own file leaves open (???) becomes the dataclass's default without a word
@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({}, "name"),
        ({"name": "a", "run_dir": "???"}, "run_dir"),
        ({"name": "a", "run_dir": "b", "optim": {"lr": "???"}}, "optim.lr"),
    ],
)
def test_open_value_is_named(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}: has no value"):
        parse_config(raw)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=4294967295", "seed", 4294967295),
        ("sampling.min_p=1", "sampling.min_p", 1.0),
        ("algorithm.clip_low=1", "algorithm.clip_low", 1.0),
        ("optim.lr=0", "optim.lr", 0.0),
        ("name=17", "name", "17"),
        ("rollout.exact=off", "rollout.exact", "off"),
        ("sampling.stop_token_ids=[3,5]", "sampling.stop_token_ids", [3, 5]),
        ("rollout.num_blocks=8", "rollout.num_blocks", 8),
    ],
)
def test_value_at_the_edge_arrives_in_its_type(override: str, key: str, value: Any) -> None:
    arrived = _get(_parse(override), key)
    assert arrived == value
    assert type(arrived) is type(value)


# -- what a resumed run must share --------------------------------------------------------------------------------


def test_trajectory_keys_hold_what_decides_the_numbers() -> None:
    keys = trajectory_keys(_parse("optim.lr=3e-5", "seed=7", "rollout.exact=off", "task.eval_rows=9"))
    expected = {"optim.lr": 3e-5, "seed": 7, "rollout.exact": "off", "task.eval_rows": 9, "rollout.dtype": "auto"}
    expected |= {"algorithm.group_size": 8, "sampling.temperature": 1.0, "model.warm_start_steps": 330}
    expected |= {"reward.kind": "task", "model.kind": "tiny", "rollout.max_model_len": None, "task.path": "absent"}
    assert {key: keys.get(key, "absent") for key in expected} == expected


@pytest.mark.parametrize("group", ["checkpoint", "tracking", "eval"])
def test_trajectory_keys_leave_whole_groups_out(group: str) -> None:
    assert not [key for key in trajectory_keys(_parse()) if key.startswith(group)]


def test_trajectory_keys_leave_out_what_only_changes_names_and_speed() -> None:
    sizes = ["block_size", "num_blocks", "memory_fraction", "max_num_seqs", "max_num_batched_tokens"]
    names = {"name", "run_dir", "resume"} | {f"rollout.{size}" for size in sizes}
    assert not names & trajectory_keys(_parse()).keys()


@pytest.mark.parametrize(("schedule", "steps"), [("constant", None), ("linear", 40), ("cosine", 40)])
def test_number_of_steps_counts_only_if_the_schedule_depends_on_it(schedule: str, steps: int | None) -> None:
    assert trajectory_keys(_parse("steps=40", f"optim.schedule={schedule}")).get("steps") == steps


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["model.path=a"], "model=hf"),
        (["model={path:a,gradient_checkpointing:true}"], "model=hf"),
        (["+task.eval_path=a"], "task=dataset"),
        (["reward=numeric", "reward.path=a:b"], "reward=custom"),
        (["tracking=none", "tracking.mode=online"], "tracking=wandb"),
        (["model=hf", "model.path=a", "model.warm_start_steps=3"], "model=tiny"),
        (["task=jsonl", "task.path=a", "++task.finished_fraction=1"], "task=arithmetic"),
    ],
)
def test_a_key_that_another_option_has_is_refused_by_that_one(overrides: list[str], remedy: str) -> None:
    """On the command line too, where Hydra would only say that there is no such key."""
    group = remedy.split("=")[0]
    with pytest.raises(ConfigError, match=rf"^{group}\.\w+=.*: is for {remedy}, and {group} is \w+; add {remedy}$"):
        _parse(*as_typed(overrides))


def test_an_unset_kind_or_path_of_ones_own_file_is_named() -> None:
    for group, key in (("model", "path"), ("task", "path"), ("reward", "path"), ("model", "kind")):
        kind = {"model": "hf", "task": "jsonl", "reward": "custom"}[group]
        raw = {"name": "a", "run_dir": "b", group: {"kind": kind} | {key: "???"}}
        with pytest.raises(ConfigError, match=rf"^{group}\.{key}: "):
            parse_config(raw)
    with pytest.raises(ConfigError, match=r"^model\.path: model=hf needs a directory, as in model\.path=DIR$"):
        _parse("model=hf", "model.path=''")


def test_a_kl_term_over_part_of_the_vocabulary_is_refused() -> None:
    """Policy and reference would cut by their own logits, and the difference of their log-probs be no KL."""
    with pytest.raises(ConfigError, match=r"^algorithm\.kl_coef"):
        _parse("algorithm.kl_coef=0.1", "sampling.top_p=0.9")


def test_sizes_of_the_engine_belong_to_the_trajectory_where_bits_depend_on_them() -> None:
    assert "rollout.num_blocks" not in trajectory_keys(_parse())
    assert "rollout.num_blocks" in trajectory_keys(_parse("rollout.exact=off"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resume=auto", "resume_changed=[weights]"], r"^resume_changed='weights': use data, reward, model or keys"),
        (["resume=auto", "resume_changed=[data,all]"], r"^resume_changed='all': use data"),
        (["resume=auto", "resume_changed=data"], r"^resume_changed: "),
        (["resume=auto", "resume_changed=[checkpoint.every]"], r"^resume_changed='checkpoint.every': use data"),
        (["resume_changed=[data]"], r"^resume_changed: is for a run that goes on; add resume=auto"),
    ],
)
def test_changes_that_a_resume_may_take(overrides: list[str], message: str) -> None:
    assert _parse("resume=auto", "resume_changed=[data,optim.lr]").resume_changed == ["data", "optim.lr"]
    with pytest.raises(ConfigError, match=message):
        _parse(*overrides)
