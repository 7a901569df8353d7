"""Keep the points and alerts that jobs report, and read them as curves.

They are claims of jobs, many and unproven, so they are stored in a separate file beside the ledger (`store.py`).
Write through `batching.Batches`; read with `store.MetricStore`:

    store.series(job)                              every metric: number of points, last step, last value
    store.points(job, metric, after, limit)        one page of points as they were posted, in order of their steps
    store.downsampled(job, metric, points)         lowest and highest point of each bucket, for a chart
    store.alerts(job, after, limit)                what a job's script and its runner reported in words

A value may be NaN or infinite. `points` gives it as it is; `downsampled` leaves it out of the curve and names its step
in `markers`, since a chart can't draw it.
"""
