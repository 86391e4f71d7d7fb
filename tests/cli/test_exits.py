"""How commands end, whatever the terminal, and when Ctrl-C finds them."""

import io
import signal
import sys

import pytest
from helpers.profiles import make_profile
from integration.tiny import config

from recast_lightning.cli import main
from recast_lightning.policy import Policy


def test_an_ascii_terminal_shows_what_it_can(tmp_path, monkeypatch):
    make_profile().save(tmp_path / "profile")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    main(["weights", str(tmp_path / "profile"), "--budgets", "ocr=1", "clip=1"])
    terminal.flush()
    text = terminal.buffer.getvalue().decode("ascii")
    assert " \\xb1 0." in text
    assert text.splitlines()[-1] == str(tmp_path / "profile-weights")


def test_ctrl_c_while_models_load_is_a_sentence_and_the_signals_exit_code(tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Policy, "load", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(config(tmp_path))])
    signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
    assert stop.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err.splitlines()[-1].startswith("recast: stopped by SIGINT; fit with --ckpt_path last")
