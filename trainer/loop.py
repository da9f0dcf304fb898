"""The training loop: step by step, each written down before the next begins."""

import logging

import torch

from rollout import use_engine
from trainer.config import trajectory_keys
from trainer.evaluation import eval_sampling, evaluate
from trainer.rewards.calling import TrainingProgress
from trainer.run import Run
from trainer.signals import Interrupted, interrupts
from trainer.step import StepResult
from trainer.storage.checkpoint import TrainerState, save_checkpoint
from trainer.tracking.collapse import CollapseError
from trainer.tracking.completions import sample_completions, table_row
from trainer.tracking.metrics import memory_metrics
from trainer.tracking.summary import write_summary
from trainer.tracking.tracking import Metrics, Progress

logger = logging.getLogger(__name__)


def train(run: Run) -> None:
    """Run the steps that are left, and write the summary."""
    config, steps = run.config, run.config.steps
    if run.start_step >= steps:
        logger.info("nothing left to do: %d of %d steps are done", run.start_step, steps)
        return
    progress = Progress(run.start_step, steps)
    with use_engine(run.engine):
        if run.start_step == 0:
            _record_first(run)
        run.timer.step = {}
        run.whole_steps = run.start_step
        try:
            for i in range(run.start_step, steps):
                result = run.trainer.step(i)
                _record(run, result, i + 1, progress)
                run.whole_steps = i + 1
                run.timer.step = {}  # what a checkpoint takes counts for the next line
                if _due(config.checkpoint.every, i + 1, steps):
                    _save(run)
                if i + 1 < steps:  # else nothing is left but the summary
                    interrupts.release()
                run.collapse.check(result.metrics, i + 1)
        except CollapseError:
            if config.checkpoint.every and run.saved_step != run.whole_steps:
                _save(run)
            raise
        except Interrupted as stop:
            # weights are ahead of what is written down only where a second signal did not wait
            new = run.whole_steps not in (run.start_step, run.saved_step)
            if new and config.checkpoint.every and not stop.at_once:
                _save(run)
                logger.info("saved as it is after step %d", run.whole_steps)
            raise
    write_summary(run)


def _save(run: Run) -> None:
    config, engine, step = run.config, run.engine, run.whole_steps
    with run.timer.phase("checkpoint"):
        chosen, kernels = trajectory_keys(config), engine.numerics.ops.identity
        refilled = run.trainer.collector.num_refilled
        score = run.last_metrics.get(config.checkpoint.keep_best or "")
        state = TrainerState(step, chosen, torch.get_num_threads(), kernels, run.contents, refilled, score)
        keep, optimizer = config.checkpoint.keep, run.trainer.optimizer
        save_checkpoint(run.run_dir, state, engine.module, run.tokenizer, optimizer, keep, run.prompts)
    run.folder.drop_completions_aside()
    run.saved_step = step


def _due(every: int, step: int, last: int) -> bool:
    """Every so many steps, and at the end; 0 means never."""
    return bool(every) and (step % every == 0 or step == last)


def _evaluate(run: Run, step: int) -> Metrics:
    config, scorer, progress = run.config.eval, run.trainer.collector.scorer, TrainingProgress(step, run.config.steps)
    with run.timer.phase("eval"):
        sampling = eval_sampling(config, run.trainer.sampling)
        return evaluate(run.engine, run.task.eval_rows, scorer, config, sampling, progress)


def _record_first(run: Run) -> None:
    """The line of step 0: how the model does before training."""
    if run.task.eval_rows and run.config.eval.every:
        metrics = _evaluate(run, 0)
        logger.info("before training: eval pass@1 %.3f", metrics["eval/pass@1"])
        run.metrics_file.append({"step": 0} | metrics)
        run.tracker.log(metrics, 0)


def _record(run: Run, result: StepResult, step: int, progress: Progress) -> None:
    """Evaluate if it is time, then write the step down: in the run's files, on the console and on the dashboard."""
    config, metrics = run.config, dict(result.metrics)
    if run.task.eval_rows and _due(config.eval.every, step, config.steps):
        metrics |= _evaluate(run, step)
    metrics |= {f"timing_s/{phase}": seconds for phase, seconds in run.timer.step.items()} | memory_metrics(run.engine)
    seed, count = config.seed, config.tracking.completions
    sampled = sample_completions(result.groups, result.scores, run.tokenizer, step, seed=seed, count=count)
    lines = [completion.line() for completion in sampled]
    # a step's line in metrics.jsonl comes last: where that is, all of the step is
    run.completions_file.append(*lines)
    run.metrics_file.append({"step": step} | metrics)
    run.last_metrics = metrics
    run.tracker.log(metrics, step)
    run.tracker.log_completions([table_row(line) for line in lines], step)
    logger.info(progress.line(metrics, step))
    if step == run.start_step + 1:
        logger.info(run.memory.report())
