from dataclasses import replace

from engine_facts import cluster
from gpuwarden.core.models import Unknown
from rule_kit import submit

FIRES = [
    replace(cluster(), engine=Unknown("the controller does not answer")),
    cluster(unread="the limits of Slurm's accounting: Connection refused"),
]
SILENT = [submit(), cluster()]
