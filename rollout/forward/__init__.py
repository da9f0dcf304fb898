"""From planned chunks, or packs of completions, to tokens and log-probs."""

from typing import TYPE_CHECKING

from rollout.lazy import importer

if TYPE_CHECKING:
    from rollout.forward.packing import Pack, build_pack
    from rollout.forward.sampler import EVAL
    from rollout.forward.scoring import TokenScores, score_tokens

__all__ = [
    "EVAL",
    "Pack",
    "TokenScores",
    "build_pack",
    "score_tokens",
]

__getattr__ = importer(
    __name__,
    {
        "rollout.forward.packing": ("Pack", "build_pack"),
        "rollout.forward.sampler": ("EVAL",),
        "rollout.forward.scoring": ("TokenScores", "score_tokens"),
    },
)
