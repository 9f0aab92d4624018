"""Supervised LoRA training of one job, from rows to a checked adapter: our own plain loop.

`child.py` calls `train` once in a process of its own. The loop is written out rather than
taken from a trainer library because its accounting is the product: exact trained tokens, loss on
trained tokens only, the same held-out rows before and after, the same bytes from the same config,
data, seed and thread count on a CPU. The base stays bf16, the LoRA factors are fp32 under bf16
autocast; the head runs on trained positions only, in chunks. The model is never put into eval mode:
there is no dropout, and quantised layers change their weights on it. It must never log a row.

Tensor suffixes: b samples of a micro-batch, t tokens, n trained positions, h hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import disable_input_dtype_casting
from peft.utils import get_peft_model_state_dict
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from domain.messages import TrainingHyperparameters, TrainProgress, TrainTask
from gpu_runners.rendering.training_rows import RenderedRow, Renderer, Sample, TrainingRefused
from gpu_runners.training import adapter_files
from gpu_runners.training.adapter_files import TARGET_MODULES, AdapterShape
from gpu_runners.training.rows import RenderedRows, hold_out, read_chat_rows, render_rows, shuffled
from gpu_runners.training.step_metrics import Tally, write_step_metrics

GRADIENT_NORM_MAX = 1.0
"""Gradients are scaled down to this norm: one odd batch cannot throw a short training off."""
WARMUP_FRACTION = 0.05
FINAL_RATE_FRACTION = 0.1
RELOAD_TOLERANCE = 1e-2
"""Nats a token by which the reloaded adapter may differ; on a CPU it is the same to the bit."""
PROBE_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """What bounds memory. A micro-batch holds at most `micro_batch_tokens`, padding included, or
    one sample; one with more than `checkpoint_over_tokens` recomputes its activations; logits exist
    for `head_chunk_tokens` positions at a time."""

    micro_batch_tokens: int
    checkpoint_over_tokens: int
    head_chunk_tokens: int


BUDGETS: dict[str, Budget] = {
    "cpu": Budget(micro_batch_tokens=1024, checkpoint_over_tokens=1024, head_chunk_tokens=256),
    "cuda": Budget(micro_batch_tokens=8192, checkpoint_over_tokens=0, head_chunk_tokens=1024),
}


@dataclass(frozen=True, slots=True)
class TrainingBase:
    """The base to train on. `revision` names the files that lie in `directory`; `source` and
    `commit` are where the adapter's user gets the base. `template_arguments` are what serving
    passes to its chat template."""

    id: str
    revision: str
    source: str
    commit: str | None
    directory: Path
    control_tokens: tuple[str, ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The fields of `TrainFinished` but for its two files, which lie in the output directory.

    `train_loss` and `train_accuracy` are means over the trained tokens of the last epoch, each
    taken before its step's update.
    """

    trained_tokens: int
    loss_tokens: int
    steps: int
    train_loss: float
    train_accuracy: float
    eval_loss_before: float | None
    eval_loss: float | None
    eval_accuracy: float | None
    eval_rows: int
    rows_trained: int
    rows_dropped: int
    seconds: float
    base_revision: str
    versions: dict[str, str]


def train(
    task: TrainTask,
    *,
    base: TrainingBase,
    training_path: Path,
    validation_path: Path | None,
    output_dir: Path,
    report: Callable[[TrainProgress], None],
) -> TrainResult:
    """Trains, and leaves the adapter's two files and the steps' metrics in `output_dir`. `report`
    is called at each step.

    Raises TrainingRefused with a job error code.
    """
    began = time.monotonic()
    settings = task.hyperparameters
    training, evaluation = _rendered(task, base, training_path, validation_path)
    torch.manual_seed(task.seed)
    model = load_with_adapter(base.directory, settings)
    device = next(model.parameters()).device
    learner = Learner(model, BUDGETS[device.type], settings.learning_rate)
    run = _Run(steps=settings.n_epochs * math.ceil(len(training.rows) / settings.batch_size))
    report(run.progress())
    run.before = learner.evaluate(samples_of(evaluation.rows))
    report(run.progress())
    _run_epochs(learner, training.rows, task, run, report)

    round_adapter(model)
    run.after = learner.evaluate(samples_of(evaluation.rows))
    shape = AdapterShape(base.source, base.commit, settings.lora_rank, settings.lora_alpha)
    adapter_files.write(output_dir, shape, get_peft_model_state_dict(model))
    adapter_files.verify(output_dir, shape)
    probe = samples_of(evaluation.rows or training.rows)[:PROBE_SAMPLES]
    check_reloaded(learner, output_dir, probe)
    write_step_metrics(output_dir, run.measured, run.after)
    return TrainResult(
        **run.result(),
        eval_rows=len(evaluation.rows),
        rows_trained=len(training.rows),
        rows_dropped=training.dropped,
        seconds=time.monotonic() - began,
        base_revision=base.revision,
        versions={name: version(name) for name in ("torch", "transformers", "peft", "tokenizers")},
    )


def _rendered(
    task: TrainTask, base: TrainingBase, training_path: Path, validation_path: Path | None
) -> tuple[RenderedRows, RenderedRows]:
    """The rows to train on and to evaluate; rows are held out before anything else is done."""
    rows = read_chat_rows(training_path)
    if validation_path is None:
        rows, held = hold_out(rows, eval_rows=task.eval_rows, seed=task.seed)
    else:
        held = read_chat_rows(validation_path)
    limit = task.hyperparameters.max_seq_length
    renderer = Renderer(
        AutoTokenizer.from_pretrained(base.directory, local_files_only=True),
        control_tokens=base.control_tokens,
        max_seq_length=limit,
        arguments=base.template_arguments,
    )
    training = render_rows(renderer, rows)
    if not training.rows:
        raise TrainingRefused(
            f"No row keeps an assistant token to train within max_seq_length ({limit} tokens). "
            "Raise it or shorten the rows.",
            code="context_too_long",
        )
    return training, render_rows(renderer, held)


def load_with_adapter(directory: Path, settings: TrainingHyperparameters) -> PeftModel:
    """The frozen bf16 base with a fresh fp32 adapter on all seven projections of each layer."""
    base = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, local_files_only=True
    )
    base.to("cuda" if torch.cuda.is_available() else "cpu")
    model = get_peft_model(
        base,
        LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=0.0,
            target_modules=list(TARGET_MODULES),
            task_type="CAUSAL_LM",
        ),
    )
    model.train()
    return model


def samples_of(rows: Sequence[RenderedRow]) -> list[Sample]:
    """All samples, row after row."""
    return [sample for row in rows for sample in row.samples]


def micro_batches(samples: Sequence[Sample], budget_tokens: int) -> Iterator[list[Sample]]:
    """Longest first, so that a batch's first sample is its padded length."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda s: len(s.ids), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0].ids) > budget_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def learning_rate(step: int, *, steps: int, peak: float) -> float:
    """The rate of a step counted from 1: a linear rise over the first 5 %, then a linear fall to a
    tenth. The rise spares the fresh optimizer state, the fall quiets the last batches, whose result
    is what is evaluated and kept; never zero, so that every row teaches something."""
    warmup = max(1, math.ceil(steps * WARMUP_FRACTION))
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (1 - (1 - FINAL_RATE_FRACTION) * done)


class Learner:
    """A model, its optimizer and the arithmetic of one step."""

    def __init__(self, model: PeftModel, budget: Budget, peak_rate: float) -> None:
        self.model = model
        self.budget = budget
        self.peak_rate = peak_rate
        self.adapter = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self.adapter.values(), lr=peak_rate, weight_decay=0.0, fused=True
        )

    def evaluate(self, samples: Sequence[Sample]) -> Tally | None:
        """Loss and accuracy without training; None where there is nothing to evaluate."""
        if not samples:
            return None
        total = Tally()
        for batch in micro_batches(samples, self.budget.micro_batch_tokens):
            losses, hits = self.token_losses(batch)
            total.add(Tally(float(losses.sum()), int(hits.sum()), len(losses)))
        if not math.isfinite(total.loss):
            raise _failed("the evaluation loss is not a finite number")
        return total

    def token_losses(self, batch: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each trained token its loss in nats, and whether it was the likeliest."""
        with torch.no_grad(), disable_input_dtype_casting(self.model), self._autocast():
            hidden_nh, labels_n = self._trained_positions(batch)
            losses, hits = [], []
            for chunk_nh, labels in self._chunks(hidden_nh, labels_n):
                logits = self._head()(chunk_nh).float()
                losses.append(cross_entropy(logits, labels, reduction="none"))
                hits.append(logits.argmax(-1) == labels)
        return torch.cat(losses), torch.cat(hits)

    def accumulate(self, samples: Sequence[Sample]) -> Tally:
        """Adds to the gradients of one optimizer step, in micro-batches; each token weighs the
        same however the step is cut."""
        step_tokens = sum(sample.loss_tokens for sample in samples)
        total = Tally()
        for batch in micro_batches(samples, self.budget.micro_batch_tokens):
            padded_tokens = len(batch) * len(batch[0].ids)
            self._set_checkpointing(padded_tokens > self.budget.checkpoint_over_tokens)
            total.add(self._backward(batch, step_tokens))
        return total

    def update(self, rate: float) -> float:
        """Applies the gradients; returns their norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.adapter.values(), GRADIENT_NORM_MAX))
        if not math.isfinite(norm):
            raise _failed("a gradient is not a finite number")
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _backward(self, batch: Sequence[Sample], step_tokens: int) -> Tally:
        """The head is frozen, so each chunk's gradient is taken at once and its logits freed; the
        body then runs backward once with all of them."""
        with disable_input_dtype_casting(self.model):
            with self._autocast():
                hidden_nh, labels_n = self._trained_positions(batch)
            tally = Tally(tokens=len(labels_n))
            gradients = []
            for chunk_nh, labels in self._chunks(hidden_nh.detach(), labels_n):
                leaf_nh = chunk_nh.requires_grad_()
                with self._autocast():
                    logits = self._head()(leaf_nh).float()
                loss = cross_entropy(logits, labels, reduction="sum")
                gradients.extend(torch.autograd.grad(loss / step_tokens, leaf_nh))
                tally.loss += float(loss.detach())
                tally.correct += int((logits.detach().argmax(-1) == labels).sum())
            if not math.isfinite(tally.loss):
                raise _failed("the training loss is not a finite number")
            hidden_nh.backward(torch.cat(gradients))
        return tally

    def _trained_positions(self, batch: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states that predict trained tokens, and these tokens. Padding is on the right,
        where causal attention never looks back from, so no mask is needed."""
        device = next(iter(self.adapter.values())).device
        ids_bt = torch.zeros(len(batch), max(len(s.ids) for s in batch), dtype=torch.long)
        mask_bt = torch.zeros_like(ids_bt, dtype=torch.bool)
        for i, sample in enumerate(batch):
            ids_bt[i, : len(sample.ids)] = torch.from_numpy(sample.ids)
            for start, end in sample.spans:
                mask_bt[i, start:end] = True
        rows, columns = mask_bt.nonzero(as_tuple=True)
        body = self.model.get_base_model().base_model
        hidden_bth = body(input_ids=ids_bt.to(device), use_cache=False).last_hidden_state
        chosen = hidden_bth[rows.to(device), (columns - 1).to(device)]
        return chosen, ids_bt[rows, columns].to(device)

    def _chunks(
        self, hidden_nh: torch.Tensor, labels_n: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = self.budget.head_chunk_tokens
        return zip(hidden_nh.split(size), labels_n.split(size), strict=True)

    def _head(self) -> torch.nn.Module:
        head: torch.nn.Module = self.model.get_base_model().get_output_embeddings()
        return head

    def _set_checkpointing(self, on: bool) -> None:
        """Reentrant checkpointing gives a frozen base's adapters no gradient: never that one."""
        base = self.model.get_base_model()
        if on and not base.is_gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        elif not on and base.is_gradient_checkpointing:
            base.gradient_checkpointing_disable()

    def _autocast(self) -> AbstractContextManager[None]:
        """bf16 arithmetic. It goes with `disable_input_dtype_casting`: peft would otherwise copy
        the input of each layer to fp32."""
        device = next(iter(self.adapter.values())).device
        casting: AbstractContextManager[None] = torch.autocast(device.type, dtype=torch.bfloat16)
        return casting


@dataclass(slots=True)
class _Run:
    """How far the training is. `epoch` sums up the current one, `measured` has each step; `before`
    and `after` are what was evaluated, if rows were held out."""

    steps: int
    step: int = 0
    trained_tokens: int = 0
    loss_tokens: int = 0
    before: Tally | None = None
    after: Tally | None = None
    epoch: Tally = field(default_factory=Tally)
    measured: list[Tally] = field(default_factory=list)

    def progress(self) -> TrainProgress:
        return TrainProgress(
            step=self.step,
            steps=self.steps,
            trained_tokens=self.trained_tokens,
            train_loss=self.measured[-1].mean_loss if self.measured else None,
            eval_loss_before=_loss(self.before),
        )

    def result(self) -> dict[str, Any]:
        """Its part of a TrainResult."""
        return {
            "trained_tokens": self.trained_tokens,
            "loss_tokens": self.loss_tokens,
            "steps": self.step,
            "train_loss": self.epoch.mean_loss,
            "train_accuracy": self.epoch.accuracy,
            "eval_loss_before": _loss(self.before),
            "eval_loss": _loss(self.after),
            "eval_accuracy": None if self.after is None else self.after.accuracy,
        }


def _loss(tally: Tally | None) -> float | None:
    return None if tally is None else tally.mean_loss


def _run_epochs(
    learner: Learner,
    rows: Sequence[RenderedRow],
    task: TrainTask,
    run: _Run,
    report: Callable[[TrainProgress], None],
) -> None:
    """Every row once an epoch, in a fresh order; the last step of an epoch may be a smaller one."""
    size = task.hyperparameters.batch_size
    for epoch in range(task.hyperparameters.n_epochs):
        run.epoch = Tally()
        order = shuffled(len(rows), seed=task.seed, purpose=f"epoch {epoch}")
        for start in range(0, len(order), size):
            chosen = [rows[i] for i in order[start : start + size]]
            tally = learner.accumulate(samples_of(chosen))
            run.step += 1
            learner.update(learning_rate(run.step, steps=run.steps, peak=learner.peak_rate))
            if run.step == 1:
                require_all_modules_learn(learner.adapter)
            run.epoch.add(tally)
            run.loss_tokens += tally.tokens
            run.trained_tokens += sum(row.billed_tokens for row in chosen)
            run.measured.append(tally)
            report(run.progress())


def require_all_modules_learn(adapter: Mapping[str, torch.Tensor]) -> None:
    """lora_B starts at zero: one that still is zero after a step got no gradient."""
    still = [name for name, p in adapter.items() if "lora_B" in name and not bool(p.any())]
    if still:
        raise _failed(f"{len(still)} of the adapter's modules received no gradient")


def round_adapter(model: PeftModel) -> None:
    """Gives the adapter the bf16 values that its file will hold, so that these are evaluated."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.to(torch.bfloat16))


def check_reloaded(learner: Learner, directory: Path, probe: Sequence[Sample]) -> None:
    """Loads the files as a user would, onto the bare base, and compares log-probabilities.

    Leaves the learner with the reloaded model. Raises TrainingRefused with `adapter_invalid`.
    """
    expected = [learner.token_losses([sample])[0] for sample in probe]
    learner.model = PeftModel.from_pretrained(learner.model.unload(), directory)
    for sample, losses in zip(probe, expected, strict=True):
        difference = (learner.token_losses([sample])[0] - losses).abs().max()
        if not float(difference) <= RELOAD_TOLERANCE:
            raise TrainingRefused(
                "The saved adapter does not answer as the trained one did.",
                code="adapter_invalid",
            )


def _failed(what: str) -> TrainingRefused:
    return TrainingRefused(f"Training failed: {what}.")
