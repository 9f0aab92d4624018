"""What work can cost and how long it can take, before any of it runs.

A quote is a value: the create command pins it on the job, the quote route answers it and writes
nothing. What create refuses for a file as a whole (size, kind, rows, alternation, time) is refused
here, so that both say the same. Nothing here reads a file: the facts come from its check.
"""

from __future__ import annotations

from dataclasses import dataclass

from domain.catalog import DPO_SLOWDOWN, BaseModel
from domain.errors import InvalidFile
from domain.inputs.job_create import FineTuneCreate
from domain.inputs.training_file import TrainingFacts
from domain.ledger.prices import PriceList, batch_lines, training_lines
from domain.ledger.receipt import charge_of
from domain.limits import (
    HOLD_OUT_DIVISOR,
    HOLD_OUT_ROWS_MAX,
    HOLD_OUT_ROWS_MIN,
    JOB_SECONDS_MAX,
    JOB_SETUP_SECONDS,
    MIB,
    TRAINING_FILE_BYTES_MAX,
    TRAINING_ROWS_MIN,
)
from domain.log.stored import StoredModel, TokenUsage

EVAL_PASSES = 2
"""Before and after training."""
EVAL_SPEEDUP = 3
"""An evaluated token costs a forward pass, a trained one a forward and a backward: a third."""


@dataclass(frozen=True, slots=True)
class JobInput:
    """A fine-tune file as create found it. `bytes` is its size."""

    facts: TrainingFacts
    bytes: int


class FineTuneQuote(StoredModel):
    """The fine-tuning page's quote. Amounts are nano-USD, `trained_rate` nano-USD per 1M tokens."""

    training_tokens_per_epoch_upper_bound: int
    n_epochs: int
    eval_rows: int
    estimated_seconds: int
    estimated_nano_usd: int
    basis: str
    trained_rate_nano_usd_per_mtok: int
    minimum_nano_usd: int
    maximum_nano_usd: int
    gpu_memory_class_gb: int | None
    price_version: int

    @property
    def training_tokens_upper_bound(self) -> int:
        """Tokens times epochs."""
        return self.training_tokens_per_epoch_upper_bound * self.n_epochs


class BatchQuote(StoredModel):
    """The most that a validated batch can cost, and why: `worst_case` has each model's input bound
    and every max_tokens. Amounts are nano-USD."""

    base: str
    requests: int
    worst_case: tuple[TokenUsage, ...]
    minimum_nano_usd: int
    maximum_nano_usd: int
    price_version: int


def quote_fine_tune(
    create: FineTuneCreate,
    *,
    training: JobInput,
    validation: JobInput | None,
    prices: PriceList,
) -> FineTuneQuote:
    """The quote of a job. Raises InvalidFile (`invalid_file_format`, `job_too_large`) naming the
    file and the fix, and InvalidRequest where the list has no price for the base."""
    of_model = prices.of(create.base.id)
    _check_file(create, training, param="training_file")
    if validation is not None:
        _check_file(create, validation, param="validation_file")
    eval_rows = _eval_rows(training.facts, validation)
    _check_rows(training.facts, held_out=0 if validation is not None else eval_rows)
    work_seconds = _work_seconds(create, training.facts, validation, eval_rows=eval_rows)
    bound = training.facts.token_bounds[create.base.id]
    memory_class_gb = create.training.memory_class_gb(
        create.method, seq_length=create.hyperparameters.max_seq_length
    )
    seconds = create.training.setup_seconds + work_seconds
    epochs = create.hyperparameters.n_epochs
    return FineTuneQuote(
        training_tokens_per_epoch_upper_bound=bound,
        n_epochs=epochs,
        eval_rows=eval_rows,
        estimated_seconds=seconds,
        estimated_nano_usd=-(-seconds * prices.machine_hour_nano_usd(memory_class_gb) // 3_600),
        basis=_basis(create),
        trained_rate_nano_usd_per_mtok=of_model.trained_rate(create.method),
        minimum_nano_usd=of_model.minimum_per_job_nano_usd,
        maximum_nano_usd=charge_of(
            training_lines(
                prices=prices,
                base=create.base.id,
                method=create.method,
                trained_tokens=bound * epochs,
            ),
            minimum_nano_usd=of_model.minimum_per_job_nano_usd,
        ),
        gpu_memory_class_gb=memory_class_gb,
        price_version=prices.version,
    )


def quote_batch(
    *, base: BaseModel, requests: int, worst_case: tuple[TokenUsage, ...], prices: PriceList
) -> BatchQuote:
    """The quote of a validated batch: each line at its input bound and its full max_tokens."""
    minimum = prices.of(base.id).minimum_per_batch_nano_usd
    return BatchQuote(
        base=base.id,
        requests=requests,
        worst_case=worst_case,
        minimum_nano_usd=minimum,
        maximum_nano_usd=charge_of(
            batch_lines(prices=prices, usage=worst_case), minimum_nano_usd=minimum
        ),
        price_version=prices.version,
    )


def hold_out_rows(rows: int) -> int:
    """Rows that are held out of a training file without a validation file."""
    return min(HOLD_OUT_ROWS_MAX, max(HOLD_OUT_ROWS_MIN, rows // HOLD_OUT_DIVISOR))


def _check_file(create: FineTuneCreate, given: JobInput, *, param: str) -> None:
    noun = param.replace("_", " ")
    if given.bytes > TRAINING_FILE_BYTES_MAX:
        raise InvalidFile(
            f"The {noun} is {given.bytes:,} bytes; the most is {TRAINING_FILE_BYTES_MAX // MIB} "
            "MiB. Split it, or drop rows.",
            param=param,
        )
    if create.base.id not in given.facts.token_bounds:
        raise InvalidFile(
            f"The {noun} was uploaded before {create.base.id} could be fine-tuned here, and its "
            "tokens were not counted for it. Upload it again.",
            param=param,
        )
    wanted = "preference" if create.method == "dpo" else "chat"
    if given.facts.kind != wanted:
        raise InvalidFile(
            f"The {noun} holds {given.facts.kind} rows; a {create.method} job trains on {wanted} "
            "rows. Use another file, or the other method.",
            param=param,
        )
    line = given.facts.first_row_that_does_not_alternate
    if create.training.strict_alternation and line is not None:
        raise InvalidFile(
            f"The {noun}, line {line}: {create.base.id} needs every row to alternate user and "
            "assistant after an optional first system message. Change the row, or use another "
            "base model.",
            param=param,
            line=line,
        )


def _eval_rows(training: TrainingFacts, validation: JobInput | None) -> int:
    return validation.facts.rows if validation is not None else hold_out_rows(training.rows)


def _check_rows(training: TrainingFacts, *, held_out: int) -> None:
    if training.rows - held_out < TRAINING_ROWS_MIN:
        besides = f" besides the {held_out} held out for evaluation" if held_out else ""
        raise InvalidFile(
            f"The training file has {training.rows} rows; at least {TRAINING_ROWS_MIN} are "
            f"needed{besides}. Add rows.",
            param="training_file",
        )


def _work_seconds(
    create: FineTuneCreate,
    training: TrainingFacts,
    validation: JobInput | None,
    *,
    eval_rows: int,
) -> int:
    """Seconds of training and evaluation. Raises InvalidFile `job_too_large`."""
    slowdown = DPO_SLOWDOWN if create.method == "dpo" else 1
    speed = create.training.tokens_per_second[create.adapter]
    epoch_tokens = _time_tokens(training, create.base)
    tokens = epoch_tokens * create.hyperparameters.n_epochs
    eval_tokens = (
        _time_tokens(validation.facts, create.base)
        if validation is not None
        else -(-epoch_tokens * eval_rows // training.rows)
    )
    eval_seconds = -(-eval_tokens * EVAL_PASSES * slowdown // (EVAL_SPEEDUP * speed))
    seconds = -(-tokens * slowdown // speed) + eval_seconds
    limit = JOB_SECONDS_MAX - JOB_SETUP_SECONDS
    if seconds > limit:
        fit = max(0, (limit - eval_seconds) * speed // slowdown)
        raise _too_large(create, training, seconds=seconds, sampled=tokens, fit=fit)
    return seconds


def _too_large(
    create: FineTuneCreate, training: TrainingFacts, *, seconds: int, sampled: int, fit: int
) -> InvalidFile:
    """Says it in the tokens that are billed; `sampled` and `fit` count those of all samples."""
    billed = training.token_estimates[create.base.id] * create.hyperparameters.n_epochs
    turn_by_turn = (
        f", which train turn by turn on {create.base.id} and take the time of {sampled:,}"
        if sampled != billed
        else ""
    )
    return InvalidFile(
        f"The job could take about {seconds + JOB_SETUP_SECONDS:,} seconds for an estimated "
        f"{billed:,} training tokens{turn_by_turn}; the limit is {JOB_SECONDS_MAX:,} seconds "
        f"(2 hours). About {fit * billed // sampled:,} training tokens fit, counting every epoch. "
        "Use fewer rows or epochs, or a smaller base model.",
        code="job_too_large",
        param="training_file",
    )


def _time_tokens(facts: TrainingFacts, base: BaseModel) -> int:
    return facts.sample_estimates.get(base.id, facts.token_estimates[base.id])


def _basis(create: FineTuneCreate) -> str:
    speed = create.training.tokens_per_second[create.adapter]
    dpo = " DPO counts each token twice, for its reference pass." if create.method == "dpo" else ""
    return (
        f"Time: the base's estimate of the file's tokens, times {create.hyperparameters.n_epochs} "
        f"epoch(s), at {speed:,} tokens per second ({create.adapter}), with an evaluation before "
        f"and after and {create.training.setup_seconds} seconds to set up.{dpo} The cost estimated "
        "from that time is not what you pay. The maximum charge counts an upper bound of the "
        "tokens from the file's bytes."
    )
