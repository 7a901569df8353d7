-- The ledger: an append-only log of events, and tables that are derived from them by triggers.
-- An event belongs to one subject (`job/j1x`, `lease/j1x-i1`, `teardown/t9k` ...). If it moves that subject's state
-- machine, `state` is the new state.

CREATE TABLE events (
  seq     INTEGER PRIMARY KEY,                        -- 1, 2, 3 ... without a gap
  at      REAL NOT NULL,                              -- seconds since the epoch
  subject TEXT NOT NULL CHECK (subject GLOB '?*/?*'),
  kind    TEXT NOT NULL,
  version INTEGER NOT NULL,                           -- of the shape of the body
  state   TEXT,
  token   TEXT,                                       -- what must not happen twice
  actor   TEXT NOT NULL,                              -- the interface that it came through: cli, mcp, reconcile
  body    TEXT NOT NULL CHECK (json_valid(body)),
  hash    TEXT NOT NULL CHECK (length(hash) = 64)     -- SHA-256 over the columns above and the hash of event seq - 1
) STRICT;

CREATE INDEX events_by_subject ON events (subject, seq);
CREATE INDEX events_by_kind ON events (kind, seq);

CREATE TRIGGER events_never_change BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER events_never_vanish BEFORE DELETE ON events
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

-- REPLACE would delete without firing the trigger above.
CREATE TRIGGER events_are_new BEFORE INSERT ON events
WHEN EXISTS (SELECT 1 FROM events WHERE seq = NEW.seq OR (kind = NEW.kind AND token = NEW.token))
BEGIN SELECT RAISE(ABORT, 'UNIQUE: this event is in the ledger already'); END;

-- Allow each token once: one job per receipt, one launch per attempt, one rental per generation, one use per approval.
CREATE UNIQUE INDEX once ON events (kind, token) WHERE token IS NOT NULL;

-- The present state of every job, lease and teardown, derived from the events.
CREATE TABLE current (
  subject  TEXT PRIMARY KEY,
  machine  TEXT NOT NULL,                             -- job, lease or teardown
  state    TEXT NOT NULL,
  since    REAL NOT NULL,                             -- when it reached that state
  seq      INTEGER NOT NULL,                          -- the event that moved it there
  opened   REAL NOT NULL,                             -- when its first event was recorded
  job      TEXT,                                      -- the job that a lease or a teardown belongs to
  platform TEXT,
  name     TEXT,                                      -- of a job
  script   TEXT,                                      -- digest of a job's script, empty without one; NULL: not recorded
  instance TEXT,                                      -- the provider's id of a lease's machine, as last seen
  rest     TEXT                                       -- of a stopped lease: `gone`, or `stopped` with its disk
) STRICT, WITHOUT ROWID;

CREATE INDEX current_by_time ON current (machine, since, seq);
CREATE INDEX current_by_state ON current (machine, state, since, seq);
CREATE INDEX current_by_job ON current (job, machine) WHERE job IS NOT NULL;
CREATE INDEX current_by_instance ON current (instance) WHERE instance IS NOT NULL;
CREATE INDEX current_by_script ON current (script, state) WHERE machine = 'job';
CREATE INDEX current_by_platform ON current (machine, platform);
CREATE INDEX current_at_rest ON current (seq) WHERE rest = 'stopped' AND state = 'stopped';

CREATE TRIGGER events_move AFTER INSERT ON events WHEN NEW.state IS NOT NULL
BEGIN
  INSERT INTO current (subject, machine, state, since, seq, opened, job, platform, name, script)
  VALUES (
    NEW.subject, substr(NEW.subject, 1, instr(NEW.subject, '/') - 1), NEW.state, NEW.at, NEW.seq, NEW.at,
    json_extract(NEW.body, '$.job'),
    coalesce(json_extract(NEW.body, '$.spec.platform'), json_extract(NEW.body, '$.platform')),
    coalesce(json_extract(NEW.body, '$.spec.name'), json_extract(NEW.body, '$.name')),
    coalesce(json_extract(NEW.body, '$.script_digest'), iif(json_type(NEW.body, '$.spec.script') = 'text', NULL, ''))
  )
  ON CONFLICT (subject) DO UPDATE SET state = excluded.state, since = excluded.since, seq = excluded.seq;
END;

CREATE TRIGGER events_of_leases AFTER INSERT ON events
WHEN NEW.subject GLOB 'lease/*'
  AND (NEW.kind IN ('lease.stopped', 'lease.gone') OR json_extract(NEW.body, '$.instance.id') IS NOT NULL)
BEGIN
  UPDATE current
  SET instance = coalesce(json_extract(NEW.body, '$.instance.id'), instance),
      rest = CASE WHEN NEW.kind IN ('lease.stopped', 'lease.gone') THEN json_extract(NEW.body, '$.saw') ELSE rest END
  WHERE subject = NEW.subject;
END;

-- The open alerts. An alert with a mark reports an event: it is raised once and never cleared.
CREATE TABLE alerts (
  subject TEXT NOT NULL,
  kind    TEXT NOT NULL,
  mark    TEXT NOT NULL,
  seq     INTEGER NOT NULL,
  PRIMARY KEY (subject, kind, mark)
) STRICT, WITHOUT ROWID;

CREATE INDEX standing ON alerts (seq) WHERE mark = '';

CREATE TRIGGER alerts_raised AFTER INSERT ON events WHEN NEW.kind = 'alert.raised'
BEGIN
  INSERT OR REPLACE INTO alerts (subject, kind, mark, seq)
  VALUES (NEW.subject, json_extract(NEW.body, '$.kind'), json_extract(NEW.body, '$.mark'), NEW.seq);
END;
CREATE TRIGGER alerts_cleared AFTER INSERT ON events WHEN NEW.kind = 'alert.cleared'
BEGIN
  DELETE FROM alerts
  WHERE subject = NEW.subject
    AND kind = json_extract(NEW.body, '$.kind') AND mark = json_extract(NEW.body, '$.mark');
END;

CREATE VIEW jobs AS SELECT substr(subject, 5) AS id, state, since FROM current WHERE machine = 'job';
CREATE VIEW leases AS SELECT substr(subject, 7) AS id, state, since FROM current WHERE machine = 'lease';
CREATE VIEW teardowns AS SELECT substr(subject, 10) AS id, state, since FROM current WHERE machine = 'teardown';

-- The run folders of jobs that have not ended, for the shell guard. CROSS and + keep SQLite from scanning every job.
CREATE VIEW live_runs AS
  SELECT json_extract(e.body, '$.handle.run_dir') AS run_dir
  FROM current c CROSS JOIN events e ON e.subject = c.subject AND +e.kind = 'job.submitted'
  WHERE c.machine = 'job' AND c.state IN (
    'draft', 'accepted', 'provisioning', 'submitting', 'queued', 'running', 'preempted', 'paused', 'unknown'
  );
