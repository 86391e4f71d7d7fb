"""What HTTPReward checks before it asks anyone."""

import math
import socket

import pytest
import torch

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.remote.http_reward import HTTPReward

IMAGE = torch.zeros(1, 3, 8, 8)


def test_facts_are_the_instance_s_own():
    reward = HTTPReward("http://a", name="mine", needs=("ocr",), version="2", positive_map="sigmoid")
    assert (reward.name, reward.needs, reward.version) == ("mine", ("ocr",), "2")
    assert (HTTPReward("http://a").name, HTTPReward("http://a").needs) == ("http", ())
    reward.check_positive()
    HTTPReward("http://a", score_range=(0.0, 1.0)).check_positive()
    with pytest.raises(ValueError, match="http can score below 0"):
        HTTPReward("http://a").check_positive()
    with pytest.raises(ValueError, match='mine needs "ocr"'):
        reward(IMAGE, [Prompt("p")])


def test_metadata_that_cannot_travel():
    for value in (torch.zeros(1), {1, 2}, math.nan):
        with pytest.raises(ValueError, match="metadata of the prompt 'p' is not JSON"):
            HTTPReward("http://127.0.0.1:1")(IMAGE, [Prompt("p", {"x": value})])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0.0}, "timeout must be above 0, got 0.0"),
        ({"timeout": math.nan}, "timeout must be above 0, got nan"),
        ({"retries": -1}, "retries must be at least 0, got -1"),
        ({"backoff": -1.0}, "backoff must be at least 0, got -1.0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"name": ""}, "name is empty"),
        ({"score_range": (1.0, 1.0)}, r"score_range is \[1.0, 1.0\]: expected"),
        ({"positive_map": "abs"}, 'positive_map is "abs"'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        HTTPReward("http://127.0.0.1:1", **options)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000/score",
        "ftp://a/score",
        "file:///etc/passwd",
        "http://",
        "http:///score",
        "http://a:99999/",
        "http://a:x/",
        "http://a/b c",
        "http://a/\nb",
        "http://a/#b",
        "http://[::1/",
        "http://ä.de/",
        "http://a..b/",
        f"http://{'a' * 64}/",
    ],
)
def test_addresses_are_checked_without_a_network(url, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", None)
    with pytest.raises(ValueError, match=r"url of http is .*: expected http://host"):
        HTTPReward(url).validate()


def test_more_about_addresses(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", None)
    for url in ("http://127.0.0.1:8000/score", "https://a.example/x?y=1", "http://[::1]:80"):
        HTTPReward(url).validate()
    with pytest.raises(ValueError, match="holds a user name or password") as stop:
        HTTPReward("http://me:secret@a/").validate()
    assert "secret" not in str(stop.value)
    for path in ("health", "//evil.example/health"):
        with pytest.raises(ValueError, match=r"health_path of http is"):
            HTTPReward("http://a/", health_path=path).validate()
