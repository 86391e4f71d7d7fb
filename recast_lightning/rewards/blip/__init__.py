"""ImageReward, on a BLIP backbone."""
