"""transformers and peft as an engine: for machines without vLLM, and to compare vLLM with.

`child.py` makes one when told to. It generates rows of one adapter together (`generation.py`), as
many as the memory that it may take for them holds when each comes to its limit.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from gpu_runners.inference.adapter_check import check_adapter
from gpu_runners.inference.answer_form import AnswerForms
from gpu_runners.inference.answer_text import AnswerText, EntryWriter
from gpu_runners.inference.drawing import generator
from gpu_runners.inference.engine import (
    CACHE_BYTES,
    AdapterUnusable,
    Base,
    ChatRequest,
    Choice,
    Embedded,
    EmbeddingRequest,
    Generated,
    Refused,
    Result,
    guarded,
)
from gpu_runners.inference.generation import Asked, Batch, Drawn, Row
from gpu_runners.inference.pooling import pooled
from gpu_runners.inference.prompts import EmbeddingPrompts, chat_prompt
from gpu_runners.rendering.chat_template import ChatTemplate

ROWS_MAX = 32
ADAPTERS_MAX = 16


class TransformersEngine:
    """One base, for chat or for embeddings."""

    gather_seconds = 0.02

    def __init__(self) -> None:
        self._base: Base
        self._tokenizer: Any
        self._model: Any
        self._template: ChatTemplate
        self._entries: EntryWriter
        self._inputs: EmbeddingPrompts
        self._forms: AnswerForms
        self._ends: frozenset[int] = frozenset()
        self._cache_tokens_max = 0
        self._adapters: OrderedDict[str, str] = OrderedDict()
        self._adapters_loaded = 0
        self._waiting: deque[Asked] = deque()
        self._texts: deque[tuple[str, list[list[int]]]] = deque()
        self._batch: Batch | None = None
        self._ended: dict[str, list[Row]] = {}

    def load(self, base: Base) -> None:
        self._base = base
        tokenizer = self._tokenizer = AutoTokenizer.from_pretrained(base.directory)
        if base.kind == "embedding":
            self._inputs = EmbeddingPrompts(tokenizer, window_tokens=base.window_tokens)
            self._model = AutoModel.from_pretrained(base.directory, dtype=torch.float32).eval()
            return
        self._template = ChatTemplate(
            tokenizer, control_tokens=base.control_tokens, arguments=base.template_kwargs
        )
        self._entries = EntryWriter(tokenizer)
        self._load_base()
        ends = self._model.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or [])
        vocabulary = self._model.config.get_text_config().vocab_size
        self._forms = AnswerForms(tokenizer, vocabulary=vocabulary, ends=sorted(self._ends))
        self._cache_tokens_max = CACHE_BYTES // _cache_bytes_of_a_token(self._model.config)

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
            self._waiting.extend(self._asked(request))

    def step(self) -> list[Result]:
        with torch.inference_mode():
            if self._texts:
                line, prompts = self._texts.popleft()
                return [guarded(line, lambda: self._embedded(line, prompts))]
            if self._batch is None:
                self._batch = self._next_batch()
            ended = self._batch.step()
            if not self._batch.rows:
                self._batch = None
        return list(self._results(ended))

    def abort(self) -> None:
        self._waiting.clear()
        self._texts.clear()
        self._ended.clear()
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

    def _asked(self, request: ChatRequest) -> list[Asked]:
        """Raises EngineRefusal."""
        sampling = request.body.sampling
        window = self._base.window_tokens
        prompt = chat_prompt(self._template, request.body.messages, window_tokens=window)
        self._forms.check(request.body.response_format)
        limit = min(sampling.max_tokens, window - len(prompt))
        # Greedy answers are all alike.
        choices = 1 if sampling.greedy else sampling.n
        return [Asked(request, choice, choices, prompt, limit) for choice in range(choices)]

    def _row(self, asked: Asked) -> Row:
        sampling, form = asked.request.body.sampling, asked.request.body.response_format
        return Row(
            asked=asked,
            source=generator(sampling, asked.choice),
            writing=AnswerText(self._tokenizer, asked.prompt),
            matcher=self._forms.matcher(form),
            drawn=None if sampling.logprobs is None else Drawn(sampling.logprobs),
        )

    def _next_batch(self) -> Batch:
        """The waiting rows that share the first one's adapter, as many as the cache has room for
        when all of them come to their limits."""
        adapter = self._waiting[0].request.adapter
        chosen: list[Asked] = []
        left: deque[Asked] = deque()
        longest = 0
        for asked in self._waiting:
            reserved, count = max(longest, asked.reserved_tokens), len(chosen) + 1
            fits = count <= ROWS_MAX and count * reserved <= self._cache_tokens_max
            if asked.request.adapter == adapter and (fits or not chosen):
                chosen.append(asked)
                longest = reserved
            else:
                left.append(asked)
        self._waiting = left
        self._choose(adapter)
        return Batch(self._model, self._ends, [self._row(asked) for asked in chosen])

    def _choose(self, adapter: str | None) -> None:
        if not isinstance(self._model, PeftModel):
            return
        if adapter is None:
            self._model.base_model.disable_adapter_layers()
        else:
            self._model.base_model.enable_adapter_layers()
            self._model.set_adapter(self._adapters[adapter])

    def _results(self, ended: Sequence[Row]) -> list[Result]:
        """Of the lines whose last row has ended, or of which one has failed."""
        failures = {row.line: row.failure for row in ended if row.failure is not None}
        for line in failures:
            self._waiting = deque(each for each in self._waiting if each.request.id != line)
            self._ended.pop(line, None)
        whole = [row.line for row in ended if row.failure is None and self._is_last(row)]
        return [
            *(Refused(id=line, error=failure) for line, failure in failures.items()),
            *(guarded(line, partial(self._generated, line)) for line in whole),
        ]

    def _is_last(self, row: Row) -> bool:
        rows = self._ended.setdefault(row.line, [])
        rows.append(row)
        return len(rows) == row.asked.of

    def _generated(self, line: str) -> Generated:
        """Raises GridlineError for an answer that is none."""
        rows = sorted(self._ended.pop(line), key=lambda each: each.asked.choice)
        asked = rows[0].asked
        copies = asked.request.body.sampling.n // len(rows)
        return Generated(
            id=line,
            choices=[self._choice(each) for each in rows] * copies,
            input_tokens=len(asked.prompt),
            output_tokens=copies * sum(len(each.tokens) for each in rows),
        )

    def _choice(self, row: Row) -> Choice:
        assert row.finish_reason is not None
        if row.finish_reason == "stop":
            self._forms.check_answer(row.asked.request.body, row.text)
        entries = None
        if row.drawn is not None:
            positions = row.drawn.positions()
            entries = self._entries.entries(positions, prompt=row.asked.prompt, text=row.text)
        return Choice(row.text, row.finish_reason, entries)

    def _embedded(self, line: str, prompts: list[list[int]]) -> Embedded:
        assert self._base.pooling is not None
        vectors = pooled(self._model, prompts, self._base.pooling)
        return Embedded(id=line, vectors=vectors, input_tokens=sum(map(len, prompts)))


def _cache_bytes_of_a_token(config: Any) -> int:
    """What the keys and values of one token take in bf16, in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(text.num_hidden_layers * 2 * heads * width * 2)
