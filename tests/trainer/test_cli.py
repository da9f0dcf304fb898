"""The command line: exit status 2 and a name for what the user can mend, 1 for a crash, values as they were typed."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import tiny_models

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "experiment=smoke", "steps=1", "model.warm_start_steps=0", "algorithm.prompts_per_step=2", "eval.every=0",
    "checkpoint.every=0", "sampling.max_new_tokens=4", "rollout.num_blocks=64", "run_dir=run",
]  # fmt: skip
"""One step in a second."""

Command = Callable[..., tuple[int, str]]
"""Exit status and standard error of the arguments."""


def _started(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m trainer` as a process of its own, not from the checkout."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "trainer", *arguments]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, encoding="utf-8", check=False)


def _jsonl(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


# -- exit status 2 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["optim.nosuch=1"], "optim.nosuch"),
        (["+optim.nosuch=1"], "error: optim.nosuch: "),
        (["nosuch/group=1"], "nosuch/group"),
        (["model=nosuch"], "model/nosuch"),
        (["steps=many"], "error: steps: "),
        (["optim.lr=fast"], "error: optim.lr: "),
        (["sampling.top_p=1.5"], "error: sampling.top_p=1.5: must be at most 1"),
        (["algorithm.group_size=1"], "error: algorithm.group_size=1: a rollout without others"),
        (["tracking.mode=loud"], "error: tracking.mode='loud': use one of offline, online, disabled"),
        (["rollout.device=cuda:x"], "error: rollout.device='cuda:x': "),
        (["task.eval_rows=4095"], "error: task.eval_rows=4095: "),
        (["task=jsonl"], "error: task.path: "),
        (["task=jsonl", "task.path=nosuch.jsonl"], "error: task.path: file 'nosuch.jsonl' does not exist"),
        (["model=hf"], "error: model.path: "),
        (["model=hf", "model.path=nosuch"], "error: model.path: model directory 'nosuch' does not exist"),
        (["reward=custom", "reward.path=nosuch.py:f"], "error: reward.path='nosuch.py:f': "),
        (["resume=nosuch"], "error: resume='nosuch': neither a checkpoint nor a run directory"),
        (["steps=1", "steps=2"], "error: steps: is given twice, as 'steps=1' and as 'steps=2'; give it once"),
        (["model=tiny", "model=hf"], "error: model: is given twice"),
        (["name=a/b"], "error: name='a/b': is not the name of one folder"),
        (["sampling.stop_token_ids=[999999]"], "error: sampling.stop_token_ids: 999999 is outside the model's vocab"),
        (["rollout.num_blocks=1"], "error: rollout.num_blocks=1: a row of 6 tokens "),
        (["task.path=a=b.jsonl"], "hint: quote values with special characters"),
        (["name=räd"], "hint: quote values with special characters"),
    ],
)
def test_what_the_user_can_mend_ends_with_2_and_a_name(
    here: Path, command: Command, overrides: list[str], named: str
) -> None:
    status, errors = command(*overrides)
    assert status == 2
    assert named in errors
    assert "Traceback" not in errors
    # nothing was loaded, warm-started or written
    assert {path.name for path in (here.parent / "cache").iterdir()} <= {"kernels"}
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (['{"prompt": "a", "answer": 1}', '{"prompt": "b", "ans'], "rows.jsonl:2: not JSON"),
        (['{"prompt": "a", "answer": 1}', "", '{"prompt": "b"}'], "rows.jsonl:3: the row has no 'answer'"),
        (['{"prompt": "a", "answer": 1, "completions": 2}'], "rows.jsonl:1: field 'completions'"),
        ([""], "rows.jsonl has no rows"),
        (['{"prompt": "a", "answer": 1}'], "error: task.eval_rows=1: rows.jsonl has 1 rows"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(here: Path, command: Command, lines: list[str], named: str) -> None:
    _jsonl(here / "rows.jsonl", *lines)
    status, errors = command("task=jsonl", "task.path=rows.jsonl", "task.eval_rows=1")
    assert (status, named in errors, "Traceback" in errors) == (2, True, False), errors
    assert {path.name for path in (here.parent / "cache").iterdir()} <= {"kernels"}


def test_empty_prompt_is_named_by_its_row(here: Path, command: Command) -> None:
    _jsonl(here / "rows.jsonl", '{"prompt": "a", "answer": 1}', '{"prompt": "", "answer": 1}')
    status, errors = command("task=jsonl", "task.path=rows.jsonl", "model.warm_start_steps=0", "run_dir=run")
    assert (status, "error: task: train row rows.jsonl:2 (''): '' is empty" in errors) == (2, True), errors


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("*.safetensors", "has no weights"),
        ("config.json", "has no config.json"),
        ("token*.json", "has no tokenizer"),
    ],
)
def test_incomplete_model_directory_is_named(here: Path, command: Command, missing: str, named: str) -> None:
    model = tiny_models.random_model("llama", vocab_size=tiny_models.TEXT_VOCAB)
    directory = tiny_models.save_directory(here / "model", model, tiny_models.byte_tokenizer())
    for path in list(directory.glob(missing)):
        path.unlink()
    status, errors = command("model=hf", "model.path=model", "run_dir=run", "tracking=none")
    assert (status, f"error: model.path: model directory 'model' {named}" in errors) == (2, True), errors
    assert not (here / "run").exists()


def test_model_kind_that_the_engine_cannot_run_is_refused(here: Path, command: Command) -> None:
    model = tiny_models.random_model("llama", vocab_size=tiny_models.TEXT_VOCAB)
    directory = tiny_models.save_directory(here / "model", model, tiny_models.byte_tokenizer())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    status, errors = command("model=hf", "model.path=model", "run_dir=run", "tracking=none")
    assert (status, "model_type='mistral' is not supported" in errors) == (2, True), errors


def test_run_directory_of_another_run_is_left_alone(here: Path, command: Command) -> None:
    (here / "run").mkdir()
    (here / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    status, errors = command(*SMALL)
    assert (status, "error: run_dir: " in errors, "give another name=" in errors) == (2, True, True), errors
    assert (here / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert [path.name for path in (here / "run").iterdir()] == ["metrics.jsonl"]


def test_exit_status_2_of_the_process(here: Path) -> None:
    done = _started(here, "+optim.nosuch=1")
    assert done.returncode == 2
    assert done.stderr == "error: optim.nosuch: Key 'nosuch' not in 'OptimConfig'\n"
    assert list(here.iterdir()) == []


# -- 0, 1 and 130 -------------------------------------------------------------------------------------------------


def test_run_that_ends_well(here: Path, command: Command) -> None:
    assert command(*SMALL) == (0, "")
    assert {path.name for path in here.iterdir()} == {"run"}
    assert {path.name for path in (here / "run").iterdir()} == {
        "completions.jsonl",
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
    }
    assert json.loads((here / "run" / "summary.json").read_text())["steps"] == 1
    assert yaml.safe_load((here / "run" / "config.yaml").read_text())["rollout"]["num_blocks"] == 64


def test_crash_while_training_ends_with_1(here: Path) -> None:
    (here / "judge.py").write_text("def f(completions):\n    raise ZeroDivisionError('in the reward')\n")
    done = _started(here, *SMALL, "reward=custom", "reward.path=judge.py:f")
    assert done.returncode == 1
    assert "ZeroDivisionError: in the reward" in done.stderr
    assert "hint:" not in done.stderr


def test_interrupt_ends_with_130_and_says_how_to_go_on(here: Path, command: Command) -> None:
    (here / "judge.py").write_text("def f(completions):\n    raise KeyboardInterrupt\n")
    status, errors = command(*SMALL, "name=mine", "reward=custom", "reward.path=judge.py:f")
    assert status == 130
    hint = shlex.split(errors.splitlines()[-1].partition("go on with: python -m trainer ")[2])
    assert hint[0] == "experiment=smoke"
    assert hint[-3:] == ["name=mine", f"run_dir={here / 'run'}", "resume=auto"]


# -- composition --------------------------------------------------------------------------------------------------

TYPED = {
    "name": "a=b,c d",
    "run_dir": "~/run (1)/[x]{y}",
    "task.path": "文件/é~.jsonl",
    "model.path": "C:\\temp\\new:1",
    "reward.path": "it's #1: 100%; $HOME & `x`",
    "tracking.project": "\\boxed{a}\\n",
}
"""By key; typed in double quotes, as the hint and the README say."""


def test_values_with_special_characters_arrive_as_typed(here: Path) -> None:
    typed = [f'{key}="{value}"' for key, value in TYPED.items()]
    done = _started(here, *typed, "seed=7", "resume=1e3", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    flat = shown | {
        f"{group}.{key}": v for group, node in shown.items() if isinstance(node, dict) for key, v in node.items()
    }
    assert {key: flat[key] for key in TYPED} == TYPED
    assert (shown["seed"], shown["resume"]) == (7, "1e3")
    assert list(here.iterdir()) == []


def test_configuration_of_the_user_s_own(here: Path) -> None:
    own = here / "conf"
    (own / "optim").mkdir(parents=True)
    (own / "mine.yaml").write_text("defaults: [config, _self_]\nsteps: 7\nsampling: {top_k: 5}\n")
    (own / "optim" / "slow.yaml").write_text("defaults: [tiny]\nlr: 1.0e-9\n")
    done = _started(here, "--config-dir", str(own), "--config-name", "mine", "optim=slow", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["steps"], shown["sampling"]["top_k"], shown["sampling"]["max_new_tokens"]) == (7, 5, 24)
    assert (shown["optim"]["lr"], shown["optim"]["beta2"]) == (1e-9, 0.95)
    assert [path.name for path in here.iterdir()] == ["conf"]
