"""Store the points and alerts that jobs report, and read them as curves.

These are numerous and are unproven claims of the jobs, so they are stored in a separate file beside the ledger
(`store.py`). Write through `batching.Batches`; read with `store.MetricStore`:

    store.series(job)                              every metric: number of points, last step, last value
    store.points(job, metric, after, limit)        one page of points as they were posted, in order of their steps
    store.downsampled(job, metric, points)         lowest and highest point of each bucket, for a chart
    store.alerts(job, after, limit)                alerts of a job's script and its runner

A value may be NaN or infinite. `points` returns such a value unchanged; `downsampled` omits it from the curve and lists
its step in `markers`, because a chart can't draw it.
"""
