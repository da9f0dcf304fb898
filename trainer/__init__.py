"""The trainer: tasks, rewards, losses and the loop around a rollout engine."""

import os

# Before torch starts its threads: waiting ones sleep instead of spinning. Beside another busy process, spinning makes
# small products on two threads ten to a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Models come from local directories; nothing is looked up on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
