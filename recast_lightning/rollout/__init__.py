"""Rollouts: which samples a process draws, how they are scored, checked and served to training."""
