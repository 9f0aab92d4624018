"""What whoever downloads an adapter does with it: transformers and peft, in a process of their own.

`test_adapter_fidelity.py` runs it as a script. In, one JSON object on standard input: "base" and
"adapter" (directories), "asked" (each with "messages" and "max_tokens") and "scored" (each with
"messages", "tuned" and the "tokens" of some answer). Out, one object on standard output: the greedy
"answers" of the tuned model, and the natural-log probability of each scored token. It imports
nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """The tuned model in bf16, as it is served."""

    def __init__(self, *, base: str, adapter: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(base)
        self._model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16),
            adapter,
            autocast_adapter_dtype=False,
        ).eval()

    def answer(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        prompt = self._prompt(messages)
        said = self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        text: str = self._tokenizer.decode(said[0, prompt.shape[1] :], skip_special_tokens=True)
        return text

    def score(
        self, messages: list[dict[str, str]], tokens: list[int], *, tuned: bool
    ) -> list[float]:
        prompt = self._prompt(messages)
        ids = torch.cat([prompt, torch.tensor([tokens])], dim=1)
        adapter = contextlib.nullcontext() if tuned else self._model.disable_adapter()
        with torch.inference_mode(), adapter:
            logits = self._model(input_ids=ids).logits[0, prompt.shape[1] - 1 : -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        scores: list[float] = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        return scores

    def _prompt(self, messages: list[dict[str, str]]) -> torch.Tensor:
        encoded: Any = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids: torch.Tensor = encoded["input_ids"]
        return ids


def main() -> None:
    asked = json.load(sys.stdin)
    reference = Reference(base=asked["base"], adapter=asked["adapter"])
    answers = [reference.answer(each["messages"], each["max_tokens"]) for each in asked["asked"]]
    scores = [
        reference.score(each["messages"], each["tokens"], tuned=each["tuned"])
        for each in asked["scored"]
    ]
    json.dump({"answers": answers, "scores": scores}, sys.stdout)


if __name__ == "__main__":
    main()
