"""From rewards and log-probs to a loss."""
