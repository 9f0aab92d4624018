-- Gridline's database as it should be. `adapters/event_log/migrations/0001_pre_initial.sql` is a link to this
-- file until the first release; after it, every change is a numbered migration and a test proves
-- that both roads lead to the same database (docs/decisions/0010-migrations.md).
--
-- To add a read model: a section of its own at the end, with its tables, indexes and the grant
--     GRANT SELECT, INSERT, UPDATE, DELETE ON <tables> TO gridline;

-- Roles ---------------------------------------------------------------------------------------

-- The application's role. It has no password until the operator (or the embedded supervisor)
-- gives it one.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'gridline') THEN
        CREATE ROLE gridline LOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL;
END
$$;

-- Migrations ----------------------------------------------------------------------------------

CREATE TABLE gridline_migrations (
    number integer PRIMARY KEY,
    name text NOT NULL,
    sha256 text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
-- Each process sees whether the database is of its release.
GRANT SELECT ON gridline_migrations TO gridline;

-- The log -------------------------------------------------------------------------------------

-- What the library's recorder sends its rows as.
CREATE TYPE stored_event_text AS (
    originator_id text,
    originator_version bigint,
    topic text,
    state bytea
);

-- Every event, in one total order: notification_id. Appends hold this table's EXCLUSIVE lock, with
-- which VACUUM and ANALYZE conflict, so the server does both rarely.
CREATE TABLE gridline_events (
    originator_id text NOT NULL,
    originator_version bigint NOT NULL,
    topic text NOT NULL,
    state bytea NOT NULL,
    notification_id bigint GENERATED ALWAYS AS IDENTITY,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (originator_id, originator_version)
) WITH (
    autovacuum_vacuum_threshold = 100000000,
    autovacuum_vacuum_insert_threshold = 500000,
    autovacuum_vacuum_insert_scale_factor = 0.5,
    autovacuum_analyze_threshold = 100000,
    autovacuum_analyze_scale_factor = 0.5
);
CREATE UNIQUE INDEX gridline_events_notification_id_idx ON gridline_events (notification_id);

-- INSERT and no more: PostgreSQL itself refuses to change history. MAINTAIN is for LOCK TABLE.
GRANT SELECT, INSERT, MAINTAIN ON gridline_events TO gridline;

-- Positions: of projections in the log, and of broker partitions in their topics.
CREATE TABLE gridline_tracking (
    application_name text PRIMARY KEY,
    notification_id bigint NOT NULL
) WITH (fillfactor = 50);
INSERT INTO gridline_tracking (application_name, notification_id) VALUES ('__migration__', 1);
GRANT SELECT, INSERT, UPDATE ON gridline_tracking TO gridline;

-- The newest state of long streams: a shortcut, always derivable from the log.
CREATE TABLE gridline_snapshots (
    originator_id text PRIMARY KEY,
    originator_version bigint NOT NULL,
    topic text NOT NULL,
    shape text NOT NULL,
    state bytea NOT NULL
);
GRANT SELECT, INSERT, UPDATE ON gridline_snapshots TO gridline;

-- What people wrote -----------------------------------------------------------------------------

-- No projections: written in the append of a command, kept by a rebuild, deleted on request. The
-- log holds ids, counts, amounts and digests alone.

CREATE TABLE account_people (
    account_id text PRIMARY KEY,
    email text NOT NULL
);
CREATE INDEX account_people_email_idx ON account_people (email);

-- A key's text is nowhere: only its SHA-256, and the prefix by which people know it.
CREATE TABLE api_key_secrets (
    key_id text PRIMARY KEY,
    account_id text NOT NULL,
    secret_sha256 text NOT NULL UNIQUE,
    prefix text NOT NULL,
    name text NOT NULL
);

-- What an operator wrote on a grant.
CREATE TABLE grant_notes (
    grant_id text PRIMARY KEY,
    account_id text NOT NULL,
    note text NOT NULL
);

CREATE TABLE file_names (
    file_id text PRIMARY KEY,
    account_id text NOT NULL,
    filename text NOT NULL
);

-- Metadata and suffix of a job or batch.
CREATE TABLE work_texts (
    work_id text PRIMARY KEY,
    account_id text NOT NULL,
    metadata jsonb,
    suffix text
);

-- What a create made, for half an hour, so that an SDK's own retry gets the same answer.
CREATE TABLE request_fingerprints (
    key_id text NOT NULL,
    route text NOT NULL,
    body_sha256 text NOT NULL,
    result_id text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (key_id, route, body_sha256)
);
CREATE INDEX request_fingerprints_created_at_idx ON request_fingerprints (created_at);
CREATE INDEX request_fingerprints_result_id_idx ON request_fingerprints (result_id);

GRANT SELECT, INSERT, UPDATE, DELETE
    ON account_people, api_key_secrets, grant_notes, file_names, work_texts, request_fingerprints
    TO gridline;

-- Runners ---------------------------------------------------------------------------------------

-- The newest heartbeat of each runner. No projection; a crash of the server empties it.
CREATE UNLOGGED TABLE runners (
    runner_id text PRIMARY KEY,
    gpu_class text NOT NULL,
    last_seen timestamptz NOT NULL,
    sent_at timestamptz NOT NULL,
    heartbeat jsonb NOT NULL
);
GRANT SELECT, INSERT, UPDATE, DELETE ON runners TO gridline;

-- Broker messages that could not be handled: where they stood, why, and a digest, never their text.
CREATE TABLE dead_letters (
    position_name text NOT NULL,
    broker_offset bigint NOT NULL,
    topic text NOT NULL,
    reason text NOT NULL,
    sha256 text NOT NULL,
    set_aside_at timestamptz NOT NULL,
    PRIMARY KEY (position_name, broker_offset)
);
GRANT SELECT, INSERT, UPDATE, DELETE ON dead_letters TO gridline;

-- Read models, written in the append ------------------------------------------------------------

-- `position` is the log position of creation: the one order in which lists page.

-- projections/money/prices.py
CREATE TABLE price_lists (
    version integer PRIMARY KEY,
    published_at timestamptz NOT NULL,
    list jsonb NOT NULL
);
GRANT SELECT, INSERT, UPDATE, DELETE ON price_lists TO gridline;

-- projections/money/accounts.py; changed_position is that of the account's last event.
CREATE TABLE accounts (
    id text PRIMARY KEY,
    position bigint NOT NULL,
    changed_position bigint NOT NULL,
    created_at timestamptz NOT NULL,
    available_nano_usd bigint NOT NULL DEFAULT 0,
    held_nano_usd bigint NOT NULL DEFAULT 0,
    granted_nano_usd bigint NOT NULL DEFAULT 0,
    charged_nano_usd bigint NOT NULL DEFAULT 0,
    open_fine_tunes integer NOT NULL DEFAULT 0,
    open_fine_tunes_max integer NOT NULL,
    open_batches integer NOT NULL DEFAULT 0,
    open_batches_max integer NOT NULL,
    models integer NOT NULL DEFAULT 0,
    training_job_id text
) WITH (fillfactor = 70);
GRANT SELECT, INSERT, UPDATE, DELETE ON accounts TO gridline;

-- projections/money/keys.py
CREATE TABLE api_keys (
    id text PRIMARY KEY,
    account_id text NOT NULL,
    position bigint NOT NULL,
    created_at timestamptz NOT NULL,
    revoked_at timestamptz,
    daily_limit_nano_usd bigint,
    total_limit_nano_usd bigint
);
CREATE INDEX api_keys_account_idx ON api_keys (account_id, position);
CREATE TABLE api_key_days (
    key_id text NOT NULL,
    day date NOT NULL,
    charged_nano_usd bigint NOT NULL,
    held_nano_usd bigint NOT NULL,
    PRIMARY KEY (key_id, day)
) WITH (fillfactor = 70);
GRANT SELECT, INSERT, UPDATE, DELETE ON api_keys, api_key_days TO gridline;

-- projections/money/holds.py
CREATE TABLE holds (
    id text PRIMARY KEY,
    work_id text NOT NULL UNIQUE,
    account_id text NOT NULL,
    key_id text NOT NULL,
    position bigint NOT NULL,
    placed_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    ended_at timestamptz,
    spend_day date NOT NULL,
    price_version integer NOT NULL,
    maximum_nano_usd bigint NOT NULL,
    captured_nano_usd bigint NOT NULL DEFAULT 0,
    returned_nano_usd bigint NOT NULL DEFAULT 0,
    state text NOT NULL
);
CREATE INDEX holds_open_idx ON holds (account_id, position) WHERE state = 'placed';
GRANT SELECT, INSERT, UPDATE, DELETE ON holds TO gridline;

-- projections/work/files.py; pins counts the open work that uses the file. A deleted file keeps its row.
CREATE TABLE files (
    id text PRIMARY KEY,
    account_id text NOT NULL,
    position bigint NOT NULL,
    purpose text NOT NULL,
    bytes bigint NOT NULL,
    sha256 text NOT NULL,
    object_key text NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz,
    training jsonb,
    pins integer NOT NULL DEFAULT 0,
    deleted_at timestamptz
);
CREATE INDEX files_account_idx ON files (account_id, position);
CREATE INDEX files_expiring_idx ON files (expires_at) WHERE deleted_at IS NULL;
CREATE INDEX files_kept_idx ON files (account_id, purpose) INCLUDE (bytes) WHERE deleted_at IS NULL;
CREATE INDEX files_newest_idx ON files (account_id, created_at) INCLUDE (purpose);
GRANT SELECT, INSERT, UPDATE, DELETE ON files TO gridline;

-- projections/work/models.py; a deleted model keeps its row.
CREATE TABLE models (
    id text PRIMARY KEY,
    account_id text NOT NULL,
    position bigint NOT NULL,
    job_id text NOT NULL,
    base text NOT NULL,
    base_revision text NOT NULL,
    created_at timestamptz NOT NULL,
    rank integer NOT NULL,
    servable boolean NOT NULL,
    config jsonb NOT NULL,
    weights jsonb NOT NULL,
    deleted_at timestamptz
);
CREATE INDEX models_account_idx ON models (account_id, position);
GRANT SELECT, INSERT, UPDATE, DELETE ON models TO gridline;

-- projections/work/batches.py; requests is null until the batch is validated.
CREATE TABLE batches (
    id text PRIMARY KEY,
    account_id text NOT NULL,
    key_id text NOT NULL,
    position bigint NOT NULL,
    status text NOT NULL,
    created_at timestamptz NOT NULL,
    in_progress_at timestamptz,
    finalizing_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz,
    expired_at timestamptz,
    cancelling_at timestamptz,
    cancelled_at timestamptz,
    expires_at timestamptz NOT NULL,
    input_file_id text NOT NULL,
    input_key text NOT NULL,
    endpoint text NOT NULL,
    completion_window text NOT NULL,
    output_expires_seconds integer,
    price_version integer NOT NULL,
    base text,
    base_revision text,
    requests integer,
    completed integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    quote jsonb,
    ending text,
    waiting_for text,
    output_file_id text,
    error_file_id text,
    errors jsonb,
    usage jsonb,
    receipt jsonb
) WITH (fillfactor = 70);
CREATE INDEX batches_account_idx ON batches (account_id, position);
GRANT SELECT, INSERT, UPDATE, DELETE ON batches TO gridline;

-- projections/work/fine_tuning_jobs.py; settings is what create resolved.
CREATE TABLE fine_tuning_jobs (
    id text PRIMARY KEY,
    account_id text NOT NULL,
    key_id text NOT NULL,
    position bigint NOT NULL,
    status text NOT NULL,
    created_at timestamptz NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    waiting_until timestamptz NOT NULL,
    training_file_id text NOT NULL,
    validation_file_id text,
    settings jsonb NOT NULL,
    waiting_for text,
    step integer NOT NULL DEFAULT 0,
    steps integer,
    progress_tokens bigint NOT NULL DEFAULT 0,
    trained_tokens bigint,
    train_loss double precision,
    eval_loss_before double precision,
    error_code text,
    error_message text,
    fault_side text,
    model text,
    result jsonb,
    receipt jsonb
) WITH (fillfactor = 70);
CREATE INDEX fine_tuning_jobs_account_idx ON fine_tuning_jobs (account_id, position);
GRANT SELECT, INSERT, UPDATE, DELETE ON fine_tuning_jobs TO gridline;

-- projections/work/fine_tuning_events.py; position is the log position times 8, plus the place in it;
-- eval_source is null but for a job's first event.
CREATE TABLE fine_tuning_events (
    id text PRIMARY KEY,
    job_id text NOT NULL,
    position bigint NOT NULL,
    created_at timestamptz NOT NULL,
    level text NOT NULL,
    type text NOT NULL,
    message text NOT NULL,
    data jsonb,
    eval_source text
);
CREATE INDEX fine_tuning_events_job_idx ON fine_tuning_events (job_id, position);
GRANT SELECT, INSERT, UPDATE, DELETE ON fine_tuning_events TO gridline;

-- projections/work/open_work.py: jobs and batches that have not ended, and what of them wants a runner or has
-- one. stage: of a batch validating, planned, running, ending; of a job waiting, queued, running.
CREATE TABLE open_work (
    work_id text PRIMARY KEY,
    kind text NOT NULL,
    account_id text NOT NULL,
    base text,
    memory_gb integer NOT NULL,
    completion_window text,
    position bigint NOT NULL,
    created_at timestamptz NOT NULL,
    stage text NOT NULL,
    due_at timestamptz NOT NULL
);
CREATE TABLE work_items (
    work_id text NOT NULL,
    chunk integer NOT NULL,
    requests integer NOT NULL,
    state text NOT NULL,
    attempt integer NOT NULL DEFAULT 0,
    runner_id text,
    PRIMARY KEY (work_id, chunk)
) WITH (fillfactor = 70);
GRANT SELECT, INSERT, UPDATE, DELETE ON open_work, work_items TO gridline;

-- Read models, following the log ----------------------------------------------------------------

-- projections/money/journal.py: double entry; the entries of one position sum to zero.
CREATE TABLE journal_entries (
    position bigint NOT NULL,
    line smallint NOT NULL,
    account_id text NOT NULL,
    ledger text NOT NULL,
    kind text NOT NULL,
    work_id text,
    grant_id text,
    at timestamptz NOT NULL,
    amount_nano_usd bigint NOT NULL,
    balance_nano_usd bigint NOT NULL,
    PRIMARY KEY (position, line)
);
CREATE INDEX journal_entries_account_idx ON journal_entries (account_id, position);
CREATE TABLE journal_balances (
    account_id text NOT NULL,
    ledger text NOT NULL,
    balance_nano_usd bigint NOT NULL,
    PRIMARY KEY (account_id, ledger)
);
GRANT SELECT, INSERT, UPDATE, DELETE ON journal_entries, journal_balances TO gridline;
