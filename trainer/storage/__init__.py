"""What a run keeps on disk: its folder, its checkpoints, and digests of what it was made from."""
