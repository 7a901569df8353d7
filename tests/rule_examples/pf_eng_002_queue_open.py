from engine_facts import cluster
from rule_kit import submit

FIRES = [
    cluster(asked={"queue": "gpus"}),
    cluster({"default": False}),
    cluster({"open": False, "state": "DOWN"}),
    cluster({"accounts": ("nlp",)}, {"account": "vision"}),
    cluster({"qos": ("long",)}, {"qos": "short"}),
]
SILENT = [
    submit(),
    cluster(),
    cluster(asked={"queue": "gpu"}),
    cluster({"open": None}),
    cluster({"accounts": ("nlp",), "qos": ("long",)}, {"account": "nlp", "qos": "long"}),
]
