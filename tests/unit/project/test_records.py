"""The schema of records: docs/reference/records.md is made from it, and code writes every event and value in it."""

import ast
from types import SimpleNamespace

from test_docs_config import generate  # noqa: F401  (a fixture)

from hvdtrain.core import ROOT
from hvdtrain.core.protocols import Record
from hvdtrain.core.records import EVENTS, RecordStream, problems


def made():
    """Event -> (values named where it is made, whether some are made elsewhere), over all of the package."""
    found = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "record"
                    and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)):
                names, more = found.get(node.args[0].value, (set(), False))
                given = {keyword.arg for keyword in node.keywords}
                found[node.args[0].value] = names | given - {None}, more or None in given
    return found


def test_the_page_of_records_is_up_to_date(generate):  # noqa: F811
    page = (ROOT.parent / "docs" / "reference" / "records.md").read_text(encoding="utf-8")
    assert page == generate.records(), "run python docs/generate.py"


def test_somebody_makes_every_event_with_every_value_and_no_other():
    found = made()
    assert found.keys() == EVENTS.keys(), "made but not documented, or documented and made by nobody"
    for name, (values, more) in found.items():
        assert values <= EVENTS[name].values.keys(), name
        assert more or values == EVENTS[name].values.keys(), f"{name}: nobody writes all that is documented"


def test_what_is_not_documented_is_told_and_events_of_others_are_theirs():
    note = Record("note", 0, 0.0, {"text": "x", "colour": 1})
    assert problems(note) == ["note has 'colour', which is not documented"]
    assert problems(Record("mine", 0, 0.0, {"colour": 1})) == []


def test_a_report_that_fails_over_the_note_about_another_is_told_once(capsys):
    class Fails:
        every, at_once = "1 step", True

        def __init__(self, name):
            self.name = name

        def write(self, record):
            raise OSError("gone")

        def close(self):
            pass

    run = SimpleNamespace(begun=True, state=SimpleNamespace(cursor=SimpleNamespace(step=0)), notes=[])
    stream = RecordStream(lambda: [Fails("first"), Fails("second")])
    run.note = lambda text: (run.notes.append(text), stream.write(run, "note", {"text": text}))
    stream.open()
    stream.write(run, "note", {"text": "anything"})
    assert sorted(note.split()[0] for note in run.notes) == ["first", "second"]
