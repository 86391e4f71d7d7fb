"""What jsonargparse says becomes one sentence, in whatever form it says it."""

from dataclasses import dataclass

import pytest

from recast_lightning.cli.sentences import explained


@dataclass(frozen=True)
class Group:
    rate: float = 0.1


class Model:
    def __init__(self, name: str, group: Group = Group()) -> None: ...


SECTIONS = {"model": Model, "data": None}


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("modle.name", "There is no option 'modle': did you mean model? Known are model, data."),
        ("model.nam", "model has no option 'nam': did you mean name? Known are name, group."),
        ("model.ratte", "model has no option 'ratte': did you mean group.rate?"),
        ("model.grop.rate", "model has no option 'grop': did you mean group? Known are name, group."),
        ("model.group.rat", "model.group has no option 'rat': did you mean rate? Known are rate."),
        ("model.group.x", "model.group has no option 'x'. Known are rate."),
    ],
)
def test_an_unknown_option_is_named_at_its_place(option, sentence):
    assert explained(f"Subcommand 'fit' does not accept option '{option}'", SECTIONS) == sentence


@pytest.mark.parametrize(
    "message",
    [
        "Something new",
        'Parser key "model.name":\n  Something new',
        "Does not validate against any of the Union subtypes\n  Something new",
        "Parser key \"a\":\n  Problem with given class_path 'no.such.Class':\n    Something new",
    ],
)
def test_a_message_of_an_unknown_form_still_says_what_it_says(message):
    said = explained(message, SECTIONS)
    assert "Something new" in said
    assert "\n" not in said
