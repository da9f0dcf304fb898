"""Errors a user can mend. Everything else that goes wrong is a bug of ours and raises as such."""


class RolloutError(ValueError):
    """Bad input or configuration: the message names the thing, its value and the remedy."""


class BackendUnavailableError(Exception):
    """A backend cannot run on this machine, and why; whoever chooses among backends decides what that means."""
