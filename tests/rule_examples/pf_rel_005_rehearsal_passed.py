from dataclasses import replace

from gpuwarden.rules.facts import Rehearsed
from rule_kit import submit

FIRES = [
    replace(submit(), rehearsed=Rehearsed("fault", True, "NameError: name 'x' is not defined", 7)),
    replace(submit(), rehearsed=Rehearsed("fault", False, "KeyError: 'text'")),
]
SILENT = [
    submit(),
    replace(submit(), rehearsed=Rehearsed("passed")),
    replace(submit(), rehearsed=Rehearsed("stopped", message="it needs the network here")),
]
