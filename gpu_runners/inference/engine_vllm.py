"""vLLM inside the engine child's own process, stepped: no server, no second process.

`child.py` makes one when told to, with the interpreter that has vLLM. Adapters are loaded
before any request names them, since vLLM answers some unloadable ones by dying. One slot more than
a batch may use stays free, and the CPU's LoRA operations are replaced (`grouped_lora.py`): with
vLLM's own, a base-model row beside adapter rows gets the last slot's answer.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm import EngineArgs, LLMEngine, PoolingParams, RequestOutput, SamplingParams
from vllm.config import PoolerConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, PoolingRequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from domain.inputs.requests.chat_body import ChatBody
from gpu_runners.inference import grouped_lora
from gpu_runners.inference.adapter_check import check_adapter
from gpu_runners.inference.answer_form import AnswerForms, decoder_schema
from gpu_runners.inference.answer_text import EntryWriter, Position
from gpu_runners.inference.engine import (
    CACHE_BYTES,
    AdapterUnusable,
    Base,
    ChatRequest,
    Choice,
    Embedded,
    EmbeddingRequest,
    EngineFailed,
    Generated,
    Result,
    guarded,
)
from gpu_runners.inference.prompts import EmbeddingPrompts, chat_prompt
from gpu_runners.rendering.chat_template import ChatTemplate

ADAPTER_SLOTS = 9
"""Eight for a batch, and the spare one."""
ADAPTERS_KEPT = 32
CHAT_SEQUENCES_MAX = 256


class VllmEngine:
    """One base, for chat or for embeddings."""

    gather_seconds = 0.0

    def __init__(self) -> None:
        self._engine: LLMEngine
        self._template: ChatTemplate
        self._inputs: EmbeddingPrompts
        self._entries: EntryWriter
        self._forms: AnswerForms
        self._base: Base
        self._adapters: dict[str, LoRARequest] = {}
        self._embedding: dict[str, _EmbeddingLine] = {}
        self._running: dict[str, ChatBody] = {}

    def load(self, base: Base) -> None:
        if not torch.cuda.is_available():
            grouped_lora.install()
        self._base = base
        tokenizer = AutoTokenizer.from_pretrained(base.directory)
        if base.kind == "embedding":
            self._inputs = EmbeddingPrompts(tokenizer, window_tokens=base.window_tokens)
        else:
            self._template = ChatTemplate(
                tokenizer, control_tokens=base.control_tokens, arguments=base.template_kwargs
            )
            self._entries = EntryWriter(tokenizer)
        self._engine = LLMEngine.from_engine_args(EngineArgs(**_engine_arguments(base)))
        vocabulary = self._engine.model_config.get_vocab_size()
        self._forms = AnswerForms(tokenizer, vocabulary=vocabulary, ends=[tokenizer.eos_token_id])

    def add_adapter(self, name: str, directory: Path) -> None:
        if name in self._adapters:
            return
        check_adapter(directory, rank_max=self._base.rank_max)
        request = LoRARequest(name, len(self._adapters) + 1, str(directory))
        try:
            added = self._engine.add_lora(request)
        except Exception as error:
            raise AdapterUnusable("The fine-tuned model's files cannot be loaded.") from error
        if not added:
            raise AdapterUnusable("The fine-tuned model cannot be loaded onto this base.")
        self._adapters[name] = request

    def submit(self, request: ChatRequest | EmbeddingRequest) -> None:
        if isinstance(request, ChatRequest):
            self._submit_chat(request)
        else:
            self._submit_embedding(request)

    def step(self) -> list[Result]:
        results: list[Result] = []
        for output in self._engine.step():
            if isinstance(output, PoolingRequestOutput):
                results += self._embedded(output)
            elif output.finished:
                body = self._running.pop(output.request_id)
                results.append(guarded(output.request_id, partial(self._generated, output, body)))
        return results

    def abort(self) -> None:
        parts = [part for line in self._embedding.values() for part in line.parts]
        self._engine.abort_request([*self._running, *parts])
        self._running.clear()
        self._embedding.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()

    @property
    def busy(self) -> bool:
        return bool(self._running or self._embedding)

    def _submit_chat(self, request: ChatRequest) -> None:
        window = self._base.window_tokens
        prompt = chat_prompt(self._template, request.body.messages, window_tokens=window)
        self._forms.check(request.body.response_format)
        parameters = _sampling_params(request.body, room=window - len(prompt))
        adapter = None if request.adapter is None else self._adapters[request.adapter]
        try:
            self._engine.add_request(
                request.id, {"prompt_token_ids": prompt}, parameters, lora_request=adapter
            )
        except (VLLMValidationError, ValueError) as error:
            raise EngineFailed("The engine could not take this request.") from error
        self._running[request.id] = request.body

    def _submit_embedding(self, request: EmbeddingRequest) -> None:
        prompts = self._inputs.ids(request.inputs)
        parts = [f"{request.id}/{index}" for index in range(len(prompts))]
        try:
            for part, prompt in zip(parts, prompts, strict=True):
                self._engine.add_request(
                    part, {"prompt_token_ids": prompt}, PoolingParams(task="embed")
                )
        except (VLLMValidationError, ValueError) as error:
            self._engine.abort_request(parts)
            raise EngineFailed("The engine could not take this request.") from error
        self._embedding[request.id] = _EmbeddingLine(parts, sum(map(len, prompts)))

    def _embedded(self, output: PoolingRequestOutput) -> list[Result]:
        line_id = output.request_id.rpartition("/")[0]
        line = self._embedding[line_id]
        line.vectors[output.request_id] = output.outputs.data.tolist()
        if len(line.vectors) < len(line.parts):
            return []
        del self._embedding[line_id]
        vectors = [line.vectors[part] for part in line.parts]
        return [Embedded(id=line_id, vectors=vectors, input_tokens=line.input_tokens)]

    def _generated(self, output: RequestOutput, body: ChatBody) -> Generated:
        prompt = output.prompt_token_ids or []
        completions = sorted(output.outputs, key=lambda each: each.index)
        copies = body.sampling.n // len(completions)
        return Generated(
            id=output.request_id,
            choices=[self._choice(each, body, prompt) for each in completions] * copies,
            input_tokens=len(prompt),
            output_tokens=copies * sum(len(each.token_ids) for each in completions),
        )

    def _choice(self, completion: CompletionOutput, body: ChatBody, prompt: list[int]) -> Choice:
        """Raises GridlineError for an answer that is none."""
        text, reason = completion.text, completion.finish_reason
        if reason == "stop":
            self._forms.check_answer(body, text)
        elif reason != "length":
            raise EngineFailed("The engine ended this request without an answer.")
        entries = None
        if body.sampling.logprobs is not None:
            positions = _positions(completion, body.sampling.logprobs)
            entries = self._entries.entries(positions, prompt=prompt, text=text)
        return Choice(text=text, finish_reason=reason, logprobs=entries)


def _positions(completion: CompletionOutput, alternatives: int) -> list[Position]:
    positions = []
    for token, found in zip(completion.token_ids, completion.logprobs or (), strict=True):
        best = sorted(found.items(), key=lambda item: -item[1].logprob)[:alternatives]
        likeliest = [(other, value.logprob) for other, value in best]
        positions.append(Position(token, found[token].logprob, likeliest))
    return positions


class _EmbeddingLine:
    """A line's inputs are requests of their own to the engine, and one answer."""

    def __init__(self, parts: list[str], input_tokens: int) -> None:
        self.parts = parts
        self.input_tokens = input_tokens
        self.vectors: dict[str, list[float]] = {}


def _engine_arguments(base: Base) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(base.directory),
        "max_model_len": base.window_tokens,
        "enforce_eager": not torch.cuda.is_available(),
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    if not torch.cuda.is_available():
        arguments["kv_cache_memory_bytes"] = CACHE_BYTES
    if base.kind == "embedding":
        pooler = PoolerConfig(seq_pooling_type=(base.pooling or "").upper())
        return {**arguments, "runner": "pooling", "dtype": "float32", "pooler_config": pooler}
    arguments |= {
        "dtype": "bfloat16",
        "max_num_seqs": CHAT_SEQUENCES_MAX,
        "structured_outputs_config": {"backend": "guidance"},
    }
    if base.rank_max > 0:
        arguments |= {
            "enable_lora": True,
            "max_loras": ADAPTER_SLOTS,
            "max_cpu_loras": ADAPTERS_KEPT,
            "max_lora_rank": base.rank_max,
        }
    return arguments


def _sampling_params(body: ChatBody, *, room: int) -> SamplingParams:
    sampling, wanted = body.sampling, body.response_format
    structured = None
    if wanted.kind != "text":
        structured = StructuredOutputsParams(json=decoder_schema(wanted))
    return SamplingParams(
        # Greedy answers are all alike, and vLLM refuses to make more than one.
        n=1 if sampling.greedy else sampling.n,
        max_tokens=min(sampling.max_tokens, room),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p,
        seed=sampling.engine_seed(0),
        stop=list(sampling.stop),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=sampling.logprobs,
        structured_outputs=structured,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
