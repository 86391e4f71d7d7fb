"""Evaluation of the averaged policy on fixed prompts and noise."""
