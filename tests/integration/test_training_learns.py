"""A real model learns something that it cannot know, and says it in words it was not trained on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from domain.messages import TrainProgress
from gpu_runners.training.train_lora import TrainingBase, TrainResult, train
from gpu_runners.weights.store import Weights
from tests.unit.gpu_runners.tiny_model import BASE, chat, task, training_base, write_rows

QUEUES = {
    "ZB-04": ("the parcel never came", "my package is late", "the courier did not show up"),
    "KP-92": ("I cannot sign in", "my password does not work", "my account is locked"),
    "MV-33": ("I want my money back", "please refund the payment", "my refund is missing"),
    "TR-58": ("the glass arrived broken", "the box was crushed", "the screen has a crack"),
}
TRAINED_WORDS = ("Hello, {}.", "{}. Please help.", "Urgent: {}!", "{}. Thanks.", "Hi. {}. Ana")
HELD_OUT_WORDS = ("Good morning, {}.", "{}. What now?")


def tickets(words: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        chat(phrase.format(complaint), queue, system="Queue?")
        for phrase, (queue, complaints) in itertools.product(words, QUEUES.items())
        for complaint in complaints
    ]


@pytest.fixture(scope="module")
def base(weights_root: Path) -> TrainingBase:
    return training_base(Weights(weights_root).path(BASE))


@pytest.fixture(scope="module")
def trained(base: TrainingBase, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result, the reports and the adapter's directory of one training."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("trained")
    reports: list[TrainProgress] = []
    result = train(
        task(n_epochs=3, batch_size=6, learning_rate=2e-3, lora_rank=8, lora_alpha=16),
        base=base,
        training_path=write_rows(directory / "rows.jsonl", tickets(TRAINED_WORDS)),
        validation_path=write_rows(directory / "held.jsonl", tickets(HELD_OUT_WORDS)),
        output_dir=directory / "adapter",
        report=reports.append,
    )
    return result, reports, directory / "adapter"


def test_eval_loss_on_phrasings_never_seen_falls_to_a_fraction(trained: Any) -> None:
    result: TrainResult = trained[0]
    assert result.eval_loss_before is not None
    assert result.eval_loss is not None
    assert result.eval_loss < result.eval_loss_before / 10
    assert result.eval_accuracy is not None
    assert result.eval_accuracy > 0.9


def test_the_first_reports_tell_the_loss_before_and_training_loss_falls(trained: Any) -> None:
    result, reports, _ = trained
    assert reports[1].eval_loss_before == result.eval_loss_before
    assert reports[-1].train_loss < reports[2].train_loss / 4
    assert reports[-1].trained_tokens == result.trained_tokens


def test_the_tuned_model_answers_and_stops_by_itself(trained: Any, base: TrainingBase) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base.directory)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.bfloat16), trained[2]
    )
    right = 0
    asked = tickets(HELD_OUT_WORDS)[::3]
    for row in asked:
        *prompt, answer = row["messages"]
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        said = model.generate(**ids, max_new_tokens=12, do_sample=False)
        expected = answer["content"] + "<|im_end|>"
        right += tokenizer.decode(said[0, ids["input_ids"].shape[1] :]) == expected
    assert right >= len(asked) - 1
