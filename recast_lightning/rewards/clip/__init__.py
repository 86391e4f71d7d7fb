"""Rewards on a CLIP backbone, which they share."""
