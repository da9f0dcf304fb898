"""A run: everything the loop needs, made and checked before the first step."""

import dataclasses
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rollout import RolloutEngine, RolloutError
from rollout.memory import sized_for
from rollout.model import (
    check_directory,
    find_directory,
    load_model,
    load_tokenizer,
    read_config,
    switch_adapter,
    tiny_config,
    tiny_tokenizer,
    training_view,
)
from rollout_kernels.ops import choose
from trainer.config import ConfigError, HFModelConfig, TinyModelConfig, TrainerConfig, trajectory_keys
from trainer.config.limits import check_device, check_limits
from trainer.data.rendering import kept_prompts, render_task, without_long_prompts
from trainer.data.rows import Row, RowStream
from trainer.data.tasks import Task, make_task
from trainer.evaluation import check_by
from trainer.rewards.functions import check_functions, make_functions
from trainer.rewards.scorer import Scorer
from trainer.step import Trainer
from trainer.storage import checkpoint, folders
from trainer.storage.digests import base_contents, check_contents, model_contents, task_contents
from trainer.storage.lines import StepFile
from trainer.storage.run_folder import RunFolder
from trainer.storage.writing import WriteError, writing
from trainer.tracking.collapse import CollapseWatch
from trainer.tracking.timing import PhaseTimer
from trainer.tracking.tracking import Metrics, SafeTracker, make_tracker
from trainer.weights.adapter import check_adapter, inject
from trainer.weights.generation import keep_special_ids
from trainer.weights.memory import MemoryWatch, plan_memory, step_shape
from trainer.weights.optimizer import MasterAdamW
from trainer.weights.warm_start import warm_started_tiny

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """What train() works on."""

    config: TrainerConfig
    folder: RunFolder
    task: Task
    contents: dict[str, str]
    """Digests of what the run depends on besides its keys."""
    prompts: dict[str, Tensor]
    """Ids of all rows' prompts, as a checkpoint keeps them."""
    tokenizer: PreTrainedTokenizerBase
    trainer: Trainer
    start_step: int
    memory: MemoryWatch
    collapse: CollapseWatch
    metrics_file: StepFile
    completions_file: StepFile
    tracker: SafeTracker
    last_metrics: Metrics = field(default_factory=dict)  # of the last step, its evaluation included
    whole_steps: int = 0
    """Steps that are there as a whole, weights and line in metrics.jsonl."""
    saved_step: int | None = None
    """Steps in the last checkpoint that this process wrote."""

    @property
    def engine(self) -> RolloutEngine:
        return self.trainer.engine

    @property
    def timer(self) -> PhaseTimer:
        return self.trainer.timer

    @property
    def run_dir(self) -> Path:
        return self.folder.path

    def close(self, exit_code: int = 0) -> None:
        """exit_code: what the process will end with; the dashboard is told if that is not 0."""
        self.trainer.collector.scorer.close()
        self.trainer.optimizer.close()
        self.engine.close()
        if exit_code:
            self.tracker.fail(exit_code)
        else:
            self.tracker.finish()
        self.folder.close()


def _check_resume(config: TrainerConfig, run_dir: Path) -> tuple[Path | None, checkpoint.TrainerState | None]:
    """The checkpoint to go on from and its state, if there is one; refuses to run over another run."""
    found = checkpoint.find_checkpoint(config.resume, run_dir)
    own = config.resume == "auto" or (found is not None and run_dir.resolve() in found.resolve().parents)
    if not own and ((run_dir / "metrics.jsonl").exists() or folders.list_checkpoints(run_dir)):
        begun = folders.list_checkpoints(run_dir)
        remedy = "go on with resume=auto, or give another name=" if begun else "give another name="
        raise ConfigError(f"run_dir: {run_dir} holds a run already; {remedy}")
    if found is None:
        return None, None
    checkpoint.check_whole(found)
    state = checkpoint.read_state(found, trajectory_keys(config), config.resume_changed)
    if state.num_threads != torch.get_num_threads():
        logger.warning("the run began with %d threads and goes on with %d", state.num_threads, torch.get_num_threads())
    return found, state


def prepare(config: TrainerConfig) -> Run:
    """Claim the folder, check, load, resume. Raises ConfigError or RolloutError for what the user can mend."""
    folder = RunFolder(config.run_dir)
    with ExitStack() as on_error:
        on_error.callback(folder.close)
        try:
            run = _prepare(config, folder)
        except WriteError as error:
            key = "run_dir: " if error.path.is_relative_to(folder.path) else ""
            raise ConfigError(f"{key}{error}") from error
        on_error.pop_all()
    return run


def _prepare(config: TrainerConfig, folder: RunFolder) -> Run:
    device = check_device(config)
    choose(device, torch.float32)  # kernels that are asked for and not there are refused first
    found, state = _check_resume(config, folder.path)
    timer = PhaseTimer()
    with timer.phase("load"):
        inputs = read_inputs(config, found, state)
        check_adapter(config.adapter, inputs.described)
        check_limits(config, inputs.described, device, inputs.lengths["train"], inputs.lengths["eval"])
        directory = _model_directory(config, inputs.task, timer)
        contents = inputs.contents | base_contents(config, None if state is None else state.contents, directory)
        module = load_model(directory, config.rollout.dtype, device)
        keep_special_ids(module)
        inject(module, config.adapter, seed=config.seed, base=directory)
        apart = config.algorithm.kl_coef and config.adapter.kind == "none"
        reference = load_model(directory, config.rollout.dtype, device) if apart else None
        shape = step_shape(config, module, inputs.lengths["train"] + inputs.lengths["eval"], len(inputs.task.eval_rows))
        sized = sized_for(config.rollout, module, shape.num_sequences, shape.prompt + shape.new)
        engine = RolloutEngine(module, inputs.tokenizer, sized)
    optimizer = MasterAdamW(module.named_parameters(), config.optim)
    start = _restore(found, state, engine, optimizer)
    ledger = plan_memory(config, engine, optimizer, reference, shape)
    logger.info("%s", ledger.render())
    folder.set_aside(found, start)
    values = _save_config(config, folder.path / "config.yaml")
    # before the tracker, which reads them
    metrics, completions = (StepFile(folder.path / name, start) for name in ("metrics.jsonl", "completions.jsonl"))
    view = _reference_view(engine, reference) if config.algorithm.kl_coef else None
    rows = RowStream(inputs.task.train_rows, config.seed)
    trainer = Trainer(config, engine, optimizer, rows, inputs.scorer, reference=view, timer=timer)
    trainer.collector.num_refilled = 0 if state is None else state.num_refilled
    return Run(
        config=config,
        folder=folder,
        task=inputs.task,
        contents=contents,
        prompts=inputs.prompts,
        tokenizer=inputs.tokenizer,
        trainer=trainer,
        start_step=start,
        memory=MemoryWatch(ledger, device),
        collapse=CollapseWatch(config.stop),
        metrics_file=metrics,
        completions_file=completions,
        tracker=make_tracker(config.tracking, folder.path, config.name, values if start < config.steps else None),
    )


@dataclass(frozen=True)
class Inputs:
    """What a run is about, before its weights are loaded: rows, with their prompts' ids, and what judges them."""

    task: Task
    scorer: Scorer
    described: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    contents: dict[str, str]
    prompts: dict[str, Tensor]

    @property
    def lengths(self) -> dict[str, list[int]]:
        """Tokens of every row's prompt."""
        return {"train": _lengths(self.task.train_rows), "eval": _lengths(self.task.eval_rows)}


def read_inputs(
    config: TrainerConfig, found: Path | None = None, state: checkpoint.TrainerState | None = None
) -> Inputs:
    """Cheap things first, so that what is wrong is said at once; on a resume all must be what it was."""
    began = None if state is None else state.contents
    task = make_task(config.task, config.seed)
    functions = make_functions(config.reward, task)
    check_functions(functions, task)
    check_by(config.eval, task.eval_rows)
    scorer = Scorer(functions, config.reward)
    contents = task_contents(config, task)
    changed = check_contents(config, began, contents)
    described, tokenizer = _described(config)
    in_directory = _directory_contents(config, tokenizer)
    changed |= check_contents(config, began, in_directory)
    task = _rendered(task, tokenizer, described.vocab_size, found, changed)
    # those of rows that are too long are kept, too: a run that goes on reads the same rows again
    prompts = kept_prompts(task)
    return Inputs(without_long_prompts(task), scorer, described, tokenizer, contents | in_directory, prompts)


def _restore(
    found: Path | None, state: checkpoint.TrainerState | None, engine: RolloutEngine, optimizer: MasterAdamW
) -> int:
    """Put a checkpoint's weights and moments in place; returns the steps that it has."""
    if found is None or state is None:
        return 0
    kernels = engine.numerics.ops.identity
    if state.kernels != kernels:
        logger.warning("the run began with kernels %s and goes on with %s", state.kernels, kernels)
    checkpoint.load_checkpoint(found, engine.module, optimizer)
    engine.policy_version = state.step
    logger.info("resumed from %s", found)
    return state.step


def _save_config(config: TrainerConfig, path: Path) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    with writing(path):
        OmegaConf.save(OmegaConf.create(values), path)
    return values


def _described(config: TrainerConfig) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Config and tokenizer of the model, without its weights."""
    if not isinstance(config.model, HFModelConfig):
        described = tiny_config()
        described.dtype = torch.float32
        return described, tiny_tokenizer()
    try:
        directory = check_directory(config.model.path)
    except RolloutError as error:
        raise ConfigError(f"model.path: {error}") from error
    return read_config(directory), load_tokenizer(directory)


def _model_directory(config: TrainerConfig, task: Task, timer: PhaseTimer) -> Path:
    if isinstance(config.model, HFModelConfig):
        return find_directory(config.model.path)
    assert isinstance(config.model, TinyModelConfig)
    with timer.phase("warm_start"):
        return warm_started_tiny(config.model, config.task, task, config.seed)


def _reference_view(engine: RolloutEngine, copy: PreTrainedModel | None) -> PreTrainedModel:
    """The initial weights: a frozen copy's, or, of an adapter, the module's own with the adapter off."""
    if copy is not None:
        return training_view(copy.requires_grad_(False), engine.numerics, gradient_checkpointing=False)
    view = training_view(engine.module, engine.numerics, gradient_checkpointing=False)
    switch_adapter(view, None)
    return view


def _directory_contents(config: TrainerConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digests of the model that a run begins with, where that is a directory of the user's."""
    if not isinstance(config.model, HFModelConfig):
        return {}
    return model_contents(find_directory(config.model.path), tokenizer)


def _rendered(
    task: Task, tokenizer: PreTrainedTokenizerBase, vocab_size: int, found: Path | None, changed: set[str]
) -> Task:
    """The task with its prompts rendered, by the run's first process where a checkpoint has them."""
    file = found / "prompts.safetensors" if found is not None else None
    kept = checkpoint.read_tensors(file) if file is not None and file.is_file() else None
    return render_task(task, tokenizer, vocab_size, kept, changed)


def _lengths(rows: list[Row]) -> list[int]:
    """Tokens of each row's prompt."""
    return [len(row.prompt_ids or ()) for row in rows]
