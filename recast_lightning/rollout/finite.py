"""NaN and inf: found without waiting for the device, judged alike by all processes, named.

Shape legend: B micro-batch, N images of this process, C H W latents.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recast_lightning.errors import RunWarning, UserError
from recast_lightning.rollout.processes import gather_values

OnNonfinite = Literal["stop", "skip"]


class _Note(NamedTuple):
    where: Sequence[str]
    names: list[str]
    finite: Tensor  # [names, B]


class FiniteCheck:
    """Stops a run at numbers that are not finite, or has them left out; all processes do the same.

    Args:
        action: `stop` raises a `UserError`, `skip` warns once of each kind and leaves out.
    """

    def __init__(self, action: OnNonfinite) -> None:
        if action not in ("stop", "skip"):
            raise ValueError(f"on_nonfinite must be 'stop' or 'skip', got {action!r}.")
        self.action = action
        self._notes: list[_Note] = []
        self._said: set[str] = set()

    def note(self, where: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Remember which rows of a micro-batch's tensors [B, ...] are finite; nothing waits for the device.

        Args:
            where: of each row, where in the run it stands, [B].
            tensors: name → tensor.
        """
        finite = torch.stack([finite_rows(t) for t in tensors.values()])
        self._notes.append(_Note(where, list(tensors), finite))

    def refuses_step(self, norm: Tensor, weights: Iterable[tuple[str, nn.Parameter]], *, scaled: bool = False) -> bool:
        """Whether the optimizer step over all that was noted must be left out; a collective call, one wait for the device.

        Args:
            norm: of the whole gradient, a scalar.
            weights: names and weights, of which those with a gradient count.
            scaled: a loss scaler is at work: gradients that overflow are its business, and neither stop nor warn.

        Raises:
            UserError: under `stop`, naming what is not finite, and where.
        """
        finite = torch.cat([note.finite.flatten() for note in self._notes] + [norm.isfinite().reshape(1)]).all()
        broken = _anywhere(~finite)
        if broken:
            forward, backward = zip(*gather_values((self._name_note(), _name_gradient(weights))), strict=True)
            where = [text for text in forward if text]
            if where or not scaled:
                found = next(
                    iter(where or [text for text in backward if text]), "The norm of the gradient is not finite"
                )
                self._tell(
                    "step", f"{found}: this optimizer step", "is not made", "skipped; train/skipped_steps counts"
                )
        self._notes.clear()
        return broken

    def broken_images(
        self, rollout: int, latents: Tensor, thumbnails: Tensor, texts: Sequence[str]
    ) -> tuple[Tensor, int]:
        """Which images [N] of a rollout (counted from 1) must be left out, and how many over all processes.

        Args:
            rollout: its number.
            latents: [N, C, H, W].
            thumbnails: of the decoded images, [N, ...].
            texts: their prompts, [N].

        Raises:
            UserError: under `stop`, naming the first prompt.
        """
        broken = [~finite_rows(t) for t in (latents, thumbnails)]
        rows = broken[0] | broken[1]
        text = ""
        if rows.any():
            i = int(rows.nonzero()[0])
            what = "latents" if broken[0][i] else "decoded image"
            text = f"Rollout {rollout}, prompt {texts[i]!r}: NaN or inf in the {what} of a sample"
        counts, found = zip(*gather_values((int(rows.sum()), text)), strict=True)
        if any(counts):
            first = next(text for text in found if text)
            self._tell(
                "image", f"{first}: the image", "cannot be trained on", "left out; rollout/nonfinite_images counts"
            )
        return rows, sum(counts)

    def _name_note(self) -> str:
        for note in self._notes:
            bad = (~note.finite).nonzero().tolist()
            if bad:
                name, row = bad[0]
                return f"{note.where[row]}: NaN or inf in the {note.names[name]}"
        return ""

    def _tell(self, kind: str, what: str, stop: str, skip: str) -> None:
        if self.action == "stop":
            raise UserError(
                f"{what} {stop}, and the weights are those before it. Resume from a checkpoint with a smaller "
                "learning_rate or a safer precision; on_nonfinite: skip would go on without it."
            )
        if kind not in self._said and not (dist.is_initialized() and dist.get_rank()):
            warnings.warn(f"{what} is {skip} (said once).", RunWarning, stacklevel=2)
        self._said.add(kind)


def total_norm(weights: Iterable[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient, a scalar, the same on all processes; sharded gradients are put together."""
    norm: Any = nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _name_gradient(weights: Iterable[tuple[str, nn.Parameter]]) -> str:
    bad = [name for name, w in weights if w.grad is not None and not _local(w.grad).isfinite().all()]
    more = f" and of {len(bad) - 1} other weights" if len(bad) > 1 else ""
    return f"NaN or inf in the gradient of {bad[0]}{more}" if bad else ""


def finite_rows(tensor: Tensor) -> Tensor:
    """Which rows of a tensor [B, ...] hold finite numbers only, [B]."""
    return tensor.detach().isfinite().reshape(len(tensor), -1).all(1)


def _local(tensor: Any) -> Tensor:
    """The part of a sharded tensor that is here."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _anywhere(flag: Tensor) -> bool:
    """Whether it is true on any process."""
    count = flag.float()
    if dist.is_initialized():
        dist.all_reduce(count)
    return count.item() > 0
