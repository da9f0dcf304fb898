"""Keys of the algorithms: what all have, and what the objective of some needs beside it."""

from dataclasses import dataclass

from trainer.config.setting import setting


@dataclass
class AlgorithmConfig:
    """What all algorithms have; algorithm=reinforce has no more."""

    kind: str = setting("grpo")
    prompts_per_step: int = setting(32, at_least=1)
    group_size: int = setting(8, at_least=1)
    micro_batch_tokens: int = setting(4096, at_least=1, trajectory=False)
    epochs: int = setting(1, at_least=1)
    minibatches: int = setting(1, at_least=1)
    baseline: str = setting("group", choices=("group", "leave_one_out", "batch", "none"))
    scale_rewards: str = setting("group", choices=("group", "batch", "none"))
    whiten: bool = setting(False)
    aggregation: str = setting("token_mean", choices=("token_mean", "sequence_mean", "sequence_sum", "constant_length"))
    kl_coef: float = setting(0.0, at_least=0)
    kl_estimator: str = setting("k3", choices=("k1", "k2", "k3"))
    kl_in: str = setting("loss", choices=("loss", "reward", "return"))
    entropy_coef: float = setting(0.0, at_least=0)
    top_entropy: float = setting(1.0, above=0, at_most=1)
    truncated: str = setting("keep", choices=("keep", "mask"))
    dynamic_sampling: bool = setting(False)
    max_refills: int = setting(10, at_least=0)
    correction: str = setting(
        "none", choices=("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    )
    correction_low: float = setting(0.0, at_least=0)
    correction_high: float = setting(2.0, above=0)


@dataclass
class ClippedConfig(AlgorithmConfig):
    """Algorithms that clip a ratio: algorithm=grpo, dr_grpo, dapo, rloo, reinforce_pp, gspo and their kin."""

    ratio: str = setting("token", choices=("token", "sequence", "sequence_token"))
    clip_low: float = setting(0.2, above=0, at_most=1)
    clip_high: float = setting(0.2, above=0)
    dual_clip: float | None = setting(None, above=1)


@dataclass
class CispoConfig(AlgorithmConfig):
    """algorithm=cispo"""

    ratio_cap: float = setting(5.0, at_least=1)


@dataclass
class SapoConfig(AlgorithmConfig):
    """algorithm=sapo"""

    tau_positive: float = setting(1.0, above=0)
    tau_negative: float = setting(1.05, above=0)


ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "grpo": ClippedConfig,
    "dr_grpo": ClippedConfig,
    "dapo": ClippedConfig,
    "rloo": ClippedConfig,
    "reinforce": AlgorithmConfig,
    "reinforce_pp": ClippedConfig,
    "reinforce_pp_baseline": ClippedConfig,
    "gspo": ClippedConfig,
    "gspo_token": ClippedConfig,
    "cispo": CispoConfig,
    "sapo": SapoConfig,
}
