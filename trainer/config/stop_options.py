"""When a run that has gone wrong ends by itself."""

from dataclasses import dataclass

from trainer.config.setting import setting


@dataclass
class StopConfig:
    max_gap: float | None = setting(None, at_least=0, trajectory=False)
    min_entropy: float | None = setting(None, above=0, trajectory=False)
    min_reward: float | None = setting(None, trajectory=False)
    min_length: float | None = setting(None, above=0, trajectory=False)
    max_length: float | None = setting(None, above=0, trajectory=False)
    max_skipped: int | None = setting(None, at_least=1, trajectory=False)
    patience: int = setting(3, at_least=1, trajectory=False)
    after: int = setting(0, at_least=0, trajectory=False)
