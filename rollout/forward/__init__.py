"""From planned chunks, or packs of completions, to tokens and log-probs."""

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
