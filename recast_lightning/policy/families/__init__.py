"""Kinds of flow-matching models that a policy can be of: one file each, behind the same seam (`base.py`)."""

from recast_lightning.errors import UserError
from recast_lightning.policy.families.base import Family
from recast_lightning.policy.families.flux import Flux
from recast_lightning.policy.families.sd3 import SD3
from recast_lightning.policy.pipeline_folder import PipelineFolder

FAMILIES: tuple[type[Family], ...] = (SD3, Flux)


def family_of(pipeline: PipelineFolder) -> type[Family]:
    """The family of a saved pipeline, by its class in `model_index.json`.

    Raises:
        UserError: naming the class, if no family serves it.
    """
    name = pipeline.pipeline_class
    for family in FAMILIES:
        if name in family.pipelines:
            return family
    served = " or ".join(served for family in FAMILIES for served in family.pipelines)
    raise UserError(f"Policy path {pipeline.path!r} is a {name}, but a policy must be a {served}.")


__all__ = ["FAMILIES", "SD3", "Family", "Flux", "family_of"]
