"""How commands end, whatever the terminal, and when Ctrl-C finds them."""

import io
import os
import signal
import subprocess
import sys
import warnings

import pytest
from helpers.profiles import make_profile
from integration.tiny import ROOT, config

from recast_lightning.cli import main
from recast_lightning.cli.lightning_cli import sort_warnings
from recast_lightning.errors import RunWarning
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


def test_no_filter_makes_an_error_of_a_warning_about_a_run():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("error")
        sort_warnings()
        warnings.warn("a reward gave all images the same score", RunWarning, stacklevel=1)
        with pytest.raises(UserWarning):
            warnings.warn("anything else", stacklevel=1)
    assert [w.category for w in seen] == [RunWarning]


def test_ctrl_c_while_libraries_are_imported_is_not_swallowed(tmp_path):
    """An import in flight is where a library may catch KeyboardInterrupt, or fail of it with an error of its own."""
    code = "import os, signal, sys; from recast_lightning.cli.exits import importing\n"
    code += "try:\n  with importing(): os.kill(os.getpid(), signal.SIGINT)\n"
    code += "except KeyboardInterrupt: print('swallowed')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.startswith(b"recast: stopped by SIGINT")
    assert not done.stdout


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
