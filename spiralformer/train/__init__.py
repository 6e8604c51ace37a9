"""Pretraining: the recipe, the loop, and a run's folder with its checkpoints."""
