"""Scoring in workers: the scores of inline scoring in order, errors that name the reward, and no process left behind."""

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.toy_rewards import (
    Brightness,
    Broken,
    Sleepy,
    SpawnedBrightness,
    SpawnedOCR,
    ThreadedBrightness,
    Unpicklable,
    Whereabouts,
)

from recast_lightning.errors import UserError
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import OCR
from recast_lightning.rollout.scoring import ScoringPool
from recast_lightning.signboard.world import draw_tensor, make_prompts, parse

ROOT = Path(__file__).parents[2]
PROMPTS = [Prompt("a sign")] * 4


def workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.name == "recast-scoring"]


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.fixture(scope="module")
def pool():
    """Two workers for all tests here that leave them alive."""
    models = {
        "threaded": ThreadedBrightness(delay=0.1),
        "inline": Brightness(),
        "spawned": SpawnedBrightness(delay=0.1, least=0.2),
        "dark": SpawnedBrightness(least=0.5),
        "where": Whereabouts(),
        "pages": SpawnedOCR(),
        "lines": SpawnedOCR(detect=False),
        "user": Broken(how="user"),
        "value": Broken(how="value"),
        "key": Broken(how="key"),
        "thread": Broken(how="key", workers="threads"),
        "here": Broken(how="value", workers="inline"),
    }
    pool = ScoringPool(models, 2)
    yield pool
    pids = workers()
    assert len(pids) == 2
    pool.close()
    assert gone(pids, 0)


def test_scores_come_in_order_bitwise_as_inline(pool):
    """The brightest batch is handed in first and is ready last."""
    images = [torch.rand(4, 3, 8, 8) * (1 - i / 6) for i in range(6)]
    names = ["spawned", "inline", "threaded"]
    inline = ScoringPool({name: pool.models[name] for name in names})
    started = [pool.submit(x, PROMPTS, names) for x in images]
    got = torch.stack([batch.result() for batch in started])
    expected = torch.stack([inline.submit(x, PROMPTS, names).result() for x in images])
    assert got.shape == (6, 4, 3)
    assert got.isnan().any()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert got[:, 0, 1].diff().lt(0).all()


@pytest.mark.parametrize("kind", ["pages", "lines"])
def test_ocr_in_a_process_reads_as_it_does_inline(pool, kind):
    prompts = make_prompts(2, 0, "test")
    images = torch.stack([draw_tensor(parse(prompt), 0) for prompt in prompts]) / 255
    images[1] = (images[1] + 0.3 * torch.rand(3, 64, 64)).clamp(0, 1)
    expected = OCR(detect=kind == "pages")(images, prompts)
    assert torch.equal(pool.submit(images, prompts, [kind]).result()[:, 0], expected)
    assert expected.max() > 0.5


def test_weights_stay_here_and_a_worker_has_one_thread(pool):
    pool.models["where"].load()
    pid, threads, travelled, _ = pool.submit(torch.rand(4, 3, 8, 8), PROMPTS, ["where"]).result()[:, 0].tolist()
    assert int(pid) in workers()
    assert (threads, travelled) == (1, 0)


def test_failures_are_counted_and_their_reason_is_said_once(pool, caplog):
    with caplog.at_level(logging.WARNING):
        batches = [pool.submit(torch.zeros(4, 3, 8, 8), PROMPTS, ["dark"]) for _ in range(4)]
        assert all(batch.result().isnan().all() for batch in batches)
    assert pool.models["dark"].failed == 16
    said = [r.getMessage() for r in caplog.records if r.name == "recast_lightning.rewards.base"]
    assert said == ["brightness could not score an image: it is darker than 0.5 (NaN; said once)"]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("user", UserError, "Reward 'user': no such thing"),
        ("value", ValueError, "Reward 'value': no such thing"),
        ("key", RuntimeError, "Reward 'key' broke with KeyError: 'no such thing'"),
        ("thread", RuntimeError, "Reward 'thread' broke with KeyError: 'no such thing'"),
        ("here", ValueError, "Reward 'here': no such thing"),
    ],
)
def test_errors_name_the_reward_and_keep_their_kind(pool, name, kind, message):
    with pytest.raises(kind) as caught:
        pool.submit(torch.rand(4, 3, 8, 8), PROMPTS, [name]).result()
    pool._pending.clear()
    assert (type(caught.value), str(caught.value)) == (kind, message)
    if pool.places[name] == "processes":
        assert "toy_rewards.py" in str(caught.value.__cause__)  # where it happened


def test_an_error_shows_while_sampling_goes_on(pool):

    def sample():
        for _ in range(5):  # one more than may wait
            pool.submit(torch.rand(4, 3, 8, 8), PROMPTS, ["key"])

    with pytest.raises(RuntimeError, match="Reward 'key' broke"):
        sample()
    pool._pending.clear()


def test_no_more_than_two_batches_a_worker_wait(pool):
    waiting = []
    for _ in range(8):
        batch = pool.submit(torch.ones(4, 3, 8, 8), PROMPTS, ["threaded"])
        waiting.append(len([b for b in pool._pending if not b.done()]))
        assert len(pool._pending) <= 4
    assert max(waiting) > 1  # it did not score one at a time
    batch.result()


def test_a_dead_worker_is_an_error_and_the_next_batch_gets_a_new_one():
    pool, others = ScoringPool({"broken": Broken(how="exit"), "where": Whereabouts()}, 1), set(workers())
    with pytest.raises(RuntimeError, match="worker process of reward 'broken' died .exit code 3"), pool.running():
        pool.submit(torch.rand(4, 3, 8, 8), PROMPTS, ["broken"]).result()
    assert set(workers()) == others
    pid = int(pool.submit(torch.rand(4, 3, 8, 8), PROMPTS, ["where"]).result()[0, 0])
    assert set(workers()) == {*others, pid}
    del pool
    gc.collect()
    assert gone([pid])  # nobody closed it


SCRIPT = """
import os, signal, sys, threading, time
import torch
from helpers.toy_rewards import Sleepy
from recast_lightning.prompts import Prompt
from recast_lightning.rollout.scoring import ScoringPool

if __name__ == "__main__":
    pool = ScoringPool({"sleepy": Sleepy()}, 1)
    with pool.running():
        batch = pool.submit(torch.rand(1, 3, 8, 8), [Prompt("a sign")], ["sleepy"])
        print(pool._workers.workers[0].process.pid, flush=True)
        while not os.path.exists(os.environ["SLEEPY"]):
            time.sleep(0.02)
        if sys.argv[1] == "interrupt":
            threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()
            batch.result()
        os.kill(os.getpid(), signal.SIGKILL)
"""


# A shell's background jobs, as in some CI, are deaf to Ctrl-C and pass that on; the script and its workers are not to be.
HEARS_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
def test_no_process_is_left_behind_in_the_middle_of_a_batch(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    runs = {}
    for way in ("interrupt", "kill"):
        command = [sys.executable, "-c", HEARS_CTRL_C, str(tmp_path / "script.py"), way]
        environment["SLEEPY"] = str(tmp_path / way)
        runs[way] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    for way, code, said in (
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("kill", -signal.SIGKILL, ""),
    ):
        out, err = runs[way].communicate(timeout=240)
        assert runs[way].returncode == code, err
        assert said in err
        assert (tmp_path / way).exists()  # the worker was at it
        assert gone([int(out)])


TWO = """
import sys
import torch
import torch.distributed as dist
from helpers.toy_rewards import SpawnedBrightness
from recast_lightning.prompts import Prompt
from recast_lightning.rollout.scoring import ScoringPool

if __name__ == "__main__":
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    images, models = torch.rand(4, 2, 3, 8, 8, generator=torch.manual_seed(0)), {"light": SpawnedBrightness()}
    pool, inline = ScoringPool(models, 1), ScoringPool(models)
    own = [pool.submit(x, [Prompt("a sign")] * 2, ["light"]) for x in images[rank::2]]
    gathered = [torch.zeros(2, 2) for _ in range(2)]
    dist.all_gather(gathered, torch.cat([batch.result() for batch in own], 1))
    expected = torch.cat([inline.submit(x, [Prompt("a sign")] * 2, ["light"]).result() for x in images[[0, 2, 1, 3]]], 1)
    assert torch.equal(torch.cat(gathered, 1), expected)
    print(pool._workers.workers[0].process.pid)
"""


def test_each_of_two_processes_has_workers_of_its_own(tmp_path):
    """Nobody closes the pools here: they end with their processes."""
    (tmp_path / "script.py").write_text(TWO)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), str(rank), str(tmp_path / "store")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    pids = [int(out) for out, _ in said]
    assert pids[0] != pids[1]
    assert gone(pids)


def test_what_cannot_work_is_refused_at_once():
    with pytest.raises(ValueError, match="'bad' runs in a process of its own, but cannot be pickled"):
        ScoringPool({"bad": Unpicklable()}, 1)
    with pytest.raises(ValueError, match="'odd' has workers 'cloud': expected one of inline, threads, processes"):
        ScoringPool({"odd": Broken(how="key", workers="cloud")}, 1)
    ScoringPool({"bad": Unpicklable(), "slow": Sleepy()})  # without workers it may be anything
