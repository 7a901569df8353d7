"""Store the points and alerts that jobs report, and read them back, for example as curves.

Points and alerts are stored in a separate file next to the ledger (`store.py`), because there are many of them and
because they are unverified claims by the jobs. Write them with `batching.Batches`; read them with `store.MetricStore`:

    store.series(job)                              every metric: number of points, last step, last value
    store.points(job, metric, after, limit)        one page of points as they were posted, ordered by step
    store.downsampled(job, metric, points)         the lowest and highest points in each bucket, for a chart
    store.alerts(job, after, limit)                alerts from a job's script and its runner

A value may be NaN or infinite. `points` returns such a value unchanged. `downsampled` omits the value from the curve
and lists its position in `markers`, because a chart can't show it.
"""
