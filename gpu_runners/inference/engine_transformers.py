"""transformers and peft as an engine: for machines without vLLM, and to compare vLLM with.

`child.py` makes one when told to. Rows of one adapter are generated together, left-padded
over one cache; a finished row leaves the batch at once. What it cannot do is refused by name.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from gpu_runners.inference.adapter_check import check_adapter
from gpu_runners.inference.engine import (
    AdapterUnusable,
    Base,
    ChatRequest,
    Choice,
    Embedded,
    EmbeddingRequest,
    EngineRefusal,
    FinishReason,
    Generated,
    Result,
)
from gpu_runners.inference.prompts import EmbeddingPrompts, TokenWriter, chat_prompt
from gpu_runners.rendering.chat_template import ChatTemplate

ROWS_MAX = 32
PROMPT_TOKENS_MAX = 16_384
"""In one batch, padding included."""
ADAPTERS_MAX = 16


@dataclass(slots=True)
class _Row:
    """One answer in the making; a request for n answers has n rows."""

    request: ChatRequest
    prompt: list[int]
    token_limit: int
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None


class TransformersEngine:
    """One base, for chat or for embeddings."""

    def __init__(self) -> None:
        self._base: Base
        self._tokenizer: Any
        self._template: ChatTemplate
        self._inputs: EmbeddingPrompts
        self._model: Any
        self._writer: TokenWriter
        self._ends: frozenset[int] = frozenset()
        self._adapters: OrderedDict[str, str] = OrderedDict()
        self._adapters_loaded = 0
        self._waiting: deque[list[_Row]] = deque()
        self._texts: deque[tuple[str, list[list[int]]]] = deque()
        self._batch: _Batch | None = None
        self._answers: dict[str, list[_Row]] = {}

    def load(self, base: Base) -> None:
        self._base = base
        self._tokenizer = AutoTokenizer.from_pretrained(base.directory)
        if base.kind == "embedding":
            self._inputs = EmbeddingPrompts(self._tokenizer, window_tokens=base.window_tokens)
            self._model = AutoModel.from_pretrained(base.directory, dtype=torch.float32).eval()
            return
        self._template = ChatTemplate(
            self._tokenizer, control_tokens=base.control_tokens, arguments=base.template_kwargs
        )
        self._writer = TokenWriter(self._tokenizer)
        self._load_base()
        ends = self._model.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or [])

    def add_adapter(self, name: str, directory: Path) -> None:
        if name in self._adapters:
            self._adapters.move_to_end(name)
            return
        check_adapter(directory, rank_max=self._base.rank_max)
        # peft takes no dots in a name, and `ft:` names have some.
        self._adapters_loaded += 1
        inner = f"a{self._adapters_loaded}"
        try:
            self._load_adapter(inner, directory)
        except Exception as error:
            self._undo_load(inner)
            raise AdapterUnusable("The fine-tuned model's files cannot be loaded.") from error
        self._adapters[name] = inner
        if len(self._adapters) > ADAPTERS_MAX:
            _, oldest = self._adapters.popitem(last=False)
            self._model.delete_adapter(oldest)

    def submit(self, request: ChatRequest | EmbeddingRequest) -> None:
        if isinstance(request, EmbeddingRequest):
            self._texts.append((request.id, self._inputs.ids(request.inputs)))
        else:
            rows = self._rows(request)
            self._answers[request.id] = rows
            self._waiting.append(rows)

    def step(self) -> list[Result]:
        with torch.inference_mode():
            if self._texts:
                return [self._embed(*self._texts.popleft())]
            if self._batch is None:
                self._batch = self._next_batch()
            finished = self._batch.step()
            if not self._batch.rows:
                self._batch = None
        return [self._generated(request_id) for request_id in self._complete(finished)]

    def abort(self) -> None:
        self._waiting.clear()
        self._texts.clear()
        self._answers.clear()
        self._batch = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._texts or self._batch)

    def _load_base(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(self._base.directory, dtype=torch.bfloat16)
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def _load_adapter(self, inner: str, directory: Path) -> None:
        options = {"autocast_adapter_dtype": False, "is_trainable": False}
        if isinstance(self._model, PeftModel):
            result = self._model.load_adapter(str(directory), adapter_name=inner, **options)
            if result.unexpected_keys:
                raise ValueError("the adapter has tensors for other modules")
        else:
            self._model = PeftModel.from_pretrained(
                self._model, str(directory), adapter_name=inner, **options
            ).eval()

    def _undo_load(self, inner: str) -> None:
        """peft puts its layers in place before it looks at the tensors."""
        if not isinstance(self._model, PeftModel):
            self._load_base()
        elif inner in self._model.peft_config:
            self._model.delete_adapter(inner)

    def _rows(self, request: ChatRequest) -> list[_Row]:
        sampling = request.body.sampling
        if request.body.response_format.kind != "text":
            raise EngineRefusal(
                "This server's engine cannot hold answers to a JSON format; 'response_format' "
                "needs vLLM.",
                param="response_format",
                code="unsupported_parameter",
            )
        window = self._base.window_tokens
        prompt = chat_prompt(self._template, request.body.messages, window_tokens=window)
        room = window - len(prompt)
        return [
            _Row(
                request=request,
                prompt=prompt,
                token_limit=min(sampling.max_tokens, room),
                generator=_generator(sampling.engine_seed(index)),
            )
            for index in range(sampling.n)
        ]

    def _next_batch(self) -> _Batch:
        """The waiting rows that share the first one's adapter, as many as fit."""
        adapter = self._waiting[0][0].request.adapter
        rows: list[_Row] = []
        left: deque[list[_Row]] = deque()
        longest = 0
        for group in self._waiting:
            length = max(longest, len(group[0].prompt))
            count = len(rows) + len(group)
            fits = count <= ROWS_MAX and count * length <= PROMPT_TOKENS_MAX
            if group[0].request.adapter == adapter and (fits or not rows):
                rows += group
                longest = length
            else:
                left.append(group)
        self._waiting = left
        self._choose(adapter)
        return _Batch(self._model, self._tokenizer, self._writer, self._ends, rows)

    def _choose(self, adapter: str | None) -> None:
        if not isinstance(self._model, PeftModel):
            return
        if adapter is None:
            self._model.base_model.disable_adapter_layers()
        else:
            self._model.base_model.enable_adapter_layers()
            self._model.set_adapter(self._adapters[adapter])

    def _complete(self, finished: list[_Row]) -> list[str]:
        """Requests all of whose rows have ended."""
        ids = {row.request.id for row in finished}
        return [i for i in ids if all(row.finish_reason for row in self._answers[i])]

    def _generated(self, request_id: str) -> Generated:
        rows = self._answers.pop(request_id)
        asked = rows[0].request.body.sampling.logprobs is not None
        return Generated(
            id=request_id,
            choices=[
                Choice(row.text, row.finish_reason or "stop", row.logprobs if asked else None)
                for row in rows
            ],
            input_tokens=len(rows[0].prompt),
            output_tokens=sum(len(row.tokens) for row in rows),
        )

    def _embed(self, request_id: str, prompts: list[list[int]]) -> Embedded:
        vectors = []
        for start in range(0, len(prompts), ROWS_MAX):
            vectors += self._mean_pooled(prompts[start : start + ROWS_MAX])
        return Embedded(id=request_id, vectors=vectors, input_tokens=sum(map(len, prompts)))

    def _mean_pooled(self, prompts: list[list[int]]) -> list[list[float]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1)
        vectors: list[list[float]] = torch.nn.functional.normalize(mean).tolist()
        return vectors


class _Batch:
    """Rows that generate together: one forward pass a step, the prompts' pass first."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        writer: TokenWriter,
        ends: frozenset[int],
        rows: list[_Row],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._writer = writer
        self._ends = ends
        self.rows = rows
        self._cache = DynamicCache(config=model.config)
        width = max(len(row.prompt) for row in rows)
        self._ids = torch.zeros(len(rows), width, dtype=torch.long, device=model.device)
        self._mask = torch.zeros_like(self._ids)
        for index, row in enumerate(rows):
            self._ids[index, width - len(row.prompt) :] = torch.tensor(row.prompt)
            self._mask[index, width - len(row.prompt) :] = 1

    def step(self) -> list[_Row]:
        """One token more for every row; returns the rows that ended with it."""
        positions = (self._mask.cumsum(-1) - 1).clamp_min(0)[:, -self._ids.shape[1] :]
        output = self._model(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1].float().cpu()
        for row, row_logits in zip(self.rows, logits, strict=True):
            self._extend(row, row_logits)
        return self._drop_finished()

    def _drop_finished(self) -> list[_Row]:
        finished = [row for row in self.rows if row.finish_reason]
        kept = [index for index, row in enumerate(self.rows) if not row.finish_reason]
        self.rows = [self.rows[index] for index in kept]
        if self.rows:
            if finished:
                chosen = torch.tensor(kept, device=self._mask.device)
                self._cache.batch_select_indices(chosen)
                self._mask = self._mask[chosen]
            last = [[row.tokens[-1]] for row in self.rows]
            self._ids = torch.tensor(last, device=self._mask.device)
            self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], dim=1)
        return finished

    def _extend(self, row: _Row, logits: torch.Tensor) -> None:
        token = _draw(row, logits)
        row.tokens.append(token)
        if row.request.body.sampling.logprobs is not None:
            row.logprobs.append(self._logprob_entry(row, logits, token))
        ended = token in self._ends
        if ended or row.request.body.sampling.stop or len(row.tokens) >= row.token_limit:
            self._finish(row, ended=ended)

    def _finish(self, row: _Row, *, ended: bool) -> None:
        """Sets text and reason when the row has come to an end: its last token, a stop text, or
        the limit."""
        text = self._tokenizer.decode(row.tokens, skip_special_tokens=True)
        cuts = [at for stop in row.request.body.sampling.stop if (at := text.find(stop)) >= 0]
        if cuts:
            row.text, row.finish_reason = text[: min(cuts)], "stop"
        elif ended:
            row.text, row.finish_reason = text, "stop"
        elif len(row.tokens) >= row.token_limit:
            row.text, row.finish_reason = text, "length"

    def _logprob_entry(self, row: _Row, logits: torch.Tensor, token: int) -> dict[str, Any]:
        logprobs = torch.log_softmax(logits, dim=-1)
        best = torch.topk(logprobs, row.request.body.sampling.logprobs or 0)
        alternatives = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {
            **self._writer.entry(token, logprobs[token].item()),
            "top_logprobs": [self._writer.entry(other, value) for other, value in alternatives],
        }


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _draw(row: _Row, logits: torch.Tensor) -> int:
    """The next token, by the row's penalties, temperature and top_p."""
    sampling = row.request.body.sampling
    if row.tokens and (sampling.frequency_penalty or sampling.presence_penalty):
        seen, counts = torch.tensor(row.tokens).unique(return_counts=True)
        logits = logits.clone()
        logits[seen] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    if sampling.greedy:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(0) - ordered > sampling.top_p
        probabilities[order[beyond]] = 0
    return int(torch.multinomial(probabilities, 1, generator=row.generator))
