"""Projection of a kernel onto given row and column sums (ReCAST, arXiv 2609.13425).

Shape legend: R rows (rewards), T columns (noise levels).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def sinkhorn_projection(
    log_kernel: Tensor, row_sums: Tensor, column_sums: Tensor, *, tolerance: float = 1e-10, max_iterations: int = 1000
) -> Tensor:
    """Matrix of the given margins that is closest to the kernel: argmin_W KL(W || K), in float64 and the log domain.

    The answer is W_it = c_t softmax_i(log K_it + u_i), whose columns are right for every u. The u that makes the rows
    right too minimises the convex dual sum_t c_t logsumexp_i(log K_it + u_i) - r u. Sinkhorn's step towards it is
    e = log r - log(row sums of W); the step taken here is d of

        (I - (1 - mu) P) d = e,    P_ij = sum_t W_it W_jt / (c_t sum_t W_it),

    which is Sinkhorn's at mu = 1 and Newton's at mu = 0 (Brauer, Clason, Lorenz and Wirth, "A Sinkhorn-Newton method
    for entropic optimal transport", arXiv 1710.06635). mu falls while steps lower the dual and rises to 1 when they do
    not (Levenberg-Marquardt). Where rounding hides how the dual falls, its slope tells: it still falls at the end of
    the step, so it fell all the way. Some 6 iterations for gains as measured, and below 100 for gains of fifty times
    the mean at a temperature of 0.01 and budgets of a millionth.

    Args:
        log_kernel: log K, finite, [R, T]; taken as a constant (no gradient flows to it).
        row_sums: r >= 0, [R]; a row of sum 0 comes out exactly 0.
        column_sums: c >= 0 of the same total, [T]; a column of sum 0 comes out exactly 0.
        tolerance: Largest error of a row sum, relative to that sum; column sums are exact to rounding.
        max_iterations: Steps to try before giving up.

    Returns:
        W, [R, T], float64, on the device of ``log_kernel``. A kernel whose rows are flat gives r c^T / total exactly.

    Raises:
        ValueError: If no such matrix exists, or it was not found in ``max_iterations``.
    """
    return project(log_kernel, row_sums, column_sums, tolerance=tolerance, max_iterations=max_iterations)[0]


def project(
    log_kernel: Tensor, row_sums: Tensor, column_sums: Tensor, *, tolerance: float = 1e-10, max_iterations: int = 1000
) -> tuple[Tensor, int]:
    """`sinkhorn_projection` (which see: arguments, method, errors) with its number of iterations.

    Returns:
        W, [R, T], float64, and how often W was computed, steps refused included; 0 for a flat kernel.

    Raises:
        ValueError: If no such matrix exists, or it was not found in ``max_iterations``.
    """
    kernel, r, c = _checked(log_kernel, row_sums, column_sums)
    support = np.ix_(r > 0, c > 0)
    weights = np.zeros_like(kernel)
    weights[support], iterations = _solve(kernel[support], r[r > 0], c[c > 0], tolerance, max_iterations)
    return torch.from_numpy(weights).to(log_kernel.device), iterations


@np.errstate(all="ignore")  # a trial may empty a row, whose log is -inf: it is refused
def _solve(kernel: Array, r: Array, c: Array, tolerance: float, max_iterations: int) -> tuple[Array, int]:
    """W for positive margins, and the number of iterations."""
    if (kernel == kernel[:, :1]).all():
        return np.outer(r, c) / r.sum(), 0
    log_r, total, identity = np.log(r), r.sum(), np.eye(len(r))
    trial = log_r - np.logaddexp.reduce(kernel + np.log(c), axis=1)  # u of half a Sinkhorn iteration: no row is empty
    s, step, dual, slope, mu = np.zeros_like(r), np.zeros_like(r), np.inf, 0.0, 1.0
    for iteration in range(1, max_iterations + 1):
        log_weights = kernel + trial[:, None]
        top = log_weights.max(0)
        weights = np.exp(log_weights - top)
        scale = weights.sum(0)
        weights *= c / scale
        s = weights.sum(1)
        e = log_r - np.log(s)
        error, new_dual = e.max() - e.min(), c @ (top + np.log(scale)) - r @ trial
        if error <= tolerance:  # bounds every |e_i|, as r and s have one total
            return weights, iteration
        better = new_dual < dual - 0.1 * abs(slope) or (s - r) @ step <= 0
        if mu == 1 or (better and error < np.inf):  # Sinkhorn's own step always lowers the dual
            u, dual, gradient = trial, new_dual, s - r
            target = e - s @ e / total  # without the shift of u that changes nothing
            pull = weights @ (weights / c).T / s[:, None]
            np.fill_diagonal(pull, 0)
            newton = np.diag(pull.sum(1)) - pull  # I - P without cancellation, as the rows of P sum to 1
            mu = max(mu / 5, 1e-12)  # never 0: Newton's system is singular along the shift
        else:
            mu = min(mu * 10, 1.0)
        step = np.linalg.solve(mu * identity + (1 - mu) * newton, target)
        trial, slope = u + step, gradient @ step
    raise ValueError(
        f"The projection missed its row sums by {np.abs(s - r).max():.1e} after {max_iterations} "
        "iterations: the kernel is too sharp, so raise the temperature or smooth the gains."
    )


def _checked(log_kernel: Tensor, row_sums: Tensor, column_sums: Tensor) -> tuple[Array, Array, Array]:
    """The inputs in float64 with exactly equal totals, or a ValueError."""
    num_rows, num_columns = log_kernel.shape if log_kernel.ndim == 2 else (-1, -1)
    if row_sums.shape != (num_rows,) or column_sums.shape != (num_columns,):
        raise ValueError(
            "log_kernel must be [R, T] with row_sums [R] and column_sums [T], got "
            f"{list(log_kernel.shape)}, {list(row_sums.shape)} and {list(column_sums.shape)}."
        )
    kernel, r, c = (x.detach().cpu().double().numpy() for x in (log_kernel, row_sums, column_sums))
    if not np.isfinite(kernel).all():
        raise ValueError(f"log_kernel must be finite, got {log_kernel.tolist()}.")
    for name, margin in (("row_sums", r), ("column_sums", c)):
        if not np.isfinite(margin).all() or (margin < 0).any() or not margin.any():
            raise ValueError(f"{name} must be finite, non-negative and not all zero, got {margin.tolist()}.")
    coarsest = max(torch.finfo(m.dtype).eps if m.is_floating_point() else 0.0 for m in (row_sums, column_sums))
    if abs(r.sum() - c.sum()) > max(1e-10, coarsest * (num_rows + num_columns)) * r.sum():
        raise ValueError(f"row_sums and column_sums must have one total, got {float(r.sum())} and {float(c.sum())}.")
    return kernel, r, c * (r.sum() / c.sum())
