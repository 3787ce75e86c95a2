"""The key remat and a model's blocks."""

from __future__ import annotations

import pytest

from hvdtrain.config import Config
from hvdtrain.config.texts import wanted
from hvdtrain.core.errors import UserError

NAMES = ["embed", "block.0", "block.1", "block.2", "head"]


@pytest.mark.parametrize("text, found", [
    ("off", []), ("auto", []), ("every:1", NAMES), ("every:2", ["block.0", "block.2"]), ("every:9", []),
    ("head, block.0", ["block.0", "head"]), (["block.1"], ["block.1"])])
def test_names_of_blocks(text, found):
    assert wanted(text, NAMES) == found
    Config(remat=text).check()


@pytest.mark.parametrize("text", ["blocks.0", "block.0,block.7", ["nose"], "every"])
def test_blocks_that_are_not_there_are_refused(text):
    with pytest.raises(UserError, match="remat"):
        wanted(text, NAMES)


@pytest.mark.parametrize("text", ["every:0", "every:x", "every2", "true", ["a", ""]])
def test_what_names_no_block_of_any_model_is_refused(text):
    with pytest.raises(UserError, match="remat is"):
        Config(remat=text).check()


def test_a_model_without_blocks_has_nothing_to_recompute():
    with pytest.raises(UserError, match="no named blocks"):
        wanted("every:2", [])
