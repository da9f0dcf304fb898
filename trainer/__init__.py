"""The trainer: tasks, rewards, losses and the loop around a rollout engine."""

import os

# Before torch starts its threads: one that waits spins for some microseconds and then sleeps. Spinning longer, as is
# the default, makes small products several times slower beside another busy process; not at all, slower when all is
# quiet.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Models come from local directories; nothing is looked up on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
