"""Every bound of the product, each with its reason; units are in the names.

The domain, the projections and the API read them; a bound that an account can have differently is
only the default here. Nothing else in the product may hold a limit of its own. The pages that are
cited are in `docs/public-pages.md`.
"""

from __future__ import annotations

from typing import Literal

MIB = 1024 * 1024

# Files
UPLOAD_BYTES_MAX = 200_000_000
"""Migration page: a batch input file is at most 200 MB; any upload may be that large."""
TRAINING_FILE_BYTES_MAX = 64 * MIB
"""Fine-tuning page: a job's training and validation files are each at most 64 MiB."""
TRAINING_LINE_BYTES_MAX = 1 * MIB
"""Fine-tuning page: each line is at most 1 MiB, its line end not counted."""
ROW_MESSAGES_MAX = 1_024
"""Fine-tuning page: at most 1,024 messages a line."""
FILES_READ_AT_ONCE = 4
"""Of one account, for creates of jobs: reading 64 MiB of rows takes seconds, and a create more is
answered sooner by a refusal that may be sent again."""
STORED_BYTES_MAX = 20_000_000_000
"""Of one account's uploads: a hundred of the largest size. Deleting and expiring make room."""
STORED_BYTES_WITHOUT_CREDIT_MAX = 500_000_000
"""Of an account that never had credit, and so can run nothing: enough to try uploads."""
UPLOADS_PER_MINUTE_MAX = 600
"""Of one account: ten a second for as long as it likes, since each is in the log for ever."""
FILE_KEPT_SECONDS = 30 * 86_400
"""Fine-tuning page: uploads are deleted after 30 days; batch outputs are kept as long."""
EXPIRES_AFTER_SECONDS_MIN = 3_600
"""OpenAI's own range of expires_after."""
EXPIRES_AFTER_SECONDS_MAX = 30 * 86_400
"""OpenAI's own range of expires_after."""

# JSON
JSON_DEPTH_MAX = 64
"""No honest row or request is deeper; a deep one can exhaust a recursive reader's stack."""
JSON_CONTAINERS_MAX = 250_000
"""Objects and arrays in one text: a hundred times those of any honest row or request. Empty ones of
two letters each take a reader thirty times their size."""
METADATA_PAIRS_MAX = 16
"""OpenAI's bound."""
METADATA_KEY_CHARACTERS_MAX = 64
"""OpenAI's bound."""
METADATA_VALUE_CHARACTERS_MAX = 512
"""OpenAI's bound."""

# Fine-tuning jobs
SUFFIX_CHARACTERS_MAX = 64
"""Both pages."""
SEED_MAX = 2_147_483_647
"""Migration page: a 31-bit seed, which every library takes."""
TRAINING_ROWS_MIN = 10
"""Fine-tuning page: at least 10 rows besides those held out."""
HOLD_OUT_DIVISOR = 20
"""Both pages: 5 % of the rows are held out where there is no validation file."""
HOLD_OUT_ROWS_MIN = 1
"""Fine-tuning page."""
HOLD_OUT_ROWS_MAX = 1_000
"""Fine-tuning page."""
JOB_SECONDS_MAX = 7_200
"""Both pages: a job must finish within 2 hours."""
JOB_SETUP_SECONDS = 600
"""Kept out of the two hours for loading the base and for casting, checking and registering the
adapter: the page's largest sizes are each base's speed times the 6,600 seconds left."""
WAITING_SECONDS_MAX = 86_400
"""Fine-tuning page: work waits for capacity or credit for up to 24 hours."""
ADAPTER_BYTES_MAX = 383 * MIB
"""Fine-tuning page: the largest lora or qlora adapter."""
DPO_ADAPTER_BYTES_MAX = 128 * MIB
"""Fine-tuning page: the largest DPO adapter."""
MODELS_PER_ACCOUNT_MAX = 100
"""Fine-tuning page: models per account, imports and open jobs' slots included."""

# Accounts: defaults, which an operator can set otherwise
OPEN_FINE_TUNES_NEW_ACCOUNT = 1
"""Both pages."""
OPEN_FINE_TUNES = 3
"""Both pages: accounts that are no longer new."""
OPEN_BATCHES_NEW_ACCOUNT = 2
"""Fine-tuning page, "The job"."""
DAILY_SPEND_USD_NEW_ACCOUNT = 100
"""Fine-tuning page, "The job": per UTC day."""
SLOT_RETRY_SECONDS = 3
"""After which a create that found no free slot may be sent again: small work ends in seconds, and
an SDK's three tries should span some of them."""
TRAINING_AT_A_TIME = 1
"""Both pages: one job trains at a time per account."""
GRANT_NOTE_CHARACTERS_MAX = 500
"""What an operator writes on a grant is a line, no document."""
CREDIT_USD_MAX = 1_000_000
"""Of one grant: a slip of the keyboard is refused, and sums of nano-USD fit 64 bits."""
KEY_DAILY_SPEND_USD_MAX = 1_000
"""Migration page: the most that a key's daily limit can be set to."""
KEY_TOTAL_SPEND_USD_MAX = 100_000
"""Migration page: the most that a key's total limit can be set to."""

# Batches
CompletionWindow = Literal["24h", "72h"]
COMPLETION_WINDOW_SECONDS: dict[CompletionWindow, int] = {"24h": 86_400, "72h": 3 * 86_400}
"""Migration page: the two windows that a batch can ask for."""
BATCH_REQUESTS_MAX = 50_000
"""Migration page."""
BATCH_LINE_BYTES_MAX = 16 * MIB
"""A full context of the longest base fits, escaped as `\\uXXXX`; an endless line does not."""
CUSTOM_ID_CHARACTERS_MAX = 512
"""Long enough for paths and hashes; the ids of 50,000 lines stay small."""
BATCH_ERRORS_MAX = 100
"""Faults that a failed batch lists, as many as a person reads."""
FT_MODELS_PER_BATCH_MAX = 8
"""Migration page; the catalog can set fewer for a base."""
MINIMUM_FROM_PERCENT = 90
"""Of a cancelled batch's lines that succeeded: from there on it pays the minimum, as if it had
completed; else cancelling at the last line would avoid it."""
HOLD_MARGIN_SECONDS = 3_600
"""A hold outlives its work's last deadline by this, so that the end settles it."""
CHUNK_REQUESTS = 200
"""Request lines that one attempt of one runner takes."""
CHUNK_BYTES_MAX = 8 * MIB
"""Of the lines of one chunk, so that no runner has to hold more; a longer line is a chunk alone."""
DEFAULT_OUTPUT_TOKENS = 1_024
"""What a chat line without max_tokens may answer, so that its worst case can be held; the same
number as the evals page's default."""
CHOICES_MAX = 128
"""OpenAI's bound of n."""
STOP_SEQUENCES_MAX = 4
"""OpenAI's bound."""
TOP_LOGPROBS_MAX = 20
"""OpenAI's bound."""
ANSWER_TOKENS_MAX = 512 * 1_024
"""Of all choices of one line: the longest context twice, or 128 choices of 4,096. At 128 bytes for
the longest tokens it is what a runner takes from an engine for one line, 64 MiB."""
ANSWER_LOGPROBS_MAX = 64 * 1_024
"""Log-probability entries of one line, alternatives counted: an entry of a long token, its bytes
listed, is half a KiB, and all of them have to fit those 64 MiB."""
TOP_K_MAX = 1_000_000
"""Beyond any vocabulary, and within what engines count with."""
GREEDY_BELOW_TEMPERATURE = 0.01
"""vLLM's own least temperature: less divides the logits past what floats hold, and draws the
likeliest token anyway."""
EMBEDDING_INPUTS_MAX = 2_048
"""OpenAI's bound of inputs in one embeddings request."""
SCHEMA_BYTES_MAX = 128 * 1024
"""Of a response format's JSON schema: hundreds of properties, and no decoder's day spoilt."""
SCHEMA_NODES_MAX = 1_000
"""Schemas within one; the decoder compiles a thousand in a tenth of a second."""
SCHEMA_VALUES_MAX = 1_000
"""Values of all enums together: OpenAI's bound."""
SCHEMA_ONE_OF_MAX = 100
"""Branches of a oneOf, each of which is held against each other."""
SCHEMA_BRANCHES_MAX = 20
"""Branches of all anyOf and oneOf together that may be objects or arrays, from the third of each
on: the decoder follows all that may stand in one place, and gives up at fifty of the widest."""
SCHEMA_OPTIONAL_MAX = 200
"""Properties that may be left out, all together: the decoder follows each of them at once."""
SCHEMA_KINDS_MAX = 50
"""Lengths, patterns and formats of strings that differ, and bounds of numbers: as many as may stand
in one place, and the decoder has them all in mind there."""
SCHEMA_LENGTH_MAX = 100_000
"""The longest string, and the most items, that a schema can ask for."""
SCHEMA_ITEMS_MAX = 1_000_000
"""Counts of items of all its arrays together: the decoder unfolds them, in half a second and 200 MB
at most."""
SCHEMA_OPTIONAL_ITEMS_MAX = 30_000
"""Items and unnamed properties that may be left out, all together: the decoder unfolds them too,
and gives up at twice as many."""
SCHEMA_MULTIPLES_MAX = 10_000
"""All multipleOf together, without their points: the decoder counts so far, and each count is a
state of its own."""
PATTERN_CHARACTERS_MAX = 2_000
"""Longer than any pattern that a person reads."""
PATTERN_DEPTH_MAX = 20
"""Groups in groups."""
PATTERN_COST_MAX = 10_000
"""What the repeats of all patterns of a schema may spell out; ten thousand characters take a
decoder milliseconds a token, more can take more than it has."""
