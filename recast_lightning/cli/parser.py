"""The parser of every command: jsonargparse's, whose errors are one sentence."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser

from recast_lightning.cli.exits import fail
from recast_lightning.cli.sentences import explained


class SentenceParser(ArgumentParser):
    """A parser that leaves with a sentence, without the page of usage before it."""

    sections: dict[str, Any] = {}  # option → the class or function whose parameters are its keys

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Leave with the sentence and exit code 2; parsers of a part raise, so that the whole can say where."""
        if not self.exit_on_error:
            return super().error(message, ex)
        return fail(explained(message, self.sections or {action.dest: None for action in self._actions}))
