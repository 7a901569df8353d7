-- The ledger on PostgreSQL 13 or newer, of the same version and with the same tables as in SQLite (see `schema.sql`, which
-- describes the columns). The first schema of `search_path` is where it goes; name `pg_temp` last there. Who owns these
-- tables can switch their triggers off, so serve under another role, which needs no more than USAGE of the schema, SELECT
-- on its tables and INSERT on `events`: the functions that fill the other tables run as their owner.

CREATE TABLE ledger_version (version integer NOT NULL);

CREATE TABLE events (
  seq     bigint PRIMARY KEY,
  at      double precision NOT NULL,
  subject text COLLATE "C" NOT NULL CHECK (subject LIKE '_%/_%'),
  kind    text COLLATE "C" NOT NULL,
  version integer NOT NULL,
  state   text COLLATE "C",
  token   text COLLATE "C",
  actor   text NOT NULL,
  body    json NOT NULL,                              -- not jsonb: the hash is over the text as it was written
  hash    text NOT NULL CHECK (length(hash) = 64)
);

CREATE INDEX events_by_subject ON events (subject, seq);
CREATE INDEX events_by_kind ON events (kind, seq);
CREATE UNIQUE INDEX once ON events (kind, token) WHERE token IS NOT NULL;

CREATE FUNCTION ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the ledger is append-only';
END $$;

CREATE TRIGGER events_never_change BEFORE UPDATE OR DELETE ON events
FOR EACH ROW EXECUTE FUNCTION ledger_is_append_only();
-- TRUNCATE fires no trigger of rows.
CREATE TRIGGER events_never_vanish BEFORE UPDATE OR DELETE OR TRUNCATE ON events
FOR EACH STATEMENT EXECUTE FUNCTION ledger_is_append_only();
-- Or a session that plays a replica (session_replication_role) would fire none of them.
ALTER TABLE events ENABLE ALWAYS TRIGGER events_never_change;
ALTER TABLE events ENABLE ALWAYS TRIGGER events_never_vanish;

CREATE TABLE current (
  subject  text COLLATE "C" PRIMARY KEY,
  machine  text COLLATE "C" NOT NULL,
  state    text COLLATE "C" NOT NULL,
  since    double precision NOT NULL,
  seq      bigint NOT NULL,
  opened   double precision NOT NULL,
  job      text COLLATE "C",
  platform text COLLATE "C",
  name     text,
  script   text COLLATE "C",
  instance text COLLATE "C",
  rest     text COLLATE "C"
);

CREATE INDEX current_by_time ON current (machine, since, seq);
CREATE INDEX current_by_state ON current (machine, state, since, seq);
CREATE INDEX current_by_job ON current (job, machine) WHERE job IS NOT NULL;
CREATE INDEX current_by_instance ON current (instance) WHERE instance IS NOT NULL;
CREATE INDEX current_by_script ON current (script, state) WHERE machine = 'job';
CREATE INDEX current_by_platform ON current (machine, platform);
CREATE INDEX current_at_rest ON current (seq) WHERE rest = 'stopped' AND state = 'stopped';

CREATE TABLE alerts (
  subject text COLLATE "C" NOT NULL,
  kind    text COLLATE "C" NOT NULL,
  mark    text COLLATE "C" NOT NULL,
  seq     bigint NOT NULL,
  PRIMARY KEY (subject, kind, mark)
);

CREATE INDEX standing ON alerts (seq) WHERE mark = '';

-- A text of PostgreSQL can't contain the character NUL. The event keeps it; what is read out of the event does not.
CREATE FUNCTION readable(body json) RETURNS json LANGUAGE sql IMMUTABLE AS $$
  SELECT replace(body::text, '\u0000', '\ufffd')::json
$$;

CREATE FUNCTION follow_event() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  body json := readable(NEW.body);
BEGIN
  IF NEW.state IS NOT NULL THEN
    INSERT INTO current (subject, machine, state, since, seq, opened, job, platform, name, script)
    VALUES (
      NEW.subject, split_part(NEW.subject, '/', 1), NEW.state, NEW.at, NEW.seq, NEW.at,
      body->>'job',
      coalesce(body#>>'{spec,platform}', body->>'platform'),
      coalesce(body#>>'{spec,name}', body->>'name'),
      coalesce(body->>'script_digest', CASE WHEN json_typeof(body#>'{spec,script}') = 'string' THEN NULL ELSE '' END)
    )
    ON CONFLICT (subject) DO UPDATE SET state = excluded.state, since = excluded.since, seq = excluded.seq;
  END IF;
  IF NEW.subject LIKE 'lease/%'
    AND (NEW.kind IN ('lease.stopped', 'lease.gone') OR body#>>'{instance,id}' IS NOT NULL) THEN
    UPDATE current
    SET instance = coalesce(body#>>'{instance,id}', instance),
        rest = CASE WHEN NEW.kind IN ('lease.stopped', 'lease.gone') THEN body->>'saw' ELSE rest END
    WHERE subject = NEW.subject;
  END IF;
  IF NEW.kind = 'alert.raised' THEN
    INSERT INTO alerts (subject, kind, mark, seq)
    VALUES (NEW.subject, body->>'kind', body->>'mark', NEW.seq)
    ON CONFLICT (subject, kind, mark) DO UPDATE SET seq = excluded.seq;
  ELSIF NEW.kind = 'alert.cleared' THEN
    DELETE FROM alerts WHERE subject = NEW.subject AND kind = body->>'kind' AND mark = body->>'mark';
  END IF;
  RETURN NULL;
END $$;

CREATE TRIGGER events_move AFTER INSERT ON events FOR EACH ROW EXECUTE FUNCTION follow_event();
ALTER TABLE events ENABLE ALWAYS TRIGGER events_move;

CREATE VIEW live_runs AS
  SELECT readable(e.body)#>>'{handle,run_dir}' AS run_dir
  FROM current c JOIN events e ON e.subject = c.subject AND e.kind = 'job.submitted'
  WHERE c.machine = 'job' AND c.state IN (
    'draft', 'accepted', 'provisioning', 'submitting', 'queued', 'running', 'preempted', 'paused', 'unknown'
  );

INSERT INTO ledger_version VALUES (3);
