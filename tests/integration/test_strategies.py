"""The same numbers on one process, under DDP and under FSDP2, through the command line (gloo, CPU)."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from integration.tiny import ROOT, adapters, config, newest_run
from PIL import Image

from recast_lightning.credit import CreditMatrix, Profile

STAGES = [{"name": "only", "rollouts": 2, "budgets": {"clip": 1, "hpsv2": 2}}]
FSDP = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False},
}
STRATEGIES = {"single": (1, "auto"), "ddp2": (2, "ddp"), "ddp4": (4, "ddp"), "fsdp2": (2, FSDP)}


def configured(folder, name, **changes):
    """Two rollouts of 4 prompts × 4 pictures, four optimizer steps, a profile, evaluations of 7 prompts."""
    processes, strategy = STRATEGIES[name]
    file = config(
        folder,
        **{
            "model__stages": STAGES,
            "model__micro_batch_size": 8 // processes,
            "data__prompts_per_rollout": 4,
            "data__validation": "signboard:test:7",
            "trainer__devices": processes,
            "trainer__strategy": strategy,
            **changes,
        },
    )
    return file


def recast(*arguments):
    """Run the command line in processes of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "recast_lightning", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
