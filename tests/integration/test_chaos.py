"""Thirty power cuts at random moments: the run ends as if there had been none."""

import random
import time

import pytest
from helpers.commands import finish, kill, start
from helpers.same_run import assert_same_run
from integration.tiny import config, fit, newest_run

KILLS = 30
LONG = {
    "data__group_size": 4, "model__rollout__micro_batch_size": 2, "trainer__accumulate_grad_batches": 2,
    "model__stages__0__epochs": 10, "model__stages__1__epochs": 10,
}  # fmt: skip


@pytest.mark.slow
def test_thirty_kills_at_random_moments_change_nothing(tmp_path):
    """Each life sees a few writings of last.ckpt at most, then ends at a random moment; some end before the first."""
    straight = fit(tmp_path / "straight", **LONG)
    file, chance = config(tmp_path / "chaos", **LONG), random.Random(0)
    for _ in range(KILLS):
        process = start("fit", "--config", str(file), "--ckpt_path", "last")
        wait_for_writings(tmp_path / "chaos", chance.choice([0, 1, 1, 2, 2, 3]), process)
        time.sleep(0.2 * chance.random())
        assert process.poll() is None, "the run ended before all kills"
        kill(process)
        finish(process)
    code, out, errors = finish(start("fit", "--config", str(file), "--ckpt_path", "last"), timeout=900)
    assert code == 0, errors[-3000:]
    assert "Report: " in out
    assert_same_run(straight, newest_run(tmp_path / "chaos"))


def wait_for_writings(folder, count, process):
    """Until a checkpoint of this configuration's runs was written so many times."""
    seen = written(folder)
    while count and process.poll() is None:
        if written(folder) != seen:
            seen, count = written(folder), count - 1
        time.sleep(0.01)


def written(folder):
    return [path.stat().st_mtime_ns for path in sorted(folder.glob("run/version_*/checkpoints/last.ckpt"))]
