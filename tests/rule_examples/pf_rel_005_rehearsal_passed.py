from dataclasses import replace

from gpuwarden.rules.facts import RehearsalOutcome
from rule_kit import submit

FIRES = [
    replace(submit(), rehearsed=RehearsalOutcome("fault", True, "NameError: name 'x' is not defined", 7)),
    replace(submit(), rehearsed=RehearsalOutcome("fault", False, "KeyError: 'text'")),
]
SILENT = [
    submit(),
    replace(submit(), rehearsed=RehearsalOutcome("passed")),
    replace(submit(), rehearsed=RehearsalOutcome("stopped", message="it needs the network here")),
]
