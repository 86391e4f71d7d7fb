"""Where a profile's strong images come from."""

from recast_lightning.proposals.base import Proposals
from recast_lightning.proposals.folder import FolderProposals
from recast_lightning.proposals.policy import PolicyProposals
from recast_lightning.proposals.renderer import RendererProposals

__all__ = ["FolderProposals", "PolicyProposals", "Proposals", "RendererProposals"]
