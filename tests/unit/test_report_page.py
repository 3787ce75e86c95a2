"""The page about a run: made from any directory of a run, whole or torn; small, closed, and right about the story."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import told_runs

from hvdtrain import report
from hvdtrain.report import facts, page, story


class Told(HTMLParser):
    """What of a page a browser would load, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.words = ""
        self._quiet = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._quiet = tag in ("script", "style")
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")
                       and not str(value).startswith(("#", "data:,"))]

    def handle_data(self, data):
        self.words += "" if self._quiet else data


@pytest.fixture(scope="module")
def throttled(tmp_path_factory):
    return told_runs.throttled(tmp_path_factory.mktemp("runs") / "throttled")


def chapters(path):
    return {one.question: " ".join([one.answer, *one.points]) for one in story.tell(facts.gather(path))}


def test_a_page_tells_the_story_at_its_top(throttled):
    path = report.write(throttled)
    told = Told(path.read_text(encoding="utf-8"))
    assert path == throttled / "report.html" and told.loads == [] and path.stat().st_size < 300_000
    assert "could not be drawn" not in told.words
    said = chapters(throttled)
    assert "all 400 steps are done, through 1 restart" in said["How it ended"]
    assert "30 steps that were computed again" in said["What it cost"]
    assert said["Who held whom up"].startswith("Rank 3 on b held the others up: 98 %")
    assert "Without rank 3 the rest would be 7 % faster" in said["Who held whom up"]
    assert "killed (SIGKILL)" in said["What went wrong"] and "Went back to step 160" in said["What went wrong"]
    assert "look for other work on its host" in said["What to do"]
    for words in said.values():
        assert words.split(".")[0] in told.words


def test_every_part_is_on_the_page(throttled):
    assert [one.name for one in page.sections(facts.gather(throttled))] == list(page.ORDER)
