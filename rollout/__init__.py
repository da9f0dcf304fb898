"""Copy-on-write rollouts from a language model, over the very weights that are being trained.

from rollout import generate_rollouts
groups = generate_rollouts(["12+34="], n=16, model="path/to/model", seed=0)
"""

from rollout.api import generate_rollouts, use_engine
from rollout.chat import ChatPrompt
from rollout.config import RolloutConfig, SamplingParams
from rollout.engine import RolloutEngine
from rollout.errors import ExactnessError, RolloutError
from rollout.requests import RolloutHandle
from rollout.stats import EngineStats
from rollout.types import Rollout, RolloutGroup, TokenEvent

__all__ = [
    "ChatPrompt",
    "EngineStats",
    "ExactnessError",
    "Rollout",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutError",
    "RolloutGroup",
    "RolloutHandle",
    "SamplingParams",
    "TokenEvent",
    "generate_rollouts",
    "use_engine",
]
