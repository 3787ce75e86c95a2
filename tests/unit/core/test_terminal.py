"""Messages go through the logger ``hvdtrain``; what is printed by default stays."""

import logging

import pytest

from hvdtrain.cluster import exit as exits
from hvdtrain.core import terminal
from hvdtrain.core.terminal import LOGGER, note, say


@pytest.fixture
def records():
    """Return the records that a handler of a script gets."""
    class Kept(logging.Handler):
        found: list[logging.LogRecord] = []

        def emit(self, record):
            Kept.found.append(record)

    handler, level, handlers = Kept(), LOGGER.level, list(LOGGER.handlers)
    LOGGER.addHandler(handler)
    yield Kept.found
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(level)


def test_messages_are_printed_and_go_to_handlers_of_a_script(records, capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(terminal.socket, "gethostname", lambda: "b")
    say("100 % of it, {}")
    note("a remark")
    exits._say("a mistake")
    out, err = capsys.readouterr()
    assert out == "100 % of it, {}\nnote: a remark\n" and err == "hvdtrain: a mistake\n"
    assert [(one.getMessage(), one.levelname, one.rank, one.host) for one in records] == [
        ("100 % of it, {}", "INFO", 3, "b"), ("note: a remark", "WARNING", 3, "b"),
        ("a mistake", "ERROR", 3, "b")]


def test_fields_of_a_scripts_own_records_stay(records, monkeypatch):
    factory = logging.getLogRecordFactory()

    def ranked(*args, **named):
        record = factory(*args, **named)
        record.rank = 7
        return record

    logging.setLogRecordFactory(ranked)
    try:
        say("a line")
    finally:
        logging.setLogRecordFactory(factory)
    assert records[-1].rank == 7 and records[-1].host


def test_a_script_silences_or_takes_messages(records, capsys):
    LOGGER.setLevel(logging.WARNING)
    say("silent")
    note("heard")
    assert capsys.readouterr().out == "note: heard\n"
    LOGGER.handlers = [one for one in LOGGER.handlers if not isinstance(one, terminal.StdoutHandler)]
    note("taken")
    assert capsys.readouterr().out == "" and records[-1].getMessage() == "note: taken"


def test_settings_of_other_loggers_leave_the_messages(capsys, monkeypatch):
    monkeypatch.setattr(LOGGER, "disabled", True)  # logging.config does so to all loggers that it does not name
    say("still there")
    assert capsys.readouterr().out == "still there\n"
