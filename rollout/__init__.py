"""Copy-on-write rollouts from a language model, over the very weights that are being trained.

from rollout import generate_rollouts
groups = generate_rollouts(["12+34="], n=16, model="path/to/model", seed=0)

Names are imported when they are first asked for, so that `import rollout.schedule` brings no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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

_HOMES = {
    "rollout.api": ("generate_rollouts", "use_engine"),
    "rollout.config": ("RolloutConfig", "SamplingParams"),
    "rollout.engine.chat": ("ChatPrompt",),
    "rollout.engine.engine": ("RolloutEngine",),
    "rollout.engine.handles": ("RolloutHandle",),
    "rollout.engine.stats": ("EngineStats",),
    "rollout.errors": ("ExactnessError", "RolloutError"),
    "rollout.types": ("Rollout", "RolloutGroup", "TokenEvent"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
