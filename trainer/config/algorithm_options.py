"""Keys of the algorithms."""

from dataclasses import dataclass

from trainer.config.setting import setting


@dataclass
class AlgorithmConfig:
    prompts_per_step: int = setting(32, at_least=1)
    group_size: int = setting(8, at_least=2)
    clip_low: float = setting(0.2, above=0, at_most=1)
    clip_high: float = setting(0.2, above=0)
    scale_rewards: str = setting("group", choices=("group", "none"))
    kl_coef: float = setting(0.0, at_least=0)
    micro_batch_tokens: int = setting(4096, at_least=1)
