import base64
import copy
import io
import logging
import pickle
import socket
import threading
import time

import numpy as np
import pytest
import torch
from helpers.web import HANG_UP, Answer, Script, serving
from PIL import Image

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.remote.http_reward import HTTPReward

FAST = {"backoff": 0.01, "timeout": 5.0}


def gray(*levels, side=8):
    """Plain uint8 images [B, 3, side, side]."""
    return torch.tensor(levels, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, side, side)


def levels_of(request):
    """What a server that grades by the level of gray answers; later batches are faster, to tempt the order."""
    files = [Image.open(io.BytesIO(base64.b64decode(text))) for text in request["images"]]
    scores = [int(np.array(file)[0, 0, 0]) for file in files]
    return Answer({"scores": scores, "version": "1"}, delay=0.1 * (scores[0] < 40))


def ask(*script, n=2, otherwise=None, **options):
    """Score n images against a script; returns scores, the reward and the requests."""
    before = set(threading.enumerate())
    with serving(Script(*script, otherwise=otherwise)) as server:
        reward = HTTPReward(f"{server.url}/score", **{**FAST, **options})
        scores = reward(gray(*range(10, 10 + n)), [Prompt(f"p{i}") for i in range(n)])
    assert set(threading.enumerate()) == before
    return scores, reward, server.requests


GOOD = Answer({"scores": [1, 2.5]})


def test_what_is_sent_and_what_comes_back():
    image = torch.randint(256, (2, 3, 5, 7), dtype=torch.uint8)
    prompts = [Prompt("ein Schild “Käse”", {"ocr": "Käse", "include": [{"class": "star", "count": 2}]}), Prompt("b")]
    with serving(Script(GOOD)) as server:
        reward = HTTPReward(f"{server.url}/score?mode=a", **FAST)
        scores = reward(image, prompts)
    assert scores.tolist() == [1, 2.5]
    assert reward.failed == 0
    ((method, path, headers, body),) = server.requests
    assert (method, path, headers["content-type"]) == ("POST", "/score?mode=a", "application/json")
    assert body["prompts"] == [{"text": prompt.text, "metadata": prompt.metadata} for prompt in prompts]
    for sent, pixels in zip(body["images"], image, strict=True):
        file = Image.open(io.BytesIO(base64.b64decode(sent)))
        assert file.format == "PNG"
        assert np.array_equal(np.array(file), pixels.permute(1, 2, 0).numpy())


def test_floats_are_rounded_to_bytes():
    with serving(Script(otherwise=levels_of)) as server:
        reward = HTTPReward(server.url, **FAST)
        levels = torch.tensor([100.4, 100.6, 255.0])[:, None, None, None].expand(-1, 3, 4, 4) / 255
        assert reward(levels, [Prompt("p")] * 3).tolist() == [100, 101, 255]


def test_order_survives_concurrency():
    before = set(threading.enumerate())
    with serving(Script(otherwise=levels_of)) as server:
        reward = HTTPReward(server.url, batch_size=3, concurrency=5, **FAST)
        scores = reward(gray(*range(20, 63)), [Prompt("p")] * 43)
    assert scores.tolist() == list(range(20, 63))
    assert len(server.requests) == 15
    assert max(len(body["images"]) for *_, body in server.requests) == 3
    assert set(threading.enumerate()) == before


def test_concurrency_is_real_and_bounded():
    now, most, lock = [0], [0], threading.Lock()

    def answer(request):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return Answer({"scores": [1]})

    ask(n=9, otherwise=answer, batch_size=1, concurrency=3)
    assert most[0] == 3


@pytest.mark.parametrize(
    "passing",
    [
        Answer({"error": "busy"}, 500),
        Answer({}, 503),
        Answer({}, 429),
        HANG_UP,
        Answer(b'{"scores": [7, 7]}', length=90),
        Answer(GOOD.content, delay=0.8),
    ],
    ids=["500", "503", "429", "hang up", "cut off", "slow"],
)
def test_what_may_pass_is_tried_again(passing):
    scores, reward, requests = ask(passing, GOOD, timeout=0.4)
    assert scores.tolist() == [1, 2.5]
    assert reward.failed == 0
    assert len(requests) == 2


def test_tries_are_counted_and_wait_longer_each_time(caplog):
    start = time.monotonic()
    scores, reward, requests = ask(*[Answer({"error": "no\x1b memory"}, 500)] * 4, retries=3, backoff=0.05)
    assert 0.35 <= time.monotonic() - start < 3
    assert len(requests) == 4
    assert scores.isnan().all()
    assert reward.failed == 2
    assert "the server answered 500 Internal Server Error: no memory (tried 4x)" in caplog.text


def test_the_server_may_ask_for_a_longer_wait():
    start = time.monotonic()
    scores, _, _ = ask(Answer({}, 429, {"Retry-After": "1"}), GOOD)
    assert time.monotonic() - start > 1
    assert scores.tolist() == [1, 2.5]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer({"error": "no such page"}, 404), "the server answered 404 Not Found: no such page"),
        (Answer({"error": {"message": "bad\nkey"}}, 401), "the server answered 401 Unauthorized: bad key"),
        (Answer(b"<html>", 302, {"Location": "http://127.0.0.1/score"}), "the server answered 302 Found: <html>"),
        (Answer(b"oops"), "the reply is not JSON"),
        (Answer(b"[" * 100000), "the reply is not JSON"),
        (Answer(b"\xff\xfe"), "the reply is not JSON"),
        (Answer([1, 2]), 'the reply has no list "scores"'),
        (Answer({"scores": 1}), 'the reply has no list "scores"'),
        (
            Answer({"scores": [1, 2], "error": "out of memory"}),
            "the server answered 200 OK and an error: out of memory",
        ),
        (
            Answer({"scores": [1, 2], "error": {"code": 7}}),
            '200 OK and an error: {"scores": [1, 2], "error": {"code": 7}}',
        ),
        (Answer({"scores": [1]}), "the reply has 1 scores for 2 images"),
        (Answer({"scores": [1, 2, 3]}), "the reply has 3 scores for 2 images"),
        (Answer(b" " * (2 << 20)), "the reply is longer than 1048576 bytes"),
    ],
)
def test_what_will_not_pass_is_tried_once(answer, message, caplog):
    scores, reward, requests = ask(answer)
    assert scores.isnan().all()
    assert reward.failed == 2
    assert len(requests) == 1
    assert message in caplog.text


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("null", "the server gave no reason"),
        ("NaN", "NaN, an infinity, or a number too large"),
        ("-Infinity", "NaN, an infinity, or a number too large"),
        ("1e39", "NaN, an infinity, or a number too large"),
        ("1" + "0" * 400, "NaN, an infinity, or a number too large"),
        ('"1"', "something else than a number"),
        ("true", "something else than a number"),
        ("[1]", "something else than a number"),
        ("5.001", r"outside the score_range [-1, 5]"),
    ],
)
def test_one_bad_score_does_not_cost_the_others(score, message, caplog):
    scores, reward, requests = ask(Answer(f'{{"scores": [0.5, {score}, -1]}}'.encode()), n=3, score_range=(-1.0, 5.0))
    assert scores.isnan().tolist() == [False, True, False]
    assert scores[[0, 2]].tolist() == [0.5, -1]
    assert (reward.failed, len(requests)) == (1, 1)
    assert message in caplog.text


def test_rounding_at_the_edge_of_the_range_is_forgiven():
    scores, _, _ = ask(Answer({"scores": [1.0000002, -2e-7]}), score_range=(0.0, 1.0))
    assert scores.tolist() == [1, 0]


def test_reasons_are_logged_once_each_and_not_without_end(caplog):
    reasons = ["the page is blank", None, *(f"reason {i}" for i in range(60))]
    scores, reward, _ = ask(Answer({"scores": [None, 1, *[None] * 60], "reasons": reasons}), n=62, batch_size=62)
    assert scores.isnan().sum() == reward.failed == 61
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 21
    assert "http could not score an image: the page is blank (NaN; said once)" in lines
    assert "more reasons" in lines[-1]


def test_a_reply_that_trickles_is_cut(caplog):
    start = time.monotonic()
    scores, _, _ = ask(Answer(GOOD.content, drip=0.05), timeout=0.3, retries=0)
    assert time.monotonic() - start < 2
    assert scores.isnan().all()
    assert "no reply within 0.3 s (tried 1x)" in caplog.text


def test_a_dead_server_costs_scores_and_nothing_else(caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    reward = HTTPReward(url, name="aesthetics", retries=2, **FAST)
    assert reward(gray(1, 2), [Prompt("p")] * 2).isnan().all()
    assert "aesthetics could not score an image: the connection failed with ConnectionRefusedError" in caplog.text
    assert "(tried 3x)" in caplog.text
    with pytest.raises(ValueError, match=r"aesthetics has no server at http://\S+/health: the connection failed"):
        reward.check()


def test_a_failed_request_costs_its_own_images_only():
    def answer(request):
        return Answer({}, 404) if len(request["images"]) == 3 else levels_of(request)

    scores, _, _ = ask(n=4, otherwise=answer, batch_size=3)
    assert scores.isnan().tolist() == [True, True, True, False]


def test_an_interrupt_stops_repetition():
    before = set(threading.enumerate())

    class Interrupted(HTTPReward):
        def _ask(self, pictures, prompts, stop):
            if pictures[0][0, 0, 0] == 10:
                time.sleep(0.2)
                raise KeyboardInterrupt
            return super()._ask(pictures, prompts, stop)

    start = time.monotonic()
    with serving(Script(otherwise=lambda request: Answer({}, 500))) as server:
        reward = Interrupted(server.url, backoff=30.0, batch_size=1, concurrency=2)
        with pytest.raises(KeyboardInterrupt):
            reward(gray(10, 11, 12, 13), [Prompt("p")] * 4)
    assert time.monotonic() - start < 5
    assert len(server.requests) < 3
    assert set(threading.enumerate()) == before


def test_versions(caplog):
    first, second = Answer({"scores": [1, 2], "version": "a"}), Answer({"scores": [3, 4], "version": "b"})
    scores, _, _ = ask(second, version="a")
    assert scores.isnan().all()
    assert "the server has version 'b', not 'a'" in caplog.text
    caplog.clear()
    scores, _, _ = ask(first, second, first, n=6, batch_size=2, concurrency=1)
    assert scores.tolist() == [1, 2, 3, 4, 1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "http: the server's version was 'a' and is now 'b', so scores may not be comparable (said once)"
    ]


def test_check():
    good = Answer({"name": "x", "version": 3, "ready": True})
    with serving(Script(good, good, good, Answer({"ready": False}), Answer([]))) as server:
        reward = HTTPReward(f"{server.url}/v1/score", **FAST)
        assert reward.check() == {"name": "x", "version": "3"}
        HTTPReward(f"{server.url}/v1/score", health_path="/live?x=1", version="3", **FAST).check()
        with pytest.raises(ValueError, match=r"has version '3', not '4'"):
            HTTPReward(server.url, version="4", **FAST).check()
        for _ in range(2):
            with pytest.raises(ValueError, match='does not say "ready": true'):
                reward.check()
    assert [request[:2] for request in server.requests[:2]] == [("GET", "/health"), ("GET", "/live?x=1")]


def test_copies_travel():
    with serving(Script(otherwise=levels_of)) as server:
        reward = HTTPReward(server.url, name="mine", score_range=(0.0, 255.0), **FAST)
        reward(gray(9), [Prompt("p")])
        for twin in (copy.deepcopy(reward), pickle.loads(pickle.dumps(reward))):
            assert twin(gray(8, 9), [Prompt("p")] * 2).tolist() == [8, 9]
            assert (twin.name, twin.score_range) == ("mine", (0.0, 255.0))


def test_nothing_is_logged_when_all_is_well(caplog):
    with caplog.at_level(logging.DEBUG):
        ask(GOOD)
    assert [record.name for record in caplog.records if record.name.startswith("recast_lightning")] == []
