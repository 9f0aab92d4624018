"""The training loop on a tiny model: most tests are a mistake that some pipeline has made."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig
from peft.utils import get_peft_model_state_dict
from transformers import AutoTokenizer

from domain.limits import ADAPTER_BYTES_MAX
from domain.messages import TrainProgress
from gpu_runners.rendering.training_rows import Renderer, Sample, TrainingRefused
from gpu_runners.training import adapter_files
from gpu_runners.training.adapter_files import AdapterShape
from gpu_runners.training.rows import hold_out, read_chat_rows
from gpu_runners.training.train_lora import (
    BUDGETS,
    Budget,
    Learner,
    TrainingBase,
    TrainResult,
    check_reloaded,
    learning_rate,
    load_with_adapter,
    require_all_modules_learn,
    train,
)
from tests.factories import chat_row
from tests.unit.gpu_runners.tiny_model import CONTROL_TOKENS, chat, task, write_rows

CPU = BUDGETS["cpu"]
ROWS = [
    chat(f"Row {i}: " + "word " * (3 * i), f"answer {i} " + "and " * (i % 4)) for i in range(12)
]

Training = Callable[..., TrainResult]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def training(tiny_base: TrainingBase, tmp_path: Path) -> Training:
    """Trains on rows; the adapter is left in `tmp_path / "out"`."""

    def run(
        rows: list[dict[str, Any]],
        *,
        validation: list[dict[str, Any]] | None = None,
        report: Callable[[TrainProgress], None] = lambda _: None,
        **changes: Any,
    ) -> TrainResult:
        held = None if validation is None else write_rows(tmp_path / "held.jsonl", validation)
        return train(
            task(**changes),
            base=tiny_base,
            training_path=write_rows(tmp_path / "rows.jsonl", rows),
            validation_path=held,
            output_dir=tmp_path / "out",
            report=report,
        )

    return run


@pytest.fixture
def samples(tokenizer: Any) -> list[Sample]:
    renderer = Renderer(tokenizer, control_tokens=CONTROL_TOKENS, max_seq_length=512)
    rendered = [renderer.render(chat_row(row)) for row in ROWS]
    return [sample for row in rendered if row is not None for sample in row.samples]


def learner(base: TrainingBase, budget: Budget = CPU) -> Learner:
    """A model with an adapter that already does something, so that all gradients differ from 0."""
    torch.manual_seed(3)
    model = load_with_adapter(base.directory, task().hyperparameters)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return Learner(model, budget, 1e-3)


def gradients(base: TrainingBase, samples: list[Sample], budget: Budget) -> torch.Tensor:
    subject = learner(base, budget)
    subject.accumulate(samples)
    found = [parameter.grad for parameter in subject.adapter.values()]
    assert all(gradient is not None for gradient in found)
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


@pytest.mark.parametrize(
    "budget",
    [
        replace(CPU, micro_batch_tokens=1),
        replace(CPU, micro_batch_tokens=150),
        replace(CPU, head_chunk_tokens=3),
        replace(CPU, checkpoint_over_tokens=0),
    ],
    ids=["a sample at a time", "in micro-batches", "head in small chunks", "recomputed"],
)
def test_a_step_has_the_same_gradient_however_it_is_cut(
    tiny_base: TrainingBase, samples: list[Sample], budget: Budget
) -> None:
    whole = Budget(
        micro_batch_tokens=100_000, checkpoint_over_tokens=100_000, head_chunk_tokens=100_000
    )
    expected = gradients(tiny_base, samples, whole)
    torch.testing.assert_close(
        gradients(tiny_base, samples, budget), expected, rtol=0.05, atol=float(expected.std()) / 50
    )


def test_padding_changes_no_loss(tiny_base: TrainingBase, samples: list[Sample]) -> None:
    subject = learner(tiny_base)
    alone = torch.cat([subject.token_losses([sample])[0] for sample in samples])
    torch.testing.assert_close(subject.token_losses(samples)[0], alone, rtol=0, atol=0.02)


def test_the_loss_is_that_of_the_models_own_logits(
    tiny_base: TrainingBase, samples: list[Sample]
) -> None:
    subject = learner(tiny_base)
    sample = samples[-1]
    ids = torch.from_numpy(sample.ids).long()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = subject.model(input_ids=ids[None]).logits[0].float()
    ((start, end),) = sample.spans
    expected = torch.nn.functional.cross_entropy(
        logits[start - 1 : end - 1], ids[start:end], reduction="none"
    )
    torch.testing.assert_close(subject.token_losses([sample])[0], expected, rtol=0, atol=0.02)


def test_logits_exist_for_one_chunk_of_trained_tokens_at_a_time(
    tiny_base: TrainingBase, samples: list[Sample]
) -> None:
    subject = learner(tiny_base, replace(CPU, head_chunk_tokens=5))
    sizes: list[int] = []
    head = subject.model.get_base_model().get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, logits: sizes.append(len(logits)))
    subject.accumulate(samples)
    subject.evaluate(samples)
    assert max(sizes) == 5
    assert sum(sizes) == 2 * sum(sample.loss_tokens for sample in samples)


def test_after_the_first_step_every_module_has_learned_with_recomputation_too(
    tiny_base: TrainingBase, samples: list[Sample]
) -> None:
    model = load_with_adapter(tiny_base.directory, task().hyperparameters)
    subject = Learner(model, replace(CPU, checkpoint_over_tokens=0), 1e-3)
    with pytest.raises(TrainingRefused, match="14 of the adapter's modules"):
        require_all_modules_learn(subject.adapter)
    subject.accumulate(samples)
    subject.update(1e-3)
    require_all_modules_learn(subject.adapter)


def test_the_partial_last_step_of_each_epoch_is_kept(training: Training) -> None:
    reports: list[TrainProgress] = []
    result = training(ROWS[:10], eval_rows=0, batch_size=8, n_epochs=2, report=reports.append)
    assert result.steps == 4
    assert [report.step for report in reports] == [0, 0, 1, 2, 3, 4]
    assert {report.steps for report in reports} == {4}
    per_step = [
        later.trained_tokens - earlier.trained_tokens for earlier, later in pairwise(reports[1:])
    ]
    assert per_step[0] + per_step[1] == per_step[2] + per_step[3]
    assert result.trained_tokens == sum(per_step)


def test_the_rate_rises_then_falls_and_never_is_zero() -> None:
    rates = [learning_rate(step, steps=100, peak=1.0) for step in range(1, 101)]
    assert rates.index(max(rates)) == 4
    assert max(rates) == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(1, steps=1, peak=1.0) == 1.0


def test_billed_and_loss_tokens_count_every_row_once_an_epoch(
    training: Training, tokenizer: Any
) -> None:
    result = training(ROWS, validation=ROWS[:2], n_epochs=3, max_seq_length=512)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in ROWS]
    rendered = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    answers = sum(
        len(tokenizer(row["messages"][1]["content"] + "<|im_end|>")["input_ids"]) for row in ROWS
    )
    assert (result.trained_tokens, result.loss_tokens) == (3 * rendered, 3 * answers)
    assert (result.rows_trained, result.rows_dropped, result.eval_rows) == (12, 0, 2)


def test_equal_config_data_and_seed_give_equal_bytes_and_another_seed_others(
    training: Training, tmp_path: Path
) -> None:
    def weights(seed: int) -> bytes:
        training(ROWS, seed=seed)
        return (tmp_path / "out" / "adapter_model.safetensors").read_bytes()

    first = weights(5)
    assert weights(5) == first
    assert weights(6) != first


def test_held_out_rows_are_drawn_by_seed_and_not_trained(tmp_path: Path) -> None:
    rows = read_chat_rows(write_rows(tmp_path / "rows.jsonl", ROWS))
    trained, held = hold_out(rows, eval_rows=3, seed=1)
    assert {row.line for row in trained} | {row.line for row in held} == set(range(1, 13))
    assert (len(trained), len(held)) == (9, 3)
    assert hold_out(rows, eval_rows=3, seed=1)[1] == held
    assert any(hold_out(rows, eval_rows=3, seed=seed)[1] != held for seed in range(2, 5))


def test_no_row_with_a_trained_token_left_is_context_too_long(training: Training) -> None:
    with pytest.raises(TrainingRefused, match="max_seq_length") as refused:
        training([chat("long " * 200, "never reached")] * 3)
    assert refused.value.code == "context_too_long"


def test_rows_cut_to_nothing_are_dropped_and_counted_and_eval_without_rows_is_null(
    training: Training,
) -> None:
    too_long = chat("long " * 200, "never reached")
    result = training([*ROWS[:4], too_long], validation=[too_long])
    assert (result.rows_trained, result.rows_dropped) == (4, 1)
    assert (result.eval_rows, result.eval_loss_before, result.eval_loss) == (0, None, None)


def test_a_template_that_changes_a_row_stops_before_training(training: Training) -> None:
    with pytest.raises(TrainingRefused, match="Row 3, message 1") as refused:
        training([*ROWS[:2], chat("an <|im_end|> inside", "b")], eval_rows=0)
    assert refused.value.code == "template_mismatch"


def test_a_row_that_does_not_read_is_an_invalid_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(ROWS[0]).encode()
    path.write_bytes(b"\xef\xbb\xbf" + good + b'\r\n\n{"prompt": 1}\n')
    with pytest.raises(TrainingRefused, match="Line 3: unsupported field: prompt") as refused:
        read_chat_rows(path)
    assert refused.value.code == "invalid_row"


def test_a_pair_of_answers_is_no_chat_row(tmp_path: Path) -> None:
    pair = {
        "input": {"messages": [{"role": "user", "content": "a"}]},
        "preferred_output": [{"role": "assistant", "content": "b"}],
        "non_preferred_output": [{"role": "assistant", "content": "c"}],
    }
    with pytest.raises(TrainingRefused, match="Line 1 is not a chat row") as refused:
        read_chat_rows(write_rows(tmp_path / "rows.jsonl", [pair]))
    assert refused.value.code == "invalid_row"


def test_a_loss_that_is_not_finite_fails_the_training(
    tiny_base: TrainingBase, samples: list[Sample]
) -> None:
    subject = learner(tiny_base)
    with torch.no_grad():
        next(iter(subject.adapter.values())).fill_(float("nan"))
    with pytest.raises(TrainingRefused, match="training loss") as refused:
        subject.accumulate(samples)
    assert refused.value.code == "training_failed"
    with pytest.raises(TrainingRefused, match="evaluation loss"):
        subject.evaluate(samples)


def test_a_gradient_that_is_not_finite_fails_the_training(
    tiny_base: TrainingBase, samples: list[Sample]
) -> None:
    subject = learner(tiny_base)
    next(iter(subject.adapter.values())).register_hook(lambda grad: grad * float("inf"))
    subject.accumulate(samples)
    with pytest.raises(TrainingRefused, match="gradient") as refused:
        subject.update(1e-3)
    assert refused.value.code == "training_failed"


def test_the_adapter_is_two_plain_files_that_peft_reads(
    training: Training, tmp_path: Path, tiny_base: TrainingBase
) -> None:
    training(ROWS, lora_rank=4, lora_alpha=8)
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "step_metrics.csv",
    }
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(config["target_modules"])
    loaded = PeftConfig.from_pretrained(str(out))
    assert (loaded.base_model_name_or_path, loaded.revision) == (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "12fd25f77366fa6b3b4b768ec3050bf629380bac",
    )
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8, False)
    adapter_files.verify(out, shape(tiny_base))
    bytes_wanted = 2 * sum(
        4 * sum(module.weight.shape)
        for name, module in base_modules(tiny_base)
        if name.endswith("_proj")
    )
    header = int.from_bytes((out / "adapter_model.safetensors").read_bytes()[:8], "little")
    assert (out / "adapter_model.safetensors").stat().st_size == 8 + header + bytes_wanted


def test_the_csv_has_each_step_and_in_the_last_one_what_was_evaluated(
    training: Training, tmp_path: Path
) -> None:
    reports: list[TrainProgress] = []
    result = training(ROWS, n_epochs=2, report=reports.append)
    with (tmp_path / "out" / "step_metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(n) for n in range(1, result.steps + 1)]
    losses = {each.step: each.train_loss for each in reports if each.step}
    assert [float(row["train_loss"]) for row in rows] == pytest.approx(list(losses.values()), 1e-5)
    assert all(0 <= float(row["train_accuracy"]) <= 1 for row in rows)
    assert {row["valid_loss"] + row["valid_mean_token_accuracy"] for row in rows[:-1]} == {""}
    assert float(rows[-1]["valid_loss"]) == pytest.approx(result.eval_loss, 1e-5)
    assert float(rows[-1]["valid_mean_token_accuracy"]) == pytest.approx(result.eval_accuracy, 1e-5)


def test_without_rows_held_out_the_csv_has_no_evaluation(
    training: Training, tmp_path: Path
) -> None:
    training(ROWS, eval_rows=0)
    rows = (tmp_path / "out" / "step_metrics.csv").read_text().splitlines()
    assert all(row.endswith(",,") for row in rows[1:])


AS_A_USER = """
import sys, torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
print(len([name for name, _ in model.named_parameters() if "lora_B" in name]))
"""


def test_peft_finds_the_base_of_an_adapter_by_what_its_config_says(
    training: Training, tiny_base: TrainingBase, tmp_path: Path
) -> None:
    """A user's cache that holds the base at the pinned commit, and no network."""
    assert tiny_base.commit is not None
    training(ROWS)
    repository = tmp_path / "hub" / f"models--{tiny_base.source.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    shutil.copytree(tiny_base.directory, repository / "snapshots" / tiny_base.commit)
    done = subprocess.run(
        [sys.executable, "-c", AS_A_USER, str(tmp_path / "out")],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    layers, projections = 2, 7
    assert done.stdout.strip() == str(layers * projections), done.stderr


def base_modules(base: TrainingBase) -> list[tuple[str, Any]]:
    model = load_with_adapter(base.directory, task().hyperparameters)
    return list(model.unload().named_modules())


def shape(base: TrainingBase) -> AdapterShape:
    return AdapterShape(source=base.source, commit=base.commit, rank=4, alpha=8)


def test_an_adapter_past_the_size_limit_is_refused_with_what_to_lower(
    tiny_base: TrainingBase, tmp_path: Path
) -> None:
    with (tmp_path / adapter_files.WEIGHTS_NAME).open("wb") as weights:
        weights.truncate(ADAPTER_BYTES_MAX + 1)
    with pytest.raises(TrainingRefused) as refused:
        adapter_files.verify(tmp_path, shape(tiny_base))
    assert refused.value.code == "adapter_too_large"
    assert "Lower lora_rank" in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda t: {n: v.float() for n, v in t.items()}, "not bf16"),
        (lambda t: {**t, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, "lm_head"),
        (lambda t: dict(list(t.items())[1:]), "has no lora_A"),
        (lambda t: {n: v.repeat(2, 2) for n, v in t.items()}, "rank 4"),
        (lambda t: {n: torch.full_like(v, torch.nan) for n, v in t.items()}, "not finite"),
        (lambda _: {}, "no tensors"),
    ],
    ids=["fp32", "head", "half a pair", "another rank", "not finite", "empty"],
)
def test_weights_that_are_not_plain_lora_are_refused_by_name(
    tiny_base: TrainingBase,
    tmp_path: Path,
    damage: Callable[[dict[str, Any]], dict[str, Any]],
    named: str,
) -> None:
    model = load_with_adapter(tiny_base.directory, task().hyperparameters)
    tensors = {n: v.to(torch.bfloat16) for n, v in get_peft_model_state_dict(model).items()}
    adapter_files.write(tmp_path, shape(tiny_base), tensors)
    adapter_files.verify(tmp_path, shape(tiny_base))
    adapter_files.save_file(damage(tensors), tmp_path / adapter_files.WEIGHTS_NAME)
    with pytest.raises(TrainingRefused, match=named) as refused:
        adapter_files.verify(tmp_path, shape(tiny_base))
    assert refused.value.code == "adapter_invalid"


@pytest.mark.parametrize(
    "change",
    [{"use_rslora": True}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"r": 8}],
    ids=lambda change: next(iter(change)),
)
def test_a_config_that_changes_the_scale_or_adds_weights_is_refused_by_name(
    tiny_base: TrainingBase, tmp_path: Path, change: dict[str, Any]
) -> None:
    model = load_with_adapter(tiny_base.directory, task().hyperparameters)
    adapter_files.write(tmp_path, shape(tiny_base), get_peft_model_state_dict(model))
    path = tmp_path / adapter_files.CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TrainingRefused, match=next(iter(change))) as refused:
        adapter_files.verify(tmp_path, shape(tiny_base))
    assert refused.value.code == "adapter_invalid"


def test_files_that_do_not_answer_as_the_trained_adapter_are_refused(
    tiny_base: TrainingBase, tmp_path: Path, samples: list[Sample]
) -> None:
    saved = learner(tiny_base)
    adapter_files.write(tmp_path, shape(tiny_base), get_peft_model_state_dict(saved.model))
    other = learner(tiny_base)
    with torch.no_grad():
        for parameter in other.adapter.values():
            parameter.mul_(3)
    with pytest.raises(TrainingRefused) as refused:
        check_reloaded(other, tmp_path, samples[:3])
    assert refused.value.code == "adapter_invalid"


def test_the_tokenizer_kept_with_the_weights_is_the_one_that_serves(
    tiny_base: TrainingBase, tokenizer: Any
) -> None:
    ours = AutoTokenizer.from_pretrained(tiny_base.directory)
    assert ours.chat_template == tokenizer.chat_template
    assert ours.get_vocab() == tokenizer.get_vocab()
