"""How a rollout is drawn, served to training and scored: sizes, places, limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recast_lightning.errors import UserError
from recast_lightning.ranges import check_ranges


@dataclass(frozen=True)
class RolloutOptions:
    """How a rollout is drawn and served.

    Args:
        batch_size: images sampled at once.
        micro_batch_size: images in one training step; must divide the images of a rollout on each process.
        timestep_fraction: share of the levels, rounded down, that each image trains at; drawn for each image.
    """

    batch_size: int = 48
    micro_batch_size: int = 24
    timestep_fraction: float = 1.0

    def __post_init__(self) -> None:
        ranges = {"batch_size": "[1, inf)", "micro_batch_size": "[1, inf)", "timestep_fraction": "(0, 1]"}
        check_ranges(vars(self), ranges, "rollout")


@dataclass(frozen=True)
class ScoringOptions:
    """Where and how rewards score.

    Args:
        num_workers: processes, and as many threads, in which slow rewards score while sampling goes on; 0 for none.
        device: where rewards score, e.g. `cuda:1`, or a list, one a process of a machine; default the policy's device.
        offload: keep the rewards' weights on the CPU except while they score.
        failure_share: a rollout in which more than this share of a reward's scores failed stops the run.
    """

    num_workers: int = 0
    device: str | list[str] | None = None
    offload: bool = False
    failure_share: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(vars(self), {"num_workers": "[0, inf)", "failure_share": "[0, 1]"}, "scoring")
        for device in self.device if isinstance(self.device, list) else [self.device]:
            _as_device(device)

    def device_of(self, local_rank: int, num_processes: int) -> torch.device | None:
        """The device on which a process scores; None where the images are.

        Args:
            local_rank: number of the process on its machine.
            num_processes: processes on a machine.

        Raises:
            UserError: if the device is not there, or there are not as many as processes on a machine.
        """
        if isinstance(self.device, list) and len(self.device) != num_processes:
            raise UserError(
                f"scoring.device lists {len(self.device)} devices for {num_processes} processes on each machine: give "
                "one for each process, or one value for all."
            )
        device = _as_device(self.device[local_rank] if isinstance(self.device, list) else self.device)
        count = torch.cuda.device_count()
        if device is not None and device.type == "cuda" and (device.index or 0) >= count:
            raise UserError(f"scoring.device {str(device)!r} is not there: this machine has {count} CUDA devices.")
        return device


def _as_device(name: str | None) -> torch.device | None:
    try:
        return None if name is None else torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"scoring.device is {name!r}: expected cpu, cuda or, e.g., cuda:1.") from error
