"""From planned chunks, or packs of completions, to tokens and log-probs."""
