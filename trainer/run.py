"""A run: everything the loop needs, made and checked before the first step."""

import dataclasses
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rollout import RolloutEngine, RolloutError, SamplingParams
from rollout.builtin import tiny_config, tiny_tokenizer
from rollout.loading import check_directory, load_config, load_model, load_tokenizer, resolve_device
from rollout.memory import sized_for
from rollout.prompts import encode_prompt
from rollout.views import training_view
from rollout_kernels.native import identity
from trainer import checkpoint
from trainer.config import ConfigError, TrainerConfig, sampling_params, trajectory_keys
from trainer.limits import check_device, check_limits
from trainer.memory import MemoryWatch, plan_memory, step_shape
from trainer.optimizer import MasterAdamW
from trainer.rewards import check_reward, make_reward
from trainer.rows import RowStream
from trainer.tasks import RewardFunction, Task, make_task
from trainer.tracking import MetricsFile, SafeTracker, make_tracker
from trainer.warm_start import warm_started_tiny

logger = logging.getLogger(__name__)


@dataclass
class PhaseTimer:
    """Seconds per phase, of the current step and of the whole run."""

    step: dict[str, float] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            for seconds in (self.step, self.total):
                seconds[name] = seconds.get(name, 0.0) + spent


@dataclass
class Run:
    """What train() works on."""

    config: TrainerConfig
    run_dir: Path
    task: Task
    reward: RewardFunction
    stream: RowStream
    sampling: SamplingParams
    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    policy: PreTrainedModel
    """Training view of engine.module."""
    reference: PreTrainedModel | None
    """Training view of the initial weights, a second copy; only with a KL term."""
    optimizer: MasterAdamW
    start_step: int
    memory: MemoryWatch
    metrics_file: MetricsFile
    tracker: SafeTracker
    timer: PhaseTimer
    whole_step: int | None = None
    """Steps that are there as a whole, weights and line in metrics.jsonl; None in between."""
    saved_step: int | None = None
    """Steps in the last checkpoint that this process wrote."""

    def close(self, exit_code: int = 0) -> None:
        """exit_code: what the process will end with; the dashboard is told if that is not 0."""
        self.optimizer.close()
        self.engine.close()
        if exit_code:
            self.tracker.fail(exit_code)
        else:
            self.tracker.finish()


def _check_resume(config: TrainerConfig, run_dir: Path) -> tuple[Path | None, checkpoint.TrainerState | None]:
    """The checkpoint to go on from and its state, if there is one; refuses to run over another run."""
    found = checkpoint.find_checkpoint(config.resume, run_dir)
    own = config.resume == "auto" or (found is not None and run_dir in found.absolute().parents)
    if not own and (run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"run_dir: {run_dir} holds a run already; go on with resume=auto, or give another name=")
    if found is None:
        return None, None
    state = checkpoint.read_state(found, trajectory_keys(config))
    if state.num_threads != torch.get_num_threads():
        logger.warning("the run began with %d threads and goes on with %d", state.num_threads, torch.get_num_threads())
    kernels = identity(resolve_device(config.rollout.device))
    if state.kernels != kernels:
        logger.warning("the run began with kernels %s and goes on with %s", state.kernels, kernels)
    return found, state


def prepare(config: TrainerConfig) -> Run:
    """Check, load, resume. Raises ConfigError or RolloutError for what the user can mend."""
    run_dir = Path(config.run_dir).expanduser().absolute()
    device = check_device(config)
    found, state = _check_resume(config, run_dir)
    task = make_task(config.task, config.seed)
    reward = make_reward(config.reward, task)
    check_reward(reward, task)
    timer = PhaseTimer()

    with timer.phase("load"):
        model_config, tokenizer = _described(config)
        lengths = _check_prompts(task, tokenizer)
        check_limits(config, model_config, device, lengths["train"], lengths["eval"])
        directory = _model_directory(config, task, timer)
        module = load_model(directory, config.rollout.dtype, device)
        _clean_generation_config(module)
        reference = load_model(directory, config.rollout.dtype, device) if config.algorithm.kl_coef else None
        shape = step_shape(config, module, lengths["train"] + lengths["eval"], len(task.eval_rows))
        engine = RolloutEngine(
            module, tokenizer, sized_for(config.rollout, module, shape.num_sequences, shape.prompt + shape.new)
        )
    optimizer = MasterAdamW(module.named_parameters(), config.optim)
    if found is not None and state is not None:
        checkpoint.load_checkpoint(found, module, optimizer)
        engine.policy_version = state.step
        logger.info("resumed from %s", found)
    start = state.step if state is not None else 0
    ledger = plan_memory(config, engine, optimizer, reference, shape)
    logger.info("%s", ledger.render())
    _prepare_directory(run_dir, found, start)
    values = dataclasses.asdict(config)
    OmegaConf.save(OmegaConf.create(values), run_dir / "config.yaml")
    return Run(
        config=config,
        run_dir=run_dir,
        task=task,
        reward=reward,
        stream=RowStream(task.train_rows, config.seed),
        sampling=sampling_params(config),
        engine=engine,
        tokenizer=tokenizer,
        policy=engine.training_view(gradient_checkpointing=config.model.gradient_checkpointing),
        reference=None if reference is None else _frozen_view(engine, reference),
        optimizer=optimizer,
        start_step=start,
        memory=MemoryWatch(ledger, device),
        metrics_file=MetricsFile(run_dir / "metrics.jsonl", start),
        tracker=make_tracker(config.tracking, run_dir, config.name, values if start < config.steps else None),
        timer=timer,
    )


def _prepare_directory(run_dir: Path, found: Path | None, start: int) -> None:
    """Leave in run_dir what the run goes on from: metrics up to its start, and no later checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics = run_dir / "metrics.jsonl"
    if found is None and metrics.exists():
        kept = metrics.rename(run_dir / "metrics.before-restart.jsonl")
        logger.warning("no checkpoint in %s: starting over; earlier metrics are in %s", run_dir, kept.name)
    if found is not None:
        source = found.absolute().parents[1] / "metrics.jsonl"
        if source != metrics and source.is_file():
            shutil.copy(source, metrics)
        checkpoint.drop_later(run_dir, start)


def _described(config: TrainerConfig) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Config and tokenizer of the model, without its weights."""
    if config.model.kind == "tiny":
        described = tiny_config()
        described.dtype = torch.float32
        return described, tiny_tokenizer()
    assert config.model.path is not None
    try:
        directory = check_directory(config.model.path)
    except RolloutError as error:
        raise ConfigError(f"model.path: {error}") from error
    return load_config(directory), load_tokenizer(directory)


def _model_directory(config: TrainerConfig, task: Task, timer: PhaseTimer) -> Path:
    if config.model.kind == "hf":
        assert config.model.path is not None
        return check_directory(config.model.path)
    with timer.phase("warm_start"):
        return warm_started_tiny(config.model, config.task, task, config.seed)


def _frozen_view(engine: RolloutEngine, reference: PreTrainedModel) -> PreTrainedModel:
    return training_view(reference.requires_grad_(False), exact=engine.exact, gradient_checkpointing=False)


def _clean_generation_config(module: PreTrainedModel) -> None:
    """Keep the special ids only: contradictory sampling defaults of a model would make every save fail."""
    old = module.generation_config
    ids = {name: getattr(old, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    module.generation_config = GenerationConfig(**{name: value for name, value in ids.items() if value is not None})


def _check_prompts(task: Task, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Render every prompt once, so that a bad row is named before training; tokens of each, by "train" and "eval"."""
    lengths: dict[str, list[int]] = {"train": [], "eval": []}
    for kind, rows in (("train", task.train_rows), ("eval", task.eval_rows)):
        for i, row in enumerate(rows):
            try:
                lengths[kind].append(len(encode_prompt(row.prompt, tokenizer, len(tokenizer))))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"task: {kind} row {i}: {error}") from error
    return lengths
