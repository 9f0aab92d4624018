"""What travels over Kafka, and nothing else does.

`gridline.work.<gpu class>` carries Assign, Cancel and Revoke, keyed by runner id;
`gridline.runners` Heartbeat, keyed by runner id; `gridline.progress` Report, keyed by work id.
No message is precious: the log says what should run where, heartbeats say what does, and the worker
sends again what was lost. Every message names (work id, chunk, attempt, runner, seq), and whatever
belongs to an older attempt or another runner is ignored. A report that ends an attempt holds
complete totals, so that lost progress is harmless.

Changing a message: add optional fields only, or raise PROTOCOL_VERSION and read both.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from domain.catalog import AdapterMethod, Endpoint, TrainingMethod
from domain.log import stored

PROTOCOL_VERSION = 1

CHUNK_OUTPUT, CHUNK_ERRORS = "output.jsonl", "errors.jsonl"
"""What a chunk's attempt writes below its task's output prefix."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STEP_METRICS = "step_metrics.csv"
"""The same of a training."""

WORK_TOPIC = "work"
RUNNERS_TOPIC = "runners"
PROGRESS_TOPIC = "progress"


class Message(BaseModel):
    """Frozen; unknown fields of a newer sender are dropped."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = PROTOCOL_VERSION


class Part(BaseModel):
    """A value inside a message."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Attempt(Part):
    """One try at one piece of work, by one runner.

    `work_id` is a batch or job id; `chunk` counts a batch's chunks from 0 and is 0 for a training;
    `attempt` counts from 1 in each chunk.
    """

    work_id: str
    chunk: int = Field(ge=0)
    attempt: int = Field(ge=1)
    runner_id: str

    @classmethod
    def of(cls, attempt: stored.Attempt) -> Self:
        """What a message says of an attempt."""
        return cls(
            work_id=attempt.work_id,
            chunk=attempt.chunk,
            attempt=attempt.attempt,
            runner_id=attempt.runner_id,
        )

    def to_log(self) -> stored.Attempt:
        """The attempt that it names."""
        return stored.Attempt(
            work_id=self.work_id,
            chunk=self.chunk,
            attempt=self.attempt,
            runner_id=self.runner_id,
        )


class ObjectRef(Part):
    """An immutable object in the store."""

    key: str
    bytes: int = Field(ge=0)
    sha256: str

    @classmethod
    def of(cls, kept: stored.StoredObject) -> Self:
        """What a message says of a stored object."""
        return cls(key=kept.key, bytes=kept.bytes, sha256=kept.sha256)

    def to_log(self) -> stored.StoredObject:
        """What the log keeps of it."""
        return stored.StoredObject(key=self.key, bytes=self.bytes, sha256=self.sha256)


class AdapterRef(Part):
    """A fine-tuned model's two files. `name` is its `ft:` name."""

    name: str
    config: ObjectRef
    weights: ObjectRef
    rank: int = Field(ge=1)


class BatchChunkTask(Part):
    """Run the request lines in bytes [start_byte, end_byte) of the input object.

    `first_line` is the 1-based number of the line that starts at `start_byte` (blank lines count);
    `requests` counts the request lines, `sha256` is of those that are no blank ones, an LF after
    each: lines that are not what was checked are not run. Results go to
    `<output_prefix>output.jsonl` and `<output_prefix>errors.jsonl`; a file that would be empty is
    not written.
    """

    kind: Literal["batch_chunk"] = "batch_chunk"
    input_key: str
    start_byte: int = Field(ge=0)
    end_byte: int = Field(ge=0)
    first_line: int = Field(ge=1)
    requests: int = Field(ge=1)
    sha256: str
    endpoint: Endpoint
    base: str
    adapters: tuple[AdapterRef, ...] = ()
    output_prefix: str


class TrainingHyperparameters(Part):
    """Resolved: no "auto" is left. `beta` is null but for DPO."""

    n_epochs: int
    batch_size: int
    learning_rate: float
    lora_rank: int
    lora_alpha: int
    max_seq_length: int
    beta: float | None = None


class TrainTask(Part):
    """Train one adapter; its files go under `output_prefix`.

    Without `validation`, `eval_rows` rows are held out of the training file first, chosen by seed.
    """

    kind: Literal["train"] = "train"
    base: str
    method: TrainingMethod
    adapter: AdapterMethod
    hyperparameters: TrainingHyperparameters
    seed: int
    training: ObjectRef
    validation: ObjectRef | None = None
    eval_rows: int = Field(ge=0)
    time_limit_seconds: int = Field(ge=1)
    output_prefix: str


Task = Annotated[BatchChunkTask | TrainTask, Field(discriminator="kind")]
TaskKind = Literal["batch_chunk", "train"]


class Assign(Message):
    """Run this attempt. Sent again while heartbeats do not name it; a runner acts on it once, and
    answers a repeat for an ended attempt with the same final report."""

    type: Literal["assign"] = "assign"
    attempt: Attempt
    task: Task


class Cancel(Message):
    """Stop, keep what is finished, and report it."""

    type: Literal["cancel"] = "cancel"
    attempt: Attempt


class Revoke(Message):
    """Stop and forget: the attempt is no longer current."""

    type: Literal["revoke"] = "revoke"
    attempt: Attempt


WorkMessage = Annotated[Assign | Cancel | Revoke, Field(discriminator="type")]
WORK_MESSAGE: TypeAdapter[Assign | Cancel | Revoke] = TypeAdapter(WorkMessage)


class Heartbeat(Message):
    """Sent by each runner every few seconds.

    `slots` says how many tasks of each kind it can run at a time; `running` names what it runs
    now. `bases` are the catalog ids it can serve or train; `warm_base` the one its engine has
    loaded. A runner that is `draining` takes no new work and finishes what runs. `stopping` is the
    last heartbeat of a runner that shuts down in order, and its `running` what it abandons.
    """

    type: Literal["heartbeat"] = "heartbeat"
    runner_id: str
    gpu_class: str
    sent_at: datetime
    slots: dict[TaskKind, int]
    running: tuple[Attempt, ...] = ()
    bases: tuple[str, ...] = ()
    warm_base: str | None = None
    draining: bool = False
    stopping: bool = False


class ModelUsage(Part):
    """Tokens of the finished lines of one model name."""

    model: str
    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)


class Started(Part):
    """The runner has begun."""

    type: Literal["started"] = "started"


class ChunkProgress(Part):
    """Lines finished so far in this attempt."""

    type: Literal["chunk_progress"] = "chunk_progress"
    completed: int = Field(ge=0)
    failed: int = Field(ge=0)


class ChunkFinished(Part):
    """The end of a chunk's attempt. `completed + failed == requests` unless `cancelled`."""

    type: Literal["chunk_finished"] = "chunk_finished"
    completed: int = Field(ge=0)
    failed: int = Field(ge=0)
    usage: tuple[ModelUsage, ...] = ()
    output: ObjectRef | None = None
    errors: ObjectRef | None = None
    cancelled: bool = False


class TrainProgress(Part):
    """Counters and losses at a step; all counters are cumulative. `eval_loss_before` is present
    from the first report that follows the measuring of it."""

    type: Literal["train_progress"] = "train_progress"
    step: int = Field(ge=0)
    steps: int = Field(ge=0)
    trained_tokens: int = Field(ge=0)
    train_loss: float | None = None
    eval_loss_before: float | None = None


class TrainFinished(Part):
    """A trained, cast, reloaded and checked adapter, and the CSV of what each step measured.

    `trained_tokens` is what is billed: all tokens of the trained rows as rendered, after the cut,
    times epochs. `loss_tokens` carry loss. Losses are the mean cross-entropy (DPO: the DPO loss).
    """

    type: Literal["train_finished"] = "train_finished"
    trained_tokens: int = Field(ge=0)
    loss_tokens: int = Field(ge=0)
    steps: int = Field(ge=0)
    train_loss: float
    train_accuracy: float | None = None
    eval_loss_before: float | None = None
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    eval_rows: int = Field(ge=0)
    rows_trained: int = Field(ge=0)
    rows_dropped: int = Field(ge=0)
    seconds: float
    adapter_config: ObjectRef
    adapter_weights: ObjectRef
    step_metrics: ObjectRef
    base_revision: str
    versions: dict[str, str] = {}


class AttemptFailed(Part):
    """The attempt ended without a result.

    `code` is a job error code of the fine-tuning page ("Errors"), or for a chunk `engine_failed`;
    `message` is written for the customer. `trained_tokens` is what had been trained.
    """

    type: Literal["attempt_failed"] = "attempt_failed"
    code: str
    message: str
    trained_tokens: int = Field(ge=0, default=0)


class TrainCancelled(Part):
    """A training stopped because it was asked to."""

    type: Literal["train_cancelled"] = "train_cancelled"
    trained_tokens: int = Field(ge=0, default=0)


ReportBody = Annotated[
    Started
    | ChunkProgress
    | ChunkFinished
    | TrainProgress
    | TrainFinished
    | TrainCancelled
    | AttemptFailed,
    Field(discriminator="type"),
]

FINAL_REPORTS = (ChunkFinished, TrainFinished, TrainCancelled, AttemptFailed)


class Report(Message):
    """What a runner tells of an attempt. `seq` grows within the attempt."""

    attempt: Attempt
    seq: int = Field(ge=1)
    at: datetime
    body: ReportBody

    @property
    def is_final(self) -> bool:
        return isinstance(self.body, FINAL_REPORTS)
