from rule_kit import submit

FIRES = [submit(unusable_rules=("the rule 'pf_mine_001' can't be imported",))]
SILENT = [submit()]
