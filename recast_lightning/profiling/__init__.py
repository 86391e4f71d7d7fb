"""A profile of the policy, measured in a running Trainer."""
