-- Points and alerts that jobs reported. No decision depends on them: only the ledger and its evidence count.
CREATE TABLE series (
  id   INTEGER PRIMARY KEY,
  job  TEXT NOT NULL,
  name TEXT NOT NULL,
  UNIQUE (job, name)
) STRICT;

-- Clustered in the order in which a chart reads the points. `at` is in microseconds. A value of NULL means NaN, which
-- SQLite can't store.
CREATE TABLE points (
  series INTEGER NOT NULL REFERENCES series (id),
  step   INTEGER NOT NULL,
  at     INTEGER NOT NULL,
  value  REAL,
  PRIMARY KEY (series, step, at)
) STRICT, WITHOUT ROWID;

-- Finds the few values that a chart can't draw, without reading all points.
CREATE INDEX odd_points ON points (series, step, at)
  WHERE value IS NULL OR value > 1.7976931348623157e308 OR value < -1.7976931348623157e308;

CREATE TABLE alerts (
  id   INTEGER PRIMARY KEY AUTOINCREMENT,
  job  TEXT NOT NULL,
  key  TEXT NOT NULL,
  type TEXT NOT NULL,
  at   INTEGER NOT NULL,
  body TEXT NOT NULL,
  UNIQUE (job, key)
) STRICT;

-- The offset up to which each spool file of a job's runner has been read.
CREATE TABLE cursors (
  job    TEXT NOT NULL,
  source TEXT NOT NULL,
  offset INTEGER NOT NULL,
  PRIMARY KEY (job, source)
) STRICT, WITHOUT ROWID;
