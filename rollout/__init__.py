"""Copy-on-write rollouts from a language model, over the very weights that are being trained.

from rollout import generate_rollouts
groups = generate_rollouts(["12+34="], n=16, model="path/to/model", seed=0)

Names are imported when they are first asked for, so that `import rollout.schedule` brings no torch.
"""

from typing import TYPE_CHECKING

from rollout.lazy import importer

if TYPE_CHECKING:
    from rollout.api import generate_rollouts, use_engine
    from rollout.config import RolloutConfig, SamplingParams
    from rollout.engine.chat import ChatPrompt
    from rollout.engine.engine import RolloutEngine
    from rollout.engine.handles import RolloutHandle
    from rollout.engine.stats import EngineStats
    from rollout.errors import ExactnessError, RolloutError
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

__getattr__ = importer(
    __name__,
    {
        "rollout.api": ("generate_rollouts", "use_engine"),
        "rollout.config": ("RolloutConfig", "SamplingParams"),
        "rollout.engine.chat": ("ChatPrompt",),
        "rollout.engine.engine": ("RolloutEngine",),
        "rollout.engine.handles": ("RolloutHandle",),
        "rollout.engine.stats": ("EngineStats",),
        "rollout.errors": ("ExactnessError", "RolloutError"),
        "rollout.types": ("Rollout", "RolloutGroup", "TokenEvent"),
    },
)


def __dir__() -> list[str]:
    return __all__
