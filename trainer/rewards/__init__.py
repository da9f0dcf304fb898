"""What a completion is worth: built-in rewards, the user's own, and numbers as people write them."""
