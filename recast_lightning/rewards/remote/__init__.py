"""Rewards that ask a server."""
