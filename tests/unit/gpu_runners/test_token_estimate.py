"""The estimate that limits and quotes count with, against real tokenizers: never below ordinary
text of whatever language, and near English.

`ordinary_texts.json` has paragraphs as customers' rows hold them, written for this, and how many
tokens the real tokenizers of the larger bases made of each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from domain.catalog import CATALOG
from domain.inputs.token_estimate import CharacterCounts
from tests.unit.gpu_runners.tiny_model import BASE

TEXTS = json.loads((Path(__file__).parent / "ordinary_texts.json").read_text())
ENGLISH, OTHERS = TEXTS["english"], TEXTS["other"]


def estimate(base: str, *texts: str) -> int:
    tuning = CATALOG[base].fine_tuning
    assert tuning is not None
    counts = CharacterCounts()
    for text in texts:
        counts.add(text)
    return counts.estimate(tuning.token_rates)


def real(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("language", OTHERS)
def test_ordinary_text_of_no_language_is_estimated_too_low(tokenizer: Any, language: str) -> None:
    text = OTHERS[language]["text"]
    assert estimate(BASE, text) >= real(tokenizer, text)
    for base, counted in OTHERS[language]["tokens"].items():
        assert estimate(base, text) >= counted, base


@pytest.mark.parametrize("kind", ENGLISH)
def test_english_is_estimated_at_about_a_third_more(tokenizer: Any, kind: str) -> None:
    text = ENGLISH[kind]["text"]
    assert 1.15 <= estimate(BASE, text) / real(tokenizer, text) <= 1.45
    for base, counted in ENGLISH[kind]["tokens"].items():
        assert 1.15 <= estimate(base, text) / counted <= 1.45, base


@pytest.mark.parametrize("language", ["Italian", "Dutch", "Indonesian"])
def test_a_translation_counts_each_text_in_its_own_language(tokenizer: Any, language: str) -> None:
    question, answer = ENGLISH["support"]["text"], OTHERS[language]["text"]
    apart = estimate(BASE, question) + estimate(BASE, answer)
    assert apart - 1 <= estimate(BASE, question, answer) <= apart


def test_a_long_text_is_judged_by_both_ends(tokenizer: Any) -> None:
    text = f"Translate this into English. {OTHERS['Dutch']['text'] * 30}"
    assert estimate(BASE, text) >= real(tokenizer, text)
