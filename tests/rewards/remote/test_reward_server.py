import base64
import importlib.util
import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers.pictures import sign, text_picture
from helpers.web import serving
from PIL import Image

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import OCR, GenEval, RewardModel
from recast_lightning.rewards.remote.http_reward import HTTPReward

ROOT = Path(__file__).parents[3]
FAST = {"backoff": 0.01, "timeout": 5.0}


def load_server_module():
    spec = importlib.util.spec_from_file_location("reward_server", ROOT / "examples/reward_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reward_server = load_server_module()


def gray(*levels, side=8):
    """Plain uint8 images [B, 3, side, side]."""
    return torch.tensor(levels, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, side, side)


class Moody(RewardModel):
    """Scores the mean; fails, in one way or another, at certain levels of gray."""

    name = "moody"
    version = "v7"
    score_range = (0.0, 255.0)

    def score(self, images, prompts):
        if any(prompt.text == "crash" for prompt in prompts):
            raise ZeroDivisionError("by zero")
        scores = images.mean((1, 2, 3)) * 255
        for level in (13, 14):
            if (scores.round() == level).any():
                self._report(f"level {level} is bad luck")
        return torch.where((scores.round() == 13) | (scores.round() == 14), torch.nan, scores)


@pytest.fixture
def moody():
    with serving(reward_server.RewardServer(Moody(), "127.0.0.1", 0, max_request=200_000)) as server:
        yield HTTPReward(f"http://127.0.0.1:{server.server_port}/score", name="remote", **FAST)


def test_the_server_gives_the_reward_s_own_scores():
    words = ("KAT", "NOT", "VEN", "HELLO", "KAT")
    images = torch.stack([text_picture(word) for word in words])
    prompts = [Prompt("p", {"ocr": target}) for target in ("KAT", "NIT", "LU", "Hello", "KATE")]
    ocr = OCR(detect=False)
    local = ocr(images, prompts)
    before = set(threading.enumerate())
    with serving(reward_server.RewardServer(OCR(detect=False), "127.0.0.1", 0)) as server:
        remote = HTTPReward(f"http://127.0.0.1:{server.server_port}/score", batch_size=2, timeout=60.0)
        assert torch.equal(remote(images, prompts), local)
        assert remote.check() == {"name": "ocr", "version": ocr.version}
    assert len(set(local.tolist())) > 2
    assert set(threading.enumerate()) == before


def test_failures_of_the_reward_reach_the_client(moody, caplog):
    assert moody.check() == {"name": "moody", "version": "v7"}
    for _ in range(2):  # each request has its own reasons, though the reward itself logs them once
        assert moody(gray(12, 13, 15), [Prompt("p")] * 3).isnan().tolist() == [False, True, False]
    assert "remote could not score an image: level 13 is bad luck" in caplog.text
    assert moody(gray(14), [Prompt("p")]).isnan().all()
    assert "remote could not score an image: level 14 is bad luck" in caplog.text
    assert moody(gray(12), [Prompt("crash")]).isnan().all()
    assert "500 Internal Server Error: The reward failed with ZeroDivisionError: by zero (tried 4x)" in caplog.text


def test_the_server_bounds_requests(moody, caplog):
    noise = torch.randint(256, (4, 3, 160, 160), dtype=torch.uint8)
    assert moody(noise, [Prompt("p")] * 4).isnan().all()
    assert "413" in caplog.text
    assert "The request is longer than 200000 bytes: send fewer images." in caplog.text
    moody.batch_size = 1
    assert moody(noise, [Prompt("p")] * 4).isfinite().all()


def picture(size=(4, 4), kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], "The request is malformed: TypeError"),
        ({"images": []}, "The request is malformed: KeyError: 'prompts'"),
        ({"images": ["%"], "prompts": [{"text": "p"}]}, "a picture is not a PNG file in base64"),
        ({"images": [picture(kind="BMP")], "prompts": [{"text": "p"}]}, "a picture is not a PNG file in base64"),
        ({"images": [picture()[:40]], "prompts": [{"text": "p"}]}, "a picture is not a PNG file in base64"),
        ({"images": [picture((5000, 1))], "prompts": [{"text": "p"}]}, "a picture is 5000 x 1: at most 4096"),
        ({"images": [picture()], "prompts": [{"text": 1}]}, "a prompt needs a text"),
        ({"images": [picture()], "prompts": [{"text": "p", "metadata": [1]}]}, "a prompt needs a text"),
        ({"images": [picture(), picture((4, 5))], "prompts": [{"text": "p"}] * 2}, "must share one size"),
        ({"images": [picture()], "prompts": []}, "moody got 1 images for 0 prompts"),
    ],
)
def test_the_server_refuses_malformed_requests(moody, payload, message):
    with pytest.raises(Exception, match="the server answered 400 Bad Request: ") as stop:
        moody.client.ask(moody.url, payload)
    assert message in str(stop.value)


def test_the_server_takes_requests_without_metadata_and_without_images(moody):
    reply = moody.client.ask(moody.url, {"images": [picture()], "prompts": [{"text": "p"}]})
    assert reply == {"scores": [0.0], "reasons": [None], "version": "v7"}
    assert moody.client.ask(moody.url, {"images": [], "prompts": []})["scores"] == []
    for address in (moody.url, moody.url.replace("score", "none")):
        with pytest.raises(Exception, match="404 Not Found: GET /health or POST /score"):
            moody.client.ask(address)


def test_nested_arguments_are_built():
    detector = {"class_path": "recast_lightning.rewards.SignboardDetector", "init_args": {"threshold": 0.6}}
    reward = reward_server.build("recast_lightning.rewards.GenEval", {"detector": detector, "mode": "strict"})
    assert isinstance(reward, GenEval)
    assert (reward.threshold, reward.mode) == (0.6, "strict")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recast_lightning.rewards.None"], "There is no class recast_lightning.rewards.None"),
        (["OCR"], "There is no class OCR"),
        (["recast_lightning.rewards.OCR", "--init", '{"x": 1}'], "does not take these arguments"),
        (["recast_lightning.rewards.OCR", "--init", "[]"], "expected a JSON object"),
        (["recast_lightning.rewards.OCR", "--init", '{"min_side": 3}'], "min_side must be at least 32, got 3"),
        (["recast_lightning.rewards.SignboardDetector"], "is no RewardModel"),
        (["recast_lightning.rewards.OCR", "--port", "99999"], "port must be 0-65535"),
    ],
)
def test_the_server_s_command_line_refuses_in_one_sentence(arguments, message, capsys):
    assert reward_server.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_server_as_a_command():
    init = {"detector": {"class_path": "recast_lightning.rewards.SignboardDetector"}}
    command = [sys.executable, ROOT / "examples/reward_server.py", "recast_lightning.rewards.GenEval", "--port", "0"]
    command += ["--init", json.dumps(init)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("geneval listens on http://127.0.0.1:")
            reward = HTTPReward(line.split()[-1], needs=("include",), score_range=(0.0, 1.0))
            prompts = [Prompt("p", {"include": [{"class": name, "count": 1}]}) for name in ("star", "circle")]
            assert reward(sign([("star", "blue", 20, 15, 18)]).expand(2, -1, -1, -1), prompts).tolist() == [1, 0]
        finally:
            process.terminate()
        assert process.stdout.readline() == "stopping\n"
        assert process.wait(60) == 0
