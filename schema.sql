-- Gridline's database as it should be. `adapters/migrations/0001_pre_initial.sql` is a link to this
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
