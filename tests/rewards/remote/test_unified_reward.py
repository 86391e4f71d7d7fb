import base64
import io
import logging
import math
import pickle
import re
import threading

import numpy as np
import pytest
import torch
from helpers.web import HANG_UP, Answer, Script, serving
from PIL import Image

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.remote.unified_reward import UnifiedReward, parse_scores

FAST = {"backoff": 0.01, "timeout": 5.0}
KEY = "sk-very-secret-0123"


def chat(text, finish="stop", **message):
    return Answer({"choices": [{"message": {"content": text, **message}, "finish_reason": finish}]})


def three(a, b, c):
    return f"Alignment Score (1-5): {a}\nCoherence Score (1-5): {b}\nStyle Score (1-5): {c}"


def ask(*script, n=1, otherwise=None, **options):
    """Grade n images against a script; returns scores, the reward and the requests."""
    before = set(threading.enumerate())
    with serving(Script(*script, otherwise=otherwise)) as server:
        reward = UnifiedReward(f"{server.url}/v1/", "judge-7b", **{**FAST, **options})
        images = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 6, 9)
        scores = reward(images, [Prompt(f"a {{sign}} number {i}") for i in range(n)])
    assert set(threading.enumerate()) == before
    return scores, reward, server.requests


def test_what_is_sent_and_what_comes_back():
    scores, reward, requests = ask(chat(three(2.69, 2.37, 2.8)))
    assert scores.item() == pytest.approx((2.69 + 2.37 + 2.8) / 3)
    assert reward.failed == 0
    ((method, path, headers, body),) = requests
    assert (method, path) == ("POST", "/v1/chat/completions")
    assert "authorization" not in headers
    assert set(body) == {"model", "messages", "temperature", "max_tokens"}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-7b", 0, 1024)
    (message,) = body["messages"]
    assert message["role"] == "user"
    picture, text = message["content"]
    kind, _, data = picture["image_url"]["url"].partition(",")
    assert (picture["type"], kind) == ("image_url", "data:image/png;base64")
    assert np.array_equal(np.array(Image.open(io.BytesIO(base64.b64decode(data)))), np.zeros((6, 9, 3)))
    assert text["type"] == "text"
    assert "Text: a {sign} number 0\n" in text["text"]
    assert text["text"].endswith(three("X", "Y", "Z"))


def test_the_older_format():
    scores, _, requests = ask(chat("It fits.\nFinal Score: 4.5"), reply="final_score", enable_thinking=False)
    assert scores.item() == 4.5
    body = requests[0][3]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert re.search(r"^Final Score: X$", body["messages"][0]["content"][1]["text"], re.M)


def test_order_survives_concurrency():
    def answer(body):
        number = int(re.search(r"number (\d+)", body["messages"][0]["content"][1]["text"])[1])
        return Answer(chat(f"Final Score: {1 + number / 10}").content, delay=0.1 * (number < 4))

    scores, _, requests = ask(n=24, otherwise=answer, reply="final_score", concurrency=6)
    assert scores.tolist() == pytest.approx([1 + i / 10 for i in range(24)])
    assert len(requests) == 24


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Final Score: 3", 3),
        ("final score:4.25.", 4.25),
        ("**Final Score:** 2", 2),
        ("Final Score (1-5):\n 5", 5),
        ("Final Score: 4/5", 4),
        ("Final Score: 4\n- 2 stars are missing", 4),
        ("Final Score: 2\nFinal Score: 5", 2),
        ("Final Score: 1-5. I say: Final Score: 4", 4),
        ("<think>Final Score: 1?</think>Final Score: 4", 4),
        ("Final Score: 4.5 out of 5", 4.5),
        ("Final Score: 4.5.", 4.5),
        ("<THINK>Final Score: 1?</THINK> Final Score: 4", 4),
        ("<think>Final Score: 1", None),
        ("<think>a</think>Final Score: 3. <think>Final Score: 1", None),
        ("Final Score: 1e1", None),
        ("Final Score: 4%", None),
        ("Final Score: 4/10", None),
        ("Final Score: 4 out of 10", None),
        ("Final Score: 4 / 50", None),
        ("Final Score: 10", None),
        ("Final Score: 10.5", None),
        ("Final Score: 0", None),
        ("Final Score: 0.9", None),
        ("Final Score: 5.1", None),
        ("Final Score: -3", None),
        ("Final Score: 1-5", None),
        ("Final Score: 4,5", None),
        ("Final Score: X", None),
        ("Score: 4", None),
        ("4", None),
        ("", None),
        ("<think>Final Score: 1</think>", None),
    ],
)
def test_final_score(text, score):
    assert parse_scores(text, "final_score") == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (three(1, 2, 4.5), 2.5),
        (three("**3**", "3.0", 3).lower(), 3),
        (three(1, 2, 3).replace(" (1-5)", ""), 2),
        ("\n".join(reversed(three(1, 2, 4.5).splitlines())), 2.5),
        (three(1, 2, 6), None),
        (three(0.5, 2, 3), None),
        (three(1, "high", 3), None),
        ("\n".join(three(1, 2, 3).splitlines()[:2]), None),
        ("Final Score: 3", None),
    ],
)
def test_three_scores(text, score):
    assert parse_scores(text, "three_scores") == score


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (chat("I cannot judge people."), "the reply lacks a grade of 1 to 5 (Alignment Score, Coherence Score, Style"),
        (chat(None, refusal="No."), "the model refused"),
        (chat("", finish="content_filter"), "the model refused"),
        (chat(None), "the reply holds no text"),
        (chat([{"type": "text", "text": "x"}]), "the reply holds no text"),
        (chat(three(3, 4, 4), finish="length"), "the reply broke off at 1024 tokens"),  # perhaps of 4.5
        (
            Answer({**chat(three(3, 3, 3)).content, "error": {"message": "worker died"}}),
            "200 OK and an error: worker died",
        ),
        (
            Answer({"choices": [{"message": {"content": three(3, 3, 3)}, "error": {"code": 502}}]}),
            "the server gave an error: {'code': 502}",
        ),
        (Answer({"choices": []}), "the reply is no chat completion"),
        (Answer({"choices": [{"message": None}]}), "the reply is no chat completion"),
        (Answer([1]), "the reply is no chat completion"),
        (Answer(b"oops"), "the reply is not JSON"),
        (Answer({"error": {"message": "no such model"}}, 404), "the server answered 404 Not Found: no such model"),
    ],
)
def test_failures_are_nan_never_a_grade(answer, message, caplog):
    scores, reward, requests = ask(answer, chat(three(3, 3, 3)), n=2, concurrency=1)
    assert scores.isnan().tolist() == [True, False]
    assert scores[1] == 3
    assert (reward.failed, len(requests)) == (1, 2)
    assert message in caplog.text


@pytest.mark.parametrize("passing", [Answer({}, 500), Answer({}, 429), HANG_UP], ids=["500", "429", "hang up"])
def test_what_may_pass_is_tried_again(passing):
    scores, _, requests = ask(passing, chat(three(3, 3, 3)))
    assert scores.item() == 3
    assert len(requests) == 2


def test_the_key_goes_to_the_server_and_nowhere_else(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    refused = Answer({"error": {"message": f"wrong key {KEY}"}}, 401)
    with caplog.at_level(logging.DEBUG):
        scores, reward, requests = ask(chat(three(3, 3, 3)), refused, n=2, concurrency=1, api_key_env="JUDGE_KEY")
    assert [request[2]["authorization"] for request in requests] == [f"Bearer {KEY}"] * 2
    assert scores.isnan().tolist() == [False, True]
    assert "401 Unauthorized: wrong key ***" in caplog.text
    assert KEY not in caplog.text
    assert KEY.encode() not in pickle.dumps(reward)
    assert KEY not in repr(vars(reward))


@pytest.mark.parametrize("value", [None, "", " ", "a b", "a\nb", "schlüssel"])
def test_a_missing_or_mangled_key_is_named_but_not_shown(value, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(ValueError, match="environment variable JUDGE_KEY holds no key") as stop:
        UnifiedReward("http://127.0.0.1:1/v1", "m", api_key_env="JUDGE_KEY").validate()
    assert not value or not value.strip() or value not in str(stop.value)


def test_a_template_of_one_s_own(tmp_path):
    file = tmp_path / "template.txt"
    file.write_text("<image>\n{schön} {prompt} / {prompt}", encoding="utf-8")
    _, reward, requests = ask(chat(three(3, 3, 3)), template=str(file))
    sent = requests[0][3]["messages"][0]["content"][1]["text"]
    assert sent == "<image>\n{schön} a {sign} number 0 / a {sign} number 0"
    assert reward.version == f"judge-7b, three_scores, {file}"
    file.write_text("no place", encoding="utf-8")
    with pytest.raises(ValueError, match=r"template \S+ has no \{prompt\}"):
        UnifiedReward("http://a/v1", "m", template=str(file)).validate()
    file.write_bytes(b"\xff{prompt}")
    for path in (file, tmp_path / "none.txt"):
        with pytest.raises(ValueError, match="cannot be read as UTF-8 text"):
            UnifiedReward("http://a/v1", "m", template=str(path)).validate()


def test_check(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    models = Answer({"data": [{"id": "other"}, {"id": "judge-7b"}]})
    with serving(Script(models, models, Answer({"data": None}), Answer({}, 403))) as server:
        UnifiedReward(f"{server.url}/v1", "judge-7b", api_key_env="JUDGE_KEY", **FAST).check()
        method, path, headers, _ = server.requests[0]
        assert (method, path, headers["authorization"]) == ("GET", "/v1/models", f"Bearer {KEY}")
        reward = UnifiedReward(f"{server.url}/v1", "judge-72b", **FAST)
        with pytest.raises(ValueError, match="has no model 'judge-72b'; it lists other, judge-7b"):
            reward.check()
        with pytest.raises(ValueError, match="it lists none"):
            reward.check()
        with pytest.raises(ValueError, match=r"unified_reward has no server at \S+/v1/models: .* 403 Forbidden"):
            reward.check()


def test_facts():
    reward = UnifiedReward("http://127.0.0.1:1/v1", "m", reply="final_score")
    assert (reward.name, reward.score_range, reward.licence) == ("unified_reward", (1, 5), "MIT")
    assert reward.version == "m, final_score, our own template"
    assert (reward.needs, reward.differentiable) == ((), False)
    reward.check_positive()


def test_copies_travel():
    with serving(Script(otherwise=lambda body: chat(three(1, 2, 3)))) as server:
        reward = UnifiedReward(f"{server.url}/v1", "m", **FAST)
        image = torch.zeros(1, 3, 8, 8)
        assert reward(image, [Prompt("p")]).item() == 2
        assert pickle.loads(pickle.dumps(reward))(image, [Prompt("p")]).item() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model is empty"),
        ({"reply": "json"}, 'reply is "json": expected one of three_scores, final_score'),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"timeout": math.inf}, "timeout must be above 0, got inf"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        UnifiedReward(**{"base_url": "http://127.0.0.1:1/v1", "model": "m", **options})


@pytest.mark.parametrize("url", ["127.0.0.1:8080/v1", "http://a/v1?size=1", "ftp://a/v1"])
def test_addresses_are_checked(url):
    with pytest.raises(ValueError, match="base_url of unified_reward is"):
        UnifiedReward(url, "m").validate()
