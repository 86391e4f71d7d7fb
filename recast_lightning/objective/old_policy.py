"""The schedule by which the old policy, which samples, follows the trained one."""


def old_policy_decay(step: int, *, rate: float, flat: int, maximum: float) -> float:
    """Decay eta = min(rate * max(step - flat, 0), maximum) of theta_old <- eta theta_old + (1 - eta) theta.

    Args:
        step: Rollouts done.
        rate: Growth a rollout.
        flat: Rollouts during which the old policy is replaced outright.
        maximum: Ceiling, < 1.
    """
    return min(rate * max(step - flat, 0), maximum)
