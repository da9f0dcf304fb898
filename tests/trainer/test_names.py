"""Values are what was typed, each is given once, and a printed command can be pasted."""

import random
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trainer.__main__ import CONFIG_DIRECTORY
from trainer.config import ConfigError, DatasetConfig, TrainerConfig, WandbConfig, parse_config, text_keys
from trainer.config.names import as_typed, command_line, override_of


def _parse(*arguments: str) -> TrainerConfig:
    """As the command line does."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_DIRECTORY)):
        return parse_config(compose("config", as_typed(arguments)))


def test_text_keys_are_the_text_fields_of_all_groups() -> None:
    keys = text_keys()
    task = "split subset eval_path eval_split answer_column answer_after system_prompt prefill"
    expected = {"resume", "eval.by", "checkpoint.keep_best", *(f"task.{name}" for name in task.split())}
    assert {key for key, may_be_null in keys.items() if may_be_null} == expected
    assert {"model.path", "task.path", "reward.path", "model.kind"} <= keys.keys()
    assert {"name", "run_dir", "tracking.project", "tracking.mode", "rollout.device", "optim.schedule"} <= keys.keys()
    assert not {"seed", "optim.lr", "rollout.num_blocks", "sampling.stop_token_ids", "reward.shuffle"} & keys.keys()


TYPED = ["1e3", "true", "FALSE", "12:30", "0x10", "1_000", "007", "a b", ".5", "1.", "-1", "+1", "inf", "NaN", "1e-3",
         "00", "None", "on", "2026-12-01", "1 2", "é文"]  # fmt: skip


@pytest.mark.parametrize("typed", TYPED)
def test_a_text_value_is_what_was_typed(typed: str) -> None:
    name = f'name="{typed}"' if not typed.isascii() else f"name={typed}"
    config = _parse(name, f"++tracking.project='{typed}'")
    assert isinstance(config.tracking, WandbConfig)
    assert (config.name, config.tracking.project, config.run_dir) == (typed, typed, f"outputs/{typed}")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["run_dir=1.50"], "run_dir"),
        (["resume=1_0"], "resume"),
        (["task=jsonl", "task.path=1e5"], "task.path"),
        (["model=hf", "model.path=True"], "model.path"),
        (["reward=custom", "reward.path=0.10"], "reward.path"),
        (["tracking.project= 1e3 "], "tracking.project"),
    ],
)
def test_every_text_key_keeps_its_text(arguments: list[str], key: str) -> None:
    config = _parse(*arguments)
    group, _, field = key.rpartition(".")
    assert getattr(getattr(config, group) if group else config, field) == arguments[-1].partition("=")[2].strip()


def test_numbers_interpolations_and_null_stay_what_they_are() -> None:
    config = _parse("seed=1_0", "optim.lr=1e-3", "resume=null", "name='${seed}-${model.kind}'", "reward.shuffle=true")
    assert (config.seed, config.optim.lr, config.resume, config.reward.shuffle) == (10, 1e-3, None, True)
    assert config.name == "10-tiny"


@pytest.mark.parametrize("override", ["name=null", "run_dir=NULL", "tracking.project=null"])
def test_null_is_no_text(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf'^{key}: must be text, not null; .*\'{key}="null"\''):
        _parse(override)
    assert _parse('name="null"').name == "null"


@pytest.mark.parametrize("value", [True, 1000.0])
def test_what_yaml_took_for_something_else_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^name={value}: must be text; put it in quotes"):
        parse_config({"name": value, "run_dir": "a"})


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["steps=1", "steps=2"], "steps"),
        (["steps=1", "steps=1"], "steps"),
        (["seed=1", "model=tiny", "+seed=2"], "seed"),
        (["++optim.lr=1", "optim.lr=2"], "optim.lr"),
        (["model=tiny", "model=hf"], "model"),
        (["experiment=smoke", "experiment=null"], "experiment"),
        (["tracking=wandb", "tracking=none"], "tracking"),
        (['name="a,b"', "name=b"], "name"),
        (["hydra.verbose=true", "hydra.verbose=false"], "hydra.verbose"),
        (["optim.lr=1e-3", "optim={lr:5e-5}"], "optim.lr"),
        (["+optim={beta1:0.5,lr:1}", "optim.lr=1"], "optim.lr"),
        (["task={eval_rows:1,path:a}", "task.path=b"], "task.path"),
    ],
)
def test_a_key_given_twice_is_refused(arguments: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: is given twice, as '.*' and as '.*'; give it once$"):
        as_typed(arguments)


@pytest.mark.parametrize("argument", ["~optim.lr", "~optim", "~task.kind=arithmetic", "~task.chat_template_kwargs.a"])
def test_a_key_that_is_deleted_is_refused(argument: str) -> None:
    key = argument[1:].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}: cannot be left out, as '{argument}' asks; give it a value$"):
        as_typed([argument])


@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize(
    "given",
    [
        ["task.chat_template_kwargs={enable_thinking:false,level:{a:1}}"],
        ["task.chat_template_kwargs.enable_thinking=false", "task.chat_template_kwargs.level.a=1"],
        ["task={chat_template_kwargs:{enable_thinking:false,level:{a:1}}}"],
    ],
)
def test_keys_of_the_chat_template_are_free(given: list[str], sign: str) -> None:
    config = _parse("task=jsonl", "task.path=a", *(sign + argument for argument in given))
    assert isinstance(config.task, DatasetConfig)
    assert config.task.chat_template_kwargs == {"enable_thinking": False, "level": {"a": 1}}


def test_no_other_keys_are() -> None:
    with pytest.raises(ConfigError, match=r"^task\.nosuch: "):
        _parse("task=jsonl", "task={path:a,chat_template_kwargs:{a:1},nosuch:1}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["optim=hf", "optim.lr=1"],
        ["optim={lr:1}", "optim.beta1=0.5"],
        ["task=jsonl", "task.chat_template_kwargs={}", "hydra={verbose:true}"],
        ["--config-dir", "here", "--config-name", "here", "steps=1"],
        ["task.path=a=b.jsonl", "task.path=a=b.jsonl"],  # Hydra's to refuse
        ["--multirun", "name=1,2"],
    ],
)
def test_everything_else_is_left_alone(arguments: list[str]) -> None:
    assert as_typed(arguments) == arguments


# -- names of folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("name", "", "is empty"),
        ("name", "  ", "is empty"),
        ("name", "a/b", "is not the name of one folder"),
        ("name", "..", "is not the name of one folder"),
        ("name", ".", "is not the name of one folder"),
        ("name", "a\nb", "has a control character"),
        ("name", "a\x00b", "has a control character"),
        ("name", "a\u2028b", "has a control character"),
        ("name", "\udcff", "has a control character, a line break or half a character"),
        ("name", "x" * 256, "is longer than the 255 bytes"),
        ("name", "é" * 128, "is longer than the 255 bytes"),
        ("run_dir", "", "is empty"),
        ("run_dir", "a/" + "x" * 256, "is longer than the 255 bytes"),
        ("run_dir", "a/\tb", "has a control character"),
    ],
)
def test_what_cannot_be_a_folder_is_refused_by_name(key: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"name": "n", "run_dir": "r"} | {key: value})
    assert str(caught.value).startswith(f"{key}='")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "...", "a\\b", "~", "-", "a:b*?", "名前"])
def test_any_other_name_is_fine(name: str, tmp_path: Path) -> None:
    (tmp_path / parse_config({"name": name, "run_dir": "../r"}).name).mkdir()


# -- the command that goes on -------------------------------------------------------------------------------------

NASTY = ['a"b', "it's", "a=b,c d", "$HOME `x`", "${name}", "\\${x}", "a\\", 'b\\"', "{x}[y](z)", "#1; & | >", "1e3",
         "null", "文é", "100%", "~", "-x", "a:b@c", "'\"\\'\"", "true", "!!", "*?"]  # fmt: skip


@pytest.mark.parametrize("name", NASTY)
def test_the_printed_command_can_be_pasted(name: str) -> None:
    printed = command_line(
        ["tracking=wandb", 'tracking.project="x=1"', "+name=old", "resume=a"], name=name, resume="auto"
    )
    words = shlex.split(printed)
    assert words[:3] == ["python", "-m", "trainer"]
    assert words[3:5] == ["tracking=wandb", 'tracking.project="x=1"']
    config = _parse(*words[3:])
    assert isinstance(config.tracking, WandbConfig)
    assert (config.name, config.tracking.project, config.resume) == (name, "x=1", "auto")


def test_an_override_gives_any_text() -> None:
    draw = random.Random(0)
    pieces = [*"a1b \\\"'${}[](),=:#%&é~*.-_", "${", "\\${", "${a}", "true", "1e3", "null", "  ", "\\\\"]
    config = OmegaConf.create({"name": ""})
    for _ in range(500):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 8)))
        OmegaConf.update(config, "name", OverridesParser.create().parse_override(override_of("name", text)).value())
        assert config.name == text


def test_a_plain_value_is_left_plain() -> None:
    assert override_of("run_dir", "/a b/c-1.5_x") == "run_dir=/a b/c-1.5_x"
