"""Grants of credit: once for a key, with a note that is not in the log."""

from __future__ import annotations

import pytest

from domain.commands.accounts import GrantCredit, grant_credit
from domain.errors import InvalidRequest, NotFound
from domain.ledger.account import Account
from domain.limits import GRANT_NOTE_CHARACTERS_MAX
from tests.integration.product_rig import MemoryStory


def available(story: MemoryStory) -> int:
    return story.of(Account, story.account_id).available_nano_usd


def grant(story: MemoryStory, amount: int, note: str = "for Ada", key: str | None = None) -> str:
    command = GrantCredit(story.account_id, amount, note, idempotency_key=key)
    return str(story.run(grant_credit, command))


def test_a_grant_under_a_key_is_made_once(story: MemoryStory) -> None:
    before = available(story)
    assert grant(story, 7, key="order-1") == grant(story, 7, key="order-1")
    assert available(story) == before + 7
    grant(story, 7, key="order-2")
    grant(story, 7)
    grant(story, 7)
    assert available(story) == before + 4 * 7


@pytest.mark.parametrize(("amount", "note"), [(8, "for Ada"), (7, "for Bob")])
def test_another_grant_under_a_used_key_is_refused(
    story: MemoryStory, amount: int, note: str
) -> None:
    grant(story, 7, key="order-1")
    before = available(story)
    with pytest.raises(InvalidRequest):
        grant(story, amount, note, key="order-1")
    assert available(story) == before


def test_what_was_written_on_a_grant_is_not_in_the_log(story: MemoryStory) -> None:
    grant_id = grant(story, 7, "for Ada Lovelace, Ockham Park")
    stored = [event.model_dump_json() for _, event in story.writer.events()]
    assert not [text for text in stored if "Lovelace" in text]
    assert [text for text in stored if grant_id in text]
    notes = story.writer.personal["grant_notes"].values()
    assert "for Ada Lovelace, Ockham Park" in {row["note"] for row in notes}


def test_a_grant_has_a_short_note_and_an_account(story: MemoryStory) -> None:
    grant(story, 7, "n" * GRANT_NOTE_CHARACTERS_MAX)
    with pytest.raises(InvalidRequest, match="note"):
        grant(story, 7, "n" * (GRANT_NOTE_CHARACTERS_MAX + 1))
    with pytest.raises(NotFound):
        story.run(grant_credit, GrantCredit("acct_nobody", 7, ""))
