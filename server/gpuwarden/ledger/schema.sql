-- The ledger: events that are added and never changed. Everything else is a view.
-- An event belongs to one subject (`job/j1x`, `lease/j1x-i1`, `teardown/t9k` ...). Where it moves that subject's machine,
-- `state` is the state it moved to.

CREATE TABLE events (
  seq     INTEGER PRIMARY KEY,
  at      REAL NOT NULL,                              -- seconds since the epoch
  subject TEXT NOT NULL CHECK (subject GLOB '?*/?*'),
  kind    TEXT NOT NULL,
  state   TEXT,
  token   TEXT,                                       -- what must not happen twice
  actor   TEXT NOT NULL,                              -- which door it came through: cli, mcp, reconcile
  body    TEXT NOT NULL CHECK (json_valid(body))
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

-- What may happen once: one job per receipt, one launch per attempt, one rental per generation, one use per approval.
CREATE UNIQUE INDEX once ON events (kind, token) WHERE token IS NOT NULL;

CREATE VIEW current AS
  SELECT e.subject, substr(e.subject, 1, instr(e.subject, '/') - 1) AS machine, e.state, e.at AS since, e.seq
  FROM events e
  JOIN (SELECT subject, max(seq) AS seq FROM events WHERE state IS NOT NULL GROUP BY subject) last
    ON last.seq = e.seq;

CREATE VIEW jobs AS SELECT substr(subject, 5) AS id, state, since FROM current WHERE machine = 'job';
CREATE VIEW leases AS SELECT substr(subject, 7) AS id, state, since FROM current WHERE machine = 'lease';
CREATE VIEW teardowns AS SELECT substr(subject, 10) AS id, state, since FROM current WHERE machine = 'teardown';
