"""`python -m trainer.inspect`: what a run would train on, without its weights."""
