from rule_kit import teardown

FIRES = [teardown(unusable_rules=("the rule 'pf_mine_001' can't be imported",))]
SILENT = [teardown()]
