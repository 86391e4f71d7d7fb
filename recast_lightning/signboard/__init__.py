"""The embedded world: signs, their renderer, and the tiny models trained on them."""
