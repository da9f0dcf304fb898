"""The trainer: tasks, rewards, losses and the loop around a rollout engine."""
