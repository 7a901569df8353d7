from engine_facts import cluster
from gpuwarden.core.engine import Ceiling
from rule_kit import submit

QUEUED = Ceiling(owner="your account nlp", kind="submitted", most=50, used=11)
RUNNING = Ceiling(owner="the QOS short", kind="running", most=2, used=1)
FIRES = [
    cluster(asked={"tasks": 1002}, max_array=1001),
    cluster(asked={"tasks": 40}, max_array=1001, ceilings=(QUEUED,)),
    cluster(ceilings=(QUEUED.model_copy(update={"used": 50}),)),
    cluster(ceilings=(QUEUED.model_copy(update={"most": 0, "used": 0}),)),
    cluster(ceilings=(RUNNING.model_copy(update={"most": 0, "used": 0}),)),
    cluster(asked={"tasks": 2}, ceilings=(RUNNING,)),
]
SILENT = [
    submit(),
    cluster(max_array=0),
    cluster(asked={"tasks": 1001}, max_array=1001),
    cluster(asked={"tasks": 39}, ceilings=(QUEUED,)),
    cluster(asked={"tasks": 40}),
    cluster(ceilings=(RUNNING,)),
]
