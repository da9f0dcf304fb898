"""The training loop: sample, score, compare, update, swap."""

import logging

import torch
from torch import Tensor

from rollout import ExactnessError, RolloutError, RolloutGroup, use_engine
from rollout.forward.scoring import TokenScores, score_tokens
from trainer.algorithm.advantages import group_advantages
from trainer.algorithm.batch import TrainingBatch, micro_batches
from trainer.algorithm.losses import PolicyLoss, policy_loss
from trainer.config import trajectory_keys
from trainer.data.rows import Row
from trainer.evaluation import evaluate
from trainer.optimizer import learning_rate
from trainer.rewards.rewards import score, shuffled
from trainer.run import Run
from trainer.signals import Interrupted, interrupts
from trainer.storage.checkpoint import TrainerState, save_checkpoint
from trainer.tracking.metrics import UpdateMetrics, completion_metrics, engine_metrics, memory_metrics
from trainer.tracking.summary import write_summary
from trainer.tracking.tracking import Metrics, Progress

logger = logging.getLogger(__name__)


def train(run: Run) -> None:
    """Run the steps that are left, and write the summary."""
    config, engine, timer = run.config, run.engine, run.timer
    progress = Progress(run.start_step, config.steps)
    if run.start_step >= config.steps:
        logger.info("nothing left to do: %d of %d steps are done", run.start_step, config.steps)
        return
    with use_engine(engine):
        if run.start_step == 0:
            _record_first(run)
        timer.step = {}
        run.whole_step = run.start_step
        try:
            for step in range(run.start_step, config.steps):
                _train_step(run, step, progress)
        except Interrupted as stop:
            new = run.whole_step not in (None, run.start_step, run.saved_step)
            if new and config.checkpoint.every and not stop.at_once:
                _save(run)
                logger.info("saved as it is after step %d", run.whole_step)
            raise
    write_summary(run)


def _train_step(run: Run, step: int, progress: Progress) -> None:
    config, engine, timer = run.config, run.engine, run.timer
    with timer.phase("step"):
        before = engine.stats()
        rows, groups = _rollouts(run, step)
        metrics = engine_metrics(before, engine.stats())
        with timer.phase("reward"):
            rewards = score(run.reward, rows, groups)
            if config.reward.shuffle:
                rewards = shuffled(rewards, config.seed, step)
            reward_table = torch.tensor(rewards, dtype=torch.float64)
            reward_table = reward_table.view(len(groups), config.algorithm.group_size)
            advantages = group_advantages(reward_table, config.algorithm.scale_rewards)
        with timer.phase("update"):
            metrics |= _update(run, groups, advantages, step)
            engine.weights_updated()
    metrics |= completion_metrics(groups, reward_table)
    _record(run, metrics, step + 1, progress, rows, groups, rewards)
    run.whole_step = step + 1
    timer.step = {}  # what a checkpoint takes counts for the next line
    if _due(config.checkpoint.every, step + 1, config.steps):
        _save(run)
    if step + 1 < config.steps:  # else nothing is left but the summary
        interrupts.release()


def _save(run: Run) -> None:
    config, engine, step = run.config, run.engine, run.whole_step
    assert step is not None
    with run.timer.phase("checkpoint"):
        chosen, kernels = trajectory_keys(config), engine.ops.identity
        state = TrainerState(step, chosen, torch.get_num_threads(), kernels, run.contents)
        keep = config.checkpoint.keep
        save_checkpoint(run.run_dir, state, engine.module, run.tokenizer, run.optimizer, keep, run.prompts)
    run.saved_step = step


def _due(every: int, step: int, last: int) -> bool:
    """Every so many steps, and at the end; 0 means never."""
    return bool(every) and (step % every == 0 or step == last)


def _rollouts(run: Run, step: int) -> tuple[list[Row], list[RolloutGroup]]:
    """The step's rows and their groups; a row whose prompt the engine cannot take is skipped and counted."""
    algorithm = run.config.algorithm
    first = step * algorithm.prompts_per_step
    rows = run.stream.take(first, algorithm.prompts_per_step)
    keys = [place % 2**32 for place in range(first, first + len(rows))]
    with run.timer.phase("rollout"):
        groups = run.engine.generate_rollouts(
            [row.engine_prompt for row in rows],
            algorithm.group_size,
            run.sampling,
            step=step,
            keys=keys,
            on_error="return",
        )
    for place, group in zip(keys, groups, strict=True):
        if group.error is not None:
            logger.warning("row at place %d of the data stream skipped: %s", place, group.error)
    good = [(row, group) for row, group in zip(rows, groups, strict=True) if group.error is None]
    if not good:
        raise RolloutError(f"step {step + 1}: none of its {len(rows)} prompts could be run; {groups[0].error}")
    return [row for row, _ in good], [group for _, group in good]


def _update(run: Run, groups: list[RolloutGroup], advantages: Tensor, step: int) -> Metrics:
    """Accumulate the loss of all micro-batches, then one optimizer step, in place."""
    config, engine = run.config, run.engine
    batches = micro_batches(
        groups,
        advantages,
        engine.layer_group,
        engine.device,
        max_tokens=config.algorithm.micro_batch_tokens,
        exact=engine.exact,
    )
    num_tokens = sum(sum(rollout.loss_mask) for group in groups for rollout in group.rollouts)
    metrics = UpdateMetrics(num_tokens)
    for batch in batches:
        scores = score_tokens(run.policy, batch.pack, run.sampling)
        loss = _loss(run, batch, scores, num_tokens)
        loss.loss.backward()  # type: ignore[no-untyped-call]
        metrics.add(batch, scores, loss)
    _hold_exactness(run, metrics.gap_max)
    # from here on the step is finished, or the weights would be ahead of what is written down
    interrupts.hold()
    run.whole_step = None
    lr = learning_rate(config.optim, step, config.steps)
    grad_norm = run.optimizer.step(lr)
    return metrics.result() | {"grad_norm": grad_norm, "learning_rate": lr}


def _hold_exactness(run: Run, gap_max: float) -> None:
    """The probe is a sample: if a step shows a difference after all, refuse or fall back, and say so."""
    if gap_max == 0.0 or not run.engine.exact:
        return
    reason = f"generator's and trainer's log-probs differ by up to {gap_max:.2g}"
    if run.config.rollout.exact == "require":
        raise ExactnessError(f"exact='require', but {reason}: use exact=auto to recompute log-probs")
    logger.warning("%s; from now on the trainer's own are used", reason)
    run.engine.exact, run.engine.exact_reason = False, reason


def _loss(run: Run, batch: TrainingBatch, scores: TokenScores, num_tokens: int) -> PolicyLoss:
    algorithm = run.config.algorithm
    ref_logprobs = None
    if run.reference is not None:
        with torch.no_grad():
            ref_logprobs = score_tokens(run.reference, batch.pack, run.sampling).logprobs
    return policy_loss(
        scores.logprobs,
        # where the generator's log-probs are not the trainer's in every bit, the trainer's own take their place
        batch.rollout_logprobs if run.engine.exact else scores.logprobs.detach(),
        batch.advantages,
        batch.loss_mask,
        num_tokens,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        ref_logprobs=ref_logprobs,
        kl_coef=algorithm.kl_coef,
    )


def _evaluate(run: Run, step: int) -> Metrics:
    limit = run.config.eval.max_new_tokens or run.sampling.max_new_tokens
    with run.timer.phase("eval"):
        return evaluate(run.engine, run.task.eval_rows, run.reward, run.sampling, limit, step)


def _record_first(run: Run) -> None:
    """The line of step 0: how the model does before training."""
    if run.task.eval_rows and run.config.eval.every:
        metrics = _evaluate(run, 0)
        logger.info("before training: eval pass@1 %.3f", metrics["eval/pass@1"])
        run.metrics_file.append({"step": 0} | metrics)
        run.tracker.log(metrics, 0)


def _record(
    run: Run,
    metrics: Metrics,
    step: int,
    progress: Progress,
    rows: list[Row],
    groups: list[RolloutGroup],
    rewards: list[list[float]],
) -> None:
    """Evaluate if it is time, then one line each in metrics.jsonl, on the console and on the dashboard."""
    config = run.config
    if run.task.eval_rows and _due(config.eval.every, step, config.steps):
        metrics |= _evaluate(run, step)
    metrics |= {f"timing_s/{phase}": seconds for phase, seconds in run.timer.step.items()} | memory_metrics(run.engine)
    run.metrics_file.append({"step": step} | metrics)
    run.tracker.log(metrics, step)
    samples = [
        {"step": step, "prompt": str(row.prompt), "completion": group.rollouts[0].text, "reward": values[0]}
        for row, group, values in zip(rows, groups, rewards, strict=True)
    ]
    run.tracker.log_completions(samples[: config.tracking.completions], step)
    logger.info(progress.line(metrics, step))
    if step == run.start_step + 1:
        logger.info(run.memory.report())
