from engine_facts import cluster
from rule_kit import submit

FIRES = [
    cluster(accounts=()),
    cluster(asked={"account": "vision"}, accounts=("nlp",)),
    cluster(asked={"qos": "high"}, accounts=("nlp",), qos=("normal",)),
]
SILENT = [
    submit(),
    cluster(asked={"account": "vision", "qos": "high"}),
    cluster(asked={"account": "nlp", "qos": "normal"}, accounts=("nlp",), qos=("normal",)),
    cluster(accounts=("nlp",)),
]
