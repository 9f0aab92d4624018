"""vLLM inside the engine child's own process, stepped: no server, no second process.

`child.py` makes one when told to, with the interpreter that has vLLM. Adapters are loaded
before any request names them, since vLLM answers some unloadable ones by dying. One slot more than
a batch may use stays free, and the CPU's LoRA operations are replaced (`grouped_lora.py`): with
vLLM's own, a base-model row beside adapter rows gets the last slot's answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm import EngineArgs, LLMEngine, PoolingParams, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from domain.inputs.requests.chat_body import ChatBody
from domain.inputs.requests.sampling import Sampling
from gpu_runners.inference import grouped_lora
from gpu_runners.inference.adapter_check import check_adapter
from gpu_runners.inference.engine import (
    AdapterUnusable,
    Base,
    ChatRequest,
    Choice,
    Embedded,
    EmbeddingRequest,
    EngineFailed,
    EngineRefusal,
    Generated,
    Refused,
    Result,
)
from gpu_runners.inference.prompts import EmbeddingPrompts, TokenWriter, chat_prompt
from gpu_runners.rendering.chat_template import ChatTemplate

ADAPTER_SLOTS = 9
"""Eight for a batch, and the spare one."""
ADAPTERS_KEPT = 32
KV_CACHE_BYTES = 1 << 30
CHAT_SEQUENCES_MAX = 256


class VllmEngine:
    """One base, for chat or for embeddings."""

    def __init__(self) -> None:
        self._engine: LLMEngine
        self._template: ChatTemplate
        self._inputs: EmbeddingPrompts
        self._writer: TokenWriter
        self._base: Base
        self._adapters: dict[str, LoRARequest] = {}
        self._embedding: dict[str, _EmbeddingLine] = {}
        self._running: dict[str, Sampling] = {}

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
            self._writer = TokenWriter(tokenizer)
        self._engine = LLMEngine.from_engine_args(EngineArgs(**_engine_arguments(base)))

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
                results.append(self._generated(output))
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
        parameters = _sampling_params(request.body, room=window - len(prompt))
        adapter = None if request.adapter is None else self._adapters[request.adapter]
        try:
            self._engine.add_request(
                request.id, {"prompt_token_ids": prompt}, parameters, lora_request=adapter
            )
        except (VLLMValidationError, ValueError) as error:
            if request.body.response_format.schema is None:
                raise EngineFailed("The engine could not take this request.") from error
            raise EngineRefusal(
                "The JSON schema in 'response_format' cannot be followed.", param="response_format"
            ) from error
        self._running[request.id] = request.body.sampling

    def _submit_embedding(self, request: EmbeddingRequest) -> None:
        prompts = self._inputs.ids(request.inputs)
        parts = [f"{request.id}/{index}" for index in range(len(prompts))]
        self._embedding[request.id] = _EmbeddingLine(parts, sum(map(len, prompts)))
        for part, prompt in zip(parts, prompts, strict=True):
            self._engine.add_request(
                part, {"prompt_token_ids": prompt}, PoolingParams(task="embed")
            )

    def _embedded(self, output: PoolingRequestOutput) -> list[Result]:
        line_id = output.request_id.rpartition("/")[0]
        line = self._embedding[line_id]
        line.vectors[output.request_id] = output.outputs.data.tolist()
        if len(line.vectors) < len(line.parts):
            return []
        del self._embedding[line_id]
        vectors = [line.vectors[part] for part in line.parts]
        return [Embedded(id=line_id, vectors=vectors, input_tokens=line.input_tokens)]

    def _generated(self, output: RequestOutput) -> Result:
        sampling = self._running.pop(output.request_id)
        choices = []
        for completion in sorted(output.outputs, key=lambda each: each.index):
            if completion.finish_reason not in ("stop", "length"):
                error = EngineFailed("The engine ended this request without an answer.")
                return Refused(id=output.request_id, error=error)
            choices.append(
                Choice(
                    text=completion.text,
                    finish_reason=completion.finish_reason,
                    logprobs=self._entries(completion, sampling.logprobs or 0),
                )
            )
        copies = sampling.n // len(choices)
        return Generated(
            id=output.request_id,
            choices=choices * copies,
            input_tokens=len(output.prompt_token_ids or []),
            output_tokens=copies * sum(len(each.token_ids) for each in output.outputs),
        )

    def _entries(self, completion: Any, alternatives: int) -> list[dict[str, Any]] | None:
        if completion.logprobs is None:
            return None
        entry = self._writer.entry
        entries = []
        for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
            best = sorted(position.items(), key=lambda item: -item[1].logprob)[:alternatives]
            entries.append(
                {
                    **entry(token_id, position[token_id].logprob),
                    "top_logprobs": [entry(other, value.logprob) for other, value in best],
                }
            )
        return entries


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
        arguments["kv_cache_memory_bytes"] = KV_CACHE_BYTES
    if base.kind == "embedding":
        return {**arguments, "runner": "pooling", "dtype": "float32"}
    arguments |= {
        "dtype": "bfloat16",
        "max_num_seqs": CHAT_SEQUENCES_MAX,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
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
    if wanted.kind == "json_object":
        structured = StructuredOutputsParams(json_object=True)
    elif wanted.schema is not None:
        structured = StructuredOutputsParams(json=wanted.schema)
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
