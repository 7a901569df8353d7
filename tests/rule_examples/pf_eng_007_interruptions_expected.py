from engine_facts import cluster
from rule_kit import submit

FIRES = [
    cluster({"preempts": "requeue", "grace_s": 30}, requeue_s=121.0),
    cluster({"preempts": "cancel"}, spec={"max_restarts": 0}),
    cluster({"preempts": "suspend"}),
]
SILENT = [submit(), cluster(), cluster({"preempts": None})]
