from engine_facts import cluster
from gpuwarden.core.engine import UNLIMITED, Ceiling
from rule_kit import submit

SHORT = Ceiling(owner="the QOS short", kind="walltime", most=3_600)
FIRES = [
    cluster(asked={"walltime_s": 86_460}),
    cluster({"max_s": 3_600}, {"walltime_s": 7_200}, {"options": {"walltime_s": 7_200}}),
    cluster(asked={"walltime_s": 7_200, "qos": "short"}, ceilings=(SHORT,)),
]
SILENT = [
    submit(),
    cluster(),
    cluster(asked={"walltime_s": 86_400}),
    cluster({"max_s": UNLIMITED}, {"walltime_s": 10**7}),
    cluster({"max_s": None}, {"walltime_s": 10**7}),
    cluster(asked={"walltime_s": 3_600, "qos": "short"}, ceilings=(SHORT,)),
]
