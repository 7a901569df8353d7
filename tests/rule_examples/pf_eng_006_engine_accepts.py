from engine_facts import cluster
from rule_kit import submit

FIRES = [cluster(refusal="allocation failure: Requested node configuration is not available")]
SILENT = [submit(), cluster()]
