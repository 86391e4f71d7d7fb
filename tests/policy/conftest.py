"""Tiny random pipelines of every family."""

import json
from pathlib import Path

import pytest
from helpers import tiny_flux, tiny_sd3


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {
        "sd3": tiny_sd3.save_pipeline(place / "sd3"),
        "sd3 without T5": tiny_sd3.save_pipeline(place / "sd3-without", with_t5=False),
        "sd3 dynamic": with_dynamic_shift(tiny_sd3.save_pipeline(place / "sd3-dynamic")),
        "flux": tiny_flux.save_pipeline(place / "flux"),
        "flux schnell": tiny_flux.save_pipeline(place / "schnell", guidance_embeds=False, dynamic=False),
    }


def with_dynamic_shift(folder: Path) -> Path:
    file = folder / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dynamic_shifting": True}))
    return folder
